"""Several transfers in one payment: either all are committed as prepared, or none.

The store is real. The engine is a fake that records its calls, like one that pays several transfers
at once.
"""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.events import AdvanceTransfer
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.order import DepositKey, Order, Transfer, TransferState
from rpcsvc.domain.pricing import Direction
from rpcsvc.errors import Unavailable
from rpcsvc.orders.deposits import ScanProgress
from rpcsvc.orders.inventory import SimulatedInventory
from rpcsvc.orders.payouts import AwaitsBlock, Payouts
from rpcsvc.orders.ports.wallets import Outcome, PreparedTransfer, Record, Verdict
from rpcsvc.orders.processor import OrderProcessor, Quarantine
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from rpcsvc.store.changes import StatusView
from rpcsvc.store.leases import SETTLER, Lease
from rpcsvc.store.orders import OrderStore
from tests.unit.orders import NOW, terms


@dataclass
class At:
    """A clock that the test moves."""

    now: int = NOW

    def now_ms(self) -> int:
        return self.now


@dataclass
class FakeWallets:
    """Signs for a transfer and its companions. ``meanwhile`` is called during signing.

    ``apart``: each in a transaction of its own. ``refused``: companions that are not signed.
    ``single``: those whose transaction takes no companions.
    """

    most: int = 15
    apart: bool = False
    refused: set[str] = field(default_factory=set)
    single: set[str] = field(default_factory=set)
    asked: list[list[str]] = field(default_factory=list)
    published: list[str] = field(default_factory=list)
    meanwhile: Any = None
    not_seen: set[str] = field(default_factory=set)
    down: set[str] = field(default_factory=set)

    async def confirmations(self, key: DepositKey) -> int:
        if key.txid in self.down:
            raise Unavailable("no node serves it")
        return 0 if key.txid in self.not_seen else 10

    def is_paused(self) -> bool:
        return False

    def signed_together(self, _network: str) -> int:
        return self.most

    def carried_at_once(self, _network: str) -> int:
        return 1

    async def prepare(
        self, transfer: Transfer, companions: Sequence[Transfer], record: Record, _leaves: object
    ) -> list[Transfer]:
        ids = [transfer.transfer_id, *(item.transfer_id for item in companions)]
        self.asked.append(ids)
        if self.meanwhile is not None:
            await self.meanwhile()
        ids = [name for name in ids if name not in self.refused]
        ids = ids[:1] if transfer.transfer_id in self.single else ids
        if self.apart:
            made = [PreparedTransfer(f"tx of {name}", (name,)) for name in ids]
        else:
            made = [PreparedTransfer(f"{len(self.asked):064x}", tuple(ids))]
        await record(made, None)
        return [item for item in companions if item.transfer_id in self.refused]

    async def look_up(self, _transfer: Transfer) -> Verdict:
        return Verdict(Outcome.ABSENT)

    async def publish(self, transfer: Transfer) -> Verdict:
        self.published.append(transfer.transfer_id)
        return Verdict(Outcome.PENDING)


@dataclass
class PayoutDriver:
    """A store with orders whose payouts are due, and the Payouts that send them."""

    store: OrderStore
    processor: OrderProcessor
    fake: FakeWallets
    payouts: Payouts
    clock: At
    quarantine: Quarantine

    async def due(self, name: str, **change: Any) -> str:
        """Make an order with a planned payout of XMR; the payout's id."""
        order = open_order(
            replace(
                terms(Direction.USDC_TO_XMR), order_id=name, session_id=name,
                deposit_address=f"deposit {name}", to_address=f"pay {name}", **change,
            )
        )  # fmt: skip
        await self.processor.open(order, None, None)
        key = DepositKey(order.terms.deposit_network, f"tx {name}", 0)
        seen = ev.DepositSeen(key, order.terms.deposit_amount, "sender", NOW)
        await self.processor.apply(name, seen)
        order = await self.processor.apply(name, ev.DepositConfirmed(key))
        return order.transfers[0].transfer_id

    async def pay(self, transfer_id: str) -> bool | AwaitsBlock:
        order_id = transfer_id.partition("/")[0]
        return await self.payouts.advance(order_id, AdvanceTransfer(transfer_id))

    async def states(self) -> dict[str, str]:
        found = [await self.order(name) for name in ("a", "b", "c")]
        return {order.order_id: order.transfers[0].state.value for order in found if order}

    async def order(self, name: str) -> Order | None:
        return await self.store.order(name)

    async def take_back(self, name: str) -> None:
        """Remove the deposit before its payout is signed."""
        order = await self.order(name)
        assert order is not None
        await self.processor.apply(name, ev.DepositRemoved(order.deposits[0].key))


