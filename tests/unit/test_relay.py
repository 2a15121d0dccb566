"""Orders at an upstream: claims in doubt stay on record with all known details."""

from __future__ import annotations

import asyncio
import sqlite3
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

import rpcsvc.settlement.upstream.relay as relay_module
from rpcsvc.domain.chains import load_chains
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.money import XMR, Money
from rpcsvc.domain.order import OrderStatus, Report, Terms
from rpcsvc.domain.pricing import Direction
from rpcsvc.domain.reservations import UPSTREAM, Admission, Reservation
from rpcsvc.errors import IdempotencyConflict, OrderNotFound, Unavailable
from rpcsvc.health import Health
from rpcsvc.orders.idempotency import Claim
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.settings_onchain import chains_toml
from rpcsvc.settlement.upstream.follower import LONGEST_PAUSE_MS, Follower
from rpcsvc.settlement.upstream.relay import Asking, Relay
from rpcsvc.settlement.upstream.requests import (
    Created,
    CreationUnknown,
    UpstreamRequest,
    UpstreamResting,
    UpstreamStatus,
)
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, UNAVAILABLE, SqliteDatabase
from rpcsvc.store.changes import Change, RelayRecord, RelayState, StoredResponse
from rpcsvc.store.database import StaleWrite, Statement
from rpcsvc.store.operator_books import OperatorBooks
from rpcsvc.store.orders import OrderStore
from tests.e2e.processes import until
from tests.sandbox import HOUR_MS, ManualClock
from tests.unit.orders import terms

ARBITRUM = load_chains(chains_toml(None)).resolve("arbitrum")
ASKED = UpstreamRequest(Direction.XMR_TO_USDC, ARBITRUM, Money(10**12, XMR), "0x1", "session")
CLAIM = Claim("public", "mine", "swap.create", {"to": "0x1", "sessionId": "session"})
ANSWER = StoredResponse(CLAIM.namespace, CLAIM.key, CLAIM.operation, CLAIM.params, b"{}", 1)
MADE = Created("up-1", "an address", 2**53, b'{"orderId": "up-1"}', expected_output=1)


class ScriptedUpstream:
    """An upstream with idempotency keys and scripted answers."""

    honours_keys = True

    def __init__(self) -> None:
        self.answers: deque[Created | Exception] = deque()
        self.asked: list[str] = []
        self.unreadable: dict[str, Exception] = {}
        self.meanwhile: Callable[[], Awaitable[object]] | None = None

    async def create(self, _asked: UpstreamRequest, _key: str, *, resumed: bool) -> Created:
        if self.meanwhile is not None:
            await self.meanwhile()
        answer = self.answers.popleft()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def remember(self, _ages_ms: list[int]) -> None:
        pass

    async def status(self, terms: Terms, *, is_watched: bool) -> UpstreamStatus:
        upstream_id = terms.upstream_id or ""
        self.asked.append(upstream_id)
        if upstream_id in self.unreadable:
            raise self.unreadable[upstream_id]
        return UpstreamStatus(OrderStatus.AWAITING_DEPOSIT, Report(), b"{}")


def asking(order_id: str) -> Asking:
    reservation = Reservation(UPSTREAM, 1, "", "monero", 10**15)
    return Asking(order_id, reservation, Admission(""))


class World:
    """A relay with a real store."""

    def __init__(self, database: SqliteDatabase, path: Path) -> None:
        self.path = path
        self.upstream, self.clock = ScriptedUpstream(), ManualClock()
        self.store = OrderStore(database, lambda: "key")
        self.books = OperatorBooks(database)
        processor = OrderProcessor(self.store, self.clock, lambda _order: None)
        self.processor = processor
        upstream = cast("Any", self.upstream)
        self.follower = Follower(self.store, processor, upstream, self.clock)
        self.relay = Relay(self.store, upstream, self.clock, self.follower.follow)
        # that of another replica on the same database
        self.other = Relay(self.store, upstream, self.clock, self.follower.follow)
        self.database = database

    async def create(self, fresh_id: str, answer: Created | Exception) -> RelayRecord:
        self.upstream.answers.append(answer)
        return (await self.relay.create(ASKED, CLAIM, asking(fresh_id)))[0]

    async def other_create(self, fresh_id: str, answer: Created | Exception) -> RelayRecord:
        self.upstream.answers.append(answer)
        return (await self.other.create(ASKED, CLAIM, asking(fresh_id)))[0]

    async def follow(self, *names: str) -> None:
        """Add orders that are open at the upstream, with their names as ids."""
        for name in names:
            agreed = replace(
                terms(), order_id=name, upstream_id=name, deposit_address=f"address of {name}"
            )
            await self.processor.open(open_order(agreed), None, None)
            self.follower.follow(name)

    async def ask_for(self, for_ms: int) -> Counter[str]:
        """The number of calls for each order within ``for_ms``; a call takes 50 ms."""
        self.upstream.asked.clear()
        end = self.clock.now + for_ms
        while self.clock.now < end:
            self.clock.now += max(50, await self.follower.ask_next())
        return Counter(self.upstream.asked)

    def note(self) -> str | None:
        """The operator's note on the only claim, read as by another process."""
        with closing(sqlite3.connect(self.path / DATABASE_NAME)) as books:
            ((note,),) = books.execute("SELECT note FROM relays")
            return note if note is None else str(note)

    async def record(self) -> RelayRecord:
        found = await self.store.relay_of_key(CLAIM.namespace, CLAIM.key)
        assert found is not None
        return found


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    database = await SqliteDatabase.open(tmp_path)
    yield World(database, tmp_path)
    await database.close()


