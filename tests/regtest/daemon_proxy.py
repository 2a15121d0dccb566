"""A proxy to a daemon that can delay, drop or change its answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final

import aiohttp
from aiohttp import web

from tests.e2e.processes import free_port

GARBAGE: Final = b"<html>502, probably</html> {{{"
_HOP: Final = frozenset({"host", "connection", "keep-alive", "content-length", "transfer-encoding"})

# Changes an answer, given the request (its path and body) and the answer.
Change = Callable[[bytes, bytes], bytes]
# Answers a call (its body) in place of the daemon; None: the call is passed on.
StandIn = Callable[[bytes], Awaitable[bytes | None]]


class DaemonProxy:
    """A proxy between the service and one daemon. ``change`` is applied to each answer.

    Calls that ``stand_in`` answers never reach the daemon; ``clear`` keeps it. Answers for which
    ``lose`` is true are dropped, and counted in ``lost``.
    """

    def __init__(self, target: str) -> None:
        self.port = free_port()
        self.change: Change | None = None
        self.stand_in: StandIn | None = None
        self.lose: Callable[[bytes], bool] | None = None
        self.lost = 0
        self.delay = 0.0
        self._target = target
        self._session: aiohttp.ClientSession | None = None

    @property
    def url(self) -> str:
        """The URL that the service has for the daemon."""
        return f"http://127.0.0.1:{self.port}"

    def clear(self) -> None:
        """Pass all answers on unchanged from now on."""
        self.change, self.lose, self.delay = None, None, 0.0

    async def handle(self, request: web.BaseRequest) -> web.StreamResponse:
        """Pass one call on."""
        body = await request.read()
        if self.stand_in is not None and (said := await self.stand_in(body)) is not None:
            return web.Response(body=said, content_type="application/json")
        try:
            status, headers, answer = await self._asked(request, body)
        except aiohttp.ClientError:
            return self._cut(request)
        await asyncio.sleep(self.delay)
        if self.lose is not None and self.lose(body):
            self.lost += 1
            return self._cut(request)
        if self.change is not None and status == web.HTTPOk.status_code:
            answer = self.change(body, answer)
        return web.Response(status=status, headers=headers, body=answer)

    async def _asked(
        self, request: web.BaseRequest, body: bytes
    ) -> tuple[int, dict[str, str], bytes]:
        assert self._session is not None
        passed = {k: v for k, v in request.headers.items() if k.lower() not in _HOP}
        async with self._session.post(
            self._target + request.path_qs, data=body, headers=passed
        ) as response:
            kept = {k: v for k, v in response.headers.items() if k.lower() not in _HOP}
            return response.status, kept, await response.read()

    @staticmethod
    def _cut(request: web.BaseRequest) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=502)

    @asynccontextmanager
    async def open(self, connections: int = 1) -> AsyncIterator[DaemonProxy]:
        """Serve within the block, over one connection to the daemon: digest nonces belong to it."""
        runner = web.ServerRunner(web.Server(self.handle))
        connector = aiohttp.TCPConnector(limit=connections)
        async with aiohttp.ClientSession(connector=connector, auto_decompress=False) as session:
            self._session = session
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", self.port).start()
            try:
                yield self
            finally:
                await runner.cleanup()


class BetweenLooks:
    """Has a block come between monerod's look into its chain and the one into its pool.

    It stands in for so many look-ups (``left``) of transactions that are not all mined, and answers
    as monerod does then: ``missed`` are those that the block took from the pool.
    """

    def __init__(self, target: str, mine: Callable[[], Awaitable[object]], left: int = 0) -> None:
        self._url = f"{target}/get_transactions"
        self._mine = mine
        self.left = left
        self.missed: list[str] = []

    async def __call__(self, body: bytes) -> bytes | None:
        """Answer a look-up of transactions; pass every other call on."""
        asked = json.loads(body)
        if self.left <= 0 or "txs_hashes" not in asked:
            return None
        shown = [item for item in await self._look(body) if not item["in_pool"]]
        if len(shown) == len(asked["txs_hashes"]):
            return None
        self.left -= 1
        await self._mine()
        after = await self._look(body)
        shown += [item for item in after if item["in_pool"]]
        found = {item["tx_hash"] for item in shown}
        missed = [txid for txid in asked["txs_hashes"] if txid not in found]
        self.missed += missed
        said = {"status": "OK", "untrusted": False, "txs": shown, "missed_tx": missed}
        return json.dumps(said).encode()

    async def _look(self, body: bytes) -> list[dict[str, Any]]:
        async with aiohttp.ClientSession() as session, session.post(self._url, data=body) as reply:
            answer: dict[str, Any] = await reply.json(content_type=None)
            return list(answer.get("txs", []))


def garbage(_body: bytes, _answer: bytes) -> bytes:
    """The answer of a broken gateway."""
    return GARBAGE


def replacing(old: bytes, new: bytes) -> Change:
    """A change that replaces one text in all answers."""
    return lambda _body, answer: answer.replace(old, new)
