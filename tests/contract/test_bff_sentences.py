"""Requirements on the BFF, TWAP and integrators that no other test covers."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.domain.bridge import BridgeStatus
from rpcsvc.domain.integrators import Integrators, parse_integrators
from rpcsvc.domain.order import OrderStatus
from rpcsvc.http.site import BFF_ROOT
from rpcsvc.operations import bff_models, models
from rpcsvc.operations.params import Params
from rpcsvc.operations.table import BFF_OPERATIONS
from rpcsvc.store.operator_books import IntegratorFees, OperatorBooks
from tests.contract.bff import ORDER, ORDER_BACK, TABLES, TO_XMR, call, check, post
from tests.contract.described import openapi_of
from tests.contract.serving import EVM, Served, serving

KEY = "integrator-key-0123456789abcdef"
ACME = f"acme:0.75:{hashlib.sha256(KEY.encode()).hexdigest()}"
ENDPOINTS = {
    ("GET", "/health"),
    ("GET", "/chains"),
    ("POST", "/quote"),
    ("POST", "/orders"),
    ("GET", "/orders/{orderId}"),
    ("GET", "/orders"),
    ("POST", "/orders/{orderId}/cancel"),  # beyond the spec
    ("POST", "/support/tickets"),
    ("GET", "/bridge/rates"),
    ("POST", "/bridge/deposit"),
    ("POST", "/bridge/withdraw"),
    ("GET", "/bridge/order/{orderId}"),
}
REQUESTS: dict[str, type[Params]] = {
    "Quote request": bff_models.BffQuoteParams,
    "Order create request": bff_models.BffOrderParams,
    "twapConfig": bff_models.TwapConfig,
    "Support ticket request": bff_models.BffTicketParams,
    "Bridge order request": bff_models.BridgeParams,
}
# 4 XMR are worth 660 USD: two chunks; 750 USDC are three.
CHUNKED = {**ORDER, "fromAmount": str(4 * 10**12), "twapConfig": {"intervalMs": 1_000}}
CHUNKED_BACK = {**ORDER_BACK, "fromAmount": "750000000", "twapConfig": {"intervalMs": 1_000}}


async def fund(served: Served, order_id: str) -> None:
    assert (await served.post("/sandbox/fund", {"orderId": order_id})).status == 200


# --- endpoints, requests, statuses ---


async def test_the_endpoints_are_those_of_the_spec_and_no_others(served: Served) -> None:
    document = openapi_of(served)
    described = {
        (method.upper(), path.removeprefix(BFF_ROOT))
        for path, item in document["paths"].items()
        if path.startswith(f"{BFF_ROOT}/")
        for method in item
    }
    assert described == ENDPOINTS
    routed = {
        (route.method, route.resource.canonical.removeprefix(BFF_ROOT))
        for route in served.client.app.router.routes()
        if route.resource is not None and route.resource.canonical.startswith(f"{BFF_ROOT}/")
    }
    assert {(method, path) for method, path in routed if method not in ("HEAD", "*")} == ENDPOINTS


@pytest.mark.parametrize("table", REQUESTS)
def test_requests_take_exactly_the_fields_of_the_spec(table: str) -> None:
    schema = REQUESTS[table].model_json_schema(by_alias=True)
    wanted = TABLES[table]
    assert set(schema["properties"]) == set(wanted)
    required = {name for name, kind in wanted.items() if not kind.endswith("?")}
    assert set(schema.get("required", ())) == required
    for name, kind in wanted.items():
        shape = schema["properties"][name]
        kinds = {each.get("type", "object") for each in shape.get("anyOf", [shape])}
        expected = kind.rstrip("?").removesuffix("|null")
        # A chain id is an integer.
        number = "integer" if name.endswith("ChainId") else expected
        assert {"twapConfig": "object"}.get(number, number) in kinds, name
        assert ("null" in kinds) >= kind.endswith("|null"), name


def test_the_statuses_are_those_of_the_spec() -> None:
    assert set(OrderStatus) == {
        "awaiting_deposit", "deposit_detected", "deposit_confirmed", "executing_swap", "completed",
        "refunding", "refunded", "failed", "expired",
    }  # fmt: skip
    assert set(BridgeStatus) == {
        "awaiting_deposit", "pending_confirmations", "processing", "completed", "failed", "expired",
    }  # fmt: skip
    twap = models.schema_of(models.Twap)["properties"]["status"]["enum"]
    assert set(twap) == {"pending", "active", "completed", "failed"}


async def test_degraded_service_says_so_in_the_three_health_fields(served: Served) -> None:
    assert (await served.post("/sandbox/fault", {"fault": "engine_down"})).status == 200
    health = await call(served, "GET", "/health")
    check("Health", health.body)
    assert (health.status, health.body["status"]) == (503, "degraded")


async def test_json_rpc_order_is_shown_and_listed_over_the_bff(served: Served) -> None:
    swap = {"direction": "x2u", "chain": "arbitrum", "amount": "0.8", "to": EVM}
    made = (await served.rpc("swap.execute", swap)).body["result"]["data"]
    order_id = made["order"]["orderId"]
    seen = (await call(served, "GET", f"/orders/{order_id}")).body
    check("Order", seen)
    assert seen["depositAddress"] == made["order"]["depositAddress"]
    session = {"session": made["sessionId"]}
    [listed] = (await call(served, "GET", "/orders", params=session)).body["orders"]
    check("Order list item", listed)
    assert (listed["id"], listed["from_amount"]) == (order_id, "800000000000")


# --- integrators ---


async def test_an_unknown_key_is_401_on_every_call(tmp_path: Path) -> None:
    async with serving(tmp_path, {"RPCSVC_INTEGRATORS": ACME}) as served:
        for operation in BFF_OPERATIONS:
            path = operation.path.replace("{orderId}", "ord_" + "0" * 26)
            answer = await call(served, operation.method, path, headers={"x-api-key": "wrong"})
            assert (answer.status, answer.body["error"]["code"]) == (401, "unauthorized"), path
            assert "wrong" not in str(answer.body)


def test_a_key_is_compared_with_every_hash_in_constant_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = [f"i{n}:1:{hashlib.sha256(b'key %d' % n).hexdigest()}" for n in range(3)]
    integrators = Integrators(parse_integrators(texts))
    compared: list[tuple[bytes, bytes]] = []
    compare = hmac.compare_digest

    def counted(given: bytes, kept: bytes) -> bool:
        compared.append((given, kept))
        return compare(given, kept)

    monkeypatch.setattr(hmac, "compare_digest", counted)
    assert integrators.find("key 0") is not None
    assert len(compared) == 3, "the first match must not end the search"
    # Only hashes are stored and compared.
    assert all(len(given) == len(kept) == 32 for given, kept in compared)


@pytest.mark.parametrize(("body", "asset"), [(CHUNKED, "USDC"), (CHUNKED_BACK, "XMR")])
async def test_chunked_order_takes_its_fee_per_chunk_and_books_it_once(
    tmp_path: Path, body: dict[str, Any], asset: str
) -> None:
    async with serving(tmp_path, {"RPCSVC_INTEGRATORS": ACME}) as served:
        order_id = (await post(served, "/orders", body, x_api_key=KEY)).body["orderId"]
        await fund(served, order_id)
        done = (await watched(served, order_id))[-1]
        order = await served.up.service.store.order(order_id)
        assert order is not None
        price, direction = order.terms.price, order.terms.direction
        fees = [price.at(f.rate).integrator_fee(direction, f.units) for f in order.fills]
        assert [fill.integrator_fee for fill in order.fills] == fees
        assert min(fees) > 0
        booked = await OperatorBooks(served.up.database).integrator_fees()
        assert booked == [IntegratorFees("acme", asset, sum(fees), 1)]
        assert done["actualOutput"] == str(sum(fill.output for fill in order.fills))


async def test_usdc_to_xmr_fee_is_quoted_taken_and_booked_in_xmr(tmp_path: Path) -> None:
    async with serving(tmp_path, {"RPCSVC_INTEGRATORS": ACME}) as served:
        plain = (await post(served, "/quote", TO_XMR)).body
        keyed = (await post(served, "/quote", TO_XMR, x_api_key=KEY)).body
        fee = int(keyed["integratorFee"]["amount"])
        assert int(plain["toAmount"]) - int(keyed["toAmount"]) == fee > 0
        order_id = (await post(served, "/orders", ORDER_BACK, x_api_key=KEY)).body["orderId"]
        await fund(served, order_id)
        done = (await watched(served, order_id))[-1]
        assert done["actualOutput"] == keyed["toAmount"]
        books = OperatorBooks(served.up.database)
        assert await books.integrator_fees() == [IntegratorFees("acme", "XMR", fee, 1)]


# --- TWAP ---


async def watched(served: Served, order_id: str) -> list[dict[str, Any]]:
    """Every distinct answer up to the end; each is checked for the fields of the spec."""
    seen: list[dict[str, Any]] = []
    async with asyncio.timeout(180):
        while not seen or seen[-1]["status"] not in ("completed", "refunded", "failed"):
            answer = (await call(served, "GET", f"/orders/{order_id}")).body
            check("Order", answer)
            if not seen or answer != seen[-1]:
                seen.append(answer)
            await asyncio.sleep(0.02)
    return seen


@pytest.mark.parametrize(
    ("body", "chunks", "total"), [(CHUNKED, 2, 4), (CHUNKED_BACK, 3, 750)], ids=["x2u", "u2x"]
)
async def test_twap_shows_every_field_of_the_spec_live(
    served: Served, body: dict[str, Any], chunks: int, total: int
) -> None:
    order_id = (await post(served, "/orders", body)).body["orderId"]
    first = (await call(served, "GET", f"/orders/{order_id}")).body["twap"]
    await fund(served, order_id)
    seen = [answer["twap"] for answer in await watched(served, order_id)]
    for twap in (first, *seen):
        check("twap", twap)
        assert twap["enabled"] is True
        fixed = (twap["chunksTotal"], twap["totalQty"], twap["chunkSizeUsd"], twap["intervalMs"])
        assert fixed == (chunks, total, 250, 1_000)
    assert (first["status"], first["filledQty"]) == ("pending", 0)
    assert first["estimatedTimeRemainingMs"] == (chunks - 1) * 1_000
    statuses = list(dict.fromkeys(twap["status"] for twap in (first, *seen)))
    assert statuses == ["pending", "active", "completed"]
    counts = [twap["chunksCompleted"] for twap in seen]
    assert counts == sorted(counts)
    assert set(counts) >= set(range(1, chunks + 1))
    filled = [twap["filledQty"] for twap in seen]
    assert filled == sorted(filled)
    assert filled[-1] == total
    active = [t["estimatedTimeRemainingMs"] for t in seen if t["status"] == "active"]
    assert len(set(active)) > 1, "the time that remains must run"
    assert max(active) <= (chunks - 1) * 1_000
    assert seen[-1]["estimatedTimeRemainingMs"] == 0


@pytest.mark.parametrize(
    "config",
    [
        {"chunkSizeUsd": 250, "intervalMs": 1_000},
        {"chunkSizeUsd": 300, "intervalMs": 60_000},
        {"chunkSizeUsd": 250.0, "intervalMs": 1_000.0},
        {"chunkSizeUsd": 300.75, "intervalMs": 1_000.5},
        {"disabled": False},
        {},
    ],
)
async def test_the_bounds_of_twap_config_may_be_used(
    served: Served, config: dict[str, Any]
) -> None:
    made = await post(served, "/orders", {**CHUNKED, "twapConfig": config})
    assert made.status == 200
    twap = (await call(served, "GET", f"/orders/{made.body['orderId']}")).body["twap"]
    assert twap["chunkSizeUsd"] == config.get("chunkSizeUsd", 250)
    assert twap["intervalMs"] == int(config.get("intervalMs", 10_000))


@pytest.mark.parametrize("size", [10_000_001, 1e300])
async def test_an_order_that_is_worth_less_than_two_chunks_is_not_cut(
    served: Served, size: float
) -> None:
    """The spec has a minimum size of a chunk, and no maximum."""
    made = await post(served, "/orders", {**CHUNKED, "twapConfig": {"chunkSizeUsd": size}})
    assert made.status == 200
    assert "twap" not in (await call(served, "GET", f"/orders/{made.body['orderId']}")).body


@pytest.mark.parametrize(
    ("pair", "amount", "is_cut"),
    [
        (ORDER, "3030303030303", False),  # 499.999999999995 USD at 165
        (ORDER, "3030303030304", True),
        (ORDER_BACK, "500000000", False),
        (ORDER_BACK, "500000001", True),
    ],
)
async def test_an_order_is_cut_above_500_usd_only(
    served: Served, pair: dict[str, Any], amount: str, *, is_cut: bool
) -> None:
    made = (await post(served, "/orders", {**pair, "fromAmount": amount})).body
    assert ("twap" in (await call(served, "GET", f"/orders/{made['orderId']}")).body) is is_cut


async def test_a_chain_number_may_be_written_with_a_point(served: Served) -> None:
    """Languages with floats only write 42161.0, which is the same number in JSON."""
    made = await post(served, "/orders", {**ORDER, "fromChainId": 0.0, "toChainId": 42161.0})
    assert made.status == 200
    refused = await post(served, "/orders", {**ORDER, "toChainId": 42161.5})
    assert refused.body["error"]["code"] == "invalid_input"


async def test_twap_is_on_unless_it_is_disabled(served: Served) -> None:
    usual = {name: value for name, value in CHUNKED.items() if name != "twapConfig"}
    for body, has_chunks in (
        (usual, True),
        ({**usual, "twapConfig": None}, True),
        ({**usual, "twapConfig": {"disabled": True}}, False),
    ):
        made = (await post(served, "/orders", body)).body
        order = (await call(served, "GET", f"/orders/{made['orderId']}")).body
        check("Order", order)
        assert ("twap" in order) is has_chunks
