"""The deposit policy in words, as every quote states it (design part 3).

What does not live here: the rules themselves (domain/deposit_rules.py).
"""

from __future__ import annotations

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
