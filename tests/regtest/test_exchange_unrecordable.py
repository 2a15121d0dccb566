"""A quarantined order does not block other orders of its wallet.

If its payout is not signed yet, it is paid only once its events can be recorded again; otherwise it
is paid once. Payouts are counted on the chains.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Final

import pytest

from rpcsvc.domain.money import USDC, XMR, parse_amount
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME
from tests.e2e.processes import Crash, Gone, Server, until
from tests.regtest.commands import command
from tests.regtest.exchange import STEP_SECONDS, details, reaches
from tests.regtest.trading import DEATH_SECONDS, PaidOrder, Trader

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

# Its payout is planned, and not signed.
DUE: Final[Crash] = ("engine prepare", "before", 1)
# Its payout is on record, and not published.
COMMITTED: Final[Crash] = ("engine publish", "before", 1)


class Books:
    """The database of a service that is not running."""

    def __init__(self, trader: Trader, swap: PaidOrder) -> None:
        self._path = trader.stack.data_dir / DATABASE_NAME
        self._order_id = swap.order_id

    def refuse(self) -> None:
        """Add a trigger that refuses further events of the order, as a bug might."""
        self._execute(
            "CREATE TRIGGER broken BEFORE INSERT ON event_log WHEN NEW.order_seq ="
            f" (SELECT seq FROM orders WHERE order_id = '{self._order_id}')"
            " BEGIN SELECT RAISE(ABORT, 'the order is broken'); END"
        )

    def mend(self) -> None:
        """Drop the trigger."""
        self._execute("DROP TRIGGER broken")

    def _execute(self, sql: str, *values: str) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(self._path)) as database, database:
            return database.execute(sql, values).fetchall()


async def killed(trader: Trader, direction: str, crash: Crash) -> tuple[PaidOrder, str]:
    """An order and its deposit address; the service is killed at ``crash``."""
    made = None
    async with trader.stack.serving(crash) as at:
        with suppress(Gone):
            made = await trader.order(at, direction)
            await trader.pay(direction, made[1])
            await reaches(trader.stack, at, made[0].order_id, "completed")
        await at.death(DEATH_SECONDS)
    assert made is not None
    return made


async def quarantine(trader: Trader, at: Server, direction: str, address: str) -> None:
    """Send a second deposit to the order, and wait until the order is quarantined."""
    await trader.pay(direction, address)

    async def is_quarantined() -> bool:
        await trader.stack.mine_in_time()
        return "order_quarantined" in str(await at.health())

    await until(is_quarantined, seconds=STEP_SECONDS)


async def refunds(at: Server, swap: PaidOrder) -> list[dict[str, str]]:
    """The refunds in an order's status."""
    transfers = (await details(at, swap.order_id))["transfers"]
    return [item for item in transfers if item["kind"] == "refund"]


def _units(refund: Mapping[str, str]) -> int:
    return parse_amount(refund["amount"], {"XMR": XMR, "USDC": USDC}[refund["asset"]]).units


@pytest.mark.parametrize("direction", ["x2u", "u2x"])
async def test_unrecordable_order_is_not_paid_and_others_are(
    trader: Trader, direction: str
) -> None:
    stack = trader.stack
    broken, _ = await killed(trader, direction, DUE)
    books = Books(trader, broken)
    books.refuse()
    async with stack.starting() as at:
        await at.ready()
        other = await trader.order_and_pay(at, direction)
        await trader.finish(at, other)
        assert await trader.received(broken) == []
        at.kill()

    books.mend()
    async with stack.serving() as at:
        await trader.finish(at, broken)
        await trader.stop(at)
    await check(trader)


@pytest.mark.parametrize("direction", ["x2u", "u2x"])
async def test_signed_payment_of_a_broken_order_is_paid_once(
    trader: Trader, direction: str
) -> None:
    stack = trader.stack
    broken, address = await killed(trader, direction, COMMITTED)
    books = Books(trader, broken)
    books.refuse()
    async with stack.starting() as at:
        await at.ready()
        await quarantine(trader, at, direction, address)
        other = await trader.order_and_pay(at, direction)
        await trader.finish(at, other)
        assert await trader.received(broken) == [broken.expected]
        at.kill()

    books.mend()
    async with stack.serving() as at:
        await trader.finish(at, broken)
        await sent_back(trader, at, broken)
        await trader.stop(at)
    await check(trader)


async def sent_back(trader: Trader, at: Server, swap: PaidOrder) -> None:
    """Wait until the extra deposit is refunded, or waits for an XMR address."""

    async def is_over() -> bool:
        await trader.stack.mine_in_time()
        if (await details(at, swap.order_id))["actionRequired"]:
            return True
        return [item["status"] for item in await refunds(at, swap)] == ["settled"]

    await until(is_over, seconds=STEP_SECONDS)
    trader.books.usdc_in -= sum(_units(item) for item in await refunds(at, swap))


async def check(trader: Trader) -> None:
    """Require one payout for each order and no missing money, by the chains and by the auditor."""
    await trader.check()
    said = await command(trader.stack, "audit")
    assert said.status == 0, said.out
