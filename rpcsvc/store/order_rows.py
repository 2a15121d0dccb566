"""The rows of orders and their parts, and the rows written with an order: idempotency keys and
claims on upstream orders.

Columns are matched by name in both directions: by position, two amounts could be swapped unnoticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import orjson
from msgspec.structs import asdict

from rpcsvc.domain.events import AdvanceTransfer, Effect, FillChunk, PriceLateDeposit
from rpcsvc.domain.money import ASSETS
from rpcsvc.domain.order import (
    Deposit,
    DepositKey,
    Fill,
    Order,
    Report,
    Terms,
    Timeouts,
    Transfer,
    TwapPlan,
)
from rpcsvc.domain.pricing import Price
from rpcsvc.store import packing
from rpcsvc.store.changes import (
    OrderBounds,
    RelayRecord,
    RelayState,
    StoredResponse,
)
from rpcsvc.store.database import (
    Row,
    Statement,
    Tables,
    Values,
    fields_of,
    from_row,
    insert,
    to_row,
    update,
)

TERMS: Final = (
    "order_id", "session_id", "direction", "chain", "chain_id", "deposit_network",
    "payout_network", "deposit_address", "to_address", "deposit_amount", "expected_output",
    "min_received", "min_deposit", "max_deposit", "rate", "spread_bps", "payout_fee",
    "min_received_bps", "integrator_bps", "funding_fee", "funding_gas", "refund_fee", "created_at",
    "expires_at", "late_window", "confirm_timeout", "prepare_timeout", "payout_check",
    "refund_reminder", "integrator", "twap_chunk_units", "twap_interval_ms", "upstream_id",
    "agreed_refund_address", "price_locked_until", "receive_amount", "client",
)  # fmt: skip
_STANDING: Final = (
    "status", "status_at", "version", "deadline_at", "on_deadline", "refund_address",
    "action_required", "error_message", "completed_at", "leftover", "lock_broken_at",
)  # fmt: skip
ORDER: Final = (*TERMS, *_STANDING)
CHANGING: Final = (*_STANDING, "unpaid_since")
DEPOSIT: Final = (
    "network", "txid", "output_index", "order_id", "units", "sender", "first_seen_at", "state",
    "transfer_id", "is_dust", "rate",
)  # fmt: skip
TRANSFER: Final = (
    "transfer_id", "order_id", "kind", "network", "asset", "address", "units", "fee", "state",
    "txid", "raw", "reason", "integrator_fee", "receipt",
)  # fmt: skip
FILLED: Final = Fill.__struct_fields__
FILL: Final = ("order_id", "chunk", *FILLED)

_RESPONSE: Final = "namespace, idempotency_key, operation, params, body, created_at"
_SELECT_RESPONSE: Final = (
    f"SELECT {_RESPONSE}, packed FROM idempotency_keys"
    " WHERE namespace = :namespace AND idempotency_key = :key"
)
_INSERT_RESPONSE: Final = (
    f"INSERT INTO idempotency_keys ({_RESPONSE}, order_seq)"
    " VALUES (:namespace, :key, :operation, :params, :body, :created_at,"
    " (SELECT seq FROM orders WHERE order_id = :order_id))"
)
_UNPACKED: Final = (
    "seq", "namespace", "idempotency_key", "operation", "params", "body", "created_at", "order_seq",
)  # fmt: skip
_SELECT_UNPACKED: Final = (
    f"SELECT {', '.join(_UNPACKED)} FROM idempotency_keys k WHERE packed = 0"
    " AND created_at < :before AND (created_at < :open_before OR NOT EXISTS (SELECT 1 FROM orders o"
    " WHERE o.seq = k.order_seq AND o.deadline_at IS NOT NULL)) ORDER BY created_at LIMIT :limit"
)
# An answer as it was sent has pages of its own, which SQLite joins with others only where a row is
# deleted: updated in place, a packed one would keep a whole page.
_DELETE_UNPACKED: Final = "DELETE FROM idempotency_keys WHERE seq = :seq AND packed = 0"
_INSERT_PACKED: Final = insert("idempotency_keys", (*_UNPACKED, "packed"))
# A poll renders it from the order again.
_DELETE_ENDED_VIEW: Final = (
    "DELETE FROM status_views WHERE order_seq = :seq AND EXISTS (SELECT 1 FROM orders o"
    " WHERE o.seq = status_views.order_seq AND o.deadline_at IS NULL"
    " AND o.action_required IS NULL)"
)
_OLDEST_KEY: Final = "SELECT seq, created_at FROM idempotency_keys ORDER BY seq LIMIT 1"
# Keys are numbered as they come, so the old ones are those up to the first young one.
_OLD_KEYS: Final = (
    "SELECT count(*) AS keys, max(seq) AS last FROM idempotency_keys WHERE seq < coalesce("
    "(SELECT seq FROM idempotency_keys WHERE created_at >= :before ORDER BY seq LIMIT 1),"
    " (SELECT max(seq) + 1 FROM idempotency_keys))"
)
# Twice the keys that expire between two runs, so that a backlog shrinks.
_FORGOTTEN_AT_ONCE_MS: Final = 2 * 3_600_000
_FORGET_KEYS: Final = "DELETE FROM idempotency_keys WHERE seq <= :last"
# That many in one transaction: orders that are made meanwhile wait for no more.
_KEYS_AT_ONCE: Final = 2_000

_RELAY_COLUMNS: Final = tuple(
    "idempotency_key" if name == "key" else name for name in RelayRecord.__struct_fields__
)
_OUTCOME: Final = tuple(name for name in _RELAY_COLUMNS if name != "order_id")
# A claim that became an order stays so, and an order that was made is recorded whatever became of
# its claim. Any other outcome counts only while nobody has made the call again since; and of those
# who want to make it again, one may. The operator's note is not among the columns: a call that was
# under way when the operator closed its claim must not change it (operator_books.py).
_UPSERT_RELAY: Final = (
    f"INSERT INTO relays ({', '.join(_RELAY_COLUMNS)}, written_at)"
    f" VALUES ({', '.join(f':{name}' for name in _RELAY_COLUMNS)}, now_ms())"
    " ON CONFLICT (order_id) DO UPDATE SET written_at = excluded.written_at,"
    f" {', '.join(f'{name} = excluded.{name}' for name in _OUTCOME)}"
    " WHERE relays.state <> 'created' AND CASE excluded.state WHEN 'created' THEN true"
    " WHEN 'claimed' THEN relays.state = 'reconciling' AND relays.attempt = excluded.attempt - 1"
    " ELSE relays.attempt = excluded.attempt END"
)
# It runs after the claim's row, which waits for another process that commits the key's answer.
_IS_UNANSWERED: Final = (
    "SELECT 1 WHERE NOT EXISTS (SELECT 1 FROM idempotency_keys"
    " WHERE namespace = :namespace AND idempotency_key = :idempotency_key)"
)
# What a claim reserved. An order that another call has made of it keeps what it reserves.
_END_RESERVATION: Final = (
    "DELETE FROM reservations WHERE order_id = :order_id AND kind = 'unfunded' AND NOT EXISTS"
    " (SELECT 1 FROM relays WHERE order_id = :order_id AND state IN ({open}))"
)
_END_OF_CLAIM: Final = _END_RESERVATION.format(open="'created'")
_END_OF_ABANDONED: Final = _END_RESERVATION.format(open="'created', 'claimed'")
_IS_OPEN: Final = (
    "EXISTS (SELECT 1 FROM relays WHERE relays.order_id = :order_id"
    " AND attempt = :attempt AND state IN ('claimed', 'reconciling'))"
)
_RETURN_WORTH: Final = (
    "UPDATE client_days SET units = units - :units, orders = orders - 1"
    f" WHERE day = :day AND client = :client AND {_IS_OPEN}"
)
# Not where the same order waits for a person again: one approval holds for it.
_RETURN_APPROVAL: Final = (
    "UPDATE approvals SET state = 'granted', order_id = NULL"
    f" WHERE order_id = :order_id AND state = 'used' AND {_IS_OPEN}"
    " AND NOT EXISTS (SELECT 1 FROM approvals AS other WHERE other.client = approvals.client"
    " AND other.terms = approvals.terms AND other.idempotency_key = approvals.idempotency_key"
    " AND other.state IN ('pending', 'granted', 'denied'))"
)
_IS_ABANDONED: Final = "state = 'claimed' AND written_at <= now_ms() - :older_ms"
_DOUBT_ABANDONED: Final = (
    "UPDATE relays SET state = 'reconciling', reason = :reason"
    f" WHERE order_id = :order_id AND {_IS_ABANDONED}"
)
_SELECT_RELAY: Final = f"SELECT {', '.join(_RELAY_COLUMNS)} FROM relays"
_SELECT_OPEN: Final = (
    "SELECT order_id FROM orders WHERE upstream_id IS NOT NULL AND deadline_at IS NOT NULL"
    " ORDER BY seq"
)
_REPORT: Final = Report.__struct_fields__
# Until the upstream has been asked for the first time there is no report.
SELECT_REPORT: Final = (
    f"SELECT {', '.join(_REPORT)} FROM relays WHERE order_id = :order_id AND evidence IS NOT NULL"
)
_UPDATE_REPORT: Final = update("relays", (*_REPORT, "evidence"), "order_id = :order_id")


# --- orders --------------------------------------------------------------------------------------


def terms_values(terms: Terms) -> dict[str, Any]:
    """Return the values of TERMS."""
    timeouts, twap = terms.timeouts, terms.twap
    return {
        **asdict(terms),
        **asdict(terms.price),
        **asdict(timeouts),
        "direction": terms.direction.value,
        "confirm_timeout": timeouts.confirm,
        "prepare_timeout": timeouts.prepare,
        "agreed_refund_address": terms.refund_address,
        "twap_chunk_units": twap and twap.chunk_units,
        "twap_interval_ms": twap and twap.interval_ms,
    }


def changing_values(order: Order) -> dict[str, Any]:
    """Return the values of CHANGING."""
    return {
        **asdict(order),
        "status": order.status.value,
        "on_deadline": order.on_deadline and order.on_deadline.value,
        "unpaid_since": order.completed_at if order.ended_unpaid else None,
    }


def order_from(row: Row) -> Order:
    """Return the order of a row of ORDER, without its deposits, transfers, chunks and report."""
    values = fields_of(row)
    chunk_units, interval_ms = values["twap_chunk_units"], values["twap_interval_ms"]
    terms = from_row(
        Terms,
        values,
        price=from_row(Price, values),
        timeouts=from_row(
            Timeouts,
            values,
            confirm=values["confirm_timeout"],
            prepare=values["prepare_timeout"],
        ),
        twap=None if chunk_units is None else TwapPlan(chunk_units, interval_ms),
        refund_address=values["agreed_refund_address"],
    )
    return from_row(Order, values, terms=terms)


# --- deposits, transfers, chunks -----------------------------------------------------------------


def deposit_values(order_id: str, deposit: Deposit) -> Values:
    """Return the values of DEPOSIT."""
    return to_row(deposit, order_id=order_id, **deposit.key._asdict())


def deposit_from(row: Row) -> Deposit:
    """Return the deposit of a row of DEPOSIT."""
    return from_row(Deposit, row, key=DepositKey(row["network"], row["txid"], row["output_index"]))


def transfer_values(order_id: str, transfer: Transfer) -> Values:
    """Return the values of TRANSFER."""
    raw, receipt = transfer.raw, transfer.receipt
    known = _known(transfer.address, transfer.txid, transfer.transfer_id)
    return to_row(
        transfer,
        order_id=order_id,
        asset=transfer.asset.symbol,
        raw=None if raw is None else bytes.fromhex(raw),
        receipt=None if receipt is None else packing.pack_receipt(receipt, known),
    )


def transfer_from(row: Row) -> Transfer:
    """Return the transfer of a row of TRANSFER."""
    raw = row["raw"]
    return from_row(
        Transfer,
        row,
        asset=ASSETS[row["asset"]],
        raw=None if raw is None else raw.hex(),
        receipt=receipt_from(row),
    )


def receipt_from(row: Row) -> str | None:
    """Return the receipt (JSON) of a row of transfers that has its address and ids, too."""
    if row["receipt"] is None:
        return None
    known = _known(row["address"], row["txid"], row["transfer_id"])
    return packing.unpack_receipt(row["receipt"], known)


def _known(address: str, txid: str | None, transfer_id: str) -> bytes:
    """Return what a receipt repeats of its row; no row changes any of it once it has a receipt."""
    return f"{address} {txid} {transfer_id}".encode()


def fill_values(order_id: str, chunk: int, fill: Fill) -> Values:
    """Return the values of FILL."""
    return to_row(fill, order_id=order_id, chunk=chunk)


def fill_from(row: Row) -> Fill:
    """Return the chunk of a row of FILLED."""
    return from_row(Fill, row)


# --- effects -------------------------------------------------------------------------------------


def effect_values(order_id: str, effect: Effect) -> Values:
    """The key of a row of ``effects``: order, kind, and the transfer or chunk that it is about."""
    if isinstance(effect, AdvanceTransfer):
        return {"order_id": order_id, "kind": "advance_transfer", "subject": effect.transfer_id}
    if isinstance(effect, FillChunk):
        return {"order_id": order_id, "kind": "fill_chunk", "subject": str(effect.index)}
    return {"order_id": order_id, "kind": "price_late_deposit", "subject": ""}


def effect_from(kind: str, subject: str) -> Effect:
    """The effect of a row of ``effects``."""
    if kind == "advance_transfer":
        return AdvanceTransfer(subject)
    if kind == "fill_chunk":
        return FillChunk(int(subject))
    if kind == "price_late_deposit":
        return PriceLateDeposit()
    raise ValueError(f"unknown effect {kind!r} in the store")


# --- idempotency keys ----------------------------------------------------------------------------


class IdempotencyRows:
    """The part of OrderStore for idempotency keys."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def response(self, namespace: str, key: str) -> StoredResponse | None:
        """The stored answer under an idempotency key."""
        row = await self._db.fetch_one(_SELECT_RESPONSE, namespace=namespace, key=key)
        if row is None:
            return None
        params, body = row["params"], row["body"]
        if row["packed"]:
            params, body = packing.unpack(body, row["packed"])
        return from_row(
            StoredResponse, row, key=row["idempotency_key"], params=orjson.loads(params), body=body
        )

    async def pack_responses(self, before: int, open_before: int, limit: int) -> int:
        """Compress answers made before a time, or ``open_before`` where their orders are under way;
        delete the status answers of their orders that are over.

        It handles ``limit`` at once and returns how many. A replay has the same bytes as before.
        Raises StaleWrite if another process has deleted one meanwhile: then none is packed.
        """
        found = await self._db.fetch(
            _SELECT_UNPACKED, before=before, open_before=open_before, limit=limit
        )
        rows: list[Statement] = []
        for row in found:
            body = packing.pack(row["params"], row["body"])
            packed = {**fields_of(row), "params": "", "body": body, "packed": packing.NEWEST}
            rows.append(Statement(_DELETE_UNPACKED, {"seq": row["seq"]}, finds=True))
            rows.append(Statement(_INSERT_PACKED, packed))
            if row["order_seq"] is not None:
                rows.append(Statement(_DELETE_ENDED_VIEW, {"seq": row["order_seq"]}))
        if rows:
            await self._db.write(rows)
        return len(found)

    async def forget_responses(self, before: int) -> int:
        """Drop idempotency keys made before a time, at most two hours' worth from the oldest on, a
        few thousand at once.

        Returns how many. It runs once an hour, so expired keys go in time, but a clock that was set
        weeks ahead deletes no key that a retry may still use.
        """
        oldest = await self._db.fetch_one(_OLDEST_KEY)
        if oldest is None:
            return 0
        before = min(before, oldest["created_at"] + _FORGOTTEN_AT_ONCE_MS)
        old = await self._db.fetch_one(_OLD_KEYS, before=before)
        if old is None or not old["keys"]:
            return 0
        for last in (*range(oldest["seq"], old["last"], _KEYS_AT_ONCE), old["last"]):
            await self._db.write([Statement(_FORGET_KEYS, {"last": last})])
        return int(old["keys"])


