"""No request of 64 KiB stalls the service, and neither do two hundred at once."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import AsyncIterator, Iterable
from itertools import pairwise

import pytest
import pytest_asyncio

from tests.contract.hostile import (
    HEADER_UNITS,
    LARGEST,
    LISTS,
    SINGLE,
    Sent,
    Stranger,
    Target,
    header_names,
    known_order,
    of_bodies,
    of_fields,
    of_header,
    of_headers,
    of_paths,
    slowness,
    targets,
)
from tests.contract.serving import TOKEN, Served, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

# CPU seconds of one request, and of one turn of the event loop.
MOST_OF_REQUEST, MOST_OF_TURN = 0.05, 0.25
AT_ONCE = 200


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A service behind a proxy, so that it reads what proxies write."""
    folder = tmp_path_factory.mktemp("hostile")
    environ = {"AGENT_RPC_TOKEN": TOKEN}
    async with serving(folder, environ, trusted_proxies="127.0.0.0/8") as ready:
        yield ready


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def known(served: Served) -> dict[str, str]:
    return await known_order(served)


async def must_be_cheap(served: Served, requests: Iterable[Sent]) -> None:
    """Require that each request is answered, by no fault, and for little CPU."""
    stranger = Stranger(served)
    for each in requests:
        cost = await stranger.cost(each, MOST_OF_REQUEST)
        assert cost.status != 500, cost
        assert cost.seconds <= MOST_OF_REQUEST, cost


@pytest.mark.slow
async def test_no_field_makes_a_request_costly(served: Served, known: dict[str, str]) -> None:
    await must_be_cheap(served, of_fields(known))


async def test_no_target_makes_a_request_costly(served: Served) -> None:
    await must_be_cheap(served, of_paths())


async def test_no_body_makes_a_request_costly(served: Served, known: dict[str, str]) -> None:
    await must_be_cheap(served, of_bodies(known))


@pytest.mark.slow
async def test_no_header_makes_a_request_costly(served: Served, known: dict[str, str]) -> None:
    """Headers that lead to a refusal are sent alone: what is read after them would be hidden."""
    for target in targets(known["$orderId"]):
        refusing = await _refusing(served, target)
        others = [name for name in header_names() if name not in refusing]
        groups = [others[at : at + 7] for at in range(0, len(others), 7)]
        for unit in HEADER_UNITS:
            alone = [of_header(target, name, unit) for name in refusing]
            together = [of_headers(target, group, unit) for group in groups]
            lines = [of_header(target, name, unit, 7) for name in LISTS if name in others]
            await must_be_cheap(served, [*alone, *together, *lines])


async def _refusing(served: Served, target: Target) -> list[str]:
    """The headers that change the answer to a call."""
    stranger = Stranger(served)

    async def status(name: str) -> int:
        lines = [f"{name}: a".encode()] if name else []
        sent = Sent(name, lambda _: target.raw(*lines, leave_out=name))
        return (await stranger.cost(sent, 60)).status

    usual = await status("")
    return [name for name in header_names() if name in SINGLE or await status(name) != usual]


class Crowd:
    """Connections of a thread of its own, whose requests become ready in one turn of the loop."""

    def __init__(self, served: Served, requests: list[bytes]) -> None:
        address = ("127.0.0.1", served.client.port)
        self._requests = requests
        self._sockets = [socket.create_connection(address) for _ in requests]
        self.sent = threading.Event()

    def begin(self, kept: int) -> None:
        """Send all of each request but its last ``kept`` bytes."""
        self._send([raw[: max(len(raw) - kept, 0)] for raw in self._requests])

    def end(self, kept: int) -> None:
        """Send the last bytes of each request."""
        self._send([raw[max(len(raw) - kept, 0) :] for raw in self._requests])
        self.sent.set()

    def _send(self, pieces: list[bytes]) -> None:
        for connection, piece in zip(self._sockets, pieces, strict=True):
            connection.sendall(piece)

    def statuses(self) -> list[int]:
        """The statuses of all answers."""
        lines = [connection.makefile("rb").readline() for connection in self._sockets]
        return [int(line.split()[1]) for line in lines]

    def close(self) -> None:
        for connection in self._sockets:
            connection.close()


async def longest_turn(served: Served, requests: list[bytes], kept: int) -> tuple[float, list[int]]:
    """CPU seconds of the longest turn of the loop while the requests are answered; their statuses.

    The loop stands still while the last ``kept`` bytes are sent: it finds all of them ready.
    """
    loop = asyncio.get_running_loop()
    crowd = await asyncio.to_thread(Crowd, served, requests)
    await asyncio.to_thread(crowd.begin, kept)
    await served.client.get("/livez", headers={"x-forwarded-proto": "https"})  # all are accepted
    turns: list[float] = [time.thread_time()]
    is_over = asyncio.Event()

    def measure() -> None:
        turns.append(time.thread_time())
        if not is_over.is_set():
            loop.call_soon(measure)

    measure()
    ending = loop.run_in_executor(None, crowd.end, kept)
    loop.call_soon(crowd.sent.wait, 10)
    await ending
    statuses = await asyncio.to_thread(crowd.statuses)
    is_over.set()
    crowd.close()
    longest = max(after - before for before, after in pairwise(turns))
    return longest / slowness(), statuses


@pytest.mark.parametrize(
    ("name", "kept"),
    [
        ("batch of unknown names", 1),  # the costliest: calls that become ready together
        ("equal keys", 1),  # handlers, once their bodies are there
        ("equal keys", LARGEST),  # whole handlers
        ("small chunks", LARGEST),  # the parser of HTTP
    ],
)
async def test_two_hundred_at_once_do_not_hold_the_loop(
    served: Served, known: dict[str, str], name: str, kept: int
) -> None:
    """Wherever their time is spent."""
    [sent] = [each for each in of_bodies(known) if each.name == name]
    turns = []
    for less in range(3):
        took, statuses = await longest_turn(served, [sent.make(less)] * AT_ONCE, kept)
        assert set(statuses) == {200}
        turns.append(took)
        if took <= MOST_OF_TURN:
            break
    assert min(turns) <= MOST_OF_TURN