@pytest.fixture
async def driver(tmp_path: Path) -> AsyncIterator[PayoutDriver]:
    database = await SqliteDatabase.open(tmp_path)
    store = OrderStore(database, lambda: "key")
    clock = At()
    processor = OrderProcessor(store, clock, lambda _order: StatusView(b"{}", None))
    fake = FakeWallets()
    quarantine = Quarantine()
    payouts = Payouts(
        store, cast("Any", fake), SimulatedInventory(), processor, clock, quarantine,
        ScanProgress((), clock), Lease(SETTLER, 1),
    )  # fmt: skip
    yield PayoutDriver(store, processor, fake, payouts, clock, quarantine)
    await database.close()


async def test_transfers_due_together_share_signing_and_commit(
    driver: PayoutDriver,
) -> None:
    first, second, third = [await driver.due(name) for name in "abc"]
    await driver.pay(second)
    assert driver.fake.asked == [[second, first, third]]
    assert driver.fake.published == [second]
    assert await driver.states() == {"a": "prepared", "b": "published", "c": "prepared"}
    await driver.pay(first)
    assert len(driver.fake.asked) == 1, "it was signed already"
    assert (await driver.states())["a"] == "published"


async def test_bytes_of_a_payment_are_recorded_once(driver: PayoutDriver) -> None:
    first, *_ = [await driver.due(name) for name in "abc"]
    await driver.pay(first)
    found = [order.transfers[0] for name in "abc" if (order := await driver.order(name))]
    assert {item.txid for item in found} == {f"{1:064x}"}


async def test_transactions_signed_together_are_published_apart(driver: PayoutDriver) -> None:
    first, *_ = [await driver.due(name) for name in "abc"]
    driver.fake.apart = True
    await driver.pay(first)
    assert await driver.states() == {"a": "published", "b": "prepared", "c": "prepared"}


async def test_companion_that_is_not_signed_takes_no_place(
    driver: PayoutDriver,
) -> None:
    first, second, third, fourth = [await driver.due(name) for name in "abcd"]
    driver.fake.most, driver.fake.refused = 2, {second}
    await driver.pay(first)
    await driver.pay(third)
    assert driver.fake.asked == [[first, second], [third, fourth]]
    fifth = await driver.due("e")
    driver.fake.refused.clear()
    driver.clock.now += 60_001
    await driver.pay(fifth)
    assert driver.fake.asked[2:] == [[fifth, second]]


async def test_companions_that_were_not_tried_still_go_out_together(
    driver: PayoutDriver,
) -> None:
    """As after a payout to an integrated address, which shares its transaction with nobody."""
    first, second, third = [await driver.due(name) for name in "abc"]
    driver.fake.single = {first}
    await driver.pay(first)
    await driver.pay(second)
    assert driver.fake.asked[1:] == [[second, third]]


async def test_companions_of_a_failed_batch_go_on_in_their_own_turns(
    driver: PayoutDriver,
) -> None:
    first, second, third = [await driver.due(name) for name in "abc"]
    driver.fake.meanwhile = AsyncMock(side_effect=ZeroDivisionError)
    driver.fake.most = 2
    assert await driver.pay(first) is False
    driver.fake.meanwhile = None
    await driver.pay(third)
    await driver.pay(second)
    await driver.pay(first)
    assert driver.fake.asked == [[first, second], [third], [second], [first]]
    assert await driver.states() == dict.fromkeys("abc", "published")


async def test_no_more_go_along_than_a_payment_takes(driver: PayoutDriver) -> None:
    first, second, _ = [await driver.due(name) for name in "abc"]
    driver.fake.most = 2
    await driver.pay(first)
    assert driver.fake.asked == [[first, second]]
    assert await driver.states() == {"a": "published", "b": "prepared", "c": "planned"}


async def test_engine_with_single_payments_is_given_no_companions(
    driver: PayoutDriver,
) -> None:
    first, _ = [await driver.due(name) for name in "ab"]
    driver.fake.most = 1
    await driver.pay(first)
    assert driver.fake.asked == [[first]]


async def test_another_network_is_another_payment(driver: PayoutDriver) -> None:
    first = await driver.due("a")
    await driver.due("b", payout_network="elsewhere")
    await driver.pay(first)
    assert driver.fake.asked == [[first]]


async def test_transfer_cancelled_during_signing_stops_the_batch(
    driver: PayoutDriver,
) -> None:
    first, second = [await driver.due(name) for name in "ab"]
    driver.fake.meanwhile = lambda: driver.take_back("b")
    assert await driver.pay(first) is False
    assert driver.fake.published == []
    assert await driver.states() == {"a": "planned", "b": "cancelled"}
    driver.fake.meanwhile = None
    await driver.pay(first)
    assert driver.fake.asked == [[first, second], [first]]
    assert await driver.states() == {"a": "published", "b": "cancelled"}


