"""The look at the wallet's outputs: when it is made, and what there is when they are too many."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rpcsvc.settlement.onchain.daemon_rpc import TooLarge
from rpcsvc.settlement.onchain.monero.inventory import MoneroInventory
from rpcsvc.settlement.onchain.monero.ledger import (
    MoneroOptions,
    Payment,
    PaymentOrder,
    PaymentState,
    Purpose,
    WalletRecord,
)
from rpcsvc.settlement.onchain.monero.link import MoneroLink
from rpcsvc.settlement.onchain.monero.monerod import NodeInfo
from rpcsvc.settlement.onchain.monero.payments import MoneroPayments
from rpcsvc.settlement.onchain.monero.wallet_types import Balance, Output, SubaddressIndex
from rpcsvc.store.onchain_monero import SqliteMoneroLedger
from rpcsvc.store.sqlite import Database
from tests.logs import captured

XMR = 10**12
OPTIONS = MoneroOptions(nettype="fakechain")


def output(number: int, units: int, minor: int = 0, *, unlocked: bool = True) -> Output:
    index = SubaddressIndex(0, minor)
    return Output(f"tx{number}", number, index, units, f"k{number}", 96, False, unlocked, False)


@dataclass
class Wallet:
    """``most``: so many outputs are as much as an answer may hold."""

    held: list[Output]
    most: int = 1000
    listed: int = 0

    async def outputs(self, indices: Sequence[int] = ()) -> list[Output]:
        self.listed += not indices
        found = [item for item in self.held if not indices or item.index.minor in indices]
        if len(found) > self.most:
            raise TooLarge("wallet", "incoming_transfers", "the answer has over 33554432 bytes")
        return found

    async def balance(self, indices: Sequence[int]) -> Balance:
        assert indices, "without any, the wallet takes seconds for this"
        total = sum(item.amount for item in self.held)
        unlocked = sum(item.amount for item in self.held if item.unlocked)
        return Balance(total, unlocked, 1_000_000, ())


class Node:
    """Whose fee is ``per_byte``."""

    per_byte = 1000

    async def fees(self) -> Any:
        return SimpleNamespace(per_byte=[self.per_byte] * 4)


@dataclass
class Clock:
    now: int = 1_700_000_000_000

    def now_ms(self) -> int:
        return self.now


@dataclass
class Desk:
    wallet: Wallet
    ledger: SqliteMoneroLedger
    inventory: MoneroInventory
    node: Node
    clock: Clock
    logged: list[Any] = field(default_factory=list)

    async def look(self, top: str = "a", height: int = 100) -> None:
        await self.inventory.refresh_fee()
        await self.inventory.look(info(top, height))


def info(top: str, height: int) -> NodeInfo:
    made: Any = SimpleNamespace(height=height, top_hash=top)
    return made  # type: ignore[no-any-return]


@pytest.fixture
async def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Desk]:
    database = await Database.open(tmp_path)
    ledger = SqliteMoneroLedger(database)
    await ledger.adopt_wallet(WalletRecord("fakechain", "4primary", 0))
    wallet, clock, node = Wallet([output(1, XMR), output(2, 2 * XMR)]), Clock(), Node()
    any_node: Any = node
    any_wallet: Any = wallet
    link = MoneroLink(any_node, any_wallet, ledger, OPTIONS)
    payments = MoneroPayments(link, ledger, clock, OPTIONS)
    made = Desk(wallet, ledger, MoneroInventory(link, payments, clock, OPTIONS), node, clock)
    made.logged = captured(monkeypatch, "rpcsvc.settlement.onchain.monero.inventory").entries
    yield made
    await database.close()


async def test_outputs_are_listed_again_once_there_is_a_block_or_a_payment(desk: Desk) -> None:
    payment = Payment(
        "tr_1", Purpose.TRANSFER, "4x", XMR, 5, "txid", "raw", "meta", "key", ("k1",), 1000,
        relayed_at=1001, height=99,
    )  # fmt: skip
    for _ in range(3):
        await desk.look()
    assert desk.wallet.listed == 1
    await desk.look("b", 101)
    assert desk.wallet.listed == 2
    await desk.ledger.add_payment(replace(payment, relayed_at=None, height=None))
    await desk.look("b", 101)
    for state in (PaymentState.RELAYING, PaymentState.PUBLISHED, PaymentState.SETTLED):
        before = desk.wallet.listed
        await desk.ledger.put_payment(replace(payment, state=state))
        await desk.look("b", 101)
        await desk.look("b", 101)
        assert desk.wallet.listed == before + 1, state


async def test_outputs_are_listed_again_after_a_while_and_when_the_clock_was_set(
    desk: Desk,
) -> None:
    await desk.look()
    desk.clock.now += 60_000
    await desk.look()
    desk.clock.now -= 3_600_000
    await desk.look()
    assert desk.wallet.listed == 3


async def test_the_fee_is_of_the_moment_though_nothing_else_has_changed(desk: Desk) -> None:
    await desk.look()
    before, desk.node.per_byte = desk.inventory.available.max_now, 2000
    await desk.look()
    assert desk.inventory.available.max_now == 3 * XMR - desk.inventory.fee() < before
    assert desk.wallet.listed == 1


async def test_more_outputs_than_can_be_listed_leave_what_the_wallet_holds_known(
    desk: Desk,
) -> None:
    """Dust at deposit addresses: the sums are the balance's, what is promised is what was seen."""
    dust = [output(n, 1, minor=7, unlocked=n % 2 == 0) for n in range(1000, 2000)]
    desk.wallet.held = [
        output(1, XMR), output(2, 2 * XMR), output(3, 4 * XMR, unlocked=False), *dust,
        output(4, 8 * XMR, minor=8),
    ]  # fmt: skip
    for block in ("a", "b"):
        await desk.look(block)
    held = desk.inventory.available
    assert (held.unlocked, held.locked) == (11 * XMR + 500, 4 * XMR + 500)
    assert held.max_now == 3 * XMR - desk.inventory.fee()
    assert (held.outputs, held.seconds_to_unlock) == (2, 1200)
    assert "more outputs than one answer can list" in str(desk.inventory.problem)
    assert [item["event"] for item in desk.logged] == ["monero_too_many_outputs"]
    desk.wallet.most = 2000
    await desk.look("c")
    assert desk.inventory.problem is None
    assert desk.inventory.available.unlocked == 11 * XMR + 500
    assert desk.inventory.available.max_now > 10 * XMR


