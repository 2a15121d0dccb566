"""The address pool with a simulated wallet: no address is handed out twice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

import pytest

from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.daemon_rpc import ChainUnusable, NodeError, TimedOut
from rpcsvc.settlement.onchain.monero.addresses import AddressPool
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.records import WalletRecord
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import Subaddress, WalletCode
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.sandbox import ManualClock
from tests.unit.address_pools import take
from tests.unit.monero_addresses import OPTIONS, AddressWallet, pool_of


@pytest.fixture
async def ledger(tmp_path: Path) -> AsyncIterator[MoneroLedger]:
    database = await SqliteDatabase.open(tmp_path)
    made = MoneroLedger(database)
    await made.adopt_wallet(WalletRecord("mainnet", "4x", 0))
    yield made
    await database.close()


async def test_address_is_never_reused_over_starts_stops_and_crashes(
    ledger: MoneroLedger,
) -> None:
    wallet, given = AddressWallet(), list[str]()
    for round_ in range(12):
        pool = await pool_of(wallet, ledger)
        given += await take(pool, 5 + 7 * round_)
        if round_ % 3 == 0:
            await pool.close()
        elif round_ % 3 == 1:
            wallet.kill()
        await asyncio.sleep(0)
    assert len(set(given)) == len(given) > 400


async def test_address_is_never_reused_when_the_wallet_is_reopened(
    ledger: MoneroLedger,
) -> None:
    """As after each failure of node or wallet while the service runs."""
    pool, given = await pool_of(AddressWallet(), ledger), list[str]()
    for _ in range(20):
        given += await take(pool, 7)
        await pool.reconcile()
    assert len(set(given)) == len(given) == 140


@pytest.mark.parametrize("is_stopped", [True, False])
async def test_address_is_never_reused_when_the_wallet_is_an_older_one(
    ledger: MoneroLedger, is_stopped: bool
) -> None:
    """The wallet makes the missing addresses again, most of which were handed out before."""
    pool = await pool_of(AddressWallet(), ledger)
    given = await take(pool, 150)
    if is_stopped:
        await pool.close()
    later = await pool_of(AddressWallet(), ledger)
    given += await take(later, 300)
    assert len(set(given)) == len(given)


async def test_a_stop_gives_back_just_what_was_not_handed_out(ledger: MoneroLedger) -> None:
    wallet = AddressWallet()
    for first in (1, 14, 27):
        pool = await pool_of(wallet, ledger)
        given = await take(pool, 13)
        assert given == [f"8w{minor}" for minor in range(first, first + 13)]
        await pool.close()
        record = await ledger.wallet()
        assert record is not None
        assert record.reserved_to == first + 12
        with pytest.raises(Unavailable):
            pool.take()


async def test_a_pool_that_runs_low_reserves_more_by_itself(
    ledger: MoneroLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, reserve, more = (
        await pool_of(AddressWallet(), ledger),
        ledger.reserve_addresses,
        asyncio.Event(),
    )

    async def noted(minor: int) -> None:
        more.set()
        await reserve(minor)

    monkeypatch.setattr(ledger, "reserve_addresses", noted)
    for _ in range(OPTIONS.reserve // 2):
        pool.take()
        await asyncio.sleep(0)
    assert not more.is_set(), "no commit for each address"
    pool.take()
    async with asyncio.timeout(10):
        await more.wait()
    await pool.close()


@pytest.mark.parametrize("more", [1, 30])
async def test_what_a_newer_wallet_knows_of_is_not_handed_out(
    ledger: MoneroLedger, more: int
) -> None:
    """The database is an older copy: the wallet's further addresses may have been handed out."""
    wallet = AddressWallet()
    await (await pool_of(wallet, ledger)).close()
    await wallet.create_addresses(more)
    pool = AddressPool(cast("WalletClient", wallet), ledger, OPTIONS)
    await pool.reconcile()
    record = await ledger.wallet()
    assert record is not None
    assert record.reserved_to == 100, "on disk at once: the next start finds no difference"
    await pool.refill()
    first = 101 + more
    assert await take(pool, 5) == [f"8w{minor}" for minor in range(first, first + 5)]


