"""A pause that can't be written to a full disk still stops payouts of the process that set it."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.audit.auditor import AuditLoop, Auditor
from rpcsvc.audit.records import AuditReport, Difference
from rpcsvc.bootstrap import running
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.engine import PayoutGuard
from rpcsvc.settlement.onchain.pause import PAUSE_FILE, PauseSwitch, throw
from rpcsvc.settlement.onchain.unrecorded import pause_for
from tests.logs import captured
from tests.sandbox import ManualClock
from tests.unit.full_disk import Disk, disk
from tests.unit.onchain_service import unreachable
from tests.unit.payout_guard import CAPS, SignedBooks

__all__ = ["disk"]

GUARD = "rpcsvc.settlement.onchain.pause"
STOLEN = Difference("unrecorded_payment", "tx", "0", "7", "USDC")
MORE = Difference("unrecorded_payment", "other", "0", "7", "USDC")


@pytest.fixture
def switch(tmp_path: Path) -> PauseSwitch:
    return PauseSwitch(tmp_path)


def the_command(data_dir: Path) -> PauseSwitch:
    """The switch in another process, such as rpcsvc payouts pause and resume."""
    return PauseSwitch(data_dir)


def guard_of(switch: PauseSwitch) -> PayoutGuard:
    return PayoutGuard(switch, CAPS, SignedBooks(), ManualClock())


# --- the switch ------------------------------------------------------------------------------


def test_nothing_is_paid_though_the_switch_can_not_be_written(
    tmp_path: Path, switch: PauseSwitch, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs, disk.is_full = captured(monkeypatch, GUARD), True
    guard = guard_of(switch)
    assert not throw(switch, "a thief")
    for _ in range(3):
        assert not throw(switch, "a thief")
        with pytest.raises(Unavailable, match="paused"):
            guard.require_open()
    assert (guard.paused(), list(tmp_path.iterdir())) == ("a thief", [])
    detail = guard.health().detail or ""
    assert detail.startswith("paused: a thief (in memory only")
    (reported,) = logs.entries
    assert (reported["event"], reported["log_level"]) == ("payouts_paused_in_memory_only", "error")
    assert "Make room" in reported["advice"]


def test_pause_is_written_once_possible_and_then_its_file_rules(
    tmp_path: Path, switch: PauseSwitch, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs, disk.is_full = captured(monkeypatch, GUARD), True
    throw(switch, "a thief")
    disk.is_full = False
    assert switch.reason() == "a thief"
    assert switch.is_written
    assert the_command(tmp_path).reason() == "a thief"
    assert [item["event"] for item in logs.entries][1:] == ["pause_written"]
    assert guard_of(switch).health().detail == "paused: a thief"

    the_command(tmp_path).resume()
    assert switch.reason() is None


def test_a_resume_before_it_is_written_lets_no_money_out(
    tmp_path: Path, switch: PauseSwitch, disk: Disk
) -> None:
    disk.is_full = True
    throw(switch, "a thief")
    the_command(tmp_path).resume()
    assert switch.reason() == "a thief"
    disk.is_full = False
    assert switch.reason() == "a thief"
    the_command(tmp_path).resume()
    assert switch.reason() is None


def test_the_operators_own_pause_meanwhile_does_not_end_it(
    tmp_path: Path, switch: PauseSwitch, disk: Disk
) -> None:
    disk.is_full = True
    throw(switch, "a thief")
    disk.is_full = False
    the_command(tmp_path).pause("the operator's own")
    assert switch.reason() == "the operator's own"
    the_command(tmp_path).resume()
    assert switch.reason() == "a thief"
    the_command(tmp_path).resume()
    assert switch.reason() is None


def test_file_in_an_unsyncable_directory_can_be_removed(
    tmp_path: Path, switch: PauseSwitch, disk: Disk
) -> None:
    disk.directories_fail = True
    assert not throw(switch, "a thief")
    assert (tmp_path / PAUSE_FILE).exists()
    assert switch.reason() == "a thief"
    the_command(tmp_path).resume()
    assert switch.reason() is None


def test_command_that_can_not_pause_reports_it(switch: PauseSwitch, disk: Disk) -> None:
    disk.is_full = True
    with pytest.raises(OSError, match="No space"):
        switch.pause("the operator's own")


def test_a_pause_is_on_disk_with_its_name(tmp_path: Path, switch: PauseSwitch, disk: Disk) -> None:
    switch.pause("a thief")
    file, directory = disk.synced
    assert (file.parent, directory) == (tmp_path, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [PAUSE_FILE]


def test_auditor_and_command_may_pause_at_the_same_moment(
    tmp_path: Path, switch: PauseSwitch, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace: Callable[..., None] = os.replace
    others = ["the operator's own"]

    def replace_after_the_command(*paths: Any, **options: Any) -> None:
        if others:
            the_command(tmp_path).pause(others.pop())
        replace(*paths, **options)

    monkeypatch.setattr(os, "replace", replace_after_the_command)
    assert throw(switch, "a thief")
    assert switch.reason() == "a thief"


def test_a_reason_that_is_no_text_pauses_all_the_same(switch: PauseSwitch) -> None:
    switch.pause("\udcff")
    assert switch.reason() == "?"


# --- what sets it ----------------------------------------------------------------------------


class ScriptedAuditor(Auditor):
    """An auditor with scripted findings."""

    def __init__(self) -> None:
        self.found: tuple[Difference, ...] = (STOLEN,)

    async def audit(self) -> AuditReport:
        return AuditReport(self.found)


async def test_the_auditor_stops_payouts_on_a_full_disk(
    tmp_path: Path, switch: PauseSwitch, disk: Disk
) -> None:
    auditor, disk.is_full = ScriptedAuditor(), True
    loop = AuditLoop(auditor, switch, seconds=1, pause_on_difference=True)
    for _ in range(2):
        await loop.once()
        with pytest.raises(Unavailable, match="paused"):
            guard_of(switch).require_open()

    disk.is_full = False
    assert (switch.reason() or "").startswith("audit: unrecorded_payment of tx")
    the_command(tmp_path).resume()
    await loop.once()
    assert switch.reason() is None, "whoever let money out again has seen it"
    auditor.found = (STOLEN, MORE)
    await loop.once()
    assert "of other" in (switch.reason() or "")


def test_unwritten_pause_for_a_strange_payment_is_unacknowledged(
    switch: PauseSwitch, disk: Disk
) -> None:
    disk.is_full = True
    assert not pause_for(switch, "the wallet")
    assert "transactions of the wallet" in (switch.reason() or "")


async def test_whoever_pays_or_pauses_in_a_service_has_the_same_switch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Path] = []
    real = PauseSwitch.__init__

    def counted(self: PauseSwitch, data_dir: Path) -> None:
        made.append(data_dir)
        real(self, data_dir)

    monkeypatch.setattr(PauseSwitch, "__init__", counted)
    async with running(unreachable(tmp_path)):
        assert made == [tmp_path]
