"""Scans for deposits of XMR: the wallet finds them, the node says whether they are still there.

A pass costs one refresh and one list of transfers from the cursor on, whatever the number of
orders. The wallet says what a transaction paid to which address; only the node says whether it is
in the pool, in a block or nowhere, since a wallet keeps what it saw in blocks that were replaced.

A deposit is one transaction and one subaddress (``output_index`` is the subaddress's index). The
wallet gives the sum of its outputs there; they are credited or removed together.

Two outputs may have the same one-time key (the burning bug); only one of them can ever be spent.
The pool shows both in full. So a deposit is confirmed by what the wallet lists as mined, up to the
outputs with different key images that it has at the address.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence, Set
from enum import Enum
from typing import Final

import structlog
from msgspec import Struct
from msgspec.structs import replace

from rpcsvc.clock import Clock
from rpcsvc.domain.order import DepositKey, DepositState
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.wallets import DepositSighting
from rpcsvc.settlement.onchain.daemon_rpc import TooLarge
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import NodeInfo, NodeTransaction
from rpcsvc.settlement.onchain.monero.records import NETWORK, Cursor, DepositRecord, MoneroOptions
from rpcsvc.settlement.onchain.monero.wallet_types import (
    OutputFilter,
    WalletTransfer,
    WalletTransferKind,
)

log = structlog.get_logger(__name__)


# Transaction id and subaddress index: the key of a deposit on record.
Key = tuple[str, int]
# That key with the height of the deposit's block.
_Mined = tuple[str, int, int | None]
# An unlock time below this is a height, otherwise seconds since the epoch (Monero's rule).
_FIRST_TIME: Final = 500_000_000
# A node drops a transaction from its pool after seven days at the latest.
_POOL_KEEPS_MS: Final = 8 * 24 * 3600 * 1000
# A deposit that is not confirmed a day after it could be is locked for long, or can't be spent.
# Anyone can send thousands of those, so each is checked about once an hour.
_DAY_BLOCKS: Final = 720
_RESTING_BLOCKS: Final = 30
# Blocks past the last threshold up to which transfers are listed again to confirm a deposit.
_RISING_BLOCKS: Final = 10
# Cursors that are compared with the chain together, once the newest is found to be replaced.
_FEW_CURSORS: Final = 20
# How long a scan that showed nothing serves while the node has the same top block and as many
# transactions in its pool: one may have taken the place of another, or a time lock may have ended.
_SERVES_MS: Final = 2_000
# The same while a payment is signed and handed over: a refresh would have it wait in the middle.
_SERVES_BESIDE_MS: Final = 4_000


class Proof(Enum):
    """The wallet's evidence for a mined deposit.

    VOID: the wallet has not received all that the pool showed. LISTED: it has. COVERED: it has
    outputs for the deposit, too, not counting those of deposits confirmed before. MISSING: it does
    not list the deposit, or has no outputs for it.
    """

    VOID = "void"
    LISTED = "listed"
    COVERED = "covered"
    MISSING = "missing"


class ChainView(Struct, frozen=True):
    """The state of one pass. ``agreed``: wallet and node were at one block throughout, and what
    counts from now on is shown to be on its chain.

    ``fork`` is the newest block that was scanned before and is still on the chain.
    """

    info: NodeInfo
    agreed: bool
    now_ms: int
    chain: Mapping[str, NodeTransaction]
    fork: int

    def height(self, item: DepositRecord) -> int | None:
        """The block of a deposit; None while it is in none."""
        found = self.chain.get(item.txid)
        return found.height if found else None

    def has_judged(self, item: DepositRecord) -> bool:
        """Whether a deposit was judged in the block that it is in: that block was scanned."""
        height = self.height(item)
        return height is not None and item.height == height <= self.fork


class DepositProofs:
    """Asks the wallet for evidence, no more often than it matters. May raise RpcFailure."""

    def __init__(self, connection: MoneroConnection, ledger: MoneroLedger) -> None:
        self._connection = connection
        self._ledger = ledger
        # Reported once; and missing ones are not asked about again before another top block.
        self._void: set[Key] = set()
        self._missing: dict[Key, str] = {}

    async def find(
        self,
        records: Sequence[DepositRecord],
        listed: Sequence[WalletTransfer],
        view: ChainView,
        deep: Set[Key],
        resting: Set[Key],
    ) -> dict[Key, Proof]:
        """Return evidence for deposits whose state may have changed, and for those that are listed
        anyway.

        Deposits that rest are not among ``records``; their last reported state stands. A deposit
        costs one question in its life, none when it is listed as it becomes deep enough.
        """
        mined = [item for item in records if view.height(item) is not None]
        self._forget_but({key_of(item) for item in mined} | resting)
        received = _received(listed)
        proofs: dict[Key, Proof] = {}
        for item in mined:
            asks = self._asks(item, view, deep)
            proof = await self._listing(item, received, view, asks=asks)
            if proof is not None:
                proofs[key_of(item)] = proof
        asking = [item for item in mined if proofs.get(key_of(item)) is Proof.LISTED]
        gone = {key_of(item) for item in records if view.height(item) is None}
        gone |= {key for key, proof in proofs.items() if proof is Proof.VOID}
        await self._cover([item for item in asking if key_of(item) in deep], gone, proofs)
        self._report(mined, proofs, view)
        return proofs

    def has_missed(self, key: Key) -> bool:
        """Return whether the wallet lacked the deposit, and is asked again with each new block."""
        return key in self._missing

    def _asks(self, item: DepositRecord, view: ChainView, deep: Set[Key]) -> bool:
        """Return whether the wallet has to be asked now if it has received the deposit."""
        if item.acknowledged is DepositState.REMOVED:
            return True
        return key_of(item) in deep and not (was_confirmed(item) and view.has_judged(item))

    def _was_void(self, item: DepositRecord, view: ChainView) -> bool:
        """Whether the deposit was removed in the block that it is in, which is permanent.

        A wallet that rescans may list it then: it no longer knows that the other output was spent.
        """
        return item.acknowledged is DepositState.REMOVED and view.has_judged(item)

    async def _listing(
        self, item: DepositRecord, listed: Mapping[_Mined, int], view: ChainView, *, asks: bool
    ) -> Proof | None:
        """Return VOID, LISTED or MISSING; None when nothing is known and need not be."""
        key = key_of(item)
        if self._was_void(item, view):
            return Proof.VOID
        at = (*key, view.height(item))
        received = listed.get(at)
        if received is None and asks and self._missing.get(key) != view.info.top_hash:
            received = _received(await self._connection.wallet.transfer(item.txid)).get(at)
        if received is None:
            return Proof.MISSING if asks else None
        return Proof.LISTED if received >= item.units else Proof.VOID

    async def _cover(
        self, asking: Sequence[DepositRecord], gone: Set[Key], proofs: dict[Key, Proof]
    ) -> None:
        """Turn LISTED into COVERED where the wallet's outputs suffice, else into MISSING.

        Independent of the wallet's list of transfers: outputs of which only one can be spent have
        one key image.
        """
        if not asking:
            return
        held = await self._held(sorted({item.minor for item in asking}))
        besides = gone | {key_of(item) for item in asking}
        for minor in {item.minor for item in asking}:
            held[minor] = held.get(minor, 0) - await self._credited(minor, besides)
        for item in sorted(asking, key=lambda each: not was_confirmed(each)):
            covered = held[item.minor] >= item.units
            if covered:
                held[item.minor] -= item.units
            proofs[key_of(item)] = Proof.COVERED if covered else Proof.MISSING

    async def _held(self, minors: Sequence[int]) -> dict[int, int]:
        """Return the units that the wallet ever received at these addresses, spent or not, by
        address.

        Each key image counts once. An address with more outputs than can be listed counts as 0: a
        payer of that many keeps only their own order waiting.
        """
        try:
            outputs = await self._connection.wallet.outputs(OutputFilter.ALL, minors)
        except TooLarge:
            if len(minors) == 1:
                return {}
            half = len(minors) // 2
            return await self._held(minors[:half]) | await self._held(minors[half:])
        held: dict[int, int] = {}
        for item in {each.key_image: each for each in outputs}.values():
            held[item.index.minor] = held.get(item.index.minor, 0) + item.amount
        return held

    async def _credited(self, minor: int, besides: Set[Key]) -> int:
        """Return the confirmed units at an address, without the deposits in ``besides``."""
        confirmed = filter(was_confirmed, await self._ledger.deposits_to(minor))
        return sum(item.units for item in confirmed if key_of(item) not in besides)

    def _report(
        self, mined: Sequence[DepositRecord], proofs: Mapping[Key, Proof], view: ChainView
    ) -> None:
        """Log new evidence once, and remember the deposits that need not be asked about again."""
        for item in mined:
            key, proof = key_of(item), proofs.get(key_of(item))
            about = {"txid": item.txid, "address": item.address, "units": item.units}
            if proof is Proof.VOID and key not in self._void and not self._was_void(item, view):
                log.error("monero_deposit_voided", **about)
                self._void.add(key)
            if proof is Proof.MISSING and key not in self._missing:
                log.error("monero_deposit_missed", **about)
            if proof is Proof.MISSING:
                self._missing[key] = view.info.top_hash
            elif proof is not None:
                self._missing.pop(key, None)

    def _forget_but(self, keys: Set[Key]) -> None:
        self._void &= keys
        self._missing = {key: top for key, top in self._missing.items() if key in keys}


def key_of(item: DepositRecord) -> Key:
    """The key under which a deposit is recorded."""
    return item.txid, item.minor


def was_confirmed(item: DepositRecord) -> bool:
    """Whether the order layer has committed it as confirmed."""
    return item.acknowledged is DepositState.CONFIRMED


def _received(transfers: Sequence[WalletTransfer]) -> dict[_Mined, int]:
    """Units that the wallet lists as received, by mined deposit.

    Where it lists a deposit twice, the larger amount counts: a wallet that rescans a transaction
    adds an entry of 0 units.
    """
    received: dict[_Mined, int] = {}
    for item in transfers:
        if item.kind is WalletTransferKind.INCOMING:
            key = (item.txid, item.index.minor, item.height)
            received[key] = max(item.amount, received.get(key, 0))
    return received


def is_timelocked(unlock_time: int, height: int, now_ms: int) -> bool:
    """Whether the sender has locked the money beyond the chain's ``height`` or now."""
    if unlock_time < _FIRST_TIME:
        return height < unlock_time
    return now_ms // 1000 < unlock_time


