"""The Monero deposit scanner on a simulated chain and wallet: only spendable money is credited.

Two transactions to one address may have the same one-time key. As in monero-wallet-rpc, the wallet
counts both in the pool, and only one of them once mined.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from structlog.testing import LogCapture

from rpcsvc.domain.order import DepositKey, DepositState
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.wallets import DepositSighting
from rpcsvc.settlement.onchain.daemon_rpc import ChainUnusable, TooLarge
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.deposits import DepositScanner
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import (
    BlockHeader,
    NodeBlock,
    NodeInfo,
    NodeTransaction,
)
from rpcsvc.settlement.onchain.monero.records import WalletRecord
from rpcsvc.settlement.onchain.monero.wallet_types import (
    Output,
    OutputFilter,
    Refreshed,
    Subaddress,
    SubaddressIndex,
    WalletTransfer,
    WalletTransferKind,
)
from rpcsvc.settlement.onchain.thresholds import Threshold
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.chain_options import monero_options
from tests.logs import captured

XMR = 10**12
OPTIONS = monero_options(
    nettype="fakechain", thresholds=(Threshold(0, 3), Threshold(50 * XMR, 5)), tracked_blocks=8
)
SEEN, CONFIRMED, REMOVED = DepositState.SEEN, DepositState.CONFIRMED, DepositState.REMOVED
VOID, MISSING = "monero_deposit_voided", "monero_deposit_missed"


@dataclass(frozen=True)
class Paid:
    """A transaction to one address; its outputs are one-time keys with amounts."""

    txid: str
    minor: int
    outputs: tuple[tuple[str, int], ...]


def paid(txid: str, units: int, key: str | None = None, minor: int = 1) -> Paid:
    return Paid(txid, minor, ((key or f"key-{txid}", units),))


@dataclass
class Chain:
    """Blocks and pool, as node and wallet see them."""

    blocks: list[tuple[str, tuple[Paid, ...]]] = field(default_factory=list)
    pool: list[Paid] = field(default_factory=list)
    branch: int = 0

    def mine(self, *found: Paid, empty: int = 0) -> None:
        self.pool = [item for item in self.pool if item not in found]
        for content in (found, *[()] * empty):
            self.blocks.append((f"h{len(self.blocks)}.{self.branch}", content))

    def pop(self, count: int) -> None:
        for _, content in self.blocks[-count:]:
            self.pool += content
        del self.blocks[-count:]
        self.branch += 1


@dataclass
class Node:
    """``asked``: the number of transactions requested. ``calls``: for what is in blocks.

    ``between``: what happens between its looks into the chain and into the pool.
    """

    chain: Chain
    asked: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    between: Callable[[], None] = lambda: None

    async def info(self) -> NodeInfo:
        height = len(self.chain.blocks)
        top = self.chain.blocks[-1][0]
        return NodeInfo(height, top, "fakechain", True, False, True, height, 0, "0.18", 600_000)

    async def headers(self, first: int, last: int) -> list[BlockHeader]:
        self.calls["headers"] += 1
        if last >= len(self.chain.blocks):
            return []
        assert last - first < 1000, "a restricted node lists no more"
        return [self._header(height) for height in range(first, last + 1)]

    async def block_at(self, height: int) -> NodeBlock | None:
        self.calls["block_at"] += 1
        if height >= len(self.chain.blocks):
            return None
        txids = tuple(item.txid for item in self.chain.blocks[height][1])
        return NodeBlock(self._header(height), f"miner of {height}", txids)

    def _header(self, height: int) -> BlockHeader:
        blocks = self.chain.blocks
        return BlockHeader(height, blocks[height][0], blocks[height - 1][0], 0)

    async def transactions(self, txids: Sequence[str]) -> dict[str, NodeTransaction]:
        self.asked += len(txids)
        found = dict[str, NodeTransaction]()
        for height, (_, content) in enumerate(self.chain.blocks):
            found |= {item.txid: NodeTransaction(item.txid, height, False) for item in content}
        self.between()
        for item in self.chain.pool:
            found.setdefault(item.txid, NodeTransaction(item.txid, None, False))
        return {txid: found[txid] for txid in txids if txid in found}


@dataclass
class Wallet:
    """Scans like wallet2: of outputs with one key it keeps the largest, and lists the difference.

    ``spent``: spent keys. ``believes``: it counts every output as new. ``lost``: transactions that
    it does not have. ``lag``: the number of blocks that it lags by. ``most``: the maximum number of
    outputs in an answer. ``primary``: its primary address.
    """

    chain: Chain
    spent: set[str] = field(default_factory=set)
    believes: bool = False
    lost: set[str] = field(default_factory=set)
    lag: int = 0
    most: int = 1000
    primary: str = "4primary"
    asked: Counter[str] = field(default_factory=Counter)

    async def refresh(self) -> Refreshed:
        return Refreshed(0)

    async def height(self) -> int:
        return len(self.chain.blocks) - self.lag

    async def primary_address(self) -> str:
        return self.primary

    async def transfers(self, from_height: int) -> list[WalletTransfer]:
        listed, _ = self._scanned()
        return [item for item in listed if item.height is None or item.height >= from_height]

    async def transfer(self, txid: str) -> list[WalletTransfer]:
        self.asked["transfer"] += 1
        return [item for item in self._scanned()[0] if item.txid == txid]

    async def outputs(self, which: OutputFilter, indices: Sequence[int]) -> list[Output]:
        assert which is OutputFilter.ALL
        self.asked["outputs"] += 1
        found = [item for item in self._scanned()[1] if item.index.minor in indices]
        if len(found) > self.most:
            raise TooLarge("wallet", "incoming_transfers", "the answer has over 33554432 bytes")
        return found

    def _scanned(self) -> tuple[list[WalletTransfer], list[Output]]:
        listed: list[WalletTransfer] = []
        held: dict[str, Output] = {}
        for height, (_, content) in enumerate(self.chain.blocks):
            for item in content:
                if item.txid not in self.lost:
                    amount = sum(self._take(item, key, units, held) for key, units in item.outputs)
                    listed.append(_transfer(item, amount, height))
        for item in self.chain.pool:
            amount = sum(
                units if self.believes else max(0, units - _amount(held.get(key)))
                for key, units in item.outputs
            )
            listed.append(_transfer(item, amount, None))
        return listed, list(held.values())

    def _take(self, item: Paid, key: str, units: int, held: dict[str, Output]) -> int:
        before = _amount(held.get(key))
        if not self.believes and (before >= units or (before and key in self.spent)):
            return 0
        name = f"{key} of {item.txid}" if self.believes else key
        index = SubaddressIndex(0, item.minor)
        held[name] = Output(item.txid, 0, index, units, f"image-{key}", 0, False, True, False)
        return units if self.believes else units - before


def _amount(held: Output | None) -> int:
    return held.amount if held else 0


def _transfer(item: Paid, amount: int, height: int | None) -> WalletTransfer:
    kind = WalletTransferKind.POOL if height is None else WalletTransferKind.INCOMING
    index = SubaddressIndex(0, item.minor)
    return WalletTransfer(
        kind, item.txid, f"8x{item.minor}", index, amount, 1, height, 0, 0, 0, False, False
    )


class Clock:
    def now_ms(self) -> int:
        return 1_700_000_000_000


@dataclass
class Rig:
    """A scanner, and the states that it reported by transaction."""

    chain: Chain
    node: Node
    wallet: Wallet
    ledger: MoneroLedger
    scanner: DepositScanner
    reported: dict[str, DepositState] = field(default_factory=dict)
    units: dict[str, int] = field(default_factory=dict)
    log: LogCapture = field(default_factory=LogCapture)

    async def observe(self) -> list[DepositSighting]:
        """One pass, not committed."""
        return await self.scanner.observe(await self.scanner._connection.check_node())

    async def poll(self) -> dict[str, DepositState]:
        """One pass, committed; the last state of every deposit."""
        found = await self.observe()
        await self.scanner.acknowledge(found)
        for item in found:
            self.reported[item.key.txid] = item.state
            self.units[item.key.txid] = item.units
        return self.reported

    @property
    def logged(self) -> list[str]:
        """The errors that it logged."""
        return [item["event"] for item in self.log.entries if item["log_level"] == "error"]

    def credited(self) -> int:
        """The units credited to orders."""
        return sum(self.units[txid] for txid, state in self.reported.items() if state is CONFIRMED)

    def restart(self) -> None:
        self.scanner = scanner(self.node, self.wallet, self.ledger)


def scanner(node: Any, wallet: Any, ledger: MoneroLedger) -> DepositScanner:
    connection = MoneroConnection(node, wallet, ledger, OPTIONS)
    return DepositScanner(connection, ledger, Clock(), OPTIONS)


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    database = await SqliteDatabase.open(tmp_path)
    ledger = MoneroLedger(database)
    await ledger.adopt_wallet(WalletRecord("fakechain", "4primary", 0))
    await ledger.add_addresses([Subaddress(SubaddressIndex(0, n), f"8x{n}") for n in (1, 2)])
    chain = Chain()
    chain.mine(empty=9)
    node, wallet = Node(chain), Wallet(chain)
    made = Rig(chain, node, wallet, ledger, scanner(node, wallet, ledger))
    made.log = captured(monkeypatch, "rpcsvc.settlement.onchain.monero.deposits")
    await made.poll()
    yield made
    await database.close()


# --- scan progress -----------------------------------------------------------------------------


async def test_scan_is_complete_if_the_wallet_is_where_the_node_is(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rig.scanner.complete_until == Clock().now_ms()
    rig.wallet.lag = 1
    await rig.poll()
    assert rig.scanner.complete_until is None, "what is in the last block was not seen"
    rig.wallet.lag = 0
    await rig.poll()
    assert rig.scanner.complete_until == Clock().now_ms()
    monkeypatch.setattr(MoneroConnection, "stall", lambda _: "has shown no new block")
    await rig.poll()
    assert rig.scanner.complete_until is None, "its chain does not go on"


async def test_scanned_height_is_that_of_the_committed_block(rig: Rig) -> None:
    await rig.poll()
    top = len(rig.chain.blocks) - 1
    assert rig.scanner.scanned_height == top
    rig.chain.mine(paid("a", XMR))
    found = await rig.observe()
    assert rig.scanner.scanned_height == top, "shown, and not committed yet"
    await rig.scanner.acknowledge(found)
    assert rig.scanner.scanned_height == top + 1


async def test_wallet_rests_until_block_or_pool_change(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = Clock().now_ms()
    monkeypatch.setattr(Clock, "now_ms", lambda _: now)

    async def rests(pool_size: int = 0, *, is_paying: bool = False) -> bool:
        info = replace(await rig.node.info(), pool_size=pool_size)
        return rig.scanner.may_rest(info, is_paying=is_paying)

    rig.restart()
    assert not await rests(), "nothing was looked at yet"
    await rig.poll()
    assert await rests()
    assert not await rests(pool_size=1)
    now += 1_999
    assert await rests()
    now += 1
    assert not await rests(), "one may have taken the place of another in the pool"
    assert await rests(is_paying=True), "a refresh would have the payment wait"
    assert not await rests(pool_size=1, is_paying=True)
    now += 2_000
    assert not await rests(is_paying=True)
    rig.chain.mine(paid("a", XMR))
    assert not await rests()
    await rig.poll()
    assert not await rests(), "it had something to show"
    await rig.poll()
    assert await rests()
    rig.wallet.primary = "4another"
    with pytest.raises(ChainUnusable):
        await rig.poll()
    assert not await rests()


async def test_failed_scan_is_not_complete(rig: Rig) -> None:
    rig.wallet.primary = "4another"
    with pytest.raises(ChainUnusable):
        await rig.poll()
    assert rig.scanner.complete_until is None


# --- honest deposits -------------------------------------------------------------------------


async def test_a_deposit_is_confirmed_at_the_cost_of_one_question(rig: Rig) -> None:
    one = paid("t1", 5 * XMR)
    rig.chain.pool.append(one)
    assert await rig.poll() == {"t1": SEEN}
    rig.chain.mine(one)
    for _ in range(3):
        await rig.poll()
        rig.chain.mine()
    assert await rig.poll() == {"t1": CONFIRMED}
    for _ in range(20):
        rig.chain.mine()
        await rig.poll()
    assert rig.wallet.asked == {"outputs": 1}
    assert rig.logged == []


async def test_deposits_of_a_block_are_confirmed_by_one_listing(rig: Rig) -> None:
    many = [paid(f"t{n}", XMR, minor=1 + n % 2) for n in range(30)]
    rig.chain.mine(*many)
    for _ in range(2):
        assert set((await rig.poll()).values()) == {SEEN}
        rig.chain.mine()
    assert set((await rig.poll()).values()) == {CONFIRMED}
    assert rig.wallet.asked == {"outputs": 1}


async def test_listing_for_one_deposit_judges_no_other_again(rig: Rig) -> None:
    rig.chain.mine(paid("a", XMR), paid("b", 60 * XMR, minor=2), empty=2)
    assert await rig.poll() == {"a": CONFIRMED, "b": SEEN}
    rig.wallet.most = 0  # no output can be listed any more
    for _ in range(4):
        rig.chain.mine()
        assert await rig.poll() == {"a": CONFIRMED, "b": SEEN}


async def test_scan_goes_on_if_blocks_are_too_full_to_list_again(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.chain.mine(paid("a", XMR), empty=1)
    await rig.poll()
    top, real = len(rig.chain.blocks) - 1, rig.wallet.transfers

    async def transfers(from_height: int) -> list[WalletTransfer]:
        if from_height <= top:
            raise TooLarge("wallet", "get_transfers", "the answer has over 33554432 bytes")
        return await real(from_height)

    monkeypatch.setattr(rig.wallet, "transfers", transfers)
    rig.chain.mine(paid("b", XMR, minor=2))
    assert await rig.poll() == {"a": CONFIRMED, "b": SEEN}


async def test_deposit_without_outputs_is_asked_about_once_a_block(rig: Rig) -> None:
    """An answer with more outputs than can be listed takes the wallet long."""
    rig.chain.mine(paid("a", XMR), empty=1)
    await rig.poll()
    rig.wallet.most = 0
    for blocks in range(1, 4):
        rig.chain.mine()
        for _ in range(5):
            assert await rig.poll() == {"a": SEEN}
        assert rig.wallet.asked["outputs"] == blocks


async def test_deposits_found_by_a_start_cost_one_question_together(rig: Rig) -> None:
    rig.chain.mine(*(paid(f"t{n}", XMR, minor=1 + n % 2) for n in range(30)), empty=9)
    assert set((await rig.poll()).values()) == {CONFIRMED}
    assert rig.wallet.asked == {"outputs": 1}


async def test_what_comes_later_takes_no_confirmation_back(rig: Rig) -> None:
    """The sum on an address needs more confirmations than its first deposit alone."""
    rig.chain.mine(paid("a", XMR), empty=2)
    assert await rig.poll() == {"a": CONFIRMED}
    rig.chain.mine(paid("b", 60 * XMR))
    assert await rig.poll() == {"a": CONFIRMED, "b": SEEN}
    rig.chain.mine(empty=3)
    assert await rig.poll() == {"a": CONFIRMED, "b": CONFIRMED}


async def test_two_deposits_to_one_address_are_both_confirmed(rig: Rig) -> None:
    one, two = paid("t1", 5 * XMR), paid("t2", 5 * XMR)
    rig.chain.pool += [one, two]
    await rig.poll()
    rig.chain.mine(one, two, empty=3)
    assert await rig.poll() == {"t1": CONFIRMED, "t2": CONFIRMED}
    rig.chain.mine(paid("t3", XMR), empty=3)
    assert (await rig.poll())["t3"] is CONFIRMED


# --- blocks that come while the node answers -------------------------------------------------


async def test_deposit_that_is_just_being_mined_is_not_removed(rig: Rig) -> None:
    one = paid("t1", 5 * XMR)
    rig.chain.pool.append(one)
    assert await rig.poll() == {"t1": SEEN}

    def mine_once() -> None:
        rig.node.between = lambda: None
        rig.chain.mine(one)

    rig.node.between = mine_once
    found = await rig.observe()
    assert found == [], "it is in the pool, then in a block: nothing of it has changed"
    await rig.scanner.acknowledge(found)
    rig.chain.mine(empty=3)
    assert await rig.poll() == {"t1": CONFIRMED}


async def test_deposits_stay_while_blocks_outrun_the_node(rig: Rig) -> None:
    rig.chain.pool.append(one := paid("t1", 5 * XMR))
    assert await rig.poll() == {"t1": SEEN}
    rig.chain.pool.remove(one)
    rig.node.between = rig.chain.mine
    for _ in range(3):
        with pytest.raises(Unavailable, match="moved while its node was asked"):
            await rig.observe()
        await rig.scanner.acknowledge([])
        assert rig.scanner.complete_until is None
    rig.node.between = lambda: None
    assert await rig.poll() == {"t1": REMOVED}, "the top stood still: it is gone"


async def test_confirmations_at_a_height_count_its_own_block(rig: Rig) -> None:
    rig.chain.mine(one := paid("t1", 5 * XMR), empty=3)
    await rig.poll()
    key = DepositKey("monero", one.txid, one.minor)
    newest = len(rig.chain.blocks) - 1
    assert await rig.scanner.confirmations(key, newest) == await rig.scanner.confirmations(key) == 4
    assert await rig.scanner.confirmations(key, newest - 3) == 1
    rig.restart()
    assert await rig.scanner.confirmations(key, newest) == 4, "a replica that scans nothing"


async def test_deposit_that_a_start_can_not_tell_of_has_no_depth(rig: Rig) -> None:
    rig.chain.mine(one := paid("t1", 5 * XMR), empty=3)
    assert await rig.poll() == {"t1": CONFIRMED}
    key = DepositKey("monero", one.txid, one.minor)
    assert await rig.scanner.confirmations(key) == 4
    rig.chain.pop(4)
    rig.chain.pool.clear()
    rig.restart()
    rig.node.between = rig.chain.mine
    with pytest.raises(Unavailable):
        await rig.observe()
    assert await rig.scanner.confirmations(key) == 0, "nothing is paid out for it"


async def test_node_that_lacks_the_newest_block_is_told_of(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.chain.mine(paid("t1", 5 * XMR), empty=3)
    assert await rig.poll() == {"t1": CONFIRMED}
    late = Node(Chain(blocks=[*rig.chain.blocks]))
    rig.chain.mine(empty=1)
    with monkeypatch.context() as patch:
        patch.setattr(rig.node, "headers", late.headers)
        with pytest.raises(Unavailable):
            await rig.observe()
    newest = len(rig.chain.blocks) - 1
    lag = rig.scanner._connection.lag
    assert lag == f"of several nodes one lacks block {newest}, which another named"
    assert await rig.scanner.confirmations(DepositKey("monero", "t1", 1)) == 0
    await rig.poll()
    assert rig.scanner._connection.lag is None


@pytest.mark.parametrize("is_in_pool", [False, True])
async def test_node_that_lacks_its_block_takes_no_confirmed_deposit(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_in_pool: bool
) -> None:
    """A late node answers where deposits are, and nothing else."""
    late = Node(Chain(blocks=[*rig.chain.blocks]))
    rig.chain.mine(one := paid("t1", 5 * XMR), empty=3)
    assert await rig.poll() == {"t1": CONFIRMED}
    late.chain.pool += [one] if is_in_pool else []
    with monkeypatch.context() as patch:
        patch.setattr(rig.node, "transactions", late.transactions)
        with pytest.raises(Unavailable):
            await rig.observe()
        assert "of several nodes one lacks block" in (rig.scanner._connection.lag or "")
    assert await rig.observe() == [], "nothing was noted of it"
    rig.chain.pop(4)
    rig.chain.pool = [one] if is_in_pool else []
    rig.chain.mine(empty=5)
    assert await rig.poll() == {"t1": SEEN if is_in_pool else REMOVED}


async def test_deposit_of_a_branch_that_one_node_lacks_has_no_depth(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of two nodes has kept the branch with it; the other one answers where deposits are."""
    rig.chain.mine(paid("t1", 5 * XMR), empty=3)
    assert await rig.poll() == {"t1": CONFIRMED}
    key = DepositKey("monero", "t1", 1)
    assert await rig.scanner.confirmations(key) == 4
    other = Node(Chain(blocks=[*rig.chain.blocks]))
    other.chain.pop(4)
    other.chain.pool.clear()
    other.chain.mine(empty=5)
    with monkeypatch.context() as patch:
        patch.setattr(rig.node, "transactions", other.transactions)
        with suppress(Unavailable):
            await rig.poll()
    assert await rig.scanner.confirmations(key) == 0, "nothing is paid out for it"
    await rig.poll()
    assert await rig.scanner.confirmations(key) == 4


