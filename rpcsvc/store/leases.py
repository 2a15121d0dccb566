"""The lease of the one process that settles orders: its rows, and who takes and renews it.

The database's clock says when a lease ends, and every write of the holder carries its token
(``Fenced``): a process that was paused past its lease writes nothing. Whether there
is still time to sign or to publish, a clock of the holder's own says.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NamedTuple

import structlog
from typing_extensions import override

from rpcsvc.clock import boot_ms
from rpcsvc.errors import Unavailable
from rpcsvc.ids import RandomBytes
from rpcsvc.store.database import Query, Row, StaleWrite, Statement, Tables

log = structlog.get_logger(__name__)

SETTLER: Final = "settler"
RENEW_MS: Final = 2_500
# How often a standby asks whether the lease is free.
ASK_MS: Final = 1_000
# Nothing is signed or published so shortly before the end: the call itself takes time.
MARGIN_MS: Final = 1_000

Pause = Callable[[float], Awaitable[None]]
# Looks at the holder while a standby waits; returns the lease of one that can't pay, to take over.
Watch = Callable[[], Awaitable["HeldLease | None"]]

_SELECT: Final = "SELECT holder, token FROM leases WHERE name = :name"
_HELD: Final = f"{_SELECT} AND expires_at > now_ms()"
_ADD: Final = (
    "INSERT INTO leases (name, holder, token, expires_at) VALUES (:name, :holder, 0, 0)"
    " ON CONFLICT DO NOTHING"
)
# A lease without an end comes from a copied SQLite database; nobody holds it.
_TAKE: Final = (
    "UPDATE leases SET holder = :holder, token = token + 1, expires_at = now_ms() + :lasts_ms"
    " WHERE name = :name AND (expires_at IS NULL OR expires_at <= now_ms() OR token = :over)"
)
_TAKE_FOR_GOOD: Final = (
    "UPDATE leases SET holder = :holder, token = token + 1, expires_at = NULL WHERE name = :name"
)
_RENEW: Final = (
    "UPDATE leases SET expires_at = now_ms() + :lasts_ms WHERE name = :name AND token = :token"
)
_RELEASE: Final = "UPDATE leases SET expires_at = 0 WHERE name = :name AND token = :token"
_FENCE: Final = "SELECT token FROM leases WHERE name = :name AND token = :token"


class LeaseLost(Unavailable):
    """Another process has taken the lease; nothing was written."""

    text = "Another replica has taken over; nothing was changed. Try again."

    def __init__(self) -> None:
        super().__init__(self.text)


class DatabaseReplaced(LeaseLost):
    """The database was replaced by an older copy, whose lease counts no more; nothing was
    written.
    """

    text = "The database was replaced by an older copy; nothing was changed. Try again."


class LeaseTaken(Exception):
    """Another process holds the lease; the message names it."""


class HeldLease(NamedTuple):
    """A lease on record: who took it last, and the token that this gave."""

    holder: str
    token: int


class Leases:
    """Leases by name, as rows. Everything may raise errors.Unavailable."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def take(
        self, name: str, holder: str, lasts_ms: int | None, over: int | None = None
    ) -> int | None:
        """Take the lease and return its token, or None while another process holds it.

        Without ``lasts_ms`` the lease never expires, and replaces any other: only for the holder of
        the database's owner lock. ``over``: the token that is taken over before it expires.
        """
        taking = _TAKE_FOR_GOOD if lasts_ms is None else _TAKE
        values = {"name": name, "holder": holder, "lasts_ms": lasts_ms, "over": over}
        try:
            await self._db.write(
                [Statement(_ADD, values, first=True), Statement(taking, values, finds=True)]
            )
        except StaleWrite:
            return None
        row = await self._db.fetch_one(_SELECT, name=name)
        # If this process was paused for longer than the lease lasts, another one may have taken it.
        return int(row["token"]) if row is not None and row["holder"] == holder else None

    async def renew(self, name: str, token: int, lasts_ms: int) -> bool:
        """Extend the lease from now; False when another process has taken it."""
        values = {"name": name, "token": token, "lasts_ms": lasts_ms}
        try:
            await self._db.write([Statement(_RENEW, values, finds=True)])
        except StaleWrite:
            return False
        return True

    async def release(self, name: str, token: int) -> None:
        """Release the lease, so that another process can take it at once."""
        await self._db.write([Statement(_RELEASE, {"name": name, "token": token})])

    async def held(self, name: str) -> HeldLease | None:
        """The current holder; None if the lease is free."""
        row = await self._db.fetch_one(_HELD, name=name)
        return None if row is None else HeldLease(row["holder"], row["token"])


