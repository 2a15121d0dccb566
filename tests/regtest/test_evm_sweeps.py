"""Sweeping deposits to the hot wallet on a real EVM node.

The tests count balances on the chain, never the service's database.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from rpcsvc.domain import usdc
from rpcsvc.settlement.onchain.daemon_rpc import TimedOut
from rpcsvc.settlement.onchain.evm.keys import TransactionPlan
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.evm.node_types import (
    Block,
    BlockRef,
    EvmCall,
    EvmSubmissionResult,
    Tag,
)
from rpcsvc.settlement.onchain.evm.records import EvmNetwork, EvmPaymentState, Sweep, SweepMethod
from tests.recording import record_calls
from tests.regtest.daemons import Anvil, mined
from tests.regtest.evm_payer import (
    ETHER,
    GWEI,
    HOT,
    KEYS,
    MINUTE_MS,
    NETWORK,
    OTHERS,
    USDC,
    USER,
    EvmPayer,
    each_by,
    evm_payer,
)
from tests.regtest.token import SOURCE, Token, compiled, deploy
from tests.rows import statement

pytestmark = pytest.mark.slow  # the quick tests must stay quick

HOUR_MS = 60 * MINUTE_MS
FIRST_PAUSE_MS = 4000


@pytest.fixture
async def own(anvil: Anvil, token: Token, tmp_path: Path) -> AsyncIterator[EvmPayer]:
    """A hot wallet with 1 ether and no USDC."""
    await token.controls.set_ether(HOT, ETHER)
    async with evm_payer(anvil, token, tmp_path) as made:
        yield made


async def finish(own: EvmPayer) -> None:
    """Mine until all sweeps under way are settled and recorded."""
    for sweep in await own.ledger.sweeps_under_way(NETWORK):
        payment = await own.ledger.payment(sweep.payment_id or "")
        assert payment is not None
        await mined(own.token.client, payment.latest.txid)
    await own.controls.mine(own.network.failed_after)
    await own.follow()
    await own.sweep()


async def all_left(own: EvmPayer) -> list[int]:
    return [item.units for item in await own.ledger.unswept(NETWORK, 1)]


async def steal(own: EvmPayer, index: int, units: int, serial: int = 1) -> None:
    """Use the authorization of a sweep from another service with the same keys."""
    address = KEYS.address(index)
    nonce = usdc.keccak256(
        b"sweep" + usdc.uint_word(own.network.chain_id) + usdc.address_word(own.token.address)
        + usdc.address_word(address) + usdc.uint_word(serial)
    )  # fmt: skip
    taking = usdc.Authorization(address, HOT, units, 0, usdc.LARGEST_WORD, nonce)
    signature = KEYS.signer(index).sign_digest(usdc.receive_digest(own.token.domain, taking))
    data = usdc.receive_with_authorization(taking, signature)
    client = own.token.client
    plan = TransactionPlan(
        own.network.chain_id, await client.nonce(HOT), own.token.address, 200_000, 9 * GWEI, GWEI,
        data,
    )  # fmt: skip
    txid = (await client.submit(KEYS.signer(0).sign(plan).raw)).txid
    assert (await mined(client, txid)).ok


# --- without faults ----------------------------------------------------------------------------


async def test_several_addresses_are_swept_together_and_hold_no_ether(own: EvmPayer) -> None:
    given = [await own.give(index, index * 10 * USDC) for index in range(2, 6)]
    await own.controls.automine(enabled=False)
    await own.sweep()
    assert len(await own.live()) == 4
    await own.sweep()
    assert len(await own.live()) == 4
    await own.controls.mine()
    assert await own.token.balance(HOT) == 140 * USDC
    await finish(own)
    assert not (
        await own.ledger.sweeps_under_way(NETWORK) or await own.live() or await all_left(own)
    )
    assert own.sweeps.conditions() == []
    assert own.sweeps.counts == {"sent": len(given), "done": len(given)}
    for address in given:
        assert await own.token.balance(address) == 0
        assert await own.token.client.ether(address) == 0


async def test_what_is_not_confirmed_or_not_worth_it_stays(own: EvmPayer) -> None:
    seen = await own.give(2, 5 * USDC, state="seen")
    removed = await own.give(3, 5 * USDC, state="removed")
    fresh = await own.give(4, 5 * USDC, state=None)
    small = await own.give(5, USDC - 1)
    await own.sweep()
    assert await own.live() == []
    await own.give(5, 1)
    await own.sweep()
    await finish(own)
    assert await own.token.balance(HOT) == USDC
    assert await own.token.balance(small) == 0
    for address in (seen, removed, fresh):
        assert await own.token.balance(address) == 5 * USDC


async def test_only_confirmed_units_are_taken_of_what_an_address_holds(own: EvmPayer) -> None:
    await own.give(2, 5 * USDC)
    address = await own.give(2, 3 * USDC, state="seen")
    await own.sweep()
    await finish(own)
    assert await own.token.balance(address) == 3 * USDC
    assert await own.token.balance(HOT) == 5 * USDC


async def test_a_second_deposit_is_swept_again(own: EvmPayer) -> None:
    for units in (5 * USDC, 2 * USDC):
        address = await own.give(2, units)
        await own.sweep()
        await finish(own)
        assert await own.token.balance(address) == 0
    assert await own.token.balance(HOT) == 7 * USDC


async def test_a_batch_has_its_bounds(own: EvmPayer) -> None:
    for index in range(2, 6):
        await own.give(index, USDC)

    def three(network: EvmNetwork) -> EvmNetwork:
        return replace(network, sweep_batch=3)

    async with own.again(three) as later:
        await later.sweep()
        await later.sweep()
        assert len(await later.live()) == 3
        await finish(later)
        assert len(await later.live()) == 1


async def test_payouts_go_before_sweeps(own: EvmPayer) -> None:
    await own.token.mint(HOT, 10 * USDC)
    await own.give(2, 5 * USDC)
    await own.controls.automine(enabled=False)
    payout = await own.prepared(own.transfer(USER))
    await own.sweep()
    assert len(await own.live()) == 1
    await own.pay(payout)
    await own.sweep()
    assert len(await own.live()) == 1
    await own.controls.mine()
    await own.payments.look_up(payout)
    await own.sweep()
    assert len(await own.live()) == 2


async def test_no_sweep_is_begun_while_a_payout_is_being_signed(
    own: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await own.token.mint(HOT, 10 * USDC)
    await own.give(2, 5 * USDC)
    real, asked, go_on = own.client.estimate_gas, asyncio.Event(), asyncio.Event()

    async def slow(call: EvmCall) -> int:
        asked.set()
        await go_on.wait()
        return await real(call)

    monkeypatch.setattr(own.client, "estimate_gas", slow)
    signing = asyncio.create_task(own.prepared(own.transfer(USER)))
    await asked.wait()
    await asyncio.wait_for(own.sweep(), 10)
    go_on.set()
    payout = await signing
    assert [item.payment_id for item in await own.live()] == [payout.transfer_id]
    await own.pay(payout)
    await mined(own.token.client, payout.txid or "")
    await own.payments.look_up(payout)
    await own.sweep()
    assert len(await own.ledger.sweeps_under_way(NETWORK)) == 1


async def test_pending_sweep_does_not_reduce_what_can_be_paid(own: EvmPayer) -> None:
    await own.token.mint(HOT, 10 * USDC)
    await own.give(2, 5 * USDC)
    await own.controls.automine(enabled=False)
    await own.sweep()
    (sweep,) = await own.live()
    payout = await own.prepared(own.transfer(USER, 10 * USDC))
    assert [item.payment_id for item in await own.live()] == [sweep.payment_id, payout.transfer_id]


async def test_the_gas_reserve_is_kept_for_payouts(own: EvmPayer) -> None:
    await own.give(2, 5 * USDC)
    await own.controls.set_ether(HOT, own.network.gas_reserve)
    await own.sweep()
    assert await own.live() == []
    (reported,) = [each.text for each in own.sweeps.conditions()]
    assert "lacks ether" in reported
    await own.controls.set_ether(HOT, ETHER)
    own.clock.now += FIRST_PAUSE_MS
    await own.sweep()
    assert own.sweeps.conditions() == []
    await finish(own)
    assert await own.token.balance(HOT) == 5 * USDC


async def test_a_refused_sweep_is_tried_after_growing_pauses(own: EvmPayer) -> None:
    """The refresh does not know that the wallet lacks the gas of a sweep besides its reserve."""
    await own.give(2, 5 * USDC)
    await own.controls.set_ether(HOT, own.network.gas_reserve)
    await own.refresh()
    calls: list[str] = []
    record_calls(own.client.rpc, calls)
    tries = []
    for second in range(0, 600, 2):
        before = calls.count("eth_estimateGas")
        await own.sweep()
        if calls.count("eth_estimateGas") > before:
            tries.append(second)
        own.clock.now += 2000
    assert tries == [0, 4, 12, 28, 60, 124, 252, 508], "five minutes are the longest pause"


async def test_what_gas_forbids_is_not_asked_for_at_all(own: EvmPayer) -> None:
    await own.give(2, 5 * USDC)
    await own.controls.set_ether(HOT, own.network.gas_reserve - 1)
    await own.refresh()
    calls: list[str] = []
    record_calls(own.client.rpc, calls)
    await own.sweep()
    assert "eth_estimateGas" not in calls
    (reported,) = [each.text for each in own.sweeps.conditions()]
    assert "nothing is swept on arbitrum: the hot wallet on arbitrum lacks ether" in reported
    await own.controls.set_ether(HOT, ETHER)
    await own.controls.set_next_base_fee(own.network.highest_fee // 50_000)
    await own.controls.mine()
    await own.refresh()
    calls.clear()
    await own.sweep()
    (reported,) = [each.text for each in own.sweeps.conditions()]
    assert "nothing is swept on arbitrum: gas on arbitrum is too dear" in reported
    assert "eth_estimateGas" not in calls
    await own.controls.mine(60)
    await own.refresh()
    await own.sweep()
    assert own.sweeps.conditions() == []


# --- deposits that can't be swept --------------------------------------------------------------


async def test_blacklisted_payee_is_reported_and_delays_no_other(own: EvmPayer) -> None:
    bad = await own.give(2, 5 * USDC)
    await own.give(3, 5 * USDC)
    await own.token.blacklist(bad)
    await own.sweep()
    await finish(own)
    assert await own.token.balance(HOT) == 5 * USDC
    (reported,) = [each.text for each in own.sweeps.conditions()]
    assert f"{bad} is on the token's blacklist" in reported
    await own.token.unblacklist(bad)
    await own.sweep()
    assert await own.live() == []  # it is retried rarely
    own.clock.now += HOUR_MS
    await own.sweep()
    await finish(own)
    assert own.sweeps.conditions() == []
    assert await own.token.balance(HOT) == 10 * USDC


async def test_sweep_blacklisted_before_mining_fails_and_backs_off(
    own: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = await own.give(2, 5 * USDC)
    real = own.client.submit

    async def submit_late(raw: bytes) -> EvmSubmissionResult:
        await own.token.blacklist(bad)
        return await real(raw)

    monkeypatch.setattr(own.client, "submit_each", each_by(submit_late))
    await own.sweep()
    await finish(own)
    assert not (await own.ledger.sweeps_under_way(NETWORK) or await own.live())
    assert "failed" in own.sweeps.conditions()[0].text
    await own.token.unblacklist(bad)
    await own.sweep()
    assert await own.live() == []
    monkeypatch.undo()
    own.clock.now += HOUR_MS
    await own.sweep()
    await finish(own)
    assert not (await all_left(own) or own.sweeps.conditions())
    assert await own.token.balance(HOT) == 5 * USDC


async def test_a_condition_goes_with_what_there_was_to_sweep(own: EvmPayer) -> None:
    bad = await own.give(2, 5 * USDC)
    await own.token.blacklist(bad)
    await own.sweep()
    assert len(own.sweeps.conditions()) == 1
    await own.database.write([statement("UPDATE evm_deposits SET acknowledged = 'removed'", ())])
    await own.sweep()
    assert own.sweeps.conditions() == []


async def test_settled_sweep_with_unused_authorization_took_nothing(
    own: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await own.give(2, 5 * USDC)
    await own.sweep()

    async def never(*_: object) -> bool:
        return False

    monkeypatch.setattr(own.sweeps, "_is_used", never)
    await finish(own)
    assert await own.ledger.unswept_of(NETWORK, 2) == 5 * USDC
    assert "failed" in own.sweeps.conditions()[0].text


async def settled_sweep(own: EvmPayer) -> Sweep:
    """A sweep whose payment is settled and that is not recorded as done yet."""
    await own.sweep()
    (sweep,) = await own.ledger.sweeps_under_way(NETWORK)
    payment = await own.ledger.payment(sweep.payment_id or "")
    assert payment is not None
    await mined(own.token.client, payment.latest.txid)
    await own.controls.mine(own.network.settled_after)
    await own.follow()
    return sweep


@pytest.mark.parametrize("late", ["for a call", "for all"])
async def test_a_node_that_is_late_does_not_undo_a_settled_sweep(
    own: EvmPayer, monkeypatch: pytest.MonkeyPatch, late: str
) -> None:
    """A load balancer switches to a node that lacks the block of the payment."""
    await own.give(2, 5 * USDC)
    await own.controls.mine()
    before = await own.token.client.block()
    assert before is not None
    call, block = own.client.call, own.client.block

    async def old_call(what: EvmCall, at: BlockRef = Tag.LATEST) -> bytes:
        return await call(what, before.number if at is Tag.LATEST else at)

    async def old_block(at: BlockRef = Tag.LATEST) -> Block | None:
        return await block(before.number if at is Tag.LATEST else at)

    await settled_sweep(own)
    monkeypatch.setattr(own.client, "call", old_call)
    if late == "for all":
        monkeypatch.setattr(own.client, "block", old_block)
    await own.sweep()
    monkeypatch.undo()
    await own.sweep()
    assert await own.ledger.unswept_of(NETWORK, 2) == 0
    assert own.sweeps.conditions() == []


async def test_settled_sweep_lost_to_a_reorg_counts_once_it_returns(
    own: EvmPayer,
) -> None:
    """The sweep was not recorded as done: the service was stopped, or its node was down."""
    await own.give(2, 5 * USDC)
    await own.controls.mine()
    sweep = await settled_sweep(own)
    await own.controls.reorganise(own.network.settled_after + 1)
    await own.controls.automine(enabled=False)
    await own.follow()
    await own.sweep()
    assert await own.ledger.sweeps_under_way(NETWORK) == [sweep]
    await own.controls.automine(enabled=True)
    await own.controls.mine(own.network.failed_after)
    await own.follow()
    await own.sweep()
    assert await own.ledger.unswept_of(NETWORK, 2) == 0
    assert await own.token.balance(HOT) == 5 * USDC
    assert own.sweeps.conditions() == []


async def test_paused_token_is_reported_and_swept_once_unpaused(own: EvmPayer) -> None:
    await own.give(2, 5 * USDC)
    await own.token.pause()
    for _ in range(3):
        await own.sweep()
    assert await own.live() == []
    assert len(own.sweeps.conditions()) == 1
    assert "paused" in own.sweeps.conditions()[0].text
    await own.token.unpause()
    await own.sweep()
    await finish(own)
    assert own.sweeps.conditions() == []
    assert await own.token.balance(HOT) == 5 * USDC


async def test_blacklisted_hot_wallet_is_reported(own: EvmPayer) -> None:
    await own.give(2, 5 * USDC)
    await own.token.blacklist(HOT)
    await own.sweep()
    assert await own.live() == []
    assert "hot wallet" in own.sweeps.conditions()[0].text


async def test_address_of_another_mnemonic_is_reported(
    own: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await own.give(2, 5 * USDC)
    monkeypatch.setattr(own.sweeps, "_keys", OTHERS)
    await own.sweep()
    assert await own.live() == []
    assert "not of this mnemonic" in own.sweeps.conditions()[0].text


# --- the same keys elsewhere --------------------------------------------------------------------


async def test_authorization_used_elsewhere_counts_as_swept(own: EvmPayer) -> None:
    await own.give(2, 5 * USDC)
    await own.give(3, 4 * USDC)
    await steal(own, 2, 5 * USDC)
    await own.sweep()
    await finish(own)
    assert await all_left(own) == []
    assert own.sweeps.conditions() == []
    assert await own.token.balance(HOT) == 9 * USDC


async def test_outside_sweep_mined_between_two_looks_counts_whole(
    own: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The address's balance is from before the sweep, and the authorization's state from after."""
    await own.give(2, 5 * USDC)
    real = own.client.estimate_gas

    async def late(call: EvmCall) -> int:
        monkeypatch.setattr(own.client, "estimate_gas", real)
        await steal(own, 2, 5 * USDC)
        return await real(call)

    monkeypatch.setattr(own.client, "estimate_gas", late)
    await own.sweep()
    assert await all_left(own) == []
    await own.sweep()
    assert own.sweeps.conditions() == []


