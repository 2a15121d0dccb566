"""swap.list, swap.check and swap.refundAddress over the wire."""

from __future__ import annotations

import asyncio
import base64
import json
from typing import Any

import jsonschema
import pytest

from rpcsvc.domain.money import LONGEST_AMOUNT
from rpcsvc.operations.params import CheckParams
from tests.contract.serving import EVM, MONERO, SWAP, Served

SESSION = "9a1f0b52-3c4d-4e6f-8a7b-1c2d3e4f5a6b"
OTHER = "0d2c4b6a-1e3f-4a5b-9c7d-8e9f0a1b2c3d"
Json = dict[str, Any]


async def ordered(served: Served, **changes: Any) -> Json:
    return dict((await served.post("/agent/swap/execute", {**SWAP, **changes})).body["data"])


async def listed(served: Served, **query: Any) -> Json:
    return dict((await served.http("GET", "/agent/swap/list", params=query)).body)


async def test_list_gives_each_order_once_newest_first(served: Served) -> None:
    made = [(await ordered(served, sessionId=SESSION))["order"]["orderId"] for _ in range(5)]
    await ordered(served, sessionId=OTHER)
    seen, query = [], {"sessionId": SESSION, "limit": 2}
    for _ in range(3):
        page = (await listed(served, **query))["data"]
        seen += [order["orderId"] for order in page["orders"]]
        query["after"] = page["nextAfter"]
    assert seen == made[::-1]
    assert page["nextAfter"] is None


async def test_list_is_stable_while_orders_are_made(served: Served) -> None:
    made = [(await ordered(served, sessionId=SESSION))["order"]["orderId"] for _ in range(3)]
    first = (await listed(served, sessionId=SESSION, limit=1))["data"]
    await ordered(served, sessionId=SESSION)
    rest = (await listed(served, sessionId=SESSION.upper(), after=first["nextAfter"]))["data"]
    assert [order["orderId"] for order in rest["orders"]] == made[1::-1]


async def test_list_needs_the_session_and_its_own_cursor(served: Served) -> None:
    other_one = (await ordered(served, sessionId=OTHER))["order"]["orderId"]
    assert (await listed(served))["missingInputs"] == ["sessionId"]
    assert (await listed(served, sessionId=SESSION))["data"]["orders"] == []
    refused = await listed(served, sessionId=SESSION, after=other_one)
    assert refused["error"]["code"] == "order_not_found"
    for limit in ("0", "101", "many", "1.5"):
        refused = await listed(served, sessionId=SESSION, limit=limit)
        assert [p["field"] for p in refused["validationErrors"]] == ["limit"], limit


async def check(served: Served, order_id: str, **payment: Any) -> Json:
    return dict((await served.post(f"/agent/swap/check/{order_id}", payment)).body)


async def test_check_agrees_with_the_funding_instructions(served: Served) -> None:
    for swap in (SWAP, {"direction": "u2x", "chain": "base", "amount": "150", "to": MONERO}):
        data = await ordered(served, **swap)
        funding, order_id = data["fundingInstructions"], data["order"]["orderId"]
        by_uri = await check(served, order_id, paymentUri=funding["paymentUri"])
        described = {
            "address": funding["depositAddress"],
            "amount": funding["amount"],
            "asset": funding["asset"],
        }
        by_id = await check(served, order_id, **described, chain=funding["chainId"])
        by_name = await check(served, order_id, **described, chain=funding["network"])
        for answer in (by_uri, by_id, by_name):
            assert answer["data"]["paymentCheck"]["safeToSend"], answer
            assert answer["data"]["paymentCheck"]["amountDue"] == funding["amount"]


