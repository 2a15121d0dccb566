"""The operator's records: transfers, sums over the wallets, claims, tickets, annotations.

Implements the port orders/ports/operator.py. Amounts are atomic units, times ms since the epoch,
gas is in wei.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from rpcsvc.domain.order import OnDeadline, Order, OrderStatus, TransferState
from rpcsvc.domain.refunds import waiting_units
from rpcsvc.orders.ports.operator import (
    BookedTransfer,
    Doubt,
    IntegratorFees,
    Signed,
    StoredTicket,
)
from rpcsvc.orders.ports.store import RelayState
from rpcsvc.orders.reservations import funded_reservations_of, reservations_of
from rpcsvc.store.database import Statement, Tables
from rpcsvc.store.orders import SqliteOrderStore


class Unswept(NamedTuple):
    """USDC on deposit addresses of a network. ``arriving`` is not confirmed yet."""

    units: int
    addresses: int
    arriving: int


@dataclass(frozen=True, slots=True)
class Owed:
    """What has to go back. ``waiting`` units of ``waiting_orders`` can go nowhere yet."""

    refunds: int = 0
    units: int = 0
    waiting: int = 0
    waiting_orders: int = 0


_FOR = "json_extract(e.details, '$.transfer_id') = t.transfer_id"
# A planned transfer has no event of its own: the order's status came with it.
_SELECT: Final = f"""
    SELECT t.transfer_id, t.order_id, t.kind, t.state, t.asset, t.network, t.address, t.units,
        t.txid,
        coalesce(t.reason, (SELECT json_extract(e.details, '$.reason') FROM event_log e
            WHERE e.order_seq = o.seq AND {_FOR} ORDER BY e.version DESC LIMIT 1)),
        coalesce((SELECT e.at FROM event_log e
            WHERE e.order_seq = o.seq AND {_FOR} ORDER BY e.version DESC LIMIT 1), o.status_at),
        o.status, o.deadline_at, o.on_deadline, o.action_required, t.receipt
    FROM transfers t JOIN orders o USING (order_id)
"""  # noqa: S608 - constants
_ATTEMPTS: Final = """
    SELECT a.txid, a.made_at, p.state, iif(p.mined_txid = a.txid, p.block_number, NULL)
    FROM evm_attempts a JOIN evm_payments p USING (payment_id)
    WHERE a.payment_id = ? ORDER BY a.number
"""
_MONERO: Final = "SELECT txid, prepared_at, state, height FROM monero_payments WHERE payment_id = ?"
_OPEN_ORDERS: Final = """
    SELECT order_id FROM orders WHERE deadline_at IS NOT NULL OR action_required IS NOT NULL
    UNION SELECT order_id FROM transfers WHERE state NOT IN ('settled', 'failed', 'cancelled')
"""


# No fee without a settled payout, and none is counted twice.
_INTEGRATOR_FEES: Final = """
    SELECT o.integrator, t.asset, sum(t.integrator_fee), count(*)
    FROM orders o JOIN transfers t USING (order_id)
    WHERE o.integrator IS NOT NULL AND t.kind = 'payout' AND t.state = 'settled'
    GROUP BY o.integrator, t.asset ORDER BY o.integrator, t.asset
