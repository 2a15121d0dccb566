"""TWAP: how an order is cut into chunks, what a chunk brings, and when the next one is due.

Pure arithmetic on an order's deposits. The chunks are cut by their worth at the quoted rate and
swapped each at the rate of its moment; the payout is their sum. A chunk is swapped only at a rate
at which the user gets no less than the order's ``min_received`` in proportion.
Sources: spec 2.4 (twapConfig, twap), spec 3.4.
"""

from __future__ import annotations

from msgspec.structs import replace

from rpcsvc.domain.events import leftover_in, next_transfer_id
from rpcsvc.domain.order import Deposit, Fill, Order, TransferKind, TransferState, TwapPlan
from rpcsvc.domain.pricing import ONE_XMR, Direction, keeps_proportion, usdc_to_deposit_floor

LEAST_CHUNK_USD = 250
LEAST_INTERVAL_MS = 1_000
LONGEST_INTERVAL_MS = 60_000
DEFAULT_INTERVAL_MS = 10_000
LEAST_CHUNKS = 2
# An order that is worth more is cut into larger chunks.
MOST_CHUNKS = 1_000
# A chunk waits this long for a fair rate: ten intervals, and not less than ten minutes.
ABANDON_INTERVALS = 10
LEAST_ABANDON_MS = 600_000


def chunks_of(plan: TwapPlan, direction: Direction, rate: int, total: int) -> tuple[int, ...]:
    """The chunks of ``total`` deposit units at the quoted ``rate``, in USDC units per XMR.

    The last chunk takes the remainder. A single one means that nothing is cut.
    """
    size = usdc_to_deposit_floor(direction, plan.chunk_units, rate)
    worth, chunk = _worths(plan, direction, rate, total)
    count = min(max(1, worth // chunk) if size else 1, MOST_CHUNKS)
    size = max(size, total // count) if count == MOST_CHUNKS else size
    return (*[size] * (count - 1), total - size * (count - 1))


def is_worth_cutting(plan: TwapPlan, direction: Direction, rate: int, total: int) -> bool:
    """Whether an order of ``total`` deposit units is worth more than two chunks at ``rate``."""
    worth, chunk = _worths(plan, direction, rate, total)
    return worth > LEAST_CHUNKS * chunk


def _worths(plan: TwapPlan, direction: Direction, rate: int, total: int) -> tuple[int, int]:
    """The worth of ``total`` and of a chunk, in a common unit that makes both exact integers."""
    if direction is Direction.XMR_TO_USDC:
        return total * rate, plan.chunk_units * ONE_XMR
    return total, plan.chunk_units


def chunks(order: Order, total: int) -> tuple[int, ...]:
    """The chunks of ``total`` deposit units; a single one without a plan."""
    terms = order.terms
    if terms.twap is None:
        return (total,)
    return chunks_of(terms.twap, terms.direction, terms.price.rate, total)


def is_cut(order: Order, total: int) -> bool:
    """Return whether a deposit of ``total`` units is swapped in chunks at all."""
    return len(chunks(order, total)) >= LEAST_CHUNKS


def counted(order: Order) -> tuple[Deposit, ...]:
    """The deposits that are being swapped now; none when no filling is going on."""
    payout_to_be = next_transfer_id(order, TransferKind.PAYOUT)
    return tuple(d for d in order.deposits if d.transfer_id == payout_to_be)


def is_filling(order: Order) -> bool:
    """Return whether chunks are being swapped: begun, and the payout not planned yet."""
    return order.terms.twap is not None and bool(counted(order))


def assign_to_payout(order: Order) -> Order:
    """Assign the unspent deposits to the payout that the chunks will make."""
    payout_to_be = next_transfer_id(order, TransferKind.PAYOUT)
    taken = {d.key for d in order.unspent}
    deposits = tuple(
        replace(d, transfer_id=payout_to_be) if d.key in taken else d for d in order.deposits
    )
    return replace(order, deposits=deposits, fills=(), leftover=0)


def total_of(order: Order) -> int:
    """The deposit units that are being swapped."""
    return sum(d.units for d in counted(order))


def next_fill(order: Order, rate: int, now: int) -> Fill | None:
    """The next chunk at ``rate``, in USDC units per XMR; None when that rate is not fair.

    The fixed fee is spread over the chunks, so that their sum bears it once.
    """
    terms, total = order.terms, total_of(order)
    cut = chunks(order, total)
    index = len(order.fills)
    units, before = cut[index], sum(cut[:index])
    price = terms.price.at(rate)
    fee_share = price.fixed_fee * (before + units) // total - price.fixed_fee * before // total
    output = price.exchanged(terms.direction, units) - fee_share
    fair = keeps_proportion(
        output=output,
        deposited=units,
        min_received=terms.min_received,
        deposit_amount=terms.deposit_amount,
    )
    if not fair:
        return None
    return Fill(units, output, price.integrator_fee(terms.direction, units), rate, now)


def is_filled(order: Order) -> bool:
    """Return whether the last chunk is swapped."""
    return len(order.fills) == len(chunks(order, total_of(order)))


def due_at(order: Order) -> int:
    """Return when (ms) the next chunk is due: the first at once, each other an interval later."""
    if not order.fills or order.terms.twap is None:
        return order.status_at
    return order.fills[-1].at + order.terms.twap.interval_ms


def abandoned_at(order: Order) -> int:
    """Return when (ms) the next chunk stops waiting for a fair rate."""
    interval = order.terms.twap.interval_ms if order.terms.twap else 0
    return due_at(order) + max(ABANDON_INTERVALS * interval, LEAST_ABANDON_MS)


def swapped_units(order: Order) -> int:
    """The deposit units of all chunks so far."""
    return sum(fill.units for fill in order.fills)


def count_leftover(order: Order) -> Order:
    """Return the order with its leftover recounted, in deposit units.

    The leftover is the sum of the payout's active deposits, minus the swapped units, minus the
    units that a refund has sent back or may yet send back.
    """
    if not order.fills or order.payout is None:
        return order
    paid_out = order.payout.transfer_id
    there = sum(d.units for d in order.deposits if d.transfer_id == paid_out and d.is_active)
    gone = (TransferState.FAILED, TransferState.CANCELLED)
    back = sum(leftover_in(order, t.transfer_id) for t in order.refunds if t.state not in gone)
    return replace(order, leftover=max(0, there - swapped_units(order) - back))
