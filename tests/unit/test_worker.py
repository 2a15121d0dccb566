"""A pass of the worker loop: a failure in one step delays no other step."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast

import pytest
from msgspec.structs import replace
from structlog.testing import LogCapture

from rpcsvc.domain.events import DeadlinePassed
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.order import OnDeadline, Order
from rpcsvc.errors import Unavailable
from rpcsvc.orders.deposits import ScanProgress
from rpcsvc.orders.processor import Quarantine
from rpcsvc.orders.scheduler import worker as worker_module
from rpcsvc.orders.scheduler.worker import LONG_PASS_MS, Deadlines, Worker
from tests.logs import captured
from tests.sandbox import ManualClock
from tests.unit.orders import terms


class Parts:
    """The worker's steps. ``broken``: the error that a step raises, by its name."""

    def __init__(self, **broken: Exception) -> None:
        self.quarantine = Quarantine()
        self.progress = ScanProgress(["monero"], ManualClock())
        self.progress.advance({"monero": 2**62}, {})
        self.broken = broken
        self.done: list[str] = []
        self.left_out: list[OnDeadline | None] = []
        self.late: Order | None = None

    def _do(self, name: str) -> None:
        if name in self.broken:
            raise self.broken[name]
        self.done.append(name)

    async def reconcile(self) -> int:
        self._do("reconcile")
        return 1

    async def overdue(
        self, now: int, _most: int, known: Mapping[str, int], but: OnDeadline | None = None
    ) -> list[str]:
        self._do("overdue")
        assert known == self.progress.complete_until
        self.left_out.append(but)
        late = self.late
        return [late.order_id] if late and late.deadline_at and late.deadline_at <= now else []

    async def order(self, _order_id: str) -> Order | None:
        return self.late

    async def apply(self, _order_id: str, _event: DeadlinePassed) -> None:
        self._do("apply")

    async def start_due(self) -> int:
        self._do("start_due")
        return 2

    async def recover(self) -> int:
        return 0

    async def stop(self) -> None:
        pass


def worker_of(parts: Parts, *, paused: bool = False) -> Worker:
    anything = cast("Any", parts)
    deadlines = Deadlines(
        anything, anything, parts.progress, parts.quarantine, ManualClock(),
        is_paused=lambda: paused,
    )  # fmt: skip

    async def reconcile() -> int:
        return await parts.reconcile()

    steps = (reconcile, deadlines.keep)
    return Worker(steps, parts.quarantine, runners=[anything])


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> LogCapture:
    """The log of the worker."""
    return captured(monkeypatch, "rpcsvc.orders.scheduler.worker")


ALL = ["reconcile", "overdue", "start_due"]


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
    reported: LogCapture,
) -> None:
    parts = Parts(start_due=Unavailable("the second"))
    worker = worker_of(parts)
    shown = []

    async def first_part() -> int:
        """Record the health left by the previous pass."""
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
    reasons = {line["reason"] for line in reported.entries if line["event"] == "worker_pass_failed"}
    assert reasons == {"the first", "the second"}


