"""The sandbox's chains, on each backend."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rpcsvc.settlement.sandbox.ledger import (
    Fault,
    Mined,
    SandboxLedger,
    Setting,
    SimulatedChain,
    Tx,
    TxKind,
    TxState,
)
from rpcsvc.store.database import Tables

CHAIN = SimulatedChain("monero", 100, 1000, 50, False, 10**16, 10**16)
DEPOSIT = Tx("monero", "t1", TxKind.DEPOSIT, "8Address", None, 7, 0, 2000)
PAYOUT = Tx("monero", "t2", TxKind.TRANSFER, "8UserAddress", None, 5, 1, 2001)


@pytest.fixture
async def ledger(database: Tables) -> SandboxLedger:
    made = SandboxLedger(database)
    await made.add_chains([CHAIN])
    await made.broadcast(DEPOSIT)
    await made.broadcast(PAYOUT)
    return made


async def test_a_chain_keeps_its_balance_and_takes_its_time(ledger: SandboxLedger) -> None:
    await ledger.add_chains([replace(CHAIN, balance=1)])
    assert await ledger.chains() == [CHAIN]
    await ledger.put_chain(replace(CHAIN, base_height=200, paused=True, balance=1))
    assert await ledger.chains() == [replace(CHAIN, base_height=200, paused=True)]


async def test_a_transaction_moves_the_balance_when_it_is_mined(ledger: SandboxLedger) -> None:
    await ledger.broadcast(replace(DEPOSIT, units=99))
    assert await ledger.watched() == [DEPOSIT, PAYOUT]
    await ledger.mine([Mined(DEPOSIT, 101, "h101", 3000), Mined(PAYOUT, 101, "h101", 3000)])
    mined = replace(DEPOSIT, state=TxState.MINED, block_height=101)
    paid = replace(PAYOUT, state=TxState.MINED, block_height=101, watched=False)
    assert await ledger.mined_above("monero", 100) == [mined, paid]
    assert await ledger.transactions_to("monero", "8UserAddress") == [paid]
    assert (await ledger.chains())[0].balance == CHAIN.balance + 7 - 6
    await ledger.unwatch([DEPOSIT])
    assert await ledger.watched() == [mined], "it has changed since it was read"
    await ledger.unwatch([mined])
    assert await ledger.watched() == []
    assert await ledger.transaction("monero", "t9") is None


async def test_faults_and_settings_stay_until_they_are_changed(ledger: SandboxLedger) -> None:
    for _ in range(2):
        await ledger.add_fault("ord_1", Fault.PAYOUT_FAILS)
        await ledger.put_setting(Setting.CLOCK_OFFSET_MS, 2**40)
    assert await ledger.has_fault("ord_1", Fault.PAYOUT_FAILS)
    assert await ledger.settings() == {Setting.CLOCK_OFFSET_MS: 2**40}
    await ledger.clear_fault("ord_1", Fault.PAYOUT_FAILS)
    assert not await ledger.has_fault("ord_1", Fault.PAYOUT_FAILS)
