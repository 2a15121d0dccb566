"""The inputs of a deposit scan of one EVM network: Transfer events, forks, pending transactions.

Blocks up to which every deposit is committed are recorded; the newest that is still on the chain is
the fork. A pending transaction gives a deposit its first-seen time and nothing else: its sender
may still replace it. A node that shows no pending block fails no scan; the block's time counts
then.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Annotated, Any, Final, NamedTuple

import structlog

from rpcsvc.clock import Clock
from rpcsvc.domain.money import MAX_UNITS
from rpcsvc.domain.usdc import (
    TRANSFER_TOPIC,
    TransferEvent,
    read_paying_call,
    read_transfer,
)
from rpcsvc.settlement.onchain.daemon_rpc import (
    BadAnswer,
    ChainUnusable,
    JsonObject,
    RpcFailure,
    named,
    read_answer,
)
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.node import EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import (
    Block,
    Data,
    Hash,
    Log,
    LogFilter,
    LogRange,
    Receipt,
    read_quantity,
)
from rpcsvc.settlement.onchain.evm.records import (
    CursorMove,
    EvmCursor,
    PoolSighting,
)

log = structlog.get_logger(__name__)

_LOGS = "eth_getLogs"
_RECEIPT = "eth_getTransactionReceipt"
# The second line behind LogRange.proven: a proxy may divide a batch over nodes, of which some lag.
_NODE_LAG_SECONDS: Final = 30
_WIDEST_OVERLAP: Final = 256
_METHOD: Final = "eth_getBlockByNumber"
_SECONDS: Final = 3.0
# A pending block is large: it is not asked for more often than that.
_POLL_MS: Final = 1_000
# A node that refused, or had too much to say, is asked again after that; or when it was lost. So is
# one that answers with a mined block so many times in a row: some networks show no pool, and of
# several nodes behind one address one that lags answers so for a while.
_PAUSE_MS: Final = 60_000
_MINED_IN_A_ROW: Final = 10
_CLEANING_MS: Final = 3_600_000
_KEEP_MS: Final = 24 * 3_600_000
# A block of 60 million gas holds fewer that move a token. To read one takes some 16 microseconds,
# and nothing else is done meanwhile.
_MOST_CALLS: Final = 2_000
# Nobody's payments keep those of others waiting: each order's are bounded permanently.
MOST_PER_LOOK: Final = 256
MOST_PER_ADDRESS: Final = 8


class Paid(NamedTuple):
    """The payment of one event to one of our addresses, in USDC units."""

    address_index: int
    address: str
    units: int
    sender: str


class EventReader:
    """Reads the events of one network's token. ``wanted``: the filter for the node."""

    def __init__(self, connection: EvmConnection, ledger: EvmDepositLedger) -> None:
        self._node = connection.client.rpc.endpoint.name
        self._network = connection.network
        self._ledger = ledger
        self.wanted = LogFilter(connection.network.token, (TRANSFER_TOPIC,))

    async def paying(self, piece: LogRange) -> list[Log]:
        """The events of some blocks that are deposits. All others are excluded by their bytes.

        Raises BadAnswer; ChainUnusable when the address pool was not loaded.
        """
        recipients = [self._recipient(item, piece) for item in piece.logs]
        ours = {item.address.lower() for item in await self._ledger.ours(set(recipients))}
        logs = [item for item, to in zip(piece.logs, recipients, strict=True) if to in ours]
        return [item for item, _ in await self._payments(logs, _LOGS)]

    async def paid_by(self, receipt: Receipt) -> dict[int, Paid]:
        """The payments of a transaction to us, by the position of the event within it.

        Raises BadAnswer; ChainUnusable when the address pool was not loaded.
        """
        indices = [item.log_index for item in receipt.logs]
        if indices != sorted(set(indices)):
            raise self._bad(_RECEIPT, "has events in disorder")
        if not receipt.ok:
            return {}
        events = [item for item in receipt.logs if self._is_transfer(item)]
        paid = await self._payments(events, _RECEIPT)
        return {receipt.position_of(item.log_index): what for item, what in paid}

    def _recipient(self, item: Log, piece: LogRange) -> str:
        """Return the recipient of an event, in lower case."""
        asked = piece.first <= item.block_number <= piece.last and self._is_transfer(item)
        if not asked or len(item.topics) != 3:
            raise self._bad(_LOGS, f"has an event of {item.txid} that was not asked for")
        return "0x" + item.topics[2][12:].hex()

    def _is_transfer(self, item: Log) -> bool:
        return item.address == self._network.token and item.topics[:1] == (TRANSFER_TOPIC,)

    async def _payments(self, logs: Iterable[Log], method: str) -> list[tuple[Log, Paid]]:
        """The Transfer events that are deposits, each with its payment.

        Leaves out the service's own transfers, and transfers of 0 units, which anyone may send in
        any number.
        """
        events = [(item, self._event(item, method)) for item in logs]
        if not events:
            return []
        parties = {name for _, event in events for name in (event.sender, event.to)}
        ours = {item.address: item.index for item in await self._ledger.ours(parties)}
        own = {*ours, await self._hot_address()}
        paid = []
        for item, event in events:
            index = ours.get(event.to)
            if index is None or event.sender in own or not self._is_credible(item, event):
                continue
            paid.append((item, Paid(index, event.to, event.units, event.sender)))
        return paid

    def _is_credible(self, item: Log, event: TransferEvent) -> bool:
        if event.units > MAX_UNITS:
            # More USDC than exists: the token is another one, or the node lies.
            log.error("evm_deposit_refused", network=self._network.name, txid=item.txid)
        return 0 < event.units <= MAX_UNITS

    def _event(self, item: Log, method: str) -> TransferEvent:
        try:
            return read_transfer(item.topics, item.data)
        except ValueError as error:
            raise self._bad(method, f"has a broken event of {item.txid}") from error

    async def _hot_address(self) -> str:
        wallet = await self._ledger.wallet()
        if wallet is None:
            raise ChainUnusable("the mnemonic is not recorded yet: the address pool was not loaded")
        return wallet.hot_address

    def _bad(self, method: str, problem: str) -> BadAnswer:
        return BadAnswer(self._node, method, f"the answer {problem}")


