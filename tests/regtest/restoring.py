"""Restores an older copy of the database, and the operator's commands after that."""

from __future__ import annotations

import asyncio
import re
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path

from rpcsvc.settlement.onchain.pause import PauseSwitch
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME
from tests.e2e.processes import Server, until
from tests.regtest.commands import command
from tests.regtest.daemons import WALLET_NAME, WALLET_PASSWORD
from tests.regtest.exchange import Exchange, reaches

UP_SECONDS = 180
_AMID_A_PASS = (
    "SELECT EXISTS (SELECT 1 FROM monero_deposits WHERE acknowledged IS NULL)"
    " OR EXISTS (SELECT 1 FROM evm_deposits WHERE acknowledged IS NULL)"
)


async def differences(stack: Exchange) -> list[dict[str, str]]:
    """The differences that ``rpcsvc audit`` finds."""
    said = await command(stack, "audit", "--json")
    assert said.status in (0, 1), said
    found: list[dict[str, str]] = said.json["differences"]
    return found


async def explain_sweeps(stack: Exchange) -> None:
    """Annotate the sweeps since the copy, if any: the transactions that the audit of the ether
    names once all payments are adopted.
    """
    for item in await differences(stack):
        if item["kind"] == "ether":
            for txid in re.findall("0x[0-9a-f]{64}", item["hint"]):
                note = ("--note", "a sweep since the copy")
                reported = await command(stack, "treasury", "explain", "arbitrum", txid, *note)
                assert reported.status == 0, reported


@asynccontextmanager
async def started(stack: Exchange) -> AsyncIterator[Server]:
    """A service that listens, but may not be ready: paused, or still scanning.

    It is stopped with SIGTERM.
    """
    at = Server(stack.data_dir, environ=stack.environ())

    async def is_up() -> bool:
        assert not at.is_dead, at.log.read_text()[-2000:]
        return (await at.health("/livez")).get("http") == 200

    try:
        await until(is_up, seconds=UP_SECONDS)
        yield at
        assert await asyncio.to_thread(at.stop) == 0
    finally:
        if not at.is_dead:
            at.kill()


async def copy_of(stack: Exchange, to: Path) -> Path:
    """A copy of the database, taken between two passes of the service.

    Within a pass an order may be ahead of the record of its deposit.
    """

    async def is_between_passes() -> bool:
        with (
            closing(sqlite3.connect(stack.data_dir / DATABASE_NAME)) as source,
            closing(sqlite3.connect(to)) as copy,
        ):
            source.backup(copy)
            (amid,) = copy.execute(_AMID_A_PASS).fetchone()
        return not amid

    await until(is_between_passes)
    return to


async def copy_before_payouts(stack: Exchange, at: Server, orders: Sequence[str], to: Path) -> Path:
    """Return a copy that knows no payout of these orders, which payouts are paused for and which
    are completed after it.
    """
    for order in orders:
        await reaches(stack, at, order, "deposit_confirmed")
    await copy_of(stack, to)
    await command(stack, "payouts", "resume")
    for order in orders:
        await reaches(stack, at, order, "completed")
    return to


async def has_looked(stack: Exchange) -> bool:
    """Whether the first block to scan is on record for each chain."""
    with closing(sqlite3.connect(stack.data_dir / DATABASE_NAME)) as database:
        sql = "SELECT (SELECT count(*) FROM monero_cursor), (SELECT count(*) FROM evm_cursor)"
        return all(database.execute(sql).fetchone())


async def restore(stack: Exchange, copy: Path) -> None:
    """Restore a copy without the payment journal. The service must not be running."""
    done = await command(stack, "db", "restore", str(copy), "--without-journal")
    assert done.status == 0, done
    switch = PauseSwitch(stack.data_dir)
    assert "without a payment journal" in str(switch.reason())
    switch.resume()


async def has_split(stack: Exchange) -> bool:
    """Mine; whether a payment of the XMR wallet to itself is settled."""
    await stack.mine_in_time()
    return count_splits(stack) > 0


def count_splits(stack: Exchange) -> int:
    """Settled payments of the XMR wallet to itself."""
    with closing(sqlite3.connect(stack.data_dir / DATABASE_NAME)) as database:
        sql = "SELECT count(*) FROM monero_payments WHERE purpose = 'upkeep' AND state = 'settled'"
        return int(database.execute(sql).fetchone()[0])


async def restore_wallet_from_words(stack: Exchange, from_height: int | None = None) -> None:
    """Restore the wallet from its words: keys and recipients of its payments are lost."""
    if from_height is None:
        async with stack.node as node:
            from_height = max((await node.info()).height - 400, 0)
    async with stack.wallet as own:
        words = await own.seed()
        await own.close()
        for file in stack.wallet_rpc.directory.glob(f"{WALLET_NAME}*"):
            file.unlink()
        await own.restore(WALLET_NAME, WALLET_PASSWORD, words, from_height)
        await own.refresh()
