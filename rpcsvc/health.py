"""The result of a check, as health shows it."""

from __future__ import annotations

from msgspec import Struct


class Health(Struct, frozen=True):
    """The result of a check; ``detail`` says what is wrong and what to do."""

    ok: bool
    detail: str | None = None
