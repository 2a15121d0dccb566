"""The key ring of one directory: created at the first start, rotated, and read again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, Self

from rpcsvc.clock import Clock, iso8601_second
from rpcsvc.durable_files import sync_directory
from rpcsvc.signing.keys import (
    RING_NAME,
    SEED_BYTES,
    Keys,
    Mark,
    RetiredKey,
    SigningKey,
    SigningKeyError,
    commit,
    explaining,
    jwk,
    locked,
    make_directory,
    mark,
    read,
    signing_key,
)

HANDOVER_SECONDS: Final = 10
"""How long after a rotation the old key's signatures count: servers that run notice it later."""

RandomBytes = Callable[[int], bytes]


class KeyRing:
    """The keys in one directory. Made by ``load_or_create`` or ``load``."""

    def __init__(self, directory: Path, clock: Clock, random: RandomBytes) -> None:
        self._directory = directory
        self._clock = clock
        self._random = random
        self._keys: Keys
        self._mark: Mark

    @classmethod
    def load_or_create(cls, directory: Path, clock: Clock, random: RandomBytes) -> Self:
        """The ring in ``directory``; at the first start, a new one. Raises SigningKeyError.

        ``random`` gives so many bytes that nobody can guess. The files are made with modes 0700
        and 0600, and are on disk when this returns.
        """
        ring = cls(directory, clock, random)
        with explaining(directory):
            make_directory(directory)
            with locked(directory):
                if not (directory / RING_NAME).exists():
                    commit(directory, Keys(ring._new_key()))
                    sync_directory(directory.parent)
                ring._adopt()
        return ring

    @classmethod
    def load(cls, directory: Path, clock: Clock, random: RandomBytes) -> Self:
        """The ring in ``directory``, which must be there. Raises SigningKeyError."""
        ring = cls(directory, clock, random)
        with explaining(directory):
            if not (directory / RING_NAME).exists():
                raise SigningKeyError(
                    f"There are no signing keys in {directory}. They are made when the service"
                    " first starts (rpcsvc serve). If it has, name its data directory with"
                    " --data-dir."
                )
            with locked(directory, shared=True):
                ring._adopt()
        return ring

    @property
    def current(self) -> SigningKey:
        """The key that signs now."""
        return self._keys.current

    @property
    def retired(self) -> tuple[RetiredKey, ...]:
        """Keys that signed before, the latest first."""
        return self._keys.retired

    def jwks(self) -> dict[str, Any]:
        """The public keys as a JWKS (RFC 7517, RFC 8037), the current one first.

        A retired key has ``retiredAt``: what says that it was signed later is not to be believed.
        """
        current = jwk(self.current)
        retired = [{**jwk(key), "retiredAt": key.retired_at} for key in self.retired]
        return {"keys": [current, *retired]}

    def rotate(self, *, revoke: bool = False) -> SigningKey:
        """Make a new key the current one; returns it.

        The old public key stays in the JWKS with the time from which it is not believed; with
        ``revoke`` it goes, and nothing that it signed can be checked any more: for a key that
        somebody else may have. The new key is on disk before the old private key is destroyed.
        Raises SigningKeyError; what is on disk then is the old ring or the new one, whole.
        """
        with explaining(self._directory), locked(self._directory):
            old, _ = read(self._directory)
            end = iso8601_second(self._clock.now_ms() // 1000 + HANDOVER_SECONDS)
            gone = RetiredKey(old.current.kid, old.current.x, old.current.created_at, end)
            retired = old.retired if revoke else (gone, *old.retired)
            commit(self._directory, Keys(self._new_key(), retired))
            self._adopt()
        return self.current

    def refresh(self) -> bool:
        """Take over what another process has rotated to; True if something was.

        Costs one stat when nothing has changed. Never waits: while the other process is at it,
        the keys stay as they are, and the next call looks again. Raises SigningKeyError.
        """
        with explaining(self._directory):
            if mark(self._directory) == self._mark:
                return False
            try:
                with locked(self._directory, shared=True, wait=False):
                    self._adopt()
            except BlockingIOError:
                return False
        return True

    def _adopt(self) -> None:
        self._keys, self._mark = read(self._directory)

    def _new_key(self) -> SigningKey:
        return signing_key(self._random(SEED_BYTES), iso8601_second(self._clock.now_ms() // 1000))
