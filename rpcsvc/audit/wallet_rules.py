"""The rules for the wallets: each transaction is recorded or annotated, and each balance adds up.

On an EVM network every Transfer event out of the hot wallet or a deposit address is a payment or a
sweep on record, and every nonce of the hot wallet is a payment on record. Ether is compared to the
wei; more ether than expected can be sent by anyone, is named as a difference of its own kind, and
stops nothing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from heapq import merge
from itertools import groupby
from typing import Final

from rpcsvc.audit.hints import hint, may_pay, unpaid_in
from rpcsvc.audit.records import (
    ETHER,
    ETHER_INCOME,
    MONERO,
    Annotated,
    Arrival,
    Books,
    Departure,
    Difference,
    Ether,
    EvmFacts,
    MoneroFacts,
    PaymentEntry,
    Sighting,
    SweepEntry,
    TokenTransfer,
)
from rpcsvc.audit.spilled import SpilledDict, SpilledGroups
from rpcsvc.domain.addresses import ZERO_ADDRESS

_XMR = "XMR"
WALLET = "the XMR wallet"

_USDC = "USDC"
WEI: Final = "wei"
_MOST_NAMED: Final = 5


def monero_differences(books: Books, since: int, facts: MoneroFacts) -> Iterator[Difference]:
    """Differences between the wallet's transactions since block ``since`` and the record."""
    annotated = books.annotations_on(MONERO)
    by_txid = SpilledGroups(PaymentEntry, _by_txid(books.payments_on(MONERO)))
    expected = sum(item.units for item in facts.arrivals if item.block is not None)
    for departure in facts.departures:
        recorded = by_txid.get(departure.txid)
        # Upkeep pays the wallet itself.
        is_upkeep = recorded is not None and not recorded[0].is_transfer
        expected -= departure.fee + (0 if is_upkeep else departure.units)
        if recorded is not None:
            yield from _recorded(departure, recorded, is_annotated=departure.txid in annotated)
        elif _is_due(departure, books, since) and not _is_settled_by(annotated, departure, books):
            yield _unrecorded_departures(departure, books)
    yield from _said_by_the_transactions(books.payments_on(MONERO), facts)
    if expected != facts.balance:
        yield Difference("wallet", WALLET, str(expected), str(facts.balance), _XMR)


def _by_txid(payments: Iterable[PaymentEntry]) -> Iterator[tuple[str, PaymentEntry]]:
    return ((txid, payment) for payment in payments for txid in payment.txids)


def _is_due(departure: Departure, books: Books, since: int) -> bool:
    """Return whether a departure must be on record: not if it is older than the service.

    A copy of the database from before the service's first scan does not say when that was.
    """
    return departure.block >= since or _may_pay(departure, books)


def _may_pay(departure: Departure, books: Books) -> bool:
    """Return whether a departure looks like the payment of an open transfer."""
    found = may_pay(books, MONERO, departure.txid, departure.destinations, departure.units)
    return bool(found)


def _is_settled_by(annotated: Mapping[str, str], departure: Departure, books: Books) -> bool:
    """Return whether an annotation settles it: not if it may pay a transfer that is still open."""
    if departure.txid not in annotated:
        return False
    return not _may_pay(departure, books)


def _unrecorded_departures(departure: Departure, books: Books) -> Difference:
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
    """Check that a transaction of orders pays nothing but what is on record, and that upkeep pays
    nobody. The operator may have annotated its other payments: orders of a lost database, for
    example.
    """
    first, due = payments[0], sum(item.units for item in payments)
    more = is_annotated and departure.units > due
    if first.is_transfer and departure.units != due and not more:
        yield Difference("sent", first.payment_id, str(due), str(departure.units), _XMR)
    if departure.fee != first.fee:
        yield Difference("fee", first.payment_id, str(first.fee), str(departure.fee), _XMR)


def _said_by_the_transactions(
    payments: Iterable[PaymentEntry], facts: MoneroFacts
) -> Iterator[Difference]:
    for payment in payments:
        seen = facts.payments.get(payment.payment_id)
        if seen is not None and seen.fee is not None and seen.fee != payment.fee:
            yield Difference("fee", payment.payment_id, str(payment.fee), str(seen.fee), _XMR)


def monero_annotated(books: Books, facts: MoneroFacts) -> Iterator[Annotated]:
    """The annotated transactions that the wallet lists, with what they moved."""
    annotated = books.annotations_on(MONERO)
    sent = [item for item in facts.departures if item.txid in annotated]
    received = [item for item in facts.arrivals if item.txid in annotated]
    for txid, note in annotated.items():
        out = [item.units + item.fee for item in sent if item.txid == txid]
        came = [item.units for item in received if item.txid == txid]
        if out or came:
            yield Annotated(MONERO, txid, sum(out), sum(came), _XMR, note)


