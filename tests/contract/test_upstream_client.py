"""The upstream client against a misbehaving server: which calls may have been carried out."""

from __future__ import annotations

import asyncio
import gzip
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from msgspec.structs import replace

from rpcsvc.settlement.upstream import wiring
from rpcsvc.settlement.upstream.calls import Dialect
from rpcsvc.settlement.upstream.client import Timing, UpstreamClient, system_timing
from rpcsvc.settlement.upstream.limits import Breaker, Budget, Demand, Urgency
from rpcsvc.settlement.upstream.transport import (
    BreakerOpen,
    BudgetSpent,
    ClientOptions,
    NeverSent,
    NoAnswer,
    UpstreamAnswer,
    UpstreamBroken,
    UpstreamCall,
    UpstreamError,
    UpstreamOutcomeUnknown,
    UpstreamRefused,
)
from tests.contract import upstream_server as does
from tests.contract.upstream_server import Behaviour, UpstreamServer
from tests.logs import logs_of

API_KEY = "rpk_live_Zm9vYmFyYmF6cXV4"
READ = UpstreamCall("chains", "GET", "/chains")
CREATE = UpstreamCall("create_order", "POST", "/orders", body={"fromAmount": "1"})
OK = {"orderId": "up-1"}
MONERO = (
    "888tNkZrPN6JsEgekjMnABU4TBzc2Dt29EPAvkRxbANsAnjyPbb3iQ1YBRk1UXcdRsiKc"
    "9dhwMVgN5S9cQUiyoogDavup3H"
)


class FakeTime:
    """A clock that advances only by waiting."""

    def __init__(self) -> None:
        self.now = 1_000_000
        self.pauses: list[int] = []
        self.on_sleep: Callable[[], None] | None = None

    def now_ms(self) -> int:
        return self.now

    async def sleep_ms(self, ms: int) -> None:
        self.pauses.append(ms)
        self.now += ms
        if self.on_sleep is not None:
            self.on_sleep()
            self.on_sleep = None
        await asyncio.sleep(0)


class World:
    """A server, and clients for it with their own time."""

    def __init__(self, server: UpstreamServer) -> None:
        self.server = server
        self.time = FakeTime()
        self.breaker = Breaker()
        self.calls = Budget(20, now=self.time.now_ms, sleep=self.time.sleep_ms)
        self.creations = Budget(5, now=self.time.now_ms, sleep=self.time.sleep_ms)
        self.options = ClientOptions(
            server.url, API_KEY, plain_http=False, connect_ms=500, read_ms=1000, create_ms=1000
        )
        self.random = 0.5

    def client(self, dialect: Dialect = wiring.BFF, **options: Any) -> UpstreamClient:
        return UpstreamClient(
            replace(self.options, **options),
            read_error=dialect.read_error,
            creations=self.creations,
            calls=self.calls,
            prices=self.calls,
            breaker=self.breaker,
            timing=Timing(self.time.now_ms, self.time.sleep_ms, lambda: self.random),
        )

    async def read(self, *script: Behaviour, demand: Demand | None = None, **options: Any) -> Any:
        self.server.script.extend(script)
        async with self.client(**options) as client:
            return await client.read(READ, _value, demand=demand or Demand())

    async def create(
        self, *script: Behaviour, key: str | None = None, resumed: bool = False, **options: Any
    ) -> Any:
        self.server.script.extend(script)
        async with self.client(**options) as client:
            return await client.create(
                CREATE, _value, key=key, demand=Demand(Urgency.CREATION), resumed=resumed
            )


def _value(answer: UpstreamAnswer) -> Any:
    return answer.value


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with does.running() as server:
        yield World(server)


def bff_error(code: str, status: int, **headers: str) -> Behaviour:
    body = {"error": {"code": code, "message": f"It says {code}."}}
    return does.answer(body, status=status, headers=headers)


# --- failures after a call was sent, of reads and creations ----------------------------------

