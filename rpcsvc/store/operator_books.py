"""The operator's records: transfers, sums over the wallets, claims, annotations.

Amounts are atomic units, times ms since the epoch, gas is in wei.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final, NamedTuple

import orjson
from msgspec import Struct

from rpcsvc.domain.chains import MONERO_NETWORK
from rpcsvc.domain.money import LARGEST_INTEGER
from rpcsvc.domain.order import OnDeadline, Order, OrderStatus, TransferState
from rpcsvc.domain.refunds import waiting_units
from rpcsvc.domain.reservations import funded_reservations_of, reservations_of
from rpcsvc.store.changes import RelayState
from rpcsvc.store.database import Row, Statement, Tables, from_row
from rpcsvc.store.order_rows import receipt_from
from rpcsvc.store.orders import OrderStore

_SELECT: Final = """
    SELECT t.transfer_id, t.order_id, t.kind, t.state, t.asset, t.network, t.address, t.units,
        t.txid, t.reason, t.receipt, o.seq AS order_seq, o.status_at, o.status AS order_status,
        o.deadline_at, o.on_deadline, o.action_required
    FROM transfers t JOIN orders o ON o.order_id = t.order_id
"""
_IN_STATES: Final = f"{_SELECT} WHERE t.state IN :states ORDER BY t.seq DESC LIMIT :limit"
_ONE: Final = f"{_SELECT} WHERE t.transfer_id = :transfer_id"
_EVENTS: Final = (
    "SELECT at, details FROM event_log WHERE order_seq = :order_seq ORDER BY version DESC"
)
_ATTEMPTS: Final = """
    SELECT a.txid, a.made_at, p.state AS wallet_state,
        CASE WHEN p.mined_txid = a.txid THEN p.block_number END AS block
    FROM evm_attempts a JOIN evm_payments p ON p.payment_id = a.payment_id
    WHERE a.payment_id = :payment_id ORDER BY a.number
"""
_MONERO: Final = """
    SELECT txid, prepared_at AS made_at, state AS wallet_state, height AS block
    FROM monero_payments WHERE payment_id = :payment_id
"""
_OPEN_ORDERS: Final = """
    SELECT order_id FROM orders WHERE deadline_at IS NOT NULL OR action_required IS NOT NULL
    UNION SELECT order_id FROM transfers WHERE state NOT IN ('settled', 'failed', 'cancelled')
"""
# A fee counts once, and only with a settled payout.
_INTEGRATOR_FEES: Final = """
    SELECT o.integrator, t.asset, sum(t.integrator_fee) AS units, count(*) AS payouts
    FROM orders o JOIN transfers t ON t.order_id = o.order_id
    WHERE o.integrator IS NOT NULL AND t.kind = 'payout' AND t.state = 'settled'
    GROUP BY o.integrator, t.asset ORDER BY o.integrator, t.asset
"""
_DOUBTS: Final = (
    "SELECT order_id, upstream_id, reason, note, created_at FROM relays"
    " WHERE state IN ('claimed', 'reconciling') ORDER BY seq"
)
# A claim whose call is under way is "claimed" and stays, also when it is made once more.
_CLOSE_CLAIM: Final = (
    "UPDATE relays SET state = 'refused', reason = :reason,"
    " note = coalesce(note || '; ', '') || :reason"
    " WHERE order_id = :order_id AND state = 'reconciling'"
)
# Read at each scrape of the metrics: only open orders are in the index of deadlines.
_OPEN_BY_STATUS: Final = """
    SELECT status, count(*) AS orders, min(status_at) AS since FROM orders
    WHERE deadline_at IS NOT NULL GROUP BY status
"""
# Every unfinished transfer has a pending effect, and effects are few.
_DUE: Final = """
    SELECT network, kind, sum(units) AS units FROM transfers
    WHERE state NOT IN ('settled', 'failed', 'cancelled')
        AND order_id IN (SELECT order_id FROM effects WHERE kind = 'advance_transfer')
    GROUP BY network, kind
