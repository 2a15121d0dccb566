"""The service composed with the engine onchain and the shipped table of chains.

No daemon answers here: that degrades health, and must not keep the service from starting. With
daemons: tests/regtest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import orjson
import pytest
from msgspec.structs import replace

from rpcsvc.bootstrap import Running, running
from rpcsvc.domain.addresses import evm_address_from_seed, stagenet_subaddress
from rpcsvc.domain.events import DeadlinePassed
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.order import Terms
from rpcsvc.domain.pricing import Direction
from rpcsvc.http.rates import offers
from rpcsvc.operations.service import Call
from rpcsvc.operations.table import OPERATIONS
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.store.changes import StatusView
from tests.e2e.processes import until
from tests.sandbox import ManualClock
from tests.unit.onchain_service import unreachable
from tests.unit.orders import terms

STATUS = next(operation for operation in OPERATIONS if operation.name == "swap.status")
ORDER_ID = "ord_" + "7" * 26
USDC_ON = {
    "arbitrum": (42161, "0xaf88d065e77c8cC2239327C5EDb3A432268e5831"),
    "base": (8453, "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913"),
}


@pytest.fixture
async def up(tmp_path: Path) -> AsyncIterator[Running]:
    """A service with an operator's first settings for mainnet: a node for one chain."""
    async with running(unreachable(tmp_path)) as made:
        yield made


async def test_network_is_known_before_the_engine_is_loaded(up: Running) -> None:
    assert up.settings.network == up.service.views.network


async def test_one_node_for_a_table_of_many_chains_is_enough_to_start(up: Running) -> None:
    assert [chain.name for chain in up.service.chains.all()] == ["arbitrum"]
    assert not (await up.engine.health()).ok


async def test_nothing_is_listed_while_no_daemon_answers(up: Running) -> None:
    assert await offers(up.service.venue) == []


async def test_real_wallets_are_audited_and_have_a_treasury(up: Running) -> None:
    assert "admin.treasury.plan" in {operation.name for operation in up.admin}

    async def audited() -> bool:
        return up.readings.last_audit() is not None

    assert not await audited()
    working = asyncio.create_task(up.worker.run())
    await until(audited)
    await up.worker.stop()
    await working


@pytest.mark.parametrize("chain", ["arbitrum", "base"])
async def test_an_order_is_shown_whether_its_chain_has_a_node_or_not(
    up: Running, chain: str
) -> None:
    await up.service.processor.open(open_order(order_of(up, chain)), None, None)
    reply = await up.dispatcher.run(STATUS, {"orderId": ORDER_ID}, Call("r"))
    chain_id, token = USDC_ON[chain]
    funding = orjson.loads(reply.body)["data"]["fundingInstructions"]
    assert (funding["network"], funding["chainId"]) == (chain, chain_id)
    assert funding["paymentUri"].startswith(f"ethereum:{token}@{chain_id}/")


async def test_order_of_stagenet_is_paid_on_the_test_network(tmp_path: Path) -> None:
    async with running(unreachable(tmp_path, MONERO_NETWORK="stagenet")) as up:
        await up.service.processor.open(open_order(order_of(up, "arbitrum")), None, None)
        reply = await up.dispatcher.run(STATUS, {"orderId": ORDER_ID}, Call("r"))
    funding = orjson.loads(reply.body)["data"]["fundingInstructions"]
    assert (funding["network"], funding["chainId"]) == ("arbitrum-sepolia", 421614)
    token = up.service.chains.resolve("arbitrum").test_usdc_contract
    assert funding["paymentUri"].startswith(f"ethereum:{token}@421614/")


async def test_orders_of_a_removed_chain_raise_an_alert_until_done(
    tmp_path: Path,
) -> None:
    """Their deposits are not scanned and their payouts not made: without an alert they hang."""
    settings = unreachable(tmp_path)
    async with running(settings) as before:
        await before.service.processor.open(open_order(order_of(before, "base")), None, None)
        assert ORDER_ID not in ((await before.engine.health()).detail or "")
    async with running(settings) as up:
        reported = (await up.engine.health()).detail or ""
        assert f"orders: 1 orders wait for a network without a node, such as {ORDER_ID}" in reported
        await expire(up, ORDER_ID)
        assert ORDER_ID not in ((await up.engine.health()).detail or "")


async def expire(up: Running, order_id: str) -> None:
    """End the order as the worker does at its deadline."""
    clock = ManualClock()
    clock.now = up.service.clock.now_ms() + 10**10
    processor = OrderProcessor(up.service.store, clock, lambda _order: StatusView(b"{}", None))
    order = await processor.apply(order_id, DeadlinePassed())
    while not order.status.is_terminal:
        order = await processor.apply(order_id, DeadlinePassed())


def order_of(up: Running, chain: str) -> Terms:
    now = up.service.clock.now_ms()
    return replace(
        terms(Direction.USDC_TO_XMR),
        order_id=ORDER_ID,
        chain=chain,
        chain_id=USDC_ON[chain][0],
        deposit_network=chain,
        deposit_address=evm_address_from_seed(b"7" * 32),
        to_address=stagenet_subaddress(b"7" * 64),
        created_at=now,
        expires_at=now + 3_600_000,
    )


async def test_service_without_its_journal_starts_and_holds_payouts(tmp_path: Path) -> None:
    settings = unreachable(tmp_path)
    async with running(settings) as before:
        assert "journal" not in ((await before.engine.health()).detail or "")
    folder = tmp_path / "journal"
    folder.rename(tmp_path / "elsewhere")
    async with running(settings) as up:
        reported = (await up.engine.health()).detail or ""
        assert "it is missing; the database knows" in reported
        assert "payouts wait" in reported
        (tmp_path / "elsewhere").rename(folder)
    async with running(settings) as up:
        assert "journal" not in ((await up.engine.health()).detail or "")
