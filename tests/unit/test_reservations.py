"""The reservations of open orders on the wallets."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.events import ImpossibleTransition
from rpcsvc.domain.machine import open_order, transition
from rpcsvc.domain.order import DepositState, Order, Transfer, TransferState, TwapPlan
from rpcsvc.domain.pricing import Direction
from rpcsvc.domain.reservations import (
    Admission,
    Claims,
    counted,
    reservations_of,
    units_to_leave,
)
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from rpcsvc.store.checks import reservation_problems
from rpcsvc.store.database import StoreConflict
from rpcsvc.store.orders import OrderStore
from tests.unit.orders import HOUR, IN_CHUNKS, NOW, key, random_event, terms
from tests.unit.reserving import Keeper, numbered, wrong_sums


def named(order_id: str, direction: Direction) -> Order:
    return open_order(replace(terms(direction), order_id=order_id))


def test_a_new_order_claims_its_output_and_the_fee_of_paying_it() -> None:
    order = named("ord_1", Direction.XMR_TO_USDC)
    fee = order.terms.price.payout_fee
    assert reservations_of(order) == {"arbitrum": order.terms.expected_output + fee}


def test_larger_deposit_reserves_more_until_it_is_paid_out() -> None:
    order = named("ord_1", Direction.XMR_TO_USDC)
    sent = order.terms.deposit_amount * 2
    order = transition(order, ev.DepositSeen(key(1), sent, None, NOW), NOW).order
    claims = reservations_of(order)
    assert claims["monero"] == sent
    assert claims["arbitrum"] > 2 * order.terms.expected_output
    order = transition(order, ev.DepositConfirmed(key(1)), NOW).order
    for event in (
        ev.TransferPrepared("ord_1/payout/1", "id", "00"),
        ev.TransferPublished("ord_1/payout/1"),
    ):
        order = transition(order, event, NOW).order
        assert reservations_of(order)["arbitrum"] == claims["arbitrum"]
    settled = transition(order, ev.TransferSettled("ord_1/payout/1"), NOW).order
    assert reservations_of(settled) == {}


def test_deposit_above_the_maximum_reserves_the_maximum() -> None:
    order = named("ord_1", Direction.XMR_TO_USDC)
    limit, price = order.terms.max_deposit, order.terms.price
    order = transition(order, ev.DepositSeen(key(1), 100 * limit, None, NOW), NOW).order
    most = price.output(order.terms.direction, limit) + price.payout_fee
    assert reservations_of(order)["arbitrum"] == most


def test_an_expired_order_claims_nothing() -> None:
    order = named("ord_1", Direction.USDC_TO_XMR)
    assert order.deadline_at is not None
    assert reservations_of(transition(order, ev.DeadlinePassed(), order.deadline_at).order) == {}


# --- possible refunds ------------------------------------------------------------------------


def test_a_deposit_counts_while_its_payout_may_yet_fail() -> None:
    """The money is in the wallet, and must not be available to another order meanwhile."""
    order = open_order(terms(Direction.XMR_TO_USDC))
    sent = order.terms.deposit_amount
    order = transition(order, ev.DepositSeen(key(1), sent, None, NOW), NOW).order
    order = transition(order, ev.DepositConfirmed(key(1)), NOW).order
    payout = "ord_1/payout/1"
    for event in (ev.TransferPrepared(payout, "id", "00"), ev.TransferUnknown(payout, "lost")):
        assert reservations_of(order)["monero"] == sent
        order = transition(order, event, NOW).order
    failed = transition(order, ev.TransferFailed(payout, "reverted"), NOW).order
    assert reservations_of(order)["monero"] == sent
    assert reservations_of(failed) == {"monero": sent}


def test_chunked_order_reserves_all_until_it_is_paid_out() -> None:
    order = open_order(terms(Direction.XMR_TO_USDC, IN_CHUNKS))
    sent = order.terms.deposit_amount * 2
    order = transition(order, ev.DepositSeen(key(1), sent, None, NOW), NOW).order
    reserved_units = reservations_of(order)
    order = transition(order, ev.DepositConfirmed(key(1)), NOW).order
    order = transition(order, ev.ChunkFilled(0, 165_000_000), NOW).order
    assert reservations_of(order) == reserved_units


def late_on(order: Order, number: int) -> Order:
    """The order with a deposit after its end."""
    seen = ev.DepositSeen(key(number), order.terms.deposit_amount, None, NOW)
    order = transition(order, seen, NOW).order
    return transition(order, ev.DepositConfirmed(key(number)), NOW).order


def expired(direction: Direction = Direction.XMR_TO_USDC, order_id: str = "ord_1") -> Order:
    order = named(order_id, direction)
    assert order.deadline_at is not None
    return transition(order, ev.DeadlinePassed(), order.deadline_at).order


def test_refund_waiting_for_an_address_stays_reserved() -> None:
    order = late_on(expired(), 1)
    assert order.status.is_terminal
    assert order.action_required == "refund_address"
    owed = order.terms.deposit_amount
    assert reservations_of(order) == {"monero": owed}

    order = transition(order, ev.RefundAddressGiven("mine"), NOW).order
    (refund,) = order.refunds
    assert reservations_of(order) == {"monero": owed}
    for event in (ev.TransferPrepared(refund.transfer_id, "id", "00"),
                  ev.TransferSettled(refund.transfer_id)):  # fmt: skip
        assert reservations_of(order) == {"monero": owed}
        order = transition(order, event, NOW).order
    assert reservations_of(order) == {}


def test_leftover_that_waits_for_an_address_is_reserved() -> None:
    order = open_order(terms(Direction.XMR_TO_USDC, IN_CHUNKS))
    order = late_on(order, 1)
    order = transition(order, ev.ChunkFilled(0, 165_000_000), NOW).order
    order = transition(order, ev.FillingStopped(1), NOW).order
    payout = order.payout
    assert payout is not None
    for event in (ev.TransferPrepared(payout.transfer_id, "id", "00"),
                  ev.TransferSettled(payout.transfer_id)):  # fmt: skip
        assert reservations_of(order)["monero"] == order.terms.deposit_amount
        order = transition(order, event, NOW).order
    assert (order.action_required, order.leftover > 0) == ("refund_address", True)
    assert reservations_of(order) == {"monero": order.leftover}


def test_order_being_refunded_reserves_no_payout() -> None:
    """A refund may wait for an address for ever, and must not block the wallet's USDC."""
    order = named("ord_1", Direction.XMR_TO_USDC)
    small = order.terms.min_deposit // 2
    order = transition(order, ev.DepositSeen(key(1), small, None, NOW), NOW).order
    order = transition(order, ev.DepositConfirmed(key(1)), NOW).order
    assert reservations_of(order)["arbitrum"] > 0
    assert order.deadline_at is not None
    order = transition(order, ev.DeadlinePassed(), order.deadline_at).order
    assert (order.status.value, order.action_required) == ("refunding", "refund_address")
    assert reservations_of(order) == {"monero": small}


