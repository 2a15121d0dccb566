"""Reading the wallet's outputs: when it is done, and the balance if there are too many."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from rpcsvc.errors import Unavailable
from rpcsvc.health import Severity, texts_of
from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure, TimedOut, TooLarge
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.inventory import MoneroInventory
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import NodeInfo
from rpcsvc.settlement.onchain.monero.payments import MoneroFees, MoneroPayments
from rpcsvc.settlement.onchain.monero.records import (
    MoneroPayment,
    MoneroPaymentOrder,
    MoneroPaymentState,
    MoneroPurpose,
    WalletRecord,
)
from rpcsvc.settlement.onchain.monero.wallet_types import Balance, Output, SubaddressIndex
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.chain_options import monero_options
from tests.logs import captured
from tests.sandbox import ManualClock

XMR = 10**12
OPTIONS = monero_options(nettype="fakechain")


def output(number: int, units: int, minor: int = 0, *, unlocked: bool = True) -> Output:
    index = SubaddressIndex(0, minor)
    return Output(f"tx{number}", number, index, units, f"k{number}", 96, False, unlocked, False)


@dataclass
class Wallet:
    """``most``: the maximum number of outputs in an answer."""

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
    """A node with a fee of ``per_byte``."""

    per_byte = 1000

    async def fees(self) -> Any:
        return SimpleNamespace(per_byte=[self.per_byte] * 4)


@dataclass
class Rig:
    wallet: Wallet
    ledger: MoneroLedger
    fees: MoneroFees
    inventory: MoneroInventory
    node: Node
    clock: ManualClock
    logged: list[Any] = field(default_factory=list)

    def with_options(self, payments: Any = None, **options: Any) -> MoneroInventory:
        """Replace the inventory by another one of the same wallet."""
        connection, made = self.inventory._connection, replace(OPTIONS, **options)
        self.fees = MoneroFees(connection, made)
        self.inventory = MoneroInventory(connection, payments, self.fees, self.clock, made)
        return self.inventory

    async def poll(self, top: str = "a", height: int = 100) -> None:
        await self.fees.poll()
        await self.inventory.poll(info(top, height))


def info(top: str, height: int) -> NodeInfo:
    made: Any = SimpleNamespace(height=height, top_hash=top)
    return made  # type: ignore[no-any-return]


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    database = await SqliteDatabase.open(tmp_path)
    ledger = MoneroLedger(database)
    await ledger.adopt_wallet(WalletRecord("fakechain", "4primary", 0))
    wallet, clock, node = Wallet([output(1, XMR), output(2, 2 * XMR)]), ManualClock(), Node()
    any_node: Any = node
    any_wallet: Any = wallet
    connection = MoneroConnection(any_node, any_wallet, ledger, OPTIONS)
    payments = MoneroPayments(connection, ledger, clock, OPTIONS)
    inventory = MoneroInventory(connection, payments, payments.fees, clock, OPTIONS)
    made = Rig(wallet, ledger, payments.fees, inventory, node, clock)
    made.logged = captured(monkeypatch, "rpcsvc.settlement.onchain.monero.inventory").entries
    yield made
    await database.close()


async def test_outputs_are_relisted_after_a_block_or_a_payment(rig: Rig) -> None:
    payment = MoneroPayment(
        "tr_1", MoneroPurpose.TRANSFER, "4x", XMR, 5, "txid", "00", "meta", "key", ("k1",), 1000,
        relayed_at=1001, height=99,
    )  # fmt: skip
    for _ in range(3):
        await rig.poll()
    assert rig.wallet.listed == 1
    await rig.poll("b", 101)
    assert rig.wallet.listed == 2
    await rig.ledger.add_payment(replace(payment, relayed_at=None, height=None))
    await rig.poll("b", 101)
    for state in (
        MoneroPaymentState.RELAYING,
        MoneroPaymentState.PUBLISHED,
        MoneroPaymentState.SETTLED,
    ):
        before = rig.wallet.listed
        await rig.ledger.put_payment(replace(payment, state=state))
        await rig.poll("b", 101)
        await rig.poll("b", 101)
        assert rig.wallet.listed == before + 1, state


async def test_outputs_are_relisted_after_a_while_or_a_clock_change(
    rig: Rig,
) -> None:
    await rig.poll()
    rig.clock.now += 60_000
    await rig.poll()
    rig.clock.now -= 3_600_000
    await rig.poll()
    assert rig.wallet.listed == 3


async def test_fee_is_refreshed_though_nothing_else_changed(rig: Rig) -> None:
    await rig.poll()
    before, rig.node.per_byte = rig.inventory.available.max_now, 2000
    await rig.poll()
    assert rig.inventory.available.max_now == 3 * XMR - rig.fees.typical() < before
    assert rig.wallet.listed == 1


async def test_unlistable_outputs_leave_the_balance_known(
    rig: Rig,
) -> None:
    """With dust: sums are the wallet's balance; only listed outputs count as payable now."""
    dust = [output(n, 1, minor=7, unlocked=n % 2 == 0) for n in range(1000, 2000)]
    rig.wallet.held = [
        output(1, XMR), output(2, 2 * XMR), output(3, 4 * XMR, unlocked=False), *dust,
        output(4, 8 * XMR, minor=8),
    ]  # fmt: skip
    for block in ("a", "b"):
        await rig.poll(block)
    held = rig.inventory.available
    assert (held.unlocked, held.locked) == (11 * XMR + 500, 4 * XMR + 500)
    assert held.max_now == 3 * XMR - rig.fees.typical()
    assert (held.outputs, held.seconds_to_unlock) == (2, 1200)
    assert "more outputs than one answer can list" in (reported(rig) or "")
    assert [item["event"] for item in rig.logged] == ["monero_outputs_exceeded"]
    rig.wallet.most = 2000
    await rig.poll("c")
    assert reported(rig) is None
    assert rig.inventory.available.unlocked == 11 * XMR + 500
    assert rig.inventory.available.max_now > 10 * XMR


