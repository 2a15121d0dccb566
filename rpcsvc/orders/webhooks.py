"""Delivers the events of orders to their webhooks: at least once, and in order for each order.

The messages are rows of the store, written by the commits of their events. One that was sent and
not recorded is sent again, with the same id. Strangers choose the receivers, so the places for
attempts are shared among the clients that named them; receivers that answered last time, and all
others, each leave some places to the other kind.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Final

import structlog
from msgspec import Struct

from rpcsvc.clock import Clock
from rpcsvc.domain.events import Event
from rpcsvc.domain.order import Order
from rpcsvc.domain.webhooks import DAY_MS, DeliveryAttempt, Webhook, judge, message_id
from rpcsvc.errors import Unavailable
from rpcsvc.store.webhooks import DueDelivery, WebhookStore

log = structlog.get_logger(__name__)

# Messages to one kind of receiver that are looked at together.
_MOST_READ: Final = 512
POLL_SECONDS: Final = 1.0
# Between two looks at the store: while messages wait for a place, and at the least.
CROWDED_SECONDS: Final = 0.1
LEAST_SECONDS: Final = 0.05
BROKEN_SECONDS: Final = 5.0
# Sends one message: to whom, its id, its body.
Send = Callable[[Webhook, str, bytes], Awaitable[DeliveryAttempt]]
# The body of an event's message, by order id and sequence.
Render = Callable[[str, int], Awaitable[bytes]]


class Places(Struct, frozen=True):
    """How many attempts may be under way: in all, to receivers of one kind (those that answered
    last time, or all others), of one client, and to one receiver.

    After ``patience`` seconds an attempt gives its place to a client that has fewer.
    """

    most: int = 64
    of_kind: int = 48
    of_client: int = 8
    of_receiver: int = 4
    patience: float = 1.0


PLACES: Final = Places()


class _Attempt(Struct, eq=False):
    """An attempt under way since ``began_at``, in seconds of the event loop's clock.

    ``clock`` ends it; None while nothing is being sent. ``yields``: its place goes to another.
    """

    delivery: DueDelivery
    began_at: float
    clock: asyncio.Timeout | None = None
    yields: bool = False

    @property
    def client(self) -> str:
        """The client who named the webhook."""
        return self.delivery.webhook.client


class Deliverer:
    """Sends due messages. Only the process that settles runs it."""

    def __init__(
        self,
        store: WebhookStore,
        render: Render,
        send: Send,
        clock: Clock,
        places: Places = PLACES,
    ) -> None:
        self._store = store
        self._render = render
        self._send = send
        self._clock = clock
        self._places = places
        self._wake = asyncio.Event()
        self._last_look = 0
        self._is_crowded = False
        # By order id, the longest first; at most one message of an order is under way.
        self._running: dict[str, _Attempt] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def observe(self, _before: Order | None, _after: Order, _event: Event | None) -> None:
        """An event was committed (OrderProcessor.on_commit): it may have a message."""
        self._wake.set()

    def wake(self) -> None:
        """Look for messages that are due now."""
        self._wake.set()

    async def run(self) -> None:
        """Send due messages until cancelled: a message under way is then sent again later."""
        self._last_look = 0
        try:
            await self._store.bring_forward(self._clock.now_ms() + DAY_MS)
            while True:
                self._wake.clear()
                await self._look()
                await asyncio.sleep(LEAST_SECONDS)
                try:
                    async with asyncio.timeout(
                        CROWDED_SECONDS if self._is_crowded else POLL_SECONDS
                    ):
                        await self._wake.wait()
                except TimeoutError:
                    continue
        finally:
            under_way = list(self._tasks.values())
            for task in under_way:
                task.cancel()
            await asyncio.gather(*under_way, return_exceptions=True)

    async def _look(self) -> None:
        try:
            while await self.start_due():
                continue
        except Unavailable as error:
            log.warning("webhooks_not_read", reason=error.message)

    async def start_due(self) -> int:
        """Begin to send the due messages that have a place; return how many."""
        now = self._clock.now_ms()
        if now < self._last_look - DAY_MS // 24:  # the clock was set back
            await self._store.bring_forward(now + DAY_MS)
        self._last_look = now
        self._is_crowded = False
        if not await self._store.has_due(now):
            return 0
        known = await self._start_kind(now, is_known=True)
        return known + await self._start_kind(now, is_known=False)

    async def drain(self, order_id: str | None = None) -> None:
        """Wait until no message is under way, or none of an order."""
        while tasks := [task for name, task in self._tasks.items() if order_id in (None, name)]:
            await asyncio.wait(tasks)

    async def _start_kind(self, now: int, *, is_known: bool) -> int:
        """Begin to send to receivers of one kind."""
        places, under_way = self._places, dict(self._running)
        if self._is_full(is_known) and not self._yielding(is_known):
            self._is_crowded = True  # perhaps: what is due is read once there may be a place
            return 0
        of_receiver = Counter(each.delivery.webhook.receiver for each in under_way.values())
        of_client = Counter(each.client for each in under_way.values())
        found = await self._store.due(
            now,
            [name for name, count in of_receiver.items() if count >= places.of_receiver],
            is_known=is_known,
            most_of_client=2 * places.of_client,  # those under way are still pending in the store
            limit=_MOST_READ,
        )
        # One that ended meanwhile may have been read before its outcome was recorded.
        found = [each for each in found if each.order_id not in under_way]
        started, waiting = 0, list[int]()
        for turn, delivery in _in_turn(found, of_client):
            receiver, client = delivery.webhook.receiver, delivery.webhook.client
            if of_receiver[receiver] >= places.of_receiver or of_client[client] >= places.of_client:
                continue
            if waiting or self._is_full(is_known):
                waiting.append(turn)
                continue
            self._begin(delivery)
            of_receiver[receiver] += 1
            of_client[client] += 1
            started += 1
        if waiting:
            self._is_crowded = True
            self._make_room(waiting, is_known)
        return started

    def _is_full(self, is_known: bool) -> bool:
        """Return whether a receiver of a kind finds no place."""
        return len(self._running) >= self._places.most or self._is_kind_full(is_known)

    def _is_kind_full(self, is_known: bool) -> bool:
        kinds = (each.delivery.is_known for each in self._running.values())
        return sum(kind is is_known for kind in kinds) >= self._places.of_kind

    def _yielding(self, is_known: bool) -> list[_Attempt]:
        """Attempts that may make room for a receiver of a kind, or do so already."""
        kinds = (is_known,) if self._is_kind_full(is_known) else (True, False)
        latest = asyncio.get_running_loop().time() - self._places.patience
        return [
            each
            for each in self._running.values()
            if each.yields
            or (
                each.clock is not None
                and each.began_at <= latest
                and each.delivery.is_known in kinds
            )
        ]

    def _make_room(self, waiting: Sequence[int], is_known: bool) -> None:
        """End attempts of clients with more attempts than the waiting clients have, the longest
        first.

        ``waiting``: for each message without a place, how many messages of its client go before it.
        """
        now, attempts = asyncio.get_running_loop().time(), self._yielding(is_known)
        held = Counter(each.client for each in self._running.values() if not each.yields)
        for turn in waiting[sum(each.yields for each in attempts) :]:
            slow = [each for each in attempts if not each.yields]
            longest = max(slow, key=lambda each: held[each.client], default=None)
            if longest is None or longest.clock is None or held[longest.client] <= turn:
                return
            held[longest.client] -= 1
            longest.yields = True
            longest.clock.reschedule(now)

    def _begin(self, delivery: DueDelivery) -> None:
        order_id = delivery.order_id
        attempt = _Attempt(delivery, asyncio.get_running_loop().time())
        task = asyncio.create_task(self._deliver(attempt), name=f"webhook {order_id}")
        self._running[order_id], self._tasks[order_id] = attempt, task
        task.add_done_callback(lambda _task: self._end(order_id))

    def _end(self, order_id: str) -> None:
        del self._running[order_id], self._tasks[order_id]
        self._wake.set()

    async def _deliver(self, under_way: _Attempt) -> None:
        delivery = under_way.delivery
        order_id, sequence = delivery.order_id, delivery.sequence
        try:
            body = await self._render(order_id, sequence)
            attempt = await self._sent(under_way, body)
            now = self._clock.now_ms()
            verdict = judge(attempt, delivery.standing, now)
            await self._store.record(delivery, attempt, verdict, now)
        except Unavailable as error:
            log.warning("webhook_not_recorded", order_id=order_id, reason=error.message)
            await asyncio.sleep(BROKEN_SECONDS)  # in this order's turn: no other waits for it
            return
        except Exception:
            log.exception("webhook_failed", order_id=order_id, sequence=sequence)
            await asyncio.sleep(BROKEN_SECONDS)
            return
        if verdict.state == "dead":
            log.warning(
                "webhook_abandoned",
                order_id=order_id,
                sequence=sequence,
                receiver=delivery.webhook.receiver,
                reason=attempt.error,
            )

    async def _sent(self, under_way: _Attempt, body: bytes) -> DeliveryAttempt:
        """Send a message and return the outcome, also when the attempt has to yield its place."""
        delivery = under_way.delivery
        name = message_id(delivery.order_id, delivery.sequence)
        try:
            async with asyncio.timeout(None) as under_way.clock:
                return await self._send(delivery.webhook, name, body)
        except TimeoutError:
            seconds = asyncio.get_running_loop().time() - under_way.began_at
            return DeliveryAttempt(
                None, f"No answer within {seconds:.1f} s, and other messages waited."
            )
        finally:
            under_way.clock = None


def _in_turn(
    found: Iterable[DueDelivery], of_client: Mapping[str, int]
) -> list[tuple[int, DueDelivery]]:
    """Messages, each with how many of its client go before it, those under way included.

    Those with fewest go first.
    """
    before, turns = Counter(of_client), []
    for delivery in found:
        turns.append((before[delivery.webhook.client], delivery))
        before[delivery.webhook.client] += 1
    return sorted(turns, key=itemgetter(0))
