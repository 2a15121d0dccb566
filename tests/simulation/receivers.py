"""Receivers of webhooks: models of people's HTTPS servers, and what each of them was told.

The product's sender runs unchanged; its look-ups and its TLS are left out. What a receiver is told
is compared with the contract when it comes: who signed it, which event it is, and what came before.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Final
from unittest.mock import patch

import orjson
from aiohttp import ServerDisconnectedError
from yarl import URL

from rpcsvc import webhook_sender
from tests.simulation.daemons import not_reached

_LONGEST_WAY: Final = 0.2
# More than a sender waits.
_HANGS: Final = 40
# A machine's clock is wrong by as much, and a message is as long under way.
_MOST_OFF_SECONDS: Final = 301
_GOOD: Final = range(200, 300)


class HookModel:
    """A server for the events of one order.

    ``manner``: steady, flaky (until the faults end), silent (never answers), or gone (it answers
    410 to the third message). ``taken``: the events that it answered for with 2xx, by sequence.
    """

    def __init__(self, number: int, manner: str, chance: random.Random) -> None:
        self.manner = manner
        self.order_id: str | None = None
        self.heard: dict[int, dict[str, Any]] = {}
        self.taken: set[int] = set()
        self.url = f"https://hooks-{number}.example.net/swaps/{number}"
        self.violations: list[str] = []
        self._key = chance.randbytes(32)
        self._chance = chance

    @property
    def param(self) -> dict[str, str]:
        """The webhook as an orderer names it."""
        return {"url": self.url, "secret": f"whsec_{base64.b64encode(self._key).decode()}"}

    def hear(self, headers: dict[str, str], body: bytes, sent_at: int) -> int:
        """Compare a message, sent at some ms, with the contract; its sequence."""
        message = orjson.loads(body)
        name, second = headers["webhook-id"], headers["webhook-timestamp"]
        data = message["data"]
        order_id, sequence = data["orderId"], data["sequence"]
        digest = hmac.digest(self._key, f"{name}.{second}.".encode() + body, "sha256")
        signature = f"v1,{base64.b64encode(digest).decode()}"
        if signature not in headers["webhook-signature"].split():
            self.violations.append(f"{name} has a wrong signature")
        if abs(int(second) * 1000 - sent_at) > _MOST_OFF_SECONDS * 1000:
            self.violations.append(f"{name} is of another time, {second}")
        if self.order_id not in (None, order_id) or name != f"msg_{order_id[4:]}_{sequence}":
            self.violations.append(f"{name} is event {sequence} of {order_id}")
        self.order_id = order_id
        event = {name: message[name] for name in ("type", "timestamp")} | data["event"]
        if (known := self.heard.setdefault(sequence, event)) != event:
            self.violations.append(f"{name} said {known}, and then {event}")
        if sequence > 1 and self.manner in ("steady", "flaky") and sequence - 1 not in self.taken:
            self.violations.append(f"{name} came before the one that is due was taken")
        return int(sequence)

    def draw(self, *, is_striking: bool) -> str:
        """How it treats the next message."""
        if self.manner == "silent":
            return "hangs"
        if self.manner == "gone" and len(self.taken) > 1:
            return "410"
        if self.manner != "flaky" or not is_striking:
            return "200"
        return self._chance.choice(
            ["200"] * 3 + ["500", "429", "301", "hangs", "lost", "unreached"]
        )

    def way(self) -> float:
        """How long (s) a message is on its way."""
        return self._chance.random() * _LONGEST_WAY


class Receivers:
    """The servers by URL."""

    def __init__(self, now: Callable[[], int]) -> None:
        self.known: dict[str, HookModel] = {}
        self.is_striking = False
        self._now = now

    def make(self, number: int, chance: random.Random) -> HookModel:
        """A server that one person has."""
        manner = chance.choice(["steady", "flaky", "flaky", "flaky", "silent", "gone"])
        made = HookModel(number, manner, chance)
        self.known[made.url] = made
        return made

    @contextmanager
    def carrying(self) -> Iterator[None]:
        """Have the product's sender send to them."""

        def session(**_options: Any) -> _HookSession:
            return _HookSession(self)

        trust = SimpleNamespace(create_default_context=lambda: None)
        with (
            patch.object(webhook_sender, "ClientSession", session),
            patch.object(webhook_sender, "ssl", trust),
        ):
            yield

    async def answer(self, url: URL, headers: dict[str, str], body: bytes) -> _HookAnswer:
        """The answer to a message. Raises what aiohttp raises."""
        receiver, sent_at = self.known[str(url)], self._now()
        await asyncio.sleep(receiver.way())
        treated = receiver.draw(is_striking=self.is_striking)
        if treated == "unreached":
            raise not_reached(url)
        sequence = receiver.hear(headers, body, sent_at)
        await asyncio.sleep(_HANGS if treated == "hangs" else receiver.way())
        if treated == "lost":
            raise ServerDisconnectedError
        status = 200 if treated == "hangs" else int(treated)
        if status in _GOOD:
            receiver.taken.add(sequence)
        return _HookAnswer(status, {"retry-after": "7"} if status == 429 else {})


class _HookAnswer:
    """As much of an aiohttp response as the product's sender reads."""

    def __init__(self, status: int, headers: dict[str, str]) -> None:
        self.status = status
        self.headers = headers

    def close(self) -> None:
        pass


class _HookExchange:
    """One request of a session, as ``async with`` uses it."""

    def __init__(self, receivers: Receivers, url: URL, headers: dict[str, str], body: bytes):
        self._asked = url, headers, body
        self._receivers = receivers

    async def __aenter__(self) -> _HookAnswer:
        return await self._receivers.answer(*self._asked)

    async def __aexit__(self, *_: object) -> None:
        pass


class _HookSession:
    """As much of an aiohttp session as the product's sender uses."""

    def __init__(self, receivers: Receivers) -> None:
        self._receivers = receivers

    async def __aenter__(self) -> _HookSession:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    def post(self, url: URL, *, data: bytes, headers: dict[str, str], **_: Any) -> _HookExchange:
        return _HookExchange(self._receivers, url, headers, data)
