"""Webhooks on each backend: messages written with commits, and their delivery."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_network
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.machine import transition
from rpcsvc.domain.order import DepositKey, Order
from rpcsvc.domain.webhooks import DAY_MS, DeliveryAttempt, Targets, Webhook
from rpcsvc.errors import Unavailable
from rpcsvc.orders.webhooks import PLACES, Deliverer, Places, Send
from rpcsvc.store.changes import Change, HistoryEntry
from rpcsvc.store.database import StoreConflict, Tables
from rpcsvc.store.orders import OrderStore
from rpcsvc.store.webhooks import WebhookStore
from rpcsvc.webhook_sender import webhook_sender
from tests.name_server import name_server
from tests.receiver import HOST, receiving
from tests.rows import statement
from tests.sandbox import ManualClock
from tests.unit.orders import NOW, VIEW, created, fresh

URL = "https://agent.example/hook"
HOOK = Webhook(URL)
OK = DeliveryAttempt(204)
DOWN = DeliveryAttempt(503, "Status 503.")
# An attempt yields its place after a second; the rest is for a busy machine.
REACHED_SECONDS = 3


class Box:
    """Orders with webhooks, a sender with scripted answers, and a manual clock."""

    def __init__(self, database: Tables) -> None:
        self.orders = OrderStore(database, lambda: "key")
        self.webhooks = WebhookStore(database)
        self.clock = ManualClock()
        self.sent: list[tuple[str, str]] = []
        self._came = asyncio.Condition()
        self.answer: Callable[[str, str], DeliveryAttempt] = lambda _url, _message: OK
        self.hold: dict[str, asyncio.Event] = {}
        self.sender: Send | None = None
        self.under_way: dict[str, int] = defaultdict(int)
        self.most_under_way: dict[str, int] = defaultdict(int)
        self.places = Places(most=8, of_kind=8, of_receiver=2)
        self.deliverer = self.restarted()

    def restarted(self) -> Deliverer:
        """A new deliverer, as after a restart."""
        return Deliverer(self.webhooks, self._render, self._send, self.clock, self.places)

    async def _render(self, order_id: str, sequence: int) -> bytes:
        return f"{order_id} {sequence}".encode()

    async def _send(self, webhook: Webhook, message_id: str, body: bytes) -> DeliveryAttempt:
        async with self._came:
            self.sent.append((webhook.url, message_id))
            self._came.notify_all()
        receiver = webhook.receiver
        self.under_way[receiver] += 1
        self.most_under_way[receiver] = max(self.most_under_way[receiver], self.under_way[receiver])
        try:
            if receiver in self.hold:
                await self.hold[receiver].wait()
            if self.sender is not None:
                return await self.sender(webhook, message_id, body)
            return self.answer(webhook.url, message_id)
        finally:
            self.under_way[receiver] -= 1

    async def until_sent(self, message: str | None = None) -> float:
        """Wait until a message is sent, by default any; how many seconds that takes."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        async with asyncio.timeout(30), self._came:
            await self._came.wait_for(
                lambda: bool(self.sent) if message is None else message in self.messages()
            )
        return loop.time() - began

    async def order(self, number: int, webhook: Webhook | None = HOOK) -> Order:
        order = fresh(number)
        await self.orders.commit(replace(created(order), webhook=webhook))
        return order

    async def happen(self, order: Order, *events: ev.Event, now: int = NOW) -> Order:
        for event in events:
            order = transition(order, event, now).order
            entry = HistoryEntry(order.version, now, "DepositSeen", order.status.value, {})
            await self.orders.commit(Change(order=order, view=VIEW, history=entry))
        return order

    async def deposited(self, number: int) -> Order:
        """An order with three events."""
        seen, confirmed = deposit(number)
        return await self.happen(await self.order(number), seen, confirmed)

    async def expired(self, number: int) -> Order:
        """An order that nobody paid."""
        order = await self.order(number)
        return await self.happen(order, ev.DeadlinePassed(), now=order.deadline_at or NOW)

    async def deliver(self) -> None:
        """Send all messages that are due now."""
        while await self.deliverer.start_due():
            await self.deliverer.drain()

    async def states(self, order_id: str = "ord_1") -> list[tuple[int, str, int]]:
        found = await self.webhooks.deliveries(order_id, 100)
        return [(each.sequence, each.state, each.attempts) for each in found]

    def messages(self) -> list[str]:
        return [message for _, message in self.sent]


def deposit(number: int) -> tuple[ev.Event, ev.Event]:
    key = DepositKey("monero", f"tx{number}", 0)
    return ev.DepositSeen(key, 10**12, None, NOW), ev.DepositConfirmed(key)