class ForkFinder:
    """Finds the block of one network from which on blocks have to be read."""

    def __init__(self, connection: EvmConnection, ledger: EvmDepositLedger) -> None:
        self._connection = connection
        self._network = connection.network
        self._ledger = ledger

    async def newest(self, head: Block) -> EvmCursor:
        """The newest block that was scanned; at the first start, the one to begin after."""
        newest = await self._ledger.newest_cursor(self._network.name)
        return (await self._begin(head))[0] if newest is None else newest

    async def find(self, head: Block) -> EvmCursor | None:
        """The newest block that was scanned and is still on the chain.

        None when this node lags and has not got there yet. Raises ChainUnusable when it is far
        behind, or has none of the blocks.
        """
        newest = await self.newest(head)
        if newest.hash in (head.hash, head.parent):
            return newest
        known = await self._ledger.cursors(self._network.name)
        within = [item for item in known if item.number <= head.number]
        fork = await self._newest_on_chain([item for item in within if may_precede(item, head)])
        if len(within) < len(known) and (not within or fork == within[0]):
            self._require_near(newest.number - head.number)
            return None
        if fork is None:
            raise ChainUnusable(
                f"the node of {self._network.name} is on another chain: it has none of the"
                f" {len(known)} blocks that deposits were read up to, from {known[-1].number} to"
                f" {newest.number}"
            )
        if fork != newest:
            log.warning("evm_blocks_replaced", network=self._network.name, above=fork.number)
        return fork

    async def _newest_on_chain(self, known: Sequence[EvmCursor]) -> EvmCursor | None:
        """Return the newest of ``known``, newest first, that is on the chain, by halves.

        A block is on the chain only if all before it are. The newest is tried first: mostly it is
        there.
        """
        low, high = 0, len(known)
        middle = 0
        while low < high:
            block = await self._connection.client.block(known[middle].number)
            if block is not None and block.hash == known[middle].hash:
                high = middle
            else:
                low = middle + 1
            middle = (low + high) // 2
        return known[low] if low < len(known) else None

    def _require_near(self, missing: int) -> None:
        """A node may lag a little. Raises ChainUnusable when it lags further."""
        if missing > self.overlap:
            raise ChainUnusable(
                f"the node of {self._network.name} lacks the newest {missing} blocks that deposits"
                " were read from: it is still synchronising, or was reset"
            )
        log.info("evm_node_lagged", network=self._network.name, blocks=missing)

    async def _begin(self, head: Block) -> list[EvmCursor]:
        """The first start: from a block on, and an older one in case that is replaced."""
        start = self._network.start_block
        first = head.number if start is None else max(0, start - 1)
        cursors = await self.cursors_at(first, head)
        await self._ledger.begin(self._network.name, cursors)
        return cursors

    async def cursors_at(self, number: int, head: Block) -> list[EvmCursor]:
        """A block to go on after, and an older one in case that is replaced.

        Raises ChainUnusable when the node has none there.
        """
        numbers = sorted({number, max(0, number - self._network.tracked_blocks)}, reverse=True)
        cursors = []
        for at in numbers:
            block = await self._connection.client.block(at)
            if block is None:
                raise ChainUnusable(
                    f"the node of {self._network.name} has no block {at} to begin at; its"
                    f" newest is {head.number}"
                )
            cursors.append(EvmCursor(at, block.hash))
        return cursors

    @property
    def overlap(self) -> int:
        """Return the number of blocks to read again, which a lagging node may lack."""
        return max(2, min(_WIDEST_OVERLAP, ceil(_NODE_LAG_SECONDS / self._network.block_seconds)))


