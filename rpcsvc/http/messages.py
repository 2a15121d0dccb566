"""Shared by the HTTP surfaces: reads JSON bodies, writes responses, renders errors."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, Final

import structlog
from aiohttp import HttpVersion11, web

from rpcsvc import strict_json
from rpcsvc.errors import (
    InternalError,
    InvalidRequest,
    MethodNotAllowed,
    PayloadTooLarge,
    RequestTimeout,
    ServiceError,
    Unauthorized,
    Unavailable,
    UnknownMethod,
    UnsupportedMediaType,
)
from rpcsvc.http.connection import connection_of
from rpcsvc.http.gate import CALLER, Caller, Gate, given_request_id
from rpcsvc.http.jsonrpc import full_error
from rpcsvc.http.site import BFF_ROOT, MCP_PATH, RPC_PATH
from rpcsvc.http.x402 import payment_headers
from rpcsvc.logs import Occasional
from rpcsvc.operations.dispatch import Dispatcher
from rpcsvc.operations.service import Call, Reply

log = structlog.get_logger(__name__)

# The operation of a request whose route belongs to one.
OPERATION = web.RequestKey("operation", str)
JSON = "application/json"
# Types have some 30 characters, and their parameters few more.
_LONGEST_TYPE: Final = 256
# How long a body may take to arrive; without an end, a client that stalls holds its connection.
BODY_SECONDS: Final = 30

# The complete body of a request, once it was read.
BODY = web.RequestKey("body", bytes)
# How long an arriving body may pause when the service stops, and how long it may take in all.
_PAUSE_SECONDS: Final = 2.0
_STOP_SECONDS: Final = 6.0


def media_type(request: web.Request) -> str:
    """Return the type of a body in lower case; empty if the header is missing or too long.

    Its parameters are not read. aiohttp's property would read them as those of an e-mail, in
    quadratic time (python/cpython#136063).
    """
    given = request.headers.get("content-type", "")
    return "" if len(given) > _LONGEST_TYPE else given.partition(";")[0].strip().lower()


def require_json(
    request: web.Request, limit: int, types: frozenset[str] = frozenset({JSON})
) -> None:
    """Check the headers of a body. Raises UnsupportedMediaType and PayloadTooLarge."""
    if request.headers.get("content-type") not in types:
        _require_type(media_type(request), types)
    if (request.content_length or 0) > limit:
        raise _too_large(limit)


def _require_type(given: str, types: frozenset[str]) -> None:
    if not given:
        raise UnsupportedMediaType(
            f"The header content-type is missing, or has over {_LONGEST_TYPE} characters. Send"
            f" {JSON}."
        )
    if given not in types:
        raise UnsupportedMediaType(f"Send the body as {JSON}, not as {given[:64]}.")


def require_framing(request: web.Request) -> None:
    """Refuse by its headers a body that can't be read.

    Raises UnsupportedMediaType for an encoded body (RFC 9110, section 8.4), and InvalidRequest for
    Transfer-Encoding in HTTP/1.0, whose framing is faulty (RFC 9112, section 6.1).
    """
    headers = request.headers
    if "content-encoding" in headers and any(
        word.strip().lower() not in ("", "identity")
        for word in ",".join(headers.getall("content-encoding")).split(",")
    ):
        raise UnsupportedMediaType(
            "Encoded bodies are not read here. Send the body as it is, without content-encoding."
        )
    if request.version < HttpVersion11 and "transfer-encoding" in headers:
        raise InvalidRequest(
            "HTTP/1.0 has no transfer-encoding. Send the body with content-length, or use HTTP/1.1."
        )


async def read_body(request: web.Request, limit: int) -> bytes:
    """The whole body. Raises PayloadTooLarge without reading more than the limit.

    Raises RequestTimeout for a body that stalls, InvalidRequest for one that breaks off or is not
    what its headers say, and Unavailable when the service stops before the body is there.
    """
    try:
        if request.content.is_eof():  # all of it came with the head: nothing to wait for
            body = request.content.read_nowait()
        else:
            body = await _arrived(request)
    except web.HTTPRequestEntityTooLarge:
        raise _too_large(limit) from None
    except TimeoutError:
        raise RequestTimeout(
            f"The body did not arrive within {BODY_SECONDS} s. Send it whole."
        ) from None
    except (web.RequestPayloadError, ConnectionError):
        raise InvalidRequest(
            "The body can't be read: it breaks off, or is not encoded as its headers say."
        ) from None
    if len(body) > limit:
        raise _too_large(limit)
    request[BODY] = body
    return body


async def unread_body(request: web.Request, limit: int) -> bytes:
    """The body of a request that was answered without it: refused, or a GET. Raises as read_body.

    Empty if it breaks off.
    """
    if not request.body_exists:
        return b""
    if (request.content_length or 0) > limit:
        raise _too_large(limit)
    with suppress(InvalidRequest):
        return await read_body(request, limit)
    return b""


async def _arrived(request: web.Request) -> bytes:
    """The complete body, in a turn that has room. Raises TimeoutError, and as _awaited."""
    async with asyncio.timeout(BODY_SECONDS):
        body = await _awaited(request)
    await connection_of(request).turns.take()  # many bodies may arrive together
    return body


async def _awaited(request: web.Request) -> bytes:
    """The complete body. Raises Unavailable if the service stops and the body is too slow."""
    reading = asyncio.ensure_future(request.read())
    stopped = asyncio.ensure_future(connection_of(request).stopping.wait())
    try:
        await asyncio.wait({reading, stopped}, return_when=asyncio.FIRST_COMPLETED)
        end = time.monotonic() + _STOP_SECONDS
        while not reading.done():
            before = request.content.total_bytes
            await asyncio.wait({reading}, timeout=_PAUSE_SECONDS)
            if not reading.done() and (
                request.content.total_bytes == before or time.monotonic() > end
            ):
                raise Unavailable("The service is stopping. Send the same call again.")
        return reading.result()
    finally:
        reading.cancel()
        stopped.cancel()


def _too_large(limit: int) -> PayloadTooLarge:
    return PayloadTooLarge(
        f"The body is over {limit} bytes. Send less.", details={"maximumBytes": limit}
    )


def require_object(value: Any) -> dict[str, Any]:
    """A JSON object. Raises InvalidRequest."""
    if not isinstance(value, dict):
        raise InvalidRequest("Send a JSON object as the body, such as {}.")
    return value


async def read_json_object(request: web.Request, limit: int, max_depth: int) -> dict[str, Any]:
    """The body as a JSON object. Raises ProtocolError for any other."""
    require_json(request, limit)
    body = await read_body(request, limit)
    return require_object(strict_json.loads(body, max_depth=max_depth))


def read_query(request: web.Request) -> dict[str, Any]:
    """Path and query as params. Raises InvalidRequest for a name that occurs twice."""
    params: dict[str, Any] = {}
    for name, value in request.query.items():
        if name in params or name in request.match_info:
            raise InvalidRequest(f"The query has {name[:64]} more than once, or names the path's.")
        params[name] = value
    params.update(request.match_info)
    return params


def with_path(request: web.Request, params: dict[str, Any]) -> dict[str, Any]:
    """The params of a body with those of the path. Raises InvalidRequest for one in both."""
    for name in request.match_info:
        if name in params:
            raise InvalidRequest(f"{name} is in the path. Leave it out of the body.")
    return {**params, **request.match_info}


def respond(
    body: bytes | None,
    request_id: str,
    *,
    status: int = 200,
    headers: Mapping[str, str] | None = None,
) -> web.Response:
    """A response with its request id, not cacheable. Without a body: 204."""
    all_headers = {"x-request-id": request_id, "cache-control": "no-store", **(headers or {})}
    if body is not None:
        all_headers["content-type"] = JSON
    return web.Response(body=body, status=status, headers=all_headers)


def respond_with(reply: Reply, caller: Caller) -> web.Response:
    """An operation's reply over HTTP."""
    headers = caller.headers
    if reply.replayed:
        headers["idempotent-replayed"] = "true"
    headers.update(error_headers(reply.error))
    headers.update(payment_headers(reply))
    return respond(reply.body, caller.request_id, status=reply.http_status, headers=headers)


def error_headers(error: ServiceError | None) -> dict[str, str]:
    """``Retry-After`` of an error that has one, and the challenge of a 401.

    RFC 9110, section 15.5.2, requires a challenge; some clients fail without one. No registered
    scheme fits a custom header; browsers show no password prompt for this unregistered one.
    """
    if isinstance(error, Unauthorized):
        return {"www-authenticate": f'ApiKey header="{error.header}"'}
    if error is None or error.retry_after is None:
        return {}
    return {"retry-after": str(error.retry_after)}


class Refusals:
    """Turns exceptions of handlers into envelopes, or flat errors on the BFF.

    Most of these requests were charged to no budget, so not each of them is logged.
    """

    def __init__(
        self,
        gate: Gate,
        dispatcher: Dispatcher,
        flat_dispatcher: Dispatcher,
        now: Callable[[], float],
    ) -> None:
        self._gate = gate
        self._dispatcher = dispatcher
        self._flat_dispatcher = flat_dispatcher
        self._refused = Occasional(now)

    def answer(self, request: web.Request, error: Exception) -> web.Response:
        """The response to an error, with its status."""
        if isinstance(error, UnicodeEncodeError) and "expect" in request.headers:
            error = web.HTTPExpectationFailed()  # aiohttp can't quote a header that is not UTF-8
        if isinstance(error, ServiceError):
            return self._refuse(request, error)
        if isinstance(error, web.HTTPException):
            return self._refuse(request, _translate(error, request), _allow_header(error))
        request_id = given_request_id(request) or self._gate.new_request_id()
        log.error("request_failed", request_id=request_id, path=request.path[:64], exc_info=error)
        return self._refuse(request, InternalError(request_id), request_id=request_id)

    def request_id(self, request: web.Request) -> str:
        """The caller's own request id, or a new one."""
        return given_request_id(request) or self._gate.new_request_id()

    def _refuse(
        self,
        request: web.Request,
        error: ServiceError,
        headers: Mapping[str, str] | None = None,
        request_id: str | None = None,
    ) -> web.Response:
        caller = request.get(CALLER)
        chosen = request_id or self.request_id(request)
        flat = f"{request.path}/".startswith(f"{BFF_ROOT}/")
        dispatcher = self._flat_dispatcher if flat else self._dispatcher
        if request.path in (RPC_PATH, MCP_PATH):
            body = full_error(error, chosen)
        else:
            reply = dispatcher.refuse(
                request.get(OPERATION, "unknown"),
                error,
                Call(chosen, transport="bff" if flat else "http"),
            )
            body = reply.body
        if count := self._refused.note(error.code):
            status = error.http_status
            log.info(
                "request_refused", request_id=chosen, code=error.code, status=status, count=count
            )
        all_headers = {
            **(caller.headers if caller else {}),
            **error_headers(error),
            **(headers or {}),
        }
        return respond(body, chosen, status=error.http_status, headers=all_headers)


def _allow_header(error: web.HTTPException) -> dict[str, str]:
    return {"allow": error.headers["Allow"]} if "Allow" in error.headers else {}


def _translate(error: web.HTTPException, request: web.Request) -> ServiceError:
    if error.status == 404:
        return UnknownMethod(
            f"There is nothing at {request.path[:128]}. GET /openapi.json lists every call."
        )
    if error.status == 405:
        allowed = error.headers.get("Allow", "")
        return MethodNotAllowed(f"This path answers to {allowed}.", details={"allowed": allowed})
    if error.status == 413:
        return PayloadTooLarge("The body is too large.")
    if error.status == 417:
        return InvalidRequest(
            "The header expect asks for what is not done here. Leave it out: 100-continue is the"
            " only expectation that is met."
        )
    return InvalidRequest("The request can't be read as HTTP.")
