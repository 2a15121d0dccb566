"""A sidecar, whose engine is the BFF of another service: orders that run through both."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from msgspec import UNSET
from msgspec.structs import replace

from rpcsvc.domain.order import OrderStatus, Report
from rpcsvc.operations import bff_models
from rpcsvc.operations.bff_models import BffNewOrder
from rpcsvc.operations.views import awaits_upstream_refund
from rpcsvc.settlement.upstream.follower import Follower
from tests.contract.bff import ORDER, call, check, post, until_completed
from tests.contract.following import until_status
from tests.contract.serving import EVM, Served, serving
from tests.contract.sidecar import STAGENET, SWAPS, beside, upstream_id
from tests.e2e.processes import until
from tests.rows import all_rows
from tests.sandbox import attested

pytestmark = pytest.mark.usefixtures("short_pauses")


async def test_checkout_url_is_of_the_sidecars_own_page(central: Served, tmp_path: Path) -> None:
    """The user has the sidecar's order id, which the upstream does not know."""
    async with beside(central, tmp_path / "own", site_url="https://side.example") as sidecar:
        made = (await sidecar.rpc("swap.execute", SWAPS["x2u"])).body["result"]["data"]["order"]
        flat = (await post(sidecar, "/orders", ORDER)).body
        for order in (made, flat):
            path = f"/orders/{order['orderId']}"
            assert order["checkoutUrl"] == f"https://side.example{path}"
            shown = await sidecar.client.get(path)
            assert shown.status == 200
            assert order["depositAddress"] in re.sub(r"<[^>]*>", "", await shown.text())
            assert (await central.client.get(path)).status == 404


@pytest.mark.parametrize("direction", ["x2u", "u2x"])
async def test_a_swap_runs_through_both_to_its_end(
    central: Served, sidecar: Served, direction: str
) -> None:
    swap = SWAPS[direction]
    made = (await sidecar.rpc("swap.execute", swap)).body["result"]
    assert made["ok"], made
    order = made["data"]["order"]
    at_central = await upstream_id(sidecar, order["orderId"])
    assert at_central != order["orderId"]
    theirs = (await call(central, "GET", f"/orders/{at_central}")).body
    for field in ("depositAddress", "depositAmount", "toAddress", "expectedOutput"):
        assert order[field] == theirs[field]
    funded = await central.post("/sandbox/fund", {"orderId": at_central})
    assert funded.status == 200
    done = await until_status(sidecar, order["orderId"], state="completed")
    theirs = (await call(central, "GET", f"/orders/{at_central}")).body
    for field in ("depositTxHash", "actualOutput", "refundTxHash", "errorMessage"):
        assert done["data"]["order"][field] == theirs[field]
    assert done["data"]["order"]["actualOutput"]
    assert done["data"]["network"] == "stagenet"
    # The addresses are simulated: no payment URI may lead a wallet to pay real money.
    uri = made["data"]["fundingInstructions"]["paymentUri"]
    assert made["data"]["fundingInstructions"]["network"] in ("monero-stagenet", "arbitrum-sepolia")
    assert uri.startswith("monero:") or "@421614/" in uri


async def test_a_sidecar_gives_no_price_lock(sidecar: Served) -> None:
    """The BFF has no field for it, so the sidecar's quote, order and attestation have none."""
    quote = {name: SWAPS["x2u"][name] for name in ("direction", "chain", "amount")}
    quoted = (await sidecar.rpc("swap.quote", quote)).body["result"]["data"]["quote"]
    made = (await sidecar.rpc("swap.execute", SWAPS["x2u"])).body["result"]["data"]
    for reported in (quoted, made["order"], made["fundingInstructions"]):
        assert reported["priceLockedUntil"] is None
    assert "priceLockedUntil" not in attested(made["order"])


