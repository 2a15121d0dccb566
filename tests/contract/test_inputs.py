"""Wrong inputs over the wire are refused with a validation message, never with a 500."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest

from tests.contract import bff
from tests.contract.serving import EVM, JSON, MONERO, SWAP, Served

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def served(shared: Served) -> Served:
    """One service: the tests below disturb no other."""
    return shared


BAD_AMOUNTS: list[tuple[Any, str]] = [
    ("0", "above 0"),
    ("-1", "sign"),
    ("1e3", "exponent"),
    ("1e400", "exponent"),
    ("0.0000000000001", "13 decimals"),
    (0.8, 'such as "0.8"'),
    (1, 'such as "1"'),
    (True, "must be a string"),
    (" 1", "spaces"),
    ("1 ", "spaces"),
    ("1,5", "comma"),
    ("1_000", "underscore"),
    ("٣", "ASCII digits"),
    ("\uff11", "ASCII digits"),
    ("9" * 200, "too long"),
    ("NaN", "not a decimal"),
    ("Infinity", "not a decimal"),
    ("", "empty"),
    ("01", "leading zero"),
    (".5", "starts with a point"),
    ("5.", "ends with a point"),
    ([], "must be a string"),
    ({}, "must be a string"),
]


@pytest.mark.parametrize(("amount", "expected"), BAD_AMOUNTS, ids=lambda v: repr(v)[:24])
async def test_a_bad_amount_is_refused_with_its_own_message(
    served: Served, amount: Any, expected: str
) -> None:
    before = served.count("orders")
    for answer in (
        (await served.post("/agent/swap/quote", {**SWAP, "to": None, "amount": amount})),
        (await served.post("/agent/swap/execute", {**SWAP, "amount": amount})),
    ):
        assert answer.status == 400
    problem = next(e for e in answer.body["validationErrors"] if e["field"] == "amount")
    assert expected in problem["message"]
    assert answer.body["ok"] is False
    assert answer.body["state"] == "invalid_input"
    assert served.count("orders") == before


BAD_DESTINATIONS = [
    (EVM.lower()[:-1], "41 characters"),
    ("0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAeE", "EIP-55"),
    ("0x5aaeb6053F3E94C9b9A09f33669435E7Ef1BeAed", "EIP-55"),
    ("0x" + "0" * 40, "zero address"),
    ("0xaf88d065e77c8cC2239327C5EDb3A432268e5831", "token contract"),
    (EVM[2:], "0x"),
    ("0x" + "g" * 40, "position 3"),
    (MONERO, "Monero address"),
    ("\ud800", None),
    ("", "0x"),
]


@pytest.mark.parametrize(("to", "expected"), BAD_DESTINATIONS, ids=lambda v: repr(v)[:24])
async def test_a_bad_evm_destination_is_refused(
    served: Served, to: str, expected: str | None
) -> None:
    answer = await served.post("/agent/swap/execute", {**SWAP, "to": to})
    assert answer.status == 400
    if expected is None:
        assert answer.body["error"]["code"] == "invalid_json"
        return
    assert answer.body["error"]["code"] == "invalid_destination"
    assert expected in answer.body["error"]["message"]


@pytest.mark.parametrize(
    ("to", "expected"),
    [
        (MONERO[:-1] + "G", "checksum"),
        (MONERO[:40] + "1" + MONERO[41:], "checksum"),
        (MONERO[:-1], "94 characters"),
        (EVM, "EVM address"),
        ("0" + MONERO[1:], "position 1"),
    ],
)
async def test_a_bad_monero_destination_is_refused(served: Served, to: str, expected: str) -> None:
    swap = {"direction": "u2x", "chain": "base", "amount": "150", "to": to}
    answer = await served.post("/agent/swap/execute", swap)
    assert answer.body["error"]["code"] == "invalid_destination"
    assert expected in answer.body["error"]["message"]


async def test_a_deposit_address_of_the_service_is_no_destination(served: Served) -> None:
    u2x = {"direction": "u2x", "chain": "base", "amount": "150", "to": MONERO}
    made = await served.post("/agent/swap/execute", u2x)
    own = made.body["data"]["fundingInstructions"]["depositAddress"]
    answer = await served.post("/agent/swap/execute", {**SWAP, "to": own})
    assert answer.body["error"]["code"] == "invalid_destination"


async def test_an_unknown_chain_offers_the_nearest_names(served: Served) -> None:
    answer = await served.post("/agent/swap/quote", {**SWAP, "to": None, "chain": "arbitrun"})
    assert answer.status == 400
    del answer.body["error"]["message"]
    by_name = {k: v for k, v in SWAP.items() if k != "to"}
    answer = await served.post("/agent/swap/quote", {**by_name, "chain": "arbitrun"})
    assert answer.body["error"]["code"] == "unsupported_chain"
    assert "Did you mean arbitrum" in answer.body["error"]["message"]
    assert "polygon" in answer.body["validationErrors"][0]["allowed"]


@pytest.mark.parametrize("chain", ["arbitrum", "ARB", 42161, "42161", 42161.0])
async def test_a_chain_goes_by_name_alias_or_number(served: Served, chain: Any) -> None:
    answer = await served.post("/agent/swap/plan", {"chain": chain})
    assert answer.body["data"]["intent"]["chainId"] == 42161
    beside_a_fault = await served.post("/agent/swap/plan", {"chain": chain, "direction": "up"})
    assert [p["field"] for p in beside_a_fault.body["validationErrors"]] == ["direction"]


@pytest.mark.parametrize("chain", [42161.5, 1e300, -0.5])
async def test_chain_refuses_a_number_with_a_fraction(served: Served, chain: float) -> None:
    answer = await served.post("/agent/swap/plan", {"chain": chain})
    assert [(p["field"], p["code"]) for p in answer.body["validationErrors"]] == [
        ("chain", "invalid_input")
    ]


async def test_amount_outside_the_limits_gets_the_limits(served: Served) -> None:
    below = await served.post("/agent/swap/execute", {**SWAP, "amount": "0.01"})
    assert below.body["error"]["code"] == "amount_below_minimum"
    assert below.body["error"]["details"]["minimum"] == "0.060606060607"
    above = await served.post("/agent/swap/execute", {**SWAP, "amount": "400"})
    assert above.body["error"]["code"] == "amount_above_maximum"
    assert above.body["error"]["details"]["maximum"] == "303.030303030303"


async def test_an_unknown_property_is_named_with_the_nearest_known_one(served: Served) -> None:
    for answer in (
        (await served.post("/agent/swap/plan", {"amout": "1"})).body,
        (await served.rpc("swap.plan", {"amout": "1"})).body["result"],
    ):
        assert answer["validationErrors"][0]["field"] == "amout"
        assert "Did you mean amount?" in answer["validationErrors"][0]["message"]
    query = await served.http("GET", "/agent/capabilities", params={"x": "1"})
    assert query.status == 400


async def test_answer_lists_all_problems_of_a_call_at_once(served: Served) -> None:
    wrong = {"direction": "sideways", "chain": "nowhere", "amount": "1,5"}
    answer = await served.post("/agent/swap/execute", wrong)
    assert answer.body["missingInputs"] == ["to"]
    assert {e["field"] for e in answer.body["validationErrors"]} >= {"direction"}
    assert answer.body["state"] == "invalid_input"


async def test_a_gap_is_good_in_a_plan_and_bad_in_an_order(served: Served) -> None:
    gap = {k: v for k, v in SWAP.items() if k != "to"}
    plan = await served.post("/agent/swap/plan", gap)
    assert (plan.body["ok"], plan.body["state"]) == (True, "needs_destination")
    create = await served.post("/agent/swap/create", gap)
    assert (create.body["ok"], create.body["state"]) == (False, "needs_destination")
    assert create.body["missingInputs"] == ["to"]
    assert create.body["error"]["code"] == "missing_input"
    empty = await served.post("/agent/swap/create", {})
    assert empty.body["state"] == "needs_input"


BAD_BODIES: list[tuple[bytes, int, str]] = [
    (b"", 400, "invalid_json"),
    (b"{", 400, "invalid_json"),
    (b"[]", 400, "invalid_request"),
    (b'"x"', 400, "invalid_request"),
    (b'{"amount": NaN}', 400, "invalid_json"),
    (b'{"amount": Infinity}', 400, "invalid_json"),
    (b'{"amount": 1e400}', 400, "invalid_json"),
    (b'{"amount": "1", "amount": "2"}', 400, "invalid_json"),
    (b'{"amount": "\xff"}', 400, "invalid_json"),
    (b'{"amount": "\\ud800"}', 400, "invalid_json"),
    (b"[" * 60_000, 400, "invalid_json"),
    (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, 400, "invalid_json"),
    (b"[" * 100_000, 413, "payload_too_large"),
    (b" " * 900_000, 413, "payload_too_large"),
]


@pytest.mark.parametrize(("body", "status", "code"), BAD_BODIES, ids=lambda v: repr(v)[:24])
async def test_a_bad_body_is_refused_over_https(
    served: Served, body: bytes, status: int, code: str
) -> None:
    answer = await served.raw(body, "/api/v1/agent/swap/plan")
    assert (answer.status, answer.body["error"]["code"]) == (status, code)
    assert answer.body["ok"] is False


@pytest.mark.parametrize(("body", "status", "code"), BAD_BODIES, ids=lambda v: repr(v)[:24])
async def test_a_bad_body_is_refused_over_json_rpc(
    served: Served, body: bytes, status: int, code: str
) -> None:
    answer = await served.raw(body)
    assert answer.status == (413 if status == 413 else 200)
    assert answer.body["error"]["code"] in (-32700, -32600)
    assert answer.body["id"] is None


async def test_ten_megabytes_are_refused_by_their_length_alone(served: Served) -> None:
    for path in ("/rpc", "/api/v1/agent/swap/plan"):
        response = await served.client.post(path, data=io.BytesIO(b" " * 10_000_000), headers=JSON)
        assert response.status == 413


async def test_a_body_of_64_kib_is_read_and_no_byte_more(served: Served) -> None:
    plan = b'{"jsonrpc":"2.0","id":"1","method":"service.swap.plan"}'
    for path, body in (("/rpc", plan), ("/api/v1/agent/swap/plan", b"{}")):
        full = body + b" " * (65_536 - len(body))
        assert (await served.raw(full, path)).status == 200
        assert (await served.raw(full + b" ", path)).status == 413


async def test_a_chunked_body_over_the_limit_is_refused(served: Served) -> None:
    async def chunks() -> Any:
        for _ in range(200):
            yield b" " * 1000

    for path in ("/rpc", "/api/v1/agent/swap/plan"):
        response = await served.client.post(path, data=chunks(), headers=JSON)
        assert response.status == 413


async def test_a_body_must_be_declared_as_json(served: Served) -> None:
    for path in ("/rpc", "/api/v1/agent/swap/plan"):
        response = await served.client.post(path, data=b"{}", headers={"content-type": "text/xml"})
        assert response.status == 415


async def test_a_batch_of_51_is_too_large(served: Served) -> None:
    call = {"jsonrpc": "2.0", "id": 1, "method": "service.swap.plan", "params": {}}
    assert len((await served.raw(json.dumps([call] * 50).encode())).body) == 50
    answer = await served.raw(json.dumps([call] * 51).encode())
    assert (answer.status, answer.body["error"]["code"]) == (413, -32600)


async def test_unknown_path_and_wrong_method_get_an_envelope(served: Served) -> None:
    unknown = await served.http("GET", "/nothing")
    assert (unknown.status, unknown.body["error"]["code"]) == (404, "unknown_method")
    assert unknown.body["state"] == "not_found"
    wrong = await served.http("GET", "/agent/swap/plan")
    assert (wrong.status, wrong.body["error"]["code"]) == (405, "invalid_request")
    assert wrong.headers["allow"] == "POST"


@pytest.mark.parametrize(
    ("method", "params"),
    [("swap.create", SWAP), ("swap.execute", SWAP), ("support.create", {"message": "help"})],
)
async def test_a_notification_that_would_create_is_not_run(
    served: Served, method: str, params: dict[str, Any]
) -> None:
    message = {"jsonrpc": "2.0", "method": f"service.{method}", "params": params}
    before = served.count("orders") + served.count("tickets")
    answer = await served.raw(json.dumps(message).encode())
    assert (answer.status, answer.body) == (204, {})
    assert served.count("orders") + served.count("tickets") == before
    assert (await served.rpc(method, params)).body["result"]["ok"]
    assert served.count("orders") + served.count("tickets") == before + 1


async def test_status_verifies_the_destination(served: Served) -> None:
    order = (await served.post("/agent/swap/execute", SWAP)).body["data"]["order"]
    path = f"/agent/swap/status/{order['orderId']}"
    assert (await served.http("GET", path, params={"verify": EVM.lower()})).status == 200
    wrong = await served.http("GET", path, params={"verify": "0x" + "1" * 40})
    assert (wrong.status, wrong.body["state"]) == (403, "verification_failed")
    assert "order" not in wrong.body["data"]
    unknown = await served.http("GET", "/agent/swap/status/ord_" + "0" * 26)
    assert (unknown.status, unknown.body["error"]["code"]) == (404, "order_not_found")


async def test_blacklisted_address_is_refused_before_an_order_is_made(
    served: Served,
) -> None:
    listed, before = "0x000000000000000000000000000000000000b1ac", served.count("orders")
    answer = await served.post("/agent/swap/execute", {**SWAP, "to": listed})
    assert (answer.status, answer.body["error"]["code"]) == (400, "invalid_destination")
    assert [problem["field"] for problem in answer.body["validationErrors"]] == ["to"]
    back = {"direction": "u2x", "chain": "arbitrum", "amount": "150", "to": MONERO}
    refund = await served.post("/agent/swap/execute", {**back, "refundAddress": listed})
    assert [problem["field"] for problem in refund.body["validationErrors"]] == ["refundAddress"]
    over_bff = await bff.post(served, "/orders", {**bff.ORDER, "toAddress": listed})
    assert over_bff.body["error"]["details"]["problems"][0]["field"] == "toAddress"
    assert served.count("orders") == before


async def test_sandbox_payment_token_is_refused_as_destination(served: Served) -> None:
    swap = {"direction": "u2x", "chain": "arbitrum", "amount": "150", "to": MONERO}
    made = await served.post("/agent/swap/execute", swap)
    uri = made.body["data"]["fundingInstructions"]["paymentUri"]
    token = uri.removeprefix("ethereum:").partition("@")[0]
    answer = await served.post("/agent/swap/execute", {**SWAP, "to": token})
    assert answer.body["error"]["code"] == "invalid_destination"
