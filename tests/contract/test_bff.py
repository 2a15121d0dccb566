"""The BFF over HTTP: every field of spec 2.4, its errors, and orders shared with the other APIs."""

from __future__ import annotations

import asyncio
import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.domain.money import USDC as USDC_ASSET
from rpcsvc.domain.money import format_units
from rpcsvc.store.operator_books import IntegratorFees, OperatorBooks
from tests.contract.bff import (
    ORDER,
    ORDER_BACK,
    SESSION,
    TO_USDC,
    TO_XMR,
    USDC,
    call,
    check,
    post,
)
from tests.contract.serving import EVM, MONERO, Served, serving

KEY = "integrator-key-0123456789abcdef"
ACME = f"acme:0.75:{hashlib.sha256(KEY.encode()).hexdigest()}"


async def until(served: Served, order_id: str, *statuses: str) -> dict[str, Any]:
    """The order once it has one of the statuses."""
    async with asyncio.timeout(180):
        while True:
            answer = await call(served, "GET", f"/orders/{order_id}")
            check("Order", answer.body)
            if answer.body["status"] in statuses:
                return dict(answer.body)
            await asyncio.sleep(0.02)


async def fund(served: Served, order_id: str, amount: str | None = None) -> None:
    params = {"orderId": order_id, **({"amount": amount} if amount else {})}
    assert (await served.post("/sandbox/fund", params)).status == 200


async def test_health_chains_quote_and_ticket_have_the_spec_fields(served: Served) -> None:
    health = await call(served, "GET", "/health")
    check("Health", health.body)
    assert (health.status, health.body["status"]) == (200, "ok")
    chains = await call(served, "GET", "/chains")
    assert set(chains.body) == {"chains"}
    for chain in chains.body["chains"]:
        check("Chain", chain)
    assert [c["chainId"] for c in chains.body["chains"]][:2] == [0, 42161]
    assert chains.body["chains"][0]["nativeToken"] == "XMR"
    for pair in (TO_USDC, TO_XMR):
        quote = await post(served, "/quote", pair)
        check("Quote response", quote.body)
        assert "integratorFee" not in quote.body
        assert quote.body["fromAmount"] == pair["fromAmount"]
    ticket = {"orderId": None, "sessionId": None, "walletAddress": None,
              "category": "question", "message": "How long does it take?"}  # fmt: skip
    opened = await post(served, "/support/tickets", ticket)
    check("Support ticket response", opened.body)
    assert opened.body["ticketId"].startswith("tkt_")


async def test_a_quote_is_the_agent_apis_quote_in_atomic_units(served: Served) -> None:
    quote = (await post(served, "/quote", TO_USDC)).body
    swap = {"direction": "x2u", "chain": 42161, "amount": "0.8"}
    agent = (await served.post("/agent/swap/quote", swap)).body["data"]["quote"]
    assert format_units(int(quote["toAmount"]), USDC_ASSET) == agent["expectedOutput"]
    assert format_units(int(quote["minReceived"]), USDC_ASSET) == agent["minReceived"]
    assert (quote["fromAmountUsd"], quote["fromSymbol"], quote["toSymbol"]) == (
        "132", "XMR", "USDC",
    )  # fmt: skip
    assert quote["toAmountUsd"] == agent["expectedOutput"]


@pytest.mark.parametrize(
    ("body", "symbol", "chain"), [(ORDER, "XMR", 0), (ORDER_BACK, "USDC", 42161)]
)
async def test_an_order_runs_to_its_end_with_the_fields_of_the_spec(
    served: Served, body: dict[str, Any], symbol: str, chain: int
) -> None:
    made = await post(served, "/orders", body)
    check("Order create response", made.body)
    assert made.body["depositChainId"] == chain
    assert made.body["depositToken"] == ("XMR" if symbol == "XMR" else USDC)
    assert made.body["depositTokenSymbol"] == symbol
    assert made.body["depositAmount"] == body["fromAmount"]
    assert made.body["status"] == "awaiting_deposit"
    order_id = made.body["orderId"]
    before = await until(served, order_id, "awaiting_deposit")
    assert (before["depositTxHash"], before["actualOutput"], before["completedAt"]) == (None,) * 3
    await fund(served, order_id)
    done = await until(served, order_id, "completed")
    assert done["actualOutput"] == made.body["expectedOutput"] == done["expectedOutput"]
    assert done["depositTxHash"]
    assert "twap" not in done


