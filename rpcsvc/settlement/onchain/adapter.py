"""The interfaces of a network, its payments and its asset's adapter; and NetworkWatch.

A scan that hangs or fails delays no other network: it goes on, and a later pass shows its result.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Final, Protocol

import structlog

from rpcsvc.clock import steady_ms
from rpcsvc.domain.money import Asset
from rpcsvc.domain.order import DepositKey, Transfer
from rpcsvc.domain.reservations import Holdings
from rpcsvc.health import Condition, Health
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

# A pass waits no longer for one network: the deposits of others and all payouts wait with it.
SCAN_TIMEOUT_SECONDS: Final = 2.0
# A scan takes milliseconds; after this long its node hangs or catches up.
HANGS_SECONDS: Final = 15.0


class Payments(Protocol):
    """The payments of one network, each on record before it is published.

    As in orders/ports/wallets.Wallets, any exception other than TransferRejected means that the
    outcome is not known.
    """

    async def recorded(self, transfer: Transfer) -> PreparedTransfer | None:
        """Return the transfer's payment if it is on record: the payment journal brought it back,
        and its order has planned the transfer since. Raises TransferRejected when it failed.
        """
        ...

    async def prepare(
        self,
        transfer: Transfer,
        companions: Sequence[Transfer],
        record: Record,
        leaves: Mapping[str, int],
    ) -> Sequence[Transfer]:
        """Sign and ``record`` without publishing, with those of ``companions`` that can be signed
        now. Return, and raise, as orders/ports/wallets.Wallets does.
        """
        ...

    async def publish(self, transfer: Transfer) -> Verdict:
        """Publish the transfer's signed bytes, unless the network has them; repeating is safe."""
        ...

    async def look_up(self, transfer: Transfer) -> Verdict:
        """Return the outcome of the transfer's payment on the network."""
        ...

    async def receipt(self, transfer: Transfer) -> dict[str, Any]:
        """Return the proof of a settled transfer, in the form that agents get.

        Raises errors.Unavailable when it can't be made now.
        """
        ...


class ServedNetwork(Protocol):
    """A network as the engine sees it. Units are atomic ones of the network's asset.

    ``carried_at_once``: how many transfers are carried on side by side.
    ``block_seconds``: the typical time between blocks, in whole seconds, at least 1.
    """

    asset: Asset
    payments: Payments
    carried_at_once: int
    block_seconds: int

    @property
    def signed_together(self) -> int:
        """The most transfers that are signed and recorded together."""
        ...

    def fee(self) -> int:
        """Return the network fee of a transfer, with a margin.

        Raises errors.Unavailable before it is known.
        """
        ...

    def holdings(self) -> Holdings:
        """Return the spendable balance. Raises errors.Unavailable before it is known."""
        ...

    async def accepts(self, address: str) -> bool:
        """False if the network is known, within a second, to refuse payments to the address."""
        ...

    def state(self) -> NetworkState:
        """Return the state of the network at the last refresh."""
        ...

    def seconds(self, units: int) -> int:
        """Return the typical time, in seconds, until a deposit of ``units`` is confirmed."""
        ...

    async def confirmations(self, key: DepositKey, height: int | None = None) -> int:
        """Return the confirmations of a deposit; 0 while it is in the pool or gone.

        As of the last scan, or when the newest block is at ``height`` (NetworkState.node_height).
        """
        ...

    def required_confirmations(self, units: int) -> int:
        """Return the confirmations after which deposits of ``units`` in all count."""
        ...

    async def is_final(self, key: DepositKey) -> bool:
        """Return whether a deposit had all confirmations that the network asks for at most, at the
        last scan.
        """
        ...

    async def observe(self) -> Observation:
        """Return deposits that may have changed since they were last acknowledged, recomputed."""
        ...

    async def acknowledge(self, sightings: Sequence[DepositSighting]) -> None:
        """Note that these, all of this network, are committed: cursors may move, final ones need
        not be shown again.
        """
        ...


class ChainAdapter(Protocol):
    """An asset on the networks that carry it, by their names in orders.

    ``upkeep``: the work between passes by name: make addresses ahead, sweep, and note conditions
    for the operator. Each is repeated by itself, and waits for none of the others.
    """

    asset: Asset
    networks: Mapping[str, ServedNetwork]
    upkeep: Mapping[str, Callable[[], Awaitable[None]]]

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
        """Return a fresh address, made ahead. Raises errors.Unavailable when none is left."""
        ...

    def total(self) -> int:
        """Return the whole balance, locked or not. Raises errors.Unavailable before it is known."""
        ...

    def names(self, chain: str) -> NetworkNames:
        """Return the names of the network that takes the deposit of an order of ``chain``."""
        ...

    async def conditions(self) -> list[Condition]:
        """Return conditions for the operator. While there is a fault, orders may wait."""
        ...


async def each_of(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Run all of them concurrently; once all have ended, raise the first failure."""
    for result in await asyncio.gather(*works, return_exceptions=True):
        if result is not None:
            raise result


def together(looks: Iterable[Observation]) -> Observation:
    """Return the observations of several networks as one."""
    parts = list(looks)
    return Observation(
        [sighting for part in parts for sighting in part.sightings],
        {network: at for part in parts for network, at in part.complete_until.items()},
    )


class NetworkWatch:
    """Runs one network's scans, one at a time. Seconds are those of ``now``, which is monotonic.

    ``has_looked``: the last ``observe`` finished a scan, and its result may be acknowledged.
    """

    def __init__(
        self,
        name: str,
        network: ServedNetwork,
        *,
        timeout: float = SCAN_TIMEOUT_SECONDS,
        now: Callable[[], float] = lambda: steady_ms() / 1000,
    ) -> None:
        self._name = name
        self._network = network
        self._timeout = timeout
        self._now = now
        self._since = 0.0
        self._fault: str | None = None
        self._poll: asyncio.Task[Observation] | None = None
        self.has_looked = False

    async def observe(self) -> Observation:
        """Return the result of the last scan; an empty one while it is under way, or when it
        failed.
        """
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
            log.error("deposit_scan_failed", network=self._name, exc_info=error)
        self._fault = fault

    async def _observe(self) -> Observation:
        return await self._network.observe()

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
        """Return not ok while a scan hangs, or after one that failed."""
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
