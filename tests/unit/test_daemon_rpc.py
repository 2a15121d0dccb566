"""The JSON-RPC client of the daemons, against answers that real ones don't give on request."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace

from rpcsvc.settlement.onchain.daemon_rpc import (
    MOST_BYTES,
    BadAnswer,
    BatchRefused,
    CallLimit,
    DaemonEndpoint,
    DaemonRpc,
    HasTime,
    HttpFailure,
    NodeError,
    NotSent,
    Resting,
    RpcOutcomeUnknown,
    TooLarge,
    TooManyCalls,
)
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from tests.e2e.processes import free_port

Publish = Callable[[DaemonEndpoint, HasTime], Awaitable[object]]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


async def no_pause(_: float) -> None:
    return


async def ask(handler: Handler, *, method: str = "read", bound: int = 1000) -> object:
    """One call to a node that answers as ``handler`` does."""
    app = web.Application()
    app.router.add_post("/json_rpc", handler)
    async with TestServer(app) as server:
        at = DaemonEndpoint("node", str(server.make_url("")), max_response_bytes=bound)
        async with DaemonRpc(at, rpc_path="/json_rpc", pause=no_pause) as rpc:
            call = rpc.read if method == "read" else rpc.act
            return await call("any")


def answering(text: str, status: int = 200) -> Handler:
    """Answers with ``text``, in which ID stands for the id of the request."""

    async def handler(request: web.Request) -> web.Response:
        number = (await request.json())["id"]
        return web.Response(text=text.replace("ID", f'"{number}"'), status=status)

    return handler


@pytest.mark.parametrize("number", [2**53 + 1, 2**64 - 1, 2**70])
async def test_numbers_beyond_the_floats_arrive_to_the_unit(number: int) -> None:
    assert await ask(answering(f'{{"id": ID, "result": {number}}}')) == number


@pytest.mark.parametrize(
    "text",
    [
        "", "garbage", "[]", "{}", '{"id": ID}', '{"id": "other", "result": 1}',
        '{"id": ID, "result": NaN}', '{"id": ID, "result": "\xff', '{"id": ID, "error": 5}',
        '{"id": ID, "error": {"code": "x", "message": 1}}', "[" * 900, '{"id": ID, "res',
    ],
)  # fmt: skip
async def test_garbage_is_an_unknown_outcome(text: str) -> None:
    with pytest.raises(BadAnswer):
        await ask(answering(text), method="act")


async def test_an_answer_over_the_bound_is_not_read_to_its_end() -> None:
    with pytest.raises(TooLarge, match="over 1000 bytes"):
        await ask(answering('{"id": ID, "result": "' + "x" * 5000 + '"}'))


async def test_an_error_is_the_nodes_own_also_with_another_http_status() -> None:
    text = '{"id": ID, "error": {"code": -32000, "message": "no", "data": "0x"}}'
    for status in (200, 400):
        with pytest.raises(NodeError, match="no") as raised:
            await ask(answering(text, status))
        assert (raised.value.code, raised.value.data) == (-32000, "0x")


@pytest.mark.parametrize("status", [204, 301, 404, 429, 500, 503])
async def test_http_error_without_json_rpc_error_is_unknown(status: int) -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=status, headers={"location": "/json_rpc"})

    with pytest.raises(RpcOutcomeUnknown):
        await ask(handler, method="act")


async def test_reads_are_repeated_and_acts_are_not() -> None:
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((await request.json())["id"])
        if len(seen) % 3:
            assert request.transport is not None
            request.transport.close()
        return web.json_response({"id": seen[-1], "result": 7})

    with pytest.raises(RpcOutcomeUnknown):
        await ask(handler, method="act")
    assert len(seen) == 1
    seen.clear()
    assert await ask(handler) == 7
    assert len(seen) == 3


async def test_a_busy_node_is_asked_again_and_then_reported() -> None:
    seen: list[str] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append((await request.json())["id"])
        return web.Response(status=503)

    with pytest.raises(HttpFailure, match="503"):
        await ask(handler)
    assert len(seen) == 3


async def test_no_message_shows_the_url_or_the_password() -> None:
    at = DaemonEndpoint("node", f"http://127.0.0.1:{free_port()}/key-abc", "user", "secret-abc")
    async with DaemonRpc(at, pause=no_pause) as rpc:
        with pytest.raises(NotSent) as raised:
            await rpc.read("any")
    for text in (str(raised.value), repr(raised.value), repr(at)):
        assert "abc" not in text


@pytest.mark.parametrize(
    "url", ["ftp://host", "host:18081", "http://", "http://user:password@host"]
)
def test_an_endpoint_that_can_not_be_right_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="node"):
        DaemonEndpoint("node", url)


@pytest.mark.parametrize(
    "publish",
    [
        lambda at, time: EvmClient(at, has_time=time).submit(b"\x02"),
        lambda at, time: MonerodClient(at, has_time=time).submit("00"),
        lambda at, time: MonerodClient(at, has_time=time).relay(["00"]),
        lambda at, time: WalletClient(replace(at, serial=True), has_time=time).relay("00"),
    ],
)
async def test_nothing_is_published_after_the_lease(publish: Publish) -> None:
    """A client that is closed would not send either, and says so."""
    at = DaemonEndpoint("node", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(NotSent, match="no time left"):
        await publish(at, lambda: False)
    with pytest.raises(NotSent, match="closed"):
        await publish(at, lambda: True)


# --- batches -----------------------------------------------------------------------------------


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[DaemonRpc]:
    app = web.Application()
    app.router.add_post("/", handler)
    async with (
        TestServer(app) as server,
        DaemonRpc(DaemonEndpoint("node", str(server.make_url(""))), pause=no_pause) as rpc,
    ):
        yield rpc


def echoing(change: Callable[[list[dict[str, object]]], object]) -> Handler:
    """Answers a batch by the method of each call, as changed."""

    async def handler(request: web.Request) -> web.Response:
        calls = await request.json()
        answers = [{"id": call["id"], "result": call["method"]} for call in calls]
        return web.json_response(change(answers))

    return handler


async def test_answers_of_a_batch_may_come_in_any_order() -> None:
    async with served(echoing(lambda answers: answers[::-1])) as rpc:
        assert await rpc.read_all([("a", []), ("b", []), ("c", [])]) == ["a", "b", "c"]


async def test_refused_call_of_a_batch_has_its_error() -> None:
    error = {"code": -32000, "message": "no"}

    def refuse_second(answers: list[dict[str, object]]) -> object:
        return [answers[0], {"id": answers[1]["id"], "error": error}]

    async with served(echoing(refuse_second)) as rpc:
        first, second = await rpc.read_all([("a", []), ("b", [])])
    assert first == "a"
    assert isinstance(second, NodeError)
    assert second.text == "no"


@pytest.mark.parametrize("kept", [[], [0], [0, 0]])
async def test_batch_with_an_answer_missing_is_no_answer(kept: list[int]) -> None:
    async with served(echoing(lambda answers: [answers[n] for n in kept])) as rpc:
        with pytest.raises(BadAnswer):
            await rpc.read_all([("a", []), ("b", [])])


async def test_reads_that_begin_together_are_one_batch() -> None:
    seen = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(calls := await request.json())
        error = {"code": -32000, "message": "no"}
        answers = [{"id": call["id"], "result": call["method"]} for call in calls]
        answers[1] = {"id": calls[1]["id"], "error": error}
        return web.json_response(answers)

    async with served(handler) as rpc:
        with rpc.together():
            names = ("a", "b", "c")
            found: list[Any] = await asyncio.gather(
                *(rpc.read(name) for name in names), return_exceptions=True
            )
    assert [found[0], found[2]] == ["a", "c"]
    assert isinstance(found[1], NodeError)
    assert [[call["method"] for call in calls] for calls in seen] == [["a", "b", "c"]]


async def test_reads_together_fail_together() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=500)

    async with served(handler) as rpc:
        with rpc.together():
            found = await asyncio.gather(rpc.read("a"), rpc.read("b"), return_exceptions=True)
    assert [type(item) for item in found] == [HttpFailure, HttpFailure]


async def test_reads_together_are_asked_alone_where_no_batch_is_taken() -> None:
    seen = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(call := await request.json())
        if isinstance(call, list):
            return web.json_response(_NO_BATCHES)
        return web.json_response({"id": call["id"], "result": call["method"]})

    async with served(handler) as rpc:
        for _ in range(2):
            with rpc.together():
                found = await asyncio.gather(rpc.read("a"), rpc.read("b"))
            assert list(found) == ["a", "b"]
    assert len(seen) == 1 + 2 + 2


async def test_cancelled_leader_of_a_batch_keeps_no_reader_waiting() -> None:
    asked, answer = asyncio.Event(), asyncio.Event()

    async def handler(_: web.Request) -> web.Response:
        asked.set()
        await answer.wait()
        return web.Response(status=500)

    async with served(handler) as rpc:
        with rpc.together():
            reads = [asyncio.create_task(rpc.read(name)) for name in "ab"]
        await asked.wait()
        reads[0].cancel()
        with pytest.raises(RpcOutcomeUnknown, match="cancelled"):
            await asyncio.wait_for(reads[1], 5)
        answer.set()


async def test_leader_cancelled_before_it_sends_holds_no_reader() -> None:
    async with served(answering("{}")) as rpc:
        with rpc.together():
            reads = [asyncio.create_task(rpc.read(name)) for name in "ab"]
            await asyncio.sleep(0)
            reads[0].cancel()
            with pytest.raises(RpcOutcomeUnknown, match="cancelled"):
                await asyncio.wait_for(reads[1], 5)


async def test_node_that_refuses_a_large_batch_is_sent_smaller_ones() -> None:
    async def handler(request: web.Request) -> web.Response:
        calls = await request.json()
        if isinstance(calls, list) and len(calls) > 3:
            return web.json_response(_NO_BATCHES)
        return web.json_response([{"id": each["id"], "result": 1} for each in calls])

    async with served(handler) as rpc:
        with pytest.raises(BatchRefused):
            await rpc.read_all([("a", [])] * 4)
        assert await rpc.read_all([("a", [])] * 3) == [1, 1, 1]


def refusing(most: int, sizes: list[int]) -> Handler:
    """Answers batches of at most ``most`` calls by their methods, and notes the sizes of all."""

    async def handler(request: web.Request) -> web.Response:
        asked = await request.json()
        calls = asked if isinstance(asked, list) else [asked]
        sizes.append(len(calls))
        if len(calls) > most:
            return web.json_response(_NO_BATCHES)
        answers = [{"id": call["id"], "result": call["method"]} for call in calls]
        return web.json_response(answers if isinstance(asked, list) else answers[0])

    return handler


_SENDS = [("read_each", DaemonRpc.read_each), ("publish_each", DaemonRpc.publish_each)]


@pytest.mark.parametrize("send", [send for _, send in _SENDS], ids=[name for name, _ in _SENDS])
@pytest.mark.parametrize(
    ("most", "expected"),
    [(50, [50, 50, 20]), (20, [50, 25, 12, 13, 12, 13, 12, 13, 12, 13, 20])],
)
async def test_many_calls_are_sent_in_batches_that_the_node_takes(
    send: Callable[[DaemonRpc, list[tuple[str, list[object]]]], Awaitable[list[object]]],
    most: int,
    expected: list[int],
) -> None:
    sizes: list[int] = []
    calls: list[tuple[str, list[object]]] = [(f"call {number}", []) for number in range(120)]
    async with served(refusing(most, sizes)) as rpc:
        assert await send(rpc, calls) == [method for method, _ in calls]
        assert rpc.takes_batches
    assert sizes == expected


async def test_batch_holds_no_more_bytes_than_its_bound() -> None:
    sizes: list[int] = []
    raw = "0x" + "ab" * (MOST_BYTES // 6)
    async with served(refusing(50, sizes)) as rpc:
        await rpc.publish_each([("send", [raw])] * 5)
    assert sizes == [2, 2, 1]


async def test_node_without_batches_is_published_to_one_by_one() -> None:
    sizes: list[int] = []
    async with served(refusing(1, sizes)) as rpc:
        assert rpc.takes_batches
        assert await rpc.publish_each([("send", [])] * 4) == ["send"] * 4
        assert not rpc.takes_batches
        await rpc.publish_each([("send", [])] * 4)
    assert sizes == [4, 1, 1, 1, 1, 1, 1, 1, 1]


async def test_missing_answer_of_a_published_batch_is_unknown_alone() -> None:
    async with served(echoing(lambda answers: [answers[2], answers[0]])) as rpc:
        first, second, third = await rpc.publish_each([("a", []), ("b", []), ("c", [])])
    assert (first, third) == ("a", "c")
    assert isinstance(second, RpcOutcomeUnknown)


async def test_lost_batch_is_not_published_again() -> None:
    seen = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.Response(status=503)

    async with served(handler) as rpc:
        found = await rpc.publish_each([("a", []), ("b", [])])
    assert [type(each) for each in found] == [HttpFailure, HttpFailure]
    assert len(seen) == 1


async def test_no_batch_is_published_after_the_lease() -> None:
    async with DaemonRpc(
        DaemonEndpoint("node", "http://127.0.0.1:1"), has_time=lambda: False
    ) as rpc:
        found = await rpc.publish_each([("a", []), ("b", [])])
    assert ["lease" in str(each) for each in found] == [True, True]


_NO_BATCHES: dict[str, object] = {
    "id": None,
    "error": {"code": -32600, "message": "no batches here"},
}


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (json.dumps(_NO_BATCHES), 200), (json.dumps([_NO_BATCHES]), 200),
        (json.dumps(_NO_BATCHES), 400), ("method not allowed", 405), ("too large", 413),
    ],
)  # fmt: skip
async def test_node_that_refuses_batches_is_sent_no_more(text: str, status: int) -> None:
    seen = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.Response(text=text, status=status)

    async with served(handler) as rpc:
        for _ in range(2):
            with pytest.raises(BatchRefused):
                await rpc.read_all([("a", []), ("b", [])])
    assert len(seen) == 1


async def test_busy_node_has_not_refused_batches() -> None:
    async def handler(_: web.Request) -> web.Response:
        return web.Response(status=503)

    async with served(handler) as rpc:
        with pytest.raises(HttpFailure):
            await rpc.read_all([("a", []), ("b", [])])


# --- a node that asks for fewer calls ----------------------------------------------------------


def limiting(seen: list[object], error: dict[str, object] | None, **headers: str) -> Handler:
    """Refuses each call: by HTTP status 429, or by an error of JSON-RPC."""

    async def handler(request: web.Request) -> web.Response:
        seen.append(call := await request.json())
        if error is None:
            return web.Response(status=429, headers=headers)
        return web.json_response({"id": call["id"], "error": error})

    return handler


@pytest.mark.parametrize(
    "error",
    [
        None, {"code": 429, "message": "slow down"},
        {"code": -32005, "message": "daily request count exceeded, request rate limited"},
        {"code": -32007, "message": "50/second request limit reached"},
    ],
)  # fmt: skip
async def test_node_that_asks_for_fewer_calls_rests(error: dict[str, object] | None) -> None:
    seen: list[object] = []
    async with served(limiting(seen, error)) as rpc:
        with pytest.raises(TooManyCalls):
            await rpc.read("any")
        for call in (rpc.read("any"), rpc.act("any"), rpc.read_all([("any", [])])):
            with pytest.raises(Resting):
                await call
    assert len(seen) == 1


@pytest.mark.parametrize("refused", [0, 1])
async def test_refusal_within_a_batch_lengthens_the_rest(
    refused: int,
) -> None:
    """Whatever the node answers besides, and in whichever order."""
    now = 0
    error = {"error": {"code": 429, "message": "slow down"}}

    async def handler(request: web.Request) -> web.Response:
        calls = await request.json()
        given = [{"id": call["id"], "result": 1} for call in calls]
        given[refused] = {"id": calls[refused]["id"], **error}
        return web.json_response(given)

    rests = []
    async with served(handler) as rpc:
        rpc._limit = CallLimit(lambda: now)
        for _ in range(3):
            with pytest.raises(TooManyCalls):
                await rpc.read_all([("a", []), ("b", [])])
            assert rpc._limit._until is not None
            rests.append(rpc._limit._until - now)
            now = rpc._limit._until
    assert rests == [1_000, 2_000, 4_000]


@pytest.mark.parametrize(
    "error",
    [
        {"code": 3, "message": "execution reverted: too many requests"},
        {"code": -32005, "message": "query returned more than 10000 results"},
        {"code": -32600, "message": "batch of 2: request limit is 1"},
        {"code": -32000, "message": "eth_getLogs requests limited to 2000 block range"},
        {"code": -32000, "message": "transaction pool at capacity"},
    ],
)
async def test_other_errors_begin_no_rest(error: dict[str, object]) -> None:
    seen: list[object] = []
    async with served(limiting(seen, error)) as rpc:
        for _ in range(2):
            with pytest.raises(NodeError):
                await rpc.read("any")
    assert len(seen) == 2


def test_rests_double_and_an_answer_shortens_them() -> None:
    now = 0
    limit = CallLimit(lambda: now)

    def rest() -> int:
        nonlocal now
        begun = now
        limit.refused()
        limit.refused()  # as by a call that was on its way
        while limit.is_resting():
            now += 500
        return now - begun

    assert [rest() for _ in range(8)] == [1000, 2000, 4000, 8000, 16_000, 32_000, 60_000, 60_000]
    limit.answered()
    assert rest() == 1000


@pytest.mark.parametrize(
    ("asked", "rest"),
    [
        ("7", 7_000),
        ("0", 1_000),
        ("86400", 300_000),
        ("soon", 1_000),
        ("-5", 1_000),
        ("²", 1_000),
        ("9" * 5_000, 1_000),
    ],
)
def test_retry_after_is_kept_within_bounds(asked: str, rest: int) -> None:
    now = 0
    limit = CallLimit(lambda: now)
    limit.refused(asked)
    now = rest - 1
    assert limit.is_resting()
    now = rest
    assert not limit.is_resting()
