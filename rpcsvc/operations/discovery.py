"""The operations capabilities and schemas."""

from __future__ import annotations

from functools import lru_cache

from rpcsvc.domain.chains import Chain
from rpcsvc.domain.money import USDC, XMR, format_units
from rpcsvc.domain.order import AgentState
from rpcsvc.domain.pricing import Direction, deposit_asset, payout_asset
from rpcsvc.operations import models
from rpcsvc.operations.inputs import IDEMPOTENCY_KEY, LEAST_PUBLIC_KEY, key_pattern
from rpcsvc.operations.narrowing import Networks
from rpcsvc.operations.params import DetailParams
from rpcsvc.operations.service import Answer, Call, Operation, Service, action
from rpcsvc.operations.swap import DEPOSIT_POLICY
from rpcsvc.orders.ports.venue import DirectionLimits, Market
from rpcsvc.strict_json import Json

_STRINGS = {"type": "array", "items": {"type": "string"}}
_OBJECTS = {"type": "array", "items": {"type": "object"}}


async def capabilities(
    service: Service, _params: DetailParams, call: Call
) -> Answer[models.CapabilitiesResult]:
    """Chains, directions, limits at the current rate, operations and the deposit policy."""
    market, price_lock = await service.venue.market(call.client), service.venue.price_lock
    data = models.CapabilitiesResult(
        *service.views.common(),
        engine=service.venue.profile.engine,
        directions=[_direction(direction) for direction in Direction],
        chains=[_chain(chain) for chain in service.chains.all()],
        assets=[models.AssetInfo(a.symbol, a.decimals) for a in (XMR, USDC)],
        limits=[_limits(each) for each in market.limits] if market else [],
        operations=[_operation(op) for op in _offered(service)],
        deposit_policy=DEPOSIT_POLICY,
        deposit_window_seconds=service.policy.deposit_window // 1000,
        price_lock_seconds=None if price_lock is None else price_lock // 1000,
        rate=_rate_view(market),
        webhooks=models.WebhookInfo(service.webhooks.public_key(), service.webhooks.targets.onion),
    )
    plan = action("plan", "Tell what the user wants, as far as it is known.", "swap.plan", {})
    return Answer(AgentState.READY, data, [plan])


async def schemas(
    service: Service, _params: DetailParams, _call: Call
) -> Answer[models.SchemasResult]:
    """JSON Schemas of the params and result of every operation, and of the envelope."""
    networks = Networks(service.chains.all(), service.monero_networks)
    described = {
        op.name: models.OperationSchemas(**schemas_of(op, networks)) for op in service.operations
    }
    data = models.SchemasResult(
        *service.views.common(), operations=described, envelope=ENVELOPE_SCHEMA
    )
    return Answer(AgentState.READY, data)


@lru_cache(maxsize=64)
def schemas_of(operation: Operation, networks: Networks) -> Json:
    """``{params, result}`` of one operation, from the models that validate."""
    params = operation.params.input_schema(networks)
    if operation.idempotent:
        params["properties"][IDEMPOTENCY_KEY] = IDEMPOTENCY_KEY_SCHEMA
    return {"params": params, "result": models.schema_of(operation.result)}


IDEMPOTENCY_KEY_SCHEMA: Json = {
    "type": "string",
    # The stricter of the two lengths: every caller may use it.
    "pattern": f"^ *{key_pattern(LEAST_PUBLIC_KEY)} *$",
    "description": "JSON-RPC only; over HTTPS the same goes into the idempotency-key header. As"
    " there, blanks around it are no part of it.",
}

ENVELOPE_SCHEMA: Json = {
    "type": "object",
    "required": [
        "ok", "operation", "state", "missingInputs", "validationErrors", "nextActions", "data",
        "requestId",
    ],
    "properties": {
        "ok": {"type": "boolean"},
        "operation": {"type": "string"},
        "state": {"enum": [state.value for state in AgentState]},
        "missingInputs": _STRINGS,
        "validationErrors": _OBJECTS,
        "nextActions": _OBJECTS,
        "data": {"type": "object"},
        "requestId": {"type": "string"},
        "error": {
            "type": "object",
            "required": ["code", "message", "retryable"],
            "properties": {
                "code": {"type": "string"},
                "message": {"type": "string"},
                "retryable": {"type": "boolean"},
                "details": {"type": "object"},
            },
        },
    },
}  # fmt: skip


def _offered(service: Service) -> list[Operation]:
    """The operations that the venue can carry out."""
    takes_authorizations = service.venue.profile.takes_authorizations
    return [op for op in service.operations if takes_authorizations or not op.payable]


def _rate_view(market: Market | None) -> models.RateInfo | None:
    if market is None:
        return None
    rate = market.rate
    return models.RateInfo(format_units(rate.usdc_per_xmr, USDC), rate.source)


def _direction(direction: Direction) -> models.DirectionInfo:
    sent, received = deposit_asset(direction), payout_asset(direction)
    return models.DirectionInfo(direction.value, sent.symbol, received.symbol)


def _chain(chain: Chain) -> models.ChainInfo:
    return models.ChainInfo(
        name=chain.name,
        chain_id=chain.chain_id,
        aliases=list(chain.aliases),
        display_name=chain.display_name,
        token=chain.usdc_contract,
        min_swap_usd=chain.min_swap_usd,
    )


def _limits(found: DirectionLimits) -> models.Limits:
    """Per direction, the least over all chains and the most; a quote names the chain's own."""
    asset = deposit_asset(found.direction)
    return models.Limits(
        direction=found.direction.value,
        asset=asset.symbol,
        minimum=format_units(found.minimum, asset),
        maximum=format_units(found.maximum, asset),
        max_now=None if found.max_now is None else format_units(found.max_now, asset),
    )


def _operation(operation: Operation) -> models.OperationInfo:
    return models.OperationInfo(
        operation=operation.name,
        summary=operation.summary,
        http=f"{operation.method} {operation.path}" if operation.path else None,
        idempotent=operation.idempotent,
    )
