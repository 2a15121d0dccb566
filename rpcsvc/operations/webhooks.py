"""Messages to the webhooks of orders: their bodies and outcomes.

A message has the event, and the order at the time of sending.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import structlog
from msgspec import to_builtins
from pydantic import Field

from rpcsvc.clock import iso8601
from rpcsvc.domain.order import AGENT_STATE_OF
from rpcsvc.domain.webhooks import message_id
from rpcsvc.errors import InvalidInput
from rpcsvc.operations import admin
from rpcsvc.operations.admin import admin_row
from rpcsvc.operations.events import TYPE_OF, event_view
from rpcsvc.operations.models import DeliveriesResult, DeliveryView, WebhookView
from rpcsvc.operations.ordering import status_answer
from rpcsvc.operations.params import DeliveriesParams, Params
from rpcsvc.operations.service import Answer, Call, Cli, Effect, Flat, Service, ViewContext, action
from rpcsvc.operations.swap import find_any_order, find_order, is_being_paid, require_owner
from rpcsvc.orders.authorizations import Authorizations
from rpcsvc.store.orders import OrderStore
from rpcsvc.store.webhooks import BookedDelivery, BookedWebhook
from rpcsvc.strict_json import Json, dumps

log = structlog.get_logger(__name__)

MOST_LISTED: Final = 100
_STATES: Final = ("pending", "dead", "delivered")


async def event_body(
    store: OrderStore,
    views: ViewContext,
    authorizations: Authorizations,
    order_id: str,
    sequence: int,
) -> bytes:
    """The body of an event's message. Raises LookupError if there is no such event."""
    # The event first: the order that is read afterwards includes it.
    entries = await store.history(order_id, sequence - 1, 1)
    is_paying = await is_being_paid(authorizations, order_id)
    order = await store.order(order_id)
    if order is None or not entries or entries[0].version != sequence:
        raise LookupError(f"event {sequence} of {order_id}")
    event = event_view(order, entries[0])
    status = status_answer(views, order, order.status_at, is_paying=is_paying).data
    return dumps(
        {
            "type": event.type,
            "timestamp": event.at,
            "data": {
                "orderId": order_id,
                "sequence": sequence,
                "event": event,
                "state": AGENT_STATE_OF[order.status].value,
                "status": status,
            },
        }
    )


async def deliveries(
    service: Service, params: DeliveriesParams, call: Call
) -> Answer[DeliveriesResult]:
    """The webhook of an order and its newest messages.

    Raises OrderNotFound, and VerificationFailed for another session.
    """
    order = require_owner(await find_order(service, params.order_id), params.session_id)
    webhook = await service.webhooks.store.webhook(order.order_id)
    booked = await service.webhooks.store.deliveries(order.order_id, MOST_LISTED)
    data = DeliveriesResult(
        *service.views.common(order.terms.session_id, call),
        webhook=None if webhook is None else _webhook_view(service, webhook),
        deliveries=[_delivery_view(each) for each in booked],
    )
    step = action(
        "read_events", "The events themselves.", "swap.events", {"orderId": order.order_id}
    )
    return Answer(AGENT_STATE_OF[order.status], data, [step])


def _webhook_view(service: Service, webhook: BookedWebhook) -> WebhookView:
    since = webhook.failing_since
    state = "active" if since is None else "failing"
    own = [] if service.webhooks.public_key() is None else ["v1a"]
    return WebhookView(
        url=webhook.url,
        signatures=[*own, *(["v1"] if webhook.has_secret else [])],
        state=state if webhook.ended_at is None else "ended",
        failing_since=None if since is None else iso8601(since),
    )


def _delivery_view(booked: BookedDelivery) -> DeliveryView:
    waits = booked.state == "pending" and booked.due_at > 0
    return DeliveryView(
        message_id=message_id(booked.order_id, booked.sequence),
        sequence=booked.sequence,
        type=TYPE_OF[booked.event],
        state=booked.state,
        attempts=booked.attempts,
        last_attempt_at=None if booked.tried_at is None else iso8601(booked.tried_at),
        last_status=booked.status,
        last_error=booked.error,
        next_attempt_at=iso8601(booked.due_at) if waits else None,
    )


# --- the operator ------------------------------------------------------------------------------


class WebhooksParams(Params):
    """Which messages to list. ``state``: pending, dead, delivered or all."""

    state: Literal["pending", "dead", "delivered", "all"] = "pending"
    limit: Annotated[int, Field(ge=1, le=admin.MOST_LISTED)] = 100


class ReplayParams(Params):
    """The messages of an order to send again: all dead ones, or the one of an event."""

    order_id: str
    sequence: Annotated[
        int | None, Field(ge=1, description="only the message of this event, by its cursor")
    ] = None


async def list_messages(service: Service, params: WebhooksParams, _call: Call) -> Flat:
    """Messages to webhooks, the newest first."""
    states = _STATES if params.state == "all" else (params.state,)
    backlog = await service.webhooks.store.backlog()
    found = await service.webhooks.store.listed(states, params.limit)
    oldest = backlog.oldest_at
    return Flat(
        {
            "pending": backlog.pending,
            "oldestAt": None if oldest is None else iso8601(oldest),
            "messages": [_message_view(each) for each in found],
        }
    )


def _message_view(booked: BookedDelivery) -> Json:
    shown = to_builtins(_delivery_view(booked))
    del shown["messageId"]
    return {
        "orderId": booked.order_id,
        "sequence": booked.sequence,
        "type": shown["type"],
        "at": iso8601(booked.at),
        "url": booked.url,
        **shown,
    }


async def replay(service: Service, params: ReplayParams, _call: Call) -> Flat:
    """Send messages again, also after the receiver has ended the webhook. Raises InvalidInput."""
    order = await find_any_order(service, params.order_id)
    if await service.webhooks.store.webhook(order.order_id) is None:
        raise InvalidInput(f"{order.order_id} has no webhook.", field="orderId")
    count = await service.webhooks.store.replay(order.order_id, params.sequence)
    if params.sequence is not None and not count:
        raise InvalidInput(
            f"{order.order_id} has no message {params.sequence}: an event before the webhook ended,"
            " by its cursor.",
            field="sequence",
        )
    service.webhooks.wake()
    log.info("webhook_replayed", order_id=order.order_id, count=count)
    return Flat({"replayed": count})


WEBHOOKS: Final = (
    admin_row(
        "webhooks.list",
        WebhooksParams,
        list_messages,
        cli=Cli(
            "webhooks list",
            "pending or dead messages, the newest first",
            {"state": "--state", "limit": "--limit N"},
        ),
    ),
    admin_row(
        "webhooks.replay",
        ReplayParams,
        replay,
        Effect.WRITE,
        Cli(
            "webhooks replay",
            "send an order's dead messages again, or one message",
            {"order_id": "ORDER_ID", "sequence": "--sequence N"},
        ),
    ),
)
