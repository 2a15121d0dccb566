"""The auditor in the service: pauses, repeated checks, and how it reads the books."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
from msgspec.structs import replace

from rpcsvc.audit.auditor import AuditLoop, Auditor
from rpcsvc.audit.books import read_books, reader_of
from rpcsvc.audit.records import (
    ETHER,
    ETHER_INCOME,
    AuditReport,
    Books,
    ChainMoved,
    Difference,
    EvmFacts,
    MoneroFacts,
    Unfit,
)
from rpcsvc.orders.settlement import LastAudit
from rpcsvc.settlement.onchain.evm.node_types import Block
from rpcsvc.settlement.onchain.monero.monerod import BlockHeader
from rpcsvc.settlement.onchain.pause import PauseSwitch
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME
from rpcsvc.store.backends.sqlite.migrations import migrate
from rpcsvc.store.checks import Progress, quiet
from rpcsvc.store.database import BooksUnreadable
from tests.logs import captured
from tests.unit.audit_world import FIRST_NONCE, HOT, SINCE, WEI, World

STOLEN = Difference("unrecorded_payment", "tx", "0", "7", "USDC")
MORE = Difference("unrecorded_payment", "other", "0", "7", "USDC")


class ScriptedAuditor(Auditor):
    """An auditor with scripted findings."""

    def __init__(self) -> None:
        self.found: tuple[Difference, ...] = ()
        self.failure: Exception | None = None

    async def audit(self) -> AuditReport:
        if self.failure is not None:
            raise self.failure
        return AuditReport(self.found)


def loop_over(auditor: Auditor, data_dir: Path, *, pauses: bool = True) -> AuditLoop:
    return AuditLoop(auditor, PauseSwitch(data_dir), seconds=1, pause_on_difference=pauses)


# --- the switch ------------------------------------------------------------------------------


async def test_a_difference_pauses_payouts_once(tmp_path: Path) -> None:
    auditor, switch = ScriptedAuditor(), PauseSwitch(tmp_path)
    loop = loop_over(auditor, tmp_path)
    await loop.once()
    assert switch.reason() is None

    auditor.found = (STOLEN,)
    await loop.once()
    reason = switch.reason()
    assert reason == "audit: unrecorded_payment of tx: 7 instead of 0 USDC (1 in all)"

    switch.resume()
    await loop.once()
    assert switch.reason() is None, "whoever let money out again has seen it"

    auditor.found = (STOLEN, MORE)
    await loop.once()
    assert "other" in (switch.reason() or "")


async def test_difference_found_during_another_pause_pauses_after_it(
    tmp_path: Path,
) -> None:
    auditor, switch = ScriptedAuditor(), PauseSwitch(tmp_path)
    loop = loop_over(auditor, tmp_path)
    switch.pause("the operator's own")
    auditor.found = (STOLEN,)
    await loop.once()
    assert switch.reason() == "the operator's own"

    switch.resume()
    await loop.once()
    assert (switch.reason() or "").startswith("audit")


async def test_a_restart_during_its_own_pause_does_not_pause_once_more(tmp_path: Path) -> None:
    auditor, switch = ScriptedAuditor(), PauseSwitch(tmp_path)
    auditor.found = (STOLEN,)
    await loop_over(auditor, tmp_path).once()
    restarted = loop_over(auditor, tmp_path)
    await restarted.once()
    switch.resume()
    await restarted.once()
    assert switch.reason() is None
    auditor.found = (STOLEN, MORE)
    await restarted.once()
    assert "other" in (switch.reason() or "")


async def test_payouts_go_on_if_pausing_on_differences_is_off(tmp_path: Path) -> None:
    auditor = ScriptedAuditor()
    auditor.found = (STOLEN,)
    await loop_over(auditor, tmp_path, pauses=False).once()
    assert PauseSwitch(tmp_path).reason() is None


@pytest.mark.parametrize(
    "failure", [ChainMoved("moved"), Unfit("another wallet"), BooksUnreadable("locked")]
)
async def test_an_audit_that_can_not_be_made_is_no_difference(
    tmp_path: Path, failure: Exception
) -> None:
    auditor = ScriptedAuditor()
    auditor.failure = failure
    await loop_over(auditor, tmp_path).once()
    assert PauseSwitch(tmp_path).reason() is None


async def test_an_interval_of_0_is_never(tmp_path: Path) -> None:
    loop = AuditLoop(ScriptedAuditor(), PauseSwitch(tmp_path), seconds=0, pause_on_difference=True)
    async with asyncio.timeout(60):
        await loop.run()
    assert loop.last is None


async def test_age_of_audits_counts_from_the_start_before_the_first(tmp_path: Path) -> None:
    """The age also grows if the first audit never ends."""
    found = list[LastAudit | None]()

    async def pause(_: float) -> None:
        found.append(loop.last)
        if len(found) == 3:
            raise asyncio.CancelledError

    auditor, switch = ScriptedAuditor(), PauseSwitch(tmp_path)
    auditor.failure = Unfit("the node is down")
    loop = AuditLoop(auditor, switch, seconds=600, pause_on_difference=True, pause=pause)
    with pytest.raises(asyncio.CancelledError):
        await loop.run()
    first = found[0]
    assert first is not None
    assert first.differences is None
    assert found == [first] * 3


async def test_it_audits_after_each_interval(tmp_path: Path) -> None:
    waits: list[float] = []
    auditor = ScriptedAuditor()
    auditor.found = (STOLEN,)

    async def pause(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            raise asyncio.CancelledError

    loop = AuditLoop(
        auditor, PauseSwitch(tmp_path), seconds=600, pause_on_difference=True, pause=pause
    )
    with pytest.raises(asyncio.CancelledError):
        await loop.run()
    assert waits == [600, 600, 600]
    assert PauseSwitch(tmp_path).reason() is not None


# --- ether -----------------------------------------------------------------------------------


def ether(due: int, found: int, kind: str = ETHER) -> Difference:
    subject = "the ether of the hot wallet on arbitrum"
    return Difference(kind, subject, str(due), str(found), "wei")


async def test_ether_that_anyone_can_send_pauses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    logs = captured(monkeypatch, "rpcsvc.audit.auditor")
    auditor, switch = ScriptedAuditor(), PauseSwitch(tmp_path)
    loop = loop_over(auditor, tmp_path)
    auditor.found = (ether(5, 6, ETHER_INCOME),)
    await loop.once()
    assert switch.reason() is None
    (reported,) = [item for item in logs.entries if item["event"] == "audit_income_found"]
    assert (reported["expected"], reported["found"], reported["log_level"]) == ("5", "6", "warning")


async def test_missing_ether_pauses_once_and_again_when_more_is_gone(tmp_path: Path) -> None:
    auditor, switch = ScriptedAuditor(), PauseSwitch(tmp_path)
    loop = loop_over(auditor, tmp_path)
    auditor.found = (ether(100, 93),)
    await loop.once()
    assert (switch.reason() or "").startswith("audit: ether of the ether of the hot wallet")

    for known in (ether(100, 93), ether(50, 43), ether(50, 44)):
        switch.resume()
        auditor.found = (known,)
        await loop.once()
        assert switch.reason() is None, "gas was paid since, or dust came: nothing new is gone"

    auditor.found = (ether(50, 43),)
    await loop.once()
    assert switch.reason() is not None, "less than with the dust"

    switch.resume()
    for settled in ((), (ether(50, 51, ETHER_INCOME),)):
        auditor.found = settled
        await loop.once()
        assert switch.reason() is None
    auditor.found = (ether(50, 49),)
    await loop.once()
    assert switch.reason() is not None, "an annotated difference does not cover the next one"


async def test_ether_lost_during_another_pause_pauses_after_it(
    tmp_path: Path,
) -> None:
    auditor, switch = ScriptedAuditor(), PauseSwitch(tmp_path)
    loop = loop_over(auditor, tmp_path)
    for found in (93, 92):
        switch.pause("the operator's own")
        auditor.found = (ether(100, found),)
        await loop.once()
        assert switch.reason() == "the operator's own"
        switch.resume()
        await loop.once()
        assert (switch.reason() or "").startswith("audit: ether")
        switch.resume()


async def test_dust_does_not_make_each_audit_dearer(tmp_path: Path) -> None:
    evm = Evm()
    evm.dust = 1
    report = await auditor_of(tmp_path, Monero(0, 0), evm).audit()
    assert [item.kind for item in report.differences] == [ETHER_INCOME]
    assert evm.accepted == 1


# --- repeated audits -------------------------------------------------------------------------


class Monero:
    """A reader with scripted results: units missing, or None for a chain that moved meanwhile."""

    def __init__(self, *looks: int | None) -> None:
        self.looks = list(looks)

    async def head(self) -> BlockHeader:
        return BlockHeader(1, "hash", "previous", 0)

    async def facts(self, books: Books, head: BlockHeader) -> MoneroFacts:
        short = self.looks.pop(0)
        if short is None:
            raise ChainMoved("it went on")
        return MoneroFacts(1, 1, (), (), {}, short)


class Evm:
    """A reader without deposits or payments."""

    is_new = False
    network = SimpleNamespace(name="arbitrum")

    def __init__(self) -> None:
        self.accepted = 0
        self.dust = 0

    def accept(self) -> None:
        self.accepted += 1

    async def head(self) -> Block:
        return Block(1, "0x", "0x", 0, None)

    async def facts(self, books: Books, head: Block) -> EvmFacts:
        facts, held = World().evm(), World().ether()
        return replace(facts, ether=replace(held, balance=held.balance + self.dust))


def auditor_of(tmp_path: Path, monero: Monero, evm: Evm, progress: Progress = quiet) -> Auditor:
    with closing(sqlite3.connect(tmp_path / DATABASE_NAME, isolation_level=None)) as database:
        migrate(database)
        database.execute("INSERT INTO evm_cursor VALUES ('arbitrum', 1, '0x')")
        database.execute("INSERT INTO evm_wallet VALUES (1, ?, 0)", (HOT,))
        opening = ("arbitrum", HOT, SINCE, "0x", FIRST_NONCE, str(WEI))
        database.execute("INSERT INTO evm_openings VALUES (?, ?, ?, ?, ?, ?)", opening)
    return Auditor(reader_of(tmp_path, None), monero, [evm], progress)  # type: ignore[arg-type, list-item] # stand-ins


@pytest.mark.parametrize(
    ("looks", "kinds", "accepted"),
    [((0,), [], 1), ((5, 0), [], 0), ((5, 5), ["wallet"], 0), ((5, 6), ["wallet"], 0),
     ((None, None, 0), [], 1)],
)  # fmt: skip
async def test_what_is_found_twice_is_a_difference(
    tmp_path: Path, looks: tuple[int | None, ...], kinds: list[str], accepted: int
) -> None:
    monero, evm = Monero(*looks), Evm()
    report = await auditor_of(tmp_path, monero, evm).audit()
    assert [item.kind for item in report.differences] == kinds
    assert monero.looks == []
    assert evm.accepted == accepted


async def test_audit_reports_its_steps(tmp_path: Path) -> None:
    steps: list[str] = []

    def progress(what: str, _done: int, _total: int) -> None:
        steps.append(what)

    await auditor_of(tmp_path, Monero(0), Evm(), progress).audit()
    assert steps == [
        "asking the Monero wallet to catch up with its node",
        "reading the books",
        "comparing 0 orders with the chains",
    ]


async def test_audit_ends_on_a_chain_that_never_rests(tmp_path: Path) -> None:
    with pytest.raises(ChainMoved):
        await auditor_of(tmp_path, Monero(*[None] * 5), Evm()).audit()


# --- the books -------------------------------------------------------------------------------


def test_books_of_another_schema_are_not_read(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / DATABASE_NAME, isolation_level=None)) as database:
        migrate(database)
        assert list(read_books(tmp_path).orders) == []
        database.execute("PRAGMA user_version = 99")
    with pytest.raises(BooksUnreadable, match="version 99"):
        read_books(tmp_path)


def test_no_database_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(BooksUnreadable, match="no database"):
        read_books(tmp_path)
