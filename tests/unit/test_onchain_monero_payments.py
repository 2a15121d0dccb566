"""No XMR payment is made twice or wrongly when node or wallet misbehave.

Both are fakes, which contradict themselves on command; the ledger is real. With real daemons:
tests/regtest/test_monero_adapter_payouts.py.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast
from unittest.mock import AsyncMock, patch

import pytest
from msgspec.structs import replace

from rpcsvc.domain.money import XMR as XMR_ASSET
from rpcsvc.domain.order import Transfer, TransferKind, TransferState
from rpcsvc.errors import Unavailable
from rpcsvc.health import faults
from rpcsvc.orders.ports.wallets import LacksFunds, Outcome, PreparedTransfer, TransferRejected
from rpcsvc.settlement.onchain.daemon_rpc import ChainUnusable, NodeError, RpcFailure, TimedOut
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import (
    BlockHeader,
    MoneroSubmission,
    MoneroSubmissionResult,
    NodeBlock,
    NodeInfo,
    NodeTransaction,
    Spent,
)
from rpcsvc.settlement.onchain.monero.payments import MoneroPayments
from rpcsvc.settlement.onchain.monero.records import (
    MoneroPayment,
    MoneroPaymentOrder,
    MoneroPaymentState,
    MoneroPurpose,
    WalletRecord,
)
from rpcsvc.settlement.onchain.monero.wallet_types import (
    AddressCheck,
    Destination,
    PreparedPayment,
    Subaddress,
    SubaddressIndex,
    WalletCode,
)
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.chain_options import monero_options
from tests.recording import Recorder, sign
from tests.sandbox import ManualClock

XMR = 10**12
FEE = 1000
OWN = "4primary"
RAW = b"tx1".hex()
OPTIONS = monero_options(nettype="fakechain", settled_after=3, failed_after=5, highest_fee=FEE)
MINUTE_MS = 60_000
GOOD = AddressCheck(valid=True, integrated=False, subaddress=False, nettype="mainnet")
SHORT_OF_MONEY = (
    WalletCode.NOT_ENOUGH_MONEY, WalletCode.NOT_ENOUGH_UNLOCKED, WalletCode.TX_NOT_POSSIBLE,
)  # fmt: skip
WRONG = {
    "invalid": dataclasses.replace(GOOD, valid=False),
    "stagenet": dataclasses.replace(GOOD, nettype="stagenet"),
}


def header(height: int) -> BlockHeader:
    return BlockHeader(height, f"h{height}", f"h{height - 1}", 0)


@dataclass
class Node:
    """``known``: the height of each transaction, None in the pool. ``takes``: it accepts bytes.

    ``misses``: how often it looks into the chain before, and into the pool after a block that takes
    what it is asked for. ``replaced``: blocks that come after it was asked for key images.
    ``waiting``: bytes in its pool. ``asked``: how often for its state.
    """

    rpc: ClassVar[Any] = SimpleNamespace(endpoint=SimpleNamespace(name="node"))
    top: int = 100
    misses: int = 0
    known: dict[str, int | None] = field(default_factory=dict)
    spent: set[str] = field(default_factory=set)
    submitted: list[str] = field(default_factory=list)
    takes: bool = True
    replaced: int = 0
    waiting: int = 0
    looked_for: list[str] = field(default_factory=list)
    asked: int = 0

    async def info(self) -> NodeInfo:
        self.asked += 1
        await asyncio.sleep(0)  # other tasks may run meanwhile, as with every network call
        height = self.top + 1
        return NodeInfo(
            height, f"h{self.top}", "fakechain", True, False, True, height, 0, "0.18", 600_000
        )

    async def key_images(self, images: Sequence[str]) -> dict[str, Spent]:
        self.top += self.replaced
        return {item: Spent(item in self.spent) for item in images}

    async def transactions(self, txids: Sequence[str]) -> dict[str, NodeTransaction]:
        self.looked_for += txids
        if self.misses:
            self.misses -= 1
            self.top += 1
            self.known |= dict.fromkeys(txids, self.top)
            return {}
        return {
            txid: NodeTransaction(txid, self.known[txid], False)
            for txid in txids
            if txid in self.known
        }

    async def pool_weight(self) -> int:
        return self.waiting

    async def header_at(self, height: int) -> BlockHeader:
        return header(height)

    async def headers(self, first: int, last: int) -> list[BlockHeader]:
        return [header(height) for height in range(first, last + 1)]

    async def block_at(self, height: int) -> NodeBlock:
        txids = tuple(txid for txid, mined_at in self.known.items() if mined_at == height)
        return NodeBlock(header(height), "miner", txids)

    async def bodies(self, txids: Sequence[str]) -> dict[str, Any]:
        assert not txids
        return {}

    async def submit(self, raw: str) -> MoneroSubmissionResult:
        self.submitted.append(raw)
        if not self.takes:
            return MoneroSubmissionResult(MoneroSubmission.REFUSED, (), "its own words")
        self.known[bytes.fromhex(raw).decode()] = None
        return MoneroSubmissionResult(MoneroSubmission.ACCEPTED, (), "OK")


@dataclass
class Wallet:
    """Signs with the first of its outputs that is not frozen."""

    node: Node
    ledger: MoneroLedger
    primary: str = OWN
    outputs: list[str] = field(default_factory=lambda: ["a", "b", "c", "d"])
    keeps_frozen: bool = True
    fee: int = FEE
    over: int = 0
    failure: RpcFailure | None = None
    relays: bool = True
    frozen: set[str] = field(default_factory=set)
    signed: list[list[Destination]] = field(default_factory=list)
    relayed: list[str] = field(default_factory=list)
    states: list[MoneroPaymentState] = field(default_factory=list)
    addresses: dict[str, AddressCheck] = field(default_factory=dict)
    own: set[str] = field(default_factory=set)
    behind: int = 0
    calls: list[str] = field(default_factory=list)
    priorities: list[int] = field(default_factory=list)
    held: int = 10**15
    validated: list[str] = field(default_factory=list)

    async def primary_address(self) -> str:
        return self.primary

    async def auto_refresh(self, *, enabled: bool) -> None:
        self.calls.append(f"auto_refresh {enabled}")

    async def validate(self, address: str) -> AddressCheck:
        self.validated.append(address)
        return self.addresses.get(address, GOOD)

    async def total(self) -> tuple[int, str]:
        return self.held, self.primary

    async def index_of(self, address: str) -> SubaddressIndex | None:
        return SubaddressIndex(1, 7) if address in self.own else None

    async def refresh(self) -> None:
        self.calls.append("refresh")

    async def height(self) -> int:
        return self.node.top + 1 - self.behind

    async def prepare(
        self, to: Sequence[Destination], *, priority: int, from_indices: Sequence[int]
    ) -> PreparedPayment:
        self.priorities.append(priority)
        if self.failure is not None:
            raise self.failure
        self.signed.append(list(to))
        txid = f"tx{len(self.signed)}"
        free = [item for item in self.outputs if not (self.keeps_frozen and item in self.frozen)]
        amount = sum(item.amount for item in to) + self.over
        return PreparedPayment(
            txid, amount, self.fee, 1, txid.encode().hex(), f"meta of {txid}", "key", (free[0],)
        )

    async def freeze(self, image: str) -> None:
        self.frozen.add(image)

    async def relay(self, metadata: str) -> None:
        """Record the payment's state in the database at the time of the relay."""
        txid = metadata.removeprefix("meta of ")
        live = await self.ledger.payments_in(*MoneroPaymentState)
        self.states += [item.state for item in live if item.txid == txid]
        self.relayed.append(txid)
        self.calls.append("relay")
        if not self.relays:
            raise TimedOut("wallet", "relay_tx", "no answer")
        self.node.known[txid] = None

    async def store(self) -> None:
        self.calls.append("store")

    async def transfers(self, _from_height: int, _kinds: object) -> list[Any]:
        return []

    async def prove_payment(self, txid: str, address: str, message: str) -> str:
        if self.failure is not None:
            raise self.failure
        return f"{txid} paid {address} for {message}"