def response_statement(response: StoredResponse, order_id: str | None) -> Statement:
    """Store an answer, and the order that it made, if any."""
    return Statement(
        _INSERT_RESPONSE,
        {
            **asdict(response),
            "params": orjson.dumps(response.params).decode(),
            "order_id": order_id,
        },
    )


# --- claims on upstream orders -------------------------------------------------------------------


class RelayRows:
    """The part of OrderStore for orders at an upstream."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def relay_of_key(self, namespace: str, key: str) -> RelayRecord | None:
        """The claim on an upstream order under an idempotency key: the one whose outcome is not
        known, or else the latest.
        """
        sql = (
            f"{_SELECT_RELAY} WHERE namespace = :namespace AND idempotency_key = :key"
            " ORDER BY state IN ('claimed', 'reconciling') DESC, seq DESC LIMIT 1"
        )
        row = await self._db.fetch_one(sql, namespace=namespace, key=key)
        return _relay_from(row) if row else None

    async def relays_in(self, state: RelayState) -> list[RelayRecord]:
        """Return all claims in a state, oldest first."""
        rows = await self._db.fetch(
            f"{_SELECT_RELAY} WHERE state = :state ORDER BY seq", state=state.value
        )
        return [_relay_from(row) for row in rows]

    async def doubt_abandoned(self, older_ms: int, reason: str) -> list[str]:
        """Make RECONCILING the claims that have been CLAIMED for at least that long, by the
        database's clock.

        Returns the ids of their orders.
        """
        sql = f"SELECT order_id FROM relays WHERE {_IS_ABANDONED} ORDER BY seq"
        found = [row["order_id"] for row in await self._db.fetch(sql, older_ms=older_ms)]
        values = {"older_ms": older_ms, "reason": reason}
        if found:
            await self._db.write(
                [Statement(_DOUBT_ABANDONED, {**values, "order_id": each}) for each in found]
                + [Statement(_END_OF_ABANDONED, {"order_id": each}) for each in found]
            )
        return found

    async def relays_since(self, at: int) -> list[int]:
        """Creation times of the claims younger than ``at``."""
        rows = await self._db.fetch("SELECT created_at FROM relays ORDER BY seq DESC LIMIT 1000")
        return [row["created_at"] for row in rows if row["created_at"] > at]

    async def open_relayed(self) -> list[str]:
        """Ids of the orders that an upstream settles and that are not over, oldest first."""
        return [row["order_id"] for row in await self._db.fetch(_SELECT_OPEN)]


def report_from(rows: Sequence[Row]) -> Report | None:
    """The upstream's last report on an order; None before the first."""
    return from_row(Report, rows[0]) if rows else None


