"""Withdrawals are carried out once each, over failures between any two steps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from msgspec.structs import replace
from structlog.testing import capture_logs

from rpcsvc.domain.money import USDC
from rpcsvc.domain.order import Transfer, TransferState
from rpcsvc.domain.reservations import Holdings, ReservationChange
from rpcsvc.domain.withdrawals import SIGN_WITHIN_MS, Withdrawal, stepped
from rpcsvc.errors import AmountAboveMaximum, IdempotencyConflict, InvalidInput, Unavailable
from rpcsvc.orders.ports.wallets import (
    Outcome,
    PreparedTransfer,
    Record,
    TransferRejected,
    Verdict,
)
from rpcsvc.orders.processor import KeyedLocks
from rpcsvc.orders.withdrawals import (
    RETRY_MS,
    WithdrawalLimits,
    WithdrawalRefused,
    WithdrawalRequest,
    Withdrawals,
    read_request,
)
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from rpcsvc.store.leases import SETTLER, Lease
from rpcsvc.store.orders import OrderStore
from rpcsvc.store.reservations import reservation_statements
from rpcsvc.store.withdrawals import WithdrawalStore
from tests.e2e.processes import until
from tests.sandbox import EVM, MONERO, ManualClock

OTHER = "0x" + "0b" * 20
NAME = "wd_first"
FEE = 100_000


class Killed(BaseException):
    """The process is killed: no handler runs."""


@dataclass
class Chain:
    """The chain, which outlives the service: transactions by id, with their submissions."""

    taken: dict[str, str] = field(default_factory=dict)
    settled: bool = False
    serial: int = 0


class ScriptedWallets:
    """Wallets with distinct signatures; ``die``: the step to be killed before or after."""

    poll_ms = 1

    def __init__(self, chain: Chain, die: str = "") -> None:
        self.chain = chain
        self.die = die
        self.paused = False
        self.refuses: Exception | None = None
        self.says: Outcome | None = None
        self.leaves: Mapping[str, int] = {}
        self.settled_on = {"arbitrum", "monero"}

    def is_paused(self) -> bool:
        return self.paused

    def fee(self, network: str) -> int:
        if network not in self.settled_on:
            raise Unavailable(f"{network} can't be settled right now")
        return FEE

    async def require_payable(self, network: str, address: str, *, field: str) -> None:
        assert (network in ("arbitrum", "monero"), field) == (True, "to"), address

    def _at(self, step: str) -> None:
        if self.die == step:
            raise Killed

    async def prepare(
        self, transfer: Transfer, companions: Any, record: Record, leaves: Mapping[str, int]
    ) -> None:
        assert companions == ()
        self.leaves = leaves
        if self.refuses is not None:
            raise self.refuses
        self._at("before prepare")
        self.chain.serial += 1
        txid = f"tx{self.chain.serial}"
        await record(
            [PreparedTransfer(txid, (transfer.transfer_id,), f"{self.chain.serial:02x}")], None
        )
        self._at("after prepare")

    async def publish(self, transfer: Transfer) -> Verdict:
        self._at("before publish")
        assert transfer.txid is not None
        self.chain.taken[transfer.txid] = transfer.address
        self._at("after publish")
        return Verdict(self.says or Outcome.PENDING)

    async def look_up(self, transfer: Transfer) -> Verdict:
        self._at("before look_up")
        if self.says is not None:
            return Verdict(self.says, "as the test says")
        if transfer.txid not in self.chain.taken:
            return Verdict(Outcome.ABSENT)
        self._at("after look_up")
        return Verdict(Outcome.SETTLED if self.chain.settled else Outcome.PENDING, receipt=None)


class Service:
    """One process on a database; ``restarted`` makes the next one."""

    def __init__(
        self,
        database: SqliteDatabase,
        clock: ManualClock,
        chain: Chain,
        die: str = "",
        allowed: Mapping[str, tuple[str, ...]] | None = None,
        free: int = 10**9,
        lease_ends: int | None = None,
        cap: int | None = None,
    ) -> None:
        self.database = database
        self.clock = clock
        self.chain = chain
        self.store = WithdrawalStore(database)
        self.orders = OrderStore(database, lambda: "")
        self.wallets = ScriptedWallets(chain, die)
        names = {"arbitrum": (EVM,), "monero": (MONERO,)} if allowed is None else allowed
        wallets = cast("Any", self.wallets)
        wallets.holdings = lambda _: Holdings(free, 0, 0)
        limits = WithdrawalLimits(names, {} if cap is None else {USDC: cap})
        self.lease = Lease(SETTLER, 1, lease_ends)
        orders: Any = SimpleNamespace(store=self.orders, clock=clock, lease=self.lease)
        self.made = Withdrawals(self.store, orders, wallets, wallets, limits, KeyedLocks())

    def restarted(self, **changed: Any) -> Service:
        return Service(self.database, self.clock, self.chain, **changed)

    async def reserved(self) -> int:
        return (await self.orders.reserved("arbitrum")).total

    async def first(self) -> Withdrawal:
        found = await self.store.find(NAME)
        assert found is not None
        return found


async def advance(service: Service) -> None:
    """Take the next step of each open withdrawal, one after the other."""
    for step in (await service.made.due()).values():
        await step()


def asked(amount: str = "5", to: str = EVM, name: str = NAME) -> WithdrawalRequest:
    return read_request(name, "arbitrum", amount, to)


@pytest.fixture
async def database(tmp_path: Path) -> AsyncIterator[SqliteDatabase]:
    opened = await SqliteDatabase.open(tmp_path)
    yield opened
    await opened.close()


@pytest.fixture
def service(database: SqliteDatabase) -> Service:
    return Service(database, ManualClock(), Chain())


# --- creation ----------------------------------------------------------------------------------


async def test_withdrawals_with_the_same_id_are_made_once(service: Service) -> None:
    first = await service.made.make(asked())
    service.clock.now += 1_000
    assert await service.made.make(asked()) == first
    # An address is the same in any case.
    assert await service.made.make(asked(to=EVM.lower())) == first
    assert await service.store.latest(10) == [first]
    assert (first.address, first.units, first.fee) == (EVM, 5_000_000, FEE)
    assert await service.reserved() == 5_000_000 + FEE


@pytest.mark.parametrize("other", [asked("6"), asked(to=OTHER), asked()._replace(network="base")])
async def test_withdrawal_id_of_other_terms_is_a_conflict(
    service: Service, other: WithdrawalRequest
) -> None:
    await service.made.make(asked())
    for act in (service.made.make, service.made.preview):
        with pytest.raises(IdempotencyConflict, match="5 USDC on arbitrum to 0x529"):
            await act(other)


async def test_withdrawal_preview_writes_nothing(service: Service) -> None:
    shown = await service.made.preview(asked())
    assert await service.store.find(NAME) is None
    assert await service.made.make(asked()) == shown


@pytest.mark.parametrize(
    ("request_", "field", "text"),
    [
        (asked(to=OTHER), "to", "is not in inventory.withdraw_to for arbitrum. Allowed: 0x529"),
        (asked()._replace(network="base"), "network", "only for arbitrum, monero"),
    ],
)
async def test_withdrawal_outside_the_settings_is_refused(
    service: Service, request_: WithdrawalRequest, field: str, text: str
) -> None:
    with pytest.raises(InvalidInput, match=text) as refused:
        await service.made.make(request_)
    assert refused.value.field == field
    assert await service.store.latest(1) == []


async def test_withdrawal_with_its_fee_can_be_stored(service: Service) -> None:
    with pytest.raises(AmountAboveMaximum):
        await service.made.make(asked("9223372036854.775807"))


async def test_withdrawal_is_not_signed_near_the_end_of_the_lease(service: Service) -> None:
    await service.made.make(asked())
    await advance(service.restarted(lease_ends=0))
    assert (await service.first()).state is TransferState.PLANNED
    assert service.chain.serial == 0


async def test_withdrawal_signed_without_time_left_is_not_recorded(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    await service.made.make(asked())
    prepare = service.wallets.prepare

    async def slow(transfer: Transfer, companions: Any, record: Record, leaves: Any) -> None:
        service.made._lease.lose()
        await prepare(transfer, companions, record, leaves)

    monkeypatch.setattr(service.wallets, "prepare", slow)
    await advance(service)
    assert (await service.first()).state is TransferState.PLANNED
    assert service.chain.serial == 1


@pytest.mark.parametrize("name", ["ord_1234", "wd_", "wd_a/b/c", "wd_" + "a" * 61])
def test_withdrawal_id_of_another_form_is_refused(name: str) -> None:
    with pytest.raises(InvalidInput, match="4 to 60 letters"):
        asked(name=name)


@pytest.mark.parametrize("amount", ["0", "-1", "1.0000001", "a"])
def test_withdrawal_amount_is_that_of_the_asset(amount: str) -> None:
    with pytest.raises(InvalidInput, match="amount"):
        asked(amount)


async def test_withdrawal_over_the_cap_per_transfer_is_refused(service: Service) -> None:
    capped = service.restarted(cap=900_000_000)
    assert (await capped.made.preview(asked("900"))).units == 900_000_000
    with pytest.raises(InvalidInput, match=r"cap per transfer of 900 USDC \(onchain.usdc_per_"):
        await capped.made.make(asked("900.000001"))
    assert await capped.store.latest(1) == []


async def test_withdrawal_leaves_what_orders_reserve(service: Service) -> None:
    change = ReservationChange("ord_1", {"arbitrum": 4_000_000}, None, begins=True)
    await service.database.write(list(reservation_statements(change)))
    short = service.restarted(free=9_000_000)
    with pytest.raises(WithdrawalRefused, match=r"reserve 4 USDC of it: at most 4.9 USDC"):
        await short.made.make(asked())
    assert await short.reserved() == 4_000_000
    assert (await short.made.make(asked("4.9"))).units == 4_900_000
    assert await short.reserved() == 9_000_000
    await advance(short)
    assert short.wallets.leaves == {NAME: 4_000_000}


async def test_second_withdrawal_waits_for_the_first(service: Service) -> None:
    await service.made.make(asked())
    with pytest.raises(WithdrawalRefused, match="wd_first is under way on arbitrum"):
        await service.made.make(asked(name="wd_second"))


async def test_withdrawal_is_not_made_while_payouts_are_paused(service: Service) -> None:
    service.wallets.paused = True
    with pytest.raises(WithdrawalRefused, match="rpcsvc payouts resume"):
        await service.made.make(asked())


@pytest.mark.parametrize("request_", [read_request(NAME, "monero", "1", MONERO), asked()])
async def test_withdrawal_needs_no_other_network(
    database: SqliteDatabase, request_: WithdrawalRequest
) -> None:
    service = Service(database, ManualClock(), Chain(), free=2 * 10**12)
    service.wallets.settled_on = {"arbitrum", "monero"} - {request_.network}
    with pytest.raises(Unavailable, match=f"{request_.network} can't be settled"):
        await service.made.make(request_)
    service.wallets.settled_on = {request_.network}
    assert (await service.made.make(request_)).fee == FEE


# --- execution ---------------------------------------------------------------------------------


async def test_withdrawal_is_signed_published_and_settled(service: Service) -> None:
    await service.made.make(asked())
    await advance(service)
    assert (await service.first()).state is TransferState.PUBLISHED
    service.chain.settled = True
    await advance(service)
    end = await service.first()
    assert (end.state, end.txid) == (TransferState.SETTLED, "tx1")
    assert service.chain.taken == {"tx1": EVM}
    assert await service.reserved() == 0
    assert await service.made.make(asked()) == end
    await advance(service)
    assert service.chain.serial == 1


STEPS = [
    f"{side} {step}" for step in ("prepare", "publish", "look_up") for side in ("before", "after")
]


@pytest.mark.parametrize("die", STEPS)
async def test_withdrawal_survives_a_kill_at_each_step(database: SqliteDatabase, die: str) -> None:
    service = Service(database, ManualClock(), Chain(), die)
    await service.made.make(asked())
    with pytest.raises(Killed):
        for _ in range(3):
            await advance(service)
    after = service.restarted()
    assert await after.reserved() == 5_000_000 + FEE
    assert (await after.made.make(asked())).withdrawal_id == NAME
    await advance(after)
    after.chain.settled = True
    await advance(after)
    await advance(after)
    assert (await after.first()).state is TransferState.SETTLED
    assert list(after.chain.taken.values()) == [EVM]
    assert await after.reserved() == 0


async def test_withdrawal_of_unknown_outcome_publishes_the_same_bytes(service: Service) -> None:
    service.wallets.says = Outcome.UNKNOWN
    await service.made.make(asked())
    await advance(service)
    unknown = await service.first()
    assert (unknown.state, unknown.reason) == (TransferState.UNKNOWN, "as the test says")
    service.wallets.says = None
    await advance(service)
    await advance(service)
    assert (await service.first()).state is TransferState.PUBLISHED
    assert service.chain.taken == {"tx1": EVM}
    assert service.chain.serial == 1


async def test_withdrawal_that_failed_frees_its_money(service: Service) -> None:
    await service.made.make(asked())
    service.wallets.says = Outcome.FAILED
    await advance(service)
    end = await service.first()
    assert (end.state, end.reason) == (TransferState.FAILED, "as the test says")
    assert await service.reserved() == 0


async def test_withdrawal_that_can_t_be_prepared_fails(service: Service) -> None:
    service.wallets.refuses = TransferRejected("the destination is on the token's blacklist")
    await service.made.make(asked())
    await advance(service)
    end = await service.first()
    assert (end.state, end.txid) == (TransferState.FAILED, None)
    assert "blacklist" in (end.reason or "")
    assert await service.reserved() == 0


async def test_withdrawal_that_waits_says_why_and_is_tried_again(service: Service) -> None:
    service.wallets.refuses = Unavailable("it is over the cap per transfer of 1 USDC")
    await service.made.make(asked())
    with capture_logs():
        await advance(service)
    assert service.made.waits_for(NAME) == "it is over the cap per transfer of 1 USDC"
    service.wallets.refuses = None
    await advance(service)
    assert (await service.first()).state is TransferState.PLANNED
    service.clock.now += RETRY_MS
    await advance(service)
    assert (await service.first()).state is TransferState.PUBLISHED
    assert service.made.waits_for(NAME) is None


async def test_unsigned_withdrawal_is_cancelled_in_time(service: Service) -> None:
    service.wallets.refuses = Unavailable("The hot wallet lacks ether for gas.")
    await service.made.make(asked())
    with capture_logs():
        await advance(service)
    service.clock.now += SIGN_WITHIN_MS
    service.wallets.refuses = None
    await advance(service)
    end = await service.first()
    assert end.state is TransferState.CANCELLED
    assert end.reason == "not signed within 10 minutes: The hot wallet lacks ether for gas."
    assert (service.chain.serial, await service.reserved()) == (0, 0)


async def test_address_that_was_taken_off_the_list_is_not_paid(service: Service) -> None:
    await service.made.make(asked())
    later = service.restarted(allowed={"arbitrum": (OTHER,)})
    with capture_logs() as logs:
        await advance(later)
    assert "withdrawal_recipient_refused" in [line["event"] for line in logs]
    assert later.chain.serial == 0
    # Its record can still be read.
    assert (await later.made.make(asked())).state is TransferState.PLANNED


async def test_bytes_that_pay_something_else_are_not_recorded(service: Service) -> None:
    await service.made.make(asked())

    async def prepare(
        transfer: Transfer, companions: Any, record: Record, leaves: Mapping[str, int]
    ) -> None:
        await record([PreparedTransfer("tx", (transfer.transfer_id, "ord_1/payout/1"))], None)

    service.wallets.prepare = prepare  # type: ignore[method-assign]
    with capture_logs():
        await advance(service)
    assert (await service.first()).state is TransferState.PLANNED


async def test_payment_on_record_is_adopted_after_a_restore(service: Service) -> None:
    """The copy has it as planned, and the payment journal has restored its payment."""
    await service.made.make(asked())
    planned = await service.first()
    service.store.cancel = _refused  # type: ignore[method-assign]
    service.clock.now += SIGN_WITHIN_MS

    await advance(service)
    assert planned.state is TransferState.PLANNED
    assert (await service.first()).state is TransferState.PUBLISHED


async def _refused(before: Withdrawal, after: Withdrawal) -> bool:
    assert after == replace(
        stepped(before, TransferState.CANCELLED, after.changed_at), reason=after.reason
    )
    return False


async def test_payment_of_other_terms_under_the_id_is_a_conflict(service: Service) -> None:
    async def terms(_name: str) -> tuple[str, str, int]:
        return "arbitrum", EVM, 7_000_000

    service.store.signed_terms = terms  # type: ignore[assignment, method-assign]
    with pytest.raises(IdempotencyConflict, match="7 USDC on arbitrum"):
        await service.made.make(asked())


@pytest.mark.parametrize("is_broken", [False, True])
async def test_withdrawal_waits_for_no_other_network(
    service: Service, monkeypatch: pytest.MonkeyPatch, *, is_broken: bool
) -> None:
    """One that is made while the wallet of another network hangs, or its rows are broken."""
    first = await service.made.make(asked())
    other = replace(first, withdrawal_id="wd_other", network="base", address=OTHER)
    await service.store.add(other, None)
    service.made.allowed["base"] = (OTHER,)  # type: ignore[index]
    monkeypatch.setattr("rpcsvc.orders.withdrawals.ENGINE_TIMEOUT_SECONDS", 3_600)
    prepare, reached = service.wallets.prepare, asyncio.Event()

    async def stuck(transfer: Transfer, companions: Any, record: Record, leaves: Any) -> None:
        if transfer.network == "base":
            reached.set()
            if not is_broken:
                await asyncio.Event().wait()
        await prepare(transfer, companions, record, leaves)

    change = service.store.change

    async def broken(before: Withdrawal, after: Withdrawal, commit: Any = None) -> None:
        if is_broken and before.network == "base":
            raise LookupError("a broken row")
        await change(before, after, commit)

    async def is_settled(name: str) -> bool:
        found = await service.store.find(name)
        return found is not None and found.state is TransferState.SETTLED

    service.wallets.prepare = stuck  # type: ignore[method-assign]
    service.store.change = broken  # type: ignore[method-assign]
    service.chain.settled = True
    with capture_logs():
        running = asyncio.create_task(service.made.run())
        try:
            await reached.wait()
            await until(lambda: is_settled(NAME))
            await service.made.make(asked(name="wd_second"))
            await until(lambda: is_settled("wd_second"))
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
    assert list(service.chain.taken.values()) == [EVM, EVM]
