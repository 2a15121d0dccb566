"""One run of the universe: replicas of the service, people who swap, faults, and the checks.

Everything that happens follows from the seed. The checks read the data and the simulated chains
themselves, and what people were told; they do not ask the service.
"""

from __future__ import annotations

import asyncio
import hashlib
import random
import sqlite3
import types
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator
from contextlib import (
    AbstractAsyncContextManager,
    asynccontextmanager,
    contextmanager,
    nullcontext,
    suppress,
)
from contextvars import copy_context
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar
from unittest.mock import patch

import orjson
from aiohttp import web

from rpcsvc import clock as product_clock
from rpcsvc.bootstrap import Running, running_on
from rpcsvc.domain.addresses import evm_checksum, stagenet_subaddress
from rpcsvc.errors import Unavailable
from rpcsvc.operations.dispatch import flat_dispatcher
from rpcsvc.operations.service import Call, Operation, Reply
from rpcsvc.operations.table import OPERATIONS
from rpcsvc.settings import load_settings
from rpcsvc.settings_onchain import read_chains
from rpcsvc.settings_sources import TOKENS_KEY
from rpcsvc.store.database import DatabaseInUse
from rpcsvc.store.leases import Lease
from rpcsvc.store.webhooks import CANCELLED
from tests.simulation.database import LEASE_MS, DatabaseServer, SimulatedDatabase
from tests.simulation.followers import Follower
from tests.simulation.loop import ACTOR, Actor, SimulatedLoop, new_loop
from tests.simulation.receivers import HookModel, Receivers
from tests.simulation.wire import TOKEN, answering, ask, is_of_rpc

HOUR_MS: Final = 3_600_000
AMOUNTS: Final = {"x2u": "0.8", "u2x": "150"}
# What is to arrive, exactly, in place of an amount that is sent.
_EXACT_AMOUNTS: Final = {"x2u": "127.300001", "u2x": "0.876543210987"}
# Of the orders, those for an exact amount.
_EXACT: Final = 0.3
BEGAN_MS: Final = 1_763_678_000_000
_MOST_LOOKS: Final = 20
# How long (s) a caller waits before it asks again, at first and at most.
_FIRST_WAIT, _MOST_WAIT = 1.0, 15.0
# Refusals, over more than half an hour, after which a call is taken to be never answered.
_MOST_TRIES: Final = 500
_MOST_WRONG_MS: Final = 300_000
_LEASE: Final = "SELECT token, expires_at FROM leases WHERE name = 'settler'"
# How long (s) a woken replica may publish what it decided to before it was paused.
_WAKING: Final = 1.0
# Nothing was done, and it may be asked again.
_AWAY: Final = Unavailable.code
# The wallets have no more for now: people come again.
_FULL: Final = "amount_above_maximum"
_GAPS: Final = (
    "SELECT order_seq FROM event_log GROUP BY order_seq"
    " HAVING count(*) <> max(version) - min(version) + 1"
)
_LOG: Final = (
    "SELECT e.version FROM event_log e JOIN orders o ON o.seq = e.order_seq"
    " WHERE o.order_id = ? ORDER BY e.version"
)
_MESSAGES: Final = (
    "SELECT d.version, d.state, d.error, w.ended_at FROM webhook_deliveries d"
    " JOIN webhooks w ON w.order_seq = d.order_seq JOIN orders o ON o.seq = d.order_seq"
    " WHERE o.order_id = ? ORDER BY d.version"
)
# Of the payers, those who pay when the order has expired.
_LATE: Final = 0.08
# Of the orders, with people who are told of their events, or who ask.
_AUDIENCE: Final = 0.3
# Of the calls in half of the universes, those that come as bytes.
_BY_HTTP: Final = 0.3
_BY_NAME: Final = {operation.name: operation for operation in OPERATIONS}


