"""Check of large books: ``rpcsvc db check`` takes no more memory for them."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Final

import pytest

from rpcsvc.store.backends.sqlite.database import DATABASE_NAME
from tools.order_sizes import settled

SOME: Final = 100
FEW: Final = 10_000
MANY: Final = 100_000
MORE_BYTES: Final = 4 * 1024 * 1024
_CHECK: Final = """
import resource, sys
from pathlib import Path
from rpcsvc.cli.recovery.db import check_books
from rpcsvc.settings import load_settings
data_dir, most = sys.argv[1:]
resource.setrlimit(resource.RLIMIT_DATA, (int(most), int(most)))
flags = {"data_dir": data_dir}
problems, _ = check_books(load_settings(config_file=None, environ={}, flags=flags).settings)
print(problems)
print(Path("/proc/self/status").read_text().partition("VmData:")[2].split()[0])
"""
_ORDER: Final = "substr({0}, 1, 20) || printf('%010d', {1} + n)"
_TRANSFER: Final = f"{_ORDER.format('{0}', '{1}')} || substr({{0}}, 31)"
_SEQ: Final = "(SELECT o.seq FROM orders o WHERE o.order_id = t.order_id)"
_COPIED: Final[Mapping[str, Mapping[str, str]]] = {
    "orders": {
        "seq": "seq + n",
        "order_id": _ORDER.format("order_id", "seq"),
        "session_id": "lower(hex(randomblob(16)))",
        "deposit_address": "lower(hex(randomblob(20)))",
    },
    "event_log": {"order_seq": "order_seq + n"},
    "deposits": {
        "seq": "seq + n",
        "order_id": _ORDER.format("order_id", _SEQ),
        "transfer_id": _TRANSFER.format("transfer_id", _SEQ),
        "txid": "lower(hex(randomblob(32)))",
    },
    "transfers": {
        "seq": "seq + n",
        "order_id": _ORDER.format("order_id", _SEQ),
        "transfer_id": _TRANSFER.format("transfer_id", _SEQ),
        "txid": "lower(hex(randomblob(32)))",
    },
}


def multiply(path: Path, orders: int) -> None:
    """Add copies of the first SOME orders to a database, so that it has so many."""
    with closing(sqlite3.connect(path)) as books, books:
        for table, changed in _COPIED.items():
            columns = [name for _, name, *_ in books.execute(f"PRAGMA table_info({table})")]
            values = ", ".join(changed.get(name, name) for name in columns)
            books.execute(
                "WITH RECURSIVE copies (n) AS (SELECT :some UNION ALL SELECT n + :some FROM copies"
                " WHERE n + :some < :orders)"
                f" INSERT INTO {table} ({', '.join(columns)})"
                f" SELECT {values} FROM {table} AS t, copies WHERE {table_seq(table)} <= :some",
                {"some": SOME, "orders": orders},
            )


def table_seq(table: str) -> str:
    return "order_seq" if table == "event_log" else "t.seq"


def checked(data_dir: Path, most: int) -> int:
    """Return the bytes of memory of its own that a process has at the end of a check, which finds
    nothing. It may have no more than ``most`` at any time; mapped pages of the file do not count.
    """
    command = (sys.executable, "-c", _CHECK, str(data_dir), str(most))
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    problems, kilobytes = done.stdout.split()
    assert problems == "[]"
    return int(kilobytes) * 1024


@pytest.mark.slow(seconds=50)
async def test_memory_of_a_check_does_not_grow_with_the_orders(tmp_path: Path) -> None:
    await settled(SOME, tmp_path)
    most = 1 << 40
    for orders in (FEW, MANY):
        path = tmp_path / str(orders)
        path.mkdir(mode=0o700)
        with closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as source:
            source.execute("VACUUM INTO ?", (str(path / DATABASE_NAME),))
        multiply(path / DATABASE_NAME, orders)
        most = checked(path, most) + MORE_BYTES
