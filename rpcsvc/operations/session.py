"""The operations of a session's holder: swap.list, swap.refundAddress and support.create.

A support ticket may name the refund address of an order, too.
"""

from __future__ import annotations

import hmac
from contextlib import suppress
from typing import Final

import structlog

from rpcsvc import ids
from rpcsvc.clock import day_of, iso8601
from rpcsvc.domain.money import format_units
from rpcsvc.domain.order import AGENT_STATE_OF, REFUND_ADDRESS, AgentState, Order
from rpcsvc.domain.refunds import has_refused
from rpcsvc.domain.reservations import SOCKET
from rpcsvc.errors import InvalidDestination, MissingInput, OrderNotFound, Unavailable
from rpcsvc.operations import models
from rpcsvc.operations.clients import require_refundable
from rpcsvc.operations.inputs import (
    Problems,
    read_order_id,
    read_refund_address,
    read_session,
)
from rpcsvc.operations.params import ListParams, RefundAddressParams, SupportParams
from rpcsvc.operations.service import Answer, Call, Service, action
from rpcsvc.operations.swap import find_any_order, look_again, require_owner
from rpcsvc.operations.views import awaits_upstream_refund, may_be_refunded_upstream
from rpcsvc.store.changes import Change, Ticket
from rpcsvc.store.database import StaleWrite
from rpcsvc.strict_json import Json

log = structlog.get_logger(__name__)

# How often a ticket budget is read again because another ticket was charged to it meanwhile.
_TRIES: Final = 5

_NO_SESSION: Final = (
    "sessionId is missing. Send the one that create or execute answered; without it, a client with"
    " a token lists its own orders."
)
_ACCEPTED = "Look at the order again until its refund has settled."


async def list_orders(
    service: Service, params: ListParams, call: Call
) -> Answer[models.ListResult]:
    """A page of the session's orders; without a session, of those of the client that calls. Orders
    of the bridge are not among them.

    Raises OrderNotFound for a cursor that is no order of these, and MissingInput.
    """
    session = read_session(params.session_id)
    if session is None and call.known is None:
        raise MissingInput(_NO_SESSION, field="sessionId")
    client = "" if call.known is None else call.known.name
    after = None if params.after is None else await _cursor(service, params.after, session, client)
    if session is None:
        found = await service.store.orders_of_client(client, params.limit, after)
    else:
        found = await service.store.orders_of_session(session, params.limit, after)
    last = found[-1].order_id if len(found) == params.limit else None
    listed = [_summary(order) for order in found if not order.terms.is_bridge]
    data = models.ListResult(*service.views.common(session, call), orders=listed, next_after=last)
    return Answer(AgentState.READY, data, _next_page(last, session))


async def _cursor(service: Service, after: str, session: str | None, client: str) -> str:
    order = await service.store.order(read_order_id(after))
    terms = None if order is None else order.terms
    if terms is None or (
        terms.client != client if session is None else terms.session_id != session
    ):
        raise OrderNotFound(
            "after is no order of this list. Send nextAfter of the page before, or leave it out"
            " for the newest orders."
        )
    return after


def _summary(order: Order) -> models.OrderSummary:
    terms = order.terms
    return models.OrderSummary(
        order_id=terms.order_id,
        state=AGENT_STATE_OF[order.status].value,
        status=order.status,
        direction=terms.direction.value,
        chain=terms.chain,
        deposit_asset=terms.deposit_asset.symbol,
        deposit_amount=format_units(terms.deposit_amount, terms.deposit_asset),
        payout_asset=terms.payout_asset.symbol,
        expected_output=format_units(terms.expected_output, terms.payout_asset),
        to_address=terms.to_address,
        created_at=iso8601(terms.created_at),
        expires_at=iso8601(terms.expires_at),
        completed_at=iso8601(order.completed_at) if order.completed_at else None,
    )


def _next_page(after: str | None, session: str | None) -> list[Json]:
    if after is None:
        return []
    params = {"after": after} if session is None else {"sessionId": session, "after": after}
    return [action("next_page", "There may be older orders.", "swap.list", params)]


# --- refund addresses --------------------------------------------------------------------------


async def set_refund_address(
    service: Service, params: RefundAddressParams, call: Call
) -> Answer[models.RefundAddressResult]:
    """Set the address of a refund that waits for one, and say whether it was accepted.

    Raises OrderNotFound, VerificationFailed, and InvalidDestination.
    """
    order = require_owner(await find_any_order(service, params.order_id), params.session_id)
    address = await read_untried(params.address, order, service, field="address")
    if call.known is not None:
        call.known.require_destination(address, field="address")
    accepted = await _give(service, order, address, params)
    data = models.RefundAddressResult(
        *service.views.common(order.terms.session_id, call),
        refund_address=models.RefundAddressView(accepted, address),
    )
    step = look_again(order, _ACCEPTED if accepted else _why_not(order))
    return Answer(AgentState.READY, data, [step])


def _why_not(order: Order) -> str:
    if order.terms.refund_address is not None:
        return "The order was made with a refundAddress, and refunds go there and nowhere else."
    if not awaits_address(order):
        return "No refund waits for an address: name one when actionRequired is refund_address."
    return "The address was not taken: another came before it. Look where the refund goes."