"""
_DOUBTS: Final = (
    "SELECT order_id, upstream_id, reason, note, created_at FROM relays"
    " WHERE state IN ('claimed', 'reconciling') ORDER BY seq"
)
# A claim that is being called is "claimed" and not touched. One that is called again at this moment
# settles itself: as an order, or in doubt once more.
_CLOSE_CLAIM: Final = (
    "UPDATE relays SET state = ?, reason = ?, note = coalesce(note || '; ', '') || ?"
    " WHERE order_id = ? AND state = ?"
)
_TICKETS: Final = (
    "SELECT ticket_id, created_at, category, order_id, wallet_address, message FROM tickets"
    " ORDER BY seq"
)
_ANNOTATE: Final = (
    "INSERT INTO annotated_transactions (network, txid, note, at, wei)"
    " VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
)


class SqliteOperatorBooks:
    """The port OperatorBooks, and what the treasury sums. All may raise errors.Unavailable."""

    def __init__(self, database: Tables) -> None:
        self._db = database
        self._orders = SqliteOrderStore(database, lambda: "")

    # --- transfers -----------------------------------------------------------------------------

    async def transfers(
        self, states: tuple[TransferState, ...], limit: int
    ) -> list[BookedTransfer]:
        """The newest transfers in these states, newest first."""
        marks = ", ".join("?" * len(states))
        where = f"WHERE t.state IN ({marks}) ORDER BY t.seq DESC LIMIT ?"
        return await self._booked(where, *states, limit)

    async def transfer(self, transfer_id: str) -> BookedTransfer | None:
        """One transfer."""
        return next(iter(await self._booked("WHERE t.transfer_id = ?", transfer_id)), None)

    async def signed(self, transfer_id: str) -> list[Signed]:
        """Every transaction that was signed for a transfer, oldest first, as its wallet has it."""
        rows = self._db.read(_ATTEMPTS, (transfer_id,)) or self._db.read(_MONERO, (transfer_id,))
        return [Signed(*row) for row in rows]

    async def _booked(self, where: str, *values: Any) -> list[BookedTransfer]:
        return [_booked(row) for row in self._db.read(f"{_SELECT} {where}", values)]

    # --- annotations ---------------------------------------------------------------------------

    async def annotation(self, network: str, txid: str) -> str | None:
        """What the operator noted on a transaction that was made by hand."""
        sql = "SELECT note FROM annotated_transactions WHERE network = ? AND txid = ?"
        row = self._db.read_one(sql, (network, txid))
        return None if row is None else str(row[0])

    async def payment_with(self, txid: str) -> str | None:
        """The payment on record that has a transaction, by the id that it is known by."""
        row = self._db.read_one(_PAYMENT_WITH, (txid, txid))
        return None if row is None else str(row[0])

    async def annotate(self, network: str, txid: str, note: str, at: int, wei: int = 0) -> None:
        """Note what a transaction was that was made by hand; one that has a note keeps it.

        ``wei``: what contracts sent to the hot wallet in it.
        """
        row = (network, txid, note, at, str(wei) if wei else None)
        await self._db.write([Statement(_ANNOTATE, row)])

    async def remove_annotation(self, network: str, txid: str) -> None:
        """Forget a note."""
        sql = "DELETE FROM annotated_transactions WHERE network = ? AND txid = ?"
        await self._db.write([Statement(sql, (network, txid))])

    # --- integrators, claims, tickets ----------------------------------------------------------

    async def integrator_fees(self) -> list[IntegratorFees]:
        """What integrators have earned."""
        return [IntegratorFees(*row) for row in self._db.read(_INTEGRATOR_FEES)]

    async def doubts(self) -> list[Doubt]:
        """The upstream orders in doubt, oldest first."""
        return [Doubt(*row) for row in self._db.read(_DOUBTS)]

    async def close_claim(self, order_id: str, reason: str) -> bool:
        """End a claim in doubt; False when it is not in doubt."""
        before, after = RelayState.RECONCILING.value, RelayState.REFUSED.value
        of_claim = "SELECT state, note FROM relays WHERE order_id = ?"
        found = self._db.read_one(of_claim, (order_id,))
        if found is None or found[0] != before:
            return False
        row = (after, reason, reason, order_id, before)
        await self._db.write([Statement(_CLOSE_CLAIM, row)])
        # A call that was under way may have settled it first, and then nothing was noted.
        return str(self._db.read_one(of_claim, (order_id,))[1]).endswith(reason)

    async def tickets(self) -> list[StoredTicket]:
        """The tickets, oldest first."""
        return [StoredTicket(*row) for row in self._db.read(_TICKETS)]

    async def close_ticket(self, ticket_id: str) -> bool:
        """Delete a ticket that was dealt with; False when there is none."""
        known = self._db.read_one("SELECT 1 FROM tickets WHERE ticket_id = ?", (ticket_id,))
        if known is None:
            return False
        await self._db.write([Statement("DELETE FROM tickets WHERE ticket_id = ?", (ticket_id,))])
        return True

    # --- own addresses -------------------------------------------------------------------------

    async def is_hot_wallet(self, address: str) -> bool:
        """Whether an address is the hot wallet of the EVM networks."""
        return self._db.read_one(_HOT_WALLET, (address,)) is not None

    async def is_own_address(self, address: str) -> bool:
        """Whether an address is a deposit address, or one of the service's wallets."""
        return await self._orders.is_deposit_address(address) or any(
            self._db.read_one(sql, (address,)) is not None for sql in _OWN_ADDRESSES
        )

    # --- sums ----------------------------------------------------------------------------------

    async def open_orders(self) -> list[Order]:
        """Orders that are not over, and those that are and still have money to send."""
        found = [await self._orders.order(row[0]) for row in self._db.read(_OPEN_ORDERS)]
        return [order for order in found if order is not None]

    async def unswept(self) -> dict[str, Unswept]:
        """By network."""
        arriving = dict(
            self._db.read(
                "SELECT network, sum(units) FROM evm_deposits WHERE watched = 1"
                " AND block_number IS NOT NULL AND acknowledged IS NOT 'confirmed' GROUP BY network"
            )
        )
        held = {
            network: (units, count)
            for network, units, count in self._db.read(
                "SELECT network, sum(unswept), count(*) FROM evm_holdings"
                " WHERE unswept > 0 GROUP BY network"
            )
        }
        return {
            name: Unswept(*held.get(name, (0, 0)), arriving.get(name, 0))
            for name in sorted({*held, *arriving})
        }

    async def swept(self) -> dict[str, int]:
        """USDC brought from deposit addresses to the hot wallet so far, by network."""
        sql = "SELECT network, sum(taken) FROM evm_sweeps GROUP BY network ORDER BY network"
        return {network: units for network, units in self._db.read(sql) if units}

    async def monero_fees(self) -> dict[str, int]:
        """Piconero that the Monero network took so far, by purpose of the payment."""
        sql = (
            "SELECT purpose, sum(fee) FROM monero_payments"
            " WHERE state IN ('published', 'settled') GROUP BY purpose ORDER BY purpose"
        )
        return dict(self._db.read(sql))

    async def gas_fees(self) -> dict[str, dict[str, int]]:
        """Wei that gas took so far, by network and purpose of the payment."""
        found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        # The products need not fit an integer of SQLite once they are added up.
        rows = self._db.read(
            "SELECT network, purpose, gas_used, gas_price FROM evm_payments"
            " WHERE mined_txid IS NOT NULL"
        )
        for network, purpose, used, price in rows:
            found[network][purpose] += used * price
        return {network: dict(sorted(found[network].items())) for network in sorted(found)}


