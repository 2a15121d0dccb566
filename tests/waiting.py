"""Orders written to a database directly: they wait for a deposit, or have done so."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec.structs import replace

from rpcsvc.domain.machine import open_order
from rpcsvc.domain.order import Order, OrderStatus
from rpcsvc.domain.pricing import Direction
from rpcsvc.orders.ports.wallets import DepositSighting
from rpcsvc.store.changes import Change, HistoryEntry, StatusView
from rpcsvc.store.database import Statement, Tables
from rpcsvc.store.orders import OrderStore
from tests.unit.orders import terms

VIEW = StatusView(b"{}", None)
_RECORD = (
    "INSERT INTO deposits (network, txid, output_index, order_id, units, first_seen_at, state,"
    " is_dust) SELECT :network, :txid, :output_index, o.order_id, :units, 1, :state, 0"
    " FROM orders o WHERE o.deposit_address = :address AND o.deposit_network = :network"
    " ON CONFLICT (network, txid, output_index) DO UPDATE SET state = excluded.state"
)


async def wait_for_deposit(
    database: Tables,
    address: str,
    *,
    expires_at: int,
    status: OrderStatus = OrderStatus.AWAITING_DEPOSIT,
    **agreed: Any,
) -> Order:
    """An order for USDC to an address, in time until ``expires_at`` (ms)."""
    found = replace(
        terms(Direction.USDC_TO_XMR),
        order_id=f"ord_{address}",
        deposit_address=address,
        created_at=expires_at - 1000,
        expires_at=expires_at,
        **agreed,
    )
    order = replace(open_order(found), status=status)
    if status.is_terminal:
        order = replace(order, deadline_at=None, on_deadline=None)
    entry = HistoryEntry(1, found.created_at, "OrderCreated", order.status.value, {})
    store = OrderStore(database, lambda: "key")
    await store.commit(Change(order=order, view=VIEW, is_new=True, history=entry))
    return order


async def record_deposits(database: Tables, sightings: Sequence[DepositSighting]) -> None:
    """Record deposits as their orders would, if they have any."""
    await database.write(
        [
            Statement(
                _RECORD,
                {
                    **each.key._asdict(),
                    "address": each.address,
                    "units": each.units,
                    "state": each.state.value,
                },
            )
            for each in sightings
        ]
    )
