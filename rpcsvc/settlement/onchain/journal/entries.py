"""What the payment journal records, converted to the body of a line and back. Pure.

Amounts are atomic units, times ms. A body suffices to find a transaction, to publish the same bytes
again, and to know whom it pays.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final

from msgspec import Struct
from msgspec.structs import replace

from rpcsvc.settlement.onchain.evm import ledger as evm
from rpcsvc.settlement.onchain.journal.files import HEADER, NO_LEASE, Line, Mark
from rpcsvc.settlement.onchain.monero import ledger as monero
from rpcsvc.store.leases import HeldLease

MONERO_PAYMENT: Final = "monero_payment"
EVM_PAYMENT: Final = "evm_payment"
EVM_ATTEMPT: Final = "evm_attempt"
VOID: Final = "void"
SWEPT: Final = "swept"
ADDRESSES: Final = "addresses"
EVM_ADDRESSES: Final = "evm"
_SIGNED: Final = (MONERO_PAYMENT, EVM_PAYMENT, EVM_ATTEMPT)


class MoneroEntry(Struct, frozen=True):
    """A signed Monero payment of the wallet with this primary address."""

    wallet: str
    payment: monero.MoneroPayment


class EvmEntry(Struct, frozen=True):
    """A signed EVM payment with its first attempt, and the sweep that it is for."""

    payment: evm.EvmPayment
    sweep: evm.Sweep | None = None


class AttemptEntry(Struct, frozen=True):
    """A replacement of an EVM payment at higher fees."""

    payment_id: str
    attempt: evm.Attempt


class VoidEntry(Struct, frozen=True):
    """A payment that was never published, or can never be mined: ``txid`` is its first one's."""

    payment_id: str
    txid: str


class SweptEntry(Struct, frozen=True):
    """How a sweep ended: ``state`` is done or void, ``taken`` USDC units left the address."""

    network: str
    address_index: int
    serial: int
    state: evm.SweepState
    taken: int


class AddressesEntry(Struct, frozen=True):
    """Deposit addresses of ``network`` (monero, or evm) may be handed out up to index ``to``."""

    network: str
    to: int


Entry = MoneroEntry | EvmEntry | AttemptEntry | VoidEntry | SweptEntry | AddressesEntry


def to_body(entry: Entry) -> dict[str, Any]:
    """The body of the entry's line."""
    match entry:
        case MoneroEntry():
            return _monero_body(entry)
        case EvmEntry():
            return _evm_body(entry)
        case AttemptEntry():
            attempt = _attempt_list(entry.attempt)
            return {"kind": EVM_ATTEMPT, "payment": entry.payment_id, "attempt": attempt}
        case VoidEntry():
            return {"kind": VOID, "payment": entry.payment_id, "txid": entry.txid}
        case SweptEntry():
            return {
                "kind": SWEPT, "network": entry.network, "index": entry.address_index,
                "serial": entry.serial, "state": entry.state.value, "taken": entry.taken,
            }  # fmt: skip
        case AddressesEntry():
            return {"kind": ADDRESSES, "network": entry.network, "to": entry.to}


def from_body(body: Mapping[str, Any]) -> Entry | None:
    """The entry of a line; None for a header. Raises ValueError for a kind that is not known."""
    kind = body["kind"]
    if kind == HEADER:
        return None
    if kind not in _READERS:
        raise ValueError(f"line {body['line']} of the journal is of the unknown kind {kind!r}")
    return _READERS[kind](body)


# --- one database, the journals of several replicas ------------------------------------------


def is_continued(marks: Sequence[Mark], watched: Sequence[Mark] | None) -> bool:
    """Whether the database has all that the replica which settled last has journaled.

    ``watched``: the marks when that one was last seen settling; None: it was not. A database that
    has less is a restored copy.
    """
    if watched is None or {mark.journal for mark in watched} != {mark.journal for mark in marks}:
        return False
    return _newest(marks) == _newest(watched) and is_later(marks, watched)


def is_later(marks: Sequence[Mark], before: Sequence[Mark]) -> bool:
    """Whether the database has at least what it had before."""
    lines = {mark.journal: mark.at.line for mark in marks}
    return _newest(marks) >= _newest(before) and all(
        lines.get(mark.journal, -1) >= mark.at.line for mark in before
    )


def _newest(marks: Sequence[Mark]) -> int:
    return max((mark.lease.token for mark in marks), default=0)


def is_ahead(heads: Iterable[HeldLease], marks: Sequence[Mark]) -> bool:
    """Whether a journal has lines of a lease that the database does not know: it is a restored
    copy. ``heads``: the lease of each journal's last line; ``marks``: the newest last.
    """
    newest = marks[-1].lease
    return any(head.token >= newest.token and head != newest for head in heads)


def last_signed(lines: Sequence[Line]) -> Line | None:
    """The last line if it is of a signed payment: all that may have had no commit.

    Each earlier one was committed, or voided, before the next was written.
    """
    entries = [line for line in lines if line.kind != HEADER]
    return entries[-1] if entries and entries[-1].kind in _SIGNED else None


def is_refused(last: Line, own: Mark | None, marks: Sequence[Mark]) -> bool:
    """Whether the database refused the commit of a last line for good; ``own``: the journal's mark.

    Since its lease another replica has opened a journal: each commit of that lease is there.
    """
    if own is None or own.lease == NO_LEASE or last.lease != own.lease:
        return False
    return any(mark.lease.token > own.lease.token for mark in marks)


