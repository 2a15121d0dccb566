"""Addresses of a service, requests and replies, and the protocol of the transports between.

A transport does not verify, retry or follow redirects: ``Calls`` verifies and retries.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol
from urllib.parse import SplitResult, urlsplit

from rpcsvc.client.errors import Unreachable
from rpcsvc.health_probe import CONNECT_SECONDS as PROBE_SECONDS
from rpcsvc.health_probe import SOCKET_NAME, connected
from rpcsvc.urls import is_loopback, without_userinfo

ROOT_URLS: Final = "such as http://127.0.0.1:8080 or https://swap.example/base"
_AGENT_API: Final = "/api/v1"
_ON_SOCKET: Final = "http://localhost"

CALL_SECONDS: Final = 30.0
CONNECT_SECONDS: Final = 10.0
# The longest answer, the status of an order with thousands of deposits, has some hundred KB.
LARGEST_ANSWER: Final = 16 * 2**20
MAYBE_DONE: Final = (
    "The call may have been carried out: repeat it with the same idempotency key, or ask for the"
    " status."
)
# Copied from operations/dispatch.py, which a probe must not import.
_RETRY: Final = {
    "action": "retry",
    "description": "Send the same call again later, with the same idempotency key if it had one.",
}


class BadUrl(Exception):
    """The text is not the root URL of a service."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A service that can be called: its name for messages, and its root URL without a slash.

    With a ``socket`` the connection goes there, whatever the URL's host is.
    """

    name: str
    url: str
    socket: Path | None = None

    @property
    def takes_token(self) -> bool:
        """False for the socket, whose file mode controls access."""
        return self.socket is None


def find_endpoint(url: str | None, data_dir: Path) -> Endpoint | None:
    """The service at ``url``, else the one that listens on the data directory, else None.

    Raises BadUrl and UntrustedSocket.
    """
    return endpoint_of(url) if url else socket_endpoint(data_dir)


def endpoint_of(url: str) -> Endpoint:
    """The service at a root URL, a path in it included; or at the base URL of its agent API.

    Its ``url`` is normalised. Raises BadUrl.
    """
    try:
        parts = urlsplit(url)
        _require_root(parts)
    except ValueError as error:
        # The parser's message may quote a password in the URL.
        why = "it must not have a user name" if "@" in url else error
        raise BadUrl(
            f"{without_userinfo(url)!r} is not a service's root URL ({why}). Give one, {ROOT_URLS}."
        ) from error
    # The specification's base_url ends so; /rpc is beside it, at the root.
    path = parts.path.rstrip("/").removesuffix(_AGENT_API)
    return Endpoint(url, f"{parts.scheme}://{parts.netloc.lower()}{path}")


def socket_endpoint(data_dir: Path) -> Endpoint | None:
    """The server that listens on the data directory's socket, if one does.

    Raises UntrustedSocket.
    """
    path = data_dir / SOCKET_NAME
    try:
        connected(str(path), PROBE_SECONDS).close()
    except OSError:
        return None
    return Endpoint(str(path), _ON_SOCKET, path)


def _require_root(parts: SplitResult) -> None:
    """Raise ValueError unless these are the parts of a root URL."""
    host, _ = parts.hostname, parts.port  # the port is read here
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError("it must begin with http:// or https:// and a host")
    if not host.isprintable() or " " in host:
        raise ValueError("its host must not have blanks")
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError("it must not have a user name, ? or #")
    if not parts.path.isascii() or not parts.path.isprintable() or " " in parts.path:
        raise ValueError("its path must be percent-encoded")
    if parts.scheme == "http" and not is_loopback(host):
        raise ValueError(
            "over plain HTTP anybody on the way could take the token and replace a deposit"
            " address, except on this machine; use https://"
        )


@dataclass(frozen=True, slots=True)
class ServiceRequest:
    """A request. ``target``: path and query below the service's root URL.

    ``seconds`` limits the whole exchange, or each pause of a stream.
    """

    method: str
    target: str
    body: bytes | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    seconds: float = CALL_SECONDS


@dataclass(frozen=True, slots=True)
class ServiceReply:
    """A whole answer, unverified. ``target``: path and query of the request as sent."""

    status: int
    headers: Sequence[tuple[str, str]]
    body: bytes
    target: str

    def header(self, name: str) -> str | None:
        """The first value of a header; its name in lower case."""
        return next((value for key, value in self.headers if key.lower() == name), None)


class Stream(Protocol):
    """An answer that is read as it comes. Reading raises Unreachable, and ValueError."""

    status: int
    media_type: str

    def lines(self) -> AsyncIterator[bytes]:
        """Its lines."""
        ...

    async def read(self, most: int) -> bytes:
        """Read at most ``most`` bytes."""
        ...


class Transport(Protocol):
    """Sends requests to one service. ``name`` is that of the service in messages."""

    name: str

    async def exchange(self, sent: ServiceRequest) -> ServiceReply:
        """Send a request and read its whole answer. Raises Unreachable."""
        ...

    def stream(self, sent: ServiceRequest) -> AbstractAsyncContextManager[Stream]:
        """Send a request, and read its answer as it comes. Raises Unreachable."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Sleep."""
        ...

    async def close(self) -> None:
        """Close all connections."""
        ...


