"""Payments and sweeps of the EVM adapter as rows, and as lines of the payment journal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace
from typing_extensions import override

from rpcsvc.settlement.onchain.evm.records import (
    Attempt,
    BlockPoint,
    EvmPayment,
    EvmPaymentOrder,
    EvmPaymentState,
    EvmPurpose,
    GasUse,
    Inclusion,
    Sweep,
    SweepMethod,
    SweepState,
    UnsweptAddress,
)
from rpcsvc.settlement.onchain.journal.files import JournalEntry, VoidEntry, as_one
from rpcsvc.settlement.onchain.journal.writer import JournaledWrites, PaymentJournal
from rpcsvc.settlement.onchain.pause import PauseRow
from rpcsvc.store.database import Row, Rows, Statement, Tables, from_row, insert, to_row, update

_PROGRESS: Final = (
    "state", "published_at", "mined_txid", "block_number", "block_hash", "gas_used", "gas_price",
    "l1_fee", "log_position", "log_index", "conflict_number", "conflict_hash",
)  # fmt: skip
_PAYMENT: Final = (
    "payment_id", "network", "sender", "nonce", "purpose", "recipient", "units", "contract",
    "data", "gas", "prepared_at", *_PROGRESS,
)  # fmt: skip
_SELECT_PAYMENT: Final = f"SELECT {', '.join(_PAYMENT)} FROM evm_payments"
# Each part reads one entry of the index by state.
_MINED_TO: Final = (
    "SELECT max(part.newest) AS newest FROM ("
    + " UNION ALL ".join(
        "SELECT max(block_number) AS newest FROM evm_payments"
        f" WHERE network = :network AND state = '{state.value}'"
        for state in EvmPaymentState
    )
    + ") AS part"
)
_ADD_PAYMENT: Final = insert("evm_payments", _PAYMENT)
_PUT_PAYMENT: Final = update("evm_payments", _PROGRESS, "payment_id = :payment_id")
_ACKNOWLEDGE_NONCE: Final = (
    "INSERT INTO evm_nonces (network, sender, acknowledged_below)"
    " VALUES (:network, :sender, :nonce)"
    " ON CONFLICT (network, sender) DO UPDATE SET acknowledged_below = excluded.acknowledged_below"
    " WHERE excluded.acknowledged_below > evm_nonces.acknowledged_below"
)
_ATTEMPT: Final = ("txid", "raw", "max_fee", "tip", "made_at")
_ADD_ATTEMPT: Final = insert("evm_attempts", ("payment_id", "number", *_ATTEMPT))
_SELECT_ATTEMPTS: Final = (
    f"SELECT payment_id, {', '.join(_ATTEMPT)} FROM evm_attempts WHERE payment_id IN :payment_ids"
    " ORDER BY number"
)
# The number of payments whose attempts are read at once.
_MOST_IDS: Final = 500
_SELECT_GAS: Final = (
    "SELECT p.gas, p.gas_used, p.gas_price, p.l1_fee, p.state,"
    " EXISTS (SELECT 1 FROM funding_authorizations f WHERE f.network = p.network"
    "  AND f.recipient = p.recipient AND f.is_gas_paid = 1) AS is_paid,"
    " (SELECT max(a.max_fee) FROM evm_attempts a WHERE a.payment_id = p.payment_id) AS max_fee"
    " FROM evm_payments p"
    " WHERE p.network = :network AND p.purpose = 'authorization' AND p.prepared_at >= :at"
    " ORDER BY p.seq"
)
_SWEEP: Final = (
    "network", "address_index", "serial", "address", "method", "units", "authorization_hash",
    "payment_id", "state", "taken",
)  # fmt: skip
_SELECT_SWEEP: Final = f"SELECT {', '.join(_SWEEP)} FROM evm_sweeps WHERE network = :network"
_ADD_SWEEP: Final = insert("evm_sweeps", _SWEEP)
_PUT_SWEEP: Final = update(
    "evm_sweeps",
    ("state", "taken"),
    "network = :network AND address_index = :address_index AND serial = :serial",
)
_UNSWEPT: Final = (
    "SELECT h.address_index, a.address, h.unswept AS units,"
    "  1 + coalesce((SELECT max(s.serial) FROM evm_sweeps s"
    "   WHERE s.network = h.network AND s.address_index = h.address_index), 0) AS serial"
    " FROM evm_holdings h JOIN evm_addresses a ON a.address_index = h.address_index"
    " WHERE h.network = :network AND h.unswept > 0 AND h.unswept >= :least"
    " AND NOT EXISTS (SELECT 1 FROM evm_sweeps s WHERE s.network = h.network"
    "  AND s.address_index = h.address_index AND s.state = 'signed')"
    " ORDER BY h.address_index"
)


# Deposits that are swept sooner or later, without those under way: they may be mined, and then the
# hot wallet has them. One that is not acknowledged counts once its order has it on record: it may
# wait to be final for minutes.
_COMING: Final = (
    "SELECT (SELECT coalesce(sum(h.unswept), 0) FROM evm_holdings h"
    "  WHERE h.network = :network AND h.unswept > 0 AND h.unswept >= :least"
    "  AND NOT EXISTS (SELECT 1 FROM evm_sweeps s WHERE s.network = h.network"
    "   AND s.address_index = h.address_index AND s.state = 'signed'))"
    " + (SELECT coalesce(sum(e.units), 0) FROM evm_deposits e"
    "  WHERE e.network = :network AND e.watched = 1 AND e.block_number IS NOT NULL"
    "  AND e.units >= :least AND (e.acknowledged = 'seen' OR e.acknowledged IS NULL"
    "   AND EXISTS (SELECT 1 FROM deposits d WHERE d.network = e.network AND d.txid = e.txid"
    "    AND d.output_index = e.position AND d.state <> 'removed'))) AS units"
)


EVM_PAYMENT: Final = "evm_payment"
EVM_ATTEMPT: Final = "evm_attempt"
SWEPT: Final = "swept"


class EvmEntry(JournalEntry, frozen=True):
    """A signed payment with its first attempt, and the sweep that it is for."""

    payment: EvmPayment
    sweep: Sweep | None = None

    @property
    def void(self) -> VoidEntry:
        """The entry that voids the payment before it is committed."""
        return VoidEntry(self.payment.payment_id, self.payment.attempts[0].txid)

    @override
    def body(self) -> dict[str, Any]:
        item, order, sweep = self.payment, self.payment.order, self.sweep
        return {
            "kind": EVM_PAYMENT, "payment": item.payment_id, "purpose": order.purpose.value,
            "network": item.network, "sender": item.sender, "nonce": item.nonce,
            "at": item.prepared_at, "recipient": order.recipient, "units": order.units,
            "contract": order.contract, "data": order.data.hex(), "gas": order.gas,
            "attempts": [_attempt_list(each) for each in item.attempts],
            "sweep": None if sweep is None else [
                sweep.address_index, sweep.serial, sweep.address, sweep.method.value, sweep.units,
                sweep.authorization,
            ],
        }  # fmt: skip

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> EvmEntry:
        """The entry of a body, published: a node may have it."""
        order = EvmPaymentOrder(
            body["payment"], EvmPurpose(body["purpose"]), body["recipient"], body["units"],
            body["contract"], bytes.fromhex(body["data"]), body["gas"],
        )  # fmt: skip
        at, attempts = body["at"], tuple(Attempt(*each) for each in body["attempts"])
        made = EvmPayment(body["network"], body["sender"], body["nonce"], order, attempts, at)
        payment = replace(made, state=EvmPaymentState.PUBLISHED, published_at=at)
        return cls(payment, _journaled_sweep(body))


class AttemptEntry(JournalEntry, frozen=True):
    """A replacement of a payment at higher fees. It has the payment's nonce: nothing voids it."""

    payment_id: str
    attempt: Attempt

    @override
    def body(self) -> dict[str, Any]:
        attempt = _attempt_list(self.attempt)
        return {"kind": EVM_ATTEMPT, "payment": self.payment_id, "attempt": attempt}

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> AttemptEntry:
        """The entry of a body."""
        return cls(body["payment"], Attempt(*body["attempt"]))