LOST: dict[str, Behaviour] = {
    "the header comes too slowly": does.slow_headers(),
    "the body comes too slowly": does.slow_body(),
    "no answer comes": does.hang(),
    "the connection is reset before the answer": does.reset(),
    "the connection is closed in the body": does.cut_in_body(OK),
    "the connection is reset in the body": does.cut_in_body(OK, with_reset=True),
    "the connection is closed in a chunk": does.cut_in_chunk(),
    "the answer is no HTTP": does.not_http(),
    "HTTP 500": does.answer({"error": {"code": "internal_error", "message": "?"}}, status=500),
    "HTTP 502 of a proxy": does.answer(
        raw=b"<h1>Bad gateway", content_type="text/html", status=502
    ),
    "HTTP 503 with our error": bff_error("unavailable", 503),
    "HTTP 408": bff_error("timeout", 408),
    "HTTP 429 of a proxy": does.answer(raw=b"slow down", content_type="text/plain", status=429),
}
GARBLED: dict[str, Behaviour] = {
    "the JSON is truncated": does.answer(raw=b'{"orderId": "up-1"'),
    "a key occurs twice": does.answer(raw=b'{"orderId": "up-1", "orderId": "up-2"}'),
    "NaN": does.answer(raw=b'{"rate": NaN}'),
    "Infinity": does.answer(raw=b'{"rate": 1e999}'),
    "nothing": does.answer(raw=b""),
    "half a surrogate pair": does.answer(raw=b'"\\ud800"'),
    "deep nesting": does.answer(raw=b"[" * 10_000),
    "HTML as JSON": does.answer(raw=b"<html>"),
    "JSON as HTML": does.answer(OK, content_type="text/html"),
    "no content type": does.answer(OK, content_type="application/octet-stream"),
}
WRONG: dict[str, Behaviour] = {
    "10 MB, declared": does.huge(10_000_000, declared=True),
    "10 MB, in chunks": does.huge(10_000_000, declared=False),
    "compressed unasked": does.answer(
        raw=gzip.compress(b"{}"), headers={"Content-Encoding": "gzip"}
    ),
    "a redirect": does.answer({}, status=307, headers={"Location": "/elsewhere"}),
    "see other": does.answer({}, status=303, headers={"Location": "/elsewhere"}),
    "a 404 of somebody else": does.answer(raw=b"not here", content_type="text/plain", status=404),
    "a 400 in another form": does.answer({"problem": "no"}, status=400),
}


def cases(*tables: dict[str, Behaviour]) -> pytest.MarkDecorator:
    rows = [(name, b) for table in tables for name, b in table.items()]
    return pytest.mark.parametrize("behaviour", [b for _, b in rows], ids=[n for n, _ in rows])


@cases(LOST, GARBLED, WRONG)
async def test_keyless_creation_is_sent_once_with_unknown_outcome(
    world: World, behaviour: Behaviour
) -> None:
    with pytest.raises(UpstreamOutcomeUnknown) as caught:
        await world.create(behaviour, key=None)

    assert len(world.server.seen) == 1
    assert caught.value.may_have_acted
    assert not caught.value.safe_to_repeat
    assert not world.time.pauses


@cases(LOST, GARBLED)
async def test_creation_with_a_key_repeats_until_its_outcome_is_known(
    world: World, behaviour: Behaviour
) -> None:
    created = await world.create(behaviour, behaviour, does.answer(OK), key="k-1")

    assert created == OK
    assert [s.headers["idempotency-key"] for s in world.server.seen] == ["k-1"] * 3
    assert len({s.body for s in world.server.seen}) == 1


@cases(LOST, GARBLED)
async def test_a_read_is_repeated_until_it_succeeds(world: World, behaviour: Behaviour) -> None:
    assert await world.read(behaviour, behaviour, does.answer([1])) == [1]

    assert len(world.server.seen) == 3


async def test_read_that_its_caller_repeats_is_sent_once(world: World) -> None:
    once = Demand(is_repeated=False)
    with pytest.raises(NoAnswer):
        await world.read(does.answer({}, status=500), does.answer([1]), demand=once)
    assert len(world.server.seen) == 1


