"""Deposits of USDC on a real node: seen, confirmed, moved, reorged out, back; over outages."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rpcsvc.domain import usdc
from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.wallets import DepositSighting
from rpcsvc.settlement.onchain.evm import deposits as evm_deposits
from rpcsvc.settlement.onchain.evm.keys import SignedTransaction
from rpcsvc.settlement.onchain.evm.node_types import EvmSubmission
from rpcsvc.settlement.onchain.evm.records import EvmAddress
from tests.regtest.daemons import Anvil, mined
from tests.regtest.evm_reader import (
    CONFIRMED,
    ETHER,
    KEYS,
    REMOVED,
    SECOND,
    SEEN,
    STRANGER,
    USDC,
    USER,
    USERS,
    EvmReader,
    States,
    crooked,
    network_of,
    pay,
    pay_in_a_row,
    reader_on,
    resubmit,
)
from tests.regtest.token import Token
from tests.sandbox import ManualClock

pytestmark = pytest.mark.slow


@pytest.fixture
async def reader(token: Token, tmp_path: Path) -> AsyncIterator[EvmReader]:
    await token.controls.set_ether(USER.address, ETHER)
    await token.mint(USER.address, 10_000 * USDC)
    await token.controls.mine(40)
    endpoint, network = token.client.rpc.endpoint, network_of(token)
    async with reader_on(
        token, endpoint, network, tmp_path / "data", ManualClock(4_000_000_000_000)
    ) as made:
        assert await made.reconcile() == {}
        yield made


# --- deposits ----------------------------------------------------------------------------------


async def test_deposit_is_seen_and_confirmed_with_sender_and_time(reader: EvmReader) -> None:
    address = reader.pool.take()
    signed = await pay(reader.token, address, 25 * USDC)
    receipt = await mined(reader.token.client, signed.txid)
    block = await reader.token.client.block(receipt.block_number)
    assert block is not None
    (sighting,) = (await reader.poll()).values()
    assert sighting == DepositSighting(
        reader.key(signed.txid), address, 25 * USDC, USER.address, block.timestamp * SECOND, SEEN
    )
    await reader.token.controls.mine(1)
    assert await reader.reconcile() == {reader.key(signed.txid): SEEN}
    assert await reader.scanner.confirmations(reader.key(signed.txid)) == 2
    await reader.token.controls.mine(1)
    assert await reader.reconcile() == {reader.key(signed.txid): CONFIRMED}
    assert await reader.scanner.confirmations(reader.key(signed.txid)) == 3
    assert await reader.reconcile() == {}
    await reader.pool.close()


async def test_deposits_of_one_transaction_differ_by_log_index(
    reader: EvmReader,
) -> None:
    first, second = reader.pool.take(), reader.pool.take()
    await pay(reader.token, STRANGER)
    txid = await pay_in_a_row(
        reader.token, (STRANGER, 9), (first, 1), (second, 2), (first, 3), (first, 0)
    )
    reader.calls.clear()
    seen = await reader.poll()
    assert {(key.output_index, item.address, item.units) for key, item in seen.items()} == {
        (1, first, 1), (2, second, 2), (3, first, 3),
    }  # fmt: skip
    assert {key.txid for key in seen} == {txid}
    assert reader.calls.count("eth_getTransactionReceipt") == 1


async def test_our_own_transfers_and_those_of_others_are_no_deposits(reader: EvmReader) -> None:
    hot, address = KEYS.address(0), reader.pool.take()
    await reader.token.controls._rpc.act("anvil_impersonateAccount", [hot])
    await reader.token.controls.set_ether(hot, ETHER)
    await reader.token.mint(hot, 50 * USDC)
    txid = await reader.token.controls.send_from(
        hot, reader.token.address, usdc.transfer(address, USDC)
    )
    await mined(reader.token.client, txid)
    await pay(reader.token, STRANGER)
    await pay(reader.token, address, 0)
    assert await reader.reconcile() == {}
    minted = await reader.token.mint(address, USDC)
    (sighting,) = (await reader.poll()).values()
    assert (sighting.key, sighting.sender) == (reader.key(minted), None)


# --- blocks that are replaced --------------------------------------------------------------------


async def test_reorged_deposit_is_removed_and_returns_when_resent(
    reader: EvmReader,
) -> None:
    address = reader.pool.take()
    signed = await pay(reader.token, address)
    key, controls = reader.key(signed.txid), reader.token.controls
    assert await reader.reconcile() == {key: SEEN}
    await controls.reorganise(1)
    assert await reader.reconcile() == {}, "a node may only be late: it is asked twice"
    assert await reader.scanner.confirmations(key) == 0
    assert await reader.reconcile() == {key: REMOVED}
    assert await reader.scanner.confirmations(key) == 0
    await controls.mine(5)
    assert await reader.reconcile() == {}
    first_seen = await reader.ledger.deposit(key)
    await resubmit(reader.token, signed)
    seen = await reader.poll()
    assert first_seen is not None
    assert (seen[key].state, seen[key].first_seen_at) == (SEEN, first_seen.first_seen_at)
    await controls.mine(2)
    assert await reader.reconcile() == {key: CONFIRMED}


async def test_confirmed_deposit_moved_to_another_block_reconfirms(
    reader: EvmReader,
) -> None:
    signed = await pay(reader.token, reader.pool.take())
    key, controls = reader.key(signed.txid), reader.token.controls
    await controls.mine(3)
    assert await reader.reconcile() == {key: CONFIRMED}
    before = await reader.ledger.deposit(key)
    await controls.reorganise(4)
    await controls.automine(enabled=False)
    await sent_again_after_another(reader, signed)
    assert await reader.reconcile() == {key: SEEN}
    after = await reader.ledger.deposit(key)
    assert before is not None
    assert after is not None
    assert after.block_hash != before.block_hash
    receipt = await mined(reader.token.client, signed.txid)
    assert receipt.logs[0].log_index == 1
    assert (after.block_number, after.block_hash) == (receipt.block_number, receipt.block_hash)
    await controls.mine(2)
    assert await reader.reconcile() == {key: CONFIRMED}


async def sent_again_after_another(reader: EvmReader, signed: SignedTransaction) -> None:
    """Mine the deposit after another transfer in one block: its log index changes."""
    token = reader.token
    whale = (await token.controls.accounts())[0]
    plan = usdc.selector("mint(address,uint256)") + usdc.address_word(STRANGER) + usdc.uint_word(1)
    params = {"from": whale, "to": token.address, "data": "0x" + plan.hex(),
              "maxPriorityFeePerGas": hex(2 * 10**9), "maxFeePerGas": hex(9 * 10**9)}  # fmt: skip
    await token.client.rpc.act("eth_sendTransaction", [params])
    assert (await token.client.submit(signed.raw)).submission is EvmSubmission.ACCEPTED
    await token.controls.mine()
    await mined(token.client, signed.txid)


async def test_deposit_replaced_during_downtime_is_found_gone(
    reader: EvmReader,
) -> None:
    signed = await pay(reader.token, reader.pool.take())
    key = reader.key(signed.txid)
    await reader.token.controls.mine(3)
    assert await reader.reconcile() == {key: CONFIRMED}
    await reader.kill()
    await reader.token.controls.reorganise(6)
    await reader.token.controls.mine(50)
    async with reader.again() as later:
        assert await later.reconcile() == {}
        assert await later.scanner.confirmations(key) == 0, "nothing is paid out for it"
        assert await later.reconcile() == {key: REMOVED}
        assert await later.reconcile() == {}


# --- the service stops -----------------------------------------------------------------------


async def test_kill_between_scan_and_commit_loses_and_doubles_nothing(
    reader: EvmReader,
) -> None:
    first = await pay(reader.token, reader.pool.take())
    shown = await reader.poll()
    reader.clock.now += 10**9
    async with reader.again() as later:
        assert await later.poll() == shown
        second = await pay(later.token, later.pool.take())
        assert await later.reconcile() == {
            later.key(first.txid): SEEN, later.key(second.txid): SEEN,
        }  # fmt: skip
        async with later.again() as last:
            assert await last.reconcile() == {}
            await last.token.controls.mine(2)
            confirmed = dict.fromkeys((last.key(first.txid), last.key(second.txid)), CONFIRMED)
            assert set(await last.poll()) == set(confirmed)
            async with last.again() as very_last:
                assert await very_last.reconcile() == confirmed
                assert await very_last.reconcile() == {}


async def test_a_long_absence_is_made_up_for_range_by_range(
    reader: EvmReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As many ranges as for some 20,000 blocks, which would take Anvil a minute to mine.
    monkeypatch.setattr(evm_deposits, "WIDEST_LOG_RANGE", 50)
    address, controls = reader.pool.take(), reader.token.controls
    await reader.kill()
    paid = []
    for _ in range(6):
        paid.append((await pay(reader.token, address)).txid)
        await controls.mine(100)
    async with reader.again() as later:
        found, passes = States(), 0
        while len(found) < len(paid):
            found |= await later.reconcile()
            passes += 1
        assert passes == 2
        assert found == {later.key(txid): CONFIRMED for txid in paid}
        ranges = later.calls.count("eth_getLogs")
        assert 12 <= ranges <= 16
        for txid in paid:
            item = await later.ledger.deposit(later.key(txid))
            assert item is not None
            assert item.first_seen_at < later.clock.now


async def test_a_first_start_may_begin_at_an_older_block(reader: EvmReader, tmp_path: Path) -> None:
    signed = await pay(reader.token, reader.pool.take())
    number = (await mined(reader.token.client, signed.txid)).block_number
    await reader.token.controls.mine(20)
    for start, expected in ((number, {reader.key(signed.txid): CONFIRMED}), (number + 9, {})):
        network = network_of(reader.token, start_block=start)
        data_dir = tmp_path / str(start)
        async with reader_on(
            reader.token, reader.endpoint, network, data_dir, reader.clock
        ) as fresh:
            assert await fresh.reconcile() == expected
    network = network_of(reader.token, start_block=10**6)
    async with reader_on(
        reader.token, reader.endpoint, network, tmp_path / "x", reader.clock
    ) as fresh:
        with pytest.raises(Unavailable):
            await fresh.reconcile()
        assert "no block 999999 to begin at" in str(fresh.scanner.problem)


# --- the node fails ----------------------------------------------------------------------------


async def test_hanging_node_is_reported_and_loses_nothing(reader: EvmReader, anvil: Anvil) -> None:
    await reader.kill()
    quick = replace(reader.endpoint, total_seconds=0.3)
    async with reader_on(
        reader.token, quick, reader.network, reader.data_dir, reader.clock
    ) as hasty:
        signed = await pay(reader.token, hasty.pool.take())
        anvil.freeze()
        with pytest.raises(Unavailable):
            await hasty.reconcile()
        assert "is down" in str(hasty.scanner.problem)
        anvil.thaw()
        hasty.connection.client.rpc.endpoint = (
            reader.endpoint
        )  # from now on without the short time limit
        assert await hasty.reconcile() == {hasty.key(signed.txid): SEEN}
        assert hasty.scanner.problem is None


async def test_a_node_of_another_chain_after_a_restart_is_refused(
    reader: EvmReader, anvil: Anvil
) -> None:
    signed = await pay(reader.token, reader.pool.take())
    await reader.reconcile()
    await asyncio.to_thread(anvil.kill)
    with pytest.raises(Unavailable):
        await reader.reconcile()
    anvil.chain_id = 1
    await asyncio.to_thread(anvil.start)
    with pytest.raises(Unavailable):
        await reader.reconcile()
    assert "is on chain 1, not on 42161" in str(reader.scanner.problem)
    stored = await reader.ledger.deposit(reader.key(signed.txid))
    assert stored is not None
    assert (stored.acknowledged, stored.block_number is None) == (SEEN, False)


def broken_logs(change: dict[str, Any]) -> Callable[[str, Any], Any]:
    def twist(method: str, answer: Any) -> Any:
        return [{**item, **change} for item in answer] if method == "eth_getLogs" else answer

    return twist


def instead(of: str, answer: Any) -> Callable[[str, Any], Any]:
    return lambda method, real: answer if method == of else real


@pytest.mark.parametrize(
    "twist",
    [
        instead("eth_getLogs", "nonsense"), instead("eth_getLogs", [7]),
        broken_logs({"address": STRANGER}), broken_logs({"blockNumber": "0x1"}),
        broken_logs({"topics": []}), broken_logs({"data": "0x"}), broken_logs({"data": None}),
        broken_logs({"topics": ["0x" + usdc.TRANSFER_TOPIC.hex()]}),
        instead("eth_getBlockByNumber", {"number": "0x1"}),
        instead("eth_getTransactionReceipt", {"status": "0x1"}),
    ],
)  # fmt: skip
async def test_garbage_is_reported_and_moves_nothing(
    reader: EvmReader, twist: Callable[[str, Any], Any]
) -> None:
    signed = await pay(reader.token, reader.pool.take())
    before = await reader.ledger.cursors("arbitrum")
    async with crooked(reader) as (node, behind):
        await behind.connection.check()
        node.twist = twist
        with pytest.raises(Unavailable):
            await behind.reconcile()
        assert "is down" in str(behind.scanner.problem)
        assert await behind.ledger.cursors("arbitrum") == before
        node.twist = lambda _, answer: answer
        assert await behind.reconcile() == {behind.key(signed.txid): SEEN}


async def test_inconsistent_node_confirms_and_removes_nothing(
    reader: EvmReader,
) -> None:
    """As with a load balancer over two nodes of which one is on a fork."""
    await reader.reconcile()
    signed = await pay(reader.token, reader.pool.take())
    key = reader.key(signed.txid)
    await reader.token.controls.mine(5)
    number = (await mined(reader.token.client, signed.txid)).block_number

    def fork(method: str, answer: Any) -> Any:
        if method == "eth_getBlockByNumber" and answer and answer["number"] == hex(number):
            return {**answer, "hash": "0x" + "ab" * 32}
        return answer

    async with crooked(reader) as (node, behind):
        node.twist = fork
        before = (await behind.ledger.cursors("arbitrum"))[1:]
        for _ in range(3):
            assert CONFIRMED not in (await behind.reconcile()).values()
            assert REMOVED not in (await behind.reconcile()).values()
        assert set(before) <= set(await behind.ledger.cursors("arbitrum"))
        node.twist = lambda _, answer: answer
        assert await behind.reconcile() == {key: CONFIRMED}


# --- number of calls -------------------------------------------------------------------------


async def test_watching_10000_addresses_costs_no_more_calls_than_100(
    reader: EvmReader,
) -> None:
    address = reader.pool.take()

    async def cost() -> list[str]:
        """Three blocks with a stranger's transfer, one with a deposit."""
        calls: list[str] = []
        for to in (STRANGER, STRANGER, STRANGER, address):
            await pay(reader.token, to)
            reader.calls.clear()
            await reader.reconcile()
            calls += reader.calls
        return sorted(calls)

    made = [EvmAddress(index, USERS.address(index)) for index in range(1, 11)]
    few = [replace(item, index=item.index + 100) for item in made] + [
        EvmAddress(200 + n, f"0x{n:040x}") for n in range(90)
    ]
    await reader.ledger.add_addresses(few[1:])
    await cost()
    with_few = await cost()
    await reader.ledger.add_addresses(
        [EvmAddress(1000 + n, f"0x{2**64 + n:040x}") for n in range(9900)]
    )
    assert await cost() == with_few
    assert with_few.count("eth_getLogs") == 4
    assert with_few.count("eth_getTransactionReceipt") == 1