def relay_statements(record: RelayRecord) -> list[Statement]:
    """Store a claim, and end its reservation once it has no order.

    The transaction fails if another process makes the call, or has answered its key.
    """
    params = None if record.params is None else orjson.dumps(record.params).decode()
    values = to_row(record, idempotency_key=record.key, params=params)
    stored = Statement(_UPSERT_RELAY, values, finds=record.state is RelayState.CLAIMED)
    if record.state is RelayState.CLAIMED and record.key is not None:
        return [stored, Statement(_IS_UNANSWERED, values, finds=True)]
    if record.state in (RelayState.CLAIMED, RelayState.CREATED):
        return [stored]
    return [stored, Statement(_END_OF_CLAIM, {"order_id": record.order_id})]


def return_statements(record: RelayRecord, returns: OrderBounds) -> list[Statement]:
    """Give back what a claim took of its client's limits, once: while the claim is open.

    They run before the claim is closed, in the same transaction.
    """
    claim = {"order_id": record.order_id, "attempt": record.attempt}
    found = []
    if returns.spending is not None:
        found.append(Statement(_RETURN_WORTH, {**claim, **returns.spending._asdict()}))
    if returns.approval is not None:
        found.append(Statement(_RETURN_APPROVAL, claim))
    return found


def report_statement(order_id: str, report: Report, evidence: bytes) -> Statement:
    """Store the upstream's report on an order, with the raw answer that it was read from."""
    return Statement(_UPDATE_REPORT, {**asdict(report), "evidence": evidence, "order_id": order_id})


def _relay_from(row: Row) -> RelayRecord:
    params = None if row["params"] is None else orjson.loads(row["params"])
    return from_row(RelayRecord, row, key=row["idempotency_key"], params=params)