@cases(LOST)
async def test_unanswered_read_says_so_and_changes_nothing(
    world: World, behaviour: Behaviour
) -> None:
    world.server.otherwise = behaviour

    with pytest.raises(NoAnswer) as caught:
        await world.read(attempts=2)

    assert not caught.value.may_have_acted
    assert len(world.server.seen) == 2


@cases(WRONG)
async def test_read_with_a_lasting_failure_is_not_repeated(
    world: World, behaviour: Behaviour
) -> None:
    with pytest.raises(UpstreamBroken):
        await world.read(behaviour)

    assert len(world.server.seen) == 1


# --- refused by the upstream, or never sent --------------------------------------------------


@pytest.mark.parametrize("key", [None, "k-1"])
async def test_a_creation_that_is_refused_did_not_happen(world: World, key: str | None) -> None:
    with pytest.raises(UpstreamRefused) as caught:
        await world.create(bff_error("amount_below_minimum", 400), key=key)

    assert (caught.value.status, caught.value.code) == (400, "amount_below_minimum")
    assert not caught.value.may_have_acted
    assert len(world.server.seen) == 1


@pytest.mark.parametrize("key", [None, "k-1"])
async def test_a_creation_without_a_connection_was_never_sent(
    world: World, key: str | None
) -> None:
    with pytest.raises(NeverSent) as caught:
        await world.create(key=key, url=f"http://127.0.0.1:{does.unused_port()}")

    assert not caught.value.may_have_acted


@pytest.mark.parametrize("key", [None, "k-1"])
async def test_creation_whose_connection_fails_was_never_sent(
    world: World, key: str | None
) -> None:
    with does.full_port() as port, pytest.raises(NeverSent, match="ConnectionTimeout"):
        await world.create(key=key, url=f"http://127.0.0.1:{port}")


async def test_a_closed_client_sends_nothing(world: World) -> None:
    with pytest.raises(NeverSent, match="closed"):
        await world.client().create(CREATE, _value, key=None, demand=Demand())


async def test_a_server_that_speaks_no_tls_never_sees_the_call(world: World) -> None:
    with pytest.raises(NeverSent):
        await world.create(url=f"https://127.0.0.1:{world.server.port}")

    assert not world.server.seen


async def test_a_refusal_after_an_unknown_attempt_proves_nothing(world: World) -> None:
    with pytest.raises(UpstreamOutcomeUnknown) as caught:
        await world.create(does.reset(), bff_error("amount_below_minimum", 400), key="k-1")

    assert caught.value.safe_to_repeat
    assert len(world.server.seen) == 2


async def test_a_lost_upstream_after_an_unknown_attempt_proves_nothing(world: World) -> None:
    async def fall_silent(server: UpstreamServer, request: Any) -> Any:
        asyncio.get_running_loop().create_task(server.stop())
        return await does.hang()(server, request)

    with pytest.raises(UpstreamOutcomeUnknown):
        await world.create(fall_silent, key="k-1")


async def test_a_refusal_of_a_resumed_creation_proves_nothing(world: World) -> None:
    with pytest.raises(UpstreamOutcomeUnknown):
        await world.create(bff_error("unsupported_chain", 400), key="k-1", resumed=True)


async def test_a_resumed_creation_that_is_answered_is_known(world: World) -> None:
    assert await world.create(does.answer(OK), key="k-1", resumed=True) == OK


async def test_a_creation_without_a_key_can_not_be_resumed(world: World) -> None:
    with pytest.raises(ValueError, match="without an idempotency key"):
        await world.create(key=None, resumed=True)

    assert not world.server.seen


async def test_unusable_creation_answer_is_unknown_and_keeps_the_id(
    world: World,
) -> None:
    def broken(_answer: UpstreamAnswer) -> None:
        raise UpstreamBroken("depositAddress is bad", field="depositAddress")

    world.server.script.append(does.answer(OK))
    async with world.client() as client:
        with pytest.raises(UpstreamOutcomeUnknown) as caught:
            await client.create(CREATE, broken, key="k-1", demand=Demand())

    assert caught.value.upstream_id == "up-1"
    assert caught.value.raw == b'{"orderId": "up-1"}'
    assert isinstance(caught.value.__cause__, UpstreamBroken)
    assert len(world.server.seen) == 1


