"""Requirements on the upstream engine that no other test covers."""

from __future__ import annotations

import asyncio
import hashlib
from collections import deque
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rpcsvc.domain.addresses import stagenet_subaddress
from tests.contract import upstream_server as does
from tests.contract.bff import ORDER, TO_USDC, call, check, post, until_completed
from tests.contract.relaying import LOST, changed, create, service, states
from tests.contract.serving import EVM, Served, serving
from tests.contract.upstream_server import Behaviour, UpstreamServer
from tests.contract.v1_api import V1Api, v1_api
from tests.e2e.processes import until
from tests.logs import logs_of
from tests.rows import one_row

pytestmark = pytest.mark.usefixtures("short_pauses")

STAGENET = stagenet_subaddress(bytes(range(64)))
KEY = "integrator-key-0123456789abcdef"
ACME = f"acme:0.75:{hashlib.sha256(KEY.encode()).hexdigest()}"
WAYS = [("deposit", EVM), ("withdraw", STAGENET)]


@pytest.fixture
async def api() -> AsyncIterator[V1Api]:
    async with v1_api() as ready:
        yield ready


@pytest.fixture
async def served(api: V1Api, tmp_path: Path) -> AsyncIterator[Served]:
    async with service(api.server.url, tmp_path) as ready:
        yield ready


async def bridge_order(served: Served, order_id: str, status: str) -> dict[str, Any]:
    """The bridge order once it has the status."""
    async with asyncio.timeout(180):
        while True:
            answer = await call(served, "GET", f"/bridge/order/{order_id}")
            check("Bridge order", answer.body)
            if answer.body["status"] == status:
                return dict(answer.body)
            await asyncio.sleep(0.01)


# --- records ---


async def test_claim_is_on_disk_before_the_upstream_gets_the_order(
    api: V1Api, served: Served
) -> None:
    met: list[list[str]] = []

    async def poll(_server: UpstreamServer, _request: web.Request) -> web.StreamResponse:
        met.append(states(served))
        return web.json_response({"error": "rate limit exceeded"}, status=429)

    api.lose.append(poll)
    await create(served)
    assert met == [["claimed"]]


async def test_upstream_answer_is_kept_beside_the_order(api: V1Api, served: Served) -> None:
    order = (await create(served))["data"]["order"]
    api.statuses = deque(["swapping"])
    async with asyncio.timeout(180):
        await changed(served, order["orderId"], "executing_swap")
    row = one_row(
        served.up.database,
        "SELECT upstream_id, raw, evidence FROM relays WHERE order_id = ?",
        (order["orderId"],),
    )
    assert row[0] == "up-1"
    assert order["depositAddress"].encode() in row[1]
    assert b'"swapping"' in row[2]


async def test_unknown_upstream_status_is_logged_as_it_came(api: V1Api, served: Served) -> None:
    order_id = (await create(served))["data"]["order"]["orderId"]
    api.statuses = deque(["almost_done_i_think"])
    with logs_of("rpcsvc.settlement.upstream.engine") as logs:
        for _ in range(2):  # the second call is sent once the first one's answer is handled
            api.asked.clear()
            async with asyncio.timeout(180):
                await api.asked.wait()
    [line, *_] = [line for line in logs if line["event"] == "upstream_status_unknown"]
    assert (line["log_level"], line["status"]) == ("warning", "almost_done_i_think")
    order = await served.up.service.store.order(order_id)
    assert order is not None
    assert order.status == "awaiting_deposit"


async def test_usdc_is_swapped_into_xmr_over_the_public_api(api: V1Api, served: Served) -> None:
    swap = {"direction": "u2x", "chain": "base", "amount": "150", "to": STAGENET}
    made = (await served.rpc("swap.create", swap)).body["result"]
    order = made["data"]["order"]
    assert order["depositAddress"].startswith("0x")
    [sent] = [seen.json for seen in api.server.seen if seen.target == "/v1/order"]
    assert (sent["fromChainId"], sent["toChainId"], sent["toToken"]) == (8453, 0, "XMR")
    assert (sent["fromAmount"], sent["toAddress"]) == ("150000000", STAGENET)
    api.statuses = deque(["completed"])
    async with asyncio.timeout(180):
        await changed(served, order["orderId"], "completed")


async def test_health_is_degraded_with_the_reason_on_upstream_failure(
    api: V1Api, served: Served
) -> None:
    assert (await served.client.get("/health")).status == 200
    api.server.otherwise = does.answer({"error": "internal"}, status=500)
    for _ in range(2):
        answer = await post(served, "/quote", TO_USDC)
        assert (answer.status, answer.body["error"]["code"]) == (503, "unavailable")
    response = await served.client.get("/health")
    engine = (await response.json())["checks"]["engine"]
    assert (response.status, engine["status"]) == (503, "degraded")
    assert "500" in engine["detail"]


async def test_configured_key_is_sent_and_the_upstream_takes_its_fee(
    tmp_path: Path,
) -> None:
    async with (
        serving(tmp_path / "central", {"RPCSVC_INTEGRATORS": ACME}) as central,
        service(central.url, tmp_path / "sidecar", "bff", API_KEY=KEY) as sidecar,
    ):
        theirs = (await post(central, "/quote", TO_USDC, x_api_key=KEY)).body
        ours = (await post(sidecar, "/quote", TO_USDC)).body
        assert ours["toAmount"] == theirs["toAmount"]
        order_id = (await create(sidecar))["data"]["order"]["orderId"]
        order = await sidecar.up.service.store.order(order_id)
        assert order is not None
        there = await central.up.service.store.order(order.terms.upstream_id or "")
        assert there is not None
        assert there.terms.integrator == "acme"


