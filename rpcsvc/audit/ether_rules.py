"""The rule for the ether of one network's hot wallet: what it held at first, less what its own
transactions took since, and what others brought, is what it holds, to the wei.

What is there beyond that, somebody has sent: nobody's transactions say so, and anyone can do it. It
is named as a difference of its own kind, which stops nothing. What does not live here: reading
(ether_chain.py), USDC (evm_rules.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rpcsvc.audit.records import ETHER, ETHER_INCOME, Books, Difference, Ether, EvmFacts, Explained

WEI: Final = "wei"
_MOST_NAMED: Final = 5


def ether_differences(books: Books, facts: EvmFacts) -> Iterator[Difference]:
    """Where the hot wallet's ether is not what its transactions make of it."""
    opening, ether = books.openings.get(facts.network), facts.ether
    if opening is None or ether is None or not _is_known(ether):
        return
    due = opening.wei + _came(books, facts, ether) - sum(ether.spent.values())
    if due == ether.balance:
        return
    kind = ETHER if ether.balance < due else ETHER_INCOME
    named = _strange(books, facts) if ether.balance < due else []
    hint = _hint(facts.network, ether.balance - due, named)
    subject = f"the ether of the hot wallet on {facts.network}"
    yield Difference(kind, subject, str(due), str(ether.balance), WEI, hint)


def ether_notes(books: Books, facts: EvmFacts) -> Iterator[str]:
    """Why the ether was not compared."""
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
            " anew, at its next start at the latest"
        )
    elif ether.untold:
        yield (
            f"the node of {network} does not say the whole fee of {len(ether.untold)} transactions,"
            f" such as {min(ether.untold)}: the ether of the hot wallet was not compared"
        )


def ether_explained(books: Books, facts: EvmFacts) -> Iterator[Explained]:
    """What the explained transactions since the opening balance did to the ether."""
    if facts.ether is None or facts.network not in books.openings:
        return
    said = _said(books, facts.network)
    for txid, note in books.explained_on(facts.network).items():
        sent = facts.ether.spent.get(txid, 0)
        came = facts.ether.came.get(txid, 0)
        inside = said.get(txid, 0) if txid in facts.ether.done else 0
        by_word = f" ({inside} wei of it by your word)" if inside else ""
        if sent or came or inside:
            yield Explained(facts.network, txid, sent, came + inside, WEI, note + by_word)


def _is_known(ether: Ether) -> bool:
    return not ether.replaced and not ether.untold


def _came(books: Books, facts: EvmFacts, ether: Ether) -> int:
    """What the explained transactions brought: by the chain, and by the operator's word."""
    said = _said(books, facts.network)
    return sum(ether.came.values()) + sum(said.get(txid, 0) for txid in ether.done)


def _said(books: Books, network: str) -> dict[str, int]:
    return {item.txid: item.wei for item in books.explanations if item.network == network}


def _strange(books: Books, facts: EvmFacts) -> list[str]:
    """Transactions that took USDC from our addresses and are on no record: their gas was ours.

    Such as the sweeps that an older copy of the database does not know.
    """
    known = {txid for item in books.payments_on(facts.network) for txid in item.txids}
    known |= books.explained_on(facts.network).keys()
    ours = {address.lower() for address in (*books.evm_addresses, books.evm_hot or "")}
    since = books.openings[facts.network].block
    moves = (move for move in facts.moves if move.block > since and move.source in ours)
    return sorted({move.txid for move in moves} - known)


def _hint(network: str, gap: int, named: Sequence[str]) -> str:
    explain = f"rpcsvc treasury explain {network} TXID --note TEXT"
    if gap > 0:
        return (
            f"is {gap} wei more than on record: somebody sent it, which stops nothing. Was it you?"
            f" {explain}"
        )
    strange = f" Not on record: {', '.join(named[:_MOST_NAMED])}." if named else ""
    return (
        f"is {-gap} wei less than on record. Adopt what paid orders, explain what was you, or a"
        f" sweep that the database has lost: {explain}. None of it: the key is stolen, move the"
        f" money to a new one.{strange}"
    )
