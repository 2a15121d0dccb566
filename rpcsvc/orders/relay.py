"""Orders that an upstream settles: made there at most once, and followed until they are over.

The order of the steps is the whole point. A claim is committed before the upstream is called; what
it answered is committed together with the order. When the outcome of the call is not known, the
claim stays for the operator as ``reconciling``: the caller hears ``unavailable``, and nothing is
sent again unless the upstream honours our key, which then names the very same order. What became of
a call is remembered until it can be written; a stop before that is found by the next start.
What does not live here: the upstream's words and wire (settlement/upstream/), what a report makes
of an order (domain/relay.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Set
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import structlog

from rpcsvc.clock import Clock
from rpcsvc.domain.chains import Chain
from rpcsvc.domain.events import UpstreamReported
from rpcsvc.domain.money import Money
from rpcsvc.domain.order import Order, Report, TwapPlan
from rpcsvc.domain.states import Direction, OrderStatus
from rpcsvc.domain.transition import ImpossibleTransition
from rpcsvc.errors import ServiceError, Unavailable
from rpcsvc.orders.idempotency import Claim, require_same
from rpcsvc.orders.ports import Change, Health, OrderStore, RelayRecord, RelayState, Ticket
from rpcsvc.orders.processor import OrderProcessor

log = structlog.get_logger(__name__)

_IN_DOUBT = (
    "Whether the order was made is not known yet; the operator is looking it up. Don't order the"
    " same again before that is settled."
)


# An order is not asked for more often than this.
ASK_EVERY_MS = 1_000
# One that could not be read is left alone for twice as long each time, up to this.
LONGEST_PAUSE_MS = 300_000
# How long nobody is asked for after that: an upstream that starts again may be back by then.
AFTER_FAILURE_MS = 250
# Health tells of orders that could not be read for so long.
UNREAD_TOLD_MS = 3_600_000
# Nor is it tried more often to write what could not be written.
WRITE_EVERY_MS = 1_000


class Asked(NamedTuple):
    """What is asked of the upstream; ``twap`` None: at once."""

    direction: Direction
    chain: Chain
    amount: Money
    to: str = ""
    session_id: str = ""
    twap: TwapPlan | None = None


class Offer(NamedTuple):
    """A price: payout units, and USDC units per XMR as they follow from it."""

    expected_output: int
    min_received: int
    usdc_per_xmr: int
    seconds: int


class Created(NamedTuple):
    """The order that the upstream made. Times are ms since the epoch."""

    upstream_id: str
    deposit_address: str
    expected_output: int
    expires_at: int
    raw: bytes


class CreationUnknown(Exception):
    """The upstream may have made the order, or not. ``raw`` is what it answered, if it did."""

    def __init__(self, reason: str, *, upstream_id: str | None = None, raw: bytes = b"") -> None:
        super().__init__(reason)
        self.reason = reason
        self.upstream_id = upstream_id
        self.raw = raw


class VenueResting(Exception):
    """No order can be asked for now, whichever it is; in ``wait_ms`` one may be."""

    def __init__(self, reason: str, wait_ms: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_ms = wait_ms


class Sighted(NamedTuple):
    """An order as the upstream tells it; ``raw`` is its answer, for audit."""

    status: OrderStatus
    report: Report
    raw: bytes


class UpstreamVenue(Protocol):
    """The upstream, in our words. Raises errors.ServiceError when nothing was done."""

    @property
    def honours_keys(self) -> bool:
        """Whether a creation may be repeated with its key."""
        ...

    def remember(self, ages_ms: list[int]) -> None:
        """Orders were created so long ago by an earlier process: they count for the limit."""
        ...

    async def quote(self, asked: Asked) -> Offer:
        """A price."""
        ...

    async def create(self, asked: Asked, key: str, *, resumed: bool) -> Created:
        """Make the order. Raises CreationUnknown when it may have been made."""
        ...

    async def bridge_rates(self) -> dict[str, Any]:
        """The bridge's rates, as spec 2.4 has them."""
        ...

    async def pass_on(self, upstream_id: str, ticket: Ticket) -> None:
        """Open a ticket about an order there, the owner's refund address with it."""
        ...

    async def sight(self, upstream_id: str, *, is_bridge: bool, is_watched: bool) -> Sighted | None:
        """The order as it stands, waited for as long as the budget asks; asked for once.

        None when its status is a word that is not known. Raises VenueResting when it was not asked.
        """
        ...


