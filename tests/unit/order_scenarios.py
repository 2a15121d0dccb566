"""An accountant that keeps its own books beside the order machine, for random order scenarios.

``sees`` records a deposit on the chain, ``fails`` the failure of a signed transfer. A violated
invariant raises ``Unsound``.

After each event (``looks_at``):
  - a transfer has a positive amount; a planned one has its effect due, and its deposits on chain;
  - at most one payout is live, and no ended transfer holds a deposit;
  - no refund goes to an address whose refund has failed, or to one that is not the order's;
  - the leftover is the deposits on the chain less the swapped and the refunded amounts;
  - an order has an effect due or asks for an address; one that stepped back or waits for its price
  plans no transfer; one that becomes refunded asks for nothing.
At each signature (``signs``):
  - every deposit of it is confirmed, and in no other live signed transfer;
  - a payout is the only one, goes to the agreed address, and is worth no more than its deposits;
  - a refund returns its deposits, and at most the leftover besides;
  - no sender is refunded more than he has sent; without a reorg, no more than the part of it that
  was not swapped.
At the end of a scenario (``closes``):
  - the order is over, or asks for an address because a refund waits for one;
  - every unit on the chain is in a signed transfer, waits for that address, or is at most a fee;
  - the order's status agrees with the payments.

The accountant adds up the chain's deposits and the signed transfers, without code of the machine.
From the order it takes only which transfer has which deposits, and the amount of each chunk.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rpcsvc.domain.events import AdvanceTransfer, Effect, FillChunk, PriceLateDeposit
from rpcsvc.domain.order import (
    DepositKey,
    DepositState,
    Fill,
    Order,
    OrderStatus,
    Terms,
    Transfer,
    TransferKind,
    TransferState,
)
from rpcsvc.domain.pricing import Direction
from rpcsvc.orders.ports.wallets import DepositSighting

XMR_UNIT = 10**12
ON_CHAIN = (DepositState.SEEN, DepositState.CONFIRMED)
OVER = (TransferState.FAILED, TransferState.CANCELLED)
ENDED_BY_REFUNDS = (OrderStatus.REFUNDED, OrderStatus.FAILED)
STEPPED_BACK = (OrderStatus.AWAITING_DEPOSIT, OrderStatus.DEPOSIT_DETECTED)


class Unsound(AssertionError):
    """An invariant of an order is violated."""


def require(holds: object, finding: str) -> None:
    """Raises Unsound with ``finding`` unless ``holds``."""
    if not holds:
        raise Unsound(finding)


@dataclass(slots=True)
class SignedTransfer:
    """A signed transfer; sums in deposit units. ``is_live``: it has not failed."""

    transfer: Transfer
    keys: list[DepositKey]
    swapped: int = 0  # of a payout
    leftover: int = 0  # of a refund: its part of the deposits that were paid out
    is_live: bool = True


def live_payouts(order: Order) -> list[Transfer]:
    return [t for t in order.transfers if t.kind is TransferKind.PAYOUT and t.state not in OVER]


def planned(order: Order) -> list[Transfer]:
    return [t for t in order.transfers if t.state is TransferState.PLANNED]


def in_flight(order: Order) -> list[Transfer]:
    return [t for t in order.transfers if not t.state.is_final]


def is_filling(order: Order) -> bool:
    """Whether chunks are still being swapped: there is no payout of them yet."""
    return order.status is OrderStatus.EXECUTING_SWAP and not live_payouts(order)


def held_by(order: Order, transfer_id: str) -> list[DepositKey]:
    return [d.key for d in order.deposits if d.transfer_id == transfer_id]


class Accountant:
    """The deposits on the chain and the signed transfers, with checks of the invariants."""

    def __init__(self, agreed: Terms) -> None:
        self.terms = agreed
        self.chain: dict[DepositKey, DepositSighting] = {}
        self.once_confirmed: set[DepositKey] = set()
        self.chain_took_back = False
        self.signed: dict[str, SignedTransfer] = {}
        self.rates = [agreed.price.rate]
        self.refused_by: set[str] = set()
        self.status = OrderStatus.AWAITING_DEPOSIT

    # --- books -------------------------------------------------------------------------------

    def sees(self, sighting: DepositSighting) -> None:
        before = self.chain.get(sighting.key)
        was_confirmed = before is not None and before.state is DepositState.CONFIRMED
        lost = was_confirmed and sighting.state is not DepositState.CONFIRMED
        self.chain_took_back |= lost or sighting.state is DepositState.REMOVED
        self.chain[sighting.key] = sighting
        if sighting.state is DepositState.CONFIRMED:
            self.once_confirmed.add(sighting.key)

    def fails(self, transfer: Transfer) -> None:
        if transfer.transfer_id in self.signed:
            self.signed[transfer.transfer_id].is_live = False
        if transfer.kind is TransferKind.REFUND:
            self.refused_by.add(transfer.address)

    def units(self, keys: Iterable[DepositKey], *states: DepositState) -> int:
        found = [self.chain[k] for k in keys]
        return sum(d.units for d in found if d.state in (states or tuple(DepositState)))

    def live(self, kind: TransferKind) -> list[SignedTransfer]:
        return [s for s in self.signed.values() if s.is_live and s.transfer.kind is kind]

    def left_of_payout(self) -> int:
        """Units of paid out deposits on the chain, less the swapped and the refunded ones."""
        payouts = self.live(TransferKind.PAYOUT)
        there = sum(self.units(s.keys, DepositState.CONFIRMED) for s in payouts)
        back = sum(s.leftover for s in self.live(TransferKind.REFUND))
        return there - sum(s.swapped for s in payouts) - back

    # --- after each event --------------------------------------------------------------------

    def looks_at(self, order: Order, due: set[Effect]) -> None:
        self.looks_at_transfers(order, due)
        self.looks_at_deposits(order)
        self.looks_at_leftover(order)
        looks_at_work(order, due)
        if order.status is not self.status and order.status in ENDED_BY_REFUNDS:
            require(not order.action_required, f"it is {order.status} with a refund to come")
        self.status = order.status

    def looks_at_transfers(self, order: Order, due: set[Effect]) -> None:
        require(all(t.units > 0 for t in order.transfers), "a transfer of nothing")
        require(len(live_payouts(order)) <= 1, "two payouts")
        for transfer in planned(order):
            name = transfer.transfer_id
            again = transfer.address in self.refused_by
            require(not again, f"{transfer.address} is tried again")
            require(AdvanceTransfer(name) in due, f"nobody is called for {name}")
            named = {self.terms.to_address, order.refund_address}
            named |= {d.sender for d in order.deposits}
            require(transfer.address in named, f"{name} goes to a stranger")
            there = all(d.is_active for d in order.deposits if d.transfer_id == name)
            require(there, f"{name} is planned with a deposit that is gone")

    def looks_at_deposits(self, order: Order) -> None:
        states = {t.transfer_id: t.state for t in order.transfers}
        for deposit in order.deposits:
            if deposit.transfer_id is None:
                continue
            name = deposit.key.txid
            require(not deposit.is_dust, f"{name} is dust, and sent all the same")
            require(states.get(deposit.transfer_id) not in OVER, f"{name}'s transfer is over")
            known = deposit.transfer_id in states or is_filling(order)
            require(known, f"{name} is held by no transfer")

    def looks_at_leftover(self, order: Order) -> None:
        require(order.leftover >= 0, "the leftover is below zero")
        require(live_payouts(order) or not order.leftover, "it is left over from no payout")
        reported = all(d.state is self.chain[d.key].state for d in order.deposits)
        if order.status is not OrderStatus.COMPLETED or not order.fills or not reported:
            return
        (payout,) = self.live(TransferKind.PAYOUT)
        there = self.units(payout.keys, *ON_CHAIN)
        rest = there - payout.swapped - sum(s.leftover for s in self.live(TransferKind.REFUND))
        to_come = [t for t in planned(order) if t.kind is TransferKind.REFUND]
        whole = sum(self.units(held_by(order, t.transfer_id)) for t in to_come)
        back = sum(t.units + t.fee for t in to_come) - whole
        require(0 <= back <= max(0, rest), f"{back} are to go back of {rest} that are left")
        owed = max(0, rest - back)
        require(order.leftover == owed, f"{owed} are left, but the order says {order.leftover}")

    # --- at each signature -------------------------------------------------------------------

    def signs(self, order: Order, transfer: Transfer) -> None:
        """Record a signed transfer. Raises Unsound if it may not be signed now."""
        entry = SignedTransfer(transfer, held_by(order, transfer.transfer_id))
        self.require_free(entry)
        if transfer.kind is TransferKind.PAYOUT:
            self.signs_payout(entry, order.fills)
        else:
            self.signs_refund(entry)
            if order.refund_address is None:
                self.require_own_money(transfer)
        self.signed[transfer.transfer_id] = entry

    def require_free(self, entry: SignedTransfer) -> None:
        taken = {k for s in self.signed.values() if s.is_live for k in s.keys}
        for found in entry.keys:
            state = self.chain[found].state
            name = f"{entry.transfer.transfer_id} is signed with {found.txid}, which is"
            require(state is DepositState.CONFIRMED, f"{name} {state}")
            require(found not in taken, f"{name} spent already")

    def signs_payout(self, entry: SignedTransfer, fills: tuple[Fill, ...]) -> None:
        payout, own = entry.transfer, self.units(entry.keys)
        require(not self.live(TransferKind.PAYOUT), "a second payout is signed")
        require(payout.address == self.terms.to_address, f"the payout goes to {payout.address}")
        entry.swapped = sum(f.units for f in fills) if fills else own
        require(0 < entry.swapped <= own, f"{entry.swapped} are swapped of {own}")
        require(entry.swapped <= self.terms.max_deposit, "more than the maximum is swapped")
        if self.terms.direction is Direction.XMR_TO_USDC:
            worth = entry.swapped * max(self.rates) // XMR_UNIT
        else:
            worth = entry.swapped * XMR_UNIT // min(self.rates)
        require(payout.units <= worth, f"{payout.units} are paid for what is worth {worth}")

    def signs_refund(self, entry: SignedTransfer) -> None:
        refund, own = entry.transfer, self.units(entry.keys)
        entry.leftover = refund.units + refund.fee - own
        require(entry.leftover >= 0, "a refund costs more than its fee")
        left = self.left_of_payout()
        require(entry.leftover <= max(0, left), f"{entry.leftover} go back of {left} that are left")

    def require_own_money(self, refund: Transfer) -> None:
        """Require that no sender gets another's deposit, unless a refund address was named."""
        sender = refund.address
        sent = self.units(k for k in self.once_confirmed if self.chain[k].sender == sender)
        if not self.chain_took_back:
            sent -= self.swapped_of(sender)
        before = [s.transfer for s in self.live(TransferKind.REFUND)]
        got = sum(t.units + t.fee for t in [*before, refund] if t.address == sender)
        require(got <= sent, f"{sender} gets {got} back of {sent}")

    def swapped_of(self, sender: str) -> int:
        """The swapped part of ``sender``'s deposits: they are swapped in the order seen."""
        of_sender = 0
        for payout in self.live(TransferKind.PAYOUT):
            rest = payout.swapped
            for deposit in (self.chain[k] for k in payout.keys):
                part = min(rest, deposit.units)
                of_sender += part if deposit.sender == sender else 0
                rest -= part
        return of_sender

    # --- at the end --------------------------------------------------------------------------

    def closes(self, order: Order) -> None:
        asks = order.action_required is not None
        require(not in_flight(order), "a transfer is in flight for ever")
        require(order.status.is_terminal or asks, f"the order stays {order.status} for ever")
        waits, left = self.waits_for_address(order), self.left_of_payout()
        is_due = waits > 0 or left > self.terms.refund_fee
        require(asks or not is_due, f"{waits} and a leftover of {left} are forgotten")
        require(is_due or not asks, "an address is asked for, but nothing waits for it")
        self.closes_status(order)

    def waits_for_address(self, order: Order) -> int:
        """Confirmed units in no signed transfer. Raises Unsound for dust above the refund fee."""
        signed = {k for s in self.signed.values() if s.is_live for k in s.keys}
        there = {k for k, d in self.chain.items() if d.state is DepositState.CONFIRMED}
        dust = {d.key for d in order.deposits if d.is_dust}
        for written_off in there & dust:
            small = self.chain[written_off].units <= self.terms.refund_fee
            require(small, f"{written_off.txid} is written off, and worth more than the fee")
        return self.units(there - signed - dust)

    def closes_status(self, order: Order) -> None:
        paid = bool(self.live(TransferKind.PAYOUT))
        if order.status.is_terminal:
            completed = order.status is OrderStatus.COMPLETED
            require(paid is completed, f"the order is {order.status}; its payout: {paid}")
        if order.status is OrderStatus.REFUNDED:
            require(self.live(TransferKind.REFUND), "the order is refunded, but nothing went back")


def looks_at_work(order: Order, due: set[Effect]) -> None:
    """Require that an order waits for a due effect, or for an input that it asks for."""
    if order.status in STEPPED_BACK:
        require(not planned(order), "an order that stepped back would still send something")
    if order.status is OrderStatus.DEPOSIT_CONFIRMED and not live_payouts(order):
        require(PriceLateDeposit() in due, "nobody is called for the price")
        require(not planned(order), "a deposit that is to be priced goes back")
    if is_filling(order):
        require(FillChunk(len(order.fills)) in due, "nobody is called for the next chunk")
    if order.status is OrderStatus.REFUNDING:
        busy = in_flight(order) or order.action_required
        require(busy, "the order is refunding, and nothing is sent or asked for")
