"""Reads the transfers and the balance of the XMR wallet from monerod and the wallet.

All calls are bounded: the wallet answers one at a time, and orders wait behind them. Its lists are
read in windows of blocks, and kept up to a block that is still on the chain at the next audit. The
transaction key proves the amount of a payment, the transaction itself its fee.
Source: the daemon and wallet RPC documentation at getmonero.org.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Final, TypeVar

from msgspec import Struct, field, json
from msgspec.structs import replace
from pydantic import BeforeValidator

from rpcsvc.audit.memory import Anchor, AuditMemory
from rpcsvc.audit.records import (
    MONERO,
    Arrival,
    Books,
    ChainMoved,
    Departure,
    MoneroFacts,
    PaymentEntry,
    Sighting,
    Unfit,
    Watched,
)
from rpcsvc.audit.spilled import SpilledDict, SpilledList, in_turns
from rpcsvc.settlement.onchain.daemon_rpc import (
    BadAnswer,
    Flag,
    Model,
    NodeError,
    Text,
    Whole,
    named,
    parse_json,
    read_answer,
)
from rpcsvc.settlement.onchain.monero.monerod import BlockHeader, MonerodClient
from rpcsvc.settlement.onchain.monero.records import MoneroOptions
from rpcsvc.settlement.onchain.monero.wallet import WalletClient, list_unspent
from rpcsvc.settlement.onchain.monero.wallet_types import WalletCode
from rpcsvc.store.checks import Progress, quiet

# Blocks per list: of a busy wallet that is a second's work, and less from then on.
_WINDOW: Final = 1 << 12
_WIDEST_WINDOW: Final = 1 << 14
_MANY: Final = 400
_TRANSACTIONS_PER_CALL: Final = 50
# A block may come while the node looks for transactions.
_TRIES: Final = 3
# Blocks that are read again each time: deeper ones are kept.
_YOUNG: Final = 60


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Came:
    txid: Text
    address: Text
    amount: Whole
    height: Whole
    unlock_time: Whole


@dataclass(frozen=True, slots=True)
class _Destination:
    address: Text
    amount: Whole


@dataclass(frozen=True, slots=True)
class _Went:
    txid: Text
    amount: Whole
    fee: Whole
    height: Whole
    destinations: tuple[_Destination, ...] = ()


@dataclass(frozen=True, slots=True)
class _ListedTransfers:
    came: Annotated[tuple[_Came, ...], named("in")] = ()
    went: Annotated[tuple[_Went, ...], named("out")] = ()
    pool: tuple[_Came, ...] = ()


@dataclass(frozen=True, slots=True)
class _Balance:
    balance: Whole


@dataclass(frozen=True, slots=True)
class _Signatures:
    fee: Annotated[Whole, named("txnFee")]


@dataclass(frozen=True, slots=True)
class _TransactionBody:
    rct_signatures: _Signatures


def _decoded(value: Any) -> Any:
    """A transaction's own JSON, which the answer holds as text."""
    return parse_json(value.encode()) if isinstance(value, str) else None


@dataclass(frozen=True, slots=True)
class _OnNode:
    txid: Annotated[Text, named("tx_hash")]
    in_pool: Flag
    body: Annotated[_TransactionBody, BeforeValidator(_decoded), named("as_json")]
    height: Annotated[Whole | None, named("block_height")] = None


@dataclass(frozen=True, slots=True)
class _Known:
    status: Text
    txs: tuple[_OnNode, ...] = ()


class _Sent(Struct, frozen=True):
    """A transaction of the wallet, as it lists it."""

    departure: Departure
    destinations: tuple[tuple[str, int], ...]


def _sightings() -> SpilledDict[str, Sighting]:
    return SpilledDict(Sighting)


class _ScannedPayments(Struct):
    """The wallet's lists of blocks, and payments that are deep, by what was asked about each
    (``_key``).

    Of ``arrivals`` and ``sent`` the first ``deep`` are in blocks up to ``mark``: all others are
    listed again.
    """

    mark: Anchor | None = None
    arrivals: SpilledList[Arrival] = field(default_factory=lambda: SpilledList(Arrival))
    sent: SpilledList[_Sent] = field(default_factory=lambda: SpilledList(_Sent))
    deep: tuple[int, int] = (0, 0)
    payments: SpilledDict[str, Sighting] = field(default_factory=_sightings)


