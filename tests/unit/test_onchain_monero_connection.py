"""Which node and wallet the XMR adapter accepts, and its messages about others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.daemon_rpc import ChainUnusable, NodeError, NotSent
from rpcsvc.settlement.onchain.monero import connection as connections
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import NodeInfo
from rpcsvc.settlement.onchain.monero.records import MoneroOptions, WalletRecord
from rpcsvc.settlement.onchain.monero.wallet_types import AddressCheck, WalletCode
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.chain_options import monero_options

GAP_MS = 40 * 60_000
OPTIONS = monero_options(nettype="stagenet", wallet_file="w", wallet_password="p")
IN_STEP = NodeInfo(100, "h99", "stagenet", True, False, False, 0, 0, "0.18", 600_000)


class Node:
    """A node that always reports to be in sync."""

    def __init__(self, nettype: str) -> None:
        self.nettype, self.height = nettype, 3_000_000

    async def info(self) -> NodeInfo:
        return NodeInfo(self.height, "top", self.nettype, True, False, False, 0, 0, "0.18", 600_000)


@pytest.mark.parametrize("nettype", ["mainnet", "fakechain"])
async def test_stalled_chain_is_reported_though_its_node_is_in_sync(
    nettype: str,
) -> None:
    """On regtest, where blocks are mined on request, a stall is not reported."""
    node, now = Node(nettype), [0]
    options = monero_options(nettype=nettype)
    nobody = cast("Any", None)
    connection = MoneroConnection(cast("Any", node), nobody, nobody, options)
    connection._stall_detector._steady = lambda: now[0]
    for now[0] in (0, GAP_MS - 1):
        await connection.check_node()
        assert connection.stall() is None
        assert connection.block_age() == now[0]
        assert connection.height() == node.height - 1, "of the newest block"
    now[0] = GAP_MS
    await connection.check_node()
    reported = "the Monero node has shown no new block for 40 minutes"
    assert connection.stall() == (reported if nettype == "mainnet" else None)
    node.height += 1
    await connection.check_node()
    assert connection.stall() is None
    node.nettype = "testnet"
    with pytest.raises(ChainUnusable):
        await connection.check_node()


# --- checks of node and wallet -------------------------------------------------------------------


@dataclass
class Daemons:
    """A node and a wallet. ``tops``: its top block at the next calls; the last one stays."""

    info_now: NodeInfo = IN_STEP
    primary: str = "5first"
    nettype: str = "stagenet"
    scanned: int = 100
    is_open: bool = True
    failure: WalletCode = WalletCode.NOT_OPEN
    opened: list[tuple[str, str]] = field(default_factory=list)
    refreshes: list[bool] = field(default_factory=list)
    tops: list[str] = field(default_factory=list)
    rpc: Any = field(default_factory=lambda: SimpleNamespace(endpoint=SimpleNamespace(name="node")))

    async def info(self) -> NodeInfo:
        if self.tops:
            self.info_now = replace(self.info_now, top_hash=self.tops.pop(0))
        return self.info_now

    async def primary_address(self) -> str:
        if not self.is_open:
            raise NodeError("wallet", "get_address", self.failure, "its own words")
        return self.primary

    async def open(self, file: str, password: str) -> None:
        self.opened.append((file, password))
        self.is_open = True

    async def validate(self, address: str) -> AddressCheck:
        assert address == self.primary
        return AddressCheck(True, False, False, self.nettype)

    async def refresh(self) -> None:
        self.refreshes.append(True)

    async def height(self) -> int:
        return self.scanned

    async def auto_refresh(self, *, enabled: bool) -> None:
        self.refreshes.append(enabled)


@dataclass
class Pair:
    """Daemons, ledger and settings of one service."""

    daemons: Daemons
    ledger: MoneroLedger
    options: MoneroOptions = OPTIONS

    def connection(self) -> MoneroConnection:
        any_of: Any = self.daemons
        return MoneroConnection(any_of, any_of, self.ledger, self.options)


@pytest.fixture
async def pair(tmp_path: Path) -> AsyncIterator[Pair]:
    database = await SqliteDatabase.open(tmp_path)
    yield Pair(Daemons(), MoneroLedger(database))
    await database.close()


@pytest.mark.parametrize(
    ("differs", "problem"),
    [
        ({"nettype": "mainnet"}, "wrong network: the node is on mainnet"),
        ({"busy_syncing": True}, "out of sync"),
        ({"synchronized": False}, "out of sync"),
        ({"target_height": 103}, "at 100 of 103"),
        ({"target_height": 102}, None),
        ({"synchronized": False, "offline": True}, None),
    ],
)
async def test_a_node_that_is_not_in_step_is_not_relied_on(
    pair: Pair, differs: dict[str, Any], problem: str | None
) -> None:
    pair.daemons.info_now = replace(pair.daemons.info_now, **differs)
    if problem is None:
        await pair.connection().check_node()
        return
    with pytest.raises(ChainUnusable, match=problem):
        await pair.connection().check_node()


async def test_the_wallet_of_the_first_start_is_the_only_one(pair: Pair) -> None:
    connection = pair.connection()
    await connection.check_wallet()
    assert await pair.ledger.wallet() == WalletRecord("stagenet", "5first", 0)
    assert connection.primary_address == "5first"
    pair.daemons.primary = "5second"
    for check in (connection.check_wallet, connection.require_wallet, connection.prepare_wallet):
        with pytest.raises(ChainUnusable, match="another wallet"):
            await check()
    assert connection.primary_address == "5first"


async def test_a_service_stays_on_the_network_of_its_first_start(pair: Pair) -> None:
    """Regtest has the addresses of mainnet: only the recorded network distinguishes them."""
    pair.daemons.nettype = "mainnet"
    with pytest.raises(ChainUnusable, match="the wallet is of mainnet, not of stagenet"):
        await pair.connection().check_wallet()
    assert await pair.ledger.wallet() is None
    pair.options = monero_options(nettype="fakechain")
    await pair.connection().check_wallet()
    pair.options = monero_options(nettype="mainnet")
    with pytest.raises(ChainUnusable, match="first started on fakechain"):
        await pair.connection().check_wallet()


async def test_wallet_is_opened_when_none_is_open_and_it_has_a_name(pair: Pair) -> None:
    pair.daemons.is_open = False
    await pair.connection().prepare_wallet()
    assert pair.daemons.opened == [("w", "p")]
    assert pair.daemons.refreshes == [False], "it is to refresh only when told"


@pytest.mark.parametrize(("file", "code"), [(None, WalletCode.NOT_OPEN), ("w", WalletCode.UNKNOWN)])
async def test_nothing_is_opened_by_guessing(
    pair: Pair, file: str | None, code: WalletCode
) -> None:
    pair.daemons.is_open, pair.daemons.failure = False, code
    pair.options = monero_options(nettype="stagenet", wallet_file=file)
    with pytest.raises(NodeError):
        await pair.connection().check_wallet()
    assert pair.daemons.opened == []


@pytest.mark.parametrize("scanned", [99, 101])
async def test_wallet_on_another_chain_is_reported(pair: Pair, scanned: int) -> None:
    connection, pair.daemons.scanned = pair.connection(), scanned
    with pytest.raises(Unavailable, match="same block"):
        await connection.in_step()
    assert connection.lag == f"the wallet is at height {scanned}, the node at 100"
    pair.daemons.scanned = 100
    pair.daemons.refreshes.clear()
    assert (await connection.in_step()).height == 100
    assert pair.daemons.refreshes == [True]
    assert connection.lag is None


async def test_block_arriving_meanwhile_is_rechecked_a_bounded_time(pair: Pair) -> None:
    connection = pair.connection()
    pair.daemons.tops = ["a", "b", "c", "d", "e", "e"]
    assert (await connection.in_step()).top_hash == "e"
    pair.daemons.tops = ["a", "b", "c", "d", "g", "f", "f", "f"]
    with pytest.raises(Unavailable, match="same block"):
        await connection.in_step()
    assert pair.daemons.tops == ["f", "f"]


async def test_wallet_is_refreshed_once_for_a_top_block(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    connection, now = pair.connection(), 1_000
    monkeypatch.setattr(connections, "steady_ms", lambda: now)

    async def refreshed() -> bool:
        pair.daemons.refreshes.clear()
        await connection.in_step()
        return bool(pair.daemons.refreshes)

    assert [await refreshed() for _ in range(3)] == [True, False, False]
    pair.daemons.tops = ["next"]
    assert await refreshed()
    now += 5_000
    assert await refreshed(), "somebody else may have moved the wallet"
    with pytest.raises(Unavailable), connection.watched():
        raise NotSent("wallet", "refresh", "not reached")
    assert await refreshed(), "another wallet may have been opened"
    pair.daemons.scanned = 99
    with pytest.raises(Unavailable, match="same block"):
        await connection.in_step()


@pytest.mark.parametrize(
    ("failure", "reported"),
    [
        (NotSent("node", "get_info", "not reached"), "the Monero node is down"),
        (NotSent("wallet", "refresh", "not reached"), "the Monero wallet is down"),
        (NodeError("node", "get_info", -9, "BUSY"), "the Monero node refuses"),
        (NodeError("wallet", "refresh", -1, "no"), "the Monero wallet refuses"),
        (NodeError("wallet", "refresh", WalletCode.NOT_OPEN, "No wallet"), "the wallet is locked"),
        (NodeError("node", "get_info", WalletCode.NOT_OPEN, "no"), "the Monero node refuses"),
        (ChainUnusable("another wallet"), "another wallet"),
    ],
)
async def test_failure_is_reported_until_all_checks_pass_again(
    pair: Pair, failure: Exception, reported: str
) -> None:
    connection = pair.connection()
    assert (connection.wallet_checked, connection.problem) == (False, "not started")
    connection._connected()
    assert (connection.wallet_checked, connection.problem) == (True, None)
    with pytest.raises(Unavailable, match="can't be settled"), connection.watched():
        raise failure
    assert (connection.wallet_checked, reported in (connection.problem or "")) == (False, True)
    connection._connected()
    assert (connection.wallet_checked, connection.problem) == (True, None)
