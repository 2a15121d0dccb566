"""What the operator asks of the books: transfers and how far they are, and sums over the wallets.

Read-only, over a snapshot; the operator's word alone is written, beside a running service: what a
transaction was for, and that a claim on an upstream order is over. Amounts are atomic units, times
ms since the epoch, gas is in wei. What does not live here: what the chains say
(settlement/onchain/readiness.py), words and tables (cli/operator/payouts.py,
cli/operator/treasury.py).
"""

from __future__ import annotations

import sqlite3
from collections import defaultdict
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from rpcsvc.domain.order import FINAL_TRANSFERS, OnDeadline, Order, OrderStatus, TransferState
from rpcsvc.orders.ports.store import RelayState
from rpcsvc.orders.reservations import funded_reservations_of, reservations_of
from rpcsvc.store.backends.sqlite.database import BUSY_TIMEOUT_MS, DATABASE_NAME
from rpcsvc.store.backends.sqlite.reader import answered
from rpcsvc.store.backends.sqlite.snapshot import Snapshot
from rpcsvc.store.books import BooksUnreadable
from rpcsvc.store.orders import SqliteOrderStore

PENDING: Final = tuple(state for state in TransferState if state not in FINAL_TRANSFERS)


class BookedTransfer(NamedTuple):
    """A payout or refund with what its order says about it.

    ``since``: when its state was reached. ``reason``: what was said of it then. ``receipt`` is
    JSON that proves it.
    """

    transfer_id: str
    order_id: str
    kind: str
    state: TransferState
    asset: str
    network: str
    address: str
    units: int
    txid: str | None
    reason: str | None
    since: int
    order_status: OrderStatus
    deadline_at: int | None
    on_deadline: OnDeadline | None
    action_required: str | None
    receipt: str | None


class Signed(NamedTuple):
    """A transaction that was signed for a transfer. ``block`` is where it was mined."""

    txid: str
    made_at: int
    wallet_state: str
    block: int | None


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


class OperatorBooks:
    """Reads over one snapshot. Everything may raise errors.Unavailable."""

    def __init__(self, taken: Snapshot) -> None:
        self._db = taken
        self._orders = SqliteOrderStore(taken, lambda: "")

    def order(self, order_id: str) -> Order | None:
        """An order as it was committed."""
        return answered(self._orders.order(order_id))

    # --- transfers -----------------------------------------------------------------------------

    def transfers(self, states: tuple[TransferState, ...], limit: int) -> list[BookedTransfer]:
        """The newest transfers in these states, newest first."""
        marks = ", ".join("?" * len(states))
        where = f"WHERE t.state IN ({marks}) ORDER BY t.seq DESC LIMIT ?"
        return self._booked(where, *states, limit)

    def transfer(self, transfer_id: str) -> BookedTransfer | None:
        """One transfer."""
        return next(iter(self._booked("WHERE t.transfer_id = ?", transfer_id)), None)

    def signed(self, transfer_id: str) -> list[Signed]:
        """Every transaction that was signed for a transfer, oldest first, as its wallet has it."""
        rows = self._db.read(_ATTEMPTS, (transfer_id,)) or self._db.read(_MONERO, (transfer_id,))
        return [Signed(*row) for row in rows]

    def _booked(self, where: str, *values: Any) -> list[BookedTransfer]:
        return [_booked(row) for row in self._db.read(f"{_SELECT} {where}", values)]

    # --- explanations --------------------------------------------------------------------------

    def explanation(self, network: str, txid: str) -> str | None:
        """What the operator said of a transaction that was made by hand."""
        sql = "SELECT note FROM annotated_transactions WHERE network = ? AND txid = ?"
        row = self._db.read_one(sql, (network, txid))
        return None if row is None else str(row[0])

    def payment_with(self, txid: str) -> str | None:
        """The payment on record that has a transaction, by the id that it is known by."""
        row = self._db.read_one(_PAYMENT_WITH, (txid, txid))
        return None if row is None else str(row[0])

    # --- own addresses -------------------------------------------------------------------------

    def is_hot_wallet(self, address: str) -> bool:
        """Whether an address is the hot wallet of the EVM networks."""
        return self._db.read_one(_HOT_WALLET, (address,)) is not None

    def is_own_address(self, address: str) -> bool:
        """Whether an address is a deposit address, or one of the service's wallets."""
        return answered(self._orders.is_deposit_address(address)) or any(
            self._db.read_one(sql, (address,)) is not None for sql in _OWN_ADDRESSES
        )

    # --- sums ----------------------------------------------------------------------------------

    def open_orders(self) -> list[Order]:
        """Orders that are not over, and those that are and still have money to send."""
        found = (self.order(row[0]) for row in self._db.read(_OPEN_ORDERS))
        return [order for order in found if order is not None]

    def unswept(self) -> dict[str, Unswept]:
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

    def swept(self) -> dict[str, int]:
        """USDC brought from deposit addresses to the hot wallet so far, by network."""
        sql = "SELECT network, sum(taken) FROM evm_sweeps GROUP BY network ORDER BY network"
        return {network: units for network, units in self._db.read(sql) if units}

    def monero_fees(self) -> dict[str, int]:
        """Piconero that the Monero network took so far, by purpose of the payment."""
        sql = (
            "SELECT purpose, sum(fee) FROM monero_payments"
            " WHERE state IN ('published', 'settled') GROUP BY purpose ORDER BY purpose"
        )
        return dict(self._db.read(sql))

    def gas_fees(self) -> dict[str, dict[str, int]]:
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


