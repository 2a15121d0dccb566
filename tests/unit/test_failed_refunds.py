"""Failed refunds: their deposits are refunded to another address, or decided with the others."""

from __future__ import annotations

from rpcsvc.domain import events as ev
from rpcsvc.domain.events import AdvanceTransfer
from rpcsvc.domain.machine import open_order, transition
from rpcsvc.domain.order import OrderStatus, TransferState
from rpcsvc.domain.pricing import Direction
from rpcsvc.orders.payouts import _is_agreed
from tests.unit.funded_orders import ENOUGH, LATER, OPEN_REFUND, after, funded, seen
from tests.unit.orders import HOUR, XMR_UNIT, key, terms

OVER = LATER + HOUR  # after the late window, too


def test_deposits_behind_a_failed_refund_go_to_the_next_address() -> None:
    order = after(open_order(terms()), ev.DeadlinePassed(), now=OVER)
    for n in range(2):  # the second deposit while the first refund waits for its wallet
        order = after(order, seen(n, XMR_UNIT), ev.DepositConfirmed(key(n)), now=OVER)
        if n == 0:
            order = after(order, ev.RefundAddressGiven("first"), now=OVER)
    assert [t.address for t in order.refunds] == ["first", "first"]
    order = after(order, ev.TransferFailed("ord_1/refund/2", "reverted"), now=OVER)
    assert order.action_required == "refund_address"
    assert not [t for t in order.refunds if t.state is TransferState.PLANNED]

    given = transition(order, ev.RefundAddressGiven("second"), OVER)

    refund = given.order.refunds[-1]
    assert (refund.address, refund.units + refund.fee) == ("second", 2 * XMR_UNIT)
    assert given.effects == (AdvanceTransfer(refund.transfer_id),)
    assert _is_agreed(given.order, refund)


def test_amount_of_a_failed_refund_is_priced_with_the_unpriced() -> None:
    agreed = terms(Direction.USDC_TO_XMR)
    half = agreed.deposit_amount // 2
    order = funded(agreed, agreed.deposit_amount, half, sender="sender")
    order = after(order, ev.TransferPrepared(OPEN_REFUND, "id", "raw"))
    order = after(order, ev.DepositRemoved(key(0)), now=LATER)
    late = ev.DepositSeen(key(2), agreed.deposit_amount, "sender", LATER)
    order = after(order, late, ev.DepositConfirmed(key(2)), now=LATER)
    assert (order.status, order.payout) == (OrderStatus.DEPOSIT_CONFIRMED, None)

    order = after(order, ev.TransferFailed(OPEN_REFUND, "reverted"), now=LATER)
    assert (order.action_required, len(order.refunds)) == (None, 1)
    order = after(order, ev.Repriced(ENOUGH), now=LATER)

    assert order.payout is not None
    total = agreed.deposit_amount + half
    assert order.payout.units == agreed.price.output(Direction.USDC_TO_XMR, total)
    assert order.unspent == ()
