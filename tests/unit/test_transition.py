"""The order machine: an order's books balance after any sequence of events."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain import twap
from rpcsvc.domain.events import AdvanceTransfer, ImpossibleTransition, Rule, leftover_in
from rpcsvc.domain.machine import RELAYED, TRANSITIONS, open_order, transition
from rpcsvc.domain.order import (
    Deposit,
    DepositState,
    OnDeadline,
    Order,
    OrderStatus,
    Report,
    Terms,
    TransferKind,
    TransferState,
    TwapPlan,
)
from rpcsvc.domain.pricing import Direction, Price
from tests.unit.orders import HOUR, IN_CHUNKS, NOW, TIMEOUTS, XMR_UNIT, key, random_event, terms

# Every status takes an answer of the operator, and stays as it is.
ALL_EVENTS = set(get_args(ev.Event)) - {ev.SupportReplied}
# An order of each kind, and its table of transitions.
OF_OURS = pytest.param(terms(), TRANSITIONS, id="ours")
RELAYED_ONE = pytest.param(replace(terms(), upstream_id="theirs"), RELAYED, id="relayed")
Table = Mapping[OrderStatus, Mapping[type, Rule]]


def test_the_tables_cover_every_status_and_every_event() -> None:
    assert set(TRANSITIONS) == set(RELAYED) == set(OrderStatus)
    known = {
        event for table in (TRANSITIONS, RELAYED) for rules in table.values() for event in rules
    }
    assert known == ALL_EVENTS


@pytest.mark.parametrize("status", OrderStatus)
@pytest.mark.parametrize(("agreed", "table"), [OF_OURS, RELAYED_ONE])
def test_a_pair_that_is_not_in_its_table_is_refused(
    agreed: Terms, table: Table, status: OrderStatus
) -> None:
    order = replace(open_order(agreed), status=status, deadline_at=None)
    unknown = ALL_EVENTS - set(table[status])
    assert unknown, "every status refuses something"
    for event in unknown:
        with pytest.raises(ImpossibleTransition, match=f"^{event.__name__} in {status}$"):
            transition(order, event(*(None for _ in event.__struct_fields__)), NOW)


def test_a_terminal_status_has_no_rule_that_leaves_it() -> None:
    for table in (TRANSITIONS, RELAYED):
        for status, rules in table.items():
            if status.is_terminal:
                assert all(rule.targets == (status,) for rule in rules.values())


def reachable(status: OrderStatus) -> set[OrderStatus]:
    """The statuses that an own order can have after this one, by the table."""
    found, new = {status}, {status}
    while new:
        targets = {to for each in new for rule in TRANSITIONS[each].values() for to in rule.targets}
        new = targets - found
        found |= new
    return found


@pytest.mark.parametrize("status", [each for each in OrderStatus if not each.is_terminal])
def test_relayed_copy_follows_whatever_happens_between_polls(
    status: OrderStatus,
) -> None:
    copy = replace(open_order(replace(terms(), upstream_id="theirs")), status=status)
    for later in reachable(status):
        reported = ev.UpstreamReported(later, Report(error="new"))
        assert transition(copy, reported, NOW).order.status is later


def test_a_deposit_is_not_credited_twice() -> None:
    seen = ev.DepositSeen(key(1), XMR_UNIT, None, NOW)
    order = transition(open_order(terms()), seen, NOW).order
    with pytest.raises(ImpossibleTransition):
        transition(order, seen, NOW)


def test_confirmed_deposit_seen_once_more_stays_confirmed() -> None:
    seen = ev.DepositSeen(key(1), XMR_UNIT // 2, None, NOW)
    order = transition(open_order(terms()), seen, NOW).order
    order = transition(order, ev.DepositConfirmed(key(1)), NOW).order
    assert order.status is OrderStatus.DEPOSIT_DETECTED, "half of it is still awaited"
    with pytest.raises(ImpossibleTransition, match="known already"):
        transition(order, seen, NOW)


def test_cancelled_payout_can_not_be_prepared() -> None:
    order = open_order(terms())
    order = transition(order, ev.DepositSeen(key(1), XMR_UNIT, None, NOW), NOW).order
    order = transition(order, ev.DepositConfirmed(key(1)), NOW).order
    payout = order.payout
    assert payout is not None
    order = transition(order, ev.DepositRemoved(key(1)), NOW).order
    assert order.status is OrderStatus.AWAITING_DEPOSIT
    order = transition(order, ev.DepositSeen(key(2), XMR_UNIT, None, NOW), NOW).order
    order = transition(order, ev.DepositConfirmed(key(2)), NOW).order
    with pytest.raises(ImpossibleTransition):
        transition(order, ev.TransferPrepared(payout.transfer_id, "t", "r"), NOW)


def test_price_arriving_after_the_payout_is_planned_is_refused() -> None:
    order = open_order(terms())
    order = transition(order, ev.DepositSeen(key(1), XMR_UNIT, None, NOW), NOW).order
    order = transition(order, ev.DepositConfirmed(key(1)), NOW).order
    assert order.payout is not None
    with pytest.raises(ImpossibleTransition, match="planned already"):
        transition(order, ev.Repriced(165_000_000), NOW)


def test_sum_above_the_maximum_while_priced_is_refunded() -> None:
    order, late = open_order(terms()), NOW + HOUR + 1
    for n, units in ((1, XMR_UNIT), (2, order.terms.max_deposit)):
        order = transition(order, ev.DepositSeen(key(n), units, None, late), late).order
        order = transition(order, ev.DepositConfirmed(key(n)), late).order
    assert order.status is OrderStatus.DEPOSIT_CONFIRMED
    order = transition(order, ev.Repriced(order.terms.price.rate), late).order
    assert order.status is OrderStatus.REFUNDING
    assert order.error_message == "The deposits are above the maximum."


@pytest.mark.parametrize(("agreed", "table"), [OF_OURS, RELAYED_ONE])
def test_a_deadline_does_not_pass_a_millisecond_before_its_time(
    agreed: Terms, table: Table
) -> None:
    order = open_order(agreed)
    due = order.deadline_at
    assert due is not None
    with pytest.raises(ImpossibleTransition, match="deadline of ord_1 is not over"):
        transition(order, ev.DeadlinePassed(), due - 1)
    passed = transition(order, ev.DeadlinePassed(), due).order
    assert passed.status in table[order.status][ev.DeadlinePassed].targets


def test_relayed_order_without_end_has_a_deadline_and_few_events() -> None:
    order, year = open_order(replace(terms(), upstream_id="theirs")), 365 * 24 * HOUR
    assert order.deadline_at == NOW + TIMEOUTS.payout_check
    while (due := order.deadline_at) is not None and due < NOW + year:
        order = transition(order, ev.DeadlinePassed(), due).order
    assert order.deadline_at is not None
    assert order.on_deadline is OnDeadline.ASK_UPSTREAM
    assert order.version <= 20


def test_relayed_order_that_moved_on_is_polled_like_a_new_one() -> None:
    order, later = open_order(replace(terms(), upstream_id="theirs")), NOW + 24 * HOUR
    moved = transition(order, ev.UpstreamReported(OrderStatus.DEPOSIT_DETECTED, Report()), later)
    assert moved.order.deadline_at == later + TIMEOUTS.payout_check


def test_a_deadline_does_not_pass_twice() -> None:
    order = open_order(terms())
    assert order.deadline_at == NOW + HOUR + HOUR // 4
    expired = transition(order, ev.DeadlinePassed(), order.deadline_at).order
    assert (expired.status, expired.deadline_at) == (OrderStatus.EXPIRED, None)
    with pytest.raises(ImpossibleTransition, match="DeadlinePassed in expired"):
        transition(expired, ev.DeadlinePassed(), order.deadline_at)


def test_deadline_postponed_by_the_last_chunk_cancels_no_payout() -> None:
    order = open_order(terms(twap_plan=IN_CHUNKS))
    order = transition(order, ev.DepositSeen(key(1), XMR_UNIT, None, NOW), NOW).order
    order = transition(order, ev.DepositConfirmed(key(1)), NOW).order
    while_filling = NOW + TIMEOUTS.payout_check
    assert (order.deadline_at, order.on_deadline) == (while_filling, OnDeadline.REPUBLISH)
    last = len(twap.chunks(order, XMR_UNIT)) - 1
    for index in range(last):
        order = transition(order, ev.ChunkFilled(index, 165_000_000), NOW).order
    assert order.deadline_at == while_filling
    # The deadline has passed, and the last chunk is filled before the event is applied.
    order = transition(order, ev.ChunkFilled(last, 165_000_000), while_filling).order
    assert order.payout is not None
    assert (order.payout.state, order.on_deadline) == (TransferState.PLANNED, OnDeadline.REFUND)

    with pytest.raises(ImpossibleTransition, match="is not over"):
        transition(order, ev.DeadlinePassed(), while_filling)

    due = while_filling + TIMEOUTS.prepare
    assert order.deadline_at == due
    late = transition(order, ev.DeadlinePassed(), due).order
    assert late.status is OrderStatus.REFUNDING
    assert late.transfers[0].state is TransferState.CANCELLED


@settings(max_examples=200, deadline=None)
@given(st.data(), st.sampled_from(Direction), st.sampled_from([None, IN_CHUNKS]))
def test_the_books_balance_whatever_happens(
    data: st.DataObject, direction: Direction, twap_plan: TwapPlan | None
) -> None:
    order, now = open_order(terms(direction, twap_plan)), NOW
    for fresh in range(data.draw(st.integers(1, 40 if twap_plan else 25))):
        now += data.draw(st.sampled_from([1, 60_000, HOUR, 25 * HOUR]))
        event = random_event(data.draw, order, now, fresh)
        try:
            result = transition(order, event, now)
        except ImpossibleTransition:
            continue
        check_step(order, result.order)
        live = {t.transfer_id for t in result.order.transfers if not t.state.is_final}
        assert {e.transfer_id for e in result.effects if hasattr(e, "transfer_id")} <= live
        order = result.order
    check_end(order, now)


def check_step(before: Order, after: Order) -> None:
    assert after.version == before.version + 1
    if before.status.is_terminal:
        assert after.status is before.status
    assert (after.deadline_at is None) == after.status.is_terminal
    assert (after.on_deadline is None) == after.status.is_terminal
    payouts = [t for t in after.transfers if t.kind is TransferKind.PAYOUT]
    gone = (TransferState.FAILED, TransferState.CANCELLED)
    assert sum(t.state not in gone for t in payouts) <= 1
    for transfer in after.transfers:
        check_transfer(after, transfer.transfer_id)
    check_chunks(before, after)
    if after.unspent and (after.status.is_terminal or after.status is OrderStatus.REFUNDING):
        assert after.action_required == "refund_address", "money that nobody sends back"
    for transfer in before.transfers:
        now = after.transfer(transfer.transfer_id)
        assert now is not None
        assert (now.address, now.units, now.fee) == (transfer.address, transfer.units, transfer.fee)
        if transfer.state.is_final:
            assert now.state is transfer.state


def check_chunks(before: Order, after: Order) -> None:
    """A chunk is filled once and at a fair rate; the rest can still be refunded."""
    grown = after.fills[: len(before.fills)] == before.fills
    assert len(after.fills) - len(before.fills) in (0, 1) if grown else not after.fills
    least = after.terms.min_received
    for fill in after.fills:
        assert fill.output * after.terms.deposit_amount >= least * fill.units
    payout = after.payout
    if payout is None or not after.fills or payout.state is TransferState.FAILED:
        return
    assert payout.units == sum(fill.output for fill in after.fills)
    spent = [d for d in after.deposits if d.transfer_id == payout.transfer_id]
    rest = sum(d.units for d in spent) - twap.swapped_units(after)
    back = after.leftover + sum(
        leftover_in(after, t.transfer_id)
        for t in after.refunds
        if t.state not in (TransferState.FAILED, TransferState.CANCELLED)
    )
    assert rest >= 0
    assert back == rest if all(d.is_active for d in spent) else back <= rest


def check_transfer(order: Order, transfer_id: str) -> None:
    transfer = order.transfer(transfer_id)
    assert transfer is not None
    taken = sum(d.units for d in order.deposits if d.transfer_id == transfer_id)
    if transfer.state in (TransferState.FAILED, TransferState.CANCELLED):
        assert taken == 0
    elif transfer.kind is TransferKind.REFUND:
        leftover = transfer.units + transfer.fee - taken
        assert leftover == 0 or (leftover > 0 and order.fills)
        assert transfer.address != order.terms.to_address
    else:
        assert transfer.address == order.terms.to_address
        assert 0 < taken <= order.terms.max_deposit


def check_end(order: Order, now: int) -> None:
    """No order waits for ever: its deadlines lead to an end, or it asks for an input.

    An unconfirmed deposit may be waited for: its chain confirms or drops it.
    """
    for _ in range(40):
        if order.deadline_at is None:
            return
        now = max(now, order.deadline_at)
        order = transition(order, ev.DeadlinePassed(), now).order
    if twap.is_filling(order):  # the runner retries each chunk until its abandon timeout
        order = transition(order, ev.FillingStopped(len(order.fills)), now).order
    in_flight = any(not t.state.is_final for t in order.transfers)
    on_its_way = any(d.state is DepositState.SEEN for d in order.deposits)
    assert in_flight or on_its_way or order.action_required == "refund_address"


def test_vanishing_deposit_takes_no_other_out_of_a_refund() -> None:
    order = open_order(terms(Direction.XMR_TO_USDC))
    small = order.terms.min_deposit // 3
    for name in (1, 2):
        order = transition(order, ev.DepositSeen(key(name), small, None, NOW), NOW).order
        order = transition(order, ev.DepositConfirmed(key(name)), NOW).order
    order = transition(order, ev.DeadlinePassed(), order.terms.expires_at).order
    order = transition(order, ev.RefundAddressGiven("home"), order.terms.expires_at).order

    after = transition(order, ev.DepositRemoved(key(1)), order.terms.expires_at)

    (refund,) = [t for t in after.order.refunds if t.state is TransferState.PLANNED]
    assert refund.units == small - order.terms.refund_fee
    assert AdvanceTransfer(refund.transfer_id) in after.effects


@given(st.integers(1, 10**16), st.integers(10**6, 10**10), st.sampled_from(Direction))
def test_no_more_is_paid_out_than_the_rate_gives(
    units: int, rate: int, direction: Direction
) -> None:
    price = Price(rate, 50, 1_000, 9_900)
    output = price.output(direction, units)
    exact = units * rate if direction is Direction.XMR_TO_USDC else units * XMR_UNIT * XMR_UNIT
    scale = XMR_UNIT if direction is Direction.XMR_TO_USDC else rate * XMR_UNIT
    assert output * scale <= exact
    assert price.min_received(direction, units) <= output


@given(st.integers(0, 10**9), st.integers(10**6, 10**10), st.sampled_from(Direction))
def test_the_least_deposit_is_the_first_that_brings_anything(
    fee: int, rate: int, direction: Direction
) -> None:
    price = Price(rate, 50, fee, 9_900)
    least = price.deposit_for(direction, 1)
    assert price.output(direction, least) > 0
    assert price.output(direction, least - 1) == 0


def test_an_exact_deposit_is_paid_what_was_quoted() -> None:
    for direction in Direction:
        order = open_order(terms(direction))
        amount = order.terms.deposit_amount
        order = transition(order, ev.DepositSeen(key(1), amount, None, NOW), NOW).order
        order = transition(order, ev.DepositConfirmed(key(1)), NOW + 1).order
        assert order.payout is not None
        assert order.payout.units == order.terms.expected_output
        assert order.deposits[0].state is DepositState.CONFIRMED


@pytest.mark.parametrize(
    ("changes", "unpaid"),
    [
        ({}, True),
        ({"report": Report()}, True),
        ({"report": Report(deposit_txid="tx")}, False),
        ({"deposits": (Deposit(key(1), 1, None, NOW, DepositState.REMOVED),)}, False),
        ({"status": OrderStatus.REFUNDED}, False),
    ],
)
def test_only_an_expired_order_that_saw_no_deposit_ended_unpaid(
    changes: dict[str, Any], unpaid: bool
) -> None:
    order = replace(open_order(terms(Direction.XMR_TO_USDC)), status=OrderStatus.EXPIRED)
    assert replace(order, **changes).ended_unpaid is unpaid