class DepositScanner:
    """Looks for deposits, pass by pass.

    ``complete_until``: when the last scan began (ms), if it has shown all deposits until then.
    ``scanned_height``: the newest block up to which all deposits are committed; None: not known.
    """

    def __init__(
        self,
        connection: MoneroConnection,
        ledger: MoneroLedger,
        clock: Clock,
        options: MoneroOptions,
    ) -> None:
        self._connection = connection
        self._ledger = ledger
        self._clock = clock
        self._options = options
        self._height = 0
        self._fork = -1
        # The newest block up to which each deposit on record was compared with the chain.
        self._compared = -1
        self._next: Cursor | None = None
        self._all_looked_at: int | None = None
        self._proofs = DepositProofs(connection, ledger)
        # The top block and the size of the pool at a complete scan that showed nothing.
        self._nothing_at: tuple[str, int] | None = None
        self.complete_until: int | None = None
        self.scanned_height: int | None = None

    def may_rest(self, info: NodeInfo, *, is_paying: bool = False) -> bool:
        """Whether a scan would most likely show nothing that the last one did not.

        ``is_paying``: the wallet is at work on a payment.
        """
        since = self._clock.now_ms() - (self.complete_until or 0)
        serves = _SERVES_BESIDE_MS if is_paying else _SERVES_MS
        return self._nothing_at == (info.top_hash, info.pool_size) and 0 <= since < serves

    async def observe(self, before: NodeInfo) -> list[DepositSighting]:
        """Deposits whose state is not the one acknowledged last; ``before``: the node's state.

        Raises RpcFailure, ChainUnusable and errors.Unavailable.
        """
        self._next, self.complete_until, self._nothing_at = None, None, None
        began = self._clock.now_ms()
        # Both are awaited: a fork that was found counts, although the wallet fails.
        fork, refreshed = await asyncio.gather(
            self._find_fork(before), self._connection.wallet.refresh(), return_exceptions=True
        )
        if isinstance(fork, BaseException):
            raise fork
        self._fork = fork
        self._compared = min(self._compared, self._fork)
        if isinstance(refreshed, BaseException):
            raise refreshed
        self.scanned_height = None if self._fork < 0 else self._fork
        watched = await self._ledger.deposits_to_watch(self._fork)
        listed, again = await self._listed(self._rising(watched, before.height))
        resting = {key_of(item) for item in watched if self._rests(item, before.height)}
        records = await self._records(
            [item for item in watched if key_of(item) not in resting], listed
        )
        view = await self._view(before, listed, records)
        # Another wallet's lack of a deposit proves nothing; the cursor must not move by it.
        await self._connection.require_wallet()
        records = [
            item for item in records if item.txid in view.chain or await self._is_on_record(item)
        ]
        view, states = await self._judge(records, [*listed, *again], view, resting)
        kept = {key_of(item) for item in records if await self._may_be_confirmed(item, view)}
        await self._remember(records, view, states)
        self._height = view.info.height
        # Of several nodes behind one name, one that lags may have said where the deposits are.
        self._compared = view.info.height - 1 if view.agreed else self._fork
        if view.agreed:
            if not resting:
                self._all_looked_at = before.height
            self._next = Cursor(view.info.height - 1, view.info.top_hash)
            self._connection.note_in_step(view.info)
            if self._connection.stall() is None:
                self.complete_until = began
        found = [
            _sighting(item, state)
            for item, state in zip(records, states, strict=True)
            if state is not item.acknowledged and key_of(item) not in kept
        ]
        if not found and self.complete_until is not None:
            self._nothing_at = (before.top_hash, before.pool_size)
        return found

    async def acknowledge(self, sightings: Sequence[DepositSighting]) -> None:
        """Record committed deposits, and move the cursor to the block that was scanned.

        Unacknowledged deposits stay in the database and are shown again.
        """
        states = [(item.key.txid, item.key.output_index, item.state) for item in sightings]
        cursor, fork, self._next = self._next, self._fork, None
        reached = cursor
        if cursor is not None and cursor in (await self._ledger.cursors())[:1]:
            cursor = None
        await self._ledger.acknowledge(states, cursor, fork)
        if reached is not None:
            self.scanned_height = reached.height

    async def confirmations(self, key: DepositKey, height: int | None = None) -> int:
        """Return the deposit's confirmations at the last scan, or when the newest block is at
        ``height``, its own block included; 0 in the pool or gone.

        Also 0 above the newest block that was scanned before and is still there, until wallet and
        node were in step throughout a scan. A replica that scans nothing gives the height, and
        tells what is on record.
        """
        # Read first: a deposit that is newer is never deeper.
        top, compared = self._height - 1, self._compared
        if height is not None:
            top = compared = height
        found = await self._ledger.deposit(key.txid, key.output_index)
        if found is None or found.height is None or found.height > compared:
            return 0
        return max(0, top - found.height + 1)

    async def _find_fork(self, before: NodeInfo) -> int:
        """The newest block that was scanned and is still on the chain; -1 when none is.

        Raises errors.Unavailable, and no deposit has depth, while the node that answers lacks the
        top block: it may have kept a branch with that block, and the deposits in it.
        """
        cursors = await self._ledger.cursors()
        for some in (cursors[:1], cursors[1:_FEW_CURSORS], cursors[_FEW_CURSORS:]):
            hashes = await self._connection.hashes_below(before, [each.height for each in some])
            if hashes is None:
                self._compared = -1
                self._connection.note_split(before)
                raise Unavailable("The Monero node lacks its newest block. Try again later.")
            for cursor in some:
                if hashes.get(cursor.height) == cursor.hash:
                    return cursor.height
                log.warning("monero_block_replaced", height=cursor.height, hash=cursor.hash)
        return -1

    def _rising(self, watched: Sequence[DepositRecord], height: int) -> dict[Key, int]:
        """The heights of unconfirmed deposits in scanned blocks that are about deep enough."""
        return {
            key_of(item): item.height
            for item in watched
            if item.height is not None
            and item.acknowledged in (None, DepositState.SEEN)
            and not self._proofs.has_missed(key_of(item))
            and self._options.required_confirmations(item.units)
            <= height - item.height
            <= self._options.final_confirmations + _RISING_BLOCKS
        }

    async def _listed(
        self, rising: Mapping[Key, int]
    ) -> tuple[list[WalletTransfer], list[WalletTransfer]]:
        """List transfers above the fork, and those of ``rising`` deposits below it: one question
        for all of these.
        """
        first = min([self._fork + 1, *rising.values()])
        try:
            found = await self._connection.wallet.transfers(first)
        except TooLarge:
            if first > self._fork:
                raise
            found = await self._connection.wallet.transfers(self._fork + 1)
        new = [item for item in found if item.height is None or item.height > self._fork]
        again = [
            item
            for item in found
            if item.height is not None
            and item.height <= self._fork
            and rising.get((item.txid, item.index.minor)) == item.height
        ]
        return new, again

    def _rests(self, item: DepositRecord, height: int) -> bool:
        """Whether a deposit is left out of this scan: unconfirmed for long, and still in its block.

        Its block is not above the fork. After a start, and on a shorter chain, none is left out.
        """
        last = self._all_looked_at
        if last is None or not 0 <= height - last < _RESTING_BLOCKS:
            return False
        if item.acknowledged is not DepositState.SEEN or item.height is None:
            return False
        due = item.height + self._options.final_confirmations
        return item.height <= self._fork and height - due >= _DAY_BLOCKS

    async def _records(
        self, watched: Sequence[DepositRecord], listed: Sequence[WalletTransfer]
    ) -> list[DepositRecord]:
        """Return the deposits that are watched already, and those that the wallet has found
        since.
        """
        records = {key_of(item): item for item in watched}
        now = self._clock.now_ms()
        for item in listed:
            key = (item.txid, item.index.minor)
            if key not in records and await self._is_ours(item):
                known = await self._ledger.deposit(*key)
                records[key] = known or DepositRecord(
                    item.txid, item.index.minor, item.address, item.amount, item.unlock_time, now,
                    None, None,
                )  # fmt: skip
        return list(records.values())

    async def _is_on_record(self, item: DepositRecord) -> bool:
        return await self._ledger.deposit(item.txid, item.minor) is not None

    async def _may_be_confirmed(self, item: DepositRecord, view: ChainView) -> bool:
        """Whether the order layer may have it as confirmed while the wallet can't be asked.

        It was shown before a crash and never acknowledged. Showing it as seen could undo a
        confirmation.
        """
        unasked = not view.agreed and view.height(item) is not None
        return unasked and item.acknowledged is None and await self._is_on_record(item)

    async def _is_ours(self, item: WalletTransfer) -> bool:
        """Whether it pays an address made for orders; the wallet has others."""
        ours = await self._ledger.address_minor(item.address) == item.index.minor
        return ours and item.amount > 0 and item.index.minor > 0

    async def _view(
        self,
        before: NodeInfo,
        listed: Sequence[WalletTransfer],
        records: Sequence[DepositRecord],
    ) -> ChainView:
        chain, scanned = await asyncio.gather(
            self._connection.find_transactions(sorted({item.txid for item in records})),
            self._connection.wallet.height(),
        )
        after = await self._connection.check_node()
        await self._require_confirmed(records, chain, after)
        stale = [
            item
            for item in listed
            if item.height is not None
            and (item.txid not in chain or chain[item.txid].height != item.height)
            and await self._is_ours(item)
        ]
        agreed = before.top_hash == after.top_hash and scanned == after.height and not stale
        return ChainView(after, agreed, self._clock.now_ms(), chain, self._fork)

    async def _require_confirmed(
        self, records: Sequence[DepositRecord], chain: Mapping[str, NodeTransaction], top: NodeInfo
    ) -> None:
        """Raise errors.Unavailable, with no depth left, if ``chain`` has a confirmed deposit in no
        block, and its block has it: of several nodes behind one name, a late one has answered.

        Or the one that has the block has kept a replaced branch: nothing may be paid by that.
        """
        for item in records:
            found, height = chain.get(item.txid), item.height
            if not was_confirmed(item) or height is None or (found and found.height is not None):
                continue
            if await self._connection.is_on_chain({item.txid: height}, top):
                self._compared = -1
                self._connection.note_split(top)
                raise Unavailable("The Monero node lacks blocks. Try again later.")

    async def _judge(
        self,
        records: Sequence[DepositRecord],
        listed: Sequence[WalletTransfer],
        view: ChainView,
        resting: Set[Key],
    ) -> tuple[ChainView, list[DepositState]]:
        """Return the states of deposits, and the view that they are judged by.

        Where one that would count from now on is not shown to be on the chain, wallet and node have
        not agreed: the node may have been two, one of them on a replaced branch.
        """
        totals: dict[int, int] = {}
        for item in records:
            if item.txid in view.chain:
                totals[item.minor] = totals.get(item.minor, 0) + item.units
        deep = {key_of(item) for item in records if self._is_deep(item, totals, view)}
        # While wallet and node disagree nothing that the wallet says of a block is relied on.
        proofs: Mapping[Key, Proof] = {}
        if view.agreed:
            proofs = await self._proofs.find(records, listed, view, deep, resting)
        states = _states(records, view, proofs, deep)
        rising = {
            item.txid: height
            for item, state in zip(records, states, strict=True)
            if state is DepositState.CONFIRMED
            and not (was_confirmed(item) and view.has_judged(item))
            and (height := view.height(item)) is not None
        }
        if not view.agreed or await self._connection.is_on_chain(rising, view.info):
            return view, states
        log.warning("monero_deposits_not_shown", txids=sorted(rising))
        view = replace(view, agreed=False)
        return view, _states(records, view, {}, deep)

    def _is_deep(self, item: DepositRecord, totals: Mapping[int, int], view: ChainView) -> bool:
        """Whether a deposit has the confirmations that its address's total requires, and is not
        locked.

        One that is confirmed stays so while its block stays: settings that ask for more take back
        nothing that was paid out for.
        """
        found = view.chain.get(item.txid)
        if found is None or found.height is None:
            return False
        # A later deposit to the address asks no more confirmations of one that is confirmed.
        total = item.units if was_confirmed(item) else totals[item.minor]
        needed = self._options.required_confirmations(total)
        stays = was_confirmed(item) and item.height == found.height <= self._fork
        deep = stays or view.info.height - found.height >= needed
        return deep and not is_timelocked(item.unlock_time, view.info.height, view.now_ms)

    # --- on record -----------------------------------------------------------------------------

    async def _remember(
        self, records: Sequence[DepositRecord], view: ChainView, states: Sequence[DepositState]
    ) -> None:
        """Commit new deposits before they are shown: the first-seen time must outlive a crash.

        Shown deposits are unacknowledged from here on: after a crash between commit and
        acknowledgement the chain's state is shown again, even if it has not changed.
        """
        changed = []
        for item, state in zip(records, states, strict=True):
            height = view.height(item)
            # A block that is not shown must not pass for the one in which it was judged.
            is_shown = view.agreed or height is None or not was_confirmed(item)
            now = replace(
                item,
                height=height if is_shown else item.height,
                acknowledged=state if item.acknowledged is state else None,
                watched=self._is_watched(item, state, height, view),
            )
            if now != item or await self._ledger.deposit(item.txid, item.minor) is None:
                changed.append(now)
        if changed:
            await self._ledger.put_deposits(changed)

    def _is_watched(
        self, item: DepositRecord, state: DepositState, height: int | None, view: ChainView
    ) -> bool:
        """Over when it is deep enough, or gone for longer than any pool would keep it.

        The wallet would not do: a transaction that comes back into the pool it doesn't look at.
        """
        if item.acknowledged is not state:
            return True
        if state is DepositState.REMOVED:
            return view.now_ms - item.first_seen_at < _POOL_KEEPS_MS
        if state is DepositState.SEEN or height is None:
            return True
        return view.info.height - height < self._options.tracked_blocks


