"""What the EVM adapter sends, as rows: the EvmPaymentLedger port over SQLite."""

from __future__ import annotations

from typing import Any, Final

from rpcsvc.orders.ports.store import Rows
from rpcsvc.settlement.onchain.evm.ledger import (
    Attempt,
    BlockPoint,
    EvmPayment,
    Inclusion,
    PaymentOrder,
    PaymentState,
    Purpose,
    Sweep,
    SweepMethod,
    SweepState,
    Unswept,
)
from rpcsvc.store.database import Statement, Tables

_PAYMENT: Final = (
    "payment_id, network, sender, nonce, purpose, recipient, units, contract, data, gas,"
    " prepared_at, state, published_at, mined_txid, block_number, block_hash, gas_used, gas_price,"
    " log_position, log_index, conflict_number, conflict_hash"
)
_SELECT_PAYMENT: Final = f"SELECT {_PAYMENT} FROM evm_payments"  # noqa: S608 - constants
_ADD_PAYMENT: Final = (
    f"INSERT INTO evm_payments ({_PAYMENT})"  # noqa: S608 - constants
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_PUT_PAYMENT: Final = (
    "UPDATE evm_payments SET state = ?, published_at = ?, mined_txid = ?, block_number = ?,"
    " block_hash = ?, gas_used = ?, gas_price = ?, log_position = ?, log_index = ?,"
    " conflict_number = ?, conflict_hash = ? WHERE payment_id = ?"
)
_ADD_ATTEMPT: Final = (
    "INSERT INTO evm_attempts (payment_id, number, txid, raw, max_fee, tip, made_at)"
    " VALUES (?, ?, ?, ?, ?, ?, ?)"
)
_SELECT_ATTEMPTS: Final = (
    "SELECT txid, raw, max_fee, tip, made_at FROM evm_attempts WHERE payment_id = ? ORDER BY number"
)
_SWEEP: Final = (
    "network, address_index, serial, address, method, units, authorization_hash, payment_id, state,"
    " taken"
)
_ADD_SWEEP: Final = (
    f"INSERT INTO evm_sweeps ({_SWEEP})"  # noqa: S608 - constants
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_PUT_SWEEP: Final = (
    "UPDATE evm_sweeps SET state = ?, taken = ?"
    " WHERE network = ? AND address_index = ? AND serial = ?"
)
_UNSWEPT: Final = (
    "SELECT h.address_index, a.address, h.unswept,"
    "  1 + COALESCE((SELECT MAX(s.serial) FROM evm_sweeps s"
    "   WHERE s.network = h.network AND s.address_index = h.address_index), 0)"
    " FROM evm_holdings h"
    " JOIN evm_addresses a ON a.address_index = h.address_index"
    " WHERE h.network = ? AND h.unswept > 0 AND h.unswept >= ?"
    " AND NOT EXISTS (SELECT 1 FROM evm_sweeps s WHERE s.network = h.network"
    "  AND s.address_index = h.address_index AND s.state = 'signed')"
    " ORDER BY h.address_index"
)
_UNSWEPT_OF: Final = "SELECT unswept FROM evm_holdings WHERE network = ? AND address_index = ?"


class SqliteEvmPaymentLedger:
    """The EvmPaymentLedger port (settlement/onchain/evm/ledger.py) over a Database."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    # --- payments ------------------------------------------------------------------------------

    async def payment(self, payment_id: str) -> EvmPayment | None:
        """One payment."""
        found = await self._payments("WHERE payment_id = ?", payment_id)
        return found[0] if found else None

    async def payments_in(self, network: str, *states: PaymentState) -> list[EvmPayment]:
        """A network's payments in these states, lowest nonce first."""
        marks = ", ".join("?" * len(states))
        where = f"WHERE network = ? AND state IN ({marks}) ORDER BY nonce, seq"
        return await self._payments(where, network, *states)

    async def settled_above(self, network: str, number: int) -> list[EvmPayment]:
        """Settled payments in blocks above a number, or in none now; not those closed by hand."""
        where = (
            "WHERE network = ? AND state = 'settled'"
            " AND (block_number > ? OR block_number IS NULL)"
            " AND payment_id NOT IN (SELECT transfer_id FROM closed_by_hand) ORDER BY nonce"
        )
        return await self._payments(where, network, number)

    async def next_nonce(self, network: str, sender: str) -> int:
        """One more than the highest nonce that a payment of the sender has or had; 0 at first."""
        sql = "SELECT MAX(nonce) FROM evm_payments WHERE network = ? AND sender = ?"
        highest = self._db.read_one(sql, (network, sender))[0]
        return 0 if highest is None else int(highest) + 1

    async def add_payment(
        self, payment: EvmPayment, sweep: Sweep | None = None, *, rows: Rows = ()
    ) -> None:
        """Commit a signed payment. Raises StoreConflict when its nonce is taken, or it is known."""
        await self._db.write([*rows, *self.adding(payment, sweep)])

    def adding(self, payment: EvmPayment, sweep: Sweep | None = None) -> list[Statement]:
        """The statements of ``add_payment``."""
        statements = _payment_statements(payment)
        if sweep is not None:
            statements.append(Statement(_ADD_SWEEP, _sweep_row(sweep)))
        return statements

    async def has_transaction(self, txid: str) -> bool:
        """Whether a payment with this transaction is on record."""
        sql = "SELECT 1 FROM evm_attempts WHERE txid = ?"
        return self._db.read_one(sql, (txid,)) is not None

    async def add_attempt(self, payment: EvmPayment, attempt: Attempt) -> None:
        """Commit one more attempt. Raises StoreConflict: it is over, or the fees do not rise."""
        await self._db.write([self.raising(payment, attempt)])

    def raising(self, payment: EvmPayment, attempt: Attempt) -> Statement:
        """The statement of ``add_attempt``."""
        number = len(payment.attempts) + 1
        return Statement(_ADD_ATTEMPT, _attempt_row(payment.payment_id, number, attempt))

    async def put_payment(self, payment: EvmPayment) -> None:
        """Change how far a payment is. Raises StoreConflict when it is over."""
        values = (*_progress(payment), payment.payment_id)
        await self._db.write([Statement(_PUT_PAYMENT, values)])

    async def _payments(self, where: str, *values: Any) -> list[EvmPayment]:
        rows = self._db.read(f"{_SELECT_PAYMENT} {where}", values)
        return [_payment(row, await self._attempts(row[0])) for row in rows]

    async def _attempts(self, payment_id: str) -> tuple[Attempt, ...]:
        rows = self._db.read(_SELECT_ATTEMPTS, (payment_id,))
        return tuple(Attempt(*row) for row in rows)

    # --- sweeps --------------------------------------------------------------------------------

    async def unswept(self, network: str, least: int) -> list[Unswept]:
        """Addresses with at least so much to sweep and no sweep under way, lowest index first."""
        return [Unswept(*row) for row in self._db.read(_UNSWEPT, (network, least))]

    async def unswept_of(self, network: str, address_index: int) -> int:
        """What of an address's confirmed deposits no sweep took; a sweep under way took nothing."""
        row = self._db.read_one(_UNSWEPT_OF, (network, address_index))
        return int(row[0]) if row else 0

    async def sweeps_under_way(self, network: str) -> list[Sweep]:
        """Sweeps in state SIGNED."""
        sql = (
            f"SELECT {_SWEEP} FROM evm_sweeps"  # noqa: S608 - constants
            " WHERE network = ? AND state = 'signed' ORDER BY address_index"
        )
        return [_sweep(row) for row in self._db.read(sql, (network,))]

    async def void_sweeps(self, network: str, address_index: int) -> list[Sweep]:
        """An address's sweeps in state VOID that have an authorization."""
        sql = (
            f"SELECT {_SWEEP} FROM evm_sweeps"  # noqa: S608 - constants
            " WHERE network = ? AND address_index = ? AND state = 'void'"
            " AND authorization_hash IS NOT NULL ORDER BY serial"
        )
        return [_sweep(row) for row in self._db.read(sql, (network, address_index))]

    async def add_sweep(self, sweep: Sweep) -> None:
        """Record a sweep that has no payment. Raises StoreConflict when its serial is taken."""
        await self._db.write([Statement(_ADD_SWEEP, _sweep_row(sweep))])

    async def put_sweep(self, sweep: Sweep) -> None:
        """Record how a sweep ended. Raises StoreConflict when it ended in another way already."""
        key = (sweep.network, sweep.address_index, sweep.serial)
        await self._db.write([Statement(_PUT_SWEEP, (sweep.state.value, sweep.taken, *key))])


def _payment_statements(payment: EvmPayment) -> list[Statement]:
    rows = [
        Statement(_ADD_ATTEMPT, _attempt_row(payment.payment_id, number, attempt))
        for number, attempt in enumerate(payment.attempts, 1)
    ]
    return [Statement(_ADD_PAYMENT, _payment_row(payment)), *rows]


def _payment_row(item: EvmPayment) -> tuple[Any, ...]:
    order = item.order
    state, *rest = _progress(item)
    return (
        order.payment_id, item.network, item.sender, item.nonce, order.purpose.value,
        order.recipient, order.units, order.contract, order.data.hex(), order.gas,
        item.prepared_at, state, *rest,
    )  # fmt: skip


def _progress(item: EvmPayment) -> tuple[Any, ...]:
    """The columns that change, in the order of _PUT_PAYMENT and of _PAYMENT's end."""
    mined, conflict = item.inclusion, item.conflict
    where: tuple[Any, ...] = (None,) * 7
    if mined is not None:
        where = (
            mined.txid, mined.block.number, mined.block.hash, mined.gas_used, mined.gas_price,
            mined.log_position, mined.log_index,
        )  # fmt: skip
    since = (None, None) if conflict is None else (conflict.number, conflict.hash)
    return (item.state.value, item.published_at, *where, *since)


def _attempt_row(payment_id: str, number: int, item: Attempt) -> tuple[Any, ...]:
    return (payment_id, number, item.txid, item.raw, item.max_fee, item.tip, item.made_at)


def _payment(row: tuple[Any, ...], attempts: tuple[Attempt, ...]) -> EvmPayment:
    (
        payment_id, network, sender, nonce, purpose, recipient, units, contract, data, gas,
        prepared_at, state, published_at, *where,
    ) = row  # fmt: skip
    order = PaymentOrder(
        payment_id, Purpose(purpose), recipient, units, contract, bytes.fromhex(data), gas
    )
    return EvmPayment(
        network, sender, nonce, order, attempts, prepared_at, PaymentState(state), published_at,
        _inclusion(where[:7]), None if where[7] is None else BlockPoint(where[7], where[8]),
    )  # fmt: skip


def _inclusion(columns: list[Any]) -> Inclusion | None:
    txid, number, block_hash, gas_used, gas_price, position, index = columns
    if txid is None:
        return None
    return Inclusion(txid, BlockPoint(number, block_hash), gas_used, gas_price, position, index)


def _sweep(row: tuple[Any, ...]) -> Sweep:
    network, index, serial, address, method, units, authorization, payment_id, state, taken = row
    return Sweep(
        network, index, serial, address, SweepMethod(method), units, authorization, payment_id,
        SweepState(state), taken,
    )  # fmt: skip


def _sweep_row(item: Sweep) -> tuple[Any, ...]:
    return (
        item.network, item.address_index, item.serial, item.address, item.method.value, item.units,
        item.authorization, item.payment_id, item.state.value, item.taken,
    )  # fmt: skip
