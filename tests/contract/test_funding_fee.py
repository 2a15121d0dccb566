"""With funding x402 the gas of a signed payment is in the quote and paid by the order, once."""

from __future__ import annotations

from typing import Any

import pytest

from rpcsvc.client import Swap
from rpcsvc.orders.quoted import read_digest
from tests.contract.paying import finished, fund, header, offered, signed
from tests.contract.serving import BACK, SWAP, Answer, Served
from tests.e2e.processes import until
from tests.rows import all_rows

GAS = 50_000  # sandbox.usdc_payout_fee: the cost of a USDC transfer there
RATE = 165_000_000
FEE = -(-GAS * 10**12 // RATE)
PAYING = {**BACK, "funding": "x402"}
Json = dict[str, Any]


def priced(swap: Json) -> Json:
    return {
        name: swap[name] for name in ("direction", "chain", "amount", "funding") if name in swap
    }


def piconero(amount: str) -> int:
    whole, _, part = amount.partition(".")
    return int(whole) * 10**12 + int(part.ljust(12, "0"))


async def quoted(served: Served, swap: Json) -> Json:
    return dict((await served.post("/agent/swap/quote", priced(swap))).body["data"])


async def test_quote_has_the_gas_in_its_fees(served: Served) -> None:
    plain, paying = [await quoted(served, swap) for swap in (BACK, PAYING)]
    assert plain["quote"]["rate"] == paying["quote"]["rate"] == "165"
    fees, before = paying["quote"]["fees"], plain["quote"]["fees"]
    assert (fees["fundingGas"], piconero(fees["funding"])) == ("0.05", FEE)
    assert before.keys() == fees.keys() - {"funding", "fundingGas"}
    assert (before["refundNetwork"], fees["refundNetwork"]) == ("0.05", "0.1")
    without, with_gas = [piconero(each["quote"]["expectedOutput"]) for each in (plain, paying)]
    assert without - with_gas == FEE
    digests = [read_digest(each["quoteDigest"]) for each in (plain, paying)]
    assert [each.funding_gas for each in digests] == [0, GAS]
    assert digests[1].expected_output == with_gas


async def test_plan_hands_funding_on_to_quote_and_execute(served: Served) -> None:
    planned = (await served.post("/agent/swap/plan", PAYING)).body
    assert planned["data"]["intent"]["funding"] == "x402"
    assert [each["params"]["funding"] for each in planned["nextActions"]] == ["x402", "x402"]
    plain = (await served.post("/agent/swap/plan", BACK)).body
    assert plain["data"]["intent"]["funding"] is None
    assert all("funding" not in each["params"] for each in plain["nextActions"])


@pytest.mark.parametrize("path", ["plan", "quote", "create", "execute"])
async def test_funding_x402_is_refused_for_xmr_deposits(served: Served, path: str) -> None:
    swap = {**SWAP, "funding": "x402"}
    answer = await served.post(f"/agent/swap/{path}", priced(swap) if path == "quote" else swap)
    assert (answer.status, answer.body["error"]["code"]) == (400, "invalid_input")
    (problem,) = answer.body["validationErrors"]
    assert (problem["field"], problem["received"]) == ("funding", "x402")
    assert "Leave funding out" in problem["message"]
    unknown = await served.post("/agent/swap/plan", {"direction": "u2x", "funding": "x403"})
    (problem,) = unknown.body["validationErrors"]
    assert (problem["field"], problem["allowed"]) == ("funding", ["x402"])


async def test_quote_digest_is_refused_for_another_funding(served: Served) -> None:
    plain, paying = [(await quoted(served, swap))["quoteDigest"] for swap in (BACK, PAYING)]
    for swap, digest in ((BACK, paying), (PAYING, plain)):
        refused = await served.post("/agent/swap/create", {**swap, "quoteDigest": digest})
        assert [each["field"] for each in refused.body["validationErrors"]] == ["quoteDigest"]
    made = await served.post("/agent/swap/create", {**PAYING, "quoteDigest": paying})
    assert made.status == 200
    assert made.body["data"]["quote"]["fees"]["fundingGas"] == "0.05"


async def test_key_is_of_the_funding_too(served: Served) -> None:
    key = "0f6c2b9a-5d1e-4c37-9a40-6b1d2f8e7c05"
    assert (await served.post("/agent/swap/create", BACK, idempotency_key=key)).status == 200
    other = await served.post("/agent/swap/create", PAYING, idempotency_key=key)
    assert (other.status, other.body["error"]["details"]["fields"]) == (409, ["funding"])


async def test_order_bears_the_gas_once(served: Served) -> None:
    made = (await served.post("/agent/swap/execute", PAYING)).body["data"]
    order_id = made["order"]["orderId"]
    payment = await signed(await offered(served, order_id))
    assert (await fund(served, order_id, **header(payment))).status == 200
    done = await finished(served, order_id)
    assert done["data"]["order"]["actualOutput"] == made["order"]["expectedOutput"]
    plain = await quoted(served, BACK)
    less = piconero(plain["quote"]["expectedOutput"]) - int(made["order"]["expectedOutput"])
    assert less == FEE
    sql = "SELECT o.funding_gas, o.funding_fee, f.is_gas_paid FROM orders o"
    joined = f"{sql} JOIN funding_authorizations f ON f.order_id = o.order_id"
    assert all_rows(served.up.database, joined) == [(GAS, FEE, 1)]


async def test_gas_is_given_away_without_funding(served: Served) -> None:
    order_id = (await served.post("/agent/swap/execute", BACK)).body["data"]["order"]["orderId"]
    payment = await signed(await offered(served, order_id))
    assert (await fund(served, order_id, **header(payment))).status == 200
    assert all_rows(served.up.database, "SELECT is_gas_paid FROM funding_authorizations") == [(0,)]


async def test_refund_bears_the_gas(served: Served) -> None:
    made = (await served.post("/agent/swap/execute", PAYING)).body["data"]["order"]
    late = {"fault": "advance_clock", "seconds": 4_000}
    dearer = {"fault": "set_rate", "rate": "400"}
    assert (await served.post("/sandbox/fault", dearer)).status == 200
    assert (await served.post("/sandbox/fault", late)).status == 200
    paid = {"orderId": made["orderId"], "amount": "150"}
    assert (await served.post("/sandbox/fund", paid)).status == 200
    done = await finished(served, made["orderId"])
    assert done["data"]["outcome"] == "refunded"
    assert [each["amount"] for each in done["data"]["transfers"]] == ["149.9"]


async def bff(served: Served, path: str, body: Json, key: str | None = None) -> Answer:
    headers = {} if key is None else {"Idempotency-Key": key}
    reply = await served.client.post(f"/bff/v1{path}", json=body, headers=headers)
    return Answer(reply.status, await reply.json(), reply.headers)


async def test_bff_quotes_and_orders_with_gas(served: Served) -> None:
    contract = served.up.service.chains.resolve("arbitrum").usdc_contract
    pair = {"fromChainId": 42161, "toChainId": 0, "fromToken": contract, "toToken": "XMR"}
    priced = {**pair, "fromAmount": "150000000"}
    plain, paying = [
        (await bff(served, "/quote", {**priced, **funding})).body
        for funding in ({}, {"funding": "x402"})
    ]
    assert (plain.get("fundingGas"), paying["fundingGas"]) == (None, str(GAS))
    assert int(plain["toAmount"]) - int(paying["toAmount"]) == FEE
    order, key = {**priced, "toAddress": BACK["to"]}, "0f6c2b9a-5d1e-4c37-9a40-6b1d2f8e7c06"
    made = (await bff(served, "/orders", {**order, "funding": "x402"}, key)).body
    assert (made["fundingGas"], made["expectedOutput"]) == (str(GAS), paying["toAmount"])
    other = await bff(served, "/orders", order, key)
    assert (other.status, other.body["error"]["details"]["fields"]) == (409, ["funding"])
    back = {"fromChainId": 0, "toChainId": 42161, "fromToken": "XMR", "toToken": contract}
    for path, more in (("/quote", {}), ("/orders", {"toAddress": SWAP["to"]})):
        wrong = {**back, "fromAmount": "800000000000", "funding": "x402", **more}
        refused = (await bff(served, path, wrong)).body["error"]
        problems = [(each["code"], each["field"]) for each in refused["details"]["problems"]]
        assert problems == [("invalid_input", "funding")]


async def test_bff_order_shows_what_is_due_of_a_part_payment(served: Served) -> None:
    order_id = (await served.post("/agent/swap/execute", BACK)).body["data"]["order"]["orderId"]
    path = f"/bff/v1/orders/{order_id}"
    assert "amountDue" not in await (await served.client.get(path)).json()
    await served.post("/sandbox/fund", {"orderId": order_id, "amount": "100"})

    async def is_detected() -> bool:
        return "amountDue" in await (await served.client.get(path)).json()

    await until(is_detected)
    assert (await (await served.client.get(path)).json())["amountDue"] == "50000000"
    await served.post("/sandbox/fund", {"orderId": order_id})
    await finished(served, order_id)
    assert "amountDue" not in await (await served.client.get(path)).json()


def test_client_asks_for_the_funding_of_its_swap() -> None:
    swap = Swap(direction="u2x", chain="base", amount="150", to="4", funding="x402")
    assert swap.terms()["funding"] == swap.wanted()["funding"] == "x402"
    assert "funding" not in Swap(direction="u2x", chain="base", amount="150", to="4").wanted()
