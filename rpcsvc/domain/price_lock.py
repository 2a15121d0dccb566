"""The price lock: which rate a deposit is swapped at, and when the lock of an order ends early.

Each deposit has its own rate, fixed when it is first recorded: a deposit inside the lock gets the
locked rate, and holds the lock for no other deposit.
Rates are USDC units per XMR; times are ms since the epoch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.order import Deposit, Order, Terms
from rpcsvc.domain.pricing import BPS
from rpcsvc.domain.states import Direction
from rpcsvc.domain.steps import ImpossibleTransition, Transition


def rate_of_deposit(order: Order, first_seen_at: int, current: int | None) -> int | None:
    """The rate of a deposit first seen at ``first_seen_at``; None if it is priced when decided.

    ``current`` is the rate at which it is recorded, None when there is no fresh one.
    """
    if first_seen_at <= order.price_locked_until:
        return order.terms.price.rate
    if first_seen_at <= order.terms.expires_at and current is not None:
        return current if brings_min_received(order.terms, current) else None
    return None


def brings_min_received(terms: Terms, rate: int) -> bool:
    """Whether the whole order would bring at least ``min_received`` at this rate."""
    output = terms.price.at(rate).output(terms.direction, terms.deposit_amount)
    return output > 0 and output >= terms.min_received


def units_by_rate(deposits: Iterable[Deposit], fallback: int) -> dict[int, int]:
    """Deposit units by the rate they are swapped at; ``fallback`` for those without a rate."""
    found: Counter[int] = Counter()
    for deposit in deposits:
        found[fallback if deposit.rate is None else deposit.rate] += deposit.units
    return dict(found)


def breaking_rate(direction: Direction, current: int, break_bps: int) -> int:
    """The locked rate from which on a lock breaks at the ``current`` rate.

    An x2u lock breaks when its rate is above the result, a u2x lock when it is below: then the
    rate has moved against the service by more than ``break_bps`` of the locked one.
    """
    if direction is Direction.XMR_TO_USDC:
        return current * BPS // (BPS - break_bps)
    return -(-current * BPS // (BPS + break_bps))


def lock_broken(order: Order, _event: ev.LockBroken, now: int) -> Transition:
    """End the lock now. Deposits that were seen before keep their rate."""
    if now >= order.price_locked_until:
        raise ImpossibleTransition(f"the price lock of {order.order_id} is over")
    return Transition(replace(order, lock_broken_at=now))