async def test_a_cancelled_creation_has_been_sent_and_stays_cancelled(world: World) -> None:
    world.server.otherwise = does.hang()
    task = asyncio.create_task(world.create(key="k-1", create_ms=60_000))
    await asyncio.wait_for(world.server.arrived.wait(), 60)

    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert len(world.server.seen) == 1


async def test_every_call_has_its_own_connection(world: World) -> None:
    async with world.client() as client:
        await client.read(READ, _value, demand=Demand())
        await client.create(CREATE, _value, key=None, demand=Demand())

    assert [s.headers["connection"] for s in world.server.seen] == ["close", "close"]


# --- pauses ----------------------------------------------------------------------------------


async def test_pauses_grow_twofold_with_full_jitter_up_to_a_limit(world: World) -> None:
    world.server.otherwise = does.answer({}, status=500)
    world.random = 0.999999

    with pytest.raises(NoAnswer):
        await world.read(attempts=5, backoff_ms=100, longest_backoff_ms=500)

    assert world.time.pauses == [99, 199, 399, 499]


async def test_a_lucky_draw_makes_no_pause_at_all(world: World) -> None:
    world.random = 0.0

    assert await world.read(does.answer({}, status=500), does.answer([1])) == [1]

    assert world.time.pauses == [0]


@pytest.mark.parametrize("status", [429, 503])
async def test_retry_after_is_waited_out_before_a_read_is_repeated(
    world: World, status: int
) -> None:
    refusal = bff_error("rate_limited", status, **{"Retry-After": "7"})

    assert await world.read(refusal, does.answer([1])) == [1]

    assert world.time.pauses == [7_000 + 125]


async def test_retry_after_date_counts_from_the_date_of_the_answer(world: World) -> None:
    refusal = bff_error(
        "rate_limited",
        429,
        **{
            "Date": "Wed, 21 Oct 2015 07:28:00 GMT",
            "Retry-After": "Wed, 21 Oct 2015 07:28:09 GMT",
        },
    )

    assert await world.read(refusal, does.answer([1])) == [1]

    assert world.time.pauses == [9_000 + 125]


FAR = "Fri, 31 Dec 99999999999999999999 23:59:59 GMT"


@pytest.mark.parametrize("value", ["", "soon", "-5", "1.5", "٣", "0", FAR])
async def test_a_retry_after_of_no_meaning_is_no_pause(world: World, value: str) -> None:
    refusal = bff_error("rate_limited", 503, **{"Retry-After": value})

    assert await world.read(refusal, does.answer([1])) == [1]

    assert world.time.pauses == [125]


async def test_retry_after_beyond_the_timeout_is_passed_on_at_once(world: World) -> None:
    with pytest.raises(UpstreamRefused) as caught:
        await world.read(bff_error("rate_limited", 429, **{"Retry-After": "999999999999"}))

    assert caught.value.retry_after_ms == 600_000
    assert not world.time.pauses


async def test_a_429_stops_every_other_call_of_that_kind(world: World) -> None:
    with pytest.raises(UpstreamRefused):
        await world.read(bff_error("rate_limited", 429, **{"Retry-After": "30"}))

    with pytest.raises(BudgetSpent) as caught:
        await world.read()

    assert caught.value.retry_after_ms == 30_000
    assert len(world.server.seen) == 1


# --- requests and their recipients -----------------------------------------------------------


async def test_api_key_is_not_sent_to_where_the_upstream_redirects(
    world: World,
) -> None:
    async with does.running() as thief:
        redirect = does.answer({}, status=302, headers={"Location": f"{thief.url}/x"})
        with pytest.raises(UpstreamBroken, match="redirects"):
            await world.read(redirect)

        assert world.server.seen[0].headers["x-api-key"] == API_KEY
        assert not thief.seen


async def test_a_proxy_of_the_environment_never_sees_a_call(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with does.running() as proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy.url)
        monkeypatch.setenv("http_proxy", proxy.url)
        await world.read()

        assert len(world.server.seen) == 1
        assert not proxy.seen


