"""The XMR adapter's records as rows: the MoneroLedger port over SQLite."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rpcsvc.domain.order import DepositState
from rpcsvc.orders.ports.store import Rows
from rpcsvc.settlement.onchain.monero.ledger import (
    Cursor,
    DepositRecord,
    Payee,
    Payment,
    PaymentState,
    Purpose,
    WalletRecord,
)
from rpcsvc.settlement.onchain.monero.wallet_types import Subaddress, SubaddressIndex
from rpcsvc.store.database import Statement, Tables

_KEPT_CURSORS: Final = 1000

_ADD_WALLET = (
    "INSERT INTO monero_wallet (id, nettype, primary_address, reserved_to) VALUES (1, ?, ?, ?)"
)
# A trigger refuses a known index with another address.
_ADD_ADDRESS = (
    "INSERT INTO monero_addresses (minor, address) VALUES (?, ?)"
    " ON CONFLICT (minor) DO UPDATE SET address = excluded.address"
)
_RESERVE = "UPDATE monero_wallet SET reserved_to = ? WHERE id = 1"
_SELECT_DEPOSIT = (
    "SELECT d.txid, d.minor, a.address, d.units, d.unlock_time, d.first_seen_at, d.height,"
    " d.acknowledged, d.watched"
    " FROM monero_deposits d JOIN monero_addresses a ON a.minor = d.minor"
)
_PUT_DEPOSIT = (
    "INSERT INTO monero_deposits"
    " (txid, minor, units, unlock_time, first_seen_at, height, acknowledged, watched)"
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?) ON CONFLICT (txid, minor) DO UPDATE SET"
    " height = excluded.height, watched = excluded.watched, acknowledged = excluded.acknowledged"
)
_ACKNOWLEDGE = "UPDATE monero_deposits SET acknowledged = ? WHERE txid = ? AND minor = ?"
_VOID_CURSORS = "DELETE FROM monero_cursor WHERE height > ? OR height < ?"
_PUT_CURSOR = (
    "INSERT INTO monero_cursor (height, hash) VALUES (?, ?)"
    " ON CONFLICT (height) DO UPDATE SET hash = excluded.hash"
)
_RESCAN_DUE = "INSERT INTO monero_rescan_due (id) VALUES (1) ON CONFLICT (id) DO NOTHING"
_RESCAN_OVER = "DELETE FROM monero_rescan_due"
_PAYMENT = (
    "payment_id, purpose, address, units, fee, txid, raw, metadata, tx_key, prepared_at, state,"
    " relayed_at, height, conflict_height, conflict_hash, proof"
)
_SELECT_PAYMENT = f"SELECT {_PAYMENT} FROM monero_payments"  # noqa: S608 - constants
_ADD_PAYMENT = (
    f"INSERT INTO monero_payments ({_PAYMENT})"  # noqa: S608 - constants
    " VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)"
)
_PUT_PAYMENT = (
    "UPDATE monero_payments SET state = ?, relayed_at = ?, height = ?, conflict_height = ?,"
    " conflict_hash = ? WHERE payment_id = ?"
)
_ADD_PAYEE = (
    "INSERT INTO monero_payees (payment_id, transfer_id, address, units) VALUES (?, ?, ?, ?)"
)
_WITHOUT_ORDER = (
    "WHERE state = 'published' AND purpose = 'transfer' AND NOT EXISTS"
    " (SELECT 1 FROM transfers AS t WHERE t.transfer_id = monero_payments.payment_id"
    "  OR t.transfer_id IN (SELECT e.transfer_id FROM monero_payees AS e"
    "   WHERE e.payment_id = monero_payments.payment_id)) ORDER BY seq"
)
_PUT_PROOF = "UPDATE monero_payments SET proof = ? WHERE payment_id = ?"
_PUT_PAYEE_PROOF = "UPDATE monero_payees SET proof = ? WHERE payment_id = ? AND transfer_id = ?"
_ADD_IMAGE = "INSERT INTO monero_key_images (payment_id, key_image, live) VALUES (?, ?, 1)"
_FREE_IMAGES = "UPDATE monero_key_images SET live = 0 WHERE payment_id = ?"


class SqliteMoneroLedger:
    """The MoneroLedger port (settlement/onchain/monero/ledger.py) over a Database."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    # --- wallet and addresses ------------------------------------------------------------------

    async def wallet(self) -> WalletRecord | None:
        """The wallet of the first start."""
        row = self._db.read_one("SELECT nettype, primary_address, reserved_to FROM monero_wallet")
        return WalletRecord(*row) if row else None

    async def adopt_wallet(self, record: WalletRecord) -> None:
        """Record the wallet. Raises StoreConflict when there is one already."""
        values = (record.nettype, record.primary_address, record.reserved_to)
        await self._db.write([Statement(_ADD_WALLET, values)])

    async def addresses_above(self, minor: int) -> list[Subaddress]:
        """The addresses with a higher index, in order."""
        sql = "SELECT minor, address FROM monero_addresses WHERE minor > ? ORDER BY minor"
        return [_subaddress(row) for row in self._db.read(sql, (minor,))]

    async def highest_address(self) -> Subaddress | None:
        """The newest address."""
        sql = "SELECT minor, address FROM monero_addresses ORDER BY minor DESC LIMIT 1"
        row = self._db.read_one(sql)
        return _subaddress(row) if row else None

    async def address_minor(self, address: str) -> int | None:
        """The index of an address of ours."""
        row = self._db.read_one("SELECT minor FROM monero_addresses WHERE address = ?", (address,))
        return None if row is None else int(row[0])

    async def add_addresses(self, made: Sequence[Subaddress]) -> None:
        """Record addresses. Raises StoreConflict when an index is there with another address."""
        await self._db.write(
            [Statement(_ADD_ADDRESS, (item.index.minor, item.address)) for item in made]
        )

    async def reserve_addresses(self, minor: int) -> None:
        """Addresses up to this index may be handed out from now on."""
        await self._db.write([self.reserving(minor)])

    def reserving(self, minor: int) -> Statement:
        """The statement of ``reserve_addresses``."""
        return Statement(_RESERVE, (minor,))

    async def rescan_due(self) -> bool:
        """Whether the wallet has to scan the chain anew."""
        return self._db.read_one("SELECT 1 FROM monero_rescan_due") is not None

    async def note_rescan_due(self) -> None:
        """It has to, from now on until ``note_rescanned``."""
        await self._db.write([Statement(_RESCAN_DUE, ())])

    async def note_rescanned(self) -> None:
        """It has, and has stored what it found."""
        await self._db.write([Statement(_RESCAN_OVER, ())])

    # --- deposits ------------------------------------------------------------------------------

    async def cursors(self) -> list[Cursor]:
        """Blocks up to which deposits are committed, newest first."""
        sql = "SELECT height, hash FROM monero_cursor ORDER BY height DESC"
        return [Cursor(*row) for row in self._db.read(sql)]

    async def deposit(self, txid: str, minor: int) -> DepositRecord | None:
        """One deposit."""
        row = self._db.read_one(f"{_SELECT_DEPOSIT} WHERE txid = ? AND d.minor = ?", (txid, minor))
        return _deposit(row) if row else None

    async def deposits_to(self, minor: int) -> list[DepositRecord]:
        """All deposits to one address."""
        where = "WHERE d.minor = ? ORDER BY d.first_seen_at, d.txid"
        return [_deposit(row) for row in self._db.read(f"{_SELECT_DEPOSIT} {where}", (minor,))]

    async def deposits_to_watch(self, above: int) -> list[DepositRecord]:
        """Deposits that are watched, and all in blocks above a height."""
        where = "WHERE d.watched = 1 OR d.height > ? ORDER BY d.first_seen_at, d.txid, d.minor"
        return [_deposit(row) for row in self._db.read(f"{_SELECT_DEPOSIT} {where}", (above,))]

    async def put_deposits(self, records: Sequence[DepositRecord]) -> None:
        """Add deposits, or change height, watch and acknowledgement of known ones."""
        await self._db.write([Statement(_PUT_DEPOSIT, _deposit_row(item)) for item in records])

    async def acknowledge(
        self,
        states: Sequence[tuple[str, int, DepositState]],
        cursor: Cursor | None,
        fork: int,
    ) -> None:
        """Record states by (txid, minor) and move the cursor; blocks above ``fork`` are void."""
        statements = [
            Statement(_ACKNOWLEDGE, (state.value, txid, minor)) for txid, minor, state in states
        ]
        if cursor is not None:
            oldest = cursor.height - _KEPT_CURSORS
            statements.append(Statement(_VOID_CURSORS, (fork, oldest)))
            statements.append(Statement(_PUT_CURSOR, (cursor.height, cursor.hash)))
        if statements:
            await self._db.write(statements)

    # --- payments ------------------------------------------------------------------------------

    async def payment(self, transfer_id: str) -> Payment | None:
        """The payment of a transfer, alone or with others."""
        sql = "SELECT payment_id FROM monero_payees WHERE transfer_id = ?"
        row = self._db.read_one(sql, (transfer_id,))
        found = await self._payments("WHERE payment_id = ?", row[0] if row else transfer_id)
        return found[0] if found else None

    async def payments_in(self, *states: PaymentState) -> list[Payment]:
        """All payments in these states, oldest first."""
        marks = ", ".join("?" * len(states))
        return await self._payments(f"WHERE state IN ({marks}) ORDER BY seq", *states)

    async def settled_above(self, height: int) -> list[Payment]:
        """Settled payments in blocks above a height, and those that are in none any more."""
        where = "WHERE state = 'settled' AND (height > ? OR height IS NULL) ORDER BY seq"
        return await self._payments(where, height)

    async def live_key_images(self, images: Sequence[str]) -> set[str]:
        """Those that a payment spends which was, or may yet be, made."""
        sql = "SELECT 1 FROM monero_key_images WHERE key_image = ? AND live = 1"
        return {image for image in images if self._db.read_one(sql, (image,)) is not None}

    async def free_key_images(self) -> set[str]:
        """Those of payments that can never be made, and of no other payment."""
        sql = "SELECT key_image FROM monero_key_images GROUP BY key_image HAVING max(live) = 0"
        return {image for (image,) in self._db.read(sql)}

    async def without_order(self) -> list[Payment]:
        """Published payments of transfers none of which the database has."""
        return await self._payments(_WITHOUT_ORDER)

    async def add_payment(self, payment: Payment, rows: Rows = ()) -> None:
        """Commit a signed payment. Raises StoreConflict when another is unpublished, spends the
        same, or pays one of its transfers.
        """
        await self._db.write([*rows, *self.adding(payment)])

    def adding(self, payment: Payment) -> list[Statement]:
        """The statements of ``add_payment``."""
        name = payment.payment_id
        statements = [Statement(_ADD_PAYMENT, _payment_row(payment))]
        statements += [
            Statement(_ADD_PAYEE, (name, item.transfer_id, item.address, item.units))
            for item in payment.batch
        ]
        statements += [Statement(_ADD_IMAGE, (name, image)) for image in payment.key_images]
        return statements

    async def has_transaction(self, txid: str) -> bool:
        """Whether a payment with this transaction is on record."""
        sql = "SELECT 1 FROM monero_payments WHERE txid = ?"
        return self._db.read_one(sql, (txid,)) is not None

    async def put_payment(self, payment: Payment) -> None:
        """Change how far a payment is. Raises StoreConflict when it is over."""
        conflict = payment.conflict
        values = (
            payment.state.value, payment.relayed_at, payment.height,
            conflict.height if conflict else None, conflict.hash if conflict else None,
            payment.payment_id,
        )  # fmt: skip
        statements = [Statement(_PUT_PAYMENT, values)]
        if payment.state.is_over:
            statements.append(Statement(_FREE_IMAGES, (payment.payment_id,)))
        await self._db.write(statements)

    async def put_proof(self, payment: Payment, payee: Payee) -> None:
        """Keep the proof of what a payment paid for one transfer."""
        if payment.batch:
            values = (payee.proof, payment.payment_id, payee.transfer_id)
            await self._db.write([Statement(_PUT_PAYEE_PROOF, values)])
        else:
            await self._db.write([Statement(_PUT_PROOF, (payee.proof, payment.payment_id))])

    async def _payments(self, where: str, *values: Any) -> list[Payment]:
        rows = self._db.read(f"{_SELECT_PAYMENT} {where}", values)
        return [
            _payment(row, await self._images(row[0]), await self._batch(row[0])) for row in rows
        ]

    async def _batch(self, payment_id: str) -> tuple[Payee, ...]:
        sql = (
            "SELECT transfer_id, address, units, proof FROM monero_payees WHERE payment_id = ?"
            " ORDER BY transfer_id"
        )
        return tuple(Payee(*row) for row in self._db.read(sql, (payment_id,)))

    async def _images(self, transfer_id: str) -> tuple[str, ...]:
        sql = "SELECT key_image FROM monero_key_images WHERE payment_id = ? ORDER BY key_image"
        return tuple(image for (image,) in self._db.read(sql, (transfer_id,)))


