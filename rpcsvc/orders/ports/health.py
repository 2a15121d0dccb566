"""The health of a part of the service, as ``/health`` shows it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Health:
    """Whether something works; ``detail`` says what is wrong when it does not."""

    ok: bool
    detail: str | None = None
