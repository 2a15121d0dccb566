"""Many payouts of one network that are due at once, on a real node, with orders and a journal."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from unittest.mock import patch

import pytest

from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.wallets import LacksFunds
from rpcsvc.settlement.onchain.evm.adapter import MOST_TOGETHER, EvmNetworkAdapter
from tests.recording import Recorder
from tests.regtest.due_payouts import DuePayouts, due_payouts
from tests.regtest.evm_payer import HOT, OTHERS, USDC, USER, EvmPayer
from tests.unit.orders import XMR_UNIT

MANY = 100
SUBMIT = "eth_sendRawTransaction"
SLOW_SECONDS = 0.025
# What it took before, one after the other, on the machine where both were measured.
LEAST_RATIO = 5


@pytest.fixture
async def due(payer: EvmPayer) -> AsyncIterator[DuePayouts]:
    async with due_payouts(payer) as made:
        yield made


async def nonces(due: DuePayouts) -> list[int]:
    rows = await due.own.database.fetch("SELECT nonce FROM evm_payments ORDER BY nonce")
    return [row["nonce"] for row in rows]


async def test_many_due_payouts_are_soon_in_a_distant_pool(
    payer: EvmPayer, capsys: pytest.CaptureFixture[str]
) -> None:
    async with due_payouts(payer, SLOW_SECONDS) as due:
        with (
            patch.object(EvmNetworkAdapter, "signed_together", 1),
            patch.object(EvmNetworkAdapter, "carried_at_once", 1),
        ):
            await due.due(10)
            single = await due.hand_over(10)
        await due.due(MANY)
        together = await due.hand_over(10 + MANY)
        before, after = single.seconds / 10, together.seconds / MANY
        with capsys.disabled():
            print(
                f"\n{MANY} payouts, the node 25 ms away: {together.seconds:.2f} s,"
                f" {together.calls.total()} calls in {together.exchanges} exchanges;"
                f" one by one {before * MANY:.1f} s, {single.calls.total() * MANY // 10} calls in"
                f" {single.exchanges * MANY // 10} exchanges: {before / after:.0f} times as fast"
            )
        assert before / after > LEAST_RATIO
        assert together.calls[SUBMIT] == MANY
        assert together.exchanges < 4 * MANY
        await due.settle()
        assert await due.paid() == due.owed
        assert await nonces(due) == list(range(10 + MANY))


async def test_one_line_and_one_commit_hold_those_signed_together(due: DuePayouts) -> None:
    await due.due(5)
    await due.hand_over(5)
    lines = due.own.data_dir.glob("journal/*.journal")
    bodies = [json.loads(line[17:]) for file in lines for line in file.read_text().splitlines()]
    (group,) = [body for body in bodies if body["kind"] == "group"]
    assert [entry["nonce"] for entry in group["entries"]] == [0, 1, 2, 3, 4]
    assert {entry["kind"] for entry in group["entries"]} == {"evm_payment"}


async def test_hundreds_due_do_not_wait_for_the_unpayable(due: DuePayouts) -> None:
    """More of them than are signed together, and older: too much for the wallet, or refused."""
    stuck, others = MOST_TOGETHER + 10, 440
    await due.due(stuck, xmr=9 * XMR_UNIT)
    await due.due(others, *[HOT] * 20)
    handed = await due.hand_over(others - 20)
    assert handed.calls[SUBMIT] == others - 20
    assert handed.calls.total() < 10 * others
    assert await due.states() == {"planned": stuck, "failed": 20, "published": others - 20}
    assert await nonces(due) == list(range(others - 20))


async def test_upkeep_looks_payouts_up_while_another_is_signed(due: DuePayouts) -> None:
    """A payout that has the wallet's writer, or waits for it, waits for no look-up."""
    await due.due(5)
    await due.hand_over(5)
    await due.settle()
    await due.due(5)
    await due.hand_over(5)
    async with asyncio.timeout(10), due.network.payments._payout_slot():
        await due.network.upkeep.maintain(await due.network.connection.check())
    assert await due.states() == {"settled": 5, "published": 5}


async def test_payouts_that_cannot_be_signed_delay_no_other(due: DuePayouts) -> None:
    await due.own.controls.automine(enabled=True)
    await due.own.token.blacklist(USER)
    await due.own.controls.automine(enabled=False)
    await due.due(60, HOT, USER, "0x" + "00" * 20, USER, HOT)
    await due.hand_over(55)
    await due.settle()
    paid = await due.paid()
    assert [paid[name] for name in list(paid)[5:]] == [due.owed[name] for name in list(paid)[5:]]
    assert await nonces(due) == list(range(55))


