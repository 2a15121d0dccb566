"""Conditions that the operator should know, and the results of the checks that health shows."""

from __future__ import annotations

from collections.abc import Iterable
from enum import StrEnum

from msgspec import Struct


class Severity(StrEnum):
    """The weight of a condition. FAULT: its check fails. NOTE: nothing waits for it."""

    FAULT = "fault"
    NOTE = "note"


class Condition(Struct, frozen=True):
    """A lasting state in one sentence: what is wrong, and what the operator does next."""

    text: str
    severity: Severity = Severity.FAULT


def faults(*texts: str | None) -> list[Condition]:
    """Return a fault for each text that is there."""
    return [Condition(text) for text in texts if text is not None]


def notes(*texts: str | None) -> list[Condition]:
    """Return a note for each text that is there."""
    return [Condition(text, Severity.NOTE) for text in texts if text is not None]


def texts_of(conditions: Iterable[Condition], severity: Severity) -> list[str]:
    """Return the texts of one severity, in their order."""
    return [item.text for item in conditions if item.severity is severity]


class Health(Struct, frozen=True):
    """The result of a check; ``detail`` says what is wrong and what to do."""

    ok: bool
    detail: str | None = None

    @classmethod
    def of(cls, conditions: Iterable[Condition]) -> Health:
        """Return the result of a check: ok unless a condition is a fault. Notes are left out."""
        texts = texts_of(conditions, Severity.FAULT)
        return cls(not texts, "; ".join(texts) or None)