"""
_EVM_UNMINED: Final = (
    "SELECT count(*) AS payments FROM evm_payments WHERE network = :network"
    " AND state IN ('prepared', 'published') AND block_number IS NULL"
)
_MONERO_UNMINED: Final = (
    "SELECT count(*) AS payments FROM monero_payments"
    " WHERE state IN ('prepared', 'relaying', 'published') AND height IS NULL"
)
_APPROVALS_PENDING: Final = (
    "SELECT count(*) AS number FROM approvals WHERE state = 'pending' AND expires_at > :now"
)
_UNRESOLVED: Final = (
    "SELECT count(*) AS open FROM funding_authorizations WHERE state IN ('recorded', 'sent')"
)
_EXTENT: Final = (
    "SELECT (SELECT count(*) FROM orders) AS orders, (SELECT max(at) FROM event_log) AS newest"
)
_BY_STATE: Final = (
    "SELECT state, count(*) AS transfers FROM transfers GROUP BY state ORDER BY state"
)
_ANNOTATE: Final = (
    "INSERT INTO annotated_transactions (network, txid, note, at, wei)"
    " VALUES (:network, :txid, :note, :at, :wei) ON CONFLICT DO NOTHING"
)
# Products of gas and price need not fit an integer of SQLite once they are added up.
_FEES_BETWEEN: Final = (
    f"SELECT '{MONERO_NETWORK}' AS network, fee AS units, 1 AS price, 0 AS besides"
    " FROM monero_payments WHERE prepared_at >= :since AND prepared_at < :before"
    " AND state IN ('published', 'settled')"
    " UNION ALL SELECT network, gas_used AS units, gas_price AS price,"
    " coalesce(l1_fee, 0) AS besides FROM evm_payments"
    " WHERE prepared_at >= :since AND prepared_at < :before AND mined_txid IS NOT NULL"
)
_LATEST: Final = LARGEST_INTEGER
_WITHDRAWALS_OVER: Final = (
    "SELECT network, state, count(*) AS withdrawals FROM withdrawals"
    " WHERE state IN ('settled', 'failed', 'cancelled') GROUP BY network, state"
)
_IS_TRANSACTION: Final = "network = :network AND txid = :txid"
_PAYMENT_WITH: Final = (
    "SELECT payment_id FROM monero_payments WHERE txid = :txid"
    " UNION ALL SELECT payment_id FROM evm_attempts WHERE txid = :txid"
)
_HOT_WALLET: Final = "SELECT 1 FROM evm_wallet WHERE lower(hot_address) = :address"
_OWN_ADDRESS: Final = (
    "SELECT 1 FROM monero_addresses WHERE address = :address"
    " UNION ALL SELECT 1 FROM monero_wallet WHERE primary_address = :address"
    " UNION ALL SELECT 1 FROM evm_addresses WHERE address_lower = :lower"
)
_MADE_AT: Final = "SELECT created_at FROM orders WHERE seq >= :seq ORDER BY seq LIMIT 1"
# CROSS JOIN has SQLite begin with the orders: it would read every deposit there ever was.
_FLOWS: Final = """
    SELECT network, sum(received) AS received, sum(sent) AS sent FROM (
        SELECT d.network, d.units AS received, 0 AS sent
        FROM orders o CROSS JOIN deposits d
        WHERE o.seq >= :first AND d.order_id = o.order_id AND d.state = 'confirmed'
        UNION ALL
        SELECT t.network, 0 AS received, t.units AS sent
        FROM orders o CROSS JOIN transfers t
        WHERE o.seq >= :first AND t.order_id = o.order_id
            AND t.state IN ('prepared', 'published', 'unknown', 'settled')
    ) AS flows GROUP BY network ORDER BY network
"""
_ARRIVING: Final = (
    "SELECT network, sum(units) AS units FROM evm_deposits WHERE watched = 1"
    " AND block_number IS NOT NULL AND acknowledged IS DISTINCT FROM 'confirmed' GROUP BY network"
)
_HELD: Final = (
    "SELECT network, sum(unswept) AS units, count(*) AS addresses FROM evm_holdings"
    " WHERE unswept > 0 GROUP BY network"
)


class BookedTransfer(Struct, frozen=True):
    """A payout or refund with facts of its order.

    ``since``: when its state was reached. ``reason``: the reason recorded with it. ``receipt`` is
    JSON that proves the payment.
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


