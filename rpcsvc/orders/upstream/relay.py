"""Makes orders at the upstream, each at most once.

A claim is committed before the call; its outcome is committed with the order. When the outcome is
unknown the claim is ``reconciling``: the caller gets ``unavailable``, and the call is repeated only
where the upstream honours our key. An order that is over, or brings less than was quoted, is not
taken. An outcome that can't be written is remembered; a stop before that is found at the next
start.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import NamedTuple

import structlog

from rpcsvc.clock import Clock, iso8601
from rpcsvc.errors import ServiceError, Unavailable
from rpcsvc.orders.idempotency import Claim, require_same
from rpcsvc.orders.ports.store import (
    Change,
    Health,
    OrderStore,
    RelayRecord,
    RelayState,
    ReservationChange,
)
from rpcsvc.orders.ports.upstream import (
    Created,
    CreationUnknown,
    UpstreamPort,
    UpstreamRequest,
)
from rpcsvc.orders.unfunded import Admission, Reservation
from rpcsvc.orders.upstream.follower import Follower

log = structlog.get_logger(__name__)

_IN_DOUBT = (
    "Whether the order was made is not known yet; the operator is looking it up. Repeat the call"
    " with its idempotency key to hear what became of it. Don't order the same under another key,"
    " or without one, before that is settled."
)

_NOT_TAKEN = (
    "No order was taken: the one that was made can't be paid any more, or would bring less than"
    " its quote's minReceived. Nothing is to be paid. Repeat the call, with the same idempotency"
    " key if it had one, for another order."
)

# What could not be written is tried again no more often than this.
WRITE_EVERY_MS = 1_000


class Asking(NamedTuple):
    """The id of an order that is asked for, what it reserves meanwhile, and within which bounds."""

    order_id: str
    reservation: Reservation
    admission: Admission


class Relay:
    """Makes orders at the upstream, and has ``follower`` follow them."""

    def __init__(
        self, store: OrderStore, upstream: UpstreamPort, clock: Clock, follower: Follower
    ) -> None:
        self._store = store
        self._upstream = upstream
        self._clock = clock
        self.follower = follower
        # What became of calls and could not be committed yet, by order id.
        self._unwritten: dict[str, RelayRecord] = {}
        self._wake = asyncio.Event()

    async def recover(self) -> None:
        """Take up the calls that an earlier process was making: their outcome is not known."""
        for record in await self._store.relays_in(RelayState.CLAIMED):
            await self._doubt(record, CreationUnknown("the service stopped during the call"))
        now = self._clock.now_ms()
        recent = await self._store.relays_since(now - 60_000)
        self._upstream.remember([now - made_at for made_at in recent])

    async def create(
        self, request: UpstreamRequest, claim: Claim | None, fresh: Asking, *, least: int = 0
    ) -> tuple[RelayRecord, Created]:
        """Make the order at the upstream, under our id; the caller commits it with the record.

        ``least``: payout units that it must bring, by the quote that was just given; a call that is
        made again had another one. Raises Unavailable while the outcome of an earlier call is not
        known, or that of this one is not, and of an order that nobody should pay for; StaleWrite,
        before anybody is asked, where the bounds do not hold any more;
        IdempotencyConflict as ``is_in_doubt`` does; and what the upstream refuses with.
        """
        record, resumed = await self._record(request, claim, fresh.order_id)
        # A resumed call is the same to the letter, or its key would be refused.
        request = request._replace(session_id=record.session_id)
        if not resumed:
            reserves = ReservationChange(record.order_id, {}, fresh.reservation, begins=True)
            await self._store.commit(
                Change(relay=record, reservation=reserves, admission=fresh.admission)
            )
        try:
            created = await self._upstream.create(request, record.order_id, resumed=resumed)
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
        made = replace(
            record, state=RelayState.CREATED, upstream_id=created.upstream_id, raw=created.raw
        )
        flaw = _flaw(created, 0 if resumed else least, self._clock.now_ms())
        if flaw is not None:
            await self._leave(made, flaw)
            raise Unavailable(_NOT_TAKEN)
        self._unwritten.pop(record.order_id, None)  # or it might be written after the order
        return made, created

    async def is_in_doubt(self, claim: Claim) -> bool:
        """Whether the key's call was made before with unknown outcome, and is now made again.

        Raises IdempotencyConflict if it was another call: whoever named another destination under
        the key would get an order of the first caller's session, if any. Raises Unavailable where
        the call can't be made again.
        """
        return await self._in_doubt(claim) is not None

    @asynccontextmanager
    async def recording(self, record: RelayRecord) -> AsyncIterator[None]:
        """Commit within this what the upstream made; then it is followed.

        What can't be recorded here is in doubt, such as an address or an id that is another
        order's. Raises Unavailable.
        """
        try:
            yield
        except Exception as error:
            reason = f"made there, and not recorded here: {type(error).__name__}"
            await self._doubt(record, CreationUnknown(reason))
            raise Unavailable(_IN_DOUBT, retry_after=30) from error
        self.follower.follow(record.order_id)

    async def _record(
        self, request: UpstreamRequest, claim: Claim | None, fresh_id: str
    ) -> tuple[RelayRecord, bool]:
        """The claim to make, and whether it was made before and its outcome is not known."""
        before = await self._in_doubt(claim) if claim else None
        if before is None:
            now = self._clock.now_ms()
            fresh = RelayRecord(fresh_id, RelayState.CLAIMED, now, request.session_id)
            return _used_for(fresh, claim), False
        return before, True

    async def _in_doubt(self, claim: Claim) -> RelayRecord | None:
        """The earlier call under the key, while its outcome is not known; as ``is_in_doubt``."""
        before = await self._store.relay_of_key(claim.namespace, claim.key)
        # The answer to a key is committed with its order: one that is gone was forgotten by age.
        if before is not None:
            before = self._unwritten.get(before.order_id, before)
        if before is None or before.state in (RelayState.REFUSED, RelayState.CREATED):
            return None
        if before.operation is not None and before.params is not None:
            require_same(before.operation, before.params, claim)
        if not self._upstream.honours_keys:
            raise Unavailable(_IN_DOUBT, retry_after=30)
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

    async def _leave(self, made: RelayRecord, flaw: str) -> None:
        """Leave an order to expire there: nobody has its address, so its key is free again."""
        log.error(
            "upstream_order_not_taken",
            order_id=made.order_id,
            upstream_id=made.upstream_id,
            reason=flaw,
        )
        await self._settle(replace(made, state=RelayState.REFUSED, reason=f"not taken: {flaw}"))

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

    async def run(self) -> None:
        """Write what could not be written, as soon as it can be."""
        while True:
            await self.write_remembered()
            if self._unwritten:
                await asyncio.sleep(WRITE_EVERY_MS / 1000)
            else:
                self._wake.clear()
                await self._wake.wait()

    async def health(self) -> Health:
        """Not ok while the outcome of a call is not known; else as the orders that were made."""
        doubtful = RelayState.RECONCILING
        unwritten = (each for each in self._unwritten.values() if each.state is doubtful)
        count = len(
            {each.order_id for each in (*await self._store.relays_in(doubtful), *unwritten)}
        )
        if count:
            return Health(
                False, f"{count} upstream orders are in doubt: settle them with rpcsvc relays"
            )
        return self.follower.health()


def _flaw(created: Created, least: int, now: int) -> str | None:
    """Why nobody should pay for the order that the upstream made, if so."""
    if created.is_over:
        return "the upstream made it, and says that it is over"
    if created.expires_at <= now:
        return f"it expired at {iso8601(created.expires_at)}, by this machine's clock"
    output = created.expected_output
    if output is not None and output < least:
        return f"it would bring {output} units; at least {least} were quoted"
    return None


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
