"""The naive build of ``service.swap.create``: the same operation, written straightforwardly.

It does what the service does for its caller: checks every input (pydantic, the monero package,
EIP-55), prices the swap, makes a deposit address, and answers with the order, its funding
instructions and the quote. It is driven by jsonrpcserver's ``async_dispatch`` with its default
deserializer, schema validator and serializer, and stores order, first event and idempotency key
with the answer in one aiosqlite transaction and commit per request (WAL, synchronous=FULL). One
connection, one lock: without the lock, requests would commit each other's half-written rows,
which is faster (most commits then find nothing left to do) and wrong after a crash.

Nothing of the service is imported here: a yardstick must not change when the service does.
"""

from __future__ import annotations

import asyncio
import json
import re
import secrets
import uuid
from datetime import UTC, datetime, timedelta
from decimal import ROUND_DOWN, Decimal
from pathlib import Path
from typing import Any, Literal

import aiosqlite
from aiohttp import web
from Cryptodome.Hash import keccak
from jsonrpcserver import Result, Success, async_dispatch, method
from monero import base58
from monero.address import address as monero_address
from nacl.bindings import (
    crypto_core_ed25519_scalar_reduce,
    crypto_scalarmult_ed25519_base_noclamp,
)
from pydantic import BaseModel, ConfigDict, Field

_SCHEMA = """
PRAGMA journal_mode = WAL;
PRAGMA synchronous = FULL;
CREATE TABLE orders (
    order_id TEXT PRIMARY KEY, session_id TEXT NOT NULL, direction TEXT NOT NULL,
    chain INTEGER NOT NULL, amount TEXT NOT NULL, destination TEXT NOT NULL,
    deposit_address TEXT NOT NULL UNIQUE, expected_output TEXT NOT NULL,
    min_received TEXT NOT NULL, status TEXT NOT NULL, created_at TEXT NOT NULL,
    expires_at TEXT NOT NULL
) STRICT;
CREATE TABLE events (
    order_id TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL,
    at TEXT NOT NULL, body TEXT NOT NULL, PRIMARY KEY (order_id, seq)
) STRICT;
CREATE TABLE idempotency (
    key TEXT PRIMARY KEY, fingerprint TEXT NOT NULL, order_id TEXT NOT NULL,
    response TEXT NOT NULL, at TEXT NOT NULL
) STRICT;
"""
_CHAINS = {"arbitrum": 42161, "base": 8453, "optimism": 10, "polygon": 137, "ethereum": 1}
_CONTRACT = "0xaf88d065e77c8cC2239327C5EDb3A432268e5831"
_RATE, _SPREAD = Decimal(165), Decimal("0.005")
_FEES = {"XMR": Decimal("0.0001"), "USDC": Decimal("0.05")}
_UNIT = {"XMR": Decimal(10) ** -12, "USDC": Decimal(10) ** -6}
_EVM = re.compile(r"0x[0-9a-fA-F]{40}")
_POLICY = [
    {"case": "a case of a deposit " + "x" * 10, "action": "what is done with it then " + "y" * 60}
] * 8


class SwapParams(BaseModel):
    """The params of a call."""

    model_config = ConfigDict(extra="forbid")

    direction: Literal["x2u", "u2x"]
    chain: str | int
    amount: str = Field(pattern=r"^(0|[1-9][0-9]*)(\.[0-9]+)?$")
    to: str
    session_id: str | None = None
    idempotency_key: str = Field(alias="idempotency-key")


def _checksum(address: str) -> str:
    digits = address[2:].lower()
    digest = keccak.new(digest_bits=256, data=digits.encode()).hexdigest()
    return "0x" + "".join(
        c.upper() if int(n, 16) > 7 else c for c, n in zip(digits, digest, strict=False)
    )


def _check_destination(params: SwapParams) -> None:
    if params.direction == "u2x":
        monero_address(params.to)
    elif not _EVM.fullmatch(params.to) or _checksum(params.to) != params.to:
        raise ValueError("to")


def _deposit_address(asset: str) -> str:
    if asset == "USDC":
        return _checksum("0x" + secrets.token_hex(20))
    scalar = crypto_core_ed25519_scalar_reduce(secrets.token_bytes(64))
    body = bytes([36]) + crypto_scalarmult_ed25519_base_noclamp(scalar) + bytes(32)
    return str(base58.encode((body + keccak.new(digest_bits=256, data=body).digest()[:4]).hex()))