@dataclass
class Rig:
    """The payments of one run of the service."""

    ledger: MoneroLedger
    node: Node
    wallet: Wallet
    clock: ManualClock
    connection: MoneroConnection
    payments: MoneroPayments

    async def sign(self, transfer: Transfer, *companions: Transfer) -> PreparedTransfer:
        return await sign(self.payments, transfer, *companions)

    async def prepared(self, transfer: Transfer, *companions: Transfer) -> Transfer:
        """The transfer as the order layer has it once prepared."""
        signed = await self.sign(transfer, *companions)
        return replace(transfer, txid=signed.txid, raw=signed.raw, state=TransferState.PREPARED)

    async def published(self, transfer: Transfer) -> Transfer:
        made = await self.prepared(transfer)
        assert (await self.payments.publish(made)).outcome is Outcome.PENDING
        return made

    async def known(self, name: str = "tr_1") -> MoneroPayment:
        found = await self.ledger.payment(name)
        assert found is not None
        return found

    async def all(self) -> list[MoneroPayment]:
        return await self.ledger.payments_in(*MoneroPaymentState)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    database = await SqliteDatabase.open(tmp_path)
    ledger, clock, node = MoneroLedger(database), ManualClock(), Node()
    await ledger.adopt_wallet(WalletRecord("fakechain", OWN, 0))
    wallet = Wallet(node, ledger)
    connection = MoneroConnection(cast("Any", node), cast("Any", wallet), ledger, OPTIONS)
    payments = MoneroPayments(connection, ledger, clock, OPTIONS, clock.now_ms)
    yield Rig(ledger, node, wallet, clock, connection, payments)
    await database.close()


def transfer(name: str = "tr_1", units: int = XMR, address: str | None = None) -> Transfer:
    to = address or f"4 {name}"
    return Transfer(name, TransferKind.PAYOUT, "monero", XMR_ASSET, to, units, FEE)


def upkeep(name: str = "upkeep-1", parts: int = 1) -> MoneroPaymentOrder:
    return MoneroPaymentOrder(name, MoneroPurpose.UPKEEP, OWN, XMR, parts)


# --- what is left for others ---------------------------------------------------------------------


async def test_payout_leaves_what_others_may_need(rig: Rig) -> None:
    rig.wallet.held = 3 * XMR
    record = Recorder()
    with pytest.raises(LacksFunds) as lack:
        await rig.payments.prepare(transfer(), [], record, {"tr_1": 2 * XMR})
    assert lack.value.missing.units == FEE
    assert rig.wallet.signed == []
    await rig.payments.prepare(transfer(), [], record, {"tr_1": 2 * XMR - FEE})
    assert [item.transfer_ids for item in record.signed] == [("tr_1",)]


