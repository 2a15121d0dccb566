"""The chains on offer and the upstream's network: read from it at start, and refreshed.

OfferedChains   the registry that our surfaces read: configured, and listed by the upstream
NetworkCheck    refuses orders while the upstream's network is not known to be ours
ChainWatch      asks for both
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterable
from decimal import Decimal
from itertools import islice
from typing import Final

import structlog
from msgspec import Struct
from msgspec.structs import replace
from typing_extensions import override

from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.domain.chains import MONERO_CHAIN_ID, Chain, ChainRegistry
from rpcsvc.errors import Unavailable, UnsupportedChain
from rpcsvc.health import Health
from rpcsvc.settlement.upstream.answers import UpstreamChain
from rpcsvc.settlement.upstream.calls import Upstream
from rpcsvc.settlement.upstream.client import Timing
from rpcsvc.settlement.upstream.limits import Demand, Urgency
from rpcsvc.settlement.upstream.transport import UpstreamError

log = structlog.get_logger(__name__)
# Whose addresses a service on a network gives; a sandbox's are of stagenet.
_MONERO_OF: Final = {
    "sandbox": MoneroNetwork.STAGENET,
    **{each.value: each for each in MoneroNetwork},
}

# A sleep is no longer than this, so that a list that is wanted sooner is asked for sooner.
_LOOK_AGAIN_MS: Final = 1_000
_MOST_SHOWN: Final = 20
_MOST_DOLLARS: Final = Decimal(10**12)


class NetworkCheck:
    """The network that the upstream reported last. A failed call changes nothing.

    EVM addresses look the same on every network, so that an order of a simulated service would take
    real USDC. Only another rpcsvc (dialect ``bff``) reports its network.
    """

    def __init__(self, upstream: Upstream, ours: MoneroNetwork) -> None:
        self._upstream = upstream
        self._ours = ours
        self._reported: str | None = None
        self.takes_signatures = False
        self._problem = "it was not asked yet"

    async def ask(self, demand: Demand, *, total_ms: int | None = None) -> bool:
        """Ask for the network now; returns whether it was reported. Failures are logged."""
        try:
            found = await self._upstream.capabilities(demand, total_ms=total_ms)
        except UpstreamError as error:
            self._problem = error.reason
            log.warning("upstream_network_unknown", reason=error.reason)
            return False
        reported, self.takes_signatures = found.data.network, found.takes_signatures
        was, self._reported = self._reported, reported
        if self._is_another and reported != was:
            log.error("upstream_network_differs", upstream=reported, ours=self._ours.value)
        return True

    @property
    def _is_another(self) -> bool:
        return self._reported is not None and _MONERO_OF.get(self._reported) is not self._ours

    def require_same(self) -> None:
        """Raise errors.Unavailable unless the upstream was last known to be on our network."""
        if self._reported is None:
            raise Unavailable(
                "The network of the service that settles this is not known yet. Try again later.",
                retry_after=10,
            )
        if self._is_another:
            raise Unavailable(
                "The service that settles this is on another network than this one. No order is"
                " made until its operator has set that right.",
                retry_after=60,
            )

    async def require_same_now(self) -> None:
        """Raise errors.Unavailable unless a fresh answer names our network. Called before each
        order.
        """
        if not await self.ask(Demand(Urgency.CREATION)):
            raise Unavailable(
                "The service that settles orders does not report its network now. Try again later.",
                retry_after=10,
            )
        self.require_same()

    def health(self) -> Health:
        """Return the health: not ok until the upstream has reported that it is on our network."""
        if self._reported is None:
            return Health(False, f"The upstream's network is not known: {self._problem}")
        if not self._is_another:
            return Health(True)
        return Health(
            False,
            f"The upstream settles on {self._reported}, and upstream.monero_network is"
            f" {self._ours}: no order is made. {self._remedy()}",
        )

    def _remedy(self) -> str:
        move = f"Set upstream.url to a service on {self._ours}"
        theirs = _MONERO_OF.get(self._reported or "")
        return (
            f"{move}{f', or upstream.monero_network to {theirs},' if theirs else ''} and restart."
        )


class OfferedChains(ChainRegistry):
    """The configured chains that are on offer; all of them until the upstream has sent its list.

    A chain that is not on offer is still found by its name and number: an order that was made on
    it stays readable, and the retry of a key gets its first answer.
    """

    def __init__(self, configured: ChainRegistry) -> None:
        super().__init__(configured.all())
        self._on_offer = configured

    @override
    def all(self) -> tuple[Chain, ...]:
        return self._on_offer.all()

    @override
    def resolve(self, value: object, *, field: str = "chain") -> Chain:
        try:
            return super().resolve(value, field=field)
        except UnsupportedChain:
            # The same refusal, in which no chain is named that is not on offer.
            return self._on_offer.resolve(value, field=field)

    def offer(self, listed: Iterable[UpstreamChain]) -> tuple[Chain, ...]:
        """Offer the configured chains that are listed, and no others, with the upstream's minimum.

        Returns them; when there are none, the earlier offer stays.
        """
        least = {chain.chain_id: _dollars(chain.min_swap_usd) for chain in listed}
        kept = tuple(
            replace(chain, min_swap_usd=least[chain.chain_id])
            for chain in super().all()
            if chain.chain_id in least
        )
        if kept:
            self._on_offer = ChainRegistry(kept)
        return kept

    def refusal(self, chain: Chain) -> UnsupportedChain:
        """The error for a chain that the upstream refuses, naming the others on offer."""
        names = [other.name for other in self.all() if other.chain_id != chain.chain_id]
        return UnsupportedChain(
            f"{chain.name} is not taken by the service that settles this."
            f" Send one of: {', '.join(names)}.",
            field="chain",
            received=chain.name,
            allowed=names,
        )


class Pace(Struct, frozen=True):
    """The pauses between requests for the list, in ms.

    ``start``: how long a start waits for it at most. ``unknown``, ``failed`` and ``usual``: the
    pause while nothing is known, after a failure, and otherwise. ``least``: the shortest pause when
    somebody has a reason to ask.
    """

    start: int = 5_000
    unknown: int = 10_000
    failed: int = 60_000
    usual: int = 600_000
    least: int = 30_000


class ChainWatch:
    """Keeps OfferedChains to what the upstream lists. A refresh that fails changes nothing.

    ``network`` is asked for together with the list; None where the upstream does not report it.
    """

    def __init__(
        self,
        upstream: Upstream,
        chains: OfferedChains,
        timing: Timing,
        pace: Pace | None = None,
        network: NetworkCheck | None = None,
    ) -> None:
        self._network = network
        self._upstream = upstream
        self._chains = chains
        self._timing = timing
        self._pace = pace or Pace()
        self._problem = "it was not asked yet"
        self._asked_at = self._due_at = timing.now_ms()
        self._learned_at: int | None = None
        self._task: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Ask once, without waiting long since the upstream may be down; then ask regularly."""
        try:
            async with asyncio.timeout(self._pace.start / 1000):
                await self.ask(Urgency.WATCHED, total_ms=self._pace.start // 2)
        except TimeoutError:
            self._failed(f"no answer within {self._pace.start} ms")
        self._task = asyncio.create_task(self._run(), name="upstream chains")

    async def close(self) -> None:
        """Ask no more."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def require_known(self) -> None:
        """Raise errors.Unavailable until the upstream has sent its list once, and while it is not
        known to be on our network.
        """
        if self._network is not None:
            self._network.require_same()
        if self._learned_at is None:
            left = self._due_at - self._timing.now_ms()
            raise Unavailable(
                "The service that settles orders has not listed its chains yet. Try again later.",
                retry_after=max(1, -(-left // 1000)),
            )

    async def require_network(self) -> None:
        """Raise errors.Unavailable unless the upstream reports our network in a fresh answer."""
        if self._network is None:
            return
        try:
            await self._network.require_same_now()
        except Unavailable:
            self._ask_for_network_soon()
            raise

    def _ask_for_network_soon(self) -> None:
        self._due_at = min(self._due_at, self._timing.now_ms() + self._pace.unknown)

    @property
    def takes_signatures(self) -> bool:
        """Whether the upstream said last that it takes signed payments (x402)."""
        return self._network is not None and self._network.takes_signatures

    def health(self) -> Health:
        """Return the health: not ok until the upstream has sent its list once and reported our
        network.
        """
        if self._network is not None and not (network := self._network.health()).ok:
            return network
        if self._learned_at is None:
            return Health(False, f"The upstream's chains are not known: {self._problem}")
        return Health(True)

    def ask_soon(self) -> None:
        """The list may have changed."""
        self._due_at = min(self._due_at, self._asked_at + self._pace.least)

    async def ask(self, urgency: Urgency, *, total_ms: int | None = None) -> None:
        """Ask for the list and the network now. What goes wrong is logged, and in ``health``."""
        self._asked_at = self._timing.now_ms()
        if self._network is None:
            await self._ask_for_chains(urgency, total_ms)
            return
        await asyncio.gather(
            self._ask_for_chains(urgency, total_ms),
            self._network.ask(Demand(urgency), total_ms=total_ms),
        )
        if not self._network.health().ok:
            self._ask_for_network_soon()

    async def _ask_for_chains(self, urgency: Urgency, total_ms: int | None) -> None:
        try:
            reported = await self._upstream.chains(Demand(urgency), total_ms=total_ms)
        except UpstreamError as error:
            self._failed(error.reason)
            return
        before, kept = self._chains.all(), self._chains.offer(reported.chains)
        if not kept:
            listed = _shown(reported.chains)
            self._failed(f"none of the configured chains is among those it lists: {listed}")
            return
        self._learned_at = self._timing.now_ms()
        self._due_at = self._learned_at + self._pace.usual
        if kept != before:
            log.info("upstream_chains_listed", offered=[chain.name for chain in kept])

    def _failed(self, problem: str) -> None:
        self._problem = problem
        pause = self._pace.unknown if self._learned_at is None else self._pace.failed
        self._due_at = self._timing.now_ms() + pause
        log.warning("upstream_chains_unknown", reason=problem)

    async def _run(self) -> None:
        while True:
            while (left := self._due_at - self._timing.now_ms()) > 0:
                await self._timing.sleep_ms(min(left, _LOOK_AGAIN_MS))
            try:
                await self.ask(Urgency.ROUTINE)
            except Exception:
                # On any failure the known list is kept, and the log says why.
                log.exception("upstream_chains_failed")
                self._failed("the call broke; see upstream_chains_failed in the log")


def _dollars(minimum: Decimal) -> int:
    """Whole dollars, rounded up, and at most 10^12."""
    return math.ceil(min(minimum, _MOST_DOLLARS))


def _shown(listed: Iterable[UpstreamChain]) -> str:
    numbers = (chain.chain_id for chain in listed if chain.chain_id != MONERO_CHAIN_ID)
    reported = list(map(str, islice(numbers, _MOST_SHOWN)))
    return ", ".join(reported) or "none"
