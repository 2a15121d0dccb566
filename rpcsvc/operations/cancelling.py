"""swap.cancel and its call on the BFF: the owner ends an order that nothing was sent to."""

from __future__ import annotations

import hmac

from rpcsvc.domain.order import Order, OrderStatus
from rpcsvc.errors import VerificationFailed
from rpcsvc.operations.envelope import Answer
from rpcsvc.operations.inputs import read_session
from rpcsvc.operations.params import CancelParams
from rpcsvc.operations.projection import status_answer
from rpcsvc.operations.results import session_source
from rpcsvc.operations.service import Call, Service
from rpcsvc.operations.swap import find_order


async def cancel(service: Service, params: CancelParams, call: Call) -> Answer:
    """The order as it stands after the cancellation. Raises as ``cancel_order`` does."""
    order = await cancel_order(service, params.order_id, params.session_id)
    answer = status_answer(service.views, order, service.clock.now_ms())
    session = {"sessionId": order.terms.session_id, "sessionSource": session_source(call)}
    return answer._replace(data={**answer.data, **session})


async def cancel_order(service: Service, order_id: str, session_id: str) -> Order:
    """End an order that waits for its first deposit. One that has expired stays as it is.

    Raises OrderNotFound (orders of the bridge included), VerificationFailed for another session,
    OrderNotCancellable once a deposit was seen, and Unavailable.
    """
    session = read_session(session_id) or ""
    order = await find_order(service, order_id)
    if not hmac.compare_digest(order.terms.session_id.encode(), session.encode()):
        raise VerificationFailed(
            "sessionId is not the one of this order. Send the sessionId that create or execute"
            " answered."
        )
    if order.status is OrderStatus.EXPIRED:
        return order
    return await service.venue.cancel(order)
