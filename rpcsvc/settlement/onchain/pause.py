"""The pause of payouts: a switch that stops all outgoing money.

The switch is a file beside the database: a command, the auditor or the operator's hand can set it
while the service runs, and it survives a restart. If the file can't be written, the running process
is paused all the same. With several replicas it is a row, too, which stops all of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import structlog

from rpcsvc.clock import Clock
from rpcsvc.durable_files import replace_file
from rpcsvc.errors import Unavailable
from rpcsvc.store.database import StaleWrite, Statement, Tables
from rpcsvc.store.leases import SETTLER

log = structlog.get_logger(__name__)

PAUSE_FILE: Final = "payouts.paused"
_FILE_MODE: Final = 0o644
_LONGEST_REASON: Final = 200
_SHARE_SECONDS: Final = 0.5
_PAUSED: Final = "SELECT reason FROM payout_pause"
# Changes nothing: it waits for payments that are being committed, and later ones for the pause.
_HOLD_LEASE: Final = "UPDATE leases SET token = token WHERE name = :name"
_PAUSE: Final = (
    "INSERT INTO payout_pause (id, reason, paused_at) VALUES (1, :reason, :at)"
    " ON CONFLICT (id) DO UPDATE SET reason = payout_pause.reason || '; ' || excluded.reason"
    " WHERE payout_pause.reason NOT LIKE '%' || excluded.reason || '%'"
)
_UNPAUSED: Final = (
    "SELECT token FROM leases WHERE name = :name AND NOT EXISTS (SELECT 1 FROM payout_pause)"
)


class PauseSwitch:
    """Whether payouts are paused, and why.

    The pause file decides. A pause that could not be written is held by this object, so all parts
    of a process share one. It is written as soon as it can be, at one of the looks: until then
    nobody can resume, so that no file means that nobody has. ``shared``: why all replicas are
    paused, as it was read last.
    """

    def __init__(self, data_dir: Path) -> None:
        self._path = data_dir / PAUSE_FILE
        self._unwritten: str | None = None
        self.shared: str | None = None

    @property
    def is_written(self) -> bool:
        """Whether the pause that ``reason`` gave last would hold over a restart."""
        return self._unwritten is None

    def reason(self) -> str | None:
        """Return why payouts are paused; None when they are not."""
        return self.own() or self.shared

    def own(self) -> str | None:
        """Return why this replica's own switch is thrown; None when it is not."""
        said, unwritten = self._said(), self._unwritten
        if unwritten is None:
            return said
        if said is None:
            self._write_late(unwritten)
            return unwritten
        if said == unwritten:
            # It was put in place, and only its directory could not be synced.
            self._unwritten = None
        return said

    def pause(self, reason: str) -> None:
        """Stop all outgoing money, from the next transfer on. It is on disk before this returns.

        Raises OSError if it can't be written; payouts are paused in memory then.
        """
        self._unwritten = _shown(reason)
        replace_file(self._path, f"{reason}\n".encode(errors="replace"), _FILE_MODE)
        self._unwritten = None

    def resume(self) -> None:
        """Resume payouts. Raises OSError."""
        self._path.unlink(missing_ok=True)
        self._unwritten = None

    def _said(self) -> str | None:
        try:
            text = self._path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return None
        except OSError:
            # A switch that can't be read may have been thrown.
            return "the switch can't be read"
        return _shown(text)

    def _write_late(self, reason: str) -> None:
        try:
            self.pause(reason)
        except OSError:
            # That it can't be written was said when it was thrown, and health goes on saying it.
            return
        log.warning("pause_written", reason=reason)


class PauseRow:
    """The pause of payouts as a row; ``unpaused`` is a condition of each payment's commit."""

    # After the look at the lease in its transaction, which waits for a pause that is being made.
    unpaused: Final = Statement(_UNPAUSED, {"name": SETTLER}, first=True, finds=True)

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def reason(self) -> str | None:
        """Return why payouts are paused; None: they are not. Raises errors.Unavailable."""
        row = await self._db.fetch_one(_PAUSED)
        return None if row is None else str(row["reason"])

    async def pause(self, reason: str, at: int) -> None:
        """Let no further payment be committed; a reason is added to earlier ones. ``at`` in ms.

        Raises errors.Unavailable.
        """
        await self._db.write(
            [
                Statement(_HOLD_LEASE, {"name": SETTLER}, first=True),
                Statement(_PAUSE, {"reason": reason, "at": at}),
            ]
        )

    async def resume(self) -> None:
        """Let payments be committed again. Raises errors.Unavailable."""
        await self._db.write([Statement("DELETE FROM payout_pause")])


@asynccontextmanager
async def unpaused(pause: PauseRow | None, *, is_payout: bool) -> AsyncIterator[list[Statement]]:
    """Give the condition of a payment's commit. Raises errors.Unavailable if payouts are paused."""
    if pause is None or not is_payout:
        yield []
        return
    try:
        yield [pause.unpaused]
    except StaleWrite:
        if await pause.reason() is None:
            raise
        raise Unavailable("Payouts are paused by the operator. Try again later.") from None


class SharedPause:
    """Keeps a switch in step with the pause that all replicas share."""

    def __init__(self, row: PauseRow, switch: PauseSwitch, clock: Clock) -> None:
        self._row = row
        self._switch = switch
        self._clock = clock

    async def look(self) -> None:
        """Read the row. Raises errors.Unavailable."""
        self._switch.shared = await self._row.reason()

    async def share(self) -> None:
        """Move a pause of this replica's own into the row, so that any replica can end it.

        Raises errors.Unavailable, and OSError when the file can't be removed.
        """
        own = self._switch.own()
        if own is not None:
            await self._row.pause(own, self._clock.now_ms())
        await self.look()
        if own is not None and self._switch.shared is not None:
            self._switch.resume()

    async def run(self, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> None:
        """Share and look, twice a second, until cancelled."""
        while True:
            try:
                await self.share()
            except (Unavailable, OSError) as error:
                log.info("pause_not_shared", reason=str(error))
            await pause(_SHARE_SECONDS)


def _shown(reason: str) -> str:
    return reason.strip()[:_LONGEST_REASON] or "no reason given"


def throw(switch: PauseSwitch, reason: str, *, is_always_named: bool = False) -> bool:
    """Pause payouts by the service itself. True if the pause was written now; never raises OSError.

    False if payouts were paused already, or the file can't be written: then the pause lasts as long
    as this process, and the log names the remedy. A reason that ``is_always_named`` is put before
    an earlier one, so that the operator who resumes sees it.
    """
    if switch.reason() is not None:
        before = switch.own()
        if not is_always_named or (before or "").startswith(_shown(reason)):
            return False
        reason = reason if before is None else f"{reason}; before that: {before}"
    try:
        switch.pause(reason)
    except OSError:
        log.exception(
            "payouts_paused_in_memory_only",
            reason=reason,
            advice="Do not restart the service: it would pay again. Make room on the disk and let"
            " it write in the data directory; it then writes the pause there by itself.",
        )
        return False
    return True
