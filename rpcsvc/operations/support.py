"""The operation support.create: a ticket for the operator, or the refund address of an order."""

from __future__ import annotations

import hmac
from contextlib import suppress
from typing import Final

import structlog

from rpcsvc import ids
from rpcsvc.clock import day_of, iso8601
from rpcsvc.domain.order import REFUND_ADDRESS, AgentState, Order
from rpcsvc.domain.refunds import has_refused
from rpcsvc.errors import InputError, InvalidDestination, InvalidInput, Unavailable
from rpcsvc.operations.envelope import Answer, Json, action
from rpcsvc.operations.inputs import combined, read_order_id, read_refund_address, read_session
from rpcsvc.operations.params import SupportParams
from rpcsvc.operations.service import (
    NO_SESSION,
    Call,
    Service,
    session_source,
    with_session,
)
from rpcsvc.operations.swap import look_again
from rpcsvc.operations.views import awaits_upstream_refund, may_be_refunded_upstream
from rpcsvc.orders.ports.store import Change, StaleWrite, Ticket
from rpcsvc.orders.unfunded import SOCKET

log = structlog.get_logger(__name__)

# How often a budget is read anew of which others took something meanwhile.
TRIES: Final = 5


async def create_ticket(service: Service, params: SupportParams, call: Call) -> Answer:
    """Record a ticket; set the order's refund address when its owner asks for it."""
    session, order_id = _read_ids(params)
    named = None if order_id is None else await service.store.order(order_id)
    order = _owned(named, session)
    refund_to = await _refund_address(service, params, order)
    ticket = Ticket(
        ticket_id=ids.ticket_id(service.random),
        created_at=service.clock.now_ms(),
        category=params.category,
        message=params.message,
        order_id=params.order_id,
        session_id=session,
        wallet_address=params.wallet_address,
    )
    is_charged = call.client != SOCKET and not _sets_refund_address(order, refund_to)
    client = call.client.stored(service.client_secret) if is_charged else None
    await _take(service, ticket, client)
    log.info("ticket_created", ticket_id=ticket.ticket_id, order_id=ticket.order_id)
    accepted = await _give(service, order, refund_to, ticket)
    data = {"ticket": _ticket_view(ticket), "refundAddress": accepted}
    session_fields = (session, session_source(call)) if session else NO_SESSION
    actions = [_next(params.order_id, named)]
    return Answer(
        AgentState.TICKET_CREATED, with_session(service.views, data, session_fields), actions
    )


async def _take(service: Service, ticket: Ticket, client: str | None) -> None:
    """Record a ticket within its client's budget; None: it takes none. Raises Unavailable."""
    if client is None:
        await service.store.commit(Change(ticket=ticket))
        return None
    for _ in range(TRIES):
        taken = await service.store.tickets_taken(day_of(ticket.created_at), client)
        charge = service.ticket_budget.charge(client, ticket, taken)
        with suppress(StaleWrite):  # others were faster: the budget is read again
            return await service.store.commit(Change(ticket=ticket, charge=charge))
    raise Unavailable("Others are writing tickets right now. Try again.", retry_after=1)


def _read_ids(params: SupportParams) -> tuple[str | None, str | None]:
    """Session and order of a ticket. Raises InvalidInput or InputErrors; one that is unknown is
    no error.
    """
    session = order_id = None
    problems: list[InputError] = []
    try:
        session = read_session(params.session_id)
    except InvalidInput as problem:
        problems.append(problem)
    try:
        order_id = None if params.order_id is None else read_order_id(params.order_id)
    except InvalidInput as problem:
        problems.append(problem)
    if problems:
        raise combined(problems)
    return session, order_id


def _owned(order: Order | None, session: str | None) -> Order | None:
    """The order, if the caller has shown both halves of its owner's secret."""
    if order is None or session is None:
        return None
    owns = hmac.compare_digest(order.terms.session_id.encode(), session.encode())
    return order if owns else None


async def _refund_address(
    service: Service, params: SupportParams, order: Order | None
) -> str | None:
    """The validated refund address, when the order waits for one. Raises InvalidDestination."""
    if order is None or params.wallet_address is None:
        return None
    if awaits_address(order):
        return await read_untried(params.wallet_address, order, service, field="walletAddress")
    if may_be_refunded_upstream(order):
        with suppress(InvalidDestination):  # or it is a ticket that happens to name an address
            direction = order.terms.direction
            return await read_refund_address(
                params.wallet_address, direction, service, field="walletAddress"
            )
    return None


def awaits_address(order: Order) -> bool:
    """Whether a refund of the order waits for an address, here or at its upstream."""
    return order.action_required == REFUND_ADDRESS or awaits_upstream_refund(order)


def _sets_refund_address(order: Order | None, refund_to: str | None) -> bool:
    """Whether money waits for this ticket: no budget may keep a refund from its owner."""
    if order is None or refund_to is None:
        return False
    return awaits_address(order)


async def read_untried(text: str, order: Order, service: Service, *, field: str) -> str:
    """The address, if a refund may be sent there. Raises InvalidDestination."""
    address = await read_refund_address(text, order.terms.direction, service, field=field)
    if has_refused(order, address):
        raise InvalidDestination(
            "A refund to this address has failed on its network, and another would, too. Send"
            " another address of the user.",
            field=field,
            received=address,
        )
    return address


async def _give(
    service: Service, order: Order | None, address: str | None, ticket: Ticket
) -> Json | None:
    if order is None:
        return None
    if order.terms.refund_address is not None and ticket.wallet_address is not None:
        return {"accepted": False, "address": ticket.wallet_address}  # the agreed one is final
    if address is None:
        return None
    accepted = await service.venue.give_refund_address(order, address, ticket)
    return {"accepted": accepted, "address": address}


def _ticket_view(ticket: Ticket) -> Json:
    return {
        "ticketId": ticket.ticket_id,
        "createdAt": iso8601(ticket.created_at),
        "category": ticket.category,
        "orderId": ticket.order_id,
    }


def _next(order_id: str | None, order: Order | None) -> Json:
    if order is not None:
        return look_again(order, "Give the user the ticketId, and check the order again later.")
    text = "Give the user the ticketId."
    if order_id is not None:
        text += f" There is no order {order_id} here: check the orderId with them."
    return action("tell_user", text)
