"""JSON over HTTP to a daemon: monerod, monero-wallet-rpc, or an EVM node.

Failures are classified by whether the node may have acted, which decides over money:

    RpcFailure
    +-- NotSent            the node can't have acted: it was never reached
    |   +-- AccessRefused      it turned the request away unread (HTTP 401 or 403)
    +-- RpcOutcomeUnknown  it may have acted, or may yet: no good answer came
    |   +-- TimedOut           no whole answer in time
    |   +-- BadAnswer          what came back is not an answer to the call
    |   |   +-- TooLarge           it has more bytes than allowed
    |   +-- HttpFailure        an HTTP error status without a JSON-RPC error in it
    +-- NodeError          its own error answer; even this is no proof that it did nothing

A cancelled call is an unknown outcome too. Only reads are repeated, never what may move money.
A node whose chain has stopped may still call itself in sync: ``StallDetector`` finds it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from decimal import Decimal
from itertools import count
from typing import Annotated, Any, Final, Self, TypeVar
from urllib.parse import urlsplit

from aiohttp import ClientResponse, ClientSession, DigestAuthMiddleware, TCPConnector
from pydantic import Field, TypeAdapter, ValidationError

from rpcsvc.clock import steady_ms
from rpcsvc.http_client import (
    HttpRequest,
    NotReached,
    ReplyLost,
    ReplyTimedOut,
    ReplyTooLarge,
    exchange,
)
from rpcsvc.redacted import Redacted

JsonObject = dict[str, Any]
Pause = Callable[[float], Awaitable[None]]
HasTime = Callable[[], bool]

_PAUSES: Final = (0.05, 0.25)
_REFUSED_UNREAD: Final = (401, 403)
_WORTH_REPEATING: Final = (429, 502, 503, 504)
_LONGEST_QUOTE: Final = 300
_CONNECTIONS: Final = 16

T = TypeVar("T")
_MINUTE_MS: Final = 60_000


class RpcFailure(Exception):
    """A call to a daemon that gave no result. ``node`` and ``method`` say which."""

    def __init__(self, node: str, method: str, problem: str) -> None:
        super().__init__(f"{node}: {method}: {problem}")
        self.node = node
        self.method = method
        self.problem = problem


class NotSent(RpcFailure):
    """The node was never reached: it can't have acted on this call."""


class AccessRefused(NotSent):
    """The node turned the request away unread: user name, password or token are wrong."""


class RpcOutcomeUnknown(RpcFailure):
    """The request went out and no answer came back: the node may have acted on it, or may yet."""


class TimedOut(RpcOutcomeUnknown):
    """The daemon sent no whole answer in time."""


class BadAnswer(RpcOutcomeUnknown):
    """The answer is not JSON, or not of the form that the call has."""


class TooLarge(BadAnswer):
    """The answer has more bytes than the endpoint allows."""


class HttpFailure(RpcOutcomeUnknown):
    """An HTTP error status, from the node or from a proxy before it."""

    def __init__(self, node: str, method: str, status: int) -> None:
        super().__init__(node, method, f"HTTP status {status}")
        self.status = status


class NodeError(RpcFailure):
    """The node answered with an error. ``code`` and ``text`` are its own; ``data`` any JSON."""

    def __init__(self, node: str, method: str, code: int, text: str, data: Any = None) -> None:
        super().__init__(node, method, f"the node answered with error {code}: {_short(text)}")
        self.code = code
        self.text = text
        self.data = data


class ChainUnusable(Exception):
    """A node, wallet, token or mnemonic is not the right one. The text is for the operator."""


