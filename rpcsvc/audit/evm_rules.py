"""The rules for the USDC wallets of one network: hot wallet and deposit addresses.

Every Transfer event that takes from one of them is a payment or a sweep on record, every nonce of
the hot wallet is a payment on record, and each balance is the sum of its events. What the operator
has explained may be on no record. What does not live here: deposits of orders (deposit_rules.py),
payouts of orders (order_rules.py).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping

from rpcsvc.audit.hints import hint, unpaid_in
from rpcsvc.audit.records import (
    Arrival,
    Books,
    Difference,
    EvmFacts,
    Explained,
    Move,
    PaymentEntry,
    Sighting,
    SweepEntry,
)
from rpcsvc.domain.addresses import ZERO_ADDRESS

_USDC = "USDC"


def evm_arrivals(books: Books, facts: EvmFacts) -> list[Arrival]:
    """What others sent to our addresses. Tokens that were minted come from nobody."""
    ours = _ours(books)
    return [
        Arrival(
            move.txid, move.recipient, move.units, move.block,
            None if move.source == ZERO_ADDRESS else move.source,
        )
        for move in facts.moves
        if move.recipient in ours and move.source not in ours
    ]  # fmt: skip


def evm_sightings(books: Books, facts: EvmFacts) -> dict[str, Sighting]:
    """What became of the network's payments, by their id; absent ones are nowhere."""
    hot = (books.evm_hot or "").lower()
    moved: dict[str, list[Move]] = defaultdict(list)
    for move in facts.moves:
        moved[move.txid].append(move)
    found = {}
    for payment in books.payments_on(facts.network):
        for txid in payment.txids:
            sighting = _sighting(payment, txid, hot, moved.get(txid, []), facts)
            if sighting is not None:
                found[payment.payment_id] = sighting
    return found