def by_transaction(moves: Iterable[TokenTransfer]) -> Mapping[str, list[TokenTransfer]]:
    """Return events by transaction."""
    return SpilledGroups(TokenTransfer, ((move.txid, move) for move in moves))


def evm_arrivals(books: Books, facts: EvmFacts) -> Iterator[Arrival]:
    """Transfers of others to our addresses. Minted tokens have no sender."""
    for move in facts.moves:
        if books.is_own(move.recipient) and not books.is_own(move.source):
            sender = None if move.source == ZERO_ADDRESS else move.source
            yield Arrival(move.txid, move.recipient, move.units, move.block, sender)


def evm_sightings(
    books: Books, facts: EvmFacts, moves: Mapping[str, list[TokenTransfer]]
) -> Iterator[tuple[str, Sighting]]:
    """The network's payments as the chain shows them, by id; absent ones are left out."""
    hot = (books.evm_hot or "").lower()
    for payment in books.payments_on(facts.network):
        for txid in payment.txids:
            sighting = _sighting(payment, txid, hot, moves.get(txid, []), facts)
            if sighting is not None:
                yield payment.payment_id, sighting


def _sighting(
    payment: PaymentEntry, txid: str, hot: str, moves: list[TokenTransfer], facts: EvmFacts
) -> Sighting | None:
    if moves:
        to = payment.recipient.lower()
        paid = sum(move.units for move in moves if (move.source, move.recipient) == (hot, to))
        return Sighting(txid, moves[0].block, paid)
    if txid in facts.mined:
        return Sighting(txid, facts.top, 0)
    return Sighting(txid, None, 0) if txid in facts.waiting else None


def evm_differences(
    books: Books, facts: EvmFacts, seen: Mapping[str, Sighting], pending: list[str]
) -> Iterator[Difference]:
    """Differences between the network's wallets and the record of them."""
    yield from _departures(books, facts, pending)
    yield from _nonces(books, facts, seen)
    yield from _balances(books, facts)


# --- what left our addresses -----------------------------------------------------------------


def _departures(books: Books, facts: EvmFacts, pending: list[str]) -> Iterator[Difference]:
    hot = (books.evm_hot or "").lower()
    payments = SpilledDict(PaymentEntry, _by_txid(books.payments_on(facts.network)))
    swept = SpilledGroups[str, TokenTransfer](TokenTransfer)
    used = SpilledDict[str, None](None)
    for move in facts.moves:
        if not books.is_own(move.source):
            continue
        if move.source != hot and move.recipient == hot:
            swept.add(move.source, move)
            continue
        payment = payments.get(move.txid)
        if payment is not None and payment.payment_id not in used and _is_of(move, payment, hot):
            used[payment.payment_id] = None
        elif not _is_annotated(move, books, facts):
            yield _unrecorded(move, books, facts.network)
    yield from _sweeps(books, facts, swept, pending)


def _is_of(move: TokenTransfer, payment: PaymentEntry, hot: str) -> bool:
    """Return whether an event belongs to an order's payment.

    Its units are compared with the order's transfer, so that one difference has one finding.
    """
    return (
        payment.is_transfer and move.source == hot and move.recipient == payment.recipient.lower()
    )


def _is_annotated(move: TokenTransfer, books: Books, facts: EvmFacts) -> bool:
    """Return whether an annotation settles it: not if it may pay a transfer that is still open."""
    if move.txid not in facts.annotated:
        return False
    return not unpaid_in(books, facts.network, move.txid, [(move.recipient, move.units)])


def _unrecorded(move: TokenTransfer, books: Books, network: str) -> Difference:
    paid = [(move.recipient, move.units)]
    reported = hint(books, network, move.txid, paid, move.units)
    return Difference("unrecorded_payment", move.txid, "0", str(move.units), _USDC, reported)


def _sweeps(
    books: Books, facts: EvmFacts, swept: Mapping[str, list[TokenTransfer]], pending: list[str]
) -> Iterator[Difference]:
    """Compare the units moved from each deposit address with those its sweeps took."""
    sweeps = SpilledGroups(
        SweepEntry,
        ((s.address.lower(), s) for s in books.sweeps if s.network == facts.network),
    )
    payments = SpilledDict(
        PaymentEntry, ((p.payment_id, p) for p in books.payments_on(facts.network))
    )
    for address, _ in groupby(merge(swept, sweeps)):
        moves = swept.get(address, [])
        left = sum(move.units for move in moves)
        reported = sum(move.units for move in moves if move.txid in facts.annotated)
        made = sweeps.get(address, [])
        taken = sum(_taken(item, moves, payments, pending) for item in made)
        if taken < left:
            taken += sum(_taken_after_all(item, moves, payments, pending) for item in made)
        if left < taken and facts.stale:
            pending.append(f"a sweep of {address} may have been in a block that was replaced")
        # What a sweep of a lost database took may be on record since, as found done.
        elif taken not in (left, left - reported):
            yield Difference("sweep", address, str(taken), str(left), _USDC)


