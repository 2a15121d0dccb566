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
# What is to arrive, by direction, with all of its decimals.
_EXACT: Final = {"x2u": "131.290001", "u2x": "0.904445454544"}


def readings(server: driver.Server) -> Iterator[Reading]:
    """Yield the largest size of each lean answer, with that of the largest full one beside it.

    Orders of both directions, of an amount and of one that arrives exactly; quotes beside an
    earlier one. No order has settled, so that observed times, some 60 bytes, are null
    (tests/contract/test_lean.py has them).
    """
    calls = [call for number in range(4) for call in _calls(server, number)]
    for operation, most in MOST.items():
        full, lean = (
            max(
                len(orjson.dumps(_result(server, name, {**params, "detail": detail})))
                for name, params in calls
                if name == operation
            )
            for detail in ("full", "lean")
        )
        title = f"{operation}, largest lean answer (full: {full:,} B)"
        yield Reading(f"lean-{operation}", title, "B", (float(lean),), under=float(most))


def _calls(server: driver.Server, number: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The calls about one kind of order."""
    swap = seeding.refundable_params(number)
    if number >= 2:
        del swap["amount"]
        swap["receiveAmount"] = _EXACT[swap["direction"]]
    names = ("direction", "chain", "amount", "receiveAmount")
    priced = {name: swap[name] for name in names if name in swap}
    digest = _result(server, "swap.quote", priced)["data"]["quoteDigest"]
    made = _result(server, "swap.create", swap)["data"]["order"]
    yield "capabilities", {}
    yield "swap.quote", {**priced, "requoteOf": digest}
    yield "swap.create", swap
    yield "swap.status", {"orderId": made["orderId"]}


def _result(server: driver.Server, operation: str, params: dict[str, Any]) -> Any:
    message = {"jsonrpc": "2.0", "id": "1", "method": f"service.{operation}", "params": params}
    request = urllib.request.Request(
        f"http://127.0.0.1:{server.port}/rpc",
        json.dumps(message).encode(),
        {"content-type": "application/json", "x-agent-rpc-token": seeding.TOKEN},
    )
    with urllib.request.urlopen(request, timeout=10) as response:
        return json.loads(response.read())["result"]
