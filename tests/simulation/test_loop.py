"""The loop of the simulation: time, order, kills and pauses come from its seed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextvars import Context, copy_context
from typing import Any

import pytest

from tests.simulation.loop import ACTOR, Actor, Deadlock, ThreadRefused, new_loop


def as_actor(actor: Actor, make: Callable[[], Coroutine[Any, Any, None]]) -> None:
    context = copy_context()
    context.run(ACTOR.set, actor)
    asyncio.get_running_loop().create_task(make(), context=context)


async def order_of(names: str) -> str:
    seen: list[str] = []

    async def note(name: str) -> None:
        seen.append(name)

    await asyncio.gather(*(note(name) for name in names))
    return "".join(seen)


def test_hours_pass_at_once() -> None:
    loop = new_loop(1)
    loop.run_simulation(asyncio.sleep(3_600))
    assert loop.time() == 3_600


def test_one_seed_gives_one_order() -> None:
    orders = {seed: new_loop(seed).run_simulation(order_of("abcdefgh")) for seed in range(20)}
    again = {seed: new_loop(seed).run_simulation(order_of("abcdefgh")) for seed in range(20)}
    assert orders == again
    assert len(set(orders.values())) > 15


def test_killed_actor_runs_no_more_code() -> None:
    seen: list[str] = []
    actor = Actor("killed")

    async def life() -> None:
        try:
            seen.append("began")
            await asyncio.sleep(10)
            seen.append("went on")
        finally:
            seen.append("cleaned up")

    async def story() -> None:
        as_actor(actor, life)
        await asyncio.sleep(5)
        actor.kill()
        await asyncio.sleep(60)
        assert seen == ["began"]

    new_loop(1).run_simulation(story())


def test_paused_actor_goes_on_when_it_is_woken() -> None:
    seen: list[float] = []
    actor = Actor("paused")

    async def life() -> None:
        await asyncio.sleep(10)
        seen.append(asyncio.get_running_loop().time())

    loop = new_loop(1)

    async def story() -> None:
        as_actor(actor, life)
        await asyncio.sleep(5)
        actor.is_paused = True
        await asyncio.sleep(25)
        assert seen == []
        loop.wake(actor)
        await asyncio.sleep(0.1)

    loop.run_simulation(story())
    assert seen == [30]


def test_threads_and_sockets_are_refused() -> None:
    async def story() -> None:
        with pytest.raises(ThreadRefused):
            await asyncio.to_thread(print)
        with pytest.raises(ThreadRefused):
            await asyncio.get_running_loop().getaddrinfo("localhost", 80)

    new_loop(1).run_simulation(story())


def test_waiting_for_nothing_is_a_deadlock() -> None:
    async def story() -> None:
        await asyncio.Event().wait()

    with pytest.raises(Deadlock):
        new_loop(1).run_simulation(story())


def test_task_with_an_empty_context_keeps_it() -> None:
    seen: list[Actor | None] = []

    async def outside() -> None:
        await asyncio.sleep(1)
        seen.append(ACTOR.get())

    async def story() -> None:
        actor = Actor("replica")
        ACTOR.set(actor)
        await asyncio.get_running_loop().create_task(outside(), context=Context())

    new_loop(1).run_simulation(story())
    assert seen == [None]