def _taken(
    sweep: SweepEntry,
    moves: list[TokenTransfer],
    payments: Mapping[str, PaymentEntry],
    pending: list[str],
) -> int:
    """Return the units that a sweep must have taken, as far as the chain shows its payment.

    A reorganisation took the block of a settled sweep that the chain does not show: the service
    publishes it again, and sweeps again if that fails. Nothing is missing meanwhile, since the
    deposit address still holds the units.
    """
    payment = payments.get(sweep.payment_id or "")
    is_mined = payment is not None and any(move.txid in payment.txids for move in moves)
    if sweep.state == "signed":
        pending.append(f"sweep {sweep.payment_id} is under way")
        return sweep.units if is_mined else 0
    if payment is None or payment.state != "settled" or not sweep.taken or is_mined:
        return sweep.taken
    pending.append(f"sweep {sweep.payment_id} was settled and is off the chain")
    return 0


def _taken_after_all(
    sweep: SweepEntry,
    moves: list[TokenTransfer],
    payments: Mapping[str, PaymentEntry],
    pending: list[str],
) -> int:
    """Units that a void sweep took because the block in which it failed was replaced.

    Where it had an authorization, the service finds that used when it next looks at the address,
    within the hour, and records the units.
    """
    payment = payments.get(sweep.payment_id or "")
    is_mined = payment is not None and any(move.txid in payment.txids for move in moves)
    if sweep.state != "void" or sweep.authorization_hash is None or not is_mined:
        return 0
    pending.append(f"sweep {sweep.payment_id} had failed and is mined after all")
    return sweep.units


# --- what the hot wallet signed --------------------------------------------------------------


def _nonces(books: Books, facts: EvmFacts, seen: Mapping[str, Sighting]) -> Iterator[Difference]:
    """Check that each nonce used since the first on record is ours, and since the opening balance:
    a lost record may be that of the first payment.
    """
    recorded = SpilledDict[int, PaymentEntry](
        PaymentEntry,
        ((p.nonce, p) for p in books.payments_on(facts.network) if p.nonce is not None),
    )
    reported = set(facts.annotated.values())
    payments = iter(recorded.items())
    upcoming = next(payments, None)
    firsts = [facts.nonce if upcoming is None else upcoming[0], facts.nonce]
    if facts.ether is not None and not facts.ether.replaced and facts.network in books.openings:
        firsts.append(books.openings[facts.network].nonce)
    for nonce in range(min(firsts), facts.nonce):
        payment = None
        if upcoming is not None and upcoming[0] == nonce:
            payment, upcoming = upcoming[1], next(payments, None)
        if nonce in reported and payment is None:
            continue
        sighting = seen.get(payment.payment_id) if payment else None
        if payment and sighting is None and nonce in reported and _is_given_up(payment, books):
            continue
        if sighting is None or sighting.block is None:
            expected = "a transaction on record" if payment is None else payment.payment_id
            subject = f"nonce {nonce} of the hot wallet on {facts.network}"
            yield Difference("unrecorded_transaction", subject, expected, "another")


def _is_given_up(payment: PaymentEntry, books: Books) -> bool:
    """Return whether the books say that a payment never leaves the wallet."""
    return payment.state == "failed" or payment.payment_id in books.closed


# --- what is there ---------------------------------------------------------------------------


def _balances(books: Books, facts: EvmFacts) -> Iterator[Difference]:
    hot, of_hot = (books.evm_hot or "").lower(), 0
    moved = SpilledGroups[str, int](int)
    for move in facts.moves:
        for address, units in ((move.recipient, move.units), (move.source, -move.units)):
            if address == hot:
                of_hot += units
            else:
                moved.add(address, units)
    for address, balance in facts.balances.items():
        opening = facts.opening if address == hot else 0
        if opening is None:
            continue
        expected = opening + (of_hot if address == hot else sum(moved.get(address, ())))
        if expected != balance:
            yield Difference("wallet", address, str(expected), str(balance), _USDC)


# --- annotated transactions ------------------------------------------------------------------


