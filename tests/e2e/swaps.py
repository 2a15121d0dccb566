"""The swaps of the crash tests."""

from __future__ import annotations

EVM = "0x52908400098527886E0F7030069857D2E4169EE7"
MONERO = (
    "888tNkZrPN6JsEgekjMnABU4TBzc2Dt29EPAvkRxbANsAnjyPbb3iQ1YBRk1UXcdRsiKc"
    "9dhwMVgN5S9cQUiyoogDavup3H"
)
SWAPS = {
    "x2u": {"direction": "x2u", "chain": "arbitrum", "amount": "0.8", "to": EVM},
    "u2x": {"direction": "u2x", "chain": "base", "amount": "150", "to": MONERO},
}
