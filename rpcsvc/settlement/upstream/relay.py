"""Makes orders at the upstream, each at most once, and has it carry signed authorizations out.

A claim is committed before the call; its outcome is committed with the order. A key has one claim
at a time: while the call is made, here or by another replica, the same call waits for its outcome.
When that is unknown the claim is ``reconciling``: the caller gets ``unavailable``, and the call is
repeated only where the upstream honours our key. An order that is over, or brings less than was
quoted, is not taken. An outcome that can't be written is remembered. A claim whose caller is gone
is older than any call lasts, and then in doubt.

An authorization is passed on only after it is on record here, and the same one again until the
upstream says what became of it: it takes a payer's nonce once.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

import structlog
from msgspec.structs import replace
from typing_extensions import override

from rpcsvc.clock import Clock, iso8601, steady_ms
from rpcsvc.domain.authorizations import (
    NOT_SIGNED,
    SIGNATURE_BYTES,
    AuthorizationRefused,
    is_signed_by_key,
)
from rpcsvc.domain.money import MAX_UNITS
from rpcsvc.domain.order import Order
from rpcsvc.domain.reservations import Admission, Reservation, ReservationChange
from rpcsvc.domain.usdc import Domain
from rpcsvc.errors import OrderNotFundable, ServiceError, Unavailable
from rpcsvc.health import Health
from rpcsvc.orders.authorizations import AuthorizationWallets, Carried
from rpcsvc.orders.idempotency import Claim, require_same
from rpcsvc.orders.ports.wallets import Outcome
from rpcsvc.settlement.upstream.engine import UpstreamEngine
from rpcsvc.settlement.upstream.requests import (
    Created,
    CreationUnknown,
    UpstreamRequest,
)
from rpcsvc.store.authorizations import AuthorizationRecord
from rpcsvc.store.changes import UNBOUNDED, Change, OrderBounds, RelayRecord, RelayState
from rpcsvc.store.database import StaleWrite
from rpcsvc.store.orders import OrderStore

log = structlog.get_logger(__name__)

_IN_DOUBT = (
    "Whether the order was made is not known yet; the operator is looking it up. Repeat the call"
    " with its idempotency key to hear what became of it. Don't order the same under another key,"
    " or without one, before that is settled."
)

_NOT_TAKEN = (
    "No order was taken: the one that was made can't be paid any more, or is worse than its quote"
    " (minReceived, fundingGas). Nothing is to be paid. Repeat the call, with the same idempotency"
    " key if it had one, for another order."
)

_UNDER_WAY = (
    "A call with this idempotency key is being made, and its outcome is not known yet. Repeat it"
    " with the same key to hear what became of it."
)
_STOPPED = "the service stopped during the call"

# What could not be written is tried again no more often than this.
WRITE_EVERY_MS = 1_000
# A call of the upstream has ended by then: its own limits, with those of the steps before it, add
# up to less (settlement/upstream/transport.py, ClientOptions).
CALL_MS: Final = 120_000
# A claim of that age has lost its caller: claim and outcome take some time to be committed, too.
ABANDONED_MS: Final = 150_000
FIND_MS: Final = 1_000
# However young: a clock may have gone back.
_ANY_AGE: Final = -(2**53)
# How long the same call waits for the outcome of one that another replica makes, and how often it
# looks.
WAIT_MS: Final = 10_000
LOOK_MS: Final = 50

# How often the upstream is asked for unresolved authorizations.
POLL_MS: Final = 5_000


class Asking(NamedTuple):
    """The id of a requested order, its reservation meanwhile, and its bounds.

    ``bounds``: what it takes of its client's limits, unless the upstream refuses the call.
    """

    order_id: str
    reservation: Reservation
    admission: Admission
    bounds: OrderBounds = UNBOUNDED


class _Outcome(NamedTuple):
    """The outcome of a call, and what it gives back of its client's limits."""

    record: RelayRecord
    returns: OrderBounds = UNBOUNDED


