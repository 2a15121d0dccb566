"""The wallets' ledgers with the payment journal before them.

What may lead to a publication, or hands out an address, is in the journal before it is committed;
what ends one is in the journal after. A line that is missing then says too little has ended, never
too much.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import structlog

from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.store import Rows
from rpcsvc.settlement.onchain.evm import ledger as evm
from rpcsvc.settlement.onchain.evm.ledger import EvmAddress
from rpcsvc.settlement.onchain.journal.entries import (
    EVM_ADDRESSES,
    AddressesEntry,
    AttemptEntry,
    Entry,
    EvmEntry,
    MoneroEntry,
    SweptEntry,
    VoidEntry,
)
from rpcsvc.settlement.onchain.journal.files import Position
from rpcsvc.settlement.onchain.journal.writer import Mark, PaymentJournal
from rpcsvc.settlement.onchain.monero import ledger as monero
from rpcsvc.store.database import Statement, Tables
from rpcsvc.store.evm_deposits import SqlEvmDepositLedger
from rpcsvc.store.evm_payments import SqlEvmPaymentLedger
from rpcsvc.store.monero import SqlMoneroLedger

log = structlog.get_logger(__name__)

_PUT_MARK: Final = (
    "INSERT INTO payment_journal (id, journal, line, sum) VALUES (1, :journal, :line, :sum)"
    " ON CONFLICT (id) DO UPDATE SET journal = excluded.journal, line = excluded.line,"
    " sum = excluded.sum"
)
_MARK: Final = "SELECT journal, line, sum FROM payment_journal"


async def mark_of(database: Tables) -> Mark | None:
    """Up to which line of which journal the database has everything; None: of none."""
    row = await database.fetch_one(_MARK)
    return Mark(row["journal"], Position(row["line"], row["sum"])) if row else None


def put_mark(mark: Mark) -> Statement:
    """The statement that records a mark."""
    values = {"journal": mark.journal, "line": mark.at.line, "sum": mark.at.sum}
    return Statement(_PUT_MARK, values)


async def forget_mark(database: Tables) -> None:
    """Have the database belong to no journal: the next one begins anew."""
    await database.write([Statement("DELETE FROM payment_journal")])


async def _note(database: Tables, journal: PaymentJournal, entry: Entry) -> None:
    """Record what is committed already. A line that is not written is no danger: see above."""
    try:
        await journal.record(entry, lambda mark: database.write([put_mark(mark)]))
    except Unavailable as reason:
        log.warning("journal_line_missing", entry=type(entry).__name__, reason=reason.message)


class JournaledMoneroLedger(SqlMoneroLedger):
    """The MoneroLedger port over a Database and a journal."""

    def __init__(self, database: Tables, journal: PaymentJournal) -> None:
        super().__init__(database)
        self._journal = journal

    async def add_payment(self, payment: monero.Payment, rows: Rows = ()) -> None:
        """Record and commit a signed payment. Raises as the ledger without a journal does."""
        wallet = await self.wallet()
        entry = MoneroEntry(wallet.primary_address if wallet else "", payment)
        void = VoidEntry(payment.payment_id, payment.txid)
        await self._journal.record(
            entry,
            lambda mark: self._db.write([*rows, *self.adding(payment), put_mark(mark)]),
            (void, lambda: self.has_transaction(payment.txid)),
        )

    async def put_payment(self, payment: monero.Payment) -> None:
        """Change how far a payment is."""
        await super().put_payment(payment)
        if payment.state.is_over:
            void = VoidEntry(payment.payment_id, payment.txid)
            await _note(self._db, self._journal, void)

    async def reserve_addresses(self, minor: int) -> None:
        """Addresses up to this index may be handed out from now on."""
        await self._journal.record(
            AddressesEntry(monero.NETWORK, minor),
            lambda mark: self._db.write([self.reserving(minor), put_mark(mark)]),
        )


class JournaledEvmDepositLedger(SqlEvmDepositLedger):
    """The EvmDepositLedger port over a Database and a journal."""

    def __init__(self, database: Tables, journal: PaymentJournal) -> None:
        super().__init__(database)
        self._journal = journal

    async def add_addresses(self, made: Sequence[EvmAddress]) -> None:
        """Record addresses, and that all up to the last may be handed out from now on."""
        await self._journal.record(
            AddressesEntry(EVM_ADDRESSES, made[-1].index),
            lambda mark: self._db.write([*self.adding(made), put_mark(mark)]),
        )

    async def reserve_addresses(self, index: int) -> None:
        """Addresses up to this index may have been handed out; those above were not."""
        await self._journal.record(
            AddressesEntry(EVM_ADDRESSES, index),
            lambda mark: self._db.write([self.reserving(index), put_mark(mark)]),
        )


class JournaledEvmPaymentLedger(SqlEvmPaymentLedger):
    """The EvmPaymentLedger port over a Database and a journal."""

    def __init__(self, database: Tables, journal: PaymentJournal) -> None:
        super().__init__(database)
        self._journal = journal

    async def add_payment(
        self, payment: evm.EvmPayment, sweep: evm.Sweep | None = None, *, rows: Rows = ()
    ) -> None:
        """Record and commit a signed payment. Raises as the ledger without a journal does."""
        await self._journal.record(
            EvmEntry(payment, sweep),
            lambda mark: self._db.write([*rows, *self.adding(payment, sweep), put_mark(mark)]),
            (
                VoidEntry(payment.payment_id, payment.attempts[0].txid),
                lambda: self.has_transaction(payment.attempts[0].txid),
            ),
        )

    async def add_attempt(self, payment: evm.EvmPayment, attempt: evm.Attempt) -> None:
        """Record and commit one more attempt. It has the payment's nonce: nothing voids it."""
        await self._journal.record(
            AttemptEntry(payment.payment_id, attempt),
            lambda mark: self._db.write([self.raising(payment, attempt), put_mark(mark)]),
        )

    async def put_sweep(self, sweep: evm.Sweep) -> None:
        """Record how a sweep ended."""
        await super().put_sweep(sweep)
        ended = SweptEntry(
            sweep.network, sweep.address_index, sweep.serial, sweep.state, sweep.taken
        )
        await _note(self._db, self._journal, ended)