class MoneroReader:
    """Reads the chain through one node and wallet, both open.

    Everything raises RpcFailure, ChainMoved and Unfit.
    """

    def __init__(
        self,
        node: MonerodClient,
        wallet: WalletClient,
        options: MoneroOptions,
        memory: AuditMemory | None = None,
        progress: Progress = quiet,
    ) -> None:
        self._progress = progress
        self._node = node
        self._wallet = wallet
        self._options = options
        self._memory = _ScannedPayments()
        self._kept_over_restarts = memory
        self._window = _WINDOW

    async def head(self) -> BlockHeader:
        """The newest block that the wallet has scanned, and the node has.

        It is asked for before the books are copied.
        """
        info = await self._node.info()
        if info.nettype != self._options.nettype:
            raise Unfit(f"the Monero node is on {info.nettype}, not on {self._options.nettype}")
        await self._open()
        await self._wallet.refresh()
        scanned = await self._wallet.height()
        header = await self._node.header_at(scanned - 1)
        if header is None:
            raise ChainMoved(f"the Monero wallet is at height {scanned}, ahead of its node")
        return header

    async def facts(self, books: Books, head: BlockHeader) -> MoneroFacts | None:
        """Return the wallet's facts as of ``head``; None before the service has met its wallet."""
        if books.monero_primary is None:
            return None
        await self._recognise(books.monero_primary)
        memory = await self._kept()
        deep = await self._list(memory, head.height)
        memory.arrivals.extend(await self._waiting())
        balance, is_complete = await self._balance()
        stale = await self._is_stale(books.watched.get(MONERO))
        await self._require_same(head)
        asked = await self._sightings(memory, books, head)
        seen, recorded = _sightings(), SpilledDict[str, None](None)
        async for payment in in_turns(books.payments_on(MONERO)):
            if (found := asked.get(_key(payment))) is not None:
                seen[payment.payment_id] = found
            recorded.update((txid, None) for txid in payment.txids)
        departures = SpilledList[Departure](Departure)
        async for item in in_turns(memory.sent):
            is_recorded = item.departure.txid in recorded
            departures.append(item.departure if is_recorded else await self._outward(item))
        self._memory = await self._to_keep(head, memory, deep, asked)
        return MoneroFacts(
            top=head.height,
            deposit_depth=self._options.final_confirmations,
            arrivals=memory.arrivals,
            departures=departures,
            payments=seen,
            balance=balance,
            is_complete=is_complete,
            stale=stale,
        )

    # --- the wallet's lists --------------------------------------------------------------------

    async def _list(self, memory: _ScannedPayments, top: int) -> tuple[int, int]:
        """List all incoming and outgoing transfers in blocks up to ``top``, those in young blocks
        last. Return how many of each are in deep ones.
        """
        arrivals, sent = memory.arrivals, memory.sent
        arrivals.cut(memory.deep[0])
        sent.cut(memory.deep[1])
        came, went = list[Arrival](), list[_Sent]()
        after = memory.mark.number if memory.mark else 0
        while after < top:
            self._progress("reading what the Monero wallet sent and received", after, top)
            upto = min(after + self._window, top)
            answer = await self._transfers(after, upto)
            for arrival in map(_arrival, answer.came):
                is_deep = arrival.block is not None and arrival.block <= top - _YOUNG
                (arrivals if is_deep else came).append(arrival)
            for item in map(_sent, answer.went):
                (sent if item.departure.block <= top - _YOUNG else went).append(item)
            after = upto
            busy = len(answer.came) + len(answer.went) > _MANY
            wider = min(self._window * 2, _WIDEST_WINDOW)
            self._window = max(1, self._window // 4) if busy else wider
        deep = len(arrivals), len(sent)
        arrivals.extend(came)
        sent.extend(went)
        return deep

    async def _waiting(self) -> list[Arrival]:
        """Return incoming transfers that wait in the pool."""
        params = {"pool": True, "account_index": self._wallet.account}
        answer = await self._ask_wallet(_ListedTransfers, "get_transfers", params)
        return [replace(_arrival(item), block=None) for item in answer.pool]

    async def _transfers(self, after: int, upto: int) -> _ListedTransfers:
        """The wallet's transfers in blocks above ``after`` and up to ``upto``."""
        params = {
            "in": True,
            "out": True,
            "account_index": self._wallet.account,
            "filter_by_height": True,
            "min_height": after,
            "max_height": upto,
        }
        return await self._ask_wallet(_ListedTransfers, "get_transfers", params)

    async def _balance(self) -> tuple[int, bool]:
        """The account's mined balance, and whether all frozen outputs could be listed.

        The wallet's own sum leaves out frozen outputs: they are added.
        """
        params = {
            "account_index": self._wallet.account,
            "address_indices": [0],
            "strict": True,
        }
        balance = (await self._ask_wallet(_Balance, "get_balance", params)).balance
        listed, is_complete = await list_unspent(self._wallet)
        held_back = sum(item.amount for item in listed if item.frozen and not item.spent)
        return balance + held_back, is_complete

    async def _outward(self, item: _Sent) -> Departure:
        """A transaction that is not on record, without what it paid to the wallet itself."""
        own, paid = 0, []
        for address, units in item.destinations:
            index = await self._wallet.index_of(address)
            if index is not None and index.major == self._wallet.account:
                own += units
            else:
                paid.append((address, units))
        found = item.departure
        return replace(found, units=max(found.units - own, 0), destinations=tuple(paid))

    # --- payments ------------------------------------------------------------------------------

    async def _sightings(
        self, memory: _ScannedPayments, books: Books, head: BlockHeader
    ) -> SpilledDict[str, Sighting]:
        """The sightings of payments, by ``_key``."""
        seen = _sightings()
        unknown: list[PaymentEntry] = []

        async def ask() -> None:
            by_txid = await self._on_node([item.txids[0] for item in unknown])
            for payment in unknown:
                found = by_txid.get(payment.txids[0])
                if found is not None:
                    seen[_key(payment)] = await self._proven(payment, found, head)
            unknown.clear()

        async for payment in in_turns(books.payments_on(MONERO)):
            if (known := memory.payments.get(key := _key(payment))) is not None:
                seen[key] = known
            else:
                unknown.append(payment)
            if len(unknown) == _TRANSACTIONS_PER_CALL:
                await ask()
        if unknown:
            await ask()
        return seen

    async def _on_node(self, txids: Sequence[str]) -> dict[str, Sighting]:
        """The node's sightings of transactions, each with the fee that it states itself.

        A transaction that is just being mined is in neither chain nor pool for the node. Raises
        ChainMoved where that may be so.
        """
        body = {"txs_hashes": list(txids), "decode_as_json": True, "prune": True}
        path = "/get_transactions"
        name = self._node.rpc.endpoint.name
        for _ in range(_TRIES):
            before = await self._node.info()
            answer = read_answer(_Known, name, path, await self._node.rpc.read_path(path, body))
            if len(answer.txs) == len(txids):
                break
            if (await self._node.info()).top_hash == before.top_hash:
                break
        else:
            raise ChainMoved(f"the Monero chain went on from block {before.height - 1}")
        if answer.status != "OK":
            raise BadAnswer(name, path, f"the answer has the status {answer.status}")
        found = {}
        for item in answer.txs:
            if not item.in_pool and item.height is None:
                raise BadAnswer(name, path, "the answer has a mined transaction without height")
            block = None if item.in_pool else item.height
            found[item.txid] = Sighting(item.txid, block, 0, item.body.rct_signatures.fee)
        return found

    async def _proven(self, payment: PaymentEntry, found: Sighting, head: BlockHeader) -> Sighting:
        """The sighting with the units paid to the recipient, by the transaction's key."""
        paid = 0
        if payment.is_transfer:
            paid = await self._paid(payment)
        block = found.block if found.block is not None and found.block <= head.height else None
        return Sighting(found.txid, block, paid, found.fee)

    async def _paid(self, payment: PaymentEntry) -> int:
        try:
            check = await self._wallet.check_key(
                payment.txids[0], payment.tx_key or "", payment.recipient
            )
        except NodeError as error:
            if error.code in (WalletCode.WRONG_ADDRESS, WalletCode.WRONG_TX_KEY):
                return 0
            raise
        return check.received

    # --- cache ---------------------------------------------------------------------------------

    async def _kept(self) -> _ScannedPayments:
        """The lists read before, if the last block of them is still on the chain, else the payments
        that were remembered over a restart.
        """
        mark = self._memory.mark
        if mark is None or not await self._has(mark):
            self._memory = _ScannedPayments(payments=await self._recalled())
        return self._memory

    async def _recalled(self) -> SpilledDict[str, Sighting]:
        kept = self._kept_over_restarts
        recalled = None if kept is None else await kept.recall(MONERO, Sighting)
        if kept is None or recalled is None:
            return _sightings()
        anchor, found = recalled
        if await self._has(Anchor(anchor.number, anchor.hash)):
            return found
        await kept.forget(MONERO)
        return _sightings()

    async def _has(self, block: Anchor) -> bool:
        header = await self._node.header_at(block.number)
        return header is not None and header.hash == block.hash

    async def _to_keep(
        self,
        head: BlockHeader,
        memory: _ScannedPayments,
        listed: tuple[int, int],
        seen: Mapping[str, Sighting],
    ) -> _ScannedPayments:
        height = head.height - _YOUNG
        header = await self._node.header_at(height) if height > 0 else None
        if header is None:
            return _ScannedPayments()
        deep, fresh = _sightings(), _sightings()
        async for key, item in in_turns(seen.items()):
            if item.block is not None and item.block <= height:
                deep[key] = item
                if key not in memory.payments:
                    fresh[key] = item
        # Of nodes behind one address another may lag more: what was deep stays so.
        mark = memory.mark
        if mark is None or mark.number < height:
            mark = Anchor(height, header.hash)
        # Thousands of proofs take longer than a block: the chain may have gone on meanwhile.
        kept = self._kept_over_restarts
        if fresh and kept is not None and await self._has(Anchor(head.height, head.hash)):
            await kept.remember(MONERO, mark, fresh)
        return _ScannedPayments(mark, memory.arrivals, memory.sent, listed, deep)

    # --- plumbing ------------------------------------------------------------------------------

    async def _open(self) -> None:
        """Open the wallet where the daemon has none open, as the service does."""
        try:
            await self._wallet.primary_address()
        except NodeError as error:
            file = self._options.wallet_file
            if error.code != WalletCode.NOT_OPEN or file is None:
                raise
            await self._wallet.open(file, self._options.wallet_password)

    async def _recognise(self, primary: str) -> None:
        found = await self._wallet.primary_address()
        if found != primary:
            raise Unfit(
                f"another XMR wallet is open: its address begins with {found[:12]}, that of the"
                f" books with {primary[:12]}"
            )

    async def _is_stale(self, watched: Watched | None) -> bool:
        """Whether the last block that the service scanned left the chain."""
        if watched is None:
            return False
        header = await self._node.header_at(watched.upto)
        return header is None or header.hash != watched.hash

    async def _require_same(self, head: BlockHeader) -> None:
        """Raise ChainMoved if the wallet has scanned further, or the block was replaced."""
        scanned, now = await self._wallet.height(), await self._node.header_at(head.height)
        if scanned != head.height + 1 or now is None or now.hash != head.hash:
            raise ChainMoved(f"the Monero chain went on from block {head.height}")

    async def _ask_wallet(self, model: Model[T], method: str, params: dict[str, Any]) -> T:
        name = self._wallet.rpc.endpoint.name
        return read_answer(model, name, method, await self._wallet.rpc.read(method, params))


def _arrival(item: _Came) -> Arrival:
    return Arrival(
        item.txid, item.address, item.amount, item.height, timelocked=item.unlock_time > 0
    )


def _sent(item: _Went) -> _Sent:
    departure = Departure(item.txid, item.amount, item.fee, item.height)
    return _Sent(departure, tuple((to.address, to.amount) for to in item.destinations))


def _key(payment: PaymentEntry) -> str:
    """Return a digest of what a sighting is read by: a payment whose row changes is a new one."""
    row = (payment.payment_id, *payment.txids, payment.tx_key, payment.recipient, payment.purpose)
    return hashlib.sha256(json.encode(row)).hexdigest()
