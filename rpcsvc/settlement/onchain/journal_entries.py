"""The entries of both chains as lines of payment journals, and the rules that judge the lines.

Pure. A line suffices to find a transaction, to publish its bytes again, and to know whom it pays.
Amounts are atomic units, times ms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from rpcsvc.settlement.onchain.evm.payment_ledger import (
    EVM_ATTEMPT,
    EVM_PAYMENT,
    SWEPT,
    AttemptEntry,
    EvmEntry,
    SweptEntry,
)
from rpcsvc.settlement.onchain.journal.files import (
    ADDRESSES,
    HEADER,
    NO_LEASE,
    VOID,
    AddressesEntry,
    Line,
    Mark,
    VoidEntry,
)
from rpcsvc.settlement.onchain.monero.ledger import MONERO_PAYMENT, MoneroEntry
from rpcsvc.store.leases import HeldLease

_SIGNED: Final = (MONERO_PAYMENT, EVM_PAYMENT, EVM_ATTEMPT)


Entry = MoneroEntry | EvmEntry | AttemptEntry | VoidEntry | SweptEntry | AddressesEntry
_READERS: Final[Mapping[str, Callable[[Mapping[str, Any]], Entry]]] = {
    MONERO_PAYMENT: MoneroEntry.read,
    EVM_PAYMENT: EvmEntry.read,
    EVM_ATTEMPT: AttemptEntry.read,
    VOID: lambda body: VoidEntry(body["payment"], body["txid"]),
    SWEPT: SweptEntry.read,
    ADDRESSES: lambda body: AddressesEntry(body["network"], body["to"]),
}


def entries_of(line: Line) -> list[Entry]:
    """Return the entries of a line; none for a header. Raises ValueError for a line that it can't
    read.
    """
    number, kind = line.at.line, line.kind
    if kind == HEADER:
        return []
    try:
        kinds = [body["kind"] for body in line.bodies]
        if unknown := [kind for kind in kinds if kind not in _READERS]:
            kind = unknown[0]
            raise ValueError(f"line {number} of the journal is of the unknown kind {kind!r}")
        return [_READERS[body["kind"]](body) for body in line.bodies]
    except (KeyError, TypeError, AttributeError) as error:
        # With the right sum, it is another version's.
        raise ValueError(f"line {number} of the journal is no {kind} ({error!r})") from error


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
    """Whether the database has at least as much as it had before."""
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
    """The last line if it is of signed payments: all that may have had no commit.

    Each earlier one was committed, or voided, before the next was written.
    """
    written = [line for line in lines if line.kind != HEADER]
    return written[-1] if written and _is_signed(written[-1]) else None


def _is_signed(line: Line) -> bool:
    return all(body["kind"] in _SIGNED for body in line.bodies)


def is_refused(last: Line, own: Mark | None, marks: Sequence[Mark]) -> bool:
    """Whether the database permanently refused the commit of a last line; ``own``: the journal's
    mark.

    Since its lease another replica has opened a journal: each commit of that lease is there.
    """
    if own is None or own.lease == NO_LEASE or last.lease != own.lease:
        return False
    return any(mark.lease.token > own.lease.token for mark in marks)


def is_restored(lines: Sequence[Line], own: Mark | None) -> bool:
    """Whether these lines, which a database lacks, prove that it is a restored copy.

    A process that is killed leaves at most one line of signed payments without a commit, and that
    under the lease of the last commit. A replica that adopts it first writes it again; killed in
    that moment, it finds two lines of the same payments.
    """
    read = [(line, entry) for line in lines for entry in entries_of(line)]
    void: set[VoidEntry] = set()
    first: dict[Entry, Line] = {}
    # The last line first, as ``latest`` has it: only what was signed before a void one is void.
    for line, entry in reversed(read):
        if isinstance(entry, VoidEntry):
            void.add(entry)
        elif _is_signed(line) and void_of(entry) not in void:
            first[entry] = line
    signed = {line.at.line: line for line in first.values()}
    is_other = any(own is None or line.lease != own.lease for line in signed.values())
    return len(signed) > 1 or is_other


def void_of(entry: Entry) -> VoidEntry | None:
    """The entry that voids a signed payment; None: nothing voids it."""
    return entry.void if isinstance(entry, MoneroEntry | EvmEntry) else None


def latest(entries: Sequence[Entry]) -> list[Entry]:
    """Return the entries without payments that a later one voided or replaced.

    The database took the later one, so it knew that the earlier one was over. A payment that was
    voided may be recorded once more after that, with the same bytes: then it is none of the voided.
    Of several ends of a sweep the last counts, in the place of the first: the next sweep of its
    address may have been signed since that one.
    """
    ends = {_sweep_of(entry): entry for entry in entries if isinstance(entry, SweptEntry)}
    kept: list[Entry] = []
    void: set[VoidEntry] = set()
    claimed: set[str] = set()
    for entry in reversed(entries):
        if isinstance(entry, VoidEntry):
            void.add(entry)
        claims = _claims(entry)
        if claims & claimed or void_of(entry) in void:
            continue
        claimed |= claims
        kept.append(entry)
    found: list[Entry | None] = [
        ends.pop(_sweep_of(entry), None) if isinstance(entry, SweptEntry) else entry
        for entry in reversed(kept)
    ]
    return [entry for entry in found if entry is not None]


def _sweep_of(entry: SweptEntry) -> tuple[str, int, int]:
    return entry.network, entry.address_index, entry.serial


def _claims(entry: Entry) -> set[str]:
    """The names that one entry claims alone: of a payment, transfer or output."""
    if isinstance(entry, MoneroEntry):
        payment = entry.payment
        payees = {item.transfer_id for item in payment.payees}
        return payees | set(payment.key_images)
    if isinstance(entry, EvmEntry):
        return {entry.payment.payment_id}
    return set()
