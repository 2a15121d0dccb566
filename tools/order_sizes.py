"""The disk space of sandbox orders, as they end and once the worker has tidied up.

``python -m tools.order_sizes [COUNT]`` makes orders with idempotency keys. It prints bytes of the
database file per order, without its free pages: of settled ones until their answers are packed and
from then on, by table and index, and of cancelled ones until they are pruned and from then on.
"""

from __future__ import annotations

import asyncio
import sqlite3
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any, Final

import orjson

from rpcsvc.bootstrap import Running, running
from rpcsvc.domain.events import Cancelled
from rpcsvc.ids import system_random
from rpcsvc.logs import configure_logging
from rpcsvc.operations.service import Call
from rpcsvc.operations.table import OPERATIONS
from rpcsvc.orders.policy import HOUR_MS, STEP
from rpcsvc.settings import Settings, load_settings
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME
from tests.sandbox import EVM, MONERO, ManualClock, Sandbox

_NAMED: Final = {row.name: row for row in OPERATIONS}
_SWAPS: Final = (
    {"direction": "x2u", "amount": "0.8", "to": EVM, "refundAddress": MONERO},
    {"direction": "u2x", "amount": "150", "to": MONERO, "refundAddress": EVM},
)
_AT_ONCE: Final = 100
_SETTLE_SECONDS: Final = 6
# Smaller ones are not printed.
_LEAST: Final = 20


async def settled(count: int, data_dir: Path) -> tuple[float, Mapping[str, float]]:
    """Bytes per settled order as it ended, and by table and index once its answer is packed."""
    clock = ManualClock()
    async with running(_settings(data_dir), clock=clock) as up:
        await up.worker.recover()
        empty = _used(data_dir)
        for first in range(0, count, _AT_ONCE):
            for number in range(first, min(count, first + _AT_ONCE)):
                made = await _made(up, number, _SWAPS[number % 2])
                await _call(up, "sandbox.fund", {"orderId": made})
            await Sandbox(up, clock).settle(_SETTLE_SECONDS)
        done = await up.database.fetch_one(
            "SELECT count(*) AS done FROM orders WHERE status = 'completed'"
        )
        if done is None or done["done"] != count:
            raise RuntimeError(f"not all of {count} orders were settled in time")
        before = _used(data_dir)
        while await up.service.store.pack_responses(clock.now + HOUR_MS, 0, STEP):
            pass
    after = _used(data_dir)
    sizes = {name: (size - empty[name]) / count for name, size in after.items()}
    return (before.total() - empty.total()) / count, sizes


async def unpaid(count: int, data_dir: Path) -> tuple[float, float]:
    """Bytes per unpaid order as it ended, and once it is pruned."""
    async with running(_settings(data_dir)) as up:
        empty = _used(data_dir).total()
        for number in range(count):
            made = await _made(up, number, _SWAPS[0])
            await up.service.processor.apply(made, Cancelled())
        before = _used(data_dir).total()
        while await up.service.store.prune_unpaid(0, 0, STEP):
            pass
        return (before - empty) / count, (_used(data_dir).total() - empty) / count


def _settings(data_dir: Path) -> Settings:
    flags = {"data_dir": str(data_dir)}
    return load_settings(config_file=None, environ={}, flags=flags).settings


async def _made(up: Running, number: int, swap: Mapping[str, str]) -> str:
    """Make an order under a key of usual length; return its id."""
    key = f"{number:08}-{system_random(12).hex()}"
    found = await _call(up, "swap.create", {**swap, "chain": "arbitrum"}, key)
    return str(found["data"]["order"]["orderId"])


async def _call(up: Running, name: str, params: Mapping[str, Any], key: str | None = None) -> Any:
    reply = await up.dispatcher.run(_NAMED[name], dict(params), Call("sizes", idempotency_key=key))
    return orjson.loads(reply.body)


def _used(data_dir: Path) -> Counter[str]:
    """Bytes of the pages in use, by table and index."""
    with closing(sqlite3.connect(data_dir / DATABASE_NAME)) as reader:
        return Counter(dict(reader.execute("SELECT name, sum(pgsize) FROM dbstat GROUP BY name")))


def main() -> None:
    """Print all figures."""
    configure_logging("console", "error")
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000
    with tempfile.TemporaryDirectory() as folder:
        before, tables = asyncio.run(settled(count, Path(folder)))
    after = sum(tables.values())
    sys.stdout.write(f"{before:.0f} bytes per settled order, {after:.0f} once it is packed:\n")
    for name, size in sorted(tables.items(), key=lambda item: -item[1]):
        if size >= _LEAST:
            sys.stdout.write(f"  {size:6.0f} {name}\n")
    with tempfile.TemporaryDirectory() as folder:
        before, after = asyncio.run(unpaid(count, Path(folder)))
    sys.stdout.write(f"{before:.0f} bytes per unpaid order, {after:.0f} once it is pruned\n")


if __name__ == "__main__":
    main()
