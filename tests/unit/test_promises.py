"""What open orders may still take out of the wallets."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcsvc.domain import events as ev
from rpcsvc.domain.order import Order
from rpcsvc.domain.states import Direction
from rpcsvc.domain.transition import ImpossibleTransition, open_order, transition
from rpcsvc.orders.promises import Promises, claims_of
from tests.unit.test_transition import HOUR, NOW, key, random_event, terms


def named(order_id: str, direction: Direction) -> Order:
    return open_order(replace(terms(direction), order_id=order_id))


def test_a_new_order_claims_its_output_and_the_fee_of_paying_it() -> None:
    order = named("ord_1", Direction.XMR_TO_USDC)
    fee = order.terms.price.payout_fee
    assert claims_of(order) == {"arbitrum": order.terms.expected_output + fee}


def test_a_larger_deposit_claims_more_and_itself_until_it_is_paid_out() -> None:
    order = named("ord_1", Direction.XMR_TO_USDC)
    sent = order.terms.deposit_amount * 2
    order = transition(order, ev.DepositSeen(key(1), sent, None, NOW), NOW).order
    claims = claims_of(order)
    assert claims["monero"] == sent
    assert claims["arbitrum"] > 2 * order.terms.expected_output
    order = transition(order, ev.DepositConfirmed(key(1)), NOW).order
    for event in (
        ev.TransferPrepared("ord_1/payout/1", "id", "raw"),
        ev.TransferPublished("ord_1/payout/1"),
    ):
        order = transition(order, event, NOW).order
        assert claims_of(order)["arbitrum"] == claims["arbitrum"]
    settled = transition(order, ev.TransferSettled("ord_1/payout/1"), NOW).order
    assert claims_of(settled) == {}


def test_an_expired_order_claims_nothing() -> None:
    order = named("ord_1", Direction.USDC_TO_XMR)
    assert order.deadline_at is not None
    assert claims_of(transition(order, ev.DeadlinePassed(), order.deadline_at).order) == {}


def test_an_order_that_could_not_be_committed_claims_nothing() -> None:
    promises, order = Promises(), named("ord_1", Direction.XMR_TO_USDC)
    with promises.holding(order):
        assert promises.on("arbitrum") > 0
    with (
        pytest.raises(OSError, match="full"),
        promises.holding(named("ord_2", order.terms.direction)),
    ):
        raise OSError("full")
    assert promises.on("arbitrum") == claims_of(order)["arbitrum"]


def test_an_order_whose_caller_is_cancelled_meanwhile_stays_counted() -> None:
    promises, order = Promises(), named("ord_1", Direction.XMR_TO_USDC)
    with pytest.raises(asyncio.CancelledError), promises.holding(order):
        raise asyncio.CancelledError  # its commit goes on
    assert promises.on("arbitrum") == claims_of(order)["arbitrum"]


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_the_sums_are_those_of_the_orders_whatever_happens(data: st.DataObject) -> None:
    promises = Promises()
    orders = {name: named(name, direction) for name, direction in zip("ab", Direction, strict=True)}
    now = NOW
    for fresh in range(data.draw(st.integers(1, 30))):
        now += data.draw(st.sampled_from([1, HOUR, 25 * HOUR]))
        name = data.draw(st.sampled_from("ab"))
        event = random_event(data.draw, orders[name], now, fresh)
        try:
            orders[name] = transition(orders[name], event, now).order
        except ImpossibleTransition:
            continue
        promises.note(orders[name])
        for network in ("monero", "arbitrum"):
            noted = [order for order in orders.values() if order.version > 1]
            assert promises.on(network) == sum(claims_of(o).get(network, 0) for o in noted)
