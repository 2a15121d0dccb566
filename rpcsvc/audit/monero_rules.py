"""The rules for the XMR wallet: every transaction of it is on record, and the sum is what it holds.

What does not live here: deposits of orders (deposit_rules.py), payouts of orders (order_rules.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rpcsvc.audit.records import Departure, Difference, MoneroFacts, PaymentEntry

_XMR = "XMR"
WALLET = "the XMR wallet"


def monero_differences(
    payments: list[PaymentEntry], since: int, facts: MoneroFacts
) -> Iterator[Difference]:
    """Where the wallet's transactions since block ``since`` and the record do not agree."""
    by_txid = {txid: item for item in payments for txid in item.txids}
    for departure in facts.departures:
        payment = by_txid.get(departure.txid)
        if payment is not None:
            yield from _recorded(departure, payment)
        elif departure.block >= since:
            units = str(departure.units + departure.fee)
            yield Difference("unrecorded_payment", departure.txid, "0", units, _XMR)
    yield from _said_by_the_transactions(payments, facts)
    expected = _expected_balance(by_txid, facts)
    if expected != facts.balance:
        yield Difference("wallet", WALLET, str(expected), str(facts.balance), _XMR)


def _recorded(departure: Departure, payment: PaymentEntry) -> Iterator[Difference]:
    """A transaction of an order pays nothing beside what is on record; upkeep pays nobody."""
    if payment.is_transfer and departure.units != payment.units:
        yield Difference("sent", payment.payment_id, str(payment.units), str(departure.units), _XMR)
    if departure.fee != payment.fee:
        yield Difference("fee", payment.payment_id, str(payment.fee), str(departure.fee), _XMR)


def _said_by_the_transactions(
    payments: list[PaymentEntry], facts: MoneroFacts
) -> Iterator[Difference]:
    for payment in payments:
        seen = facts.payments.get(payment.payment_id)
        if seen is not None and seen.fee is not None and seen.fee != payment.fee:
            yield Difference("fee", payment.payment_id, str(payment.fee), str(seen.fee), _XMR)


def _expected_balance(by_txid: Mapping[str, PaymentEntry], facts: MoneroFacts) -> int:
    """All that came in mined blocks less all that went: of upkeep, the fee alone."""
    came = sum(item.units for item in facts.arrivals if item.block is not None)
    went = 0
    for departure in facts.departures:
        payment = by_txid.get(departure.txid)
        is_upkeep = payment is not None and not payment.is_transfer
        went += departure.fee + (0 if is_upkeep else departure.units)
    return came - went
