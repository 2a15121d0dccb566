"""The last check before signing: the recipient is the order's own address."""

from __future__ import annotations

from typing import Any, cast

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.events import AdvanceTransfer
from rpcsvc.domain.machine import open_order, transition
from rpcsvc.domain.order import DepositKey, Order, Transfer
from rpcsvc.domain.pricing import Direction
from rpcsvc.orders.deposits import ScanProgress
from rpcsvc.orders.inventory import SimulatedInventory
from rpcsvc.orders.payouts import Payouts, published_verdict
from rpcsvc.orders.ports.wallets import Outcome, Verdict
from rpcsvc.orders.processor import Quarantine
from rpcsvc.store.leases import MARGIN_MS, SETTLER, Lease
from tests.sandbox import ManualClock
from tests.unit.orders import NOW, key, terms


class FakeWallets:
    """A store with one order, and an engine that records the recipients it signs for."""

    def __init__(self, order: Order) -> None:
        self.held = order
        self.signed_for: list[str] = []

    async def order(self, _order_id: str) -> Order:
        return self.held

    async def confirmations(self, _key: DepositKey) -> int:
        return 10

    def is_paused(self) -> bool:
        return False

    def signed_together(self, _network: str) -> int:
        return 1

    def carried_at_once(self, _network: str) -> int:
        return 1

    async def prepare(self, transfer: Any, *_others: Any) -> None:
        self.signed_for.append(transfer.address)
        raise TimeoutError  # ends the attempt here


def paying(direction: Direction) -> Order:
    order = open_order(terms(direction))
    amount = order.terms.deposit_amount
    order = transition(order, ev.DepositSeen(key(1), amount, "sender", NOW), NOW).order
    return transition(order, ev.DepositConfirmed(key(1)), NOW).order


def refunding() -> Order:
    order = open_order(terms(Direction.USDC_TO_XMR))
    small = order.terms.min_deposit // 2
    order = transition(order, ev.DepositSeen(key(1), small, "sender", NOW), NOW).order
    order = transition(order, ev.DepositConfirmed(key(1)), NOW).order
    assert order.deadline_at is not None
    return transition(order, ev.DeadlinePassed(), order.deadline_at).order


def at_once() -> ManualClock:
    """A clock at the time of the order's creation."""
    clock = ManualClock()
    clock.now = NOW
    return clock


async def sign(
    order: Order, lease: Lease | None = None, progress: ScanProgress | None = None
) -> list[str]:
    """Advance the order's only transfer; the recipients that were signed for."""
    fake = FakeWallets(order)
    anything = cast("Any", fake)
    payouts = Payouts(
        anything, anything, SimulatedInventory(), anything, at_once(), Quarantine(),
        progress or ScanProgress((), at_once()), lease or Lease(SETTLER, 1),
    )  # fmt: skip
    await payouts.advance(order.order_id, AdvanceTransfer(order.transfers[0].transfer_id))
    return fake.signed_for


@pytest.mark.parametrize("direction", Direction)
async def test_a_payout_is_signed_for_the_orders_destination(direction: Direction) -> None:
    assert await sign(paying(direction)) == ["pay here"]


async def test_a_refund_is_signed_for_the_sender() -> None:
    assert await sign(refunding()) == ["sender"]


@pytest.mark.parametrize("order", [paying(Direction.XMR_TO_USDC), refunding()])
@pytest.mark.parametrize("change", [{"address": "thief"}, {"network": "elsewhere"}])
async def test_nothing_is_signed_for_a_stranger(order: Order, change: dict[str, Any]) -> None:
    swapped = replace(order.transfers[0], **change)
    assert await sign(replace(order, transfers=(swapped,))) == []


@pytest.mark.parametrize("order", [paying(Direction.XMR_TO_USDC), refunding()])
async def test_nothing_is_signed_before_a_scan_since_the_pause(order: Order) -> None:
    network, clock, pauses = order.deposits[0].key.network, at_once(), ["a deep branch"]
    progress = ScanProgress((network, "another"), clock, lambda: bool(pauses))
    progress.advance({network: clock.now, "another": clock.now}, {})
    assert progress.is_current(network)
    clock.now += 1
    pauses.clear()
    assert await sign(order, progress=progress) == []
    progress.advance({"another": clock.now}, {})
    assert await sign(order, progress=progress) == []
    progress.advance({network: clock.now}, {})
    assert len(await sign(order, progress=progress)) == 1


class AbsentTransfer:
    """Wallets whose network does not know a transfer until it is published."""

    def __init__(self) -> None:
        self.published = 0

    async def look_up(self, _transfer: Transfer) -> Verdict:
        return Verdict(Outcome.ABSENT)

    async def publish(self, _transfer: Transfer) -> Verdict:
        self.published += 1
        return Verdict(Outcome.PENDING)


async def test_nothing_is_published_without_time_left() -> None:
    wallets, now = AbsentTransfer(), 1_000
    transfer = paying(Direction.XMR_TO_USDC).transfers[0]
    lease = Lease(SETTLER, 1, now + MARGIN_MS, lambda: now)

    async def publish() -> tuple[Outcome, int]:
        verdict = await published_verdict(cast("Any", wallets), lease, transfer)
        return verdict.outcome, wallets.published

    assert await publish() == (Outcome.ABSENT, 0)
    lease.extend(now + MARGIN_MS + 1)
    assert await publish() == (Outcome.PENDING, 1)
    lease.lose()
    assert await publish() == (Outcome.ABSENT, 1)


async def test_nothing_is_signed_without_time_left() -> None:
    order = paying(Direction.XMR_TO_USDC)
    now = 1_000
    ends_soon = Lease(SETTLER, 1, now + MARGIN_MS, lambda: now)
    assert await sign(order, ends_soon) == []
    ends_soon.extend(now + MARGIN_MS + 1)
    assert await sign(order, ends_soon) == ["pay here"]
    ends_soon.lose()
    assert await sign(order, ends_soon) == []