async def test_deposit_on_no_order_yet_pays_for_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.wallet.held = 3 * XMR + FEE
    monkeypatch.setattr(rig.ledger, "on_no_order", AsyncMock(return_value=1))
    with pytest.raises(LacksFunds) as lack:
        await rig.payments.prepare(transfer(), [], Recorder(), {"tr_1": 2 * XMR})
    assert lack.value.missing.units == 1


async def test_companions_leave_what_others_may_need_together(rig: Rig) -> None:
    rig.wallet.held = 5 * XMR
    names = ("tr_1", "tr_2", "tr_3")
    first, *others = [transfer(name) for name in names]
    record = Recorder()
    left = await rig.payments.prepare(first, others, record, dict.fromkeys(names, 2 * XMR))
    assert [item.transfer_ids for item in record.signed] == [("tr_1", "tr_2")]
    assert [item.transfer_id for item in left] == ["tr_3"]


async def test_refund_takes_the_last_of_the_wallet(rig: Rig) -> None:
    rig.wallet.held = XMR
    await rig.sign(transfer())
    assert len(rig.wallet.signed) == 1


# --- a batch is asked about once -----------------------------------------------------------------


async def batch(rig: Rig) -> list[Transfer]:
    """Three transfers that one transaction pays, as the order layer has them."""
    first, *others = [transfer(f"tr_{number}") for number in range(1, 4)]
    made = await rig.prepared(first, *others)
    return [made, *(replace(item, txid=made.txid, raw="", state=made.state) for item in others)]


async def test_batch_shares_a_look_up_until_the_next_block(rig: Rig) -> None:
    due = await batch(rig)
    assert (await rig.payments.publish(due[0])).outcome is Outcome.PENDING
    for height, outcome in (
        (None, Outcome.PENDING), (rig.node.top, Outcome.PENDING),
        (rig.node.top - 1, Outcome.SETTLED),
    ):  # fmt: skip
        rig.node.known[due[0].txid or ""] = height
        rig.node.looked_for.clear()
        await rig.connection.check_node()  # as each scan does
        for item in due:
            assert (await rig.payments.look_up(item)).outcome is outcome
        assert rig.node.looked_for == [due[0].txid]
        rig.node.top += 1


async def test_batch_that_left_the_pool_is_missed_without_a_block(rig: Rig) -> None:
    due = await batch(rig)
    await rig.payments.publish(due[0])
    assert (await rig.payments.look_up(due[1])).outcome is Outcome.PENDING
    rig.node.known.clear()
    rig.node.asked = 0
    assert (await rig.payments.look_up(due[2])).outcome is Outcome.PENDING
    assert rig.node.asked == 0
    rig.clock.now += 5_000
    assert (await rig.payments.look_up(due[1])).outcome is Outcome.ABSENT
    assert (await rig.payments.publish(due[2])).outcome is Outcome.PENDING
    assert (await rig.payments.look_up(due[1])).outcome is Outcome.PENDING


async def test_address_is_checked_once_until_it_is_the_services(rig: Rig) -> None:
    rig.wallet.held = 0
    names = ("tr_1", "tr_2")
    due, leaves = [transfer(name) for name in names], dict.fromkeys(names, 1)
    for _ in range(2):
        with pytest.raises(LacksFunds):
            await rig.payments.prepare(due[0], due[1:], Recorder(), leaves)
    asked = [each for each in rig.wallet.validated if each != rig.wallet.primary]
    assert asked == [item.address for item in due]
    await rig.ledger.add_addresses([Subaddress(SubaddressIndex(0, 7), due[0].address)])
    with pytest.raises(TransferRejected, match="the service itself"):
        await rig.payments.prepare(due[0], [], Recorder(), leaves)


# --- signing -------------------------------------------------------------------------------------


async def test_a_transfer_that_is_signed_is_not_signed_again(rig: Rig) -> None:
    first = await rig.sign(transfer())
    assert await rig.sign(transfer()) == first
    await rig.payments.publish(replace(transfer(), txid=first.txid, raw=first.raw))
    assert await rig.sign(transfer()) == first
    assert len(rig.wallet.signed) == 1


@pytest.mark.parametrize("other", [{"units": XMR + 1}, {"address": "4other"}])
async def test_what_was_signed_is_not_given_out_for_other_terms(
    rig: Rig, other: dict[str, Any]
) -> None:
    await rig.sign(transfer())
    with pytest.raises(LookupError, match="another recipient or amount"):
        await rig.sign(transfer(**other))


async def test_outputs_of_a_payment_are_frozen_and_others_spent(rig: Rig) -> None:
    """The wallet was killed before it stored the first payment, and has lost it."""
    await rig.published(transfer("tr_1"))
    await rig.prepared(transfer("tr_2"))
    assert rig.wallet.frozen == {"a"}
    assert [item.key_images for item in await rig.all()] == [("a",), ("b",)]


async def test_wallet_that_still_offers_spent_outputs_signs_nothing(rig: Rig) -> None:
    await rig.published(transfer("tr_1"))
    rig.wallet.keeps_frozen = False
    with pytest.raises(Unavailable, match="has spent"):
        await rig.sign(transfer("tr_2"))
    assert len(await rig.all()) == 1