async def test_an_order_of_one_surface_is_seen_over_the_other(served: Served) -> None:
    made = (await post(served, "/orders", ORDER)).body
    seen = await served.http("GET", f"/agent/swap/status/{made['orderId']}")
    assert seen.body["data"]["order"]["depositAddress"] == made["depositAddress"]
    over_rpc = await served.rpc("swap.status", {"orderId": made["orderId"]})
    assert over_rpc.body["result"]["data"]["order"]["depositAmount"] == made["depositAmount"]
    swap = {"direction": "u2x", "chain": "arbitrum", "amount": "150", "to": MONERO,
            "sessionId": SESSION.upper()}  # fmt: skip
    other = (await served.post("/agent/swap/create", swap)).body["data"]["order"]["orderId"]
    assert (await call(served, "GET", f"/orders/{other}")).body["toAddress"] == MONERO
    listed = (await call(served, "GET", "/orders", params={"session": SESSION})).body["orders"]
    for item in listed:
        check("Order list item", item)
    assert [item["id"] for item in listed] == [other, made["orderId"]]
    assert (listed[0]["from_chain_id"], listed[0]["to_chain_id"]) == (42161, 0)
    nobodys = "3f2b8c1e-7d64-4f0a-9c1b-000000000000"
    assert (await call(served, "GET", "/orders", params={"session": nobodys})).body == {
        "orders": []
    }


async def test_verify_shows_the_order_only_with_its_destination(served: Served) -> None:
    order_id = (await post(served, "/orders", ORDER)).body["orderId"]
    good = await call(served, "GET", f"/orders/{order_id}", params={"verify": EVM.lower()})
    assert good.body["orderId"] == order_id
    bad = await call(served, "GET", f"/orders/{order_id}", params={"verify": MONERO})
    assert (bad.status, bad.body["error"]["code"]) == (403, "verification_failed")
    assert set(bad.body) == {"error"}


async def test_key_makes_one_order_and_changed_payload_conflicts(served: Served) -> None:
    first = await post(served, "/orders", ORDER, idempotency_key="k1-0123456789abc")
    again = await post(served, "/orders", ORDER, idempotency_key="k1-0123456789abc")
    assert first.body == again.body
    assert again.headers["idempotent-replayed"] == "true"
    changed = {**ORDER, "twapConfig": {"disabled": True}}
    other = await post(served, "/orders", changed, idempotency_key="k1-0123456789abc")
    assert (other.status, other.body["error"]["code"]) == (409, "idempotency_conflict")
    assert other.body["error"]["details"] == {"fields": ["twapConfig"]}
    assert served.count("orders") == 1


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"fromChainId": 0, "toChainId": 0}, "unsupported_chain", "toChainId"),
    ({"fromChainId": 1, "toChainId": 42161}, "unsupported_chain", "toChainId"),
    ({"toChainId": 999}, "unsupported_chain", "toChainId"),
    ({"fromToken": "BTC"}, "unsupported_token", "fromToken"),
    ({"toToken": "0x" + "1" * 40}, "unsupported_token", "toToken"),
    ({"toToken": "XMR"}, "unsupported_token", "toToken"),
    ({"fromAmount": "0.8"}, "invalid_input", "fromAmount"),
    ({"fromAmount": "0"}, "invalid_input", "fromAmount"),
    ({"fromAmount": "-5"}, "invalid_input", "fromAmount"),
    ({"fromAmount": 800000000000}, "invalid_input", "fromAmount"),
    ({"fromAmount": "9" * 30}, "amount_above_maximum", "fromAmount"),
    ({"fromAmount": "1"}, "amount_below_minimum", "fromAmount"),
    ({"toAddress": MONERO}, "invalid_destination", "toAddress"),
    ({"toAddress": USDC}, "invalid_destination", "toAddress"),
    ({"sessionId": "mine"}, "invalid_input", "sessionId"),
    ({"fromAmmount": "1"}, "invalid_input", "fromAmmount"),
    ({"fromChainId": True}, "invalid_input", "fromChainId"),
    ({"twapConfig": {"chunkSizeUsd": 249}}, "invalid_input", "twapConfig.chunkSizeUsd"),
    ({"twapConfig": {"intervalMs": 999}}, "invalid_input", "twapConfig.intervalMs"),
    ({"twapConfig": {"intervalMs": 60_001}}, "invalid_input", "twapConfig.intervalMs"),
    ({"twapConfig": {"intervalMs": 60_000.5}}, "invalid_input", "twapConfig.intervalMs"),
    ({"twapConfig": {"intervalMs": "1000"}}, "invalid_input", "twapConfig.intervalMs"),
    ({"twapConfig": {"chunkSizeUsd": 249.9}}, "invalid_input", "twapConfig.chunkSizeUsd"),
    ({"twapConfig": {"chunkSizeUsd": True}}, "invalid_input", "twapConfig.chunkSizeUsd"),
    ({"twapConfig": {"on": True}}, "invalid_input", "twapConfig.on"),
    ({"toAddress": None}, "invalid_input", "toAddress"),
]


@pytest.mark.parametrize(("change", "code", "field"), WRONG)
async def test_wrong_value_is_named_with_the_supported_ones(
    served: Served, change: dict[str, Any], code: str, field: str
) -> None:
    answer = await post(served, "/orders", {**ORDER, **change})
    assert (answer.status, set(answer.body)) == (400, {"error"})
    error = answer.body["error"]
    assert error["code"] == code, error
    assert set(error) <= {"code", "message", "details"}
    assert [p["field"] for p in error["details"]["problems"]] == [field]
    if code.startswith("unsupported"):
        assert error["details"]["allowed"]
    assert served.count("orders") == 0