async def test_cookies_of_the_upstream_are_not_sent_back(world: World) -> None:
    world.server.otherwise = does.answer({}, headers={"Set-Cookie": "a=b"})
    # A cookie jar ignores cookies of a bare IP address by default.
    async with world.client(url=f"http://localhost:{world.server.port}") as client:
        for _ in range(2):
            await client.read(READ, _value, demand=Demand())

    assert not any("cookie" in s.headers for s in world.server.seen)


async def test_a_call_is_sent_as_json_under_the_base_address(world: World) -> None:
    await world.create(url=f"{world.server.url}/bff/v1/", key="k 1")

    (seen,) = world.server.seen
    assert (seen.method, seen.target) == ("POST", "/bff/v1/orders")
    assert seen.json == {"fromAmount": "1"}
    assert seen.headers["content-type"] == "application/json"
    assert seen.headers["idempotency-key"] == "k 1"


@pytest.mark.parametrize("key", ["", "a\nb", "é", "x" * 256])
async def test_a_key_that_is_no_header_value_is_not_sent(world: World, key: str) -> None:
    with pytest.raises(ValueError, match="idempotency key"):
        await world.create(key=key)

    assert not world.server.seen


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"url": "http://swap.example"}, "https://"),
        ({"url": "swap.example"}, "https://"),
        ({"url": "ftp://swap.example"}, "https://"),
        ({"url": "https://user:pass@swap.example"}, "no user"),
        ({"url": "https://swap.example/?key=1"}, "query"),
        ({"api_key": "two words"}, "API key"),
        ({"api_key": "line\nbreak"}, "API key"),
        ({"connect_ms": 1000}, "connect_ms"),
        ({"attempts": 0}, "attempts"),
    ],
)
async def test_a_configuration_that_can_not_be_right_is_refused(
    world: World, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ValueError, match=complaint) as caught:
        world.client(**options)

    assert API_KEY not in str(caught.value)
    assert "pass" not in str(caught.value)


async def test_plain_http_is_accepted_on_a_network_declared_trusted(world: World) -> None:
    world.client(url="http://central.internal:8080", plain_http=True)


# --- errors and logs -------------------------------------------------------------------------


async def test_errors_logs_and_reprs_hide_the_key_and_whole_addresses(
    world: World,
) -> None:
    echo = {"error": {"code": "invalid_input", "message": f"key {API_KEY} for {MONERO}\x1b[2J"}}
    with (
        logs_of("rpcsvc.settlement.upstream.client") as logs,
        pytest.raises(UpstreamRefused) as caught,
    ):
        await world.read(
            does.answer(echo, status=500), does.answer(echo, status=400), api_key=API_KEY
        )

    reported = f"{logs} {caught.value} {caught.value.message} {world.options!r} {CREATE!r}"
    assert API_KEY not in reported
    assert MONERO not in reported
    assert "\x1b" not in reported
    assert {entry["event"] for entry in logs} == {"upstream_call_retried", "upstream_refused"}


async def test_upstream_message_is_kept_up_to_its_limit(world: World) -> None:
    long = {"error": {"code": "invalid_input", "message": "x" * 200_000}}
    with pytest.raises(UpstreamRefused) as caught:
        await world.read(does.answer(long, status=400))

    assert len(caught.value.message) <= 300
    assert len(caught.value.raw) == 65_536


@pytest.mark.parametrize(("declared", "least"), [(True, 0), (False, 65_536)])
async def test_oversized_answer_is_not_read_to_its_end(
    world: World, declared: bool, least: int
) -> None:
    with pytest.raises(UpstreamBroken, match="larger than 1048576 bytes") as caught:
        await world.read(does.huge(10_000_000, declared=declared))

    assert len(caught.value.raw) == least


async def test_a_large_but_allowed_answer_is_read_whole(world: World) -> None:
    items = ["x" * 1000] * 1000

    assert await world.read(does.answer(items)) == items


async def test_the_clock_of_the_machine_goes_forward_while_one_sleeps() -> None:
    timing = system_timing()
    before = timing.now_ms()
    await timing.sleep_ms(2)

    assert 1 <= timing.now_ms() - before < 5_000
    assert 0 <= timing.random() < 1


