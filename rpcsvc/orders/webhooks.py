"""Delivers the events of orders to their webhooks: at least once, and in order for each order.

The messages are rows of the store, written by the commits of their events. One that was sent and
not recorded is sent again, with the same id.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from rpcsvc.clock import Clock
from rpcsvc.domain.events import Event
from rpcsvc.domain.order import Order
from rpcsvc.domain.webhooks import DAY_MS, DeliveryAttempt, Webhook, judge, message_id
from rpcsvc.errors import Unavailable
from rpcsvc.store.webhooks import DueDelivery, WebhookStore

log = structlog.get_logger(__name__)

MOST_AT_ONCE: Final = 64
# However slow a receiver is, it takes no more than these.
MOST_OF_RECEIVER: Final = 4
POLL_SECONDS: Final = 1.0
# Between two looks at the store, however often it is written.
LEAST_SECONDS: Final = 0.05
BROKEN_SECONDS: Final = 5.0
# Sends one message: to whom, its id, its body.
Send = Callable[[Webhook, str, bytes], Awaitable[DeliveryAttempt]]
# The body of an event's message, by order id and sequence.
Render = Callable[[str, int], Awaitable[bytes]]


class Deliverer:
    """Sends what is due. Only the process that settles runs it."""

    def __init__(
        self,
        store: WebhookStore,
        render: Render,
        send: Send,
        clock: Clock,
        *,
        most: int = MOST_AT_ONCE,
        most_of_receiver: int = MOST_OF_RECEIVER,
    ) -> None:
        self._store = store
        self._render = render
        self._send = send
        self._clock = clock
        self._most = most
        self._most_of_receiver = most_of_receiver
        self._wake = asyncio.Event()
        self._last_look = 0
        # By order id; at most one message of an order is under way.
        self._running: dict[str, asyncio.Task[None]] = {}
        self._of_receiver: Counter[str] = Counter()

    def observe(self, _before: Order | None, _after: Order, _event: Event | None) -> None:
        """An event was committed (OrderProcessor.on_commit): it may have a message."""
        self._wake.set()

    def wake(self) -> None:
        """Look for messages that are due now."""
        self._wake.set()

    async def run(self) -> None:
        """Send what is due, until cancelled: then what is under way is sent again later."""
        self._last_look = 0
        try:
            await self._store.hurry(self._clock.now_ms() + DAY_MS)
            while True:
                self._wake.clear()
                await self._look()
                await asyncio.sleep(LEAST_SECONDS)
                try:
                    async with asyncio.timeout(POLL_SECONDS):
                        await self._wake.wait()
                except TimeoutError:
                    continue
        finally:
            under_way = list(self._running.values())
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
        """Begin to send what is due and has room; returns how many messages."""
        now = self._clock.now_ms()
        if now < self._last_look - DAY_MS // 24:  # the clock was set back
            await self._store.hurry(now + DAY_MS)
        self._last_look = now
        room = self._most - len(self._running)
        if room <= 0:
            return 0
        # Those under way are still pending in the store.
        found = await self._store.due(now, room + len(self._running), self._busy())
        started = 0
        for delivery in found:
            receiver = delivery.webhook.receiver
            is_full = self._of_receiver[receiver] >= self._most_of_receiver
            if delivery.order_id in self._running or is_full or started >= room:
                continue
            self._begin(delivery)
            started += 1
        return started

    async def drain(self, order_id: str | None = None) -> None:
        """Wait until no message is under way, or none of an order."""
        while tasks := [task for name, task in self._running.items() if order_id in (None, name)]:
            await asyncio.wait(tasks)

    def _busy(self) -> list[str]:
        return [name for name, n in self._of_receiver.items() if n >= self._most_of_receiver]

    def _begin(self, delivery: DueDelivery) -> None:
        task = asyncio.create_task(self._deliver(delivery), name=f"webhook {delivery.order_id}")
        self._running[delivery.order_id] = task
        self._of_receiver[delivery.webhook.receiver] += 1
        task.add_done_callback(lambda _task: self._end(delivery))

    def _end(self, delivery: DueDelivery) -> None:
        receiver = delivery.webhook.receiver
        del self._running[delivery.order_id]
        self._of_receiver[receiver] -= 1
        if not self._of_receiver[receiver]:
            del self._of_receiver[receiver]
        self._wake.set()

    async def _deliver(self, delivery: DueDelivery) -> None:
        order_id, sequence = delivery.order_id, delivery.sequence
        try:
            body = await self._render(order_id, sequence)
            attempt = await self._send(delivery.webhook, message_id(order_id, sequence), body)
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
