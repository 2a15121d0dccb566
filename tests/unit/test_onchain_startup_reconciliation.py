"""Startup reconciliation: nothing is signed with a wallet before it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest

from rpcsvc.domain.money import USDC, XMR, Asset
from rpcsvc.domain.order import Transfer
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.wallets import Outcome, Verdict
from rpcsvc.settlement.onchain.daemon_rpc import ChainUnusable, TimedOut
from rpcsvc.settlement.onchain.engine import OnchainEngine, PayoutGuard
from rpcsvc.settlement.onchain.monero.addresses import AddressPool
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import BlockHeader, NodeInfo, Spent
from rpcsvc.settlement.onchain.monero.records import WalletRecord
from rpcsvc.settlement.onchain.monero.unrecorded import (
    NEWEST_BLOCK_MS,
    TOLD_AFTER_MS,
    MoneroOutgoing,
    OutgoingUnknown,
    StartupReconciliation,
)
from rpcsvc.settlement.onchain.pause import PauseSwitch
from rpcsvc.settlement.onchain.unrecorded import UnrecordedLedger, pause_for
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.chain_options import monero_options
from tests.recording import Recorder
from tests.rows import statement
from tests.sandbox import HOUR_MS, ManualClock
from tests.unit.adapters import CAPS, FLOORS, FakeAdapter, transfer
from tests.unit.payout_guard import SignedBooks

PAUSE_REASON = "transactions of the Monero wallet that the database does not know: run rpcsvc audit"


class Wallet(MoneroOutgoing):
    """The wallet's sent transactions; ``failure``: raised instead."""

    def __init__(self, ledger: UnrecordedLedger) -> None:
        self._unrecorded = ledger
        self.sent: set[str] = set()
        self.failure: Exception | None = None
        self.asked = 0

    async def unknown(self) -> list[str]:
        self.asked += 1
        await asyncio.sleep(0)  # other tasks run during a call
        if self.failure is not None:
            raise self.failure
        return await self._unrecorded.not_on_record(self.sent)


class Signing(FakeAdapter):
    """An adapter that signs every transfer."""

    def __init__(self, signed: list[str], asset: Asset, network: str) -> None:
        super().__init__(asset, network, Verdict(Outcome.PENDING))
        self.signed = signed

    async def prepare(self, item: Transfer, *_others: Any) -> list[Transfer]:
        self.signed.append(item.network)
        return []

    async def maintain(self) -> None:
        pass


class Rig:
    """An engine whose XMR adapter needs the startup reconciliation before it signs."""

    def __init__(self, database: SqliteDatabase, data_dir: Path) -> None:
        self.database = database
        self.ledger: UnrecordedLedger = UnrecordedLedger(database)
        self.wallet, self.switch, self.clock = (
            Wallet(self.ledger), PauseSwitch(data_dir), ManualClock(),
        )  # fmt: skip
        self.steady = ManualClock()
        self.signed: list[str] = []
        self.start()

    def start(self) -> None:
        """Start as after a restart: only the database and the switch are kept."""
        self.poll = StartupReconciliation(
            self.wallet, self.ledger, self.switch, self.clock, steady=self.steady.now_ms
        )
        guard = PayoutGuard(self.switch, CAPS, SignedBooks(), self.clock)
        adapters = [Signing(self.signed, XMR, "monero"), Signing(self.signed, USDC, "arbitrum")]
        self.engine = OnchainEngine(
            cast("Any", adapters), guard, floors=FLOORS, poll_ms=1, reconciliations={XMR: self.poll}
        )


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    database = await SqliteDatabase.open(tmp_path)
    yield Rig(database, tmp_path)
    await database.close()


async def test_a_wallet_that_sent_nothing_unknown_signs_after_one_look(rig: Rig) -> None:
    for _ in range(2):
        await rig.engine.prepare(transfer("monero"), [], Recorder(), {})
    assert (rig.signed, rig.wallet.asked) == (["monero", "monero"], 1)
    assert rig.switch.reason() is None


async def test_signing_that_waits_for_a_pausing_check_signs_nothing(rig: Rig) -> None:
    """Maintenance reconciles first and acknowledges its findings; the waiter then finds none."""
    rig.wallet.sent = {"ab"}
    looked = await asyncio.gather(
        rig.poll.require_done(),
        rig.engine.prepare(transfer("monero"), [], Recorder(), {}),
        return_exceptions=True,
    )
    assert [type(item) for item in looked] == [Unavailable, Unavailable]
    assert rig.signed == []


