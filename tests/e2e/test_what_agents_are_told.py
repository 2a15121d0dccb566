"""Guidance in answers: missing inputs, the amount to send, and when not to send."""

from __future__ import annotations

from typing import Any

import pytest

from tests.sandbox import EVM, HOUR_MS, Sandbox

NIL_UUID = "00000000-0000-0000-0000-000000000000"
UUID_OF_VERSION_1 = "2f1d1c64-c6f5-11f0-8de9-0242ac120002"


def fields(answer: dict[str, Any]) -> list[str]:
    return [problem["field"] for problem in answer["validationErrors"]]


async def test_nobody_is_led_to_an_address_whose_time_is_over(box: Sandbox) -> None:
    order = await box.order("x2u")
    before = await order.status()
    assert before["data"]["fundingInstructions"]
    assert before["data"]["amountDue"] == "0.8"
    await box.fault("pause_blocks")
    box.clock.now += HOUR_MS  # the worker has not checked the deadline yet
    after = await order.status()
    assert after["nextActions"][0]["action"] == "stop_funding"
    assert after["data"]["fundingInstructions"] is None
    assert after["data"]["amountDue"] is None


async def test_a_plan_with_a_wrong_input_still_says_what_is_missing(box: Sandbox) -> None:
    answer = await box.call("swap.plan", chain="zz")
    assert fields(answer) == ["chain"]
    assert answer["missingInputs"] == ["direction", "amount", "to"]
    assert answer["state"] == "invalid_input"
    answer = await box.call("swap.plan", direction="x2u", chain="base", amount="0.0001")
    assert (fields(answer), answer["missingInputs"]) == (["amount"], ["to"])


async def test_of_several_problems_each_says_what_its_field_may_be(box: Sandbox) -> None:
    answer = await box.call("swap.plan", direction="sideways", chain="zz")
    allowed = {p["field"]: p["allowed"] for p in answer["validationErrors"]}
    assert allowed["direction"] == ["x2u", "u2x"]
    assert "arbitrum" in allowed["chain"]
    assert "allowed" not in answer["error"].get("details", {})


async def test_answer_tells_of_money_held_as_dust(box: Sandbox) -> None:
    order = await box.order("x2u")
    await order.fund("0.00005")
    await box.settle()
    await box.jump(HOUR_MS)
    await box.settle()
    answer = await order.status()
    assert answer["data"]["outcome"] == "failed"
    assert answer["data"]["order"]["errorMessage"] == (
        "The deposits stayed below the minimum until the order expired. They are worth no more"
        " than the fee of sending them back, and are held."
    )


@pytest.mark.parametrize("session", [NIL_UUID, UUID_OF_VERSION_1])
async def test_a_session_id_that_can_be_guessed_is_refused(box: Sandbox, session: str) -> None:
    order = {"direction": "x2u", "chain": "base", "amount": "1", "to": EVM}
    answer = await box.call("swap.execute", **order, sessionId=session)
    assert fields(answer) == ["sessionId"]
    assert "version 4" in answer["validationErrors"][0]["message"]


@pytest.mark.parametrize("chain", ["042161", "0042161", "٤٢١٦١"])
async def test_a_chain_is_written_as_its_number_is(box: Sandbox, chain: str) -> None:
    answer = await box.call("swap.plan", chain=chain)
    assert answer["error"]["code"] == "unsupported_chain"


async def test_an_evm_address_with_a_blank_is_known_to_be_one(box: Sandbox) -> None:
    answer = await box.call("swap.plan", to=f" {EVM}")
    assert answer["validationErrors"][0]["allowed"] == [
        "the user's own EVM address: 0x and 40 hex digits"
    ]


async def test_amount_that_is_no_string_does_not_break_the_answer(
    box: Sandbox,
) -> None:
    answer = await box.call("swap.plan", amount="\udcff")
    assert fields(answer) == ["amount"]


async def test_read_is_not_advised_to_use_an_idempotency_key(box: Sandbox) -> None:
    await box.fault("rates_down")
    answer = await box.call("swap.quote", direction="x2u", chain="base", amount="1")
    assert answer["nextActions"][0]["description"].endswith("idempotency key if it had one.")


async def test_a_bad_key_does_not_hide_the_other_problems(box: Sandbox) -> None:
    answer = await box.call("swap.execute", direction="x2u", chain="zz", key="\x00")
    assert fields(answer) == ["idempotency-key", "chain"]
    assert answer["missingInputs"] == ["amount", "to"]


async def test_ticket_with_two_wrong_ids_gets_both(box: Sandbox) -> None:
    answer = await box.call("support.create", message="help", orderId="bad", sessionId="worse")
    assert fields(answer) == ["sessionId", "orderId"]
