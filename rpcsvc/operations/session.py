"""The operations of a session's holder: swap.list and swap.refundAddress."""

from __future__ import annotations

from rpcsvc import ids
from rpcsvc.clock import iso8601
from rpcsvc.domain.money import format_units
from rpcsvc.domain.order import AGENT_STATE_OF, AgentState, Order
from rpcsvc.errors import OrderNotFound
from rpcsvc.operations.envelope import Answer, Json, action
from rpcsvc.operations.inputs import read_order_id, read_session
from rpcsvc.operations.params import ListParams, RefundAddressParams
from rpcsvc.operations.service import Call, Service, session_source, with_session
from rpcsvc.operations.support import awaits_address, read_untried
from rpcsvc.operations.swap import find_any_order, look_again, require_owner
from rpcsvc.orders.ports.store import Ticket


async def list_orders(service: Service, params: ListParams, call: Call) -> Answer:
    """A page of the session's orders. Orders of the bridge are not among them.

    Raises OrderNotFound for a cursor that is no order of the session.
    """
    session = read_session(params.session_id) or ""
    after = None if params.after is None else await _cursor(service, params.after, session)
    found = await service.store.orders_of_session(session, params.limit, after)
    last = found[-1].order_id if len(found) == params.limit else None
    listed = [_summary(order) for order in found if not order.terms.is_bridge]
    data: Json = {"orders": listed, "nextAfter": last}
    data = with_session(service.views, data, (session, session_source(call)))
    return Answer(AgentState.READY, data, _next_page(last, session))


async def _cursor(service: Service, after: str, session: str) -> str:
    order = await service.store.order(read_order_id(after))
    if order is None or order.terms.session_id != session:
        raise OrderNotFound(
            "after is no order of this session. Send nextAfter of the page before, or leave it out"
            " for the newest orders."
        )
    return after


def _summary(order: Order) -> Json:
    terms = order.terms
    return {
        "orderId": terms.order_id,
        "state": AGENT_STATE_OF[order.status].value,
        "status": order.status.value,
        "direction": terms.direction.value,
        "chain": terms.chain,
        "depositAsset": terms.deposit_asset.symbol,
        "depositAmount": format_units(terms.deposit_amount, terms.deposit_asset),
        "payoutAsset": terms.payout_asset.symbol,
        "expectedOutput": format_units(terms.expected_output, terms.payout_asset),
        "toAddress": terms.to_address,
        "createdAt": iso8601(terms.created_at),
        "expiresAt": iso8601(terms.expires_at),
        "completedAt": iso8601(order.completed_at) if order.completed_at else None,
    }


def _next_page(after: str | None, session: str) -> list[Json]:
    if after is None:
        return []
    params = {"sessionId": session, "after": after}
    return [action("next_page", "There may be older orders.", "swap.list", params)]


async def set_refund_address(service: Service, params: RefundAddressParams, call: Call) -> Answer:
    """Have the refund that waits go to the address; whether it was accepted.

    Raises OrderNotFound, VerificationFailed, and InvalidDestination.
    """
    order = require_owner(await find_any_order(service, params.order_id), params.session_id)
    address = await read_untried(params.address, order, service, field="address")
    accepted = await _give(service, order, address, params)
    data = {"refundAddress": {"accepted": accepted, "address": address}}
    data = with_session(service.views, data, (order.terms.session_id, session_source(call)))
    step = look_again(order, _ACCEPTED if accepted else _why_not(order))
    return Answer(AgentState.READY, data, [step])


_ACCEPTED = "Look at the order again until its refund has settled."


def _why_not(order: Order) -> str:
    if order.terms.refund_address is not None:
        return "The order was made with a refundAddress, and refunds go there and nowhere else."
    if not awaits_address(order):
        return "No refund waits for an address: name one when actionRequired is refund_address."
    return "The address was not taken: another came before it. Look where the refund goes."


async def _give(service: Service, order: Order, address: str, params: RefundAddressParams) -> bool:
    """Give the address where one is awaited. The same address again is accepted again."""
    if order.terms.refund_address is not None:
        return False
    if order.refund_to == address:
        return True
    if not awaits_address(order):
        return False
    if await service.venue.give_refund_address(order, address, _ticket(service, params)):
        return True
    return (await find_any_order(service, order.order_id)).refund_to == address


def _ticket(service: Service, params: RefundAddressParams) -> Ticket:
    """The same in the form that an upstream takes; it is not a ticket of this service."""
    return Ticket(
        ticket_id=ids.ticket_id(service.random),
        created_at=service.clock.now_ms(),
        category="agent",
        message="Please send the refund to this address.",
        order_id=params.order_id,
        session_id=params.session_id,
        wallet_address=params.address,
    )