async def test_an_order_that_ended_unpaid_at_the_upstream_is_pruned(
    central: Served, sidecar: Served
) -> None:
    swap = {**SWAPS["x2u"], "idempotency-key": "mine-0123456789a"}
    made = (await sidecar.rpc("swap.execute", swap)).body["result"]["data"]["order"]
    late = {"fault": "advance_clock", "seconds": 2 * 3_600}
    assert (await central.post("/sandbox/fault", late)).status == 200
    before = await until_status(sidecar, made["orderId"], state="terminal_failure")
    assert before["data"]["outcome"] == "expired"
    assert await sidecar.up.service.store.prune_unpaid(2**62, 0, 10) == 1
    assert (sidecar.count("idempotency_keys"), sidecar.count("status_views")) == (0, 0)
    assert all_rows(sidecar.up.database, "SELECT raw FROM relays") == [(b"",)]
    again = (await sidecar.rpc("swap.status", {"orderId": made["orderId"]})).body["result"]
    assert again["data"] == before["data"]


async def test_reduced_history_of_an_upstream_order_leaves_its_status(
    central: Served, sidecar: Served
) -> None:
    made = (await sidecar.rpc("swap.execute", SWAPS["x2u"])).body["result"]["data"]["order"]
    at_central = await upstream_id(sidecar, made["orderId"])
    assert (await central.post("/sandbox/fund", {"orderId": at_central})).status == 200
    before = await until_status(sidecar, made["orderId"], state="completed")
    for served in (central, sidecar):
        assert await served.up.service.store.reduce_history(2**62, 10) == 1
        assert (served.count("event_log"), served.count("status_views")) == (1, 0)
    again = (await sidecar.rpc("swap.status", {"orderId": made["orderId"]})).body["result"]
    assert again["data"] == before["data"]
    events = (await sidecar.rpc("swap.events", {"orderId": made["orderId"]})).body["result"]["data"]
    assert [each["state"] for each in events["events"]] == ["completed"]


async def test_a_retry_of_the_callers_key_is_the_same_order_at_both(
    central: Served, sidecar: Served
) -> None:
    swap = {**SWAPS["x2u"], "idempotency-key": "mine-0123456789a"}
    first = (await sidecar.rpc("swap.execute", swap)).body["result"]
    again = (await sidecar.rpc("swap.execute", swap)).body["result"]
    assert first["data"] == again["data"]
    assert (sidecar.count("orders"), central.count("orders")) == (1, 1)


async def test_refusal_of_the_upstream_is_quoted(sidecar: Served) -> None:
    small = {**SWAPS["x2u"], "amount": "0.00001"}
    answer = (await sidecar.rpc("swap.execute", small)).body["result"]
    error = answer["error"]
    assert error["code"] == "amount_below_minimum"
    # Each transport names its own field and unit, not the upstream's.
    limit = error["details"]["minimum"]
    assert [problem["field"] for problem in answer["validationErrors"]] == ["amount"]
    flat = await post(sidecar, "/orders", {**ORDER, "fromAmount": "10000000"})
    reported = flat.body["error"]["details"]
    assert reported["problems"][0]["field"] == "fromAmount"
    assert int(reported["minimum"]) == int(float(limit) * 10**12) > 10**9
    assert sidecar.count("relays") == 0
    assert sidecar.count("orders") == 0


async def test_upstream_down_is_unavailable(tmp_path: Path) -> None:
    async with serving(tmp_path / "central") as central:
        url = central.url
    environ = {"RPCSVC_ENGINE": "upstream", "RPCSVC_UPSTREAM__URL": url}
    priced = {name: SWAPS["x2u"][name] for name in ("direction", "chain", "amount")}
    async with serving(tmp_path / "sidecar", environ) as sidecar:
        answer = (await sidecar.rpc("swap.quote", priced)).body["result"]
        assert answer["error"]["code"] == "unavailable"
        plan = (await sidecar.rpc("swap.plan", SWAPS["x2u"])).body["result"]
        assert plan["state"] == "ready"
        assert (await sidecar.rpc("capabilities", {})).body["result"]["ok"]
        networks = await sidecar.up.service.venue.networks()
        assert not networks["monero"].ok
        assert networks["monero"].detail is None


