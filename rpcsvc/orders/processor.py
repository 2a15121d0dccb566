"""Commit, then act: one event of an order at a time.

``OrderProcessor.apply`` reads the order, asks the pure machine what the event makes of it, commits
order, history and effects in one transaction, and only then hands the effects over. ``Quarantine``
keeps an order whose events can't be recorded from stopping all others.
"""

from __future__ import annotations

import asyncio
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Hashable,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from typing import Any

import structlog
from msgspec import Struct, to_builtins
from msgspec.structs import asdict, replace

from rpcsvc.clock import Clock, iso8601
from rpcsvc.domain.events import Effect, Event, ImpossibleTransition, TransferPrepared, order_of
from rpcsvc.domain.finality import (
    FINAL_ONLY,
    FinalityChange,
    FinalityLimits,
    finality_change,
    is_lost,
)
from rpcsvc.domain.machine import transition
from rpcsvc.domain.order import DepositKey, Order
from rpcsvc.domain.reservations import Admission, Counting, counted
from rpcsvc.domain.settle_times import settle_time
from rpcsvc.domain.webhooks import Webhook
from rpcsvc.errors import OrderNotFound, ServiceError, Unavailable
from rpcsvc.health import Health
from rpcsvc.orders.ports.wallets import PreparedTransfer
from rpcsvc.store.changes import (
    UNBOUNDED,
    Change,
    HistoryEntry,
    OrderBounds,
    PendingEffect,
    Projection,
    RelayRecord,
    StatusView,
    StoredResponse,
    TicketMessage,
)
from rpcsvc.store.database import Commit, StaleWrite
from rpcsvc.store.orders import OrderStore

log = structlog.get_logger(__name__)

# How often an order that another process keeps changing is read again for one event.
TRIES = 20
_BUSY = "The order is being changed by others right now; nothing was changed. Try again."

OrderCheck = Callable[[Sequence[Order]], Awaitable[None]]
EffectSink = Callable[[str, Iterable[Effect]], None]
# The order before an event and after it, and the event; a new order has the second only.
Observer = Callable[[Order | None, Order, Event | None], None]
# Bytes and addresses are on the order already; the history keeps what happened, not copies.
_NOT_IN_HISTORY = frozenset({"raw", "address", "receipt"})


class _AppliedEvent(Struct, frozen=True):
    """An order after an event, with what is to be committed."""

    before: Order
    after: Order
    event: Event
    change: Change


