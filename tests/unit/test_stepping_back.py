"""Deposits that are reorged out after the decision: every change on the chain is recorded, and
nothing is paid for a missing deposit.
"""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain import twap
from rpcsvc.domain.events import ImpossibleTransition
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.order import Order, OrderStatus, TransferState, TwapPlan
from rpcsvc.domain.pricing import Direction
from tests.unit.funded_orders import ENOUGH, LATER, OPEN_REFUND, after, funded, seen
from tests.unit.orders import IN_CHUNKS, XMR_UNIT, key, terms


@pytest.mark.parametrize("chunks", [None, IN_CHUNKS])
def test_payout_is_cancelled_when_only_dust_is_left_beside_it(
    chunks: TwapPlan | None,
) -> None:
    order = funded(terms(twap_plan=chunks), XMR_UNIT, 1)
    assert order.status.value == ("executing_swap" if chunks else "deposit_confirmed")

    order = after(order, ev.DepositRemoved(key(0)), now=LATER)

    assert order.status is OrderStatus.DEPOSIT_DETECTED
    assert all(t.state is TransferState.CANCELLED for t in order.transfers)
    assert not twap.is_filling(order)
    order = after(order, seen(0, XMR_UNIT), ev.DepositConfirmed(key(0)), now=LATER)
    assert order.status.value == ("executing_swap" if chunks else "deposit_confirmed")


def test_order_left_with_only_dust_does_not_wait_for_ever() -> None:
    order = after(funded(terms(), XMR_UNIT, 1), ev.DepositRemoved(key(0)), now=LATER)
    assert order.deadline_at is not None
    order = after(order, ev.DeadlinePassed(), now=order.deadline_at)
    assert order.status is OrderStatus.EXPIRED


def test_an_order_whose_deposit_is_gone_permanently_expires() -> None:
    order = after(funded(terms(), XMR_UNIT), ev.DepositRemoved(key(0)))
    assert order.status is OrderStatus.AWAITING_DEPOSIT
    assert [t.state for t in order.transfers] == [TransferState.CANCELLED]
    assert order.deadline_at is not None
    order = after(order, ev.DeadlinePassed(), now=order.deadline_at)
    assert order.status is OrderStatus.EXPIRED


@pytest.mark.parametrize("is_back", ["back", "late"])
def test_deposit_returning_after_its_payout_counts_once(is_back: str) -> None:
    order = funded(terms(), XMR_UNIT)
    assert order.payout is not None
    paid, signed = order.payout.transfer_id, order.payout.units
    back = (seen(0, XMR_UNIT), ev.DepositConfirmed(key(0)))
    order = after(order, ev.TransferPrepared(paid, "id", "raw"), ev.DepositRemoved(key(0)))
    order = after(order, *(back if is_back == "back" else ()), ev.TransferPublished(paid))
    order = after(order, ev.TransferSettled(paid), *(back if is_back == "late" else ()), now=LATER)
    assert order.status is OrderStatus.COMPLETED
    assert [(t.transfer_id, t.units) for t in order.transfers] == [(paid, signed)]
    assert [(d.state.value, d.transfer_id) for d in order.deposits] == [("confirmed", paid)]


def test_refund_beside_a_payout_is_cancelled_with_the_decision() -> None:
    agreed = terms(Direction.USDC_TO_XMR)
    order = funded(agreed, agreed.deposit_amount, agreed.deposit_amount, sender="sender")
    assert [t.transfer_id for t in order.refunds] == [OPEN_REFUND]

    order = after(order, ev.DepositRemoved(key(0)))

    # The other deposits suffice for the order, so they are swapped instead.
    assert order.refunds[0].state is TransferState.CANCELLED
    assert order.payout is not None
    assert order.deposits[1].transfer_id == order.payout.transfer_id


