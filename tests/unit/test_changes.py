"""Inconsistent changes are refused by their constructor."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.events import AdvanceTransfer
from rpcsvc.domain.machine import open_order, transition
from rpcsvc.domain.order import Fill, Report
from rpcsvc.store.changes import Change, HistoryEntry, StatusView
from tests.unit.orders import NOW, key, terms

NEW = open_order(terms())
SEEN = transition(NEW, ev.DepositSeen(key(1), NEW.terms.deposit_amount, None, NOW), NOW).order
DUE = transition(SEEN, ev.DepositConfirmed(key(1)), NOW).order
ENTRY = HistoryEntry(1, NOW, "event", "status", {})
VIEW = StatusView(b"{}", None)
FILL = Fill(units=1, output=1, integrator_fee=0, rate=1, at=1)


@pytest.mark.parametrize(
    "parts",
    [
        {"history": ENTRY},
        {"order": NEW},
        {"effects": (AdvanceTransfer("t"),)},
        {"view": VIEW},
        {"is_new": True},
        {"evidence": b"said so"},
        {"order": NEW, "history": ENTRY, "evidence": b"said so"},
        {"order": SEEN, "history": ENTRY, "is_new": True},
        {"order": replace(DUE, deposits=()), "history": ENTRY, "is_new": True},
        {"order": replace(NEW, fills=(FILL,)), "history": ENTRY, "is_new": True},
        {"order": replace(NEW, report=Report()), "history": ENTRY, "is_new": True},
    ],
    ids=" ".join,
)
def test_a_change_that_would_be_written_in_part_is_refused(parts: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="order"):
        Change(**parts)


@pytest.mark.parametrize(
    "parts",
    [
        {},
        {"order": NEW, "history": ENTRY, "is_new": True, "view": VIEW},
        {"order": DUE, "history": ENTRY, "effects": (AdvanceTransfer("t"),)},
        {"order": replace(DUE, report=Report()), "history": ENTRY, "evidence": b"said so"},
        {"order": replace(DUE, report=Report()), "history": ENTRY},
    ],
    ids=lambda parts: " ".join(parts) or "nothing",
)
def test_complete_change_is_accepted(parts: dict[str, Any]) -> None:
    change = Change(**parts)
    assert {name: getattr(change, name) for name in parts} == parts
