"""capabilities and schemas: what the service can do, and how to ask."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from rpcsvc.domain.money import USDC, XMR, format_units
from rpcsvc.domain.order import AgentState
from rpcsvc.domain.pricing import Direction, deposit_asset, payout_asset
from rpcsvc.errors import Unavailable
from rpcsvc.operations.envelope import Answer, Json, action
from rpcsvc.operations.inputs import LEAST_PUBLIC_KEY, key_pattern
from rpcsvc.operations.narrowing import Networks
from rpcsvc.operations.operation import Operation
from rpcsvc.operations.params import NoParams
from rpcsvc.operations.policy_text import DEPOSIT_POLICY
from rpcsvc.operations.quoting import limits, network_of, payable_deposit
from rpcsvc.operations.service import Call, Service
from rpcsvc.orders.ports.rates import Rate
from rpcsvc.orders.unfunded import Client


async def capabilities(service: Service, _params: NoParams, call: Call) -> Answer:
    """Chains, directions, limits at the current rate, operations and the deposit policy."""
    rate = _rate(service)
    data = {
        "engine": service.engine.name,
        "directions": [_direction(direction) for direction in Direction],
        "chains": [_chain(chain) for chain in service.chains.all()],
        "assets": [{"symbol": a.symbol, "decimals": a.decimals} for a in (XMR, USDC)],
        "limits": _limits(service, rate, call.client) if rate else [],
        "operations": [_operation(op) for op in service.operations],
        "depositPolicy": DEPOSIT_POLICY,
        "depositWindowSeconds": service.policy.deposit_window // 1000,
        "priceLockSeconds": None if service.relay else service.policy.price_lock // 1000,
        "rate": _rate_view(rate),
    }
    plan = action("plan", "Tell what the user wants, as far as it is known.", "swap.plan", {})
    return Answer(AgentState.READY, data, [plan])


async def schemas(service: Service, _params: NoParams, _call: Call) -> Answer:
    """JSON Schemas of the params and result of every operation, and of the envelope."""
    networks = Networks(service.chains.all(), service.monero_networks)
    described = {op.name: schemas_of(op, networks) for op in service.operations}
    return Answer(AgentState.READY, {"operations": described, "envelope": ENVELOPE_SCHEMA})


@lru_cache(maxsize=64)
def schemas_of(operation: Operation, networks: Networks) -> Json:
    """``{params, result}`` of one operation, from the models that validate."""
    params = operation.params.input_schema(networks)
    if operation.idempotent:
        params["properties"]["idempotency-key"] = IDEMPOTENCY_KEY_SCHEMA
    return {"params": params, "result": operation.result.model_json_schema(by_alias=True)}


IDEMPOTENCY_KEY_SCHEMA: Json = {
    "type": "string",
    # The stricter of the two lengths: every caller may use it.
    "pattern": f"^ *{key_pattern(LEAST_PUBLIC_KEY)} *$",
    "description": "JSON-RPC only; over HTTPS the same goes into the idempotency-key header. As"
    " there, blanks around it are no part of it.",
}

_STRINGS = {"type": "array", "items": {"type": "string"}}
_OBJECTS = {"type": "array", "items": {"type": "object"}}
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


def _rate(service: Service) -> Rate | None:
    """The rate, or None: capabilities are told even while there is no price."""
    try:
        return service.rates.rate()
    except Unavailable:
        return None


def _rate_view(rate: Rate | None) -> dict[str, str] | None:
    if rate is None:
        return None
    return {"usdcPerXmr": format_units(rate.usdc_per_xmr, USDC), "source": rate.source}


def _direction(direction: Direction) -> dict[str, str]:
    return {
        "direction": direction.value,
        "send": deposit_asset(direction).symbol,
        "receive": payout_asset(direction).symbol,
    }


def _chain(chain: Any) -> Json:
    return {
        "name": chain.name,
        "chainId": chain.chain_id,
        "aliases": list(chain.aliases),
        "displayName": chain.display_name,
        "token": chain.usdc_contract,
        "minSwapUsd": chain.min_swap_usd,
    }


def _limits(service: Service, rate: Rate, client: Client) -> list[Json]:
    """Per direction, the least over all chains and the most; a quote names the chain's own."""
    rows = []
    for direction in Direction:
        asset = deposit_asset(direction)
        pairs = [limits(service, direction, chain, rate) for chain in service.chains.all()]
        rows.append(
            {
                "direction": direction.value,
                "asset": asset.symbol,
                "minimum": format_units(min(low for low, _ in pairs), asset),
                "maximum": format_units(max(high for _, high in pairs), asset),
                "maxNow": _max_now(service, direction, rate, client),
            }
        )
    return rows


def _max_now(service: Service, direction: Direction, rate: Rate, client: Client) -> str | None:
    """The largest deposit that the client can order now, on the chain with most; None: no limit."""
    payout = payout_asset(direction)
    most = -1
    for network in {network_of(payout, chain) for chain in service.chains.all()}:
        try:
            room = service.reservable(network, client)
        except Unavailable:
            continue  # this one can pay nothing; health says why
        if room is None:
            return None
        most = max(most, room)
    units = payable_deposit(direction, max(0, most), rate)
    return format_units(units, deposit_asset(direction))


def _operation(operation: Operation) -> Json:
    return {
        "operation": operation.name,
        "summary": operation.summary,
        "http": f"{operation.method} {operation.path}" if operation.path else None,
        "idempotent": operation.idempotent,
    }
