"""How long a wallet waits for a signed payment that its order does not take up."""

from __future__ import annotations

from rpcsvc.settings import OrderSettings
from rpcsvc.settlement.onchain.patience import PATIENCE_MS, Patience

MINUTE_MS = 60_000


def test_those_that_waited_are_paid_before_their_orders_would_be_refunded() -> None:
    order_waits_ms = OrderSettings().prepare_timeout_seconds * 1000
    assert order_waits_ms - PATIENCE_MS >= 5 * MINUTE_MS


def test_it_is_counted_from_the_first_that_had_to_wait_and_anew_for_another_payment() -> None:
    now = 7
    patience = Patience(lambda: now)
    assert not patience.is_over("one")
    now += PATIENCE_MS - 1
    assert not patience.is_over("one")
    now += 1
    assert patience.is_over("one")
    assert not patience.is_over("another")
    now += PATIENCE_MS
    assert patience.is_over("another")