async def test_health_names_an_api_key_that_the_upstream_refuses(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "central", {"RPCSVC_INTEGRATORS": ACME}) as central,
        service(central.url, tmp_path / "sidecar", "bff", API_KEY="another-key") as sidecar,
    ):
        health = await (await sidecar.client.get("/health")).json()
        assert "API key" in health["checks"]["engine"]["detail"]
        assert (await create(sidecar))["error"]["code"] == "unavailable"


async def test_chunked_order_has_the_spec_fields_at_a_sidecar(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "central") as central,
        service(central.url, tmp_path / "sidecar", "bff") as sidecar,
    ):
        body = {**ORDER, "fromAmount": str(4 * 10**12), "twapConfig": {"intervalMs": 1_000}}
        made = (await post(sidecar, "/orders", body)).body
        check("Order create response", made)
        order = await sidecar.up.service.store.order(made["orderId"])
        assert order is not None
        await central.post("/sandbox/fund", {"orderId": order.terms.upstream_id})
        seen = await until_completed(sidecar, f"/orders/{made['orderId']}", "Order")
        assert seen["twap"]["status"] == "completed"
        listed = await call(sidecar, "GET", "/orders", params={"session": ORDER["sessionId"]})
        [item] = listed.body["orders"]
        check("Order list item", item)
        assert (item["id"], item["status"]) == (made["orderId"], "completed")


# --- the bridge of the public API ---


async def test_the_bridges_rates_are_passed_through(served: Served) -> None:
    rates = (await call(served, "GET", "/bridge/rates")).body
    check("Bridge rate list", rates)
    assert rates == {
        "rates": [{"exchange": "an exchange", "rate": 164.2, "eta": "5 min"}],
        "wagyuRate": {"rate": 165.5, "eta": "5 min"},
    }


@pytest.mark.parametrize(("way", "to"), WAYS, ids=["deposit", "withdraw"])
async def test_a_bridge_order_is_followed_to_its_end(
    api: V1Api, served: Served, way: str, to: str
) -> None:
    made = (await post(served, f"/bridge/{way}", {"toAddress": to})).body
    check("Bridge order response", made)
    assert made["destination"] == to
    for said, seen in (
        ("awaiting_deposit", "awaiting_deposit"),
        ("pending_confirmations", "pending_confirmations"),
        ("on_its_way", "pending_confirmations"),
        ("processing", "processing"),
        ("completed", "completed"),
    ):
        api.statuses = deque([said])
        api.asked.clear()
        async with asyncio.timeout(180):
            await api.asked.wait()
        order = await bridge_order(served, made["orderId"], seen)
        assert order["type"] == way
    assert (order["amount"], order["confirmations"]) == ("500000000000", 10)
    assert order["tx_in"] != order["tx_out"] is not None


async def test_bridge_answer_of_the_other_direction_is_refused(api: V1Api, served: Served) -> None:
    made = (await post(served, "/bridge/deposit", {"toAddress": EVM})).body
    api.change_status = {"type": "withdraw"}
    api.statuses = deque(["failed"])
    with logs_of("rpcsvc.settlement.upstream.calls") as lines:

        async def was_reported() -> bool:
            return bool(lines)

        assert await until(was_reported)
    assert lines[0]["reason"].endswith("type is not that of the order.")
    order = (await call(served, "GET", f"/bridge/order/{made['orderId']}")).body
    assert order["status"] == "awaiting_deposit"


async def test_a_bridge_order_that_fails_says_why(api: V1Api, served: Served) -> None:
    made = (await post(served, "/bridge/deposit", {"toAddress": EVM})).body
    api.statuses = deque(["failed"])
    order = await bridge_order(served, made["orderId"], "failed")
    assert order["failure_reason"] == "The exchange is closed."


@pytest.mark.parametrize("lost", LOST.values(), ids=LOST.keys())
async def test_a_bridge_order_of_unknown_outcome_is_never_made_again(
    api: V1Api, served: Served, lost: Behaviour
) -> None:
    api.lose.append(lost)
    for _ in range(3):
        answer = await post(
            served, "/bridge/deposit", {"toAddress": EVM}, idempotency_key="mine-0123456789a"
        )
        assert (answer.status, answer.body["error"]["code"]) == (503, "unavailable")
    assert api.sent("POST", "/v1/bridge/deposit") == 1
    assert (served.count("orders"), states(served)) == (0, ["reconciling"])


@pytest.mark.parametrize(
    "change",
    [
        {"depositAddress": "0x" + "1" * 40},
        {"depositAddress": "44" + "1" * 93},
        {"destination": "0x" + "2" * 40},
    ],
)
async def test_untrusted_bridge_address_is_never_shown(
    api: V1Api, served: Served, change: dict[str, Any]
) -> None:
    api.change = change
    answer = await post(served, "/bridge/deposit", {"toAddress": EVM})
    assert (answer.status, answer.body["error"]["code"]) == (503, "unavailable")
    assert change.popitem()[1] not in str(answer.body)
    assert states(served) == ["reconciling"]


@pytest.mark.parametrize(
    ("text", "status", "code"),
    [
        ("invalid destination address", 400, "invalid_destination"),
        ("amount below minimum", 400, "amount_below_minimum"),
        ("something else", 400, "unavailable"),
        ("rate limit exceeded", 429, "unavailable"),
    ],
)
async def test_upstream_bridge_error_has_our_wording(
    api: V1Api, served: Served, text: str, status: int, code: str
) -> None:
    api.lose.append(does.answer({"error": text}, status=status))
    answer = await post(served, "/bridge/deposit", {"toAddress": EVM})
    assert answer.body["error"]["code"] == code
    assert text not in str(answer.body)
