"""Orders with an agreed refund address are refunded to that address only."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.events import ImpossibleTransition
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.order import Order, OrderStatus, TransferState
from rpcsvc.domain.pricing import Direction
from rpcsvc.orders.payouts import _is_agreed
from tests.unit.funded_orders import LATER, after, seen
from tests.unit.orders import HOUR, XMR_UNIT, key, terms

OVER = LATER + HOUR


def _expired(direction: Direction, agreed: str | None) -> Order:
    fresh = open_order(replace(terms(direction), refund_address=agreed))
    return after(fresh, ev.DeadlinePassed(), now=OVER)


def _late(order: Order, n: int, units: int, sender: str | None = None) -> Order:
    came = ev.DepositSeen(key(n), units, sender, OVER)
    return after(order, came, ev.DepositConfirmed(key(n)), now=OVER)


@pytest.mark.parametrize("direction", list(Direction))
def test_every_refund_goes_to_the_agreed_address(direction: Direction) -> None:
    order = _expired(direction, "agreed")
    for n, sender in enumerate(("payer", "somebody else")):
        order = _late(order, n, XMR_UNIT, sender if order.terms.senders_can_be_refunded else None)

    assert [refund.address for refund in order.refunds] == ["agreed", "agreed"]
    assert order.action_required is None
    assert all(_is_agreed(order, refund) for refund in order.refunds)


def test_overpaid_orders_are_refunded_to_the_agreed_address() -> None:
    agreed = replace(terms(), refund_address="agreed")
    order = open_order(agreed)
    for n in range(2):  # the first is more than any order may be
        order = after(order, seen(n, agreed.max_deposit + 1), ev.DepositConfirmed(key(n)))

    assert order.status is OrderStatus.REFUNDING
    assert {refund.address for refund in order.refunds} == {"agreed"}
    with pytest.raises(ImpossibleTransition):
        after(order, ev.RefundAddressGiven("thief"))


def test_refund_is_signed_to_the_agreed_address_only() -> None:
    order = _late(_expired(Direction.USDC_TO_XMR, "agreed"), 0, XMR_UNIT, "payer")
    tampered = replace(order, refund_address="thief")

    assert not _is_agreed(tampered, replace(order.refunds[0], address="thief"))
    assert not _is_agreed(tampered, replace(order.refunds[0], address="payer"))


def test_a_refused_agreed_address_waits_for_the_operator_alone() -> None:
    order = _late(_expired(Direction.USDC_TO_XMR, "agreed"), 0, XMR_UNIT, "payer")
    order = after(order, ev.TransferFailed("ord_1/refund/1", "blacklisted"), now=OVER)
    assert order.action_required == "refund_blocked"
    with pytest.raises(ImpossibleTransition):
        after(order, ev.RefundAddressGiven("thief"), now=OVER)

    order = after(order, ev.RefundRetried(), now=OVER)

    assert order.action_required is None
    assert (order.refunds[-1].address, order.refunds[-1].state) == ("agreed", TransferState.PLANNED)
    with pytest.raises(ImpossibleTransition):
        after(order, ev.RefundRetried(), now=OVER)


def test_a_later_named_address_takes_no_refund_of_another_sender() -> None:
    """An address named later applies to the failed refund only, not to the victim's deposit."""
    order = _late(_expired(Direction.USDC_TO_XMR, None), 0, XMR_UNIT, "attacker")
    order = after(order, ev.TransferFailed("ord_1/refund/1", "blacklisted"), now=OVER)
    order = after(order, ev.RefundAddressGiven("attacker 2"), now=OVER)
    order = _late(order, 1, XMR_UNIT, "victim")

    assert [refund.address for refund in order.refunds] == ["attacker", "attacker 2", "victim"]