async def test_unrecorded_payment_pauses_payouts_until_resumed(
    rig: Rig,
) -> None:
    rig.wallet.sent = {"ab", "cd"}
    with pytest.raises(Unavailable, match="not on record"):
        await rig.engine.prepare(transfer("monero"), [], Recorder(), {})
    assert (rig.switch.reason() or "").startswith(PAUSE_REASON)
    assert PAUSE_REASON in str((await rig.engine.health()).detail)
    with pytest.raises(Unavailable, match="paused"):
        await rig.engine.prepare(transfer("monero"), [], Recorder(), {})

    rig.switch.resume()
    await rig.engine.prepare(transfer("monero"), [], Recorder(), {})
    assert rig.signed == ["monero"]
    assert "database does not know" not in str((await rig.engine.health()).detail)

    rig.start()
    await rig.engine.prepare(transfer("monero"), [], Recorder(), {})
    assert rig.switch.reason() is None, "the operator has acknowledged these"
    rig.wallet.sent.add("ef")
    rig.start()
    with pytest.raises(Unavailable, match="not on record"):
        await rig.engine.prepare(transfer("monero"), [], Recorder(), {})
    assert rig.switch.reason() is not None


async def test_what_is_found_during_another_pause_pauses_after_it(rig: Rig) -> None:
    rig.wallet.sent = {"ab"}
    rig.switch.pause("the operator's own")
    with pytest.raises(Unavailable):
        await rig.poll.require_done()
    assert rig.switch.reason() == "the operator's own"
    assert PAUSE_REASON in str(rig.poll.health().detail)
    rig.switch.resume()
    with pytest.raises(Unavailable, match="not on record"):
        await rig.engine.prepare(transfer("monero"), [], Recorder(), {})
    assert (rig.switch.reason() or "").startswith(PAUSE_REASON)


async def test_annotated_and_recorded_payments_are_known(rig: Rig) -> None:
    annotation = (
        "INSERT INTO annotated_transactions (network, txid, note, at) VALUES (?, ?, 'n', 1)"
    )
    await rig.database.write([statement(annotation, ("monero", "ab"))])
    await rig.database.write([statement(annotation, ("arbitrum", "cd"))])
    recorded = (
        "INSERT INTO monero_payments (payment_id, purpose, address, units, fee, txid, raw,"
        " metadata, tx_key, prepared_at, state)"
        " VALUES ('t', 'transfer', 'a', 1, 1, 'ef', x'', '', '', 1, 'prepared')"
    )
    await rig.database.write([statement(recorded, ())])
    assert await rig.ledger.not_on_record({"ab", "cd", "ef", "00"}) == ["00", "cd"]


async def test_the_other_asset_does_not_wait(rig: Rig) -> None:
    rig.wallet.failure = TimedOut("wallet", "get_transfers", "no answer")
    await rig.engine.prepare(transfer("arbitrum"), [], Recorder(), {})
    assert (rig.signed, rig.wallet.asked) == (["arbitrum"], 0)


async def test_wallet_that_lists_nothing_signs_nothing_and_is_told(rig: Rig) -> None:
    rig.wallet.failure = TimedOut("wallet", "get_transfers", "no answer")
    for after_ms in (0, TOLD_AFTER_MS, HOUR_MS):
        rig.steady.now += after_ms
        with pytest.raises(Unavailable, match="not known yet"):
            await rig.engine.prepare(transfer("monero"), [], Recorder(), {})
        assert (await rig.engine.health()).ok is (after_ms == 0)
    assert "reconciliation has failed for 3660 s" in str((await rig.engine.health()).detail)
    assert rig.signed == []

    rig.wallet.failure, rig.wallet.sent = None, {"ab"}
    with pytest.raises(Unavailable, match="not on record"):
        await rig.engine.prepare(transfer("monero"), [], Recorder(), {})


async def test_failures_between_answers_let_no_payouts_through(rig: Rig) -> None:
    """A node that catches up answers, and fails once before and once after."""
    failed = TimedOut("wallet", "get_transfers", "no answer")
    for failure in (failed, OutgoingUnknown("the node is late"), failed):
        rig.wallet.failure = failure
        with pytest.raises(Unavailable, match="not known yet"):
            await rig.engine.prepare(transfer("monero"), [], Recorder(), {})
        rig.steady.now += HOUR_MS
    assert rig.signed == []