class OrderProcessor:
    """The only writer of orders."""

    def __init__(
        self,
        store: OrderStore,
        clock: Clock,
        project: Projection,
        count: Counting = counted,
        finality: FinalityLimits = FINAL_ONLY,
    ) -> None:
        self._store = store
        self._count = count
        self._finality = finality
        self._project = project
        self._clock = clock
        self._locks = KeyedLocks()
        self._sinks: list[EffectSink] = []
        self._observers: list[Observer] = []

    def on_commit(self, observer: Observer) -> None:
        """Call ``observer`` with each committed event. It must not raise."""
        self._observers.append(observer)

    def on_effects(self, sink: EffectSink) -> None:
        """Call ``sink`` with the effects of each transition, after its commit."""
        self._sinks.append(sink)

    async def open(
        self,
        order: Order,
        view: StatusView | None,
        response: StoredResponse | None,
        relay: RelayRecord | None = None,
        admission: Admission | None = None,
        *,
        webhook: Webhook | None = None,
        bounds: OrderBounds = UNBOUNDED,
    ) -> None:
        """Commit a new order together with the answer that its idempotency key replays.

        ``relay`` is the claim that became this order, of one that an upstream settles;
        ``admission`` is who asked for it, and the bounds that it is made within;
        ``webhook`` is where its events are sent; ``bounds`` are checked in the same transaction.
        Raises StaleWrite where one of the bounds does not hold by now, and errors.Unavailable:
        nothing was changed.
        """
        client = admission.client if admission else ""
        entry = HistoryEntry(
            order.version,
            order.terms.created_at,
            "OrderCreated",
            order.status.value,
            {"deadline_at": order.deadline_at},
        )
        change = Change(
            order=order,
            view=view,
            is_new=True,
            history=entry,
            response=response,
            relay=relay,
            reservation=self._count(None, order, client),
            admission=admission,
            webhook=webhook,
            rates=bounds.rates,
            pooled=bounds.pooled,
            spending=bounds.spending,
            approval=bounds.approval,
        )
        await self._store.commit(change)
        for observe in self._observers:
            observe(None, order, None)

    async def apply(
        self,
        order_id: str,
        event: Event,
        *,
        done: tuple[Effect, ...] = (),
        done_if_void: bool = False,
        evidence: bytes = b"",
        message: TicketMessage | None = None,
    ) -> Order:
        """Apply ``event`` to the order; returns the order as committed.

        ``done`` are effects of the order that this event finishes; with ``done_if_void`` they are
        dropped as well when the event can't happen. ``evidence`` is the upstream's answer that the
        event was read from, ``message`` what the operator answered. Raises OrderNotFound,
        ImpossibleTransition (the order was not changed) and errors.Unavailable (nothing was
        changed).
        """
        async with self._locks.hold(order_id):
            finished = tuple(PendingEffect(order_id, effect) for effect in done)
            try:
                steps = await self._commit(
                    {order_id: event}, done=finished, evidence=evidence, message=message
                )
            except ImpossibleTransition:
                if done_if_void:
                    # Under the lock: the next event may call for the same effect once more.
                    await self._store.commit(Change(done=finished))
                raise
        self._notify(steps)
        return steps[0].after

    async def record(
        self,
        signed: Sequence[PreparedTransfer],
        commit: Commit | None = None,
        check: OrderCheck | None = None,
    ) -> None:
        """Apply TransferPrepared to each transfer that ``signed`` pays: all of them, or none.

        No two transfers are of one order. ``commit`` writes that together with rows of its own.
        ``check`` is called under the orders' locks, with the orders as they are now. Raises as
        ``apply`` does, and as ``check`` does.
        """
        events: Mapping[str, Event] = {
            order_of(name): TransferPrepared(name, made.txid, made.raw)
            for made in signed
            for name in made.transfer_ids
        }
        async with AsyncExitStack() as held:
            for order_id in sorted(events):  # everyone in the same order: nobody waits in a circle
                await held.enter_async_context(self._locks.hold(order_id))
            steps = await self._commit(events, commit, check=check)
        self._notify(steps)

    async def _step(self, order_id: str, event: Event) -> _AppliedEvent:
        """Apply the event to the order. Raises OrderNotFound and ImpossibleTransition."""
        before = await self._store.order(order_id)
        if before is None:
            raise OrderNotFound(f"There is no order {order_id}.")
        now = self._clock.now_ms()
        result = transition(before, event, now)
        change = Change(
            order=result.order,
            view=self._project(result.order),
            history=_history_entry(result.order, event, now),
            effects=result.effects,
            reservation=self._count(before, result.order, ""),
            finality=finality_change(before, result.order, event, self._finality, now),
            settled=settle_time(before, result.order, now),
        )
        return _AppliedEvent(before, result.order, event, change)

    async def _commit(
        self,
        events: Mapping[str, Event],
        commit: Commit | None = None,
        *,
        check: OrderCheck | None = None,
        done: tuple[PendingEffect, ...] = (),
        evidence: bytes = b"",
        message: TicketMessage | None = None,
    ) -> list[_AppliedEvent]:
        """Commit the events, each on its order as it is now, all of them or none.

        An order that another process changed meanwhile is read again: the earlier decision may no
        longer hold.
        """
        for remaining in reversed(range(TRIES)):
            steps = [await self._step(order_id, event) for order_id, event in events.items()]
            if check is not None:
                await check([step.before for step in steps])
            changes = [
                replace(step.change, done=done, evidence=evidence, message=message)
                for step in steps
            ]
            try:
                if commit is None:
                    await self._store.commit(*changes)
                else:
                    await commit(self._store.rows(*changes))
                break
            except StaleWrite:
                if not remaining:
                    raise Unavailable(_BUSY) from None
                log.info("order_reread", order_ids=list(events))
        return steps

    def _notify(self, steps: Sequence[_AppliedEvent]) -> None:
        for step in steps:
            for sink in self._sinks:
                sink(step.after.order_id, step.change.effects)
            for observe in self._observers:
                observe(step.before, step.after, step.event)
            _log_transition(step.before, step.after, step.event)
            if (finality := step.change.finality) is not None:
                _log_losses(step.after.order_id, finality)

    async def discard(self, order_id: str, effect: Effect) -> None:
        """Drop an effect that has nothing left to do."""
        await self._store.commit(Change(done=(PendingEffect(order_id, effect),)))