class Faults(NamedTuple):
    """How often each fault strikes. Chances are per callback, or per payment where it says so."""

    kill: float = 0.0
    pause: float = 0.0
    away: float = 0.0
    payment: float = 0.0
    cut: float = 0.0
    slow: float = 0.0
    step: float = 0.0
    delay_ms: float = 2.0

    @classmethod
    def drawn(cls, chance: random.Random) -> Faults:
        """A mix of its own for each seed; some seeds have none of a kind."""

        def rate(most: float) -> float:
            return chance.choice([0.0, most / 10, most])

        return cls(
            kill=rate(1e-4),
            pause=rate(1e-4),
            away=rate(5e-5),
            payment=rate(0.5),
            cut=rate(1e-4),
            slow=rate(1e-3),
            step=rate(5e-5),
            delay_ms=chance.choice([0.5, 5.0, 50.0]),
        )


T = TypeVar("T")
_F = TypeVar("_F", bound=NamedTuple)


def faults_without(faults: _F, left_out: Collection[str]) -> _F:
    """The same faults, of which those that are left out by name do not strike."""
    calm = type(faults)._field_defaults
    return faults._replace(**{name: calm[name] for name in faults._fields if name in left_out})


class Violated(Exception):
    """Something does not hold: the rest of the run would say nothing more."""


class ReplicaClock:
    """The wall clock of a machine, which may be wrong by some ms."""

    def __init__(self, universe: Universe) -> None:
        self._universe = universe
        self.wrong_ms = 0

    def now_ms(self) -> int:
        return self._universe.now_ms() + self.wrong_ms


class Replica:
    """A process: an actor that runs the whole service on the shared data until it is killed."""

    def __init__(self, universe: Universe, number: int) -> None:
        self.clock = ReplicaClock(universe)
        self._universe = universe
        self.number = number
        self.lives = 0
        self.up: Running | None = None
        # Answers calls that come as bytes, in universes that have such.
        self.http: web.Server | None = None
        self.database: SimulatedDatabase | None = None
        self.actor = Actor(f"replica {number}")
        self._life: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        """Whether its process runs, be it that it still starts or waits for the lease."""
        is_alive = self._life is not None and not self._life.done()
        return is_alive and not self.actor.is_killed

    def start(self) -> None:
        """Begin a life."""
        self.lives += 1
        self.actor = Actor(f"replica {self.number}.{self.lives}")
        context = copy_context()
        context.run(ACTOR.set, self.actor)
        self._life = context.run(asyncio.ensure_future, self._live())
        self._life.add_done_callback(self._ended)

    @asynccontextmanager
    async def _serving(self, up: Running) -> AsyncIterator[asyncio.Event]:
        """Work and answer until the block ends; the event is set when the lease is lost."""
        ended = asyncio.Event()
        working = asyncio.ensure_future(up.worker.run())
        lost = asyncio.ensure_future(up.lease.lost.wait())
        following = asyncio.ensure_future(up.service.waits.follow_log())
        for each in (working, lost):
            each.add_done_callback(lambda _task: ended.set())
        self.up = up
        try:
            async with self._universe.answering(up) as self.http:
                yield ended
        finally:
            self.up = self.http = None
            for task in (lost, following):
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task
            await up.worker.stop()
            await working

    @asynccontextmanager
    async def _standing_by(self, up: Running) -> AsyncIterator[None]:
        """Answer while another replica settles."""
        async with self._serving(up):
            yield

    def _ended(self, life: asyncio.Task[None]) -> None:
        """A process that ended by itself, as one without its lease does, is started again."""
        if (error := life.exception()) is not None:
            self._universe.ended(self, error)
        self._universe.later(1, self.start)

    def kill(self) -> None:
        """End it between two callbacks: nothing more of it runs, and its connections are cut."""
        self.actor.kill()
        self._universe.graves.append(self.actor)  # see Actor.kill
        self.up = self.http = None

    async def _live(self) -> None:
        universe = self._universe
        chance = random.Random(universe.chance.getrandbits(64))
        faults = universe.faults
        database = SimulatedDatabase(universe.server, chance, faults.delay_ms, faults.slow)
        self.database = database
        folder = universe.folder / f"replica-{self.number}"
        flags = {"data_dir": str(folder), **universe.settings}
        settings = load_settings(config_file=None, environ={}, flags=flags).settings
        chains = read_chains(settings.chains_file)
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            async with (
                running_on(
                    database,
                    settings,
                    chains,
                    self.clock,
                    chance.randbytes,
                    asyncio.Event(),
                    self._standing_by,
                ) as up,
                self._serving(up) as ended,
            ):
                await ended.wait()
        finally:
            await database.close()


