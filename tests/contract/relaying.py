"""A service that passes orders on to an upstream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from aiohttp import ClientSession, web

from tests.contract import upstream_server as does
from tests.contract.serving import EVM, Served, serving
from tests.contract.upstream_server import Behaviour, UpstreamServer
from tests.rows import all_rows

SWAP = {"direction": "x2u", "chain": "arbitrum", "amount": "0.8", "to": EVM}


@asynccontextmanager
async def service(
    url: str, data_dir: Path, dialect: str = "v1", **more: Any
) -> AsyncIterator[Served]:
    async with serving(data_dir, environ_of(url, dialect, **more)) as served:
        yield served


def environ_of(url: str, dialect: str, **more: Any) -> dict[str, str]:
    return {
        "RPCSVC_ENGINE": "upstream",
        "RPCSVC_UPSTREAM__URL": url,
        "RPCSVC_UPSTREAM__DIALECT": dialect,
        "RPCSVC_UPSTREAM__MONERO_NETWORK": "stagenet",
        "RPCSVC_ORDERS__UNFUNDED_ADDRESS_ORDERS": "1000",
        **{f"RPCSVC_UPSTREAM__{name}": str(value) for name, value in more.items()},
    }


async def create(served: Served, key: str | None = None) -> dict[str, Any]:
    params = SWAP if key is None else {**SWAP, "idempotency-key": key}
    return dict((await served.rpc("swap.create", params)).body["result"])


def states(served: Served) -> list[str]:
    return [row[0] for row in all_rows(served.up.database, "SELECT state FROM relays ORDER BY seq")]


LOST: dict[str, Behaviour] = {
    "reset": does.reset(),
    "cut in the body": does.cut_in_body({"orderId": "up-1"}),
    "cut in a chunk": does.cut_in_chunk(),
    "no HTTP": does.not_http(),
    "HTTP 500": does.answer({"error": "internal"}, status=500),
    "HTTP 502": does.answer(raw=b"<h1>Bad gateway", content_type="text/html", status=502),
    "garbage": does.answer(raw=b'{"orderId": "up-1", "orderId": "up-2"}'),
    "half an order": does.answer({"orderId": "up-1", "depositAddress": "somewhere"}),
}


async def changed(served: Served, order_id: str, wanted: str) -> None:
    """Wait until the order has a status."""
    while True:
        order = await served.up.service.store.order(order_id)
        if order is not None and order.status == wanted:
            return
        await asyncio.sleep(0.01)


# --- a dialect with keys ---


class Cutting:
    """Passes calls on to a service; ``lose``: faults for the answers of the next creations.

    ``lose_calls``: creations are lost before they reach the service. ``no_price``: quotes are
    refused; ``no_order``: creations are.
    """

    def __init__(self, server: UpstreamServer, target: str) -> None:
        self.server = server
        self.target = target
        self.lose: list[Behaviour] = []
        self.lose_calls = self.no_price = self.no_order = False
        server.otherwise = self.handle

    async def handle(self, server: UpstreamServer, request: web.Request) -> web.StreamResponse:
        if self.lose_calls and request.path.endswith("/orders"):
            return await does.reset()(server, request)
        refused = (self.no_price, "/quote"), (self.no_order, "/orders")
        if any(is_on and request.path.endswith(end) for is_on, end in refused):
            error = {"code": "amount_below_minimum", "message": "The minimum has risen."}
            return web.json_response({"error": error}, status=400)
        passed = {n: v for n, v in request.headers.items() if n.lower() in _PASSED}
        async with ClientSession() as session, session.request(
            request.method, self.target + request.path_qs, data=await request.read(), headers=passed
        ) as response:  # fmt: skip
            body = await response.read()
            if self.lose and request.path.endswith(("/orders", "/deposit")):
                return await self.lose.pop(0)(server, request)
            return web.Response(status=response.status, body=body, content_type="application/json")


_PASSED = {"content-type", "idempotency-key", "x-api-key"}
