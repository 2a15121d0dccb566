"""The client of a request whose connection has no peer address any more."""

from __future__ import annotations

import socket
from typing import Any
from unittest.mock import Mock

import pytest
from aiohttp.test_utils import make_mocked_request

from rpcsvc.domain.clients import Clients
from rpcsvc.errors import Unauthorized
from rpcsvc.http.gate import SOCKET_CLIENT, Gate
from rpcsvc.settings import Settings


def request_over(family: socket.AddressFamily, peer: Any) -> Any:
    """A request on a connection of that family whose peer address is ``peer``."""
    transport = Mock()
    known = {"socket": Mock(family=family), "peername": peer}
    transport.get_extra_info.side_effect = lambda name, default=None: known.get(name, default)
    return make_mocked_request("POST", "/rpc", transport=transport)


def gate() -> Gate:
    return Gate(Settings(), Clients(), bytes, lambda: 0.0)


def test_caller_without_an_address_is_not_the_socket() -> None:
    request = request_over(socket.AF_INET, None)
    caller = gate().admit(request)
    assert not caller.is_local
    with pytest.raises(Unauthorized):
        gate().require_token(request, caller)


@pytest.mark.parametrize("peer", ["", "/run/client.sock", "127.0.0.1"])
def test_socket_is_known_by_family_not_by_peer_name(peer: str) -> None:
    assert gate().admit(request_over(socket.AF_UNIX, peer)).address == SOCKET_CLIENT


def test_a_client_over_tcp_is_known_by_its_address() -> None:
    assert gate().admit(request_over(socket.AF_INET6, ("::1", 5, 0, 0))).address == "::1"