async def test_scan_that_fails_above_a_fork_leaves_no_depth(rig: Rig) -> None:
    rig.chain.mine(paid("t1", 5 * XMR), empty=3)
    assert await rig.poll() == {"t1": CONFIRMED}
    rig.chain.pop(4)
    rig.chain.pool.clear()
    rig.chain.mine(empty=9)
    rig.node.between = rig.chain.mine
    with pytest.raises(Unavailable):
        await rig.observe()
    assert await rig.scanner.confirmations(DepositKey("monero", "t1", 1)) == 0


async def test_deposit_above_a_fork_read_out_of_step_has_no_depth(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.chain.mine(paid("t1", 5 * XMR), empty=3)
    assert await rig.poll() == {"t1": CONFIRMED}
    late = Node(Chain(blocks=[*rig.chain.blocks]))  # behind the same name, and not up to date
    rig.chain.pop(4)
    rig.chain.pool.clear()
    rig.chain.mine(empty=19)
    rig.restart()
    monkeypatch.setattr(rig.node, "transactions", late.transactions)
    rig.wallet.lag = 1
    await rig.poll()
    key = DepositKey("monero", "t1", 1)
    assert await rig.scanner.confirmations(key) == 0, "nothing is paid out for it"
    monkeypatch.undo()
    rig.wallet.lag = 0
    assert await rig.poll() == {"t1": REMOVED}
    assert await rig.scanner.confirmations(key) == 0


# --- several nodes behind one name, one on a replaced branch ---------------------------------


async def replaced(rig: Rig, confirmed: bool) -> Node:
    """Replace the block of a deposit; return a node that kept it, its branch as high."""
    rig.chain.mine(paid("a", XMR))
    if confirmed:
        rig.chain.mine(empty=1)
    await rig.poll()
    late = Node(Chain(blocks=[*rig.chain.blocks]))
    rig.chain.pop(3 if confirmed else 1)
    rig.chain.pool.clear()
    rig.chain.mine(empty=6)
    late.chain.mine(empty=len(rig.chain.blocks) - len(late.chain.blocks) - 1)
    return late


@pytest.mark.parametrize("confirmed", [False, True])
@pytest.mark.parametrize("too", [(), ("block_at",), ("headers",), ("block_at", "headers")])
async def test_deposit_on_a_replaced_branch_does_not_count(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, confirmed: bool, too: Sequence[str]
) -> None:
    """The node that names the top has the new branch; another answers where the deposit is."""
    late = await replaced(rig, confirmed)
    state = CONFIRMED if confirmed else SEEN
    assert rig.reported == {"a": state}
    with monkeypatch.context() as patch:
        patch.setattr(rig.wallet, "chain", late.chain)
        for name in ("transactions", *too):
            patch.setattr(rig.node, name, getattr(late, name))
        for _ in range(3):
            with suppress(Unavailable):
                await rig.poll()
            assert rig.reported == {"a": state}
            assert await rig.scanner.confirmations(DepositKey("monero", "a", 1)) == 0
            assert rig.scanner.complete_until is None, "deadlines wait"
    assert await rig.poll() == {"a": REMOVED}


async def test_deposit_first_seen_on_a_replaced_branch_waits(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others are shown meanwhile, and it counts once its own block is shown."""
    top = len(rig.chain.blocks)
    late = Node(Chain(blocks=[*rig.chain.blocks]))
    late.chain.mine(one := paid("a", XMR), empty=5)
    rig.chain.branch += 1
    rig.chain.mine(empty=5)
    assert len(rig.chain.blocks) == len(late.chain.blocks)
    with monkeypatch.context() as patch:
        patch.setattr(rig.wallet, "chain", late.chain)
        patch.setattr(rig.node, "transactions", late.transactions)
        assert await rig.poll() == {"a": SEEN}
        assert await rig.scanner.confirmations(DepositKey("monero", "a", 1)) == 0
        assert rig.scanner.scanned_height == top - 1, "the cursor stays below"
    rig.chain.mine(one, empty=2)
    assert await rig.poll() == {"a": CONFIRMED}
    assert await rig.scanner.confirmations(DepositKey("monero", "a", 1)) == 3


async def test_block_of_a_replaced_branch_is_not_the_one_judged(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node on a third branch has a confirmed deposit deeper; then it leaves the chain."""
    key = DepositKey("monero", "a", 1)
    rig.chain.mine(empty=4)
    late = Node(Chain(blocks=[*rig.chain.blocks]))
    late.chain.mine(paid("a", XMR), empty=8)
    rig.chain.branch += 1
    rig.chain.mine(empty=2)
    assert await rig.poll() == {}
    rig.chain.mine(paid("a", XMR), empty=5)
    assert await rig.poll() == {"a": CONFIRMED}
    depth = await rig.scanner.confirmations(key)
    with monkeypatch.context() as patch:
        patch.setattr(rig.wallet, "chain", late.chain)
        patch.setattr(rig.node, "transactions", late.transactions)
        for _ in range(3):
            with suppress(Unavailable):
                await rig.poll()
            assert await rig.scanner.confirmations(key) <= depth
        rig.chain.pop(6)
        rig.chain.pool.clear()
        rig.chain.mine(empty=8)
        for _ in range(3):
            with suppress(Unavailable):
                await rig.poll()
            assert await rig.scanner.confirmations(key) == 0
            assert rig.scanner.complete_until is None
    assert await rig.poll() == {"a": REMOVED}


async def test_deposits_are_shown_to_be_on_the_chain_once(rig: Rig) -> None:
    rig.chain.mine(*(paid(f"t{n}", XMR, minor=1 + n % 2) for n in range(30)))
    await rig.poll()
    rig.chain.mine(empty=2)
    rig.node.calls.clear()
    assert set((await rig.poll()).values()) == {CONFIRMED}
    assert rig.node.calls == {"headers": 2, "block_at": 1}, "one of the headers is for the cursor"
    rig.node.calls.clear()
    await rig.poll()
    assert rig.node.calls == {}
    rig.chain.mine()
    await rig.poll()
    assert rig.node.calls == {"headers": 1}


async def test_deposit_deeper_than_one_listing_is_confirmed(rig: Rig) -> None:
    rig.chain.mine(paid("a", XMR), empty=2100)
    assert await rig.poll() == {"a": CONFIRMED}
    assert rig.node.calls["headers"] == 3 + 3, "the cursor is as deep"


# --- the same key twice ----------------------------------------------------------------------


@pytest.mark.parametrize("first", [5, 7, 9])
@pytest.mark.parametrize("apart", [0, 1, 6], ids=["one block", "two blocks", "deep apart"])
@pytest.mark.parametrize("swapped", [False, True], ids=["in order", "other first"])
async def test_no_more_is_credited_than_can_be_spent(
    rig: Rig, first: int, apart: int, swapped: bool
) -> None:
    one, two = paid("t1", first * XMR, "same"), paid("t2", 7 * XMR, "same")
    rig.chain.pool += [one, two]
    assert await rig.poll() == {"t1": SEEN, "t2": SEEN}
    before, after = (two, one) if swapped else (one, two)
    if apart:
        rig.chain.mine(before)
        for _ in range(apart):
            await rig.poll()
            rig.chain.mine()
        rig.chain.mine(after, empty=4)
    else:
        rig.chain.mine(before, after, empty=4)
    await rig.poll()
    assert rig.reported == {before.txid: CONFIRMED, after.txid: REMOVED}
    assert rig.credited() == before.outputs[0][1] <= max(first, 7) * XMR
    assert rig.logged == [VOID]


async def test_the_void_one_is_gone_as_soon_as_it_is_mined(rig: Rig) -> None:
    one, two = paid("t1", 5 * XMR, "same"), paid("t2", 5 * XMR, "same")
    rig.chain.pool += [one, two]
    await rig.poll()
    rig.chain.mine(one, two)
    assert await rig.poll() == {"t1": SEEN, "t2": REMOVED}


async def test_second_output_with_a_confirmed_key_is_never_shown(rig: Rig) -> None:
    rig.chain.mine(paid("t1", 5 * XMR, "same"), empty=3)
    assert await rig.poll() == {"t1": CONFIRMED}
    two = paid("t2", 5 * XMR, "same")
    rig.chain.pool.append(two)
    await rig.poll()
    rig.chain.mine(two, empty=9)
    assert await rig.poll() == {"t1": CONFIRMED}


async def test_larger_output_with_a_confirmed_key_adds_the_difference(
    rig: Rig,
) -> None:
    rig.chain.mine(paid("t1", 5 * XMR, "same"), empty=3)
    await rig.poll()
    two = paid("t2", 7 * XMR, "same")
    rig.chain.pool.append(two)
    await rig.poll()
    rig.chain.mine(two, empty=9)
    await rig.poll()
    assert rig.credited() == 7 * XMR


async def test_a_larger_one_adds_nothing_once_the_first_is_spent(rig: Rig) -> None:
    rig.chain.mine(paid("t1", 5 * XMR, "same"), empty=3)
    await rig.poll()
    two = paid("t2", 7 * XMR, "same")
    rig.chain.pool.append(two)
    await rig.poll()
    rig.wallet.spent.add("same")
    rig.chain.mine(two, empty=9)
    assert await rig.poll() == {"t1": CONFIRMED, "t2": REMOVED}


async def test_transaction_with_one_key_twice_is_credited_once(rig: Rig) -> None:
    both = Paid("t1", 1, (("same", 5 * XMR), ("same", 5 * XMR)))
    rig.chain.pool.append(both)
    await rig.poll()
    rig.chain.mine(both, empty=9)
    assert await rig.poll() == {"t1": REMOVED}
    assert rig.logged == [VOID]


async def test_void_deposit_stays_void_over_restarts_and_is_not_reread(
    rig: Rig,
) -> None:
    one, two = paid("t1", 5 * XMR, "same"), paid("t2", 5 * XMR, "same")
    rig.chain.pool += [one, two]
    await rig.poll()
    rig.chain.mine(one, two, empty=9)
    expected = {"t1": CONFIRMED, "t2": REMOVED}
    assert await rig.poll() == expected
    rig.wallet.asked.clear()
    for _ in range(9):
        rig.chain.mine()
        assert await rig.poll() == expected
    assert not rig.wallet.asked
    rig.restart()
    for _ in range(9):
        rig.chain.mine()
        assert await rig.poll() == expected
    assert not rig.wallet.asked
    assert rig.logged == [VOID]


async def test_a_void_deposit_stays_void_when_the_wallet_scans_again(rig: Rig) -> None:
    rig.chain.mine(paid("t1", 5 * XMR, "same"), empty=3)
    await rig.poll()
    two, three = paid("t2", 7 * XMR, "same"), paid("t3", 9 * XMR, "same")
    rig.chain.pool.append(two)
    await rig.poll()
    rig.wallet.spent.add("same")
    rig.chain.mine(two, empty=9)
    rig.chain.mine(three, empty=9)
    await rig.poll()
    rig.wallet.spent.clear()  # now the wallet keeps the largest
    for _ in range(2):
        rig.chain.mine()
        assert await rig.poll() == {"t1": CONFIRMED, "t2": REMOVED}
        rig.restart()


# --- reorganisations -------------------------------------------------------------------------


@pytest.mark.parametrize("looks", [True, False], ids=["seen at work", "found afterwards"])
async def test_a_reorganisation_that_swaps_the_two_swaps_what_counts(rig: Rig, looks: bool) -> None:
    one, two = paid("t1", 5 * XMR, "same"), paid("t2", 5 * XMR, "same")
    rig.chain.pool += [one, two]
    await rig.poll()
    rig.chain.mine(one)
    rig.chain.mine(two, empty=3)
    assert await rig.poll() == {"t1": CONFIRMED, "t2": REMOVED}
    rig.chain.pop(5)
    if looks:
        assert await rig.poll() == {"t1": SEEN, "t2": SEEN}
    rig.chain.mine(two)
    rig.chain.mine(one, empty=9)
    assert await rig.poll() == {"t1": REMOVED, "t2": CONFIRMED}


async def test_credited_one_of_two_with_one_key_stays_when_both_move(
    rig: Rig,
) -> None:
    """The wallet counts both, but one key image spends only one; its order may be paid out."""
    one, two = paid("t1", 5 * XMR, "same"), paid("t2", 5 * XMR, "same")
    rig.wallet.believes = True
    rig.chain.pool += [one, two]
    await rig.poll()
    rig.chain.mine(two, empty=3)
    assert await rig.poll() == {"t1": SEEN, "t2": CONFIRMED}
    rig.chain.pop(4)
    rig.chain.mine(one, two, empty=4)
    assert await rig.poll() == {"t1": SEEN, "t2": CONFIRMED}
    assert rig.logged == [MISSING]


async def test_one_that_is_back_is_seen_before_it_is_deep(rig: Rig) -> None:
    one = paid("t1", 5 * XMR)
    rig.chain.mine(one)
    assert await rig.poll() == {"t1": SEEN}
    rig.chain.pop(1)
    rig.chain.pool.clear()
    rig.chain.mine()
    assert await rig.poll() == {"t1": REMOVED}
    rig.chain.mine(one)
    assert await rig.poll() == {"t1": SEEN}


@pytest.mark.parametrize("is_last", [True, False])
async def test_an_entry_of_nothing_beside_the_deposit_voids_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, is_last: bool
) -> None:
    """A wallet that scans a transaction again adds an entry without an amount."""
    list_transfers = rig.wallet.transfers

    async def twice(from_height: int) -> list[WalletTransfer]:
        found = await list_transfers(from_height)
        nothing = [replace(item, amount=0) for item in found]
        return [*found, *nothing] if is_last else [*nothing, *found]

    monkeypatch.setattr(rig.wallet, "transfers", twice)
    rig.chain.mine(paid("t1", 5 * XMR), empty=9)
    assert await rig.poll() == {"t1": CONFIRMED}
    assert (rig.credited(), rig.logged) == (5 * XMR, [])


async def test_the_void_one_counts_once_the_other_is_gone(rig: Rig) -> None:
    one, two = paid("t1", 5 * XMR, "same"), paid("t2", 5 * XMR, "same")
    rig.chain.pool += [one, two]
    await rig.poll()
    rig.chain.mine(one)
    rig.chain.mine(two)
    assert await rig.poll() == {"t1": SEEN, "t2": REMOVED}
    rig.chain.pop(2)
    rig.chain.pool.remove(one)
    rig.chain.mine()
    rig.chain.mine(two, empty=3)
    assert await rig.poll() == {"t1": REMOVED, "t2": CONFIRMED}


async def test_honest_deposit_that_is_mined_again_is_confirmed_again(rig: Rig) -> None:
    one = paid("t1", 5 * XMR)
    rig.chain.mine(one, empty=3)
    assert await rig.poll() == {"t1": CONFIRMED}
    rig.chain.pop(4)
    assert await rig.poll() == {"t1": SEEN}
    rig.chain.mine()
    rig.chain.mine(one, empty=3)
    assert await rig.poll() == {"t1": CONFIRMED}
    assert rig.logged == []


# --- a wallet with wrong answers -------------------------------------------------------------


async def test_outputs_with_one_key_image_count_once(
    rig: Rig,
) -> None:
    rig.wallet.believes = True
    one, two = paid("t1", 5 * XMR, "same"), paid("t2", 5 * XMR, "same")
    rig.chain.pool += [one, two]
    await rig.poll()
    rig.chain.mine(one, two, empty=9)
    await rig.poll()
    assert sorted(rig.reported.values()) == [CONFIRMED, SEEN]
    rig.restart()
    rig.chain.mine()
    await rig.poll()
    assert rig.credited() == 5 * XMR
    assert rig.logged == [MISSING, MISSING]


async def test_deposit_unknown_to_the_wallet_waits_until_it_knows(rig: Rig) -> None:
    one = paid("t1", 5 * XMR)
    rig.chain.pool.append(one)
    await rig.poll()
    rig.wallet.lost.add("t1")
    rig.chain.mine(one, empty=9)
    for _ in range(5):
        assert await rig.poll() == {"t1": SEEN}
    assert rig.wallet.asked == {"transfer": 1}  # no further call before the next block
    assert rig.logged == [MISSING]
    rig.wallet.lost.clear()
    rig.chain.mine()
    assert await rig.poll() == {"t1": CONFIRMED}


async def test_unlistable_outputs_hold_up_only_their_own_order(
    rig: Rig,
) -> None:
    """66,000 outputs, in some 4,500 transactions, exceed the size of an answer."""
    rig.wallet.most = 2
    for n in range(3):
        rig.chain.mine(paid(f"dust {n}", 1, minor=1))
    rig.chain.mine(paid("honest", 5, minor=2), empty=2)
    reported = await rig.poll()
    assert reported["honest"] is CONFIRMED
    assert {reported[f"dust {n}"] for n in range(3)} == {DepositState.SEEN}
    assert set(rig.logged) == {"monero_deposit_missed"}


async def test_what_is_confirmed_stays_so_when_the_wallet_has_lost_it(rig: Rig) -> None:
    one = paid("t1", 5 * XMR)
    rig.chain.mine(one, empty=3)
    await rig.poll()
    rig.wallet.lost.add("t1")
    rig.restart()
    for _ in range(3):
        rig.chain.mine()
        assert await rig.poll() == {"t1": CONFIRMED}
    assert rig.logged == []


async def test_wallet_and_node_in_conflict_change_no_deposit(
    rig: Rig,
) -> None:
    rig.chain.mine(paid("t1", 5 * XMR), empty=9)
    await rig.poll()
    one, two = paid("t2", 5 * XMR, "same", minor=2), paid("t3", 5 * XMR, "same", minor=2)
    rig.chain.pool += [one, two]
    await rig.poll()
    rig.chain.mine(one, two, empty=9)
    rig.wallet.lag = 1
    for _ in range(2):
        assert await rig.poll() == {"t1": CONFIRMED, "t2": SEEN, "t3": SEEN}
        rig.restart()
    rig.wallet.lag = 0
    assert await rig.poll() == {"t1": CONFIRMED, "t2": CONFIRMED, "t3": REMOVED}


async def test_unacknowledged_confirmation_survives_a_conflict(
    rig: Rig,
) -> None:
    rig.chain.mine(paid("t1", 5 * XMR))
    assert await rig.poll() == {"t1": SEEN}
    rig.chain.mine(empty=5)
    (shown,) = await rig.observe()
    assert shown.state is CONFIRMED
    # The order layer committed it, and the service was killed before the acknowledgement.
    rig.restart()
    rig.wallet.lag = 1
    assert await rig.observe() == []
    rig.wallet.lag = 0
    assert await rig.poll() == {"t1": CONFIRMED}


async def test_what_a_late_wallet_has_not_got_to_is_read_later(rig: Rig) -> None:
    """The node has the block with a deposit, and the lagging wallet does not list it yet."""
    rig.chain.mine(paid("a", XMR))
    rig.wallet.lag, rig.wallet.lost = 1, {"a"}
    assert await rig.poll() == {}
    rig.wallet.lag, rig.wallet.lost = 0, set()
    assert await rig.poll() == {"a": SEEN}


async def test_block_that_is_replaced_during_a_scan_is_read_later(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wallet has listed the transactions of the replaced block of the same height."""
    height = rig.wallet.height

    async def replaced() -> int:
        rig.chain.pop(1)
        rig.chain.mine(paid("a", XMR))
        return await height()

    rig.chain.mine()
    monkeypatch.setattr(rig.wallet, "height", replaced)
    assert await rig.poll() == {}
    monkeypatch.undo()
    assert await rig.poll() == {"a": SEEN}


async def test_block_the_wallet_has_from_another_branch_is_read_later(rig: Rig) -> None:
    """Its height is the node's, but it lists transactions that the node does not have."""
    rig.wallet.chain = Chain(blocks=[*rig.chain.blocks])
    rig.wallet.chain.mine(paid("gone", XMR))
    rig.chain.mine(paid("a", XMR))
    assert await rig.poll() == {}
    rig.wallet.chain = rig.chain
    assert await rig.poll() == {"a": SEEN}


async def test_what_another_wallet_has_not_received_is_read_later(rig: Rig) -> None:
    """Another wallet was opened in the daemon during the pass, and no call failed."""
    rig.chain.mine(paid("a", XMR))
    rig.wallet.lost, rig.wallet.primary = {"a"}, "4another"
    with pytest.raises(ChainUnusable, match="another wallet"):
        await rig.poll()
    rig.wallet.lost, rig.wallet.primary = set(), "4primary"
    assert await rig.poll() == {"a": SEEN}


async def test_what_is_confirmed_late_is_shown_until_it_is_committed(rig: Rig) -> None:
    """A crash or a full disk kept the order from recording it; its block is already deep."""
    rig.chain.mine(paid("a", XMR))
    assert await rig.poll() == {"a": SEEN}
    rig.wallet.lost = {"a"}
    rig.chain.mine(empty=OPTIONS.tracked_blocks)
    await rig.poll()
    rig.wallet.lost = set()
    rig.chain.mine()
    for _ in range(2):
        (shown,) = await rig.observe()
        assert shown.state is CONFIRMED
        rig.restart()
    assert await rig.poll() == {"a": CONFIRMED}


async def test_a_new_deposit_is_seen_while_they_disagree(rig: Rig) -> None:
    rig.chain.mine(paid("t1", 5 * XMR))
    rig.wallet.lag = 1
    assert await rig.poll() == {"t1": SEEN}


async def test_a_confirmed_deposit_in_a_replaced_block_is_proven_again(rig: Rig) -> None:
    one = paid("t1", 5 * XMR)
    rig.chain.mine(one, empty=3)
    await rig.poll()
    rig.chain.pop(4)
    rig.wallet.lost.add("t1")
    rig.chain.mine(one, empty=9)  # at the same height as before
    assert await rig.poll() == {"t1": SEEN}
    rig.wallet.lost.clear()
    rig.chain.mine()
    assert await rig.poll() == {"t1": CONFIRMED}


# --- deposits that stay unconfirmed ----------------------------------------------------------


async def unconfirmed_for_long(rig: Rig) -> None:
    """A deposit that the wallet has lacked for a day of blocks."""
    rig.chain.pool.append(paid("t1", 5 * XMR))
    await rig.poll()
    rig.wallet.lost.add("t1")
    rig.chain.mine(*rig.chain.pool, empty=730)
    assert await rig.poll() == {"t1": SEEN}
    rig.node.asked = 0
    rig.wallet.asked.clear()


async def test_deposit_that_stays_unconfirmed_is_rechecked_hourly(rig: Rig) -> None:
    """Anyone can send thousands of these: locked for years, or twice with one key."""
    await unconfirmed_for_long(rig)
    for _ in range(60):
        rig.chain.mine()
        for _ in range(3):
            await rig.poll()
    assert rig.wallet.asked["transfer"] == 2
    assert rig.node.asked <= 2 * 3
    assert rig.logged == [MISSING]


async def test_deposit_that_stayed_unconfirmed_confirms_when_possible(rig: Rig) -> None:
    await unconfirmed_for_long(rig)
    rig.wallet.lost.clear()
    for _ in range(30):
        rig.chain.mine()
        await rig.poll()
    assert rig.reported == {"t1": CONFIRMED}


async def test_deposit_that_stayed_unconfirmed_is_read_after_a_start(rig: Rig) -> None:
    await unconfirmed_for_long(rig)
    rig.wallet.lost.clear()
    rig.restart()
    assert await rig.poll() == {"t1": CONFIRMED}


async def test_deposit_that_stayed_unconfirmed_leaves_with_its_block(rig: Rig) -> None:
    await unconfirmed_for_long(rig)
    rig.chain.pop(735)
    rig.chain.pool.clear()
    rig.chain.mine(empty=740)
    assert await rig.poll() == {"t1": REMOVED}


async def test_confirmed_deposit_stays_so_when_settings_ask_for_more(rig: Rig) -> None:
    rig.chain.mine(paid("t1", 5 * XMR), empty=2)
    assert await rig.poll() == {"t1": CONFIRMED}
    more = structs.replace(OPTIONS, thresholds=(Threshold(0, 5),))
    connection = MoneroConnection(rig.node, rig.wallet, rig.ledger, more)  # type: ignore[arg-type]
    rig.scanner = DepositScanner(connection, rig.ledger, Clock(), more)
    assert await rig.poll() == {"t1": CONFIRMED}
    # In another block it has to be that deep once more.
    rig.chain.pop(3)
    rig.chain.mine(empty=1)
    rig.chain.mine(rig.chain.pool[0], empty=2)
    assert await rig.poll() == {"t1": SEEN}