class _Unread(NamedTuple):
    """An order that could not be read since ``since`` (ms), and how long it is left alone."""

    since: int
    pause_ms: int


class Relay:
    """Makes orders at the upstream and follows them."""

    def __init__(
        self, store: OrderStore, processor: OrderProcessor, venue: UpstreamVenue, clock: Clock
    ) -> None:
        self._store = store
        self._processor = processor
        self._venue = venue
        self._clock = clock
        self._open: dict[str, int] = {}  # when each open order was last asked for
        self._watched: set[str] = set()
        self._unread: dict[str, _Unread] = {}
        self._is_failing = False  # the last order that was asked for could not be read
        # What became of calls and could not be committed yet, by order id.
        self._unwritten: dict[str, RelayRecord] = {}
        self._wake = asyncio.Event()

    async def quote(self, asked: Asked) -> Offer:
        """A price. Raises errors.ServiceError."""
        return await self._venue.quote(asked)

    async def bridge_rates(self) -> dict[str, Any]:
        """The bridge's rates. Raises errors.ServiceError."""
        return await self._venue.bridge_rates()

    async def pass_on(self, order: Order, ticket: Ticket) -> bool:
        """Give the upstream an owner's ticket about an order; whether it took it."""
        try:
            await self._venue.pass_on(order.terms.upstream_id or "", ticket)
        except ServiceError as error:
            log.warning("ticket_not_passed_on", order_id=order.order_id, reason=error.message)
            return False
        self.watch(order.order_id)
        return True

    # --- making an order ---

    async def create(
        self, asked: Asked, claim: Claim | None, fresh_id: str
    ) -> tuple[RelayRecord, Created]:
        """Make the order at the upstream, under our id; the caller commits it with the record.

        Raises Unavailable while the outcome of an earlier call is not known, or that of this one
        is not; IdempotencyConflict as ``require_same`` does; and what the upstream refuses with.
        """
        record, resumed = self._record(asked, claim, fresh_id)
        # A resumed call is the same to the letter, or its key would be refused.
        asked = asked._replace(session_id=record.session_id)
        if not resumed:
            await self._store.commit(Change(relay=record))
        try:
            created = await self._venue.create(asked, record.order_id, resumed=resumed)
        except CreationUnknown as unknown:
            await self._doubt(record, unknown)
            raise Unavailable(_IN_DOUBT, retry_after=30) from unknown
        except ServiceError as refusal:
            if not resumed:
                reason = refusal.message
                await self._settle(replace(record, state=RelayState.REFUSED, reason=reason))
            raise
        except Exception as broken:
            await self._doubt(record, CreationUnknown(f"the call broke: {type(broken).__name__}"))
            raise Unavailable(_IN_DOUBT, retry_after=30) from broken
        self._unwritten.pop(record.order_id, None)  # or it might be written after the order
        made = replace(
            record, state=RelayState.CREATED, upstream_id=created.upstream_id, raw=created.raw
        )
        return made, created

    def require_same(self, claim: Claim) -> None:
        """Raise IdempotencyConflict if the key stands for another call, of unknown outcome.

        Such a call has no answer yet that its key could be compared with. Whoever named another
        destination under the key would get an order of the first caller's session, if any.
        """
        self._in_doubt(claim)

    @asynccontextmanager
    async def recording(self, record: RelayRecord) -> AsyncIterator[None]:
        """Commit within this what the upstream made: what can't be recorded here is in doubt.

        Such as an address or an id that is another order's. Raises Unavailable.
        """
        try:
            yield
        except Exception as error:
            reason = f"made there, and not recorded here: {type(error).__name__}"
            await self._doubt(record, CreationUnknown(reason))
            raise Unavailable(_IN_DOUBT, retry_after=30) from error

    def _record(self, asked: Asked, claim: Claim | None, fresh_id: str) -> tuple[RelayRecord, bool]:
        """The claim to make, and whether it was made before and its outcome is not known."""
        before = self._in_doubt(claim) if claim else None
        if before is None:
            now = self._clock.now_ms()
            fresh = RelayRecord(fresh_id, RelayState.CLAIMED, now, asked.session_id)
            return _used_for(fresh, claim), False
        if not self._venue.honours_keys:
            raise Unavailable(_IN_DOUBT, retry_after=30)
        return before, True

    def _in_doubt(self, claim: Claim) -> RelayRecord | None:
        """The earlier call under the key, while its outcome is not known."""
        before = self._store.relay_of_key(claim.namespace, claim.key)
        # The answer to a key is committed with its order: one that is gone was forgotten by age.
        if before is not None:
            before = self._unwritten.get(before.order_id, before)
        if before is None or before.state in (RelayState.REFUSED, RelayState.CREATED):
            return None
        if before.operation is not None and before.params is not None:
            require_same(before.operation, before.params, claim)
        return before

    async def _doubt(self, record: RelayRecord, unknown: CreationUnknown) -> None:
        doubtful = replace(
            record,
            state=RelayState.RECONCILING,
            # What an earlier attempt showed of the order is still what is known.
            upstream_id=unknown.upstream_id or record.upstream_id,
            reason=unknown.reason,
            raw=unknown.raw or record.raw,
        )
        log.error(
            "upstream_order_in_doubt",
            order_id=record.order_id,
            upstream_id=doubtful.upstream_id,
            reason=unknown.reason,
        )
        await self._settle(doubtful)

    async def _settle(self, record: RelayRecord) -> None:
        """Write what became of a call, or remember it: the call has happened all the same."""
        self._unwritten[record.order_id] = record
        await self._write(record)
        if self._unwritten:
            self._wake.set()

    async def _write(self, record: RelayRecord) -> None:
        try:
            await self._store.commit(Change(relay=record))
        except ServiceError as error:
            reason = error.message
            log.warning("upstream_outcome_not_written", order_id=record.order_id, reason=reason)
            return
        if self._unwritten.get(record.order_id) is record:
            del self._unwritten[record.order_id]

    async def write_remembered(self) -> None:
        """Write what could not be written before, the oldest first; stops at what still can't."""
        while self._unwritten:
            # Looked for anew each time: a call that is made again takes its outcome back.
            record = next(iter(self._unwritten.values()))
            await self._write(record)
            if self._unwritten.get(record.order_id) is record:
                return

    # --- following it ---

    async def recover(self) -> None:
        """Take up what an earlier process left: calls that it was making, and open orders."""
        for record in self._store.relays_in(RelayState.CLAIMED):
            await self._doubt(record, CreationUnknown("the service stopped during the call"))
        now = self._clock.now_ms()
        recent = self._store.relays_since(now - 60_000)
        self._venue.remember([now - made_at for made_at in recent])
        self._open = dict.fromkeys(self._store.open_relayed(), 0)
        self._wake.set()

    def follow(self, order_id: str) -> None:
        """An order was made: follow it."""
        self._open[order_id] = self._clock.now_ms()
        self._wake.set()

    def watch(self, order_id: str) -> None:
        """Somebody asks for this order: it comes before those that nobody asks for."""
        if order_id in self._open:
            self._watched.add(order_id)

    async def run(self) -> None:
        """Ask for one order after the other, as fast as the upstream's limit allows."""
        while True:
            await self.write_remembered()
            if self._open:
                await self._pause(await self.ask_next())
            elif self._unwritten:
                await asyncio.sleep(WRITE_EVERY_MS / 1000)
            else:
                self._wake.clear()
                await self._wake.wait()

    async def _pause(self, wait_ms: int) -> None:
        """Wait for the next call; what could not be written does not wait for it."""
        while wait_ms > WRITE_EVERY_MS:
            await asyncio.sleep(WRITE_EVERY_MS / 1000)
            await self.write_remembered()
            wait_ms -= WRITE_EVERY_MS
        await asyncio.sleep(wait_ms / 1000)

    async def ask_next(self) -> int:
        """Ask for the order that was not asked for longest, watched ones first.

        Returns how long to wait before the next call, in ms.
        """
        early = {order_id: self._early_ms(order_id) for order_id in self._turn()}
        due = {order_id for order_id, wait_ms in early.items() if not wait_ms}
        if not due:
            return min(ASK_EVERY_MS, *early.values())  # others may be due by then
        order_id = min((self._watched & due) or due, key=self._open.__getitem__)
        is_watched = order_id in self._watched
        self._watched.discard(order_id)
        wait_ms = await self._ask_safely(order_id, is_watched=is_watched)
        if order_id in self._open:
            self._open[order_id] = self._clock.now_ms()
        return wait_ms

    def _turn(self) -> Set[str]:
        """Of whom one is asked for next. After one that could not be read, one that could be.

        Else some orders that can't be read would be failures in a row, and look like an upstream
        that is down.
        """
        readable = self._open.keys() - self._unread.keys() if self._is_failing else None
        return readable or self._open.keys()

    def _early_ms(self, order_id: str) -> int:
        """How long an order is left alone yet; 0 when it is due."""
        unread = self._unread.get(order_id)
        pause_ms = unread.pause_ms if unread else ASK_EVERY_MS
        early = self._open[order_id] + pause_ms - self._clock.now_ms()
        return early if 0 < early <= pause_ms else 0  # more, and the clock has gone back

    async def _ask_safely(self, order_id: str, *, is_watched: bool) -> int:
        self._is_failing = False
        wait_ms = 0
        try:
            await self._ask(order_id, is_watched=is_watched)
        except VenueResting as rest:
            log.warning("upstream_poll_failed", order_id=order_id, reason=rest.reason)
            wait_ms = rest.wait_ms
        except ServiceError as error:
            log.warning("upstream_poll_failed", order_id=order_id, reason=error.message)
            wait_ms = (error.retry_after or 1) * 1000
        except Exception:
            log.exception("upstream_poll_failed", order_id=order_id)
            wait_ms = ASK_EVERY_MS
        # An order that can't be read waits by itself; what it told and can't be kept is for all.
        return AFTER_FAILURE_MS if self._is_failing else wait_ms

    async def _ask(self, order_id: str, *, is_watched: bool) -> None:
        order = self._store.order(order_id)
        if order is None or order.terms.upstream_id is None or order.status.is_terminal:
            self._leave(order_id)
            return
        sighted = await self._sight(order, order.terms.upstream_id, is_watched=is_watched)
        if sighted is None:
            return
        event = UpstreamReported(sighted.status, sighted.report)
        try:
            order = await self._processor.apply(order_id, event, evidence=sighted.raw)
        except ImpossibleTransition as refused:
            if sighted.status is not order.status:
                log.warning("upstream_report_ignored", order_id=order_id, reason=str(refused))
        if order.status.is_terminal:
            self._leave(order_id)

    async def _sight(self, order: Order, upstream_id: str, *, is_watched: bool) -> Sighted | None:
        try:
            sighted = await self._venue.sight(
                upstream_id, is_bridge=order.terms.is_bridge, is_watched=is_watched
            )
        except VenueResting:
            raise
        except Exception:
            self._is_failing = True
            self._leave_alone(order.order_id)
            raise
        self._unread.pop(order.order_id, None)
        return sighted

    def _leave_alone(self, order_id: str) -> None:
        """An order could not be read: it is asked for again later, and later each time."""
        before = self._unread.get(order_id)
        if before is None:
            self._unread[order_id] = _Unread(self._clock.now_ms(), ASK_EVERY_MS)
        else:
            pause_ms = min(2 * before.pause_ms, LONGEST_PAUSE_MS)
            self._unread[order_id] = before._replace(pause_ms=pause_ms)

    def _leave(self, order_id: str) -> None:
        self._open.pop(order_id, None)
        self._unread.pop(order_id, None)
        self._watched.discard(order_id)

    def health(self) -> Health:
        """Not ok while the outcome of a call is not known; a note, of orders not read for long."""
        doubtful = RelayState.RECONCILING
        unwritten = (each for each in self._unwritten.values() if each.state is doubtful)
        count = len({each.order_id for each in (*self._store.relays_in(doubtful), *unwritten)})
        if count:
            return Health(False, f"{count} upstream orders are in doubt (reconciling)")
        long_ago = self._clock.now_ms() - UNREAD_TOLD_MS
        unread = sum(each.since <= long_ago for each in self._unread.values())
        note = f"{unread} upstream orders could not be read for an hour" if unread else None
        return Health(True, note)


def _used_for(record: RelayRecord, claim: Claim | None) -> RelayRecord:
    """The record with its key, if it has one, and what that is used for."""
    if claim is None:
        return record
    return replace(
        record,
        namespace=claim.namespace,
        key=claim.key,
        operation=claim.operation,
        params=claim.params,
    )