@pytest.fixture
def box(database: Tables) -> Box:
    return Box(database)


async def test_events_of_an_order_are_sent_once_and_in_order(box: Box) -> None:
    await box.deposited(1)
    await box.deliver()
    assert box.messages() == ["msg_1_1", "msg_1_2", "msg_1_3"]
    assert await box.states() == [(1, "delivered", 1), (2, "delivered", 1), (3, "delivered", 1)]
    assert (await box.webhooks.backlog()) == (0, None)


async def test_orders_without_a_webhook_have_no_messages(box: Box, database: Tables) -> None:
    order = await box.order(1, None)
    await box.happen(order, *deposit(1))
    assert await database.fetch("SELECT * FROM webhook_deliveries") == []
    assert await box.webhooks.webhook("ord_1") is None


async def test_a_webhook_is_committed_with_its_order_or_not_at_all(box: Box) -> None:
    await box.order(1)
    with pytest.raises(StoreConflict):
        await box.order(1)
    orders = [box.order(number, HOOK if number % 2 else None) for number in range(2, 30)]
    await asyncio.gather(*orders)  # in one group of writes
    for number in range(2, 30):
        expected = [(1, "pending", 0)] if number % 2 else []
        assert await box.states(f"ord_{number}") == expected


async def test_a_failure_holds_back_only_its_own_order(box: Box) -> None:
    await box.deposited(1)
    await box.deposited(2)
    box.answer = lambda _url, message: DOWN if message.startswith("msg_1_") else OK
    await box.deliver()
    assert await box.states("ord_1") == [(1, "pending", 1), (2, "pending", 0), (3, "pending", 0)]
    assert [state for _, state, _ in await box.states("ord_2")] == ["delivered"] * 3
    assert (await box.webhooks.backlog()).pending == 3
    box.answer = lambda _url, _message: OK
    box.sent.clear()
    await box.deliver()
    assert box.sent == []  # not before its time
    box.clock.now += 5_000
    await box.deliver()
    assert box.messages() == ["msg_1_1", "msg_1_2", "msg_1_3"]
    assert (await box.states("ord_1"))[0] == (1, "delivered", 2)


async def test_pauses_double_until_a_day_is_over(box: Box) -> None:
    await box.deposited(1)
    box.answer = lambda _url, _message: DOWN
    began = box.clock.now
    times = []
    while (await box.states())[0][1] == "pending":
        before = len(box.sent)
        await box.deliver()
        times += [box.clock.now - began] * (len(box.sent) - before)
        (waiting,) = await box.webhooks.deliveries("ord_1", 1)
        box.clock.now = max(box.clock.now, waiting.due_at)
    pauses = [after - before for before, after in pairwise(times)]
    assert pauses[:4] == [5_000, 10_000, 20_000, 40_000]
    # The last attempt is made after a day; the order's other messages are then tried once each.
    assert times[-3:] == [DAY_MS] * 3
    assert [state for _, state, _ in await box.states()] == ["dead"] * 3
    assert [attempts for _, _, attempts in await box.states()][1:] == [1, 1]


async def test_order_without_a_deposit_is_18_requests_at_most(box: Box) -> None:
    """An order's events are its creation, the end of its price lock, and its end (webhooks.md)."""
    order = await box.happen(await box.order(1), ev.LockBroken(1))
    await box.happen(order, ev.DeadlinePassed(), now=order.deadline_at or NOW)
    box.answer = lambda _url, _message: DOWN
    while any(state == "pending" for _, state, _ in await box.states()):
        await box.deliver()
        waiting = await box.webhooks.deliveries("ord_1", 100)
        box.clock.now = max(box.clock.now, *(each.due_at for each in waiting))
    assert [attempts for _, _, attempts in await box.states()] == [16, 1, 1]
    box.clock.now += 10 * DAY_MS
    await box.deliver()
    assert len(box.sent) == 18


async def test_returned_receiver_gets_remaining_messages(box: Box) -> None:
    order = await box.order(1)
    box.answer = lambda _url, _message: DOWN
    await box.deliver()
    box.clock.now += DAY_MS
    await box.deliver()
    assert await box.states() == [(1, "dead", 2)]
    box.answer = lambda _url, _message: OK
    await box.happen(order, *deposit(1))
    await box.deliver()
    assert await box.states() == [(1, "dead", 2), (2, "delivered", 1), (3, "delivered", 1)]
    webhook = await box.webhooks.webhook("ord_1")
    assert webhook is not None
    assert webhook.failing_since is None


