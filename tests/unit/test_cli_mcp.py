"""``rpcsvc mcp``: every request of a client is answered under its id, also after errors."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from rpcsvc.cli.agent.mcp import McpForwarder
from rpcsvc.client.aio import AioTransport
from rpcsvc.client.transport import endpoint_of
from tests.mcp import meta

Handler = Callable[[web.Request], Any]


@asynccontextmanager
async def service(handler: Handler, token: str | None = None) -> AsyncIterator[McpForwarder]:
    app = web.Application()
    app.router.add_post("/mcp", handler)
    async with TestServer(app) as server, at(str(server.make_url("/"))) as transport:
        yield McpForwarder(transport, token)


@asynccontextmanager
async def at(url: str) -> AsyncIterator[AioTransport]:
    transport = AioTransport(endpoint_of(url))
    yield transport
    await transport.close()


async def answer(passed_on: McpForwarder, message: Any) -> Any:
    line = message if isinstance(message, bytes) else json.dumps(message).encode() + b"\n"
    written = await passed_on.answer(line)
    return None if written is None else json.loads(written)


async def test_mcp_mirrors_the_message_in_headers_and_sends_the_token() -> None:
    seen: list[web.Request] = []

    async def handle(request: web.Request) -> web.Response:
        seen.append(request)
        return web.json_response({"jsonrpc": "2.0", "id": 1, "result": {}})

    async with service(handle, "secret") as passed_on:
        params = {"name": "get_quote", "_meta": meta()}
        sent = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        assert (await answer(passed_on, sent))["result"] == {}
    (request,) = seen
    assert request.headers["mcp-method"] == "tools/call"
    assert request.headers["mcp-name"] == "get_quote"
    assert request.headers["x-agent-rpc-token"] == "secret"


@pytest.mark.parametrize("call_id", ["a", 5])
async def test_mcp_gives_a_refusal_the_id_of_its_request(call_id: Any) -> None:
    async def refuse(_request: web.Request) -> web.Response:
        error = {"code": -32001, "message": "Send the token."}
        return web.json_response({"jsonrpc": "2.0", "id": None, "error": error}, status=401)

    async with service(refuse) as passed_on:
        reported = await answer(
            passed_on, {"jsonrpc": "2.0", "id": call_id, "method": "tools/list"}
        )
        assert (reported["id"], reported["error"]["code"]) == (call_id, -32001)


@pytest.mark.parametrize("body", [b"<html>", b"[]", b'{"ok": true}', b""])
async def test_mcp_reports_an_answer_that_is_none(body: bytes) -> None:
    async def gateway(_request: web.Request) -> web.Response:
        return web.Response(body=body, status=502)

    async with service(gateway) as passed_on:
        reported = await answer(passed_on, {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
        assert reported["id"] == 1
        assert "HTTP 502" in reported["error"]["message"]


async def test_mcp_answers_for_a_service_that_is_gone() -> None:
    async with at("http://127.0.0.1:1") as nobody:
        gone = McpForwarder(nobody, None)
        reported = await answer(gone, {"jsonrpc": "2.0", "id": 1, "method": "tools/list"})
        assert (reported["id"], reported["error"]["data"]["retryable"]) == (1, True)
        note = {"jsonrpc": "2.0", "method": "notifications/initialized"}
        assert await answer(gone, note) is None


async def test_mcp_passes_a_line_on_that_is_no_message() -> None:
    async def handle(request: web.Request) -> web.Response:
        assert await request.read() == b"{"
        error = {"code": -32700, "message": "no JSON"}
        return web.json_response({"jsonrpc": "2.0", "id": None, "error": error}, status=400)

    async with service(handle) as passed_on:
        assert (await answer(passed_on, b"{\n"))["error"]["code"] == -32700
