"""Deposit addresses of the XMR adapter: made ahead, each handed out at most once.

The wallet makes an address and stores its file; then it is recorded, reserved, and handed out, in
this order. "Reserved up to index N" is committed before one up to N is handed out: a crash skips a
few and repeats none. An orderly stop returns the unused ones.

A wallet that lacks more addresses than it looks ahead has to rescan the chain. That a rescan is due
is committed before the missing addresses are made, and stays due until its result is stored.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

import structlog

from rpcsvc.clock import steady_ms
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.backoff import Backoff
from rpcsvc.settlement.onchain.daemon_rpc import ChainUnusable, NodeError, RpcFailure
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.records import MoneroOptions
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import Subaddress, WalletCode

log = structlog.get_logger(__name__)

# A wallet finds money on this many addresses, counted from the newest that it knows.
_LOOKAHEAD: Final = 200
# Nobody is kept waiting for a scan, which may take hours, for longer than this.
_SCAN_WAIT_SECONDS: Final = 2.0
# How often in one go the wallet makes addresses: it does nothing else meanwhile.
_CALLS_PER_REFILL: Final = 4
# A scan begins at the first block each time, and the wallet does nothing else meanwhile.
_FIRST_PAUSE_MS: Final = 60_000
_LONGEST_PAUSE_MS: Final = 3_600_000
_RESCAN: Final = "rescan"


class AddressPool:
    """The addresses that orders may still get."""

    def __init__(
        self,
        wallet: WalletClient,
        ledger: MoneroLedger,
        options: MoneroOptions,
        *,
        scan_wait: float = _SCAN_WAIT_SECONDS,
        steady: Callable[[], int] = steady_ms,
    ) -> None:
        self._wallet = wallet
        self._ledger = ledger
        self._options = options
        self._scan_wait = scan_wait
        self._pooled: deque[Subaddress] = deque()  # committed
        self._free: deque[Subaddress] = deque()  # committed and reserved
        self._reserving: asyncio.Task[None] | None = None
        self._making: asyncio.Task[None] | None = None
        self._rescan: asyncio.Task[None] | None = None
        self._failed_rescans = Backoff(steady, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS)
        self._rescan_problem = ""
        self._loaded = False
        # Batches are committed and handed out in the order of their indices.
        self._lock = asyncio.Lock()

    @property
    def left(self) -> int:
        """The number of addresses that are made and not handed out."""
        return len(self._pooled) + len(self._free)

    @property
    def ready(self) -> int:
        """The number of addresses that can be handed out at once."""
        return len(self._free)

    def require_scanned(self) -> None:
        """Raise ChainUnusable while the wallet rescans the chain: it answers nothing."""
        if self._rescan is not None and not self._rescan.done():
            raise ChainUnusable("rescanning: the wallet scans the chain for missed deposits")

    def take(self) -> str:
        """A fresh address, never handed out again. Raises errors.Unavailable when none is ready."""
        if not self._free:
            raise Unavailable("No XMR deposit address is ready. Try again in a moment.")
        address = self._free.popleft().address
        if len(self._free) < self._options.reserve // 2 and self._pooled:
            self._reserve_soon()
        return address

    async def reconcile(self) -> None:
        """Make wallet and database agree on the addresses that exist. Raises ChainUnusable.

        A wallet restored from an older file makes its lost addresses again, in order. Where it has
        to scan the chain for them, ChainUnusable is raised until the scan is over; the scan
        continues when the caller is cancelled.
        """
        highest = await self._ledger.highest_address()
        if highest is not None:
            await self._bring_up(highest)
        await self._record_reserved(highest.index.minor if highest else 0)
        highest = await self._ledger.highest_address()
        if not self._loaded:
            await self._load(highest.index.minor if highest else 0)
            self._loaded = True

    async def refill(self) -> None:
        """Make more when few are left, and reserve some."""
        if self.left < self._options.pool_low:
            for _ in range(_CALLS_PER_REFILL):
                missing = self._options.pool_target - self.left
                if missing > 0:
                    await self._make(min(missing, self._options.addresses_per_call))
        await self._reserve_quietly()

    async def close(self) -> None:
        """Return the addresses that were reserved and not handed out."""
        if self._rescan is not None:
            self._rescan.cancel()  # it stays due
            await asyncio.wait({self._rescan})
        under_way = [task for task in (self._making, self._reserving) if task is not None]
        await asyncio.gather(*under_way, return_exceptions=True)
        async with self._lock:
            if self._free:
                unused = min(item.index.minor for item in self._free)
                self._pooled, self._free = deque(), deque()
                try:
                    await self._ledger.reserve_addresses(unused - 1)
                except Unavailable as reason:
                    log.info("monero_addresses_skipped", reason=reason.message)

    async def _bring_up(self, highest: Subaddress) -> None:
        missing = await self._missing(highest)
        if missing:
            log.warning("monero_wallet_lacks_addresses", missing=missing)
            if missing >= _LOOKAHEAD:
                await self._ledger.note_rescan_due()
            for made in range(0, missing, self._options.addresses_per_call):
                await self._make(min(missing - made, self._options.addresses_per_call))
        (found,) = await self._wallet.addresses([highest.index.minor])
        if found.address != highest.address:
            raise ChainUnusable(
                f"another wallet: its address {highest.index.minor} is not the one that was"
                " recorded"
            )
        if await self._ledger.rescan_due():
            await self._scan()

    async def _record_reserved(self, highest: int) -> None:
        """Record addresses that were handed out after a restored copy of the database was made.

        The payment journal tells how many. Deposits to them have to be seen.
        """
        wallet = await self._ledger.wallet()
        missing = wallet.reserved_to - highest if wallet else 0
        if missing <= 0:
            return
        log.warning("monero_addresses_recorded", addresses=missing)
        if not await self._has(highest + missing):
            # The wallet is as old, or restored from its words: it has not looked at them.
            await self._ledger.note_rescan_due()
        for first in range(highest + 1, highest + missing + 1, self._options.addresses_per_call):
            last = min(first + self._options.addresses_per_call - 1, highest + missing)
            await self._ledger.add_addresses(await self._known_or_made(first, last))
        if await self._ledger.rescan_due():
            await self._scan()

    async def _known_or_made(self, first: int, last: int) -> list[Subaddress]:
        """Return addresses of the wallet; missing ones are made, the next ones in order."""
        if await self._has(last):
            return await self._wallet.addresses(range(first, last + 1))
        known: list[Subaddress] = []
        for minor in range(first, last + 1):
            if not await self._has(minor):
                made = await self._wallet.create_addresses(last - minor + 1)
                await self._wallet.store()
                return known + list(made)
            known += await self._wallet.addresses([minor])
        return known

    async def _scan(self) -> None:
        """Have the wallet rescan the chain, or wait for the rescan that is under way.

        Raises ChainUnusable while it is, and for a while after a rescan that failed.
        """
        if self._rescan is None or self._rescan.done():
            if not self._failed_rescans.is_due(_RESCAN):
                raise ChainUnusable(self._rescan_problem)
            self._rescan = asyncio.create_task(self._scanned(), name="rescan")
            self._rescan.add_done_callback(_note_end)
        await asyncio.wait({self._rescan}, timeout=self._scan_wait)
        self.require_scanned()
        self._rescan.result()

    async def _scanned(self) -> None:
        log.warning("monero_wallet_rescan_started")
        try:
            await self._wallet.rescan_blockchain()
            await self._wallet.store()
        except RpcFailure as failure:
            seconds = self._failed_rescans.note(_RESCAN) // 1000
            self._rescan_problem = (
                f"the wallet could not scan the chain ({failure}) and rests for {seconds} s before"
                " it scans the chain again: check monero-wallet-rpc and its node"
            )
            raise
        self._failed_rescans.forget(_RESCAN)
        await self._ledger.note_rescanned()

    async def _missing(self, highest: Subaddress) -> int:
        """The number of addresses that the wallet lacks below the newest recorded one."""
        low, high = 0, highest.index.minor
        if await self._has(high):
            return 0
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if await self._has(middle) else (low, middle)
        return highest.index.minor - low

    async def _has(self, minor: int) -> bool:
        try:
            return bool(await self._wallet.addresses([minor]))
        except NodeError as error:
            if error.code != WalletCode.NO_SUCH_ADDRESS:
                raise
            return False

    async def _load(self, highest: int) -> None:
        wallet = await self._ledger.wallet()
        if wallet is None:
            raise ChainUnusable("the wallet is not recorded yet")
        reserved_to = wallet.reserved_to
        if highest and await self._has(highest + 1):
            # The wallet knows more than the database, which may be an older copy: what the
            # difference was handed out to is not known here, so none of it is used.
            reserved_to = highest
            await self._ledger.reserve_addresses(highest)
        self._pooled.extend(await self._ledger.addresses_above(reserved_to))
        await self._reserve_quietly()  # deposits are seen without a reservation, too

    async def _make(self, count: int) -> None:
        """Make some more. It goes on when the caller is cancelled: addresses that the wallet has
        and the database does not know are never used.
        """
        self._making = asyncio.create_task(self._made(count), name="make-addresses")
        await asyncio.shield(self._making)

    async def _made(self, count: int) -> None:
        newest = await self._ledger.highest_address()
        made = await self._wallet.create_addresses(count)
        await self._wallet.store()
        await self._ledger.add_addresses(made)
        # A wallet from an older file makes addresses again that may have been handed out.
        known = newest.index.minor if newest else 0
        self._pooled.extend(item for item in made if item.index.minor > known)

    def _reserve_soon(self) -> None:
        if self._reserving is None or self._reserving.done():
            self._reserving = asyncio.create_task(self._reserve_quietly(), name="reserve-addresses")

    async def _reserve_quietly(self) -> None:
        try:
            await self._reserve()
        except Unavailable:
            log.warning("monero_addresses_not_reserved", exc_info=True)

    async def _reserve(self) -> None:
        """Commit that the next few may be handed out, then let them be."""
        async with self._lock:
            await self._reserve_batch()

    async def _reserve_batch(self) -> None:
        count = min(self._options.reserve - len(self._free), len(self._pooled))
        if count <= 0:
            return
        batch = [self._pooled.popleft() for _ in range(count)]
        try:
            await self._ledger.reserve_addresses(batch[-1].index.minor)
        except BaseException:
            self._pooled.extendleft(reversed(batch))
            raise
        self._free.extend(batch)


def _note_end(rescan: asyncio.Task[None]) -> None:
    """Log the end of a rescan: its starter may have stopped waiting for it."""
    if rescan.cancelled():
        return
    failure = rescan.exception()
    if failure is None:
        log.info("monero_wallet_rescanned")
    else:
        log.warning("monero_rescan_not_finished", reason=str(failure))
