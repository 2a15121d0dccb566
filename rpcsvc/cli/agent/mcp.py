"""``rpcsvc mcp``: MCP over stdin and stdout, for agents that start servers as programs.

It forwards each message to /mcp of a service: the one at ``--url``, else the one that runs on the
data directory, else one that this process runs until stdin ends. stdout carries only messages.
"""

from __future__ import annotations

import asyncio
import json
import sys
import threading  # noqa: TID251 - a read from a silent client must not keep the process alive
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any, BinaryIO, Final

from rpcsvc.cli.context import OK, Context, Json, add_common, add_target
from rpcsvc.cli.opening import in_process
from rpcsvc.client.aio import AioTransport
from rpcsvc.client.errors import Unreachable
from rpcsvc.client.transport import (
    Endpoint,
    ServiceRequest,
    Transport,
    find_endpoint,
    headers_of,
    not_this_service,
)
from rpcsvc.http.mcp.revisions import mirrored
from rpcsvc.http.site import MCP_PATH
from rpcsvc.logs import configure_logging
from rpcsvc.settings import Settings

_UNREACHABLE: Final = -32000
# A call may wait for an event.
_SECONDS: Final = 60.0


def add_commands(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("mcp", help="speak MCP on stdin and stdout, for desktop agents")
    add_common(parser)
    add_target(parser)
    parser.set_defaults(command=run_mcp)


def run_mcp(context: Context) -> int:
    """Forward messages until stdin ends; returns the exit status.

    Raises UsageError, BadUrl, SettingsError and Unreachable before the first message.
    """
    settings = context.settings()
    configure_logging(settings.log.format, "warning")
    endpoint = find_endpoint(context.url(), settings.data_dir)
    token = context.token(settings)
    if endpoint is not None:
        asyncio.run(_relay(endpoint, token, asyncio.Event()))
        return OK
    with in_process(settings):
        asyncio.run(_serve_and_relay(context, settings))
    return OK


async def _serve_and_relay(context: Context, settings: Settings) -> None:
    async with AsyncExitStack() as stack:
        ended = await stack.enter_async_context(context.private(settings))
        endpoint = await asyncio.to_thread(find_endpoint, None, settings.data_dir)
        if endpoint is None:
            raise Unreachable(f"No socket could be made in the data directory {settings.data_dir}.")
        await _relay(endpoint, None, ended)


async def _relay(endpoint: Endpoint, token: str | None, ended: asyncio.Event) -> None:
    """Answer each line of stdin on stdout, several at a time, until stdin or the service ends."""
    transport = AioTransport(endpoint)
    service = McpForwarder(transport, token if endpoint.takes_token else None)

    async def answer(line: bytes) -> None:
        message = await service.answer(line)
        if message is not None:
            sys.stdout.buffer.write(message + b"\n")
            sys.stdout.buffer.flush()

    try:
        async with asyncio.TaskGroup() as group:
            async for line in _lines(sys.stdin.buffer, ended):
                group.create_task(answer(line))
    finally:
        await transport.close()


async def _lines(stream: BinaryIO, ended: asyncio.Event) -> AsyncIterator[bytes]:
    """The lines of a blocking stream, until it or the service ends."""
    loop = asyncio.get_running_loop()
    lines: asyncio.Queue[bytes | None] = asyncio.Queue()

    def read() -> None:
        for line in stream:
            loop.call_soon_threadsafe(lines.put_nowait, line)
        loop.call_soon_threadsafe(lines.put_nowait, None)

    threading.Thread(target=read, daemon=True).start()
    stopped = asyncio.ensure_future(ended.wait())
    stopped.add_done_callback(lambda _task: lines.put_nowait(None))
    try:
        while (line := await lines.get()) is not None:
            if line.strip():
                yield line
    finally:
        stopped.cancel()


class McpForwarder:
    """Forwards messages to /mcp of a service."""

    def __init__(self, transport: Transport, token: str | None) -> None:
        self._transport = transport
        self._token = token

    async def answer(self, line: bytes) -> bytes | None:
        """The answer to one message as one line; None for a notification."""
        message = _read(line)
        call_id = message.get("id")
        if "method" in message and "id" not in message:
            await self._send(line, message)
            return None
        answered = await self._send(line, message)
        if answered.get("id") is None:  # refused before it was read
            answered["id"] = call_id
        return json.dumps(answered, ensure_ascii=False).encode("utf-8", "backslashreplace")

    async def _send(self, line: bytes, message: Json) -> Json:
        method, params = message.get("method"), message.get("params")
        headers = headers_of(self._token)
        if isinstance(method, str) and isinstance(params, dict):
            headers |= mirrored(method, params)
        try:
            reply = await self._transport.exchange(
                ServiceRequest("POST", MCP_PATH, line.strip(), headers, _SECONDS)
            )
            if reply.status == 202:
                return {}
            found = _read(reply.body)
            if found.get("jsonrpc") != "2.0":
                raise not_this_service(self._transport.name, MCP_PATH, reply.status)
        except Unreachable as error:
            return _failure(str(error))
        return found


def _read(text: bytes) -> Json:
    """Parse a JSON object; empty for anything else, which the service refuses."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _failure(why: str) -> Json:
    data = {"code": "unavailable", "message": why, "retryable": True}
    return {"jsonrpc": "2.0", "error": {"code": _UNREACHABLE, "message": why, "data": data}}