class Relay:
    """Makes orders at the upstream. ``follow`` is called with the id of each."""

    def __init__(
        self,
        store: OrderStore,
        upstream: UpstreamEngine,
        clock: Clock,
        follow: Callable[[str], None],
    ) -> None:
        self._store = store
        self._upstream = upstream
        self._clock = clock
        self._follow = follow
        self._find_at = 0
        # What became of calls and could not be committed yet, by order id.
        self._unwritten: dict[str, _Outcome] = {}
        self._wake = asyncio.Event()

    async def recover(self, *, is_alone: bool) -> None:
        """Take up the calls that earlier processes made, for the limit of creations.

        Where no other process can be making one (``is_alone``), those without an outcome are in
        doubt at once.
        """
        if is_alone:
            await self._doubt_abandoned(_ANY_AGE)
        now = self._clock.now_ms()
        recent = await self._store.relays_since(now - 60_000)
        self._upstream.remember([now - made_at for made_at in recent])

    async def find(self) -> int:
        """Put calls in doubt whose caller is gone, once a second; returns 0: not work."""
        now = steady_ms()
        if now >= self._find_at:
            self._find_at = now + FIND_MS
            await self._doubt_abandoned(ABANDONED_MS)
        return 0

    async def _doubt_abandoned(self, older_ms: int) -> None:
        for order_id in await self._store.doubt_abandoned(older_ms, _STOPPED):
            _log_doubt(order_id, None, _STOPPED)

    async def create(
        self,
        request: UpstreamRequest,
        claim: Claim | None,
        fresh: Asking,
        *,
        least: int = 0,
        most_gas: int = MAX_UNITS,
        most_deposit: int = MAX_UNITS,
        is_repeated: bool = False,
    ) -> tuple[RelayRecord, Created]:
        """Make the order at the upstream, under our id; the caller commits it with the record.

        ``least``: payout units that it must bring, and ``most_gas``: USDC units of gas that it may
        bear, by the quote that was just given; a call that is made again had another one.
        ``most_deposit``: deposit units that it may ask for, also then. ``is_repeated``: the caller
        has taken it for a call that is made again, and has checked no limits. Raises
        Unavailable while the outcome of an earlier call is not known, or that of this one is not,
        and of an order that nobody should pay for; StaleWrite, before anybody is asked, where the
        bounds do not hold any more, the key's call is made elsewhere, or its claim was closed;
        IdempotencyConflict as ``is_in_doubt`` does; and what the upstream refuses with.
        """
        record, resumed = await self._record(request, claim, fresh.order_id)
        if is_repeated and not resumed:
            raise StaleWrite
        # A resumed call is the same to the letter, or its key would be refused.
        request = replace(request, session_id=record.session_id)
        if resumed:
            least, most_gas = 0, MAX_UNITS
            approval = await self._store.approval_of(record.order_id)
            if approval is not None:
                least, most_deposit = approval.least_output, approval.most_deposit
            await self._store.commit(Change(relay=record))
        else:
            reserves = ReservationChange(record.order_id, {}, fresh.reservation, begins=True)
            await self._store.commit(
                Change(
                    relay=record,
                    reservation=reserves,
                    admission=fresh.admission,
                    spending=fresh.bounds.spending,
                    approval=fresh.bounds.approval,
                )
            )
        try:
            async with asyncio.timeout(CALL_MS / 1000):
                created = await self._upstream.create(request, record.order_id, resumed=resumed)
        except CreationUnknown as unknown:
            await self._doubt(record, unknown)
            raise Unavailable(_IN_DOUBT, retry_after=30) from unknown
        except ServiceError as refusal:
            ended = replace(record, state=RelayState.REFUSED, reason=refusal.message)
            if resumed:  # that does not say what became of the call before it
                await self._settle(replace(record, state=RelayState.RECONCILING))
            else:
                await self._settle(ended, fresh.bounds)
            raise
        except asyncio.CancelledError:
            await self._doubt(record, CreationUnknown("the call was cut off"))
            raise
        except Exception as broken:
            await self._doubt(record, CreationUnknown(f"the call broke: {type(broken).__name__}"))
            raise Unavailable(_IN_DOUBT, retry_after=30) from broken
        made = replace(
            record, state=RelayState.CREATED, upstream_id=created.upstream_id, raw=created.raw
        )
        flaw = _flaw(created, least, most_gas, most_deposit, self._clock.now_ms())
        if flaw is not None:
            await self._leave(made, flaw)
            raise Unavailable(_NOT_TAKEN)
        self._unwritten.pop(record.order_id, None)  # or it might be written after the order
        return made, created

    async def is_in_doubt(self, claim: Claim) -> bool:
        """Return whether the key's call was made before with unknown outcome, and is now made
        again.

        Raises IdempotencyConflict if it was another call: a caller who names another destination
        under the key would get an order of the first caller's session. Raises Unavailable where the
        call can't be made again.
        """
        return await self._in_doubt(claim) is not None

    @asynccontextmanager
    async def recording(self, record: RelayRecord) -> AsyncIterator[None]:
        """Commit within this block what the upstream made; then the order is followed.

        An order that can't be recorded here is in doubt: its address or id may belong to another
        order. Raises Unavailable; and StaleWrite where another replica, which repeated the same
        call, has recorded this order meanwhile.
        """
        try:
            yield
        except Exception as error:
            if isinstance(error, StaleWrite) and await self._store.order(record.order_id):
                raise
            reason = f"made there, and not recorded here: {type(error).__name__}"
            await self._doubt(record, CreationUnknown(reason))
            raise Unavailable(_IN_DOUBT, retry_after=30) from error
        self._follow(record.order_id)

    async def _record(
        self, request: UpstreamRequest, claim: Claim | None, fresh_id: str
    ) -> tuple[RelayRecord, bool]:
        """The claim to make, and whether it was made before and its outcome is not known."""
        before = await self._in_doubt(claim) if claim else None
        if before is None:
            now = self._clock.now_ms()
            fresh = RelayRecord(fresh_id, RelayState.CLAIMED, now, request.session_id)
            return _used_for(fresh, claim), False
        return replace(before, state=RelayState.CLAIMED, attempt=before.attempt + 1), True

    async def _in_doubt(self, claim: Claim) -> RelayRecord | None:
        """The earlier call under the key, if it ended without a known outcome; as ``is_in_doubt``.

        Raises StaleWrite once a call that was under way has ended.
        """
        before = await self._open_claim(claim)
        if before is None:
            return None
        if before.operation is not None and before.params is not None:
            require_same(before.operation, before.params, claim)
        if before.state is RelayState.CLAIMED:
            await self._ended(before, claim)
            raise StaleWrite
        if not self._upstream.honours_keys:
            raise Unavailable(_IN_DOUBT, retry_after=30)
        return before

    async def _open_claim(self, claim: Claim) -> RelayRecord | None:
        """The key's claim while its outcome is not on record; one that is known here is written."""
        before = await self._store.relay_of_key(claim.namespace, claim.key)
        if before is not None and (known := self._unwritten.get(before.order_id)) is not None:
            await self._write(known)
            before = await self._store.relay_of_key(claim.namespace, claim.key)
        # The answer to a key is committed with its order: one that is gone was forgotten by age.
        return before if before is not None and before.is_open else None

    async def _ended(self, before: RelayRecord, claim: Claim) -> None:
        """Wait until a call that is under way has ended. Raises Unavailable after a while."""
        end = steady_ms() + WAIT_MS
        while await self._open_claim(claim) == before:
            if steady_ms() >= end:
                raise Unavailable(_UNDER_WAY, retry_after=5)
            await asyncio.sleep(LOOK_MS / 1000)

    async def _doubt(self, record: RelayRecord, unknown: CreationUnknown) -> None:
        doubtful = replace(
            record,
            state=RelayState.RECONCILING,
            # Details of the order from an earlier attempt still hold.
            upstream_id=unknown.upstream_id or record.upstream_id,
            reason=unknown.reason,
            raw=unknown.raw or record.raw,
        )
        _log_doubt(record.order_id, doubtful.upstream_id, unknown.reason)
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

    async def _settle(self, record: RelayRecord, returns: OrderBounds = UNBOUNDED) -> None:
        """Write the outcome of a call, or remember it: the call has happened all the same."""
        outcome = _Outcome(record, returns)
        self._unwritten[record.order_id] = outcome
        await self._write(outcome)
        if self._unwritten:
            self._wake.set()

    async def _write(self, outcome: _Outcome) -> None:
        record, returns = outcome
        try:
            try:
                await self._store.commit(Change(relay=record, returns=returns))
            except StaleWrite:
                # The operator closed this claim, and the key's next call is under way or in doubt.
                keyless = replace(record, namespace=None, key=None)
                await self._store.commit(Change(relay=keyless, returns=returns))
        except ServiceError as error:
            reason = error.message
            log.warning("upstream_outcome_not_written", order_id=record.order_id, reason=reason)
            return
        if self._unwritten.get(record.order_id) is outcome:
            del self._unwritten[record.order_id]

    async def write_remembered(self) -> None:
        """Write what could not be written before, the oldest first; stops at what still can't."""
        while self._unwritten:
            # Read again each time: a call that is made again takes its outcome back.
            outcome = next(iter(self._unwritten.values()))
            await self._write(outcome)
            if self._unwritten.get(outcome.record.order_id) is outcome:
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
        """Return the health: not ok while the outcome of a call is not known."""
        doubtful = RelayState.RECONCILING
        unwritten = (record for record, _ in self._unwritten.values() if record.state is doubtful)
        count = len(
            {each.order_id for each in (*await self._store.relays_in(doubtful), *unwritten)}
        )
        if count:
            return Health(
                False, f"{count} upstream orders are in doubt: settle them with rpcsvc relays"
            )
        return Health(True)