def _history_entry(after: Order, event: Event, now: int) -> HistoryEntry:
    details = {
        name: _plain(value) for name, value in asdict(event).items() if name not in _NOT_IN_HISTORY
    }
    details["deadline_at"] = after.deadline_at
    return HistoryEntry(after.version, now, type(event).__name__, after.status.value, details)


def _plain(value: Any) -> Any:
    return value._asdict() if isinstance(value, DepositKey) else to_builtins(value)


def _log_transition(before: Order, after: Order, event: Event) -> None:
    # Only the operator can resolve a loss.
    has_loss = any(is_lost(deposit) for deposit in after.deposits)
    write = log.warning if after.action_required or has_loss else log.info
    write(
        "order_transition",
        order_id=after.order_id,
        transition=type(event).__name__,
        before=before.status.value,
        status=after.status.value,
        **({"action_required": after.action_required} if after.action_required else {}),
    )


def _log_losses(order_id: str, change: FinalityChange) -> None:
    for key in change.lost:
        log.error(
            "deposit_lost",
            order_id=order_id,
            network=key.network,
            txid=key.txid,
            final_only_until=iso8601(change.held_until),
        )
    for key in change.returned:
        log.warning("deposit_returned", order_id=order_id, network=key.network, txid=key.txid)


class KeyedLocks:
    """One lock per key; unrelated keys never wait for one another. Waiters are served in turn."""

    def __init__(self) -> None:
        self._locks: dict[str, asyncio.Lock] = {}
        self._users: dict[str, int] = {}

    @asynccontextmanager
    async def hold(self, key: str) -> AsyncIterator[None]:
        """Hold the lock of ``key`` for the length of the block."""
        lock = self._locks.setdefault(key, asyncio.Lock())
        self._users[key] = self._users.get(key, 0) + 1
        try:
            async with lock:
                yield
        finally:
            self._users[key] -= 1
            if self._users[key] == 0:
                del self._users[key], self._locks[key]


class Quarantine:
    """Orders with a broken step, each until that step succeeds.

    A violated constraint or a hole in a rule is a bug, and the order's record may differ from the
    chain: nothing more is signed for it, signed transfers are carried to their end, and health
    names it. A store that is down stops everything instead.
    """

    def __init__(self) -> None:
        self._broken: dict[str, set[Hashable]] = {}

    @contextmanager
    def isolate(self, order_id: str, step: Hashable) -> Iterator[None]:
        """Run the block for one order; an exception in it quarantines that order.

        ``step`` names the attempt: another step that succeeds does not mend it. Raises only
        errors.ServiceError: the store can't serve anybody.
        """
        try:
            yield
        except ServiceError:
            raise
        except Exception:
            log.exception("order_quarantined", order_id=order_id)
            self._broken.setdefault(order_id, set()).add(step)
        else:
            self._mended(order_id, step)

    def __contains__(self, order_id: str) -> bool:
        return order_id in self._broken

    def is_broken(self, order_id: str, step: Hashable) -> bool:
        """Return whether this step of the order failed when it was last tried."""
        return step in self._broken.get(order_id, ())

    def failing(self, step: Hashable) -> list[str]:
        """Return the orders whose step of this name failed when it was last tried."""
        return [order_id for order_id, steps in self._broken.items() if step in steps]

    def _mended(self, order_id: str, step: Hashable) -> None:
        steps = self._broken.get(order_id, set())
        steps.discard(step)
        if not steps:
            self._broken.pop(order_id, None)

    def health(self) -> Health:
        """Return the health: not ok while an order is quarantined."""
        if not self._broken:
            return Health(True)
        count = len(self._broken)
        return Health(
            False, f"{count} orders are quarantined: order_quarantined in the log names them"
        )
