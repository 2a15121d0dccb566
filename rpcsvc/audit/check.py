"""Compares the books with the chains, in one pass, and holds the rules for deposits. Pure.

A deposit is compared by transaction, address, units and sender, each as often as it occurs. What
the service has not scanned yet, or is not deep enough, is pending.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct, field

from rpcsvc.audit.order_rules import (
    ChainCoverage,
    order_differences,
    transfer_differences,
    write_off,
)
from rpcsvc.audit.records import (
    MONERO,
    Annotated,
    Arrival,
    AuditReport,
    Books,
    DepositEntry,
    Difference,
    EvmFacts,
    MoneroFacts,
    OrderEntry,
    PaymentEntry,
    Sighting,
    Watched,
)
from rpcsvc.audit.spilled import SpilledDict, SpilledGroups, SpilledList
from rpcsvc.audit.wallet_rules import (
    by_transaction,
    ether_annotated,
    ether_differences,
    ether_notes,
    evm_annotated,
    evm_arrivals,
    evm_differences,
    evm_sightings,
    monero_annotated,
    monero_differences,
)
from rpcsvc.domain.addresses import evm_checksum
from rpcsvc.domain.order import LIVE_TRANSFERS, DepositState, TransferState
from rpcsvc.domain.pricing import deposit_asset
from rpcsvc.domain.withdrawals import is_withdrawal

_REPORTED: Final = 1_000
# States of a transfer that has, or may have, spent the deposits it was planned for.
_SPENT: Final = LIVE_TRANSFERS | {TransferState.SETTLED}


class ChainDeposits(Struct, frozen=True):
    """The arrivals of one network, by address in lower case.

    Those in blocks up to ``due`` must be confirmed on their orders. ``stale``: the service has not
    seen yet that blocks were replaced, and may have on record what was in them.
    """

    arrivals: Mapping[str, list[Arrival]]
    due: int
    stale: bool


def chain_deposits(
    facts: MoneroFacts | EvmFacts, arrivals: Iterable[Arrival], watched: Watched | None
) -> ChainDeposits:
    """Arrivals by address, and the last block whose deposits must be confirmed.

    Depth is counted from the last block that the service scanned.
    """
    by_address = SpilledGroups(Arrival, ((_key(item.address), item) for item in arrivals))
    if watched is None or facts.stale:
        return ChainDeposits(by_address, -1, stale=True)
    due = min(facts.top, watched.upto) + 1 - facts.deposit_depth
    return ChainDeposits(by_address, due, stale=False)


def deposit_differences(
    order: OrderEntry, chain: ChainDeposits, pending: list[str], written_off: Collection[str] = ()
) -> Iterator[Difference]:
    """Differences between the order's deposits and its address on the chain.

    ``written_off``: transactions of this network that the operator has annotated.
    """
    arrivals: dict[str, list[Arrival]] = defaultdict(list)
    for arrival in chain.arrivals.get(_key(order.deposit_address), ()):
        arrivals[arrival.txid].append(arrival)
    deposits: dict[str, list[DepositEntry]] = defaultdict(list)
    for deposit in order.deposits:
        is_lost = deposit.txid not in arrivals and _is_spent(order, deposit)
        if not (is_lost and deposit.txid in written_off):
            deposits[deposit.txid].append(deposit)
    unit = deposit_asset(order.direction).symbol
    if not chain.stale:
        yield from _unmined(order, arrivals, unit, pending)
    for txid in sorted({*arrivals, *deposits}):
        yield from _of_one_transaction(
            chain, order, txid, arrivals.get(txid, []), deposits.get(txid, []), pending
        )


def _unmined(
    order: OrderEntry, arrivals: Mapping[str, list[Arrival]], unit: str, pending: list[str]
) -> Iterator[Difference]:
    """Deposits that were paid out for, and that a deep reorganisation put back into the pool.

    One that counted before it was final is expected back.
    """
    for deposit in order.deposits:
        if not _is_spent(order, deposit):
            continue
        if not any(item.block is None for item in arrivals.get(deposit.txid, ())):
            continue
        if deposit.is_early:
            pending.append(f"deposit {deposit.txid} was paid out and waits to be mined again")
        else:
            yield Difference("deposit_unmined", deposit.txid, str(deposit.units), "0", unit)


def _is_spent(order: OrderEntry, deposit: DepositEntry) -> bool:
    spent_on = order.transfer(deposit.transfer_id) if deposit.transfer_id else None
    return spent_on is not None and spent_on.state in _SPENT


def _of_one_transaction(
    chain: ChainDeposits,
    order: OrderEntry,
    txid: str,
    arrivals: list[Arrival],
    deposits: list[DepositEntry],
    pending: list[str],
) -> Iterator[Difference]:
    """Pair equal entries; judge the entries that are left over on either side."""
    unit = deposit_asset(order.direction).symbol
    left = list(arrivals)
    odd: list[DepositEntry] = []
    for deposit in deposits:
        same = next((item for item in left if _same(item, deposit)), None)
        if same is None:
            odd.append(deposit)
            continue
        left.remove(same)
        yield from _judge(chain, same, deposit, unit, pending)
    claimed = [item for item in odd if item.state is DepositState.CONFIRMED]
    yield from _unmatched(chain, order, txid, left, claimed, pending)
    pending.extend(f"deposit {txid} is {item.state}" for item in odd if _is_open(item))


def _is_open(deposit: DepositEntry) -> bool:
    return deposit.state is DepositState.SEEN


def _unmatched(
    chain: ChainDeposits,
    order: OrderEntry,
    txid: str,
    left: list[Arrival],
    claimed: list[DepositEntry],
    pending: list[str],
) -> Iterator[Difference]:
    unit = deposit_asset(order.direction).symbol
    for arrival, deposit in zip(left, claimed, strict=False):
        if arrival.units != deposit.units:
            yield Difference("deposit_units", txid, str(arrival.units), str(deposit.units), unit)
        else:
            yield Difference(
                "deposit_sender", txid, arrival.sender or "none", deposit.sender or "none"
            )
    for deposit in claimed[len(left) :]:
        if chain.stale or deposit.is_early:
            pending.append(f"deposit {txid} was in a block that was replaced")
        else:
            reported = write_off(order.deposit_network, txid) if _is_spent(order, deposit) else ""
            yield Difference("deposit_not_on_chain", txid, "0", str(deposit.units), unit, reported)
    for arrival in left[len(claimed) :]:
        if _is_due(chain, arrival):
            yield Difference("deposit_missing", txid, str(arrival.units), "0", unit)
        else:
            pending.append(f"deposit {txid} is not on its order yet")


def _judge(
    chain: ChainDeposits, arrival: Arrival, deposit: DepositEntry, unit: str, pending: list[str]
) -> Iterator[Difference]:
    if deposit.state is DepositState.CONFIRMED:
        if arrival.block is None:
            pending.append(f"deposit {deposit.txid} waits to be mined again")
    elif _is_due(chain, arrival):
        yield Difference(
            "deposit_not_credited", deposit.txid, str(arrival.units), deposit.state.value, unit
        )
    else:
        pending.append(f"deposit {deposit.txid} is {deposit.state}")


def _is_due(chain: ChainDeposits, arrival: Arrival) -> bool:
    return arrival.block is not None and arrival.block <= chain.due and not arrival.timelocked


def _same(arrival: Arrival, deposit: DepositEntry) -> bool:
    if arrival.units != deposit.units:
        return False
    return _key(arrival.sender or "") == _key(deposit.sender or "")


def _key(address: str) -> str:
    """Return an address as it is compared: case does not matter on EVM, and does on Monero."""
    return address.lower() if address.startswith("0x") else address


def check(
    books: Books,
    monero: MoneroFacts | None,
    evm: Sequence[EvmFacts],
    compared: Callable[[int], None] = lambda _orders: None,
) -> AuditReport:
    """Return all differences between the books and the chains that were asked.

    ``compared`` is called with the number of orders compared so far.
    """
    work = _Work(books)
    work.index_orders()
    if monero is not None:
        work.take_monero(monero)
    for facts in evm:
        work.take_evm(facts)
    work.compare_orders(compared)
    work.note_unfound()
    return AuditReport(
        differences=tuple(work.differences),
        annotated=tuple(work.annotated),
        pending=tuple(dict.fromkeys(work.pending)),
        notes=tuple(work.notes),
        orders=len(books.orders),
        payments=len(books.payments),
    )


class _Work(Struct):
    """The state of one running audit.

    ``addresses`` has the orders of each deposit address, in lower case. ``transfers``: the ids
    of all transfers and withdrawals. ``networks``: all that orders are on.
    """

    books: Books
    addresses: SpilledGroups[str, str] = field(default_factory=lambda: SpilledGroups(str))
    transfers: SpilledDict[str, None] = field(default_factory=lambda: SpilledDict(None))
    networks: set[str] = field(default_factory=set)
    differences: list[Difference] = field(default_factory=list)
    pending: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    annotated: list[Annotated] = field(default_factory=list)
    chains: dict[str, ChainDeposits] = field(default_factory=dict)
    seen: SpilledDict[str, Sighting] = field(default_factory=lambda: SpilledDict(Sighting))
    tops: dict[str, int] = field(default_factory=dict)

    def index_orders(self) -> None:
        """Index the orders, for rules that look something up among all of them."""
        for order in self.books.orders:
            self.addresses.add(order.deposit_address.lower(), order.order_id)
            self.transfers.update((item.transfer_id, None) for item in order.transfers)
            self.networks |= {order.deposit_network, order.payout_network}
        self.transfers.update((item.transfer_id, None) for item in self.books.withdrawals)

    def take_monero(self, facts: MoneroFacts) -> None:
        watched = self.books.watched.get(MONERO)
        self.tops[MONERO] = facts.top
        self.chains[MONERO] = chain_deposits(facts, facts.arrivals, watched)
        self.seen.update(facts.payments.items())
        since = facts.top + 1 if watched is None else watched.since
        self.differences += monero_differences(self.books, since, facts)
        self.annotated += monero_annotated(self.books, facts)
        self.notes += self._unattributed(MONERO, facts.arrivals, self.books.monero_primary, since)
        if not facts.is_complete:
            self.notes.append(
                "the XMR wallet has more outputs than one answer can list: what is held back"
                " (frozen) in it at deposit addresses counts as missing"
            )

    def take_evm(self, facts: EvmFacts) -> None:
        watched = self.books.watched[facts.network]
        arrivals = SpilledList(Arrival, evm_arrivals(self.books, facts))
        moves = by_transaction(facts.moves)
        self.tops[facts.network] = facts.top
        self.chains[facts.network] = chain_deposits(facts, arrivals, watched)
        self.notes += self._unattributed(facts.network, arrivals, self.books.evm_hot, watched.since)
        seen = SpilledDict(Sighting, evm_sightings(self.books, facts, moves))
        self.seen.update(seen.items())
        self.differences += evm_differences(self.books, facts, seen, self.pending)
        self.differences += ether_differences(self.books, facts)
        self.notes += ether_notes(self.books, facts)
        ether = list(ether_annotated(self.books, facts))
        self.annotated += evm_annotated(self.books, facts, moves, {item.txid for item in ether})
        self.annotated += ether
        if facts.opening is None:
            self.notes.append(
                f"the node of {facts.network} does not keep what the hot wallet held before block"
                f" {watched.since}: its balance was not compared"
            )

    def compare_orders(self, compared: Callable[[int], None]) -> None:
        payments = SpilledDict[str, PaymentEntry](
            PaymentEntry, ((item.payment_id, item) for item in self.books.payments)
        )
        looked_at = frozenset(self.chains)
        stale = frozenset(name for name, chain in self.chains.items() if chain.stale)
        self.pending += (f"{name}: replaced blocks are not on record yet" for name in sorted(stale))
        self.differences += self._shared_addresses()
        self.differences += self._orphans(payments)
        asked = ChainCoverage(looked_at, stale, self.tops, self.books.closed)
        self.notes += [
            f"{name} is paid by the operator's word (rpcsvc payouts close)"
            for name in sorted(self.books.closed)
        ]
        for number, order in enumerate(self.books.orders, 1):
            if number % _REPORTED == 0:
                compared(number)
            written_off = self.books.annotations_on(order.deposit_network)
            self.differences += order_differences(order, written_off)
            self.differences += transfer_differences(
                order.order_id, order.transfers, payments, self.seen, asked, self.pending
            )
            chain = self.chains.get(order.deposit_network)
            if chain is not None:
                self.differences += deposit_differences(order, chain, self.pending, written_off)
        for item in self.books.withdrawals:
            self.differences += transfer_differences(
                item.transfer_id, (item,), payments, self.seen, asked, self.pending
            )
        self._note_unasked(looked_at)

    def _unattributed(
        self, network: str, arrivals: Iterable[Arrival], wallet: str | None, since: int
    ) -> Iterator[str]:
        """Yield money at addresses of no order: the database has lost the order."""
        own = (wallet or "").lower()
        reported, unit = self.books.annotations_on(network), "XMR" if network == MONERO else "USDC"
        for item in arrivals:
            is_old = item.block is not None and item.block < since
            address = item.address.lower()
            is_known = address == own or address in self.addresses
            if not is_known and item.txid not in reported and not is_old:
                to = item.address
                to = evm_checksum(to) if to.startswith("0x") else to
                yield (
                    f"{item.txid} on {network} brought {item.units} {unit} units to {to}, which is"
                    " no order's address"
                )

    def note_unfound(self) -> None:
        """Note annotations of transactions that the chains read do not show."""
        found = {(item.network, item.txid) for item in self.annotated}
        for item in self.books.annotations:
            if item.network in self.chains and (item.network, item.txid) not in found:
                self.notes.append(f"{item.txid} is explained, and {item.network} does not show it")

    def _shared_addresses(self) -> Iterator[Difference]:
        for address, orders in self.addresses.items():
            if len(orders) > 1:
                yield Difference("deposit_address", address, "1 order", f"{len(orders)} orders")

    def _orphans(self, payments: Mapping[str, PaymentEntry]) -> Iterator[Difference]:
        """Yield payments for transfers that no order has, and that are no withdrawal.

        Of several payments under one id the last counts.
        """
        found = (
            item.payment_id
            for item in self.books.payments
            if item.is_transfer and item.payment_id not in self.transfers
        )
        for payment in (payments[payment_id] for payment_id in dict.fromkeys(found)):
            if not payment.is_transfer:
                continue
            if not self.books.from_journal.isdisjoint(payment.txids):
                lost = (
                    "a withdrawal that the copy lacks: rpcsvc treasury withdraw with its --id and"
                    " terms puts it on record"
                    if is_withdrawal(payment.payment_id)
                    else "which no order has: the order is lost, or has not planned it yet"
                )
                self.notes.append(
                    f"{payment.txids[0]} paid {payment.payment_id}, {lost}; the payment journal"
                    " knows it"
                )
            else:
                unit = "XMR" if payment.network == MONERO else "USDC"
                yield Difference(
                    "payment_without_order", payment.payment_id, "0", str(payment.units), unit
                )

    def _note_unasked(self, looked_at: frozenset[str]) -> None:
        for network in sorted(self.networks - looked_at):
            self.notes.append(
                f"{network} has orders, and was not compared: no node is configured for it, or the"
                " service has not scanned it yet"
            )
