"""Pauses between the tries of costly work that was refused: the next second changes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable

from msgspec import Struct


class _Refusal(Struct, frozen=True):
    decided_by: Hashable
    at: int
    pause_ms: int


class Backoff:
    """Tells when refused work may be tried again. Times are those of ``now_ms``.

    Each pause is twice as long as the last, from ``first_ms`` to ``longest_ms``. Work may be tried
    at once when the facts that decided have changed, or the clock was set back.
    """

    def __init__(self, now_ms: Callable[[], int], first_ms: int, longest_ms: int) -> None:
        self._now_ms = now_ms
        self._first_ms = first_ms
        self._longest_ms = longest_ms
        self._found: dict[str, _Refusal] = {}

    def is_due(self, work: str, decided_by: Hashable = None) -> bool:
        """Whether the work may be tried now."""
        known = self._found.get(work)
        if known is None or known.decided_by != decided_by:
            return True
        return not 0 <= self._now_ms() - known.at < known.pause_ms

    def note(self, work: str, decided_by: Hashable = None) -> int:
        """Record that the work was refused; returns how long (ms) it rests now."""
        known = self._found.get(work)
        pause = self._first_ms
        if known is not None and known.decided_by == decided_by:
            pause = min(2 * known.pause_ms, self._longest_ms)
        self._found[work] = _Refusal(decided_by, self._now_ms(), pause)
        return pause

    def forget(self, work: str) -> None:
        """Record that the work was done, or is not needed any more."""
        self._found.pop(work, None)

    def forget_all_but(self, works: Collection[str]) -> None:
        """Forget the refusals of all other work."""
        self._found = {name: item for name, item in self._found.items() if name in works}
