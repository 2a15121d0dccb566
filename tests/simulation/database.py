"""A database server in the loop: SQLite with the real schema, and the faults of a network to it.

A commit is atomic and lasts; a read sees one committed state. A killed replica may or may not have
committed what it asked for. As the port says, Unavailable means that nothing was committed.
"""

from __future__ import annotations

import asyncio
import random
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.store.backends.sqlite.database import BoundRows, GroupConnection, compiled
from rpcsvc.store.backends.sqlite.migrations import migrate
from rpcsvc.store.database import CommitObserver, Query, Row, Statement
from rpcsvc.store.group_commit import GroupCommit, StatementRows

LEASE_MS: Final = 10_000
_SLOWEST_SECONDS: Final = 15
# How much more often than others the answer is late that a lease was renewed, or a payment recorded
# or marked as given out: what is next must ask for the lease's time again.
_LATE_ANSWERS: Final = 100
# Only the settler changes these; it does so under its lease.
_SETTLED: Final = (
    "deposits", "effects", "evm_payments", "monero_payments", "payment_journal", "wallet_states",
)  # fmt: skip
# Tables of payments, and the network of a new row in SQL.
_PAYMENTS: Final = {"evm_payments": "NEW.network", "monero_payments": "'monero'"}
# How long (ms) after a pause a replica may give out what it decided to before.
_PAUSING_MS: Final = 60_000


def nothing() -> None:
    """Take no note of an effect."""


class DatabaseServer:
    """The data, and whether it can be reached now."""

    def __init__(self, now_ms: Callable[[], int]) -> None:
        self.connection: GroupConnection = sqlite3.connect(
            ":memory:", isolation_level=None, cached_statements=256, factory=GroupConnection
        )
        migrate(self.connection)
        self.connection.row_factory = sqlite3.Row
        self.connection.execute("PRAGMA foreign_keys = ON")
        self.connection.create_function("now_ms", 0, now_ms)
        self.is_away = False
        self.commits = 0
        # Tokens of leases that were taken over before they ended.
        self.taken_over: set[int] = set()
        self._over: set[int] = set()
        # Called after each commit of anything but a lease.
        self.effect: Callable[[], None] = nothing
        # Called at each change of what only the settler changes, by the process that makes it.
        self.changed: Callable[[], None] = lambda: None
        # Called when a payment is recorded or given out while payouts are paused, with which.
        self.paid_in_pause: Callable[[str], None] = lambda _what: None
        # Payments that were given out, which a copy that was put in place may lack.
        self._given_out: set[str] = set()
        # Called when a lease is taken, and not taken over, while it lasts, with its token.
        self.taken_early: Callable[[int], None] = lambda _token: None
        self.connection.create_function("taken_early", 1, self._call_taken_early)
        self.connection.execute(
            "CREATE TEMP TRIGGER leases_taken AFTER UPDATE OF token ON main.leases"
            " WHEN NEW.token <> OLD.token AND OLD.expires_at > now_ms()"
            " BEGIN SELECT taken_early(OLD.token); END"
        )
        hooks = {
            "changed": 0, "counted": 3, "reserved": 1, "signed": 2, "nonce_taken": 1, "ended": 2,
        }  # fmt: skip
        for name, values in hooks.items():
            self.connection.create_function(name, values, partial(self._call, name))
        self.connection.create_function("signed_in_pause", 1, self._call_signed_in_pause)
        self.connection.create_function("given_out_in_pause", 1, self._call_given_out_in_pause)
        for table in _SETTLED:
            for change in ("INSERT", "UPDATE"):
                self.connection.execute(
                    f"CREATE TEMP TRIGGER {table}_{change} AFTER {change} ON main.{table}"
                    " BEGIN SELECT changed(); END"
                )
        # Called when a deposit counts from now on, with its network, transaction and order.
        self.counted: Callable[[str, str, str], None] = lambda _network, _txid, _order_id: None
        for change, when in (("INSERT", ""), ("UPDATE", " AND OLD.state <> 'confirmed'")):
            self.connection.execute(
                f"CREATE TEMP TRIGGER deposits_counted_{change} AFTER {change} ON main.deposits"
                f" WHEN NEW.state = 'confirmed'{when}"
                " BEGIN SELECT counted(NEW.network, NEW.txid, NEW.order_id); END"
            )
        # Called when an order without deposits has reserved its payout, with that one's network.
        self.reserved: Callable[[str], None] = lambda _network: None
        self.connection.execute(
            "CREATE TEMP TRIGGER reservations_made AFTER INSERT ON main.reservations"
            " WHEN NEW.kind = 'unfunded' AND NOT EXISTS"
            " (SELECT 1 FROM main.deposits d WHERE d.order_id = NEW.order_id)"
            " BEGIN SELECT reserved(NEW.network); END"
        )
        # Called when a payment was signed, before it is on record, with its network and id: what
        # the schema would refuse then must not have been signed.
        self.signed: Callable[[str, str], None] = lambda _network, _payment_id: None
        # Called when a payment was signed for a nonce that is another's, with the nonce.
        self.nonce_taken: Callable[[int], None] = lambda _nonce: None
        self.connection.execute(
            "CREATE TEMP TRIGGER nonces_taken BEFORE INSERT ON main.evm_payments WHEN EXISTS"
            " (SELECT 1 FROM main.evm_payments p WHERE p.network = NEW.network AND"
            " p.sender = NEW.sender AND p.nonce = NEW.nonce AND p.payment_id <> NEW.payment_id)"
            " BEGIN SELECT nonce_taken(NEW.nonce); END"
        )
        # Called when a payment is called settled, or failed, with its table and id.
        self.ended: Callable[[str, str], None] = lambda _table, _payment_id: None
        for table, network in _PAYMENTS.items():
            self.connection.execute(
                f"CREATE TEMP TRIGGER {table}_ended AFTER UPDATE OF state ON main.{table} WHEN"
                " NEW.state <> OLD.state AND NEW.state IN ('settled', 'failed')"
                f" BEGIN SELECT ended('{table}', NEW.payment_id); END"
            )
            self.connection.execute(
                f"CREATE TEMP TRIGGER {table}_recorded BEFORE INSERT ON main.{table}"
                f" BEGIN SELECT signed({network}, NEW.payment_id); END"
            )
            self.connection.execute(
                f"CREATE TEMP TRIGGER {table}_signed AFTER INSERT ON main.{table} WHEN NEW.purpose"
                " = 'transfer' AND EXISTS (SELECT 1 FROM main.payout_pause)"
                " BEGIN SELECT signed_in_pause(NEW.payment_id); END"
            )
            self.connection.execute(
                f"CREATE TEMP TRIGGER {table}_given_out AFTER UPDATE OF state ON main.{table} WHEN"
                " NEW.purpose = 'transfer' AND OLD.state = 'prepared' AND NEW.state IN"
                " ('relaying', 'published') AND EXISTS (SELECT 1 FROM main.payout_pause"
                f" WHERE paused_at < now_ms() - {_PAUSING_MS})"
                " BEGIN SELECT given_out_in_pause(NEW.payment_id); END"
            )

    def copy(self) -> sqlite3.Connection:
        """A copy of the data as it is now."""
        copied = sqlite3.connect(":memory:")
        self.connection.backup(copied)
        return copied

    def restore(self, copied: sqlite3.Connection) -> None:
        """Put a copy in place. Nobody may be connected."""
        for table in _PAYMENTS:
            sql = f"SELECT payment_id FROM {table} WHERE state <> 'prepared'"
            self._given_out |= {row["payment_id"] for row in self.connection.execute(sql)}
        copied.backup(self.connection)

    def commit(self, group: list[BoundRows], over: set[int]) -> None:
        """Commit rows; ``over``: the leases that they take over. Raises as the connection does."""
        self.connection.group, self._over = group, over
        self.connection.commit()
        self.commits += 1
        self.taken_over |= over

    def _call_taken_early(self, token: int) -> None:
        if token not in self._over:
            self.taken_early(token)

    def _call(self, hook: str, *values: Any) -> None:
        """Call a hook by its name: it is set after the triggers are made."""
        getattr(self, hook)(*values)

    def _call_signed_in_pause(self, payment_id: str) -> None:
        self.paid_in_pause(f"{payment_id} was signed")

    def _call_given_out_in_pause(self, payment_id: str) -> None:
        if payment_id not in self._given_out:
            self.paid_in_pause(f"{payment_id} was given out")