@pytest.mark.parametrize("first", [0, 1])
def test_no_refund_remains_when_both_deposits_return(first: int) -> None:
    agreed = terms(Direction.USDC_TO_XMR)
    order = funded(agreed, agreed.deposit_amount, agreed.deposit_amount // 20, sender="sender")
    assert order.transfer(OPEN_REFUND) is not None

    order = after(order, ev.DepositRemoved(key(first)), ev.DepositRemoved(key(1 - first)))

    assert order.status is OrderStatus.AWAITING_DEPOSIT
    assert all(t.state is TransferState.CANCELLED for t in order.transfers)


def stepped_back_with_a_signed_refund() -> Order:
    """The refund of its second deposit is signed, and the first deposit is removed."""
    agreed = terms(Direction.USDC_TO_XMR)
    order = funded(agreed, agreed.deposit_amount, agreed.deposit_amount // 20, sender="sender")
    order = after(order, ev.TransferPrepared(OPEN_REFUND, "id", "raw"))
    order = after(order, ev.DepositRemoved(key(0)), now=LATER)
    assert order.status is OrderStatus.DEPOSIT_DETECTED
    return order


def test_a_refund_that_was_signed_before_is_recorded_to_its_end() -> None:
    order = after(
        stepped_back_with_a_signed_refund(),
        ev.TransferPublished(OPEN_REFUND),
        ev.TransferUnknown(OPEN_REFUND, "lost"),
        ev.TransferSettled(OPEN_REFUND),
        now=LATER,
    )
    assert order.refunds[0].state is TransferState.SETTLED
    assert order.status is OrderStatus.DEPOSIT_DETECTED


def test_signed_refund_that_fails_frees_its_deposit() -> None:
    order = stepped_back_with_a_signed_refund()
    order = after(order, ev.TransferFailed(OPEN_REFUND, "reverted"), now=LATER)
    assert order.status is OrderStatus.REFUNDING  # less than the minimum, and the window is over
    assert order.unspent == (order.deposits[1],)


def test_refund_failing_after_its_deposit_left_ends_the_order() -> None:
    agreed = terms(Direction.USDC_TO_XMR)
    order = after(open_order(agreed), seen(0, agreed.min_deposit // 2, sender="sender"))
    order = after(order, ev.DepositConfirmed(key(0)), now=LATER)
    order = after(order, ev.TransferPrepared(OPEN_REFUND, "id", "raw"), now=LATER)
    order = after(order, ev.DepositRemoved(key(0)), now=LATER)
    assert order.status is OrderStatus.REFUNDING

    order = after(order, ev.TransferFailed(OPEN_REFUND, "reverted"), now=LATER)

    assert order.status is OrderStatus.FAILED


def test_chunk_remainder_is_refunded_after_a_brief_reorg() -> None:
    order = funded(terms(twap_plan=IN_CHUNKS), XMR_UNIT)
    order = after(order, ev.ChunkFilled(0, ENOUGH), ev.FillingStopped(1))
    left = order.leftover
    assert left == XMR_UNIT - order.fills[0].units
    paid = "ord_1/payout/1"
    order = after(order, ev.TransferPrepared(paid, "id", "raw"), ev.TransferSettled(paid))

    assert order.action_required == "refund_address"
    order = after(order, ev.DepositRemoved(key(0)))
    assert (order.leftover, order.action_required) == (0, None)
    order = after(order, seen(0, XMR_UNIT))
    assert (order.leftover, order.action_required) == (left, None), "it may yet go permanently"
    order = after(order, ev.DepositConfirmed(key(0)))
    assert (order.leftover, order.action_required) == (left, "refund_address")
    order = after(order, ev.RefundAddressGiven("refund here"))

    assert [t.units + t.fee for t in order.refunds] == [left]
    # Once the refund is signed, further removals and returns plan no second one.
    order = after(order, ev.TransferPrepared(OPEN_REFUND, "id 2", "raw"))
    order = after(order, ev.DepositRemoved(key(0)), seen(0, XMR_UNIT), ev.DepositConfirmed(key(0)))
    assert (order.leftover, len(order.refunds)) == (0, 1)


LEFT = 70_000_000  # of 150 USDC in chunks of 40, two of which are swapped


def swapped_in_part(*units: int) -> Order:
    """An order in chunks with deposits from "sender 0", ..., and a leftover of LEFT."""
    order = open_order(terms(Direction.USDC_TO_XMR, IN_CHUNKS))
    for n, sent in enumerate(units):
        order = after(order, seen(n, sent, sender=f"sender {n}"))
    # The first one last, so that all are confirmed at the decision.
    order = after(order, *(ev.DepositConfirmed(key(n)) for n in reversed(range(len(units)))))
    order = after(order, *(ev.ChunkFilled(n, ENOUGH) for n in (0, 1)), ev.FillingStopped(2))
    paid = "ord_1/payout/1"
    return after(order, ev.TransferPrepared(paid, "id", "raw"), ev.TransferSettled(paid))


def test_stranger_who_adds_a_little_does_not_get_the_refund() -> None:
    order = swapped_in_part(149_000_000, 1_000_000)
    assert sum(t.units + t.fee for t in order.refunds) == LEFT
    assert {t.address: t.units + t.fee for t in order.refunds} == {
        "sender 0": LEFT - 1_000_000,
        "sender 1": 1_000_000,
    }


def test_what_a_failed_refund_frees_is_not_sent_to_another() -> None:
    order = swapped_in_part(120_000_000, 30_000_000)
    failed = next(t for t in order.refunds if t.address == "sender 0")
    assert failed.units + failed.fee == 40_000_000
    order = after(
        order,
        ev.TransferPrepared(failed.transfer_id, "id 2", "raw"),
        ev.TransferFailed(failed.transfer_id, "blacklisted"),
    )
    assert (order.leftover, order.action_required) == (40_000_000, "refund_address")
    assert [t.address for t in order.refunds] == ["sender 1", "sender 0"]

    order = after(order, ev.RefundAddressGiven("refund here"))

    assert order.leftover == 0
    assert (order.refunds[-1].address, order.refunds[-1].fee) == ("refund here", failed.fee)


def test_failed_refund_is_not_resent_while_its_deposit_is_gone() -> None:
    order = swapped_in_part(120_000_000, 30_000_000)
    failing, other = sorted(order.refunds, key=lambda t: t.address)
    order = after(
        order,
        ev.TransferPrepared(other.transfer_id, "id 2", "raw"),
        ev.TransferSettled(other.transfer_id),
        ev.TransferPrepared(failing.transfer_id, "id 3", "raw"),
        ev.DepositRemoved(key(0)),
        ev.TransferFailed(failing.transfer_id, "blacklisted"),
    )
    assert order.leftover == 0
    assert not [t for t in order.refunds if t.state is TransferState.PLANNED]

    order = after(order, seen(0, 120_000_000, sender="sender 0"), ev.DepositConfirmed(key(0)))

    assert (order.leftover, order.action_required) == (40_000_000, "refund_address")


@pytest.mark.parametrize("direction", Direction)
def test_sum_that_fees_consume_is_refunded(direction: Direction) -> None:
    agreed = terms(direction)
    all_of_it = agreed.price.output(direction, agreed.min_deposit)
    dear = replace(agreed.price, payout_fee=agreed.price.payout_fee + all_of_it)
    order = after(open_order(replace(agreed, price=dear)), seen(0, agreed.min_deposit, sender="me"))

    order = after(order, ev.DepositConfirmed(key(0)), now=LATER)

    assert order.status is OrderStatus.REFUNDING
    assert order.payout is None


def test_deposit_returning_with_another_amount_is_not_credited() -> None:
    order = after(open_order(terms()), seen(0, XMR_UNIT), ev.DepositRemoved(key(0)))
    with pytest.raises(ImpossibleTransition, match="another amount"):
        after(order, seen(0, 1))
    assert after(order, seen(0, XMR_UNIT)).status is OrderStatus.DEPOSIT_DETECTED
