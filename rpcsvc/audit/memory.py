"""Facts that audits have read of deep transactions, kept over restarts in a file beside the books.

They are facts of the chain alone, each under the books' own words for it: today's books are
compared with them as with fresh ones, and a row that has changed is asked about again. An anchor,
a block at or above all facts of a network, says whether they are still on the chain.
"""

from __future__ import annotations

import asyncio
import os
import sqlite3
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Final, TypeVar

import structlog
from msgspec import DecodeError, Struct, json

from rpcsvc.audit.spilled import SpilledDict

log = structlog.get_logger(__name__)

FILE: Final = "audit.sqlite3"
_BUSY_SECONDS: Final = 5.0
# Raised whenever a fact changes its fields or its meaning: a file of another version is emptied.
_VERSION: Final = 1
_TABLES: Final = (
    "DROP TABLE IF EXISTS anchors",
    "DROP TABLE IF EXISTS facts",
    "CREATE TABLE anchors (network TEXT PRIMARY KEY, number INTEGER NOT NULL, hash TEXT NOT NULL)"
    " STRICT, WITHOUT ROWID",
    "CREATE TABLE facts (network TEXT NOT NULL, key TEXT NOT NULL, fact BLOB NOT NULL,"
    " PRIMARY KEY (network, key)) STRICT, WITHOUT ROWID",
    f"PRAGMA user_version = {_VERSION}",
)

T = TypeVar("T")
Fact = TypeVar("Fact", bound=Struct)


class Anchor(Struct, frozen=True):
    """A block at or above those of all facts of its network."""

    number: int
    hash: str


class AuditMemory:
    """Keeps facts of deep transactions by network and key.

    A file that can't be read or written is logged and costs time, never an audit.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / FILE

    async def recall(
        self, network: str, kind: type[Fact]
    ) -> tuple[Anchor, SpilledDict[str, Fact]] | None:
        """Return a network's anchor with its facts; None: there are none."""

        def read(file: sqlite3.Connection) -> tuple[Anchor, SpilledDict[str, Fact]] | None:
            values = {"network": network}
            sql = "SELECT number, hash FROM anchors WHERE network = :network"
            anchor = file.execute(sql, values).fetchone()
            if anchor is None:
                return None
            rows = file.execute("SELECT key, fact FROM facts WHERE network = :network", values)
            facts = ((key, json.decode(fact, type=kind)) for key, fact in rows)
            return Anchor(*anchor), SpilledDict(kind, facts)

        return await asyncio.to_thread(self._use, read)

    async def remember(self, network: str, anchor: Anchor, facts: Mapping[str, Struct]) -> None:
        """Add facts, all of them at or below the anchor."""

        def write(file: sqlite3.Connection) -> None:
            file.execute(
                "INSERT INTO anchors VALUES (?, ?, ?) ON CONFLICT (network) DO UPDATE SET"
                " number = excluded.number, hash = excluded.hash"
                # Another process may have added facts of blocks above this one.
                " WHERE excluded.number > anchors.number",
                (network, anchor.number, anchor.hash),
            )
            file.executemany(
                "INSERT OR REPLACE INTO facts VALUES (?, ?, ?)",
                ((network, key, json.encode(fact)) for key, fact in facts.items()),
            )

        await asyncio.to_thread(self._use, write)

    async def forget(self, *networks: str) -> None:
        """Delete the facts of networks, whose anchors are not on their chains; of all if none is
        named.
        """

        def delete(file: sqlite3.Connection) -> None:
            known = [name for (name,) in file.execute("SELECT network FROM anchors")]
            for name in networks or known:
                file.execute("DELETE FROM facts WHERE network = ?", (name,))
                file.execute("DELETE FROM anchors WHERE network = ?", (name,))

        await asyncio.to_thread(self._use, delete)

    def _use(self, work: Callable[[sqlite3.Connection], T]) -> T | None:
        """Run ``work`` in a transaction; None where the file can't be used."""
        try:
            os.close(os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            with closing(sqlite3.connect(self._path, timeout=_BUSY_SECONDS)) as file, file:
                file.execute("BEGIN IMMEDIATE")
                if file.execute("PRAGMA user_version").fetchone() != (_VERSION,):
                    for sql in _TABLES:
                        file.execute(sql)
                return work(file)
        except (OSError, sqlite3.Error, DecodeError) as error:
            log.warning("audit_memory_unusable", path=str(self._path), reason=str(error))
            return None
