"""TWAP orders in the order machine: each chunk once, at a fair rate, exact to the unit."""

from __future__ import annotations

import orjson
import pytest
from msgspec import UNSET
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain import twap
from rpcsvc.domain.events import AdvanceTransfer, FillChunk, ImpossibleTransition, Transition
from rpcsvc.domain.machine import open_order, transition
from rpcsvc.domain.order import OnDeadline, Order, OrderStatus, TransferState, TwapPlan
from rpcsvc.domain.pricing import Direction
from rpcsvc.operations.views import twap_view
from rpcsvc.strict_json import Json, dumps
from tests.unit.orders import IN_CHUNKS, NOW, XMR_UNIT, key, terms

RATE = 165_000_000
X2U, U2X = Direction


def funded(direction: Direction = X2U, plan: TwapPlan = IN_CHUNKS, funding_fee: int = 0) -> Order:
    """An order whose exact deposit has just been confirmed."""
    agreed = terms(direction, plan)
    order = open_order(replace(agreed, price=replace(agreed.price, funding_fee=funding_fee)))
    seen = ev.DepositSeen(key(1), order.terms.deposit_amount, "the sender", NOW)
    order = transition(order, seen, NOW).order
    return transition(order, ev.DepositConfirmed(key(1)), NOW + 1).order


def fill(order: Order, rate: int = RATE, now: int = NOW + 2) -> Transition:
    return transition(order, ev.ChunkFilled(len(order.fills), rate), now)


def filled(order: Order, count: int) -> Order:
    for _ in range(count):
        order = fill(order).order
    return order


def settled(order: Order) -> Transition:
    """Settle the order's payout."""
    payout = order.payout
    assert payout is not None
    for event in (
        ev.TransferPrepared(payout.transfer_id, "id", "raw"),
        ev.TransferPublished(payout.transfer_id),
    ):
        order = transition(order, event, NOW + 3).order
    return transition(order, ev.TransferSettled(payout.transfer_id), NOW + 4)


def test_deposit_is_cut_by_worth_and_the_last_chunk_has_the_rest() -> None:
    order = open_order(terms(X2U, IN_CHUNKS))
    size = XMR_UNIT * 40 // 165
    assert twap.chunks(order, XMR_UNIT) == (size, size, size, XMR_UNIT - 3 * size)
    assert twap.chunks(open_order(terms(U2X, IN_CHUNKS)), 150_000_000) == (
        40_000_000, 40_000_000, 70_000_000,
    )  # fmt: skip
    assert twap.chunks(order, size) == (size,)
    assert twap.chunks(open_order(terms()), XMR_UNIT) == (XMR_UNIT,)


def test_chunks_of_an_order_are_bounded_in_number() -> None:
    cut = twap.chunks_of(TwapPlan(250_000_000, 1_000), X2U, RATE, 10**18)
    assert (len(cut), sum(cut)) == (twap.MOST_CHUNKS, 10**18)
    assert max(cut) - min(cut) < twap.MOST_CHUNKS == 1_000


@pytest.mark.parametrize("funding_fee", [0, 77_777])
def test_payout_equals_the_predicted_sum_of_chunks_exactly(funding_fee: int) -> None:
    order = funded(funding_fee=funding_fee)
    assert order.status is OrderStatus.EXECUTING_SWAP
    rates = [165_000_000, 164_000_000, 166_500_000, 165_250_000]
    sizes = twap.chunks(order, XMR_UNIT)
    for rate in rates:
        order = fill(order, rate).order
    expected = sum(
        order.terms.price.at(rate).exchanged(X2U, size)
        for rate, size in zip(rates, sizes, strict=True)
    )
    payout = order.payout
    assert payout is not None
    assert payout.units == expected - order.terms.price.payout_fee - funding_fee
    assert payout.fee == order.terms.price.payout_fee
    assert payout.state is TransferState.PLANNED
    assert order.on_deadline is OnDeadline.REFUND
    assert settled(order).order.status is OrderStatus.COMPLETED


def test_each_chunk_leads_to_the_next_and_the_last_to_the_payout() -> None:
    order = funded()
    assert fill(order).effects == (FillChunk(1),)
    last = fill(filled(order, 3))
    assert last.effects == (AdvanceTransfer("ord_1/payout/1"),)


@pytest.mark.parametrize("index", [0, 2, -1])
def test_a_chunk_that_is_not_the_next_one_changes_nothing(index: int) -> None:
    order = filled(funded(), 1)
    with pytest.raises(ImpossibleTransition):
        transition(order, ev.ChunkFilled(index, RATE), NOW + 5)
    with pytest.raises(ImpossibleTransition):
        transition(order, ev.FillingStopped(index), NOW + 5)


def test_a_rate_under_the_orders_minimum_fills_nothing() -> None:
    order = filled(funded(), 1)
    fair = next(r for r in range(RATE, 0, -10_000) if not twap.next_fill(order, r, NOW)) + 10_000
    chunk = twap.next_fill(order, fair, NOW)
    assert chunk is not None
    assert chunk.output * order.terms.deposit_amount >= order.terms.min_received * chunk.units
    with pytest.raises(ImpossibleTransition):
        fill(order, fair - 10_000)


