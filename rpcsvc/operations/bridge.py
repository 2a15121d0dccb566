"""The bridge's handlers: rates, deposit, withdraw and an order by id (spec 2.4, 4.4).

What does not live here: what a bridge order is (domain/bridge.py).
"""

from __future__ import annotations

import orjson

from rpcsvc.clock import iso8601
from rpcsvc.domain.bridge import DIRECTION_OF, STATUS_OF, BridgeKind, kind_of, perps_chain
from rpcsvc.domain.chains import Chain
from rpcsvc.domain.money import USDC, Money, format_units
from rpcsvc.domain.order import PERPS, Deposit, Order, Report
from rpcsvc.domain.pricing import ONE_XMR, Direction, Price, deposit_asset, usd_to_deposit_ceil
from rpcsvc.errors import OrderNotFound, Unavailable
from rpcsvc.operations.bff_models import Nothing
from rpcsvc.operations.bridge_models import BridgeOrderIdParams, BridgeParams
from rpcsvc.operations.envelope import Json
from rpcsvc.operations.inputs import read_destination
from rpcsvc.operations.ordering import OrderRequest, Placed, place
from rpcsvc.operations.results import Flat, Stored
from rpcsvc.operations.service import Call, Service
from rpcsvc.operations.swap import find_any_order
from rpcsvc.orders.idempotency import Claim


async def rates(service: Service, _params: Nothing, _call: Call) -> Flat:
    """The market's rate, and what a bridge order would be given now."""
    _require_bridge(service)
    if service.relay is not None:
        return Flat(await service.relay.bridge_rates())
    rate, policy = service.rates.rate(), service.policy
    ours = Price(rate.usdc_per_xmr, policy.spread_bps, 0, policy.min_received_bps)
    eta = _eta(service)
    market = {"exchange": rate.source, "rate": _number(rate.usdc_per_xmr), "eta": eta}
    own = {"rate": _number(ours.output(Direction.XMR_TO_USDC, ONE_XMR)), "eta": eta}
    return Flat({"rates": [market], "wagyuRate": own})


async def deposit(service: Service, params: BridgeParams, call: Call) -> Stored:
    """A new order from XMR to the exchange."""
    return await _open(service, params, call, BridgeKind.DEPOSIT)


async def withdraw(service: Service, params: BridgeParams, call: Call) -> Stored:
    """A new order from the exchange to XMR."""
    return await _open(service, params, call, BridgeKind.WITHDRAW)


async def order(service: Service, params: BridgeOrderIdParams, _call: Call) -> Flat:
    """A bridge order as it stands. Raises OrderNotFound."""
    found = await find_any_order(service, params.order_id)
    if service.relay is not None:
        service.relay.follower.watch(found.order_id)
    if not found.terms.is_bridge:
        raise OrderNotFound(
            f"{params.order_id} is not a bridge order. Ask for it at GET /orders/{params.order_id}."
        )
    return Flat(await _view(service, found))


async def _open(service: Service, params: BridgeParams, call: Call, kind: BridgeKind) -> Stored:
    _require_bridge(service)
    direction = DIRECTION_OF[kind]
    to = await read_destination(params.to_address, direction, service, field="toAddress")
    chain = perps_chain(service.policy.bridge_min_usd)
    claim = None
    if call.idempotency_key is not None:
        claim = Claim(call.namespace, call.idempotency_key, f"bff.bridge.{kind}", {"toAddress": to})

    def request() -> OrderRequest:
        amount = Money(_least(service, direction, chain), deposit_asset(direction))
        return OrderRequest(
            direction, chain, amount, to, None, client=call.client, to_field="toAddress"
        )

    return await place(service, request, claim, _opened)


def _least(service: Service, direction: Direction, chain: Chain) -> int:
    """The least deposit, in deposit units; an upstream has its own."""
    if service.relay is not None:
        return 1
    return usd_to_deposit_ceil(direction, chain.min_swap_usd, service.rates.rate().usdc_per_xmr)


def _require_bridge(service: Service) -> None:
    if PERPS not in service.engine.bridges:
        raise Unavailable("This service has no bridge.")


def _eta(service: Service) -> str:
    seconds = service.engine.estimated_seconds(deposit_asset(Direction.XMR_TO_USDC), PERPS)
    return f"{seconds} s" if seconds < 120 else f"{-(-seconds // 60)} min"


def _opened(placed: Placed) -> bytes:
    terms = placed.order.terms
    return orjson.dumps(
        {
            "orderId": terms.order_id,
            "depositAddress": terms.deposit_address,
            "destination": terms.to_address,
            "expiresAt": iso8601(terms.expires_at),
        }
    )


async def _view(service: Service, found: Order) -> Json:
    terms = found.terms
    if found.terms.upstream_id is not None:
        return _relayed_view(found)
    arrived = [d for d in found.deposits if d.is_active]
    payout, needed = found.payout, service.engine.required_confirmations(terms.deposit_network)
    status = STATUS_OF[found.status]
    return {
        "id": terms.order_id,
        "type": kind_of(found).value,
        "status": status.value,
        "amount": str(sum(d.units for d in arrived)),
        "confirmations": min(needed, await _confirmations(service, arrived)),
        "requiredConfirmations": needed,
        "tx_in": arrived[0].key.txid if arrived else None,
        "tx_out": payout.txid if payout else None,
        "failure_reason": found.error_message if status.is_failure else None,
        "created_at": iso8601(terms.created_at),
        "completed_at": iso8601(found.completed_at) if found.completed_at else None,
    }


def _relayed_view(found: Order) -> Json:
    """A bridge order that an upstream settles, as it last told."""
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


async def _confirmations(service: Service, arrived: list[Deposit]) -> int:
    """Those of the deposit that has the fewest."""
    return min([await service.engine.confirmations(d.key) for d in arrived], default=0)


def _number(units: int) -> orjson.Fragment:
    """USDC units as a JSON number, digit for digit."""
    return orjson.Fragment(format_units(units, USDC).encode())
