"""Random order scenarios: the accountant of order_scenarios.py accounts for every unit.

An order is underpaid, overpaid and paid late, by up to three senders; deposits are reorged out and
come back; transfers fail or get lost; deadlines pass in time, late or not at all. The machine must
accept every event. A seed determines the scenario; a failure's note lists its events.
"""

from __future__ import annotations

import random

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain import twap
from rpcsvc.domain.events import AdvanceTransfer, Effect, FillChunk, PriceLateDeposit
from rpcsvc.domain.machine import open_order, transition
from rpcsvc.domain.order import DepositState, OrderStatus, Terms, Transfer, TransferState
from rpcsvc.domain.pricing import Direction
from rpcsvc.orders.deposits import events_of
from rpcsvc.orders.ports.wallets import DepositSighting
from tests.unit.order_scenarios import (
    ON_CHAIN,
    Accountant,
    Unsound,
    is_filling,
    live_payouts,
    require,
)
from tests.unit.orders import HOUR, IN_CHUNKS, NOW, key, terms

RATE = 165_000_000  # as quoted, in USDC units per XMR
RATES = [*[RATE] * 6, RATE * 9 // 10, RATE * 11 // 10, RATE * 101 // 100]
MOST_DEPOSITS = 7


def agreed_by(die: random.Random) -> Terms:
    """Terms with low and high fees, and with room for a lot or for the exact amount only."""
    agreed = terms(die.choice(list(Direction)), die.choice([None, IN_CHUNKS, IN_CHUNKS]))
    amount, direction, price = agreed.deposit_amount, agreed.direction, agreed.price
    if die.random() < 0.2:
        price = replace(price, payout_fee=price.output(direction, amount) // 5)
    if die.random() < 0.3:
        price = replace(price, integrator_bps=100)
    return replace(
        agreed,
        price=price,
        expected_output=price.output(direction, amount),
        min_received=price.min_received(direction, amount),
        refund_fee=die.choice([0, amount // 1000, amount // 1000, amount // 5, amount // 12]),
        min_deposit=die.choice([1, amount // 10, amount]),
        max_deposit=die.choice([amount, amount * 3 // 2, amount * 10]),
    )


class Scenario:
    """One order with its chain and its worker, driven by a seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.die = random.Random(seed)
        self.order = open_order(agreed_by(self.die))
        self.books = Accountant(self.order.terms)
        self.now = NOW
        self.due: set[Effect] = set()
        self.events: list[str] = []
        self.addresses = 0
        self.failures = self.die.choice([0.1, 0.3, 0.5])
        reorgs = [self.reorganise] * self.die.choice([0, 2, 3, 4])
        self.moves = [*[self.mine] * 3, *reorgs, *[self.work] * 8, self.name_address]

    def run(self) -> None:
        """From the first deposit to the end. Raises Unsound, or what the machine raises."""
        try:
            if self.die.random() < 0.6:
                self.fund()
            for _ in range(self.die.randint(3, 60)):
                self.step()
            self.end()
        except Exception as wrong:
            wrong.add_note("\n".join([f"scenario {self.seed}, {self.order.terms}", *self.events]))
            raise

    def happens(self, event: ev.Event) -> None:
        self.events.append(f"{self.now - NOW:>10} ms  {self.order.status:<17} {event}")
        result = transition(self.order, event, self.now)
        self.order = result.order
        self.due.update(result.effects)
        self.books.looks_at(self.order, self.due)

    def step(self) -> None:
        long = [HOUR // 4, HOUR, 3 * HOUR, 25 * HOUR] if self.die.random() < 0.15 else []
        self.now += self.die.choice([1, 1_000, 1_000, 2_000, 60_000, 60_000, *long])
        if self.die.random() < 0.8:
            self.poll()
        pays = 5 if len(self.books.chain) < 2 else 1
        self.die.choice([*[self.pay] * pays, *self.moves])()

    def poll(self) -> None:
        """Report the order's deadline if it has passed."""
        if self.order.deadline_at is not None and self.now >= self.order.deadline_at:
            self.happens(ev.DeadlinePassed())

    # --- the chain ---------------------------------------------------------------------------

    def pay(self) -> None:
        if len(self.books.chain) == MOST_DEPOSITS:
            return
        amount = self.order.terms.deposit_amount
        small = [1, amount // 20, amount // 10, amount // 3, amount // 2, amount * 9 // 10]
        large = [amount, amount, amount + 1, amount * 3 // 2, amount * 3, amount * 12]
        state = self.die.choice([DepositState.SEEN, DepositState.SEEN, DepositState.CONFIRMED])
        self.show_new(self.die.choice([*small, *large, *[self.missing()] * 4]), state)

    def fund(self) -> None:
        """Deposit the agreed amount at once, from one or two senders."""
        self.show_new(self.missing() // self.die.choice([1, 1, 2, 3]), DepositState.CONFIRMED)
        self.show_new(self.missing(), DepositState.CONFIRMED)

    def missing(self) -> int:
        there = self.books.units(self.books.chain, *ON_CHAIN)
        return max(1, self.order.terms.deposit_amount - there)

    def show_new(self, units: int, state: DepositState) -> None:
        named = self.order.terms.senders_can_be_refunded and self.die.random() < 0.95
        sender = f"sender {self.die.randrange(3)}" if named else None
        fresh = key(len(self.books.chain))
        self.show(DepositSighting(fresh, "here", units, sender, self.now, state))

    def mine(self) -> None:
        waiting = [d for d in self.books.chain.values() if d.state is not DepositState.CONFIRMED]
        self.show_one_of(
            waiting, [DepositState.CONFIRMED, DepositState.CONFIRMED, DepositState.SEEN]
        )

    def reorganise(self) -> None:
        there = [d for d in self.books.chain.values() if d.state is not DepositState.REMOVED]
        self.show_one_of(there, [DepositState.REMOVED, DepositState.REMOVED, DepositState.SEEN])

    def show_one_of(self, known: list[DepositSighting], states: list[DepositState]) -> None:
        if known:
            self.show(replace(self.die.choice(known), state=self.die.choice(states)))

    def show(self, sighting: DepositSighting) -> None:
        self.books.sees(sighting)
        for event in events_of(self.order, sighting):
            self.happens(event)

    # --- the worker --------------------------------------------------------------------------

    def work(self) -> None:
        """Try one due effect; it stays due until it is done or void."""
        if not self.due:
            return
        effect = self.die.choice(sorted(self.due, key=repr))
        if isinstance(effect, PriceLateDeposit):
            self.price(effect)
        elif isinstance(effect, FillChunk):
            self.fill(effect)
        else:
            self.send(effect)

    def rate(self) -> int:
        self.books.rates.append(self.die.choice(RATES))
        return self.books.rates[-1]

    def price(self, effect: PriceLateDeposit) -> None:
        self.due.discard(effect)
        if self.order.status is OrderStatus.DEPOSIT_CONFIRMED and not live_payouts(self.order):
            self.happens(ev.Repriced(self.rate()))

    def fill(self, effect: FillChunk) -> None:
        if not is_filling(self.order) or effect.index != len(self.order.fills):
            self.due.discard(effect)
            return
        rate = self.rate()
        if twap.next_fill(self.order, rate, self.now) is not None and self.die.random() < 0.7:
            self.due.discard(effect)
            self.happens(ev.ChunkFilled(effect.index, rate))
        elif self.die.random() < 0.5:
            self.due.discard(effect)
            self.happens(ev.FillingStopped(effect.index))

    def send(self, effect: AdvanceTransfer) -> None:
        transfer = self.order.transfer(effect.transfer_id)
        if transfer is None or transfer.state.is_final:
            self.due.discard(effect)
        elif transfer.state is TransferState.PLANNED:
            self.sign(transfer)
        else:
            self.publish(transfer)

    def sign(self, transfer: Transfer) -> None:
        name = transfer.transfer_id
        if self.die.random() < self.failures * 0.4:
            self.books.fails(transfer)
            self.happens(ev.TransferFailed(name, "refused"))
            return
        self.books.signs(self.order, transfer)
        self.happens(ev.TransferPrepared(name, f"id of {name}", "raw"))

    def publish(self, transfer: Transfer) -> None:
        name, goes_wrong = transfer.transfer_id, self.die.random() < self.failures
        if goes_wrong and self.die.random() < 0.5:
            self.books.fails(transfer)
            self.happens(ev.TransferFailed(name, "reverted"))
        elif goes_wrong and transfer.state is not TransferState.UNKNOWN:
            self.happens(ev.TransferUnknown(name, "lost"))
        elif transfer.state is TransferState.PUBLISHED or self.die.random() < 0.3:
            self.happens(ev.TransferSettled(name))
        else:
            self.happens(ev.TransferPublished(name))

    def name_address(self) -> None:
        if self.order.action_required:
            self.addresses += 1
            self.happens(ev.RefundAddressGiven(f"back {self.addresses}"))

    # --- the end -----------------------------------------------------------------------------

    def end(self) -> None:
        """Settle the chain, finish all work, and perhaps name a refund address."""
        self.settle_chain()
        self.failures = 0.1
        self.work_until_over()
        if self.die.random() < 0.5:
            self.name_until_over()
        self.books.closes(self.order)

    def settle_chain(self) -> None:
        comes_back = self.die.random() < 0.7
        for deposit in list(self.books.chain.values()):
            gone = deposit.state is DepositState.REMOVED
            if not gone or (comes_back and self.die.random() < 0.7):
                self.show(replace(deposit, state=DepositState.CONFIRMED))

    def work_until_over(self) -> None:
        for turn in range(400):
            self.failures = self.failures if turn < 30 else 0
            self.work()
            if not self.due and (self.order.status.is_terminal or self.order.action_required):
                return
            if turn % 7 == 6 or not self.due:
                late = HOUR // 10 if self.due else (self.order.deadline_at or 0) - self.now
                self.now += max(0, late)
                self.poll()
        raise Unsound("there is always something to do")

    def name_until_over(self) -> None:
        self.failures = 0
        for _ in range(3):
            self.name_address()
            for _ in range(60):
                self.work()
        require(not self.order.action_required, "an address is asked for again and again")


# --- the tests -------------------------------------------------------------------------------


# A rare case: in scenario 12,082 a leftover's refund fails while its deposit is reorged out.
@pytest.mark.parametrize("first", [0, 300, 600, 900, 1_200, 12_000])
def test_an_accountant_finds_every_unit_in_random_scenarios(first: int) -> None:
    for seed in range(first, first + 300):
        Scenario(seed).run()


@pytest.mark.slow
def test_an_accountant_finds_every_unit_in_many_scenarios() -> None:
    for seed in range(10_000, 25_000):
        Scenario(seed).run()