def waiting_units(order: Order) -> int:
    """Deposit units of an order that wait for a refund address, its fee not taken off."""
    return sum(deposit.units for deposit in order.unspent) + order.leftover


def _booked(row: tuple[Any, ...]) -> BookedTransfer:
    as_stored = BookedTransfer(*row)
    on_deadline = as_stored.on_deadline
    return as_stored._replace(
        state=TransferState(as_stored.state),
        order_status=OrderStatus(as_stored.order_status),
        on_deadline=None if on_deadline is None else OnDeadline(on_deadline),
    )


# --- the operator's word ---------------------------------------------------------------------


def explain(data_dir: Path, network: str, txid: str, note: str, at: int, wei: int = 0) -> bool:
    """Note that a transaction was made by hand; False when it is noted already.

    ``wei``: what contracts sent to the hot wallet in it. Raises BooksUnreadable when it can't be
    written.
    """
    sql = (
        "INSERT INTO annotated_transactions (network, txid, note, at, wei)"
        " VALUES (?, ?, ?, ?, ?) ON CONFLICT DO NOTHING"
    )
    return _write(data_dir, sql, (network, txid, note, at, str(wei) if wei else None))


def take_back(data_dir: Path, network: str, txid: str) -> bool:
    """Forget an explanation; False when there is none. Raises BooksUnreadable."""
    sql = "DELETE FROM annotated_transactions WHERE network = ? AND txid = ?"
    return _write(data_dir, sql, (network, txid))


def close_claim(data_dir: Path, order_id: str, reason: str) -> bool:
    """End a claim in doubt, so that its idempotency key is free; False when it is not in doubt.

    Nobody was told a deposit address, so no money can be on its way. ``reason`` stays as a note,
    after those of earlier closings, whatever becomes of the claim. Raises BooksUnreadable.
    """
    # One that is being called is "claimed" and not touched. One that is called again just now
    # settles itself: as an order, or in doubt once more.
    sql = (
        "UPDATE relays SET state = ?, reason = ?, note = coalesce(note || '; ', '') || ?"
        " WHERE order_id = ? AND state = ?"
    )
    before, after = RelayState.RECONCILING.value, RelayState.REFUSED.value
    return _write(data_dir, sql, (after, reason, reason, order_id, before))


def close_ticket(data_dir: Path, ticket_id: str) -> bool:
    """Delete a ticket that was dealt with; False when there is none. Raises BooksUnreadable."""
    return _write(data_dir, "DELETE FROM tickets WHERE ticket_id = ?", (ticket_id,))


def _write(data_dir: Path, sql: str, values: tuple[Any, ...]) -> bool:
    """One statement in a transaction of its own, durable when this returns.

    A running service waits its turn for the database as this does.
    """
    path = data_dir / DATABASE_NAME
    if not path.is_file():
        raise BooksUnreadable(f"There is no database at {path}.")
    try:
        uri = f"{path.absolute().as_uri()}?mode=rw"
        with closing(sqlite3.connect(uri, uri=True, isolation_level=None)) as writer:
            writer.execute(f"PRAGMA busy_timeout = {BUSY_TIMEOUT_MS}")
            writer.execute("PRAGMA synchronous = FULL")
            return writer.execute(sql, values).rowcount == 1
    except sqlite3.Error as error:
        raise BooksUnreadable(f"{path} can't be written: {error}.") from error