async def test_a_restart_goes_on_following(central: Served, tmp_path: Path) -> None:
    async with beside(central, tmp_path / "sidecar") as sidecar:
        made = (await sidecar.rpc("swap.execute", SWAPS["x2u"])).body["result"]
        order_id = made["data"]["order"]["orderId"]
        at_central = await upstream_id(sidecar, order_id)
    await central.post("/sandbox/fund", {"orderId": at_central})
    async with beside(central, tmp_path / "sidecar") as sidecar:
        done = await until_status(sidecar, order_id, state="completed")
        assert done["data"]["order"]["actualOutput"]


async def test_an_order_in_chunks_shows_the_upstreams_progress(
    central: Served, sidecar: Served
) -> None:
    body = {**ORDER, "fromAmount": str(4 * 10**12), "twapConfig": {"intervalMs": 1000}}
    made = (await post(sidecar, "/orders", body)).body
    at_central = await upstream_id(sidecar, made["orderId"])
    theirs = (await call(central, "GET", f"/orders/{at_central}")).body
    assert theirs["twap"]["chunksTotal"] == 2
    await central.post("/sandbox/fund", {"orderId": at_central})
    ours = await until_completed(sidecar, f"/orders/{made['orderId']}", "Order")
    assert ours["twap"]["status"] == "completed"
    assert ours["twap"]["filledQty"] == 4


