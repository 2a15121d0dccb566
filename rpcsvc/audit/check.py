"""Comparing the books with the chains: pure, one pass over both.

What does not live here: the rules themselves (order_rules.py, deposit_rules.py, monero_rules.py,
evm_rules.py), reading either side (books.py, monero_chain.py, evm_chain.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from rpcsvc.audit.deposit_rules import Shown, deposit_differences, shown
from rpcsvc.audit.ether_rules import ether_differences, ether_explained, ether_notes
from rpcsvc.audit.evm_rules import (
    evm_arrivals,
    evm_differences,
    evm_explained,
    evm_sightings,
)
from rpcsvc.audit.monero_rules import monero_differences, monero_explained
from rpcsvc.audit.order_rules import Asked, order_differences, transfer_differences
from rpcsvc.audit.records import (
    MONERO,
    Arrival,
    Books,
    Difference,
    EvmFacts,
    Explained,
    MoneroFacts,
    PaymentEntry,
    Report,
    Sighting,
)
from rpcsvc.domain.addresses import evm_checksum


def check(books: Books, monero: MoneroFacts | None, evm: Sequence[EvmFacts]) -> Report:
    """Everything in which the books and the chains that were asked do not agree."""
    work = _Work(books)
    if monero is not None:
        work.take_monero(monero)
    for facts in evm:
        work.take_evm(facts)
    work.compare_orders()
    work.note_unfound()
    return Report(
        differences=tuple(work.differences),
        explained=tuple(work.explained),
        pending=tuple(dict.fromkeys(work.pending)),
        notes=tuple(work.notes),
        orders=len(books.orders),
        payments=len(books.payments),
    )


@dataclass(slots=True)
class _Work:
    """One audit under way."""

    books: Books
    differences: list[Difference] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    explained: list[Explained] = field(default_factory=list)
    chains: dict[str, Shown] = field(default_factory=dict)
    seen: dict[str, Sighting] = field(default_factory=dict)
    tops: dict[str, int] = field(default_factory=dict)

    def take_monero(self, facts: MoneroFacts) -> None:
        watched = self.books.watched.get(MONERO)
        self.tops[MONERO] = facts.top
        self.chains[MONERO] = shown(facts, facts.arrivals, watched)
        self.seen.update(facts.payments)
        since = facts.top + 1 if watched is None else watched.since
        self.differences += monero_differences(self.books, since, facts)
        self.explained += monero_explained(self.books, facts)
        self.notes += self._strays(MONERO, facts.arrivals, self.books.monero_primary, since)
        if not facts.is_whole:
            self.notes.append(
                "the XMR wallet has more outputs than one answer can list: what is held back"
                " (frozen) in it at deposit addresses counts as missing"
            )

    def take_evm(self, facts: EvmFacts) -> None:
        watched = self.books.watched[facts.network]
        arrivals = evm_arrivals(self.books, facts)
        self.tops[facts.network] = facts.top
        self.chains[facts.network] = shown(facts, arrivals, watched)
        self.notes += self._strays(facts.network, arrivals, self.books.evm_hot, watched.since)
        seen = evm_sightings(self.books, facts)
        self.seen.update(seen)
        self.differences += evm_differences(self.books, facts, seen, self.pending)
        self.differences += ether_differences(self.books, facts)
        self.notes += ether_notes(self.books, facts)
        ether = list(ether_explained(self.books, facts))
        self.explained += evm_explained(self.books, facts, {item.txid for item in ether})
        self.explained += ether
        if facts.opening is None:
            self.notes.append(
                f"the node of {facts.network} does not keep what the hot wallet held before block"
                f" {watched.since}: its balance was not compared"
            )

    def compare_orders(self) -> None:
        payments = {item.payment_id: item for item in self.books.payments}
        looked_at = frozenset(self.chains)
        stale = frozenset(name for name, chain in self.chains.items() if chain.stale)
        self.pending += (f"{name}: replaced blocks are not on record yet" for name in sorted(stale))
        self.differences += self._shared_addresses()
        self.differences += self._orphans(payments)
        asked = Asked(looked_at, stale, self.tops, self.books.closed)
        self.notes += [
            f"{name} is paid by the operator's word (rpcsvc payouts close)"
            for name in sorted(self.books.closed)
        ]
        for order in self.books.orders:
            written_off = self.books.explained_on(order.deposit_network)
            self.differences += order_differences(order, written_off)
            self.differences += transfer_differences(
                order, payments, self.seen, asked, self.pending
            )
            chain = self.chains.get(order.deposit_network)
            if chain is not None:
                self.differences += deposit_differences(order, chain, self.pending, written_off)
        self._note_unasked(looked_at)

    def _strays(
        self, network: str, arrivals: Iterable[Arrival], wallet: str | None, since: int
    ) -> Iterator[str]:
        """Money at deposit addresses that no order has: of orders that the database has lost."""
        known = {order.deposit_address.lower() for order in self.books.orders}
        known.add((wallet or "").lower())
        told, unit = self.books.explained_on(network), "XMR" if network == MONERO else "USDC"
        for item in arrivals:
            is_old = item.block is not None and item.block < since
            if item.address.lower() not in known and item.txid not in told and not is_old:
                to = item.address
                to = evm_checksum(to) if to.startswith("0x") else to
                yield (
                    f"{item.txid} on {network} brought {item.units} {unit} units to {to}, which is"
                    " no order's address"
                )

    def note_unfound(self) -> None:
        """Explanations of what is on no chain that was looked at."""
        found = {(item.network, item.txid) for item in self.explained}
        for item in self.books.explanations:
            if item.network in self.chains and (item.network, item.txid) not in found:
                self.notes.append(f"{item.txid} is explained, and {item.network} does not show it")

    def _shared_addresses(self) -> Iterator[Difference]:
        used = Counter(order.deposit_address.lower() for order in self.books.orders)
        for address, count in used.items():
            if count > 1:
                yield Difference("deposit_address", address, "1 order", f"{count} orders")

    def _orphans(self, payments: dict[str, PaymentEntry]) -> Iterator[Difference]:
        """A payment for an order's transfer that no order has."""
        known = {t.transfer_id for order in self.books.orders for t in order.transfers}
        for payment in payments.values():
            if not payment.is_transfer or payment.payment_id in known:
                continue
            if not self.books.from_journal.isdisjoint(payment.txids):
                self.notes.append(
                    f"{payment.txids[0]} paid {payment.payment_id}, which no order has: the order"
                    " is lost, or has not planned it yet; the payment journal knows it"
                )
            else:
                unit = "XMR" if payment.network == MONERO else "USDC"
                yield Difference(
                    "payment_without_order", payment.payment_id, "0", str(payment.units), unit
                )

    def _note_unasked(self, looked_at: frozenset[str]) -> None:
        used = {
            network
            for order in self.books.orders
            for network in (order.deposit_network, order.payout_network)
        }
        for network in sorted(used - looked_at):
            self.notes.append(
                f"{network} has orders, and was not compared: no node is configured for it, or the"
                " service has not looked at it yet"
            )
