"""A beat of the worker: what breaks in one part of it holds up none of the others."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
from structlog.testing import LogCapture

from rpcsvc.domain.states import OnDeadline
from rpcsvc.errors import Unavailable
from rpcsvc.orders.aside import OrdersAside
from rpcsvc.orders.worker import Worker
from tests.logs import captured
from tests.sandbox import ManualClock


class Parts:
    """Everything that a worker moves. ``broken``: what each part raises instead, by its name."""

    def __init__(self, **broken: Exception) -> None:
        self.aside = OrdersAside()
        self.broken = broken
        self.done: list[str] = []
        self.left_out: list[OnDeadline | None] = []

    def _do(self, name: str) -> None:
        if name in self.broken:
            raise self.broken[name]
        self.done.append(name)

    async def reconcile(self) -> int:
        self._do("reconcile")
        return 1

    def overdue(self, _now: int, _most: int, but: OnDeadline | None = None) -> list[str]:
        self._do("overdue")
        self.left_out.append(but)
        return []

    async def forget_responses(self, _before: int) -> int:
        self._do("forget_responses")
        return 0

    def start_due(self) -> int:
        self._do("start_due")
        return 2

    def recover(self) -> int:
        return 0

    async def drain(self) -> None:
        pass


def worker_of(parts: Parts, *, paused: bool = False) -> Worker:
    anything = cast("Any", parts)
    return Worker(
        anything, anything, anything, anything, ManualClock(), keep_responses_ms=1,
        is_paused=lambda: paused,
    )  # fmt: skip


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> LogCapture:
    """What the worker logs."""
    return captured(monkeypatch, "rpcsvc.orders.worker")


ALL = ["reconcile", "overdue", "start_due", "forget_responses"]


async def test_a_beat_does_all_of_its_parts() -> None:
    parts = Parts()
    assert await worker_of(parts).tick() == 3
    assert parts.done == ALL


@pytest.mark.parametrize("name", ALL)
async def test_a_part_that_breaks_keeps_none_of_the_others_waiting(name: str) -> None:
    parts = Parts(**{name: RuntimeError("a bug")})
    with pytest.raises(RuntimeError, match="a bug"):
        await worker_of(parts).tick()
    assert parts.done == [each for each in ALL if each != name]


async def test_each_failure_is_logged_and_the_first_is_in_health(
    told: LogCapture,
) -> None:
    parts = Parts(start_due=Unavailable("the second"))
    worker = worker_of(parts)
    shown = []

    async def first_part() -> int:
        """It sees what the beat before has left."""
        shown.append(worker.health().detail)
        if len(shown) == 1:
            raise Unavailable("the first")
        parts.broken.clear()
        if len(shown) == 3:
            await worker.stop()
        return 0

    parts.reconcile = first_part  # type: ignore[method-assign]
    async with asyncio.timeout(180):
        await worker.run()
    assert shown == [None, "the first", None]
    reasons = {line["reason"] for line in told.entries if line["event"] == "beat_failed"}
    assert reasons == {"the first", "the second"}


async def test_what_stops_all_parts_is_logged_once(told: LogCapture) -> None:
    down = Unavailable("the database is down")
    worker = worker_of(Parts(**dict.fromkeys(ALL, cast("Exception", down))))
    with pytest.raises(Unavailable):
        await worker.tick()
    assert told.entries == []


@pytest.mark.parametrize(("paused", "left_out"), [(True, OnDeadline.REFUND), (False, None)])
async def test_nothing_turns_into_a_refund_while_payouts_are_paused(
    paused: bool, left_out: OnDeadline | None
) -> None:
    """The operator may know of a payout that the database has lost: he adopts it first."""
    parts = Parts()
    await worker_of(parts, paused=paused).tick()
    assert parts.left_out == [left_out]
