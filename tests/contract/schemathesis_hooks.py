"""Hooks for schemathesis: valid addresses, and the refusals that no schema can describe.

A request that follows the schemas is accepted, or refused for the state of the service. The
statuses of such refusals are in the configuration (test_schemathesis.py); those that share theirs
with refusals of a wrong request are listed here. Loaded by schemathesis.
"""

from __future__ import annotations

import json
import os
import zlib
from pathlib import Path
from typing import Any, Final

import schemathesis

import tests.contract.good_addresses  # noqa: F401 - registers the strategies
from rpcsvc.http.site import API_ROOT

SWAP: Final = f"{API_ROOT}/agent/swap"

# An order that exists, and its session: few ids and sessions that are drawn do.
ORDER, SESSION = os.environ["SCHEMATHESIS_ORDER"].split()
# One line for each answer to a request that follows the schemas.
TALLY: Final = Path(os.environ["SCHEMATHESIS_TALLY"])
# These limits change with the rate and with the balance of the sandbox's wallet.
LIMITS: Final = frozenset({"amount_below_minimum", "amount_above_maximum"})
# Numbers of 78 digits beyond 256 bits; credentials of no challenge; digests of no quote; lists of
# no session, for which a client has a token; in the sandbox: the order has no amount due or no
# deposit, or the clock would pass 2100.
STATE: Final = {
    f"{SWAP}/fund/{{orderId}}": {
        "payment",
        "Payment-Authorization",
        *(f"payment.payload.authorization.{n}" for n in ("value", "validAfter", "validBefore")),
    },
    f"{SWAP}/list": {"sessionId"},
    f"{SWAP}/quote": {"requoteOf"},
    f"{SWAP}/create": {"quoteDigest"},
    f"{SWAP}/execute": {"quoteDigest"},
    f"{API_ROOT}/sandbox/fund": {"amount"},
    f"{API_ROOT}/sandbox/fault": {"orderId", "seconds"},
}
CHECK: Final = f"{SWAP}/check/{{orderId}}"
# The valid network of a refund address depends on the order.
BY_ORDER: Final = f"{SWAP}/refund-address/{{orderId}}"


@schemathesis.hook
def before_call(_context: Any, case: Any, _kwargs: Any) -> None:
    """Have half of the calls that name an order name one that exists, and shorten long polls.

    Schemathesis counts an answer after ten seconds as a failure.
    """
    if case.meta is None or case.meta.generation.mode.is_negative:
        return
    names = ("path_parameters", "query", "body")
    parts = {name: part for name in names if isinstance(part := getattr(case, name), dict)}
    ids = [part["orderId"] for part in parts.values() if isinstance(part.get("orderId"), str)]
    known: dict[str, Any] = {"waitSec": 1}
    if ids and zlib.crc32(repr(parts).encode()) % 2:
        known |= {"orderId": ORDER, "sessionId": SESSION}
    for name, part in parts.items():  # cases share their parts
        setattr(case, name, {**part, **{key: known[key] for key in known if part.get(key)}})


@schemathesis.check
def refused_for_its_state_only(_context: Any, response: Any, case: Any) -> None:
    """A request that follows the schemas gets 400 only for a limit or an order's state."""
    if case.meta is None:
        return
    if case.meta.generation.mode.is_negative:
        if case.path == CHECK and response.status_code == 200:
            assert not response.json()["data"]["paymentCheck"]["safeToSend"]
        return
    with TALLY.open("a") as file:
        file.write(json.dumps([case.path, response.status_code]) + "\n")
    if response.status_code == 400:
        answer = response.json()
        error = answer["error"]
        if error["code"] == "invalid_destination":
            # Some phases draw addresses by their pattern alone.
            assert "checksum" in error["message"] or case.path == BY_ORDER, answer
        elif error["code"] not in LIMITS:
            named = {problem["field"] for problem in answer["validationErrors"]}
            named |= set(answer["missingInputs"])
            assert error["code"] in ("invalid_input", "missing_input"), answer
            assert named <= STATE.get(case.path, set()), answer