def _states(
    records: Sequence[DepositRecord],
    view: ChainView,
    proofs: Mapping[Key, Proof],
    deep: Set[Key],
) -> list[DepositState]:
    return [
        _state(item, view.chain.get(item.txid), proofs.get(key_of(item)), key_of(item) in deep)
        for item in records
    ]


def _state(
    item: DepositRecord, found: NodeTransaction | None, proof: Proof | None, deep: bool
) -> DepositState:
    """The state of a deposit by node and wallet together."""
    if found is None or (found.height is None and found.double_spend_seen):
        return DepositState.REMOVED
    if found.height is None:
        return DepositState.SEEN
    # A void or gone deposit stays so until the wallet could be asked.
    is_back = proof is not None or item.acknowledged is not DepositState.REMOVED
    if proof is Proof.VOID or not is_back:
        return DepositState.REMOVED
    # Nothing is confirmed without the wallet; nor is a deposit removed because it wasn't asked.
    kept = was_confirmed(item) and proof is None
    return (
        DepositState.CONFIRMED if deep and (proof is Proof.COVERED or kept) else DepositState.SEEN
    )


def _sighting(item: DepositRecord, state: DepositState) -> DepositSighting:
    key = DepositKey(NETWORK, item.txid, item.minor)
    return DepositSighting(key, item.address, item.units, None, item.first_seen_at, state)
