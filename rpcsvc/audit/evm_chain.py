"""Reads from an EVM node the transfers of our addresses in USDC and ether, and their balances.

It reads eth_getLogs by itself, for our addresses alone, so that its findings owe nothing to the
service's own scan. Findings are kept up to a block that is still on the chain at the next audit.
Sources: the Ethereum JSON-RPC specification (execution-apis); ERC-20; the OP stack's receipts.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import merge
from itertools import groupby
from math import ceil
from typing import Annotated, Any, Final, TypeVar

from msgspec import Struct, field

from rpcsvc.audit.memory import Anchor, AuditMemory
from rpcsvc.audit.records import (
    Books,
    ChainMoved,
    Ether,
    EvmFacts,
    OpeningEntry,
    PaymentEntry,
    TokenTransfer,
    Unfit,
    Watched,
)
from rpcsvc.audit.spilled import SpilledDict, SpilledList, batches, in_turns
from rpcsvc.domain import usdc
from rpcsvc.settlement.onchain.daemon_rpc import (
    BadAnswer,
    BatchRefused,
    NodeError,
    Text,
    TooLarge,
    named,
    read_answer,
)
from rpcsvc.settlement.onchain.evm.node import WIDEST_LOG_RANGE, EvmClient
from rpcsvc.settlement.onchain.evm.node_types import Block, Data, EvmCall, Quantity, Receipt, Tag
from rpcsvc.settlement.onchain.evm.records import EvmNetwork
from rpcsvc.store.checks import Progress, quiet

# Questions under way at once.
_AT_ONCE: Final = 8
T = TypeVar("T")
_GET_LOGS: Final = "eth_getLogs"
# Of several nodes behind one address some lag, and a proxy may divide a batch over them
# (docs/adr/0015-several-evm-nodes.md): the blocks of this time are read again by the next audit.
_LAG_SECONDS: Final = 30
_MOST_ADDRESSES: Final = 500
_WIDEST_SPAN: Final = 1 << 20
# Events of one range of blocks in memory: the next range is narrower after more of them.
_MANY: Final = 50_000


@dataclass(frozen=True, slots=True)
class _Event:
    topics: tuple[Data, ...]
    data: Data
    txid: Annotated[Text, named("transactionHash")]
    block: Annotated[Quantity, named("blockNumber")]
    index: Annotated[Quantity, named("logIndex")]
    removed: bool = False


class MinedTransaction(Struct, frozen=True):
    """A mined transaction: ``cost`` is its fee in wei, None where the node does not say it all."""

    block: int
    ok: bool
    cost: int | None


class ByHand(Struct, frozen=True):
    """An annotated transaction that is mined. ``nonce``: of the hot wallet's own, else None.

    ``sent`` and ``came``: wei that went along with it, from the hot wallet and to it.
    """

    mined: MinedTransaction
    nonce: int | None
    sent: int
    came: int


def _receipts() -> SpilledDict[str, MinedTransaction]:
    return SpilledDict(MinedTransaction)


class EvmReceipts(Struct):
    """Reads receipts of one network's transactions. Every method raises RpcFailure."""

    network: EvmNetwork
    client: EvmClient
    memory: AuditMemory | None = None
    _mined: SpilledDict[str, MinedTransaction] = field(default_factory=_receipts)
    _fresh: SpilledDict[str, MinedTransaction] = field(default_factory=_receipts)
    _by_hand: dict[str, ByHand] = field(default_factory=dict)

    async def start_again(self) -> None:
        """Forget the receipts, since blocks may have been replaced; recall those of before whose
        anchor is on the chain.
        """
        self._mined, self._fresh = _receipts(), _receipts()
        self._by_hand.clear()
        if self.memory is None:
            return
        recalled = await self.memory.recall(self.network.name, MinedTransaction)
        if recalled is None:
            return
        anchor, found = recalled
        block = await self.client.block(anchor.number)
        if block is not None and block.hash == anchor.hash:
            self._mined = found
        else:
            await self.memory.forget(self.network.name)

    async def keep(self, anchor: Block | None) -> None:
        """Remember the deep receipts that were read since; ``anchor`` is at or above them all."""
        if self.memory is not None and anchor is not None and self._fresh:
            at = Anchor(anchor.number, anchor.hash)
            await self.memory.remember(self.network.name, at, self._fresh)
        self._fresh = _receipts()

    def deepest(self, head: Block) -> int | None:
        """Return the newest block that is deep below ``head``, if a receipt is to be kept."""
        return head.number - self.network.failed_after if self._fresh else None

    def knows(self, txid: str) -> bool:
        """Whether a transaction is mined, and too deep to be asked about again."""
        return txid in self._mined

    async def mined(
        self, txids: Iterable[str], head: Block
    ) -> tuple[SpilledDict[str, MinedTransaction], frozenset[str]]:
        """The transactions that are mined up to ``head``, and the ids of those mined later."""
        found, later = _receipts(), set()
        unknown: list[str] = []

        async def ask() -> None:
            for txid, receipt in await each(unknown, self.client.receipt):
                if receipt is None:
                    continue
                if receipt.block_number > head.number:
                    later.add(txid)
                    continue
                made = found[txid] = self._read(receipt)
                if self._is_deep(receipt, head):
                    self._mined[txid] = self._fresh[txid] = made
            unknown.clear()

        async for txid in in_turns(txids):
            if (known := self._mined.get(txid)) is not None:
                found[txid] = known
            else:
                unknown.append(txid)
            if len(unknown) == _AT_ONCE:
                await ask()
        await ask()
        return found, frozenset(later)

    async def by_hand(self, txids: Iterable[str], hot: str, head: Block) -> dict[str, ByHand]:
        """The annotated transactions that are mined up to ``head``."""
        wanted = list(txids)
        found = {txid: known for txid in wanted if (known := self._by_hand.get(txid)) is not None}
        unknown = [txid for txid in wanted if txid not in found]
        mined, _ = await self.mined(unknown, head)
        for txid, made in await each(mined, self.client.transaction):
            if made is None:
                continue  # replaced meanwhile
            is_own = made.sender.lower() == hot.lower()
            is_to = (made.to or "").lower() == hot.lower()
            value = made.value if mined[txid].ok else 0
            found[txid] = ByHand(
                mined[txid],
                made.nonce if is_own else None,
                value if is_own and not is_to else 0,
                value if is_to and not is_own else 0,
            )
            if self.knows(txid):
                self._by_hand[txid] = found[txid]
        return found

    def _is_deep(self, receipt: Receipt, head: Block) -> bool:
        return head.number - receipt.block_number >= self.network.failed_after

    def _read(self, receipt: Receipt) -> MinedTransaction:
        """Return the cost of a transaction, None where a part of it is not known.

        The operator fee follows from the chain's release, which no receipt names.
        """
        lacks_l1 = self.network.l1_fee_oracle is not None and receipt.l1_fee is None
        cost = receipt.gas_used * receipt.gas_price + (receipt.l1_fee or 0)
        is_incomplete = lacks_l1 or receipt.has_operator_fee
        return MinedTransaction(receipt.block_number, receipt.ok, None if is_incomplete else cost)


