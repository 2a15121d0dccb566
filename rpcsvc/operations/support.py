"""support.create: a ticket for the operator, and the way to give a refund address."""

from __future__ import annotations

import hmac

import structlog

from rpcsvc import ids
from rpcsvc.clock import iso8601
from rpcsvc.domain.events import RefundAddressGiven
from rpcsvc.domain.order import REFUND_ADDRESS, Order
from rpcsvc.domain.states import AgentState
from rpcsvc.domain.transition import ImpossibleTransition
from rpcsvc.operations.envelope import Answer, Json, action
from rpcsvc.operations.inputs import read_order_id, read_refund_address, read_session
from rpcsvc.operations.models import SupportParams
from rpcsvc.operations.results import with_session
from rpcsvc.operations.service import Call, Service
from rpcsvc.operations.views import awaits_upstream_refund
from rpcsvc.orders.ports import Change, Ticket

log = structlog.get_logger(__name__)


async def create_ticket(service: Service, params: SupportParams, _call: Call) -> Answer:
    """Record a ticket; set the order's refund address when its owner asks for it."""
    session = read_session(params.session_id)
    order = _owned_order(service, params, session)
    refund_to = _refund_address(service, params, order)
    ticket = Ticket(
        ticket_id=ids.ticket_id(service.random),
        created_at=service.clock.now_ms(),
        category=params.category,
        message=params.message,
        order_id=params.order_id,
        session_id=session,
        wallet_address=params.wallet_address,
    )
    await service.store.commit(Change(ticket=ticket))
    log.info("ticket_created", ticket_id=ticket.ticket_id, order_id=ticket.order_id)
    accepted = await _give(service, order, refund_to, ticket)
    data = {"ticket": _ticket_view(ticket), "refundAddress": accepted}
    session_fields = (session, "request" if session else "none")
    actions = [_next(params.order_id)]
    return Answer(
        AgentState.TICKET_CREATED, with_session(service.venue, data, session_fields), actions
    )


def _owned_order(service: Service, params: SupportParams, session: str | None) -> Order | None:
    """The order, if the caller has shown both halves of its owner's secret."""
    if params.order_id is None:
        return None
    order = service.store.order(read_order_id(params.order_id))
    if order is None or session is None:
        return None
    owns = hmac.compare_digest(order.terms.session_id.encode(), session.encode())
    return order if owns else None


def _refund_address(service: Service, params: SupportParams, order: Order | None) -> str | None:
    """The validated refund address, when the order waits for one. Raises InvalidDestination."""
    if order is None or params.wallet_address is None:
        return None
    if order.action_required != REFUND_ADDRESS and not awaits_upstream_refund(order):
        return None
    return read_refund_address(params.wallet_address, order.terms.direction, service)


async def _give(
    service: Service, order: Order | None, address: str | None, ticket: Ticket
) -> Json | None:
    if order is None or address is None:
        return None
    if service.relay is not None:
        return {"accepted": await service.relay.pass_on(order, ticket), "address": address}
    try:
        await service.processor.apply(order.order_id, RefundAddressGiven(address))
    except ImpossibleTransition:
        return {"accepted": False, "address": address}  # somebody else was first
    service.wake()
    return {"accepted": True, "address": address}


def _ticket_view(ticket: Ticket) -> Json:
    return {
        "ticketId": ticket.ticket_id,
        "createdAt": iso8601(ticket.created_at),
        "category": ticket.category,
        "orderId": ticket.order_id,
    }


def _next(order_id: str | None) -> Json:
    if order_id is None:
        return action("tell_user", "Give the user the ticketId.")
    return action(
        "poll_status",
        "Give the user the ticketId, and look at the order again later.",
        "swap.status",
        {"orderId": order_id},
    )
