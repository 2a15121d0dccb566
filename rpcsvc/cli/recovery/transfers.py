"""``rpcsvc payouts adopt|close`` and ``treasury explain``: record how a transfer ended.

``adopt`` asks the chain whether a transaction of our own wallet pays exactly that transfer.
``close`` records the operator's statement, for payments that no key proves or that a reorganisation
removed permanently. Nothing is ever signed for a closed transfer. The service must be stopped.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Final

import orjson
from msgspec.structs import asdict, replace

from rpcsvc.cli.context import FAILED, OK, Context, Json, UsageError, complain, say
from rpcsvc.cli.operator.service import onchain_settings
from rpcsvc.cli.recovery.db import with_database
from rpcsvc.clock import SystemClock
from rpcsvc.domain import withdrawals
from rpcsvc.domain.events import AdvanceTransfer, TransferSettled, order_of
from rpcsvc.domain.money import USDC, XMR, format_units
from rpcsvc.domain.order import Transfer, TransferKind, TransferState
from rpcsvc.domain.withdrawals import is_withdrawal
from rpcsvc.ids import system_random
from rpcsvc.orders.ports.wallets import PreparedTransfer
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.settings import Settings
from rpcsvc.settings_onchain import read_chains
from rpcsvc.settlement.onchain import wiring
from rpcsvc.settlement.onchain.evm.adoption import EvmAdoption
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.node import EvmConnection
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.presence import require_unminable
from rpcsvc.settlement.onchain.evm.records import EvmPaymentState, EvmPurpose
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.presence import MoneroPayoutEnd
from rpcsvc.settlement.onchain.monero.records import NETWORK as MONERO
from rpcsvc.settlement.onchain.monero.records import MoneroPaymentState, MoneroPurpose
from rpcsvc.settlement.onchain.monero.unrecorded import MoneroAdoption
from rpcsvc.settlement.onchain.unrecorded import Adopted, NotAdopted, OpenTransfer, bare_txid
from rpcsvc.signing import KEYS_DIR, KeyRing, ResponseSigner
from rpcsvc.store.database import Commit, Rows, Statement, StoreConflict, Tables
from rpcsvc.store.operator_books import OperatorBooks
from rpcsvc.store.orders import OrderStore
from rpcsvc.store.withdrawals import WithdrawalStore
from rpcsvc.treasury.annotations import Annotations, Noted

_UNPAID: Final = (TransferState.FAILED, TransferState.CANCELLED)
_ENDED: Final = "can't be mined any more"
_ADD: Final = (
    "INSERT INTO closed_by_hand (transfer_id, txid, note, at, kid, signature)"
    " VALUES (:transfer_id, :txid, :note, :at, :kid, :signature) ON CONFLICT DO NOTHING"
)
_IS_OPEN: Final = (
    "SELECT 1 FROM transfers WHERE transfer_id = :transfer_id"
    " AND state NOT IN ('failed', 'cancelled')"
    " AND transfer_id NOT IN (SELECT transfer_id FROM closed_by_hand)"
)
# What is on record as closed, and others that the same transaction was to pay.
_CLOSED: Final = (
    "SELECT transfer_id, txid, note FROM closed_by_hand WHERE txid ="
    " (SELECT txid FROM closed_by_hand WHERE transfer_id = :transfer_id)"
    " ORDER BY transfer_id <> :transfer_id, transfer_id"
)


def adopt(context: Context) -> int:
    """Run ``payouts adopt``. Raises UsageError and Unreachable; then nothing was changed."""
    settings, options = onchain_settings(context), context.options

    async def work(database: Tables) -> Adopted:
        return await _Adoption(settings, database).run(
            options.transfer, options.txid, options.tx_key
        )

    try:
        done = with_database(settings, work)
    except NotAdopted as refused:
        complain(f"rpcsvc: not adopted: {refused}\n")
        return FAILED
    except StoreConflict as conflict:
        complain(f"rpcsvc: not adopted: the books refuse it: {conflict}\n")
        return FAILED
    _print(done)
    return OK


def _print(done: Adopted) -> None:
    where = "waits to be mined" if done.block is None else f"is in block {done.block}"
    for item in done.transfers:
        paid = item.transfer
        amount = f"{format_units(paid.units, paid.asset)} {paid.asset.symbol}"
        say(
            f"{paid.transfer_id} of {item.order_id}: {amount}, paid by {done.txid}, which {where}\n"
        )
    asset, network = done.transfers[0].transfer.asset, done.transfers[0].transfer.network
    if done.other_units:
        say(
            f"The transaction pays {format_units(done.other_units, asset)} {asset.symbol} more than"
            " that. If it was to orders that the database has lost: rpcsvc treasury explain"
            f" {network} {done.txid} --note TEXT\n"
        )
    say("It is not paid again. Check the rest with: rpcsvc audit\n")


async def find_transfer(database: Tables, transfer_id: str) -> OpenTransfer:
    """A transfer and its order. Raises UsageError."""
    if is_withdrawal(transfer_id):
        item = await WithdrawalStore(database).find(transfer_id)
        transfer = item.transfer if item else None
    else:
        order = await OrderStore(database, lambda: "").order(order_of(transfer_id))
        transfer = order.transfer(transfer_id) if order else None
    found = transfer or await _paid_without_order(database, transfer_id)
    if found is not None:
        return OpenTransfer(order_of(transfer_id), found)
    if is_withdrawal(transfer_id):
        raise UsageError(f"There is no withdrawal {transfer_id}: rpcsvc treasury withdrawals")
    raise UsageError(f"There is no transfer {transfer_id}. They are listed by: rpcsvc payouts list")


async def _paid_without_order(database: Tables, name: str) -> Transfer | None:
    """Return a transfer as a wallet's payment has it, which the payment journal brought back while
    its order is lost.
    """
    kind = TransferKind.REFUND if f"/{TransferKind.REFUND}/" in name else TransferKind.PAYOUT
    xmr = await MoneroLedger(database).payment(name)
    if xmr is not None and xmr.purpose is MoneroPurpose.TRANSFER:
        is_given = xmr.state is MoneroPaymentState.RELAYING
        state = TransferState.UNKNOWN if is_given else TransferState(xmr.state)
        for to in (each for each in xmr.payees if each.transfer_id == name):
            return Transfer(name, kind, MONERO, XMR, to.address, to.units, 0, state, xmr.txid)
    usdc = await EvmPaymentLedger(database).payment(name)
    if usdc is None or usdc.order.purpose is not EvmPurpose.TRANSFER:
        return None
    made, state, txid = usdc.order, TransferState(usdc.state), usdc.prepared.txid
    return Transfer(name, kind, usdc.network, USDC, made.recipient, made.units, 0, state, txid)


class _Adoption:
    """One adoption over an open database that has no other writer."""

    def __init__(self, settings: Settings, database: Tables) -> None:
        self._settings = settings
        self._db = database
        self._clock = SystemClock()
        # The next poll renders the status answer.
        store = OrderStore(database, lambda: "")
        self._processor = OrderProcessor(store, self._clock, lambda _order: None)
        self._withdrawals = WithdrawalStore(database)

    async def _record(self, made: Sequence[PreparedTransfer], commit: Commit | None = None) -> None:
        """Record a payment together with the orders or the withdrawal that it pays."""
        (signed,) = made
        item = await self._withdrawals.find(signed.transfer_ids[0])
        if item is None:
            await self._processor.record(made, commit)
            return
        if len(signed.transfer_ids) > 1:
            raise NotAdopted(f"{signed.txid} pays others besides {item.withdrawal_id}.")
        after = withdrawals.signed(item, signed.txid, signed.raw, self._clock.now_ms())
        await self._withdrawals.change(item, after, commit)

    async def run(self, transfer_id: str, txid: str, key: str | None) -> Adopted:
        """Prove the payment and record it. Raises NotAdopted."""
        opened = await find_transfer(self._db, transfer_id)
        state, network = opened.transfer.state, opened.transfer.network
        if is_withdrawal(transfer_id) and state in _UNPAID:
            raise NotAdopted(
                f"{transfer_id} is {state.value}, which is final. If the transaction did pay it:"
                f" rpcsvc treasury explain {network} {txid[:80]} --note TEXT"
            )
        if network == MONERO:
            return await self._monero(opened, txid, key)
        return await self._evm(opened, txid)

    async def _planned(self, network: str, but: str) -> list[OpenTransfer]:
        """Return the other transfers that wait for payment on a network, oldest first."""
        rows = await self._db.fetch(
            "SELECT transfer_id FROM transfers WHERE network = :network AND state = 'planned'"
            " AND transfer_id <> :but ORDER BY seq",
            network=network,
            but=but,
        )
        return [await find_transfer(self._db, row["transfer_id"]) for row in rows]

    async def _monero(self, opened: OpenTransfer, txid: str, key: str | None) -> Adopted:
        settings = self._settings.onchain
        node, wallet = wiring.monero_clients(settings)
        ledger = MoneroLedger(self._db)
        connection = MoneroConnection(node, wallet, ledger, wiring.monero_options(settings))
        name = opened.transfer.transfer_id
        # A withdrawal never shares a transaction.
        others = [] if is_withdrawal(name) else await self._planned(MONERO, name)
        async with node, wallet:
            adoption = MoneroAdoption(connection, ledger)
            return await adoption.adopt(opened, others, txid, key, self._record)

    async def _evm(self, opened: OpenTransfer, txid: str) -> Adopted:
        settings, name = self._settings.onchain, opened.transfer.network
        chains = read_chains(self._settings.chains_file)
        nodes = wiring.evm_nodes(settings, wiring.served_chains(settings, chains))
        served = next((node for node in nodes if node.network.name == name), None)
        wallet = await EvmDepositLedger(self._db).wallet()
        if served is None or wallet is None:
            raise UsageError(f"onchain.nodes names no node for {name}, or no wallet is on record.")
        connection, ledger = (
            EvmConnection(served.client, served.network),
            EvmPaymentLedger(self._db),
        )
        async with AsyncExitStack() as clients:
            await clients.enter_async_context(served.client)
            adoption = EvmAdoption(connection, ledger, wallet.hot_address, self._clock)
            return await adoption.adopt(opened, txid, self._record)


def close(context: Context) -> int:
    """Run ``payouts close``. Raises UsageError and Unreachable; then nothing was changed."""
    settings, options = onchain_settings(context), context.options
    note = " ".join(options.note.split())
    if not note:
        raise UsageError("--note must give your evidence, or what you are going to do.")

    async def work(database: Tables) -> str:
        closing = _Closing(settings, database, note, is_unproven=options.unproven)
        return await closing.run(options.transfer, options.txid)

    try:
        said = with_database(settings, work)
    except NotAdopted as refused:
        complain(f"rpcsvc: not closed: {refused}\n")
        return FAILED
    say(f"{said}\n")
    return OK


@dataclass(slots=True)
class _Closing:
    """One closing over an open database that has no other writer. All methods raise NotAdopted.

    ``is_unproven``: the operator says that an XMR payment whose inputs the wallet lacks is not
    mined; False once that is proven all the same.
    """

    settings: Settings
    database: Tables
    note: str
    is_unproven: bool = False

    async def run(self, transfer_id: str, txid: str | None) -> str:
        """Close the transfer; returns the text for the operator."""
        opened = await find_transfer(self.database, transfer_id)
        transfer = opened.transfer
        name = transfer.transfer_id
        if self.is_unproven and (txid is not None or transfer.network != MONERO):
            raise UsageError("--unproven is for a signed XMR payout, without TXID.")
        prefix = "" if transfer.network == MONERO else "0x"
        paid_by = None if txid is None else bare_txid(txid, prefix)
        if transfer.state in _UNPAID:
            raise NotAdopted(f"{name} is {transfer.state.value}, which is final.")
        cut = await self._cut_short(name, paid_by)
        if cut is None:
            self._require_closable(transfer, paid_by)
            is_paid, ended_by = paid_by is not None, paid_by or transfer.txid or ""
            closed = await self._paid_with(opened)
        else:
            closed, ended_by = cut
            signed = await self._signed(opened)
            # The wallet's own transaction is looked for again, also where it is named now.
            is_paid = not signed or paid_by not in (None, *signed)
        if is_paid:
            await self._settle(opened, ended_by)
            return (
                f"{_line(opened)}, paid as you say: {self.note}\nIt is not paid again. Once all"
                " that the transaction paid is closed: rpcsvc treasury explain"
            )
        rival = await self._end(opened, closed)
        if rival is not None:
            return (
                f"{_line(opened)}, is not closed yet: {rival} spends its inputs now. Start the"
                " service. Once that is deep, one that was not settled fails by itself. If health"
                " goes on naming it, stop the service and close it again."
            )
        for each in closed:
            await self._settle(each, ended_by)
        return "\n".join([
            *(_line(each) for each in closed),
            f"{ended_by} {'is not mined, as you say' if self.is_unproven else _ENDED}. The"
            " service does not pay this again: it is yours to pay. If you do so from the service's"
            " own wallets: rpcsvc treasury explain",
        ])  # fmt: skip

    async def _cut_short(
        self, name: str, paid_by: str | None
    ) -> tuple[list[OpenTransfer], str] | None:
        """Return the transfers of a close that was cut short, with its transaction; None: the
        transfer was never closed. It goes on with the note that is on record.
        """
        rows = await self.database.fetch(_CLOSED, transfer_id=name)
        if not rows:
            return None
        txid, self.note = rows[0]["txid"], rows[0]["note"]
        found = [await find_transfer(self.database, row["transfer_id"]) for row in rows]
        closed = [each for each in found if each.transfer.state not in _UNPAID]
        is_over = all(each.transfer.state.is_final for each in closed)
        if is_over or paid_by not in (None, txid):
            raise NotAdopted(f"{name} is closed already, by {txid}: {self.note}")
        return closed, txid

    @staticmethod
    def _require_closable(transfer: Transfer, paid_by: str | None) -> None:
        name, state = transfer.transfer_id, transfer.state
        if state is TransferState.PLANNED and paid_by is None:
            raise NotAdopted(
                f"{name} is planned, and the service pays it. Name the TXID of what has paid it"
                " already."
            )
        if state is not TransferState.PLANNED and paid_by is not None:
            raise NotAdopted(
                f"{name} is {state.value}, by {transfer.txid}. If a reorganisation took that for"
                " good: the same without TXID."
            )

    async def _signed(self, opened: OpenTransfer) -> list[str]:
        """Return the transactions of the wallet's payment of the transfer; empty: there is none."""
        name = opened.transfer.transfer_id
        if opened.transfer.network == MONERO:
            xmr = await MoneroLedger(self.database).payment(name)
            return [] if xmr is None else [xmr.txid]
        usdc = await EvmPaymentLedger(self.database).payment(name)
        return [] if usdc is None else [each.txid for each in usdc.attempts]

    # --- signed payments -----------------------------------------------------------------------

    async def _end(self, opened: OpenTransfer, closed: Sequence[OpenTransfer]) -> str | None:
        """Make sure that the payment can't be mined any more; ``closed``: all that it was to pay.

        Returns the transaction that must be confirmed deeply enough first; None if there is none.
        """
        name, network = opened.transfer.transfer_id, opened.transfer.network
        if network == MONERO:
            return await self._end_monero(opened, closed)
        payment = await EvmPaymentLedger(self.database).payment(name)
        # Its record may say so before the order's: then it does not fail by itself either.
        is_settled = payment is not None and payment.state is EvmPaymentState.SETTLED
        if payment is None or not (is_settled or opened.transfer.state is TransferState.SETTLED):
            raise NotAdopted(
                f"{name} is {opened.transfer.state.value}: the service publishes it again, and it"
                " fails by itself if something else has spent its nonce."
            )
        onchain = self.settings.onchain
        chains = wiring.served_chains(onchain, read_chains(self.settings.chains_file))
        nodes = {node.network.name: node for node in wiring.evm_nodes(onchain, chains)}
        if network not in nodes:
            raise UsageError(f"onchain.nodes names no node for {network}.")
        node = nodes[network]
        async with AsyncExitStack() as clients:
            await clients.enter_async_context(node.client)
            await require_unminable(EvmConnection(node.client, node.network), payment)
        return None

    async def _paid_with(self, opened: OpenTransfer) -> list[OpenTransfer]:
        """The transfer, and the others that its transaction was to pay."""
        payment = await MoneroLedger(self.database).payment(opened.transfer.transfer_id)
        names = {payee.transfer_id for payee in payment.payees} if payment else set()
        found = [opened]
        for name in sorted(names - {opened.transfer.transfer_id}):
            # Skips transfers of orders that a restored copy lacks, and those already closed.
            if await self.database.fetch_one(_IS_OPEN, transfer_id=name) is not None:
                found.append(await find_transfer(self.database, name))
        return found

    async def _end_monero(self, opened: OpenTransfer, closed: Sequence[OpenTransfer]) -> str | None:
        ledger, onchain = MoneroLedger(self.database), self.settings.onchain
        name = opened.transfer.transfer_id
        payment = await ledger.payment(name)
        if payment is None:
            raise NotAdopted(f"{name} has no signed payment on record.")
        node, wallet = wiring.monero_clients(onchain)
        options = wiring.monero_options(onchain)
        clock = SystemClock()
        connection = MoneroConnection(node, wallet, ledger, options)

        async def annotate(txid: str) -> None:
            text = f"takes the inputs of {name}, which a reorganisation took: {self.note}"
            await OperatorBooks(self.database).annotate(MONERO, txid, text, clock.now_ms())

        async with node, wallet:
            end = MoneroPayoutEnd(
                connection, ledger, clock, options, annotate, is_by_word=self.is_unproven
            )
            rival = await end.end(payment)
        self.is_unproven = end.took_word
        if rival is None and not payment.state.is_over:
            # Without proof it keeps no conflict: it may be mined after all. Its journal line stays,
            # so that a restored copy does not take the transfer for unsigned.
            conflict = None if end.took_word else payment.conflict
            failed = replace(
                payment, state=MoneroPaymentState.FAILED, height=None, conflict=conflict
            )
            # With the statements: a failed payment without them would be paid back.
            said = [self._statement(each.transfer.transfer_id, payment.txid) for each in closed]
            await ledger.put_payment(failed, said)
        return rival

    # --- the statement -------------------------------------------------------------------------

    def _statement(self, name: str, txid: str) -> Statement:
        """Return what puts the operator's word on record, signed; a second one changes nothing."""
        clock = SystemClock()
        ring = KeyRing.load_or_create(self.settings.data_dir / KEYS_DIR, clock, system_random)
        signer, at = ResponseSigner(ring, clock), clock.now_ms()
        word = orjson.dumps({"at": at, "note": self.note, "transfer": name, "txid": txid})
        values = {
            "transfer_id": name, "txid": txid, "note": self.note, "at": at, "kid": signer.kid,
            "signature": signer.vouch(word),
        }  # fmt: skip
        return Statement(_ADD, values)

    async def _settle(self, opened: OpenTransfer, txid: str) -> None:
        """Record the statement, and settle the transfer."""
        clock, name, state = SystemClock(), opened.transfer.transfer_id, opened.transfer.state

        async def commit(rows: Rows) -> None:
            await self.database.write([*rows, self._statement(name, txid)])

        if is_withdrawal(name):
            await self._settle_withdrawal(name, txid, clock.now_ms(), commit)
            return
        store = OrderStore(self.database, lambda: "")
        order = await store.order(opened.order_id)
        if order is None or order.transfer(name) is None:
            await commit(())
            return
        processor = OrderProcessor(store, clock, lambda _order: None)
        # The statement first: without it the audit would report the transfer as unpaid. With it
        # alone, a transfer that is still planned would be paid.
        if state is TransferState.PLANNED:
            await processor.record([PreparedTransfer(txid, (name,))], commit)
        else:
            await commit(())
        if state is not TransferState.SETTLED:
            effect = AdvanceTransfer(name)
            await processor.apply(opened.order_id, TransferSettled(name, None), done=(effect,))

    async def _settle_withdrawal(self, name: str, txid: str, at: int, commit: Commit) -> None:
        store = WithdrawalStore(self.database)
        item = await store.find(name)
        if item is None or item.state is TransferState.SETTLED:
            await commit(())
            return
        is_planned = item.state is TransferState.PLANNED
        paid = withdrawals.signed(item, txid, "", at) if is_planned else item
        await store.change(item, withdrawals.stepped(paid, TransferState.SETTLED, at), commit)


def annotate(settings: Settings, action: str, params: Json) -> Json:
    """The answer of ``treasury.annotate`` or ``unannotate``, given while no service runs."""

    async def alone(database: Tables) -> Noted:
        annotations = Annotations(settings, database, SystemClock())
        network, txid = params["network"], params["txid"]
        if action == "unannotate":
            return await annotations.remove(network, txid)
        return await annotations.add(network, txid, params["note"], params["internalWei"])

    return asdict(with_database(settings, alone))


def _line(opened: OpenTransfer) -> str:
    item = opened.transfer
    amount = f"{format_units(item.units, item.asset)} {item.asset.symbol}"
    return f"{item.transfer_id}: {amount} to {item.address}"
