"""Every row of "What happens to a deposit", from the first call to the last transfer."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.rows import all_rows
from tests.sandbox import EVM, HOUR_MS, MONERO, Sandbox, sandbox

BOTH = pytest.mark.parametrize("direction", ["x2u", "u2x"])
STRANGER = "3f2b8c1e-7d64-4f0a-9c1b-2a5e8d7f6c90"
# amounts per direction: a part above the minimum, one below it, one worth less than a refund fee
PART = {"x2u": "0.3", "u2x": "60"}
TINY = {"x2u": "0.01", "u2x": "2"}
DUST = {"x2u": "0.00005", "u2x": "0.01"}
HUGE = {"x2u": "400", "u2x": "60000"}


def transfers(answer: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(t["kind"], t["amount"], t["status"]) for t in answer["data"]["transfers"]]


def uses(answer: dict[str, Any]) -> list[str]:
    return [d["use"] for d in answer["data"]["deposits"]]


@BOTH
async def test_remaining_due_is_sent_once_before_the_order_sees_it(
    box: Sandbox, direction: str
) -> None:
    order = await box.order(direction)
    await order.fund(PART[direction])
    first, second = await asyncio.gather(
        *(box.call("sandbox.fund", orderId=order.order_id) for _ in range(2))
    )
    assert first["data"]["transaction"]["amount"] == {"x2u": "0.5", "u2x": "90"}[direction]
    assert second["error"]["code"] == "invalid_input"
    await box.settle()
    assert (await order.status())["state"] == "completed"


async def test_confirmations_needed_follow_what_has_arrived(
    box: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    def needed(_wallets: object, _network: str, units: int) -> int:
        return 20 if units >= 5 * 10**11 else 10

    monkeypatch.setattr(type(box.up.engine), "required_confirmations", needed)
    order = await box.order("x2u")

    async def required() -> int:
        found = await box.up.service.store.order(order.order_id)
        assert found is not None
        confirmations = await box.up.service.venue.confirmations(found)
        assert confirmations is not None
        return confirmations.required

    assert await required() == 20, "of the order's amount, while nothing has arrived"
    for amount, expected in (("0.3", 10), ("0.5", 20)):
        await order.fund(amount)
        await box.up.worker.tick()
        assert await required() == expected


async def test_an_exact_deposit_of_xmr_pays_out_the_quoted_usdc(box: Sandbox) -> None:
    order = await box.order("x2u")
    await order.fund()
    answer = await order.settle_payout()
    assert transfers(answer) == [("payout", "131.29", "settled")]
    assert answer["data"]["order"]["actualOutput"] == "131290000"


async def test_an_exact_deposit_of_usdc_pays_out_the_quoted_xmr(box: Sandbox) -> None:
    order = await box.order("u2x")
    await order.fund()
    answer = await order.settle_payout()
    assert transfers(answer) == [("payout", "0.904445454544", "settled")]


async def test_overpayment_is_swapped_in_full_at_the_locked_rate(box: Sandbox) -> None:
    order = await box.order("x2u")
    await box.fault("set_rate", rate="100")
    await order.fund("1")
    await box.settle()
    assert transfers(await order.status()) == [("payout", "164.125", "settled")]


@BOTH
async def test_a_deposit_over_the_maximum_is_refunded(box: Sandbox, direction: str) -> None:
    order = await box.order(direction)
    await order.fund(HUGE[direction])
    answer = await order.settle_refund(direction)
    assert (answer["state"], answer["data"]["outcome"]) == ("terminal_failure", "refunded")
    assert [kind for kind, _, _ in transfers(answer)] == ["refund"]


@BOTH
async def test_an_under_payment_may_be_topped_up(box: Sandbox, direction: str) -> None:
    order = await box.order(direction)
    await order.fund(PART[direction])
    await box.settle()
    waiting = await order.status()
    assert waiting["state"] == "deposit_detected"
    due = waiting["data"]["amountDue"]
    assert due == {"x2u": "0.5", "u2x": "90"}[direction]
    instructions = waiting["data"]["fundingInstructions"]
    assert instructions["amount"] == due
    assert instructions["amountDisplay"] == {"x2u": "0.5 XMR", "u2x": "90 USDC"}[direction]
    wanted = {"x2u": "tx_amount=0.5", "u2x": "uint256=90000000"}[direction]
    assert instructions["paymentUri"].endswith(wanted)
    assert waiting["data"]["order"]["onDeadline"] == "swap_or_refund"
    assert "attestation" in waiting["data"]["order"]
    await order.fund()
    await box.catch_up()
    seen = await order.status()
    assert (seen["state"], seen["data"]["fundingInstructions"]) == ("deposit_detected", None)
    assert "attestation" not in seen["data"]["order"], "nobody is to pay that address any more"
    answer = await order.settle_payout()
    assert uses(answer) == ["payout", "payout"]


@BOTH
async def test_an_under_payment_above_the_minimum_is_swapped_at_expiry(
    box: Sandbox, direction: str
) -> None:
    order = await box.order(direction)
    await order.fund(PART[direction])
    await box.settle()
    await box.fault("set_rate", rate="100")  # the quote's is locked
    await box.jump(HOUR_MS)
    answer = await order.settle_payout()
    amount = {"x2u": "49.2025", "u2x": "0.361718181817"}[direction]
    assert transfers(answer) == [("payout", amount, "settled")]


@BOTH
async def test_underpayment_below_the_minimum_is_refunded_at_expiry(
    box: Sandbox, direction: str
) -> None:
    order = await box.order(direction)
    await order.fund(TINY[direction])
    await box.settle()
    await box.jump(HOUR_MS)
    answer = await order.settle_refund(direction)
    assert answer["data"]["outcome"] == "refunded"
    amount = {"x2u": "0.0099", "u2x": "1.95"}[direction]
    assert transfers(answer) == [("refund", amount, "settled")]


@BOTH
async def test_dust_is_held_and_shown_and_the_order_fails(box: Sandbox, direction: str) -> None:
    order = await box.order(direction)
    await order.fund(DUST[direction])
    await box.settle()
    await box.jump(HOUR_MS)
    answer = await order.status()
    assert answer["data"]["outcome"] == "failed"
    assert uses(answer) == ["dust"]


@BOTH
async def test_a_late_deposit_is_swapped_while_the_rate_holds(box: Sandbox, direction: str) -> None:
    order = await box.order(direction)
    await box.jump(HOUR_MS + 1)
    late = await order.status()
    assert late["state"] == "waiting_for_funding"
    assert late["nextActions"][0]["action"] == "stop_funding"
    await order.fund()
    await box.settle()
    assert (await order.status())["state"] == "completed"


@pytest.mark.parametrize(
    ("direction", "rate", "amount"),
    [("x2u", "164", "130.494"), ("u2x", "166", "0.898996385541")],
)
async def test_a_late_deposit_is_swapped_at_the_rate_of_now(
    box: Sandbox, direction: str, rate: str, amount: str
) -> None:
    order = await box.order(direction)
    await box.jump(HOUR_MS + 1)
    await box.fault("set_rate", rate=rate)
    await order.fund()
    await box.settle()
    assert transfers(await order.status()) == [("payout", amount, "settled")]


@BOTH
async def test_a_late_deposit_is_refunded_when_the_rate_has_moved(
    box: Sandbox, direction: str
) -> None:
    order = await box.order(direction)
    await box.jump(HOUR_MS + 1)
    await box.fault("set_rate", rate={"x2u": "120", "u2x": "220"}[direction])
    await order.fund()
    answer = await order.settle_refund(direction)
    assert answer["data"]["outcome"] == "refunded"
    assert [kind for kind, _, _ in transfers(answer)] == ["refund"]


@BOTH
async def test_an_order_without_a_deposit_expires(box: Sandbox, direction: str) -> None:
    order = await box.order(direction)
    await box.jump(HOUR_MS + HOUR_MS // 4 - 1)
    assert (await order.status())["state"] == "waiting_for_funding"
    await box.jump(1)
    answer = await order.status()
    assert (answer["state"], answer["data"]["outcome"]) == ("terminal_failure", "expired")


@pytest.mark.parametrize("ended", ["completed", "expired"])
async def test_a_usdc_deposit_after_the_end_goes_back_to_its_sender(
    box: Sandbox, ended: str
) -> None:
    order = await box.order("u2x")
    if ended == "completed":
        await order.fund()
        await box.settle()
    else:
        await box.jump(2 * HOUR_MS)
    await order.fund("60")
    await box.settle()
    answer = await order.status()
    assert answer["data"]["outcome"] == ended
    assert transfers(answer)[-1] == ("refund", "59.95", "settled")


async def test_xmr_deposit_after_the_end_waits_for_a_refund_address(
    box: Sandbox,
) -> None:
    order = await box.order("x2u")
    await box.jump(2 * HOUR_MS)
    await order.fund("0.3")
    await box.settle()
    waiting = await order.status()
    assert waiting["data"]["actionRequired"] == "refund_address"
    assert (await order.give_refund_address(MONERO))["accepted"]
    await box.settle()
    answer = await order.status()
    assert answer["data"]["outcome"] == "expired"
    assert answer["data"]["actionRequired"] is None
    assert transfers(answer) == [("refund", "0.2999", "settled")]
    assert answer["data"]["transfers"][0]["address"] == MONERO


@BOTH
async def test_dropped_deposit_takes_the_order_back_and_may_return(
    box: Sandbox, direction: str
) -> None:
    order = await box.order(direction)
    await box.fault("pause_blocks")
    await order.fund()
    await box.settle(1)
    assert (await order.status())["state"] == "deposit_detected"
    await order.fault("drop_deposit")
    await box.settle(1)
    assert (await order.status())["data"]["order"]["status"] == "awaiting_deposit"
    await order.fault("restore_deposit")
    await box.fault("resume_blocks")
    await box.settle()
    assert (await order.status())["state"] == "completed"


@BOTH
async def test_reorganised_deposit_is_confirmed_again_before_payout(
    box: Sandbox, direction: str
) -> None:
    order = await box.order(direction)
    await box.fault("engine_down")  # no payout is possible yet
    await order.fund()
    await box.settle()
    assert (await order.status())["data"]["order"]["status"] == "deposit_confirmed"
    await order.fault("reorganise_deposit")
    await box.catch_up()
    assert (await order.status())["data"]["order"]["status"] == "deposit_detected"
    await box.fault("engine_up")
    await box.settle(20)
    answer = await order.status()
    assert answer["state"] == "completed"
    assert [kind for kind, _, _ in transfers(answer)] == ["payout"]


@BOTH
async def test_a_payout_that_fails_leads_to_a_refund(box: Sandbox, direction: str) -> None:
    order = await box.order(direction)
    await order.fault("payout_fails")
    await order.fund()
    await box.settle()
    if direction == "x2u":
        assert (await order.status())["data"]["actionRequired"] == "refund_address"
        await order.give_refund_address(MONERO)
        await box.settle()
    answer = await order.status()
    assert answer["data"]["outcome"] == "refunded"
    assert [(k, s) for k, _, s in transfers(answer)] == [
        ("payout", "failed"),
        ("refund", "settled"),
    ]


@BOTH
@pytest.mark.parametrize("fault", ["payout_unknown_sent", "payout_unknown_lost"])
async def test_a_payout_of_unknown_outcome_is_paid_exactly_once(
    box: Sandbox, direction: str, fault: str
) -> None:
    order = await box.order(direction)
    await order.fault(fault)
    await order.fund()
    answer = await order.settle_payout()
    assert len(answer["data"]["transfers"]) == 1
    to = answer["data"]["order"]["toAddress"]
    sent = all_rows(
        box.up.database,
        "SELECT state FROM sandbox_transactions WHERE recipient = ? AND kind = 'transfer'",
        (to,),
    )
    assert sent == [("mined",)]


@BOTH
async def test_a_refund_that_fails_waits_for_another_address(box: Sandbox, direction: str) -> None:
    order = await box.order(direction)
    await order.fault("payout_fails")
    await order.fault("refund_fails")
    await order.fund()
    waiting = await order.settle_refund(direction)
    assert waiting["state"] == "refunding"
    assert waiting["data"]["actionRequired"] == "refund_address"


async def test_an_address_that_a_refund_failed_to_reach_is_refused(box: Sandbox) -> None:
    order = await box.order("x2u")
    await order.fault("payout_fails")
    await order.fault("refund_fails")
    await order.fund()
    await box.settle()
    await order.give_refund_address(MONERO)
    await box.settle()
    answer = await order.ask_for_refund(MONERO)
    assert answer["error"]["code"] == "invalid_destination"
    assert "another address" in answer["error"]["message"]
    assert (await order.status())["data"]["actionRequired"] == "refund_address"


async def test_only_the_session_of_the_order_may_give_a_refund_address(box: Sandbox) -> None:
    order = await box.order("x2u")
    await order.fault("payout_fails")
    await order.fund()
    await box.settle()
    assert await order.give_refund_address(MONERO, session_id=STRANGER) is None
    assert (await order.status())["data"]["actionRequired"] == "refund_address"
    assert (await order.give_refund_address(MONERO))["accepted"]


async def test_a_refund_address_of_the_wrong_network_is_refused(box: Sandbox) -> None:
    order = await box.order("x2u")
    await order.fault("payout_fails")
    await order.fund()
    await box.settle()
    answer = await order.ask_for_refund(EVM)
    assert answer["error"]["code"] == "invalid_destination"


@BOTH
async def test_a_restart_in_the_middle_of_a_swap_changes_nothing(
    tmp_path: Path, direction: str
) -> None:
    async with sandbox(tmp_path) as before:
        clock = before.clock
        order = await before.order(direction)
        await order.fund()
        await before.settle(1)
    async with sandbox(tmp_path, clock) as after:
        await after.settle()
        answer = await after.call("swap.status", orderId=order.order_id)
    assert answer["state"] == "completed"


@BOTH
async def test_a_payout_that_can_not_be_prepared_in_time_is_refunded(
    box: Sandbox, direction: str
) -> None:
    order = await box.order(direction)
    await box.fault("engine_down")
    await order.fund()
    await box.settle()
    await box.jump(900_000)
    await box.fault("engine_up")
    await box.settle(70)
    if direction == "x2u":
        await order.give_refund_address(MONERO)
        await box.settle(10)
    assert (await order.status())["data"]["outcome"] == "refunded"


@BOTH
async def test_parts_that_came_while_nobody_looked_count_together(
    box: Sandbox, direction: str
) -> None:
    order = await box.order(direction)
    for _ in range(2):
        await order.fund({"x2u": "0.4", "u2x": "75"}[direction])
    await box.jump(2 * HOUR_MS)  # both are confirmed, and the order's time is over
    await box.settle()
    answer = await order.status()
    assert uses(answer) == ["payout", "payout"]
    assert [kind for kind, _, _ in transfers(answer)] == ["payout"]
    assert answer["state"] == "completed"
