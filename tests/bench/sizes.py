"""The bytes of full and lean answers, which a model pays for."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any, Final

import orjson

from tests.bench import driver, seeding
from tests.bench.report import Reading

SIZES: Final = "sizes"
# The most bytes of a lean answer.
MOST: Final = {"capabilities": 2_000, "swap.quote": 800, "swap.create": 1_500, "swap.status": 1_000}


def readings(server: driver.Server) -> Iterator[Reading]:
    """Yield the size of each lean answer, with that of the full one beside it."""
    swap = seeding.swap_params(0)
    priced = {name: value for name, value in swap.items() if name in ("direction", "amount")}
    created = _answer(server, "swap.create", swap)
    order = {"orderId": json.loads(created)["result"]["data"]["order"]["orderId"]}
    params = {
        "capabilities": {},
        "swap.quote": {**priced, "chain": swap["chain"]},
        "swap.create": swap,
        "swap.status": order,
    }
    for operation, most in MOST.items():
        full, lean = (
            len(orjson.dumps(json.loads(_answer(server, operation, given))["result"]))
            for detail in ("full", "lean")
            for given in ({**params[operation], "detail": detail},)
        )
        title = f"{operation}, lean answer (full: {full:,} B)"
        yield Reading(f"lean-{operation}", title, "B", (float(lean),), under=float(most))


def _answer(server: driver.Server, operation: str, params: dict[str, Any]) -> bytes:
    message = {"jsonrpc": "2.0", "id": "1", "method": f"service.{operation}", "params": params}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/rpc",
        json.dumps(message).encode(),
        {"content-type": "application/json", "x-agent-rpc-token": seeding.TOKEN},
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        body: bytes = response.read()
    return body
