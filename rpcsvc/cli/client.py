"""Calls a service, at a URL or over the UNIX socket of its data directory, and reads the answer.

A gateway between may answer in its place while the call is carried out. So only what this service
writes is accepted: JSON-RPC 2.0 with an envelope, or with an error that bears its codes.
"""

from __future__ import annotations

import http.client
import ipaddress
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from rpcsvc.health_probe import CONNECT_SECONDS, SOCKET_NAME, connected
from rpcsvc.settings_sources import without_userinfo

Json = dict[str, Any]

# States of the envelope for what a server refuses as a message; other codes are the caller's input.
_STATES: Final = {
    "unknown_method": "not_found",
    "rate_limited": "rate_limited",
    "unavailable": "unavailable",
    "internal_error": "internal_error",
}
# As operations/envelope.py has it; a probe, which imports this, must not import that.
_RETRY: Final = {
    "action": "retry",
    "description": "Send the same call again later, with the same idempotency key if it had one.",
}


class ForeignAnswer(Exception):
    """What came is not this service's answer to a call."""


def read_answer(body: bytes, operation: str, request_id: str | None, network: str | None) -> Json:
    """The envelope in the body of a response, also when the call was refused as a message.

    ``network`` is the service's, None where it is not known: a refused message does not tell it.
    Raises ForeignAnswer.
    """
    try:
        answer = json.loads(body, parse_constant=_refuse)
        _require_json_rpc(answer)
        if "result" in answer:
            return _carried_out(answer["result"])
        return _refused(answer["error"], operation, request_id, network)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ForeignAnswer from error


def read_result(body: bytes) -> Json:
    """The result in the body of a response; of a refused message ``{"error": {code, message}}``.

    Raises ForeignAnswer.
    """
    try:
        answer = json.loads(body, parse_constant=_refuse)
        _require_json_rpc(answer)
        if "result" in answer:
            return dict(answer["result"])
        data = answer["error"]["data"]
        return {"error": {"code": str(data["code"]), "message": str(data["message"])}}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ForeignAnswer from error


def _refuse(constant: str) -> None:
    """NaN and the infinities, which Python reads and writes, and JSON does not have."""
    raise ValueError(constant)


def _require_json_rpc(answer: Json) -> None:
    if answer["jsonrpc"] != "2.0":
        raise ValueError("not JSON-RPC 2.0")


def _carried_out(envelope: Json) -> Json:
    if not isinstance(envelope["ok"], bool) or not isinstance(envelope["data"], dict):
        raise TypeError("not an envelope")
    return dict(envelope)


def _refused(error: Json, operation: str, request_id: str | None, network: str | None) -> Json:
    """A JSON-RPC error as an envelope: whoever reads stdout finds one shape only."""
    data = error["data"]
    code = data["code"]
    if type(error["code"]) is not int or not isinstance(code, str):
        raise TypeError("not an error of this service")
    retryable = data.get("retryable") is True
    described = {"code": code, "message": str(error["message"]), "retryable": retryable}
    if "details" in data:
        described["details"] = data["details"]
    return {
        "ok": False,
        "operation": operation,
        "state": _STATES.get(code, "invalid_input"),
        "missingInputs": [],
        "validationErrors": [],
        "nextActions": [_RETRY] if retryable else [],
        "data": {"network": network, "sessionId": None, "sessionSource": "none"},
        "requestId": data.get("requestId", request_id or ""),
        "error": described,
    }


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
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    headers = _headers(request_id, token if endpoint.takes_token else None, local_session)
    status, body = _post(endpoint, _written(message), headers)
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
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    status, body = _post(endpoint, _written(message), _headers(None, None, None), seconds)
    try:
        return read_result(body)
    except ForeignAnswer as error:
        raise Unreachable(
            f"What answers at {endpoint.name} (HTTP {status}) is not this service's /rpc."
        ) from error


def _written(message: Json) -> bytes:
    """As short as JSON can say it: escapes would take a text within its limit over the body's."""
    text = json.dumps(message, ensure_ascii=False)
    # Half a surrogate pair becomes \udXXX, which is also its escape in JSON.
    return text.encode("utf-8", "backslashreplace")


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
    """Whether nobody is on the way to ``host``."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _headers(
    request_id: str | None, token: str | None, local_session: str | None
) -> dict[str, str]:
    headers = {"content-type": "application/json"}
    if token:
        headers["x-agent-rpc-token"] = token
    if local_session:
        headers["x-agent-local-session"] = local_session
    # One that no header can hold is one that the service would replace by its own.
    if request_id and request_id.isascii() and request_id.isprintable():
        headers["x-request-id"] = request_id
    return headers


def _post(
    endpoint: Endpoint, body: bytes, headers: dict[str, str], seconds: int = TIMEOUT_SECONDS
) -> tuple[int, bytes]:
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
