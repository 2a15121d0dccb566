"""Calls to the BFF, and a check of its answers by the spec's tables, field by field."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.contract.serving import EVM, MONERO, Answer, Served
from tests.e2e.processes import until

TABLES: dict[str, dict[str, str]] = json.loads(
    (Path(__file__).parent / "data" / "bff_tables.json").read_text()
)
USDC = "0xaf88d065e77c8cC2239327C5EDb3A432268e5831"
SESSION = "3f2b8c1e-7d64-4f0a-9c1b-2a5e8d7f6c90"
TO_USDC = {
    "fromChainId": 0, "toChainId": 42161, "fromToken": "XMR", "toToken": USDC,
    "fromAmount": "800000000000",
}  # fmt: skip
TO_XMR = {
    "fromChainId": 42161, "toChainId": 0, "fromToken": USDC, "toToken": "XMR",
    "fromAmount": "150000000",
}  # fmt: skip
ORDER = {**TO_USDC, "toAddress": EVM, "sessionId": SESSION}
ORDER_BACK = {**TO_XMR, "toAddress": MONERO, "sessionId": SESSION}
_TIME = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{3})?Z")


async def call(served: Served, method: str, path: str, **kwargs: Any) -> Answer:
    """One call under /bff/v1."""
    response = await served.client.request(method, f"/bff/v1{path}", **kwargs)
    text = await response.read()
    return Answer(response.status, json.loads(text) if text else {}, response.headers)


async def post(served: Served, path: str, body: Any, **headers: str) -> Answer:
    """One POST; ``idempotency_key`` becomes the header of that name."""
    names = {name.replace("_", "-"): value for name, value in headers.items()}
    return await call(served, "POST", path, json=body, headers=names)


def check(table: str, value: Any) -> None:
    """Raise AssertionError unless the value has exactly the fields and types of a spec table."""
    wanted = TABLES[table]
    assert isinstance(value, dict)
    optional = {name for name, kind in wanted.items() if kind.endswith("?")}
    assert set(wanted) - optional <= set(value) <= set(wanted), table
    for name, found in value.items():
        _check_field(wanted[name].rstrip("?"), found, f"{table}.{name}")


async def until_completed(served: Served, path: str, table: str) -> dict[str, Any]:
    """Return the order or bridge order at ``path`` once it is completed; check each answer."""

    async def completed() -> dict[str, Any] | None:
        found: dict[str, Any] = (await call(served, "GET", path)).body
        check(table, found)
        return found if found["status"] == "completed" else None

    return await until(completed)


def _check_field(kind: str, found: Any, where: str) -> None:
    if kind.endswith("|null") and found is None:
        return
    kind = kind.removesuffix("|null")
    if kind in TABLES:
        check(kind, found)
    elif kind == "time":
        assert isinstance(found, str), where
        assert _TIME.fullmatch(found), where
    elif kind == "number":
        assert type(found) in (int, float), where
    else:
        assert type(found) is {"string": str, "boolean": bool, "array": list}[kind], where