async def test_what_was_known_of_an_order_in_doubt_stays_known(world: World) -> None:
    shown = CreationUnknown("half an order", upstream_id="up-1", raw=b"half")
    silent = CreationUnknown("no answer")
    for answer in (shown, silent):
        with pytest.raises(Unavailable):
            await world.create("ord_1", answer)
    record = await world.record()
    assert (record.state, record.reason) == (RelayState.RECONCILING, "no answer")
    assert (record.upstream_id, record.raw) == ("up-1", b"half")


async def test_key_in_doubt_belongs_to_the_call_that_first_used_it(world: World) -> None:
    with pytest.raises(Unavailable):
        await world.create("ord_1", CreationUnknown("no answer"))
    other = replace(CLAIM, params={"to": "0x2", "sessionId": "a stranger's"})

    with pytest.raises(IdempotencyConflict) as reported:
        await world.relay.create(replace(ASKED, to="0x2"), other, asking("ord_2"))

    assert reported.value.details == {"fields": ["sessionId", "to"]}
    assert (await world.create("ord_3", MADE)).order_id == "ord_1"


async def test_a_key_in_doubt_from_before_its_use_was_kept_is_resumed(world: World) -> None:
    old = RelayRecord("ord_1", RelayState.RECONCILING, 1, "session", CLAIM.namespace, CLAIM.key)
    await world.store.commit(Change(relay=old))

    assert (await world.create("ord_2", MADE)).order_id == "ord_1"


async def test_unknown_outcome_that_expired_frees_its_key(
    world: World,
) -> None:
    with pytest.raises(Unavailable):
        await world.create("ord_1", CreationUnknown("no answer"))

    with pytest.raises(Unavailable, match="for another order"):
        await world.create("ord_2", MADE._replace(expires_at=world.clock.now))

    record = await world.record()
    assert (record.order_id, record.state) == ("ord_1", RelayState.REFUSED)
    assert (record.upstream_id, record.raw) == ("up-1", MADE.raw)
    assert (await world.relay.health()).ok
    assert (await world.create("ord_3", MADE)).order_id == "ord_3"


async def test_current_price_does_not_judge_an_earlier_calls_order(
    world: World,
) -> None:
    with pytest.raises(Unavailable):
        await world.create("ord_1", CreationUnknown("no answer"))
    world.upstream.answers.append(MADE)
    least = (MADE.expected_output or 0) + 1

    made, _ = await world.relay.create(ASKED, CLAIM, asking("ord_2"), least=least)

    assert (made.order_id, made.state) == ("ord_1", RelayState.CREATED)


async def test_unexpected_failure_of_a_call_is_in_doubt(world: World) -> None:
    with pytest.raises(Unavailable):
        await world.create("ord_1", KeyError("unforeseen"))
    assert (await world.record()).state is RelayState.RECONCILING
    assert not (await world.relay.health()).ok


async def test_what_can_not_be_recorded_is_in_doubt_with_its_id(world: World) -> None:
    made = await world.create("ord_1", MADE)
    with pytest.raises(Unavailable):
        async with world.relay.recording(made):
            raise KeyError("another order has that address")
    record = await world.record()
    assert (record.state, record.upstream_id) == (RelayState.RECONCILING, "up-1")
    assert record.raw == MADE.raw


