"""Daemons in the loop: what the product's HTTP client sends reaches models, over a faulty network.

A request acts when it arrives, whether or not its caller is still there. What becomes of request
and answer is drawn from the seed.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import copy_context
from functools import partial
from types import SimpleNamespace
from typing import Any, Final, NamedTuple, Protocol, runtime_checkable
from unittest.mock import patch

import orjson
from aiohttp import ClientConnectorError, ServerDisconnectedError
from aiohttp.client_reqrep import ConnectionKey
from yarl import URL

from rpcsvc.settlement.onchain import daemon_rpc
from tests.simulation.loop import ACTOR

_SLOWEST_SECONDS: Final = 40


class CallRefused(Exception):
    """A daemon's own error answer (JSON-RPC)."""

    def __init__(self, code: int, text: str, data: Any = None) -> None:
        super().__init__(text)
        self.error = {"code": code, "message": text} | ({} if data is None else {"data": data})


class DaemonModel(Protocol):
    """A model that answers as a daemon does. Raises CallRefused."""

    def call(self, method: str, params: Any) -> Any:
        """The result of a JSON-RPC call."""
        ...

    def call_path(self, path: str, body: dict[str, Any]) -> Any:
        """The answer of a plain JSON path, of a daemon that has some."""
        raise LookupError(path)


@runtime_checkable
class SharedName(Protocol):
    """Several daemons behind one address."""

    def one(self, asked: Any) -> DaemonModel:
        """Return the daemon that answers the next exchange; ``asked``: its JSON."""
        ...


class NetworkFaults(NamedTuple):
    """How likely each fault of one exchange is. ``delay_ms``: the longest usual way of a message.

    ``unreached``: no connection is made. ``unread``: the connection is lost before the daemon acts.
    ``lost``: it is lost after. ``slow``: the answer takes up to 40 s. ``busy``: HTTP 503 of a proxy
    before the daemon. ``cut``: the answer is half of one.
    """

    unreached: float = 0.0
    unread: float = 0.0
    lost: float = 0.0
    slow: float = 0.0
    busy: float = 0.0
    cut: float = 0.0
    delay_ms: float = 2.0


NO_FAULTS: Final = NetworkFaults()


