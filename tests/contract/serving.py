"""A service behind real sockets on loopback, with its settlement loop running."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import ClientResponse, web
from aiohttp.test_utils import BaseTestServer, TestClient

from rpcsvc.bootstrap import Running, running
from rpcsvc.http.edge import Edge
from rpcsvc.http.http_server import EdgeRunner
from rpcsvc.serving import web_app
from rpcsvc.settings import load_settings
from tests.rows import one_row

TOKEN = "correct-horse-battery-staple"
EVM = "0x52908400098527886E0F7030069857D2E4169EE7"
MONERO = (
    "888tNkZrPN6JsEgekjMnABU4TBzc2Dt29EPAvkRxbANsAnjyPbb3iQ1YBRk1UXcdRsiKc"
    "9dhwMVgN5S9cQUiyoogDavup3H"
)
SWAP = {"direction": "x2u", "chain": "arbitrum", "amount": "0.8", "to": EVM}
BACK = {"direction": "u2x", "chain": "base", "amount": "150", "to": MONERO}
UNKNOWN_ORDER = "ord_" + "0" * 26
JSON = {"content-type": "application/json"}


class Answer(NamedTuple):
    """An answer over HTTP."""

    status: int
    body: Any
    headers: Any


class EdgeServer(BaseTestServer):
    """Serves an edge on loopback, on a free port unless one is named."""

    def __init__(self, edge: Edge, port: int | None = None) -> None:
        super().__init__(port=port)
        self.app = edge.routes
        self._edge = edge

    async def _make_runner(self, **kwargs: Any) -> web.BaseRunner:
        # As in production: aiohttp's test server would cancel handlers whose caller hangs up.
        return EdgeRunner(self._edge, **{**kwargs, "handler_cancellation": False})


class Served:
    """A running service, and calls to it over its sockets."""

    def __init__(self, up: Running, client: TestClient[Any, Any]) -> None:
        self.up = up
        self.client = client

    @property
    def url(self) -> str:
        return str(self.client.make_url("/"))[:-1]

    async def http(self, method: str, path: str, **kwargs: Any) -> Answer:
        return await _answer(await self.client.request(method, f"/api/v1{path}", **kwargs))

    async def post(self, path: str, params: Any, **headers: str) -> Answer:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        return await self.http("POST", path, json=params, headers=names)

    async def raw(self, body: bytes, path: str = "/rpc", **headers: str) -> Answer:
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        response = await self.client.post(path, data=body, headers={**JSON, **names})
        return await _answer(response)

    async def rpc(self, method: str, params: Any, **headers: str) -> Answer:
        message = {"jsonrpc": "2.0", "id": "1", "method": f"service.{method}", "params": params}
        return await self.raw(json.dumps(message).encode(), **headers)

    async def rpc_discover(self, **headers: str) -> Answer:
        message = {"jsonrpc": "2.0", "id": "1", "method": "rpc.discover"}
        return await self.raw(json.dumps(message).encode(), **headers)

    def count(self, table: str) -> int:
        row = one_row(self.up.database, f"SELECT count(*) FROM {table}")
        return int(row[0])


async def a_ticket(served: Served, **params: Any) -> dict[str, str]:
    """A new ticket: what opens it."""
    answer = await served.post("/agent/support/tickets", {"message": "m", **params})
    data = answer.body["data"]
    return {"ticketId": data["ticket"]["ticketId"], "ticketSecret": data["ticketSecret"]}


async def with_live_ticket(served: Served, params: dict[str, Any]) -> dict[str, Any]:
    """The params with a new ticket in place of a recorded one."""
    return {**params, **await a_ticket(served)} if "ticketId" in params else params


async def placed(
    served: Served, params: dict[str, Any], *, in_usdc: bool = False
) -> dict[str, Any]:
    """The params of an example, with an order and a ticket of their own for its placeholders."""
    wanted, known = set(map(str, params.values())), {}
    if {"$orderId", "$sessionId"} & wanted:
        data = (await served.post("/agent/swap/execute", BACK if in_usdc else SWAP)).body["data"]
        known = {"$orderId": data["order"]["orderId"], "$sessionId": data["sessionId"]}
    if "$ticketId" in wanted:
        known |= {f"${name}": value for name, value in (await a_ticket(served)).items()}
    return {name: known.get(str(value), value) for name, value in params.items()}


def split_path(path: str, params: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The path of an operation with its path params filled in, and the other params."""
    rest = dict(params)
    for name in [name for name in rest if f"{{{name}}}" in path]:
        path = path.replace(f"{{{name}}}", str(rest.pop(name)))
    return path, rest


async def _answer(response: ClientResponse) -> Answer:
    text = await response.read()
    return Answer(response.status, json.loads(text) if text else {}, response.headers)


@asynccontextmanager
async def serving(
    data_dir: Path,
    environ: dict[str, str] | None = None,
    *,
    port: int | None = None,
    **flags: Any,
) -> AsyncIterator[Served]:
    """A service on ``data_dir``; limits are off unless ``flags`` say otherwise."""
    given = {
        "data_dir": str(data_dir),
        "rate_limit.enabled": False,
        "support.tickets_per_client": 1_000_000,
        "sandbox.xmr_block_ms": 50,
        "sandbox.usdc_block_ms": 50,
        **{name.replace("__", "."): value for name, value in flags.items()},
    }
    settings = load_settings(config_file=None, environ=environ or {}, flags=given).settings
    async with running(settings) as up:
        client: TestClient[Any, Any] = TestClient(EdgeServer(web_app(up), port))
        await client.start_server()
        beat = asyncio.create_task(up.worker.run())
        try:
            yield Served(up, client)
        finally:
            await client.close()
            await up.worker.stop()
            await beat
