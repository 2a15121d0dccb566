"""The replay of the payment journal's lines into a database that lacks them.

A line without a row is adopted: its bytes are published again, and nothing is signed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from rpcsvc.clock import Clock
from rpcsvc.domain.events import order_of
from rpcsvc.domain.order import Transfer, TransferState
from rpcsvc.domain.withdrawals import is_withdrawal
from rpcsvc.orders.ports.wallets import PreparedTransfer
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.settlement.onchain.evm import records as evm
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.payment_ledger import (
    AttemptEntry,
    EvmEntry,
    EvmPaymentLedger,
    SweptEntry,
)
from rpcsvc.settlement.onchain.evm.records import EvmAddress
from rpcsvc.settlement.onchain.journal.files import (
    EVM_ADDRESSES,
    AddressesEntry,
    Line,
    Mark,
    VoidEntry,
    as_one,
)
from rpcsvc.settlement.onchain.journal.writer import PaymentJournal, marks_of, put_mark
from rpcsvc.settlement.onchain.journal_entries import (
    Entry,
    entries_of,
    is_ahead,
    is_continued,
    is_later,
    is_refused,
    is_restored,
    last_signed,
    latest,
    void_of,
)
from rpcsvc.settlement.onchain.monero import records as monero
from rpcsvc.settlement.onchain.monero.ledger import MoneroEntry, MoneroLedger
from rpcsvc.settlement.onchain.pause import PauseSwitch, SharedPause, throw
from rpcsvc.store.database import Rows, StaleWrite, Statement, StoreConflict, Tables
from rpcsvc.store.leases import SETTLER, DatabaseReplaced, HeldLease
from rpcsvc.store.orders import OrderStore
from rpcsvc.store.withdrawals import WithdrawalStore

log = structlog.get_logger(__name__)

_HELD: Final = "SELECT holder, token FROM leases WHERE name = :name"
# Then nothing is known of its last lines, which that replica has to adopt.
_DOUBT: Final = "UPDATE payment_journal SET token = 0, holder = '' WHERE journal = :journal"
_MONERO_LIVE: Final = (
    monero.MoneroPaymentState.PREPARED,
    monero.MoneroPaymentState.RELAYING,
    monero.MoneroPaymentState.PUBLISHED,
)
_NOTE: Final = (
    "INSERT INTO journal_adopted (txid, adopted_at) VALUES (:txid, :at) ON CONFLICT DO NOTHING"
)
# A holder that starts opens its journal sooner, unless it adopts thousands of lines.
_MOST_CLOSED_LOOKS: Final = 30
_RESTORED: Final = (
    "the database is a restored copy: start each replica that has settled since, so that it adopts"
    " what its journal has, run rpcsvc audit, then rpcsvc payouts resume"
)


class JournalWatch:
    """The marks of all journals, as a standby saw them last while another replica settled.

    Marks count from a replica that had opened its journal: one that has not may lack lines of
    another journal, and writes none. A look that finds less than the one before is left out: the
    database was replaced by an older copy. ``journal``: the standby's own. ``pause`` is read, too.
    """

    def __init__(
        self, database: Tables, journal: PaymentJournal, pause: SharedPause | None = None
    ) -> None:
        self._db = database
        self._journal = journal
        self._pause = pause
        self._closed = (HeldLease("", 0), 0)
        self.marks: list[Mark] | None = None

    async def __call__(self) -> HeldLease | None:
        """Look, while another replica holds the lease; return that lease if it is to be taken over.

        It is, once the holder has not opened its journal for 30 looks and this replica could open
        its own: payouts would wait for an operator otherwise. Raises errors.Unavailable.
        """
        marks = await marks_of(self._db)
        held = HeldLease(*await self._db.fetch_one(_HELD, name=SETTLER) or ("", 0))
        if self._pause is not None:
            await self._pause.look()
        if not marks or marks[-1].lease == held:
            self._closed = (held, 0)
            if marks and (self.marks is None or is_later(marks, self.marks)):
                self.marks = marks
            return None
        before, looks = self._closed
        self._closed = (held, looks + 1 if held == before else 1)
        is_due = self._closed[1] > _MOST_CLOSED_LOOKS and await self._could_open(marks)
        return held if is_due else None

    async def _could_open(self, marks: Sequence[Mark]) -> bool:
        standing = JournalStanding.among(marks, await self._journal.heads(), self.marks)
        return standing.may_pay and await self._journal.can_be_opened(standing.mark)


class JournalStanding(Struct, frozen=True):
    """A replica's right to open its journal: the rules of docs/adr/0014-replicas.md.

    ``own``: the mark of its journal, if the database has one. ``mark``: the one that its journal
    must have. ``is_newer``: its journal proves that the database is a restored copy.
    """

    own: Mark | None
    mark: Mark | None
    may_pay: bool
    is_newer: bool

    @classmethod
    def among(
        cls,
        marks: Sequence[Mark],
        heads: Mapping[str, HeldLease],
        watched: Sequence[Mark] | None,
        *,
        is_alone: bool = False,
    ) -> JournalStanding:
        """Judge by the database's marks (the newest last), the journals on disk, and the marks that
        the replica saw as a standby.
        """
        own = next((mark for mark in reversed(marks) if mark.journal in heads), None)
        follows = not marks or own == marks[-1] or is_continued(marks, watched)
        # Alone there is one journal; one that the database does not know is another database's.
        is_newer = not is_alone and not follows and is_ahead(heads.values(), marks)
        may_pay = follows or is_newer
        return cls(own, own if may_pay else marks[-1], may_pay, is_newer)


class ReplayResult(Struct):
    """The outcome of a replay.

    ``orders``: transfers that are now paid. ``lost``: transfers that a payment pays but no order
    has. ``refused``: lines that the database rejects, with the reason.
    """

    payments: list[str] = field(default_factory=list)
    orders: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)
    refused: list[str] = field(default_factory=list)


class JournalReplay:
    """Replays lines once into an open database that has no other writer."""

    def __init__(self, database: Tables, clock: Clock) -> None:
        self._db = database
        self._clock = clock
        self._monero = MoneroLedger(database)
        self._evm = EvmPaymentLedger(database)
        self._addresses = EvmDepositLedger(database)
        # The next poll renders the status answer.
        self._store = OrderStore(database, lambda: "")
        self._withdrawals = WithdrawalStore(database)
        self._processor = OrderProcessor(self._store, clock, lambda _order: None)
        self._done = ReplayResult()

    async def run(
        self, lines: Sequence[Line], mark: Mark, known: Mark | None = None
    ) -> ReplayResult:
        """Adopt the payments of these lines; ``mark`` is the end of the journal.

        ``known``: the mark that the database had when the lines were read. Raises
        errors.Unavailable, DatabaseReplaced when it has less by now, and ValueError for a line that
        this version does not know.
        """
        entries = [entry for line in lines for entry in entries_of(line)]
        for entry in latest(entries):
            try:
                await self._adopt(entry)
            except StoreConflict as conflict:
                self._done.refused.append(f"{_name(entry)}: {conflict}")
        if not self._done.refused:
            try:
                await self._db.write([put_mark(mark, known)])
            except StaleWrite:
                raise DatabaseReplaced from None
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
                await self._fail(entry)

    # --- payments ------------------------------------------------------------------------------

    async def _adopt_monero(self, payment: monero.MoneroPayment) -> None:
        name, txid = payment.payment_id, payment.txid
        if await self._monero.has_transaction(txid):
            return
        is_transfer = payment.purpose is monero.MoneroPurpose.TRANSFER
        paid = [(each.transfer_id, each.address, each.units) for each in payment.payees]
        waiting, lost = await self._waiting(paid if is_transfer else [])

        async def commit(rows: Rows) -> None:
            await self._monero.add_payment(payment, rows)

        await self._processor.record([PreparedTransfer(txid, waiting)], commit)
        await self._note(name, txid, waiting, lost)

    async def _adopt_evm(self, entry: EvmEntry) -> None:
        payment, order = entry.payment, entry.payment.order
        name, first = payment.payment_id, payment.attempts[0]
        if await self._evm.has_transaction(first.txid):
            return
        if entry.sweep is not None:
            await self._know_address(entry.sweep)
        is_transfer = order.purpose is evm.EvmPurpose.TRANSFER
        paid = [(name, order.recipient, order.units)]
        waiting, lost = await self._waiting(paid if is_transfer else [])

        async def commit(rows: Rows) -> None:
            await self._evm.add_payment(payment, entry.sweep, rows=rows)

        await self._processor.record([PreparedTransfer(first.txid, waiting)], commit)
        await self._note(name, first.txid, waiting, lost)

    async def _waiting(
        self, paid: Sequence[tuple[str, str, int]]
    ) -> tuple[tuple[str, ...], list[str]]:
        """Split payments (transfer id, address, units) into transfers that wait for exactly that
        payment, and transfers whose order the database lacks.

        A transfer that is planned later finds its payment on record.
        """
        waiting, lost = [], []
        for transfer_id, address, units in paid:
            if is_withdrawal(transfer_id):
                # A recorded withdrawal finds its payment at its next attempt.
                known = await self._withdrawals.find(transfer_id)
                lost += [] if known else [transfer_id]
                continue
            order = await self._store.order(order_of(transfer_id))
            transfer = order.transfer(transfer_id) if order else None
            if order is None:
                lost.append(transfer_id)
            elif transfer is not None and _waits_for(transfer, address, units):
                waiting.append(transfer_id)
        return tuple(waiting), lost

    async def _adopt_attempt(self, entry: AttemptEntry) -> None:
        payment = await self._evm.payment(entry.payment_id)
        if payment is None or payment.state.is_over:
            return
        if await self._evm.has_transaction(entry.attempt.txid):
            return
        last = payment.attempts[-1]
        if entry.attempt.max_fee <= last.max_fee or entry.attempt.tip <= last.tip:
            # Another replica has raised the fees since. Both spend the nonce of the same payment.
            log.info("evm_attempt_not_adopted", payment_id=entry.payment_id,
                     txid=entry.attempt.txid)  # fmt: skip
            return
        await self._evm.add_attempt(payment, entry.attempt)
        if payment.state is evm.EvmPaymentState.PREPARED:
            # Only a published transaction is replaced.
            at = entry.attempt.made_at
            out = replace(payment, state=evm.EvmPaymentState.PUBLISHED, published_at=at)
            await self._evm.put_payment(out)

    async def _fail(self, entry: VoidEntry) -> None:
        """Mark an XMR payment that can never be made as failed. For EVM the network decides."""
        for payment in await self._monero.payments_in(*_MONERO_LIVE):
            if (payment.payment_id, payment.txid) == (entry.payment_id, entry.txid):
                failed = replace(payment, state=monero.MoneroPaymentState.FAILED)
                await self._monero.put_payment(failed)

    async def _note(
        self, payment_id: str, txid: str, waiting: Sequence[str], lost: Sequence[str]
    ) -> None:
        self._done.payments.append(payment_id)
        self._done.orders += waiting
        self._done.lost += lost
        await self._db.write([Statement(_NOTE, {"txid": txid, "at": self._clock.now_ms()})])

    # --- sweeps and addresses ------------------------------------------------------------------

    async def _know_address(self, sweep: evm.Sweep) -> None:
        """Record the address of a sweep, because sweeps are summed by address. Addresses before it
        are filled in once the keys are available.
        """
        if await self._addresses.ours([sweep.address]):
            return
        wallet = await self._addresses.wallet()
        reserved = max(sweep.address_index, wallet.reserved_to if wallet else 0)
        await self._addresses.add_addresses([EvmAddress(sweep.address_index, sweep.address)])
        await self._addresses.reserve_addresses(reserved)

    async def _end_sweep(self, entry: SweptEntry) -> None:
        for sweep in await self._evm.sweeps_under_way(entry.network):
            if (sweep.address_index, sweep.serial) == (entry.address_index, entry.serial):
                await self._evm.put_sweep(replace(sweep, state=entry.state, taken=entry.taken))

    async def _skip_addresses(self, entry: AddressesEntry) -> None:
        """Reserve the addresses that were, or may have been, handed out."""
        ledger = self._addresses if entry.network == EVM_ADDRESSES else self._monero
        wallet = await ledger.wallet()
        if wallet is not None and wallet.reserved_to < entry.to:
            await ledger.reserve_addresses(entry.to)


async def _decided(
    journal: PaymentJournal, lines: Sequence[Line], last: Line, *, is_refused: bool
) -> tuple[Line, ...]:
    """Write down whether the last line is adopted or void: in another copy it must not go the other
    way.
    """
    entries = entries_of(last)
    voids = [void for entry in entries if (void := void_of(entry)) is not None]
    if notes := voids if is_refused else entries:
        await journal.write(as_one(notes))
    if not is_refused:
        return tuple(lines)
    log.info("journal_line_refused", line=last.at.line, kind=last.kind)
    return tuple(line for line in lines if line != last)


async def open_journal(
    journal: PaymentJournal,
    database: Tables,
    clock: Clock,
    switch: PauseSwitch,
    watched: Sequence[Mark] | None = None,
    *,
    shared: SharedPause | None = None,
) -> ReplayResult:
    """Open the journal and adopt the lines that the database lacks (docs/adr/0014-replicas.md).

    ``watched``: the marks that a standby saw last while another replica settled. Where there are
    others (``shared``: their pause), a restored copy pauses payouts, at all of them before anything
    is adopted: other journals may have more of them, and another replica may take over meanwhile. A
    line that the database rejects pauses payouts, too.
    """
    is_alone = shared is None
    marks = await marks_of(database)
    standing = JournalStanding.among(marks, await journal.heads(), watched, is_alone=is_alone)
    own = standing.own
    lines = await journal.open(standing.mark)
    if not journal.health().ok or journal.mark == own:
        return ReplayResult()
    if standing.is_newer:
        await database.write([Statement(_DOUBT, {"journal": marks[-1].journal})])
    if not is_alone and (last := last_signed(lines)) is not None:
        lines = await _decided(journal, lines, last, is_refused=is_refused(last, own, marks))
    if shared is not None and is_restored(lines, own):
        await pause_restored(switch, shared)
    mark = journal.mark
    done = await JournalReplay(database, clock).run(lines, mark, journal.known)
    if not done.refused:
        journal.note_committed(mark)
    else:
        reason = f"the payment journal can't be adopted: {done.refused[0]}"
        throw(switch, f"{reason} ({len(done.refused)} in all)", is_always_named=True)
        if shared is not None:
            await _share(shared)
    return done


async def pause_restored(switch: PauseSwitch, shared: SharedPause) -> None:
    """Pause payouts at all replicas, since other journals may have more than the database.

    Raises errors.Unavailable; then this replica's own are paused.
    """
    throw(switch, _RESTORED)
    await _share(shared)


async def _share(pause: SharedPause) -> None:
    """Pause payouts at all replicas. The file that stays where it can't be removed does no harm."""
    with suppress(OSError):
        await pause.share()


def _waits_for(transfer: Transfer, address: str, units: int) -> bool:
    same = (transfer.address.lower(), transfer.units) == (address.lower(), units)
    return same and transfer.state is TransferState.PLANNED


def _name(entry: Entry) -> str:
    if isinstance(entry, MoneroEntry | EvmEntry):
        return entry.payment.payment_id
    return type(entry).__name__