async def test_money_of_a_settled_payment_is_spent_permanently(rig: Rig) -> None:
    made = await rig.published(transfer("tr_1"))
    rig.node.known[made.txid or ""] = rig.node.top - 50
    assert (await rig.payments.look_up(made)).outcome is Outcome.SETTLED
    rig.wallet.keeps_frozen = False
    with pytest.raises(Unavailable, match="has spent"):
        await rig.sign(transfer("tr_2"))


@pytest.mark.parametrize("over", [-1, 1])
async def test_another_amount_than_asked_for_is_not_committed(rig: Rig, over: int) -> None:
    rig.wallet.over = over
    with pytest.raises(Unavailable, match="another amount"):
        await rig.sign(transfer())
    assert await rig.all() == []


async def test_a_fee_is_bounded_for_each_transfer(rig: Rig) -> None:
    rig.wallet.fee = FEE + 1
    with pytest.raises(Unavailable, match="fee is too high"):
        await rig.sign(transfer())
    assert await rig.all() == []
    rig.wallet.fee = 2 * FEE
    signed = await rig.sign(transfer("tr_1"), transfer("tr_2"))
    assert signed.transfer_ids == ("tr_1", "tr_2")


async def test_a_batch_that_costs_too_much_is_not_made(rig: Rig) -> None:
    rig.wallet.fee = 2 * FEE + 1
    with pytest.raises(Unavailable, match="fee is too high"):
        await rig.sign(transfer("tr_1"), transfer("tr_2"))
    assert [len(item) for item in rig.wallet.signed] == [2, 1], "alone it was tried, too"
    assert await rig.all() == []


@pytest.mark.parametrize(("waiting", "priority"), [(0, 1), (300_000, 1), (300_001, 2)])
async def test_priority_rises_when_the_pool_fills_a_block(
    rig: Rig, waiting: int, priority: int
) -> None:
    rig.node.waiting = waiting
    await rig.prepared(transfer())
    assert rig.wallet.priorities == [priority]


async def test_priority_rises_while_a_payment_waits_for_a_block(rig: Rig) -> None:
    first = await rig.published(transfer())
    rig.clock.now += 20 * MINUTE_MS
    await rig.published(transfer("tr_2"))
    assert rig.wallet.priorities[-1] == 1
    rig.clock.now += 1
    await rig.published(transfer("tr_3"))
    assert rig.wallet.priorities[-1] == 2
    rig.node.known[first.txid or ""] = rig.node.top
    await rig.payments.look_up(first)
    await rig.published(transfer("tr_4"))
    assert rig.wallet.priorities[-1] == 1


async def test_parts_are_equal_and_lose_nothing(rig: Rig) -> None:
    payment = await rig.payments.prepare_upkeep(upkeep(parts=3))
    share = XMR // 3
    assert [item.amount for item in rig.wallet.signed[0]] == [share + 1, share, share]
    assert payment.units == XMR


async def test_the_wallet_s_other_accounts_are_no_destination(rig: Rig) -> None:
    rig.wallet.own = {"4 tr_1"}
    with pytest.raises(TransferRejected, match="service itself"):
        await rig.sign(transfer())
    assert rig.wallet.signed == []


@pytest.mark.parametrize(
    ("code", "raised", "text"),
    [
        (WalletCode.WRONG_ADDRESS, TransferRejected, "refuses the destination"),
        (WalletCode.UNKNOWN, Unavailable, "can't make this payment"),
        (WalletCode.TRANSFER_FAILED, Unavailable, "can't make this payment"),
        (WalletCode.NOT_OPEN, Unavailable, "XMR can't be settled"),
        (WalletCode.NO_DAEMON, Unavailable, "XMR can't be settled"),
        (WalletCode.DAEMON_BUSY, Unavailable, "XMR can't be settled"),
        *((code, Unavailable, "Not enough XMR is unlocked") for code in SHORT_OF_MONEY),
    ],
)
async def test_only_a_wrong_address_is_an_end(
    rig: Rig, code: WalletCode, raised: type[Exception], text: str
) -> None:
    """A rejected transfer is refunded; every other error may be temporary."""
    rig.wallet.failure = NodeError("wallet", "transfer", code, "its own words")
    with pytest.raises(raised, match=text):
        await rig.sign(transfer())
    assert await rig.all() == []
    rig.wallet.failure = None
    await rig.sign(transfer())


@pytest.mark.parametrize("why", WRONG)
async def test_an_address_that_can_not_be_paid_is_an_end(rig: Rig, why: str) -> None:
    rig.wallet.addresses["4 tr_1"] = WRONG[why]
    with pytest.raises(TransferRejected, match="the destination is"):
        await rig.sign(transfer())
    assert rig.wallet.signed == []


async def test_a_deposit_address_of_the_service_is_no_destination(rig: Rig) -> None:
    """Also if a wallet restored from an older file does not have it."""
    await rig.published(transfer("tr_0"))
    await rig.ledger.add_addresses([Subaddress(SubaddressIndex(0, 1), "4 tr_1")])
    with pytest.raises(TransferRejected, match="service itself"):
        await rig.sign(transfer())
    assert len(rig.wallet.signed) == 1


async def test_only_companions_that_can_be_paid_and_are_not_go_along(rig: Rig) -> None:
    await rig.published(transfer("paid"))
    rig.wallet.addresses = {f"4 {name}": check for name, check in WRONG.items()}
    rig.wallet.addresses["4 integrated"] = dataclasses.replace(GOOD, integrated=True)
    rig.wallet.own, rig.wallet.fee = {"4 ours"}, 3 * FEE
    names = ("paid", *WRONG, "integrated", "ours", "good", "better")
    signed = await rig.sign(transfer("first"), *(transfer(name) for name in names))
    assert set(signed.transfer_ids) == {"first", "good", "better"}


