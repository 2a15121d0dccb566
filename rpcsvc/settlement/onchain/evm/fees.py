"""What a transaction offers for its gas: fees of the moment, and of a replacement.

Pure arithmetic of EIP-1559: gas prices are wei per gas, costs wei in all. What does not live
here: asking a node (node.py), when to replace (payments.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from rpcsvc.settlement.onchain.evm.node_types import FeeData
from rpcsvc.settlement.onchain.evm.payment_ledger import LARGEST_STORED

USUAL_GAS: Final = 65_000
"""What a transfer of USDC to a new holder takes, about; used until a node has estimated it."""
# By so many percent nodes want both fees of a replacement higher, unless told otherwise: Geth,
# Reth and Nethermind.
_USUAL_RULE: Final = 10


@dataclass(frozen=True, slots=True)
class GasPrice:
    """Wei per gas: ``max_fee`` bounds base fee and ``tip`` together."""

    max_fee: int
    tip: int


def with_margin(gas: int) -> int:
    """The gas limit for an estimate. Gas that is not used is not paid."""
    return gas + gas // 4


def with_l1_margin(fee: int) -> int:
    """What an OP-stack chain may take for L1, from its estimate: as for gas, and it may double."""
    return with_margin(2 * fee)


def price_of(moment: FeeData) -> GasPrice:
    """What is offered when nothing bounds it: the base fee may double before it is mined."""
    return GasPrice(2 * moment.base_fee + moment.tip, moment.tip)


def first_price(moment: FeeData, gas: int, highest_cost: int) -> GasPrice | None:
    """What a new transaction offers; None when the moment's price costs more than the bound."""
    return _bounded(moment, GasPrice(1, 0), gas, highest_cost)


def raised_price(
    old: GasPrice, moment: FeeData, percent: int, gas: int, highest_cost: int
) -> GasPrice | None:
    """What a replacement offers: both fees raised by ``percent`` and at least the moment's.

    When that costs more than the bound, the bound itself, if nodes would still take that for a
    rise; else None. Nodes refuse a replacement unless both rise, by 10 percent usually.
    """
    wished = _bounded(moment, _both_raised(old, percent), gas, highest_cost)
    if wished is not None:
        return wished
    last = _bounded(moment, _both_raised(old, _USUAL_RULE), gas, highest_cost)
    return None if last is None else GasPrice(_highest(gas, highest_cost), last.tip)


def is_too_low(price: GasPrice, moment: FeeData) -> bool:
    """Whether the next block would not take it."""
    return price.max_fee < moment.base_fee + min(price.tip, moment.tip)


def _both_raised(old: GasPrice, percent: int) -> GasPrice:
    return GasPrice(_raised(old.max_fee, percent), _raised(old.tip, percent))


def _raised(fee: int, percent: int) -> int:
    """Rounded up, and more than before whatever the percentage."""
    return max(-(-fee * (100 + percent) // 100), fee + 1)


def _highest(gas: int, highest_cost: int) -> int:
    return min(highest_cost // gas, LARGEST_STORED)


def _bounded(moment: FeeData, least: GasPrice, gas: int, highest_cost: int) -> GasPrice | None:
    highest = _highest(gas, highest_cost)
    tip = max(least.tip, moment.tip)
    needed = max(least.max_fee, moment.base_fee + tip, 1)
    if needed > highest:
        return None
    wished = 2 * moment.base_fee + tip
    return GasPrice(max(needed, min(wished, highest)), tip)