def test_filling_stopped_midway_pays_out_and_refunds_the_rest() -> None:
    order = filled(funded(U2X), 1)
    stopped = transition(order, ev.FillingStopped(1), NOW + 9)
    assert stopped.effects == (AdvanceTransfer("ord_1/payout/1"),)
    assert stopped.order.payout is not None
    assert stopped.order.payout.units == order.fills[0].output
    done = settled(stopped.order)
    assert done.order.status is OrderStatus.COMPLETED
    (refund,) = done.order.refunds
    assert refund.address == "the sender"
    assert refund.units + refund.fee == 150_000_000 - order.fills[0].units
    assert done.effects == (AdvanceTransfer(refund.transfer_id),)
    assert done.order.leftover == 0


def test_payout_after_a_long_wait_has_its_full_preparation_time() -> None:
    order = filled(funded(U2X), 1)
    hours_later = NOW + 10 * 3_600_000
    stopped = transition(order, ev.FillingStopped(1), hours_later).order
    due = hours_later + order.terms.timeouts.prepare
    assert (stopped.deadline_at, stopped.on_deadline) == (due, OnDeadline.REFUND)
    extra = ev.DepositSeen(key(2), 1, "other", hours_later)
    assert transition(stopped, extra, hours_later + 60_000).order.deadline_at == due


def test_leftover_xmr_waits_for_an_address_after_a_failed_refund() -> None:
    order = transition(filled(funded(), 2), ev.FillingStopped(2), NOW + 9).order
    order = settled(order).order
    assert (order.status, order.action_required) == (OrderStatus.COMPLETED, "refund_address")
    left = order.leftover
    assert left == XMR_UNIT - twap.swapped_units(order)
    given = transition(order, ev.RefundAddressGiven("mine"), NOW + 10).order
    (refund,) = given.refunds
    assert (refund.units + refund.fee, given.leftover) == (left, 0)
    failed = ev.TransferFailed(refund.transfer_id, "reverted")
    again = transition(given, failed, NOW + 11).order
    assert (again.leftover, again.action_required) == (left, "refund_address")


def test_a_filling_that_never_began_is_a_refund_of_everything() -> None:
    order = transition(funded(U2X), ev.FillingStopped(0), NOW + 9).order
    assert order.status is OrderStatus.REFUNDING
    assert order.refunds[0].units + order.refunds[0].fee == 150_000_000


def test_payout_failing_after_a_stop_refunds_the_whole_deposit() -> None:
    order = transition(filled(funded(U2X), 1), ev.FillingStopped(1), NOW + 9).order
    payout = order.payout
    assert payout is not None
    order = transition(order, ev.TransferFailed(payout.transfer_id, "no"), NOW + 10).order
    assert order.refunds[0].units + order.refunds[0].fee == 150_000_000
    assert order.leftover == 0


@pytest.mark.parametrize("chunks", [0, 2, 4])
def test_chunks_leave_with_their_deposit_until_a_signature(chunks: int) -> None:
    order = transition(filled(funded(), chunks), ev.DepositRemoved(key(1)), NOW + 9).order
    assert (order.status, order.fills) == (OrderStatus.AWAITING_DEPOSIT, ())
    back = transition(order, ev.DepositSeen(key(1), XMR_UNIT, None, NOW), NOW + 10).order
    again = transition(back, ev.DepositConfirmed(key(1)), NOW + 11)
    assert again.effects == (FillChunk(0),)
    assert again.order.fills == ()


def test_deposit_confirmed_while_filling_is_refunded_by_itself() -> None:
    order = filled(funded(U2X), 1)
    order = transition(order, ev.DepositSeen(key(2), 5_000_000, "other", NOW), NOW + 5).order
    order = transition(order, ev.DepositConfirmed(key(2)), NOW + 6).order
    assert [(r.address, r.units + r.fee) for r in order.refunds] == [("other", 5_000_000)]
    assert twap.total_of(order) == 150_000_000


def test_payout_not_prepared_in_time_is_refunded_whole() -> None:
    order = filled(funded(U2X), 3)
    assert order.deadline_at is not None
    after = transition(order, ev.DeadlinePassed(), order.deadline_at).order
    assert after.status is OrderStatus.REFUNDING
    assert after.refunds[0].units + after.refunds[0].fee == 150_000_000


def test_deadline_passed_while_filling_retries_the_next_chunk() -> None:
    order = filled(funded(), 2)
    assert order.deadline_at is not None
    assert transition(order, ev.DeadlinePassed(), order.deadline_at).effects == (FillChunk(2),)


def test_view_shows_the_progress() -> None:
    waiting = shown(open_order(terms(U2X, IN_CHUNKS)), NOW)
    assert (waiting["status"], waiting["chunksTotal"]) == ("pending", 3)
    assert waiting["estimatedTimeRemainingMs"] == 2_000
    order = filled(funded(U2X), 1)
    active = shown(order, NOW + 502)
    assert (active["status"], active["chunksCompleted"]) == ("active", 1)
    assert active["estimatedTimeRemainingMs"] == 500 + 1_000
    assert (active["filledQty"], active["totalQty"]) == (40, 150)
    done = shown(settled(filled(order, 2)).order, NOW)
    assert (done["status"], done["estimatedTimeRemainingMs"]) == ("completed", 0)
    stopped = transition(order, ev.FillingStopped(1), NOW + 9).order
    assert shown(stopped, NOW)["status"] == "failed"
    assert twap_view(replace(order, terms=terms(U2X)), NOW) is UNSET


def shown(order: Order, now: int) -> Json:
    return dict(orjson.loads(dumps(twap_view(order, now))))
