"""``data.quote``: a price as callers see it."""

from __future__ import annotations

from typing import Any

import orjson

from rpcsvc.clock import iso8601
from rpcsvc.domain.money import USDC, format_units
from rpcsvc.operations.policy_text import DEPOSIT_POLICY
from rpcsvc.operations.service import Service
from rpcsvc.orders.ports.venue import Quote

# The same in every quote: written once.
_DEPOSIT_POLICY = orjson.Fragment(orjson.dumps(DEPOSIT_POLICY))


def quote_view(service: Service, quote: Quote) -> dict[str, Any]:
    """``data.quote``: amounts as decimal strings, fees in the payout's asset."""
    payout = quote.payout_asset
    spread = quote.price.spread(quote.direction, quote.deposit.units)
    return {
        "direction": quote.direction.value,
        "chain": quote.chain.name,
        "chainId": quote.chain.chain_id,
        "depositAsset": quote.deposit_asset.symbol,
        "depositAmount": format_units(quote.deposit.units, quote.deposit_asset),
        "payoutAsset": payout.symbol,
        "expectedOutput": format_units(quote.expected_output, payout),
        "minReceived": format_units(quote.min_received, payout),
        "rate": format_units(quote.rate.usdc_per_xmr, USDC),
        "rateAsOf": iso8601(quote.rate.as_of),
        "fees": {
            "asset": payout.symbol,
            "spread": format_units(spread, payout),
            "network": format_units(quote.price.payout_fee, payout),
            "refundNetwork": format_units(quote.fees.refund, quote.deposit_asset),
            "refundAsset": quote.deposit_asset.symbol,
        },
        "estimatedTimeSeconds": quote.seconds,
        "depositWindowSeconds": service.policy.deposit_window // 1000,
        "priceLockedUntil": None
        if quote.price_locked_until is None
        else iso8601(quote.price_locked_until),
        "depositPolicy": _DEPOSIT_POLICY,
    }
