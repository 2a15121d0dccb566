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
from typing import Final, NamedTuple

import structlog
from msgspec import Struct

from rpcsvc.clock import Clock
from rpcsvc.domain.events import order_of
from rpcsvc.domain.money import XMR, Asset, format_units
from rpcsvc.domain.order import Transfer
from rpcsvc.durable_files import replace_file
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.store.database import StaleWrite, Statement, Tables
from rpcsvc.store.leases import SETTLER

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


class PauseRow:
    """The pause of payouts as a row; ``unpaused`` is a condition of each payment's commit."""

    # After the look at the lease in its transaction, which waits for a pause that is being made.
    unpaused: Final = Statement(_UNPAUSED, {"name": SETTLER}, first=True, finds=True)

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def reason(self) -> str | None:
        """Why payouts are paused; None: they are not. Raises errors.Unavailable."""
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


_SENT: Final = {
    "XMR": "SELECT coalesce(sum(units), 0) AS units FROM monero_payments"
    " WHERE purpose = 'transfer' AND prepared_at >= :at AND state <> 'failed'",
    "USDC": "SELECT coalesce(sum(units), 0) AS units FROM evm_payments"
    " WHERE purpose = 'transfer' AND prepared_at >= :at AND state <> 'failed'",
}
# Payments that are out, of transfers whose ids lie between two.
_OUT: Final = (
    "SELECT payment_id AS transfer_id, txid, address, units FROM monero_payments"
    " WHERE state IN ('relaying', 'published', 'settled')"
    "  AND payment_id > :after AND payment_id < :before"
    " UNION ALL SELECT e.transfer_id, p.txid, e.address, e.units FROM monero_payees AS e"
    " JOIN monero_payments AS p ON p.payment_id = e.payment_id"
    " WHERE p.state IN ('relaying', 'published', 'settled')"
    "  AND e.transfer_id > :after AND e.transfer_id < :before"
    " UNION ALL SELECT p.payment_id, a.txid, p.recipient, p.units FROM evm_payments AS p"
    " JOIN evm_attempts AS a ON a.payment_id = p.payment_id AND a.number = 1"
    " WHERE p.state IN ('published', 'settled')"
    "  AND p.payment_id > :after AND p.payment_id < :before"
)
_STATES: Final = "SELECT transfer_id, state FROM transfers WHERE order_id = :order_id"
_NOT_PAID: Final = ("planned", "failed", "cancelled")


class SignedPayments:
    """Sums over the payments of the service's wallets."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def sent_since(self, asset: Asset, at: int) -> int:
        """Atomic units signed for orders since ``at`` (ms), over all networks."""
        row = await self._db.fetch_one(_SENT["XMR" if asset is XMR else "USDC"], at=at)
        return int(row["units"]) if row else 0

    async def unmatched(self, transfer: Transfer) -> str | None:
        """A recorded payment that conflicts with the transfer's order, in words; None if there is
        none.

        The payment journal may restore a payment for an order that an older copy of the database
        carries on differently: the next transfer would pay a second time.
        """
        order_id = order_of(transfer.transfer_id)
        out = await self._db.fetch(_OUT, after=f"{order_id}/", before=f"{order_id}0")
        known = await self._db.fetch(_STATES, order_id=order_id) if out else []
        states = {row["transfer_id"]: row["state"] for row in known}
        for row in out:
            if row["transfer_id"] == transfer.transfer_id:
                paid = (row["address"].lower(), row["units"])
                same = paid == (transfer.address.lower(), transfer.units)
            else:
                same = states.get(row["transfer_id"], "planned") not in _NOT_PAID
            if not same:
                return (
                    f"{row['txid']} paid {row['units']} units for {row['transfer_id']} of this"
                    " order, which the database has otherwise: settle it, then rpcsvc payouts close"
                    f" {transfer.transfer_id} {row['txid']} --note TEXT"
                )
        return None


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
        self.switch = switch
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
        return self.switch.reason()

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
            lost = "" if self.switch.is_written else f" ({_IN_MEMORY})"
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