def _quote(params: SwapParams) -> dict[str, Any]:
    send, receive = ("XMR", "USDC") if params.direction == "x2u" else ("USDC", "XMR")
    amount = Decimal(params.amount)
    usd = amount * _RATE if send == "XMR" else amount
    if not 25 <= usd <= 50_000 or amount % _UNIT[send]:
        raise ValueError("amount")
    gross = amount * _RATE if send == "XMR" else amount / _RATE
    output = gross * (1 - _SPREAD) - _FEES[receive]
    return {
        "depositAsset": send,
        "depositAmount": str(amount),
        "payoutAsset": receive,
        "expectedOutput": str(output.quantize(_UNIT[receive], ROUND_DOWN)),
        "minReceived": str((output * Decimal("0.99")).quantize(_UNIT[receive], ROUND_DOWN)),
        "rate": str(_RATE),
        "fees": {"spread": str(gross * _SPREAD), "network": str(_FEES[receive])},
        "depositPolicy": _POLICY,
    }


def _new_order(params: SwapParams, quote: dict[str, Any]) -> dict[str, Any]:
    now = datetime.now(UTC)
    chain = params.chain
    known = _CHAINS.get(str(chain).lower()) or int(chain)
    if known not in _CHAINS.values():
        raise ValueError("chain")
    return {
        "order_id": f"ord_{secrets.token_hex(13)}",
        "session_id": params.session_id or str(uuid.uuid4()),
        "direction": params.direction,
        "chain": known,
        "amount": params.amount,
        "destination": params.to,
        "deposit_address": _deposit_address(quote["depositAsset"]),
        "expected_output": quote["expectedOutput"],
        "min_received": quote["minReceived"],
        "status": "awaiting_deposit",
        "created_at": now.isoformat(),
        "expires_at": (now + timedelta(hours=1)).isoformat(),
    }


def _envelope(order: dict[str, Any], quote: dict[str, Any]) -> dict[str, Any]:
    """An answer of about the content and size that the service gives."""
    address, display = order["deposit_address"], f"{order['amount']} {quote['depositAsset']}"
    return {
        "ok": True,
        "operation": "swap.create",
        "state": "waiting_for_funding",
        "missingInputs": [],
        "validationErrors": [],
        "nextActions": [
            {"action": "ask_user_to_fund", "description": f"Send {display} to {address}."},
            {
                "action": "poll_status",
                "description": "Ask again until the state is completed or terminal_failure.",
                "operation": "swap.status",
                "params": {"orderId": order["order_id"]},
            },
        ],
        "data": {
            "sessionId": order["session_id"],
            "order": {
                "orderId": order["order_id"],
                "status": order["status"],
                "depositAddress": address,
                "depositAmount": order["amount"],
                "toAddress": order["destination"],
                "expectedOutput": order["expected_output"],
                "createdAt": order["created_at"],
                "expiresAt": order["expires_at"],
            },
            "fundingInstructions": {
                "depositAddress": address,
                "amount": order["amount"],
                "amountDisplay": display,
                "chainId": order["chain"],
                "expiresAt": order["expires_at"],
                "paymentUri": f"ethereum:{_CONTRACT}@{order['chain']}/transfer?address={address}",
                "warnings": ["Send exactly this amount, once, before it expires."],
            },
            "quote": quote,
        },
    }


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


def naive_app(db: Path) -> web.Application:
    """The naive build; its database is made at ``db``, which must not exist yet."""
    store = NaiveStore(db)

    @method(name="service.swap.create")
    async def create(**sent: Any) -> Result:
        params = SwapParams(**sent)
        _check_destination(params)
        quote = _quote(params)
        order = _new_order(params, quote)
        answer = _envelope(order, quote)
        await store.insert(order, params.idempotency_key, answer)
        return Success(answer)

    async def rpc(request: web.Request) -> web.Response:
        answer = await async_dispatch(await request.text())
        return web.Response(text=answer, content_type="application/json")

    app = web.Application()
    app.cleanup_ctx.append(store.lifespan)
    app.router.add_post("/rpc", rpc)
    return app