@given(st.data(), st.sampled_from(Direction), st.sampled_from([None, IN_CHUNKS]))
@settings(max_examples=100)
def test_refunds_owed_grow_only_by_what_is_deposited(
    data: st.DataObject, direction: Direction, plan: TwapPlan | None
) -> None:
    """Possible refunds grow by deposits only."""
    order, now = open_order(terms(direction, plan)), NOW
    network = order.terms.deposit_network
    for fresh in range(data.draw(st.integers(1, 25))):
        now += data.draw(st.sampled_from([1, 60_000, HOUR, 25 * HOUR]))
        event = random_event(data.draw, order, now, fresh)
        try:
            after = transition(order, event, now).order
        except ImpossibleTransition:
            continue
        came = event.units if isinstance(event, ev.DepositSeen) else 0
        reserved_units = reservations_of(order).get(network, 0)
        assert reservations_of(after).get(network, 0) <= reserved_units + came
        order = after


# --- reservations by changes of an order -----------------------------------------------------


def test_what_stays_reserved_as_it_was_is_not_written() -> None:
    order = named("ord_1", Direction.XMR_TO_USDC)
    assert counted(order, order) is None
    begun = counted(None, order, "address:1")
    assert begun is not None
    assert (begun.begins, begun.funded) == (True, {})
    assert begun.unfunded is not None
    assert (begun.unfunded.client, begun.unfunded.units) == (
        "address:1", reservations_of(order)["arbitrum"],
    )  # fmt: skip


