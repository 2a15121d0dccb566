"""The operations of a session's holder: swap.list and swap.refundAddress."""

from __future__ import annotations

from typing import Final

import structlog

from rpcsvc import ids
from rpcsvc.clock import iso8601
from rpcsvc.domain.clients import KnownClient
from rpcsvc.domain.money import format_units
from rpcsvc.domain.order import AGENT_STATE_OF, REFUND_ADDRESS, AgentState, Order
from rpcsvc.domain.refunds import has_refused
from rpcsvc.errors import InvalidDestination, MissingInput, OrderNotFound
from rpcsvc.operations import models
from rpcsvc.operations.clients import require_refundable
from rpcsvc.operations.inputs import (
    read_order_id,
    read_refund_address,
    read_session,
)
from rpcsvc.operations.params import ListParams, RefundAddressParams
from rpcsvc.operations.service import Answer, Call, Service, action
from rpcsvc.operations.swap import find_any_order, look_again, require_owner
from rpcsvc.operations.views import awaits_upstream_refund
from rpcsvc.store.changes import Ticket
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
    address = await read_untried(params.address, order, service, call.known, field="address")
    if call.known is not None:
        call.known.require_destination(address, field="address", caller=call.known)
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


async def read_untried(
    text: str, order: Order, service: Service, caller: KnownClient | None = None, *, field: str
) -> str:
    """The validated address, unless a refund to it has failed before.

    Raises InvalidDestination, and DestinationNotAllowed as ``require_refundable``.
    """
    address = await read_refund_address(text, order.terms.direction, service, field=field)
    require_refundable(service, order, address, field, caller)
    if has_refused(order, address):
        raise InvalidDestination(
            "A refund to this address has failed on its network, and another would, too. Send"
            " another address of the user.",
            field=field,
            received=address,
        )
    return address
