"""A sidecar beside a service, over real sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from rpcsvc.domain.addresses import stagenet_subaddress
from tests.contract.serving import EVM, Served, serving

STAGENET = stagenet_subaddress(bytes(range(64)))
SWAPS = {
    "x2u": {"direction": "x2u", "chain": "arbitrum", "amount": "0.8", "to": EVM},
    "u2x": {"direction": "u2x", "chain": "arbitrum", "amount": "150", "to": STAGENET},
}


@asynccontextmanager
async def beside(central: Served, data_dir: Path, **flags: Any) -> AsyncIterator[Served]:
    """A sidecar of ``central``, or of whatever ``upstream.url`` says."""
    environ = {
        "RPCSVC_ENGINE": "upstream",
        "RPCSVC_UPSTREAM__URL": central.url,
        "RPCSVC_UPSTREAM__MONERO_NETWORK": "stagenet",
    }
    async with serving(data_dir, environ, **flags) as sidecar:
        yield sidecar


async def upstream_id(sidecar: Served, order_id: str) -> str:
    order = await sidecar.up.service.store.order(order_id)
    assert order is not None
    assert order.terms.upstream_id is not None
    return order.terms.upstream_id