def is_restored(lines: Sequence[Line], own: Mark | None) -> bool:
    """Whether these lines, which a database lacks, prove that it is a restored copy.

    A process that is killed leaves at most one signed payment without a commit, and that under the
    lease of the last commit. A replica that adopts it first writes its line again; killed in that
    moment, it finds two lines of the one payment.
    """
    read = [(line, from_body(line.body)) for line in lines]
    void = [entry for _, entry in read if isinstance(entry, VoidEntry)]
    first: dict[Entry, Line] = {}
    for line, entry in read:
        if entry is not None and line.kind in _SIGNED and void_of(entry) not in void:
            first.setdefault(entry, line)
    signed = first.values()
    return len(signed) > 1 or any(own is None or line.lease != own.lease for line in signed)


def void_of(entry: Entry | None) -> VoidEntry | None:
    """The entry that voids a signed payment; None: nothing voids it."""
    match entry:
        case MoneroEntry():
            return VoidEntry(entry.payment.payment_id, entry.payment.txid)
        case EvmEntry():
            return VoidEntry(entry.payment.payment_id, entry.payment.attempts[0].txid)
    return None


def latest(entries: Sequence[Entry], void: Collection[tuple[str, str]]) -> list[Entry]:
    """Without payments that a later one took the place of; ``void``: (payment id, txid).

    The database took the later one, so it knew that the earlier one was over.
    """
    kept: list[Entry] = []
    claimed: set[str] = set()
    for entry in reversed(entries):
        claims = _claims(entry, void)
        if claims & claimed:
            continue
        claimed |= claims
        kept.append(entry)
    return kept[::-1]


def _claims(entry: Entry, void: Collection[tuple[str, str]]) -> set[str]:
    """The resources that only one payment can claim: a transfer, an output, a nonce."""
    if isinstance(entry, MoneroEntry):
        payment = entry.payment
        if (payment.payment_id, payment.txid) in void:
            return set()
        payees = {item.transfer_id for item in payment.payees}
        return payees | set(payment.key_images)
    if isinstance(entry, EvmEntry):
        return {entry.payment.payment_id}
    return set()


def _monero_body(entry: MoneroEntry) -> dict[str, Any]:
    item = entry.payment
    return {
        "kind": MONERO_PAYMENT, "payment": item.payment_id, "purpose": item.purpose.value,
        "wallet": entry.wallet, "at": item.prepared_at, "txid": item.txid, "units": item.units,
        "fee": item.fee, "address": item.address,
        "batch": [[each.transfer_id, each.address, each.units] for each in item.batch],
        "key": item.tx_key, "key_images": list(item.key_images), "raw": item.raw,
    }  # fmt: skip


def _monero_entry(body: Mapping[str, Any]) -> MoneroEntry:
    at = body["at"]
    payment = monero.MoneroPayment(
        payment_id=body["payment"],
        purpose=monero.MoneroPurpose(body["purpose"]),
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
        state=monero.MoneroPaymentState.PUBLISHED,
        relayed_at=at,
        batch=tuple(monero.Payee(*each) for each in body["batch"]),
    )
    return MoneroEntry(body["wallet"], payment)


def _evm_body(entry: EvmEntry) -> dict[str, Any]:
    item, order, sweep = entry.payment, entry.payment.order, entry.sweep
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


def _evm_entry(body: Mapping[str, Any]) -> EvmEntry:
    order = evm.EvmPaymentOrder(
        body["payment"], evm.EvmPurpose(body["purpose"]), body["recipient"], body["units"],
        body["contract"], bytes.fromhex(body["data"]), body["gas"],
    )  # fmt: skip
    at, attempts = body["at"], tuple(evm.Attempt(*each) for each in body["attempts"])
    made = evm.EvmPayment(body["network"], body["sender"], body["nonce"], order, attempts, at)
    payment = replace(made, state=evm.EvmPaymentState.PUBLISHED, published_at=at)
    return EvmEntry(payment, _sweep(body))


def _sweep(body: Mapping[str, Any]) -> evm.Sweep | None:
    if body["sweep"] is None:
        return None
    index, serial, address, method, units, authorization = body["sweep"]
    return evm.Sweep(
        body["network"], index, serial, address, evm.SweepMethod(method), units, authorization,
        body["payment"],
    )  # fmt: skip


def _attempt_list(item: evm.Attempt) -> list[Any]:
    return [item.txid, item.raw, item.max_fee, item.tip, item.made_at]


def _swept_entry(body: Mapping[str, Any]) -> SweptEntry:
    state = evm.SweepState(body["state"])
    return SweptEntry(body["network"], body["index"], body["serial"], state, body["taken"])


_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Entry]]] = {
    MONERO_PAYMENT: _monero_entry,
    EVM_PAYMENT: _evm_entry,
    EVM_ATTEMPT: lambda body: AttemptEntry(body["payment"], evm.Attempt(*body["attempt"])),
    VOID: lambda body: VoidEntry(body["payment"], body["txid"]),
    SWEPT: _swept_entry,
    ADDRESSES: lambda body: AddressesEntry(body["network"], body["to"]),
}