async def test_nothing_is_available_before_the_first_poll(rig: Rig) -> None:
    assert not rig.inventory.is_known
    for ask in (rig.fees.typical, lambda: rig.inventory.available):
        with pytest.raises(Unavailable, match="not known yet"):
            ask()
    await rig.poll()
    assert rig.inventory.is_known


@pytest.mark.parametrize(("fees", "per_byte"), [([10, 20, 30, 40], 20), ([7], 7)])
async def test_fee_is_the_dearest_with_a_margin_and_rounded_up(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, fees: list[int], per_byte: int
) -> None:
    async def reported() -> Any:
        return SimpleNamespace(per_byte=fees)

    monkeypatch.setattr(rig.node, "fees", reported)
    rig.with_options(typical_weight=1001, fee_margin_percent=25)
    await rig.fees.poll()
    assert rig.fees.typical() == -(-per_byte * 1001 * 125 // 100)


async def test_spent_and_frozen_outputs_are_not_available(rig: Rig) -> None:
    rig.wallet.held += [
        dataclasses.replace(output(3, 4 * XMR), spent=True),
        dataclasses.replace(output(4, 8 * XMR), frozen=True),
        dataclasses.replace(output(5, 16 * XMR), unlocked=False),
    ]
    await rig.poll()
    held = rig.inventory.available
    assert (held.unlocked, held.locked, held.outputs) == (3 * XMR, 16 * XMR, 2)
    assert held.max_now == 3 * XMR - rig.fees.typical()


async def test_less_than_a_fee_can_pay_nothing(rig: Rig) -> None:
    rig.wallet.held = [output(1, 5)]
    await rig.poll()
    assert rig.inventory.available.max_now == 0
    rig.wallet.held = []
    await rig.poll("b")
    held = rig.inventory.available
    assert (held.unlocked, held.max_now, held.seconds_to_unlock) == (0, 0, 0)


@pytest.mark.parametrize(
    ("heights", "blocks"),
    [([100], 10), ([95], 5), ([91], 1), ([90, 20], 1), ([0], 10), ([20, 97, 93], 7)],
)
async def test_unlock_time_of_the_last_output_is_stated(
    rig: Rig, heights: list[int], blocks: int
) -> None:
    """An output of block 0 is not mined yet; an old one that is locked has an unlock time."""
    rig.wallet.held = [
        dataclasses.replace(output(n, XMR, unlocked=False), height=at)
        for n, at in enumerate(heights)
    ]
    rig.wallet.held.append(output(9, XMR))
    await rig.poll(height=100)
    assert rig.inventory.available.seconds_to_unlock == blocks * 120


class Payments:
    """Records payment orders. ``busy``: another payment is under way.

    ``failure``: what the wallet does instead of signing.
    """

    failure: Exception | None = None

    def __init__(self, *, busy: bool = False, unfinished: bool = False) -> None:
        self.orders: list[MoneroPaymentOrder] = []
        self.busy, self.unfinished = busy, unfinished
        self.finished = 0

    async def under_way(self) -> frozenset[object]:
        return frozenset()

    async def is_busy(self) -> bool:
        return self.busy

    async def finish_upkeep(self) -> bool:
        self.finished += 1
        return self.unfinished

    async def prepare_upkeep(self, order: MoneroPaymentOrder) -> Any:
        self.orders.append(order)
        if self.failure is not None:
            raise self.failure
        return SimpleNamespace(txid="txid", fee=1)


async def test_dust_below_its_fee_blocks_no_consolidation(
    rig: Rig,
) -> None:
    made = Payments()
    rig.with_options(made, outputs_target=1, dusty_outputs=10)
    rig.wallet.held = [output(n, 1, minor=7) for n in range(100, 200)]
    await rig.poll("a")
    assert not await rig.inventory.keep_up(), "nothing but dust"
    rig.wallet.held += [output(n, XMR // 10, minor=n) for n in range(11, 31)]
    await rig.poll("b")
    assert await rig.inventory.keep_up()
    (order,) = made.orders
    assert order.from_indices == tuple(range(11, 31))
    assert XMR < order.units < 2 * XMR


TARGET = {"outputs_target": 8, "output_units": XMR, "dusty_outputs": 3}


async def orders_of(rig: Rig, *held: Output, **options: Any) -> list[MoneroPaymentOrder]:
    """The payments to itself that a wallet with these outputs makes."""
    made = Payments()
    rig.with_options(made, **(TARGET | options))
    rig.wallet.held = list(held)
    await rig.poll(f"top of {len(held)}")
    assert await rig.inventory.keep_up() is bool(made.orders)
    assert made.finished == 1 + len(made.orders), "what was signed is handed over at once"
    return made.orders


@pytest.mark.parametrize(
    ("units", "large", "options", "parts"),
    [
        (100, 0, {}, 7),  # the missing ones, beside the change
        (100, 4, {}, 3),
        (100, 5, {}, 0),  # a few missing are not worth a fee
        (100, 0, {"outputs_target": 60}, 14),  # the most in one transaction
        (5, 0, {}, 3),  # with a fee to pay, none under the configured size
        (2, 0, {}, 0),
        (100, 0, {"outputs_target": 0}, 0),
    ],
)
async def test_the_largest_output_is_cut_into_what_is_missing(
    rig: Rig, units: int, large: int, options: dict[str, Any], parts: int
) -> None:
    """Locked outputs count: they unlock by themselves."""
    locked = [output(100 + n, XMR, unlocked=False) for n in range(large)]
    found = await orders_of(rig, output(1, units * XMR, minor=5), *locked, **options)
    assert [item.parts for item in found] == ([parts] if parts else [])
    for order in found:
        share, rest = divmod(order.units, order.parts)
        assert (rest, share >= XMR, order.from_indices) == (0, True, (5,))
        left = units * XMR - order.units
        assert share <= left <= share + 3 * rig.fees.typical(), "what is left is a part, too"


async def test_what_can_not_be_spent_is_not_cut(rig: Rig) -> None:
    assert await orders_of(rig, output(1, 100 * XMR, unlocked=False)) == []
    assert await orders_of(rig) == []


async def test_small_outputs_are_put_together_once_there_are_too_many(rig: Rig) -> None:
    small = [output(n, XMR // 10 + n, minor=n) for n in range(1, 5)]
    assert await orders_of(rig, *small[:3]) == []
    (order,) = await orders_of(rig, *small)
    assert (order.parts, order.from_indices) == (1, (1, 2, 3, 4))
    total = sum(item.amount for item in small)
    assert total // 2 < order.units < total
    assert order.purpose is MoneroPurpose.UPKEEP
    assert await orders_of(rig, *small, outputs_target=0) == [], "it is left as it is"


async def test_consolidation_takes_one_transaction_of_the_smallest(
    rig: Rig,
) -> None:
    small = [output(n, XMR // 10 + n, minor=n) for n in range(60, 0, -1)]
    (order,) = await orders_of(rig, *small)
    assert order.from_indices == tuple(range(1, 41))
    assert order.units < sum(XMR // 10 + n for n in range(1, 41))


async def test_where_something_large_is_nothing_is_put_together(rig: Rig) -> None:
    """The wallet could spend a large output instead of the small ones."""
    small = [output(n, XMR // 10, minor=7) for n in range(1, 5)]
    large = [output(100 + n, XMR, minor=7) for n in range(8)]
    assert await orders_of(rig, *small, *large) == []


@pytest.mark.parametrize("state", [{"busy": True}, {"unfinished": True}])
async def test_nothing_is_made_while_something_is_under_way(
    rig: Rig, state: dict[str, bool]
) -> None:
    made = Payments(**state)
    rig.with_options(made, **TARGET)
    rig.wallet.held = [output(1, 100 * XMR)]
    await rig.poll()
    assert not await rig.inventory.keep_up()
    assert made.orders == []


# --- what is refused -----------------------------------------------------------------------------


async def test_nothing_is_cut_while_what_was_sent_is_unknown(rig: Rig) -> None:
    """Its inputs would be those of a payment that is on no record, and hide it."""
    made, waits = Payments(), [Unavailable("not compared yet")]

    async def compared() -> None:
        if waits:
            raise waits.pop()

    rig.with_options(made, **TARGET)
    rig.inventory.hold(compared)
    rig.wallet.held = [output(1, 100 * XMR, minor=5)]
    await rig.poll("a")
    with pytest.raises(Unavailable):
        await rig.inventory.keep_up()
    assert made.orders == []
    assert await rig.inventory.keep_up()


REFUSAL = Unavailable("The wallet can't make this payment just now.")


async def upkeep_of(rig: Rig, **options: Any) -> Payments:
    """Payments of a wallet whose four small outputs are to be put together."""
    made = Payments()
    rig.with_options(made, **(TARGET | options))
    rig.wallet.held = [output(n, XMR // 10, minor=n) for n in range(1, 5)]
    await rig.poll()
    return made


def reported(rig: Rig) -> str | None:
    """The note for the operator, of which there is one at most."""
    texts = texts_of(rig.inventory.conditions(), Severity.NOTE)
    assert len(texts) <= 1
    return texts[0] if texts else None


async def test_upkeep_that_would_cost_too_much_is_never_signed(rig: Rig) -> None:
    """The wallet would work on it for seconds, each time."""
    made = await upkeep_of(rig, highest_fee=3_489_999)
    for _ in range(3):
        await rig.poll()
        assert not await rig.inventory.keep_up()
    assert made.orders == []
    assert reported(rig) == (
        "joining 4 outputs of the XMR wallet would take a fee of about 0.00000349 XMR, and the"
        " service gives 0.000003489999 at most: wait, it is done once the network's fee has fallen"
    )
    assert [item["event"] for item in rig.logged] == ["monero_upkeep_postponed"]
    rig.node.per_byte = 999
    await rig.poll()
    assert await rig.inventory.keep_up()
    assert len(made.orders) == 1
    assert reported(rig) is None


async def test_a_split_is_estimated_by_its_outputs(rig: Rig) -> None:
    made = Payments()
    rig.with_options(made, **TARGET, highest_fee=(1510 + 6 * 355) * 1000 - 1)
    rig.wallet.held = [output(1, 100 * XMR)]
    await rig.poll()
    assert not await rig.inventory.keep_up()
    assert made.orders == []
    assert "cutting an output of the XMR wallet into 8" in (reported(rig) or "")


@pytest.mark.parametrize("failure", [REFUSAL, TimedOut("wallet", "transfer", "no answer")])
async def test_refused_upkeep_rests_for_twice_as_long_each_time(
    rig: Rig, failure: Exception
) -> None:
    made = await upkeep_of(rig)
    made.failure = failure
    tries = []
    for second in range(0, 4 * 3600, 2):
        rig.clock.now += 2000
        before = len(made.orders)
        with suppress(Unavailable, RpcFailure):
            assert not await rig.inventory.keep_up()
        if len(made.orders) > before:
            tries.append(second // 60)
    assert tries == [0, 1, 3, 7, 15, 31, 63, 123, 183], "minutes; an hour is the longest"
    assert "joining 4 outputs of the XMR wallet was refused (" in (reported(rig) or "")
    assert "is tried again at 20" in (reported(rig) or "")


@pytest.mark.parametrize("change", ["fee", "outputs", "clock"])
async def test_refused_upkeep_is_tried_once_what_decided_has_changed(rig: Rig, change: str) -> None:
    made = await upkeep_of(rig)
    made.failure = REFUSAL
    with pytest.raises(Unavailable):
        await rig.inventory.keep_up()
    assert not await rig.inventory.keep_up()
    if change == "fee":
        rig.node.per_byte = 1001
    elif change == "outputs":
        rig.wallet.held.append(output(5, XMR // 10, minor=5))
    else:
        rig.clock.now -= 3_600_000
    made.failure = None
    await rig.poll("b")
    assert await rig.inventory.keep_up()
    assert len(made.orders) == 2
    assert reported(rig) is None


async def test_upkeep_that_is_not_needed_any_more_is_not_reported(rig: Rig) -> None:
    made = await upkeep_of(rig)
    made.failure = REFUSAL
    with pytest.raises(Unavailable):
        await rig.inventory.keep_up()
    rig.wallet.held = [output(1, XMR // 10)]
    await rig.poll("b")
    assert not await rig.inventory.keep_up()
    assert reported(rig) is None


async def test_payments_that_all_cost_too_much_are_reported(rig: Rig) -> None:
    rig.with_options(highest_fee=1_509_999)
    made = rig.fees
    assert made.too_dear() is None, "before the fee is known"
    await made.poll()
    assert made.too_dear() == (
        "nothing is paid: the Monero network may take 0.00000151 XMR for a payment, and the"
        " service gives 0.000001509999 at most: wait until the network's fee falls"
    )
    with pytest.raises(Unavailable, match="fee is too high"):
        made.require_affordable()
    made.require_affordable(2)  # each of two transfers adds as much as it may cost
    rig.node.per_byte = 999
    await made.poll()
    assert made.too_dear() is None
    made.require_affordable()
