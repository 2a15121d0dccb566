"""Refunds: the share of each recipient, dust, and what is left of deposits swapped in part."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.events import AdvanceTransfer, ImpossibleTransition, leftover_in
from rpcsvc.domain.machine import open_order, transition
from rpcsvc.domain.money import USDC
from rpcsvc.domain.order import (
    Deposit,
    DepositState,
    Fill,
    Order,
    OrderReason,
    OrderStatus,
    Transfer,
    TransferKind,
    TransferState,
)
from rpcsvc.domain.pricing import Direction
from rpcsvc.domain.refunds import plan_refunds, refund, refund_extra, waiting_units
from tests.unit.orders import NOW, key, terms

S, T = OrderStatus, TransferState
AGREED = replace(terms(Direction.USDC_TO_XMR), refund_fee=10)
PAYOUT = Transfer("ord_1/payout/1", TransferKind.PAYOUT, "monero", AGREED.payout_asset, "to", 1, 1)
SETTLED = replace(PAYOUT, state=T.SETTLED)


def deposit(n: int, units: int, sender: str | None = "ann", **changes: object) -> Deposit:
    fresh = Deposit(key(n), units, sender, NOW, DepositState.CONFIRMED)
    return replace(fresh, **changes)


def order_of(*deposits: Deposit, status: OrderStatus = S.EXPIRED, **changes: object) -> Order:
    return replace(open_order(AGREED), status=status, deposits=deposits, **changes)


def refunds_of(order: Order) -> dict[str, int]:
    """The units that arrive, by recipient."""
    return {each.address: each.units for each in order.refunds}


def test_deposits_of_one_sender_share_a_transfer_and_its_fee() -> None:
    order, effects = plan_refunds(
        order_of(deposit(1, 30), deposit(2, 100, "bob"), deposit(3, 40), deposit(4, 11, "eve"))
    )
    assert refunds_of(order) == {"ann": 60, "bob": 90, "eve": 1}
    names = [f"ord_1/refund/{n}" for n in (1, 2, 3)]
    assert effects == tuple(map(AdvanceTransfer, names))
    assert [d.transfer_id for d in order.deposits] == [names[0], names[1], names[0], names[2]]
    assert order.refunds[0] == Transfer(
        names[0], TransferKind.REFUND, "arbitrum", USDC, "ann", 60, 10
    )
    assert (order.action_required, order.unspent) == (None, ())


def test_deposit_worth_no_more_than_the_fee_is_dust() -> None:
    order, effects = plan_refunds(
        order_of(
            deposit(1, 10), deposit(2, 11, "bob"), deposit(3, 100, None), deposit(4, 30, "eve")
        )
    )
    assert [d.is_dust for d in order.deposits] == [True, False, False, False]
    assert refunds_of(order) == {"bob": 1, "eve": 20}
    assert len(effects) == 2
    assert order.action_required == "refund_address"
    assert waiting_units(order) == 100


def test_refund_that_failed_is_tried_at_another_address() -> None:
    failed = Transfer(
        "ord_1/refund/1", TransferKind.REFUND, "arbitrum", USDC, "ann", 1, 1, T.FAILED
    )
    order = order_of(deposit(1, 50), transfers=(failed,))
    blocked, effects = plan_refunds(order)
    assert (effects, blocked.action_required) == ((), "refund_address")
    given = transition(blocked, ev.RefundAddressGiven("cat"), NOW)
    assert refunds_of(given.order) == {"ann": 1, "cat": 40}
    assert given.effects == (AdvanceTransfer("ord_1/refund/2"),)
    assert given.order.refund_address == "cat"
    with pytest.raises(ImpossibleTransition, match="does not wait for a refund address"):
        transition(given.order, ev.RefundAddressGiven("dog"), NOW)
    with pytest.raises(ImpossibleTransition, match="no refund to an agreed"):
        transition(blocked, ev.RefundRetried(), NOW)


def test_order_whose_deposits_are_all_dust_has_failed() -> None:
    order = order_of(deposit(1, 10), status=S.REFUNDING)
    assert refund_extra(order).order.error_message == OrderReason.DUST.text
    reason = OrderReason.ABOVE_MAXIMUM.text
    done = refund_extra(replace(order, error_message=reason)).order
    assert (done.status, done.error_message) == (S.FAILED, f"{reason} {OrderReason.DUST.text}")
    none = refund_extra(order_of(status=S.REFUNDING, error_message=reason)).order
    assert (none.status, none.error_message) == (S.FAILED, reason)


# --- what is left of deposits that were swapped in part --------------------------------------


def swapped(leftover: int, *deposits: Deposit, **changes: object) -> Order:
    """A completed order that has swapped all but ``leftover`` of its deposits."""
    paid = tuple(replace(each, transfer_id=PAYOUT.transfer_id) for each in deposits)
    total = sum(each.units for each in deposits)
    fills = (Fill(total - leftover, 1, 0, 1, NOW),)
    done = order_of(*paid, status=S.COMPLETED, transfers=(SETTLED,), fills=fills, leftover=leftover)
    return replace(done, **changes)


@pytest.mark.parametrize(
    ("leftover", "expected"),
    [
        (20, {"bob": 10}), (50, {"bob": 40}), (80, {"bob": 40, "ann": 20}),
        (150, {"bob": 40, "ann": 90}), (10, {}), (0, {}),
    ],
)  # fmt: skip
def test_leftover_is_of_the_deposits_that_were_seen_last(
    leftover: int, expected: dict[str, int]
) -> None:
    order, effects = plan_refunds(swapped(leftover, deposit(1, 100), deposit(2, 50, "bob")))
    assert refunds_of(order) == expected
    assert len(effects) == len(expected)
    assert order.leftover == leftover - sum(units + 10 for units in expected.values())
    assert sum(leftover_in(order, each.transfer_id) for each in order.refunds) == (
        leftover - order.leftover
    )


def test_leftover_of_one_senders_deposits_is_one_refund() -> None:
    order, _ = plan_refunds(swapped(80, deposit(1, 100), deposit(2, 50, "bob"), deposit(3, 40)))
    assert refunds_of(order) == {"ann": 30, "bob": 30}


def test_leftover_goes_with_a_further_deposit_of_its_sender() -> None:
    order = swapped(30, deposit(1, 100))
    order, _ = plan_refunds(replace(order, deposits=(*order.deposits, deposit(2, 5))))
    assert refunds_of(order) == {"ann": 25}
    assert (order.leftover, leftover_in(order, "ord_1/refund/1")) == (0, 30)


def test_leftover_of_a_cancelled_refund_is_due_again() -> None:
    order = swapped(30, deposit(1, 100))
    order, _ = plan_refunds(replace(order, deposits=(*order.deposits, deposit(2, 25))))
    assert refunds_of(order) == {"ann": 45}
    gone = transition(order, ev.DepositRemoved(key(2)), NOW).order
    assert [(each.state, each.units) for each in gone.refunds] == [
        (T.CANCELLED, 45), (T.PLANNED, 20),
    ]  # fmt: skip
    assert gone.leftover == 0
    with pytest.raises(ImpossibleTransition, match="can't become removed"):
        transition(gone, ev.DepositRemoved(key(2)), NOW)


def test_leftover_on_its_way_is_not_sent_again() -> None:
    going = Transfer("ord_1/refund/1", TransferKind.REFUND, "arbitrum", USDC, "bob", 30, 10)
    for state in T:
        order = swapped(
            60, deposit(1, 100), deposit(2, 50, "bob"),
            transfers=(SETTLED, replace(going, state=state)),
        )  # fmt: skip
        order, _ = plan_refunds(order)
        sent = {each.address: each.units for each in order.refunds[1:]}
        if state is T.CANCELLED:
            assert sent == {"bob": 40}
        elif state is T.FAILED:
            assert sent == {}
            assert order.action_required == "refund_address"
        else:
            assert sent == {"ann": 40}, state


def test_two_refunds_on_their_way_to_one_sender_count_both() -> None:
    going = Transfer("ord_1/refund/1", TransferKind.REFUND, "arbitrum", USDC, "bob", 10, 10)
    both = (going, replace(going, transfer_id="ord_1/refund/2"))
    order = swapped(40, deposit(1, 100), deposit(2, 40, "bob"), transfers=(SETTLED, *both))
    order, _ = plan_refunds(order)
    assert [(r.address, r.units) for r in order.refunds[2:]] == [("ann", 30)]


def test_leftovers_of_all_senders_go_to_the_agreed_address() -> None:
    order = swapped(80, deposit(1, 100), deposit(2, 50, "bob"))
    order = replace(order, terms=replace(AGREED, refund_address="back here"))
    order, _ = plan_refunds(order)
    assert (refunds_of(order), order.leftover) == ({"back here": 70}, 0)


def test_leftover_is_not_exceeded_by_what_others_got_too_much() -> None:
    # Bob is being sent more than what is left of his deposits: others get what remains.
    going = Transfer("ord_1/refund/1", TransferKind.REFUND, "arbitrum", USDC, "bob", 30, 10)
    order = swapped(
        90, deposit(1, 100), deposit(2, 50, "eve"), deposit(3, 10, "bob"),
        transfers=(SETTLED, going),
    )  # fmt: skip
    order, _ = plan_refunds(order)
    assert refunds_of(order) == {"bob": 30, "eve": 40, "ann": 30}
    assert order.leftover == 0


def test_refund_of_a_decision_is_carried_out() -> None:
    agreed = replace(AGREED, refund_address="back here")
    moved = refund(replace(order_of(deposit(1, 50)), terms=agreed), OrderReason.ABOVE_MAXIMUM)
    assert moved.effects == (AdvanceTransfer("ord_1/refund/1"),)
    assert moved.order.status is S.REFUNDING
    assert moved.order.error_message == OrderReason.ABOVE_MAXIMUM.text


def test_leftover_without_a_sender_waits_for_an_address() -> None:
    order, effects = plan_refunds(swapped(60, deposit(1, 100, None)))
    assert (effects, order.action_required, order.leftover) == ((), "refund_address", 60)
    assert waiting_units(order) == 60
    given = transition(order, ev.RefundAddressGiven("cat"), NOW).order
    assert (refunds_of(given), given.leftover) == ({"cat": 50}, 0)
    little, _ = plan_refunds(swapped(10, deposit(1, 100, None)))
    assert little.action_required is None


def test_leftover_waits_for_its_payout_and_its_deposits() -> None:
    order = swapped(60, deposit(1, 100))
    for waits in (
        replace(order, status=S.EXECUTING_SWAP),
        replace(order, deposits=(replace(order.deposits[0], state=DepositState.SEEN),)),
    ):
        assert plan_refunds(waits) == (waits, ())
    gone = replace(order.deposits[0], state=DepositState.REMOVED)
    assert plan_refunds(replace(order, deposits=(gone,)))[0].refunds == ()
    assert plan_refunds(order)[0].refunds


def test_leftover_goes_to_the_agreed_address_again_on_request() -> None:
    agreed = replace(AGREED, refund_address="back here")
    failed = Transfer(
        "ord_1/refund/1", TransferKind.REFUND, "arbitrum", USDC, "back here", 50, 10, T.FAILED
    )
    order = swapped(60, deposit(1, 100), terms=agreed, transfers=(SETTLED, failed))
    blocked, _ = plan_refunds(order)
    assert (blocked.action_required, len(blocked.refunds)) == ("refund_blocked", 1)
    again = transition(blocked, ev.RefundRetried(), NOW)
    assert again.effects == (AdvanceTransfer("ord_1/refund/2"),)
    assert (again.order.refunds[-1].units, again.order.leftover) == (50, 0)