async def test_a_beat_that_hangs_is_in_health_until_it_ends(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = [7_000]
    monkeypatch.setattr(worker_module, "steady_ms", lambda: now[0])
    parts = Parts()
    worker = worker_of(parts)
    hangs, goes_on = asyncio.Event(), asyncio.Event()

    async def waits_for_a_disk() -> int:
        hangs.set()
        await goes_on.wait()
        await worker.stop()
        return 0

    parts.reconcile = waits_for_a_disk  # type: ignore[method-assign]
    running = asyncio.create_task(worker.run())
    async with asyncio.timeout(180):
        await hangs.wait()
        now[0] += LONG_PASS_MS - 1
        assert worker.health().ok, "it may have much to do"
        now[0] += 1
        assert "has lasted 60 s so far." in str(worker.health().detail)
        assert worker.stall() == worker.health()
        goes_on.set()
        await running
    assert worker.health().ok


async def test_passes_begin_at_even_intervals(monkeypatch: pytest.MonkeyPatch) -> None:
    """A late scan is shown by the next pass, which must not wait for another interval."""
    now, took, pauses = [7_000], [0, 120, 190, 900], list[int]()
    monkeypatch.setattr(worker_module, "steady_ms", lambda: now[0])
    parts = Parts()
    worker = worker_of(parts)

    async def takes_a_while() -> int:
        now[0] += took[len(pauses)]
        return 0

    async def pause(milliseconds: int) -> None:
        pauses.append(milliseconds)
        if len(pauses) == len(took):
            await worker.stop()

    parts.reconcile = takes_a_while  # type: ignore[method-assign]
    monkeypatch.setattr(worker, "_pause", pause)
    await worker.run()
    assert pauses == [200, 80, 50, 50]


async def test_what_stops_all_parts_is_logged_once(reported: LogCapture) -> None:
    down = Unavailable("the database is down")
    worker = worker_of(Parts(**dict.fromkeys(ALL, cast("Exception", down))))
    with pytest.raises(Unavailable):
        await worker.tick()
    assert reported.entries == []


@pytest.mark.parametrize(("paused", "left_out"), [(True, OnDeadline.REFUND), (False, None)])
async def test_nothing_turns_into_a_refund_while_payouts_are_paused(
    paused: bool, left_out: OnDeadline | None
) -> None:
    """The operator may have to adopt a payout that the database has lost first."""
    parts = Parts()
    await worker_of(parts, paused=paused).tick()
    assert parts.left_out == [left_out]


async def test_order_with_a_failing_deadline_is_quarantined_until_met() -> None:
    parts = Parts(apply=RuntimeError("a hole in a rule"))
    parts.late = replace(open_order(terms()), deadline_at=1)
    worker = worker_of(parts)

    await worker.tick()
    assert "ord_1" in parts.quarantine
    assert not worker.health().ok

    parts.broken.clear()
    await worker.tick()
    assert worker.health().ok
    assert "apply" in parts.done


@pytest.mark.parametrize("deadline_at", [None, 2**62])
async def test_order_with_a_postponed_deadline_leaves_quarantine(
    deadline_at: int | None,
) -> None:
    """Otherwise it would stay there until its next deadline, which may never come."""
    parts = Parts(apply=RuntimeError("a hole in a rule"))
    parts.late = replace(open_order(terms()), deadline_at=1)
    worker = worker_of(parts)
    await worker.tick()

    parts.late = replace(parts.late, deadline_at=deadline_at)
    await worker.tick()

    assert worker.health().ok
    assert "apply" not in parts.done


async def test_order_stays_quarantined_while_payouts_are_paused() -> None:
    parts = Parts()
    parts.late = replace(open_order(terms()), deadline_at=2**62)
    with parts.quarantine.isolate("ord_1", DeadlinePassed):
        raise ZeroDivisionError

    await worker_of(parts, paused=True).tick()
    assert "ord_1" in parts.quarantine


class Broken(Parts):
    """``count`` orders whose deadline event can't be recorded, older than all others."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    async def overdue(
        self, now: int, most: int, known: Mapping[str, int], but: OnDeadline | None = None
    ) -> list[str]:
        await super().overdue(now, most, known, but)
        return [f"ord_{number}" for number in range(self.count + 1)][:most]

    async def order(self, order_id: str) -> Order | None:
        return replace(open_order(replace(terms(), order_id=order_id)), deadline_at=1)

    async def apply(self, order_id: str, _event: DeadlinePassed) -> None:
        if order_id != f"ord_{self.count}":
            raise RuntimeError("a hole in a rule")
        self._do(f"apply {order_id}")


async def test_failing_deadlines_block_none_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "DEADLINES_PER_TICK", 2)
    parts = Broken(4)
    worker = worker_of(parts)
    for _ in range(3):
        await worker.tick()
    assert f"apply ord_{parts.count}" in parts.done


async def test_orders_with_unrecorded_deposits_block_none_behind_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(worker_module, "DEADLINES_PER_TICK", 1)
    parts = Broken(4)
    waiting = [f"ord_{number}" for number in range(4)]
    parts.progress.advance({}, dict.fromkeys(waiting, "monero"))

    assert await worker_of(parts).tick() == 4, "those that wait are no work"

    assert parts.done[-1:] == ["start_due"]
    assert "apply ord_4" in parts.done
    assert not any(order_id in parts.quarantine for order_id in waiting), "none of them was tried"


async def test_due_order_waits_when_its_scan_lags_again() -> None:
    parts = Parts()
    parts.late = replace(open_order(terms()), deadline_at=5)
    parts.progress = ScanProgress(["monero"], ManualClock())
    worker = worker_of(parts)
    await worker.tick()
    assert "apply" not in parts.done
    parts.progress.advance({"monero": 4}, {})
    await worker.tick()
    assert "apply" not in parts.done
    parts.progress.advance({"monero": 5}, {})
    await worker.tick()
    assert "apply" in parts.done