class Network:
    """The hosts by name and port, and what happens to what is sent to them."""

    def __init__(self, loop: asyncio.AbstractEventLoop, chance: random.Random) -> None:
        self._loop = loop
        self._chance = chance
        self._daemons: dict[str, DaemonModel | SharedName] = {}
        self._outside = copy_context()
        self._outside.run(ACTOR.set, None)
        self.away: list[str] = []
        # Hosts that answer nothing, and whether they carry out what they are asked.
        self.hung: dict[str, bool] = {}
        # Methods whose requests reach no daemon.
        self.blocked: frozenset[str] = frozenset()
        # Called with the method of each request, before its daemon acts and after it has.
        self.watch: Callable[[str, bool], None] = lambda _method, _is_done: None
        # Called with the method of each request, in its sender; whether the answer takes long.
        self.sent: Callable[[str], bool] = lambda _method: False
        self.faults = NO_FAULTS
        self.exchanges = 0

    def serve(self, host: str, daemon: DaemonModel | SharedName) -> str:
        """Let a daemon answer at a host; its URL."""
        self._daemons[f"{host}:80"] = daemon
        return f"http://{host}:80"

    @contextmanager
    def carrying(self) -> Iterator[None]:
        """Have the product's daemon clients send over this network."""
        with patch.object(daemon_rpc, "ClientSession", partial(_Session, self)):
            yield

    async def exchange(self, url: URL, body: bytes) -> _Answer:
        """Send a request and wait for its answer. Raises what aiohttp raises."""
        answer: asyncio.Future[_Answer] = self._loop.create_future()
        methods = [item.get("method", url.path) for item in _each(orjson.loads(body))]
        slow = [self.sent(method) for method in methods]
        self._later(self._travel(), partial(self._arrive, url, body, answer, any(slow)))
        return await answer

    def _travel(self) -> float:
        return self._chance.random() * self.faults.delay_ms / 1000

    def _later(self, seconds: float, act: Callable[[], None]) -> None:
        self._loop.call_later(seconds, act, context=self._outside)

    def _arrive(
        self, url: URL, body: bytes, answer: asyncio.Future[_Answer], is_slow: bool
    ) -> None:
        """The request is at the daemon, or lost on the way."""
        self.exchanges += 1
        host, faults = f"{url.host}:{url.port}", self.faults
        asked = orjson.loads(body)
        names = [item.get("method", url.path) for item in _each(asked)]
        if self.hung.get(host) is False:
            return
        is_away = host in self.away or not self.blocked.isdisjoint(names)
        if is_away or self._strikes(faults.unreached):
            self._end(answer, not_reached(url))
        elif self._strikes(faults.unread):
            self._end(answer, ServerDisconnectedError())
        elif self._strikes(faults.busy):
            self._end(answer, _Answer(503, b"busy"))
        else:
            self._watched(names, is_done=False)
            content = _answered(self._daemons[host], url.path, asked)
            self._watched(names, is_done=True)
            if host in self.hung:
                return
            if self._strikes(faults.lost):
                self._end(answer, ServerDisconnectedError())
            elif self._strikes(faults.cut):
                self._end(answer, _Answer(200, content[: len(content) // 2]))
            else:
                slow = is_slow or self._strikes(faults.slow)
                wait = self._chance.random() * _SLOWEST_SECONDS if slow else self._travel()
                self._later(wait, partial(_set, answer, _Answer(200, content)))

    def _watched(self, methods: list[str], *, is_done: bool) -> None:
        for method in methods:
            self.watch(method, is_done)

    def _strikes(self, rate: float) -> bool:
        return rate > 0 and self._chance.random() < rate

    def _end(self, answer: asyncio.Future[_Answer], outcome: _Answer | Exception) -> None:
        self._later(self._travel(), partial(_set, answer, outcome))


def _set(answer: asyncio.Future[_Answer], outcome: _Answer | Exception) -> None:
    """The caller gets it, unless it is gone."""
    if answer.done():
        return
    if isinstance(outcome, Exception):
        answer.set_exception(outcome)
    else:
        answer.set_result(outcome)


def _each(body: Any) -> list[dict[str, Any]]:
    """Return the calls of a request, which may be a batch."""
    return body if isinstance(body, list) else [body]


def _answered(daemon: DaemonModel | SharedName, path: str, body: Any) -> bytes:
    """Return the answer to a request. One daemon answers all calls of a batch."""
    one = daemon.one(body) if isinstance(daemon, SharedName) else daemon
    if isinstance(body, list):
        return orjson.dumps([_result(one, each) for each in body])
    if "jsonrpc" not in body:
        return orjson.dumps(one.call_path(path, body))
    return orjson.dumps(_result(one, body))


def _result(daemon: DaemonModel, body: dict[str, Any]) -> dict[str, Any]:
    answer = {"jsonrpc": "2.0", "id": body["id"]}
    try:
        answer["result"] = daemon.call(body["method"], body.get("params"))
    except CallRefused as refused:
        answer["error"] = refused.error
    return answer


def not_reached(url: URL) -> ClientConnectorError:
    key = ConnectionKey(url.host or "", url.port, False, True, None, None, None)
    return ClientConnectorError(key, ConnectionRefusedError(111, "refused"))


class _Answer:
    """As much of an aiohttp response as the product's HTTP client reads."""

    headers: Mapping[str, str] = {}

    def __init__(self, status: int, body: bytes) -> None:
        self.status = status
        self.content_length = len(body)
        self.content = SimpleNamespace(iter_chunked=self._chunks)
        self._body = body

    async def _chunks(self, size: int) -> AsyncIterator[bytes]:
        for at in range(0, len(self._body), size):
            yield self._body[at : at + size]

    def close(self) -> None:
        pass


class _Exchange:
    """One request of a session, as ``async with`` uses it."""

    def __init__(self, network: Network, url: URL, body: bytes) -> None:
        self._network = network
        self._url = url
        self._body = body

    async def __aenter__(self) -> _Answer:
        return await self._network.exchange(self._url, self._body)

    async def __aexit__(self, *_: object) -> None:
        pass


class _Session:
    """As much of an aiohttp session as the product's HTTP client uses."""

    def __init__(self, network: Network, **_options: Any) -> None:
        self._network = network

    def request(self, _method: str, url: URL, *, data: bytes, **_options: Any) -> _Exchange:
        return _Exchange(self._network, url, data)

    async def close(self) -> None:
        pass