async def test_events_behind_a_failure_wait_with_it(box: Box) -> None:
    order = await box.order(1)
    box.answer = lambda _url, _message: DOWN
    await box.deliver()
    await box.happen(order, *deposit(1))
    await box.deliver()
    assert box.messages() == ["msg_1_1"]


async def test_retry_after_is_honoured(box: Box) -> None:
    await box.order(1)
    box.answer = lambda _url, _message: DeliveryAttempt(429, "Status 429.", 600_000)
    await box.deliver()
    for passed, count in ((599_999, 1), (1, 2)):
        box.clock.now += passed
        await box.deliver()
        assert len(box.sent) == count


async def test_410_ends_the_webhook_and_a_replay_opens_it(box: Box) -> None:
    order = await box.deposited(1)
    box.answer = lambda _url, _message: DeliveryAttempt(410, "Status 410.")
    await box.deliver()
    assert box.messages() == ["msg_1_1"]
    assert await box.states() == [(1, "dead", 1), (2, "dead", 0), (3, "dead", 0)]
    webhook = await box.webhooks.webhook("ord_1")
    assert webhook is not None
    assert webhook.ended_at == box.clock.now
    order = await box.happen(order, ev.TransferPrepared("ord_1/payout/1", "txid", "00"))
    assert len(await box.states()) == 3  # no further messages are written for it
    box.answer = lambda _url, _message: OK
    assert await box.webhooks.replay("ord_1", None) == 3
    await box.happen(order, ev.TransferPublished("ord_1/payout/1"))
    await box.deliver()
    assert [sequence for sequence, state, _ in await box.states() if state == "delivered"] == [
        1, 2, 3, 5,
    ]  # fmt: skip


@pytest.mark.parametrize("answer", [None, DOWN], ids=["untried", "failing"])
async def test_cancelling_an_unfunded_order_ends_its_webhook(
    box: Box, answer: DeliveryAttempt | None
) -> None:
    order = await box.order(1)
    if answer is not None:
        box.answer = lambda _url, _message: answer
        await box.deliver()
    await box.happen(order, ev.Cancelled())
    box.clock.now += DAY_MS
    box.sent.clear()
    await box.deliver()
    assert box.sent == []
    assert [state for _, state, _ in await box.states()] == ["dead", "dead"]
    webhook = await box.webhooks.webhook("ord_1")
    assert webhook is not None
    assert webhook.ended_at is not None


async def test_cancelled_order_ends_its_webhook_at_the_first_failure(box: Box) -> None:
    order = await box.order(1)
    await box.deliver()
    await box.happen(order, ev.Cancelled())
    box.answer = lambda _url, _message: DOWN
    await box.deliver()
    assert box.messages() == ["msg_1_1", "msg_1_2"]
    assert await box.states() == [(1, "delivered", 1), (2, "dead", 1)]
    assert (await box.webhooks.backlog()).pending == 0


async def test_answer_after_the_end_does_not_open_a_webhook(box: Box) -> None:
    box.hold[HOOK.receiver] = asyncio.Event()
    order = await box.order(1)
    assert await box.deliverer.start_due() == 1
    await box.until_sent("msg_1_1")
    await box.happen(order, ev.Cancelled())
    box.hold[HOOK.receiver].set()
    await box.deliverer.drain()
    webhook = await box.webhooks.webhook("ord_1")
    assert webhook is not None
    assert webhook.ended_at is not None
    assert [state for _, state, _ in await box.states()] == ["dead", "dead"]


@pytest.mark.parametrize("ending", ["funded", "expired"])
async def test_other_ends_of_an_order_leave_its_webhook(box: Box, ending: str) -> None:
    box.answer = lambda _url, _message: DOWN
    if ending == "funded":
        order = await box.deposited(1)
        await box.deliver()
        await box.happen(order, ev.TransferPrepared("ord_1/payout/1", "txid", "00"))
    else:
        await box.expired(1)
        await box.deliver()
    assert {state for _, state, _ in await box.states()} == {"pending"}


async def test_replay_sends_one_message_again(box: Box) -> None:
    await box.deposited(1)
    await box.deliver()
    assert await box.webhooks.replay("ord_1", None) == 0
    assert await box.webhooks.replay("ord_1", 9) == 0
    assert await box.webhooks.replay("ord_1", 2) == 1
    await box.deliver()
    assert box.messages()[-1] == "msg_1_2"
    assert (await box.states())[1] == (2, "delivered", 2)