def not_reached(name: str, why: object) -> Unreachable:
    """The error if no connection was made: nothing was sent."""
    return Unreachable(f"No service answers at {name}: {why}.")


def lost(name: str, sent: ServiceRequest, why: object) -> Unreachable:
    """The error if the request was sent at least in part, and no whole answer came."""
    advice = "" if sent.method == "GET" else f" {MAYBE_DONE}"
    return Unreachable(f"The connection to {name} broke ({why}).{advice}", may_be_done=True)


def not_this_service(name: str, what: str, status: int) -> Unreachable:
    """The error if another server answered instead of the service."""
    advice = ""
    if status in (404, 405) or 300 <= status < 400:
        advice = f" Give the service's root URL, {ROOT_URLS}."
    elif not 400 <= status < 500 or status == 408:  # 408 means only that something took too long
        advice = f" {MAYBE_DONE}"
    # A proxy may also have replaced the answer: whatever the status, the call may be done.
    return Unreachable(
        f"What answers at {name} (HTTP {status}) is not this service's {what}.{advice}",
        may_be_done=True,
    )


Json = dict[str, Any]

# States of the envelope for what a server refuses as a message; other codes are the caller's input.
_STATES: Final = {
    "unknown_method": "not_found",
    "rate_limited": "rate_limited",
    "unavailable": "unavailable",
    "internal_error": "internal_error",
}


class UnreadableAnswer(Exception):
    """The answer does not come from this service."""


def read_answer(body: bytes, operation: str, request_id: str | None, network: str | None) -> Json:
    """The envelope in the body of a response, also when the call was refused as a message.

    ``network`` is the service's, None where it is not known: a refused message does not tell it.
    Raises UnreadableAnswer.
    """
    try:
        answer = json.loads(body, parse_constant=_refuse)
        _require_json_rpc(answer)
        if "result" in answer:
            return _carried_out(answer["result"])
        return _refused(answer["error"], operation, request_id, network)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnreadableAnswer from error


def read_envelope(body: bytes) -> Json:
    """The envelope in the body of a response of the agent API. Raises UnreadableAnswer."""
    try:
        return _carried_out(json.loads(body, parse_constant=_refuse))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnreadableAnswer from error


def read_result(body: bytes) -> Json:
    """The result in the body of a response; of a refused message ``{"error": {code, message}}``.

    Raises UnreadableAnswer.
    """
    try:
        answer = json.loads(body, parse_constant=_refuse)
        _require_json_rpc(answer)
        if "result" in answer:
            return dict(answer["result"])
        data = answer["error"]["data"]
        return {"error": {"code": str(data["code"]), "message": str(data["message"])}}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UnreadableAnswer from error


def _refuse(constant: str) -> None:
    """Refuse NaN and the infinities, which Python accepts although JSON has none."""
    raise ValueError(constant)


def _require_json_rpc(answer: Json) -> None:
    if answer["jsonrpc"] != "2.0":
        raise ValueError("not JSON-RPC 2.0")


def _carried_out(envelope: Json) -> Json:
    if not isinstance(envelope["ok"], bool) or not isinstance(envelope["data"], dict):
        raise TypeError("not an envelope")
    return dict(envelope)


def _refused(error: Json, operation: str, request_id: str | None, network: str | None) -> Json:
    """A JSON-RPC error as an envelope, so that stdout always has the same form."""
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


def written(message: Json) -> bytes:
    """A body as compact JSON, in UTF-8.

    Escapes could make a text of allowed length exceed the limit of the body.
    """
    text = json.dumps(message, ensure_ascii=False)
    # Half a surrogate pair becomes \udXXX, which is also its escape in JSON.
    return text.encode("utf-8", "backslashreplace")


def call_of(method: str, params: Json) -> bytes:
    """The body of one JSON-RPC call."""
    return written({"jsonrpc": "2.0", "id": 1, "method": method, "params": params})


def headers_of(token: str | None, local_session: str | None = None) -> dict[str, str]:
    """The headers of a call, which hold printable ASCII."""
    headers = {"content-type": "application/json"}
    if token:
        headers["x-agent-rpc-token"] = token
    if local_session:
        headers["x-agent-local-session"] = local_session
    return headers


def request_id_of(text: str | None) -> dict[str, str]:
    """The header with a request id; none for one that the service would replace by its own."""
    return {"x-request-id": text} if text and text.isascii() and text.isprintable() else {}