async def each(items: Iterable[str], ask: Callable[[str], Awaitable[T]]) -> list[tuple[str, T]]:
    """Ask about each item, a bounded number at once; return the answers."""
    wanted: Sequence[str] = list(items)
    answers: list[tuple[str, T]] = []
    for at in range(0, len(wanted), _AT_ONCE):
        some = wanted[at : at + _AT_ONCE]
        # All have ended when the first failure is raised: no request outlives the call.
        said = await asyncio.gather(*(ask(item) for item in some), return_exceptions=True)
        for item, answer in zip(some, said, strict=True):
            if isinstance(answer, BaseException):
                raise answer
            answers.append((item, answer))
    return answers


_Events = dict[tuple[str, int], TokenTransfer]


class _ScannedEvents(Struct):
    """The events of blocks ``since`` to ``top``. ``touched``: their addresses, ours and others',
    that were not yet compared.

    Blocks above ``done`` are read again: of ``moves`` only the first ``deep`` stay, and ``young``
    has all others.
    """

    since: int
    done: Block | None = None
    top: Block | None = None
    moves: SpilledList[TokenTransfer] = field(default_factory=lambda: SpilledList(TokenTransfer))
    deep: int = 0
    young: _Events = field(default_factory=dict)
    touched: SpilledDict[str, None] = field(default_factory=lambda: SpilledDict(None))
    opening: int | None = None
    opening_asked: bool = False


