"""The interface of a chain adapter (one asset on the networks that carry it), and AdapterWatch.

A scan that hangs or fails delays no other adapter: it goes on, and a later pass shows its result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import structlog

from rpcsvc.clock import steady_ms
from rpcsvc.domain.money import Asset
from rpcsvc.domain.order import DepositKey, Transfer
from rpcsvc.domain.reservations import Holdings
from rpcsvc.health import Health
from rpcsvc.orders.ports.wallets import (
    DepositSighting,
    NetworkNames,
    NetworkState,
    Observation,
    PreparedTransfer,
    Record,
    Verdict,
)

log = structlog.get_logger(__name__)


class ChainAdapter(Protocol):
    """One asset on the networks that carry it. Units are atomic ones of that asset.

    As in orders/ports/wallets.Wallets, any exception other than TransferRejected means that the
    outcome is not known.
    """

    asset: Asset
    # Whose deposits and transfers belong to this adapter.
    networks: frozenset[str]

    async def start(self) -> None:
        """Connect, check that the nodes are on the right networks, load, catch up."""
        ...

    async def close(self) -> None:
        """Close the connections."""
        ...

    def require_ready(self) -> None:
        """Raise errors.Unavailable when orders of this asset can't be taken now."""
        ...

    def deposit_address(self) -> str:
        """A fresh address from those made ahead. Raises errors.Unavailable when none is left."""
        ...

    def fee(self, chain: str) -> int:
        """The network fee of a transfer in a swap with USDC on ``chain``, with a margin.

        Raises errors.Unavailable before it is known.
        """
        ...

    def holdings(self, network: str) -> Holdings:
        """The spendable balance on a network. Raises errors.Unavailable before it is known."""
        ...

    async def accepts(self, network: str, address: str) -> bool:
        """False if the network is known, within a second, to refuse payments to the address."""
        ...

    def total(self) -> int:
        """The whole balance, locked or not. Raises errors.Unavailable before the first refresh."""
        ...

    def states(self) -> Mapping[str, NetworkState]:
        """The state of each network at the last refresh."""
        ...

    def names(self, chain: str) -> NetworkNames:
        """The names of the network that takes the deposit of an order of ``chain``."""
        ...

    def seconds(self, chain: str, units: int) -> int:
        """The typical time, in seconds, until a deposit of ``units`` is confirmed."""
        ...

    def block_seconds(self, chain: str) -> int:
        """The typical time between blocks, in seconds, rounded up."""
        ...

    async def observe(self) -> Observation:
        """Deposits that may have changed since they were last acknowledged, recomputed."""
        ...

    async def acknowledge(self, sightings: Sequence[DepositSighting]) -> None:
        """Note that these are committed: cursors may move, final ones need not be shown again."""
        ...

    def transfers_per_payment(self, network: str) -> int:
        """The most transfers that one transaction of a network may carry out."""
        ...

    async def recorded(self, transfer: Transfer) -> PreparedTransfer | None:
        """The transfer's payment if it is on record: the payment journal brought it back, and its
        order has planned the transfer since. Raises TransferRejected when it failed.
        """
        ...

    async def prepare(
        self, transfer: Transfer, companions: Sequence[Transfer], record: Record
    ) -> None:
        """Sign and ``record`` without publishing. Raises TransferRejected; after anything else
        nothing is on record, and it may be retried.
        """
        ...

    async def publish(self, transfer: Transfer) -> Verdict:
        """Publish the transfer's signed bytes; repeating it is safe."""
        ...

    async def look_up(self, transfer: Transfer) -> Verdict:
        """The outcome for the transfer's transaction id."""
        ...

    async def receipt(self, transfer: Transfer) -> dict[str, Any]:
        """The proof of a settled transfer, in the form that agents get.

        Raises errors.Unavailable when it can't be made now.
        """
        ...

    async def confirmations(self, key: DepositKey, height: int | None = None) -> int:
        """The confirmations of a deposit; 0 while it is in the pool or gone.

        As of the last scan, or when the newest block is at ``height`` (NetworkState.node_height).
        """
        ...

    def required_confirmations(self, network: str, units: int) -> int:
        """The confirmations after which deposits of ``units`` in all are final on this network."""
        ...

    async def maintain(self) -> None:
        """Work between passes: make addresses ahead, sweep, note what the operator must know."""
        ...

    async def health(self) -> Health:
        """Whether this adapter can settle now."""
        ...

    async def notes(self) -> list[str]:
        """Notes for the operator that delay no order."""
        ...


