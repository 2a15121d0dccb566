"""Addresses, deposits and payments of the Monero adapter as rows, and payments as lines of the
payment journal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from typing_extensions import override

from rpcsvc.domain.order import DepositState
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.journal.files import AddressesEntry, JournalEntry, VoidEntry
from rpcsvc.settlement.onchain.journal.writer import JournaledWrites, PaymentJournal
from rpcsvc.settlement.onchain.monero.records import (
    NETWORK,
    Cursor,
    DepositRecord,
    MoneroPayment,
    MoneroPaymentState,
    MoneroPurpose,
    Payee,
    WalletRecord,
)
from rpcsvc.settlement.onchain.monero.wallet_types import Subaddress, SubaddressIndex
from rpcsvc.settlement.onchain.pause import PauseRow
from rpcsvc.store.database import (
    Row,
    Rows,
    StaleWrite,
    Statement,
    Tables,
    from_row,
    insert,
    to_row,
    update,
)

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
# These abort the transaction where the database was replaced since the scan by an older copy.
_HAS_DEPOSIT: Final = "SELECT 1 FROM monero_deposits m WHERE m.txid = :txid AND m.minor = :minor"
_IS_OF_NO_ORDER: Final = (
    "NOT EXISTS (SELECT 1 FROM monero_addresses a JOIN orders o"
    " ON o.deposit_address_ends = a.address_ends AND o.deposit_address = a.address"
    " WHERE a.minor = m.minor AND o.deposit_network = 'monero')"
)
_OF_ITS_ORDER: Final = (
    "FROM deposits d WHERE d.network = 'monero' AND d.txid = m.txid AND d.output_index = m.minor"
)
_IS_RECORDED: Final = {
    DepositState.SEEN: f"{_HAS_DEPOSIT} AND"
    f" (EXISTS (SELECT 1 {_OF_ITS_ORDER}) OR {_IS_OF_NO_ORDER})",
    DepositState.CONFIRMED: f"{_HAS_DEPOSIT} AND"
    f" (EXISTS (SELECT 1 {_OF_ITS_ORDER} AND d.state <> 'seen') OR {_IS_OF_NO_ORDER})",
    DepositState.REMOVED: _HAS_DEPOSIT,
}
_HAS_CURSOR: Final = "SELECT 1 FROM monero_cursor WHERE height = :fork"
# The order layer takes few deposits of one order at a time, and none that it can't record.
_ON_NO_ORDER: Final = (
    "SELECT coalesce(sum(m.units), 0) AS units FROM monero_deposits m"
    " WHERE m.watched = 1 AND m.acknowledged IS NULL AND NOT EXISTS (SELECT 1 FROM deposits d"
    "  WHERE d.network = 'monero' AND d.txid = m.txid AND d.output_index = m.minor"
    "  AND d.state <> 'removed')"
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
    "prepared_at", *_PROGRESS,
)  # fmt: skip
_SELECT_PAYMENT: Final = f"SELECT {', '.join(_PAYMENT)} FROM monero_payments"
_ADD_PAYMENT: Final = insert("monero_payments", _PAYMENT)
_PUT_PAYMENT: Final = update(
    "monero_payments", (*_PROGRESS, "metadata"), "payment_id = :payment_id"
)
_ADD_PAYEE: Final = insert("monero_payees", ("payment_id", "transfer_id", "address", "units"))
_WITHOUT_ORDER: Final = (
    "WHERE state = 'published' AND purpose = 'transfer' AND NOT EXISTS"
    " (SELECT 1 FROM transfers AS t WHERE t.transfer_id = monero_payments.payment_id"
    "  OR t.transfer_id IN (SELECT e.transfer_id FROM monero_payees AS e"
    "   WHERE e.payment_id = monero_payments.payment_id)) AND NOT EXISTS"
    " (SELECT 1 FROM withdrawals AS w WHERE w.withdrawal_id = monero_payments.payment_id)"
    " ORDER BY seq"
)
_ADD_IMAGE: Final = (
    "INSERT INTO monero_key_images (payment_id, key_image, live)"
    " VALUES (:payment_id, :key_image, 1)"
)
_FREE_IMAGES: Final = "UPDATE monero_key_images SET live = 0 WHERE payment_id = :payment_id"


MONERO_PAYMENT: Final = "monero_payment"


class MoneroEntry(JournalEntry, frozen=True):
    """A signed payment of the wallet with this primary address."""

    wallet: str
    payment: MoneroPayment

    @property
    def void(self) -> VoidEntry:
        """The entry that voids the payment while it is not published."""
        return VoidEntry(self.payment.payment_id, self.payment.txid)

    @override
    def body(self) -> dict[str, Any]:
        item = self.payment
        return {
            "kind": MONERO_PAYMENT, "payment": item.payment_id, "purpose": item.purpose.value,
            "wallet": self.wallet, "at": item.prepared_at, "txid": item.txid, "units": item.units,
            "fee": item.fee, "address": item.address,
            "batch": [[each.transfer_id, each.address, each.units] for each in item.batch],
            "key": item.tx_key, "key_images": list(item.key_images), "raw": item.raw,
        }  # fmt: skip

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> MoneroEntry:
        """The entry of a body, published: the network may have it."""
        at = body["at"]
        payment = MoneroPayment(
            payment_id=body["payment"],
            purpose=MoneroPurpose(body["purpose"]),
            address=body["address"],
            units=body["units"],
            fee=body["fee"],
            txid=body["txid"],
            raw=body["raw"],
            # The wallet needs it to relay, which it is not asked to do a second time.
            metadata="",
            tx_key=body["key"],
            key_images=tuple(body["key_images"]),
            prepared_at=at,
            state=MoneroPaymentState.PUBLISHED,
            relayed_at=at,
            batch=tuple(Payee(*each) for each in body["batch"]),
        )
        return cls(body["wallet"], payment)


class MoneroLedger:
    """Keeps the wallet's addresses, deposits and payments. All may raise errors.Unavailable.

    ``journal`` has a payment, and a reserved address, before the database; None: the process signs
    nothing. ``pause``: the pause that all replicas share.
    """

    def __init__(
        self,
        database: Tables,
        journal: PaymentJournal | None = None,
        pause: PauseRow | None = None,
    ) -> None:
        self._db = database
        self._writes = JournaledWrites(database, journal, pause)

    # --- wallet and addresses ------------------------------------------------------------------

    async def wallet(self) -> WalletRecord | None:
        """The wallet of the first start."""
        row = await self._db.fetch_one(
            "SELECT nettype, primary_address, reserved_to FROM monero_wallet"
        )
        return from_row(WalletRecord, row) if row else None

    async def adopt_wallet(self, record: WalletRecord) -> None:
        """Record the wallet. Raises StoreConflict when there is one already."""
        await self._db.write([Statement(_ADD_WALLET, to_row(record))])

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
        reserved = Statement(_RESERVE, {"minor": minor})
        await self._writes.record(AddressesEntry(NETWORK, minor), [reserved])

    async def rescan_due(self) -> bool:
        """Whether the wallet must rescan the chain."""
        return await self._db.fetch_one("SELECT 1 FROM monero_rescan_due") is not None

    async def note_rescan_due(self) -> None:
        """Record that a rescan is due, until ``note_rescanned``."""
        await self._db.write([Statement(_RESCAN_DUE)])

    async def note_rescanned(self) -> None:
        """Record that the wallet rescanned and stored the result."""
        await self._db.write([Statement("DELETE FROM monero_rescan_due")])

    # --- deposits ------------------------------------------------------------------------------

    async def cursors(self) -> list[Cursor]:
        """Blocks up to which deposits are committed, newest first."""
        sql = "SELECT height, hash FROM monero_cursor ORDER BY height DESC"
        return [from_row(Cursor, row) for row in await self._db.fetch(sql)]

    async def scanned_height(self) -> int | None:
        """The newest block of Monero whose deposits are on record; None before the first scan."""
        row = await self._db.fetch_one("SELECT max(height) AS height FROM monero_cursor")
        return None if row is None or row["height"] is None else int(row["height"])

    async def recorded_height(self) -> int:
        """The block of the newest payout on record, or the oldest scanned block that is kept,
        whichever is lower; 0 without either.

        An adopted payout may be newer than one that is not on record. Payments of the wallet to
        itself do not count: one may have been signed while a payout was on no record.
        """
        sql = (
            "SELECT coalesce(min(height), 0) AS height FROM ("
            "SELECT max(height) AS height FROM monero_payments WHERE purpose = 'transfer'"
            " UNION ALL SELECT min(height) FROM monero_cursor) AS known"
        )
        row = await self._db.fetch_one(sql)
        return int(row["height"]) if row else 0

    async def deposit(self, txid: str, minor: int) -> DepositRecord | None:
        """Return a deposit; None if it is not on record."""
        sql = f"{_SELECT_DEPOSIT} WHERE d.txid = :txid AND d.minor = :minor"
        row = await self._db.fetch_one(sql, txid=txid, minor=minor)
        return from_row(DepositRecord, row) if row else None

    async def deposits_to(self, minor: int) -> list[DepositRecord]:
        """Return all deposits to one address."""
        sql = f"{_SELECT_DEPOSIT} WHERE d.minor = :minor ORDER BY d.first_seen_at, d.txid"
        return [from_row(DepositRecord, row) for row in await self._db.fetch(sql, minor=minor)]

    async def deposits_to_watch(self, above: int) -> list[DepositRecord]:
        """Deposits that are watched, and all in blocks above a height."""
        sql = (
            f"{_SELECT_DEPOSIT} WHERE d.watched = 1 OR d.height > :above"
            " ORDER BY d.first_seen_at, d.txid, d.minor"
        )
        return [from_row(DepositRecord, row) for row in await self._db.fetch(sql, above=above)]

    async def on_no_order(self) -> int:
        """Return the piconero of deposits that are shown and that no order has on record yet."""
        row = await self._db.fetch_one(_ON_NO_ORDER)
        return int(row["units"]) if row else 0

    async def put_deposits(self, records: Sequence[DepositRecord]) -> None:
        """Add deposits, or change height, watch and acknowledgement of known ones."""
        await self._db.write([Statement(_PUT_DEPOSIT, to_row(item)) for item in records])

    async def acknowledge(
        self,
        states: Sequence[tuple[str, int, DepositState]],
        cursor: Cursor | None,
        fork: int,
    ) -> None:
        """Record acknowledged states by (txid, minor) and move the cursor; blocks above ``fork``
        are void.

        Raises errors.Unavailable where the database lacks what was scanned, or an order's deposit:
        it fell back meanwhile, and the next scan shows them again.
        """
        statements = []
        for txid, minor, state in states:
            key = {"txid": txid, "minor": minor}
            statements += [
                Statement(_IS_RECORDED[state], key, finds=True),
                Statement(_ACKNOWLEDGE, {"acknowledged": state.value, **key}),
            ]
        if cursor is not None:
            if fork >= 0:
                statements.append(Statement(_HAS_CURSOR, {"fork": fork}, finds=True))
            oldest = cursor.height - _KEPT_CURSORS
            statements += [
                Statement(_VOID_CURSORS, {"fork": fork, "oldest": oldest}),
                Statement(_PUT_CURSOR, to_row(cursor)),
            ]
        if not statements:
            return
        try:
            await self._db.write(statements)
        except StaleWrite:
            raise Unavailable("The database lacks what was scanned: it is scanned again.") from None

    # --- payments ------------------------------------------------------------------------------

    async def payment(self, transfer_id: str) -> MoneroPayment | None:
        """The payment that pays a transfer, alone or with others."""
        sql = "SELECT payment_id FROM monero_payees WHERE transfer_id = :transfer_id"
        row = await self._db.fetch_one(sql, transfer_id=transfer_id)
        name = row["payment_id"] if row else transfer_id
        found = await self._payments("WHERE payment_id = :payment_id", payment_id=name)
        return found[0] if found else None

    async def payments_in(self, *states: MoneroPaymentState) -> list[MoneroPayment]:
        """Return all payments in these states, oldest first."""
        return await self._payments("WHERE state IN :states ORDER BY seq", states=states)

    async def settled_above(self, height: int) -> list[MoneroPayment]:
        """Return settled payments in blocks above a height, or in no block any more."""
        where = "WHERE state = 'settled' AND (height > :height OR height IS NULL) ORDER BY seq"
        return await self._payments(where, height=height)

    async def live_key_images(self, images: Sequence[str]) -> set[str]:
        """The key images that are spent by a payment that was made, or may yet be."""
        sql = "SELECT key_image FROM monero_key_images WHERE key_image IN :images AND live = 1"
        return {row["key_image"] for row in await self._db.fetch(sql, images=images)}

    async def free_key_images(self) -> set[str]:
        """Return key images spent only by payments that can never be made."""
        sql = "SELECT key_image FROM monero_key_images GROUP BY key_image HAVING max(live) = 0"
        return {row["key_image"] for row in await self._db.fetch(sql)}

    async def without_order(self) -> list[MoneroPayment]:
        """Return published payments none of whose transfers is in the database."""
        return await self._payments(_WITHOUT_ORDER)

    async def add_payment(self, payment: MoneroPayment, rows: Rows = ()) -> None:
        """Commit a signed payment.

        Raises StoreConflict if another payment is unpublished, spends the same outputs, or pays one
        of its transfers, and errors.Unavailable when it is a payout and payouts are paused.
        """
        name, wallet = payment.payment_id, await self.wallet()
        images = [{"payment_id": name, "key_image": image} for image in payment.key_images]
        statements = [
            Statement(_ADD_PAYMENT, _payment_values(payment)),
            *(Statement(_ADD_PAYEE, to_row(item, payment_id=name)) for item in payment.batch),
            *(Statement(_ADD_IMAGE, values) for values in images),
        ]
        entry = MoneroEntry(wallet.primary_address if wallet else "", payment)
        is_payout = payment.purpose is MoneroPurpose.TRANSFER
        await self._writes.record_payment(
            entry,
            entry.void,
            [*rows, *statements],
            lambda: self.has_transaction(payment.txid),
            is_payout=is_payout,
        )

    async def has_transaction(self, txid: str) -> bool:
        """Whether a payment with this transaction is on record."""
        sql = "SELECT 1 FROM monero_payments WHERE txid = :txid"
        return await self._db.fetch_one(sql, txid=txid) is not None

    async def put_payment(self, payment: MoneroPayment, beside: Sequence[Statement] = ()) -> None:
        """Update the state of a payment, and write ``beside`` with it. Raises StoreConflict if it
        is over.

        A settled one loses its metadata, by which the wallet relays it the first time.
        """
        values = _payment_values(payment)
        if payment.state is MoneroPaymentState.SETTLED:
            values["metadata"] = ""
        statements = [Statement(_PUT_PAYMENT, values), *beside]
        if payment.state.is_over:
            statements.append(Statement(_FREE_IMAGES, values))
        await self._db.write(statements)
        if payment.state.is_over:
            await self._writes.note(VoidEntry(payment.payment_id, payment.txid))

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
            "SELECT transfer_id, address, units FROM monero_payees"
            " WHERE payment_id = :payment_id ORDER BY transfer_id"
        )
        return tuple(
            from_row(Payee, row) for row in await self._db.fetch(sql, payment_id=payment_id)
        )

    async def _images(self, payment_id: str) -> tuple[str, ...]:
        sql = (
            "SELECT key_image FROM monero_key_images WHERE payment_id = :payment_id"
            " ORDER BY key_image"
        )
        return tuple(row["key_image"] for row in await self._db.fetch(sql, payment_id=payment_id))


def _subaddress(row: Row) -> Subaddress:
    # Rows hold one account, that of the wallet client.
    return Subaddress(SubaddressIndex(0, row["minor"]), row["address"])


def _payment(row: Row, images: tuple[str, ...], batch: tuple[Payee, ...]) -> MoneroPayment:
    height = row["conflict_height"]
    conflict = None if height is None else Cursor(height, row["conflict_hash"])
    return from_row(
        MoneroPayment,
        row,
        raw=row["raw"].hex(),
        key_images=images,
        conflict=conflict,
        batch=batch,
    )


def _payment_values(item: MoneroPayment) -> dict[str, Any]:
    conflict = item.conflict
    return to_row(
        item,
        raw=bytes.fromhex(item.raw),
        conflict_height=conflict and conflict.height,
        conflict_hash=conflict and conflict.hash,
    )
