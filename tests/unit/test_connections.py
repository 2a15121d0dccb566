"""The limits of open connections, and which ones are closed."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from ipaddress import ip_network
from typing import Any
from unittest.mock import Mock

import pytest

from rpcsvc.http import http_server as module
from rpcsvc.http.http_server import AcceptFailures, Connections
from tests.logs import logs_of


class Speaker:
    """The HTTP protocol object of a connection."""

    def __init__(self, *, idle: bool = True, asked: bool = True) -> None:
        self.idle, self.asked = idle, asked

    def is_idle(self) -> bool:
        return self.idle

    def has_asked(self) -> bool:
        return self.asked


class World:
    """Connections made of socket pairs, with a manual clock."""

    def __init__(self, stack: ExitStack, **limits: Any) -> None:
        self.now = 1_000.0
        self.stack = stack
        given = {"most": 16, "most_per_client": 100, "descriptors": 10_000, "proxies": (), **limits}
        self.connections = Connections(**given, now=lambda: self.now)

    def open(self, peer: str = "192.0.2.1", speaker: Speaker | None = None) -> Mock | None:
        """The transport of a new connection; None when it was refused."""
        ours, theirs = socket.socketpair()
        self.stack.enter_context(theirs)
        admitted = self.connections.admit(ours, peer)
        if admitted is None:
            assert ours.fileno() == -1
            return None
        self.stack.enter_context(admitted)
        transport = Mock()
        transport.get_extra_info.return_value = admitted
        transport.get_write_buffer_size.return_value = 0
        transport.abort.side_effect = admitted.close
        if speaker is not None:
            self.connections.attach(speaker, transport)
        return transport

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.connections.sweep()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_connections_of_one_address_are_limited(stack: ExitStack) -> None:
    world = World(stack, most_per_client=3)
    first, *_ = [world.open("2001:db8::1", Speaker()) for _ in range(3)]
    assert world.open("2001:db8::2") is None  # the same /64
    assert world.open("2001:db8:0:1::1") is not None
    assert first is not None
    first.abort()
    assert world.open("2001:db8::2") is not None


def test_connections_of_one_ipv6_customer_are_limited_to_half(stack: ExitStack) -> None:
    world = World(stack)
    opened = [world.open(f"2001:db8:0:{n:x}::1", Speaker(idle=False)) for n in range(9)]
    assert [each is None for each in opened] == [*[False] * 8, True]
    assert world.open("2001:db8:1::1") is not None
    assert world.open("192.0.2.1") is not None
    assert opened[0] is not None
    opened[0].abort()
    assert world.open("2001:db8:0:99::1") is not None


def test_proxy_is_limited_in_all_only(stack: ExitStack) -> None:
    world = World(stack, most_per_client=1, proxies=(ip_network("10.0.0.0/8"),))
    assert all(world.open("10.1.2.3", Speaker(idle=False)) for _ in range(16))
    assert world.open("10.1.2.3") is None


def test_longest_idle_makes_room_for_the_next(stack: ExitStack) -> None:
    world = World(stack)
    busy = world.open("192.0.2.1", Speaker(idle=False))
    idle = [world.open(f"192.0.2.{n}", Speaker()) for n in range(2, 17)]
    used = idle[0]
    assert busy is not None
    assert used is not None
    world.connections.touch(used.get_extra_info("socket").fileno())

    assert world.open("198.51.100.1") is not None

    assert [mock.abort.called for mock in (busy, *idle) if mock][:4] == [False, False, True, False]
    assert len(world.connections) == 16


def test_connection_beyond_the_limit_is_refused_and_logged(stack: ExitStack) -> None:
    world = World(stack)
    for _ in range(16):
        world.open(speaker=Speaker(idle=False))
    with logs_of("rpcsvc.http.http_server") as logs:
        assert [world.open() for _ in range(5)] == [None] * 5
        world.later(30)
        world.later(31)
        world.later(31)
    refused = [line for line in logs if line["event"] == "connections_refused"]
    assert [line["count"] for line in refused] == [5]


def test_connections_leave_descriptors_for_the_rest(stack: ExitStack) -> None:
    world = World(stack, most=2_000, descriptors=300)
    for _ in range(44):
        assert world.open(speaker=Speaker(idle=False)) is not None
    assert world.open() is None


@pytest.mark.parametrize(
    ("speaker", "seconds"),
    [(None, module.HANDSHAKE_SECONDS), (Speaker(asked=False), module.FIRST_HEAD_SECONDS)],
    ids=["TLS handshake", "first head"],
)
def test_silent_connection_is_ended(
    stack: ExitStack, speaker: Speaker | None, seconds: float
) -> None:
    world = World(stack)
    transport = world.open(speaker=speaker)
    assert transport is not None
    accepted = next(iter(world.connections._open.values())).socket
    world.later(seconds - 1)
    assert not transport.abort.called
    world.later(1)
    if speaker is None:
        assert accepted.recv(1) == b""  # asyncio sees its end
    else:
        assert transport.abort.called


def test_connection_that_reads_nothing_is_ended(stack: ExitStack) -> None:
    world = World(stack)
    transport = world.open(speaker=Speaker())
    assert transport is not None
    transport.get_write_buffer_size.return_value = 5
    world.later(0)
    world.later(module.UNREAD_SECONDS - 1)
    transport.get_write_buffer_size.return_value = 0  # the peer has read all
    world.later(2)
    transport.get_write_buffer_size.return_value = 5
    world.later(0)
    world.later(module.UNREAD_SECONDS - 1)
    assert not transport.abort.called
    world.later(1)
    assert transport.abort.called


async def test_failures_to_accept_are_logged_once_a_minute() -> None:
    now = 100.0
    handler = AcceptFailures(lambda: now)
    loop = Mock(spec=asyncio.AbstractEventLoop)
    failure = {"exception": OSError(errno.EMFILE, "Too many open files"), "socket": object()}
    with logs_of("rpcsvc.http.http_server") as logs:
        for _ in range(200):
            handler(loop, failure)
        now += 61
        handler(loop, failure)
    assert [line["count"] for line in logs] == [1, 200]
    assert not loop.default_exception_handler.called


async def test_failures_other_than_accept_go_to_the_default_handler() -> None:
    loop = Mock(spec=asyncio.AbstractEventLoop)
    context = {"exception": ValueError("x"), "message": "y"}
    AcceptFailures(lambda: 0.0)(loop, context)
    loop.default_exception_handler.assert_called_once_with(context)
