"""The bridge over the BFF: both directions to the end, statuses, and failures."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.domain.bridge import BridgeStatus
from rpcsvc.domain.money import USDC, parse_amount
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.venue import Rate
from tests.contract.bff import call, check, post
from tests.contract.serving import EVM, MONERO, Served
from tests.e2e.audit import audit
from tests.sandbox import ManualClock, Placed, Sandbox, sandbox

WAYS = [("deposit", EVM, "0.5"), ("withdraw", MONERO, "75")]


async def test_rates_have_the_fields_of_the_spec(served: Served) -> None:
    rates = await call(served, "GET", "/bridge/rates")
    check("Bridge rate list", rates.body)
    for rate in rates.body["rates"]:
        check("rate", rate)
    assert rates.body["rates"][0]["rate"] == 165
    # Half a percent: the default spread of the service.
    assert rates.body["wagyuRate"]["rate"] == 164.175


@pytest.mark.parametrize(("way", "to", "amount"), WAYS)
async def test_a_bridge_order_runs_to_its_end(
    served: Served, way: str, to: str, amount: str
) -> None:
    made = await post(served, f"/bridge/{way}", {"toAddress": to})
    check("Bridge order response", made.body)
    order_id = made.body["orderId"]
    assert made.body["destination"] == to
    assert made.body["depositAddress"].startswith("0x") is (way == "withdraw")
    before = await call(served, "GET", f"/bridge/order/{order_id}")
    check("Bridge order", before.body)
    assert (before.body["type"], before.body["status"]) == (way, "awaiting_deposit")
    assert (before.body["amount"], before.body["confirmations"]) == ("0", 0)
    await served.post("/sandbox/fund", {"orderId": order_id, "amount": amount})
    async with asyncio.timeout(180):
        while (answer := await call(served, "GET", f"/bridge/order/{order_id}")).body[
            "status"
        ] != "completed":
            check("Bridge order", answer.body)
            await asyncio.sleep(0.02)
    done = answer.body
    assert done["confirmations"] == done["requiredConfirmations"] == 2
    assert done["tx_in"] != done["tx_out"] is not None
    assert (done["failure_reason"], done["completed_at"] is None) == (None, False)
    order = await served.up.service.store.order(order_id)
    assert order is not None
    assert order.payout is not None
    assert order.payout.address == to
    assert order.payout.units == order.terms.price.output(
        order.terms.direction, int(done["amount"])
    )


async def test_a_key_makes_one_bridge_order(served: Served) -> None:
    first = await post(
        served, "/bridge/deposit", {"toAddress": EVM}, idempotency_key="k-0123456789abcd"
    )
    again = await post(
        served, "/bridge/deposit", {"toAddress": EVM}, idempotency_key="k-0123456789abcd"
    )
    assert first.body == again.body
    assert again.headers["idempotent-replayed"] == "true"
    other = await post(
        served, "/bridge/withdraw", {"toAddress": MONERO}, idempotency_key="k-0123456789abcd"
    )
    assert (other.status, other.body["error"]["code"]) == (409, "idempotency_conflict")
    assert served.count("orders") == 1


async def test_known_key_is_replayed_without_a_rate_and_makes_no_order(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await post(
        served, "/bridge/deposit", {"toAddress": EVM}, idempotency_key="k-0123456789abcd"
    )

    def no_rate(_: object) -> Rate:
        raise Unavailable("There is no fresh rate.")

    monkeypatch.setattr(type(served.up.engine), "rate", no_rate)
    again = await post(
        served, "/bridge/deposit", {"toAddress": EVM}, idempotency_key="k-0123456789abcd"
    )
    assert (again.status, again.body) == (200, first.body)
    fresh = await post(
        served, "/bridge/deposit", {"toAddress": EVM}, idempotency_key="other-0123456789"
    )
    assert (fresh.status, fresh.body["error"]["code"]) == (503, "unavailable")
    assert served.count("orders") == 1


@pytest.mark.parametrize(
    ("way", "to"), [("deposit", MONERO), ("withdraw", EVM), ("deposit", "0x" + "0" * 40)]
)
async def test_a_wrong_destination_is_refused(served: Served, way: str, to: str) -> None:
    answer = await post(served, f"/bridge/{way}", {"toAddress": to})
    assert (answer.status, answer.body["error"]["code"]) == (400, "invalid_destination")
    assert served.count("orders") == 0


async def test_swap_and_bridge_orders_are_found_on_their_own_paths(served: Served) -> None:
    bridged = (await post(served, "/bridge/deposit", {"toAddress": EVM})).body["orderId"]
    for path in (f"/orders/{bridged}", f"/bridge/order/ord_{'0' * 26}"):
        answer = await call(served, "GET", path)
        assert (answer.status, answer.body["error"]["code"]) == (404, "order_not_found")
    assert (await served.http("GET", f"/agent/swap/status/{bridged}")).status == 404
    swap = {"direction": "x2u", "chain": "arbitrum", "amount": "0.8", "to": EVM}
    made = (await served.post("/agent/swap/create", swap)).body["data"]["order"]["orderId"]
    assert (await call(served, "GET", f"/bridge/order/{made}")).status == 404
    bad = {**swap, "chain": "perps"}
    assert (await served.post("/agent/swap/create", bad)).body["error"][
        "code"
    ] == "unsupported_chain"


# --- with a manual clock ---


async def bridge(box: Sandbox, way: str = "deposit") -> Placed:
    made = await box.bff(f"bridge.{way}", toAddress=EVM if way == "deposit" else MONERO)
    order = await box.up.service.store.order(made["orderId"])
    assert order is not None
    return Placed(box, order.order_id, order.terms.session_id)


async def seen(box: Sandbox, placed: Placed) -> dict[str, Any]:
    return await box.bff("bridge.order", orderId=placed.order_id)


async def test_the_status_moves_as_the_deposit_confirms(tmp_path: Path) -> None:
    async with sandbox(tmp_path, ManualClock()) as box:
        placed = await bridge(box)
        await placed.fund("0.5")
        met = []
        for _ in range(16):
            await box.settle(0.5)
            answer = await seen(box, placed)
            met.append((answer["status"], answer["confirmations"]))
        assert list(dict.fromkeys(status for status, _ in met)) == [
            BridgeStatus.PENDING_CONFIRMATIONS, BridgeStatus.PROCESSING, BridgeStatus.COMPLETED,
        ]  # fmt: skip
        assert {count for status, count in met if status == "pending_confirmations"} == {0, 1}
    assert audit(tmp_path) == []


async def test_a_deposit_that_is_reorganised_away_is_awaited_again(tmp_path: Path) -> None:
    async with sandbox(tmp_path, ManualClock()) as box:
        placed = await bridge(box)
        await placed.fund("0.5")
        await box.settle(1)
        await placed.fault("drop_deposit")
        await box.settle(1)
        answer = await seen(box, placed)
        assert (answer["status"], answer["amount"]) == ("awaiting_deposit", "0")
        assert answer["tx_in"] is None
        await placed.fault("restore_deposit")
        await box.settle(8)
        assert (await seen(box, placed))["status"] == "completed"
    assert audit(tmp_path) == []


async def test_unfunded_order_expires_and_one_below_minimum_fails(tmp_path: Path) -> None:
    async with sandbox(tmp_path, ManualClock()) as box:
        idle, small = await bridge(box), await bridge(box, "withdraw")
        await small.fund("2")
        for _ in range(3):
            await box.jump(3_600_000)
            await box.settle(5)
        assert (await seen(box, idle))["status"] == "expired"
        failed = await seen(box, small)
        assert failed["status"] == "failed"
        assert failed["failure_reason"]
        order = await box.up.service.store.order(small.order_id)
        assert order is not None
        assert [r.units + r.fee for r in order.refunds] == [parse_amount("2", USDC).units]
    assert audit(tmp_path) == []


@pytest.mark.parametrize("fault", ["payout_unknown_sent", "payout_unknown_lost", "payout_fails"])
async def test_a_payout_of_unknown_outcome_is_made_once(tmp_path: Path, fault: str) -> None:
    async with sandbox(tmp_path, ManualClock()) as box:
        placed = await bridge(box, "withdraw")
        await placed.fault(fault)
        await placed.fund("75")
        await box.settle(70)
        status = (await seen(box, placed))["status"]
        assert status == ("failed" if fault == "payout_fails" else "completed")
    assert audit(tmp_path) == []