async def test_agent_status_of_a_sidecar_shows_chunks_from_the_start(
    central: Served, sidecar: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def asks_for_nothing(_follower: Follower) -> int:
        return 60_000

    with monkeypatch.context() as patched:
        patched.setattr(Follower, "ask_next", asks_for_nothing)
        body = {**ORDER, "fromAmount": str(4 * 10**12)}
        made = (await post(sidecar, "/orders", body)).body
        status = (await sidecar.rpc("swap.status", {"orderId": made["orderId"]})).body["result"]
    at_central = await upstream_id(sidecar, made["orderId"])
    theirs = (await call(central, "GET", f"/orders/{at_central}")).body["twap"]
    assert theirs["status"] == "pending"
    assert status["data"]["order"]["twap"] == theirs
    owned = {"orderId": made["orderId"], "sessionId": ORDER["sessionId"]}
    ended = (await sidecar.rpc("swap.cancel", owned)).body["result"]["data"]["order"]
    assert (ended["status"], ended["twap"]["status"]) == ("expired", "failed")


@pytest.mark.parametrize(
    ("way", "to", "amount"), [("deposit", EVM, "0.5"), ("withdraw", STAGENET, "75")]
)
async def test_a_bridge_order_runs_through_both_to_its_end(
    central: Served, sidecar: Served, way: str, to: str, amount: str
) -> None:
    made = await post(sidecar, f"/bridge/{way}", {"toAddress": to})
    check("Bridge order response", made.body)
    order_id = made.body["orderId"]
    first = (await call(sidecar, "GET", f"/bridge/order/{order_id}")).body
    check("Bridge order", first)
    assert (first["type"], first["status"]) == (way, "awaiting_deposit")
    at_central = await upstream_id(sidecar, order_id)
    await central.post("/sandbox/fund", {"orderId": at_central, "amount": amount})
    ours = await until_completed(sidecar, f"/bridge/order/{order_id}", "Bridge order")
    theirs = (await call(central, "GET", f"/bridge/order/{at_central}")).body
    for field in ("type", "amount", "tx_in", "tx_out", "confirmations", "requiredConfirmations"):
        assert ours[field] == theirs[field], field
    assert (await call(sidecar, "GET", f"/orders/{order_id}")).status == 404


async def test_a_bridge_order_is_followed_until_its_refund_is_over(
    central: Served, sidecar: Served
) -> None:
    made = await post(sidecar, "/bridge/deposit", {"toAddress": EVM})
    order_id = made.body["orderId"]
    at_central = await upstream_id(sidecar, order_id)
    await central.post("/sandbox/fault", {"fault": "payout_fails", "orderId": at_central})
    await central.post("/sandbox/fund", {"orderId": at_central, "amount": "0.5"})

    refunding = await until_failed(sidecar, order_id, is_over=False)

    assert refunding["failure_reason"]
    order = await central.up.service.store.order(at_central)
    assert order is not None
    ticket = {"orderId": at_central, "sessionId": order.terms.session_id, "message": "refund it"}
    given = await central.rpc("support.create", {**ticket, "walletAddress": STAGENET})
    assert given.body["result"]["data"]["refundAddress"]["accepted"]
    over = await until_failed(sidecar, order_id, is_over=True)
    assert over == {**refunding, "completed_at": over["completed_at"]}


async def until_failed(served: Served, order_id: str, *, is_over: bool) -> dict[str, Any]:
    """The bridge order once it has failed and ``is_over`` holds."""

    async def failed() -> dict[str, Any] | None:
        found: dict[str, Any] = (await call(served, "GET", f"/bridge/order/{order_id}")).body
        if found["status"] != "failed" or (is_over and found["completed_at"] is None):
            return None
        assert is_over or found["completed_at"] is None
        return found

    return await until(failed)


async def test_the_bridges_rates_are_the_upstreams(central: Served, sidecar: Served) -> None:
    ours, theirs = [await call(each, "GET", "/bridge/rates") for each in (sidecar, central)]
    check("Bridge rate list", ours.body)
    assert ours.body == theirs.body


async def test_refund_address_given_to_a_sidecar_reaches_the_upstream(
    central: Served, sidecar: Served
) -> None:
    made = (await sidecar.rpc("swap.execute", SWAPS["x2u"])).body["result"]["data"]
    order_id = made["order"]["orderId"]
    at_central = await upstream_id(sidecar, order_id)
    await central.post("/sandbox/fault", {"fault": "payout_fails", "orderId": at_central})
    await central.post("/sandbox/fund", {"orderId": at_central})
    waits = await until_status(sidecar, order_id, state="refunding")
    step = waits["nextActions"][0]
    assert step["action"] == "provide_refund_address"
    assert "swap.refundAddress" in step["description"]
    assert waits["data"]["actionRequired"] == "refund_address"
    ticket = {"message": "refund, please", "orderId": order_id, "walletAddress": STAGENET}
    strangers = (await sidecar.rpc("support.create", ticket)).body["result"]
    assert strangers["data"]["refundAddress"] is None
    mine = {**ticket, "sessionId": made["sessionId"]}
    owners = (await sidecar.rpc("support.create", mine)).body["result"]
    assert owners["data"]["refundAddress"] == {"accepted": True, "address": STAGENET}
    ended = await until_status(sidecar, order_id, state="terminal_failure")
    assert ended["data"]["outcome"] == "refunded"
    assert ended["data"]["order"]["refundTxHash"]
    assert ended["data"]["order"]["refundAddress"] == STAGENET
    assert ended["data"]["actionRequired"] is None


async def test_no_refund_address_is_asked_for_that_the_upstream_has(sidecar: Served) -> None:
    made = (await sidecar.rpc("swap.execute", SWAPS["x2u"])).body["result"]["data"]
    order = await sidecar.up.service.store.order(made["order"]["orderId"])
    assert order is not None
    waiting = replace(order, status=OrderStatus.REFUNDING, report=Report())
    assert awaits_upstream_refund(waiting)
    assert not awaits_upstream_refund(replace(waiting, report=Report(refund_address=STAGENET)))


async def test_late_deposit_is_refunded_after_a_sidecar_stops_polling(
    central: Served, sidecar: Served
) -> None:
    made = (await sidecar.rpc("swap.execute", SWAPS["x2u"])).body["result"]["data"]
    order_id = made["order"]["orderId"]
    at_central = await upstream_id(sidecar, order_id)
    await central.post("/sandbox/fund", {"orderId": at_central})
    await until_status(sidecar, order_id, state="completed")
    await central.post("/sandbox/fund", {"orderId": at_central, "amount": "0.8"})
    await until_status(central, at_central, state="completed", actionRequired="refund_address")

    ticket = {"message": "I paid again", "orderId": order_id, "sessionId": made["sessionId"]}
    other = (await sidecar.rpc("support.create", {**ticket, "walletAddress": EVM})).body["result"]
    assert (other["ok"], other["data"]["refundAddress"]) == (True, None)
    mine = {**ticket, "walletAddress": STAGENET}
    given = (await sidecar.rpc("support.create", mine)).body["result"]

    assert given["data"]["refundAddress"] == {"accepted": True, "address": STAGENET}
    await until_status(central, at_central, state="completed", actionRequired=None)
    order = await central.up.service.store.order(at_central)
    assert order is not None
    assert [refund.address for refund in order.refunds] == [STAGENET]


async def test_sidecar_asks_for_the_rest_of_a_partly_swapped_order(
    central: Served, sidecar: Served
) -> None:
    body = {**ORDER, "fromAmount": str(4 * 10**12), "twapConfig": {"intervalMs": 1_000}}
    made = (await post(sidecar, "/orders", body)).body
    order = await sidecar.up.service.store.order(made["orderId"])
    assert order is not None
    report = Report(output=1, extra='{"status":"failed"}')
    over = replace(order, status=OrderStatus.COMPLETED, report=report)
    assert awaits_upstream_refund(over)
    assert not awaits_upstream_refund(replace(over, report=replace(report, refund_txid="sent")))
    assert not awaits_upstream_refund(replace(over, report=Report(output=1)))
    assert not awaits_upstream_refund(replace(over, terms=replace(over.terms, upstream_id=None)))


@pytest.mark.parametrize(
    ("amount", "code"),
    [
        ("0.000001", "amount_below_minimum"),
        ("9999", "amount_above_maximum"),
        ("9" * 30, "amount_above_maximum"),  # more digits than the upstream accepts
    ],
)
async def test_a_plan_refuses_what_the_upstream_would(
    sidecar: Served, amount: str, code: str
) -> None:
    swap = {**SWAPS["x2u"], "amount": amount}
    plan = (await sidecar.rpc("swap.plan", swap)).body["result"]
    del swap["to"]
    quote = (await sidecar.rpc("swap.quote", swap)).body["result"]
    assert (plan["ok"], plan["state"]) == (False, "invalid_input")
    assert plan["error"]["code"] == code
    assert plan["error"]["details"] == quote["error"]["details"]
    assert float(quote["error"]["details"]["maximum"]) < 400
    good = (await sidecar.rpc("swap.plan", SWAPS["x2u"])).body["result"]
    assert good["state"] == "ready"


@pytest.mark.parametrize("direction", ["x2u", "u2x"])
async def test_a_refund_address_is_fixed_at_both(
    central: Served, sidecar: Served, direction: str
) -> None:
    address = {"x2u": STAGENET, "u2x": EVM}[direction]
    swap = {**SWAPS[direction], "refundAddress": address}
    order = (await sidecar.rpc("swap.execute", swap)).body["result"]["data"]["order"]
    theirs = (
        await call(central, "GET", f"/orders/{await upstream_id(sidecar, order['orderId'])}")
    ).body
    assert order["refundAddress"] == theirs["refundAddress"] == address


async def test_a_refund_address_that_the_upstream_drops_is_no_order(
    central: Served, sidecar: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A payer relies on the refund address in the sidecar's attestation."""

    def dropping(**fields: Any) -> BffNewOrder:
        return replace(BffNewOrder(**fields), refund_address=UNSET)

    monkeypatch.setattr(bff_models, "BffNewOrder", dropping)
    answer = (await sidecar.rpc("swap.execute", {**SWAPS["x2u"], "refundAddress": STAGENET})).body[
        "result"
    ]
    assert answer["error"]["code"] == "unavailable"
    assert sidecar.count("orders") == 0
