"""``rpcsvc.client`` continues with the restarted service after a kill."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path

from rpcsvc.client import Retries, Swap, SwapClient
from tests.contract.faulty_line import faulty_line
from tests.contract.serving import SWAP
from tests.e2e.processes import Server

PATIENT = Retries(attempts=100, longest=0.3)


async def test_client_goes_on_after_the_service_was_killed(tmp_path: Path) -> None:
    servers = [Server(tmp_path / "data")]
    try:
        await servers[0].ready()
        async with (
            faulty_line(servers[0].url) as line,
            SwapClient(line.url, issuer=servers[0].url, retries=PATIENT) as client,
        ):
            placed = await client.create(Swap.model_validate(SWAP))
            waiting = asyncio.create_task(client.wait(placed.order_id))
            await client.sandbox_fund(placed.order_id)
            servers[0].kill()
            servers.append(Server(tmp_path / "data"))
            line.target = servers[1].url
            swap = Swap.model_validate(SWAP)
            # Both calls are made before the service listens again.
            again = SwapClient(line.url, issuer=servers[1].url, retries=PATIENT)
            async with asyncio.timeout(90), again:
                second = await again.create(swap)
                assert (await waiting).outcome == "completed"
                assert (await again.create(swap)).order_id == second.order_id
    finally:
        for server in servers:
            server.kill()
    with contextlib.closing(sqlite3.connect(tmp_path / "data" / "rpcsvc.db")) as db:
        assert db.execute("SELECT count(*) FROM orders").fetchone() == (2,)
