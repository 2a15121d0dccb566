"""Followers: people who read an order's events by cursor, from any replica that answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

_WAITS: Final = (0, 5, 25)
_PAUSES: Final = (0.1, 5, 30)
_ENDS: Final = ("completed", "terminal_failure")

# Asks a service for the events after a cursor, and waits some seconds for them.
Ask = Callable[[int, int], Awaitable[dict[str, Any]]]


class Follower:
    """Reads the events of one order, each once and in order, until the order has ended."""

    def __init__(self, order_id: str, chance: random.Random, ask: Ask) -> None:
        self.order_id = order_id
        self.events: list[dict[str, Any]] = []
        self.violations: list[str] = []
        self._chance = chance
        self._ask = ask

    @property
    def cursor(self) -> int:
        """The number of the last event that was read."""
        return len(self.events)

    async def run(self) -> None:
        """Read on and on."""
        while not await self.read(self._chance.choice(_WAITS)):  # noqa: ASYNC110 - over a network
            await asyncio.sleep(self._chance.choice(_PAUSES))

    async def read(self, seconds: int = 0) -> bool:
        """Read once; whether the order has ended and there is nothing more."""
        answer = await self._ask(self.cursor, seconds)
        data = answer["data"]
        for event in data["events"]:
            if event["cursor"] != self.cursor + 1:
                self.violations.append(
                    f"a follower of {self.order_id} got event {event['cursor']} after {self.cursor}"
                )
                return True
            self.events.append(event)
        if data["cursor"] != self.cursor:
            self.violations.append(
                f"a follower of {self.order_id} is told cursor {data['cursor']} at {self.cursor}"
            )
            return True
        return answer["state"] in _ENDS and not data["events"]
