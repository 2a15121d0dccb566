"""The disk space of an order that ended without a deposit, before and after it is pruned.

``python -m tools.unpaid_orders [COUNT]`` makes orders with idempotency keys on a sandbox, cancels
them, prunes them and prints bytes of the database file per order, without its free pages.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from pathlib import Path
from typing import Final

from rpcsvc.bootstrap import Running, running
from rpcsvc.domain.events import Cancelled
from rpcsvc.logs import configure_logging
from rpcsvc.operations.service import Call, Reply
from rpcsvc.operations.table import OPERATIONS
from rpcsvc.orders.policy import STEP
from rpcsvc.settings import load_settings
from tests.rows import one_row

_EXECUTE: Final = next(row for row in OPERATIONS if row.name == "swap.execute")
_SWAP: Final = {
    "direction": "x2u",
    "chain": "arbitrum",
    "amount": "0.8",
    "to": "0x52908400098527886E0F7030069857D2E4169EE7",
    "refundAddress": "888tNkZrPN6JsEgekjMnABU4TBzc2Dt29EPAvkRxbANsAnjyPbb3iQ1YBRk1UXcdRsiKc"
    "9dhwMVgN5S9cQUiyoogDavup3H",
}
_AT_ONCE: Final = 100


async def measured(count: int, data_dir: Path) -> tuple[float, float]:
    """Bytes per unpaid order as it ended, and once it is pruned."""
    flags = {"data_dir": str(data_dir)}
    settings = load_settings(config_file=None, environ={}, flags=flags).settings
    async with running(settings) as up:
        empty = _used(up)
        for first in range(0, count, _AT_ONCE):
            numbers = range(first, min(count, first + _AT_ONCE))
            await asyncio.gather(*(_unpaid(up, number) for number in numbers))
        full = _used(up)
        while await up.service.store.prune_unpaid(0, 0, STEP):
            pass
        return (full - empty) / count, (_used(up) - empty) / count


async def _unpaid(up: Running, number: int) -> None:
    call = Call("measure", idempotency_key=f"measure-{number:032}")
    reply: Reply = await up.dispatcher.run(_EXECUTE, _SWAP, call)
    order_id = reply.body.partition(b'"orderId":"')[2].partition(b'"')[0].decode()
    await up.service.processor.apply(order_id, Cancelled())


def _used(up: Running) -> int:
    pragmas = ("page_count", "freelist_count", "page_size")
    pages, free, size = (one_row(up.database, f"PRAGMA {name}")[0] for name in pragmas)
    return int((pages - free) * size)


def main() -> None:
    """Print both figures."""
    configure_logging("console", "error")
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 2_000
    with tempfile.TemporaryDirectory() as folder:
        before, after = asyncio.run(measured(count, Path(folder)))
    sys.stdout.write(f"{before:.0f} bytes per unpaid order, {after:.0f} once it is pruned\n")


if __name__ == "__main__":
    main()
