"""Places an order: the venue opens it, and it is committed with its answer.

Orders of every surface go through ``place``, so one key makes one order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from rpcsvc.domain.machine import open_order
from rpcsvc.domain.order import Order
from rpcsvc.operations.envelope import Answer
from rpcsvc.operations.projection import as_view, status_answer
from rpcsvc.operations.service import Service, Stored
from rpcsvc.orders.idempotency import Claim
from rpcsvc.orders.ports.store import StoredResponse
from rpcsvc.orders.ports.venue import NewOrder, OrderRequest, Quote


class Placed(NamedTuple):
    """A new order, the status answer that is stored with it, and the quote that it locks.

    A bridge order has no status answer: the agent API does not know it.
    """

    order: Order
    status: Answer | None
    quote: Quote


async def place(
    service: Service,
    request: Callable[[], OrderRequest],
    claim: Claim | None,
    write: Callable[[Placed], bytes],
) -> Stored:
    """Make the order, or give the answer again that its idempotency key was first given.

    ``request`` is called only if an order is made: what it needs, such as a rate, is not in the way
    of an answer that was given before. ``write`` makes the answer, which is committed together with
    the order and the key. Raises IdempotencyConflict, Unavailable and the limits' errors.
    """
    if claim is None:
        return Stored(await _make(service, request(), None, write))
    body, replayed = await service.idempotency.once(
        claim, lambda: _make(service, request(), claim, write)
    )
    return Stored(body, replayed)


async def _make(
    service: Service, request: OrderRequest, claim: Claim | None, write: Callable[[Placed], bytes]
) -> bytes:
    async with service.venue.opening(request, claim) as opened:
        return await _commit(service, opened, claim, write)


async def _commit(
    service: Service, opened: NewOrder, claim: Claim | None, write: Callable[[Placed], bytes]
) -> bytes:
    order, status = open_order(opened.terms), None
    if not order.terms.is_bridge:
        status = status_answer(service.views, order, order.status_at)
    body = write(Placed(order, status, opened.quote))
    response = _response(claim, body, order.terms.created_at)
    view = as_view(order, status) if status else None
    await service.processor.open(order, view, response, opened.relay, opened.client)
    return body


def _response(claim: Claim | None, body: bytes, now: int) -> StoredResponse | None:
    if claim is None:
        return None
    return StoredResponse(claim.namespace, claim.key, claim.operation, claim.params, body, now)
