"""The Monero adapter's records as rows: the MoneroLedger port over a database."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from rpcsvc.domain.order import DepositState
from rpcsvc.settlement.onchain.monero.ledger import (
    Cursor,
    DepositRecord,
    MoneroPayment,
    MoneroPaymentState,
    MoneroPurpose,
    Payee,
    WalletRecord,
)
from rpcsvc.settlement.onchain.monero.wallet_types import Subaddress, SubaddressIndex
from rpcsvc.store.database import Row, Rows, Statement, Tables, insert, update

_KEPT_CURSORS: Final = 1000

_ADD_WALLET: Final = (
    "INSERT INTO monero_wallet (id, nettype, primary_address, reserved_to)"
    " VALUES (1, :nettype, :primary_address, :reserved_to)"
)
# A trigger refuses a known index with another address.
_ADD_ADDRESS: Final = (
    "INSERT INTO monero_addresses (minor, address) VALUES (:minor, :address)"
    " ON CONFLICT (minor) DO UPDATE SET address = excluded.address"
)
_RESERVE: Final = "UPDATE monero_wallet SET reserved_to = :minor WHERE id = 1"
_DEPOSIT: Final = (
    "txid", "minor", "units", "unlock_time", "first_seen_at", "height", "acknowledged", "watched",
)  # fmt: skip
_SELECT_DEPOSIT: Final = (
    f"SELECT {', '.join(f'd.{name}' for name in _DEPOSIT)}, a.address"
    " FROM monero_deposits d JOIN monero_addresses a ON a.minor = d.minor"
)
_PUT_DEPOSIT: Final = (
    f"{insert('monero_deposits', _DEPOSIT)} ON CONFLICT (txid, minor) DO UPDATE SET"
    " height = excluded.height, watched = excluded.watched, acknowledged = excluded.acknowledged"
)
_ACKNOWLEDGE: Final = update(
    "monero_deposits", ("acknowledged",), "txid = :txid AND minor = :minor"
)
_VOID_CURSORS: Final = "DELETE FROM monero_cursor WHERE height > :fork OR height < :oldest"
_PUT_CURSOR: Final = (
    "INSERT INTO monero_cursor (height, hash) VALUES (:height, :hash)"
    " ON CONFLICT (height) DO UPDATE SET hash = excluded.hash"
)
_RESCAN_DUE: Final = "INSERT INTO monero_rescan_due (id) VALUES (1) ON CONFLICT (id) DO NOTHING"
_PROGRESS: Final = ("state", "relayed_at", "height", "conflict_height", "conflict_hash")
_PAYMENT: Final = (
    "payment_id", "purpose", "address", "units", "fee", "txid", "raw", "metadata", "tx_key",
    "prepared_at", "proof", *_PROGRESS,
)  # fmt: skip
_SELECT_PAYMENT: Final = f"SELECT {', '.join(_PAYMENT)} FROM monero_payments"
_ADD_PAYMENT: Final = insert("monero_payments", _PAYMENT)
_PUT_PAYMENT: Final = update("monero_payments", _PROGRESS, "payment_id = :payment_id")
_ADD_PAYEE: Final = insert("monero_payees", ("payment_id", "transfer_id", "address", "units"))
_WITHOUT_ORDER: Final = (
    "WHERE state = 'published' AND purpose = 'transfer' AND NOT EXISTS"
    " (SELECT 1 FROM transfers AS t WHERE t.transfer_id = monero_payments.payment_id"
    "  OR t.transfer_id IN (SELECT e.transfer_id FROM monero_payees AS e"
    "   WHERE e.payment_id = monero_payments.payment_id)) AND NOT EXISTS"
    " (SELECT 1 FROM withdrawals AS w WHERE w.withdrawal_id = monero_payments.payment_id)"
    " ORDER BY seq"
)
_PUT_PROOF: Final = update("monero_payments", ("proof",), "payment_id = :payment_id")
_PUT_PAYEE_PROOF: Final = update(
    "monero_payees", ("proof",), "payment_id = :payment_id AND transfer_id = :transfer_id"
)
_ADD_IMAGE: Final = (
    "INSERT INTO monero_key_images (payment_id, key_image, live)"
    " VALUES (:payment_id, :key_image, 1)"
)
_FREE_IMAGES: Final = "UPDATE monero_key_images SET live = 0 WHERE payment_id = :payment_id"


class SqlMoneroLedger:
    """The MoneroLedger port (settlement/onchain/monero/ledger.py)."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    # --- wallet and addresses ------------------------------------------------------------------

    async def wallet(self) -> WalletRecord | None:
        """The wallet of the first start."""
        row = await self._db.fetch_one(
            "SELECT nettype, primary_address, reserved_to FROM monero_wallet"
        )
        return WalletRecord(**row) if row else None

    async def adopt_wallet(self, record: WalletRecord) -> None:
        """Record the wallet. Raises StoreConflict when there is one already."""
        values = {
            "nettype": record.nettype, "primary_address": record.primary_address,
            "reserved_to": record.reserved_to,
        }  # fmt: skip
        await self._db.write([Statement(_ADD_WALLET, values)])

    async def addresses_above(self, minor: int) -> list[Subaddress]:
        """The addresses with a higher index, in order."""
        sql = "SELECT minor, address FROM monero_addresses WHERE minor > :minor ORDER BY minor"
        return [_subaddress(row) for row in await self._db.fetch(sql, minor=minor)]

    async def highest_address(self) -> Subaddress | None:
        """The newest address."""
        sql = "SELECT minor, address FROM monero_addresses ORDER BY minor DESC LIMIT 1"
        row = await self._db.fetch_one(sql)
        return _subaddress(row) if row else None

    async def address_minor(self, address: str) -> int | None:
        """The index of an address of ours."""
        sql = "SELECT minor FROM monero_addresses WHERE address = :address"
        row = await self._db.fetch_one(sql, address=address)
        return None if row is None else int(row["minor"])

    async def add_addresses(self, made: Sequence[Subaddress]) -> None:
        """Record addresses. Raises StoreConflict when an index is there with another address."""
        await self._db.write(
            [
                Statement(_ADD_ADDRESS, {"minor": item.index.minor, "address": item.address})
                for item in made
            ]
        )

    async def reserve_addresses(self, minor: int) -> None:
        """Record that addresses up to this index may be handed out."""
        await self._db.write([self.reserving(minor)])

    def reserving(self, minor: int) -> Statement:
        """The statement of ``reserve_addresses``."""
        return Statement(_RESERVE, {"minor": minor})

    async def rescan_due(self) -> bool:
        """Whether the wallet must rescan the chain."""
        return await self._db.fetch_one("SELECT 1 FROM monero_rescan_due") is not None

    async def note_rescan_due(self) -> None:
        """Record that a rescan is due, until ``note_rescanned``."""
        await self._db.write([Statement(_RESCAN_DUE)])

    async def note_rescanned(self) -> None:
        """Record that the wallet rescanned and stored what it found."""
        await self._db.write([Statement("DELETE FROM monero_rescan_due")])

    # --- deposits ------------------------------------------------------------------------------

    async def cursors(self) -> list[Cursor]:
        """Blocks up to which deposits are committed, newest first."""
        sql = "SELECT height, hash FROM monero_cursor ORDER BY height DESC"
        return [Cursor(**row) for row in await self._db.fetch(sql)]

    async def deposit(self, txid: str, minor: int) -> DepositRecord | None:
        """One deposit."""
        sql = f"{_SELECT_DEPOSIT} WHERE d.txid = :txid AND d.minor = :minor"
        row = await self._db.fetch_one(sql, txid=txid, minor=minor)
        return _deposit(row) if row else None

    async def deposits_to(self, minor: int) -> list[DepositRecord]:
        """All deposits to one address."""
        sql = f"{_SELECT_DEPOSIT} WHERE d.minor = :minor ORDER BY d.first_seen_at, d.txid"
        return [_deposit(row) for row in await self._db.fetch(sql, minor=minor)]

    async def deposits_to_watch(self, above: int) -> list[DepositRecord]:
        """Deposits that are watched, and all in blocks above a height."""
        sql = (
            f"{_SELECT_DEPOSIT} WHERE d.watched = 1 OR d.height > :above"
            " ORDER BY d.first_seen_at, d.txid, d.minor"
        )
        return [_deposit(row) for row in await self._db.fetch(sql, above=above)]

    async def put_deposits(self, records: Sequence[DepositRecord]) -> None:
        """Add deposits, or change height, watch and acknowledgement of known ones."""
        await self._db.write([Statement(_PUT_DEPOSIT, _deposit_values(item)) for item in records])

    async def acknowledge(
        self,
        states: Sequence[tuple[str, int, DepositState]],
        cursor: Cursor | None,
        fork: int,
    ) -> None:
        """Record acknowledged states by (txid, minor) and move the cursor; blocks above ``fork``
        are void.
        """
        statements = [
            Statement(_ACKNOWLEDGE, {"acknowledged": state.value, "txid": txid, "minor": minor})
            for txid, minor, state in states
        ]
        if cursor is not None:
            oldest = cursor.height - _KEPT_CURSORS
            statements += [
                Statement(_VOID_CURSORS, {"fork": fork, "oldest": oldest}),
                Statement(_PUT_CURSOR, {"height": cursor.height, "hash": cursor.hash}),
            ]
        if statements:
            await self._db.write(statements)

    # --- payments ------------------------------------------------------------------------------

    async def payment(self, transfer_id: str) -> MoneroPayment | None:
        """The payment that pays a transfer, alone or with others."""
        sql = "SELECT payment_id FROM monero_payees WHERE transfer_id = :transfer_id"
        row = await self._db.fetch_one(sql, transfer_id=transfer_id)
        name = row["payment_id"] if row else transfer_id
        found = await self._payments("WHERE payment_id = :payment_id", payment_id=name)
        return found[0] if found else None

    async def payments_in(self, *states: MoneroPaymentState) -> list[MoneroPayment]:
        """All payments in these states, oldest first."""
        return await self._payments("WHERE state IN :states ORDER BY seq", states=states)

    async def settled_above(self, height: int) -> list[MoneroPayment]:
        """Settled payments in blocks above a height, and those that are no longer in a block."""
        where = "WHERE state = 'settled' AND (height > :height OR height IS NULL) ORDER BY seq"
        return await self._payments(where, height=height)

    async def live_key_images(self, images: Sequence[str]) -> set[str]:
        """Key images spent by payments that were, or may yet be, made."""
        sql = "SELECT key_image FROM monero_key_images WHERE key_image IN :images AND live = 1"
        return {row["key_image"] for row in await self._db.fetch(sql, images=images)}

    async def free_key_images(self) -> set[str]:
        """Key images spent only by payments that can never be made."""
        sql = "SELECT key_image FROM monero_key_images GROUP BY key_image HAVING max(live) = 0"
        return {row["key_image"] for row in await self._db.fetch(sql)}

    async def without_order(self) -> list[MoneroPayment]:
        """Published payments none of whose transfers is in the database."""
        return await self._payments(_WITHOUT_ORDER)

    async def add_payment(self, payment: MoneroPayment, rows: Rows = ()) -> None:
        """Commit a signed payment.

        Raises StoreConflict if another payment is unpublished, spends the same outputs, or pays one
        of its transfers.
        """
        await self._db.write([*rows, *self.adding(payment)])

    def adding(self, payment: MoneroPayment) -> list[Statement]:
        """The statements of ``add_payment``."""
        name = payment.payment_id
        payees = [
            {
                "payment_id": name, "transfer_id": item.transfer_id, "address": item.address,
                "units": item.units,
            }
            for item in payment.batch
        ]  # fmt: skip
        images = [{"payment_id": name, "key_image": image} for image in payment.key_images]
        return [
            Statement(_ADD_PAYMENT, _payment_values(payment)),
            *(Statement(_ADD_PAYEE, values) for values in payees),
            *(Statement(_ADD_IMAGE, values) for values in images),
        ]

    async def has_transaction(self, txid: str) -> bool:
        """Whether a payment with this transaction is on record."""
        sql = "SELECT 1 FROM monero_payments WHERE txid = :txid"
        return await self._db.fetch_one(sql, txid=txid) is not None

    async def put_payment(self, payment: MoneroPayment) -> None:
        """Update the state of a payment. Raises StoreConflict if it is over."""
        values = _payment_values(payment)
        statements = [Statement(_PUT_PAYMENT, values)]
        if payment.state.is_over:
            statements.append(Statement(_FREE_IMAGES, values))
        await self._db.write(statements)

    async def put_proof(self, payment: MoneroPayment, payee: Payee) -> None:
        """Store the proof of what a payment paid for one transfer."""
        sql = _PUT_PAYEE_PROOF if payment.batch else _PUT_PROOF
        values = {
            "proof": payee.proof, "payment_id": payment.payment_id,
            "transfer_id": payee.transfer_id,
        }  # fmt: skip
        await self._db.write([Statement(sql, values)])

    async def _payments(self, where: str, **values: Any) -> list[MoneroPayment]:
        rows = await self._db.fetch(f"{_SELECT_PAYMENT} {where}", **values)
        return [
            _payment(
                row, await self._images(row["payment_id"]), await self._batch(row["payment_id"])
            )
            for row in rows
        ]

    async def _batch(self, payment_id: str) -> tuple[Payee, ...]:
        sql = (
            "SELECT transfer_id, address, units, proof FROM monero_payees"
            " WHERE payment_id = :payment_id ORDER BY transfer_id"
        )
        return tuple(Payee(**row) for row in await self._db.fetch(sql, payment_id=payment_id))

    async def _images(self, payment_id: str) -> tuple[str, ...]:
        sql = (
            "SELECT key_image FROM monero_key_images WHERE payment_id = :payment_id"
            " ORDER BY key_image"
        )
        return tuple(row["key_image"] for row in await self._db.fetch(sql, payment_id=payment_id))


