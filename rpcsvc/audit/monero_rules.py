"""XMR wallet rules: each transaction is recorded or annotated, and the balance adds up."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from rpcsvc.audit.hints import hint, may_pay
from rpcsvc.audit.records import (
    MONERO,
    Annotated,
    Books,
    Departure,
    Difference,
    MoneroFacts,
    PaymentEntry,
)

_XMR = "XMR"
WALLET = "the XMR wallet"


def monero_differences(books: Books, since: int, facts: MoneroFacts) -> Iterator[Difference]:
    """Where the wallet's transactions since block ``since`` and the record do not agree."""
    payments, annotated = books.payments_on(MONERO), books.annotations_on(MONERO)
    by_txid: dict[str, list[PaymentEntry]] = defaultdict(list)
    for payment in payments:
        for txid in payment.txids:
            by_txid[txid].append(payment)
    for departure in facts.departures:
        if recorded := by_txid.get(departure.txid):
            yield from _recorded(departure, recorded, is_annotated=departure.txid in annotated)
        elif _is_due(departure, books, since) and not _is_settled_by(annotated, departure, books):
            yield _unrecorded(departure, books)
    yield from _said_by_the_transactions(payments, facts)
    expected = _expected_balance(by_txid, facts)
    if expected != facts.balance:
        yield Difference("wallet", WALLET, str(expected), str(facts.balance), _XMR)


def _is_due(departure: Departure, books: Books, since: int) -> bool:
    """Whether it must be on record: not what the wallet did before there was a service.

    A copy of the database from before the service's first look does not say when that was.
    """
    return departure.block >= since or _may_pay(departure, books)


def _may_pay(departure: Departure, books: Books) -> bool:
    """Whether it looks like the payment of an open transfer."""
    found = may_pay(books, MONERO, departure.txid, departure.destinations, departure.units)
    return bool(found)


def _is_settled_by(annotated: Mapping[str, str], departure: Departure, books: Books) -> bool:
    """Whether an explanation settles it: not if it looks like what would be paid once more."""
    if departure.txid not in annotated:
        return False
    return not _may_pay(departure, books)


def _unrecorded(departure: Departure, books: Books) -> Difference:
    return Difference(
        "unrecorded_payment",
        departure.txid,
        "0",
        str(departure.units + departure.fee),
        _XMR,
        hint(books, MONERO, departure.txid, departure.destinations, departure.units),
    )


def _recorded(
    departure: Departure, payments: Sequence[PaymentEntry], *, is_annotated: bool
) -> Iterator[Difference]:
    """A transaction of orders pays nothing beside what is on record; upkeep pays nobody.

    What else it paid may be explained: to orders, for one, that a lost database had.
    """
    first, due = payments[0], sum(item.units for item in payments)
    more = is_annotated and departure.units > due
    if first.is_transfer and departure.units != due and not more:
        yield Difference("sent", first.payment_id, str(due), str(departure.units), _XMR)
    if departure.fee != first.fee:
        yield Difference("fee", first.payment_id, str(first.fee), str(departure.fee), _XMR)


def _said_by_the_transactions(
    payments: list[PaymentEntry], facts: MoneroFacts
) -> Iterator[Difference]:
    for payment in payments:
        seen = facts.payments.get(payment.payment_id)
        if seen is not None and seen.fee is not None and seen.fee != payment.fee:
            yield Difference("fee", payment.payment_id, str(payment.fee), str(seen.fee), _XMR)


def _expected_balance(by_txid: Mapping[str, list[PaymentEntry]], facts: MoneroFacts) -> int:
    """All that came in mined blocks less all that went: of upkeep, the fee alone."""
    came = sum(item.units for item in facts.arrivals if item.block is not None)
    went = 0
    for departure in facts.departures:
        recorded = by_txid.get(departure.txid)
        is_upkeep = recorded is not None and not recorded[0].is_transfer
        went += departure.fee + (0 if is_upkeep else departure.units)
    return came - went


def monero_annotated(books: Books, facts: MoneroFacts) -> Iterator[Annotated]:
    """The explained transactions that the wallet lists, with what they moved."""
    for txid, note in books.annotations_on(MONERO).items():
        sent = [item for item in facts.departures if item.txid == txid]
        received = [item for item in facts.arrivals if item.txid == txid]
        if sent or received:
            out = sum(item.units + item.fee for item in sent)
            came = sum(item.units for item in received)
            yield Annotated(MONERO, txid, out, came, _XMR, note)