# --- breaker, budget, health -----------------------------------------------------------------


async def test_breaker_opens_after_failures_and_lets_one_probe_through(
    world: World,
) -> None:
    world.server.otherwise = does.answer({}, status=500)
    for _ in range(5):
        with pytest.raises(NoAnswer):
            await world.read(attempts=1)

    for attempt in (world.read, world.create):
        with pytest.raises(BreakerOpen):
            await attempt()
    assert len(world.server.seen) == 5

    world.time.now += 10_000
    world.server.otherwise = does.answer([1])
    assert await world.read() == [1]
    assert await world.create() == [1]


async def test_breaker_never_probes_with_an_unrepeatable_creation(world: World) -> None:
    world.server.otherwise = does.answer({}, status=500)
    for _ in range(5):
        with pytest.raises(NoAnswer):
            await world.read(attempts=1)
    world.time.now += 10_000
    world.server.otherwise = does.answer(OK)

    with pytest.raises(BreakerOpen):
        await world.create(key=None)

    assert await world.create(key="k-1") == OK


async def test_refusals_do_not_open_the_breaker(world: World) -> None:
    world.server.otherwise = bff_error("order_not_found", 404)
    for _ in range(10):
        with pytest.raises(UpstreamRefused):
            await world.read()

    assert len(world.server.seen) == 10


async def test_calls_beyond_the_budget_are_never_sent(world: World) -> None:
    for _ in range(5):
        await world.create()

    with pytest.raises(BudgetSpent) as caught:
        async with world.client() as client:
            await client.create(CREATE, _value, key=None, demand=Demand(), total_ms=1_000)

    assert not caught.value.may_have_acted
    assert caught.value.retry_after_ms == 60_250
    assert len(world.server.seen) == 5
    await world.read()  # reads have a budget of their own


async def test_repeats_are_counted_in_the_budget(world: World) -> None:
    world.server.otherwise = does.answer({}, status=500)
    with pytest.raises(NoAnswer):
        await world.read(attempts=4)

    assert world.calls.free() == 16


async def test_a_call_that_the_breaker_stops_costs_no_budget(world: World) -> None:
    world.server.otherwise = does.answer({}, status=500)
    for _ in range(5):
        with pytest.raises(NoAnswer):
            await world.read(attempts=1)
    for _ in range(5):
        with pytest.raises(BreakerOpen):
            await world.read(attempts=1)

    assert world.calls.free() == 15


async def test_breaker_that_opens_during_a_wait_returns_the_slot(world: World) -> None:
    for _ in range(20):
        with await world.calls.slot(Demand(), max_wait_ms=0):
            pass
    world.breaker = Breaker(failures=1, open_ms=100_000)
    world.time.on_sleep = lambda: world.breaker.admit(0).failed("down", world.time.now)

    async with world.client() as client:
        with pytest.raises(BreakerOpen):
            await client.read(READ, _value, demand=Demand(), total_ms=70_000)

    assert world.calls.free() == 20
    assert not world.server.seen


@pytest.mark.parametrize(
    ("dialect", "refusal"),
    [
        (wiring.BFF, bff_error("unauthorized", 401)),
        (wiring.V1, does.answer({"error": "bad key"}, status=403)),
    ],
)
async def test_health_says_that_the_key_is_refused_until_it_is_not(
    world: World, dialect: Dialect, refusal: Behaviour
) -> None:
    world.server.script.append(refusal)
    async with world.client(dialect) as client:
        assert client.health().ok
        with pytest.raises(UpstreamRefused):
            await client.read(READ, _value, demand=Demand())

        assert not client.health().ok
        assert "API key" in (client.health().detail or "")

        await client.read(READ, _value, demand=Demand())
        assert client.health().ok


async def test_health_names_the_failure_that_opened_the_breaker(world: World) -> None:
    world.server.otherwise = does.reset()
    async with world.client(attempts=1) as client:
        for _ in range(5):
            with pytest.raises(UpstreamError):
                await client.read(READ, _value, demand=Demand())

        assert "connection was lost" in (client.health().detail or "")
