"""An order that can't be recorded, killed while it is paid, keeps no others of its wallet waiting.

Its payment is signed, and was handed to nobody or is about to be: then it is given up, or paid, and
never both. What was paid is counted on the chains. What does not live here: the giving up by itself
(test_evm_payments.py, test_monero_side_payouts.py).
"""

from __future__ import annotations

import sqlite3
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Final

import pytest

from rpcsvc.domain.money import USDC, XMR, parse_amount
from rpcsvc.store.sqlite import DATABASE_NAME
from tests.e2e.processes import Crash, Gone, Server, until
from tests.regtest.commands import command
from tests.regtest.exchange import STEP_SECONDS, call, details, reaches
from tests.regtest.impatient import MODULE as IMPATIENT
from tests.regtest.trading import DEATH_SECONDS, Deal, Trader

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

# The wallet has its payment on record, and the order has not.
SIGNED: Final[dict[str, Crash]] = {
    "x2u": ("evm record", "after", 1),
    "u2x": ("monero record", "after", 1),
}
# The order has it on record, and nobody was handed it.
COMMITTED: Final[Crash] = ("engine publish", "before", 1)
GIVING_UP: Final[dict[str, str]] = {"x2u": "evm withdraw", "u2x": "monero withdraw"}


class Books:
    """The database of a service that is not running."""

    def __init__(self, trader: Trader, deal: Deal) -> None:
        self._path = trader.stack.data_dir / DATABASE_NAME
        self._order_id = deal.order_id

    def refuse(self) -> None:
        """Let no further event of the order be recorded, as a bug might."""
        self._execute(
            "CREATE TRIGGER broken BEFORE INSERT ON event_log WHEN NEW.order_seq ="
            f" (SELECT seq FROM orders WHERE order_id = '{self._order_id}')"
            " BEGIN SELECT RAISE(ABORT, 'the order is broken'); END"
        )

    def mend(self) -> None:
        """Let them be recorded again."""
        self._execute("DROP TRIGGER broken")

    def session(self) -> str:
        """The order's session, which is its owner's secret."""
        sql = "SELECT session_id FROM orders WHERE order_id = ?"
        return str(self._execute(sql, self._order_id)[0][0])

    def _execute(self, sql: str, *values: str) -> list[tuple[object, ...]]:
        with closing(sqlite3.connect(self._path)) as database, database:
            return database.execute(sql, values).fetchall()


async def killed(trader: Trader, direction: str, crash: Crash) -> tuple[Deal, str]:
    """An order, and its deposit address, of which the service dies at ``crash``."""
    made = None
    async with trader.stack.serving(crash) as at:
        with suppress(Gone):
            made = await trader.order(at, direction)
            await trader.pay(direction, made[1])
            await reaches(trader.stack, at, made[0].order_id, "completed")
        await at.death(DEATH_SECONDS)
    assert made is not None
    return made


async def mined_until_dead(trader: Trader, at: Server) -> None:
    """Blocks until the service dies of its crash."""

    async def is_dead() -> bool:
        await trader.stack.mine_in_time()
        return at.is_dead

    await until(is_dead, seconds=DEATH_SECONDS)


async def set_aside(trader: Trader, at: Server, direction: str, address: str) -> None:
    """Pay once more to an order that can't be recorded, and wait until that is noticed."""
    await trader.pay(direction, address)

    async def is_aside() -> bool:
        await trader.stack.mine_in_time()
        return "order_set_aside" in str(await at.health())

    await until(is_aside, seconds=STEP_SECONDS)


async def refunded(trader: Trader, at: Server, deal: Deal, session: str) -> None:
    """Follow an order to its refund, which is told of as a deal of the other asset.

    USDC goes back to its sender; XMR to an address that its owner names.
    """
    if deal.direction == "x2u":
        address = (await trader.payee.create_addresses(1))[0].address

        async def is_taken() -> bool:
            asked = {"message": "refund", "orderId": deal.order_id, "sessionId": session}
            answer = await call(at, "service.support.create", {**asked, "walletAddress": address})
            return bool((answer["data"]["refundAddress"] or {}).get("accepted"))

        await until(is_taken, seconds=STEP_SECONDS)
    await reaches(trader.stack, at, deal.order_id, "refunded")
    trader.give_up(deal)
    for item in await refunds(at, deal):
        if deal.direction == "x2u":
            trader.deals.append(Deal("u2x", deal.order_id, item["address"], _units(item)))
        else:
            trader.books.usdc_in -= _units(item)


async def refunds(at: Server, deal: Deal) -> list[dict[str, str]]:
    """What goes back of an order's deposits, as its status tells it."""
    transfers = (await details(at, deal.order_id))["transfers"]
    return [item for item in transfers if item["kind"] == "refund"]


def _units(refund: Mapping[str, str]) -> int:
    return parse_amount(refund["amount"], {"XMR": XMR, "USDC": USDC}[refund["asset"]]).units


@pytest.mark.parametrize("direction", ["x2u", "u2x"])
async def test_what_a_broken_order_never_takes_up_is_given_up_and_others_are_paid(
    trader: Trader, direction: str
) -> None:
    stack = trader.stack
    broken, address = await killed(trader, direction, SIGNED[direction])
    books = Books(trader, broken)
    books.refuse()
    async with stack.starting() as at:
        await at.ready()
        await set_aside(trader, at, direction, address)
        others = [await trader.deal(at, direction) for _ in range(2)]
        for other in others:
            await reaches(stack, at, other.order_id, "deposit_confirmed")
        at.kill()
    for when in ("before", "after"):
        async with stack.starting((GIVING_UP[direction], when, 1), IMPATIENT) as at:
            await mined_until_dead(trader, at)
    async with stack.starting(module=IMPATIENT) as at:
        await at.ready()
        await trader.finish(at, *others)
        assert await trader.received(broken) == []
        await trader.stop(at)

    books.mend()
    async with stack.serving() as at:
        await refunded(trader, at, broken, books.session())
        await trader.stop(at)
    await check(trader)


@pytest.mark.parametrize("direction", ["x2u", "u2x"])
async def test_what_a_broken_order_has_committed_is_paid_once_and_keeps_nobody_waiting(
    trader: Trader, direction: str
) -> None:
    stack = trader.stack
    broken, address = await killed(trader, direction, COMMITTED)
    books = Books(trader, broken)
    books.refuse()
    async with stack.starting() as at:  # patient: nothing is given up
        await at.ready()
        await set_aside(trader, at, direction, address)
        other = await trader.deal(at, direction)
        await trader.finish(at, other)
        assert await trader.received(broken) == [broken.expected]
        at.kill()

    books.mend()
    async with stack.serving() as at:
        await trader.finish(at, broken)
        await sent_back(trader, at, broken)
        await trader.stop(at)
    await check(trader)


async def sent_back(trader: Trader, at: Server, deal: Deal) -> None:
    """Wait until what was paid beside the order has gone back, or waits for an XMR address."""

    async def is_over() -> bool:
        await trader.stack.mine_in_time()
        if (await details(at, deal.order_id))["actionRequired"]:
            return True
        return [item["status"] for item in await refunds(at, deal)] == ["settled"]

    await until(is_over, seconds=STEP_SECONDS)
    trader.books.usdc_in -= sum(_units(item) for item in await refunds(at, deal))


async def check(trader: Trader) -> None:
    """Nothing was paid twice and nothing is missing, by the chains and by the auditor."""
    await trader.check()
    said = await command(trader.stack, "audit")
    assert said.status == 0, said.out
