"""``data.quote`` and the deposit policy that every quote states (design part 3)."""

from __future__ import annotations

from typing import Any

import orjson

from rpcsvc.clock import iso8601
from rpcsvc.domain.money import USDC, format_units
from rpcsvc.operations.service import Service
from rpcsvc.orders.ports.venue import Quote

DEPOSIT_POLICY = [
    {
        "case": "exact",
        "action": "Paid out at the quoted rate once it is confirmed, when first seen until"
        " priceLockedUntil.",
    },
    {"case": "over", "action": "All of it is swapped, up to the maximum."},
    {"case": "above_maximum", "action": "All of it is refunded."},
    {
        "case": "under",
        "action": "More may follow until expiresAt. Then a sum of at least the minimum is"
        " swapped, a smaller one refunded; what is worth no more than the fee of sending it back"
        " is held and shown.",
    },
    {"case": "several", "action": "Deposits are summed, each at the rate of its own time."},
    {
        "case": "after_price_lock",
        "action": "First seen after priceLockedUntil and before expiresAt: swapped at the rate of"
        " that moment if it brings at least minReceived in proportion, otherwise treated as late."
        " The lock ends early when the rate moves too far; what was seen by then keeps its rate.",
    },
    {
        "case": "late",
        "action": "Re-priced when first seen after expiresAt; swapped if the result is within"
        " minReceived in proportion, otherwise refunded.",
    },
    {
        "case": "after_terminal",
        "action": "Recorded, shown on the order, and refunded when worth more than the fee.",
    },
    {
        "case": "refund",
        "action": "Goes to the refundAddress that the order was made with, and nowhere else."
        " Without one a USDC refund goes to the sender, and an XMR refund waits until the holder of"
        " the session names an address (actionRequired: refund_address).",
    },
    {"case": "reorganised_away", "action": "The order steps back to awaiting_deposit."},
]


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
