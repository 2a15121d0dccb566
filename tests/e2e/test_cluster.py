"""Replicas behind HAProxy, with the configuration that is shipped."""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.e2e.cluster import Balancer, cluster
from tests.e2e.processes import POLL_SECONDS, TIMEOUT_SECONDS, until
from tests.e2e.swaps import SWAPS

pytestmark = pytest.mark.skipif(
    shutil.which("haproxy") is None and not os.environ.get("CLUSTER_REQUIRED"),
    reason="haproxy is not installed: tools/cluster/install",
)


async def polled(front: Balancer, order_id: str, seen: list[str]) -> None:
    """Poll the order until it is over, each time over a new connection. No call may fail."""
    url = f"{front.url}/api/v1/agent/swap/status/{order_id}"
    while seen[-1:] != ["completed"]:
        async with aiohttp.ClientSession() as session, session.get(url) as response:
            assert response.status == 200, await response.text()
            seen.append((await response.json())["state"])
        await asyncio.sleep(POLL_SECONDS)


async def answered(front: Balancer, path: str, body: dict[str, Any]) -> dict[str, Any] | None:
    """The data of a successful call; None while no replica is ready."""
    headers = {"idempotency-key": "a key of sixteen or more"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{front.url}/api/v1{path}", json=body, headers=headers) as response,
    ):
        if response.status == 503:
            return None
        assert response.status == 200, await response.text()
        return dict((await response.json())["data"])


async def test_orders_are_taken_and_read_while_the_settler_is_replaced(
    postgres: Callable[[], str], tmp_path: Path
) -> None:
    async with cluster(postgres(), tmp_path) as up:
        first = await answered(up.front, "/agent/swap/execute", SWAPS["u2x"])
        assert first is not None
        made = {"orderId": first["order"]["orderId"]}
        seen: list[str] = []
        polling = asyncio.create_task(polled(up.front, made["orderId"], seen))
        struck = await up.replicas.holder()
        struck.kill()
        again = await until(lambda: answered(up.front, "/agent/swap/execute", SWAPS["u2x"]))
        assert again == first
        assert await answered(up.front, "/sandbox/fund", made)
        assert await up.replicas.value("SELECT token FROM leases") == 1, "nobody settles yet"
        before = len(seen)
        assert await up.replicas.holder() is not struck
        assert len(seen) > before + 10, "it was read all the time"
        async with asyncio.timeout(TIMEOUT_SECONDS):
            await polling
        assert seen[-1] == "completed"
        assert await up.replicas.value("SELECT count(*) FROM orders") == 1
