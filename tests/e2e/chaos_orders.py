"""Settles the orders of a chaos run, and checks each by its own terms."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Final

from rpcsvc.domain.order import Order, OrderStatus, Transfer, TransferKind, TransferState
from rpcsvc.domain.pricing import keeps_proportion
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from rpcsvc.store.orders import OrderStore
from tests.e2e.audit import count, orders_of
from tests.e2e.chaos import KillableService
from tests.e2e.processes import until

# The exact amount, dust, below the minimum, underpaid, overpaid, and above the maximum.
AMOUNTS: Final = {
    "x2u": [None, None, None, "0.00005", "0.01", "0.3", "1", "7", "1000"],
    "u2x": [None, None, None, "0.01", "2", "60", "200", "1100", "60000"],
}
HOUR: Final = 3_600
# More deposits than any of these orders has.
MOST_CHUNKS: Final = 200
GONE: Final = (TransferState.FAILED, TransferState.CANCELLED)


async def pass_deadlines(service: KillableService) -> None:
    """Advance the clock until every deadline has passed and every chunk is swapped or abandoned."""
    for seconds in (1, 2 * HOUR, 2 * HOUR, 25 * HOUR, HOUR):
        await settle(service, seconds)
    for _ in range(MOST_CHUNKS):
        if count(service.data_dir, "effects"):
            await settle(service, HOUR)


async def settle(service: KillableService, seconds: int) -> None:
    """Advance the clock, and wait until all work that is due is done."""
    answer = await service.rpc("sandbox.fault", fault="advance_clock", seconds=seconds)
    now = int(datetime.fromisoformat(answer["now"]).timestamp() * 1000)
    due = (
        "effects WHERE kind <> 'fill_chunk'",  # a chunk may wait for a fair rate
        "sandbox_transactions WHERE state = 'mempool'",
        "sandbox_transactions WHERE state = 'dropped' AND watched = 1",
        "deposits WHERE state = 'seen'",
        f"orders WHERE deadline_at <= {now}",
    )

    async def is_done() -> bool:
        return not any(count(service.data_dir, table) for table in due)

    try:
        await until(is_done)
    except TimeoutError:
        left = [table for table in due if count(service.data_dir, table)]
        raise AssertionError(f"work that is due is not done: {left}") from None


async def stored(data_dir: Path) -> list[Order]:
    """All orders in the database."""
    database = await SqliteDatabase.open(data_dir)
    try:
        store = OrderStore(database, str)
        found = [await store.order(order_id) for order_id in orders_of(data_dir)]
        return [order for order in found if order is not None]
    finally:
        await database.close()


def inconsistencies_of(order: Order) -> list[str]:
    """Contradictions of a settled order to its own terms."""
    found = []
    if not order.status.is_terminal and order.action_required is None:
        found.append(f"is {order.status}, and waits for nobody")
    sent = [transfer for transfer in order.transfers if transfer.state not in GONE]
    if any(transfer.state is not TransferState.SETTLED for transfer in sent):
        found.append("has a transfer that is not at its end")
    payouts = [transfer for transfer in sent if transfer.kind is TransferKind.PAYOUT]
    if len(payouts) != (order.status is OrderStatus.COMPLETED):
        found.append(f"is {order.status} with {len(payouts)} payouts")
    found += [each for payout in payouts for each in _payout_inconsistencies(order, payout)]
    beside = sum(_beside_deposits(order, t) for t in sent if t.kind is TransferKind.REFUND)
    if not 0 <= beside <= sum(_unswapped(order, payout) for payout in payouts):
        found.append(f"was sent {beside} back beside its deposits")
    return [f"{order.order_id} {each}" for each in found]


def _payout_inconsistencies(order: Order, payout: Transfer) -> list[str]:
    terms = order.terms
    taken = [d for d in order.deposits if d.transfer_id == payout.transfer_id]
    total = sum(d.units for d in taken)
    if order.fills:
        brought = sum(fill.output for fill in order.fills)
        is_right = payout.units == brought and _unswapped(order, payout) >= 0
    elif any(d.first_seen_at > order.price_locked_until for d in taken):
        is_right = keeps_proportion(
            output=payout.units,
            deposited=total,
            min_received=terms.min_received,
            deposit_amount=terms.deposit_amount,
        )
    else:
        is_right = payout.units == terms.price.output(terms.direction, total)
    return [] if is_right else [f"was paid {payout.units} for {total}"]


def _unswapped(order: Order, payout: Transfer) -> int:
    """The part of the paid out deposits that no chunk swapped, in deposit units."""
    if not order.fills:
        return 0
    taken = sum(d.units for d in order.deposits if d.transfer_id == payout.transfer_id)
    return taken - sum(fill.units for fill in order.fills)


def _beside_deposits(order: Order, refund: Transfer) -> int:
    """The part of a refund beyond its own deposits, in deposit units."""
    taken = sum(d.units for d in order.deposits if d.transfer_id == refund.transfer_id)
    return refund.units + refund.fee - taken
