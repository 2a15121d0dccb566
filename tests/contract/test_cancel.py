"""swap.cancel over every transport: an unfunded order ends, a funded one does not change."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.contract.bff import ORDER, call, check, post
from tests.contract.following import status, until_status
from tests.contract.serving import EVM, MONERO, SWAP, Served, serving
from tests.contract.sidecar import SWAPS, beside, upstream_id
from tests.e2e.processes import until
from tests.rows import all_rows

OTHER_SESSION = "9a1f0b52-3c4d-4e6f-8a7b-1c2d3e4f5a6b"
Json = dict[str, Any]


async def ordered(served: Served, swap: Json = SWAP) -> Json:
    """Make an order; the params to cancel it."""
    data = (await served.post("/agent/swap/execute", swap)).body["data"]
    return {"orderId": data["order"]["orderId"], "sessionId": data["sessionId"]}


async def cancel(served: Served, owned: Json) -> Json:
    return dict((await served.rpc("swap.cancel", owned)).body["result"])


async def test_cancel_ends_an_unfunded_order(served: Served) -> None:
    owned = await ordered(served)
    answer = await cancel(served, owned)
    assert (answer["ok"], answer["state"]) == (True, "terminal_failure")
    data = answer["data"]
    assert (data["outcome"], data["fundingInstructions"]) == ("expired", None)
    assert data["order"]["errorMessage"] == "The order was cancelled before a deposit came."
    assert (data["sessionId"], data["sessionSource"]) == (owned["sessionId"], "request")
    assert "deadlineAt" not in data["order"]
    seen = (await served.http("GET", f"/agent/swap/status/{owned['orderId']}")).body
    assert seen["data"]["order"] == data["order"]
    assert seen["data"]["sessionId"] is None


async def test_second_cancel_gets_the_same_answer(served: Served) -> None:
    owned = await ordered(served)
    path = f"/agent/swap/cancel/{owned['orderId']}"
    body = {"sessionId": owned["sessionId"].upper()}
    first, second = await served.post(path, body), await served.post(path, body)
    assert (first.status, second.status) == (200, 200)
    assert first.body["data"] == second.body["data"]


async def test_concurrent_cancels_make_one_transition(served: Served) -> None:
    owned = await ordered(served)
    answers = await asyncio.gather(*(cancel(served, owned) for _ in range(8)))
    assert all(answer["ok"] for answer in answers)
    history = all_rows(
        served.up.database, "SELECT event FROM order_events WHERE order_id = ?", (owned["orderId"],)
    )
    assert [row[0] for row in history].count("Cancelled") == 1


async def test_cancel_needs_the_orders_own_session(served: Served) -> None:
    owned = await ordered(served)
    answer = await cancel(served, {**owned, "sessionId": OTHER_SESSION})
    assert (answer["error"]["code"], answer["data"].get("order")) == ("verification_failed", None)
    unknown = await cancel(served, {**owned, "orderId": "ord_" + "0" * 26})
    assert unknown["error"]["code"] == "order_not_found"
    missing = await cancel(served, {"orderId": owned["orderId"]})
    assert missing["missingInputs"] == ["sessionId"]
    seen = (await served.http("GET", f"/agent/swap/status/{owned['orderId']}")).body
    assert seen["state"] == "waiting_for_funding"


async def test_cancel_names_the_order_in_the_path_only(served: Served) -> None:
    owned = await ordered(served)
    answer = await served.post(f"/agent/swap/cancel/{owned['orderId']}", owned)
    assert (answer.status, answer.body["error"]["code"]) == (400, "invalid_request")
    assert "orderId is in the path" in answer.body["error"]["message"]


async def test_cancel_leaves_a_funded_order_alone(served: Served) -> None:
    owned = await ordered(served)
    await served.post("/sandbox/fault", {"fault": "pause_blocks"})
    await served.post("/sandbox/fund", {"orderId": owned["orderId"], "amount": "0.1"})
    await until_status(served, owned["orderId"], status="deposit_detected")
    path = f"/agent/swap/cancel/{owned['orderId']}"
    answer = await served.post(path, {"sessionId": owned["sessionId"]})
    assert (answer.status, answer.body["error"]["code"]) == (409, "order_not_cancellable")
    assert answer.body["error"]["details"] == {"status": "deposit_detected"}
    await served.post("/sandbox/fault", {"fault": "resume_blocks"})
    await served.post("/sandbox/fund", {"orderId": owned["orderId"]})
    done = await until_status(served, owned["orderId"], status="completed")
    assert done["data"]["outcome"] == "completed"
    over = await cancel(served, owned)
    assert over["error"]["details"] == {"status": "completed"}


async def test_a_deposit_after_cancellation_is_refunded(served: Served) -> None:
    swap = {"direction": "u2x", "chain": "base", "amount": "150", "to": MONERO}
    owned = await ordered(served, swap)
    assert (await cancel(served, owned))["ok"]
    await served.post("/sandbox/fund", {"orderId": owned["orderId"], "amount": "150"})

    async def settled() -> Json | None:
        seen = await status(served, owned["orderId"])
        return (
            seen if [each["status"] for each in seen["data"]["transfers"]] == ["settled"] else None
        )

    seen = await until(settled)
    assert [transfer["kind"] for transfer in seen["data"]["transfers"]] == ["refund"]
    assert seen["data"]["order"]["status"] == "expired"


async def test_cancel_over_the_bff(served: Served) -> None:
    made = (await post(served, "/orders", ORDER)).body
    path = f"/orders/{made['orderId']}/cancel"
    refused = await post(served, path, {"sessionId": OTHER_SESSION})
    assert (refused.status, refused.body["error"]["code"]) == (403, "verification_failed")
    answer = await post(served, path, {"sessionId": ORDER["sessionId"]})
    check("Order", answer.body)
    assert (answer.status, answer.body["status"]) == (200, "expired")


async def test_cancel_does_not_know_bridge_orders(served: Served) -> None:
    made = (await post(served, "/bridge/deposit", {"toAddress": EVM})).body
    answer = await cancel(served, {"orderId": made["orderId"], "sessionId": OTHER_SESSION})
    assert answer["error"]["code"] == "order_not_found"


async def test_waiting_for_funding_offers_cancellation(served: Served) -> None:
    owned = await ordered(served)
    seen = (await served.http("GET", f"/agent/swap/status/{owned['orderId']}")).body
    assert "cancel_order" in [step["action"] for step in seen["nextActions"]]
    assert owned["sessionId"] not in str(seen)


async def test_a_sidecar_cancels_at_its_upstream(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "central") as central,
        beside(central, tmp_path / "sidecar") as sidecar,
    ):
        owned = await ordered(sidecar, SWAPS["x2u"])
        answer = await cancel(sidecar, owned)
        assert (answer["ok"], answer["data"]["outcome"]) == (True, "expired")
        theirs = await call(
            central, "GET", f"/orders/{await upstream_id(sidecar, owned['orderId'])}"
        )
        assert theirs.body["status"] == "expired"
        assert (await cancel(sidecar, owned))["data"] == answer["data"]


async def test_sidecar_reports_a_deposit_that_its_upstream_saw(tmp_path: Path) -> None:
    async with (
        serving(tmp_path / "central") as central,
        beside(central, tmp_path / "sidecar") as sidecar,
    ):
        owned = await ordered(sidecar, SWAPS["x2u"])
        there = await upstream_id(sidecar, owned["orderId"])
        await central.post("/sandbox/fault", {"fault": "pause_blocks"})
        await central.post("/sandbox/fund", {"orderId": there})
        await until_status(central, there, status="deposit_detected")
        answer = await cancel(sidecar, owned)
        assert answer["error"]["code"] == "order_not_cancellable"
        await until_status(sidecar, owned["orderId"], status="deposit_detected")


@pytest.mark.parametrize("swap", list(SWAPS))
async def test_a_sidecar_refuses_where_its_upstream_cannot_cancel(
    tmp_path: Path, swap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        serving(tmp_path / "central") as central,
        beside(central, tmp_path / "sidecar") as sidecar,
    ):
        owned = await ordered(sidecar, SWAPS[swap])
        upstream = sidecar.up.engine._upstream
        older = {**upstream.dialect.paths, "cancel_order": "/orders/{id}/not-there-yet"}
        for paths in (older, {k: v for k, v in older.items() if k != "cancel_order"}):
            monkeypatch.setattr(upstream, "dialect", replace(upstream.dialect, paths=paths))
            answer = await cancel(sidecar, owned)
            assert answer["error"]["code"] == "order_not_cancellable"
            assert "expiresAt" in answer["error"]["message"]
