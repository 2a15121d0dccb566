"""XMR wallet transactions on no record: found at the start, adopted by the operator.

A restored database does not know what was paid since. The wallet is asked once for what it sent
since the newest payout on record; a transaction that is not on record pauses payouts. A wallet
that was restored or killed lists a transaction only once its node shows it in a block: a spend in
the node's pool of an output that the wallet believes unspent shows one before, and the node's
newest block must be a few minutes old.

A transaction is adopted as the payment of transfers if the wallet lists it as its own, the node has
it, and its key shows that it paid each address exactly the transfer's units. Source: the daemon and
wallet RPC documentation at getmonero.org.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

import structlog
from msgspec import Struct

from rpcsvc.clock import Clock, iso8601, steady_ms
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.orders.ports.wallets import PreparedTransfer, Record
from rpcsvc.settlement.onchain.backoff import Backoff
from rpcsvc.settlement.onchain.daemon_rpc import ChainUnusable, NodeError, RpcFailure
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import NodeBytes, Spent
from rpcsvc.settlement.onchain.monero.records import (
    NETWORK,
    MoneroPayment,
    MoneroPaymentState,
    MoneroPurpose,
    Payee,
)
from rpcsvc.settlement.onchain.monero.wallet import list_unspent
from rpcsvc.settlement.onchain.monero.wallet_types import (
    WalletCode,
    WalletTransfer,
    WalletTransferKind,
)
from rpcsvc.settlement.onchain.pause import PauseSwitch
from rpcsvc.settlement.onchain.unrecorded import (
    Adopted,
    NotAdopted,
    OpenTransfer,
    UnrecordedLedger,
    bare_txid,
    pause_for,
    reason_of,
    require_open,
    require_unsigned,
)
from rpcsvc.store.database import Rows

log = structlog.get_logger(__name__)


# A reorganisation may have brought a later transaction into a block before the copy.
_MARGIN: Final = 20
_SENT: Final = (WalletTransferKind.OUTGOING, WalletTransferKind.PENDING)
_WALLET: Final = "the Monero wallet"
# Blocks come every two minutes: at one start in some 20,000 none has come for so long, and it
# waits. That clocks of miners are right to some minutes is assumed.
NEWEST_BLOCK_MS: Final = 20 * 60_000
# A single call may fail; a list that fails for as long as this is the operator's to mend.
TOLD_AFTER_MS: Final = 60_000
# To list a wallet's outputs takes long where there are many, and only a block ends most waits.
_FIRST_PAUSE_MS: Final = 4_000
_LONGEST_PAUSE_MS: Final = 60_000
_SPEND: Final = "spend"


class OutgoingUnknown(Unavailable):
    """The wallet may have sent what it does not list. ``problem``: why, for the operator."""

    def __init__(self, problem: str) -> None:
        super().__init__("What left the XMR wallet is not known yet. Try again later.")
        self.problem = f"{problem}: nothing is signed with {_WALLET} before that"


class MoneroOutgoing:
    """The outgoing transactions of the operator's Monero wallet since the newest payout on record.

    ``mines_on_demand``: the chain is for tests, and its newest block may be of any age.
    """

    def __init__(
        self,
        connection: MoneroConnection,
        ledger: MoneroLedger,
        unrecorded: UnrecordedLedger,
        clock: Clock,
        *,
        mines_on_demand: bool = False,
        steady: Callable[[], int] = steady_ms,
    ) -> None:
        self._connection = connection
        self._node = connection.node
        self._wallet = connection.wallet
        self._ledger = ledger
        self._unrecorded = unrecorded
        self._clock = clock
        self._mines_on_demand = mines_on_demand
        self._backoff = Backoff(steady, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS)
        self._waiting = 0
        self._since: int | None = None

    async def unknown(self) -> list[str]:
        """Return transactions on no record; none before the service's first scan, when nothing is
        owed.

        Raises OutgoingUnknown; RpcFailure when the list itself fails; errors.Unavailable while the
        wallet is not the service's, or not shown to be at its node's newest block.
        """
        if await self._ledger.scanned_height() is None:
            return []
        if self._since is None:
            # Once, and not the newest block on record: while this waits, deposits are scanned.
            self._since = max(await self._ledger.recorded_height() - _MARGIN, 0)
        await self._require_no_spend(await self._require_newest())
        await self._require_newest()  # transactions mined since are listed now
        sent = await self._wallet.transfers(self._since, _SENT)
        return await self._unrecorded.not_on_record({item.txid for item in sent})

    async def _require_no_spend(self, top: str) -> None:
        """Raise OutgoingUnknown while one waits in the pool; ``top``: the hash of the newest
        block.
        """
        if not self._backoff.is_due(_SPEND, top):
            raise _spend_waits(self._waiting)
        listed, _ = await list_unspent(self._wallet)
        seen = await self._node.key_images([item.key_image for item in listed if not item.spent])
        waiting = [image for image, where in seen.items() if where is Spent.IN_POOL]
        unknown = len(waiting) - len(await self._ledger.live_key_images(waiting))
        if unknown:
            self._waiting = unknown
            self._backoff.note(_SPEND, top)
            raise _spend_waits(unknown)
        self._backoff.forget(_SPEND)

    async def _require_newest(self) -> str:
        """Return the hash of the network's newest block; raise as ``unknown``, but no RpcFailure.

        A wallet that is not there can't sign either, or is about to: one that was restored from its
        words scans for hours, and may sign as soon as that ends.
        """
        try:
            return await self._newest()
        except (ChainUnusable, RpcFailure) as found:  # health says it already
            raise Unavailable(f"Node or wallet can't be relied on: {found}") from found

    async def _newest(self) -> str:
        """Return the hash of the network's newest block, which the wallet has scanned.

        A late node names an old one, of several behind one name too: then a payment in a later
        block is not listed by a wallet that was restored from its words. Nor is one that spends
        what came to addresses which that wallet was not given yet.
        """
        info = await self._connection.in_step(await self._connection.ready())
        height, scanned = info.height - 1, await self._ledger.scanned_height()
        if scanned is not None and scanned > height:
            raise OutgoingUnknown(
                f"the Monero node's newest block is {height}, and block {scanned} was read before:"
                " it is late, wait or set onchain.monerod_url to another one"
            )
        header = await self._node.header_at(height)
        if header is None or header.hash != info.top_hash:
            raise Unavailable("The Monero chain moved while its node was asked.")
        off = abs(self._clock.now_ms() - header.timestamp * 1000)
        if off > NEWEST_BLOCK_MS and not self._mines_on_demand:
            raise OutgoingUnknown(
                f"the Monero node's newest block, {height}, is of"
                f" {iso8601(header.timestamp * 1000)}, {off // 60_000} min from this machine's"
                " clock: wait for a block, and check the clock and that the node has all blocks"
            )
        return info.top_hash


def _spend_waits(outputs: int) -> OutgoingUnknown:
    return OutgoingUnknown(
        f"the node's pool has what spends {outputs} outputs that {_WALLET} takes to be unspent:"
        " wait until that is in a block, or dropped"
    )


class StartupReconciliation:
    """Holds signatures until the wallet's outgoing transactions were compared with the records,
    once.

    A wallet that can't answer can't sign either, so holding costs nothing. One that is in step with
    its node and fails to list what it sent may have paid what is due: it holds, too, and health
    says so after ``TOLD_AFTER_MS``. ``steady`` is a monotonic clock in ms: the wall clock is often
    set soon after a machine's start.
    """

    def __init__(
        self,
        outgoing: MoneroOutgoing,
        unrecorded: UnrecordedLedger,
        switch: PauseSwitch,
        clock: Clock,
        *,
        steady: Callable[[], int] = steady_ms,
    ) -> None:
        self._outgoing = outgoing
        self._unrecorded = unrecorded
        self._switch = switch
        self._clock = clock
        self._steady = steady
        self._is_done = False
        self._problem: str | None = None
        self._failing_since: int | None = None
        self._one = asyncio.Lock()

    async def require_done(self) -> None:
        """Look, unless it is done. Raises errors.Unavailable when nothing may be signed yet."""
        if self._is_done:
            return
        async with self._one:
            if not self._is_done:
                await self._poll()

    def health(self) -> Health:
        """Return not ok while a transaction is on no record, or the check has failed for long."""
        return Health(self._problem is None, self._problem)

    async def _poll(self) -> None:
        try:
            unrecorded = await self._outgoing.unknown()
        except RpcFailure as failure:
            self._note_failed(failure)
            raise Unavailable(
                "What left the XMR wallet is not known yet. Try again later."
            ) from failure
        except Unavailable as reason:
            self._failing_since = None
            if isinstance(reason, OutgoingUnknown):
                self._problem = reason.problem
            raise
        self._failing_since = None
        if unrecorded:
            await self._stop(unrecorded)
        self._is_done, self._problem = True, None

    async def _stop(self, unrecorded: list[str]) -> None:
        """Pause payouts and record these as acknowledged: a resume lets payouts go on."""
        if pause_for(self._switch, _WALLET):
            await self._unrecorded.acknowledge_transactions(
                NETWORK, unrecorded, self._clock.now_ms()
            )
        self._problem = f"{reason_of(_WALLET)} ({unrecorded[0]}, {len(unrecorded)} in all)"
        raise Unavailable(
            "The Monero wallet has sent what is not on record. Nothing is signed with it before"
            " the operator has looked."
        )

    def _note_failed(self, failure: RpcFailure) -> None:
        now = self._steady()
        if self._failing_since is None:
            self._failing_since = now
        seconds = (now - self._failing_since) // 1000
        if seconds < TOLD_AFTER_MS // 1000:
            return
        if self._problem is None:
            log.error("reconciliation_failed", reason=str(failure))
        self._problem = (
            f"startup reconciliation has failed for {seconds} s ({failure}): nothing is signed with"
            f" {_WALLET} before it; restart monero-wallet-rpc, or restore the wallet from its words"
        )


class _FoundTransaction(Struct, frozen=True):
    """A transaction, as wallet and node have it."""

    sent: WalletTransfer
    bytes: NodeBytes
    key: str


class MoneroAdoption:
    """Looks at one wallet and its node, both open. Everything raises RpcFailure, ChainUnusable."""

    def __init__(self, connection: MoneroConnection, ledger: MoneroLedger) -> None:
        self._connection = connection
        self._wallet = connection.wallet
        self._ledger = ledger

    async def adopt(
        self,
        wanted: OpenTransfer,
        others: Sequence[OpenTransfer],
        txid: str,
        key: str | None,
        record: Record,
    ) -> Adopted:
        """Put on record that the transaction pays ``wanted``, and those of ``others`` it pays too.

        ``key`` is the transaction's; without one the wallet is asked. Raises NotAdopted.
        """
        txid = bare_txid(txid, "")
        if (known := await self._known(wanted, txid)) is not None:
            await record([PreparedTransfer(txid, (wanted.transfer.transfer_id,))], None)
            return Adopted(txid, (wanted,), known.height)
        found = await self._find(txid, key)
        received = await self._received(found, wanted.transfer.address)
        if received != wanted.transfer.units:
            raise NotAdopted(
                f"{txid} pays {received} piconero to the address of {wanted.transfer.transfer_id},"
                f" which is for {wanted.transfer.units}."
            )
        paid = [wanted, *await self._also_paid(found, wanted, others)]
        payment = _payment(found, paid)
        if taken := await self._ledger.live_key_images(payment.key_images):
            raise NotAdopted(
                f"{txid} spends what another payment on record spends ({len(taken)} key images)."
            )

        async def commit(rows: Rows) -> None:
            await self._ledger.add_payment(payment, rows)

        names = tuple(item.transfer.transfer_id for item in paid)
        await record([PreparedTransfer(txid, names)], commit)
        return Adopted(txid, tuple(paid), found.bytes.height, found.sent.amount - payment.units)

    async def _known(self, wanted: OpenTransfer, txid: str) -> MoneroPayment | None:
        """The recorded payment, if its order does not know it yet; else None. Raises NotAdopted
        when the transfer has another one, or knows this one.
        """
        require_open(wanted.transfer)
        known = await self._ledger.payment(wanted.transfer.transfer_id)
        if known is None:
            return None
        if known.txid != txid:
            raise NotAdopted(
                f"{wanted.transfer.transfer_id} has a signed payment on record already,"
                f" {known.txid}: a second one is not taken for it."
            )
        require_unsigned(wanted.transfer, txid)
        return known

    # --- from node and wallet ------------------------------------------------------------------

    async def _find(self, txid: str, key: str | None) -> _FoundTransaction:
        await self._connection.check_node()
        await self._connection.check_wallet()
        await self._wallet.refresh()
        listed = [item for item in await self._wallet.transfer(txid) if item.kind in _SENT]
        if not listed:
            raise NotAdopted(f"{txid} is not a payment that the XMR wallet knows as its own.")
        found = await self._connection.node.transaction_bytes(txid)
        if found is None:
            raise NotAdopted(f"The Monero node has no transaction {txid}, in a block or waiting.")
        if not found.raw:
            raise NotAdopted(
                f"The Monero node has pruned {txid}: ask one that keeps whole transactions"
                " (onchain.monerod_url)."
            )
        return _FoundTransaction(listed[0], found, key or await self._own_key(txid))

    async def _own_key(self, txid: str) -> str:
        try:
            return await self._wallet.tx_key(txid)
        except NodeError as error:
            if error.code != WalletCode.NO_TX_KEY:
                raise
            raise NotAdopted(
                f"The wallet does not have the key of {txid}, which proves whom it paid. Give it"
                " with --tx-key, from the receipt of the payout or from where it was made."
            ) from error

    async def _received(self, found: _FoundTransaction, address: str) -> int:
        """Return the piconero that the transaction paid to an address, by its key."""
        try:
            check = await self._wallet.check_key(found.sent.txid, found.key, address)
        except NodeError as error:
            if error.code in (WalletCode.UNKNOWN, WalletCode.WRONG_TX_KEY):
                raise NotAdopted(
                    f"The key is not that of {found.sent.txid}: {error.text}"
                ) from error
            raise
        return check.received

    async def _also_paid(
        self, found: _FoundTransaction, wanted: OpenTransfer, others: Sequence[OpenTransfer]
    ) -> list[OpenTransfer]:
        """Return open transfers that the transaction pays, too: the service pays several at
        once.
        """
        left = found.sent.amount - wanted.transfer.units
        addresses, also = {wanted.transfer.address}, []
        for item in others:
            transfer = item.transfer
            if not 0 < transfer.units <= left or transfer.address in addresses:
                continue
            if await self._ledger.payment(transfer.transfer_id) is not None:
                continue
            if await self._received(found, transfer.address) == transfer.units:
                left -= transfer.units
                addresses.add(transfer.address)
                also.append(item)
        return also


def _payment(found: _FoundTransaction, paid: Sequence[OpenTransfer]) -> MoneroPayment:
    """The record as the service makes one, at the step after publication."""
    transfers = [item.transfer for item in paid]
    at, txid = found.sent.timestamp * 1000, found.sent.txid
    alone = len(transfers) == 1
    return MoneroPayment(
        payment_id=transfers[0].transfer_id if alone else f"batch-{txid}",
        purpose=MoneroPurpose.TRANSFER,
        address=transfers[0].address,
        units=sum(item.units for item in transfers),
        fee=found.sent.fee,
        txid=txid,
        raw=found.bytes.raw,
        # The wallet needs them to relay a payment, which it does only the first time.
        metadata="",
        tx_key=found.key,
        key_images=tuple(sorted(found.bytes.key_images)),
        prepared_at=at,
        state=MoneroPaymentState.PUBLISHED,
        relayed_at=at,
        height=found.bytes.height,
        batch=()
        if alone
        else tuple(Payee(item.transfer_id, item.address, item.units) for item in transfers),
    )