def test_a_deposit_turns_an_unfunded_reservation_into_a_funded() -> None:
    order = named("ord_1", Direction.XMR_TO_USDC)
    seen = ev.DepositSeen(key(1), order.terms.deposit_amount, None, NOW)
    funded = counted(order, transition(order, seen, NOW).order)
    assert funded is not None
    assert (funded.unfunded, funded.begins) == (None, False)
    needed = order.terms.expected_output + order.terms.price.payout_fee
    assert funded.funded == {"arbitrum": needed, "monero": order.terms.deposit_amount}


# --- what payouts leave --------------------------------------------------------------------------

_OPEN = (TransferState.PREPARED, TransferState.PUBLISHED, TransferState.UNKNOWN)


def claims_on(network: str, orders: Iterable[Order]) -> Claims:
    """The claims on a network, added up from the orders."""
    total = returnable = above = 0
    for order in orders:
        units = reservations_of(order).get(network, 0)
        units -= sum(
            item.units + item.fee
            for item in order.transfers
            if item.network == network and item.state in _OPEN
        )
        total += units
        returnable += units if network == order.terms.deposit_network else 0
        if network == order.terms.payout_network:
            above += max(0, units - order.terms.expected_output - order.terms.price.payout_fee)
    return Claims(total, returnable, above)


class World:
    """Orders each way and their wallets, which hold a deposit as soon as it is seen."""

    def __init__(self, own: dict[str, int]) -> None:
        self.held = own
        self.orders = [named(f"ord_{number}", way) for number, way in enumerate([*Direction] * 2)]

    def step(self, number: int, percent: int, now: int) -> None:
        """Deposit, or have an order take the next step that is open to it."""
        order = self.orders[number]
        if percent:
            units = order.terms.deposit_amount * percent // 100
            seen = ev.DepositSeen(key(len(order.deposits)), units, "sender", now)
            self.held[order.terms.deposit_network] += units
            self._apply(number, seen, now)
            return
        for deposit in order.deposits:
            if deposit.state is DepositState.SEEN:
                self._apply(number, ev.DepositConfirmed(deposit.key), now)
        for item in self.orders[number].transfers:
            if item.state is TransferState.PLANNED and self._may_be_signed(order, item):
                self.held[item.network] -= item.units + item.fee
                prepared = ev.TransferPrepared(item.transfer_id, item.transfer_id, "00")
                self._apply(number, prepared, now)
                return
            if item.state is TransferState.PREPARED:
                self._apply(number, ev.TransferSettled(item.transfer_id), now)

    def pass_deadline(self, number: int) -> None:
        """Have the deadline of an order pass."""
        if (at := self.orders[number].deadline_at) is not None:
            self._apply(number, ev.DeadlinePassed(), at)

    def _may_be_signed(self, order: Order, item: Transfer) -> bool:
        left = self.held[item.network] - item.units - item.fee
        return left >= units_to_leave(order, item, claims_on(item.network, self.orders))

    def _apply(self, number: int, event: ev.Event, now: int) -> None:
        self.orders[number] = transition(self.orders[number], event, now).order

    def require_backed(self) -> None:
        """All that may have to go back is there."""
        for network, held in self.held.items():
            assert held >= claims_on(network, self.orders).returnable


NUMBERS = st.integers(0, 3)
STEPS = st.lists(st.tuples(NUMBERS, st.sampled_from([0, 0, 0, 0, 5, 100, 300, 1100])), max_size=40)


