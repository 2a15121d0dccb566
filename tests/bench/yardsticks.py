"""The two servers that the service is measured against, each a process of its own.

    python -m tests.bench.yardsticks raw --port P
    python -m tests.bench.yardsticks naive --port P --db FILE

raw     the ceiling: a bare aiohttp handler that parses the request with orjson and answers
        ``{"jsonrpc", "result": {"ok": true, "method": <as sent>, "params": <how many>}, "id"}``.
        No token check, no validation, no storage, a small body.
naive   the floor: ``service.swap.create`` as a straightforward build has it. jsonrpcserver's
        ``async_dispatch`` with its default deserializer, schema validator and serializer, and one
        aiosqlite transaction and commit per request (WAL, synchronous=FULL) that stores an order,
        its first event and the idempotency key with the answer. One connection, one lock: without
        the lock, requests would commit each other's half-written rows: faster (most commits then
        find nothing left to do) and wrong after a crash.

Nothing of the service is imported here: a yardstick must not change when the service does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import secrets
import time
from pathlib import Path
from typing import Any

import aiosqlite
import orjson
from aiohttp import web
from jsonrpcserver import Result, Success, async_dispatch, method

HOST = "127.0.0.1"
_AMOUNT = re.compile(r"(0|[1-9][0-9]*)(\.[0-9]+)?")
_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE orders (
    order_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, direction TEXT NOT NULL,
    chain TEXT NOT NULL, amount TEXT NOT NULL, destination TEXT NOT NULL,
    deposit_address TEXT NOT NULL UNIQUE, status TEXT NOT NULL,
    created_at INTEGER NOT NULL, expires_at INTEGER NOT NULL
) STRICT;
CREATE TABLE events (
    order_id TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL,
    at INTEGER NOT NULL, body TEXT NOT NULL, PRIMARY KEY (order_id, seq)
) STRICT;
CREATE TABLE idempotency (
    key TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, order_id TEXT NOT NULL,
    response TEXT NOT NULL, at INTEGER NOT NULL
) STRICT;
"""


async def raw_rpc(request: web.Request) -> web.Response:
    """Parse, answer; the least that a JSON-RPC server over aiohttp does."""
    call = orjson.loads(await request.read())
    result = {"ok": True, "method": call["method"], "params": len(call["params"])}
    answer = {"jsonrpc": "2.0", "result": result, "id": call["id"]}
    return web.Response(body=orjson.dumps(answer), content_type="application/json")


class NaiveStore:
    """One aiosqlite connection, one transaction at a time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = asyncio.Lock()

    async def lifespan(self, _: web.Application) -> Any:
        """Open the database for as long as the application runs."""
        async with aiosqlite.connect(self._path) as self._db:
            await self._db.executescript(_SCHEMA)
            yield

    async def insert(self, order: dict[str, Any], key: str, answer: dict[str, Any]) -> None:
        """Store order, event and idempotency row, and return after the commit."""
        at, body = order["created_at"], json.dumps(order)
        async with self._lock:
            await self._db.execute(
                f"INSERT INTO orders VALUES ({', '.join('?' * len(order))})", tuple(order.values())
            )
            await self._db.execute(
                "INSERT INTO events VALUES (?, 1, 'created', ?, ?)", (order["order_id"], at, body)
            )
            await self._db.execute(
                "INSERT INTO idempotency VALUES (?, ?, ?, ?, ?)",
                (key, body, order["order_id"], json.dumps(answer), at),
            )
            await self._db.commit()


def _new_order(params: dict[str, Any]) -> dict[str, Any]:
    if not _AMOUNT.fullmatch(params["amount"]) or params["direction"] not in ("x2u", "u2x"):
        raise ValueError("amount or direction")
    now = time.time_ns() // 1_000_000
    return {
        "order_id": f"ord_{secrets.token_hex(13)}",
        "session_id": secrets.token_hex(16),
        "direction": params["direction"],
        "chain": str(params["chain"]),
        "amount": params["amount"],
        "destination": params["to"],
        "deposit_address": f"0x{secrets.token_hex(20)}",
        "status": "awaiting_deposit",
        "created_at": now,
        "expires_at": now + 3_600_000,
    }


def _envelope(order: dict[str, Any]) -> dict[str, Any]:
    """An answer of about the size that a real create gives."""
    address, amount = order["deposit_address"], order["amount"]
    return {
        "ok": True,
        "operation": "swap.create",
        "state": "waiting_for_funding",
        "missingInputs": [],
        "validationErrors": [],
        "nextActions": [{"action": "fund", "description": f"Send {amount} to {address}."}],
        "data": {
            "order": {"orderId": order["order_id"], "toAddress": order["destination"]},
            "fundingInstructions": {
                "depositAddress": address,
                "amountDisplay": amount,
                "expiresAt": order["expires_at"],
                "warnings": ["Send exactly this amount, once, before it expires."],
            },
            "sessionId": order["session_id"],
        },
    }


def naive_app(db: Path) -> web.Application:
    """The naive build; its database is made at ``db``, which must not exist yet."""
    store = NaiveStore(db)

    @method(name="service.swap.create")
    async def create(**params: Any) -> Result:
        order = _new_order(params)
        answer = _envelope(order)
        await store.insert(order, params["idempotency-key"], answer)
        return Success(answer)

    async def rpc(request: web.Request) -> web.Response:
        answer = await async_dispatch(await request.text())
        return web.Response(text=answer, content_type="application/json")

    app = web.Application()
    app.cleanup_ctx.append(store.lifespan)
    app.router.add_post("/rpc", rpc)
    app.router.add_get("/readyz", ready)
    return app


def raw_app() -> web.Application:
    """The bare handler."""
    app = web.Application()
    app.router.add_post("/rpc", raw_rpc)
    app.router.add_get("/readyz", ready)
    return app


async def ready(_: web.Request) -> web.Response:
    """Answer the harness's question whether the server is up."""
    return web.json_response({"status": "ok"})


def main() -> None:
    """Serve one yardstick on the loopback until SIGTERM."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.yardsticks")
    parser.add_argument("kind", choices=("raw", "naive"))
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--db", type=Path, help="where naive keeps its orders")
    args = parser.parse_args()
    if args.kind == "naive" and args.db is None:
        parser.error("naive needs --db FILE")
    app = raw_app() if args.kind == "raw" else naive_app(args.db)
    web.run_app(app, host=HOST, port=args.port, access_log=None, print=None)


if __name__ == "__main__":
    main()
