"""Scans one network for deposits of USDC: Transfer events of the token, block range by block range.

A pass reads the events since the cursor, and a little before it; one database query tells which pay
us. Its cost depends on blocks and on deposits that are new, moved or due, never on the number of
orders. A deposit is one event, and exists while its block is on the chain. After a reorganisation,
blocks above the fork are read again, and deposits that are not found again are looked up one by
one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Final

import structlog
from msgspec import Struct, field
from msgspec.structs import replace

from rpcsvc.clock import Clock
from rpcsvc.domain.order import DepositKey, DepositState
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.wallets import DepositSighting
from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.node import WIDEST_LOG_RANGE, EvmClient, EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import Block, LogRange
from rpcsvc.settlement.onchain.evm.records import BlockPoint, CursorMove, EvmCursor, EvmDeposit
from rpcsvc.settlement.onchain.evm.scan import (
    EventReader,
    ForkFinder,
    Paid,
    PoolWatch,
    may_precede,
)
from rpcsvc.settlement.onchain.thresholds import DepthTag, tags, threshold_of

log = structlog.get_logger(__name__)

# How many ranges of blocks one pass reads at most: a service that was away for long catches up
# over several passes, and other work goes on between them.
_RANGES_PER_PASS: Final = 8
# To read one takes some 20 microseconds, and nothing else is done meanwhile.
_MANY_EVENTS: Final = 4000
_NOBODY: Final = "0x" + "0" * 40
# A deposit that a reorganisation took is mostly back in one of the next blocks.
_RETURN_MS: Final = 60_000


class ScanPass(Struct):
    """State of one pass. ``reached``: the last block up to which all events were read.

    ``stored`` are the deposits as the database has them, ``totals`` their units in blocks, by
    address. ``settled`` is False when the chain changed while it was looked at: the next pass
    begins where this one did. ``missing`` are the transactions that the node did not have, and had
    at the pass before. ``follows``: whether the nodes that list events have the block that was read
    before; None: that is not shown. ``listed``: the transactions with deposits that they have
    listed, with their blocks' hashes.
    """

    client: EvmClient
    fork: EvmCursor
    reached: EvmCursor
    now_ms: int
    settled: bool = True
    deposits: dict[DepositKey, EvmDeposit] = field(default_factory=dict)
    stored: dict[DepositKey, EvmDeposit] = field(default_factory=dict)
    keys: dict[str, set[DepositKey]] = field(default_factory=dict)
    totals: Counter[int] = field(default_factory=Counter)
    blocks: dict[int, Block | None] = field(default_factory=dict)
    missing: set[str] = field(default_factory=set)
    follows: bool | None = None
    listed: set[tuple[str, str]] = field(default_factory=set)

    def load(self, known: Iterable[EvmDeposit]) -> None:
        """Add the database's deposits that are not here already."""
        for item in known:
            self.stored.setdefault(item.key, item)
            self.put(self.deposits.get(item.key, item))

    def put(self, item: EvmDeposit) -> None:
        """Take in a deposit as it is now."""
        before = self.deposits.get(item.key)
        if before is not None and before.block_number is not None:
            self.totals[before.address_index] -= before.units
        if item.block_number is not None:
            self.totals[item.address_index] += item.units
        self.deposits[item.key] = item
        self.keys.setdefault(item.txid, set()).add(item.key)

    def of(self, txid: str) -> list[EvmDeposit]:
        """The deposits that a transaction made, or had made."""
        return [self.deposits[key] for key in self.keys.get(txid, ())]

    def count_read(self, piece: LogRange) -> bool:
        """Count the blocks of a range as read, as far as the node is shown to have them.

        Return whether these are all of them. A node on another branch proves nothing.
        """
        proven = piece.proven
        if piece.follows is not None or self.reached == self.fork:
            self.follows = piece.follows
        if proven is None:
            return False
        known = self.blocks.get(proven.number)
        if known is not None and known.hash != proven.hash:
            return False
        if proven.number > self.reached.number:
            self.reached = EvmCursor(proven.number, proven.hash)
        return proven.number == piece.last

    async def block(self, number: int) -> Block | None:
        """The block of that number now; asked once a pass."""
        if number not in self.blocks:
            self.blocks[number] = await self.client.block(number)
        return self.blocks[number]

    async def still_has(self, item: EvmDeposit) -> bool:
        """Whether a deposit's block is on the chain, whose events tell of blocks that were read.

        Clears ``settled`` when the node does not know a block of that number.
        """
        if item.block_number is None or item.block_hash is None:
            return False
        if self.has_read(item.block_number):
            return (item.txid, item.block_hash) in self.listed
        block = await self.block(item.block_number)
        if block is None:
            self.settled = False
        return block is not None and block.hash == item.block_hash

    def is_joined(self, head: Block) -> bool:
        """Whether the blocks that were read are shown to be on the chain of ``head``."""
        return head.hash in (self.fork.hash, self.reached.hash) or head.parent == self.fork.hash

    def has_read(self, number: int) -> bool:
        """Whether this pass has all events of a block, of a chain that has the fork."""
        return self.fork.number < number <= self.reached.number