@given(STEPS, st.sampled_from([0, 100_000_000, 300_000_000]))
@settings(max_examples=100, deadline=None)
def test_payouts_leave_what_refunds_may_need(steps: list[tuple[int, int]], own: int) -> None:
    """However much is deposited, each refund can be paid, and no order waits for ever."""
    world = World({"monero": own * 10**4, "arbitrum": own})
    for number, percent in steps:
        world.step(number, percent, NOW)
        world.require_backed()
    for _ in range(3):  # the deposit window, the time to sign, and some more
        for number in [0, 1, 2, 3] * 8:
            world.step(number, 0, NOW)
            world.require_backed()
        for number in range(4):
            world.pass_deadline(number)
    states = {item.state for order in world.orders for item in order.transfers}
    assert TransferState.PLANNED not in states


def funded(name: str, direction: Direction, percent: int = 100) -> Order:
    """An order whose deposit is confirmed, with its payout planned."""
    order = named(name, direction)
    units = order.terms.deposit_amount * percent // 100
    order = transition(order, ev.DepositSeen(key(1), units, "sender", NOW), NOW).order
    return transition(order, ev.DepositConfirmed(key(1)), NOW).order


def test_overpaid_order_leaves_what_others_were_quoted() -> None:
    exact, over = (funded(name, Direction.XMR_TO_USDC, n) for name, n in (("a", 100), ("b", 300)))
    other = funded("c", Direction.USDC_TO_XMR)
    claims = claims_on("arbitrum", [exact, over, other])
    quoted = exact.transfers[0].units + exact.transfers[0].fee
    returnable = other.terms.deposit_amount
    assert units_to_leave(exact, exact.transfers[0], claims) == returnable
    assert units_to_leave(over, over.transfers[0], claims) == returnable + quoted


def test_overpaid_order_holds_up_no_other_above_its_quote() -> None:
    """A stranger overpays an order, for more than the wallet has; another's rate rose a little."""
    other, huge = (
        funded(name, Direction.XMR_TO_USDC, percent) for name, percent in (("a", 101), ("b", 1000))
    )
    claims = claims_on("arbitrum", [other, huge])
    quoted = huge.terms.expected_output + huge.terms.price.payout_fee
    for order in (other, huge):
        assert units_to_leave(order, order.transfers[0], claims) == quoted


def test_refund_waits_for_no_other_order() -> None:
    order = named("ord_1", Direction.USDC_TO_XMR)
    seen = ev.DepositSeen(key(1), order.terms.max_deposit + 1, "sender", NOW)
    order = transition(order, seen, NOW).order
    order = transition(order, ev.DepositConfirmed(key(1)), NOW).order
    (refund,) = order.refunds
    assert units_to_leave(order, refund, claims_on("arbitrum", [order])) == 0


# --- the sum of all --------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=20, deadline=None)
def test_the_sums_are_those_of_the_orders_whatever_happens(data: st.DataObject) -> None:
    async def run() -> None:
        with TemporaryDirectory() as folder:
            database = await SqliteDatabase.open(Path(folder))
            try:
                await _live(data, database)
            finally:
                await database.close()

    asyncio.run(run())


async def _live(data: st.DataObject, database: SqliteDatabase) -> None:
    keeper, now = Keeper(OrderStore(database, lambda: "key")), NOW
    for number, direction in enumerate(Direction):
        await keeper.open(numbered(number, direction), Admission(f"address:{number}"))
    for fresh in range(data.draw(st.integers(1, 20))):
        now += data.draw(st.sampled_from([1, HOUR, 25 * HOUR]))
        if data.draw(st.booleans()):
            await keeper.expire(now)
        order_id = data.draw(st.sampled_from(["ord_0", "ord_1"]))
        event = random_event(data.draw, keeper.orders[order_id], now, fresh)
        with suppress(ImpossibleTransition, StoreConflict):  # a refusal changes nothing
            await keeper.apply(order_id, event, now)
        assert await keeper.reserved() == keeper.recount()
    assert await wrong_sums(database) == []
    assert await reservation_problems(database, now) == []