def may_precede(item: EvmCursor, head: Block) -> bool:
    """Whether a block can be on the chain of ``head``, by what that says of itself."""
    known = {head.number: head.hash, head.number - 1: head.parent}
    return item.number <= head.number and known.get(item.number, item.hash) == item.hash


class PendingPayment(NamedTuple):
    """A call of the token that would pay ``to``, in lower case."""

    txid: str
    to: str


class PendingBlock(NamedTuple):
    """The block that ``node`` would mine next. ``number``: any JSON; transactions as JSON
    has them.
    """

    node: str
    number: Any
    transactions: list[JsonObject]


@dataclass(frozen=True, slots=True)
class _PendingCall:
    txid: Annotated[Hash, named("hash")]
    data: Annotated[Data, named("input")]


class PoolWatch:
    """Reads one network's pending blocks. Polls must not overlap."""

    def __init__(self, connection: EvmConnection, ledger: EvmDepositLedger, clock: Clock) -> None:
        self._connection = connection
        self._network = connection.network
        self._ledger = ledger
        self._clock = clock
        self._cleaned_at: int | None = None
        self._refused: tuple[int, int] | None = None
        self._is_reported = False
        self._polled_at: int | None = None
        self._mined_in_a_row = 0

    async def poll(self, head: Block) -> None:
        """Note payments that are about to be mined after ``head``. Raises errors.Unavailable."""
        now = self._clock.now_ms()
        await self._clean(now)
        if self._is_postponed(now) or not await self._ledger.is_awaiting(self._network.name, now):
            return
        self._polled_at = now
        try:
            payments = await self._payments(head)
        except RpcFailure as failure:
            self._postpone(failure)
            return
        self._refused = None
        if self._is_reported:
            self._is_reported = False
            log.info("evm_pool_observed", network=self._network.name)
        await self._note(payments)

    async def first_seen(self, txid: str, address_index: int) -> tuple[int, ...]:
        """Return when a payment was seen before it was mined, in ms; empty when it was not."""
        found = await self._ledger.pool_sighting(self._network.name, txid)
        if found is None or found.address_index != address_index:
            return ()
        return (found.first_seen_at,)

    async def _payments(self, head: Block) -> Mapping[str, str]:
        """Return the recipients by transaction of the pending block. Raises RpcFailure."""
        client = self._connection.client
        answer = await client.pending_block(seconds=_SECONDS)
        if answer is None:
            return {}
        block = read_pending(client.rpc.endpoint.name, answer)
        if _is_mined(block, head):
            self._mined_in_a_row += 1
            return {}
        self._mined_in_a_row = 0
        return dict(pending_payments(block, self._network.token))

    async def _note(self, payments: Mapping[str, str]) -> None:
        """Record new payments, up to a bound for the scan, and one for each address."""
        if not payments:
            return
        name, now = self._network.name, self._clock.now_ms()
        awaiting = await self._ledger.awaiting(name, set(payments.values()), now)
        indices = {item.address.lower(): item.index for item in awaiting}
        ours = {txid: indices[to] for txid, to in payments.items() if to in indices}
        known = await self._ledger.pool_sightings(name, ours) if ours else set()
        new = {txid: index for txid, index in ours.items() if txid not in known}
        if not new:
            return
        found = await self._within_bounds(new, now)
        if found:
            await self._ledger.put_pool_sightings(found)

    async def _within_bounds(self, new: Mapping[str, int], now: int) -> list[PoolSighting]:
        counts = await self._ledger.pool_counts(self._network.name, set(new.values()))
        found = list[PoolSighting]()
        for txid, index in new.items():
            counts[index] = counts.get(index, 0) + 1
            if counts[index] <= MOST_PER_ADDRESS and len(found) < MOST_PER_LOOK:
                found.append(PoolSighting(self._network.name, txid, index, now))
        return found

    async def _clean(self, now: int) -> None:
        """Forget sightings that are of no use any more, once an hour."""
        if self._cleaned_at is None or abs(now - self._cleaned_at) >= _CLEANING_MS:
            await self._ledger.forget_pool_sightings(self._network.name, now - _KEEP_MS)
            self._cleaned_at = now

    def _is_postponed(self, now: int) -> bool:
        """Whether the node was asked, or refused, a short time ago, and was not lost since."""
        if self._polled_at is not None:
            shows_none = self._mined_in_a_row >= _MINED_IN_A_ROW
            if 0 <= now - self._polled_at < (_PAUSE_MS if shows_none else _POLL_MS):
                return True
        if self._refused is None:
            return False
        at, failures = self._refused
        return failures == self._connection.failures and abs(now - at) < _PAUSE_MS

    def _postpone(self, failure: RpcFailure) -> None:
        self._refused = (self._clock.now_ms(), self._connection.failures)
        if not self._is_reported:
            self._is_reported = True
            log.warning("evm_pool_lookup_failed", network=self._network.name, reason=str(failure))