async def test_an_integrated_address_is_paid_alone(rig: Rig) -> None:
    rig.wallet.addresses["4 tr_1"] = dataclasses.replace(GOOD, integrated=True)
    signed = await rig.sign(transfer("tr_1"), transfer("tr_2"))
    assert signed.transfer_ids == ("tr_1",)
    assert len(rig.wallet.signed[0]) == 1


@pytest.mark.parametrize("behind", [-1, 1])
async def test_a_wallet_that_is_not_where_its_node_is_signs_nothing(rig: Rig, behind: int) -> None:
    rig.wallet.behind = behind
    with pytest.raises(Unavailable, match="same block"):
        await rig.sign(transfer())
    assert rig.wallet.signed == []


# --- one at a time -------------------------------------------------------------------------------


async def test_concurrent_requests_for_a_transfer_sign_and_relay_once(rig: Rig) -> None:
    asked = (rig.sign(transfer()) for _ in range(2))
    first, second = await asyncio.gather(*asked, return_exceptions=True)
    assert isinstance(first, PreparedTransfer)
    assert isinstance(second, Unavailable)
    made = replace(transfer(), txid=first.txid, raw=first.raw)
    await asyncio.gather(*(rig.payments.publish(made) for _ in range(2)))
    assert (rig.wallet.relayed, rig.node.submitted) == (["tx1"], [])


async def test_upkeep_and_a_transfer_are_not_signed_at_the_same_moment(rig: Rig) -> None:
    asked = (rig.payments.prepare_upkeep(upkeep()), rig.sign(transfer()))
    made = await asyncio.gather(*asked, return_exceptions=True)
    assert [type(item).__name__ for item in made] == ["MoneroPayment", "Unavailable"]
    assert len(rig.wallet.signed) == 1
    await asyncio.gather(*(rig.payments.finish_upkeep() for _ in range(2)))
    assert (rig.wallet.relayed, rig.node.submitted) == (["tx1"], [])


async def test_upkeep_waits_for_a_transfer_that_is_signed(rig: Rig) -> None:
    await rig.prepared(transfer())
    with pytest.raises(Unavailable, match="earlier XMR payment"):
        await rig.payments.prepare_upkeep(upkeep())
    assert len(rig.wallet.signed) == 1


async def test_what_the_network_has_meanwhile_holds_nothing_back(rig: Rig) -> None:
    """The relay's answer was lost: the payment is RELAYING until the next lookup."""
    made = await rig.prepared(transfer("tr_1"))
    rig.wallet.relays = rig.node.takes = False
    assert (await rig.payments.publish(made)).outcome is Outcome.UNKNOWN
    with pytest.raises(Unavailable, match="earlier XMR payment"):
        await rig.sign(transfer("tr_2"))
    rig.node.known[made.txid or ""] = None
    await rig.sign(transfer("tr_2"))
    assert (await rig.known("tr_1")).state is MoneroPaymentState.PUBLISHED


async def test_upkeep_is_brought_to_its_end(rig: Rig) -> None:
    await rig.published(transfer())
    await rig.payments.prepare_upkeep(upkeep())
    assert await rig.payments.finish_upkeep()
    made = await rig.known("upkeep-1")
    assert (made.state, rig.wallet.relayed) == (MoneroPaymentState.PUBLISHED, ["tx1", made.txid])
    rig.node.known |= {"tx1": rig.node.top, made.txid: rig.node.top}
    rig.node.top += 5
    assert not await rig.payments.finish_upkeep()
    assert (await rig.known("upkeep-1")).state is MoneroPaymentState.SETTLED


async def test_unmined_upkeep_hides_no_unmined_payout(rig: Rig) -> None:
    await rig.payments.prepare_upkeep(upkeep())
    assert await rig.payments.finish_upkeep()
    rig.clock.now += 1
    await rig.published(transfer())
    rig.clock.now += 61 * MINUTE_MS
    (said,) = await rig.payments.conditions()
    assert said.text.endswith("rpcsvc payouts close tr_1 --note TEXT")


async def test_refused_upkeep_is_handed_over_after_growing_pauses(rig: Rig) -> None:
    rig.wallet.relays = rig.node.takes = False
    await rig.payments.prepare_upkeep(upkeep())
    for _ in range(600):
        assert await rig.payments.finish_upkeep()
        rig.clock.now += 2000
    assert len(rig.node.submitted) == 23, "in 20 minutes: after 4, 8, 16, 32 s, then once a minute"
    (said,) = [each.text for each in await rig.payments.conditions()]
    assert "upkeep-1 is signed and the network does not take it" in said
    assert said.endswith("it pays nobody, and fails once its node has lacked it for 5 blocks")
    rig.node.known["tx1"] = None
    assert await rig.payments.finish_upkeep()
    assert (await rig.known("upkeep-1")).state is MoneroPaymentState.PUBLISHED
    rig.node.known.clear()
    for _ in range(3):
        assert await rig.payments.finish_upkeep()
    assert len(rig.node.submitted) == 24, "what was lost is handed over at once"


# --- publishing ----------------------------------------------------------------------------------


