"""Values of an order: what its deposits, transfers and terms say of it."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rpcsvc.domain.machine import open_order
from rpcsvc.domain.order import (
    Deposit,
    DepositState,
    Order,
    OrderReason,
    OrderStatus,
    Report,
    Transfer,
    TransferKind,
    TransferState,
    reasons_in,
)
from rpcsvc.domain.pricing import Direction
from tests.unit.orders import HOUR, NOW, key, terms

S, T = OrderStatus, TransferState
FRESH = open_order(terms())
SEEN = Deposit(key(1), 50, None, NOW)
CONFIRMED = replace(SEEN, state=DepositState.CONFIRMED)
REMOVED = replace(SEEN, state=DepositState.REMOVED)
SPENT = replace(CONFIRMED, transfer_id="ord_1/payout/1")
DUST = replace(CONFIRMED, is_dust=True)
PAYOUT = Transfer(
    "ord_1/payout/1", TransferKind.PAYOUT, "arbitrum", terms().payout_asset, "to", 7, 2
)
REFUND = replace(PAYOUT, transfer_id="ord_1/refund/1", kind=TransferKind.REFUND)


def test_ends_are_those_that_nothing_follows() -> None:
    assert {s for s in S if s.is_terminal} == {S.COMPLETED, S.REFUNDED, S.FAILED, S.EXPIRED}
    assert {s for s in T if s.is_final} == {T.SETTLED, T.FAILED, T.CANCELLED}
    assert {s for s in T if s.may_be_live} == {T.PREPARED, T.PUBLISHED, T.UNKNOWN}


@pytest.mark.parametrize(
    ("deposit", "active", "unspent", "pending"),
    [
        (SEEN, True, False, 50), (CONFIRMED, True, True, 50), (REMOVED, False, False, 0),
        (SPENT, True, False, 0), (DUST, True, False, 0),
        (replace(REMOVED, transfer_id="x"), False, False, 0),
    ],
)  # fmt: skip
def test_deposit_counts_by_its_state(
    deposit: Deposit, active: bool, unspent: bool, pending: int
) -> None:
    order = replace(FRESH, deposits=(deposit, replace(SEEN, key=key(2), units=3)))
    assert (deposit.is_active, deposit.is_unspent) == (active, unspent)
    assert order.unspent == ((deposit,) if unspent else ())
    assert order.pending_units == pending + 3
    assert order.due_units == terms().deposit_amount - pending - 3
    assert order.deposit(key(1)) == deposit
    assert order.deposit(key(9)) is None


def test_nothing_is_due_once_enough_came() -> None:
    amount = terms().deposit_amount
    order = replace(FRESH, deposits=(replace(SEEN, units=amount + 1),))
    assert order.due_units == 0
    relayed = replace(FRESH, terms=replace(terms(), upstream_id="theirs"))
    assert relayed.due_units == amount
    assert replace(relayed, status=S.EXECUTING_SWAP).due_units == 0
    reported = replace(relayed, status=S.EXECUTING_SWAP, report=Report(due=5))
    assert reported.due_units == 5
    assert replace(relayed, report=Report()).due_units == amount


def test_payout_is_the_last_that_was_not_cancelled() -> None:
    first, second = (
        replace(PAYOUT, transfer_id=f"ord_1/payout/{n}", state=T.FAILED) for n in (1, 2)
    )
    order = replace(FRESH, transfers=(first, second, REFUND))
    assert order.payout == second
    assert order.refunds == (REFUND,)
    cancelled = replace(second, state=T.CANCELLED)
    assert replace(order, transfers=(first, cancelled)).payout == first
    assert FRESH.payout is None
    assert order.transfer("ord_1/payout/2") == second
    assert order.transfer("ord_1/payout/9") is None


def test_lock_ends_when_agreed_or_broken() -> None:
    assert FRESH.price_locked_until == NOW + HOUR
    shorter = replace(FRESH, terms=replace(terms(), price_locked_until=NOW + 5))
    assert shorter.price_locked_until == NOW + 5
    assert replace(shorter, lock_broken_at=NOW + 3).price_locked_until == NOW + 3
    assert replace(shorter, lock_broken_at=NOW + 9).price_locked_until == NOW + 5


def test_order_that_ended_unpaid_saw_no_deposit_anywhere() -> None:
    ended = replace(FRESH, status=S.EXPIRED, status_at=NOW + HOUR)
    assert (ended.ended_unpaid, ended.was_cancelled) == (True, False)
    early = replace(ended, status_at=NOW + HOUR - 1)
    assert early.was_cancelled
    for paid in (
        replace(early, deposits=(REMOVED,)),
        replace(early, report=Report(deposit_txid="tx")),
        replace(early, status=S.FAILED),
    ):
        assert not paid.ended_unpaid
        assert not paid.was_cancelled
    assert replace(early, report=Report()).ended_unpaid


def test_order_has_money_above_the_fee_of_returning_it() -> None:
    fee = terms().refund_fee
    assert not replace(FRESH, deposits=(replace(SEEN, units=fee),)).has_money
    parts = replace(SEEN, units=fee), replace(SEEN, key=key(2), units=1)
    assert replace(FRESH, deposits=parts).has_money
    for lost in (REMOVED, DUST):
        assert not replace(FRESH, deposits=(parts[0], replace(lost, units=fee))).has_money
    assert replace(FRESH, report=Report(deposit_txid="tx")).has_money
    assert not replace(FRESH, report=Report()).has_money


def test_refund_goes_to_the_agreed_address_first() -> None:
    order: Order = FRESH
    assert order.refund_to is None
    order = replace(order, report=Report(refund_address="reported"))
    assert order.refund_to == "reported"
    order = replace(order, refund_address="named")
    assert order.refund_to == "named"
    order = replace(order, terms=replace(order.terms, refund_address="agreed"))
    assert order.refund_to == "agreed"
    assert order.order_id == "ord_1"


def test_terms_know_their_assets() -> None:
    for direction, sent, paid in ((Direction.XMR_TO_USDC, "XMR", "USDC"),
                                  (Direction.USDC_TO_XMR, "USDC", "XMR")):  # fmt: skip
        agreed = terms(direction)
        assert (agreed.deposit_asset.symbol, agreed.payout_asset.symbol) == (sent, paid)
        assert agreed.senders_can_be_refunded is (sent == "USDC")
        assert not agreed.is_bridge
        assert replace(agreed, chain="perps").is_bridge


def test_exact_terms_pay_their_amount_for_their_deposit() -> None:
    agreed = replace(terms(), receive_amount=terms().expected_output - 5)
    rate, amount = agreed.price.rate, agreed.deposit_amount
    fee = agreed.price.integrator_fee(agreed.direction, amount)
    assert terms().payout({rate: amount}, is_priced=True) == (terms().expected_output, fee)
    assert agreed.payout({rate: amount}, is_priced=True)[0] == agreed.receive_amount
    more = agreed.payout({rate: amount, 2 * rate: 1_000_000}, is_priced=True)[0]
    assert more == terms().payout({rate: amount, 2 * rate: 1_000_000}, is_priced=True)[0]
    assert agreed.payout({rate // 2: amount}, is_priced=True)[0] == agreed.receive_amount
    half = agreed.price.at(rate // 2).output(agreed.direction, amount)
    assert agreed.payout({rate // 2: amount}, is_priced=False)[0] == half


def test_reasons_are_read_from_the_message() -> None:
    above, dust = OrderReason.ABOVE_MAXIMUM, OrderReason.DUST
    assert reasons_in(above.text) == [above]
    assert reasons_in(f"{above.text} {dust.text}") == [above, dust]
    assert reasons_in(f"{above.text} It rained.") == []
    assert reasons_in("") == []