def _log_doubt(order_id: str, upstream_id: str | None, reason: str) -> None:
    log.error("upstream_order_in_doubt", order_id=order_id, upstream_id=upstream_id, reason=reason)


def _flaw(created: Created, least: int, most_gas: int, most_deposit: int, now: int) -> str | None:
    """Return why nobody should pay for the order that the upstream made, if so."""
    if created.is_over:
        return "the upstream made it, and says that it is over"
    if created.expires_at <= now:
        return f"it expired at {iso8601(created.expires_at)}, by this machine's clock"
    output = created.expected_output
    if output is not None and output < least:
        return f"it would bring {output} units; at least {least} were quoted"
    if created.funding_gas > most_gas:
        return f"it would bear {created.funding_gas} units of gas; {most_gas} were quoted"
    if created.deposit > most_deposit:
        return f"it asks for {created.deposit} units; at most {most_deposit} were quoted"
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


# --- signed authorizations -----------------------------------------------------------------------


class RelayedAuthorizations(AuthorizationWallets):
    """Has the upstream carry authorizations out, for the orders that it settles."""

    def __init__(self, orders: OrderStore, upstream: UpstreamEngine) -> None:
        self._orders = orders
        self._upstream = upstream
        self._domains: dict[str, Domain] = {}  # as they were offered last, by network

    @override
    def contract(self, network: str) -> str:
        return self._upstream.contract(network)

    @override
    async def token(self, order: Order) -> Domain:
        if not self._upstream.takes_authorizations:
            raise OrderNotFundable(
                "The service that settles this order takes no signed payments (x402). Pay it as its"
                " fundingInstructions say.",
                details={"status": order.status.value},
            )
        domain = await self._upstream.signing_domain(order.terms, order.due_units)
        self._domains[order.terms.deposit_network] = domain
        return domain

    @override
    def fee(self, network: str) -> int:
        # The upstream prices its orders by itself.
        raise Unavailable(f"What gas on {network} costs is for the service that settles orders.")

    @override
    async def require_usable(self, record: AuthorizationRecord) -> None:
        # The upstream asks wallets with code.
        domain = self._domains.get(record.key.network)
        if domain is None:
            domain = await self.token(await self._order(record))
        is_of_key = len(record.signed.signature) == SIGNATURE_BYTES
        if is_of_key and not is_signed_by_key(domain, record.signed):
            raise AuthorizationRefused(NOT_SIGNED)

    @override
    async def carry_out(self, record: AuthorizationRecord) -> Carried:
        # Passed on as often as it takes: until the upstream sees the deposit.
        order = await self._order(record)
        if record.txid is not None and order.due_units == 0:
            return Carried(Outcome.SETTLED, record.txid)
        domain = self._domains.get(record.key.network)
        return await self._upstream.pay_signed(order.terms, record.signed, domain)

    async def _order(self, record: AuthorizationRecord) -> Order:
        order = await self._orders.order(record.order_id)
        if order is None:
            raise Unavailable(f"The order {record.order_id} can't be read.")
        return order