async def test_check_tells_each_difference(served: Served) -> None:
    swap = {"direction": "u2x", "chain": "base", "amount": "150", "to": MONERO}
    data = await ordered(served, **swap)
    call = "0xa9059cbb" + EVM[2:].lower().rjust(64, "0") + f"{150 * 10**6:064x}"
    sent = {"to": EVM, "data": call, "chainId": 8453}
    answers = [
        await check(served, data["order"]["orderId"], transaction=given)
        for given in (sent, json.dumps(sent))
    ]
    for answer in answers:
        result = answer["data"]["paymentCheck"]
        codes = [each["code"] for each in result["problems"]]
        # The sandbox accepts a test network's money only.
        assert codes == ["wrong_address", "wrong_token", "wrong_chain"]
        assert result["safeToSend"] is False


async def test_check_needs_the_contract_of_calldata(served: Served) -> None:
    swap = {"direction": "u2x", "chain": "base", "amount": "150", "to": MONERO}
    data = await ordered(served, **swap)
    order_id, funding = data["order"]["orderId"], data["fundingInstructions"]
    deposit = funding["depositAddress"]
    token = funding["paymentUri"].removeprefix("ethereum:").partition("@")[0]
    call = "0xa9059cbb" + deposit[2:].lower().rjust(64, "0") + f"{150 * 10**6:064x}"
    payment = {"transaction": call, "chain": funding["chainId"]}
    alone = (await check(served, order_id, **payment))["data"]["paymentCheck"]
    assert alone["safeToSend"] is False
    (problem,) = alone["problems"]
    assert (problem["code"], problem["expected"]) == ("wrong_token", token)
    other = (await check(served, order_id, **payment, contract=EVM))["data"]["paymentCheck"]
    assert [each["code"] for each in other["problems"]] == ["wrong_token"]
    whole = (await check(served, order_id, **payment, contract=token))["data"]["paymentCheck"]
    assert (whole["safeToSend"], whole["problems"]) == (True, [])


async def test_check_repeats_and_logs_no_secret(
    served: Served, capfd: pytest.CaptureFixture[str]
) -> None:
    order_id = (await ordered(served))["order"]["orderId"]
    key = "4c0883a69102937d6231471b5dbb6204fe5129617082792ae468d01a3f362318"
    raw = "0x02f8" + key * 4
    encoded = base64.b64encode(bytes.fromhex(raw[2:])).decode()
    percent = "".join(f"%{ord(each):02x}" for each in raw)
    token = f"ethereum:{EVM}@84532/transfer?uint256=1&address="
    payments: list[Json] = [
        {"transaction": "0x" + key},
        {"transaction": {"to": EVM, "privateKey": key}},
        {"transaction": json.dumps({"to": EVM, "r": key, "s": key, "v": 27})},
        {"transaction": raw},
        {"transaction": raw.upper()},
        {"transaction": json.dumps(raw)},
        {"transaction": [raw]},
        {"transaction": {"tx": raw}},
        {"transaction": {"to": EVM, "tx": {"bytes": [raw]}}},
        {"transaction": json.dumps({"tx": raw})},
        {"transaction": {raw: None}},
        {"address": raw, "amount": "1", "asset": "USDC"},
        {"address": raw[:250], "amount": "1", "asset": "USDC"},
        {"address": encoded, "amount": "1", "asset": "USDC"},
        {"address": {"tx": raw}},
        {"address": key, "amount": "1", "asset": "USDC"},
        {"address": EVM, "amount": raw, "asset": "USDC"},
        {"address": EVM, "amount": "1", "asset": raw},
        {"transaction": {"to": EVM, "data": "0x", "chainId": 1}, "contract": raw},
        {"transaction": "0xa9059cbb", "contract": raw[:250]},
        {"transaction": "0xa9059cbb", "chain": raw},
        {"paymentUri": key},
        {"paymentUri": raw},
        {"paymentUri": f"monero:{raw}"},
        {"paymentUri": token + raw},
        {"paymentUri": token + key},
        {"paymentUri": token + percent},
        {"tx": raw},
        {"tx": {"raw": raw}},
        {"rawTransaction": encoded},
        {raw: True},
    ]
    for payment in payments:
        path = f"/agent/swap/check/{order_id}"
        rpc = await served.rpc("swap.check", {"orderId": order_id, **payment})
        for answer in (await served.post(path, payment), rpc):
            reported = json.dumps(answer.body)
            assert "It was not read." in reported, payment
            assert key[:24] not in reported.lower(), payment
            assert encoded[:24] not in reported, payment
    misplaced = await served.post(f"/agent/swap/check/{raw}", {"transaction": "0x"})
    assert key[:24] not in json.dumps(misplaced.body)
    output = capfd.readouterr()
    assert key[:24] not in (output.out + output.err).lower()
    assert encoded[:24] not in output.out + output.err


