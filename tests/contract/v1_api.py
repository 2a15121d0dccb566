"""A small server of the public cross-chain API as documented, which misbehaves on command.

``lose``: behaviours for the answers of the next creations, after the order was made.
``statuses``: successive statuses of an order; the last one stays. ``no_price``: quotes are refused.
``change`` and ``change_status``: fields replaced in the answers to a creation and to a status call.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from rpcsvc.domain.addresses import evm_address_from_seed, stagenet_subaddress
from tests.contract import upstream_server as does
from tests.contract.upstream_server import Behaviour, UpstreamServer

RATE = 165


class V1Api:
    """The API's state and handlers."""

    def __init__(self, server: UpstreamServer) -> None:
        self.server = server
        self.orders: dict[str, dict[str, Any]] = {}
        self.lose: deque[Behaviour | None] = deque()
        self.no_price = False
        self.change: dict[str, Any] = {}
        self.change_status: dict[str, Any] = {}
        self.chains = {0: "monero", 42161: "arbitrum", 8453: "base", 101: "solana"}
        self.statuses: deque[str] = deque(["awaiting_deposit"])
        self.asked = asyncio.Event()
        # No limits per minute, unless a test sets them.
        self.most_creations = self.most_calls = 10**9
        self._ids = itertools.count(1)
        server.otherwise = self.handle

    def sent(self, method: str, path: str) -> int:
        """The number of calls received."""
        return sum(s.method == method and s.target.startswith(path) for s in self.server.seen)

    async def handle(self, server: UpstreamServer, request: web.Request) -> web.StreamResponse:
        body = await request.json() if request.method == "POST" else {}
        if request.path == "/v1/order":
            if self.sent("POST", "/v1/order") > self.most_creations:
                return web.json_response({"error": "rate limit exceeded"}, status=429)
            return await self._create(server, request, body)
        if request.path.startswith("/v1/bridge/"):
            return await self._bridge(server, request, body)
        return self._read(server, request.path, body)

    def _read(self, server: UpstreamServer, path: str, body: dict[str, Any]) -> web.StreamResponse:
        if path.endswith("/chains"):
            return self._chains()
        if path.endswith("/capabilities"):  # called by a client that expects an rpcsvc
            return web.json_response({"data": {"network": "stagenet"}})
        if path == "/v1/quote" and self.no_price:
            return web.json_response({"error": "amount below minimum"}, status=400)
        if path == "/v1/quote":
            return web.json_response(_quote(body))
        if len(server.seen) - self.sent("POST", "/v1/order") > self.most_calls:
            return web.json_response({"error": "rate limit exceeded"}, status=429)
        return self._status(path.rpartition("/")[2])

    def _chains(self) -> web.StreamResponse:
        listed = [
            {"chainId": number, "name": name, "nativeToken": "XMR" if number == 0 else "ETH",
             "minSwapUsd": 12.5}
            for number, name in self.chains.items()
        ]  # fmt: skip
        return web.json_response({"chains": listed})

    async def _create(
        self, server: UpstreamServer, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        if int(body["fromAmount"]) < 10_000:
            return web.json_response({"error": "amount below minimum"}, status=400)
        is_xmr = body["fromChainId"] == 0
        if "twapConfig" in body and not is_xmr:
            return web.json_response({"error": "twapConfig is for XMR orders"}, status=400)
        number = next(self._ids)
        seed = bytes([number]) * 64
        order = {
            "orderId": f"up-{number}",
            "depositAddress": stagenet_subaddress(seed)
            if is_xmr
            else evm_address_from_seed(seed[:32]),
            "depositChain": "monero" if is_xmr else "arbitrum",
            "depositChainId": body["fromChainId"],
            "depositToken": body["fromToken"],
            "depositTokenSymbol": "XMR" if is_xmr else "USDC",
            "depositAmount": body["fromAmount"],
            "toAddress": body["toAddress"],
            "expectedOutput": _quote(body)["toAmount"],
            "expiresAt": "2036-01-01T00:00:00Z",
            "status": "awaiting_deposit",
        }
        self.orders[order["orderId"]] = order
        lost = self.lose.popleft() if self.lose else None
        if lost is not None:
            return await lost(server, request)
        return web.json_response({**order, **self.change})

    async def _bridge(
        self, server: UpstreamServer, request: web.Request, body: dict[str, Any]
    ) -> web.StreamResponse:
        what = request.path.removeprefix("/v1/bridge/")
        if what == "rates":
            rates = [{"exchange": "an exchange", "rate": 164.2, "eta": "5 min"}]
            return web.json_response({"rates": rates, "wagyuRate": {"rate": 165.5, "eta": "5 min"}})
        if what.startswith("order/"):
            return self._bridge_status(what.removeprefix("order/"))
        number = next(self._ids)
        seed, pays_monero = bytes([number]) * 64, what == "deposit"
        order = {
            "orderId": f"br-{number}",
            "depositAddress": (
                stagenet_subaddress(seed) if pays_monero else evm_address_from_seed(seed[:32])
            ),
            "destination": body["toAddress"],
            "expiresAt": "2036-01-01T00:00:00Z",
        }
        self.orders[order["orderId"]] = {**order, "type": what}
        lost = self.lose.popleft() if self.lose else None
        if lost is not None:
            return await lost(server, request)
        return web.json_response({**order, **self.change})

    def _bridge_status(self, order_id: str) -> web.StreamResponse:
        self.asked.set()
        order = self.orders[order_id]
        status = self.statuses[0] if len(self.statuses) == 1 else self.statuses.popleft()
        seen, over = status != "awaiting_deposit", status == "completed"
        return web.json_response(
            {
                "id": order_id,
                "type": order["type"],
                "status": status,
                "amount": "500000000000" if seen else "0",
                "confirmations": 10 if over else 0,
                "requiredConfirmations": 10,
                "tx_in": "ab" * 32 if seen else None,
                "tx_out": "cd" * 32 if over else None,
                "failure_reason": "The exchange is closed." if status == "failed" else None,
                "created_at": "2026-01-01T00:00:00Z",
                "completed_at": "2026-01-01T01:00:00Z" if over else None,
                **self.change_status,
            }
        )

    def _status(self, order_id: str) -> web.StreamResponse:
        self.asked.set()
        order = self.orders.get(order_id)
        if order is None:
            return web.json_response({"error": "order not found"}, status=404)
        status = self.statuses[0] if len(self.statuses) == 1 else self.statuses.popleft()
        over = status in ("completed", "complete", "success")
        named = ("orderId", "depositAddress", "depositTokenSymbol", "depositAmount",
                 "depositChainId", "toAddress", "expectedOutput")  # fmt: skip
        return web.json_response(
            {
                **{name: order[name] for name in named},
                "status": status,
                "depositTxHash": None if status == "awaiting_deposit" else "ab" * 32,
                "actualOutput": order["expectedOutput"] if over else None,
                "errorMessage": "The market closed." if status == "failed" else None,
                "refundTxHash": "cd" * 32 if status == "refunded" else None,
                "createdAt": "2026-01-01T00:00:00Z",
                "completedAt": "2026-01-01T01:00:00Z" if over else None,
                **self.change_status,
            }
        )


def _quote(body: dict[str, Any]) -> dict[str, Any]:
    sent = int(body["fromAmount"])
    is_xmr = body["fromChainId"] == 0
    received = sent * RATE // 10**6 if is_xmr else sent * 10**6 // RATE
    return {
        "fromAmount": str(sent), "fromAmountUsd": "1", "fromSymbol": "XMR" if is_xmr else "USDC",
        "toAmount": str(received), "toAmountUsd": "1", "toSymbol": "USDC" if is_xmr else "XMR",
        "estimatedTime": 1200, "minReceived": str(received * 99 // 100),
    }  # fmt: skip


@asynccontextmanager
async def v1_api() -> AsyncIterator[V1Api]:
    """The API, listening."""
    async with does.running() as server:
        yield V1Api(server)