class EvmDepositScanner:
    """Looks for deposits on one network, pass by pass. Passes must not overlap.

    ``problem`` says, until a pass succeeds, why the last did not; None: it did. The connection's
    own is cleared by its next check, which does not know what was read before.
    ``complete_until``: when the last scan began (ms), if it has shown all deposits until then.
    ``scanned_height``: the newest block up to which all deposits are committed; None: not known.
    ``is_quiet``: the last scan was complete, no deposit waits for blocks or to be recorded, and a
    reorganisation took none lately.
    """

    def __init__(self, connection: EvmConnection, ledger: EvmDepositLedger, clock: Clock) -> None:
        self._connection = connection
        self._client = connection.client
        self._network = connection.network
        self._ledger = ledger
        self._clock = clock
        self._events = EventReader(connection, ledger)
        self._forks = ForkFinder(connection, ledger)
        self._pool = PoolWatch(connection, ledger, clock)
        self._span = WIDEST_LOG_RANGE
        self._height = -1
        self._recorded_height = -1
        # The newest block up to which each deposit on record was compared with the chain.
        self._compared_height = -1
        # A late node may have said after a start which blocks are still there.
        self._has_compared_all = False
        self._tagged: Mapping[DepthTag, int] = {}
        self._recorded_tagged: Mapping[DepthTag, int] = {}
        self._missing: Set[str] = frozenset()
        self._next: CursorMove | None = None
        self.problem: str | None = "not started"
        self.complete_until: int | None = None
        self.scanned_height: int | None = None
        self.is_quiet = False
        self._is_unproven = False
        self._removed_at: int | None = None

    async def observe(self) -> list[DepositSighting]:
        """Deposits whose state is not the one acknowledged last. Raises errors.Unavailable.

        Of a long stretch of blocks it reads a part; the next pass goes on.
        """
        self._next, self.complete_until, self.is_quiet = None, None, False
        try:
            with self._connection.watched():
                found = await self._observe()
        except Unavailable as error:
            self.problem = self._connection.problem or error.message
            raise
        except Exception as error:
            self._next = None
            raise self._faulty(error) from error
        self.problem = None
        return found

    def _faulty(self, error: Exception) -> Unavailable:
        """A fault of the service itself is one of this network alone. Said once: passes go on."""
        name = self._network.name
        problem = f"the deposit scan of {name} has failed ({type(error).__name__})"
        if problem != self.problem:
            log.error("deposit_scan_failed", network=name, exc_info=error)
        self.problem = problem
        return Unavailable(f"Deposits on {name} can't be seen right now. Try again later.")

    async def acknowledge(self, sightings: Sequence[DepositSighting]) -> None:
        """Record committed deposits, and move the cursor to the block that was scanned.

        Unacknowledged deposits stay in the database and are shown again.
        """
        states = [(item.key, item.state) for item in sightings]
        move, self._next = self._next, None
        await self._ledger.acknowledge(states, move)
        if move is not None:
            self.scanned_height = move.to.number

    async def confirmations(self, key: DepositKey, height: int | None = None) -> int:
        """The deposit's confirmations at the last scan, or when the newest block is at ``height``,
        its own block included; 0 when it is gone, or that scan did not show its block on the chain.

        A scan that is under way counts once the removals that it found are on record. One that
        found blocks replaced, and was not given all since, shows none of those above its fork. A
        replica that scans nothing gives the height, and tells what is on record.
        """
        if height is not None:
            number = await self._block_of(key)
            return 0 if number is None else max(0, height - number + 1)
        # Read first: a deposit that is newer is never deeper.
        height, compared = self._recorded_height, self._compared_height
        number = await self._block_of(key)
        return 0 if number is None or number > compared else max(0, height - number + 1)

    async def is_final(self, key: DepositKey) -> bool:
        """Return whether the deposit was as deep at the last scan as the last threshold asks.

        Not while that scan did not show that its block is on the chain.
        """
        height, tagged = self._recorded_height, self._recorded_tagged
        compared = self._compared_height
        number = await self._block_of(key)
        final = self._network.thresholds[-1].depth
        return number is not None and number <= compared and _is_at(final, number, height, tagged)

    async def _block_of(self, key: DepositKey) -> int | None:
        """Return the block of a deposit; None when it is gone, or was missing at the last scan."""
        found = await self._ledger.deposit(key)
        return None if found is None or key.txid in self._missing else found.block_number

    # --- one pass ------------------------------------------------------------------------------

    async def _observe(self) -> list[DepositSighting]:
        began = self._clock.now_ms()
        head = await self._connection.head()
        await self._pool.poll(head)
        scanned = await self._scanned(head)
        if scanned is None:
            return []
        await self._rise(scanned, head)
        await self._look_up_lost(scanned)
        states = {key: await self._state(item, scanned) for key, item in scanned.deposits.items()}
        await self._remember(scanned, states)
        self._missing, self._recorded_height = scanned.missing, self._height
        self._recorded_tagged = self._tagged
        if scanned.follows is False:
            self._compared_height = -1
        elif scanned.is_joined(head):
            compared = scanned.reached if scanned.settled else scanned.fork
            self._compared_height = compared.number
            self._has_compared_all |= scanned.settled
        await self._plan_move(scanned)
        has_all = scanned.reached.number >= head.number
        if scanned.settled and has_all and self._connection.stall() is None:
            self.complete_until, self._is_unproven = began, False
            self.is_quiet = self._is_calm(scanned, states)
        return [
            _sighting(item, states[key])
            for key, item in sorted(scanned.deposits.items())
            if states[key] is not item.acknowledged and key.txid not in scanned.missing
        ]

    def _is_calm(self, scanned: ScanPass, states: Mapping[DepositKey, DepositState]) -> bool:
        if DepositState.REMOVED in states.values():
            self._removed_at = scanned.now_ms
        since = self._removed_at
        return (since is None or abs(scanned.now_ms - since) >= _RETURN_MS) and all(
            state is DepositState.CONFIRMED and state is scanned.deposits[key].acknowledged
            for key, state in states.items()
        )

    # --- events --------------------------------------------------------------------------------

    async def _scanned(self, head: Block) -> ScanPass | None:
        """Read new blocks; None when the node lags.

        Of several nodes behind one address, one may have blocks that the others have replaced: the
        one that lists events has to have the block that was read last, or the fork is looked for.
        """
        newest = await self._forks.newest(head)
        if newest.number < head.number and may_precede(newest, head):
            scanned = await self._begin(newest, head)
            try:
                await self._scan(scanned, head)
            except RpcFailure as failure:
                # Blocks may have been replaced all the same; the scan after the fork raises it.
                log.info("evm_scan_repeated", network=self._network.name, reason=str(failure))
            else:
                if scanned.follows:
                    return scanned
        fork = await self._forks.find(head)
        if fork is None:
            return None
        scanned = await self._begin(fork, head)
        await self._scan(scanned, head)
        scanned.settled = scanned.follows is not False
        return scanned

    async def _begin(self, fork: EvmCursor, head: Block) -> ScanPass:
        self.scanned_height = fork.number
        self._compared_height = min(self._compared_height, fork.number)
        scanned = ScanPass(self._client, fork, fork, self._clock.now_ms())
        scanned.blocks[head.number] = head
        scanned.load(await self._ledger.deposits_to_watch(self._network.name, fork.number))
        return scanned

    async def _scan(self, scanned: ScanPass, head: Block) -> None:
        """Read new blocks, as many as one pass does, and a few before them.

        Blocks that the node is not shown to have are read again by the next pass.
        """
        if scanned.fork.number >= head.number:
            return
        first, news = max(0, scanned.fork.number + 1 - self._forks.overlap), 0
        after: BlockPoint | None = None
        if scanned.fork.hash != head.parent or head.number - first >= self._span:
            after = BlockPoint(scanned.fork.number, scanned.fork.hash)
        while first <= head.number and news < _RANGES_PER_PASS:
            last = min(first + self._span - 1, head.number)
            # Asked for before its events. The cursor gets this hash, so that the next pass notices
            # if these blocks are replaced while their events are read.
            await scanned.block(last)
            wanted = self._events.wanted
            async for piece in self._client.scan(wanted, first, last, span=self._span, after=after):
                # Without ``after``, a node that has the newest block has the one before it.
                has_head = piece.proven == BlockPoint(head.number, head.hash)
                if has_head or (piece.follows and after is not None):
                    await self._read(scanned, piece)
                self._fit_span(piece, last - first + 1)
                if not scanned.count_read(piece):
                    self._note_unproven(piece)
                    return
            news += last > scanned.fork.number
            first = last + 1
            if after is not None:
                after = BlockPoint(scanned.reached.number, scanned.reached.hash)

    def _note_unproven(self, piece: LogRange) -> None:
        """Log that a range was listed by a node that lacks its end; once until a scan has all."""
        if not self._is_unproven:
            log.info("evm_range_not_proven", network=self._network.name, last=piece.last)
        self._is_unproven = True

    def _fit_span(self, piece: LogRange, asked: int) -> None:
        """Ask for fewer blocks when the node refuses the number, or their events take long
        to read.
        """
        given = piece.last - piece.first + 1
        if len(piece.logs) > _MANY_EVENTS:
            self._span = max(1, given // 2)
        elif given < asked:
            self._span = given
        elif given == self._span:
            self._span = min(2 * given, WIDEST_LOG_RANGE)

    async def _read(self, scanned: ScanPass, piece: LogRange) -> None:
        """Find the transactions among a range's events that pay us, and place each new one."""
        where = {item.txid: item.block_hash for item in await self._events.paying(piece)}
        if not where:
            return
        scanned.listed.update(where.items())
        known = await self._ledger.deposits_by(self._network.name, where)
        scanned.load(known)
        placed = {(item.txid, item.block_hash) for item in known}
        for txid, block_hash in where.items():
            if (txid, block_hash) not in placed:
                await self._place(scanned, txid, listed=True)

    # --- where a transaction is ----------------------------------------------------------------

    async def _place(self, scanned: ScanPass, txid: str, *, listed: bool) -> None:
        """Find out where a transaction is now, and what it pays to whom there.

        ``listed``: the node has just given an event of it. If it contradicts itself, the chain
        has changed between two questions, and the next pass asks again. A transaction is gone if
        it has no receipt in two passes in a row: nodes write receipts after the blocks, and of
        several nodes behind one address some lag.
        """
        receipt = await self._client.receipt(txid)
        if receipt is None and not listed:
            if txid in self._missing:
                self._note_gone(scanned, txid)
            else:
                scanned.missing.add(txid)
                scanned.settled = False
            return
        block = await scanned.block(receipt.block_number) if receipt else None
        if receipt is None or block is None or block.hash != receipt.block_hash:
            scanned.settled = False
            return
        is_listed = (txid, block.hash) in scanned.listed
        if not is_listed and (listed or scanned.has_read(block.number)):
            scanned.settled = False
            return
        await self._note_found(scanned, txid, await self._events.paid_by(receipt), block)

    async def _note_found(
        self, scanned: ScanPass, txid: str, paid: Mapping[int, Paid], block: Block
    ) -> None:
        known = {item.position: item for item in scanned.of(txid)}
        for position, item in known.items():
            same = paid.get(position) == _paid(item)
            if position in paid and not same:
                # A key keeps its amount and its order: the operator sorts out what this pays now.
                log.error("evm_deposit_changed", network=self._network.name, txid=txid)
            at = (block.number, block.hash) if same else (None, None)
            scanned.put(replace(item, block_number=at[0], block_hash=at[1]))
        for position in paid.keys() - known.keys():
            what, at = paid[position], (block.number, block.hash)
            waited = await self._pool.first_seen(txid, what.address_index)
            seen_at = min(scanned.now_ms, block.timestamp * 1000, *waited)
            scanned.put(EvmDeposit(self._network.name, txid, position, *what, seen_at, *at))

    def _note_gone(self, scanned: ScanPass, txid: str) -> None:
        for item in scanned.of(txid):
            scanned.put(replace(item, block_number=None, block_hash=None))
            log.warning("evm_deposit_removed", network=self._network.name, txid=txid)

    async def _look_up_lost(self, scanned: ScanPass) -> None:
        """Look up deposits whose block is not on the chain any more, and that were not found since.

        Deposits about to be confirmed are checked, too: they may be from a pass whose node lagged.
        After a start all are, until a pass has compared them with one chain.
        """
        lost = [
            item.txid
            for item in scanned.deposits.values()
            if self._is_doubtful(item, scanned) and not await scanned.still_has(item)
        ]
        if lost and scanned.settled:
            scanned.load(await self._ledger.deposits_by(self._network.name, set(lost)))
            for txid in dict.fromkeys(lost):
                await self._place(scanned, txid, listed=False)

    def _is_doubtful(self, item: EvmDeposit, scanned: ScanPass) -> bool:
        if item.block_number is None or item.block_number > scanned.reached.number:
            return False
        due = item.acknowledged is not DepositState.CONFIRMED and self._is_deep(item, scanned)
        is_above = item.block_number > scanned.fork.number
        return due or is_above or not self._has_compared_all

    # --- states --------------------------------------------------------------------------------

    async def _rise(self, scanned: ScanPass, head: Block) -> None:
        """Note the height of the chain, and of its tagged parts where they decide.

        Blocks count above a deposit once they were read, and are shown to be on the chain of the
        newest one: the node that listed them may have kept a branch that the others replaced.
        """
        reached = scanned.reached.number
        self._height = reached if scanned.is_joined(head) else min(self._height, reached)
        if scanned.deposits:
            asked = tags(self._network.thresholds)
            self._tagged = {tag: await self._connection.tagged(tag) for tag in asked}

    def _is_deep(self, item: EvmDeposit, scanned: ScanPass) -> bool:
        """Return whether a mined deposit is as deep as the total of its address asks."""
        needed = threshold_of(self._network.thresholds, scanned.totals[item.address_index]).depth
        return self._is_at(needed, item.block_number)

    def _is_at(self, depth: int | DepthTag, number: int | None) -> bool:
        return number is not None and _is_at(depth, number, self._height, self._tagged)

    async def _state(self, item: EvmDeposit, scanned: ScanPass) -> DepositState:
        """The state of a deposit by the chain, as far as this pass has read it."""
        if item.block_number is None:
            return DepositState.REMOVED
        before = scanned.stored.get(item.key, item)
        if item.acknowledged is DepositState.CONFIRMED and item.block_hash == before.block_hash:
            # It stays so while its block stays, even if the node that answers now lags.
            return DepositState.CONFIRMED
        if self._is_deep(item, scanned) and await scanned.still_has(item):
            return DepositState.CONFIRMED
        return DepositState.SEEN

    async def _remember(self, scanned: ScanPass, states: Mapping[DepositKey, DepositState]) -> None:
        """Commit new deposits before they are shown: the first-seen time must outlive a crash.

        Likewise that they are shown: from then on the order layer may have committed either state,
        until it acknowledges one.
        """
        for key, item in scanned.deposits.items():
            known = item.acknowledged if item.acknowledged is states[key] else None
            watched = self._is_watched(item, states[key])
            scanned.deposits[key] = replace(item, acknowledged=known, watched=watched)
        changed = [
            item for key, item in scanned.deposits.items() if item != scanned.stored.get(key)
        ]
        if changed:
            await self._ledger.put_deposits(changed)

    def _is_watched(self, item: EvmDeposit, state: DepositState) -> bool:
        """Whether a deposit can still change: until it is deep enough. An event shows one that is
        back.
        """
        if item.acknowledged is not state or state is DepositState.SEEN:
            return True
        if item.block_number is None:
            return False
        is_final = self._is_at(self._network.thresholds[-1].depth, item.block_number)
        return not is_final or self._height - item.block_number < self._network.tracked_blocks

    async def _plan_move(self, scanned: ScanPass) -> None:
        """The position of the cursor once all sightings of this pass are committed."""
        to = scanned.reached
        if scanned.settled and await self._ledger.newest_cursor(self._network.name) != to:
            keep = to.number - self._network.tracked_blocks
            self._next = CursorMove(self._network.name, to, scanned.fork.number, keep)


def _is_at(depth: int | DepthTag, number: int, height: int, tagged: Mapping[DepthTag, int]) -> bool:
    """Return whether a block is at a depth, of a chain of this height."""
    if isinstance(depth, DepthTag):
        return number <= tagged.get(depth, -1)
    return height - number + 1 >= depth


def _paid(item: EvmDeposit) -> Paid:
    return Paid(item.address_index, item.address, item.units, item.sender)


def _sighting(item: EvmDeposit, state: DepositState) -> DepositSighting:
    # Minted tokens come from nobody, and nothing can be sent back there.
    sender = None if item.sender == _NOBODY else item.sender
    return DepositSighting(item.key, item.address, item.units, sender, item.first_seen_at, state)