async def test_transfer_cancelled_during_signing_leaves_nothing_to_do(
    driver: PayoutDriver,
) -> None:
    first = await driver.due("a")
    driver.fake.meanwhile = lambda: driver.take_back("a")
    assert await driver.pay(first) is True
    assert await driver.states() == {"a": "cancelled"}
    assert await driver.store.pending_effects() == []


@pytest.mark.parametrize("why", ["not_seen", "down", "quarantine"])
async def test_companion_changed_while_signing_is_not_recorded(
    driver: PayoutDriver, why: str
) -> None:
    """A reorganisation may come at any moment."""
    first, _ = [await driver.due(name) for name in "ab"]

    async def changes() -> None:
        if why == "quarantine":
            with driver.quarantine.isolate("b", "a step"):
                raise ZeroDivisionError
        else:
            getattr(driver.fake, why).add("tx b")

    driver.fake.meanwhile = changes
    assert await driver.pay(first) is False
    assert driver.fake.published == []
    assert await driver.states() == {"a": "planned", "b": "planned"}

    driver.fake.meanwhile = None
    await driver.pay(first)
    assert driver.fake.asked[1:] == [[first]]
    assert await driver.states() == {"a": "published", "b": "planned"}


async def test_what_is_about_to_be_refunded_is_not_signed_any_more(driver: PayoutDriver) -> None:
    """Payouts were paused for longer than the price holds."""
    first, second = [await driver.due(name) for name in "ab"]
    driver.clock.now += terms(Direction.USDC_TO_XMR).timeouts.prepare
    third = await driver.due("c")
    for transfer_id in (first, second):
        assert await driver.pay(transfer_id) is False
    assert driver.fake.asked == []
    await driver.pay(third)
    assert driver.fake.asked == [[third]]


async def test_quarantined_order_joins_no_batch_until_it_is_mended(
    driver: PayoutDriver,
) -> None:
    """A deposit of it may be gone without being recorded so."""
    first, second, third = [await driver.due(name) for name in "abc"]
    with driver.quarantine.isolate("b", "a step"):
        raise ZeroDivisionError
    assert await driver.pay(second) is False
    assert driver.fake.asked == []
    await driver.pay(first)
    assert driver.fake.asked == [[first, third]]
    assert await driver.states() == {"a": "published", "b": "planned", "c": "prepared"}

    with driver.quarantine.isolate("b", "a step"):
        pass
    await driver.pay(second)
    assert (await driver.states())["b"] == "published"


@pytest.mark.parametrize("why", ["not_seen", "down"])
async def test_nothing_is_signed_before_its_deposits_are_seen_again(
    driver: PayoutDriver, why: str
) -> None:
    """They may have been reorged out while the service was down."""
    first, second, third = [await driver.due(name) for name in "abc"]
    unseen: set[str] = getattr(driver.fake, why)
    unseen.add("tx b")
    assert await driver.pay(second) is False
    assert driver.fake.asked == []
    await driver.pay(first)
    assert driver.fake.asked == [[first, third]]

    unseen.clear()
    await driver.pay(second)
    assert await driver.states() == {"a": "published", "b": "published", "c": "prepared"}


async def test_signed_payment_finishes_before_its_deposits_are_seen(
    driver: PayoutDriver,
) -> None:
    first, second = [await driver.due(name) for name in "ab"]
    await driver.pay(first)
    driver.fake.not_seen.update({"tx a", "tx b"})
    await driver.pay(second)
    assert await driver.states() == {"a": "published", "b": "published"}


async def test_signed_payment_of_a_quarantined_order_is_finished(
    driver: PayoutDriver,
) -> None:
    first, second = [await driver.due(name) for name in "ab"]
    await driver.pay(first)
    with driver.quarantine.isolate("b", "a step"):
        raise ZeroDivisionError
    await driver.pay(second)
    assert len(driver.fake.asked) == 1
    assert await driver.states() == {"a": "published", "b": "published"}


async def test_a_stranger_does_not_go_along(driver: PayoutDriver, tmp_path: Path) -> None:
    """Possible only in a database that was tampered with."""
    first, second = [await driver.due(name) for name in "ab"]
    with closing(sqlite3.connect(tmp_path / "rpcsvc.db")) as other, other:
        other.execute("DROP TRIGGER transfers_keep_what_they_are")
        other.execute("UPDATE transfers SET address = 'thief' WHERE transfer_id = ?", (second,))
    await driver.pay(first)
    assert driver.fake.asked == [[first]]
    assert (await driver.states())["b"] == TransferState.PLANNED