def _subaddress(row: tuple[int, str]) -> Subaddress:
    # The account is the wallet client's; rows hold those of one account.
    return Subaddress(SubaddressIndex(0, row[0]), row[1])


def _deposit(row: tuple[Any, ...]) -> DepositRecord:
    txid, minor, address, units, unlock_time, at, height, acknowledged, watched = row
    state = None if acknowledged is None else DepositState(acknowledged)
    return DepositRecord(txid, minor, address, units, unlock_time, at, height, state, bool(watched))


def _deposit_row(item: DepositRecord) -> tuple[Any, ...]:
    acknowledged = None if item.acknowledged is None else item.acknowledged.value
    return (
        item.txid, item.minor, item.units, item.unlock_time, item.first_seen_at, item.height,
        acknowledged, int(item.watched),
    )  # fmt: skip


def _payment(row: tuple[Any, ...], images: tuple[str, ...], batch: tuple[Payee, ...]) -> Payment:
    (
        transfer_id, purpose, address, units, fee, txid, raw, metadata, tx_key, prepared_at,
        state, relayed_at, height, conflict_height, conflict_hash, proof,
    ) = row  # fmt: skip
    conflict = None if conflict_height is None else Cursor(conflict_height, conflict_hash)
    return Payment(
        transfer_id, Purpose(purpose), address, units, fee, txid, raw, metadata, tx_key, images,
        prepared_at, PaymentState(state), relayed_at, height, conflict, proof, batch,
    )  # fmt: skip


def _payment_row(item: Payment) -> tuple[Any, ...]:
    conflict = item.conflict
    return (
        item.payment_id, item.purpose.value, item.address, item.units, item.fee, item.txid,
        item.raw, item.metadata, item.tx_key, item.prepared_at, item.state.value,
        item.relayed_at, item.height, conflict.height if conflict else None,
        conflict.hash if conflict else None, item.proof,
    )  # fmt: skip