class Order(NamedTuple):
    """An order that was acknowledged to its orderer. ``number``: of the person who made it.

    ``due``: deposit units that bring ``expected`` payout units. ``chain``: where its USDC is.
    """

    number: int
    direction: str
    order_id: str
    session_id: str
    to: str
    deposit_address: str
    due: int
    expected: int
    chain: str

    @property
    def deposit_network(self) -> str:
        """The network on which it is paid for."""
        return "monero" if self.direction == "x2u" else self.chain

    @property
    def payout_network(self) -> str:
        """The network on which it pays."""
        return self.chain if self.direction == "x2u" else "monero"


class Universe:
    """The clock, the data, the replicas and the people; an engine's own adds its chains.

    ``settings`` are those of all replicas; ``chains`` the names of the chains that orders are of.
    ``left_out``: faults by their names, and single strikes by their numbers, that do not happen.
    ``strikes`` counts them all the same. ``struck``: the effects at which a scenario was struck.
    """

    chains: tuple[str, ...]

    def __init__(
        self,
        seed: int,
        folder: Path,
        faults: Faults | None = None,
        left_out: Collection[str] = (),
    ) -> None:
        self.seed = seed
        self.folder = folder
        self.chance = random.Random(seed)
        self.loop = new_loop(self.chance.getrandbits(64))
        self.left_out = frozenset(left_out)
        drawn = Faults.drawn(self.chance) if faults is None else faults
        self.faults = faults_without(drawn, self.left_out)
        self.strikes = 0
        self.struck: tuple[int, ...] = ()
        self.server = DatabaseServer(self.now_ms)
        self.graves: list[Actor] = []
        self.replicas = [Replica(self, number) for number in range(self.chance.choice([1, 2, 3]))]
        self.settings: dict[str, Any] = {"signing.enabled": False, TOKENS_KEY: TOKEN}
        self.orders: dict[str, Order] = {}
        self._asked: dict[str, dict[str, Any]] = {}
        self.violations: list[str] = []
        self.server.changed = self._written
        self.server.paid_in_pause = self._paid_in_pause
        self.server.taken_early = lambda token: self.violated(f"lease {token} was taken early")
        # Nobody in a universe without faults, where each effect is counted.
        self._audience = _AUDIENCE if self.faults != Faults() else 0.0
        # No draw of its own: it would be other universes.
        self._has_http = bool(self._audience) and seed % 2 == 1
        self.receivers = Receivers(self.now_ms)
        self._told: dict[str, HookModel] = {}
        self._late: list[tuple[Order, random.Random]] = []
        self._followers: list[Follower] = []
        self._reading: list[asyncio.Task[None]] = []
        self.counts = dict.fromkeys(
            ["kills", "pauses", "outages", "cuts", "steps",
             "calls", "http", "unanswered", "messages", "events"], 0
        )  # fmt: skip
        self.is_striking = False
        self._failed_over_at = 0
        # The error of the universe itself, with which the run ends.
        self.broken: BaseException | None = None
        # How long (s) people come, and how long faults strike after the last payment.
        self.comes, self.lingers = 60.0, 0.0
        self._most_steps = self._people = 0

    def now_ms(self) -> int:
        """Wall-clock time, the same for all."""
        return BEGAN_MS + self.loop.now_ns // 1_000_000

    # --- of an engine --------------------------------------------------------------------------

    async def begin(self) -> None:
        """Start what the chains do by themselves."""

    def calm(self) -> None:
        """Let no more faults strike."""
        self.is_striking = self.receivers.is_striking = False
        self.faults = self.faults._replace(slow=0.0)
        for replica in self.replicas:
            replica.clock.wrong_ms = 0
            if replica.database is not None:
                replica.database.slow, replica.database.is_cut = 0.0, False

    def destination(self, direction: str, number: int) -> str:
        """Where a person wants to be paid."""
        raise NotImplementedError

    def chain_of(self, _number: int, chance: random.Random) -> str:
        """Return the EVM chain that a person orders on."""
        return chance.choice(self.chains)

    def refund_address(self, order: Order, attempt: int) -> str:
        """Where an orderer wants a refund, each time that it is asked for."""
        raise NotImplementedError

    async def verify(self, order: Order, attestation: str, params: dict[str, Any]) -> None:
        """Have an orderer verify what was attested, if anything is signed."""

    async def pay(self, order: Order, chance: random.Random) -> None:
        """Have a person pay once, in some way."""
        raise NotImplementedError

    async def settled(self) -> None:
        """Wait until nothing more happens by itself for now."""
        await asyncio.sleep(40)

    async def differences(self) -> list[str]:
        """Faults in the money, by chains and data."""
        raise NotImplementedError

    # --- a run ---------------------------------------------------------------------------------

    def run(self, orders: int) -> None:
        """Have people make orders under faults, let all orders end, and check."""
        self._most_steps = self.most_steps(orders)
        with _simulated_time(self.loop), self.receivers.carrying():
            self.loop.before_step = self._strike
            self.loop.run_simulation(self.story(orders))

    def most_steps(self, orders: int) -> int:
        """Steps of the loop after which something is said to never end."""
        return 500_000 + 20_000 * orders

    async def story(self, orders: int) -> None:
        """Let people come under faults; then end the faults, and check."""
        self._people = orders
        await self.begin()
        for replica in self.replicas:
            replica.start()
        self.is_striking = self.receivers.is_striking = True
        people = [asyncio.ensure_future(self._person(number)) for number in range(orders)]
        await asyncio.gather(*people)
        await asyncio.sleep(self.lingers)
        self.calm()
        await self.recover()
        await self.check()

    async def _person(self, number: int) -> None:
        """Order, pay in some way, and follow the order to its end."""
        chance = random.Random(f"{self.seed} {number}")
        await asyncio.sleep(chance.random() * self.comes)
        direction = chance.choice(["x2u", "u2x"])
        order = await self.place(number, direction, chance)
        if chance.random() < 0.1:
            await self._cancel(order, chance)
            return
        if chance.random() < _LATE:
            self._late.append((order, chance))
            return
        if chance.random() < 0.1:
            await asyncio.gather(self._cancel(order, chance), self.pay(order, chance))
        for _ in range(chance.choice([1, 1, 1, 2])):
            await asyncio.sleep(chance.choice([0.1, 2, 10, 60]))
            await self.pay(order, chance)

    async def _cancel(self, order: Order, chance: random.Random) -> None:
        """Cancel at some moment, which is refused once a deposit was seen."""
        await asyncio.sleep(chance.random() * 30)
        await self.call(
            "swap.cancel", chance, once=True, orderId=order.order_id, sessionId=order.session_id
        )

    async def place(self, number: int, direction: str, chance: random.Random) -> Order:
        """Order, sometimes several times at once under one key: all must be the same order."""
        key, to = f"person-{number:08d}-key", self.destination(direction, number)
        params: dict[str, Any] = {
            "direction": direction,
            "chain": self.chain_of(number, chance),
            "amount": AMOUNTS[direction],
            "to": to,
        }
        hooks = random.Random(f"{self.seed} {number} audience")
        if self._audience and hooks.random() < _EXACT:
            del params["amount"]
            params["receiveAmount"] = _EXACT_AMOUNTS[direction]
        if hooks.random() < self._audience:
            receiver = self._told[key] = self.receivers.make(number, hooks)
            params["webhook"] = receiver.param
        self._asked[key] = params
        copies = chance.choice([1, 1, 1, 3])
        answers = await asyncio.gather(
            *(self.call("swap.execute", chance, key=key, **params) for _ in range(copies))
        )
        for answer in answers:
            data = answer["data"]
            made = data["order"]
            order = Order(
                number, direction, made["orderId"], data["sessionId"], to,
                made["depositAddress"], int(made["depositAmount"]), int(made["expectedOutput"]),
                params["chain"],
            )  # fmt: skip
            exact = params.get("receiveAmount")
            if exact is not None and int(made["receiveAmount"]) != order.expected:
                self.violated(f"{made} is not for {exact}")
            known = self.orders.setdefault(key, order)
            if known != order:
                self.violated(f"key {key} has two orders: {known.order_id}, {order.order_id}")
            self.loop.note(f"order {order.order_id}")
            await self.verify(order, made.get("attestation", ""), params)
        if hooks.random() < self._audience:
            self._follow(order, hooks)
        return order

    def _follow(self, order: Order, chance: random.Random) -> None:
        """Have somebody read the events of an order."""

        async def ask(cursor: int, seconds: int) -> dict[str, Any]:
            name, order_id = "swap.events", order.order_id
            return await self.call(name, chance, orderId=order_id, after=cursor, waitSec=seconds)

        follower = Follower(order.order_id, chance, ask)
        self._followers.append(follower)
        self._reading.append(asyncio.ensure_future(follower.run()))

    async def call(
        self,
        name: str,
        chance: random.Random,
        *,
        key: str | None = None,
        once: bool = False,
        **params: Any,
    ) -> dict[str, Any]:
        """Call any replica until one answers ok; with ``once``, until one may have acted.

        A call whose replica was killed has no answer: the caller waits, gives up, and asks again.
        """
        wait, tries = _FIRST_WAIT, 0
        while True:
            replica = chance.choice(self.replicas)
            if (tries := tries + 1) > _MOST_TRIES:
                self.violated(f"{name} has no answer: {key or params}")
            if replica.up is not None:
                self.counts["calls"] += 1
                body = await self._ask(replica, replica.up, _BY_NAME[name], params, key, chance)
                if body is None:
                    self.counts["unanswered"] += 1
                    if once:
                        return {}
                else:
                    answer: dict[str, Any] = orjson.loads(body)
                    self.loop.note(f"{name} {answer['state']}")
                    if answer["ok"]:
                        return answer
                    if answer["error"]["code"] == "internal_error":
                        self.violated(f"{name} answered {answer}")
                        return answer
                    if answer["error"]["code"] == _FULL:
                        await asyncio.sleep(60)
                        tries = 0
                    elif not answer["error"]["retryable"]:
                        if once:
                            return answer
                        self.violated(f"{name} was refused: {answer['error']}")
                        return answer
            await asyncio.sleep(wait * (0.2 + chance.random()))
            wait = min(_MOST_WAIT, 1.5 * wait)

    async def administer(
        self, name: str, chance: random.Random, params: dict[str, Any]
    ) -> dict[str, Any]:
        """Call an admin method at any replica until one answers, and is not unavailable."""
        while True:
            replica = chance.choice(self.replicas)
            if (up := replica.up) is not None:
                operation = next((each for each in up.admin if each.name == name), None)
                if operation is None:
                    raise LookupError(f"there is no method {name}")
                flat = flat_dispatcher(up.service)
                body = await self._reply(replica, flat.run(operation, params, Call("req_operator")))
                answer: dict[str, Any] = {} if body is None else orjson.loads(body)
                if body is not None and answer.get("error", {}).get("code") != _AWAY:
                    return answer
            await asyncio.sleep(0.2 + chance.random())

    async def _ask(
        self,
        replica: Replica,
        up: Running,
        operation: Operation,
        params: dict[str, Any],
        key: str | None,
        chance: random.Random,
    ) -> bytes | None:
        if self._has_http and (is_of_rpc(key) or chance.random() < _BY_HTTP):
            if replica.http is None:
                return None  # it does not listen yet, or no longer
            self.counts["http"] += 1
            return await self._run(replica, ask(replica.http, operation, params, key, chance))
        call = Call("req_simulated", idempotency_key=key)
        return await self._reply(replica, up.dispatcher.run(operation, params, call))

    async def _reply(self, replica: Replica, work: Coroutine[Any, Any, Reply]) -> bytes | None:
        reply = await self._run(replica, work)
        return None if reply is None else reply.body

    async def _run(self, replica: Replica, work: Coroutine[Any, Any, T | None]) -> T | None:
        """The answer of a replica; None if none came in time."""
        context = copy_context()
        context.run(ACTOR.set, replica.actor)
        running: asyncio.Task[T | None] = self.loop.create_task(work, context=context)
        if not (await asyncio.wait({running}, timeout=30))[0]:
            return None
        return running.result()

    def answering(self, up: Running) -> AbstractAsyncContextManager[web.Server | None]:
        """Answer HTTP over a running service, in universes where calls come so."""
        return answering(up) if self._has_http else nullcontext()

    # --- faults --------------------------------------------------------------------------------

    def _strike(self) -> None:
        """Between two callbacks: perhaps kill or pause a replica, or take the database away."""
        if self.broken is not None:
            raise self.broken
        if self.violations:
            raise Violated(self.violations[0])
        if self.loop.steps > self._most_steps:
            raise TimeoutError(f"orders have not ended after {self.loop.steps} steps")
        if not self.is_striking:
            return
        roll = self.chance.random()
        faults = self.faults
        if roll >= faults.kill + faults.pause + faults.away + faults.cut + faults.step:
            return
        self.strikes += 1
        if str(self.strikes) in self.left_out:
            return
        if roll < faults.kill:
            self.kill(self.chance.choice(self.replicas))
        elif roll < faults.kill + faults.pause:
            self.pause(self.chance.choice(self.replicas))
        elif roll < faults.kill + faults.pause + faults.away and not self.server.is_away:
            self.counts["outages"] += 1
            self.server.is_away = True
            self.later(self.chance.random() * 20, self._bring_database_back)
        elif roll < faults.kill + faults.pause + faults.away + faults.cut:
            self.cut(self.chance.choice(self.replicas))
        else:
            self._step_clock(self.chance.choice(self.replicas))

    def kill(self, replica: Replica) -> None:
        """Kill a replica, unless it is down, and start it again after a while."""
        if not replica.is_running:
            return
        self.counts["kills"] += 1
        self.loop.note(f"kill {replica.actor.name}")
        replica.kill()
        self.later(0.1 + self.chance.random() * 20, replica.start)

    def restart(self, replica: Replica, seconds: float) -> None:
        """Stop a replica, unless it is down, and start it again after ``seconds``."""
        if replica.is_running:
            replica.kill()
            self.later(seconds, replica.start)

    def restore(self, copied: sqlite3.Connection) -> None:
        """Stop the replicas, put a copy of the database in place, and start them again."""
        self.loop.note("restore")
        for replica in self.replicas:
            self.restart(replica, LEASE_MS / 1000)
        self.server.restore(copied)

    def fail_over(self, copied: sqlite3.Connection) -> None:
        """Put a copy of the database in place, and let the replicas run on it."""
        self.loop.note("fail over")
        self._failed_over_at = self.now_ms()
        self.server.restore(copied)

    def pause(self, replica: Replica, seconds: float | None = None) -> None:
        """Let nothing of a replica run for ``seconds``, or for up to half a minute."""
        actor = replica.actor
        if actor.is_killed or actor.is_paused:
            return
        self.counts["pauses"] += 1
        self.loop.note(f"pause {actor.name}")
        actor.is_paused = True
        lasts = self.chance.random() * 30 if seconds is None else seconds
        self.later(lasts, lambda: self.loop.wake(actor))

    def _bring_database_back(self) -> None:
        self.server.is_away = False

    def cut(self, replica: Replica) -> None:
        """Take the database away from one replica for a while."""
        database = replica.database
        if database is not None and not database.is_cut:
            self.counts["cuts"] += 1
            self.loop.note(f"cut {replica.actor.name}")
            database.is_cut = True
            self.later(self.chance.random() * 30, partial(setattr, database, "is_cut", False))

    def _step_clock(self, replica: Replica) -> None:
        """Set a replica's clock wrong by up to five minutes."""
        self.counts["steps"] += 1
        replica.clock.wrong_ms = round((2 * self.chance.random() - 1) * _MOST_WRONG_MS)
        self.loop.note(f"clock of {replica.actor.name} is wrong by {replica.clock.wrong_ms}")

    # --- the lease -----------------------------------------------------------------------------

    def _written(self) -> None:
        """Compare with the lease: something is changed now that only the settler changes."""
        if (settler := self._settling()) is None:
            return
        actor, lease = settler
        row = self.server.connection.execute(_LEASE).fetchone()
        if lease.token != row["token"]:
            self.violated(f"{actor.name} wrote under lease {lease.token}; {row['token']} was taken")

    def published(self) -> None:
        """Compare with the lease's time: a replica sends a signed payment to the network now.

        Between its look at the lease and the request it can't be paused. One whose lease was taken
        over early could record nothing, and gives out again what is on record.
        """
        if (settler := self._settling()) is None:
            return
        actor, lease = settler
        if lease.token in self.server.taken_over:
            return
        if self.now_ms() - self._failed_over_at < LEASE_MS:
            return  # the copy has an earlier end of its lease than was promised
        row = self.server.connection.execute(_LEASE).fetchone()
        if lease.token != row["token"] or row["expires_at"] <= self.now_ms():
            self.violated(f"{actor.name} published without lease {lease.token}")

    def _paid_in_pause(self, what: str) -> None:
        """A payout is signed or given out while payouts are paused.

        A replica that begins adopts what it signed before, from its journal. One that has just been
        woken may have looked before it was paused.
        """
        if (settler := self._settling()) is None:
            return
        if self.loop.time() > settler[0].woke_at + _WAKING:
            self.violated(f"{what} by {settler[0].name} while payouts are paused")

    def sender(self) -> Replica | None:
        """The replica whose code runs now."""
        return next((each for each in self.replicas if each.actor is ACTOR.get()), None)

    def _settling(self) -> tuple[Actor, Lease] | None:
        """The replica whose code runs now, and its lease, if it settles."""
        replica = self.sender()
        if replica is None or replica.up is None or not replica.up.lease.is_held:
            return None
        return replica.actor, replica.up.lease

    def later(self, seconds: float, act: Any) -> None:
        """Do something outside of every actor."""
        context = copy_context()
        context.run(ACTOR.set, None)
        self.loop.call_later(seconds, act, context=context)

    # --- the end -------------------------------------------------------------------------------

    @property
    def has_all_orders(self) -> bool:
        """Whether everybody who comes has ordered."""
        return len(self.orders) == self._people

    async def recover(self) -> None:
        """Faults have stopped: let every deadline pass, and name the refund addresses due."""
        await asyncio.sleep(60)
        await self.settled()
        chance = random.Random(self.seed)
        for attempt, wait_ms in enumerate((HOUR_MS, HOUR_MS, 25 * HOUR_MS, 25 * HOUR_MS)):
            # Each pass of a worker would be simulated: the machine sleeps instead.
            self.loop.skip(wait_ms / 1000)
            if attempt % 2 == 0:  # an hour after the order, or a day
                late, self._late = self._late[::2], self._late[1::2]
                for order, payer in late:
                    await self.pay(order, payer)
            await self.settled()
            for order in self.orders.values():
                answer = await self.call("swap.status", chance, orderId=order.order_id)
                if answer["data"]["actionRequired"]:
                    # One that a refund could not be sent to is refused the next time.
                    await self.call(
                        "support.create",
                        chance,
                        message="refund, please",
                        orderId=order.order_id,
                        sessionId=order.session_id,
                        walletAddress=self.refund_address(order, attempt),
                    )
        await asyncio.sleep(60)
        await self.settled()

    async def states(self) -> dict[str, str]:
        """How far each order is, by its id."""
        chance = random.Random(self.seed)
        answers = {
            order.order_id: await self.call("swap.status", chance, orderId=order.order_id)
            for order in self.orders.values()
        }
        return {order_id: answer["state"] for order_id, answer in answers.items()}

    async def check(self) -> None:
        """Note all that does not hold in the end."""
        self.violations += await self.differences()
        for order_id, state in (await self.states()).items():
            if state not in ("completed", "terminal_failure"):
                self.violated(f"{order_id} has not ended: {state}")
        rows = self.server.connection.execute("SELECT count(*) FROM orders").fetchone()
        if rows[0] != len(self.orders):
            self.violated(f"{rows[0]} orders are stored, {len(self.orders)} were acknowledged")
        for row in self.server.connection.execute(_GAPS):
            self.violated(f"the events of order {row[0]} have a gap")
        await self._check_keys()
        await self._check_followers()
        self._check_receivers()
        for replica in self.replicas:
            if problem := await self._sickness(replica):
                self.violated(f"{replica.actor.name} is not well after the faults: {problem}")
        for failure in self.loop.failures:
            self.violated(f"the loop caught {failure}")

    async def _check_keys(self) -> None:
        """Each key gives its order again."""
        chance = random.Random(self.seed)
        for key, order in self.orders.items():
            answer = await self.call("swap.execute", chance, key=key, **self._asked[key])
            again = answer.get("data", {}).get("order", {}).get("orderId")
            if again != order.order_id:
                self.violated(f"key {key} gave {order.order_id}, and then {again}")

    async def _check_followers(self) -> None:
        """Each read the whole log of its order, each event once."""
        await asyncio.gather(*self._reading)
        for follower in self._followers:
            self.counts["events"] += follower.cursor
            while not follower.violations and not await follower.read():
                continue  # deposits come late, too, to an order that has ended
            log = [row[0] for row in self.server.connection.execute(_LOG, (follower.order_id,))]
            if log != [event["cursor"] for event in follower.events]:
                self.violated(f"a follower of {follower.order_id} read {follower.cursor} of {log}")
            self.violations += follower.violations

    def _check_receivers(self) -> None:
        """Each event has a message, which its receiver took, or whose failure is on record."""
        for key, receiver in self._told.items():
            order_id = self.orders[key].order_id
            if receiver.order_id not in (None, order_id):
                self.violated(f"the receiver of {order_id} was told of {receiver.order_id}")
            self.violations += receiver.violations
            self.counts["messages"] += len(receiver.heard)
            log = [row[0] for row in self.server.connection.execute(_LOG, (order_id,))]
            rows = self.server.connection.execute(_MESSAGES, (order_id,)).fetchall()
            for row in rows:
                said = f"message {row['version']} of {order_id} to {receiver.manner}"
                if row["state"] == "delivered" and row["version"] not in receiver.taken:
                    self.violated(f"{said} is delivered, and was not taken")
                elif row["state"] == "pending" and receiver.manner == "silent":
                    continue  # it is tried again for a day
                elif row["state"] == "pending" or (row["state"] == "dead" and not row["error"]):
                    self.violated(f"{said} is {row['state']}: {row['error']}")
                elif row["error"] and receiver.manner == "steady" and row["error"] != CANCELLED:
                    self.violated(f"{said} was given up: {row['error']}")
            has_ended = bool(rows) and rows[-1]["ended_at"] is not None
            if not has_ended and [row["version"] for row in rows] != log:
                self.violated(f"{order_id} has {len(rows)} messages for {log}")

    async def _sickness(self, replica: Replica) -> str:
        """The trouble of a replica that stays for some minutes; empty: none."""
        problem = ""
        for _ in range(_MOST_LOOKS):
            up = replica.up
            if up is None:
                return ""  # it waits for the lease
            checks = {**await up.service.venue.health(), "worker": up.worker.health()}
            wrong = [f"{name}: {check.detail}" for name, check in checks.items() if not check.ok]
            if not wrong:
                return ""
            problem = "; ".join(wrong)
            await asyncio.sleep(20)
        return problem

    def ended(self, replica: Replica, error: BaseException) -> None:
        """A replica has ended by an error; a database that is away or another's lease is none."""
        if not isinstance(error, (Unavailable, DatabaseInUse)):
            self.violated(f"{replica.actor.name} ended by {error!r}")
            raise error

    def violated(self, what: str) -> None:
        """Note what does not hold."""
        self.loop.note(f"violation {what}")
        self.violations.append(f"at {self.loop.time():.3f} s: {what}")


def monero_address(*parts: object) -> str:
    """An address that follows from the parts."""
    return stagenet_subaddress(hashlib.sha512(repr(parts).encode()).digest())


def evm_address(*parts: object) -> str:
    """An address that follows from the parts (EIP-55)."""
    return evm_checksum("0x" + hashlib.sha256(repr(parts).encode()).hexdigest()[:40])


@contextmanager
def _simulated_time(loop: SimulatedLoop) -> Iterator[None]:
    """Have the product's clocks tell the loop's time."""
    began = BEGAN_MS * 1_000_000
    fake = types.SimpleNamespace(
        time_ns=lambda: began + loop.now_ns,
        monotonic_ns=lambda: loop.now_ns,
        clock_gettime_ns=lambda _clock: loop.now_ns,
        CLOCK_BOOTTIME=0,
    )
    with patch.object(product_clock, "time", fake):
        yield
