"""A sidecar and a central service as two processes, with a faulty connection between them."""

from __future__ import annotations

import asyncio
import json
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from rpcsvc.domain.addresses import stagenet_subaddress
from rpcsvc.store.backends.sqlite.maintenance import check_database
from tests.e2e.audit import audit, count
from tests.e2e.bad_line import MISHAPS, bad_line
from tests.e2e.processes import Server, server, until
from tests.e2e.sidecar import environ

EVM = "0x52908400098527886E0F7030069857D2E4169EE7"
XMR = stagenet_subaddress(bytes(range(64)))
USDC = "0xaf88d065e77c8cC2239327C5EDb3A432268e5831"
PAIRS = {
    "x2u": {"fromChainId": 0, "toChainId": 42161, "fromToken": "XMR", "toToken": USDC,
            "fromAmount": "800000000000", "toAddress": EVM},
    "u2x": {"fromChainId": 42161, "toChainId": 0, "fromToken": USDC, "toToken": "XMR",
            "fromAmount": "150000000", "toAddress": XMR},
}  # fmt: skip
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("/orders", PAIRS["x2u"]),
    ("/orders", PAIRS["u2x"]),
    ("/bridge/deposit", {"toAddress": EVM}),
    ("/bridge/withdraw", {"toAddress": XMR}),
]
ENDS = {"completed", "failed", "expired", "refunded"}


class Agent:
    """Makes orders at a sidecar and follows them, with retries after every failure."""

    def __init__(self, sidecar: Server, central: Server) -> None:
        self.sidecar = sidecar
        self.central = central

    async def call(self, method: str, path: str, body: Any = None, key: str = "") -> Any:
        """The answer; None if there was none or the service was unavailable."""
        headers = {"idempotency-key": key} if key else {}
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.request(
                    method, f"{self.sidecar.url}/bff/v1{path}", json=body, headers=headers
                ) as response,
            ):
                answer = await response.json()
        except (aiohttp.ClientError, json.JSONDecodeError):
            return None
        if "error" in answer:
            assert answer["error"]["code"] == "unavailable", answer
            return None
        return answer

    async def insist(self, method: str, path: str, body: Any = None, key: str = "") -> Any:
        return await until(lambda: self.call(method, path, body, key), seconds=300)

    async def run(self, path: str, body: Any, key: str) -> dict[str, Any]:
        """One order to its end."""
        order_id = (await self.insist("POST", path, body, key))["orderId"]
        await self.fund(order_id, "0.5" if "bridge/deposit" in path else "75")
        where = f"/bridge/order/{order_id}" if "bridge" in path else f"/orders/{order_id}"

        async def over() -> dict[str, Any] | None:
            answer = await self.insist("GET", where)
            return dict(answer) if answer["status"] in ENDS else None

        return await until(over, seconds=300)

    async def fund(self, order_id: str, amount: str) -> None:
        with closing(_read(self.sidecar.data_dir)) as books:
            (theirs,) = books.execute(
                "SELECT upstream_id FROM orders WHERE order_id = ?", (order_id,)
            ).fetchone()
        with closing(_read(self.central.data_dir)) as books:
            (chain,) = books.execute(
                "SELECT chain FROM orders WHERE order_id = ?", (theirs,)
            ).fetchone()
        params = {"orderId": theirs, **({"amount": amount} if chain == "perps" else {})}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{self.central.url}/api/v1/sandbox/fund", json=params) as response,
        ):
            assert response.status == 200, await response.text()


def _read(data_dir: Path) -> sqlite3.Connection:
    return sqlite3.connect(f"{(data_dir / 'rpcsvc.db').as_uri()}?mode=ro", uri=True)


async def follow_all(agent: Agent, rounds: int) -> list[dict[str, Any]]:
    jobs = [
        agent.run(path, body, f"key-{n:08}-{path}-{body.get('fromChainId')}")
        for n in range(rounds)
        for path, body in CALLS
    ]
    async with asyncio.timeout(300):
        return await asyncio.gather(*jobs)


@pytest.mark.parametrize(
    ("seeds", "rounds"),
    [([1], 1), pytest.param(range(2, 6), 6, marks=pytest.mark.slow(seconds=60))],
)
async def test_no_order_is_lost_or_doubled_over_a_bad_line(
    tmp_path: Path, seeds: Sequence[int], rounds: int
) -> None:
    """Side by side, for they wait most of the time: what failed is sent again after a pause."""
    for seed in seeds:
        (tmp_path / f"{seed}").mkdir()
    await asyncio.gather(*(over_a_bad_line(tmp_path / f"{seed}", seed, rounds) for seed in seeds))


async def over_a_bad_line(folder: Path, seed: int, rounds: int) -> None:
    async with server(folder / "central") as central:
        async with bad_line(central.port, seed=seed, rate=0.3) as line:
            settings = environ(line.port)
            async with server(folder / "sidecar", environ=settings, is_new=True) as sidecar:
                ended = await follow_all(Agent(sidecar, central), rounds)
        assert {order["status"] for order in ended} == {"completed"}
        assert sum(line.met[mishap] for mishap in MISHAPS) >= 3
    wanted = rounds * len(CALLS)
    assert count(folder / "central", "orders") == wanted
    assert count(folder / "sidecar", "orders") == wanted
    assert audit(folder / "central") == []
    assert check_database(folder / "sidecar") == []


async def test_a_sidecar_that_is_killed_takes_its_orders_up_again(tmp_path: Path) -> None:
    async with server(tmp_path / "central") as central:
        settings = environ(central.port)
        async with server(tmp_path / "sidecar", environ=settings) as sidecar:
            agent = Agent(sidecar, central)
            running = asyncio.create_task(follow_all(agent, 2))
            for path, body in CALLS:
                await agent.insist(
                    "POST", path, body, f"key-{0:08}-{path}-{body.get('fromChainId')}"
                )
            sidecar.kill()
            async with server(tmp_path / "sidecar", environ=settings) as again:
                agent.sidecar = again
                ended = await running
        assert {order["status"] for order in ended} == {"completed"}
    assert count(tmp_path / "central", "orders") == 2 * len(CALLS)
    assert count(tmp_path / "sidecar", "orders") == 2 * len(CALLS)
    assert audit(tmp_path / "central") == []