async def _give(service: Service, order: Order, address: str, params: RefundAddressParams) -> bool:
    """Return whether the order takes the address. Giving the same address again is accepted."""
    if order.terms.refund_address is not None:
        return False
    if order.refund_to == address:
        return True
    if not awaits_address(order):
        return False
    if await service.venue.give_refund_address(order, address, _upstream_ticket(service, params)):
        return True
    return (await find_any_order(service, order.order_id)).refund_to == address


def _upstream_ticket(service: Service, params: RefundAddressParams) -> Ticket:
    """The request as a ticket for the upstream; this service does not store it as a ticket."""
    return Ticket(
        ticket_id=ids.ticket_id(service.random),
        created_at=service.clock.now_ms(),
        category="agent",
        message="Please send the refund to this address.",
        order_id=params.order_id,
        session_id=params.session_id,
        wallet_address=params.address,
    )


def awaits_address(order: Order) -> bool:
    """Return whether a refund of the order waits for an address, here or at its upstream."""
    return order.action_required == REFUND_ADDRESS or awaits_upstream_refund(order)


async def read_untried(text: str, order: Order, service: Service, *, field: str) -> str:
    """The validated address, unless a refund to it has failed before.

    Raises InvalidDestination, and DestinationNotAllowed as ``require_refundable``.
    """
    address = await read_refund_address(text, order.terms.direction, service, field=field)
    require_refundable(service, order, address, field)
    if has_refused(order, address):
        raise InvalidDestination(
            "A refund to this address has failed on its network, and another would, too. Send"
            " another address of the user.",
            field=field,
            received=address,
        )
    return address


# --- tickets -----------------------------------------------------------------------------------


async def create_ticket(
    service: Service, params: SupportParams, call: Call
) -> Answer[models.SupportResult]:
    """Record a ticket; set the order's refund address when its owner asks for it.

    Raises InvalidInput, InvalidDestination, RateLimited and Unavailable.
    """
    session, order_id = _read_ids(params)
    named = None if order_id is None else await service.store.order(order_id)
    order = _owned(named, session)
    refund_to = await _refund_address(service, params, order)
    if call.known is not None and refund_to is not None:
        call.known.require_destination(refund_to, field="walletAddress")
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
    client, has_money = call.client.stored(service.client_secret), False
    if order is not None and order.has_money:
        client, has_money = order.order_id, True
    await _record(service, ticket, client if is_charged else None, has_money=has_money)
    log.info("ticket_created", ticket_id=ticket.ticket_id, order_id=ticket.order_id)
    accepted = await _give_with_ticket(service, order, refund_to, ticket)
    data = models.SupportResult(
        *service.views.common(session, call),
        ticket=models.TicketView(
            ticket_id=ticket.ticket_id,
            created_at=iso8601(ticket.created_at),
            category=ticket.category,
            order_id=ticket.order_id,
        ),
        refund_address=accepted,
    )
    return Answer(AgentState.TICKET_CREATED, data, [_ticket_action(params.order_id, named)])


async def _record(service: Service, ticket: Ticket, client: str | None, *, has_money: bool) -> None:
    """Store a ticket and charge it to its client's budget; None charges nobody.

    Raises RateLimited and Unavailable.
    """
    if client is None:
        await service.store.commit(Change(ticket=ticket))
        return None
    for _ in range(_TRIES):
        taken = await service.store.tickets_taken(day_of(ticket.created_at), client)
        charge = service.ticket_budget.charge(client, ticket, taken, has_money=has_money)
        with suppress(StaleWrite):  # others were faster: the budget is read again
            return await service.store.commit(Change(ticket=ticket, charge=charge))
    raise Unavailable("Others are writing tickets right now. Try again.", retry_after=1)


def _read_ids(params: SupportParams) -> tuple[str | None, str | None]:
    """Session id and order id of a ticket; unknown ones are accepted.

    Raises InvalidInput or InputErrors for malformed ones.
    """
    problems = Problems()
    with problems:
        session = read_session(params.session_id)
    with problems:
        order_id = None if params.order_id is None else read_order_id(params.order_id)
    problems.raise_found()
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
            address = await read_refund_address(
                params.wallet_address, direction, service, field="walletAddress"
            )
            require_refundable(service, order, address, "walletAddress")
            return address
    return None


def _sets_refund_address(order: Order | None, refund_to: str | None) -> bool:
    """Return whether the ticket sets a refund address: no budget may block a refund."""
    if order is None or refund_to is None:
        return False
    return awaits_address(order)


async def _give_with_ticket(
    service: Service, order: Order | None, address: str | None, ticket: Ticket
) -> models.RefundAddressView | None:
    if order is None:
        return None
    if order.terms.refund_address is not None and ticket.wallet_address is not None:
        return models.RefundAddressView(False, ticket.wallet_address)  # the agreed one is final
    if address is None:
        return None
    accepted = await service.venue.give_refund_address(order, address, ticket)
    return models.RefundAddressView(accepted, address)


def _ticket_action(order_id: str | None, order: Order | None) -> Json:
    if order is not None:
        return look_again(order, "Give the user the ticketId, and check the order again later.")
    text = "Give the user the ticketId."
    if order_id is not None:
        text += f" There is no order {order_id} here: check the orderId with them."
    return action("tell_user", text)
