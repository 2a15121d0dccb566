"""Nodes that die, hang, answer wrongly or are on another network, in the middle of orders.

During a fault health gives the reason and quotes are refused; afterwards every order has one payout
and the money of both chains adds up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import pytest
import pytest_asyncio

from tests.e2e.processes import Server, until
from tests.regtest.daemon_proxy import BetweenLooks, DaemonProxy, garbage, replacing
from tests.regtest.daemons import Anvil, Daemon
from tests.regtest.exchange import call, reaches
from tests.regtest.faults import both_refused, degraded, well
from tests.regtest.trading import Trader, kill_anvil

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

DAEMONS = ("anvil", "monerod", "wallet")
# Health's reason while each one can't be reached.
DOWN = {
    "anvil": "USDC: the node of arbitrum is down",
    "monerod": "XMR: the Monero node is down",
    "wallet": "XMR: the Monero wallet is down",
}
BOTH = ("x2u", "u2x")
# The deposit window in seconds, for tests that can't wait for an hour.
WINDOWS = {"DEPOSIT_WINDOW_SECONDS": 10, "LATE_WINDOW_SECONDS": 2}


@dataclass
class Lines:
    """A proxy to each daemon, and the users of the stack."""

    trader: Trader
    lines: dict[str, DaemonProxy]

    def daemon(self, name: str) -> Daemon:
        stack = self.trader.stack
        return {"anvil": stack.anvil, "monerod": stack.monerod, "wallet": stack.wallet_rpc}[name]

    def clear(self) -> None:
        for line in self.lines.values():
            line.clear()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(trader: Trader) -> AsyncIterator[Lines]:
    async with AsyncExitStack() as opened:
        lines = Lines(trader, {})
        for name in DAEMONS:
            line = DaemonProxy(lines.daemon(name).url)
            lines.lines[name] = await opened.enter_async_context(line.open())
        trader.stack.extra |= {
            "RPCSVC_ONCHAIN__NODES": f"arbitrum={lines.lines['anvil'].url}",
            "RPCSVC_ONCHAIN__MONEROD_URL": lines.lines["monerod"].url,
            "RPCSVC_ONCHAIN__WALLET_URL": lines.lines["wallet"].url,
        }
        yield lines


@pytest.fixture
def lines(shared: Lines) -> Lines:
    shared.clear()
    return shared


@asynccontextmanager
async def open_orders(trader: Trader) -> AsyncIterator[Server]:
    """A service with an open order each way; after the block it recovers and both are swapped."""
    async with trader.stack.serving() as at:
        for direction in BOTH:
            await trader.order_and_pay(at, direction)
        yield at
        await well(at)
        await trader.finish(at)
        await trader.stop(at)
    await trader.check()


@pytest.mark.parametrize("name", DAEMONS)
async def test_a_daemon_that_is_killed_in_the_middle_of_orders(lines: Lines, name: str) -> None:
    trader, daemon = lines.trader, lines.daemon(name)
    async with open_orders(trader) as at:
        if isinstance(daemon, Anvil):
            await kill_anvil(trader.stack)
        else:
            await asyncio.to_thread(daemon.kill)
        try:
            await degraded(at, DOWN[name])
            await both_refused(at)
        finally:
            await asyncio.to_thread(daemon.start)
        await trader.stack.miner.reconnect()


@pytest.mark.parametrize(
    ("name", "direction"), [("anvil", "u2x"), ("monerod", "x2u"), ("wallet", "x2u")]
)
async def test_order_paid_during_an_outage_is_swapped_past_expiry(
    lines: Lines, name: str, direction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    trader = lines.trader
    for key, seconds in WINDOWS.items():
        monkeypatch.setitem(trader.stack.extra, f"RPCSVC_ORDERS__{key}", str(seconds))
    async with trader.stack.serving() as at:
        swap, address = await trader.order(at, direction)
        is_over = time.monotonic() + sum(WINDOWS.values()) + 1
        lines.lines[name].change = garbage
        await degraded(at, DOWN[name])
        await trader.pay(direction, address)

        async def has_run_out() -> bool:
            return time.monotonic() >= is_over

        await until(has_run_out)
        status = await call(at, "service.swap.status", {"orderId": swap.order_id})
        assert status["state"] == "waiting_for_funding"
        lines.clear()
        await well(at)
        await trader.finish(at)
        await trader.stop(at)
    await trader.check()


@pytest.mark.parametrize("name", DAEMONS)
async def test_a_daemon_that_never_answers(lines: Lines, name: str) -> None:
    trader, daemon = lines.trader, lines.daemon(name)
    async with open_orders(trader) as at:
        daemon.freeze()
        try:
            # Monero's wallet hangs together with its node: health may name either.
            await degraded(at, "the deposit scan has run for")
            await both_refused(at)
        finally:
            daemon.thaw()


@pytest.mark.parametrize("name", DAEMONS)
async def test_a_daemon_that_answers_with_garbage(lines: Lines, name: str) -> None:
    trader = lines.trader
    async with open_orders(trader) as at:
        lines.lines[name].change = garbage
        await degraded(at, DOWN[name])
        await both_refused(at)
        lines.clear()


async def test_daemons_that_answer_late_only_make_it_slow(
    lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    trader = lines.trader
    # Signing needs wallet and node at one height: leave time between blocks.
    monkeypatch.setattr("tests.regtest.exchange.BLOCK_SECONDS", 4.0)
    async with trader.stack.serving() as at:
        for line in lines.lines.values():
            line.delay = 0.1
        for direction in BOTH:
            await trader.order_and_pay(at, direction)
        await trader.finish(at)
        lines.clear()
        await trader.stop(at)
    await trader.check()


# --- lost answers of calls that were carried out ----------------------------------------------

LOST = {
    "eth_sendRawTransaction": ("anvil", "x2u"),
    "relay_tx": ("wallet", "u2x"),
    "store": ("wallet", "u2x"),
    "transfer": ("wallet", "u2x"),
}


@pytest.mark.parametrize("method", LOST)
async def test_a_payment_whose_answer_is_lost_is_not_made_again(lines: Lines, method: str) -> None:
    trader, (name, direction) = lines.trader, LOST[method]
    line = lines.lines[name]
    before = line.lost
    wanted = f'"method":"{method}"'.encode()
    async with trader.stack.serving() as at:
        swap = await trader.order_and_pay(at, direction)
        line.lose = lambda body: wanted in body.replace(b" ", b"") and line.lost - before < 2
        await trader.finish(at, swap)
        assert line.lost > before
        lines.clear()
        await well(at)
        await trader.stop(at)
    await trader.check()


# --- blocks that come while a node answers ------------------------------------------------------


async def test_order_keeps_a_deposit_that_is_mined_between_two_looks(lines: Lines) -> None:
    """Shown as removed, it would be asked for once more, and paid twice."""
    trader, line = lines.trader, lines.lines["monerod"]
    blocks = BetweenLooks(lines.daemon("monerod").url, trader.stack.miner.mine)
    line.stand_in = blocks
    try:
        async with trader.stack.serving() as at:
            swap = await trader.order_and_pay(at, "x2u")
            await reaches(trader.stack, at, swap.order_id, "deposit_detected", mine=False)
            blocks.left = 1

            async def is_missed() -> bool:
                return bool(blocks.missed)

            await until(is_missed)
            await trader.finish(at, swap)
            said = await call(at, "service.swap.events", {"orderId": swap.order_id})
            await trader.stop(at)
    finally:
        line.stand_in = None
    types = [item["type"] for item in said["data"]["events"]]
    assert (types.count("deposit.seen"), types.count("deposit.removed")) == (1, 0)
    await trader.check()


# --- another network --------------------------------------------------------------------------

OTHER = {
    "anvil": (replacing(b'"0xa4b1"', b'"0x1"'), "wrong network: the node of arbitrum is on chain"),
    "monerod": (replacing(b'"fakechain"', b'"mainnet"'), "wrong network: the node is on mainnet"),
}


@pytest.mark.parametrize("name", OTHER)
async def test_a_node_of_another_network_is_refused_at_the_start(lines: Lines, name: str) -> None:
    trader, (change, reason) = lines.trader, OTHER[name]
    lines.lines[name].change = change
    async with trader.stack.starting() as at:
        await degraded(at, reason)
        await both_refused(at)
        lines.clear()
        await well(at)
        await trader.order_and_pay(at, "u2x")
        await trader.finish(at)
        await trader.stop(at)
    await trader.check()


@pytest.mark.parametrize("name", OTHER)
async def test_a_node_that_comes_back_on_another_network_is_refused(
    lines: Lines, name: str
) -> None:
    trader, (change, reason) = lines.trader, OTHER[name]
    line = lines.lines[name]
    async with open_orders(trader) as at:
        line.lose = lambda _body: True
        await degraded(at, DOWN[name])
        line.change, line.lose = change, None
        await degraded(at, reason)
        await both_refused(at)
        lines.clear()
