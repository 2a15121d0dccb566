"""Replicas on one PostgreSQL, one wallet and one chain.

Orders are made at a replica that does not settle. The settler is killed or paused, another replica
takes over once its lease has ended, and the resumed one writes nothing more. Payouts are counted on
the chains. Each step of a payout: test_exchange_replicas_payouts.py.
"""

from __future__ import annotations

import os
import signal
from functools import partial

import pytest
from eth_account import Account

from rpcsvc.ids import system_random
from rpcsvc.settlement.onchain.wiring import KEY_FILE
from tests.e2e.cluster import is_ready, reads
from tests.e2e.processes import Crash, until
from tests.regtest.exchange import call, status
from tests.regtest.ledger_of_chains import usdc_received
from tests.regtest.replicas import OnchainReplicas
from tests.regtest.trading import Trader
from tests.regtest.x402_payer import VALUE, Payer

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]


# (direction, point): of a payout in USDC, and of one in XMR. Here the lease ends by itself.
POINTS: list[tuple[str, Crash]] = [
    ("x2u", ("evm journal", "after", 1)),
    ("u2x", ("monero relay", "stopped after", 1)),
]


async def test_standby_finishes_what_the_settler_began(
    trader: Trader, replicas: OnchainReplicas
) -> None:
    plain = await replicas.settling(replicas.start("first"))
    names = ["third", "first"]
    for direction, crash in POINTS:
        struck = await replicas.standing_by("second", crash)
        await trader.stop(plain)
        await replicas.settling(struck)
        plain = await replicas.taking_orders(names[0])
        names.reverse()
        order = await trader.order_and_pay(plain, direction)
        await replicas.stopped(struck)
        await replicas.settling(plain)
        await trader.finish(plain, order)
        if not struck.is_dead:
            os.kill(struck.pid, signal.SIGCONT)
            assert await struck.death() == 1, "its lease is lost"
    other = await replicas.taking_orders("second")
    payer = Payer(trader, Account.from_key(system_random(32)), keeps=False)
    await trader.stack.token.mint(payer.account.address, VALUE)
    await payer.run(other)
    assert await trader.stack.token.balance(payer.account.address) == 0
    assert await usdc_received(trader.stack, payer.deposit_address) == [VALUE]
    order, address = await trader.order(other, "x2u")
    paused = await replicas.command("second", "payouts", "pause", "--reason", "from a standby")
    assert paused[0] == 0, paused
    await trader.pay("x2u", address)

    async def is_refused() -> bool:
        await trader.stack.mine_in_time()
        return "Payouts are paused" in plain.log.read_text()

    await until(is_refused)
    signed = f"SELECT 1 FROM evm_payments WHERE payment_id LIKE '{order.order_id}/%'"
    assert await replicas.value(signed) is None
    await trader.stop(plain)
    await until(partial(replicas.holds, other))
    resumed = await replicas.command(names[0], "payouts", "resume")
    assert "from a standby" in resumed[1], "the pause outlives the replica that settled"
    await replicas.settling(other)
    await trader.finish(other, order)
    audit = await replicas.command(names[0], "audit")
    assert audit[0] == 0, audit
    asked = await replicas.command("fourth", "onchain", "init")
    assert "Put the mnemonic back" in asked[1], "a new replica makes no keys of its own"
    assert not (trader.stack.data_dir.parent / "fourth" / KEY_FILE).exists()
    await trader.stop(other)
    await trader.check()


async def test_no_orders_are_taken_while_nobody_settles(
    trader: Trader, replicas: OnchainReplicas
) -> None:
    """Published states count for 5 seconds at this replica: a minute of waiting shows no more."""
    names = replicas.in_turn()
    settler = await replicas.settling(replicas.start(next(names)))
    other = replicas.start(next(names), module="tests.regtest.short_age")
    await until(partial(is_ready, other))
    made = [await trader.order(other, direction) for direction in ("x2u", "u2x")]
    os.kill(settler.pid, signal.SIGSTOP)
    await replicas.keep_lease()
    for order, address in made:
        await trader.pay(order.direction, address)

    async def refuses() -> bool:
        await trader.stack.mine_in_time()
        return not await is_ready(other)

    await until(refuses, seconds=30)
    swap = {"chain": "arbitrum", "direction": "x2u", "amount": "1", "to": made[0][0].to}
    refused = await call(other, "service.swap.create", swap)
    assert refused["error"]["code"] == "unavailable", refused
    assert "published no fresh state" in refused["error"]["message"]
    assert await reads(other)
    for order, _ in made:
        assert (await status(other, order.order_id))["status"] == "awaiting_deposit"
    await replicas.end_lease()
    await replicas.settling(other)
    await trader.order_and_pay(other, "x2u")
    await trader.finish(other)
    os.kill(settler.pid, signal.SIGCONT)
    assert await settler.death() == 1, "its lease is lost"
    await trader.stop(other)
    await trader.check()
