"""Whether an upstream settles on the network that this service tells its users to pay on.

Only another rpcsvc (dialect ``bff``) tells its network, in its capabilities. While it is not known,
or is another one, no order is made there: EVM addresses look the same on every network, so that an
order of a simulated service would take real USDC.
"""

from __future__ import annotations

from typing import Final

import structlog

from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.health import Health
from rpcsvc.settlement.upstream.budget import Demand, Urgency
from rpcsvc.settlement.upstream.calls import Upstream
from rpcsvc.settlement.upstream.models import UpstreamError

log = structlog.get_logger(__name__)

# Whose addresses a service on a network gives; a sandbox's are of stagenet.
_MONERO_OF: Final = {
    "sandbox": MoneroNetwork.STAGENET,
    **{each.value: each for each in MoneroNetwork},
}


class NetworkCheck:
    """What the upstream last told of its network. A call that fails changes nothing."""

    def __init__(self, upstream: Upstream, ours: MoneroNetwork) -> None:
        self._upstream = upstream
        self._ours = ours
        self._told: str | None = None
        self._problem = "it was not asked yet"

    async def ask(self, demand: Demand, *, patience_ms: int | None = None) -> bool:
        """Ask for the network now; whether it was told. What goes wrong is logged."""
        try:
            told = await self._upstream.network(demand, patience_ms=patience_ms)
        except UpstreamError as error:
            self._problem = error.reason
            log.warning("upstream_network_unknown", reason=error.reason)
            return False
        was, self._told = self._told, told
        if self._is_another and told != was:
            log.error("upstream_network_differs", upstream=told, ours=self._ours.value)
        return True

    @property
    def _is_another(self) -> bool:
        return self._told is not None and _MONERO_OF.get(self._told) is not self._ours

    def require_same(self) -> None:
        """Raise errors.Unavailable unless the upstream was last known to be on our network."""
        if self._told is None:
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
        """The same, of what the upstream tells when it is asked now: before each order."""
        if not await self.ask(Demand(Urgency.CREATION)):
            raise Unavailable(
                "The service that settles this does not tell its network now. Try again later.",
                retry_after=10,
            )
        self.require_same()

    def health(self) -> Health:
        """Not ok until the upstream has told that it is on our network."""
        if self._told is None:
            return Health(False, f"The upstream's network is not known: {self._problem}")
        if not self._is_another:
            return Health(True)
        return Health(
            False,
            f"The upstream settles on {self._told}, and upstream.monero_network is {self._ours}: no"
            f" order is made. {self._remedy()}",
        )

    def _remedy(self) -> str:
        move = f"Set upstream.url to a service on {self._ours}"
        theirs = _MONERO_OF.get(self._told or "")
        return (
            f"{move}{f', or upstream.monero_network to {theirs},' if theirs else ''} and restart."
        )
