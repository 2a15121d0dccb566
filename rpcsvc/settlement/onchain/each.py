"""Several adapters or networks as one: none is left out when another one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

from rpcsvc.orders.ports.wallets import Observation


async def each_of(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all of them at the same time; once all have ended, raise the first failure."""
    for result in await asyncio.gather(*works, return_exceptions=True):
        if result is not None:
            raise result


def together(looks: Iterable[Observation]) -> Observation:
    """What looks at different networks have found."""
    parts = list(looks)
    return Observation(
        [sighting for part in parts for sighting in part.sightings],
        {network: at for part in parts for network, at in part.complete_until.items()},
    )