async def test_deposit_after_an_outside_sweep_is_swept_next(
    own: EvmPayer,
) -> None:
    await own.give(2, 5 * USDC)
    await steal(own, 2, 5 * USDC)
    address = await own.give(2, 3 * USDC)
    await own.sweep()
    await own.sweep()
    await finish(own)
    assert await all_left(own) == []
    assert await own.token.balance(address) == 0
    assert await own.token.balance(HOT) == 8 * USDC


async def failed_by_another(own: EvmPayer, monkeypatch: pytest.MonkeyPatch, units: int) -> None:
    """A sweep of 5 USDC fails: the same keys swept ``units`` elsewhere under its nonce."""
    await own.give(2, 5 * USDC)

    async def lost(raw: bytes) -> EvmSubmissionResult:
        raise TimedOut("node", "eth_sendRawTransaction", "no answer in time")

    with monkeypatch.context() as patched:
        patched.setattr(own.client, "submit_each", each_by(lost))
        await own.sweep()
    await steal(own, 2, units)
    for _ in range(2):
        await own.follow()
        await own.controls.mine(own.network.failed_after)
    await own.follow()
    (sweep,) = await own.ledger.sweeps_under_way(NETWORK)
    payment = await own.ledger.payment(sweep.payment_id or "")
    assert payment is not None
    assert payment.state is EvmPaymentState.FAILED


