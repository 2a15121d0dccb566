"""kill -9 around the chunks of a TWAP order: each is filled once, and their sum is paid once."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rpcsvc.domain.order import Order
from rpcsvc.domain.pricing import ONE_USDC
from rpcsvc.settlement.sandbox.engine import price_at
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from rpcsvc.store.orders import OrderStore
from tests.e2e.audit import audit, count, deposits_on_chain, orders_of
from tests.e2e.processes import (
    Crash,
    Gone,
    Server,
    both_sides,
    call_for_data,
    crash_name,
    server,
    until,
    until_over,
)

pytestmark = pytest.mark.slow

EVM = "0x52908400098527886E0F7030069857D2E4169EE7"
MONERO = (
    "888tNkZrPN6JsEgekjMnABU4TBzc2Dt29EPAvkRxbANsAnjyPbb3iQ1YBRk1UXcdRsiKc"
    "9dhwMVgN5S9cQUiyoogDavup3H"
)
USDC = "0xaf88d065e77c8cC2239327C5EDb3A432268e5831"
# Three chunks of 250 USD each way; the last takes the remainder.
ORDERS = {
    "x2u": {"fromChainId": 0, "toChainId": 42161, "fromToken": "XMR", "toToken": USDC,
            "fromAmount": str(5 * 10**12), "toAddress": EVM},
    "u2x": {"fromChainId": 42161, "toChainId": 0, "fromToken": USDC, "toToken": "XMR",
            "fromAmount": str(810 * ONE_USDC), "toAddress": MONERO},
}  # fmt: skip
CHUNKS = 3
INTERVAL_MS = 1_000
BASE = 165 * ONE_USDC
PATH = [0, 12, -7, 31, -20, 5, 25, -33]
STEP_MS = 1_000
# The most time between reading the rate of a chunk and committing the chunk.
AT_MOST_MS = 500
ENVIRON = {
    "RPCSVC_SANDBOX__RATE_PATH_BPS": ",".join(map(str, PATH)),
    "RPCSVC_SANDBOX__RATE_STEP_SECONDS": str(STEP_MS // 1000),
}


@dataclass
class Client:
    """Orders, funds once and follows to the end; begins again after a crash, with the same key."""

    data_dir: Path
    direction: str
    made: dict[str, Any] = field(default_factory=dict)

    async def run(self, at: Server) -> dict[str, Any]:
        """The last status over the BFF. Raises Gone."""
        order_id = await self.fund(at)
        await until_over(at, order_id)
        return await self.bff(at, "GET", f"/orders/{order_id}")

    async def fund(self, at: Server) -> str:
        """Order, and pay unless the chain has the deposit; the order's id. Raises Gone."""
        order_id = str((await self.create(at))["orderId"])
        if not deposits_on_chain(self.data_dir, order_id):
            await call_for_data(at, "sandbox.fund", {"orderId": order_id})
        return order_id

    async def create(self, at: Server) -> dict[str, Any]:
        body = {**ORDERS[self.direction], "twapConfig": {"intervalMs": INTERVAL_MS}}
        made = await self.bff(at, "POST", "/orders", body)
        assert made == (self.made or made), "a retry got another answer"
        self.made = made
        return made

    async def has_filled(self, at: Server, chunks: int) -> bool:
        """Whether so many chunks are swapped."""
        order = await self.bff(at, "GET", f"/orders/{self.made['orderId']}")
        return int(order["twap"]["chunksCompleted"]) >= chunks

    async def bff(self, at: Server, method: str, path: str, body: Any = None) -> dict[str, Any]:
        """One call that succeeds. Raises Gone."""
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.request(
                    method,
                    f"{at.url}/bff/v1{path}",
                    json=body,
                    headers={"idempotency-key": "the key-01234567"},
                ) as response,
            ):
                answer = await response.json()
                assert response.status == 200, answer
                return dict(answer)
        except (aiohttp.ClientError, ConnectionError) as error:
            raise Gone from error


async def stored(data_dir: Path, order_id: str) -> Order:
    """The order in the database, after the server has ended."""
    database = await SqliteDatabase.open(data_dir)
    try:
        order = await OrderStore(database, str).order(order_id)
    finally:
        await database.close()
    assert order is not None
    return order


def predicted(order: Order) -> int:
    """The output computed from the chunks' sizes, the price path and the fill times alone."""
    terms, total = order.terms, 0
    for fill in order.fills:
        assert fill.rate in {price_at(BASE, PATH, STEP_MS, fill.at - ms) for ms in (0, AT_MOST_MS)}
        total += terms.price.at(fill.rate).exchanged(terms.direction, fill.units)
    return total - terms.price.payout_fee


async def check_the_end(client: Client, end: dict[str, Any]) -> None:
    """Require every chunk once, on schedule, and one payout of their sum."""
    data_dir = client.data_dir
    order = await stored(data_dir, client.made["orderId"])
    assert (end["status"], end["twap"]["status"]) == ("completed", "completed")
    assert end["twap"]["chunksCompleted"] == end["twap"]["chunksTotal"] == CHUNKS
    assert len(order.fills) == CHUNKS
    assert sum(fill.units for fill in order.fills) == order.terms.deposit_amount
    assert count(data_dir, "order_events WHERE event = 'ChunkFilled'") == CHUNKS
    times = [fill.at for fill in order.fills]
    waits = [after - before for before, after in pairwise(times)]
    assert min(waits) >= INTERVAL_MS
    assert end["actualOutput"] == str(predicted(order))
    assert count(data_dir, "transfers WHERE kind = 'payout'") == 1
    assert count(data_dir, "sandbox_transactions WHERE kind = 'transfer'") == 1
    assert list(orders_of(data_dir).values()) == ["completed"]
    assert audit(data_dir) == []


async def run_through_crash(client: Client, crash: Crash) -> None:
    """Run the client on a server that is killed at ``crash``, then on one that is not."""
    async with server(client.data_dir, crash=crash, environ=ENVIRON) as first:
        with suppress(Gone):
            await client.run(first)
        await first.death()  # a point that is never reached would time out here
    async with server(client.data_dir, environ=ENVIRON) as second:
        end = await client.run(second)
        await client.create(second)
        assert second.stop() == 0
    await check_the_end(client, end)


# Before the commit of each chunk, and after it: between two chunks, or before the payout.
CHUNK = both_sides(*(("ChunkFilled", n) for n in range(1, CHUNKS + 1)))
# In the middle of the transaction that holds the chunk.
HALF_WRITTEN = both_sides(("fill row", 1), ("fill row", 2), ("fill row", 3))
PAYOUT = both_sides(("prepare", 1), ("TransferPrepared", 1), ("publish", 1), ("TransferSettled", 1))


@pytest.mark.parametrize("direction", ["x2u", "u2x"])
@pytest.mark.parametrize("crash", [*CHUNK, *HALF_WRITTEN, *PAYOUT], ids=crash_name)
async def test_crash_around_a_chunk_fills_each_once_and_pays_once(
    tmp_path: Path, direction: str, crash: Crash
) -> None:
    await run_through_crash(Client(tmp_path / "data", direction), crash)


async def test_kill_between_all_chunks_fills_and_pays_each_once(
    tmp_path: Path,
) -> None:
    client = Client(tmp_path / "data", "u2x")
    for filled in range(1, CHUNKS):
        async with server(client.data_dir, environ=ENVIRON) as at:
            await client.fund(at)
            await until(partial(client.has_filled, at, filled))
            at.kill()
    async with server(client.data_dir, environ=ENVIRON) as last:
        end = await client.run(last)
        assert last.stop() == 0
    await check_the_end(client, end)