def _sighting(
    payment: PaymentEntry, txid: str, hot: str, moves: list[Move], facts: EvmFacts
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
    """Where the network's wallets and the record of them do not agree."""
    yield from _departures(books, facts, pending)
    yield from _nonces(books, facts, seen)
    yield from _balances(books, facts)


# --- what left our addresses -----------------------------------------------------------------


def _departures(books: Books, facts: EvmFacts, pending: list[str]) -> Iterator[Difference]:
    hot, ours = (books.evm_hot or "").lower(), _ours(books)
    payments = {txid: item for item in books.payments_on(facts.network) for txid in item.txids}
    swept: dict[str, list[Move]] = defaultdict(list)
    used: set[str] = set()
    for move in facts.moves:
        if move.source not in ours:
            continue
        if move.source != hot and move.recipient == hot:
            swept[move.source].append(move)
            continue
        payment = payments.get(move.txid)
        if payment is not None and payment.payment_id not in used and _is_of(move, payment, hot):
            used.add(payment.payment_id)
        elif not _is_explained(move, books, facts):
            yield _unrecorded(move, books, facts.network)
    yield from _sweeps(books, facts, swept, pending)


def _is_of(move: Move, payment: PaymentEntry, hot: str) -> bool:
    """Whether an event is the one that a payment of an order makes; its units are compared there.

    The amount is compared with the order's transfer: one difference has one finding.
    """
    return (
        payment.is_transfer and move.source == hot and move.recipient == payment.recipient.lower()
    )


def _is_explained(move: Move, books: Books, facts: EvmFacts) -> bool:
    """Whether an explanation settles it: not if it looks like what would be paid once more."""
    if move.txid not in facts.explained:
        return False
    return not unpaid_in(books, facts.network, move.txid, [(move.recipient, move.units)])


def _unrecorded(move: Move, books: Books, network: str) -> Difference:
    paid = [(move.recipient, move.units)]
    told = hint(books, network, move.txid, paid, move.units)
    return Difference("unrecorded_payment", move.txid, "0", str(move.units), _USDC, told)


def _sweeps(
    books: Books, facts: EvmFacts, swept: Mapping[str, list[Move]], pending: list[str]
) -> Iterator[Difference]:
    """What went from each deposit address to the hot wallet is what its sweeps took."""
    sweeps: dict[str, list[SweepEntry]] = defaultdict(list)
    for sweep in books.sweeps:
        if sweep.network == facts.network:
            sweeps[sweep.address.lower()].append(sweep)
    payments = {item.payment_id: item for item in books.payments_on(facts.network)}
    for address in sorted({*swept, *sweeps}):
        moves = swept.get(address, [])
        left = sum(move.units for move in moves)
        told = sum(move.units for move in moves if move.txid in facts.explained)
        taken = sum(_taken(item, moves, payments, pending) for item in sweeps.get(address, []))
        if left < taken and facts.stale:
            pending.append(f"a sweep of {address} may have been in a block that was replaced")
        # What a sweep of a lost database took may be on record since, as found done.
        elif taken not in (left, left - told):
            yield Difference("sweep", address, str(taken), str(left), _USDC)


def _taken(
    sweep: SweepEntry,
    moves: list[Move],
    payments: Mapping[str, PaymentEntry],
    pending: list[str],
) -> int:
    """What a sweep has to have taken, as far as the chain shows its payment.

    A settled one that the chain does not show was in a block that a reorganisation took: the
    service publishes it again, and sweeps anew if that fails. Nothing is missing meanwhile, since
    the deposit address holds what was to be moved.
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


# --- what the hot wallet signed --------------------------------------------------------------


def _nonces(books: Books, facts: EvmFacts, seen: Mapping[str, Sighting]) -> Iterator[Difference]:
    """Each nonce that the chain has seen used since the first on record is ours.

    And each since the opening balance: a lost record may be that of the first payment.
    """
    recorded = {
        item.nonce: item for item in books.payments_on(facts.network) if item.nonce is not None
    }
    told = set(facts.explained.values())
    firsts = [*recorded, facts.nonce]
    if facts.ether is not None and not facts.ether.replaced and facts.network in books.openings:
        firsts.append(books.openings[facts.network].nonce)
    for nonce in range(min(firsts), facts.nonce):
        if nonce in told and nonce not in recorded:
            continue
        payment = recorded.get(nonce)
        sighting = seen.get(payment.payment_id) if payment else None
        if payment and sighting is None and payment.payment_id in books.closed and nonce in told:
            continue
        if sighting is None or sighting.block is None:
            expected = "a transaction on record" if payment is None else payment.payment_id
            subject = f"nonce {nonce} of the hot wallet on {facts.network}"
            yield Difference("unrecorded_transaction", subject, expected, "another")


# --- what is there ---------------------------------------------------------------------------


def _balances(books: Books, facts: EvmFacts) -> Iterator[Difference]:
    sums: Counter[str] = Counter()
    for move in facts.moves:
        sums[move.recipient] += move.units
        sums[move.source] -= move.units
    hot = (books.evm_hot or "").lower()
    for address, balance in sorted(facts.balances.items()):
        opening = facts.opening if address == hot else 0
        if opening is None:
            continue
        if opening + sums[address] != balance:
            expected = str(opening + sums[address])
            yield Difference("wallet", address, expected, str(balance), _USDC)


# --- what is explained -----------------------------------------------------------------------


def evm_explained(
    books: Books, facts: EvmFacts, ether: Collection[str] = ()
) -> Iterator[Explained]:
    """The explained transactions that are mined, with the USDC that they moved.

    Those that moved ``ether`` alone are left to ether_rules.py.
    """
    ours = _ours(books)
    notes = books.explained_on(facts.network)
    for txid in facts.explained:
        moves = [move for move in facts.moves if move.txid == txid]
        sent = sum(m.units for m in moves if m.source in ours and m.recipient not in ours)
        came = sum(m.units for m in moves if m.recipient in ours and m.source not in ours)
        if sent or came or txid not in ether:
            yield Explained(facts.network, txid, sent, came, _USDC, notes[txid])


def _ours(books: Books) -> frozenset[str]:
    addresses = {address.lower() for address in books.evm_addresses}
    return frozenset(addresses | ({books.evm_hot.lower()} if books.evm_hot else set()))