async def test_a_slow_receiver_holds_up_no_other(box: Box) -> None:
    slow = Webhook("https://slow.example/hook")
    box.hold[slow.receiver] = asyncio.Event()
    for number in range(20):
        await box.order(number, slow)
    await box.order(99)
    assert await box.deliverer.start_due() == 2  # all found ones are of one receiver
    assert await box.deliverer.start_due() == 1
    await box.deliverer.drain("ord_99")
    assert await box.states("ord_99") == [(1, "delivered", 1)]
    box.hold[slow.receiver].set()
    await box.deliverer.drain()
    await box.deliver()
    assert box.most_under_way[slow.receiver] == 2
    assert (await box.webhooks.backlog()).pending == 0


async def test_no_more_than_some_are_under_way(box: Box) -> None:
    for number in range(20):
        webhook = Webhook(f"https://host{number}.example/")
        box.hold[webhook.receiver] = asyncio.Event()
        await box.order(number, webhook)
    assert await box.deliverer.start_due() == 8
    assert await box.deliverer.start_due() == 0
    for event in box.hold.values():
        event.set()
    await box.deliverer.drain()
    await box.deliver()
    assert len(box.sent) == len(set(box.sent)) == 20


def named(clients: int, hosts: int) -> list[Webhook]:
    """Webhooks at so many hosts that never answer, named by so many clients."""
    return [
        Webhook(f"https://silent{number}.example/", client=f"client{number % clients}")
        for number in range(hosts)
    ]


@asynccontextmanager
async def beside(box: Box, webhooks: list[Webhook]) -> AsyncIterator[None]:
    """The deliverer runs, and has begun to send to these webhooks."""
    box.places = PLACES
    box.deliverer = box.restarted()
    await asyncio.gather(*(box.order(1_000 + number, each) for number, each in enumerate(webhooks)))
    box.sent.clear()
    running = asyncio.create_task(box.deliverer.run())
    await box.until_sent()
    yield
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@pytest.mark.parametrize("clients", [1, 40, 400])
async def test_receiver_is_reached_beside_400_silent_hosts(box: Box, clients: int) -> None:
    hosts = named(clients, 400)
    box.hold |= dict.fromkeys((each.receiver for each in hosts), asyncio.Event())
    async with beside(box, hosts):
        await box.order(1, Webhook(URL, client="honest"))
        box.deliverer.wake()
        assert await box.until_sent("msg_1_1") < REACHED_SECONDS


