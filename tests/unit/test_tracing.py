"""Which span of an order ends with which event."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.money import USDC
from rpcsvc.domain.order import Deposit, Order, Transfer, TransferKind
from rpcsvc.http.tracing import OrderSpan, span_of, trace_of
from tests.unit.orders import NOW, key, terms

SEEN_AT, SINCE, LATER = NOW + 10, NOW + 50, NOW + 90
DEPOSIT = Deposit(key(1), 5, None, SEEN_AT)


def order() -> Order:
    opened = open_order(terms())
    refund = Transfer("ord/refund/1", TransferKind.REFUND, "base", USDC, "0x0", 4, 1)
    return replace(opened, deposits=(DEPOSIT,), transfers=(refund,))


@pytest.mark.parametrize(
    ("event", "step"),
    [
        (None, OrderSpan("commit order", NOW, LATER)),
        (ev.DepositSeen(key(1), 5, None, SEEN_AT), OrderSpan("wait for deposit", NOW, LATER)),
        (ev.DepositConfirmed(key(1)), OrderSpan("confirm deposit", SEEN_AT, LATER)),
        (ev.TransferPrepared("ord/refund/1", "t", "r"), OrderSpan("sign refund", SINCE, LATER)),
        (ev.TransferSettled("ord/refund/1"), OrderSpan("settle refund", SINCE, LATER)),
        (
            ev.TransferUnknown("ord/refund/1", "no answer"),
            OrderSpan("broadcast refund", SINCE, LATER, "no answer"),
        ),
        (
            ev.TransferFailed("ord/refund/1", "reverted"),
            OrderSpan("settle refund", SINCE, LATER, "reverted"),
        ),
        (ev.Cancelled(), OrderSpan("Cancelled", LATER, LATER)),
    ],
)
def test_span_ends_with_the_event_of_its_step(event: ev.Event | None, step: OrderSpan) -> None:
    assert span_of(order(), event, SINCE, LATER) == step


def test_trace_of_an_order_is_its_own() -> None:
    ids = [trace_of(f"ord_{number}") for number in range(100)]
    assert len({(each.trace_id, each.span_id) for each in ids}) == 100
    assert trace_of("ord_1") == ids[1]
    assert all(each.is_valid and each.trace_flags.sampled for each in ids)
