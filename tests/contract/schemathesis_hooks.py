"""Hooks for schemathesis: valid addresses, and the refusals that no schema can describe.

A request that follows the schemas is accepted, or refused for the state of the service. The
statuses of such refusals are in the configuration (test_schemathesis.py); those that share theirs
with refusals of a wrong request are listed here. Loaded by schemathesis.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Final

import schemathesis

import tests.contract.good_addresses  # noqa: F401 - registers the strategies
from rpcsvc.http.site import API_ROOT

SWAP: Final = f"{API_ROOT}/agent/swap"

# One line for each answer to a request that follows the schemas.
TALLY: Final = Path(os.environ["SCHEMATHESIS_TALLY"])
# These limits change with the rate and with the balance of the sandbox's wallet.
LIMITS: Final = frozenset({"amount_below_minimum", "amount_above_maximum"})
# Numbers of 78 digits beyond 256 bits; credentials of no challenge; digests of no quote; orders of
# no session, which a client with a token alone may list; in the sandbox: the order has no amount due
# or no deposit, or the clock would pass 2100.
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
# The valid network of a refund address depends on the order.
BY_ORDER: Final = f"{SWAP}/refund-address/{{orderId}}"


@schemathesis.hook
def map_query(_context: Any, query: dict[str, Any] | None) -> dict[str, Any] | None:
    """Shorten long polls to a second: schemathesis counts an answer after ten as a failure."""
    wait = query and query.get("waitSec")
    return {**query, "waitSec": 1} if query and wait in range(2, 26) else query


@schemathesis.check
def refused_for_its_state_only(_context: Any, response: Any, case: Any) -> None:
    """A request that follows the schemas gets 400 only for a limit or an order's state."""
    if case.meta is None or case.meta.generation.mode.is_negative:
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