class Lease:
    """A lease that this process took. ``ends_at`` by ``boot_ms``, or None: it has no end."""

    def __init__(
        self,
        name: str,
        token: int,
        ends_at: int | None = None,
        now_ms: Callable[[], int] = boot_ms,
        holder: str = "",
    ) -> None:
        self.name = name
        self.token = token
        self.holder = holder
        self._ends_at = ends_at
        self._now_ms = now_ms
        self.lost = asyncio.Event()
        self.loss = LeaseLost

    @property
    def on_record(self) -> HeldLease:
        """The lease as the database names it."""
        return HeldLease(self.holder, self.token)

    @property
    def is_held(self) -> bool:
        """Whether it was taken: a standby works with one that it waits for."""
        return self.token > 0

    @property
    def is_alone(self) -> bool:
        """Whether no other process can use the database: its holder has the owner lock."""
        return self._ends_at is None

    def has_time(self) -> bool:
        """Return whether something may be signed or published now."""
        if self.lost.is_set():
            return False
        return self._ends_at is None or self._now_ms() < self._ends_at - MARGIN_MS

    def left_ms(self) -> int | None:
        """Time until it ends unless it is renewed; None: it has no end."""
        return None if self._ends_at is None else max(0, self._ends_at - self._now_ms())

    def extend(self, ends_at: int) -> None:
        """Note that the lease was renewed."""
        self._ends_at = ends_at

    def lose(self, loss: type[LeaseLost] = LeaseLost) -> None:
        """Note that the lease counts no more, and why; final for this process."""
        if not self.lost.is_set():
            self.lost.set()
            self.loss = loss
            log.critical("lease_lost", lease=self.name, fence=self.token, reason=loss.text)


def holder_name(random: RandomBytes) -> str:
    """The name under which this process takes a lease: host, process id, and a random part."""
    return f"{socket.gethostname()}:{os.getpid()}:{random(4).hex()}"