class SimulatedDatabase:
    """One replica's connections to the server, with delays; implements the port Database."""

    lease_ms: int | None = LEASE_MS

    def __init__(
        self, server: DatabaseServer, chance: random.Random, delay_ms: float, slow: float = 0.0
    ) -> None:
        self._server = server
        self._chance = chance
        self._delay_ms = delay_ms
        self.slow = slow
        self.is_cut = False
        # Whether commits take up to 15 s on their way.
        self.is_late = False
        self._group = GroupCommit(self._transact)

    async def _travel(self, times: int = 1) -> None:
        """Wait as long as a message takes to the server or back; ``times`` as often long."""
        is_slow = self.slow > 0 and self._chance.random() < self.slow * times
        most = _SLOWEST_SECONDS if is_slow else self._delay_ms / 1000
        await asyncio.sleep(self._chance.random() * most)

    def _require_up(self) -> None:
        if self._server.is_away or self.is_cut:
            raise Unavailable("The database is away.")

    async def fetch(self, sql: str, **values: Any) -> list[Row]:
        return (await self.fetch_together([Query(sql, values)]))[0]

    async def fetch_one(self, sql: str, **values: Any) -> Row | None:
        rows = await self.fetch(sql, **values)
        return rows[0] if rows else None

    async def fetch_together(self, queries: Sequence[Query]) -> list[list[Row]]:
        await self._travel()
        self._require_up()
        found = []
        for query in queries:
            form = compiled(query.sql)
            cursor = self._server.connection.execute(form.text, form.bind(query.values))
            found.append(cursor.fetchall())
        await self._travel()
        return found

    async def write(self, statements: Sequence[Statement]) -> None:
        await self._group.write(statements)

    async def _transact(self, rows: list[StatementRows]) -> None:
        if self.is_late:
            await asyncio.sleep(self._chance.random() * _SLOWEST_SECONDS)
        await self._travel()
        self._require_up()
        is_lease = any("leases SET" in each.sql for each in rows)
        forms = [(compiled(each.sql), each) for each in rows]
        group = [
            BoundRows(form, each.finds, [form.bind(values) for values in each.values])
            for form, each in forms
        ]
        over = {
            given["over"] for each in rows for given in each.values if given.get("over") is not None
        }
        self._server.commit(group, over)
        if not is_lease:
            self._server.effect()
        # The answer may take long, and the replica may be killed before it comes.
        is_payment = any(table in each.sql for each in rows for table in _PAYMENTS)
        await self._travel(_LATE_ANSWERS if is_lease or is_payment else 1)

    def health(self) -> Health:
        if self._server.is_away or self.is_cut:
            return Health(False, "The database is away.")
        return Health(True)

    def on_commit(self, observer: CommitObserver) -> None:
        self._group.observe = observer

    async def close(self) -> None:
        await self._group.close()