@pytest.mark.parametrize("by_ms", [HOUR_MS, -HOUR_MS])
async def test_a_clock_that_is_set_lets_nothing_through(rig: Rig, by_ms: int) -> None:
    rig.wallet.sent = {"ab"}
    rig.wallet.failure = TimedOut("wallet", "get_transfers", "it starts")
    for _ in range(3):
        with pytest.raises(Unavailable, match="not known yet"):
            await rig.engine.prepare(transfer("monero"), [], Recorder(), {})
        rig.clock.now += by_ms
    rig.wallet.failure = None
    with pytest.raises(Unavailable, match="not on record"):
        await rig.engine.prepare(transfer("monero"), [], Recorder(), {})
    assert rig.signed == []


async def test_a_wallet_that_is_not_fit_is_waited_for(rig: Rig) -> None:
    rig.wallet.failure = Unavailable("behind its node")
    for _ in range(3):
        with pytest.raises(Unavailable, match="behind its node"):
            await rig.engine.prepare(transfer("monero"), [], Recorder(), {})
        rig.steady.now += HOUR_MS
    assert (rig.signed, rig.poll.health().ok) == ([], True)


async def test_it_looks_though_nothing_is_to_be_signed(rig: Rig) -> None:
    rig.wallet.sent = {"ab"}

    class Over(Exception):
        pass

    async def pause(_seconds: float) -> None:
        raise Over

    with pytest.raises(Over):
        await rig.engine.run(pause)
    assert rig.switch.reason() is not None


def test_failed_pause_leaves_the_operator_unwarned(tmp_path: Path) -> None:
    assert not pause_for(PauseSwitch(tmp_path / "gone"), "the wallet")


# --- calls to the wallet ------------------------------------------------------------------------


