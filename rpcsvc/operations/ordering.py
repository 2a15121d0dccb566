"""Placing an order: a quote becomes terms, and the order is committed with its answer.

Whatever surface an order is made over comes through ``place``; so one key makes one order, and
an order made over one surface is seen over the other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import NamedTuple

from rpcsvc import ids
from rpcsvc.domain import twap
from rpcsvc.domain.chains import Chain
from rpcsvc.domain.integrators import Integrator
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.money import Money
from rpcsvc.domain.order import Order, Terms, TwapPlan
from rpcsvc.domain.pricing import Direction, payout_asset
from rpcsvc.errors import ServiceError
from rpcsvc.operations.envelope import Answer
from rpcsvc.operations.projection import as_view, status_answer
from rpcsvc.operations.quoting import Quote, agreed, make_quote, network_of, quote_to_come
from rpcsvc.operations.results import Stored
from rpcsvc.operations.service import SOCKET, Service
from rpcsvc.orders.idempotency import Claim
from rpcsvc.orders.ports.store import RelayRecord, StoredResponse
from rpcsvc.orders.ports.upstream import Created, UpstreamRequest
from rpcsvc.orders.unfunded import Client
from rpcsvc.orders.upstream.relay import Relay


class OrderRequest(NamedTuple):
    """What the user wants, checked: ``amount`` is what they send, ``to`` where the payout goes.

    ``twap``: swap it in chunks, if it is worth two or more. ``integrator``: who brought it.
    ``refund_address``: where refunds go, and nowhere else.
    ``client``: whose unfunded orders it is counted with. ``to_field``: the input that named ``to``.
    """

    direction: Direction
    chain: Chain
    amount: Money
    to: str
    session_id: str | None
    twap: TwapPlan | None = None
    integrator: Integrator | None = None
    refund_address: str | None = None
    client: Client = SOCKET
    to_field: str = "to"


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
    if service.relay is not None:
        return await _make_there(service, service.relay, request, claim, write)
    service.engine.require_ready()
    await _require_payable(service, request)
    found = await _quoted(service, request)
    order = open_order(_terms(service, found, request))
    return await _commit(service, order, found, claim, write, request.client)


async def _require_payable(service: Service, request: OrderRequest) -> None:
    """Raise InvalidDestination for a payout or refund address that is refused on its network."""
    named = [(payout_asset(request.direction), request.to, request.to_field)]
    if request.refund_address is not None:
        named.append((request.amount.asset, request.refund_address, "refundAddress"))
    for asset, address, field in named:
        network = network_of(asset, request.chain)
        await service.engine.require_payable(network, address, field=field)


async def _quoted(service: Service, request: OrderRequest) -> Quote:
    return await make_quote(
        service,
        direction=request.direction,
        chain=request.chain,
        amount=request.amount,
        integrator=request.integrator,
        to=request.to,
        client=request.client,
    )


async def _make_there(
    service: Service,
    relay: Relay,
    request: OrderRequest,
    claim: Claim | None,
    write: Callable[[Placed], bytes],
) -> bytes:
    """The same at the upstream. No price is in the way of what a key in doubt is an answer to."""
    relay.require_can_fix(request.refund_address)
    is_in_doubt = claim is not None and await relay.is_in_doubt(claim)
    try:
        found = await _quoted(service, request)
    except ServiceError:
        if not is_in_doubt:
            raise
        found = quote_to_come(service, request.direction, request.chain, request.amount)
    terms = _terms(service, found, request)
    with _asking(service, terms, request.client):
        record, created = await _created(relay, terms, request, claim)
    async with relay.recording(record):
        found = agreed(found, created)
        terms = replace(
            terms,
            order_id=record.order_id,
            session_id=record.session_id,
            deposit_address=created.deposit_address,
            price=found.price,
            expected_output=found.expected_output,
            min_received=found.min_received,
            expires_at=created.expires_at,
            upstream_id=created.upstream_id,
            twap=None,
        )
        order = open_order(terms)
        body = await _commit(service, order, found, claim, write, request.client, record)
    if request.twap is not None:
        # Whether it is cut, and how, is told with its status only.
        await relay.follower.ask_first(record.order_id)
    return body


async def _commit(
    service: Service,
    order: Order,
    found: Quote,
    claim: Claim | None,
    write: Callable[[Placed], bytes],
    client: Client,
    record: RelayRecord | None = None,
) -> bytes:
    status = None
    if not order.terms.is_bridge:
        status = status_answer(service.venue, order, order.status_at)
    body = write(Placed(order, status, found))
    response = _response(claim, body, order.terms.created_at)
    view = as_view(order, status) if status else None
    await service.processor.open(order, view, response, record, service.stored(client))
    return body


def _asking(service: Service, terms: Terms, client: Client) -> AbstractContextManager[None]:
    """Count an order with its client's while the upstream is being asked for it."""
    if service.reservations is None:
        return nullcontext()
    return service.reservations.asking(open_order(terms), service.stored(client))


async def _created(
    relay: Relay, terms: Terms, request: OrderRequest, claim: Claim | None
) -> tuple[RelayRecord, Created]:
    """What the upstream made, and the claim that it was made under."""
    # The session goes with the order: with it its owner can name a refund address there, too.
    # Nothing here may depend on the rate: a call that is repeated must be the very same.
    there = UpstreamRequest(
        direction=request.direction,
        chain=request.chain,
        amount=request.amount,
        to=request.to,
        session_id=terms.session_id,
        twap=request.twap,
        refund_address=request.refund_address,
    )
    return await relay.create(there, claim, terms.order_id, least=terms.min_received)


def _response(claim: Claim | None, body: bytes, now: int) -> StoredResponse | None:
    if claim is None:
        return None
    return StoredResponse(claim.namespace, claim.key, claim.operation, claim.params, body, now)


def _terms(service: Service, found: Quote, request: OrderRequest) -> Terms:
    now = service.clock.now_ms()
    return Terms(
        order_id=ids.order_id(service.random),
        session_id=request.session_id or ids.session_id(service.random),
        direction=found.direction,
        chain=found.chain.name,
        chain_id=found.chain.chain_id,
        deposit_network=network_of(found.deposit_asset, found.chain),
        payout_network=network_of(found.payout_asset, found.chain),
        deposit_address=_deposit_address(service, found),
        to_address=request.to,
        deposit_amount=found.deposit.units,
        expected_output=found.expected_output,
        min_received=found.min_received,
        min_deposit=found.minimum,
        max_deposit=found.maximum,
        price=found.price,
        refund_fee=found.fees.refund,
        created_at=now,
        expires_at=now + service.policy.deposit_window,
        timeouts=service.policy.timeouts,
        integrator=request.integrator.id if request.integrator else None,
        twap=request.twap if request.twap and _is_cut(found, request.twap) else None,
        refund_address=request.refund_address,
        price_locked_until=found.price_locked_until,
    )


def _deposit_address(service: Service, found: Quote) -> str:
    """The engine's; of an order that an upstream settles, nothing before that has made it."""
    return "" if service.relay is not None else service.engine.deposit_address(found.deposit_asset)


def _is_cut(found: Quote, plan: TwapPlan) -> bool:
    """Whether the order is worth more than two chunks."""
    return twap.is_worth_cutting(plan, found.direction, found.price.rate, found.deposit.units)
