"""Places an order and commits it with its answer; renders the status answer of each change.

Orders of every surface go through ``place``, so one key makes one order. Polls are far more
frequent than changes, so rendered answers are stored. ``view_key`` names the code and settings that
rendered one; an answer with another key is ignored.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from itertools import count

from msgspec import Struct
from msgspec.structs import replace

from rpcsvc import __version__
from rpcsvc.domain.addresses import ZERO_ADDRESS
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.order import (
    AGENT_STATE_OF,
    AWAITS_DEPOSIT,
    Deposit,
    DepositKey,
    DepositState,
    Order,
    OrderStatus,
    Terms,
    Timeouts,
    TwapPlan,
)
from rpcsvc.domain.pricing import Direction, Price
from rpcsvc.domain.refunds import plan_refunds
from rpcsvc.domain.settle_times import kind_of_order
from rpcsvc.domain.twap import is_filling
from rpcsvc.domain.webhooks import Webhook
from rpcsvc.operations.approvals import Unapproved, approved
from rpcsvc.operations.clients import require_worth, within_limits
from rpcsvc.operations.dispatch import head
from rpcsvc.operations.models import StatusResult
from rpcsvc.operations.service import Answer, Service, Stored, ViewContext
from rpcsvc.operations.views import status_actions, status_data
from rpcsvc.orders.idempotency import Claim, retried
from rpcsvc.orders.ports.venue import NewOrder, OrderRequest, VenueQuote
from rpcsvc.signing import ResponseSigner
from rpcsvc.store.changes import StatusView, StoredResponse
from rpcsvc.store.database import StaleWrite


class PlacedOrder(Struct, frozen=True):
    """A new order, its stored status answer, and the quote that it locks.

    A bridge order has no status answer: the agent API does not serve it.
    """

    order: Order
    status: Answer[StatusResult] | None
    quote: VenueQuote


async def place(
    service: Service,
    request: Callable[[], OrderRequest],
    claim: Claim | None,
    write: Callable[[PlacedOrder], bytes],
) -> Stored:
    """Make the order, or replay the first answer of its idempotency key.

    ``request`` runs only if an order is made, so that a missing rate can't block a replay.
    ``write`` renders the answer, which is committed with the order and the key. Raises
    IdempotencyConflict, Unavailable and the limits' errors.
    """
    attempts = count()

    def make() -> Awaitable[bytes]:
        return _make(service, request(), claim, write, is_first=next(attempts) == 0)

    if claim is None:
        return Stored(await retried(make))
    body, replayed = await service.idempotency.once(claim, make)
    return Stored(body, replayed)


async def _make(
    service: Service,
    request: OrderRequest,
    claim: Claim | None,
    write: Callable[[PlacedOrder], bytes],
    *,
    is_first: bool,
) -> bytes:
    webhook = request.webhook
    if webhook is not None:
        client = request.client.customer.stored(service.client_secret)
        webhook = replace(webhook, client=client)
    try:
        limited = await within_limits(service, request, is_first=is_first)
        return await _open(service, limited, claim, write, webhook)
    except Unapproved as wanted:
        await require_worth(service, request.known, wanted.quote)
        approval = await approved(service, request, claim, wanted)
    request = replace(request, approval=approval)
    try:
        limited = await within_limits(service, request, is_first=is_first)
        return await _open(service, limited, claim, write, webhook)
    except Unapproved:  # the rate has moved meanwhile
        raise StaleWrite from None


async def _open(
    service: Service,
    request: OrderRequest,
    claim: Claim | None,
    write: Callable[[PlacedOrder], bytes],
    webhook: Webhook | None,
) -> bytes:
    async with service.venue.opening(request, claim) as opened:
        return await _commit(service, opened, claim, write, webhook)


async def _commit(
    service: Service,
    opened: NewOrder,
    claim: Claim | None,
    write: Callable[[PlacedOrder], bytes],
    webhook: Webhook | None,
) -> bytes:
    order, status = open_order(opened.terms), None
    if not order.terms.is_bridge:
        status = status_answer(service.views, order, order.status_at)
    body = write(PlacedOrder(order, status, opened.quote))
    response = _response(claim, body, order.terms.created_at)
    view = as_view(order, status) if status else None
    await service.processor.open(
        order,
        view,
        response,
        opened.relay,
        opened.admission,
        webhook=webhook,
        bounds=opened.bounds,
    )
    return body


def _response(claim: Claim | None, body: bytes, now: int) -> StoredResponse | None:
    if claim is None:
        return None
    return StoredResponse(claim.namespace, claim.key, claim.operation, claim.params, body, now)


def status_answer(
    views: ViewContext, order: Order, now: int, *, is_paying: bool = False
) -> Answer[StatusResult]:
    """The answer of swap.status for an order at ``now`` (ms).

    ``is_paying``: a signed payment is under way. Stored answers are rendered without it, and not
    served meanwhile.
    """
    data = status_data(views, order, now, is_paying=is_paying)
    actions = status_actions(views, order, now, is_paying=is_paying)
    return Answer(AGENT_STATE_OF[order.status], data, actions)


def project(views: ViewContext, order: Order) -> StatusView | None:
    """The status answer as bytes, and until when it is valid.

    None for a bridge order, and while chunks are swapped, because their remaining time changes.
    """
    if order.terms.is_bridge or is_filling(order):
        return None
    return as_view(order, status_answer(views, order, order.status_at))


def as_view(order: Order, answer: Answer[StatusResult]) -> StatusView:
    """The stored form of an answer of ``status_answer``."""
    body = head("swap.status", answer)
    # The next actions change with time only while a deposit is awaited.
    awaits = order.status in AWAITS_DEPOSIT
    return StatusView(
        body,
        order.terms.expires_at if awaits else None,
        None if order.status.is_terminal else kind_of_order(order),
    )


def view_key(
    views: ViewContext, chains: ChainRegistry, signer: ResponseSigner | None
) -> Callable[[], str]:
    """Return the key of status answers: after a rotation, stored ones are attested again."""

    @cache
    def rendering() -> str:
        return _hash_of_samples(replace(views, attest=None), [each.name for each in chains.all()])

    return lambda: rendering() if signer is None else f"{rendering()}-{signer.kid[:16]}"


def _hash_of_samples(views: ViewContext, chains: Sequence[str]) -> str:
    """A hash of sample views, which names the code and settings that render views."""
    samples = [
        head("swap.status", status_answer(views, _sample(direction, chain, status), 0))
        for chain in chains
        for direction in Direction
        for status in OrderStatus
    ]
    return hashlib.sha256(b"\n".join([__version__.encode(), *samples])).hexdigest()[:16]


def _sample(direction: Direction, chain: str, status: OrderStatus) -> Order:
    order = open_order(_sample_terms(direction, chain))
    if status is OrderStatus.AWAITING_DEPOSIT:
        return order
    deposit = Deposit(DepositKey("n", "t", 0), 10, ZERO_ADDRESS, 1, DepositState.CONFIRMED)
    order, _ = plan_refunds(replace(order, status=status, deposits=(deposit,)))
    return order


def _sample_terms(direction: Direction, chain: str) -> Terms:
    return Terms(
        order_id="ord_" + "0" * 26,
        session_id="",
        direction=direction,
        chain=chain,
        chain_id=1,
        deposit_network="n",
        payout_network="n",
        deposit_address=ZERO_ADDRESS,
        to_address=ZERO_ADDRESS,
        deposit_amount=100,
        expected_output=100,
        min_received=90,
        min_deposit=1,
        max_deposit=1000,
        price=Price(1, 0, 0, 9900),
        refund_fee=1,
        created_at=0,
        expires_at=1000,
        timeouts=Timeouts(1, 1, 1, 1, 1),
        twap=TwapPlan(1, 1),
    )