def pending_payments(block: PendingBlock, token: str) -> Iterator[PendingPayment]:
    """The calls of a token in a block with whole transactions that would pay somebody.

    Raises BadAnswer for a call without hash or input.
    """
    calls = [item for item in block.transactions if _target(item) == token.lower()]
    for item in calls[:_MOST_CALLS]:
        call = read_answer(_PendingCall, block.node, _METHOD, item)
        paying = read_paying_call(call.data)
        # Anyone may move nothing from anyone to anyone.
        if paying is not None and 0 < paying.units <= MAX_UNITS:
            yield PendingPayment(call.txid, paying.to)


def read_pending(node: str, answer: Any) -> PendingBlock:
    """A pending block with whole transactions. Raises BadAnswer."""
    block = read_answer(JsonObject, node, _METHOD, answer)
    transactions = read_answer(list[JsonObject], node, _METHOD, block.get("transactions", []))
    return PendingBlock(node, block.get("number"), transactions)


def _target(item: JsonObject) -> str | None:
    """Return the contract that a transaction calls, in lower case; None when it makes one."""
    to = item.get("to")
    return to.lower() if isinstance(to, str) else None


def _is_mined(block: PendingBlock, head: Block) -> bool:
    """Whether the "pending" block is mined already, as on a network that shows no pool."""
    try:
        return read_quantity(block.number) <= head.number
    except ValueError:
        return False  # some nodes give a pending block no number


class NotReread(Exception):
    """The reason why nothing is read again, for the operator."""


async def reread(connection: EvmConnection, ledger: EvmDepositLedger, first: int) -> int:
    """Move the cursor before block ``first``; the newest block that was read before.

    Raises NotReread, RpcFailure, ChainUnusable and errors.Unavailable: then nothing was changed.
    """
    name = connection.network.name
    if await ledger.newest_cursor(name) is None:
        raise NotReread(f"No deposits were read on {name} yet: the service begins at its start.")
    head = await connection.check()
    forks = ForkFinder(connection, ledger)
    newest = await forks.find(head)
    if newest is None:
        raise NotReread(f"The node of {name} lags: it lacks blocks that were read. Try again.")
    if not 1 <= first <= newest.number:
        raise NotReread(
            f"received block {first}; allowed: 1 to {newest.number}, up to which deposits on"
            f" {name} were read. What comes after is read by the service itself."
        )
    # A node that has thrown old events away would keep the service from going on.
    await connection.client.logs(EventReader(connection, ledger).wanted, first, first)
    cursors = await forks.cursors_at(first - 1, head)
    await ledger.begin(name, cursors)
    to, oldest = cursors[0], cursors[-1].number
    await ledger.acknowledge([], CursorMove(name, to, to.number, oldest))
    return newest.number