class Payments:
    """Notes what is to be paid."""

    def __init__(self) -> None:
        self.orders: list[PaymentOrder] = []

    def under_way(self) -> frozenset[object]:
        return frozenset()

    def is_busy(self) -> bool:
        return False

    async def finish_upkeep(self) -> bool:
        return False

    async def prepare_upkeep(self, order: PaymentOrder) -> Any:
        self.orders.append(order)
        return SimpleNamespace(txid="txid", fee=1)


async def test_dust_that_is_not_worth_its_fee_keeps_nothing_from_being_put_together(
    desk: Desk,
) -> None:
    made = Payments()
    payments: Any = made
    options = replace(OPTIONS, outputs_target=1, dusty_outputs=10)
    link = desk.inventory._link
    desk.inventory = MoneroInventory(link, payments, desk.clock, options)
    desk.wallet.held = [output(n, 1, minor=7) for n in range(100, 200)]
    await desk.look("a")
    assert not await desk.inventory.keep_up(), "nothing but dust"
    desk.wallet.held += [output(n, XMR // 10, minor=n) for n in range(11, 31)]
    await desk.look("b")
    assert await desk.inventory.keep_up()
    (order,) = made.orders
    assert order.from_indices == tuple(range(11, 31))
    assert XMR < order.units < 2 * XMR