async def each_of(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all of them at the same time; once all have ended, raise the first failure."""
    for result in await asyncio.gather(*works, return_exceptions=True):
        if result is not None:
            raise result


def together(looks: Iterable[Observation]) -> Observation:
    """The observations of several networks as one."""
    parts = list(looks)
    return Observation(
        [sighting for part in parts for sighting in part.sightings],
        {network: at for part in parts for network, at in part.complete_until.items()},
    )


# A pass waits no longer for one adapter: the other's deposits and all payouts wait with it.
SCAN_TIMEOUT_SECONDS: Final = 2.0
# A scan takes milliseconds. One that takes this long waits for a node that hangs or catches up.
HANGS_SECONDS: Final = 15.0


class AdapterWatch:
    """One adapter's scans, one at a time. Seconds are those of ``now``, which is monotonic.

    ``has_looked``: the last ``observe`` finished a scan, and its result may be acknowledged.
    """

    def __init__(
        self,
        adapter: ChainAdapter,
        *,
        timeout: float = SCAN_TIMEOUT_SECONDS,
        now: Callable[[], float] = lambda: steady_ms() / 1000,
    ) -> None:
        self._adapter = adapter
        self._timeout = timeout
        self._now = now
        self._since = 0.0
        self._fault: str | None = None
        self._poll: asyncio.Task[Observation] | None = None
        self.has_looked = False

    async def observe(self) -> Observation:
        """The result of the last scan; empty while it is under way, or when it failed."""
        self.has_looked = False
        if self._poll is None:
            self._since = self._now()
            self._poll = asyncio.create_task(self._observe())
        done, _ = await asyncio.wait({self._poll}, timeout=self._timeout)
        if not done:
            return Observation()
        poll, self._poll = self._poll, None
        try:
            found = poll.result()
        except Exception as error:  # noqa: BLE001 - logged, and in health
            self._failed(error)
            return Observation()
        self.has_looked, self._fault = True, None
        return found

    def _failed(self, error: Exception) -> None:
        """Log it once; a scan is begun every second."""
        fault = type(error).__name__
        if fault != self._fault:
            log.error("deposit_scan_failed", asset=self._adapter.asset.symbol, exc_info=error)
        self._fault = fault

    async def _observe(self) -> Observation:
        return await self._adapter.observe()

    async def close(self) -> None:
        """Cancel the scan that is under way."""
        poll, self._poll = self._poll, None
        if poll is not None:
            poll.cancel()
            await asyncio.gather(poll, return_exceptions=True)

    def hangs(self) -> bool:
        """Whether a scan has been under way for too long."""
        return self._poll is not None and self._now() - self._since >= HANGS_SECONDS

    def is_blind(self) -> bool:
        """Whether deposits are not seen: a scan hangs, or the last one failed."""
        return self._fault is not None or self.hangs()

    def health(self) -> Health:
        """Not ok while a scan hangs, or after one that failed."""
        if not self.is_blind():
            return Health(True)
        if self._fault is not None:
            fault = self._fault
            return Health(
                False,
                f"the deposit scan has failed ({fault}): report deposit_scan_failed in the log",
            )
        seconds = int(self._now() - self._since)
        return Health(
            False, f"the deposit scan has run for {seconds} s: a node hangs or catches up, check it"
        )