async def test_relay_is_on_record_before_the_wallet_relays(rig: Rig) -> None:
    made = await rig.prepared(transfer())
    rig.wallet.calls.clear()
    await rig.payments.publish(made)
    assert rig.wallet.states == [MoneroPaymentState.RELAYING]
    assert (await rig.known()).relayed_at == rig.clock.now
    assert rig.wallet.calls == ["relay", "store"]
    assert rig.node.submitted == []


async def test_wallet_at_another_height_is_refreshed_to_relay(rig: Rig) -> None:
    made = await rig.prepared(transfer())
    rig.wallet.behind = 5  # killed, and started from its file
    rig.wallet.calls.clear()
    await rig.payments.publish(made)
    assert rig.wallet.calls == ["refresh", "relay", "store"]


async def test_payment_that_nobody_was_given_is_not_looked_up(rig: Rig) -> None:
    made = await rig.prepared(transfer())
    assert (await rig.payments.look_up(made)).outcome is Outcome.ABSENT
    assert rig.node.looked_for == []
    assert (await rig.payments.publish(made)).outcome is Outcome.PENDING
    assert (rig.node.looked_for, rig.wallet.relayed) == ([made.txid], [made.txid])
    await rig.payments.look_up(made)
    assert rig.node.looked_for == [made.txid] * 2


async def test_wallet_is_paying_from_signature_to_relay(rig: Rig) -> None:
    assert not rig.payments.is_paying
    made = await rig.prepared(transfer())
    assert rig.payments.is_paying
    await rig.payments.publish(made)
    assert not rig.payments.is_paying


