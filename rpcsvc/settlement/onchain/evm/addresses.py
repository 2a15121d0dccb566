"""Deposit addresses of the USDC adapter: derived ahead, each handed out at most once.

They are accounts of one mnemonic from index 1 on, valid on every chain; index 0 is the hot wallet.
"Reserved up to index N" is committed together with the addresses before one is handed out: a crash
skips a few indices and repeats none. An orderly stop returns the unused ones.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

import structlog

from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.daemon_rpc import ChainUnusable
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.keys import HOT_WALLET_INDEX, HdKeys
from rpcsvc.settlement.onchain.evm.records import EvmAddress

log = structlog.get_logger(__name__)


class EvmAddressPool:
    """The addresses that orders may still get.

    ``target`` of them are made ahead, again when fewer than half are left.
    """

    def __init__(self, keys: HdKeys, ledger: EvmDepositLedger, target: int) -> None:
        self._keys = keys
        self._ledger = ledger
        self._target = target
        self._low = target // 2
        self._free: deque[str] = deque()  # committed and reserved, in the order of their indices
        self._top = HOT_WALLET_INDEX  # the highest index that is in use, skipped or free
        self._is_open = False
        self._refilling: asyncio.Task[None] | None = None
        # Batches are made, committed and given back one after another.
        self._lock = asyncio.Lock()

    @property
    def left(self) -> int:
        """The number of addresses that are made and not handed out."""
        return len(self._free)

    @property
    def ready(self) -> int:
        """The number of addresses that can be handed out at once: all that are made."""
        return len(self._free)

    def take(self) -> str:
        """A fresh address, never handed out again. Raises errors.Unavailable when none is left."""
        if not self._free:
            self._refill_soon()
            raise Unavailable("No USDC deposit address is ready. Try again in a moment.")
        address = self._free.popleft()
        if len(self._free) < self._low:
            self._refill_soon()
        return address

    async def load(self) -> None:
        """Load the addresses that an earlier run returned.

        Raises ChainUnusable when the recorded addresses are those of another mnemonic.
        """
        async with self._lock:
            if self._is_open:
                return
            hot = await asyncio.to_thread(self._keys.address, HOT_WALLET_INDEX)
            wallet = await self._ledger.wallet()
            if wallet is None:
                await self._ledger.adopt_wallet(hot)
            elif wallet.hot_address != hot:
                raise _another_mnemonic("hot wallet", wallet.hot_address, hot)
            await self._load_returned(wallet.reserved_to if wallet else HOT_WALLET_INDEX)
            self._is_open = True

    async def refill(self) -> None:
        """Make more when few are left."""
        async with self._lock:
            if self._is_open and len(self._free) < self._low:
                await self._make(self._target - len(self._free))

    async def close(self) -> None:
        """Return the unused addresses; none can be taken any more."""
        if self._refilling is not None:
            await asyncio.gather(self._refilling, return_exceptions=True)
        async with self._lock:
            unused, self._free, self._is_open = len(self._free), deque(), False
            if unused:
                try:
                    await self._ledger.reserve_addresses(self._top - unused)
                except Unavailable as reason:
                    log.info("evm_addresses_skipped", unused=unused, reason=reason.message)

    async def _load_returned(self, reserved_to: int) -> None:
        await self._know_all(reserved_to)
        given_back = await self._ledger.addresses_above(reserved_to)
        await self._require_ours(given_back or await self._newest())
        self._top = max(reserved_to, self._top)
        if given_back:
            await self._ledger.add_addresses(given_back)
            self._add(given_back)

    async def _know_all(self, reserved_to: int) -> None:
        """Record addresses that were handed out after a restored copy of the database was made.

        Otherwise deposits to them would not be seen.
        """
        if missing := await self._ledger.unknown_addresses(reserved_to):
            log.warning("evm_addresses_recorded", addresses=len(missing))
            await self._ledger.add_addresses(await asyncio.to_thread(self._derive, missing))
            await self._ledger.reserve_addresses(reserved_to)

    async def _newest(self) -> list[EvmAddress]:
        newest = await self._ledger.highest_address()
        return [newest] if newest else []

    async def _require_ours(self, recorded: list[EvmAddress]) -> None:
        derived = await asyncio.to_thread(self._derive, [item.index for item in recorded])
        for ours, theirs in zip(derived, recorded, strict=True):
            if ours != theirs:
                raise _another_mnemonic(f"index {ours.index}", theirs.address, ours.address)

    async def _make(self, count: int) -> None:
        # Nothing above the top was ever handed out: addresses of a failed commit are made again.
        indices = range(self._top + 1, self._top + 1 + count)
        made = await asyncio.to_thread(self._derive, indices)
        await self._ledger.add_addresses(made)
        self._add(made)

    def _derive(self, indices: Iterable[int]) -> list[EvmAddress]:
        return [EvmAddress(index, self._keys.address(index)) for index in indices]

    def _add(self, made: list[EvmAddress]) -> None:
        self._top = made[-1].index
        self._free.extend(item.address for item in made)

    def _refill_soon(self) -> None:
        if self._is_open and (self._refilling is None or self._refilling.done()):
            self._refilling = asyncio.create_task(self._refill_quietly(), name="refill-addresses")

    async def _refill_quietly(self) -> None:
        try:
            await self.refill()
        except Unavailable:
            log.warning("evm_addresses_not_made", left=self.left, exc_info=True)


def _another_mnemonic(which: str, recorded: str, derived: str) -> ChainUnusable:
    return ChainUnusable(
        f"another mnemonic: its address of {which} is {derived}, and {recorded} was recorded at"
        " the first start. Put the first mnemonic back: the deposit addresses of all orders"
        " belong to it"
    )