async def test_address_is_never_reused_after_a_silent_rollback(
    ledger: MoneroLedger,
) -> None:
    """As with a machine that is reset to a snapshot between two calls, neither of which fails."""
    wallet = AddressWallet()
    pool = await pool_of(wallet, ledger)
    given = await take(pool, 50)
    wallet.made = wallet.stored = 10
    given += await take(pool, 150)
    assert len(set(given)) == len(given)


async def test_a_wallet_that_does_not_say_what_it_has_is_given_nothing(
    ledger: MoneroLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    wallet = AddressWallet()
    await pool_of(wallet, ledger)

    async def locked(_indices: list[int]) -> list[Subaddress]:
        raise NodeError("wallet", "get_address", WalletCode.NOT_OPEN, "No wallet file")

    monkeypatch.setattr(wallet, "addresses", locked)
    with pytest.raises(NodeError, match="No wallet file"):
        await pool_of(wallet, ledger)
    assert wallet.made == 100
    assert not await ledger.rescan_due()


async def test_an_address_is_reserved_on_disk_before_it_can_be_taken(
    ledger: MoneroLedger,
) -> None:
    pool = await pool_of(AddressWallet(), ledger)
    for _ in range(30):
        (address,) = await take(pool, 1)
        record, minor = await ledger.wallet(), await ledger.address_minor(address)
        assert record is not None
        assert minor is not None
        assert minor <= record.reserved_to


async def test_two_reservations_at_the_same_time_keep_their_order(
    ledger: MoneroLedger,
) -> None:
    pool = await pool_of(AddressWallet(), ledger)
    given = [pool.take() for _ in range(5)]
    await asyncio.gather(*(pool.refill() for _ in range(4)))
    given += [pool.take() for _ in range(3)]
    await pool.close()
    later = AddressPool(cast("WalletClient", AddressWallet()), ledger, OPTIONS)
    record = await ledger.wallet()
    assert record is not None
    assert record.reserved_to >= max([await ledger.address_minor(item) or 0 for item in given])
    assert later.ready == 0


async def test_no_address_is_recorded_before_the_wallet_has_stored_it(
    ledger: MoneroLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    wallet = AddressWallet()

    async def full_disk() -> None:
        raise NodeError("wallet", "store", -1, "disk full")

    monkeypatch.setattr(wallet, "store", full_disk)
    with pytest.raises(NodeError):
        await pool_of(wallet, ledger)
    assert await ledger.highest_address() is None


async def test_restored_wallet_makes_missing_addresses_and_rescans(
    ledger: MoneroLedger,
) -> None:
    wallet = AddressWallet()
    for _ in range(4):
        await take(await pool_of(wallet, ledger), 90)
    older = AddressWallet()
    older.made = 3
    await pool_of(older, ledger)
    highest = await ledger.highest_address()
    assert highest is not None
    assert older.made >= highest.index.minor > 200
    assert older.rescans == 1


async def test_a_wallet_with_other_addresses_is_refused(ledger: MoneroLedger) -> None:
    wallet = AddressWallet()
    await pool_of(wallet, ledger)
    wallet.spelling = "8z"
    with pytest.raises(ChainUnusable, match="another wallet"):
        await pool_of(wallet, ledger)


# --- a scan of the chain -------------------------------------------------------------------------


async def restored(ledger: MoneroLedger, made: int = 0) -> AddressWallet:
    """A wallet with ``made`` of the 300 and more recorded addresses."""
    wallet = AddressWallet()
    for _ in range(4):
        await take(await pool_of(wallet, ledger), 90)
    other = AddressWallet()
    other.made = other.stored = made
    return other


def unhurried(
    wallet: AddressWallet,
    ledger: MoneroLedger,
    scan_wait: float = 5.0,
    steady: Callable[[], int] = lambda: 0,
) -> AddressPool:
    own = cast("WalletClient", wallet)
    return AddressPool(own, ledger, OPTIONS, scan_wait=scan_wait, steady=steady)


async def test_a_rescan_that_failed_is_made_again_without_a_restart(
    ledger: MoneroLedger,
) -> None:
    """A rescan takes all of the wallet's time, so it rests: for a minute, then for two."""
    wallet, clock = await restored(ledger, 1000), ManualClock(0)
    await ledger.note_rescan_due()
    wallet.failures = 2
    pool = unhurried(wallet, ledger, steady=clock.now_ms)
    for rest_ms in (60_000, 120_000):
        with pytest.raises(TimedOut, match="rescan_blockchain"):
            await pool.reconcile()
        pool.require_scanned()
        assert await ledger.rescan_due()
        wallet.scans.clear()
        for _ in range(3):
            with pytest.raises(ChainUnusable, match=f"rests for {rest_ms // 1000} s"):
                await pool.reconcile()
        assert not wallet.scans.is_set()
        clock.now += rest_ms
    await pool.reconcile()
    assert (wallet.rescans, await ledger.rescan_due()) == (1, False)


@pytest.mark.parametrize("made", [0, 150], ids=["while addresses are made", "while it scans"])
@pytest.mark.parametrize("killed", [True, False])
async def test_a_rescan_that_was_cut_short_is_made_up_for(
    ledger: MoneroLedger, made: int, killed: bool
) -> None:
    wallet = await restored(ledger, made)
    wallet.failures = 1
    with pytest.raises(TimedOut):
        await unhurried(wallet, ledger).reconcile()
    assert wallet.rescans == 0
    if killed:
        wallet.kill()
    await unhurried(wallet, ledger).reconcile()
    await unhurried(wallet, ledger).reconcile()
    assert wallet.rescans == 1


async def test_due_rescan_is_on_disk_before_an_address_is_made(
    ledger: MoneroLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    wallet, due = await restored(ledger), list[bool]()
    make = wallet.create_addresses

    async def noted(count: int) -> list[Subaddress]:
        due.append(await ledger.rescan_due())
        return await make(count)

    monkeypatch.setattr(wallet, "create_addresses", noted)
    await unhurried(wallet, ledger).reconcile()
    assert set(due) == {True}
    assert not await ledger.rescan_due()


async def test_rescan_is_due_until_the_wallet_stored_its_result(
    ledger: MoneroLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    wallet = await restored(ledger)
    store = wallet.store

    async def full_disk() -> None:
        if wallet.rescans:
            raise NodeError("wallet", "store", -1, "disk full")
        await store()

    monkeypatch.setattr(wallet, "store", full_disk)
    with pytest.raises(NodeError):
        await unhurried(wallet, ledger).reconcile()
    assert await ledger.rescan_due()


async def test_a_caller_who_gives_up_does_not_end_the_rescan(ledger: MoneroLedger) -> None:
    wallet = await restored(ledger)
    wallet.may_end.clear()
    pool = unhurried(wallet, ledger)
    caller = asyncio.create_task(pool.reconcile())
    await wallet.scans.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    with pytest.raises(ChainUnusable, match="rescanning"):
        pool.require_scanned()
    wallet.may_end.set()
    await pool.reconcile()
    pool.require_scanned()
    assert wallet.rescans == 1
    assert not await ledger.rescan_due()


async def test_nobody_waits_for_a_long_rescan_and_a_stop_leaves_it_due(
    ledger: MoneroLedger,
) -> None:
    wallet = await restored(ledger)
    wallet.may_end.clear()
    pool = unhurried(wallet, ledger, scan_wait=0)
    for _ in range(3):
        with pytest.raises(ChainUnusable, match="rescanning"):
            await pool.reconcile()
    await pool.close()
    assert await ledger.rescan_due()
    wallet.may_end.set()
    await unhurried(wallet, ledger).reconcile()
    assert wallet.rescans == 1


@pytest.mark.parametrize(("lacks", "rescans"), [(199, 0), (200, 1)])
async def test_wallet_rescans_for_addresses_beyond_its_lookahead(
    ledger: MoneroLedger, lacks: int, rescans: int
) -> None:
    wallet = await restored(ledger)
    highest = await ledger.highest_address()
    assert highest is not None
    wallet.made = wallet.stored = highest.index.minor - lacks
    await unhurried(wallet, ledger).reconcile()
    assert wallet.rescans == rescans


async def test_another_wallet_is_refused_before_it_scans(ledger: MoneroLedger) -> None:
    wallet = await restored(ledger, 150)
    await ledger.note_rescan_due()
    wallet.spelling, wallet.made = "8z", 1000
    with pytest.raises(ChainUnusable, match="another wallet"):
        await unhurried(wallet, ledger).reconcile()
    assert wallet.rescans == 0