class Daemons:
    """Node and wallet in one; the wallet has scanned ``height_now`` blocks once it was refreshed.

    ``sent``: the wallet's transactions by their block, which it lists once it has scanned that.
    ``mined_at``: when the newest block was made, in ms.
    """

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.scanned_height = MoneroLedger(rig.database).scanned_height
        self.recorded_height = MoneroLedger(rig.database).recorded_height
        self.height_now, self.top, self.address = 100, 100, "4Own"
        self.mined_at: int | None = None
        self.sent = {95: "ab"}
        self.scanned = 0
        self.asked_from: list[int] = []
        self.spent = {"free": Spent.UNSPENT}
        self.live: set[str] = set()
        self.mines = False
        self.lists = 0
        self.failing: str | None = None

    def fail(self, method: str) -> None:
        if method == self.failing:
            raise TimedOut("wallet", method, "no answer")

    async def primary_address(self) -> str:
        self.fail("get_address")
        return self.address

    async def refresh(self) -> None:
        self.scanned = self.height_now

    async def height(self) -> int:
        return self.scanned

    async def info(self) -> NodeInfo:
        top = f"h{self.top - 1}"
        return NodeInfo(self.top, top, "mainnet", True, False, False, 0, 0, "0.18", 600_000)

    async def header_at(self, height: int) -> BlockHeader:
        made = self.rig.clock.now if self.mined_at is None else self.mined_at
        return BlockHeader(height, f"h{height}", f"h{height - 1}", made // 1000)

    async def transfers(self, from_height: int, kinds: Any) -> list[Any]:
        self.fail("get_transfers")
        assert {str(kind) for kind in kinds} == {"out", "pending"}
        self.asked_from.append(from_height)
        listed = [txid for at, txid in self.sent.items() if from_height <= at < self.scanned]
        return [type("Sent", (), {"txid": txid}) for txid in listed]

    async def wallet(self) -> WalletRecord:
        return WalletRecord("mainnet", "4Own", 0)

    async def outputs(self) -> list[Any]:
        self.lists += 1
        return [type("Held", (), {"key_image": each, "spent": False}) for each in self.spent]

    async def key_images(self, images: list[str]) -> dict[str, Spent]:
        found = {image: self.spent[image] for image in images}
        self.height_now = self.top = self.top + self.mines
        return found

    async def live_key_images(self, images: list[str]) -> set[str]:
        return self.live & set(images)


async def read_blocks(rig: Rig, *heights: int) -> None:
    """Record that the deposits of these blocks were read."""
    cursor = "INSERT INTO monero_cursor (height, hash) VALUES (?, 'h')"
    await rig.database.write([statement(cursor, (height,)) for height in heights])


@pytest.fixture
async def daemons(rig: Rig) -> Daemons:
    await read_blocks(rig, 90)
    return Daemons(rig)


def outgoing_of(daemons: Daemons, rig: Rig, **options: Any) -> MoneroOutgoing:
    anything = cast("Any", daemons)
    connection = MoneroConnection(anything, anything, anything, monero_options())
    connection.wallet_checked = True
    steady = rig.steady.now_ms
    return MoneroOutgoing(connection, anything, rig.ledger, rig.clock, steady=steady, **options)


async def pay(rig: Rig, height: int, purpose: str = "transfer") -> None:
    """Record a payment in this block."""
    paid = (
        "INSERT INTO monero_payments (payment_id, purpose, address, units, fee, txid, raw,"
        " metadata, tx_key, prepared_at, state, height)"
        " VALUES (?, ?, 'a', 1, 1, ?, x'', '', '', 1, 'settled', ?)"
    )
    await rig.database.write([statement(paid, (f"at {height}", purpose, f"tx{height}", height))])


async def test_wallet_is_asked_from_the_newest_payment_once_ready(
    rig: Rig,
) -> None:
    daemons = Daemons(rig)
    outgoing = outgoing_of(daemons, rig)
    assert await outgoing.unknown() == [], "nobody can be owed before the first look"
    await read_blocks(rig, 60, 90)
    assert await outgoing.unknown() == ["ab"]
    await pay(rig, 50)
    assert await outgoing_of(daemons, rig).unknown() == ["ab"]
    assert daemons.asked_from == [40, 30]

    daemons.top = 101
    with pytest.raises(Unavailable, match="not at the same block"):
        await outgoing.unknown()
    daemons.top, daemons.address = 100, "4Another"
    with pytest.raises(Unavailable, match="another wallet"):
        await outgoing.unknown()
    assert len(daemons.asked_from) == 2


async def test_payment_before_an_adopted_one_is_found(rig: Rig, daemons: Daemons) -> None:
    """The operator has adopted the newest payment since the copy, and not the one before."""
    daemons.sent, daemons.height_now, daemons.top = {130: "ab", 200: "tx200"}, 300, 300
    await pay(rig, 60)
    await pay(rig, 200)
    assert await outgoing_of(daemons, rig).unknown() == ["ab"]


@pytest.mark.parametrize("is_restarted", [False, True])
async def test_upkeep_while_the_list_waits_hides_no_payment(
    rig: Rig, daemons: Daemons, is_restarted: bool
) -> None:
    """Outputs are split while the clock is wrong, and blocks are scanned."""
    daemons.sent, daemons.height_now, daemons.top = {130: "ab", 200: "tx200"}, 300, 300
    daemons.mined_at = rig.clock.now - NEWEST_BLOCK_MS - 1000
    await pay(rig, 60)
    outgoing = outgoing_of(daemons, rig)
    with pytest.raises(OutgoingUnknown):
        await outgoing.unknown()
    await pay(rig, 200, "upkeep")
    await rig.database.write([statement("DELETE FROM monero_cursor", ())])
    await read_blocks(rig, 299)
    daemons.mined_at = None
    if is_restarted:
        outgoing = outgoing_of(daemons, rig)
    assert await outgoing.unknown() == ["ab"]


@pytest.mark.parametrize("failing", ["get_address", "get_transfers"])
async def test_wallet_that_still_scans_lets_nothing_through(
    rig: Rig, daemons: Daemons, failing: str
) -> None:
    """The wallet may sign as soon as it answers."""
    daemons.failing = failing
    rig.wallet = cast("Any", outgoing_of(daemons, rig))
    rig.start()
    for _ in range(2):
        with suppress(Unavailable):
            await rig.engine.prepare(transfer("monero"), [], Recorder(), {})
        rig.steady.now += HOUR_MS
    assert rig.signed == []


async def test_wallet_that_lacks_addresses_is_waited_for(
    rig: Rig, daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A restored wallet does not list what it paid with deposits to addresses that it lacks."""

    async def check(_self: MoneroConnection) -> None:
        pass

    async def reconcile(_self: AddressPool) -> None:
        raise ChainUnusable("rescanning")

    monkeypatch.setattr(MoneroConnection, "prepare_wallet", check)
    monkeypatch.setattr(AddressPool, "reconcile", reconcile)
    outgoing = outgoing_of(daemons, rig)
    outgoing._connection.wallet_checked = False
    with pytest.raises(Unavailable, match="rescanning"):
        await outgoing.unknown()
    assert daemons.asked_from == []


async def test_payment_that_a_late_node_hides_is_found_later(rig: Rig, daemons: Daemons) -> None:
    """The wallet was restored from its words. Meanwhile the scan of deposits goes on."""
    outgoing, hour = outgoing_of(daemons, rig), 60 * 60_000
    daemons.sent, daemons.mined_at = {130: "ab"}, rig.clock.now - hour
    with pytest.raises(OutgoingUnknown) as found:
        await outgoing.unknown()
    assert "99, is of" in found.value.problem
    assert "60 min from this machine's clock" in found.value.problem
    assert daemons.asked_from == []

    await read_blocks(rig, *range(91, 200))
    daemons.height_now = daemons.top = 200
    daemons.mined_at = rig.clock.now - NEWEST_BLOCK_MS
    assert await outgoing.unknown() == ["ab"]


@pytest.mark.parametrize("off", [-NEWEST_BLOCK_MS - 1000, NEWEST_BLOCK_MS + 1000])
async def test_newest_block_far_from_the_clock_proves_nothing(
    rig: Rig, daemons: Daemons, off: int
) -> None:
    daemons.mined_at = rig.clock.now + off
    with pytest.raises(OutgoingUnknown):
        await outgoing_of(daemons, rig).unknown()
    assert await outgoing_of(daemons, rig, mines_on_demand=True).unknown() == ["ab"]


async def test_node_below_a_block_that_was_read_is_late(rig: Rig, daemons: Daemons) -> None:
    await read_blocks(rig, 100)
    with pytest.raises(OutgoingUnknown) as found:
        await outgoing_of(daemons, rig).unknown()
    assert "newest block is 99, and block 100 was read before" in found.value.problem
    daemons.height_now = daemons.top = 101
    assert await outgoing_of(daemons, rig).unknown() == ["ab"]


async def test_time_of_a_block_of_another_branch_proves_nothing(
    rig: Rig, daemons: Daemons, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two of several nodes behind one name have answered."""

    async def another(height: int) -> BlockHeader:
        return BlockHeader(height, "other", "other", rig.clock.now // 1000)

    monkeypatch.setattr(daemons, "header_at", another)
    with pytest.raises(Unavailable, match="chain moved"):
        await outgoing_of(daemons, rig).unknown()


async def test_unknown_spend_in_the_pool_is_waited_for(rig: Rig, daemons: Daemons) -> None:
    outgoing = outgoing_of(daemons, rig)
    daemons.spent = {"free": Spent.UNSPENT, "ours": Spent.IN_POOL, "lost": Spent.IN_POOL}
    daemons.live = {"ours"}
    with pytest.raises(OutgoingUnknown) as found:
        await outgoing.unknown()
    assert "what spends 1 outputs" in found.value.problem
    assert daemons.asked_from == []

    daemons.spent["lost"] = Spent.IN_CHAIN
    daemons.height_now = daemons.top = 101
    assert await outgoing.unknown() == ["ab"]


async def test_outputs_are_listed_again_after_a_block_or_a_pause(
    rig: Rig, daemons: Daemons
) -> None:
    """A wallet may have thousands, and a spend waits in the pool for a block."""
    outgoing = outgoing_of(daemons, rig)
    daemons.spent = {"lost": Spent.IN_POOL}
    for _ in range(600):
        with pytest.raises(OutgoingUnknown):
            await outgoing.unknown()
        rig.steady.now += 2000
    assert daemons.lists == 23, "in 20 minutes: after 4, 8, 16, 32 s, then once a minute"
    daemons.height_now = daemons.top = 101
    with pytest.raises(OutgoingUnknown):
        await outgoing.unknown()
    assert daemons.lists == 24


async def test_spend_mined_during_the_check_is_listed(rig: Rig, daemons: Daemons) -> None:
    daemons.mines = True
    await outgoing_of(daemons, rig).unknown()
    assert daemons.scanned == daemons.top == 101


async def test_unknown_outgoing_holds_payouts_and_is_in_health(
    rig: Rig,
) -> None:
    rig.wallet.failure = OutgoingUnknown("the pool has what spends 2 outputs")
    for _ in range(3):
        with pytest.raises(Unavailable, match="not known yet"):
            await rig.engine.prepare(transfer("monero"), [], Recorder(), {})
        rig.steady.now += HOUR_MS
    assert "the pool has what spends 2 outputs" in str((await rig.engine.health()).detail)
    rig.wallet.failure = None
    await rig.engine.prepare(transfer("monero"), [], Recorder(), {})
    assert rig.signed == ["monero"]
    assert "pool" not in str((await rig.engine.health()).detail)
