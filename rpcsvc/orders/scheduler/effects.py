"""Carries out effects after their commit, each until it is done, and again after a crash.

Wallets work side by side: one that hangs delays no other. Each signs and publishes in one turn at a
time, and looks up as many transfers at once as its engine allows. The schedule is in memory, the
effects are in the store: ``recover`` schedules them again.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from enum import Enum, auto
from typing import Any

import structlog

from rpcsvc.clock import Clock, steady_ms
from rpcsvc.domain import twap
from rpcsvc.domain.events import (
    AdvanceTransfer,
    ChunkFilled,
    Effect,
    Event,
    FillChunk,
    FillingStopped,
    ImpossibleTransition,
    PriceLateDeposit,
    RefundRetried,
    Repriced,
    order_of,
)
from rpcsvc.domain.order import Order, Transfer, TransferKind
from rpcsvc.errors import ServiceError, Unavailable
from rpcsvc.orders.payouts import AwaitsBlock, Payouts
from rpcsvc.orders.ports.venue import RateSource
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.store.changes import PendingEffect
from rpcsvc.store.orders import OrderStore

log = structlog.get_logger(__name__)

MAX_BACKOFF_MS = 60_000
MAX_AT_ONCE = 128
# After the requests in flight (graceful_seconds), and within the unit's TimeoutStopSec.
STOP_SECONDS = 10.0
TRIES_PER_PAUSE = 8
FIND_MS = 1_000


class Then(Enum):
    """When an effect runs next, if not at a given time: never, or after its retry delay."""

    DONE = auto()
    RETRY = auto()


class EffectRunner:
    """Runs pending effects when they are due.

    A transfer that awaits a block is looked at again once the wallets have seen that block.
    """

    def __init__(
        self,
        store: OrderStore,
        processor: OrderProcessor,
        payouts: Payouts,
        rates: RateSource,
        clock: Clock,
        *,
        poll_ms: int,
        stop_seconds: float = STOP_SECONDS,
        payable: Callable[[Order], Awaitable[int | None]] | None = None,
    ) -> None:
        self._store = store
        self._processor = processor
        self._payouts = payouts
        self._rates = rates
        self._clock = clock
        self._poll_ms = poll_ms
        self._stop_seconds = stop_seconds
        self._payable = payable
        self._awaited: dict[PendingEffect, AwaitsBlock] = {}
        self._is_stopping = False
        self._due: list[tuple[int, int, PendingEffect]] = []
        self._last_pass = 0
        self._find_at = 0
        self._number = itertools.count()  # of effects due at the same time the older goes first
        self._known: set[PendingEffect] = set()
        self._attempts: dict[PendingEffect, int] = {}
        self._running: set[asyncio.Task[None]] = set()
        # By network, while its wallet is at work: what waits for it.
        self._queues: dict[str, WalletQueue] = {}
        processor.on_effects(self.schedule)

    def schedule(self, order_id: str, effects: Iterable[Effect]) -> None:
        """Schedule the effects."""
        for effect in effects:
            self._push(PendingEffect(order_id, effect), self._clock.now_ms())

    async def recover(self) -> int:
        """Schedule all pending effects of the store; returns how many there are."""
        pending = await self._store.pending_effects()
        for effect in pending:
            self._push(effect, self._clock.now_ms())
        return len(pending)

    async def find(self) -> int:
        """Schedule what other replicas have committed, once a second; returns 0: not work yet.

        An effect that ended since it was read runs once more, and finds nothing left to do. A
        transfer that an operator woke at another replica runs now.
        """
        now = steady_ms()
        if now >= self._find_at:
            self._find_at = now + FIND_MS
            await self.recover()
            for transfer_id in await self._store.take_woken():
                self.wake_transfer(transfer_id)
        return 0

    async def start_due(self) -> int:
        """Start the effects that are due, up to a limit; returns how many.

        Each starts now, or as soon as its wallet is done with those before it.
        """
        taken = 0
        now = self._clock.now_ms()
        self._follow_clock(now)
        self._wake_at_blocks(now)
        while self._due and self._due[0][0] <= now and self._has_room(taken):
            _, _, pending = heapq.heappop(self._due)
            await self._take_up(pending)
            taken += 1
        return taken

    def _has_room(self, taken: int) -> bool:
        return not self._is_stopping and max(taken, len(self._running)) < MAX_AT_ONCE

    async def _take_up(self, pending: PendingEffect) -> None:
        transfer = await self._transfer_of(pending)
        if self._is_stopping:
            return  # it is committed: the next start finds it
        if transfer is None:
            self._begin(self._run(pending), f"effect {pending.order_id}")
            return
        network = transfer.network
        waiting = self._queues.setdefault(network, WalletQueue())
        waiting.add(transfer.kind, pending)
        if waiting.workers < self._payouts.carried_at_once(network):
            waiting.workers += 1
            self._begin(self._run_queue(network), f"transfers {network}")

    async def _transfer_of(self, pending: PendingEffect) -> Transfer | None:
        """The transfer that needs a wallet; None when the effect needs none, or has no record."""
        if not isinstance(pending.effect, AdvanceTransfer):
            return None
        try:
            order = await self._store.order(pending.order_id)
        except Exception:  # noqa: BLE001 - it is read again when it runs, which reports the failure
            return None
        return order.transfer(pending.effect.transfer_id) if order else None

    def _begin(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    def wake_transfer(self, transfer_id: str) -> bool:
        """Move a transfer to the next pass instead of after its pause; returns whether it waited.

        One that is being worked on, or is the wallet's next, is left alone: nothing ever runs
        twice at a time.
        """
        for place, (_, number, pending) in enumerate(self._due):
            effect = pending.effect
            if isinstance(effect, AdvanceTransfer) and effect.transfer_id == transfer_id:
                self._due[place] = (self._clock.now_ms(), number, pending)
                heapq.heapify(self._due)
                self._attempts.pop(pending, None)
                return True
        return False

    async def drain(self) -> None:
        """Wait until no effect is running."""
        while self._running:
            await asyncio.wait(self._running)

    async def stop(self) -> None:
        """Start nothing more, and wait up to ``stop_seconds`` for running effects.

        What takes longer is cut short as by a crash: the effect is committed, and the next start
        finds out how far it came.
        """
        self._is_stopping = True
        for waiting in self._queues.values():
            waiting.clear()
        if not self._running:
            return
        _, late = await asyncio.wait(self._running, timeout=self._stop_seconds)
        for task in late:
            log.warning("effect_interrupted", task=task.get_name())
            task.cancel()
        await asyncio.gather(*late, return_exceptions=True)

    def _follow_clock(self, now: int) -> None:
        """Have nothing wait for longer than it was to wait because the clock was set back."""
        back = self._last_pass - now
        if back > 0:
            # The same for all: the heap stays one.
            self._due = [(due - back, number, pending) for due, number, pending in self._due]
        self._last_pass = now

    def _wake_at_blocks(self, now: int) -> None:
        """Have the transfers run now whose blocks have come."""
        if not self._awaited:
            return
        heights = self._payouts.heights()
        come = {each for each, block in self._awaited.items() if self._has_come(block, heights)}
        if come:
            for pending in come:
                del self._awaited[pending]
                self._attempts.pop(pending, None)
            self._due = [
                (now if pending in come else due, number, pending)
                for due, number, pending in self._due
            ]
            heapq.heapify(self._due)

    @staticmethod
    def _has_come(block: AwaitsBlock, heights: Mapping[str, int]) -> bool:
        return heights.get(block.network, -1) >= block.height

    def _push(self, pending: PendingEffect, due: int) -> None:
        if pending not in self._known:
            self._known.add(pending)
            heapq.heappush(self._due, (due, next(self._number), pending))

    async def _run_queue(self, network: str) -> None:
        waiting = self._queues[network]
        try:
            while (pending := waiting.take()) is not None:
                await self._run(pending)
                # While payouts are paused nothing in a run waits for anything: let others in.
                await asyncio.sleep(0)
        finally:
            waiting.workers -= 1
            if not waiting.workers:
                del self._queues[network]

    async def _run(self, pending: PendingEffect) -> None:
        again: Then | AwaitsBlock | int = Then.RETRY
        try:
            again = await self._carry_out(pending)
        except Unavailable as error:
            log.warning("effect_postponed", order_id=pending.order_id, reason=error.message)
        except Exception:
            # Whatever broke, the effect is still committed: keep trying and log it.
            log.exception("effect_failed", order_id=pending.order_id)
        self._known.discard(pending)
        self._awaited.pop(pending, None)
        match again:
            case Then.DONE:
                self._attempts.pop(pending, None)
            case Then.RETRY:
                self._push(pending, self._clock.now_ms() + self._pause_ms(pending))
            case AwaitsBlock():
                self._push(pending, self._clock.now_ms() + self._pause_ms(pending))
                if not self._has_come(again, self._payouts.heights()):
                    self._awaited[pending] = again
            case due:
                self._push(pending, due)

    async def _carry_out(self, pending: PendingEffect) -> Then | AwaitsBlock | int:
        """Return how it goes on: an integer is when, in ms since the epoch."""
        match pending.effect:
            case AdvanceTransfer():
                done = await self._payouts.advance(pending.order_id, pending.effect)
                if isinstance(done, AwaitsBlock):
                    return done
                return Then.DONE if done else Then.RETRY
            case FillChunk():
                return await self._fill(pending.order_id, pending.effect)
            case PriceLateDeposit():
                return await self._reprice(pending.order_id, pending.effect)

    async def _fill(self, order_id: str, effect: FillChunk) -> Then | int:
        order, now = await self._store.order(order_id), self._clock.now_ms()
        if order is None:
            raise LookupError(f"chunk of {order_id}, which is not in the store")
        if not twap.is_filling(order) or effect.index != len(order.fills):
            # Void, and dropped; if the order begins again at this moment, the chunk is due indeed.
            rate = self._rates.rate().usdc_per_xmr
            return await self._apply_once(order_id, ChunkFilled(effect.index, rate), effect)
        due = twap.due_at(order)
        if 0 < due - now <= self._retry_ms(order):  # more than that, and the clock was set back
            return due
        event = self._next_of(order, effect, now)
        if event is None:
            return now + self._retry_ms(order)
        return await self._apply_once(order_id, event, effect)

    def _next_of(self, order: Order, effect: FillChunk, now: int) -> Event | None:
        """Return the event that the chunk has now; None when it has to wait for a fair rate."""
        try:
            rate = self._rates.rate().usdc_per_xmr
        except Unavailable as error:
            log.warning("chunk_postponed", order_id=order.order_id, reason=error.message)
        else:
            if twap.next_fill(order, rate, now) is not None:
                return ChunkFilled(effect.index, rate)
        return FillingStopped(effect.index) if now >= twap.abandoned_at(order) else None

    @staticmethod
    def _retry_ms(order: Order) -> int:
        """Return how long a chunk that has no fair rate waits for its next try: one interval."""
        return order.terms.twap.interval_ms if order.terms.twap else MAX_BACKOFF_MS

    async def _reprice(self, order_id: str, effect: PriceLateDeposit) -> Then:
        rate, order = self._rates.rate().usdc_per_xmr, await self._store.order(order_id)
        payable = await self._payable(order) if order is not None and self._payable else None
        return await self._apply_once(order_id, Repriced(rate, payable), effect)

    async def _apply_once(self, order_id: str, event: Event, effect: Effect) -> Then:
        """Apply the event that ends an effect; drop the effect if the event can't happen."""
        try:
            await self._processor.apply(order_id, event, done=(effect,), done_if_void=True)
        except ImpossibleTransition as refused:
            log.info("effect_dropped", order_id=order_id, reason=str(refused))
        return Then.DONE

    def _pause_ms(self, pending: PendingEffect) -> int:
        """Return the pause before the next try: the engine's poll interval, doubled every 8 tries.

        The usual wait, for blocks, is checked often; a minute is the longest.
        """
        tries = self._attempts.get(pending, 0)
        self._attempts[pending] = tries + 1
        return min(self._poll_ms << min(tries // TRIES_PER_PAUSE, 16), MAX_BACKOFF_MS)


class WalletQueue:
    """Pending transfers of one wallet. ``workers``: the tasks that take from it."""

    def __init__(self) -> None:
        self.workers = 0
        self._payouts: deque[PendingEffect] = deque()
        self._refunds: deque[PendingEffect] = deque()
        self._turn = (self._payouts, self._refunds)  # the first goes next, if any waits there

    def add(self, kind: TransferKind, pending: PendingEffect) -> None:
        """Append a transfer to the queue of its kind."""
        (self._payouts if kind is TransferKind.PAYOUT else self._refunds).append(pending)

    def take(self) -> PendingEffect | None:
        """The next transfer; None when the queue is empty."""
        for waiting, other in (self._turn, self._turn[::-1]):
            if waiting:
                self._turn = (other, waiting)
                return waiting.popleft()
        return None

    def clear(self) -> None:
        """Empty the queue."""
        for waiting in self._turn:
            waiting.clear()


async def retry_transfer(
    transfer_id: str, wake: Callable[[str], Awaitable[bool]], processor: OrderProcessor
) -> bool:
    """Move a transfer to the front of its schedule; return whether it, or its order's refund to the
    agreed address, goes on now.

    Nothing is signed here. Raises errors.Unavailable.
    """
    if await wake(transfer_id):
        return True
    try:
        await processor.apply(order_of(transfer_id), RefundRetried())
    except Unavailable:
        raise
    except (ImpossibleTransition, ServiceError) as reason:
        log.info("refund_retry_refused", transfer_id=transfer_id[:80], reason=str(reason))
        return False
    return True
