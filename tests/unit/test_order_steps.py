"""Steps of the order machine: what each transfer event changes, and each status's deadline."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain import machine
from rpcsvc.domain.events import AdvanceTransfer, FillChunk, ImpossibleTransition, order_of
from rpcsvc.domain.machine import open_order, transition
from rpcsvc.domain.order import (
    DepositState,
    OnDeadline,
    Order,
    OrderReason,
    OrderStatus,
    Report,
    Terms,
    Transfer,
    TransferState,
)
from rpcsvc.domain.pricing import Direction
from tests.unit.orders import HOUR, IN_CHUNKS, NOW, TIMEOUTS, XMR_UNIT, key, terms

S, T = OrderStatus, TransferState
PAYOUT, REFUND = "ord_1/payout/1", "ord_1/refund/1"
AMOUNT = terms().deposit_amount


def after(order: Order, *events: ev.Event, now: int = NOW) -> Order:
    for event in events:
        order = transition(order, event, now).order
    return order


def funded(units: int = AMOUNT, agreed: Terms | None = None) -> Order:
    """An order with one confirmed deposit, decided upon."""
    seen = ev.DepositSeen(key(1), units, "sender", NOW)
    return after(open_order(agreed or terms()), seen, ev.DepositConfirmed(key(1)))


def refunding(agreed: Terms | None = None) -> Order:
    """An order whose one deposit is above the maximum and goes back."""
    agreed = replace(agreed or terms(), refund_address="back here")
    return funded(agreed.max_deposit + 1, agreed)


def transfer(order: Order, transfer_id: str) -> Transfer:
    found = order.transfer(transfer_id)
    assert found is not None
    return found


def events_for(transfer_id: str) -> dict[TransferState, ev.Event]:
    return {
        T.PREPARED: ev.TransferPrepared(transfer_id, "tx", "raw"),
        T.PUBLISHED: ev.TransferPublished(transfer_id),
        T.UNKNOWN: ev.TransferUnknown(transfer_id, "no answer"),
        T.SETTLED: ev.TransferSettled(transfer_id, "receipt"),
        T.FAILED: ev.TransferFailed(transfer_id, "reverted"),
    }


@pytest.mark.parametrize(("order", "name"), [(funded(), PAYOUT), (refunding(), REFUND)])
def test_transfer_keeps_what_each_step_says_of_it(order: Order, name: str) -> None:
    steps = events_for(name)
    planned = transfer(order, name)
    signed = after(order, steps[T.PREPARED])
    prepared = replace(planned, state=T.PREPARED, txid="tx", raw="raw")
    assert transfer(signed, name) == prepared
    unknown = after(signed, steps[T.UNKNOWN])
    assert transfer(unknown, name) == replace(prepared, state=T.UNKNOWN, reason="no answer")
    published = after(unknown, steps[T.PUBLISHED])
    assert transfer(published, name) == replace(prepared, state=T.PUBLISHED)
    doubted = after(published, steps[T.UNKNOWN])
    assert transfer(doubted, name) == replace(prepared, state=T.UNKNOWN, reason="no answer")
    for state in (signed, unknown, published):
        settled = transfer(after(state, steps[T.SETTLED]), name)
        assert settled == replace(prepared, state=T.SETTLED, receipt="receipt")
        failed = transfer(after(state, steps[T.FAILED]), name)
        assert failed == replace(prepared, state=T.FAILED, reason="reverted")
    unsigned = transfer(after(order, steps[T.FAILED]), name)
    assert unsigned == replace(planned, state=T.FAILED, reason="reverted")


@pytest.mark.parametrize(("order", "name"), [(funded(), PAYOUT), (refunding(), REFUND)])
def test_transfer_takes_no_step_out_of_turn(order: Order, name: str) -> None:
    steps = events_for(name)
    states = {
        T.PLANNED: order,
        T.PREPARED: after(order, steps[T.PREPARED]),
        T.PUBLISHED: after(order, steps[T.PREPARED], steps[T.PUBLISHED]),
        T.UNKNOWN: after(order, steps[T.PREPARED], steps[T.UNKNOWN]),
        T.SETTLED: after(order, steps[T.PREPARED], steps[T.SETTLED]),
        T.FAILED: after(order, steps[T.PREPARED], steps[T.FAILED]),
    }
    allowed = {
        T.PREPARED: {T.PLANNED},
        T.PUBLISHED: {T.PREPARED, T.UNKNOWN},
        T.UNKNOWN: {T.PREPARED, T.PUBLISHED},
        T.SETTLED: {T.PREPARED, T.PUBLISHED, T.UNKNOWN},
        T.FAILED: {T.PLANNED, T.PREPARED, T.PUBLISHED, T.UNKNOWN},
    }
    for step, event in steps.items():
        for state, reached in states.items():
            if state not in allowed[step]:
                with pytest.raises(
                    ImpossibleTransition, match=rf"{name} is {state}|in {reached.status}"
                ):
                    transition(reached, event, NOW)


def test_step_of_an_unknown_transfer_is_refused() -> None:
    for event in events_for("ord_1/payout/9").values():
        with pytest.raises(ImpossibleTransition, match=r"ord_1/payout/9 is absent|in deposit"):
            transition(funded(), event, NOW)


def test_order_follows_its_payout() -> None:
    steps = events_for(PAYOUT)
    order = funded()
    assert order.status is S.DEPOSIT_CONFIRMED
    order = after(order, steps[T.PREPARED])
    assert order.status is S.EXECUTING_SWAP
    done = after(order, steps[T.SETTLED], now=NOW + 9)
    assert (done.status, done.completed_at, done.status_at) == (S.COMPLETED, NOW + 9, NOW + 9)
    assert (done.deadline_at, done.on_deadline) == (None, None)
    failed = after(order, steps[T.FAILED])
    assert (failed.status, failed.action_required) == (S.REFUNDING, "refund_address")
    assert failed.error_message == OrderReason.PAYOUT_FAILED.text
    assert failed.deposits[0].transfer_id is None
    assert order_of(PAYOUT) == "ord_1"


@pytest.mark.parametrize("status", [S.AWAITING_DEPOSIT, S.DEPOSIT_DETECTED])
def test_signed_refund_of_an_undecided_order_decides_nothing(status: OrderStatus) -> None:
    rules = machine.TRANSITIONS[status]
    for event in (ev.TransferPublished, ev.TransferUnknown, ev.TransferSettled):
        assert rules[event].targets == (status,)


def test_every_event_is_a_version() -> None:
    order = funded()
    assert (open_order(terms()).version, order.version) == (1, 3)
    assert after(order, ev.TransferPrepared(PAYOUT, "tx", "raw")).version == 4


def test_failed_refund_waits_for_the_operator_and_is_tried_again() -> None:
    order = after(refunding(), *[events_for(REFUND)[step] for step in (T.PREPARED, T.FAILED)])
    assert (order.status, order.action_required) == (S.REFUNDING, "refund_blocked")
    assert order.deadline_at == NOW + TIMEOUTS.refund_reminder
    assert order.on_deadline is OnDeadline.REMIND
    again = transition(order, ev.RefundRetried(), NOW)
    assert again.effects == (AdvanceTransfer("ord_1/refund/2"),)
    assert again.order.action_required is None
    done = after(again.order, *[events_for("ord_1/refund/2")[s] for s in (T.PREPARED, T.SETTLED)])
    assert done.status is S.REFUNDED


# --- deadlines -------------------------------------------------------------------------------


def deadline(order: Order) -> tuple[int | None, OnDeadline | None]:
    return order.deadline_at, order.on_deadline


def test_order_without_a_deposit_ends_after_the_late_window() -> None:
    order = open_order(terms())
    over = NOW + HOUR + TIMEOUTS.late_window
    assert deadline(order) == (over, OnDeadline.EXPIRE)
    late = after(
        order, ev.DepositSeen(key(1), 5, None, over - 1), ev.DepositRemoved(key(1)), now=over - 1
    )
    assert deadline(late) == (over - 1 + TIMEOUTS.late_window, OnDeadline.EXPIRE)


def test_order_with_a_part_waits_for_the_rest_until_it_expires() -> None:
    part, whole = (
        after(open_order(terms()), ev.DepositSeen(key(1), units, None, NOW))
        for units in (AMOUNT - 1, AMOUNT)
    )
    assert deadline(part) == (NOW + HOUR, OnDeadline.SWAP_OR_REFUND)
    assert deadline(whole) == (NOW + TIMEOUTS.confirm, OnDeadline.SWAP_OR_REFUND)
    for at, expected in ((NOW + HOUR - 1, NOW + HOUR), (NOW + HOUR, NOW + HOUR + TIMEOUTS.confirm)):
        late = after(open_order(terms()), ev.DepositSeen(key(1), 5, None, at), now=at)
        assert deadline(late) == (expected, OnDeadline.SWAP_OR_REFUND)


def test_unsigned_payout_is_cancelled_at_its_deadline() -> None:
    order = funded()
    assert deadline(order) == (NOW + TIMEOUTS.prepare, OnDeadline.REFUND)
    later = after(order, ev.DepositSeen(key(2), 5, None, NOW + 1), now=NOW + 1)
    assert deadline(later) == (NOW + TIMEOUTS.prepare, OnDeadline.REFUND)
    over = after(order, ev.DeadlinePassed(), now=NOW + TIMEOUTS.prepare)
    assert over.error_message == OrderReason.PAYOUT_NOT_PREPARED.text
    assert (over.status, transfer(over, PAYOUT).state) == (S.REFUNDING, T.CANCELLED)
    with pytest.raises(ImpossibleTransition, match="deadline of ord_1 is not over"):
        transition(order, ev.DeadlinePassed(), NOW + TIMEOUTS.prepare - 1)


def test_signed_payout_is_looked_at_again_and_again() -> None:
    order = after(funded(), ev.TransferPrepared(PAYOUT, "tx", "raw"))
    first = NOW + TIMEOUTS.payout_check
    assert deadline(order) == (first, OnDeadline.REPUBLISH)
    later = after(order, ev.TransferPublished(PAYOUT), now=NOW + 1)
    assert deadline(later) == (first, OnDeadline.REPUBLISH)
    again = transition(later, ev.DeadlinePassed(), first)
    assert again.effects == (AdvanceTransfer(PAYOUT),)
    assert deadline(again.order) == (first + TIMEOUTS.payout_check, OnDeadline.REPUBLISH)


def test_refund_is_looked_at_again_and_again() -> None:
    order = refunding()
    first = NOW + TIMEOUTS.payout_check
    assert deadline(order) == (first, OnDeadline.REPUBLISH)
    again = transition(order, ev.DeadlinePassed(), first)
    assert again.effects == (AdvanceTransfer(REFUND),)
    assert deadline(again.order) == (first + TIMEOUTS.payout_check, OnDeadline.REPUBLISH)


# --- chunks ----------------------------------------------------------------------------------

RATE = 165_000_000


def filling() -> Order:
    return funded(XMR_UNIT, terms(twap_plan=IN_CHUNKS))


def test_chunks_follow_each_other_and_end_in_a_payout() -> None:
    order = filling()
    again = transition(order, ev.DeadlinePassed(), order.deadline_at or 0)
    assert again.effects == (FillChunk(0),)
    moved = transition(order, ev.ChunkFilled(0, RATE), NOW)
    assert moved.effects == (FillChunk(1),)
    order = moved.order
    again = transition(order, ev.DeadlinePassed(), order.deadline_at or 0)
    assert again.effects == (FillChunk(1),)
    price = replace(order.terms.price, integrator_bps=100)
    agreed = replace(order.terms, price=price, min_received=1)
    order = replace(filling(), terms=agreed)
    for index in range(4):
        order = after(order, ev.ChunkFilled(index, RATE))
    payout = transfer(order, PAYOUT)
    assert payout.units == sum(fill.output for fill in order.fills)
    assert payout.integrator_fee == sum(fill.integrator_fee for fill in order.fills) > 0
    assert deadline(order) == (NOW + TIMEOUTS.prepare, OnDeadline.REFUND)
    seen = after(order, ev.DepositSeen(key(2), 5, None, NOW + 1), now=NOW + 1)
    assert deadline(seen) == (NOW + TIMEOUTS.prepare, OnDeadline.REFUND)
    unsigned = after(order, ev.DeadlinePassed(), now=NOW + TIMEOUTS.prepare)
    assert unsigned.error_message == OrderReason.PAYOUT_NOT_PREPARED.text
    assert unsigned.leftover == 0


def test_filling_that_stops_says_if_a_part_was_swapped() -> None:
    none = transition(filling(), ev.FillingStopped(0), NOW).order
    assert none.error_message == OrderReason.RATE_FELL.text
    assert (none.payout, none.deposits[0].transfer_id) == (None, None)
    order = after(filling(), ev.ChunkFilled(0, RATE), ev.FillingStopped(1))
    assert order.error_message == OrderReason.RATE_FELL_MIDWAY.text
    assert order.leftover == XMR_UNIT - order.fills[0].units
    assert transfer(order, PAYOUT).units == order.fills[0].output
    for event in (ev.FillingStopped(0), ev.ChunkFilled(0, RATE)):
        with pytest.raises(ImpossibleTransition, match="chunk 0 is not the next"):
            transition(order, event, NOW)


def test_unsigned_payout_of_some_chunks_is_refunded_whole() -> None:
    agreed = replace(terms(twap_plan=IN_CHUNKS), refund_address="back here")
    order = after(funded(XMR_UNIT, agreed), ev.ChunkFilled(0, RATE), ev.FillingStopped(1))
    assert order.leftover > 0
    over = after(order, ev.DeadlinePassed(), now=order.deadline_at or 0)
    assert over.leftover == 0
    assert transfer(over, REFUND).units == XMR_UNIT - agreed.refund_fee


def test_leftover_goes_back_once_the_payout_is_settled() -> None:
    agreed = replace(terms(twap_plan=IN_CHUNKS), refund_address="back here")
    order = after(
        funded(XMR_UNIT, agreed), ev.ChunkFilled(0, RATE), ev.FillingStopped(1),
        ev.TransferPrepared(PAYOUT, "tx", "raw"),
    )  # fmt: skip
    assert order.leftover > 0
    done = transition(order, ev.TransferSettled(PAYOUT), NOW)
    assert done.effects == (AdvanceTransfer(REFUND),)
    refund = transfer(done.order, REFUND)
    assert refund.units == order.leftover - agreed.refund_fee
    assert (refund.fee, refund.address, done.order.leftover) == (agreed.refund_fee, "back here", 0)
    failed = after(order, ev.TransferFailed(PAYOUT, "reverted"))
    assert failed.leftover == 0
    assert transfer(failed, REFUND).units == XMR_UNIT - agreed.refund_fee


# --- losses ----------------------------------------------------------------------------------


def test_lost_deposit_is_told_once_and_only_while_it_is_gone() -> None:
    done = after(funded(), *[events_for(PAYOUT)[step] for step in (T.PREPARED, T.SETTLED)])
    lost = after(done, ev.DepositRemoved(key(1)))
    text = OrderReason.DEPOSIT_LOST.text
    assert lost.error_message == text
    assert lost.deposits[0].state is DepositState.REMOVED
    back = after(lost, ev.DepositSeen(key(1), AMOUNT, "sender", NOW))
    assert back.error_message is None
    said = replace(done, error_message="Something else.")
    lost = after(said, ev.DepositRemoved(key(1)))
    assert lost.error_message == f"Something else. {text}"
    back = after(lost, ev.DepositSeen(key(1), AMOUNT, "sender", NOW))
    assert back.error_message == "Something else."


def test_message_without_a_loss_is_kept_to_the_letter() -> None:
    done = after(funded(), *[events_for(PAYOUT)[step] for step in (T.PREPARED, T.SETTLED)])
    said = replace(done, error_message="Two  spaces.")
    assert after(said, ev.DepositSeen(key(2), 5, None, NOW)).error_message == "Two  spaces."
    text = OrderReason.DEPOSIT_LOST.text
    for message in (f"{text} It rained.", f"{text} It rained. {text}"):
        lost = after(replace(done, error_message=message), ev.DepositRemoved(key(1)))
        assert lost.error_message == f"It rained. {text}"


# --- orders that an upstream settles ---------------------------------------------------------


def relayed() -> Order:
    return open_order(replace(terms(Direction.USDC_TO_XMR), upstream_id="theirs"))


def test_report_is_recorded_as_it_is() -> None:
    report = Report(deposit_txid="tx", output=5, error="It is slow.")
    order = after(relayed(), ev.UpstreamReported(S.EXECUTING_SWAP, report), now=NOW + 5)
    assert (order.status, order.report, order.error_message) == (
        S.EXECUTING_SWAP, report, "It is slow.",
    )  # fmt: skip
    assert deadline(order) == (NOW + 5 + TIMEOUTS.payout_check, OnDeadline.ASK_UPSTREAM)
    with pytest.raises(ImpossibleTransition, match="nothing new"):
        transition(order, ev.UpstreamReported(S.EXECUTING_SWAP, report), NOW)
    more = after(order, ev.UpstreamReported(S.EXECUTING_SWAP, replace(report, output=6)))
    assert more.report == replace(report, output=6)


def test_deadline_of_a_relayed_order_is_put_off() -> None:
    order, asked = relayed(), NOW + TIMEOUTS.payout_check
    assert deadline(order) == (asked, OnDeadline.ASK_UPSTREAM)
    late = NOW + 5 * TIMEOUTS.payout_check
    moved = transition(order, ev.DeadlinePassed(), late)
    assert moved.effects == ()
    assert deadline(moved.order) == (late + 5 * TIMEOUTS.payout_check, OnDeadline.ASK_UPSTREAM)


def test_relayed_order_that_is_over_has_no_deadline() -> None:
    order = after(relayed(), ev.UpstreamReported(S.COMPLETED, Report()), now=NOW + 3)
    assert deadline(order) == (None, None)
    assert order.completed_at == NOW + 3


def test_money_that_goes_back_is_not_swapped_upstream() -> None:
    order = after(relayed(), ev.UpstreamReported(S.REFUNDING, Report()))
    for status in set(S) - {S.REFUNDING, S.REFUNDED, S.FAILED}:
        with pytest.raises(ImpossibleTransition, match=f"{status} can't follow refunding"):
            transition(order, ev.UpstreamReported(status, Report(output=1)), NOW)
    for status in (S.REFUNDING, S.REFUNDED, S.FAILED):
        moved = after(order, ev.UpstreamReported(status, Report(output=1)))
        assert moved.status is status


# --- deposits that go ------------------------------------------------------------------------


def removed(order: Order, n: int) -> Order:
    return after(order, ev.DepositRemoved(key(n)))


def with_extra(order: Order) -> Order:
    """The same with a further deposit, confirmed after the decision, by nobody known."""
    return after(order, ev.DepositSeen(key(2), 70, None, NOW), ev.DepositConfirmed(key(2)))


def test_removal_cancels_only_the_payout_that_it_concerns() -> None:
    agreed = replace(terms(), refund_fee=10)
    order = with_extra(funded(agreed=agreed))
    assert order.action_required == "refund_address"
    without_extra = removed(order, 2)
    assert transfer(without_extra, PAYOUT).state is T.PLANNED
    assert (without_extra.action_required, without_extra.status) == (None, S.DEPOSIT_CONFIRMED)
    without_payout = removed(order, 1)
    assert transfer(without_payout, PAYOUT).state is T.CANCELLED
    assert without_payout.status is S.DEPOSIT_DETECTED
    assert (without_payout.action_required, without_payout.leftover) == (None, 0)
    assert removed(funded(), 1).status is S.AWAITING_DEPOSIT


def test_removal_of_an_extra_deposit_changes_no_signed_payout() -> None:
    agreed = replace(terms(), refund_fee=10, refund_address="back here")
    signed = after(with_extra(funded(agreed=agreed)), ev.TransferPrepared(PAYOUT, "tx", "raw"))
    assert transfer(signed, REFUND).state is T.PLANNED
    gone = removed(signed, 2)
    assert transfer(gone, REFUND).state is T.CANCELLED
    assert transfer(gone, PAYOUT) == transfer(signed, PAYOUT)
    assert gone.error_message is None
    lost = removed(signed, 1)
    assert transfer(lost, PAYOUT) == transfer(signed, PAYOUT)
    assert lost.error_message == OrderReason.DEPOSIT_LOST.text


def test_leftover_is_withheld_once_its_deposits_are_gone() -> None:
    agreed = replace(
        terms(twap_plan=IN_CHUNKS), refund_address="back here", max_deposit=100 * XMR_UNIT
    )
    order = after(
        open_order(agreed),
        ev.DepositSeen(key(1), XMR_UNIT // 2, None, NOW),
        ev.DepositSeen(key(2), XMR_UNIT // 2, None, NOW),
        ev.DepositConfirmed(key(1)), ev.DepositConfirmed(key(2)),
        ev.ChunkFilled(0, RATE), ev.FillingStopped(1),
        ev.TransferPrepared(PAYOUT, "tx", "raw"), ev.TransferSettled(PAYOUT),
    )  # fmt: skip
    swapped = order.fills[0].units
    assert transfer(order, REFUND).units + agreed.refund_fee == XMR_UNIT - swapped
    half = removed(order, 2)
    assert transfer(half, REFUND).state is T.CANCELLED
    again = transfer(half, "ord_1/refund/2")
    assert again.units + agreed.refund_fee == XMR_UNIT // 2 - swapped
    none = removed(half, 1)
    assert transfer(none, "ord_1/refund/2").state is T.CANCELLED
    assert (none.leftover, len(none.refunds)) == (0, 2)
    back = after(none, ev.DepositSeen(key(1), XMR_UNIT // 2, None, NOW))
    assert back.leftover == XMR_UNIT // 2 - swapped
    other = after(order, ev.DepositSeen(key(3), 5, None, NOW))
    assert removed(other, 3).transfers == order.transfers
    signed = after(order, ev.TransferPrepared(REFUND, "tx", "raw"))
    kept = removed(signed, 2)
    assert transfer(kept, REFUND).state is T.PREPARED
    assert kept.leftover == 0


def test_chunks_of_a_removed_deposit_are_undone() -> None:
    order = after(filling(), ev.ChunkFilled(0, RATE))
    gone = removed(order, 1)
    assert (gone.status, gone.fills, gone.leftover) == (S.AWAITING_DEPOSIT, (), 0)
    extra = with_extra(order)
    kept = removed(extra, 2)
    assert (kept.status, kept.fills) == (S.EXECUTING_SWAP, order.fills)
    again = removed(extra, 1)
    assert (again.status, again.fills) == (S.DEPOSIT_DETECTED, ())
    planned = after(order, ev.FillingStopped(1))
    undone = removed(planned, 1)
    assert transfer(undone, PAYOUT).state is T.CANCELLED
    assert (undone.status, undone.fills, undone.leftover) == (S.AWAITING_DEPOSIT, (), 0)
    assert undone.error_message is None
    back = after(
        undone, ev.DepositSeen(key(1), XMR_UNIT, "sender", NOW), ev.DepositConfirmed(key(1))
    )
    assert (back.status, back.fills) == (S.EXECUTING_SWAP, ())
