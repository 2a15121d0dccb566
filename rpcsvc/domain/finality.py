"""The sum at risk: deposits that orders count before they are final. Pure.

Such a deposit is a row, written by the commit that confirms it, and so before anything can be
planned with it; the sums of these rows are checked in that transaction. The row goes once the
deposit is final, or is gone and was not paid out. The row of a deposit that vanishes after its
payout stays: all losses together never pass the operator's bounds. Then its network counts final
deposits only, for a time. Amounts are USDC units.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from msgspec import Struct

from rpcsvc.domain.events import DepositConfirmed, Event
from rpcsvc.domain.money import mul_div_ceil
from rpcsvc.domain.order import Deposit, DepositKey, DepositState, Order
from rpcsvc.domain.pricing import ONE_XMR, Direction

# The network of the sum over all networks.
EVERYWHERE: Final = ""


class FinalityLimits(Struct, frozen=True):
    """The operator's bounds on the sum at risk (settings ``onchain.unfinal_usd``): in all, on each
    network, and on networks with a bound of their own. ``hold_ms``: how long after a loss only
    final deposits count on the network.
    """

    total: int = 0
    each: int = 0
    networks: Mapping[str, int] = MappingProxyType({})
    hold_ms: int = 0

    def on(self, network: str) -> tuple[tuple[str, int], tuple[str, int]]:
        """Return the bounds that hold on a network: its own, and that of all."""
        return (network, self.networks.get(network, self.each)), (EVERYWHERE, self.total)


# Only final deposits count.
FINAL_ONLY: Final = FinalityLimits()


class Exposure(Struct, frozen=True):
    """A deposit that counts early, with its worth, and the bounds that the sums must keep."""

    key: DepositKey
    units: int
    bounds: tuple[tuple[str, int], ...]


class FinalityChange(Struct, frozen=True):
    """The effect of an order's change on the sum at risk.

    ``taken`` counts from now on. ``freed`` are final, or gone unspent. ``lost`` are gone and paid
    out, and their networks wait for finality until ``held_until``; ``returned`` are back.
    """

    order_id: str
    at: int
    taken: Exposure | None = None
    freed: tuple[DepositKey, ...] = ()
    lost: tuple[DepositKey, ...] = ()
    returned: tuple[DepositKey, ...] = ()
    held_until: int = 0


def counts_early(order: Order, deposit: Deposit) -> bool:
    """Return whether an order may count a deposit before it is final.

    Not where a later rate decides what is paid for it: its worth would not be known. Nor dust: it
    would cost more to keep count of than it is worth.
    """
    if deposit.units <= order.terms.refund_fee:
        return False
    if order.terms.direction is Direction.USDC_TO_XMR:
        return True
    return order.terms.twap is None and deposit.rate is not None


def worth(order: Order, deposit: Deposit) -> int:
    """Return the most that can be paid out or sent back for a deposit, at the rate of its swap."""
    if order.terms.direction is Direction.USDC_TO_XMR:
        return deposit.units
    rate = order.terms.price.rate if deposit.rate is None else deposit.rate
    return max(1, mul_div_ceil(deposit.units, rate, ONE_XMR))


def is_lost(deposit: Deposit | None) -> bool:
    """Return whether a deposit vanished after a payout or refund of it was signed."""
    return (
        deposit is not None
        and deposit.state is DepositState.REMOVED
        and deposit.transfer_id is not None
    )


def finality_change(
    before: Order, after: Order, event: Event, limits: FinalityLimits, now: int
) -> FinalityChange | None:
    """Return what an event that changed an order does to the sum at risk; None: nothing."""
    taken, freed, lost, returned = None, [], [], []
    if isinstance(event, DepositConfirmed):
        deposit = after.deposit(event.key)
        if event.is_final or deposit is None:
            freed.append(event.key)
        else:
            taken = Exposure(event.key, worth(after, deposit), limits.on(event.key.network))
    for deposit in after.deposits:
        known = before.deposit(deposit.key)
        if known == deposit:
            continue
        if is_lost(deposit) and not is_lost(known):
            lost.append(deposit.key)
        elif deposit.state is DepositState.REMOVED and not is_lost(deposit):
            freed.append(deposit.key)
        elif is_lost(known) and not is_lost(deposit):
            returned.append(deposit.key)
    if not (taken or freed or lost or returned):
        return None
    return FinalityChange(
        after.order_id,
        now,
        taken,
        tuple(freed),
        tuple(lost),
        tuple(returned),
        now + limits.hold_ms,
    )