async def test_check_takes_one_whole_payment(served: Served) -> None:
    order_id = (await ordered(served))["order"]["orderId"]
    half = {"address": MONERO, "asset": "XMR"}
    wrong = {**half, "amount": "0.0000000000001"}
    odd = {**half, "amount": "0*"}
    jsonschema.validate({"orderId": order_id, **odd}, CheckParams.model_json_schema())
    for payment in ({}, {"paymentUri": "monero:8", "address": MONERO}, half, wrong, odd):
        result = (await check(served, order_id, **payment))["data"]["paymentCheck"]
        codes = [each["code"] for each in result["problems"]]
        assert (result["safeToSend"], codes) == (False, ["unreadable"])
    refused = await check(served, order_id, **{**half, "amount": "1" * (LONGEST_AMOUNT + 1)})
    assert [problem["field"] for problem in refused["validationErrors"]] == ["amount"]


async def needing_an_address(served: Served, **changes: Any) -> Json:
    data = await ordered(served, **changes)
    order_id = data["order"]["orderId"]
    await served.post("/sandbox/fund", {"orderId": order_id, "amount": "500"})
    async with asyncio.timeout(60):
        while True:
            seen = (await served.http("GET", f"/agent/swap/status/{order_id}")).body["data"]
            if seen["actionRequired"] == "refund_address" or seen["outcome"]:
                return data
            await asyncio.sleep(0.02)


async def set_address(served: Served, data: Json, address: str, session: str = "") -> Json:
    path = f"/agent/swap/refund-address/{data['order']['orderId']}"
    params = {"sessionId": session or data["sessionId"], "address": address}
    return dict((await served.post(path, params)).body)


async def test_refund_address_is_taken_once(served: Served) -> None:
    data = await needing_an_address(served)
    wrong = await set_address(served, data, MONERO, OTHER)
    assert wrong["error"]["code"] == "verification_failed"
    invalid = await set_address(served, data, EVM)
    assert invalid["error"]["code"] == "invalid_destination"
    first, second = [await set_address(served, data, MONERO) for _ in range(2)]
    for answer in (first, second):
        assert answer["data"]["refundAddress"] == {"accepted": True, "address": MONERO}
    assert served.count("tickets") == 0


async def test_refund_address_is_accepted_only_where_one_is_awaited(served: Served) -> None:
    unfunded = await set_address(served, await ordered(served), MONERO)
    assert unfunded["data"]["refundAddress"]["accepted"] is False
    assert "No refund waits" in unfunded["nextActions"][0]["description"]
    agreed = await needing_an_address(served, refundAddress=MONERO)
    final = await set_address(served, agreed, MONERO)
    assert final["data"]["refundAddress"]["accepted"] is False
    assert "made with a refundAddress" in final["nextActions"][0]["description"]


async def test_check_says_that_it_cannot_read_a_payment(served: Served) -> None:
    order_id = (await ordered(served))["order"]["orderId"]
    for payment in ({"transaction": "hello"}, {"paymentUri": "x:y"}, {"transaction": "{"}):
        answer = await check(served, order_id, **payment)
        assert answer["data"]["paymentCheck"]["safeToSend"] is False
        assert answer["data"]["paymentCheck"]["problems"][0]["code"] == "unreadable"
