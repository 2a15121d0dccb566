"""Addresses handed out by a lost database are not handed out again."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest

from rpcsvc.cli.recovery import deposits
from rpcsvc.cli.recovery.deposits import skip_evm, skip_monero
from rpcsvc.settlement.onchain.daemon_rpc import ChainUnusable, RpcFailure
from rpcsvc.settlement.onchain.evm.addresses import EvmAddressPool
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.keys import HdKeys
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import NodeInfo
from rpcsvc.settlement.onchain.monero.records import WalletRecord
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.unit.address_pools import take
from tests.unit.monero_addresses import OPTIONS, AddressWallet, pool_of

WORDS = "test test test test test test test test test test test junk"
OTHER = "legal winner thank year wave sausage worth useful legal winner thank yellow"


@pytest.fixture
async def databases(tmp_path: Path) -> AsyncIterator[tuple[SqliteDatabase, SqliteDatabase]]:
    """The lost database, and an older copy of it."""
    for name in ("lost", "copy"):
        (tmp_path / name).mkdir(mode=0o700)
    lost, copy = [await SqliteDatabase.open(tmp_path / name) for name in ("lost", "copy")]
    yield lost, copy
    await lost.close()
    await copy.close()


class ConnectionStub:
    """A connection whose node and wallet pass every check; counts the checks."""

    def __init__(self, wallet: AddressWallet) -> None:
        self.wallet = wallet
        self.checks = 0

    async def check_node(self) -> NodeInfo:
        self.checks += 1
        return NodeInfo(900, "top", "mainnet", True, False, False, 900, 0, "0.18", 600_000)

    async def check_wallet(self) -> None:
        self.checks += 1


async def skip(
    wallet: AddressWallet, ledger: MoneroLedger, count: int, *, rescan: bool = False
) -> int:
    connection = cast("MoneroConnection", ConnectionStub(wallet))
    return await skip_monero(connection, ledger, OPTIONS, count, rescan=rescan)


async def ledgers(databases: tuple[SqliteDatabase, SqliteDatabase]) -> tuple[Any, Any]:
    made = [MoneroLedger(database) for database in databases]
    for ledger in made:
        await ledger.adopt_wallet(WalletRecord("mainnet", "4x", 0))
    return made[0], made[1]


@pytest.mark.parametrize("orders", [3, 90, 300])
async def test_xmr_addresses_of_lost_orders_are_skipped(
    databases: tuple[SqliteDatabase, SqliteDatabase], orders: int
) -> None:
    """The copy is from before any order, of a stopped service that has given its pool back."""
    lost, copy = await ledgers(databases)
    wallet = AddressWallet()
    pool = await pool_of(wallet, lost)
    await copy.add_addresses(await lost.addresses_above(0))
    given = await take(pool, orders)

    last = await skip(wallet, copy, 10)

    assert (await copy.wallet()).reserved_to == last == wallet.stored
    fresh = await take(await pool_of(wallet, copy), 50)
    assert not {*given} & {*fresh}
    known = {item.address for item in await copy.addresses_above(0)}
    assert known >= {*given}, "what comes to them is seen"


async def test_xmr_addresses_are_skipped_when_the_wallet_is_a_copy_too(
    databases: tuple[SqliteDatabase, SqliteDatabase],
) -> None:
    lost, copy = await ledgers(databases)
    wallet = AddressWallet()
    pool = await pool_of(wallet, lost)
    await copy.add_addresses(await lost.addresses_above(0))
    given = await take(pool, 150)
    restored = AddressWallet()

    await skip(restored, copy, 150)

    fresh = await take(await pool_of(restored, copy), 50)
    assert not {*given} & {*fresh}


@pytest.mark.parametrize("count", [1, 63, 64, 65, 130])
async def test_as_many_as_asked_for_are_skipped(
    databases: tuple[SqliteDatabase, SqliteDatabase], count: int
) -> None:
    ledger, _ = await ledgers(databases)
    wallet = AddressWallet()
    assert await skip(wallet, ledger, count) == count
    assert (await take(await pool_of(wallet, ledger), 1)) == [f"8w{count + 1}"]


@pytest.mark.parametrize("rescan", [True, False])
async def test_wallet_rescans_only_on_request(
    databases: tuple[SqliteDatabase, SqliteDatabase], rescan: bool
) -> None:
    ledger, _ = await ledgers(databases)
    wallet = AddressWallet()
    await skip(wallet, ledger, 300, rescan=rescan)
    assert wallet.rescans == rescan
    assert not await ledger.rescan_due()


async def test_a_scan_that_ends_half_way_is_made_up_for_by_the_service(
    databases: tuple[SqliteDatabase, SqliteDatabase], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger, _ = await ledgers(databases)
    wallet = AddressWallet()

    async def killed() -> None:
        raise RpcFailure("wallet", "rescan_blockchain", "killed")

    monkeypatch.setattr(wallet, "rescan_blockchain", killed)
    with pytest.raises(RpcFailure):
        await skip(wallet, ledger, 3, rescan=True)
    assert await ledger.rescan_due()


# --- USDC --------------------------------------------------------------------------------------


async def opened(keys: HdKeys, ledger: EvmDepositLedger) -> EvmAddressPool:
    pool = EvmAddressPool(keys, ledger, 8)
    await pool.load()
    await pool.refill()
    return pool


async def taken(pool: EvmAddressPool, count: int) -> list[str]:
    found = []
    for _ in range(count):
        await pool.refill()
        found.append(pool.take())
    return found


@pytest.mark.parametrize("in_order", [True, False])
async def test_usdc_addresses_of_lost_orders_are_skipped(
    databases: tuple[SqliteDatabase, SqliteDatabase], in_order: bool
) -> None:
    """``in_order``: the copy is of a stopped service; otherwise of a running one."""
    keys = HdKeys(WORDS)
    lost, copy = (EvmDepositLedger(database) for database in databases)
    for ledger in (lost, copy):
        pool = await opened(keys, ledger)
        if in_order:
            await pool.close()
    given = await taken(await opened(keys, lost), 20)

    newest = await copy.highest_address()
    said: list[str] = []
    last = await skip_evm(keys, copy, 30, said.append)

    assert said == ["USDC addresses: 0 of 30"]
    assert newest is not None
    assert last == newest.index + 30
    pool = await opened(keys, copy)
    fresh = await taken(pool, 5)
    assert not {*given} & {*fresh}
    assert [item.address for item in await copy.addresses_above(last)][:5] == fresh
    assert {item.address for item in await copy.ours(given)} == {*given}, (
        "what comes to them is seen"
    )


async def test_another_mnemonic_skips_nothing(
    databases: tuple[SqliteDatabase, SqliteDatabase],
) -> None:
    ledger = EvmDepositLedger(databases[0])
    with pytest.raises(ChainUnusable, match="none is on record"):
        await skip_evm(HdKeys(WORDS), ledger, 5)
    await opened(HdKeys(WORDS), ledger)
    before = await ledger.highest_address()
    with pytest.raises(ChainUnusable, match="another mnemonic"):
        await skip_evm(HdKeys(OTHER), ledger, 5)
    assert await ledger.highest_address() == before


async def test_a_person_sees_how_far_the_wallet_is(
    databases: tuple[SqliteDatabase, SqliteDatabase], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, copy = await ledgers(databases)
    said: list[str] = []
    wallet, now, ticked = AddressWallet(), itertools.count(0, 61_000), asyncio.Event()

    def say(text: str) -> None:
        said.append(text)
        if "3:03 min" in text:
            ticked.set()

    async def rescan() -> None:
        async with asyncio.timeout(60):
            await ticked.wait()

    monkeypatch.setattr(wallet, "rescan_blockchain", rescan)
    monkeypatch.setattr(deposits, "_TICK_SECONDS", 0)
    monkeypatch.setattr(deposits, "steady_ms", lambda: next(now))
    connection = cast("MoneroConnection", ConnectionStub(wallet))
    count = 2 * OPTIONS.addresses_per_call + 1
    await skip_monero(connection, copy, OPTIONS, count, rescan=True, progress=say)
    steps = range(0, count, OPTIONS.addresses_per_call)
    assert said[: len(steps)] == [f"XMR subaddresses: {done} of {count}" for done in steps]
    ticks = said[len(steps) :]
    assert [text.partition(";")[0] for text in ticks[:3]] == [
        f"the wallet scans 900 blocks again, for {minutes}:0{minutes} min so far"
        for minutes in (1, 2, 3)
    ]
    await asyncio.sleep(0)
    assert said[len(steps) :] == ticks, "nothing more is said once it is done"
