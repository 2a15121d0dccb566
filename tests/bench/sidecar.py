"""A sidecar under many status polls: its upstream, and a store of open orders made there.

    python -m tests.bench.sidecar --port P      the upstream, in the public API's dialect

The upstream counts its calls: ``GET /mark`` resets the count, ``GET /busiest`` returns the number
in the busiest minute since.
"""

from __future__ import annotations

import argparse
import http.client
import itertools
import os
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web

from tests.bench import seeding
from tests.bench.driver import HOST, Server

START_SECONDS = 30.0
# The published limits of the public API, per client address and minute (budget.py).
CALLS_PER_MINUTE = 20
WINDOW_SECONDS = 60.0
_CHAINS = {
    "chains": [
        {"chainId": number, "name": str(number), "nativeToken": "ETH", "minSwapUsd": 1}
        for number in (0, 1, 10, 137, 8453, 42161)
    ]
}


class Upstream:
    """Accepts any order of USDC to XMR and never reports a deposit."""

    def __init__(self) -> None:
        self._orders: dict[str, dict[str, Any]] = {}
        self._calls: list[float] = []
        self._numbers = itertools.count(1)

    async def handle(self, request: web.Request) -> web.Response:
        """One call of the public API."""
        self._calls.append(time.monotonic())
        if request.path == "/v1/chains":
            return web.json_response(_CHAINS)
        if request.method == "GET":
            order = self._orders[request.path.rpartition("/")[2]]
            return web.json_response(order)
        body = await request.json()
        return web.json_response(_quote(body) if request.path == "/v1/quote" else self._make(body))

    def _make(self, body: dict[str, Any]) -> dict[str, Any]:
        number = next(self._numbers)
        order = {
            "orderId": f"up-{number}",
            "depositAddress": "0x" + sha256(b"%d" % number).hexdigest()[:40],
            "depositChain": "evm",
            "depositChainId": body["fromChainId"],
            "depositToken": body["fromToken"],
            "depositTokenSymbol": "USDC",
            "depositAmount": body["fromAmount"],
            "toAddress": body["toAddress"],
            "expectedOutput": _quote(body)["toAmount"],
            "expiresAt": "2099-01-01T00:00:00Z",
            "createdAt": "2026-01-01T00:00:00Z",
            "status": "awaiting_deposit",
            **dict.fromkeys(
                ("depositTxHash", "actualOutput", "errorMessage", "refundTxHash", "completedAt")
            ),
        }
        self._orders[order["orderId"]] = order
        return order

    async def mark(self, _request: web.Request) -> web.Response:
        """Forget the calls so far."""
        self._calls.clear()
        return web.json_response({})

    async def busiest(self, _request: web.Request) -> web.Response:
        """The most calls in any minute."""
        calls = self._calls
        ends = (sum(at <= other < at + WINDOW_SECONDS for other in calls) for at in calls)
        return web.json_response({"calls": max(ends, default=0), "all": len(calls)})


def _quote(body: dict[str, Any]) -> dict[str, Any]:
    received = int(body["fromAmount"]) * 10**6 // 165
    return {
        "fromAmount": body["fromAmount"], "fromAmountUsd": "1", "fromSymbol": "USDC",
        "toAmount": str(received), "toAmountUsd": "1", "toSymbol": "XMR",
        "estimatedTime": 1200, "minReceived": str(received * 99 // 100),
    }  # fmt: skip


def upstream(log: Path) -> Server:
    """Start the upstream."""
    server = Server("upstream", ["tests.bench.sidecar"], os.environ, log)
    server.wait_for("/readyz", START_SECONDS)
    return server


def ask(server: Server, path: str) -> dict[str, Any]:
    """One GET."""
    connection = http.client.HTTPConnection(HOST, server.port, timeout=30)
    try:
        connection.request("GET", path)
        found: dict[str, Any] = orjson.loads(connection.getresponse().read())
        return found
    finally:
        connection.close()


def service(data_dir: Path, log: Path, at: Server, *, calls_per_minute: int) -> Server:
    """Start the sidecar of an upstream, with a budget of so many calls a minute."""
    settings = {
        "RPCSVC_ENGINE": "upstream",
        "RPCSVC_UPSTREAM__URL": f"http://{HOST}:{at.port}",
        "RPCSVC_UPSTREAM__DIALECT": "v1",
        "RPCSVC_UPSTREAM__MONERO_NETWORK": "stagenet",
        "RPCSVC_UPSTREAM__CALLS_PER_MINUTE": str(calls_per_minute),
        "RPCSVC_UPSTREAM__CREATIONS_PER_MINUTE": str(calls_per_minute),
        "RPCSVC_UPSTREAM__RESERVABLE_USD": "1000000000",
    }
    return seeding.service("sidecar", data_dir, log, signs=False, more=settings)


def make_orders(data_dir: Path, log: Path, at: Server, count: int) -> list[str]:
    """Make orders at the upstream, through a sidecar without a budget; returns their ids."""
    server = service(data_dir, log, at, calls_per_minute=1_000_000)
    try:
        server.wait_for("/readyz", START_SECONDS)
        connection = http.client.HTTPConnection(HOST, server.port, timeout=60)
        found = [_made(connection, number) for number in range(count)]
        connection.close()
    finally:
        server.stop()
    return found


def _made(connection: http.client.HTTPConnection, number: int) -> str:
    params = seeding.swap_params(2 * number + 1)
    call = {"jsonrpc": "2.0", "id": "1", "method": "service.swap.create", "params": params}
    headers = {"content-type": "application/json", "x-agent-rpc-token": seeding.TOKEN}
    connection.request("POST", "/rpc", orjson.dumps(call), headers)
    answer = orjson.loads(connection.getresponse().read())
    try:
        return str(answer["result"]["data"]["order"]["orderId"])
    except KeyError:
        raise seeding.SeedingFailed(f"no order was made: {answer}") from None


def main() -> None:
    """Serve the upstream on the loopback until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.sidecar")
    parser.add_argument("--port", type=int, required=True)
    port = parser.parse_args().port
    served, app = Upstream(), web.Application()

    async def ready(_: web.Request) -> web.Response:
        return web.json_response({"status": "ok"})

    app.router.add_get("/readyz", ready)
    app.router.add_get("/mark", served.mark)
    app.router.add_get("/busiest", served.busiest)
    app.router.add_route("*", "/v1/{rest:.*}", served.handle)
    web.run_app(app, host=HOST, port=port, access_log=None, print=None)


if __name__ == "__main__":
    main()