class EvmReader:
    """Reads one network. ``client`` is open. Everything raises RpcFailure, ChainMoved and Unfit."""

    def __init__(
        self,
        network: EvmNetwork,
        client: EvmClient,
        memory: AuditMemory | None = None,
        progress: Progress = quiet,
    ) -> None:
        self._progress = progress
        self.network = network
        self._client = client
        self._span = WIDEST_LOG_RANGE
        self._memory: _ScannedEvents | None = None
        self._receipts = EvmReceipts(network, client, memory)

    async def head(self) -> Block:
        """The newest block, asked for before the books are copied.

        They then have each transaction of ours up to it, committed before it was published.
        """
        found = await self._client.chain_id()
        if found != self.network.chain_id:
            raise Unfit(
                f"the node of {self.network.name} is on chain {found}, not on"
                f" {self.network.chain_id}"
            )
        return await self._block(Tag.LATEST)

    @property
    def is_new(self) -> bool:
        """Whether nothing was read yet."""
        return self._memory is None

    async def catch_up(self, books: Books) -> None:
        """Read blocks that are far behind, so that the next audit reads a block whose state nodes
        keep.
        """
        if self._is_watched(books):
            head = await self.head()
            memory = await self._read_on(books, head)
            moved = _blocks(memory.moves)
            await self._receipts.mined(self._to_ask(moved, books), head)

    async def facts(self, books: Books, head: Block) -> EvmFacts | None:
        """Return a network's facts as of ``head``; None if the service has not scanned it."""
        if not self._is_watched(books) or books.evm_hot is None:
            return None
        missing = books.watched[self.network.name].upto - head.number
        if missing > self._young:
            raise ChainMoved(
                f"the node of {self.network.name} lags: it lacks the newest {missing} blocks that"
                " deposits were read from"
            )
        memory = await self._read_on(books, head)
        hot = books.evm_hot
        balances = SpilledDict[str, int](int)
        for address, _ in groupby(merge(memory.touched, [hot.lower()])):
            if books.is_own(address):
                balances[address] = await self._balance(address, head.number)
        nonce = await self._client.nonce(hot, head.number)
        ether = await self._client.ether(hot, head.number)
        opening = await self._opening(memory, hot)
        moved = _blocks(memory.moves)
        mined, waiting, forgotten = await self._transactions(moved, books, head)
        reported = books.annotations_on(self.network.name)
        by_hand = await self._receipts.by_hand(reported, hot, head)
        depth = await self._deposit_depth(head)
        ours = await self._ether(books, head, ether, mined, forgotten, by_hand)
        stale = await self._is_stale(books.watched[self.network.name])
        deepest = self._receipts.deepest(head)
        anchor = None if deepest is None else await self._block(deepest)
        await self._require_same(head)
        await self._receipts.keep(anchor)
        return EvmFacts(
            network=self.network.name,
            top=head.number,
            deposit_depth=depth,
            moves=memory.moves,
            balances=balances,
            opening=opening,
            nonce=nonce,
            mined=mined,
            waiting=waiting,
            stale=stale,
            annotated={txid: made.nonce for txid, made in by_hand.items()},
            ether=ours,
        )

    def accept(self) -> None:
        """Mark the events read as agreeing with the books: only later ones are compared again."""
        if self._memory is not None:
            self._memory.touched = SpilledDict(None)

    def _is_watched(self, books: Books) -> bool:
        return self.network.name in books.watched

    # --- events --------------------------------------------------------------------------------

    async def _read_on(self, books: Books, head: Block) -> _ScannedEvents:
        """Read the blocks that were not read yet, and the youngest ones again, up to ``head``."""
        memory = await self._kept(books)
        read = memory.since - 1 if memory.done is None else memory.done.number
        if memory.done is not None and head.number < read:
            raise ChainMoved(f"the node of {self.network.name} lacks block {read}: it lags")
        # Of nodes behind one address another may lag more: what was deep stays so.
        kept = min(head.number, max(head.number - self._young, read))
        memory.moves.cut(memory.deep)
        before, young = dict(memory.young), _Events()
        first = read + 1
        while first <= head.number:
            self._progress(
                f"reading {self.network.name}", first - memory.since, head.number - memory.since
            )
            last = min(first + self._span - 1, head.number)
            try:
                found = await self._moves(books.own_addresses, first, last)
            except (NodeError, TooLarge):
                # Nodes have no common error for "too many": try a narrow range.
                if first == last:
                    raise
                self._span = max(1, (last - first + 1) // 2)
                continue
            for key, move in found.items():
                was = before.pop(key, None)
                if was != move:
                    _touch(memory.touched, move, was)
                if move.block <= kept:
                    memory.moves.append(move)
                else:
                    young[key] = move
            first = last + 1
            busy = len(found) > _MANY
            self._span = max(1, self._span // 4) if busy else min(self._span * 2, _WIDEST_SPAN)
        done = await self._block(kept) if kept >= 0 else None
        await self._require_same(head)
        _touch(memory.touched, *before.values())
        memory.deep = len(memory.moves)
        memory.moves.extend(young.values())
        memory.young, memory.done, memory.top = young, done, head
        return memory

    @property
    def _young(self) -> int:
        """Return the number of blocks that a node which lags may lack."""
        return max(2, ceil(_LAG_SECONDS / self.network.block_seconds))

    async def _kept(self, books: Books) -> _ScannedEvents:
        """The events read before, if the last block that is not read again is on the chain."""
        memory = self._memory
        if memory is not None and await self._has(memory.done):
            if not await self._has(memory.top):
                await self._receipts.start_again()
            return memory
        self._memory = _ScannedEvents(since=books.watched[self.network.name].since)
        await self._receipts.start_again()
        return self._memory

    async def _moves(self, ours: Iterable[str], first: int, last: int) -> _Events:
        found = _Events()
        topic = "0x" + usdc.TRANSFER_TOPIC.hex()
        for some in batches(ours, _MOST_ADDRESSES):
            words = ["0x" + usdc.address_word(address).hex() for address in some]
            for topics in ([topic, words], [topic, None, words]):
                found.update(await self._logs(topics, first, last))
        return found

    async def _logs(self, topics: list[Any], first: int, last: int) -> _Events:
        params = {
            "address": self.network.token,
            "topics": topics,
            "fromBlock": hex(first),
            "toBlock": hex(last),
        }
        try:
            (block,), items = await self._client.with_blocks([last], (_GET_LOGS, [params]))
        except BatchRefused:
            items = await self._client.rpc.read(_GET_LOGS, [params])
        else:
            if block is None:
                raise ChainMoved(f"the node of {self.network.name} lacks block {last}: it lags")
        name = self._client.rpc.endpoint.name
        events = read_answer(list[_Event], name, _GET_LOGS, items)
        moves = (_move(item, name) for item in events if not item.removed)
        # Anyone can make an event of 0 units in anybody's name.
        return {key: move for key, move in moves if move.units > 0}

    # --- state ---------------------------------------------------------------------------------

    async def _balance(self, address: str, at: int) -> int:
        call = EvmCall(self.network.token, usdc.balance_of(address))
        result = await self._client.call(call, at)
        try:
            return usdc.read_uint(result)
        except ValueError as error:
            raise Unfit(
                f"{self.network.token} on {self.network.name} is no token at block {at}"
            ) from error

    async def _opening(self, memory: _ScannedEvents, hot: str) -> int | None:
        """The hot wallet's USDC before the first block; None when the node has forgotten."""
        if not memory.opening_asked:
            try:
                before = memory.since - 1
                memory.opening = await self._balance(hot, before) if before >= 0 else 0
            except (NodeError, Unfit):
                memory.opening = None
            memory.opening_asked = True
        return memory.opening

    async def _deposit_depth(self, head: Block) -> int:
        """The depth at which the service must have confirmed a deposit."""
        depth = self.network.thresholds[-1].depth
        if isinstance(depth, int):
            return depth
        block = await self._client.block(Tag(depth.value))
        lag = head.number + 1 if block is None else head.number - block.number
        # The service saw that block become final a while after it was.
        return max(lag, 0) + 1 + 3 * self.network.settled_after

    # --- transactions --------------------------------------------------------------------------

    def _to_ask(self, moved: Mapping[str, int], books: Books) -> Iterator[str]:
        """Yield the recorded transactions whose receipts are needed.

        Without an event, to see whether they are mined; since the opening balance, all that are
        mined, for their cost.
        """
        opening = books.openings.get(self.network.name)
        for payment in books.payments_on(self.network.name):
            known = [txid for txid in payment.txids if txid in moved or self._receipts.knows(txid)]
            if not known:
                yield from payment.txids
            elif _costs(payment, opening) or not any(txid in moved for txid in known):
                yield from known

    async def _transactions(
        self, moved: Mapping[str, int], books: Books, head: Block
    ) -> tuple[SpilledDict[str, MinedTransaction], frozenset[str], SpilledDict[str, None]]:
        """Return the recorded transactions that are mined, as far as asked, those that wait, and
        those with an event since the opening balance without a receipt: nodes forget receipts
        before they forget events.
        """
        mined, later = await self._receipts.mined(self._to_ask(moved, books), head)
        opening, left = books.openings.get(self.network.name), list[str]()
        forgotten = SpilledDict[str, None](None)
        async for payment in in_turns(books.payments_on(self.network.name)):
            is_found = False
            for txid in payment.txids:
                receipt = mined.get(txid)
                is_known = receipt is not None and (
                    opening is None or receipt.block > opening.block
                )
                block = None if is_known else moved.get(txid)
                is_found |= receipt is not None or block is not None
                if opening is not None and block is not None and block > opening.block:
                    forgotten[txid] = None
            if not is_found:
                left += payment.txids
        known = await each((txid for txid in left if txid not in later), self._client.transaction)
        pool = {txid for txid, made in known if made is not None}
        return mined, frozenset(pool.union(later.intersection(left))), forgotten

    async def _ether(
        self,
        books: Books,
        head: Block,
        balance: int,
        mined: Mapping[str, MinedTransaction],
        forgotten: Mapping[str, None],
        by_hand: Mapping[str, ByHand],
    ) -> Ether | None:
        """Return the hot wallet's ether, and the transactions that moved it since its opening
        balance.
        """
        opening = books.openings.get(self.network.name)
        if opening is None:
            return None
        block = await self._client.block(opening.block)
        if opening.block > head.number or block is None or block.hash != opening.hash:
            return Ether(balance, replaced=True)
        since = {txid: made for txid, made in by_hand.items() if made.mined.block > opening.block}
        own = {txid: made for txid, made in since.items() if made.nonce is not None}
        spent, cost_unknown = SpilledDict[str, int](int), SpilledDict[str, None](None)

        def add(txid: str, cost: int | None, sent: int = 0) -> None:
            if cost is None:
                cost_unknown[txid] = None
            else:
                spent[txid] = cost + sent

        async for txid, made in in_turns(mined.items()):
            if made.block > opening.block and txid not in own:
                add(txid, made.cost)
        for txid, annotated in own.items():
            add(txid, annotated.mined.cost, annotated.sent)
        async for txid in in_turns(forgotten):
            if txid not in own:
                add(txid, None)
        return Ether(
            balance,
            spent=spent,
            came={txid: made.came for txid, made in since.items() if made.came},
            done=frozenset(txid for txid, made in since.items() if made.mined.ok),
            cost_unknown=cost_unknown,
        )

    # --- plumbing ------------------------------------------------------------------------------

    async def _block(self, at: Tag | int) -> Block:
        block = await self._client.block(at)
        if block is None:
            raise ChainMoved(f"the node of {self.network.name} has no block {at}")
        return block

    async def _has(self, block: Block | None) -> bool:
        """Whether a block is on the chain now."""
        now = None if block is None else await self._client.block(block.number)
        return block is not None and now is not None and now.hash == block.hash

    async def _is_stale(self, watched: Watched) -> bool:
        """Whether the last block that the service scanned left the chain."""
        block = await self._client.block(watched.upto)
        return block is None or block.hash != watched.hash

    async def _require_same(self, head: Block) -> None:
        if (await self._block(head.number)).hash != head.hash:
            raise ChainMoved(f"block {head.number} of {self.network.name} was replaced")


def _costs(payment: PaymentEntry, opening: OpeningEntry | None) -> bool:
    """Whether its cost came after the opening balance."""
    return opening is not None and payment.nonce is not None and payment.nonce >= opening.nonce


def _blocks(moves: Iterable[TokenTransfer]) -> SpilledDict[str, int]:
    """Return the block of each transaction with an event."""
    return SpilledDict(int, ((move.txid, move.block) for move in moves))


def _touch(touched: SpilledDict[str, None], *moves: TokenTransfer | None) -> None:
    for move in moves:
        if move is not None:
            touched[move.source] = touched[move.recipient] = None


def _move(item: _Event, node: str) -> tuple[tuple[str, int], TokenTransfer]:
    """A log as an event of the token. Raises BadAnswer."""
    try:
        event = usdc.read_transfer(item.topics, item.data)
    except ValueError as error:
        problem = "the answer has an event that is not the token's Transfer"
        raise BadAnswer(node, _GET_LOGS, problem) from error
    txid = item.txid.lower()
    move = TokenTransfer(txid, event.sender.lower(), event.to.lower(), event.units, item.block)
    return (txid, item.index), move
