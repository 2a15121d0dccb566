"""The call budget is kept in every window, for any network delays."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcsvc.settlement.upstream.limits import WINDOW_MS, Budget, Demand, Urgency, shared
from rpcsvc.settlement.upstream.transport import BudgetSpent
from tests.unit.virtual_time import VirtualTime

WATCHED, ROUTINE, CREATION = Urgency.WATCHED, Urgency.ROUTINE, Urgency.CREATION
HELD = WINDOW_MS + 250


def simulate(scenario: Callable[[VirtualTime], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(scenario(VirtualTime()))


def budget(time: VirtualTime, per_window: int = 3, *, reserved: int = 0) -> Budget:
    return Budget(per_window, now=time.now_ms, sleep=time.sleep_ms, reserved=reserved)


async def use(b: Budget, urgency: Urgency = WATCHED, *, max_wait_ms: int = 0) -> None:
    with await b.slot(Demand(urgency), max_wait_ms=max_wait_ms):
        pass


CALL = st.tuples(
    st.integers(0, 200_000),  # arrival
    st.integers(0, 40_000),  # duration
    st.sampled_from(Urgency),
    st.integers(0, 150_000),  # longest wait
)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 6), st.data(), st.lists(CALL, max_size=40))
def test_any_60_seconds_stay_within_the_call_limit(
    limit: int, data: st.DataObject, calls: list[tuple[int, int, Urgency, int]]
) -> None:
    reserved = data.draw(st.integers(0, limit - 1))
    made: list[tuple[int, int]] = []

    async def call(b: Budget, time: VirtualTime, spec: tuple[int, int, Urgency, int]) -> None:
        arrival, runs, urgency, max_wait = spec
        await time.sleep_ms(arrival)
        try:
            with await b.slot(Demand(urgency), max_wait_ms=max_wait):
                started = time.now
                await time.sleep_ms(runs)
                made.append((started, time.now))
        except BudgetSpent as error:
            assert (error.retry_after_ms or 0) > 0
        assert time.now <= arrival + max_wait + runs

    async def scenario(time: VirtualTime) -> None:
        b = budget(time, limit, reserved=reserved)
        tasks = [asyncio.create_task(call(b, time, spec)) for spec in calls]
        await time.pass_until(1_000_000)
        await asyncio.gather(*tasks)
        assert b.free() == limit

    simulate(scenario)
    # A call may arrive at any time between its start and end: take the worst case.
    for _, window_start in made:
        within = [1 for s, e in made if s < window_start + WINDOW_MS and e >= window_start]
        assert len(within) <= limit


def test_a_whole_budget_may_be_spent_at_once_and_no_more() -> None:
    async def scenario(time: VirtualTime) -> None:
        b = budget(time, 3)
        for _ in range(3):
            await use(b)

        with pytest.raises(BudgetSpent) as caught:
            await use(b)
        assert caught.value.retry_after_ms == HELD
        assert not caught.value.may_have_acted

        time.now += HELD - 1
        with pytest.raises(BudgetSpent):
            await use(b)
        time.now += 1
        await use(b)

    simulate(scenario)


def test_budget_slot_is_held_for_a_window_after_the_call_ends() -> None:
    async def scenario(time: VirtualTime) -> None:
        b = budget(time, 1)
        with await b.slot(Demand(), max_wait_ms=0):
            time.now += 30_000
        time.now += HELD - 1

        with pytest.raises(BudgetSpent):
            await use(b)

    simulate(scenario)


def test_a_call_that_waits_goes_as_soon_as_there_is_room() -> None:
    async def scenario(time: VirtualTime) -> None:
        b = budget(time, 1)
        await use(b)
        waiting = asyncio.create_task(use(b, max_wait_ms=HELD))
        await time.pass_until(HELD - 1)
        assert not waiting.done()

        await time.pass_until(HELD)

        await waiting

    simulate(scenario)


def test_the_urgent_go_first_however_late_they_come() -> None:
    async def scenario(time: VirtualTime) -> None:
        b, order = budget(time, 1), []

        async def wait(urgency: Urgency) -> None:
            await use(b, urgency, max_wait_ms=10 * HELD)
            order.append(urgency)

        await use(b)
        tasks = []
        for urgency in (ROUTINE, WATCHED, CREATION, WATCHED):
            tasks.append(asyncio.create_task(wait(urgency)))
            await time.settle()
        await time.pass_until(6 * HELD)
        await asyncio.gather(*tasks)

        assert order == [CREATION, WATCHED, WATCHED, ROUTINE]

    simulate(scenario)


def test_routine_calls_leave_the_reserved_slots_to_the_urgent() -> None:
    async def scenario(time: VirtualTime) -> None:
        b = budget(time, 5, reserved=2)
        for _ in range(3):
            await use(b, ROUTINE)

        with pytest.raises(BudgetSpent):
            await use(b, ROUTINE)
        await use(b, WATCHED)
        await use(b, CREATION)
        with pytest.raises(BudgetSpent):
            await use(b, CREATION)

    simulate(scenario)


def test_one_who_gives_up_leaves_the_place_to_the_next() -> None:
    async def scenario(time: VirtualTime) -> None:
        b = budget(time, 1)
        await use(b)
        first = asyncio.create_task(use(b, CREATION, max_wait_ms=HELD))
        second = asyncio.create_task(use(b, WATCHED, max_wait_ms=3 * HELD))
        await time.pass_until(HELD // 2)
        first.cancel()

        await time.pass_until(HELD)

        await second
        assert first.cancelled()

    simulate(scenario)


def test_a_call_that_is_cancelled_while_it_runs_is_counted() -> None:
    async def scenario(time: VirtualTime) -> None:
        b = budget(time, 1)

        async def run() -> None:
            with await b.slot(Demand(), max_wait_ms=0):
                await time.sleep_ms(10_000)

        task = asyncio.create_task(run())
        await time.pass_until(5_000)
        task.cancel()
        await time.settle()

        assert b.free() == 0
        with pytest.raises(BudgetSpent) as caught:
            await use(b)
        assert caught.value.retry_after_ms == HELD

    simulate(scenario)


def test_a_slot_that_was_not_used_is_free_again_at_once() -> None:
    async def scenario(time: VirtualTime) -> None:
        b = budget(time, 1)
        with await b.slot(Demand(), max_wait_ms=0) as slot:
            slot.give_back()

        await use(b)

    simulate(scenario)


def test_calls_of_an_earlier_process_count_after_a_restart() -> None:
    async def scenario(time: VirtualTime) -> None:
        b = budget(time, 2)
        b.remember([70_000, 20_000, 50_000])

        with pytest.raises(BudgetSpent) as caught:
            await use(b)
        assert caught.value.retry_after_ms == HELD - 50_000

    simulate(scenario)


def test_nobody_calls_while_the_upstream_wants_to_be_left_alone() -> None:
    async def scenario(time: VirtualTime) -> None:
        b = budget(time, 3)
        b.pause(30_000)
        b.pause(10_000)

        with pytest.raises(BudgetSpent) as caught:
            await use(b, CREATION)
        assert caught.value.retry_after_ms == 30_000
        assert b.free() == 0

        time.now += 30_000
        await use(b, CREATION)

    simulate(scenario)


def shares(time: VirtualTime, per_window: int) -> tuple[Budget, Budget]:
    return shared(per_window, now=time.now_ms, sleep=time.sleep_ms)


async def use_up(b: Budget, urgency: Urgency) -> int:
    """The number of calls that are admitted at once."""
    for count in range(1_000):
        try:
            await use(b, urgency)
        except BudgetSpent:
            return count
    raise AssertionError("there is no end to it")


@pytest.mark.parametrize("orders_first", [True, False])
@pytest.mark.parametrize("limit", [4, 5, 20, 240])
def test_shared_budget_leaves_each_side_a_quarter(limit: int, orders_first: bool) -> None:
    async def scenario(time: VirtualTime) -> None:
        first, second = shares(time, limit) if orders_first else reversed(shares(time, limit))

        used = await use_up(first, CREATION)
        left = await use_up(second, CREATION)

        assert left >= limit // 4 >= 1
        assert used + left == limit

    simulate(scenario)


def test_limit_too_small_to_share_serves_both_budgets() -> None:
    async def scenario(time: VirtualTime) -> None:
        orders, prices = shares(time, 1)
        await use(orders)
        with pytest.raises(BudgetSpent):
            await use(prices, CREATION)
        time.now += HELD
        await use(prices, ROUTINE)

    simulate(scenario)


def test_idle_price_calls_leave_budget_to_orders() -> None:
    async def scenario(time: VirtualTime) -> None:
        _, prices = shares(time, 20)
        assert await use_up(prices, ROUTINE) == 12
        assert await use_up(prices, CREATION) == 3

    simulate(scenario)


def test_call_beyond_the_whole_limit_holds_no_place_in_its_share() -> None:
    async def scenario(time: VirtualTime) -> None:
        orders, prices = shares(time, 4)
        for _ in range(3):
            await use(orders)
        await use(prices)
        with pytest.raises(BudgetSpent) as caught:
            await use(prices)
        assert caught.value.retry_after_ms == HELD
        assert prices.free() == 2

    simulate(scenario)


def test_upstream_that_refuses_prices_is_asked_by_nobody() -> None:
    async def scenario(time: VirtualTime) -> None:
        orders, prices = shares(time, 20)
        prices.pause(30_000)
        for b in (orders, prices):
            with pytest.raises(BudgetSpent) as caught:
                await use(b, CREATION)
            assert caught.value.retry_after_ms == 30_000

    simulate(scenario)


@pytest.mark.parametrize(("limit", "reserved"), [(0, 0), (3, 3), (3, -1)])
def test_a_budget_that_makes_no_sense_is_refused(limit: int, reserved: int) -> None:
    with pytest.raises(ValueError, match="budget"):
        budget(VirtualTime(), limit, reserved=reserved)