class DaemonEndpoint(Redacted, frozen=True):
    """The address of a daemon. Messages show ``name``: a URL may hold a secret.

    ``username`` and ``password`` are for HTTP digest. ``serial``: one request at a time over one
    connection, as monero-wallet-rpc works (its digest nonces belong to a connection).
    Times are seconds; ``max_response_bytes`` bounds one answer. Raises ValueError.
    """

    HIDDEN = frozenset({"url", "password"})

    name: str
    url: str
    username: str | None = None
    password: str | None = None
    serial: bool = False
    connect_seconds: float = 5
    total_seconds: float = 30
    max_response_bytes: int = 32 << 20

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{self.name}: the URL must be http:// or https:// with a host")
        if "@" in parts.netloc:
            raise ValueError(
                f"{self.name}: the URL holds a user name or password; give them as settings of"
                " their own, since URLs end up in logs"
            )
        if (self.username is None) != (self.password is None):
            raise ValueError(
                f"{self.name}: user name and password are given together or not at all"
            )


def always() -> bool:
    """Allow publishing at any time: for a process that shares its database with no other."""
    return True


class DaemonRpc:
    """Calls one daemon. Use as ``async with``, or ``open`` and ``close``.

    ``read`` and ``read_path`` repeat calls whose failure may pass; ``act`` and ``act_path`` send
    once. All raise RpcFailure. JSON-RPC goes to the endpoint's URL with ``rpc_path`` added.
    ``pause`` waits between repetitions, in seconds. ``has_time``: whether the lease of this process
    allows a payment to be published now (docs/adr/0014-replicas.md).
    """

    def __init__(
        self,
        endpoint: DaemonEndpoint,
        *,
        rpc_path: str = "",
        pause: Pause = asyncio.sleep,
        has_time: HasTime = always,
    ) -> None:
        self.endpoint = endpoint
        self._rpc_path = rpc_path
        self._pause = pause
        self._has_time = has_time
        self._ids = count(1)
        self._lock = asyncio.Lock()
        self._session: ClientSession | None = None

    async def __aenter__(self) -> Self:
        self.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def open(self) -> None:
        """Make ready to send; nothing is sent yet. Call it with the event loop running."""
        at = self.endpoint
        self._session = ClientSession(
            connector=TCPConnector(limit=1 if at.serial else _CONNECTIONS),
            middlewares=_digest(at),
            headers={"accept-encoding": "identity"},
        )

    async def close(self) -> None:
        """Close the connections. May be called twice."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def read(self, method: str, params: Any = None, *, seconds: float | None = None) -> Any:
        """The result of a JSON-RPC call that changes nothing. ``seconds``: another time limit."""
        return await self._repeating(lambda: self.act(method, params, seconds=seconds))

    async def act(
        self,
        method: str,
        params: Any = None,
        *,
        seconds: float | None = None,
        publishes: bool = False,
    ) -> Any:
        """The result of a JSON-RPC call, sent at most once. ``seconds``: another time limit.

        One that ``publishes`` a payment is not sent (NotSent) once the lease has no time left.
        """
        number = str(next(self._ids))
        body = {"jsonrpc": "2.0", "id": number, "method": method}
        if params is not None:
            body["params"] = params
        status, content = await self._post(self._rpc_path, method, body, seconds, publishes)
        return self._result(method, number, self._parse(method, status, content))

    async def read_path(
        self, path: str, body: JsonObject, *, seconds: float | None = None
    ) -> JsonObject:
        """The answer of a plain JSON path (monerod has some) that changes nothing."""
        return await self._repeating(lambda: self.act_path(path, body, seconds=seconds))

    async def act_path(
        self,
        path: str,
        body: JsonObject,
        *,
        seconds: float | None = None,
        publishes: bool = False,
    ) -> JsonObject:
        """The answer of a plain JSON path (monerod has some), sent at most once; as ``act``."""
        status, content = await self._post(path, path, body, seconds, publishes)
        if status != 200:
            raise HttpFailure(self.endpoint.name, path, status)
        return self._parse(path, status, content)

    # --- one exchange --------------------------------------------------------------------------

    async def _repeating(self, call: Callable[[], Awaitable[T]]) -> T:
        for seconds in _PAUSES:
            try:
                return await call()
            except RpcFailure as failure:
                if not _may_pass(failure):
                    raise
            await self._pause(seconds)
        return await call()

    async def _post(
        self, path: str, method: str, body: JsonObject, seconds: float | None, publishes: bool
    ) -> tuple[int, bytes]:
        limit = self.endpoint.total_seconds if seconds is None else seconds
        if not self.endpoint.serial:
            return await self._send(path, method, body, limit, publishes)
        await self._wait_for_turn(method, limit)
        try:
            return await self._send(path, method, body, limit, publishes)
        finally:
            self._lock.release()

    async def _wait_for_turn(self, method: str, limit: float) -> None:
        try:
            async with asyncio.timeout(limit):
                await self._lock.acquire()
        except TimeoutError:
            problem = f"other calls kept the daemon busy for {limit:g} seconds"
            raise NotSent(self.endpoint.name, method, problem) from None

    async def _send(
        self, path: str, method: str, body: JsonObject, limit: float, publishes: bool
    ) -> tuple[int, bytes]:
        at = self.endpoint
        if publishes and not self._has_time():
            raise NotSent(at.name, method, "the lease of this replica has no time left")
        if self._session is None:
            raise NotSent(at.name, method, "the client is closed")

        def refuse_unread(response: ClientResponse) -> None:
            if response.status in _REFUSED_UNREAD:
                problem = f"HTTP status {response.status}: check its user name, password or token"
                raise AccessRefused(at.name, method, problem)

        request = HttpRequest(
            "POST",
            at.url.rstrip("/") + path if path else at.url,
            seconds=limit,
            most_bytes=at.max_response_bytes,
            body=json.dumps(body, allow_nan=False).encode(),
            headers={"content-type": "application/json"},
            connect_seconds=at.connect_seconds,
        )
        try:
            reply = await exchange(self._session, request, refuse_unread)
        except NotReached as error:
            raise NotSent(at.name, method, f"not reached: {_words(error.cause)}") from error
        except ReplyTimedOut as error:
            raise TimedOut(at.name, method, str(error)) from error
        except ReplyTooLarge as error:
            raise TooLarge(at.name, method, str(error)) from error
        except ReplyLost as error:
            raise RpcOutcomeUnknown(
                at.name, method, f"connection lost: {_words(error.cause)}"
            ) from error
        return reply.status, reply.body

    # --- reading the answer --------------------------------------------------------------------

    def _parse(self, method: str, status: int, content: bytes) -> JsonObject:
        name = self.endpoint.name
        if status in _WORTH_REPEATING:
            raise HttpFailure(name, method, status)
        try:
            answer = parse_json(content)
        except ValueError as error:
            if status != 200:
                raise HttpFailure(name, method, status) from error
            raise BadAnswer(name, method, f"the answer is not JSON: {_words(error)}") from error
        if status != 200 and not (isinstance(answer, dict) and "error" in answer):
            raise HttpFailure(name, method, status)
        if not isinstance(answer, dict):
            raise BadAnswer(name, method, "the answer is not a JSON object")
        return answer

    def _result(self, method: str, number: str, answer: JsonObject) -> Any:
        name = self.endpoint.name
        error = answer.get("error")
        # A node that could not read the request answers with id null.
        if isinstance(error, dict) and answer.get("id") in (number, None):
            raise _node_error(name, method, error)
        if answer.get("id") != number or "result" not in answer:
            raise BadAnswer(name, method, "it is not the answer to this call")
        return answer["result"]


# Types of an answer's fields: nothing is converted. A whole number is not negative.
Whole = Annotated[int, Field(strict=True, ge=0)]
Text = Annotated[str, Field(strict=True)]
Flag = Annotated[bool, Field(strict=True)]

WHOLE: Final[TypeAdapter[int]] = TypeAdapter(Whole)
TEXT: Final[TypeAdapter[str]] = TypeAdapter(Text)
FLAG: Final[TypeAdapter[bool]] = TypeAdapter(Flag)


def named(name: str) -> Any:
    """A pydantic field whose value is called ``name`` in the answer."""
    return Field(validation_alias=name)


Model = type[T] | TypeAdapter[T]


_adapters: dict[Any, TypeAdapter[Any]] = {}


def _adapter(model: Model[T]) -> TypeAdapter[T]:
    """The TypeAdapter of a model, made at its first use."""
    if isinstance(model, TypeAdapter):
        return model
    if model not in _adapters:
        _adapters[model] = TypeAdapter(model)
    return _adapters[model]


def read_answer(model: Model[T], node: str, method: str, value: Any) -> T:
    """An answer as its model. Fields that the model lacks are ignored. Raises BadAnswer."""
    try:
        return _adapter(model).validate_python(value)
    except ValidationError as error:
        # Without its cause, which quotes the answer: a wallet's may hold secrets.
        raise BadAnswer(node, method, f"the answer {_first_problem(error)}") from None


def read_field(model: Model[T], node: str, method: str, answer: Any, key: str) -> T:
    """Return one field of an answer as its model. Raises BadAnswer, also for a missing field."""
    if not isinstance(answer, dict) or key not in answer:
        raise BadAnswer(node, method, f"the answer has no {key}")
    return read_answer(model, node, f"{method}: {key}", answer[key])


def _first_problem(error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    where = ".".join(str(part) for part in first["loc"])
    problem = first["msg"].removeprefix("Value error, ")
    return f"is not as expected{' at ' if where else ''}{where}: {problem}"


def parse_json(content: bytes) -> Any:
    """Return JSON with integers exact at any size and no floats (Decimal). Raises ValueError."""
    try:
        return json.loads(content, parse_float=Decimal, parse_constant=_no_constant)
    except RecursionError as error:
        raise ValueError("nested too deeply") from error


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _digest(at: DaemonEndpoint) -> tuple[DigestAuthMiddleware, ...]:
    if at.username is None or at.password is None:
        return ()
    return (DigestAuthMiddleware(at.username, at.password),)


def _may_pass(failure: RpcFailure) -> bool:
    """Whether a failed read is worth repeating: after a time-out it would only add to the load."""
    if isinstance(failure, HttpFailure):
        return failure.status in _WORTH_REPEATING
    if isinstance(failure, AccessRefused | TimedOut | TooLarge):
        return False
    return isinstance(failure, NotSent | RpcOutcomeUnknown)


def _node_error(name: str, method: str, error: JsonObject) -> RpcFailure:
    code, text = error.get("code"), error.get("message")
    if isinstance(code, bool) or not isinstance(code, int) or not isinstance(text, str):
        return BadAnswer(name, method, "it is an error without code or message")
    return NodeError(name, method, code, text, error.get("data"))


def _words(error: BaseException) -> str:
    return _short(str(error)) or type(error).__name__


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST_QUOTE else text[: _LONGEST_QUOTE - 3] + "..."


class StallDetector:
    """Watches one node, whose blocks nearly always come within ``longest_gap_ms``.

    ``steady`` is a monotonic clock in ms. ``height``: the node's last answer; None before the
    first.
    """

    def __init__(self, longest_gap_ms: int, steady: Callable[[], int] = steady_ms) -> None:
        self._longest_gap_ms = longest_gap_ms
        self._steady = steady
        self._highest = -1
        self._since = 0
        self.height: int | None = None

    def saw(self, height: int) -> None:
        """Note how high the node says its chain is. Of several behind one address some lag."""
        self.height = height
        if height > self._highest:
            self._highest, self._since = height, self._steady()

    def age_ms(self) -> int | None:
        """Return the time since the node showed a new block; None before the first."""
        return None if self._highest < 0 else self._steady() - self._since

    def problem(self, node: str) -> str | None:
        """Return a message for the operator when the chain of ``node`` has stopped; else None."""
        lasts = self._steady() - self._since
        if self._highest < 0 or lasts < self._longest_gap_ms:
            return None
        return f"{node} has shown no new block for {lasts // _MINUTE_MS} minutes"
