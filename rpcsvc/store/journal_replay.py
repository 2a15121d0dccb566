"""Adopts what a payment journal has and the database does not: after a crash, or an older copy.

A line without its row was signed, and may have been published. So it becomes a payment on record
that is looked for and, if it is nowhere, published again with the same bytes; nothing is signed
anew for what it pays. Idempotent: it may be cut short and done again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Final

import structlog

from rpcsvc.clock import Clock
from rpcsvc.domain.order import Transfer
from rpcsvc.domain.refunds import order_of
from rpcsvc.domain.states import TransferState
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.settlement.onchain.adoption import Open, tell
from rpcsvc.settlement.onchain.evm import payment_ledger as evm
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmAddress
from rpcsvc.settlement.onchain.guard import PauseSwitch, throw
from rpcsvc.settlement.onchain.journal.entries import (
    EVM_ADDRESSES,
    AddressesEntry,
    AttemptEntry,
    Entry,
    EvmEntry,
    MoneroEntry,
    SweptEntry,
    VoidEntry,
    from_body,
    latest,
)
from rpcsvc.settlement.onchain.journal.lines import Line
from rpcsvc.settlement.onchain.journal.writer import Mark, PaymentJournal
from rpcsvc.settlement.onchain.monero import ledger as monero
from rpcsvc.store.journaled import mark_of, put_mark
from rpcsvc.store.onchain_evm_deposits import SqliteEvmDepositLedger
from rpcsvc.store.onchain_evm_payments import SqliteEvmPaymentLedger
from rpcsvc.store.onchain_monero import SqliteMoneroLedger
from rpcsvc.store.orders import SqliteOrderStore
from rpcsvc.store.sqlite import Database, Statement, StoreConflict

log = structlog.get_logger(__name__)

_MONERO_OUT: Final = (monero.PaymentState.RELAYING, monero.PaymentState.PUBLISHED)
_NOTE: Final = "INSERT INTO journal_adopted (txid, adopted_at) VALUES (?, ?) ON CONFLICT DO NOTHING"


@dataclass(slots=True)
class Adopted:
    """What a replay did. ``orders``: transfers that are paid now. ``lost``: transfers that a
    payment pays and no order has. ``refused``: what the database does not take, and why.
    """

    payments: list[str] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Paid:
    """What a payment on record pays: (transfer id, address, units), and by which bytes."""

    txid: str
    raw: str
    payees: tuple[tuple[str, str, int], ...]


class JournalReplay:
    """One replay over an open database that nobody else writes."""

    def __init__(self, database: Database, clock: Clock) -> None:
        self._db = database
        self._clock = clock
        self._monero = SqliteMoneroLedger(database)
        self._evm = SqliteEvmPaymentLedger(database)
        self._addresses = SqliteEvmDepositLedger(database)
        # A status answer is made when it is asked for next.
        self._store = SqliteOrderStore(database, lambda: "")
        self._done = Adopted()
        self._void: set[tuple[str, str]] = set()

    async def run(self, lines: Sequence[Line], mark: Mark) -> Adopted:
        """Adopt the payments of these lines; ``mark`` is where the journal ends.

        Raises ValueError for a line that this version does not know, errors.Unavailable.
        """
        entries = [entry for line in lines if (entry := from_body(line.body)) is not None]
        self._void = {(e.payment_id, e.txid) for e in entries if isinstance(e, VoidEntry)}
        for entry in latest(entries, self._void):
            try:
                await self._adopt(entry)
            except StoreConflict as conflict:
                self._done.refused.append(f"{_name(entry)}: {conflict}")
        if not self._done.refused:
            await self._db.write([put_mark(mark)])
        if self._done.payments or self._done.refused:
            done = self._done
            log.warning("journal_adopted", payments=len(done.payments), orders=len(done.orders),
                        lost=len(done.lost), refused=done.refused)  # fmt: skip
        return self._done

    async def _adopt(self, entry: Entry) -> None:
        match entry:
            case MoneroEntry():
                await self._adopt_monero(entry.payment)
            case EvmEntry():
                await self._adopt_evm(entry)
            case AttemptEntry():
                await self._adopt_attempt(entry)
            case SweptEntry():
                await self._end_sweep(entry)
            case AddressesEntry():
                await self._skip_addresses(entry)
            case VoidEntry():
                await self._withdraw(entry)

    # --- payments ------------------------------------------------------------------------------

    async def _adopt_monero(self, payment: monero.Payment) -> None:
        if not self._monero.has_transaction(payment.txid):
            if (payment.payment_id, payment.txid) in self._void:
                return
            await self._monero.add_payment(payment)
            await self._note(payment.payment_id, payment.txid)
        known = self._monero.payment(payment.payees[0].transfer_id)
        is_out = (
            known is not None
            and known.txid == payment.txid
            and known.state in (*_MONERO_OUT, monero.PaymentState.SETTLED)
        )
        if is_out and payment.purpose is monero.Purpose.TRANSFER:
            payees = tuple((each.transfer_id, each.address, each.units) for each in payment.payees)
            await self._tell(_Paid(payment.txid, payment.raw, payees))

    async def _adopt_evm(self, entry: EvmEntry) -> None:
        payment, order = entry.payment, entry.payment.order
        first = payment.attempts[0]
        if not self._evm.has_transaction(first.txid):
            if (payment.payment_id, first.txid) in self._void:
                return
            if entry.fills is not None:
                await self._adopt_fill(payment, entry.fills)
                return
            if entry.sweep is not None:
                await self._know_address(entry.sweep)
            await self._evm.add_payment(payment, entry.sweep)
            await self._note(payment.payment_id, first.txid)
        known = self._evm.payment(payment.payment_id)
        is_out = known is not None and known.state in (
            evm.PaymentState.PUBLISHED, evm.PaymentState.SETTLED
        )  # fmt: skip
        if is_out and order.purpose is evm.Purpose.TRANSFER:
            payees = ((payment.payment_id, order.recipient, order.units),)
            await self._tell(_Paid(first.txid, first.raw, payees))

    async def _adopt_fill(self, fill: evm.EvmPayment, filled: str) -> None:
        """Its nonce was another payment's. Without the word that this one is void, that one may
        have been published after all: then it keeps the nonce, and the network says which it is.
        """
        known = self._evm.payment(filled)
        if known is None:
            if any(name == filled for name, _ in self._void):
                await self._evm.add_payment(fill)
                await self._note(fill.payment_id, fill.attempts[0].txid)
            return
        is_void = (filled, known.attempts[0].txid) in self._void
        if is_void and known.state is evm.PaymentState.PREPARED:
            await self._evm.withdraw(known, fill)
            await self._note(fill.payment_id, fill.attempts[0].txid)

    async def _adopt_attempt(self, entry: AttemptEntry) -> None:
        payment = self._evm.payment(entry.payment_id)
        live = (evm.PaymentState.PREPARED, evm.PaymentState.PUBLISHED)
        if payment is None or payment.state not in live:
            return
        if self._evm.has_transaction(entry.attempt.txid):
            return
        await self._evm.add_attempt(payment, entry.attempt)
        if payment.state is evm.PaymentState.PREPARED:
            # Only what was published is replaced.
            at = entry.attempt.made_at
            out = replace(payment, state=evm.PaymentState.PUBLISHED, published_at=at)
            await self._evm.put_payment(out)

    async def _withdraw(self, entry: VoidEntry) -> None:
        """An XMR payment that can never be made; an EVM one is void when its nonce is filled."""
        for payment in self._monero.payments_in(monero.PaymentState.PREPARED, *_MONERO_OUT):
            if (payment.payment_id, payment.txid) == (entry.payment_id, entry.txid):
                was_out = payment.state in _MONERO_OUT
                state = monero.PaymentState.FAILED if was_out else monero.PaymentState.WITHDRAWN
                await self._monero.put_payment(replace(payment, state=state))

    async def _note(self, payment_id: str, txid: str) -> None:
        self._done.payments.append(payment_id)
        await self._db.write([Statement(_NOTE, (txid, self._clock.now_ms()))])

    # --- sweeps and addresses ------------------------------------------------------------------

    async def _know_address(self, sweep: evm.Sweep) -> None:
        """What a sweep takes is summed up by address; those between come when keys are at hand."""
        if self._addresses.ours([sweep.address]):
            return
        wallet = self._addresses.wallet()
        reserved = max(sweep.address_index, wallet.reserved_to if wallet else 0)
        await self._addresses.add_addresses([EvmAddress(sweep.address_index, sweep.address)])
        await self._addresses.reserve_addresses(reserved)

    async def _end_sweep(self, entry: SweptEntry) -> None:
        for sweep in self._evm.sweeps_under_way(entry.network):
            if (sweep.address_index, sweep.serial) == (entry.address_index, entry.serial):
                await self._evm.put_sweep(replace(sweep, state=entry.state, taken=entry.taken))

    async def _skip_addresses(self, entry: AddressesEntry) -> None:
        """Addresses up to this one were handed out, or may have been."""
        ledger = self._addresses if entry.network == EVM_ADDRESSES else self._monero
        wallet = ledger.wallet()
        if wallet is not None and wallet.reserved_to < entry.to:
            await ledger.reserve_addresses(entry.to)

    # --- orders --------------------------------------------------------------------------------

    async def _tell(self, paid: _Paid) -> None:
        """Tell the orders that wait for it. One that has no such transfer yet finds the payment on
        record when it plans one.
        """
        processor = OrderProcessor(self._store, self._clock, lambda _order: None)
        for transfer_id, address, units in paid.payees:
            order = self._store.order(order_of(transfer_id))
            if order is None:
                self._done.lost.append(transfer_id)
                continue
            transfer = order.transfer(transfer_id)
            if transfer is not None and _waits_for(transfer, address, units):
                await tell(processor, [Open(order.order_id, transfer)], paid.txid, paid.raw)
                self._done.orders.append(transfer_id)


async def open_journal(
    journal: PaymentJournal, database: Database, clock: Clock, switch: PauseSwitch
) -> Adopted:
    """Open the journal, and adopt what it has and the database does not.

    What the database does not take pauses payouts.
    """
    before = mark_of(database)
    lines = await journal.open(before)
    if not journal.health().ok or journal.mark == before:
        return Adopted()
    done = await JournalReplay(database, clock).run(lines, journal.mark)
    if done.refused:
        throw(switch, f"the payment journal can't be adopted: {done.refused[0]}"
                      f" ({len(done.refused)} in all)")  # fmt: skip
    return done


def _waits_for(transfer: Transfer, address: str, units: int) -> bool:
    same = (transfer.address.lower(), transfer.units) == (address.lower(), units)
    return same and transfer.state is TransferState.PLANNED


def _name(entry: Entry) -> str:
    if isinstance(entry, MoneroEntry | EvmEntry):
        return entry.payment.payment_id
    return type(entry).__name__
