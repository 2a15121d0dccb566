"""Checks that node and wallet are up, on the right network, in step, and the wallet of the first
start.

Node and wallet are asked nothing for an order before the check has passed. A failed call discards
its result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Final

import structlog

from rpcsvc.clock import steady_ms
from rpcsvc.errors import Unavailable
from rpcsvc.health import Condition, faults
from rpcsvc.settlement.onchain.daemon_rpc import ChainUnusable, NodeError, RpcFailure, StallDetector
from rpcsvc.settlement.onchain.monero.addresses import AddressPool
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import (
    HEADERS_PER_CALL,
    MonerodClient,
    NodeInfo,
    NodeTransaction,
)
from rpcsvc.settlement.onchain.monero.records import MoneroOptions, WalletRecord
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import WalletCode

log = structlog.get_logger(__name__)

# Blocks come every two minutes; a node may be this many behind its peers.
_MOST_BEHIND: Final = 2
# In 20 times as long as usual no block comes once in some hundred million.
_LONGEST_GAP_MS: Final = 40 * 60_000
# How long a refresh serves those who need the wallet at its node's top block.
_IN_STEP_MS: Final = 5_000
# A block may come while the wallet refreshes.
_TRIES: Final = 3


class MoneroConnection:
    """Node and wallet, checked. ``problem``: the reason not to use them, for the operator; or None.

    ``lag``: how wallet and node, or several nodes, differed when that last mattered; None: in step.
    ``primary_address`` is the wallet's own, where change goes; empty before the first check.
    ``top_hash``: of the node's newest block when it was last asked; empty before.
    ``addresses``: the wallet's deposit addresses. ``wallet_checked``: False until the wallet was
    found to be the right one, and again after each failure.
    """

    def __init__(
        self,
        node: MonerodClient,
        wallet: WalletClient,
        ledger: MoneroLedger,
        options: MoneroOptions,
    ) -> None:
        self.node = node
        self.wallet = wallet
        self._ledger = ledger
        self._options = options
        self.wallet_checked = False
        self._stall_detector = StallDetector(_LONGEST_GAP_MS)
        self._connecting = asyncio.Lock()
        self.addresses = AddressPool(wallet, ledger, options)
        self.primary_address = ""
        self.top_hash = ""
        self.lag: str | None = None
        self.problem: str | None = "not started"
        # The node's state when the wallet was in step with it, and when that was (steady ms).
        self._in_step: tuple[NodeInfo, int] | None = None

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turn failures of node and wallet into errors.Unavailable, and remember the reason."""
        try:
            yield
        except RpcFailure as failure:
            self._note(self._reason(failure))
            raise Unavailable("XMR can't be settled right now. Try again later.") from failure
        except ChainUnusable as found:
            self._note(str(found))
            raise Unavailable("XMR can't be settled right now. Try again later.") from found

    async def ready(self, info: NodeInfo | None = None) -> NodeInfo:
        """Check the node, which wallet is open, and all of the wallet again after each failure.

        ``info``: the node's state, if it was just checked. Raises RpcFailure and ChainUnusable.
        """
        self.addresses.require_scanned()
        asks_both = info is None and self.wallet_checked
        if info is None:
            info = await (self.require_both() if asks_both else self.check_node())
        async with self._connecting:
            if not self.wallet_checked:  # also where a call failed while the node answered
                await self.prepare_wallet()
                await self.addresses.reconcile()
            elif not asks_both:
                await self.require_wallet()
            self._connected()
        return info

    async def check_node(self) -> NodeInfo:
        """The node's state. Raises RpcFailure, or ChainUnusable when it can't be relied on."""
        info = await self.node.info()
        wanted = self._options.nettype
        if info.nettype != wanted:
            raise ChainUnusable(f"wrong network: the node is on {info.nettype}, not on {wanted}")
        behind = info.target_height - info.height
        if info.busy_syncing or not (info.synchronized or info.offline) or behind > _MOST_BEHIND:
            raise ChainUnusable(
                f"the node is out of sync: at {info.height} of {info.target_height}"
            )
        self._stall_detector.saw(info.height)
        self.top_hash = info.top_hash
        return info

    async def find_transactions(self, txids: Sequence[str]) -> dict[str, NodeTransaction]:
        """Return those of ``txids`` that are in a block or in the pool, by transaction id.

        monerod looks into the chain, then into the pool: a block that takes a transaction out of
        the pool in between makes it miss that one. So a missing transaction is looked for twice,
        the second time with the same top block before and after. Raises RpcFailure, ChainUnusable,
        and errors.Unavailable while blocks come faster than the node answers.
        """
        found = await self.node.transactions(txids)
        for _ in range(_TRIES):
            missing = [txid for txid in txids if txid not in found]
            if not missing:
                return found
            before = await self.check_node()
            found |= await self.node.transactions(missing)
            after = await self.check_node()
            if before.top_hash == after.top_hash:
                return found
        raise Unavailable("The Monero chain moved while its node was asked. Try again later.")

    async def hashes_below(self, info: NodeInfo, heights: Collection[int]) -> dict[int, str] | None:
        """Return the hashes of the blocks at ``heights`` on the chain of ``info``'s top block; none
        for those above it.

        Each block names the one before it, so that it does not matter which of several nodes behind
        one name answers: one that lacks the top block proves nothing, which is None. May raise
        RpcFailure.
        """
        height, block = info.height - 1, info.top_hash
        wanted, lowest = frozenset(heights), min(heights, default=height)
        found = {height: block} if height in wanted else {}
        while height > lowest:
            first = max(lowest + 1, height + 1 - HEADERS_PER_CALL)
            listed = await self.node.headers(first, height)
            for header in reversed(listed):
                if (header.height, header.hash) != (height, block):
                    return None
                height, block = height - 1, header.previous
                if height in wanted:
                    found[height] = block
            if height >= first:
                return None
        return found

    async def is_on_chain(self, places: Mapping[str, int], info: NodeInfo) -> bool:
        """Return whether these transactions are in the blocks of these heights, on the chain of
        ``info``'s top block.

        A node that kept a replaced branch finds them in blocks of it, and their depth would count
        from the top block of another node. False may also mean that it is not proven now. May raise
        RpcFailure.
        """
        heights = sorted(set(places.values()))
        hashes, blocks = await asyncio.gather(
            self.hashes_below(info, heights), asyncio.gather(*map(self.node.block_at, heights))
        )
        mined: set[tuple[str, int]] = set()
        for height, block in zip(heights, blocks, strict=True):
            if hashes and block is not None and block.header.hash == hashes.get(height):
                mined |= {(txid, height) for txid in (block.miner_txid, *block.txids)}
        return mined.issuperset(places.items())

    def block_age(self) -> int | None:
        """Return the time (ms) since the node showed a new block; None before the first."""
        return self._stall_detector.age_ms()

    def height(self) -> int | None:
        """Return the height of the node's newest block at the last look; None before the first."""
        count = self._stall_detector.height
        return None if count is None else count - 1

    def stall(self) -> str | None:
        """Return a message for the operator when the chain has stopped; None on regtest, which
        mines on demand.
        """
        if self._options.mines_on_demand:
            return None
        return self._stall_detector.problem("the Monero node")

    def conditions(self) -> list[Condition]:
        """Return the reasons why node and wallet can't be relied on, for the operator."""
        lag = None if self.lag is None else f"out of sync: {self.lag}"
        return faults(self.problem, self.stall(), lag)

    async def check_wallet(self) -> None:
        """Raise ChainUnusable unless this is the wallet of the first start. Raises RpcFailure."""
        address = await self._open()
        check = await self.wallet.validate(address)
        if check.nettype != self._options.address_nettype:
            raise ChainUnusable(
                f"wrong network: the wallet is of {check.nettype}, not of"
                f" {self._options.address_nettype}"
            )
        await self._recognise(address)
        self.primary_address = address

    async def require_wallet(self) -> None:
        """Raise ChainUnusable unless the wallet that was checked is still the one that is open.

        Another may have been opened in its daemon without any call having failed. Raises
        RpcFailure.
        """
        await self._recognise(await self.wallet.primary_address())

    async def require_both(self) -> NodeInfo:
        """Check the node and ask which wallet is open, side by side; return the node's state."""
        info, _ = await asyncio.gather(self.check_node(), self.require_wallet())
        return info

    async def total_of_wallet(self) -> int:
        """Return what the wallet holds, locked or not, in piconero; raise as ``require_wallet``
        does: one answer tells both.
        """
        total, address = await self.wallet.total()
        await self._recognise(address)
        return total

    async def prepare_wallet(self) -> None:
        """Check the wallet and stop it from refreshing by itself."""
        await self.check_wallet()
        await self.wallet.auto_refresh(enabled=False)

    def _connected(self) -> None:
        """Note that all checks have passed."""
        self.wallet_checked = True
        if self.problem is not None:
            log.info("monero_connected")
        self.problem = None

    async def in_step(self, info: NodeInfo | None = None) -> NodeInfo:
        """Return the node's state once the wallet has scanned exactly its chain; refresh the wallet
        unless it had a moment ago. ``info``: the node's state, if it was just asked for.

        After blocks were taken off the chain a wallet keeps the transfers in them until the first
        block of the new branch: then it is ahead of its node. Raises errors.Unavailable.
        """
        for _ in range(_TRIES):
            before, info = info or await self.check_node(), None
            if self._was_in_step(before) and await self.wallet.height() == before.height:
                return before
            await self.wallet.refresh()
            scanned, after = await self.wallet.height(), await self.check_node()
            if scanned == after.height and before.top_hash == after.top_hash:
                self.note_in_step(after)
                return after
        self.lag = f"the wallet is at height {scanned}, the node at {after.height}"
        raise Unavailable("The XMR wallet and its node are not at the same block. Try again later.")

    def note_split(self, info: NodeInfo) -> None:
        """Note that a node lacks the top block that a node behind the same name has named."""
        lag = f"of several nodes one lacks block {info.height - 1}, which another named"
        if self.lag != lag:
            log.warning("monero_nodes_differ", height=info.height - 1, hash=info.top_hash)
        self.lag = lag

    def note_in_step(self, info: NodeInfo) -> None:
        """Note that the wallet was refreshed, and has scanned the node's chain up to this top."""
        self.lag = None
        self._in_step = (info, steady_ms())

    async def is_where_it_was(self) -> bool:
        """Return whether the wallet was in step a moment ago and is at the same height: it was not
        started again from an older file.
        """
        if self._in_step is None:
            return False
        known, at = self._in_step
        return steady_ms() - at < _IN_STEP_MS and await self.wallet.height() == known.height

    def _was_in_step(self, info: NodeInfo) -> bool:
        """Whether the wallet was in step at this very top block, a moment ago.

        Not for longer: the node may have left the block since, and have come back to it, while
        somebody else had the wallet refreshed. No output of the blocks between is spendable.
        """
        if self._in_step is None:
            return False
        known, at = self._in_step
        return known.top_hash == info.top_hash and steady_ms() - at < _IN_STEP_MS

    async def _open(self) -> str:
        """Open the wallet unless it is open; return its own address."""
        try:
            return await self.wallet.primary_address()
        except NodeError as error:
            if error.code != WalletCode.NOT_OPEN or self._options.wallet_file is None:
                raise
            await self.wallet.open(self._options.wallet_file, self._options.wallet_password)
            return await self.wallet.primary_address()

    async def _recognise(self, address: str) -> None:
        known = await self._ledger.wallet()
        if known is None:
            await self._ledger.adopt_wallet(WalletRecord(self._options.nettype, address, 0))
            log.info("monero_wallet_adopted", primary_address=address)
        elif known.primary_address != address:
            raise ChainUnusable(
                f"another wallet: its primary address begins with {address[:12]}, that of the"
                f" first start with {known.primary_address[:12]}"
            )
        elif known.nettype != self._options.nettype:
            raise ChainUnusable(
                f"wrong network: the service was first started on {known.nettype}, and is now"
                f" set to {self._options.nettype}"
            )

    def _note(self, reason: str) -> None:
        self.wallet_checked, self._in_step = False, None
        if reason != self.problem:
            log.warning("monero_disconnected", reason=reason)
        self.problem = reason

    def _reason(self, failure: RpcFailure) -> str:
        which = "node" if failure.node == self.node.rpc.endpoint.name else "wallet"
        if isinstance(failure, NodeError):
            if failure.code == WalletCode.NOT_OPEN and which == "wallet":
                return "the wallet is locked: the wallet daemon has no wallet open"
            return f"the Monero {which} refuses: {failure}"
        return f"the Monero {which} is down: {failure}"
