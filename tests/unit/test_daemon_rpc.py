"""The JSON-RPC client of the daemons, against answers that real ones don't give on request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec.structs import replace

from rpcsvc.settlement.onchain.daemon_rpc import (
    BadAnswer,
    DaemonEndpoint,
    DaemonRpc,
    HasTime,
    HttpFailure,
    NodeError,
    NotSent,
    RpcOutcomeUnknown,
    TooLarge,
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
        return web.Response(status=429)

    with pytest.raises(HttpFailure, match="429"):
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
