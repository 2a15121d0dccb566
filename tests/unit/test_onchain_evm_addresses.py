"""The pool of USDC deposit addresses: no address is handed out twice."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.daemon_rpc import ChainUnusable
from rpcsvc.settlement.onchain.evm.addresses import EvmAddressPool
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.keys import HdKeys
from rpcsvc.settlement.onchain.evm.records import EvmAddress, EvmWallet
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.unit.address_pools import take

KEYS = HdKeys("legal winner thank year wave sausage worth useful legal winner thank yellow")
OTHERS = HdKeys("letter advice cage absurd amount doctor acoustic avoid letter advice cage above")
TARGET = 12


@pytest.fixture
async def empty(tmp_path: Path) -> AsyncIterator[EvmDepositLedger]:
    """A database without a recorded hot wallet."""
    database = await SqliteDatabase.open(tmp_path)
    yield EvmDepositLedger(database)
    await database.close()


async def pool_of(ledger: EvmDepositLedger, keys: HdKeys = KEYS) -> EvmAddressPool:
    pool = EvmAddressPool(keys, ledger, TARGET)
    await pool.load()
    await pool.refill()
    return pool


async def test_addresses_follow_the_mnemonic_without_the_hot_wallet(
    empty: EvmDepositLedger,
) -> None:
    pool = await pool_of(empty)
    assert (pool.left, pool.ready) == (12, 12)
    assert await take(pool, 30) == [KEYS.address(index) for index in range(1, 31)]
    await pool.close()
    assert await empty.wallet() == EvmWallet(KEYS.address(0), 30)


async def test_address_is_reserved_on_disk_before_it_can_be_drawn(
    empty: EvmDepositLedger,
) -> None:
    pool = await pool_of(empty)
    for _ in range(40):
        (address,) = await take(pool, 1)
        (found,), wallet = await empty.ours([address]), await empty.wallet()
        assert wallet is not None
        assert found.address == address
        assert found.index <= wallet.reserved_to
    await pool.close()


async def test_address_is_never_reused_over_starts_stops_and_crashes(
    empty: EvmDepositLedger,
) -> None:
    given: list[str] = []
    for round_ in range(9):
        pool = await pool_of(empty)
        given += await take(pool, 3 + 4 * round_)
        await pool.refill()
        if round_ % 2:
            await pool.close()
    wallet = await empty.wallet()
    assert wallet is not None
    assert len(set(given)) == len(given) == 171
    # The addresses skipped by a crash are bounded: less than two refills each time.
    assert wallet.reserved_to < 171 + 5 * 2 * TARGET


async def test_crash_skips_unused_addresses_and_a_stop_keeps_them(
    empty: EvmDepositLedger,
) -> None:
    await take(await pool_of(empty), 2)
    later = await pool_of(empty)
    assert later.take() == KEYS.address(13)
    await later.close()
    last = await pool_of(empty)
    assert last.take() == KEYS.address(14)
    # An address that was given back can be taken once only.
    assert (await pool_of(empty)).take() == KEYS.address(25)


async def test_a_stopped_pool_hands_out_nothing(empty: EvmDepositLedger) -> None:
    pool = await pool_of(empty)
    await pool.close()
    await pool.refill()
    with pytest.raises(Unavailable):
        pool.take()
    await pool.close()
    assert await empty.wallet() == EvmWallet(KEYS.address(0), 0)


async def test_a_pool_that_was_not_loaded_hands_out_nothing(
    empty: EvmDepositLedger,
) -> None:
    pool = EvmAddressPool(KEYS, empty, TARGET)
    await pool.refill()
    assert (pool.left, pool.ready) == (0, 0)
    with pytest.raises(Unavailable):
        pool.take()


async def test_another_mnemonic_is_refused_and_changes_nothing(
    empty: EvmDepositLedger,
) -> None:
    await (await pool_of(empty)).close()
    before = await empty.wallet(), await empty.addresses_above(0)
    with pytest.raises(ChainUnusable, match="another mnemonic"):
        await pool_of(empty, OTHERS)
    assert (await empty.wallet(), await empty.addresses_above(0)) == before


async def test_a_recorded_address_of_another_mnemonic_is_refused(
    empty: EvmDepositLedger,
) -> None:
    await empty.adopt_wallet(KEYS.address(0))
    await empty.add_addresses([EvmAddress(1, OTHERS.address(1))])
    with pytest.raises(ChainUnusable, match="index 1"):
        await pool_of(empty)


async def test_a_pool_in_use_fills_itself(empty: EvmDepositLedger) -> None:
    pool = await pool_of(empty)
    for _ in range(7):
        pool.take()
    await pool.close()  # waits for the refill under way
    assert await empty.highest_address() == EvmAddress(19, KEYS.address(19))


async def test_a_commit_that_fails_hands_out_nothing_and_skips_nothing(
    empty: EvmDepositLedger, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = await pool_of(empty)

    async def full(_: object) -> None:
        raise Unavailable("disk full")

    with monkeypatch.context() as patch:
        patch.setattr(empty, "add_addresses", full)
        for _ in range(12):
            pool.take()
        for _ in range(3):
            with pytest.raises(Unavailable):
                await pool.refill()
        with pytest.raises(Unavailable):
            pool.take()
    assert await take(pool, 1) == [KEYS.address(13)]
    await pool.close()