async def test_a_store_that_is_down_leaves_the_claim_to_the_next_start(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def down(*_changes: Change) -> None:
        raise Unavailable("disk full")

    made = await world.create("ord_1", MADE)
    with monkeypatch.context() as patched, pytest.raises(Unavailable):
        patched.setattr(world.store, "commit", down)
        async with world.relay.recording(made):
            await world.store.commit(Change(relay=made))
    assert (await world.record()).state is RelayState.CLAIMED

    await world.relay.recover(is_alone=True)

    assert (await world.record()).state is RelayState.RECONCILING


class Failing:
    """A store whose writes fail while the test says so."""

    def __init__(self, store: OrderStore, *, after: int) -> None:
        self._commit, self.left = store.commit, after

    async def commit(self, *changes: Change) -> None:
        """Commit, or raise as the store does on a full disk."""
        if self.left <= 0:
            raise Unavailable(UNAVAILABLE)
        self.left -= 1
        await self._commit(*changes)


async def test_claim_whose_call_is_made_again_can_not_be_closed(world: World) -> None:
    with pytest.raises(Unavailable):
        await world.create("ord_1", CreationUnknown("no answer"))
    closed = []

    async def close() -> None:
        closed.append(await world.books.close_claim("ord_1", "looked up, not there"))

    world.upstream.meanwhile = close
    await world.create("ord_2", MADE)

    assert closed == [False]


@pytest.mark.parametrize("ends", [CreationUnknown("no answer again"), MADE], ids=["doubt", "order"])
async def test_the_operators_note_outlives_a_call_that_was_under_way(
    world: World, ends: Created | Exception
) -> None:
    """The call exceeds its time limit and counts as lost, and its claim is closed."""

    async def close() -> None:
        await world.relay.recover(is_alone=True)
        assert await world.books.close_claim("ord_1", "looked up, not there")

    world.upstream.meanwhile = close
    with suppress(Unavailable):
        made = await world.create("ord_1", ends)
        await world.store.commit(Change(relay=made))

    state = RelayState.CREATED if ends is MADE else RelayState.RECONCILING
    assert ((await world.record()).order_id, (await world.record()).state) == ("ord_1", state)
    assert world.note() == "looked up, not there"


async def age(world: World, by_ms: int) -> None:
    await world.database.write(
        [Statement("UPDATE relays SET written_at = written_at - :by_ms", {"by_ms": by_ms})]
    )


async def test_only_a_claim_older_than_any_call_is_in_doubt(world: World) -> None:
    claimed = RelayRecord("ord_1", RelayState.CLAIMED, 1, "session", CLAIM.namespace, CLAIM.key)
    await world.store.commit(Change(relay=claimed))
    await age(world, relay_module.ABANDONED_MS - 60_000)
    await world.relay.find()
    assert (await world.record()).state is RelayState.CLAIMED

    await age(world, 60_000)
    await world.other.find()
    assert (await world.record()).state is RelayState.RECONCILING


async def test_call_that_another_replica_makes_is_waited_for(world: World) -> None:
    """One of two replicas with one key calls the upstream; both answer with its order."""
    calls: list[str] = []
    second: list[asyncio.Task[Any]] = []

    async def meanwhile() -> None:
        calls.append("asked")
        second.append(asyncio.create_task(world.other.create(ASKED, CLAIM, asking("ord_2"))))
        await asyncio.sleep(0.1)
        assert not second[0].done()

    world.upstream.meanwhile = meanwhile
    made = await world.create("ord_1", MADE)
    async with world.relay.recording(made):
        await world.store.commit(Change(relay=made))
    with pytest.raises(StaleWrite):
        await second[0]
    assert calls == ["asked"]


async def test_two_claims_at_once_for_one_key_ask_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have found no claim before either is committed."""
    both = asyncio.Barrier(2)
    commit = world.store.commit

    async def together(*changes: Change) -> None:
        if changes[0].relay is not None and changes[0].relay.state is RelayState.CLAIMED:
            await both.wait()
        await commit(*changes)

    monkeypatch.setattr(world.store, "commit", together)
    world.upstream.answers.append(MADE)
    ended = await asyncio.gather(
        world.relay.create(ASKED, CLAIM, asking("ord_1")),
        world.other.create(ASKED, CLAIM, asking("ord_2")),
        return_exceptions=True,
    )
    assert sorted(type(each).__name__ for each in ended) == ["StaleWrite", "tuple"]


async def test_late_refusal_leaves_a_claim_that_is_called_again(world: World) -> None:
    """The first caller was paused and counts as lost; another one repeats its call."""
    late = RelayRecord("ord_1", RelayState.CLAIMED, 1, "session", CLAIM.namespace, CLAIM.key)
    await world.store.commit(Change(relay=late))
    await world.relay.recover(is_alone=True)

    async def refuse() -> None:
        for state in (RelayState.REFUSED, RelayState.RECONCILING):
            await world.store.commit(Change(relay=replace(late, state=state)))
            assert (await world.record()).state is RelayState.CLAIMED

    world.upstream.meanwhile = refuse
    assert (await world.create("ord_2", MADE)).order_id == "ord_1"


async def test_late_order_is_recorded_and_keeps_what_it_reserves(world: World) -> None:
    """Its caller counted as lost, and another replica made the same order once more."""
    late = await world.create("ord_1", MADE)
    await world.relay.recover(is_alone=True)
    world.upstream.answers.append(MADE)
    again, _ = await world.other.create(ASKED, CLAIM, asking("ord_2"))
    order = open_order(replace(terms(), order_id="ord_1", upstream_id="up-1"))
    async with world.relay.recording(late):
        await world.processor.open(order, None, ANSWER, relay=late)
    with pytest.raises(StaleWrite):
        async with world.other.recording(again):
            await world.processor.open(order, None, ANSWER, relay=again)

    await world.store.commit(Change(relay=replace(again, state=RelayState.RECONCILING)))
    assert (await world.record()).state is RelayState.CREATED
    assert await world.store.reserved_by("ord_1", UPSTREAM) > 0


async def test_doubt_of_a_closed_claim_stays_beside_the_next_call(world: World) -> None:
    first = await world.create("ord_1", MADE)
    await world.relay.recover(is_alone=True)
    assert await world.books.close_claim("ord_1", "not there")
    await world.other_create("ord_2", MADE)

    with pytest.raises(Unavailable):
        async with world.relay.recording(first):
            raise KeyError("another order has that address")

    assert (await world.record()).order_id == "ord_2"
    (doubt,) = await world.store.relays_in(RelayState.RECONCILING)
    assert (doubt.order_id, doubt.upstream_id, doubt.key) == ("ord_1", "up-1", None)


async def test_call_that_is_cut_off_is_in_doubt_at_once(world: World) -> None:
    is_asked = asyncio.Event()

    async def asked_for_long() -> None:
        is_asked.set()
        await asyncio.sleep(60)

    world.upstream.meanwhile = asked_for_long
    calling = asyncio.create_task(world.create("ord_1", MADE))
    await is_asked.wait()
    calling.cancel()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert (await world.record()).state is RelayState.RECONCILING


async def test_orders_that_another_replica_made_are_followed(world: World) -> None:
    await world.follow("here")
    agreed = replace(terms(), order_id="there", upstream_id="there", deposit_address="of there")
    await world.processor.open(open_order(agreed), None, None)
    await world.follower.find()

    asked = await world.ask_for(10_000)

    assert min(asked[name] for name in ("here", "there")) >= 8
    assert max(asked.values()) <= 11


async def test_every_note_of_the_operator_stays(world: World) -> None:
    with pytest.raises(Unavailable):
        await world.create("ord_1", CreationUnknown("no answer"))
    doubt = await world.record()
    assert await world.books.close_claim("ord_1", "not there")
    await world.store.commit(Change(relay=doubt))
    assert await world.books.close_claim("ord_1", "still not there")

    assert world.note() == "not there; still not there"


async def test_a_claim_that_became_an_order_is_never_in_doubt_again(world: World) -> None:
    made = await world.create("ord_1", MADE)
    await world.store.commit(Change(relay=made))

    await world.store.commit(Change(relay=replace(made, state=RelayState.RECONCILING)))

    assert await world.record() == made


async def test_unstored_unknown_outcome_is_reported_and_stored_later(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing = Failing(world.store, after=1)
    monkeypatch.setattr(world.store, "commit", failing.commit)

    with pytest.raises(Unavailable, match="Don't order the same under another key"):
        await world.create("ord_1", CreationUnknown("no answer", upstream_id="up-1"))

    assert (await world.record()).state is RelayState.CLAIMED
    assert "1 upstream orders are in doubt" in str((await world.relay.health()).detail)
    await world.relay.write_remembered()
    assert (await world.record()).state is RelayState.CLAIMED

    failing.left = 1
    await world.relay.write_remembered()

    assert ((await world.record()).state, (await world.record()).upstream_id) == (
        RelayState.RECONCILING,
        "up-1",
    )
    assert "1 upstream orders are in doubt" in str((await world.relay.health()).detail)
    await world.relay.write_remembered()  # no outcomes are left to write
    assert await world.books.close_claim("ord_1", "not made there")


async def test_doubt_is_written_by_the_round_without_followed_orders(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(relay_module, "WRITE_EVERY_MS", 1)
    failing = Failing(world.store, after=1)
    monkeypatch.setattr(world.store, "commit", failing.commit)
    following = asyncio.create_task(world.relay.run())
    with pytest.raises(Unavailable):
        await world.create("ord_1", CreationUnknown("no answer"))

    failing.left = 1

    async def is_written() -> bool:
        return (await world.record()).state is RelayState.RECONCILING

    assert await until(is_written)
    following.cancel()


async def test_unwritten_doubt_is_over_once_the_order_is_made(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(world.store, "commit", Failing(world.store, after=1).commit)
        with pytest.raises(Unavailable):
            await world.create("ord_1", CreationUnknown("no answer"))

    made = await world.create("ord_2", MADE)
    async with world.relay.recording(made):
        await world.store.commit(Change(relay=made))
    await world.relay.write_remembered()

    assert ((await world.record()).order_id, (await world.record()).state) == (
        "ord_1",
        RelayState.CREATED,
    )
    assert (await world.relay.health()).ok


async def test_unwritable_refusal_still_frees_the_key(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.upstream.honours_keys = False
    with monkeypatch.context() as patched:
        patched.setattr(world.store, "commit", Failing(world.store, after=1).commit)
        with pytest.raises(OrderNotFound):
            await world.create("ord_1", OrderNotFound("refused there"))
    assert (await world.relay.health()).ok

    assert (await world.create("ord_2", MADE)).order_id == "ord_2"


async def test_orders_are_asked_for_though_the_clock_has_gone_back(world: World) -> None:
    world.follower.follow("ord_1")
    world.clock.now += 1_000
    assert await world.follower.ask_next() == 0

    world.follower.follow("ord_1")
    world.clock.now -= HOUR_MS

    assert await world.follower.ask_next() == 0


async def test_an_order_that_can_not_be_read_holds_up_no_other(world: World) -> None:
    await world.follow("lost", "gone", "bad", "well")
    world.upstream.unreadable = dict.fromkeys(("lost", "gone", "bad"), Unavailable("HTTP 500"))

    asked = await world.ask_for(60_000)

    assert asked["well"] >= 40
    assert all(3 <= asked[name] <= 7 for name in ("lost", "gone", "bad"))


async def test_unreadable_orders_are_not_polled_one_by_one(
    world: World,
) -> None:
    await world.follow("lost", "well", "gone", "bad")
    world.upstream.unreadable = dict.fromkeys(("lost", "gone", "bad"), Unavailable("HTTP 500"))
    await world.ask_for(10_000)
    await world.ask_for(60_000)

    pairs = zip(world.upstream.asked, world.upstream.asked[1:], strict=False)

    assert all("well" in pair for pair in pairs)


async def test_an_order_that_can_be_read_again_is_followed_as_before(world: World) -> None:
    await world.follow("lost")
    world.upstream.unreadable = {"lost": Unavailable("HTTP 500")}
    assert (await world.ask_for(HOUR_MS))["lost"] <= 25
    assert world.follower.health().detail is None

    world.clock.now += 2_000
    assert world.follower.health() == Health(
        True, "1 upstream orders could not be read for an hour"
    )

    world.upstream.unreadable.clear()
    await world.ask_for(LONGEST_PAUSE_MS)
    assert world.follower.health() == Health(True)
    assert (await world.ask_for(60_000))["lost"] >= 40


async def test_resting_upstream_is_asked_for_no_order(world: World) -> None:
    await world.follow("lost", "well")
    resting = UpstreamResting("the breaker is open", 60_000)
    world.upstream.unreadable = {"lost": resting, "well": resting}

    world.clock.now += 1_000
    assert await world.follower.ask_next() == 60_000

    world.upstream.unreadable.clear()
    assert await world.follower.ask_next() == 0
    assert min((await world.ask_for(10_000)).values()) >= 8


async def test_order_made_during_a_polling_pause_is_polled_at_once(
    world: World,
) -> None:
    await world.follow("lost")
    world.upstream.unreadable = {"lost": Unavailable("HTTP 500")}
    await world.ask_for(HOUR_MS)

    assert await world.follower.ask_next() <= 1_000


async def test_follower_asks_for_unpolled_orders_beside_polled_ones(
    world: World,
) -> None:
    await world.follow("polled", "polled too", "left alone")
    for _ in range(40):
        world.follower.watch("polled")
        world.follower.watch("polled too")
        world.clock.now += 3_000  # the interval under the public API's limit
        await world.follower.ask_next()

    asked = Counter(world.upstream.asked)
    assert asked["left alone"] >= 5
    assert min(asked["polled"], asked["polled too"]) >= 12