_PAYMENT_WITH: Final = (
    "SELECT payment_id FROM monero_payments WHERE txid = ?"
    " UNION ALL SELECT payment_id FROM evm_attempts WHERE txid = ?"
)
_HOT_WALLET: Final = "SELECT 1 FROM evm_wallet WHERE lower(hot_address) = lower(?)"
_OWN_ADDRESSES: Final = (
    "SELECT 1 FROM monero_addresses WHERE address = ?",
    "SELECT 1 FROM monero_wallet WHERE primary_address = ?",
    "SELECT 1 FROM evm_addresses WHERE address_lower = lower(?)",
    _HOT_WALLET,
)


def reserved(orders: list[Order], now: int) -> dict[str, int]:
    """What open orders may still take out of the wallets, by network (orders/reservations.py).

    A reservation for deposits that have not come ends with the deposit window, as in the service.
    """
    total: dict[str, int] = defaultdict(int)
    for order in orders:
        is_over = order.terms.expires_at <= now
        for network, units in (funded_reservations_of if is_over else reservations_of)(
            order
        ).items():
            total[network] += units
    return {network: units for network, units in sorted(total.items()) if units}


def owed(orders: list[Order]) -> dict[str, Owed]:
    """What depositors have to get back, by network."""
    found: dict[str, Owed] = {}
    for order in orders:
        network = order.terms.deposit_network
        before, own = found.get(network, Owed()), _owed(order)
        if own != Owed():
            found[network] = Owed(
                before.refunds + own.refunds,
                before.units + own.units,
                before.waiting + own.waiting,
                before.waiting_orders + own.waiting_orders,
            )
    return dict(sorted(found.items()))


def _owed(order: Order) -> Owed:
    refunds = [item for item in order.refunds if not item.state.is_final]
    waits = order.action_required is not None
    units = waiting_units(order) if waits else 0
    return Owed(len(refunds), sum(item.units for item in refunds), units, int(waits))


def _booked(row: tuple[Any, ...]) -> BookedTransfer:
    as_stored = BookedTransfer(*row)
    on_deadline = as_stored.on_deadline
    return as_stored._replace(
        state=TransferState(as_stored.state),
        order_status=OrderStatus(as_stored.order_status),
        on_deadline=None if on_deadline is None else OnDeadline(on_deadline),
    )