class SweptEntry(JournalEntry, frozen=True):
    """The end of a sweep: ``state`` is done or void, ``taken`` USDC units left the address."""

    network: str
    address_index: int
    serial: int
    state: SweepState
    taken: int

    @override
    def body(self) -> dict[str, Any]:
        return {
            "kind": SWEPT, "network": self.network, "index": self.address_index,
            "serial": self.serial, "state": self.state.value, "taken": self.taken,
        }  # fmt: skip

    @classmethod
    def read(cls, body: Mapping[str, Any]) -> SweptEntry:
        """The entry of a body."""
        state = SweepState(body["state"])
        return cls(body["network"], body["index"], body["serial"], state, body["taken"])


def _journaled_sweep(body: Mapping[str, Any]) -> Sweep | None:
    if body["sweep"] is None:
        return None
    index, serial, address, method, units, authorization = body["sweep"]
    return Sweep(
        body["network"], index, serial, address, SweepMethod(method), units, authorization,
        body["payment"],
    )  # fmt: skip


def _attempt_list(item: Attempt) -> list[Any]:
    return [item.txid, item.raw, item.max_fee, item.tip, item.made_at]


class EvmPaymentLedger:
    """Keeps payments and sweeps. Everything may raise errors.Unavailable.

    ``journal`` has a payment before the database; None: the process signs nothing. ``pause``: the
    pause that all replicas share.
    """

    def __init__(
        self,
        database: Tables,
        journal: PaymentJournal | None = None,
        pause: PauseRow | None = None,
    ) -> None:
        self._db = database
        self._writes = JournaledWrites(database, journal, pause)

    # --- payments ------------------------------------------------------------------------------

    async def payment(self, payment_id: str) -> EvmPayment | None:
        """Return a payment by its id; None if it is not on record."""
        found = await self._payments("WHERE payment_id = :payment_id", payment_id=payment_id)
        return found[0] if found else None

    async def payments_in(self, network: str, *states: EvmPaymentState) -> list[EvmPayment]:
        """Return a network's payments in these states, lowest nonce first."""
        where = "WHERE network = :network AND state IN :states ORDER BY nonce, seq"
        return await self._payments(where, network=network, states=states)

    async def ended_above(self, network: str, number: int) -> list[EvmPayment]:
        """Return settled and failed payments in blocks above a number or in no block, except those
        closed by hand, lowest nonce first.

        A failed payment that another transaction displaced counts in the block of that one.
        """
        where = (
            "WHERE network = :network AND state IN ('settled', 'failed')"
            " AND (block_number > :number OR block_number IS NULL AND (state = 'settled'"
            "  OR conflict_number IS NULL OR conflict_number > :number))"
            " AND payment_id NOT IN (SELECT transfer_id FROM closed_by_hand) ORDER BY nonce"
        )
        return await self._payments(where, network=network, number=number)

    async def mined_to(self, network: str) -> int:
        """Return the newest block in which a payment was mined; 0: there is none."""
        row = await self._db.fetch_one(_MINED_TO, network=network)
        return 0 if row is None or row["newest"] is None else int(row["newest"])

    async def paid_out_attempt(self, payment: EvmPayment) -> Attempt | None:
        """Return the attempt whose deposit its order has spent; None: there is none."""
        row = await self._db.fetch_one(
            "SELECT txid FROM deposits"
            " WHERE network = :network AND txid IN :txids AND transfer_id IS NOT NULL",
            network=payment.network,
            txids=[attempt.txid for attempt in payment.attempts],
        )
        made = {attempt.txid: attempt for attempt in payment.attempts}
        return None if row is None else made[row["txid"]]

    async def next_nonce(self, network: str, sender: str) -> int:
        """Return one more than the highest nonce of the sender's payments; 0 before the first."""
        row = await self._db.fetch_one(
            "SELECT max(nonce) AS highest FROM evm_payments"
            " WHERE network = :network AND sender = :sender",
            network=network,
            sender=sender,
        )
        return 0 if row is None or row["highest"] is None else int(row["highest"]) + 1

    async def unused_nonces(self, network: str, sender: str, first: int, end: int) -> list[int]:
        """Return the nonces from ``first`` to below ``end`` that no payment of the sender has."""
        where = (
            "FROM evm_payments WHERE network = :network AND sender = :sender"
            " AND nonce >= :first AND nonce < :end"
        )
        values = {"network": network, "sender": sender, "first": first, "end": end}
        row = await self._db.fetch_one(f"SELECT count(*) AS used {where}", **values)
        if row is not None and row["used"] == max(0, end - first):
            return []
        used = {row["nonce"] for row in await self._db.fetch(f"SELECT nonce {where}", **values)}
        return [nonce for nonce in range(first, end) if nonce not in used]

    async def acknowledged_nonce(self, network: str, sender: str) -> int | None:
        """The nonce below which the operator has acknowledged all nonces; None: never."""
        row = await self._db.fetch_one(
            "SELECT acknowledged_below FROM evm_nonces"
            " WHERE network = :network AND sender = :sender",
            network=network,
            sender=sender,
        )
        return int(row["acknowledged_below"]) if row else None

    async def acknowledge_nonce(self, network: str, sender: str, nonce: int) -> None:
        """Record that the operator has acknowledged all nonces below this one."""
        values = {"network": network, "sender": sender, "nonce": nonce}
        await self._db.write([Statement(_ACKNOWLEDGE_NONCE, values)])

    async def add_payment(
        self, payment: EvmPayment, sweep: Sweep | None = None, *, rows: Rows = ()
    ) -> None:
        """Commit a signed payment with the sweep that it is for, or with its order's ``rows``.

        Raises StoreConflict when its nonce is taken, or it is known, and errors.Unavailable when it
        is a payout and payouts are paused.
        """
        is_payout = payment.order.purpose is EvmPurpose.TRANSFER
        await self._add([EvmEntry(payment, sweep)], rows, is_payout=is_payout)

    async def add_payouts(self, payments: Sequence[EvmPayment], rows: Rows) -> None:
        """Commit signed payouts with their orders' ``rows``: all of them, or none.

        They are one line of the journal. Raises as ``add_payment`` does.
        """
        await self._add([EvmEntry(payment) for payment in payments], rows, is_payout=True)

    async def _add(self, entries: Sequence[EvmEntry], rows: Rows, *, is_payout: bool) -> None:
        payments = [entry.payment for entry in entries]
        added = [Statement(_ADD_PAYMENT, _payment_values(payment)) for payment in payments]
        attempts = [
            _add_attempt(payment.payment_id, number, attempt)
            for payment in payments
            for number, attempt in enumerate(payment.attempts, 1)
        ]
        sweeps = [Statement(_ADD_SWEEP, _sweep_values(e.sweep)) for e in entries if e.sweep]
        txid = payments[0].attempts[0].txid
        await self._writes.record_payment(
            as_one(entries),
            as_one([entry.void for entry in entries]),
            [*rows, *added, *attempts, *sweeps],
            lambda: self.has_transaction(txid),
            is_payout=is_payout,
        )

    async def has_transaction(self, txid: str) -> bool:
        """Whether a payment with this transaction is on record."""
        sql = "SELECT 1 FROM evm_attempts WHERE txid = :txid"
        return await self._db.fetch_one(sql, txid=txid) is not None

    async def add_attempt(self, payment: EvmPayment, attempt: Attempt) -> None:
        """Commit one more attempt. Raises StoreConflict if the payment is over or the fees do not
        rise.
        """
        added = _add_attempt(payment.payment_id, len(payment.attempts) + 1, attempt)
        await self._writes.record(AttemptEntry(payment.payment_id, attempt), [added])

    async def put_payment(self, *payments: EvmPayment) -> None:
        """Update the state of payments, all or none. Raises StoreConflict if one is over."""
        await self._db.write([Statement(_PUT_PAYMENT, _payment_values(each)) for each in payments])

    async def authorization_gas(self, network: str, at: int) -> list[GasUse]:
        """Return the gas of each authorization whose payment was prepared since a time (ms)."""
        return [_gas_use(row) for row in await self._db.fetch(_SELECT_GAS, network=network, at=at)]

    async def _payments(self, where: str, **values: Any) -> list[EvmPayment]:
        rows = await self._db.fetch(f"{_SELECT_PAYMENT} {where}", **values)
        attempts = await self._attempts([row["payment_id"] for row in rows])
        return [_payment(row, tuple(attempts[row["payment_id"]])) for row in rows]

    async def _attempts(self, payment_ids: Sequence[str]) -> Mapping[str, list[Attempt]]:
        found = defaultdict[str, list[Attempt]](list)
        for part in range(0, len(payment_ids), _MOST_IDS):
            ids = payment_ids[part : part + _MOST_IDS]
            for row in await self._db.fetch(_SELECT_ATTEMPTS, payment_ids=ids):
                found[row["payment_id"]].append(from_row(Attempt, row, raw=row["raw"].hex()))
        return found

    # --- sweeps --------------------------------------------------------------------------------

    async def unswept(self, network: str, least: int) -> list[UnsweptAddress]:
        """Addresses with at least ``least`` units to sweep and no sweep under way, lowest index
        first.
        """
        return [
            from_row(UnsweptAddress, row)
            for row in await self._db.fetch(_UNSWEPT, network=network, least=least)
        ]

    async def coming(self, network: str, least: int) -> int:
        """Return the units of deposits that are still to be swept, of at least ``least`` each."""
        row = await self._db.fetch_one(_COMING, network=network, least=least)
        return int(row["units"]) if row else 0

    async def unswept_of(self, network: str, address_index: int) -> int:
        """Return the confirmed deposits of an address less the units swept; an open sweep counts as
        0.
        """
        row = await self._db.fetch_one(
            "SELECT unswept FROM evm_holdings"
            " WHERE network = :network AND address_index = :address_index",
            network=network,
            address_index=address_index,
        )
        return int(row["unswept"]) if row else 0

    async def sweeps_under_way(self, network: str) -> list[Sweep]:
        """Sweeps in state SIGNED."""
        sql = f"{_SELECT_SWEEP} AND state = 'signed' ORDER BY address_index"
        return [_sweep(row) for row in await self._db.fetch(sql, network=network)]

    async def void_sweeps(self, network: str, address_index: int) -> list[Sweep]:
        """An address's sweeps in state VOID that have an authorization."""
        sql = (
            f"{_SELECT_SWEEP} AND address_index = :address_index AND state = 'void'"
            " AND authorization_hash IS NOT NULL ORDER BY serial"
        )
        rows = await self._db.fetch(sql, network=network, address_index=address_index)
        return [_sweep(row) for row in rows]

    async def add_sweep(self, sweep: Sweep) -> None:
        """Record a sweep that has ended without a payment on record.

        Raises StoreConflict when its serial is taken, and errors.Unavailable: in an older copy of
        the database it may be the sweep whose payment the journal has.
        """
        await self._writes.record(_swept(sweep), [Statement(_ADD_SWEEP, _sweep_values(sweep))])

    async def put_sweep(self, sweep: Sweep) -> None:
        """Record how a sweep ended. Raises StoreConflict if it ended differently before, and
        errors.Unavailable.

        An older copy of the database has it as under way: without its line the next sweep of that
        address could not be adopted beside it.
        """
        await self._writes.record(_swept(sweep), [Statement(_PUT_SWEEP, _sweep_values(sweep))])