class LeaseKeeper:
    """Takes a lease, and renews it until it is lost. ``lasts_ms`` as in ``Leases.take``."""

    def __init__(
        self,
        leases: Leases,
        holder: str,
        lasts_ms: int | None,
        *,
        name: str = SETTLER,
        now_ms: Callable[[], int] = boot_ms,
        pause: Pause = asyncio.sleep,
    ) -> None:
        self._leases = leases
        self._holder = holder
        self._lasts_ms = lasts_ms
        self._name = name
        self._now_ms = now_ms
        self._pause = pause

    @asynccontextmanager
    async def held(self, stop: asyncio.Event | None = None) -> AsyncIterator[Lease]:
        """Take the lease, and keep it as long as the block lasts. Raises as ``take``."""
        lease = await self.take(stop)
        async with self.kept(lease):
            yield lease

    @asynccontextmanager
    async def kept(self, lease: Lease) -> AsyncIterator[None]:
        """Renew a lease that was taken as long as the block lasts, then give it up."""
        if self._lasts_ms is None:
            yield
            return
        renewing = asyncio.create_task(self.renew(lease, self._lasts_ms), name="renew lease")
        try:
            yield
        finally:
            renewing.cancel()
            await asyncio.gather(renewing, return_exceptions=True)
            with suppress(Unavailable):  # it ends by itself
                await self._leases.release(lease.name, lease.token)

    async def take(self, stop: asyncio.Event | None = None, watch: Watch | None = None) -> Lease:
        """Take the lease; with ``stop``, wait until it is free or that is set.

        ``watch`` is called at each look at which another process holds it, and may name a lease to
        take over. Raises LeaseTaken, and Unavailable where it does not wait.
        """
        waits_for: HeldLease | None = None
        while True:
            holder: HeldLease | None = None
            try:
                if self._lasts_ms is not None:
                    holder = await self._leases.held(self._name)
                over = await watch() if holder is not None and watch is not None else None
                free = holder is None or over is not None
                if free and (lease := await self._taken(over)) is not None:
                    return lease
            except Unavailable as error:
                if stop is None:
                    raise
                log.warning("lease_request_failed", lease=self._name, reason=error.message)
            if stop is None or stop.is_set():
                raise LeaseTaken(holder.holder if holder else "another process")
            if holder is not None and holder != waits_for:
                log.info("lease_awaited", lease=self._name, holder=holder.holder)
                waits_for = holder
            await self._pause(ASK_MS / 1000)

    async def _taken(self, over: HeldLease | None = None) -> Lease | None:
        """The lease, if it is free now, or still held as ``over`` says."""
        asked_at = self._now_ms()  # the database's time, from which it lasts, is later
        token = await self._leases.take(
            self._name, self._holder, self._lasts_ms, None if over is None else over.token
        )
        if token is None:
            return None
        if over is not None:
            log.warning("lease_taken_over", lease=self._name, holder=over.holder)
        log.info("lease_taken", lease=self._name, fence=token, holder=self._holder)
        ends_at = None if self._lasts_ms is None else asked_at + self._lasts_ms
        return Lease(self._name, token, ends_at, self._now_ms, self._holder)

    async def renew(self, lease: Lease, lasts_ms: int) -> None:
        """Renew the lease until another process has it."""
        while not lease.lost.is_set():
            await self._pause(RENEW_MS / 1000)
            asked_at = self._now_ms()
            try:
                renewed = await self._leases.renew(lease.name, lease.token, lasts_ms)
            except Unavailable as error:
                log.warning("lease_not_renewed", lease=lease.name, reason=error.message)
                continue
            if not renewed:
                lease.lose()
                return
            lease.extend(asked_at + lasts_ms)


class Fenced(Tables):
    """A database under a lease: a write checks the lease's token in its own transaction.

    Taking the lease waits for a running commit; a later write finds another token and is rolled
    back.
    """

    def __init__(self, database: Tables, lease: Lease) -> None:
        self._db = database
        self._lease = lease
        values = {"name": lease.name, "token": lease.token}
        self._fence = Statement(_FENCE, values, first=True, finds=True)

    @override
    def fetch(self, sql: str, **values: Any) -> Coroutine[Any, Any, list[Row]]:
        return self._db.fetch(sql, **values)

    @override
    def fetch_one(self, sql: str, **values: Any) -> Coroutine[Any, Any, Row | None]:
        return self._db.fetch_one(sql, **values)

    @override
    def fetch_together(self, queries: Sequence[Query]) -> Coroutine[Any, Any, list[list[Row]]]:
        return self._db.fetch_together(queries)

    @override
    async def write(self, statements: Sequence[Statement]) -> None:
        # After the lease was lost nothing is written, and no later write will be.
        if self._lease.lost.is_set():
            raise self._lease.loss
        try:
            await self._db.write([self._fence, *statements])
        except StaleWrite:
            if await self._is_lost():
                self._lease.lose()
                raise LeaseLost from None
            raise

    async def _is_lost(self) -> bool:
        row = await self._db.fetch_one(_SELECT, name=self._lease.name)
        return row is None or bool(row["token"] != self._lease.token)
