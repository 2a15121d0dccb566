"""Clients of the settings in tests: their tables, and their orders over every surface."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.serving import reload_settings
from rpcsvc.settings import load_settings
from tests import mcp
from tests.contract import bff
from tests.contract.serving import SWAP, TOKEN, Answer, Served, serving
from tests.rows import one_row

Json = dict[str, Any]
DESK, SHOP = "token-of-the-desk-0123456789", "token-of-the-shop-0123456789"
OTHER_EVM = "0xde709f2102306220921060314715629080e2fb77"
ENVIRON = {"AGENT_RPC_TOKEN": TOKEN}
SURFACES = ("http", "bearer", "rpc", "mcp", "bff")


def client(token: str, *scopes: str, **limits: Any) -> Json:
    digest = hashlib.sha256(token.encode()).hexdigest()
    return {"token_sha256": [digest], "scopes": [*scopes] or ["read", "order", "fund"], **limits}


def with_clients(data_dir: Path, **limits: Any) -> Any:
    """A service with a client ``desk`` of these limits, and a client ``shop`` without any."""
    clients = {"desk": client(DESK, **limits), "shop": client(SHOP)}
    return serving(data_dir, ENVIRON, clients=clients)


def set_clients(served: Served, **clients: Json) -> None:
    """Take other clients, as after SIGHUP."""
    settings = load_settings(config_file=None, environ=ENVIRON, flags={"clients": clients}).settings
    reload_settings(served.up.held, served.up.settings, lambda: settings)


class OrderRefused(Exception):
    """A call that was refused, with its code and details."""

    def __init__(self, status: int, error: Json) -> None:
        super().__init__(error["code"])
        self.status, self.code = status, error["code"]
        self.details = error.get("details", {})


async def order(
    served: Served, surface: str, token: str = DESK, key: str | None = None, **changes: Any
) -> str:
    """The id of a new order over a surface. Raises OrderRefused."""
    swap = {**SWAP, **changes}
    name = {"authorization": f"Bearer {token}"} if surface == "bearer" else {
        "x_agent_rpc_token": token
    }  # fmt: skip
    keyed = {} if key is None else {"idempotency_key": key}
    if surface in ("http", "bearer"):
        return made_id(await served.post("/agent/swap/create", swap, **name, **keyed))
    if surface == "rpc":
        given = {} if key is None else {"idempotency-key": key}
        answer = await served.rpc("swap.create", {**swap, **given}, **name)
        return made_id(Answer(200, answer.body["result"], answer.headers))
    if surface == "mcp":
        given = {"sessionId": str(uuid.uuid4())} if key is None else {
            "sessionId": "9a1f0b52-3c4d-4e6f-8a7b-1c2d3e4f5a6b", "idempotency-key": key
        }  # fmt: skip
        call = {"name": "create_swap", "arguments": {**swap, **given}}
        answer = await mcp.stateless(served, "tools/call", call, **name)
        if answer.status != 200:
            raise OrderRefused(answer.status, answer.body["error"]["data"])
        result = answer.body["result"]
        return made_id(Answer(200, result["structuredContent"], answer.headers))
    units = int(float(swap["amount"]) * 10**12)
    body = {**bff.TO_USDC, "fromAmount": str(units), "toAddress": swap["to"]}
    made = await bff.post(served, "/orders", body, **name, **keyed)
    if made.status != 200:
        raise OrderRefused(made.status, made.body["error"])
    return str(made.body["orderId"])


def made_id(answer: Answer) -> str:
    if not answer.body.get("ok"):
        raise OrderRefused(answer.status, answer.body["error"])
    return str(answer.body["data"]["order"]["orderId"])


async def refusal(served: Served, surface: str, token: str = DESK, **given: Any) -> OrderRefused:
    with pytest.raises(OrderRefused) as caught:
        await order(served, surface, token, **given)
    return caught.value


def client_of(served: Served, order_id: str) -> str | None:
    sql = f"SELECT client FROM orders WHERE order_id = '{order_id}'"
    found: str | None = one_row(served.up.database, sql)[0]
    return found