@pytest.mark.parametrize("units", [5 * USDC, 3 * USDC])
async def test_sweep_displaced_by_another_counts_by_balance(
    own: EvmPayer, monkeypatch: pytest.MonkeyPatch, units: int
) -> None:
    await failed_by_another(own, monkeypatch, units)
    await own.sweep()
    assert await own.ledger.unswept_of(NETWORK, 2) == 5 * USDC - units
    await finish(own)
    assert not (await all_left(own) or own.sweeps.conditions())
    assert await own.token.balance(HOT) == 5 * USDC


async def test_no_more_counts_as_swept_than_was_to_be(
    own: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await failed_by_another(own, monkeypatch, 5 * USDC)
    await own.give(2, 4 * USDC)
    await drain(own, 2, 4 * USDC)
    await own.sweep()
    assert await all_left(own) == [4 * USDC]
    assert "something else takes from it" in own.sweeps.conditions()[0].text


@pytest.mark.parametrize("was_signed", [True, False])
async def test_deposit_after_an_outside_sweep_does_not_block_its_end(
    own: EvmPayer, monkeypatch: pytest.MonkeyPatch, was_signed: bool
) -> None:
    if was_signed:
        await failed_by_another(own, monkeypatch, 5 * USDC)
    else:
        await own.give(2, 5 * USDC)
        await steal(own, 2, 5 * USDC)
    await own.give(2, 8 * USDC, state="seen")
    await own.sweep()
    assert await own.ledger.sweeps_under_way(NETWORK) == []
    assert await own.ledger.unswept_of(NETWORK, 2) == 5 * USDC


async def drain(own: EvmPayer, index: int, units: int) -> None:
    """Move USDC off a deposit address with its key, outside of the service."""
    signer = KEYS.signer(index)
    await own.controls.set_ether(signer.address, ETHER)
    plan = TransactionPlan(
        own.network.chain_id, 0, own.token.address, 200_000, 9 * GWEI, GWEI,
        usdc.transfer(USER, units),
    )  # fmt: skip
    result = await own.token.client.submit(signer.sign(plan).raw)
    assert (await mined(own.token.client, result.txid)).ok


async def test_what_others_drained_is_not_counted_as_swept(
    own: EvmPayer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await own.give(2, 5 * USDC)
    real = own.client.submit

    async def submit_late(raw: bytes) -> EvmSubmissionResult:
        await drain(own, 2, 5 * USDC)
        return await real(raw)

    monkeypatch.setattr(own.client, "submit_each", each_by(submit_late))
    await own.sweep()
    await finish(own)
    assert await own.ledger.sweeps_under_way(NETWORK) == []
    assert await own.ledger.unswept_of(NETWORK, 2) == 5 * USDC
    assert "failed" in own.sweeps.conditions()[0].text


async def test_missing_units_are_reported(own: EvmPayer) -> None:
    await own.give(2, 5 * USDC)
    await drain(own, 2, 5 * USDC)
    await own.sweep()
    assert await own.live() == []
    assert "something else takes from it" in own.sweeps.conditions()[0].text


# --- kills and stuck sweeps ---------------------------------------------------------------------


@pytest.mark.parametrize("before", ["it was marked", "it was sent"])
async def test_kill_before_sending_sends_the_sweep_once_at_next_start(
    own: EvmPayer, monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    await own.give(2, 5 * USDC)
    if before == "it was marked":
        monkeypatch.setattr(own.payments, "hand_over", None)
    else:
        monkeypatch.setattr(own.client, "submit_each", None)
    with pytest.raises(TypeError):
        await own.sweep()
    async with own.again() as later:
        (signed,) = await later.live()
        assert (signed.state is EvmPaymentState.PREPARED) == (before == "it was marked")
        await later.sweep()
        assert await later.live() == [signed]
        await later.follow()
        await finish(later)
        assert await all_left(later) == []
        assert await later.token.balance(HOT) == 5 * USDC


async def test_a_stuck_sweep_is_replaced_and_counted_once(own: EvmPayer) -> None:
    await own.give(2, 5 * USDC)
    await own.controls.automine(enabled=False)
    await own.sweep()
    own.clock.now += MINUTE_MS
    await own.follow()
    assert len((await own.live())[0].attempts) == 2
    await own.controls.mine()
    await finish(own)
    assert await all_left(own) == []
    assert await own.token.balance(HOT) == 5 * USDC


# --- sweeps by permit ---------------------------------------------------------------------------


def without_receive(directory: Path) -> bytes:
    """The token's creation code with a receiveWithAuthorization that always reverts."""
    check = 'assert to == msg.sender, "FiatTokenV2: caller must be the payee"'
    source = SOURCE.read_text().replace(check, 'assert False, "no such function"', 1)
    assert source.count(check) == 0
    path = directory / "Refusing.vy"
    path.write_text(source)
    return compiled(path)


async def test_a_token_that_refuses_authorizations_is_swept_by_permit(
    anvil: Anvil, evm: EvmClient, tmp_path: Path
) -> None:
    token = await deploy(evm, without_receive(tmp_path))
    await token.controls.set_ether(HOT, ETHER)
    async with evm_payer(anvil, token, tmp_path) as own:
        address = await own.give(2, 5 * USDC)
        await own.sweep()
        (permit,) = await own.ledger.sweeps_under_way(NETWORK)
        assert permit.method is SweepMethod.PERMIT
        await finish(own)
        (take,) = await own.ledger.sweeps_under_way(NETWORK)
        assert take.method is SweepMethod.TAKE
        await finish(own)
        assert not (await all_left(own) or own.sweeps.conditions())
        assert await token.balance(address) == 0
        assert await token.balance(HOT) == 5 * USDC


async def test_failed_second_attempt_took_nothing_and_is_retried(
    anvil: Anvil, evm: EvmClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = await deploy(evm, without_receive(tmp_path))
    await token.controls.set_ether(HOT, ETHER)
    async with evm_payer(anvil, token, tmp_path) as own:
        address = await own.give(2, 5 * USDC)
        await own.sweep()
        real = own.client.submit

        async def submit_late(raw: bytes) -> EvmSubmissionResult:
            await token.blacklist(address)
            return await real(raw)

        monkeypatch.setattr(own.client, "submit_each", each_by(submit_late))
        await finish(own)
        (take,) = await own.ledger.sweeps_under_way(NETWORK)
        assert take.method is SweepMethod.TAKE
        await finish(own)
        assert await all_left(own) == [5 * USDC]
        assert "failed" in own.sweeps.conditions()[0].text
        monkeypatch.undo()
        await token.unblacklist(address)
        own.clock.now += HOUR_MS
        await own.sweep()
        await finish(own)
        assert not (await all_left(own) or own.sweeps.conditions())
        assert await token.balance(HOT) == 5 * USDC


# --- deposit and sweep reorged out ---------------------------------------------------------------


async def acknowledge(own: EvmPayer, state: str) -> None:
    """Record this state for all deposits, as the scanner does."""
    change = "UPDATE evm_deposits SET acknowledged = ?"
    await own.database.write([statement(change, (state,))])


async def deposit_and_sweep_gone(own: EvmPayer) -> Sweep:
    """A deposit and its settled, recorded sweep, both reorged out; the sweep."""
    before = await own.controls.snapshot()
    await own.give(2, 5 * USDC)
    await own.sweep()
    (sweep,) = await own.ledger.sweeps_under_way(NETWORK)
    await finish(own)
    assert await own.ledger.unswept_of(NETWORK, 2) == 0
    await own.controls.revert(before)
    await own.controls.mine(4 * own.network.failed_after)
    await acknowledge(own, "removed")
    return sweep


async def settle_all(own: EvmPayer) -> None:
    """Mine until all published payments are deep, and record their outcomes."""
    await own.controls.mine(own.network.failed_after)
    await own.follow()
    await own.sweep()


async def refused_again(own: EvmPayer, sweep: Sweep) -> None:
    """Require that the sweep is published again at once, and reverts."""
    await own.follow()
    payment = await own.ledger.payment(sweep.payment_id or "")
    assert payment is not None
    assert not (await mined(own.token.client, payment.latest.txid)).ok


async def test_a_deposit_back_after_its_sweep_failed_is_swept_again(own: EvmPayer) -> None:
    sweep = await deposit_and_sweep_gone(own)
    await refused_again(own, sweep)
    await own.token.mint(KEYS.address(2), 5 * USDC)
    await acknowledge(own, "confirmed")
    await own.sweep()
    assert await own.ledger.unswept_of(NETWORK, 2) == 0, "it may yet be reorganised back"
    await settle_all(own)
    failed = await own.ledger.payment(sweep.payment_id or "")
    assert failed is not None
    assert failed.state is EvmPaymentState.FAILED
    (second,) = await own.ledger.sweeps_under_way(NETWORK)
    assert (second.serial, second.payment_id) == (2, f"sweep-{NETWORK}-2-2")
    await finish(own)
    assert await own.token.balance(HOT) == 5 * USDC
    assert not (await all_left(own) or own.sweeps.conditions() or await own.payments.conditions())


async def test_a_deposit_gone_permanently_leaves_a_void_sweep(own: EvmPayer) -> None:
    sweep = await deposit_and_sweep_gone(own)
    await refused_again(own, sweep)
    await settle_all(own)
    assert await own.ledger.unswept_of(NETWORK, 2) == 0
    assert not (await own.ledger.sweeps_under_way(NETWORK) or await own.live())
    assert not (own.sweeps.conditions() or await own.payments.conditions())
    await own.give(2, 3 * USDC)
    await own.sweep()
    await finish(own)
    assert await own.token.balance(HOT) == 3 * USDC, "a later deposit is swept whole"


async def test_a_deposit_back_in_time_is_swept_by_the_same_bytes(own: EvmPayer) -> None:
    sweep = await deposit_and_sweep_gone(own)
    await own.token.mint(KEYS.address(2), 5 * USDC)
    await acknowledge(own, "confirmed")
    await own.follow()
    await settle_all(own)
    payment = await own.ledger.payment(sweep.payment_id or "")
    assert payment is not None
    assert payment.state is EvmPaymentState.SETTLED
    assert await own.token.balance(HOT) == 5 * USDC
    assert not (await all_left(own) or await own.ledger.sweeps_under_way(NETWORK))
    assert not (own.sweeps.conditions() or await own.payments.conditions())


async def test_a_settled_sweep_whose_nonce_another_took_is_made_again(own: EvmPayer) -> None:
    """On the new branch the same key elsewhere has used its nonce for another transaction."""
    sweep = await deposit_and_sweep_gone(own)
    await own.token.mint(KEYS.address(2), 5 * USDC)
    await acknowledge(own, "confirmed")
    payment = await own.ledger.payment(sweep.payment_id or "")
    assert payment is not None
    plan = TransactionPlan(own.network.chain_id, payment.nonce, HOT, 21_000, 50 * GWEI, GWEI)
    rival = await own.token.client.submit(KEYS.signer(0).sign(plan).raw)
    await mined(own.token.client, rival.txid)
    await settle_all(own)
    await finish(own)
    assert await own.token.balance(HOT) == 5 * USDC
    assert not (await all_left(own) or own.sweeps.conditions() or await own.payments.conditions())


async def test_failed_sweep_whose_block_is_gone_spends_its_nonce_again(own: EvmPayer) -> None:
    """Payments signed after it wait for that nonce, and no pool has its bytes."""
    sweep = await deposit_and_sweep_gone(own)
    before = await own.controls.snapshot()
    await refused_again(own, sweep)
    await settle_all(own)
    await own.controls.revert(before)
    await own.controls.mine(4 * own.network.failed_after)
    nonce = await own.token.client.nonce(HOT, Tag.LATEST)
    await refused_again(own, sweep)
    assert await own.token.client.nonce(HOT, Tag.LATEST) == nonce + 1
    await settle_all(own)
    payment = await own.ledger.payment(sweep.payment_id or "")
    assert payment is not None
    assert payment.state is EvmPaymentState.FAILED
    assert not (own.sweeps.conditions() or await own.payments.conditions())


async def test_a_failed_sweep_that_is_mined_after_all_counts(own: EvmPayer) -> None:
    """The block of its failure is replaced, too, and a block producer still has its bytes."""
    sweep = await deposit_and_sweep_gone(own)
    before = await own.controls.snapshot()
    await refused_again(own, sweep)
    await settle_all(own)
    payment = await own.ledger.payment(sweep.payment_id or "")
    assert payment is not None
    assert payment.state is EvmPaymentState.FAILED
    await own.controls.revert(before)
    await own.token.mint(KEYS.address(2), 5 * USDC)
    await own.token.client.submit(bytes.fromhex(payment.latest.raw))
    assert (await mined(own.token.client, payment.latest.txid)).ok
    await acknowledge(own, "confirmed")
    await own.sweep()
    assert await own.ledger.unswept_of(NETWORK, 2) == 0
    assert await own.token.balance(HOT) == 5 * USDC
    assert not (await own.live() or own.sweeps.conditions())


@pytest.mark.parametrize("comes_back", [True, False], ids=["late", "gone permanently"])
async def test_sweep_reorged_below_finality_ends_with_its_deposit(
    own: EvmPayer, comes_back: bool
) -> None:
    """A sweep that was mined and not settled reverts once, and is made again after an hour."""
    before = await own.controls.snapshot()
    await own.give(2, 5 * USDC)
    await own.sweep()
    (sweep,) = await own.ledger.sweeps_under_way(NETWORK)
    await own.follow()
    await own.controls.revert(before)
    await acknowledge(own, "removed")
    await refused_again(own, sweep)
    if comes_back:
        await own.token.mint(KEYS.address(2), 5 * USDC)
        await acknowledge(own, "confirmed")
    await settle_all(own)
    assert await own.ledger.sweeps_under_way(NETWORK) == []
    own.clock.now += HOUR_MS
    await own.sweep()
    await finish(own)
    assert await own.token.balance(HOT) == (5 * USDC if comes_back else 0)
    assert not (await all_left(own) or await own.live())
    assert not (own.sweeps.conditions() or await own.payments.conditions())


@pytest.mark.parametrize("is_back", [True, False], ids=["back late", "gone permanently"])
async def test_a_permit_and_what_it_let_take_are_made_again(
    anvil: Anvil, evm: EvmClient, tmp_path: Path, is_back: bool
) -> None:
    """Both are settled and reorged out with the deposit. The permit is valid again."""
    token = await deploy(evm, without_receive(tmp_path))
    await token.controls.set_ether(HOT, ETHER)
    async with evm_payer(anvil, token, tmp_path) as own:
        before = await own.controls.snapshot()
        await own.give(2, 5 * USDC)
        await own.sweep()
        await finish(own)
        await finish(own)
        assert await token.balance(HOT) == 5 * USDC
        await own.controls.revert(before)
        await own.controls.mine(4 * own.network.failed_after)
        await acknowledge(own, "removed")
        await own.follow()
        await own.controls.mine()
        if is_back:
            await token.mint(KEYS.address(2), 5 * USDC)
            await acknowledge(own, "confirmed")
        await settle_all(own)
        if not is_back:
            assert not (await own.ledger.sweeps_under_way(NETWORK) or await own.live())
            await own.give(2, 5 * USDC)  # a later deposit is swept in full
            await own.sweep()
        await finish(own)
        assert await token.balance(HOT) == 5 * USDC
        assert not (
            await all_left(own) or own.sweeps.conditions() or await own.payments.conditions()
        )


async def test_pause_since_the_last_look_postpones_no_sweep(own: EvmPayer) -> None:
    await own.give(2, 5 * USDC)
    await own.connection.check()
    await own.token.pause()
    await own.sweeps.maintain(await own.connection.head())
    await own.token.unpause()
    await own.sweep()
    assert own.sweeps.counts["sent"] == 1
