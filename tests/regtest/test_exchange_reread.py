"""A deposit that the node's index lacked at first is found by a reread."""

from __future__ import annotations

import asyncio
import sqlite3
from contextlib import closing

import pytest

from rpcsvc.settlement.onchain.evm.node_types import Block
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME
from tests.e2e.processes import Server, until
from tests.regtest.commands import command
from tests.regtest.exchange import USDC, Exchange, create, reaches, status
from tests.regtest.restoring import differences, has_looked

pytestmark = pytest.mark.slow

# Deeper than the service rescans by itself.
FAR = 300


async def stop(at: Server) -> None:
    assert await asyncio.to_thread(at.stop) == 0


async def test_skipped_deposit_is_credited_once_it_is_reread(
    stack: Exchange, wallet: WalletClient
) -> None:
    to = await wallet.primary_address()
    async with stack.serving() as at:
        order = (await create(at, direction="u2x", amount="165", to=to))["data"]["order"]
        await until(lambda: has_looked(stack))
        await stop(at)
    before = await newest(stack)
    await stack.pay_usdc(order["depositAddress"], 165 * USDC)
    await stack.controls.mine(FAR)
    note_as_read(stack, await newest(stack))
    again = ("onchain", "reread", "arbitrum", "--from", str(before.number + 1))
    async with stack.serving() as at:
        await stack.controls.mine()
        top = (await newest(stack)).number
        await until(lambda: has_read(stack, top))
        assert (await status(at, order["orderId"]))["status"] == "awaiting_deposit"
        assert (await command(stack, *again)).status == 2, "the service runs"
        await stop(at)
    assert [item["kind"] for item in await differences(stack)] == ["deposit_missing"]

    reported = await command(stack, *again)
    assert reported.status == 0, reported
    reported = await command(stack, *again)
    assert reported.status == 2, "the service has yet to read from there on"
    async with stack.serving() as at:
        await reaches(stack, at, order["orderId"], "completed")
        await stop(at)
    assert await differences(stack) == []


async def newest(stack: Exchange) -> Block:
    block = await stack.evm.block()
    assert block is not None
    return block


def note_as_read(stack: Exchange, block: Block) -> None:
    """Record blocks as scanned, as happens when the node serves them without their events."""
    with closing(sqlite3.connect(stack.data_dir / DATABASE_NAME)) as books, books:
        books.execute(
            "INSERT INTO evm_cursor VALUES ('arbitrum', ?, ?)", (block.number, block.hash)
        )


async def has_read(stack: Exchange, number: int) -> bool:
    with closing(sqlite3.connect(stack.data_dir / DATABASE_NAME)) as books:
        (upto,) = books.execute("SELECT max(number) FROM evm_cursor").fetchone()
    return bool(upto >= number)
