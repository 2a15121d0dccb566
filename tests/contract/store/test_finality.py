"""Deposits that count before they are final: bounded, freed, lost and held, on both databases."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast
from unittest.mock import patch

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.finality import FinalityLimits
from rpcsvc.domain.order import DepositKey, OrderReason, OrderStatus
from rpcsvc.domain.pricing import Direction
from rpcsvc.errors import Unavailable
from rpcsvc.orders.deposits import DEPOSITS_PER_PASS
from rpcsvc.orders.local_venue import LocalVenue
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.records import (
    Attempt,
    EvmPayment,
    EvmPaymentOrder,
    EvmPurpose,
)
from rpcsvc.settlement.onchain.thresholds import Threshold, threshold_of
from rpcsvc.store.backends.postgresql.database import PostgresqlDatabase
from rpcsvc.store.database import Statement, Tables
from rpcsvc.store.finality import loss_problem
from tests.sandbox import ManualClock
from tests.unit.early_deposits import USD, EarlyExchange, TieredChains
from tests.unit.orders import HOUR, NOW

U2X, X2U = Direction.USDC_TO_XMR, Direction.XMR_TO_USDC
TIERS = {
    "arbitrum": (Threshold(0, 1), Threshold(500 * USD, 20)),
    "base": (Threshold(0, 1), Threshold(500 * USD, 20)),
    "monero": (Threshold(0, 2), Threshold(50 * 10**12, 10)),
}
LIMITS = FinalityLimits(350 * USD, 250 * USD, {"monero": 300 * USD}, 24 * HOUR)
DONE = OrderStatus.COMPLETED
Make = Callable[..., EarlyExchange]


@pytest.fixture
def make(database: Tables) -> Make:
    chains = TieredChains(TIERS, dict.fromkeys(TIERS, 100))
    clock = ManualClock(NOW)

    def exchange(limits: FinalityLimits = LIMITS, tables: Tables = database) -> EarlyExchange:
        return EarlyExchange(tables, chains, limits, clock)

    return exchange


async def pay(exchange: EarlyExchange, name: str, usd: int, chain: str = "arbitrum") -> None:
    order = await exchange.open(name, U2X, chain, usd * USD)
    exchange.chains.pay(chain, f"tx {name}", order.terms.deposit_address, usd * USD)


async def status(exchange: EarlyExchange, *names: str) -> list[OrderStatus]:
    return [(await exchange.order(name)).status for name in names]


async def test_small_deposits_are_paid_within_the_bound(make: Make) -> None:
    exchange = make()
    for name in ("a", "b", "c"):
        await pay(exchange, name, 100)
    await exchange.settle()
    done = await status(exchange, "a", "b", "c")
    assert done.count(DONE) == 2, "the third would make 300 USD of 250"
    assert await exchange.store.at_risk() == {("arbitrum", "counted"): 200 * USD}
    assert await exchange.problems() == []
    exchange.chains.grow("arbitrum", 16)
    await exchange.settle()
    assert (await status(exchange, "a", "b", "c")).count(DONE) == 2
    # The first deposit is final now: the sum at risk has room for the third, in the next pass.
    exchange.chains.grow("arbitrum", 1)
    await exchange.settle()
    await exchange.settle()
    assert await status(exchange, "a", "b", "c") == [DONE] * 3
    exchange.chains.grow("arbitrum", 20)
    await exchange.settle()
    assert await exchange.store.at_risk() == {}
    assert await exchange.problems() == []


async def test_second_loss_never_shortens_the_wait(make: Make) -> None:
    exchange = make()
    for name in ("a", "b"):
        await pay(exchange, name, 100)
    await exchange.settle()
    first, second = exchange.chains.placed
    await exchange.processor.apply("ord_a", ev.DepositRemoved(first))
    until = await exchange.store.held_until("arbitrum", NOW)
    hasty = make(replace(LIMITS, hold_ms=HOUR))
    await hasty.processor.apply("ord_b", ev.DepositRemoved(second))
    assert await exchange.store.held_until("arbitrum", NOW) == until == NOW + 24 * HOUR


async def test_attempt_whose_deposit_was_spent_is_found(make: Make, database: Tables) -> None:
    exchange, ledger = make(), EvmPaymentLedger(database)
    await pay(exchange, "a", 100)
    call = EvmPaymentOrder("x402", EvmPurpose.AUTHORIZATION, "0xto", 1, "0xtoken", b"", 60_000)
    made = tuple(Attempt(txid, "aa", fee, 1, NOW) for fee, txid in enumerate(("tx a", "tx b"), 5))
    payment = EvmPayment("arbitrum", "0xhot", 0, call, made, NOW)
    assert await ledger.paid_out_attempt(payment) is None, "not spent yet"
    await exchange.settle()
    assert await ledger.paid_out_attempt(payment) == made[0]
    assert await ledger.paid_out_attempt(replace(payment, network="base")) is None


async def test_bound_of_all_networks_holds_beside_their_own(make: Make) -> None:
    exchange = make()
    for number in range(2):
        await pay(exchange, f"a{number}", 100)
        await pay(exchange, f"b{number}", 100, "base")
    await exchange.settle()
    assert sum((await exchange.store.at_risk()).values()) == 300 * USD
    assert (await status(exchange, "a0", "a1", "b0", "b1")).count(DONE) == 3


async def test_final_deposit_takes_nothing_of_the_bound(make: Make) -> None:
    exchange = make()
    await pay(exchange, "big", 5000)
    exchange.chains.grow("arbitrum", 19)
    await exchange.settle()
    assert await status(exchange, "big") == [DONE]
    assert await exchange.store.at_risk() == {}


async def test_without_limits_an_order_waits_for_finality(make: Make) -> None:
    exchange = make(FinalityLimits())
    await pay(exchange, "a", 10)
    exchange.chains.grow("arbitrum", 18)
    await exchange.settle()
    assert await status(exchange, "a") == [OrderStatus.DEPOSIT_DETECTED]
    assert exchange.watcher.progress.lagging == frozenset(), "it is on record"
    exchange.chains.grow("arbitrum")
    await exchange.settle()
    assert await status(exchange, "a") == [DONE]
    assert exchange.watcher.progress.lagging == frozenset()


async def test_xmr_counts_by_its_worth_and_never_before_its_price(make: Make) -> None:
    exchange = make()
    order = await exchange.open("x", X2U, "arbitrum", 10**12)
    exchange.chains.pay("monero", "x", order.terms.deposit_address, 10**12)
    exchange.chains.grow("monero")
    await exchange.settle()
    assert await status(exchange, "x") == [DONE]
    assert await exchange.store.at_risk() == {("monero", "counted"): 165 * USD}
    late = await exchange.open("late", X2U, "arbitrum", 10**11)
    key = exchange.chains.pay("monero", "late", late.terms.deposit_address, 10**11)
    seen = ev.DepositSeen(key, 10**11, None, late.terms.expires_at + 1)
    await exchange.processor.apply("ord_late", seen)
    exchange.chains.grow("monero")
    await exchange.settle()
    assert await status(exchange, "late") == [OrderStatus.DEPOSIT_DETECTED]
    with pytest.raises(ev.ImpossibleTransition):
        await exchange.processor.apply("ord_late", ev.DepositConfirmed(key, is_final=False))


async def test_payouts_planned_at_once_never_pass_the_bound(make: Make, database: Tables) -> None:
    """The check is in the transaction that plans the payout: no look before it decides."""
    exchange = make()
    others: list[PostgresqlDatabase] = []
    if isinstance(database, PostgresqlDatabase):
        others.append(await PostgresqlDatabase.open(database.url))
    replicas = [exchange, *(make(tables=each) for each in others)]
    keys = {}
    for number in range(8):
        order = await exchange.open(str(number), U2X, "arbitrum", 100 * USD)
        address = order.terms.deposit_address
        keys[number] = exchange.chains.pay("arbitrum", f"tx{number}", address, 100 * USD)
        seen = ev.DepositSeen(keys[number], 100 * USD, "sender", NOW)
        await exchange.processor.apply(order.order_id, seen)
    made = await asyncio.gather(
        *(
            replicas[number % len(replicas)].processor.apply(
                f"ord_{number}", ev.DepositConfirmed(key, is_final=False)
            )
            for number, key in keys.items()
        ),
        return_exceptions=True,
    )
    refused = [each for each in made if isinstance(each, BaseException)]
    assert len(refused) == 6
    assert all(isinstance(each, Unavailable) for each in refused)
    assert await exchange.store.at_risk() == {("arbitrum", "counted"): 200 * USD}
    planned = [row["n"] for row in await database.fetch("SELECT count(*) AS n FROM transfers")]
    assert planned == [2], "no payout is planned without its part of the sum"
    assert await exchange.problems() == []
    for each in others:
        await each.close()


async def test_after_a_loss_the_network_waits_for_finality(make: Make) -> None:
    exchange = make()
    await pay(exchange, "thief", 100)
    await exchange.settle()
    (key,) = exchange.chains.reorganise("arbitrum", 3)
    await exchange.settle()
    order = await exchange.order("thief")
    assert (order.status, order.error_message) == (DONE, OrderReason.DEPOSIT_LOST.text)
    (lost,) = await exchange.store.lost_deposits()
    assert (lost.network, lost.txid, lost.units) == ("arbitrum", key.txid, 100 * USD)
    assert await exchange.store.at_risk() == {("arbitrum", "lost"): 100 * USD}
    assert await exchange.problems() == []
    told = await loss_problem(exchange.store, NOW)
    assert told is not None
    assert f"such as {key.txid} of ord_thief on arbitrum; until 1970-01-02T00:16:40.000Z" in told
    # The hold is on record: also another process, started later, waits for finality there.
    later = make()
    await pay(later, "next", 50)
    await pay(later, "elsewhere", 50, "base")
    await later.settle()
    waits = OrderStatus.DEPOSIT_DETECTED
    assert await status(later, "next", "elsewhere") == [waits, DONE]
    seen = next(each for each in later.chains.placed if each.txid == "tx next")
    with pytest.raises(Unavailable):
        await later.processor.apply("ord_next", ev.DepositConfirmed(seen, is_final=False))
    later.clock.now = NOW + 24 * HOUR
    await later.settle()
    assert await status(later, "next") == [DONE]


async def test_losses_stay_in_the_bound_until_it_is_raised(make: Make) -> None:
    exchange = make()
    for number in range(6):
        await pay(exchange, str(number), 100)
        await exchange.settle()
        exchange.chains.reorganise("arbitrum", 1)
        await exchange.settle()
        exchange.clock.now += 25 * HOUR
    assert await exchange.store.at_risk() == {("arbitrum", "lost"): 200 * USD}
    raised = make(FinalityLimits(10**12, 10**12, {}, HOUR))
    await pay(raised, "more", 100)
    await raised.settle()
    assert await status(raised, "more") == [DONE]


async def test_dust_waits_for_finality(make: Make) -> None:
    exchange = make()
    order = await exchange.open("a", U2X, "arbitrum", 100 * USD)
    for name, units in (("dust", order.terms.refund_fee), ("more", order.terms.refund_fee + 1)):
        exchange.chains.pay("arbitrum", name, order.terms.deposit_address, units)
    await exchange.settle()
    assert await exchange.store.at_risk() == {("arbitrum", "counted"): order.terms.refund_fee + 1}


async def test_many_waiting_deposits_are_looked_at_in_turn(make: Make) -> None:
    """A pass judges DEPOSITS_PER_PASS deposits of an order, those that have to wait included."""
    exchange = make(FinalityLimits())
    order = await exchange.open("a", U2X, "arbitrum", 100 * USD)
    asked: list[DepositKey] = []

    async def is_final(_chains: TieredChains, key: DepositKey) -> bool:
        asked.append(key)
        return False

    for number in range(DEPOSITS_PER_PASS + 5):
        exchange.chains.pay("arbitrum", f"tx{number}", order.terms.deposit_address, USD)
    for item in exchange.chains.placed.values():
        item.block = exchange.chains.heights["arbitrum"]
    await exchange.settle()
    await exchange.settle()
    with patch.object(TieredChains, "is_final", is_final):
        await exchange.settle()
    assert len(asked) == DEPOSITS_PER_PASS


async def test_waiting_dust_keeps_no_other_deposit_waiting(make: Make) -> None:
    exchange = make()
    order = await exchange.open("a", U2X, "arbitrum", 100 * USD)
    block = exchange.chains.grow("arbitrum")
    for number in range(3 * DEPOSITS_PER_PASS):
        key = exchange.chains.pay("arbitrum", f"dust{number}", order.terms.deposit_address, 1)
        exchange.chains.placed[key].block = block
    exchange.chains.heights["arbitrum"] = block
    exchange.chains.pay("arbitrum", "tx", order.terms.deposit_address, 100 * USD)
    for _ in range(5):
        await exchange.settle()
    assert await status(exchange, "a") == [DONE]


async def test_returned_deposit_stays_at_risk_until_it_is_confirmed(make: Make) -> None:
    exchange = make()
    await pay(exchange, "a", 100)
    await exchange.settle()
    (key,) = exchange.chains.placed
    await exchange.processor.apply("ord_a", ev.DepositRemoved(key))
    await exchange.processor.apply("ord_a", ev.DepositSeen(key, 100 * USD, "sender", NOW))
    assert await exchange.store.at_risk() == {("arbitrum", "counted"): 100 * USD}
    assert await exchange.store.unfinal() == []
    await exchange.processor.apply("ord_a", ev.DepositConfirmed(key))
    assert await exchange.store.at_risk() == {}
    assert await exchange.problems() == []


async def test_written_off_loss_is_reported_no_more(make: Make, database: Tables) -> None:
    exchange = make()
    await pay(exchange, "a", 100)
    await exchange.settle()
    (key,) = exchange.chains.reorganise("arbitrum", 1)
    await exchange.settle()
    values = {"network": key.network, "txid": key.txid, "note": "ours", "at": NOW}
    names = ", ".join(values)
    sql = f"INSERT INTO annotated_transactions ({names}) VALUES (:network, :txid, :note, :at)"
    await database.write([Statement(sql, values)])
    assert await loss_problem(exchange.store, NOW) is None
    assert await exchange.store.at_risk() == {("arbitrum", "written_off"): 100 * USD}


async def test_page_says_how_long_a_deposit_without_room_waits(make: Make) -> None:
    exchange = make(FinalityLimits())
    await pay(exchange, "a", 100)
    await exchange.settle()

    async def depth(key: DepositKey) -> int:
        return exchange.chains.depth(key)

    def required(network: str, units: int) -> int:
        found = threshold_of(TIERS[network], units).depth
        assert isinstance(found, int)
        return found

    wallets = SimpleNamespace(confirmations=depth, required_confirmations=required)
    venue = cast("LocalVenue", SimpleNamespace(_wallets=wallets))
    order = await exchange.order("a")
    assert await LocalVenue.confirmations(venue, order) == (1, 20)
    exchange.chains.grow("arbitrum", 8)
    assert await LocalVenue.confirmations(venue, order) == (9, 20)


async def test_deposit_that_returns_is_no_loss(make: Make) -> None:
    exchange = make()
    await pay(exchange, "a", 100)
    await exchange.settle()
    (key,) = exchange.chains.reorganise("arbitrum", 1)
    await exchange.settle()
    assert await exchange.store.lost_deposits() != []
    exchange.chains.placed[key].block = exchange.chains.grow("arbitrum")
    await exchange.settle()
    assert (await exchange.order("a")).error_message is None
    assert await exchange.store.lost_deposits() == []
    assert await exchange.store.at_risk() == {("arbitrum", "counted"): 100 * USD}
    exchange.chains.grow("arbitrum", 20)
    await exchange.settle()
    assert await exchange.store.at_risk() == {}
    assert await exchange.problems() == []
    assert [t.transfer_id for t in (await exchange.order("a")).transfers] == ["ord_a/payout/1"]


async def test_deposit_gone_before_it_is_paid_out_is_no_loss(make: Make) -> None:
    exchange = make()
    await pay(exchange, "a", 100)
    await exchange.watcher.reconcile()
    assert (await exchange.order("a")).payout is not None
    exchange.chains.reorganise("arbitrum", 1)
    await exchange.settle()
    order = await exchange.order("a")
    assert (order.status, order.error_message) == (OrderStatus.AWAITING_DEPOSIT, None)
    assert await exchange.store.at_risk() == {}
    assert await exchange.store.lost_deposits() == []
    assert await exchange.store.held_until("arbitrum", NOW) is None


async def test_refund_of_an_early_deposit_is_at_risk_too(make: Make) -> None:
    exchange = make()
    await pay(exchange, "a", 100)
    await exchange.settle()
    order = await exchange.order("a")
    key = exchange.chains.pay("arbitrum", "extra", order.terms.deposit_address, 90 * USD)
    await exchange.settle()
    (refund,) = (await exchange.order("a")).refunds
    assert refund.units + refund.fee == 90 * USD
    assert await exchange.store.at_risk() == {("arbitrum", "counted"): 190 * USD}
    assert exchange.chains.reorganise("arbitrum", 1) == [key]
    await exchange.settle()
    assert (await exchange.store.at_risk())["arbitrum", "lost"] == 90 * USD
    assert await exchange.problems() == []


async def test_final_deposit_that_is_lost_is_reported_and_not_counted(make: Make) -> None:
    exchange = make()
    await pay(exchange, "a", 5000)
    exchange.chains.grow("arbitrum", 19)
    await exchange.settle()
    exchange.chains.reorganise("arbitrum", 30)
    await exchange.settle()
    assert [each.units for each in await exchange.store.lost_deposits()] == [5000 * USD]
    assert await exchange.store.at_risk() == {}
    assert await exchange.store.held_until("arbitrum", NOW) == NOW + 24 * HOUR
