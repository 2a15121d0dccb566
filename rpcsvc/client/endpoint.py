"""Where a service is, at a URL or on the UNIX socket of its data directory; and one call to it.

These calls block, and load no more than a command needs: aiohttp alone would take a sixth of the
time that a command takes to start. Programs use SwapClient.
"""

from __future__ import annotations

import http.client
import ipaddress
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, urlsplit

from rpcsvc.client.messages import (
    ForeignAnswer,
    Json,
    call_of,
    headers_of,
    read_answer,
    read_result,
)
from rpcsvc.health_probe import CONNECT_SECONDS, SOCKET_NAME, connected
from rpcsvc.urls import without_userinfo

TIMEOUT_SECONDS = 30
# The service's longest is the status of an order with thousands of deposits: some hundred KB.
LARGEST_ANSWER: Final = 16 * 2**20

_AGENT_API: Final = "/api/v1"
_ROOT_URLS: Final = "such as http://127.0.0.1:8080 or https://swap.example/base"
MAYBE_DONE: Final = (
    "The call may have been carried out: repeat it with the same idempotency key, or ask for the"
    " status."
)


class Unreachable(Exception):
    """No service answers there."""


class BadUrl(Exception):
    """The text is not the root URL of a service."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A service that can be called: its name for messages, the path of /rpc, how to connect.

    ``takes_token`` is false for the socket, whose file mode is the gate.
    """

    name: str
    path: str
    connection: Callable[[], http.client.HTTPConnection]
    takes_token: bool = True


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a UNIX socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_SECONDS)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = connected(self._path, self.timeout)


def find_endpoint(url: str | None, data_dir: Path) -> Endpoint | None:
    """The service at ``url``, else the one that listens on the data directory, else None.

    Raises BadUrl and UntrustedSocket.
    """
    return endpoint_of(url) if url else socket_endpoint(data_dir)


def service_at(url: str) -> str:
    """One name for the service at ``url``, however that is spelled. Raises BadUrl."""
    endpoint, parts = endpoint_of(url), urlsplit(url)
    return f"{parts.scheme}://{parts.netloc.lower()}{endpoint.path.removesuffix('/rpc')}"


def endpoint_of(url: str) -> Endpoint:
    """The service at a root URL, a path in it included; or at the base URL of its agent API.

    Raises BadUrl.
    """
    try:
        parts = urlsplit(url)
        connection = _connection_to(parts)
        connection()
    except (ValueError, http.client.InvalidURL) as error:
        # Of a URL with a password, a parser's words may quote a part of that.
        why = "it must not have a user name" if "@" in url else error
        raise BadUrl(
            f"{without_userinfo(url)!r} is not a service's root URL ({why}). Give one,"
            f" {_ROOT_URLS}."
        ) from error
    # The specification's base_url ends so; /rpc is beside it, at the root.
    root = parts.path.rstrip("/").removesuffix(_AGENT_API)
    return Endpoint(url, root + "/rpc", connection)


def socket_endpoint(data_dir: Path) -> Endpoint | None:
    """The server that listens on the data directory's socket, if one does.

    Raises UntrustedSocket.
    """
    path = data_dir / SOCKET_NAME
    try:
        connected(str(path), CONNECT_SECONDS).close()
    except OSError:
        return None
    return Endpoint(str(path), "/rpc", lambda: _UnixConnection(path), takes_token=False)


def call_rpc(
    endpoint: Endpoint,
    method: str,
    params: Json,
    *,
    request_id: str | None,
    token: str | None,
    network: str | None = None,
    local_session: str | None = None,
) -> Json:
    """Send one JSON-RPC call; its envelope, also when it was refused as a message.

    ``token`` and ``local_session`` must be printable ASCII; ``network`` is the service's, if it is
    known. Raises Unreachable.
    """
    headers = headers_of(request_id, token if endpoint.takes_token else None, local_session)
    status, body = post(endpoint, call_of(method, params), headers)
    try:
        return read_answer(body, method.split(".", 1)[-1], request_id, network)
    except ForeignAnswer as error:
        raise Unreachable(
            f"What answers at {endpoint.name} (HTTP {status}) is not this service's /rpc."
            f"{_advice(status)}"
        ) from error


def call_method(endpoint: Endpoint, method: str, params: Json, *, seconds: int) -> Json:
    """Send one JSON-RPC call of a method without an envelope; its result, or ``{"error": ...}``.

    Waits so many seconds for the answer. Raises Unreachable.
    """
    status, body = post(endpoint, call_of(method, params), headers_of(None, None, None), seconds)
    try:
        return read_result(body)
    except ForeignAnswer as error:
        raise Unreachable(
            f"What answers at {endpoint.name} (HTTP {status}) is not this service's /rpc."
        ) from error


def _advice(status: int) -> str:
    """What to do about an answer that somebody else gave, by its HTTP status."""
    if status in (404, 405) or 300 <= status < 400:
        return f" Give the service's root URL, {_ROOT_URLS}."
    if 400 <= status < 500 and status != 408:
        return ""  # refused on the way; 408 tells only that something took too long
    return f" {MAYBE_DONE}"


def _connection_to(parts: SplitResult) -> Callable[[], http.client.HTTPConnection]:
    host, port = parts.hostname, parts.port
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError("it must begin with http:// or https:// and a host")
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError("it must not have a user name, ? or #")
    if not parts.path.isascii() or not parts.path.isprintable() or " " in parts.path:
        raise ValueError("its path must be percent-encoded")
    if parts.scheme == "http":
        if not is_this_machine(host):
            raise ValueError(
                "over plain HTTP anybody on the way could take the token and replace a deposit"
                " address, except on this machine; use https://"
            )
        return lambda: http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
    context = ssl.create_default_context()
    return lambda: http.client.HTTPSConnection(host, port, timeout=TIMEOUT_SECONDS, context=context)


def is_this_machine(host: str) -> bool:
    """Whether ``host`` is this machine."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def post(
    endpoint: Endpoint, body: bytes, headers: dict[str, str], seconds: int = TIMEOUT_SECONDS
) -> tuple[int, bytes]:
    """Send a body; status and body of the answer. Raises Unreachable."""
    connection = endpoint.connection()
    connection.timeout = seconds
    try:
        _connect(endpoint, connection)
        connection.request("POST", endpoint.path, body, headers)
        return read_response(connection)
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(
            f"The connection to {endpoint.name} broke ({error or type(error).__name__})."
            f" {MAYBE_DONE}"
        ) from error
    finally:
        connection.close()


def read_response(connection: http.client.HTTPConnection) -> tuple[int, bytes]:
    """Status and body of the answer to what was sent.

    Raises OSError, and HTTPException, also for a body that is larger than any of the service's.
    """
    with connection.getresponse() as response:
        body = response.read(LARGEST_ANSWER + 1)
    if len(body) > LARGEST_ANSWER:
        raise http.client.HTTPException(f"it answers with more than {LARGEST_ANSWER} bytes")
    return response.status, body


def _connect(endpoint: Endpoint, connection: http.client.HTTPConnection) -> None:
    try:
        connection.connect()
    except (OSError, UnicodeError) as error:
        raise Unreachable(f"No service answers at {endpoint.name}: {error}.") from error