def _swept(sweep: Sweep) -> SweptEntry:
    return SweptEntry(sweep.network, sweep.address_index, sweep.serial, sweep.state, sweep.taken)


def _payment_values(item: EvmPayment) -> dict[str, Any]:
    order, mined, conflict = item.order, item.inclusion, item.conflict
    none = dict.fromkeys(("block", *Inclusion.__struct_fields__))
    return {
        **(none if mined is None else to_row(mined)),
        **to_row(order),
        **to_row(item),
        "mined_txid": mined and mined.txid,
        "block_number": mined and mined.block.number,
        "block_hash": mined and mined.block.hash,
        "conflict_number": conflict and conflict.number,
        "conflict_hash": conflict and conflict.hash,
    }


def _add_attempt(payment_id: str, number: int, item: Attempt) -> Statement:
    raw = bytes.fromhex(item.raw)
    return Statement(_ADD_ATTEMPT, to_row(item, payment_id=payment_id, number=number, raw=raw))


def _payment(row: Row, attempts: tuple[Attempt, ...]) -> EvmPayment:
    mined, conflict = row["mined_txid"], row["conflict_number"]
    block = BlockPoint(row["block_number"], row["block_hash"])
    return from_row(
        EvmPayment,
        row,
        order=from_row(EvmPaymentOrder, row),
        attempts=attempts,
        inclusion=None if mined is None else from_row(Inclusion, row, txid=mined, block=block),
        conflict=None if conflict is None else BlockPoint(conflict, row["conflict_hash"]),
    )


def _gas_use(row: Row) -> GasUse:
    used, most = row["gas_used"], row["gas"] * row["max_fee"]
    wei = most if used is None else used * row["gas_price"]
    return from_row(GasUse, row, wei=wei)


def _sweep(row: Row) -> Sweep:
    return from_row(Sweep, row, authorization=row["authorization_hash"])


def _sweep_values(item: Sweep) -> dict[str, Any]:
    return to_row(item, authorization_hash=item.authorization)
