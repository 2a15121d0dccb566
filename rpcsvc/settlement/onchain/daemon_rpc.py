"""JSON over HTTP to a daemon: monerod, monero-wallet-rpc, or an EVM node.

Failures are classified by whether the node may have acted, which decides over money:

    RpcFailure
    +-- NotSent            the node can't have acted: it was never reached
    |   +-- AccessRefused      it turned the request away unread (HTTP 401 or 403)
    |   +-- Resting            it has asked for fewer calls
    +-- RpcOutcomeUnknown  it may have acted, or may yet: no good answer came
    |   +-- TimedOut           no whole answer in time
    |   +-- BadAnswer          what came back is not an answer to the call
    |   |   +-- TooLarge           it has more bytes than allowed
    |   +-- HttpFailure        an HTTP error status without a JSON-RPC error in it
    |   +-- TooManyCalls       it asks for fewer calls (HTTP 429, or an error that says so)
    +-- NodeError          its own error answer; even this is no proof that it did nothing
    +-- BatchRefused       it takes no batch of calls: it has read none of them

A cancelled call is an unknown outcome too. Only reads are repeated, never what may move money.
A node that asks for fewer calls gets none for a while (``CallLimit``), from any caller.
A node whose chain has stopped may still call itself in sync: ``StallDetector`` finds it.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from decimal import Decimal
from itertools import count
from typing import Annotated, Any, Final, Self, TypeVar
from urllib.parse import urlsplit

import structlog
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

log = structlog.get_logger(__name__)

JsonObject = dict[str, Any]
# A method and its parameters.
Call = tuple[str, Any]
Pause = Callable[[float], Awaitable[None]]
HasTime = Callable[[], bool]

_PAUSES: Final = (0.05, 0.25)
_REFUSED_UNREAD: Final = (401, 403)
_WORTH_REPEATING: Final = (502, 503, 504)
_TOO_MANY_CALLS: Final = 429
# JSON-RPC has no code for it; these words are those of providers.
_LIMIT_WORDS: Final = re.compile(
    r"rate.?limit|too many requests?|requests? (count|rate|limit|per)\b|compute units|capacity",
    re.I,
)
# A refusal with one of these is about what was asked, or a contract wrote it.
_OTHER_LIMITS: Final = re.compile(r"revert|batch|block|range|results?\b|logs?\b|pool", re.I)
# Retry-After; its other form, a date, is that of another clock (RFC 9110, section 10.2.3).
_SECONDS: Final = re.compile(r"[0-9]{1,9}", re.ASCII)
_FIRST_REST_MS: Final = 1_000
_LONGEST_REST_MS: Final = 60_000
# A node may ask for a longer rest, up to this.
_LONGEST_RETRY_AFTER_MS: Final = 5 * 60_000
# Answers of nodes and proxies that know no batches, if they hold no error of JSON-RPC.
_BATCH_UNKNOWN: Final = (400, 404, 405, 413, 415, 422, 501)
# How long a node that refused a batch is sent none: it may be another one by then.
_NO_BATCH_MS: Final = 10 * 60_000
# The most calls and bytes of a batch; a node that refuses one may take a smaller one.
MOST_CALLS: Final = 50
MOST_BYTES: Final = 128 * 1024
# A refused batch of so few calls is not divided: its calls are sent one by one.
_FEW_CALLS: Final = 8
# Steps of the event loop in which the reads of a batch begin: a nested gather takes one more.
_STEPS: Final = 3
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


class Resting(NotSent):
    """The node has asked for fewer calls: none is sent to it for a while."""


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


class TooManyCalls(RpcOutcomeUnknown):
    """The node asks for fewer calls."""


class NodeError(RpcFailure):
    """The node answered with an error. ``code`` and ``text`` are its own; ``data`` any JSON."""

    def __init__(self, node: str, method: str, code: int, text: str, data: Any = None) -> None:
        super().__init__(node, method, f"the node answered with error {code}: {_short(text)}")
        self.code = code
        self.text = text
        self.data = data


class BatchRefused(RpcFailure):
    """The node takes no batch of calls: ask it one by one."""


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


class CallLimit:
    """The rest that a node has asked for, which all callers of its client keep.

    Each refusal doubles it, from 1 s to a minute; an answer ends that. ``Retry-After`` lengthens
    it, to five minutes at most. ``steady`` is a monotonic clock in ms.
    """

    def __init__(self, steady: Callable[[], int] = steady_ms) -> None:
        self._steady = steady
        self._next_ms = _FIRST_REST_MS
        self._until: int | None = None

    def is_resting(self) -> bool:
        """Whether no call may be sent now."""
        return self._until is not None and self._steady() < self._until

    def refused(self, retry_after: str | None = None) -> None:
        """Begin a rest, ``retry_after`` seconds at least. Calls refused together count once."""
        if self.is_resting():
            return
        asked = retry_after or ""
        given = int(asked) * 1000 if _SECONDS.fullmatch(asked) else 0
        rest = max(self._next_ms, min(given, _LONGEST_RETRY_AFTER_MS))
        self._next_ms = min(2 * self._next_ms, _LONGEST_REST_MS)
        self._until = self._steady() + rest

    def answered(self) -> None:
        """Note an answer: the next rest is short again."""
        self._next_ms = _FIRST_REST_MS


class _Batch:
    """Collects reads of one client that begin in one step of the event loop."""

    def __init__(self, rpc: DaemonRpc) -> None:
        self.rpc = rpc
        self._waiting: list[tuple[Call, asyncio.Future[Any]]] = []

    async def read(self, method: str, params: Any) -> Any:
        outcome: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting.append(((method, params), outcome))
        if len(self._waiting) == 1:
            await self._lead()
        found = await outcome
        if isinstance(found, RpcFailure):
            raise found
        return found

    async def _lead(self) -> None:
        """Let the other reads begin, also those of nested gathers, then send all of them."""
        waiting = self._waiting
        found: list[Any] = []
        try:
            for _ in range(_STEPS):
                await asyncio.sleep(0)
            self._waiting = []  # what begins from now on is another batch
            found = await self.rpc.read_each([call for call, _ in waiting])
        finally:
            if self._waiting is waiting:
                self._waiting = []
            cut = RpcOutcomeUnknown(self.rpc.endpoint.name, waiting[0][0][0], "it was cancelled")
            found = found or [cut] * len(waiting)
            for (_, outcome), item in zip(waiting, found, strict=True):
                if not outcome.done():
                    outcome.set_result(item)


# The reads that begin in this context are sent together.
_BATCH: ContextVar[_Batch | None] = ContextVar("batch", default=None)


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
        # The size of the smallest batch that was refused, and when: smaller ones may be taken.
        self._refused_batch: tuple[int, int] | None = None
        self._limit = CallLimit()

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
        batch = _BATCH.get()
        if batch is not None and batch.rpc is self and seconds is None:
            return await batch.read(method, params)
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
        body = self._body(method, params)
        status, content = await self._post(self._rpc_path, method, body, seconds, publishes)
        found = self._outcome(body, self._parse(method, status, content))
        self._note([found])
        if isinstance(found, RpcFailure):
            raise found
        return found

    @contextmanager
    def together(self) -> Iterator[None]:
        """Send reads that begin together within the block as one batch.

        Have them begin by asyncio.gather. A node that takes no batches is asked one by one.
        """
        batch = _BATCH.get()
        if batch is not None and batch.rpc is self:
            yield
            return
        token = _BATCH.set(_Batch(self))
        try:
            yield
        finally:
            _BATCH.reset(token)

    async def read_each(self, calls: Sequence[Call]) -> list[Any]:
        """Return the results of calls that change nothing, or the failure of each, in their order.

        They are sent as batches, or one by one to a node that takes none.
        """

        async def alone(method: str, params: Any) -> Any:
            return await self._repeating(lambda: self.act(method, params))

        return await self._divided(calls, self.read_all, alone)

    async def publish_each(self, calls: Sequence[Call]) -> list[Any]:
        """Return the results of calls that publish, or the failure of each, in their order.

        They are sent as ``read_each`` sends its calls, and not repeated; none is sent (NotSent)
        once the lease has no time left. Of a batch that the node refuses each is sent once more: it
        must be safe to repeat.
        """

        async def together(batch: Sequence[Call]) -> list[Any]:
            return await self._batch(batch, publishes=True)

        async def alone(method: str, params: Any) -> Any:
            return await self.act(method, params, publishes=True)

        return await self._divided(calls, together, alone)

    async def _divided(
        self,
        calls: Sequence[Call],
        together: Callable[[Sequence[Call]], Awaitable[list[Any]]],
        alone: Callable[[str, Any], Awaitable[Any]],
    ) -> list[Any]:
        """Return the result or the failure of each call, sent in batches that the node takes."""
        found: list[Any] = []
        waiting = _batches(calls)[::-1]
        while waiting:
            batch = waiting.pop()
            try:
                found += await together(batch) if len(batch) > 1 else [await alone(*batch[0])]
            except BatchRefused:
                if len(batch) <= _FEW_CALLS:
                    waiting += [[call] for call in reversed(batch)]
                else:
                    half = len(batch) // 2
                    waiting += [batch[half:], batch[:half]]
            except RpcFailure as failure:
                found += [failure] * len(batch)
                if isinstance(failure, TimedOut):  # the node hangs: so would the others
                    return found + [failure] * sum(map(len, waiting))
        return found

    @property
    def takes_batches(self) -> bool:
        """Whether the node has not refused, lately, even a batch of a few calls."""
        size, at = self._refused_batch or (MOST_CALLS, 0)
        return size > _FEW_CALLS or steady_ms() - at >= _NO_BATCH_MS

    async def read_all(self, calls: Sequence[Call]) -> list[Any]:
        """Return the results of calls that change nothing, sent as one batch, in their order.

        A call that the node refused has its NodeError as the result. Raises BatchRefused when the
        node takes no batches. Source: JSON-RPC 2.0, section 6.
        """
        return await self._repeating(lambda: self._batch(calls))

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

    def _body(self, method: str, params: Any) -> JsonObject:
        body = {"jsonrpc": "2.0", "id": str(next(self._ids)), "method": method}
        return body if params is None else body | {"params": params}

    async def _batch(self, calls: Sequence[Call], *, publishes: bool = False) -> list[Any]:
        name = " and ".join(dict.fromkeys(method for method, _ in calls))
        size, at = self._refused_batch or (len(calls) + 1, 0)
        if len(calls) >= size and steady_ms() - at < _NO_BATCH_MS:
            raise BatchRefused(self.endpoint.name, name, "it has refused a batch of calls before")
        bodies = [self._body(method, params) for method, params in calls]
        status, content = await self._post(self._rpc_path, name, bodies, None, publishes)
        try:
            return self._results(name, bodies, status, content, is_each=publishes)
        except BatchRefused as refused:
            log.warning("batch_refused", node=self.endpoint.name, reason=str(refused))
            self._refused_batch = (len(calls), steady_ms())
            raise

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
        self,
        path: str,
        method: str,
        body: JsonObject | list[JsonObject],
        seconds: float | None,
        publishes: bool = False,
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
        self,
        path: str,
        method: str,
        body: JsonObject | list[JsonObject],
        limit: float,
        publishes: bool,
    ) -> tuple[int, bytes]:
        at = self.endpoint
        if publishes and not self._has_time():
            raise NotSent(at.name, method, "the lease of this replica has no time left")
        if self._session is None:
            raise NotSent(at.name, method, "the client is closed")
        if self._limit.is_resting():
            raise Resting(at.name, method, "it has asked for fewer calls")

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
        if reply.status == _TOO_MANY_CALLS:
            self._limit.refused(reply.headers.get("Retry-After"))
            raise TooManyCalls(at.name, method, f"HTTP status {reply.status}")
        return reply.status, reply.body

    # --- reading the answer --------------------------------------------------------------------

    def _parse(self, method: str, status: int, content: bytes) -> JsonObject:
        answer = self._json(method, status, content)
        if not isinstance(answer, dict):
            raise BadAnswer(self.endpoint.name, method, "the answer is not a JSON object")
        return answer

    def _json(self, method: str, status: int, content: bytes) -> Any:
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
        return answer

    def _results(
        self,
        name: str,
        bodies: Sequence[JsonObject],
        status: int,
        content: bytes,
        *,
        is_each: bool,
    ) -> list[Any]:
        """Return the results of a batch, whose answers may come in any order.

        ``is_each``: a bad or missing answer is the failure of its call, and not of all.
        """
        node = self.endpoint.name
        try:
            answers = self._json(name, status, content)
        except HttpFailure as failure:
            if failure.status in _BATCH_UNKNOWN:
                raise BatchRefused(node, name, f"no batches: {failure.problem}") from failure
            raise
        if isinstance(answers, dict):
            answers = [answers | {"id": None}]
        if not isinstance(answers, list) or not all(isinstance(item, dict) for item in answers):
            raise BadAnswer(node, name, "the answer is not a list of JSON objects")
        if len(answers) == 1 and answers[0].get("id") is None:
            refusal = self._outcome({"method": name, "id": None}, answers[0])
            if isinstance(refusal, TooManyCalls):
                self._note([refusal])
                raise refusal
            raise BatchRefused(node, name, f"no batches: {refusal}")
        by_id = {item.get("id"): item for item in answers if isinstance(item.get("id"), str)}
        found = [self._outcome(body, by_id.get(body["id"], {})) for body in bodies]
        self._note(found)
        kept = RpcFailure if is_each else NodeError
        for each in found:
            if isinstance(each, RpcFailure) and not isinstance(each, kept):
                raise each
        return found

    def _outcome(self, body: JsonObject, answer: JsonObject) -> Any:
        """Return the result of one call, or its failure."""
        try:
            return self._result(body["method"], body["id"], answer)
        except RpcFailure as failure:
            return failure

    def _note(self, outcomes: Sequence[Any]) -> None:
        """Begin a rest when the node refused one of the calls: it may have answered others."""
        if any(isinstance(each, TooManyCalls) for each in outcomes):
            self._limit.refused()
        elif not all(isinstance(each, RpcFailure) for each in outcomes):
            self._limit.answered()

    def _result(self, method: str, number: str, answer: JsonObject) -> Any:
        name = self.endpoint.name
        error = answer.get("error")
        # A node that could not read the request answers with id null.
        if isinstance(error, dict) and answer.get("id") in (number, None):
            failure = _node_error(name, method, error)
            if _is_limit(failure):
                raise TooManyCalls(name, method, failure.problem)
            raise failure
        if answer.get("id") != number or "result" not in answer:
            raise BadAnswer(name, method, "it is not the answer to this call")
        return answer["result"]


def _batches(calls: Sequence[Call]) -> list[list[Call]]:
    """Divide calls into batches within the bounds; a call that is larger is a batch of its own."""
    batches: list[list[Call]] = []
    room = 0
    for call in calls:
        size = len(json.dumps(call, allow_nan=False))
        if not batches or len(batches[-1]) == MOST_CALLS or size > room:
            batches.append([])
            room = MOST_BYTES
        batches[-1].append(call)
        room -= size
    return batches


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
    if isinstance(failure, AccessRefused | Resting | TimedOut | TooLarge | TooManyCalls):
        return False
    return isinstance(failure, NotSent | RpcOutcomeUnknown)


def _node_error(name: str, method: str, error: JsonObject) -> RpcFailure:
    code, text = error.get("code"), error.get("message")
    if isinstance(code, bool) or not isinstance(code, int) or not isinstance(text, str):
        return BadAnswer(name, method, "it is an error without code or message")
    return NodeError(name, method, code, text, error.get("data"))


def _is_limit(failure: RpcFailure) -> bool:
    """Whether a node's error asks for fewer calls.

    Not when a contract may have written its words: that of a payer could silence the node. Nor when
    it is about the size of a batch or of a range of blocks: to rest and ask again would never help.
    """
    if not isinstance(failure, NodeError) or _OTHER_LIMITS.search(failure.text):
        return False
    return failure.code == _TOO_MANY_CALLS or bool(_LIMIT_WORDS.search(failure.text))


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
