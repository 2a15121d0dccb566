"""The bridge's handlers: rates, deposit, withdraw and an order by id (spec 2.4, 4.4)."""

from __future__ import annotations

import orjson
from msgspec import Raw

from rpcsvc.clock import iso8601
from rpcsvc.domain.bridge import DIRECTION_OF, STATUS_OF, BridgeKind, kind_of, perps_chain
from rpcsvc.domain.money import Money
from rpcsvc.domain.order import PERPS, Order, Report
from rpcsvc.domain.pricing import deposit_asset
from rpcsvc.errors import OrderNotFound, Unavailable
from rpcsvc.operations import bff_models
from rpcsvc.operations.inputs import read_destination
from rpcsvc.operations.ordering import PlacedOrder, place
from rpcsvc.operations.service import Call, Flat, Service, Stored
from rpcsvc.operations.swap import find_any_order
from rpcsvc.orders.idempotency import Claim
from rpcsvc.orders.ports.venue import ExchangeRate, OrderRequest
from rpcsvc.strict_json import Json, dumps


async def rates(service: Service, _params: bff_models.Nothing, _call: Call) -> Flat:
    """The market's rate, and what a bridge order would be given now."""
    _require_bridge(service)
    found = await service.venue.bridge_rates()
    market = [bff_models.BridgeRate(each.exchange, _rate(each), each.eta) for each in found.market]
    return Flat(
        bff_models.BridgeRates(market, bff_models.ReferenceRate(_rate(found.own), found.own.eta))
    )


async def deposit(service: Service, params: bff_models.BridgeParams, call: Call) -> Stored:
    """A new order from XMR to the exchange."""
    return await _open(service, params, call, BridgeKind.DEPOSIT)


async def withdraw(service: Service, params: bff_models.BridgeParams, call: Call) -> Stored:
    """A new order from the exchange to XMR."""
    return await _open(service, params, call, BridgeKind.WITHDRAW)


async def order(service: Service, params: bff_models.BridgeOrderIdParams, _call: Call) -> Flat:
    """A bridge order's current state. Raises OrderNotFound."""
    found = await find_any_order(service, params.order_id)
    service.venue.watch(found.order_id)
    if not found.terms.is_bridge:
        raise OrderNotFound(
            f"{params.order_id} is not a bridge order. Ask for it at GET /orders/{params.order_id}."
        )
    return Flat(await _view(service, found))


async def _open(
    service: Service, params: bff_models.BridgeParams, call: Call, kind: BridgeKind
) -> Stored:
    _require_bridge(service)
    direction = DIRECTION_OF[kind]
    to = await read_destination(params.to_address, direction, service, field="toAddress")
    chain = perps_chain(service.policy.bridge_min_usd)
    claim = None
    if call.idempotency_key is not None:
        claim = Claim(call.namespace, call.idempotency_key, f"bff.bridge.{kind}", {"toAddress": to})

    def request() -> OrderRequest:
        least = service.venue.least_deposit(direction, chain)
        amount = Money(least, deposit_asset(direction))
        return OrderRequest(
            direction,
            chain,
            amount,
            to,
            None,
            client=call.client,
            to_field="toAddress",
            known=call.known,
        )

    return await place(service, request, claim, _opened)


def _require_bridge(service: Service) -> None:
    if PERPS not in service.venue.profile.bridges:
        raise Unavailable("This service has no bridge.")


def _opened(placed: PlacedOrder) -> bytes:
    terms = placed.order.terms
    return dumps(
        bff_models.BridgeOpened(
            order_id=terms.order_id,
            deposit_address=terms.deposit_address,
            destination=terms.to_address,
            expires_at=iso8601(terms.expires_at),
        )
    )


async def _view(service: Service, found: Order) -> bff_models.BridgeOrderView | Json:
    terms = found.terms
    if (
        terms.upstream_id is not None
        or (confirmations := await service.venue.confirmations(found)) is None
    ):
        return _relayed_view(found)
    arrived = [d for d in found.deposits if d.is_active]
    payout, status = found.payout, STATUS_OF[found.status]
    return bff_models.BridgeOrderView(
        id=terms.order_id,
        type=kind_of(found),
        status=status,
        amount=str(sum(d.units for d in arrived)),
        confirmations=confirmations.fewest,
        required_confirmations=confirmations.required,
        tx_in=arrived[0].key.txid if arrived else None,
        tx_out=payout.txid if payout else None,
        failure_reason=found.error_message if status.is_failure else None,
        created_at=iso8601(terms.created_at),
        completed_at=iso8601(found.completed_at) if found.completed_at else None,
    )


def _relayed_view(found: Order) -> Json:
    """A bridge order that an upstream settles, with its progress as last reported."""
    terms, report = found.terms, found.report or Report()
    nothing = {"amount": "0", "confirmations": 0, "requiredConfirmations": 0, "tx_out": None}
    progress = orjson.loads(report.extra) if report.extra else nothing
    return {
        "id": terms.order_id,
        "type": kind_of(found).value,
        "status": STATUS_OF[found.status].value,
        "tx_in": report.deposit_txid,
        "failure_reason": report.error,
        "created_at": iso8601(terms.created_at),
        "completed_at": iso8601(found.completed_at) if found.completed_at else None,
        **progress,
    }


def _rate(rate: ExchangeRate) -> Raw:
    return Raw(format(rate.rate, "f").encode())
