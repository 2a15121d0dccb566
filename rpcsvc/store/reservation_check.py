"""Recounts what orders reserve, for ``rpcsvc db check``: rows against what follows from orders."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping

from rpcsvc.domain.order import Order
from rpcsvc.orders.reservations import funded_units, unfunded_reservation_of
from rpcsvc.store.database import Tables
from rpcsvc.store.engines import WALLETS
from rpcsvc.store.orders import SqlOrderStore

_ROWS = "SELECT order_id, kind, network, units FROM reservations"

# Units by kind and network.
Written = Mapping[tuple[str, str], int]


async def reservation_problems(database: Tables, now: int) -> list[str]:
    """Orders whose reservations do not follow from them at a time (ms); ``database`` is of one
    moment. Simulated wallets take every order: nothing is counted for them.
    """
    has_wallets = await database.fetch_one(WALLETS) is not None
    written: dict[str, dict[tuple[str, str], int]] = defaultdict(dict)
    for row in await database.fetch(_ROWS):
        written[row["order_id"]][row["kind"], row["network"]] = row["units"]
    store = SqlOrderStore(database, lambda: "")
    problems: list[str] = []
    for order_id in sorted({*written, *await store.open_orders()}):
        order = await store.order(order_id)
        if order is None:
            continue  # an upstream is being asked for it
        if has_wallets or order.terms.upstream_id is not None or order_id in written:
            problems += _differences(order, written.get(order_id, {}), now)
    return problems


def _differences(order: Order, written: Written, now: int) -> Iterator[str]:
    expected = {("funded", network): units for network, units in funded_units(order).items()}
    unfunded = unfunded_reservation_of(order)
    if unfunded is not None:
        place = ("unfunded", unfunded.network)
        if place in written or order.terms.expires_at > now:
            expected[place] = unfunded.units
    for kind, network in sorted({*expected, *written}):
        has, needs = written.get((kind, network)), expected.get((kind, network))
        if has != needs:
            yield (
                f"what an order reserves ({kind}, on {network}) is {has or 0} units and has to be"
                f" {needs or 0}: {order.order_id}"
            )
