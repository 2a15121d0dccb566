"""The pause switch and the caps on outgoing money.

The switch is a file beside the database: a command, the auditor or the operator's hand can set it
while the service runs, and it survives a restart. If the file can't be written, the running process
is paused all the same. With several replicas it is a row, too, which stops all of them. A transfer
over a cap waits, and health says why.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import structlog
from msgspec import Struct

from rpcsvc.clock import Clock
from rpcsvc.domain.money import Asset, format_units
from rpcsvc.domain.order import Transfer
from rpcsvc.durable_files import replace_file
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health

log = structlog.get_logger(__name__)

PAUSE_FILE: Final = "payouts.paused"
_FILE_MODE: Final = 0o644
_DAY_MS: Final = 24 * 3600 * 1000
# A transfer that waits for a cap is tried at least once a minute (orders/scheduler/effects.py): one
# that was not tried for this long was cancelled, or waits for something else.
_ASKS_AGAIN_MS: Final = 5 * 60 * 1000
_LONGEST_REASON: Final = 200
_SHARE_SECONDS: Final = 0.5
_IN_MEMORY: Final = "in memory only, since the switch can't be written: do not restart the service"


class Caps(Struct, frozen=True):
    """The most of one asset that goes out in one transfer, and within 24 hours; atomic units."""

    per_transfer: int
    per_day: int


class SignedPayments(Protocol):
    """Sums of signed payments, as recorded in the books."""

    async def sent_since(self, asset: Asset, at: int) -> int:
        """Units signed away since a time (ms), other than what can never be made."""
        ...

    async def unmatched(self, transfer: Transfer) -> str | None:
        """A payment on record that the transfer's order does not know, in words; None: none is."""
        ...


class _WaitingTransfer(NamedTuple):
    """A transfer that waits for a cap: which, and when it was last asked for (ms)."""

    problem: str
    at: int


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
        """Whether what ``reason`` said last would hold over a restart."""
        return self._unwritten is None

    def reason(self) -> str | None:
        """Why payouts are paused; None when they are not."""
        return self.own() or self.shared

    def own(self) -> str | None:
        """Why this replica's own switch is thrown; None when it is not."""
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


class PauseRow(Protocol):
    """The pause that all replicas share. Everything may raise errors.Unavailable."""

    async def reason(self) -> str | None:
        """Why payouts are paused; None: they are not."""
        ...

    async def pause(self, reason: str, at: int) -> None:
        """Let no further payment be committed; a reason is added to earlier ones. ``at`` in ms."""
        ...


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


class PayoutGuard:
    """Lets transfers pass, or not. ``shared``: the pause that other replicas may make."""

    def __init__(
        self,
        switch: PauseSwitch,
        caps: Mapping[Asset, Caps],
        signed: SignedPayments,
        clock: Clock,
        shared: SharedPause | None = None,
    ) -> None:
        self._switch = switch
        self._shared = shared
        self._caps = caps
        self._signed = signed
        self._clock = clock
        self._held: dict[str, _WaitingTransfer] = {}
        # Units that are being signed: wallets work side by side, and their books don't have it yet.
        self._passing = Counter[Asset]()
        # Held from the sums of the books until a transfer counts: two wallets may pay one asset.
        self._counting = asyncio.Lock()

    def paused(self) -> str | None:
        """Why payouts are paused; None when they are not."""
        return self._switch.reason()

    async def look(self) -> None:
        """Read what other replicas may have said. Raises errors.Unavailable."""
        if self._shared is not None:
            await self._shared.look()

    def require_open(self) -> None:
        """Raise errors.Unavailable while payouts are paused."""
        if self.paused() is not None:
            raise Unavailable("Payouts are paused by the operator. Try again later.")

    @asynccontextmanager
    async def passing(
        self, transfer: Transfer, companions: Sequence[Transfer] = ()
    ) -> AsyncIterator[list[Transfer]]:
        """Let a transfer pass to be signed, with those of ``companions`` that may go along.

        Within the block they count for all others. Raises errors.Unavailable for a transfer that
        is too large, or too much for one day.
        """
        async with self._counting:
            await self._require_within_caps(transfer)
            together = await self._within_caps(companions, after=transfer)
            units = sum(item.units for item in (transfer, *together))
            self._passing[transfer.asset] += units
        try:
            yield together
        finally:
            self._passing[transfer.asset] -= units

    async def _require_within_caps(self, transfer: Transfer) -> None:
        self._held.pop(transfer.transfer_id, None)
        problem = await self._signed.unmatched(transfer) or await self._over(transfer)
        if problem is not None:
            self._held[transfer.transfer_id] = _WaitingTransfer(problem, self._clock.now_ms())
            raise Unavailable(f"Transfer {transfer.transfer_id} waits: {problem}.")

    async def _within_caps(
        self, transfers: Sequence[Transfer], *, after: Transfer
    ) -> list[Transfer]:
        """The transfers that may go out together with ``after``; the others wait in the queue."""
        passed: list[Transfer] = []
        units = after.units
        for transfer in transfers:
            if await self._signed.unmatched(transfer) is None and (
                await self._over(transfer, besides=units) is None
            ):
                passed.append(transfer)
                units += transfer.units
        return passed

    async def _over(self, transfer: Transfer, besides: int = 0) -> str | None:
        """The cap that a transfer exceeds, if ``besides`` units are about to be signed as well."""
        caps, asset = self._caps[transfer.asset], transfer.asset
        if transfer.units > caps.per_transfer:
            return _over("the cap per transfer", caps.per_transfer, asset)
        # In this order: what is committed meanwhile counts twice, rather than not at all.
        passing = self._passing[asset]
        sent = passing + await self._signed.sent_since(asset, self._clock.now_ms() - _DAY_MS)
        if sent + besides + transfer.units > caps.per_day:
            return _over("the cap per day", caps.per_day, asset)
        return None

    def health(self) -> Health:
        """Whether money may go out, and if not, what holds it."""
        reason = self.paused()
        if reason is not None:
            lost = "" if self._switch.is_written else f" ({_IN_MEMORY})"
            return Health(False, f"paused: {reason}{lost}")
        self._forget_silent()
        if self._held:
            transfer_id, held = next(iter(self._held.items()))
            return Health(False, f"{transfer_id} waits: {held.problem} ({len(self._held)} in all)")
        return Health(True)

    def _forget_silent(self) -> None:
        """Drop what does not ask any more; by a clock that was set back, what asked "later"."""
        now = self._clock.now_ms()
        self._held = {
            transfer_id: held
            for transfer_id, held in self._held.items()
            if abs(now - held.at) <= _ASKS_AGAIN_MS
        }


def _over(cap: str, units: int, asset: Asset) -> str:
    return f"it is over {cap} of {format_units(units, asset)} {asset.symbol}"
