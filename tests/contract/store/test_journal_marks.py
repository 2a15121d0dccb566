"""The database's mark of a payment journal, on each backend: an older copy takes no payment."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.journal.files import FOLDER, HEADER, VOID, read_place
from rpcsvc.settlement.onchain.journal.writer import JournalOptions, PaymentJournal, marks_of
from rpcsvc.settlement.onchain.monero import records as monero
from rpcsvc.settlement.onchain.monero.ledger import MONERO_PAYMENT, MoneroLedger
from rpcsvc.store.database import Statement, Tables
from rpcsvc.store.leases import SETTLER, DatabaseReplaced, Fenced, Lease, Leases
from tests.sandbox import ManualClock

_FORGET = "DELETE FROM payment_journal"
_TAKE_BACK = "UPDATE payment_journal SET line = line - 1"


class Failing(Fenced):
    """A fenced database. ``before`` runs once before a write; ``answers_lost``: replies to hide."""

    before: Callable[[], Awaitable[None]] | None = None
    answers_lost = 0

    async def write(self, statements: Sequence[Statement]) -> None:
        if (before := self.before) is not None:
            self.before = None
            await before()
        await super().write(statements)
        if self.answers_lost:
            self.answers_lost -= 1
            raise Unavailable("There was no answer.")


class Settler:
    """A ledger with a journal, under a lease that ends with the database."""

    def __init__(self, database: Tables, lease: Lease, folder: Path) -> None:
        self.raw = database
        self.database = Failing(database, lease)
        self.lease = lease
        self.journal = PaymentJournal(
            JournalOptions(folder),
            ManualClock(),
            lambda n: b"\x0a" * n,
            lease=lease.on_record,
            on_replaced=self._replaced,
        )
        self.ledger = MoneroLedger(self.database, self.journal)
        self.told = self.signed = 0

    async def _replaced(self) -> None:
        self.told += 1
        self.lease.lose(DatabaseReplaced)

    async def pay(self) -> monero.MoneroPayment:
        self.signed += 1
        txid = f"{self.signed:064x}"
        made = monero.MoneroPayment(
            f"ord_{self.signed}/payout/1", monero.MoneroPurpose.TRANSFER, "4x", 10, 1, txid,
            "02ff", "metadata", "key", (f"image-{txid}",), 1,
        )  # fmt: skip
        await self.ledger.add_payment(made)
        await self.ledger.put_payment(replace(made, state=monero.MoneroPaymentState.PUBLISHED))
        return made

    async def replace(self, sql: str = _TAKE_BACK) -> None:
        await self.raw.write([Statement(sql)])

    async def line(self) -> int | None:
        marks = await marks_of(self.raw)
        return marks[-1].at.line if marks else None

    def kinds(self) -> list[str]:
        return [line.kind for line in read_place(self.journal._options.folder).lines]


@pytest.fixture
async def settler(database: Tables, tmp_path_factory: pytest.TempPathFactory) -> Settler:
    token = await Leases(database).take(SETTLER, "a", 3_600_000)
    assert token is not None
    folder = tmp_path_factory.mktemp("data") / FOLDER
    made = Settler(database, Lease(SETTLER, token, holder="a"), folder)
    await made.journal.open(None)
    await made.pay()
    return made


@pytest.mark.parametrize("sql", [_TAKE_BACK, _FORGET])
async def test_older_copy_gets_no_line(settler: Settler, sql: str) -> None:
    await settler.replace(sql)
    found, kinds = await settler.line(), settler.kinds()
    for _ in range(2):
        with pytest.raises(DatabaseReplaced):
            await settler.pay()
    assert (await settler.line(), settler.kinds()) == (found, kinds)
    assert (settler.told, settler.lease.loss) == (1, DatabaseReplaced)
    assert not settler.journal.is_usable
    assert "replaced by an older copy" in str(settler.journal.health().detail)


@pytest.mark.parametrize("sql", [_TAKE_BACK, _FORGET])
async def test_copy_put_in_place_before_a_commit_refuses_it(settler: Settler, sql: str) -> None:
    settler.database.before = lambda: settler.replace(sql)
    with pytest.raises(DatabaseReplaced):
        await settler.pay()
    assert not await settler.ledger.has_transaction(f"{2:064x}")
    assert settler.kinds() == [HEADER, MONERO_PAYMENT, MONERO_PAYMENT, VOID]
    with pytest.raises(DatabaseReplaced):
        await settler.pay()
    assert len(settler.kinds()) == 4, "nothing follows what was refused"
    assert settler.told == 1


async def test_commit_without_an_answer_is_no_older_copy(settler: Settler) -> None:
    settler.database.answers_lost = 1
    with pytest.raises(Unavailable):
        await settler.ledger.reserve_addresses(5)
    assert settler.journal.known != settler.journal.mark
    await settler.pay()
    assert settler.told == 0
    assert await settler.line() == settler.journal.mark.at.line


async def test_end_of_a_payment_moves_no_mark_of_an_older_copy(settler: Settler) -> None:
    made = await settler.pay()
    await settler.replace()
    found = await settler.line()
    await settler.ledger.put_payment(replace(made, state=monero.MoneroPaymentState.FAILED))
    assert await settler.line() == found
    assert settler.told == 1


async def test_copy_is_noticed_while_nothing_is_signed(settler: Settler) -> None:
    looks = 0

    async def pause(_seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 2:
            await settler.replace()
        if looks == 4:
            raise InterruptedError

    with pytest.raises(InterruptedError):
        await settler.journal.compare(settler.database, pause)
    assert (settler.told, settler.lease.lost.is_set()) == (1, True)


@pytest.mark.parametrize("is_replaced", [False, True])
async def test_reads_of_another_server_decide_nothing(
    settler: Settler, monkeypatch: pytest.MonkeyPatch, is_replaced: bool
) -> None:
    """Reads from a late standby end nothing; those from the old primary hide no older copy."""
    fetch_one = settler.database.fetch_one

    async def elsewhere(sql: str, **values: object) -> object:
        row = await fetch_one(sql, **values)
        if "FROM payment_journal" not in sql or row is None:
            return row
        return {**dict(row), "line": row["line"] + (1 if is_replaced else -1)}

    monkeypatch.setattr(settler.database, "fetch_one", elsewhere)
    if is_replaced:
        await settler.replace()
    with pytest.raises(Unavailable) as raised:
        await settler.pay()
    assert (type(raised.value) is DatabaseReplaced, settler.told) == (is_replaced, is_replaced)
    if is_replaced:
        assert settler.kinds() == [HEADER, MONERO_PAYMENT, MONERO_PAYMENT, VOID]
    else:
        monkeypatch.undo()
        settler.signed = 1
        await settler.pay()


async def test_commit_whose_answer_was_lost_is_known_at_the_next_look(settler: Settler) -> None:
    """A payment may have been published by then: an older copy must not take it again."""
    known = await settler.line()
    settler.database.answers_lost = 1
    with pytest.raises(Unavailable):
        await settler.pay()
    assert await settler.line() == (known or 0) + 1
    await settler.journal.require_current(settler.database)
    await settler.replace()
    with pytest.raises(DatabaseReplaced):
        await settler.journal.require_current(settler.database)