class Signed(Struct, frozen=True):
    """A transaction that was signed for a transfer. ``block`` is where it was mined."""

    txid: str
    made_at: int
    wallet_state: str
    block: int | None


class IntegratorFees(Struct, frozen=True):
    """The earnings of an integrator in one asset, by a number of settled payouts."""

    integrator: str
    asset: str
    units: int
    payouts: int


class Doubt(Struct, frozen=True):
    """A call to the upstream whose outcome is not known.

    ``note``: what the operator noted when closing it, of one that came into doubt again.
    """

    order_id: str
    upstream_id: str | None
    reason: str | None
    note: str | None
    created_at: int


class UnsweptTotal(NamedTuple):
    """USDC on deposit addresses of a network. ``arriving`` is not confirmed yet."""

    units: int
    addresses: int
    arriving: int


class Flow(NamedTuple):
    """Units that deposits brought to a network, and that payouts and refunds took, atomic."""

    received: int
    sent: int


class Owed(Struct, frozen=True):
    """Refunds that are due. ``waiting`` units of ``waiting_orders`` lack an address."""

    refunds: int = 0
    units: int = 0
    waiting: int = 0
    waiting_orders: int = 0


class OperatorBooks:
    """The records as the operator and the treasury see them. All may raise errors.Unavailable."""

    def __init__(self, database: Tables) -> None:
        self._db = database
        self._orders = OrderStore(database, lambda: "")

    # --- transfers -----------------------------------------------------------------------------

    async def transfers(
        self, states: tuple[TransferState, ...], limit: int
    ) -> list[BookedTransfer]:
        """The newest transfers in these states, newest first."""
        return await self._booked(_IN_STATES, states=states, limit=limit)

    async def transfer(self, transfer_id: str) -> BookedTransfer | None:
        """Return a transfer by its id."""
        return next(iter(await self._booked(_ONE, transfer_id=transfer_id)), None)

    async def signed(self, transfer_id: str) -> list[Signed]:
        """Return all transactions that a wallet signed for a transfer, oldest first."""
        rows = await self._db.fetch(_ATTEMPTS, payment_id=transfer_id)
        rows = rows or await self._db.fetch(_MONERO, payment_id=transfer_id)
        return [from_row(Signed, row) for row in rows]

    async def _booked(self, sql: str, **values: Any) -> list[BookedTransfer]:
        rows = await self._db.fetch(sql, **values)
        return [_booked(row, *await self._last_event(row)) for row in rows]

    async def _last_event(self, row: Row) -> tuple[int, str | None]:
        """Time and text of a transfer's last event.

        A planned transfer has no event of its own: it takes the order's, which set the status.
        """
        for event in await self._db.fetch(_EVENTS, order_seq=row["order_seq"]):
            details = orjson.loads(event["details"])
            if details.get("transfer_id") == row["transfer_id"]:
                return event["at"], details.get("reason")
        return row["status_at"], None

    # --- annotations ---------------------------------------------------------------------------

    async def annotation(self, network: str, txid: str) -> str | None:
        """The operator's note on a transaction that was made by hand."""
        sql = f"SELECT note FROM annotated_transactions WHERE {_IS_TRANSACTION}"
        row = await self._db.fetch_one(sql, network=network, txid=txid)
        return None if row is None else str(row["note"])

    async def payment_with(self, txid: str) -> str | None:
        """The id of the recorded payment that has this transaction."""
        row = await self._db.fetch_one(_PAYMENT_WITH, txid=txid)
        return None if row is None else str(row["payment_id"])

    async def annotate(self, network: str, txid: str, note: str, at: int, wei: int = 0) -> None:
        """Annotate a transaction that was made by hand; an existing note stays.

        ``wei`` is what contracts sent to the hot wallet in it.
        """
        values = {
            "network": network, "txid": txid, "note": note, "at": at,
            "wei": str(wei) if wei else None,
        }  # fmt: skip
        await self._db.write([Statement(_ANNOTATE, values)])

    async def remove_annotation(self, network: str, txid: str) -> None:
        """Remove an annotation."""
        sql = f"DELETE FROM annotated_transactions WHERE {_IS_TRANSACTION}"
        await self._db.write([Statement(sql, {"network": network, "txid": txid})])

    # --- orders, integrators, claims ---------------------------------------------------------

    async def open_orders_by_status(self) -> dict[str, tuple[int, int]]:
        """Number of open orders by status, and since when (ms) the oldest has it."""
        rows = await self._db.fetch(_OPEN_BY_STATUS)
        return {row["status"]: (row["orders"], row["since"]) for row in rows}

    async def due(self) -> dict[tuple[str, str], int]:
        """Units of the transfers that are not over, by network and kind."""
        rows = await self._db.fetch(_DUE)
        return {(row["network"], row["kind"]): int(row["units"]) for row in rows}

    async def unmined_payments(self, networks: Iterable[str]) -> dict[str, int]:
        """Number of signed payments that are in no block, by network."""
        found = {}
        for network in networks:
            if network == MONERO_NETWORK:
                rows = await self._db.fetch(_MONERO_UNMINED)
            else:
                rows = await self._db.fetch(_EVM_UNMINED, network=network)
            found[network] = int(rows[0]["payments"])
        return found

    async def network_fees(self, since: int, before: int | None = None) -> dict[str, int]:
        """Piconero or wei, by network, that payments prepared in that time (ms) took.

        A network that took nothing is left out. Fees for data on L1 are included.
        """
        found: dict[str, int] = defaultdict(int)
        end = _LATEST if before is None else before
        for row in await self._db.fetch(_FEES_BETWEEN, since=since, before=end):
            found[row["network"]] += row["units"] * row["price"] + row["besides"]
        return dict(found)

    async def withdrawals_over(self) -> dict[tuple[str, str], int]:
        """Number of ended withdrawals by network and final state."""
        rows = await self._db.fetch(_WITHDRAWALS_OVER)
        return {(row["network"], row["state"]): row["withdrawals"] for row in rows}

    async def unresolved_authorizations(self) -> int:
        """Number of signed authorizations that have neither paid their order nor failed."""
        return int((await self._db.fetch(_UNRESOLVED))[0]["open"])

    async def approvals_pending(self, now: int) -> int:
        """Number of orders of clients that wait for a person at a time (ms)."""
        return int((await self._db.fetch(_APPROVALS_PENDING, now=now))[0]["number"])

    async def extent(self) -> tuple[int, int | None]:
        """Number of orders, and time (ms) of the newest event."""
        (row,) = await self._db.fetch(_EXTENT)
        return row["orders"], row["newest"]

    async def transfers_by_state(self) -> dict[str, int]:
        """Number of payouts and refunds by state."""
        return {row["state"]: row["transfers"] for row in await self._db.fetch(_BY_STATE)}

    async def integrator_fees(self) -> list[IntegratorFees]:
        """Fees that integrators have earned."""
        return [
            from_row(IntegratorFees, row, units=int(row["units"]))
            for row in await self._db.fetch(_INTEGRATOR_FEES)
        ]

    async def doubts(self) -> list[Doubt]:
        """The upstream orders in doubt, oldest first."""
        return [from_row(Doubt, row) for row in await self._db.fetch(_DOUBTS)]

    async def close_claim(self, order_id: str, reason: str) -> bool:
        """End a claim in doubt, so that its idempotency key is free; False when it is not in doubt.

        Nobody was given a deposit address, so no money can be on its way. ``reason`` is appended to
        the notes of earlier closings and kept.
        """
        of_claim = "SELECT state, note FROM relays WHERE order_id = :order_id"
        found = await self._db.fetch_one(of_claim, order_id=order_id)
        if found is None or found["state"] != RelayState.RECONCILING.value:
            return False
        values = {"order_id": order_id, "reason": reason}
        await self._db.write([Statement(_CLOSE_CLAIM, values)])
        # A call that was under way may have settled it first, and then nothing was noted.
        after = await self._db.fetch_one(of_claim, order_id=order_id)
        return after is not None and str(after["note"]).endswith(reason)

    # --- own addresses -------------------------------------------------------------------------

    async def is_hot_wallet(self, address: str) -> bool:
        """Return whether an address is the hot wallet of the EVM networks."""
        return await self._db.fetch_one(_HOT_WALLET, address=address.lower()) is not None

    async def is_own_address(self, address: str) -> bool:
        """Return whether an address is a deposit address, or one of the service's wallets."""
        if await self._orders.is_deposit_address(address) or await self.is_hot_wallet(address):
            return True
        row = await self._db.fetch_one(_OWN_ADDRESS, address=address, lower=address.lower())
        return row is not None

    # --- sums ----------------------------------------------------------------------------------

    async def open_orders(self) -> list[Order]:
        """Open orders, and finished ones that still have money to send."""
        found = []
        for row in await self._db.fetch(_OPEN_ORDERS):
            order = await self._orders.order(row["order_id"])
            found += [] if order is None else [order]
            await asyncio.sleep(0)  # there may be thousands, and the service has other work
        return found

    async def unswept(self) -> dict[str, UnsweptTotal]:
        """Unswept USDC by network."""
        arriving = {row["network"]: int(row["units"]) for row in await self._db.fetch(_ARRIVING)}
        held = {
            row["network"]: (int(row["units"]), row["addresses"])
            for row in await self._db.fetch(_HELD)
        }
        return {
            name: UnsweptTotal(*held.get(name, (0, 0)), arriving.get(name, 0))
            for name in sorted({*held, *arriving})
        }

    async def swept(self) -> dict[str, int]:
        """USDC swept from deposit addresses to the hot wallet so far, by network."""
        sql = (
            "SELECT network, sum(taken) AS units FROM evm_sweeps WHERE taken > 0"
            " GROUP BY network ORDER BY network"
        )
        return {row["network"]: int(row["units"]) for row in await self._db.fetch(sql)}

    async def flows(self, since: int) -> dict[str, Flow]:
        """Flow of orders made since a time (ms), by network."""
        first = await self._first_made(since)
        rows = await self._db.fetch(_FLOWS, first=first)
        return {row["network"]: Flow(int(row["received"]), int(row["sent"])) for row in rows}

    async def _first_made(self, since: int) -> int:
        """The number of the first order made since a time. Times have no index, so it bisects."""
        newest = await self._db.fetch_one("SELECT max(seq) AS seq FROM orders")
        low, high = 1, ((newest and newest["seq"]) or 0) + 1
        while low < high:
            middle = (low + high) // 2
            row = await self._db.fetch_one(_MADE_AT, seq=middle)
            if row is not None and row["created_at"] < since:
                low = middle + 1
            else:
                high = middle
        return low

    async def monero_fees(self) -> dict[str, int]:
        """Monero network fees so far in piconero, by purpose of the payment."""
        sql = (
            "SELECT purpose, sum(fee) AS units FROM monero_payments"
            " WHERE state IN ('published', 'settled') GROUP BY purpose ORDER BY purpose"
        )
        return {row["purpose"]: int(row["units"]) for row in await self._db.fetch(sql)}

    async def gas_fees(self) -> dict[str, dict[str, int]]:
        """Wei that gas and data on L1 took so far, by network and purpose of the payment."""
        found: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
        # The products need not fit an integer of SQLite once they are added up.
        rows = await self._db.fetch(
            "SELECT network, purpose, gas_used, gas_price, l1_fee FROM evm_payments"
            " WHERE mined_txid IS NOT NULL"
        )
        for row in rows:
            wei = row["gas_used"] * row["gas_price"] + (row["l1_fee"] or 0)
            found[row["network"]][row["purpose"]] += wei
        return {network: dict(sorted(found[network].items())) for network in sorted(found)}


def reserved(orders: list[Order], now: int) -> dict[str, int]:
    """Units reserved by open orders, by network (domain/reservations.py).

    A reservation for a deposit that has not come ends with the deposit window, as in the service.
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
    """Refunds that are owed to depositors, by network."""
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


def _booked(row: Row, since: int, reason: str | None) -> BookedTransfer:
    given = row["reason"] if row["reason"] is not None else reason
    return from_row(BookedTransfer, row, since=since, reason=given, receipt=receipt_from(row))