@pytest.mark.parametrize("wrong", [{"busy_syncing": True}, {"nettype": "stagenet"}])
async def test_payment_waits_while_its_node_is_not_to_be_used(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    """The wallet notes a payment only if the node takes it from the wallet, the first time."""
    made, real = await rig.prepared(transfer()), rig.node.info

    async def info() -> NodeInfo:
        return dataclasses.replace(await real(), **wrong)

    with monkeypatch.context() as patch:
        patch.setattr(rig.node, "info", info)
        with pytest.raises(Unavailable):
            await rig.payments.publish(made)
    assert (rig.wallet.relayed, rig.node.submitted) == ([], [])
    assert (await rig.known()).state is MoneroPaymentState.PREPARED
    assert (await rig.payments.publish(made)).outcome is Outcome.PENDING
    assert rig.wallet.relayed == [made.txid]


async def test_payment_of_an_earlier_run_is_looked_up_first(rig: Rig) -> None:
    made = await rig.prepared(transfer())
    rig.node.known[made.txid or ""] = None
    later = MoneroPayments(rig.connection, rig.ledger, rig.clock, OPTIONS, rig.clock.now_ms)
    assert (await later.publish(made)).outcome is Outcome.PENDING
    assert rig.wallet.relayed == []


async def test_wallet_relays_once_and_the_node_ever_after(rig: Rig) -> None:
    rig.wallet.relays = rig.node.takes = False
    made = await rig.prepared(transfer())
    for _ in range(2):
        verdict = await rig.payments.publish(made)
        assert (verdict.outcome, "its own words" in verdict.reason) == (Outcome.UNKNOWN, True)
    assert rig.wallet.relayed == ["tx1"]
    assert rig.node.submitted == [RAW, RAW]
    rig.node.takes = True
    assert (await rig.payments.publish(made)).outcome is Outcome.PENDING
    assert (rig.wallet.relayed, len(rig.node.submitted)) == (["tx1"], 3)


async def test_what_the_network_has_is_handed_to_nobody(rig: Rig) -> None:
    made = await rig.published(transfer())
    await rig.payments.publish(made)
    assert (rig.wallet.relayed, rig.node.submitted) == (["tx1"], [])


async def test_another_wallet_relays_and_signs_nothing(rig: Rig) -> None:
    made = await rig.prepared(transfer("tr_1"))
    rig.wallet.primary = "4other"
    with pytest.raises(Unavailable, match="can't be settled"):
        await rig.payments.publish(made)
    assert (rig.connection.problem or "").startswith("another wallet")
    assert (rig.wallet.relayed, (await rig.known()).state) == ([], MoneroPaymentState.PREPARED)
    rig.wallet.primary = OWN
    await rig.payments.publish(made)
    rig.wallet.primary = "4other"
    with pytest.raises(Unavailable, match="can't be settled"):
        await rig.sign(transfer("tr_2"))
    assert len(rig.wallet.signed) == 1


async def test_another_wallet_does_not_judge_a_destination(rig: Rig) -> None:
    """If the destination is its own address, that is no reason to reject the payout."""
    rig.wallet.primary, rig.wallet.own = "4other", {"4 tr_1"}
    with pytest.raises(Unavailable, match="can't be settled"):
        await rig.sign(transfer())
    with pytest.raises(ChainUnusable, match="another wallet"):
        await rig.payments.prepare_upkeep(upkeep())
    assert rig.wallet.signed == []


async def test_wallet_opened_after_the_first_check_signs_nothing(rig: Rig) -> None:
    own = rig.wallet.validate

    async def validate(address: str) -> AddressCheck:
        rig.wallet.primary = "4other"
        return await own(address)

    await rig.connection.ready()
    with (
        patch.object(rig.wallet, "validate", validate),
        pytest.raises(Unavailable, match="can't be settled"),
    ):
        await rig.sign(transfer())
    assert (rig.connection.problem or "").startswith("another wallet")
    assert rig.wallet.signed == []


async def test_payout_asks_node_and_wallet_side_by_side(rig: Rig) -> None:
    """Neither is asked after the other: before it is signed, and before it is relayed."""
    await rig.connection.ready()
    asked, node, wallet = rig.node.info, asyncio.Event(), asyncio.Event()

    async def info() -> NodeInfo:
        node.set()
        await wallet.wait()
        return await asked()

    async def primary_address() -> str:
        wallet.set()
        await node.wait()
        return OWN

    with (
        patch.object(rig.node, "info", info),
        patch.object(rig.wallet, "primary_address", primary_address),
    ):
        async with asyncio.timeout(5):
            made = await rig.prepared(transfer())
            node.clear()
            wallet.clear()
            await rig.payments.publish(made)
    assert rig.wallet.relayed == ["tx1"]


async def test_failure_while_the_node_answers_is_not_forgotten(rig: Rig) -> None:
    """The wallet's daemon was started again: it refreshes by itself, and may lack addresses."""
    await rig.connection.ready()
    rig.wallet.calls.clear()
    asked, reached, answers = rig.node.info, asyncio.Event(), asyncio.Event()

    async def info() -> NodeInfo:
        reached.set()
        await answers.wait()
        return await asked()

    with patch.object(rig.node, "info", info):
        async with asyncio.timeout(5):
            checking = asyncio.create_task(rig.connection.ready())
            await reached.wait()
            with pytest.raises(Unavailable), rig.connection.watched():
                raise ChainUnusable("the wallet is gone")
            answers.set()
            await checking
    assert rig.wallet.calls == ["auto_refresh False"]


async def test_what_has_failed_is_never_handed_over(rig: Rig) -> None:
    state = MoneroPaymentState.FAILED
    made = await rig.prepared(transfer())
    await rig.ledger.put_payment(replace(await rig.known(), state=state))
    assert (await rig.payments.publish(made)).outcome is Outcome.UNKNOWN
    assert (rig.wallet.relayed, rig.node.submitted) == ([], [])
    with pytest.raises(TransferRejected, match=state):
        await rig.sign(transfer())
    assert (await rig.known()).state is state


async def test_a_transfer_of_other_bytes_is_left_alone(rig: Rig) -> None:
    made = replace(await rig.prepared(transfer()), txid="tx9")
    for ask in (rig.payments.publish, rig.payments.look_up, rig.payments.receipt):
        with pytest.raises(LookupError, match="not the recorded one"):
            await ask(made)
    with pytest.raises(LookupError, match="not the recorded one"):
        await rig.payments.publish(replace(made, transfer_id="tr_9"))
    assert (rig.wallet.relayed, rig.node.submitted) == ([], [])


# --- lookups -------------------------------------------------------------------------------------


async def test_it_has_settled_at_its_depth_and_not_a_block_earlier(rig: Rig) -> None:
    made = await rig.published(transfer())
    mined = rig.node.known["tx1"] = rig.node.top
    for depth in range(1, OPTIONS.settled_after):
        rig.node.top = mined + depth - 1
        verdict = await rig.payments.look_up(made)
        assert (verdict.outcome, verdict.reason) == (Outcome.PENDING, f"{depth} of 3 confirmations")
        assert verdict.settles_at == mined + 2
        assert ((await rig.known()).state, (await rig.known()).height) == (
            MoneroPaymentState.PUBLISHED,
            mined,
        )
        with pytest.raises(Unavailable, match="not settled"):
            await rig.payments.receipt(made)
    rig.node.top += 1
    assert (await rig.payments.look_up(made)).outcome is Outcome.SETTLED
    assert (await rig.known()).state is MoneroPaymentState.SETTLED


async def test_payment_on_a_replaced_branch_is_not_settled(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node has it in a block that the others, which name the top, have replaced."""
    made = await rig.published(transfer())
    rig.node.known["tx1"] = rig.node.top
    rig.node.top += 9

    async def replaced_block(height: int) -> NodeBlock:
        return NodeBlock(BlockHeader(height, "another", "another", 0), "miner", ("tx1",))

    async def without_it(height: int) -> NodeBlock:
        return NodeBlock(header(height), "miner", ())

    async def of_another_top(first: int, last: int) -> list[BlockHeader]:
        return [BlockHeader(height, "another", "another", 0) for height in range(first, last + 1)]

    for name, answer in (
        ("block_at", replaced_block), ("block_at", without_it), ("headers", of_another_top)
    ):  # fmt: skip
        with monkeypatch.context() as patch:
            patch.setattr(rig.node, name, answer)
            verdict = await rig.payments.look_up(made)
        assert (verdict.outcome, "not shown" in verdict.reason) == (Outcome.PENDING, True)
        assert (await rig.known()).state is MoneroPaymentState.PUBLISHED
    assert (await rig.payments.look_up(made)).outcome is Outcome.SETTLED


async def test_reorged_payment_is_in_no_block_and_resent_unchanged(
    rig: Rig,
) -> None:
    made = await rig.published(transfer())
    rig.node.known["tx1"] = rig.node.top
    await rig.payments.look_up(made)
    rig.node.known["tx1"] = None
    assert (await rig.payments.look_up(made)).reason == "0 of 3 confirmations"
    assert (await rig.known()).height is None
    rig.node.known["tx1"] = rig.node.top
    await rig.payments.look_up(made)
    rig.node.known.clear()
    assert (await rig.payments.look_up(made)).outcome is Outcome.ABSENT
    assert ((await rig.known()).state, (await rig.known()).height) == (
        MoneroPaymentState.PUBLISHED,
        None,
    )
    await rig.payments.publish(made)
    assert (rig.wallet.relayed, rig.node.submitted) == (["tx1"], [RAW])


async def test_input_spent_while_blocks_arrive_proves_nothing_yet(rig: Rig) -> None:
    """The payment itself may be in a block that arrived between the two calls."""
    made = await rig.published(transfer())
    rig.node.known.clear()
    rig.node.spent, rig.node.replaced = {"a"}, 1
    assert (await rig.payments.look_up(made)).outcome is Outcome.ABSENT
    assert (await rig.known()).conflict is None


async def test_payment_that_is_just_being_mined_is_not_resent(rig: Rig) -> None:
    made = await rig.published(transfer())
    rig.node.misses = 1
    verdict = await rig.payments.publish(made)
    assert (verdict.outcome, verdict.reason) == (Outcome.PENDING, "1 of 3 confirmations")
    assert (rig.node.submitted, (await rig.known()).height) == ([], rig.node.top)


async def test_payment_is_unknown_while_blocks_outrun_the_node(rig: Rig) -> None:
    made = await rig.published(transfer())
    before = await rig.known()
    rig.node.misses = 9
    with pytest.raises(Unavailable, match="moved while its node was asked"):
        await rig.payments.publish(made)
    assert (rig.node.submitted, await rig.known()) == ([], before)


@pytest.mark.parametrize("is_back", [True, False], ids=["in the pool again", "nowhere"])
async def test_input_that_is_unspent_again_is_reported_no_longer(rig: Rig, is_back: bool) -> None:
    made = await rig.published(transfer())
    rig.node.known.clear()
    rig.node.spent = {"a"}
    assert (await rig.payments.look_up(made)).outcome is Outcome.UNKNOWN
    rig.clock.now += 61 * MINUTE_MS
    assert "something has spent an input" in (await rig.payments.conditions())[0].text
    rig.node.spent = set()
    rig.node.known = {"tx1": None} if is_back else {}
    await rig.payments.look_up(made)
    reported = (
        "payment tr_1 was published and is not mined for long, since 2025-11-20T22:33:20.000Z"
    )
    end = "; if its node refuses it permanently: rpcsvc payouts close tr_1 --note TEXT"
    assert await rig.payments.conditions() == faults(reported + end)


async def test_abandoned_payment_found_on_the_chain_is_reported(
    rig: Rig,
) -> None:
    made = await rig.published(transfer())
    await rig.ledger.put_payment(replace(await rig.known(), state=MoneroPaymentState.FAILED))
    rig.node.known["tx1"] = rig.node.top - 50
    assert (await rig.payments.look_up(made)).outcome is Outcome.SETTLED
    assert (await rig.known()).state is MoneroPaymentState.FAILED


# --- after settlement ----------------------------------------------------------------------------


async def test_payment_that_makes_no_progress_is_reported_in_time(rig: Rig) -> None:
    made = await rig.prepared(transfer())
    rig.clock.now += 10 * MINUTE_MS
    assert await rig.payments.conditions() == []
    rig.clock.now += 1
    reported = (
        "payment tr_1 is signed and the network does not take it, since 2025-11-20T22:33:20.000Z"
        "; if its node refuses it permanently: rpcsvc payouts close tr_1 --note TEXT"
    )
    assert await rig.payments.conditions() == faults(reported)
    assert (await rig.payments.publish(made)).outcome is Outcome.PENDING
    rig.clock.now += 60 * MINUTE_MS
    assert await rig.payments.conditions() == [], "an hour from the relay, not from the signature"
    rig.clock.now += 1
    assert "not mined for long" in (await rig.payments.conditions())[0].text
    rig.node.known["tx1"] = rig.node.top
    await rig.payments.look_up(made)
    assert await rig.payments.conditions() == []


async def test_signed_and_unpublished_payment_keeps_the_wallet_busy(rig: Rig) -> None:
    assert not await rig.payments.is_busy()
    made = await rig.prepared(transfer())
    assert await rig.payments.is_busy()
    assert await rig.payments.under_way() == {("tr_1", MoneroPaymentState.PREPARED)}
    await rig.payments.publish(made)
    assert not await rig.payments.is_busy()
    assert await rig.payments.under_way() == {("tr_1", MoneroPaymentState.PUBLISHED)}


async def test_a_receipt_has_a_proof_or_none(rig: Rig) -> None:
    made = await rig.published(transfer())
    rig.node.known["tx1"] = mined = rig.node.top - 50
    await rig.payments.look_up(made)
    rig.wallet.failure = NodeError("wallet", "get_tx_proof", WalletCode.NO_TX_KEY, "no key")
    assert (await rig.payments.receipt(made))["transactionProof"] is None
    rig.wallet.failure = None
    receipt = await rig.payments.receipt(made)
    assert receipt["transactionProof"] == "tx1 paid 4 tr_1 for tr_1"
    assert (receipt["amount"], receipt["block"]) == ("1", mined)
    await rig.ledger.put_payment(replace(await rig.known(), height=None))
    with pytest.raises(Unavailable, match="not settled"):
        await rig.payments.receipt(made)