@pytest.mark.parametrize("clients", [1, 12, 120])
async def test_receiver_is_reached_beside_silent_name_servers(
    box: Box, clients: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names of 120 other hosts have no answer; the receiver and its name server are real."""
    targets = Targets((ip_network("127.0.0.1/32"),))
    async with (
        receiving(tmp_path) as receiver,
        name_server({HOST: [["127.0.0.1"]]}) as names,
        webhook_sender(targets, None, box.clock, name_servers=[names.address]) as sender,
    ):
        monkeypatch.setenv("SSL_CERT_FILE", str(receiver.ca_file))
        box.sender = sender.send
        async with beside(box, named(clients, 120)):
            await box.order(1, Webhook(f"https://{HOST}:{receiver.port}/", client="honest"))
            box.deliverer.wake()
            await receiver.until(1, seconds=REACHED_SECONDS)


async def test_known_receiver_is_reached_at_once(box: Box) -> None:
    """A receiver that answered last time, in any client's order, has places of its own."""
    await box.order(1, Webhook(URL, client="client0"))
    await box.deliver()
    hosts = named(400, 400)
    box.hold |= dict.fromkeys((each.receiver for each in hosts), asyncio.Event())
    async with beside(box, hosts):
        await box.order(2, Webhook(f"{URL}/other", client="client1"))
        box.deliverer.wake()
        assert await box.until_sent("msg_2_1") < PLACES.patience / 2


async def test_attempt_that_yields_its_place_is_made_again(box: Box) -> None:
    box.places = Places(most=2, of_kind=2, of_client=2, patience=0)
    box.deliverer = box.restarted()
    greedy = [Webhook(f"https://silent{number}.example/", client="greedy") for number in (1, 2)]
    for number, webhook in enumerate(greedy, 1):
        box.hold[webhook.receiver] = asyncio.Event()
        await box.order(number, webhook)
    assert await box.deliverer.start_due() == 2
    await box.until_sent("msg_2_1")
    await box.order(3, Webhook(URL, client="modest"))
    assert await box.deliverer.start_due() == 0
    await box.deliverer.drain("ord_1")
    assert await box.deliverer.start_due() == 1
    await box.deliverer.drain("ord_3")
    (first,) = await box.webhooks.deliveries("ord_1", 1)
    assert (first.state, first.attempts, first.due_at) == ("pending", 1, box.clock.now + 5_000)
    assert "other messages waited" in (first.error or "")
    assert await box.states("ord_2") == [(1, "pending", 0)]
    assert await box.states("ord_3") == [(1, "delivered", 1)]


async def test_client_with_as_many_attempts_ends_none(box: Box) -> None:
    box.places = Places(most=2, of_kind=2, of_client=2, patience=0)
    box.deliverer = box.restarted()
    for number, client in enumerate(("one", "other", "one"), 1):
        webhook = Webhook(f"https://silent{number}.example/", client=client)
        box.hold[webhook.receiver] = asyncio.Event()
        await box.order(number, webhook)
    assert await box.deliverer.start_due() == 2
    await box.until_sent("msg_2_1")
    assert await box.deliverer.start_due() == 0
    box.hold["silent2.example:443"].set()
    await box.deliverer.drain("ord_2")
    assert await box.states("ord_2") == [(1, "delivered", 1)]
    assert await box.states("ord_1") == await box.states("ord_3") == [(1, "pending", 0)]


async def test_what_was_sent_and_not_recorded_is_sent_again(
    box: Box, monkeypatch: pytest.MonkeyPatch
) -> None:
    await box.order(1)
    with monkeypatch.context() as patched:
        patched.setattr(box.webhooks, "record", _unavailable)
        patched.setattr("rpcsvc.orders.webhooks.BROKEN_SECONDS", 0)
        assert await box.deliverer.start_due() == 1
        await box.deliverer.drain()
    assert await box.states() == [(1, "pending", 0)]
    box.deliverer = box.restarted()
    await box.deliver()
    assert box.messages() == ["msg_1_1"] * 2
    assert await box.states() == [(1, "delivered", 1)]


async def _unavailable(*_args: object) -> None:
    raise Unavailable("The disk is full.")


async def test_a_clock_that_is_set_back_delays_nothing_for_long(box: Box) -> None:
    await box.order(1)
    box.answer = lambda _url, _message: DOWN
    await box.deliver()
    box.clock.now -= 30 * DAY_MS
    await box.deliver()
    assert len(box.sent) == 2


async def test_run_sends_what_comes_and_ends_with_its_worker(box: Box) -> None:
    running = asyncio.create_task(box.deliverer.run())
    order = await box.order(1)
    box.deliverer.observe(None, order, None)
    async with asyncio.timeout(30):
        await box.until_sent("msg_1_1")
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_pruning_an_unpaid_order_drops_its_webhook(box: Box, database: Tables) -> None:
    order = await box.order(1)
    order = await box.happen(order, ev.Cancelled())
    assert await box.orders.prune_unpaid(NOW + DAY_MS, 10, 10) == 1
    for table in ("webhooks", "webhook_deliveries"):
        assert await database.fetch(f"SELECT * FROM {table}") == []


async def test_webhooks_of_orders_that_are_over_are_forgotten(box: Box) -> None:
    await box.expired(1)
    ended = await box.expired(2)
    await box.order(3)
    box.answer = lambda _url, message: DOWN if message.startswith("msg_2_") else OK
    await box.deliver()
    assert await box.orders.forget_webhooks(ended.status_at) == 0
    # One is open, of one a message waits.
    assert await box.orders.forget_webhooks(NOW + DAY_MS) == 1
    assert await box.webhooks.webhook("ord_1") is None
    assert await box.webhooks.webhook("ord_2") is not None
    assert await box.webhooks.webhook("ord_3") is not None


@pytest.mark.parametrize(
    "sql",
    [
        "UPDATE webhooks SET url = 'https://thief.example/'",
        "UPDATE webhooks SET secret = 'another'",
        "UPDATE webhooks SET failures = 1",
        "UPDATE webhook_deliveries SET state = 'delivered', attempts = 1, tried_at = 1",
        "UPDATE webhook_deliveries SET state = 'delivered', status = 500",
        "UPDATE webhook_deliveries SET state = 'sent'",
        "UPDATE webhook_deliveries SET attempts = 1",
        "INSERT INTO webhook_deliveries SELECT order_seq + 1, version, state, due_at, attempts,"
        " tried_at, status, error FROM webhook_deliveries",
        "DELETE FROM webhooks",
    ],
)
async def test_database_refuses_impossible_webhook_rows(
    box: Box, database: Tables, sql: str
) -> None:
    await box.order(1)
    with pytest.raises(StoreConflict):
        await database.write([statement(sql, ())])