async def test_limit_in_smallest_units_can_be_sent_back_as_it_stands(
    served: Served,
) -> None:
    refused = await post(served, "/quote", {**TO_USDC, "fromAmount": "1"})
    limits = refused.body["error"]["details"]
    assert limits["asset"] == "XMR"
    assert int(limits["maximum"]) > int(limits["minimum"]) > 10**9
    at_least = await post(served, "/quote", {**TO_USDC, "fromAmount": limits["minimum"]})
    assert at_least.status == 200


async def test_a_missing_field_is_named(served: Served) -> None:
    body = {name: value for name, value in ORDER.items() if name != "toAddress"}
    answer = await post(served, "/orders", body)
    assert (answer.status, answer.body["error"]["code"]) == (400, "missing_input")
    no_session = await call(served, "GET", "/orders")
    assert no_session.body["error"]["code"] == "missing_input"
    assert "session" in no_session.body["error"]["message"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "code"),
    [
        ("GET", "/nothing", None, 404, "unknown_method"),
        ("DELETE", "/orders", None, 405, "invalid_request"),
        ("POST", "/orders", b"{", 400, "invalid_json"),
        ("POST", "/orders", b"[]", 400, "invalid_request"),
        ("POST", "/quote", b'{"a":' + b"1" * 70_000 + b"}", 413, "payload_too_large"),
        ("GET", "/orders/nonsense", None, 400, "invalid_input"),
        ("GET", "/orders/ord_" + "0" * 26, None, 404, "order_not_found"),
    ],
)
async def test_every_error_has_the_bffs_shape(
    served: Served, method: str, path: str, body: bytes | None, status: int, code: str
) -> None:
    headers = {"content-type": "application/json"} if body is not None else {}
    answer = await call(served, method, path, data=body, headers=headers)
    assert (answer.status, answer.body["error"]["code"]) == (status, code)
    assert set(answer.body) == {"error"}
    assert re.fullmatch(r"[\w-]{86}", answer.headers["x-service-signature"])
    assert answer.headers["vary"] == "origin"


async def test_rate_limits_have_the_bff_shape(tmp_path: Path) -> None:
    async with serving(
        tmp_path, rate_limit__enabled=True, rate_limit__orders_per_minute=1
    ) as served:
        assert (await post(served, "/orders", ORDER)).status == 200
        answer = await post(served, "/orders", ORDER)
    assert (answer.status, answer.body["error"]["code"]) == (429, "rate_limited")
    assert int(answer.headers["retry-after"]) > 0


# --- integrators ---


async def test_an_unknown_key_is_refused_before_anything_is_done(tmp_path: Path) -> None:
    async with serving(tmp_path, {"RPCSVC_INTEGRATORS": ACME}) as served:
        for key in ("wrong", KEY + "x", ""):
            answer = await post(served, "/orders", ORDER, x_api_key=key)
            assert (answer.status, answer.body["error"]["code"]) == (401, "unauthorized")
        assert served.count("orders") == 0


async def test_the_integrators_fee_is_quoted_taken_and_accounted(tmp_path: Path) -> None:
    async with serving(tmp_path, {"RPCSVC_INTEGRATORS": ACME}) as served:
        plain = (await post(served, "/quote", TO_USDC)).body
        keyed = (await post(served, "/quote", TO_USDC, x_api_key=KEY)).body
        check("Quote response", keyed)
        fee = keyed["integratorFee"]
        assert fee == {"percent": 0.75, "amount": "990000", "amountUsd": "0.99"}
        assert int(plain["toAmount"]) - int(keyed["toAmount"]) == int(fee["amount"])
        made = (await post(served, "/orders", ORDER, x_api_key=KEY)).body
        assert made["expectedOutput"] == keyed["toAmount"]
        await fund(served, made["orderId"])
        done = await until(served, made["orderId"], "completed")
        assert done["actualOutput"] == keyed["toAmount"]
        books = OperatorBooks(served.up.database)
        assert await books.integrator_fees() == [IntegratorFees("acme", "USDC", 990_000, 1)]


async def test_keys_of_integrators_do_not_meet(tmp_path: Path) -> None:
    async with serving(tmp_path, {"RPCSVC_INTEGRATORS": ACME}) as served:
        public = await post(served, "/orders", ORDER, idempotency_key="same-0123456789a")
        keyed = await post(
            served, "/orders", ORDER, idempotency_key="same-0123456789a", x_api_key=KEY
        )
        assert public.body["orderId"] != keyed.body["orderId"]
        again = await post(
            served, "/orders", ORDER, idempotency_key="same-0123456789a", x_api_key=KEY
        )
        assert again.body == keyed.body
