"""The pause of payouts shared by replicas, and reading the books for an audit, on each backend."""

from __future__ import annotations

import asyncio
from itertools import count
from pathlib import Path

import pytest

from rpcsvc.audit.books import read_books_of
from rpcsvc.audit.records import Watched
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.evm import records as evm
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.journal.writer import JournalOptions, PaymentJournal
from rpcsvc.settlement.onchain.pause import PauseRow, PauseSwitch, SharedPause
from rpcsvc.store.database import StaleWrite, Statement, Tables
from rpcsvc.store.leases import SETTLER, Fenced, Lease, Leases
from tests.e2e.processes import TIMEOUT_SECONDS, until
from tests.sandbox import ManualClock
from tests.unit.journaled import evm_payment

LONG_MS = 3_600_000
_ROW = (
    "INSERT INTO tickets (ticket_id, created_at, category, message, secret_hash)"
    " VALUES (:name, 0, 'paid', '', '')"
)


def row(name: str) -> Statement:
    """A write that stands for a payment."""
    return Statement(_ROW, {"name": name})


async def paid(database: Tables) -> list[str]:
    rows = await database.fetch("SELECT ticket_id FROM tickets ORDER BY seq")
    return [row["ticket_id"] for row in rows]


async def fenced(database: Tables) -> Fenced:
    token = await Leases(database).take(SETTLER, "a", LONG_MS)
    assert token is not None
    return Fenced(database, Lease(SETTLER, token))


async def test_pause_is_seen_and_ended_by_every_replica(database: Tables) -> None:
    here, there = PauseRow(database), PauseRow(database)
    assert await there.reason() is None
    await here.pause("first", 1)
    for at in (2, 3):
        await here.pause("second", at)
        assert await there.reason() == "first; second"
    await here.resume()
    assert await there.reason() is None


async def test_pause_of_a_replica_is_moved_into_the_row(database: Tables, tmp_path: Path) -> None:
    shown, switch = PauseRow(database), PauseSwitch(tmp_path)
    shared = SharedPause(shown, switch, ManualClock())
    await shared.share()
    assert switch.reason() is None
    switch.pause("audit: it differs")
    await shared.share()
    assert (switch.own(), switch.reason()) == (None, "audit: it differs")
    await shown.resume()
    assert switch.reason() == "audit: it differs", "as it was read last"
    await shared.share()
    assert switch.reason() is None, "no file brings it back"


async def test_nothing_is_committed_after_pause_returned(database: Tables) -> None:
    pause, settler = PauseRow(database), await fenced(database)
    numbers = count()

    async def pay() -> None:
        while True:
            await settler.write([pause.unpaused, row(f"{next(numbers)}")])

    async def is_paying() -> bool:
        return len(await paid(database)) >= 20

    paying = [asyncio.create_task(pay()) for _ in range(8)]
    await until(is_paying)
    await pause.pause("stop", 1)
    before = await paid(database)
    async with asyncio.timeout(TIMEOUT_SECONDS):
        ends = await asyncio.gather(*paying, return_exceptions=True)
    assert all(isinstance(end, StaleWrite) for end in ends)
    assert await paid(database) == before
    await settler.write([row("what is no payment goes on")])
    await pause.resume()
    await settler.write([pause.unpaused, row("again")])


async def test_paused_payment_is_refused_and_its_line_void(
    database: Tables, tmp_path_factory: pytest.TempPathFactory
) -> None:
    pause, settler = PauseRow(database), await fenced(database)
    folder = tmp_path_factory.mktemp("journal")
    journal = PaymentJournal(JournalOptions(folder), ManualClock(), lambda n: b"\x0a" * n)
    await journal.open(None)
    ledger = EvmPaymentLedger(settler, journal, pause)
    await pause.pause("stop", 1)
    with pytest.raises(Unavailable, match="paused"):
        await ledger.add_payment(evm_payment("ord_1/payout/1", 10, "0x00", 0))
    sweep = evm_payment("sweep_1", 10, "0x00", 0, purpose=evm.EvmPurpose.SWEEP)
    await ledger.add_payment(sweep)  # sweeps continue during a pause
    assert await ledger.payment("ord_1/payout/1") is None
    assert journal.mark.at.line == 4, "a header, the line, its void, and the sweep"
    await pause.resume()
    await ledger.add_payment(evm_payment("ord_1/payout/1", 10, "0x00", 1))
    await journal.close()


async def test_books_are_read_at_the_newest_block_of_each_network(database: Tables) -> None:
    cursor = "INSERT INTO evm_cursor (network, number, hash) VALUES (:network, :number, :hash)"
    await database.write(
        [
            Statement(cursor, {"network": network, "number": number, "hash": f"0x{number:064x}"})
            for network in ("arbitrum", "base")
            for number in (9, 11, 10)
        ]
    )
    books = await read_books_of(database)
    newest = Watched(9, 11, f"0x{11:064x}")
    assert books.watched == {"arbitrum": newest, "base": newest}
    assert list(books.orders) == []
