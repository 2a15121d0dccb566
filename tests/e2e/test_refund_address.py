"""Orders with a refund address: knowing the order is not enough to redirect its refund."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from rpcsvc.orders.scheduler.effects import retry_transfer
from tests.sandbox import EVM, HOUR_MS, MONERO, Placed, Sandbox, sandbox

OTHER_MONERO = (
    "44AFFq5kSiGBoZ4NMDwYtN18obc8AemS33DBLWs3H7otXft3Xjrp"
    "DtQGv7SqSsaBYBb98uNbr2VBBEt7f2wfn3RVGQBEP3A"
)
OTHER_EVM = "0x8617E340B3D01FA5F11F306F4090FD50E238070D"
SWAPS: dict[str, dict[str, Any]] = {
    "x2u": {"direction": "x2u", "chain": "arbitrum", "amount": "0.8", "to": EVM},
    "u2x": {"direction": "u2x", "chain": "arbitrum", "amount": "150", "to": MONERO},
}
HOME = {"x2u": MONERO, "u2x": EVM}


async def order_with(box: Sandbox, direction: str, **extra: Any) -> Placed:
    params = {**SWAPS[direction], "refundAddress": HOME[direction], **extra}
    answer = await box.call("swap.execute", **params)
    assert answer["ok"], answer
    return Placed(box, answer["data"]["order"]["orderId"], answer["data"]["sessionId"])


def refunded_to(status: dict[str, Any]) -> set[str]:
    found = status["data"]["transfers"]
    return {item["address"] for item in found if item["kind"] == "refund"}


@pytest.mark.parametrize("direction", ["x2u", "u2x"])
async def test_overpaying_first_brings_the_attacker_nothing(tmp_path: Path, direction: str) -> None:
    async with sandbox(tmp_path) as box:
        order = await order_with(box, direction)
        too_much = {"x2u": "1000", "u2x": "200000"}[direction]
        await order.fund(too_much)  # the attacker, who made the order
        await box.settle()
        await order.fund({"x2u": "0.8", "u2x": "150"}[direction])  # the victim
        await box.settle()
        answer = await order.ask_for_refund({"x2u": OTHER_MONERO, "u2x": OTHER_EVM}[direction])
        await box.settle()

        status = await order.status()
        assert answer["data"]["refundAddress"]["accepted"] is False
        assert status["data"]["order"]["status"] == "refunded"
        assert status["data"]["actionRequired"] is None
        assert refunded_to(status) == {HOME[direction]}
        assert status["data"]["order"]["refundAddress"] == HOME[direction]


@pytest.mark.parametrize("direction", ["x2u", "u2x"])
async def test_dust_and_a_late_payment_go_back_to_the_payer(tmp_path: Path, direction: str) -> None:
    async with sandbox(tmp_path) as box:
        order = await order_with(box, direction)
        await order.fund({"x2u": "0.001", "u2x": "1"}[direction])
        await box.settle()
        await box.jump(3 * HOUR_MS)
        await order.fund({"x2u": "0.8", "u2x": "150"}[direction])
        await box.settle()
        await order.ask_for_refund({"x2u": OTHER_MONERO, "u2x": OTHER_EVM}[direction])
        await box.settle()

        assert refunded_to(await order.status()) == {HOME[direction]}


async def test_an_order_cancelled_before_the_payment_refunds_its_payer(tmp_path: Path) -> None:
    async with sandbox(tmp_path) as box:
        order = await order_with(box, "x2u")
        owned = {"orderId": order.order_id, "sessionId": order.session_id}
        assert (await box.call("swap.cancel", **owned))["ok"]  # the attacker, who made the order
        await order.fund("0.8")  # the victim, who verified it a moment before
        await box.settle()
        await order.ask_for_refund(OTHER_MONERO)
        await box.settle()

        assert refunded_to(await order.status()) == {MONERO}


async def test_a_refused_refund_is_tried_again_by_the_operator_only(tmp_path: Path) -> None:
    async with sandbox(tmp_path) as box:
        order = await order_with(box, "u2x")
        await order.fault("refund_fails")
        await order.fund("200000")
        await box.settle()
        blocked = await order.status()
        assert blocked["data"]["actionRequired"] == "refund_blocked"
        assert (await order.give_refund_address(OTHER_EVM))["accepted"] is False

        wake, processor = box.up.worker.wake_transfer, box.up.service.processor
        assert await retry_transfer(f"{order.order_id}/refund/1", wake, processor)
        await box.settle()
        assert not await retry_transfer(f"{order.order_id}/refund/1", wake, processor)

        status = await order.status()
        assert status["data"]["order"]["status"] == "refunded"
        assert refunded_to(status) == {EVM}


@pytest.mark.parametrize(
    ("direction", "address", "field"),
    [
        ("x2u", EVM, "refundAddress"),
        ("u2x", MONERO, "refundAddress"),
        ("x2u", MONERO[:-1] + "J", "refundAddress"),
        ("u2x", "0xaf88d065e77c8cC2239327C5EDb3A432268e5831", "refundAddress"),
        ("u2x", "0x" + "0" * 40, "refundAddress"),
    ],
)
async def test_a_refund_address_must_be_one_of_the_deposits_network(
    tmp_path: Path, direction: str, address: str, field: str
) -> None:
    async with sandbox(tmp_path) as box:
        answer = await box.call("swap.execute", **SWAPS[direction] | {"refundAddress": address})
        assert answer["error"]["code"] == "invalid_destination"
        assert [problem["field"] for problem in answer["validationErrors"]] == [field]


async def test_a_deposit_address_is_no_refund_address(tmp_path: Path) -> None:
    async with sandbox(tmp_path) as box:
        other = await box.order("x2u")
        address = (await other.status())["data"]["order"]["depositAddress"]
        answer = await box.call("swap.create", **SWAPS["x2u"], refundAddress=address)
        assert answer["error"]["code"] == "invalid_destination"


async def test_wrong_refund_address_is_listed_with_other_problems(tmp_path: Path) -> None:
    async with sandbox(tmp_path) as box:
        wrong = SWAPS["x2u"] | {"refundAddress": EVM, "chain": "nowhere", "hasFunds": True}
        answer = await box.call("swap.execute", **wrong)
        fields = {problem["field"] for problem in answer["validationErrors"]}
        assert fields == {"refundAddress", "chain", "hasFunds"}


async def test_another_refund_address_under_the_same_key_is_a_conflict(tmp_path: Path) -> None:
    key = "5b9d0ddc-0b4f-4c0e-9d0a-2f0e4cf3c1ab"
    async with sandbox(tmp_path) as box:
        params = {**SWAPS["x2u"], "refundAddress": MONERO, "key": key}
        first = await box.call("swap.execute", **params)
        again = await box.call("swap.execute", **params)
        other = await box.call("swap.execute", **params | {"refundAddress": OTHER_MONERO})
        none = await box.call("swap.execute", **SWAPS["x2u"], key=key)

        assert first["data"] == again["data"]
        assert other["error"]["code"] == none["error"]["code"] == "idempotency_conflict"


async def test_the_bff_takes_a_refund_address_and_shows_it(tmp_path: Path) -> None:
    params = {
        "fromChainId": 0,
        "toChainId": 42161,
        "fromToken": "XMR",
        "toToken": "0xaf88d065e77c8cC2239327C5EDb3A432268e5831",
        "fromAmount": "800000000000",
        "toAddress": EVM,
    }
    async with sandbox(tmp_path) as box:
        made = await box.bff("orders.create", **params, refundAddress=MONERO)
        shown = await box.bff("orders.get", orderId=made["orderId"])
        plain = await box.bff("orders.create", **params)

        assert made["refundAddress"] == shown["refundAddress"] == MONERO
        assert "refundAddress" not in plain


async def test_payer_sees_where_a_refund_goes(tmp_path: Path) -> None:
    async with sandbox(tmp_path) as box:
        fixed = await (await order_with(box, "x2u")).status()
        open_ = await (await box.order("x2u")).status()

        assert MONERO in fixed["data"]["fundingInstructions"]["warnings"][-1]
        assert "refundAddress" in open_["data"]["fundingInstructions"]["warnings"][-1]
        assert open_["data"]["order"]["refundAddress"] is None