async def test_payouts_leave_what_refunds_may_need(payer: EvmPayer) -> None:
    """The hot wallet has 1,000 USDC: two payouts of 100 fit where 750 may have to go back, and a
    third one when a deposit is still to be swept.
    """
    due = [payer.transfer(OTHERS.address(number), 100 * USDC) for number in range(4)]
    record, leaves = Recorder(), {item.transfer_id: 750 * USDC for item in due}
    left = await payer.payments.prepare(due[0], due[1:], record, leaves)
    assert [item.transfer_ids[0] for item in record.signed] == ["tr_1", "tr_2"]
    assert left == due[2:]
    for item in due[:2]:
        await payer.paid(item)
    await payer.follow()
    with pytest.raises(LacksFunds) as lack:
        await payer.payments.prepare(due[2], [], record, leaves)
    assert lack.value.missing.units == 50 * USDC
    await payer.give(3, 50 * USDC)
    await payer.payments.prepare(due[2], [], record, leaves)


async def test_payout_waits_for_a_sweep_under_way_and_lacks_nothing(payer: EvmPayer) -> None:
    """The hot wallet has 1,000 USDC, and 500 that may have to go back are on their way to it."""
    await payer.give(3, 500 * USDC)
    await payer.controls.automine(enabled=False)
    await payer.sweep()
    item, record = payer.transfer(USER, 900 * USDC), Recorder()
    with pytest.raises(Unavailable, match="Not enough USDC is left"):
        await payer.payments.prepare(item, [], record, {item.transfer_id: 500 * USDC})
    with pytest.raises(LacksFunds) as lack:
        await payer.payments.prepare(item, [], record, {item.transfer_id: 700 * USDC})
    assert lack.value.missing.units == 100 * USDC
    await payer.controls.mine()
    await payer.payments.prepare(item, [], record, {item.transfer_id: 500 * USDC})
    assert len(record.signed) == 1


async def test_payouts_beyond_the_wallet_wait_and_leave_no_gap(due: DuePayouts) -> None:
    await due.due(60, xmr=XMR_UNIT // 6)
    fit = 1_000 * USDC // max(due.owed.values())
    await due.hand_over(fit)
    assert await due.states() == {"planned": 60 - fit, "published": fit}
    await due.own.controls.automine(enabled=True)
    await due.own.token.mint(HOT, 1_000 * USDC)
    await due.settle()
    assert await due.paid() == due.owed
    assert await nonces(due) == list(range(60))


async def test_batch_that_the_node_cuts_short_is_finished(due: DuePayouts) -> None:
    """Each answer that is missing is an unknown outcome of its own; nothing is signed again."""

    def cut(body: bytes, answer: bytes) -> bytes:
        asked = json.loads(body)
        if isinstance(asked, list) and asked[0]["method"] == SUBMIT and len(asked) > 1:
            return json.dumps(json.loads(answer)[::2]).encode()
        return answer

    due.proxy.change = cut
    await due.due(20)
    await due.hand_over(20)
    await due.settle()
    assert await due.paid() == due.owed
    assert await nonces(due) == list(range(20))


async def test_node_that_limits_calls_gets_all_payouts(due: DuePayouts) -> None:
    """As a provider that counts each call of a batch, and allows 25 at once."""
    error = {"code": 429, "message": "Too Many Requests"}

    async def limited(body: bytes) -> bytes | None:
        asked = json.loads(body)
        if not isinstance(asked, list) or len(asked) <= 25:
            return None
        answers = [{"jsonrpc": "2.0", "id": call["id"], "error": error} for call in asked]
        return json.dumps(answers).encode()

    due.proxy.stand_in = limited
    await due.due(40)
    await due.hand_over(40)
    due.proxy.stand_in = None
    await due.settle()
    assert await due.paid() == due.owed
    assert await nonces(due) == list(range(40))


async def test_node_without_batches_gets_all_payouts(due: DuePayouts) -> None:
    refusal = {"jsonrpc": "2.0", "id": None, "error": {"code": -32600, "message": "no batches"}}

    async def alone(body: bytes) -> bytes | None:
        is_batch = isinstance(json.loads(body), list)
        return json.dumps(refusal).encode() if is_batch else None

    due.proxy.stand_in = alone
    await due.due(12)
    await due.hand_over(12)
    assert not due.network.client.rpc.takes_batches
    assert due.network.signed_together < MOST_TOGETHER
    await due.settle()
    assert await due.paid() == due.owed