def _subaddress(row: Row) -> Subaddress:
    # Rows hold one account, that of the wallet client.
    return Subaddress(SubaddressIndex(0, row["minor"]), row["address"])


def _deposit(row: Row) -> DepositRecord:
    state = row["acknowledged"]
    return DepositRecord(
        txid=row["txid"], minor=row["minor"], address=row["address"], units=row["units"],
        unlock_time=row["unlock_time"], first_seen_at=row["first_seen_at"], height=row["height"],
        acknowledged=None if state is None else DepositState(state), watched=bool(row["watched"]),
    )  # fmt: skip


def _deposit_values(item: DepositRecord) -> dict[str, Any]:
    return {
        "txid": item.txid, "minor": item.minor, "units": item.units,
        "unlock_time": item.unlock_time, "first_seen_at": item.first_seen_at,
        "height": item.height, "acknowledged": item.acknowledged and item.acknowledged.value,
        "watched": int(item.watched),
    }  # fmt: skip


def _payment(row: Row, images: tuple[str, ...], batch: tuple[Payee, ...]) -> MoneroPayment:
    height = row["conflict_height"]
    return MoneroPayment(
        payment_id=row["payment_id"], purpose=MoneroPurpose(row["purpose"]), address=row["address"],
        units=row["units"], fee=row["fee"], txid=row["txid"], raw=row["raw"],
        metadata=row["metadata"], tx_key=row["tx_key"], key_images=images,
        prepared_at=row["prepared_at"], state=MoneroPaymentState(row["state"]),
        relayed_at=row["relayed_at"], height=row["height"],
        conflict=None if height is None else Cursor(height, row["conflict_hash"]),
        proof=row["proof"], batch=batch,
    )  # fmt: skip


def _payment_values(item: MoneroPayment) -> dict[str, Any]:
    conflict = item.conflict
    return {
        "payment_id": item.payment_id, "purpose": item.purpose.value, "address": item.address,
        "units": item.units, "fee": item.fee, "txid": item.txid, "raw": item.raw,
        "metadata": item.metadata, "tx_key": item.tx_key, "prepared_at": item.prepared_at,
        "proof": item.proof, "state": item.state.value, "relayed_at": item.relayed_at,
        "height": item.height, "conflict_height": conflict.height if conflict else None,
        "conflict_hash": conflict.hash if conflict else None,
    }  # fmt: skip
