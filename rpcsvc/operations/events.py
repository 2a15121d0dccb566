"""Serves the event log of an order under public names: reads it, waits for the next event, streams
it.

The log is the order's committed history. A cursor is the order's version, which only grows.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from msgspec import UNSET, UnsetType

from rpcsvc.clock import iso8601
from rpcsvc.domain.money import format_units
from rpcsvc.domain.order import AGENT_STATE_OF, DepositKey, Order, OrderStatus
from rpcsvc.operations.models import EventDeposit, EventsResult, EventTransfer, EventView
from rpcsvc.operations.params import EventsParams
from rpcsvc.operations.service import Answer, Call, Service, action
from rpcsvc.operations.swap import find_order
from rpcsvc.operations.views import mined_txid
from rpcsvc.orders.waits import LONGEST_WAIT_SECONDS
from rpcsvc.store.changes import HistoryEntry
from rpcsvc.strict_json import Json

# Public names of the order machine's events (domain/events.py).
TYPE_OF: Final = {
    "OrderCreated": "order.created",
    "DepositSeen": "deposit.seen",
    "DepositConfirmed": "deposit.confirmed",
    "DepositRemoved": "deposit.removed",
    "Repriced": "order.repriced",
    "LockBroken": "price_lock.ended",
    "ChunkFilled": "chunk.swapped",
    "FillingStopped": "chunk.stopped",
    "UpstreamReported": "order.updated",
    "DeadlinePassed": "deadline.passed",
    "Cancelled": "order.cancelled",
    "RefundAddressGiven": "refund_address.set",
    "RefundRetried": "refund.retried",
    "SupportReplied": "support.replied",
    "TransferPrepared": "transfer.signed",
    "TransferPublished": "transfer.published",
    "TransferUnknown": "transfer.unknown",
    "TransferSettled": "transfer.settled",
    "TransferFailed": "transfer.failed",
}

# Longest silence of a stream: proxies close a connection after about a minute.
HEARTBEAT_SECONDS: Final = 25


async def events(service: Service, params: EventsParams, call: Call) -> Answer[EventsResult]:
    """The events after a cursor; if there are none, those that come within ``waitSec``.

    Raises OrderNotFound, and RateLimited while too many of the client's calls wait.
    """
    order = await find_order(service, params.order_id)
    service.venue.watch(order.order_id)
    entries = await service.waits.history(
        order.order_id, params.after, params.wait_sec, call.client
    )
    if entries:  # the current order has the transfers that the events refer to
        order = await find_order(service, order.order_id)
    cursor = entries[-1].version if entries else params.after
    data = EventsResult(
        *service.views.common(),
        events=[event_view(order, entry) for entry in entries],
        cursor=cursor,
    )
    return Answer(AGENT_STATE_OF[order.status], data, _next(order, cursor))


async def follow(
    service: Service, params: EventsParams, call: Call
) -> AsyncGenerator[list[EventView], None] | None:
    """A stream of the events after a cursor; an empty list after a silent while.

    It ends once the order is final. None if the order is final and no event is left. Raises
    OrderNotFound, and RateLimited while too many of the client's calls wait.
    """
    order = await find_order(service, params.order_id)
    if _is_all(order, params.after):
        return None
    service.waits.require(call.client)
    return _followed(service, params, call)


async def _followed(
    service: Service, params: EventsParams, call: Call
) -> AsyncGenerator[list[EventView], None]:
    order_id, waits = params.order_id, service.waits
    service.venue.watch(order_id)
    log = waits.follow(order_id, params.after, HEARTBEAT_SECONDS, call.client)
    async with aclosing(log) as parts:
        async for entries in parts:
            service.venue.watch(order_id)
            if not entries:
                yield []
                continue
            order = await find_order(service, order_id)
            yield [event_view(order, entry) for entry in entries]
            if _is_all(order, entries[-1].version):
                return


def _is_all(order: Order, cursor: int) -> bool:
    """Return whether the order is over and a cursor has all of its events."""
    is_over = order.status.is_terminal and all(each.state.is_final for each in order.transfers)
    return is_over and cursor >= order.version


def event_view(order: Order, entry: HistoryEntry) -> EventView:
    """The view of an event. ``order`` may be newer: what the event refers to never changes."""
    details, status = entry.details, OrderStatus(entry.status)
    deadline = details.get("deadline_at")
    return EventView(
        cursor=entry.version,
        at=iso8601(entry.at),
        type=TYPE_OF[entry.event],
        state=AGENT_STATE_OF[status].value,
        status=status,
        deadline_at=UNSET if deadline is None else iso8601(deadline),
        deposit=_deposit(order, entry),
        transfer=_transfer(order, entry) if "transfer_id" in details else UNSET,
        ticket_id=details.get("ticket_id", UNSET),
    )


def _deposit(order: Order, entry: HistoryEntry) -> EventDeposit | UnsetType:
    terms, asset = order.terms, order.terms.deposit_asset
    if entry.event == "OrderCreated":
        return EventDeposit(None, format_units(terms.deposit_amount, asset), asset.symbol)
    if "key" not in entry.details:
        return UNSET
    key = DepositKey(**entry.details["key"])
    deposit = order.deposit(key)
    amount = None if deposit is None else format_units(deposit.units, asset)
    return EventDeposit(key.txid, amount, asset.symbol)


def _transfer(order: Order, entry: HistoryEntry) -> EventTransfer | None:
    transfer = order.transfer(entry.details["transfer_id"])
    if transfer is None:
        return None
    is_settled = entry.event == "TransferSettled"
    return EventTransfer(
        kind=transfer.kind,
        address=transfer.address,
        amount=format_units(transfer.units, transfer.asset),
        asset=transfer.asset.symbol,
        # A payment whose fee was raised is mined under another transaction id.
        txid=mined_txid(transfer) if is_settled else entry.details.get("txid"),
    )


def _next(order: Order, cursor: int) -> list[Json]:
    if order.status.is_terminal and cursor >= order.version:
        return []
    params = {"orderId": order.order_id, "after": cursor, "waitSec": LONGEST_WAIT_SECONDS}
    return [action("wait_for_events", "Wait for what comes next.", "swap.events", params)]