def evm_annotated(
    books: Books,
    facts: EvmFacts,
    by_txid: Mapping[str, list[TokenTransfer]],
    ether: Collection[str] = (),
) -> Iterator[Annotated]:
    """Return the mined annotated transactions, with the USDC that they moved. Transactions that
    moved ``ether`` alone are left to the rules for ether.
    """
    is_own = books.is_own
    notes = books.annotations_on(facts.network)
    for txid in facts.annotated:
        moves = by_txid.get(txid, [])
        sent = sum(m.units for m in moves if is_own(m.source) and not is_own(m.recipient))
        came = sum(m.units for m in moves if is_own(m.recipient) and not is_own(m.source))
        if sent or came or txid not in ether:
            yield Annotated(facts.network, txid, sent, came, _USDC, notes[txid])


def ether_differences(books: Books, facts: EvmFacts) -> Iterator[Difference]:
    """A difference where the hot wallet's ether is not the sum of its transactions."""
    opening, ether = books.openings.get(facts.network), facts.ether
    if opening is None or ether is None or not _is_known(ether):
        return
    due = opening.wei + _came(books, facts, ether) - sum(ether.spent.values())
    if due == ether.balance:
        return
    kind = ETHER if ether.balance < due else ETHER_INCOME
    named = _unrecognised(books, facts) if ether.balance < due else []
    hint = _hint(facts.network, ether.balance - due, named)
    subject = f"the ether of the hot wallet on {facts.network}"
    yield Difference(kind, subject, str(due), str(ether.balance), WEI, hint)


def ether_notes(books: Books, facts: EvmFacts) -> Iterator[str]:
    """Return why the ether was not compared."""
    network, ether = facts.network, facts.ether
    if network not in books.openings or ether is None:
        yield (
            f"what ether the hot wallet on {network} had at first is not on record yet: it was not"
            " compared"
        )
    elif ether.replaced:
        yield (
            f"block {books.openings[network].block} of {network}, where the hot wallet's ether was"
            " looked at first, is not on the chain: the ether was not compared. The service looks"
            " again, at its next start at the latest"
        )
    elif ether.cost_unknown:
        yield (
            f"the node of {network} does not say the whole fee of {len(ether.cost_unknown)}"
            f" transactions, such as {min(ether.cost_unknown)}: the ether of the hot wallet was not"
            " compared"
        )


def ether_annotated(books: Books, facts: EvmFacts) -> Iterator[Annotated]:
    """The ether that annotated transactions moved since the opening balance."""
    if facts.ether is None or facts.network not in books.openings:
        return
    said = _said(books, facts.network)
    for txid, note in books.annotations_on(facts.network).items():
        sent = facts.ether.spent.get(txid, 0)
        came = facts.ether.came.get(txid, 0)
        inside = said.get(txid, 0) if txid in facts.ether.done else 0
        by_word = f" ({inside} wei of it by your word)" if inside else ""
        if sent or came or inside:
            yield Annotated(facts.network, txid, sent, came + inside, WEI, note + by_word)


def _is_known(ether: Ether) -> bool:
    return not ether.replaced and not ether.cost_unknown


def _came(books: Books, facts: EvmFacts, ether: Ether) -> int:
    """The ether that annotated transactions brought, by the chain and by the operator's word."""
    said = _said(books, facts.network)
    return sum(ether.came.values()) + sum(said.get(txid, 0) for txid in ether.done)


def _said(books: Books, network: str) -> dict[str, int]:
    return {item.txid: item.wei for item in books.annotations if item.network == network}


def _unrecognised(books: Books, facts: EvmFacts) -> list[str]:
    """Return the first transactions off record that took USDC from our addresses, at our gas.

    Sweeps that an older copy of the database lacks are such transactions.
    """
    known = SpilledDict[str, None](
        None, ((txid, None) for txid, _ in _by_txid(books.payments_on(facts.network)))
    )
    annotated, since = books.annotations_on(facts.network), books.openings[facts.network].block
    unknown = {
        move.txid
        for move in facts.moves
        if move.block > since
        and books.is_own(move.source)
        and move.txid not in known
        and move.txid not in annotated
    }
    return sorted(unknown)[:_MOST_NAMED]


def _hint(network: str, gap: int, named: Sequence[str]) -> str:
    explain = f"rpcsvc treasury explain {network} TXID --note TEXT"
    if gap > 0:
        return (
            f"is {gap} wei more than on record: somebody sent it, which stops nothing. Was it you?"
            f" {explain}"
        )
    strange = f" Not on record: {', '.join(named)}." if named else ""
    return (
        f"is {-gap} wei less than on record. Adopt what paid orders, explain what was you, or a"
        f" sweep or a payer's signed payment that the database has lost: {explain}. None of it: the"
        f" key is stolen, move the money to a new one.{strange}"
    )
