"""Checks of a database for every backend: invariants of its books, reservations against the orders
that they follow from, and open orders that the configured engine can't settle.

An engine does not see the money of another engine's orders: it would let them expire, refund them,
or call them paid.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Final

from rpcsvc.domain.order import Order
from rpcsvc.domain.reservations import funded_units, unfunded_reservation_of
from rpcsvc.store.database import Query, Row, Tables
from rpcsvc.store.orders import OrderStore

# Called with what is done, and how much of how much.
Progress = Callable[[str, int, int], None]
CHECKING: Final = "checking the books"

# Each query finds rows that must not exist; its first column names the order or transfer.
BOOKS: Final[tuple[tuple[str, str], ...]] = (
    (
        "a deposit is spent on a transfer of another order",
        "SELECT d.order_id FROM deposits d JOIN transfers t USING (transfer_id)"
        " WHERE t.order_id <> d.order_id",
    ),
    (
        "a deposit is spent on a transfer that does not exist",
        # While an order is swapped in chunks, its deposits belong to the payout that will follow.
        "SELECT d.order_id FROM deposits d JOIN orders o USING (order_id)"
        " WHERE d.transfer_id IS NOT NULL"
        " AND d.transfer_id NOT IN (SELECT transfer_id FROM transfers)"
        " AND NOT (o.twap_chunk_units IS NOT NULL AND o.status = 'executing_swap'"
        " AND d.transfer_id LIKE o.order_id || '/payout/%')",
    ),
    (
        "an order has more than one payout that is, or may be, paid",
        "SELECT order_id FROM transfers WHERE kind = 'payout'"
        " AND state NOT IN ('failed', 'cancelled') GROUP BY order_id HAVING count(*) > 1",
    ),
    (
        "a refund is not its deposits less the fee",
        "SELECT t.transfer_id FROM transfers t WHERE t.kind = 'refund'"
        " AND t.state NOT IN ('failed', 'cancelled') AND t.units + t.fee <>"
        " (SELECT coalesce(sum(d.units), 0) FROM deposits d WHERE d.transfer_id = t.transfer_id)"
        " AND t.order_id NOT IN (SELECT order_id FROM fills)",
    ),
    (
        "a payout is not the sum of its chunks",
        "SELECT t.transfer_id FROM transfers t JOIN fills f USING (order_id)"
        " WHERE t.kind = 'payout' AND t.state NOT IN ('failed', 'cancelled')"
        " GROUP BY t.seq HAVING t.units <> sum(f.output)",
    ),
    (
        "chunks, refunds and what is left do not add up to an order's deposits",
        # Left out: orders with removed deposits, whose leftover is withheld.
        "SELECT order_id FROM (SELECT o.order_id, o.leftover,"
        " (SELECT sum(f.units) FROM fills f WHERE f.order_id = o.order_id) AS swapped,"
        " (SELECT coalesce(sum(d.units), 0) FROM deposits d WHERE d.order_id = o.order_id"
        "  AND d.transfer_id IS NOT NULL) AS spent,"
        " (SELECT coalesce(sum(t.units + t.fee), 0) FROM transfers t"
        "  WHERE t.order_id = o.order_id AND t.kind = 'refund'"
        "  AND t.state NOT IN ('failed', 'cancelled')) AS refunded"
        " FROM orders o WHERE o.status = 'completed' AND NOT EXISTS"
        " (SELECT 1 FROM deposits d WHERE d.order_id = o.order_id AND d.state = 'removed')) AS sums"
        " WHERE swapped IS NOT NULL AND swapped + leftover + refunded <> spent",
    ),
    (
        "a payout goes to another address than was ordered",
        "SELECT t.transfer_id FROM transfers t JOIN orders o USING (order_id)"
        " WHERE t.kind = 'payout' AND t.address <> o.to_address",
    ),
    (
        "an order is completed without a settled payout",
        "SELECT order_id FROM orders WHERE status = 'completed' AND upstream_id IS NULL"
        " AND order_id NOT IN"
        " (SELECT order_id FROM transfers WHERE kind = 'payout' AND state = 'settled')",
    ),
    (
        "an order that is over has a deadline, or one that is not has none",
        "SELECT order_id FROM orders WHERE (deadline_at IS NULL) <>"
        " (status IN ('completed', 'refunded', 'failed', 'expired'))",
    ),
    (
        "an order's history has a gap",
        "SELECT o.order_id FROM orders o LEFT JOIN event_log e ON e.order_seq = o.seq"
        " AND e.version >= o.history_from GROUP BY o.seq"
        " HAVING count(e.version) <> o.version - o.history_from + 1 OR max(e.version) <> o.version",
    ),
    (
        "the sum of reservations is another than that of its orders",
        "SELECT scope || ' ' || network FROM ("
        " SELECT 'total' AS scope, network, units, 1 AS number FROM reservations"
        " UNION ALL SELECT 'all', network, units, 1 FROM reservations WHERE kind = 'unfunded'"
        " UNION ALL SELECT 'by_address', network, units, 1 FROM reservations"
        "  WHERE kind = 'unfunded' AND (client = '' OR client LIKE 'address:%')"
        " UNION ALL SELECT client, network, units, 1 FROM reservations WHERE kind = 'unfunded'"
        " UNION ALL SELECT client, '', 0, 1 FROM reservations WHERE kind = 'unfunded'"
        " UNION ALL SELECT 'unfinal', network, units, 1 FROM unfinal_deposits"
        " UNION ALL SELECT 'unfinal', '', units, 1 FROM unfinal_deposits"
        " UNION ALL SELECT scope, network, -units, -number FROM reservation_sums) AS sums"
        " GROUP BY scope, network HAVING sum(units) <> 0 OR sum(number) <> 0",
    ),
    (
        "a deposit that counts before it is final is neither on its order nor lost",
        "SELECT u.order_id FROM unfinal_deposits u LEFT JOIN deposits d"
        " USING (network, txid, output_index) WHERE d.order_id IS DISTINCT FROM u.order_id"
        " OR (d.state = 'removed' AND d.transfer_id IS NOT NULL) <> (u.lost_at IS NOT NULL)"
        " OR (d.state = 'removed' AND d.transfer_id IS NULL)",
    ),
    (
        "an order that awaits no deposit reserves something for one",
        "SELECT order_id FROM reservations JOIN orders USING (order_id)"
        " WHERE kind = 'unfunded' AND status NOT IN ('awaiting_deposit', 'deposit_detected')",
    ),
    (
        "a transfer that is not over has no pending effect",
        "SELECT transfer_id FROM transfers WHERE state NOT IN ('settled', 'failed', 'cancelled')"
        " AND transfer_id NOT IN (SELECT subject FROM effects)",
    ),
    (
        "a withdrawal reserves another amount than it takes, or is over and reserves some",
        "SELECT w.withdrawal_id FROM withdrawals w LEFT JOIN reservations r"
        " ON r.order_id = w.withdrawal_id AND r.kind = 'funded' AND r.network = w.network"
        " WHERE coalesce(r.units, 0) <> CASE WHEN w.state IN ('settled', 'failed', 'cancelled')"
        " THEN 0 ELSE w.units + w.fee END",
    ),
    (
        "something is reserved for a withdrawal that does not exist",
        "SELECT order_id FROM reservations WHERE order_id LIKE 'wd_%'"
        " AND order_id NOT IN (SELECT withdrawal_id FROM withdrawals)",
    ),
    (
        "the payment of a withdrawal is another one, or pays something else",
        "SELECT w.withdrawal_id FROM withdrawals w JOIN monero_payments p"
        " ON p.payment_id = w.withdrawal_id WHERE w.network <> 'monero'"
        " OR p.address <> w.address OR p.units <> w.units OR p.txid <> coalesce(w.txid, p.txid)"
        " UNION ALL SELECT w.withdrawal_id FROM withdrawals w JOIN evm_payments p"
        " ON p.payment_id = w.withdrawal_id"
        " JOIN evm_attempts a ON a.payment_id = p.payment_id AND a.number = 1"
        " WHERE p.network <> w.network OR lower(p.recipient) <> lower(w.address)"
        " OR p.units <> w.units OR a.txid <> coalesce(w.txid, a.txid)",
    ),
)


def quiet(_what: str, _done: int, _total: int) -> None:
    """Report no progress."""


# --- reservations ------------------------------------------------------------------------------

_RESERVED: Final = "SELECT order_id, kind, network, units FROM reservations"
# Units by kind and network.
Written = Mapping[tuple[str, str], int]

WALLETS: Final = "SELECT id FROM evm_wallet UNION ALL SELECT id FROM monero_wallet"
_COUNT: Final = "SELECT count(*) AS orders, min(order_id) AS one FROM"
_THERE: Final = f"{_COUNT} orders WHERE upstream_id IS NOT NULL AND deadline_at IS NOT NULL"
# Withdrawals from simulated wallets belong to the sandbox, too.
_SIMULATED: Final = (
    f"{_COUNT} (SELECT order_id, deadline_at FROM orders WHERE upstream_id IS NULL"
    " UNION ALL SELECT withdrawal_id, CASE WHEN state IN ('settled', 'failed', 'cancelled')"
    " THEN NULL ELSE created_at END FROM withdrawals) AS simulated"
)
_SIMULATED_OPEN: Final = f"{_SIMULATED} WHERE deadline_at IS NOT NULL"
_IS_OPEN: Final = "(deadline_at IS NOT NULL OR action_required IS NOT NULL)"
# An order may be over and still owe a refund.
_WAITING: Final = (
    f"SELECT order_id, deposit_network AS network FROM orders WHERE {_IS_OPEN}"
    f" UNION SELECT order_id, payout_network FROM orders WHERE {_IS_OPEN}"
    " UNION SELECT order_id, network FROM transfers"
    "  WHERE state IN ('planned', 'prepared', 'published', 'unknown')"
    " UNION SELECT withdrawal_id, network FROM withdrawals"
    "  WHERE state IN ('planned', 'prepared', 'published', 'unknown')"
)
_UNSERVED: Final = (
    f"SELECT order_id, network FROM ({_WAITING}) AS waiting"
    " WHERE network NOT IN :served ORDER BY network, order_id"
)
_STILL: Final = (
    f"SELECT 1 FROM ({_WAITING}) AS waiting WHERE order_id = :order_id AND network = :network"
)


async def reservation_problems(database: Tables, now: int) -> list[str]:
    """Orders whose reservations differ from what the orders need at ``now`` (ms).

    ``database`` reads one moment. Orders of simulated wallets are skipped: they reserve nothing.
    """
    has_wallets = await database.fetch_one(WALLETS) is not None
    written: dict[str, dict[tuple[str, str], int]] = defaultdict(dict)
    for row in await database.fetch(_RESERVED):
        written[row["order_id"]][row["kind"], row["network"]] = row["units"]
    store = OrderStore(database, lambda: "")
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


# --- engines -----------------------------------------------------------------------------------


async def engine_conflict(database: Tables, engine: str) -> tuple[str, str] | None:
    """Return the engine that owns the database and the reason, unless that is ``engine``.

    Real wallets own a database permanently: money may reach their addresses at any time. Another
    engine owns it until its orders are over. ``onchain`` also refuses finished orders of the
    sandbox: its auditor would find payouts that real wallets never made. Raises errors.Unavailable.
    """
    # From one snapshot: another replica may be making the wallets, and the first orders.
    wallets, there, simulated, unfinished = await database.fetch_together(
        [Query(sql, {}) for sql in (WALLETS, _THERE, _SIMULATED, _SIMULATED_OPEN)]
    )
    if wallets and engine != "onchain":
        return "onchain", "it has the orders of real wallets"
    if engine != "upstream" and (found := _named(there)):
        return "upstream", f"{found} not over at an upstream"
    if wallets or engine == "sandbox":
        return None
    if engine == "onchain":
        found = _named(simulated)
        return ("sandbox", f"{found} the sandbox's") if found else None
    found = _named(unfinished)
    return ("sandbox", f"{found} not over in the sandbox") if found else None


def _named(rows: Sequence[Row]) -> str | None:
    """Return how many orders a query has counted, with the first of them; None: none."""
    (row,) = rows
    return f"{row['orders']} orders, such as {row['one']}, are" if row["orders"] else None


class UnservedOrders:
    """Open orders on networks without a node. All methods raise errors.Unavailable.

    They are searched for once, since such networks get no new orders; later only those found are
    read again.
    """

    def __init__(self, database: Tables, waiting: list[tuple[str, str]]) -> None:
        self._db = database
        self._waiting = waiting

    @classmethod
    async def find(cls, database: Tables, served: Collection[str]) -> UnservedOrders:
        """Search for them."""
        rows = await database.fetch(_UNSERVED, served=served)
        return cls(database, [(row["order_id"], row["network"]) for row in rows])

    async def problem(self) -> str | None:
        """Tell the operator what to do about them; None when there are none."""
        self._waiting = [
            (order_id, network)
            for order_id, network in self._waiting
            if await self._db.fetch_one(_STILL, order_id=order_id, network=network) is not None
        ]
        if not self._waiting:
            return None
        order_id, network = self._waiting[0]
        return (
            f"{len(self._waiting)} orders wait for a network without a node, such as {order_id} for"
            f" {network}: name a node for it in onchain.nodes until they are over"
        )
