"""JSON-RPC 2.0 messages: the bytes of a request in, the bytes of the answer out.

jsonrpcserver finds a method and calls it with the params as keywords, one request at a time. This
wrapper parses, validates and writes the messages and splits batches, which the library would run
unbounded. A method that jsonrpcserver calls raises nothing, since the library would log the
exception and send its text.

Decisions where JSON-RPC 2.0 leaves room, all within its letter:

- An invalid request is answered with its id where that can be read: a client that matches answers
  by id would wait for ever. Section 5 asks for null where there was an error in detecting the id.
- ``"id": null`` is an id, not a notification. Strings and numbers are the others.
- ``"params": null`` stands for params that were left out: some libraries send it.
- ``params`` of another kind than object or list make the request invalid (-32600); a list is valid
  JSON-RPC, but no method of this service takes one (-32602).
- Members that the specification does not name are ignored.
"""

from __future__ import annotations

import asyncio
import importlib
import uuid
import warnings
from collections.abc import Awaitable, Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import cache, cached_property, partial
from typing import Any, Final, Generic, TypeAlias, TypeVar

import structlog
from msgspec import Struct

from rpcsvc import strict_json
from rpcsvc.errors import (
    InternalError,
    InvalidJson,
    InvalidParams,
    InvalidRequest,
    PayloadTooLarge,
    ProtocolError,
    ServiceError,
    UnknownMethod,
)
from rpcsvc.ids import is_request_id
from rpcsvc.strict_json import shown

C = TypeVar("C")

_CONCURRENT_IN_BATCH: Final = 8
_ID_TYPES: Final = frozenset({str, int, float, type(None)})
_KINDS: Final = {
    dict: "an object",
    list: "a list",
    str: "a string",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    type(None): "null",
}
_NO_ID: Final = object()
_PARAMS_TYPES: Final = frozenset({dict, list, type(None)})
_LONGEST_GUESSED_NAME: Final = 48
_LIKENESS: Final = 0.4

_logger: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


# The HTTP status and the body to send; None for no body (HTTP 204).
RpcAnswer: TypeAlias = tuple[int, bytes | None]


async def _now() -> None:
    """Take no turn."""


def _never_waits(_params: dict[str, Any]) -> bool:
    return False


class RpcMethod(Struct, Generic[C], frozen=True):
    """A callable method.

    ``call`` takes the caller's context, the JSON-RPC id if it is a string (a hint for the request
    id, not yet checked) and the params; it gives a JSON value or an orjson.Fragment, or raises
    ProtocolError or InternalError. ``runs_as_notification`` is False where the caller must see the
    result, such as the deposit address of an order: a notification of it does nothing.
    ``waits`` returns for the params whether a call waits for an event and changes nothing.
    """

    call: Callable[[C, str | None, dict[str, Any]], Awaitable[Any]]
    runs_as_notification: bool
    waits: Callable[[dict[str, Any]], bool] = _never_waits


class _Context(Struct, Generic[C], frozen=True):
    """The caller of a method, the JSON-RPC id if it is a string, and whether no answer is due."""

    caller: C
    hint: str | None
    is_notification: bool


def error_object(error: ServiceError, request_id: str | None) -> dict[str, Any]:
    """``error`` as a JSON-RPC error object (JSON-RPC 2.0, section 5.1).

    An error without a JSON-RPC code of its own (an HTTP method that is not POST) is reported as
    an invalid request.
    """
    data: dict[str, Any] = {
        "code": error.code,
        "message": error.message,
        "retryable": error.retryable,
    }
    if request_id is not None:
        data["requestId"] = request_id
    if error.details is not None:
        data["details"] = error.details
    rpc_code = InvalidRequest.rpc_code if error.rpc_code is None else error.rpc_code
    return {"code": rpc_code, "message": error.message, "data": data}


def full_error(error: ServiceError, request_id: str | None) -> bytes:
    """A whole response with the id null, for a message that is refused before it is read."""
    return _error_response(None, error_object(error, request_id))


def _describe(_caller: Any, error: ServiceError, request_id: str | None) -> dict[str, Any]:
    return error_object(error, request_id)


def _hinted(_caller: Any, hint: str | None) -> str:
    return hint if is_request_id(hint) else uuid.uuid4().hex


class JsonRpcServer(Generic[C]):
    """Answers JSON-RPC 2.0 messages from a fixed table of methods. Safe for concurrent use.

    ``max_batch`` is the most elements of a batch, ``max_depth`` the deepest nesting of a body.
    ``request_id`` gives the request id under which a failure is reported and logged, from the
    caller's context and the hint (see RpcMethod); ``describe_error`` makes the error object from
    the context, the error and that request id.
    """

    def __init__(
        self,
        methods: Mapping[str, RpcMethod[C]],
        *,
        max_batch: int = 50,
        max_depth: int = 32,
        describe_error: Callable[[C, ServiceError, str | None], dict[str, Any]] = _describe,
        request_id: Callable[[C, str | None], str] = _hinted,
    ) -> None:
        self._methods = methods
        self._waits = {name: each.waits for name, each in methods.items()}
        self._max_batch = max_batch
        self._max_depth = max_depth
        self._describe_error = describe_error
        self._request_id = request_id

    async def answer(
        self,
        body: bytes,
        caller: C,
        only_waits: Callable[[], None] = lambda: None,
        turn: Callable[[], Awaitable[None]] = _now,
    ) -> RpcAnswer:
        """Answer one body: a request, a notification or a batch of them.

        ``only_waits`` is called once only calls that wait are left: from then on the call may be
        cancelled. ``turn`` is awaited before each element of a batch.

        The status is 200, for faults too, but 413 for a batch that is too long and 204 where
        JSON-RPC requires no answer. Exceptions of methods become answers, except
        asyncio.CancelledError; cancelling the call cancels the methods that it runs.
        """
        try:
            message = strict_json.loads(body, max_depth=self._max_depth)
        except InvalidJson as error:
            return self._full_error(caller, error)
        if type(message) is list:
            return await self._answer_batch(message, caller, only_waits, turn)
        if self._is_wait(message):
            only_waits()
        answer = await self._answer_one(message, caller)
        return 204 if answer is None else 200, answer

    async def _answer_batch(
        self,
        elements: list[Any],
        caller: C,
        only_waits: Callable[[], None],
        turn: Callable[[], Awaitable[None]],
    ) -> RpcAnswer:
        if not elements:
            empty = InvalidRequest("The batch is empty. Send at least one request in it.")
            return self._full_error(caller, empty)
        if len(elements) > self._max_batch:
            too_long = PayloadTooLarge(
                f"The batch has {len(elements)} elements. Send at most {self._max_batch} at once.",
                details={"received": len(elements), "allowed": self._max_batch},
            )
            return self._full_error(caller, too_long, too_long.http_status)
        found = await self._answer_all(elements, caller, only_waits, turn)
        answers = [answer for answer in found if answer]
        return (200, b"[%b]" % b",".join(answers)) if answers else (204, None)

    async def _answer_all(
        self,
        elements: list[Any],
        caller: C,
        only_waits: Callable[[], None],
        turn: Callable[[], Awaitable[None]],
    ) -> list[bytes | None]:
        """Answer the elements concurrently; answers keep their order.

        The number of working calls is limited; calls that only wait are not counted.
        """
        answers: list[bytes | None] = [None] * len(elements)
        numbered = list(enumerate(elements))
        waits = [each for each in numbered if self._is_wait(each[1])]
        others = [each for each in numbered if not self._is_wait(each[1])]
        rest, unanswered = iter(others), len(others)

        async def work(index: int, element: Any) -> None:
            await turn()
            answers[index] = await self._answer_one(element, caller)

        async def work_on_rest() -> None:
            nonlocal unanswered
            for each in rest:
                await work(*each)
                unanswered -= 1
            if waits and not unanswered:
                only_waits()

        if not others:
            only_waits()
        workers = min(_CONCURRENT_IN_BATCH, len(others))
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work(*each)) for each in waits]
            tasks += [group.create_task(work_on_rest()) for _ in range(workers)]
        if any(task.cancelled() for task in tasks):
            # TaskGroup ignores a task that cancelled itself; here its answer would be missing.
            raise asyncio.CancelledError
        return answers

    def _is_wait(self, element: Any) -> bool:
        """Return whether an element is a call that waits for an event and changes nothing."""
        if type(element) is not dict or type(element.get("method")) is not str:
            return False
        params, waits = element.get("params"), self._waits.get(element["method"])
        return waits is not None and type(params) is dict and waits(params)

    async def _answer_one(self, element: Any, caller: C) -> bytes | None:
        """The answer to one element; None for a notification."""
        call_id = _id_of(element)
        is_notification = call_id is _NO_ID
        hint = call_id if type(call_id) is str else None
        problem = _problem(element)
        if problem is not None:
            known_id = None if is_notification else call_id
            request_id = self._request_id(caller, hint)
            return self._refusal(caller, known_id, problem, request_id)
        context = _Context(caller, hint, is_notification)
        try:
            member, value = await self._dispatch(element, call_id, context)
            if is_notification:
                return None
            return strict_json.dumps({"jsonrpc": "2.0", member: value, "id": call_id})
        except Exception as error:  # noqa: BLE001 - answered, and logged unless it is the caller's
            described = self._described(element["method"], context, error)
            return None if is_notification else _error_response(call_id, described)

    async def _dispatch(
        self, element: dict[str, Any], call_id: Any, context: _Context[C]
    ) -> tuple[str, Any]:
        """Have jsonrpcserver run the method; return the member ``result`` or ``error`` by name.

        The library's own binding of params to a signature is left out: every method takes all
        keywords, and the model of its operation validates them. Raises UnknownMethod and
        InvalidParams.
        """
        library, name, params = _jsonrpcserver()[0], element["method"], element.get("params")
        found = library.get_method(self._callables, name)
        if isinstance(found, library.Left):
            raise _unknown_method(name, self._callables)
        if type(params) is list and params:
            raise InvalidParams(
                'The member "params" is a list. Send an object: params are given by name.'
            )
        request = library.Request(name, params or {}, call_id)
        outcome = await library.call(request, context, found._value)
        if isinstance(outcome, library.Left):
            return "error", outcome._error._asdict()
        return "result", outcome._value.result

    @cached_property
    def _callables(self) -> dict[str, Callable[..., Awaitable[Any]]]:
        """The methods as jsonrpcserver calls them: context by position, params as keywords."""
        return {name: partial(self._run, name, method) for name, method in self._methods.items()}

    async def _run(
        self, name: str, method: RpcMethod[C], context: _Context[C], /, **params: Any
    ) -> Any:
        """Run a method; return jsonrpcserver's Success, or its Error for a failure."""
        results = _jsonrpcserver()[1]
        if context.is_notification and not method.runs_as_notification:
            return results.Success(None)
        try:
            return results.Success(await method.call(context.caller, context.hint, params))
        except Exception as error:  # noqa: BLE001 - the library would log it and send its text
            return results.Error(**self._described(name, context, error))

    def _described(self, name: str, context: _Context[C], error: Exception) -> dict[str, Any]:
        """The error object of a failed call. Logs a failure that is not a caller's fault."""
        request_id = self._request_id(context.caller, context.hint)
        if isinstance(error, ProtocolError | InternalError):
            return self._describe_error(context.caller, error, request_id)
        _logger.exception("rpc_method_failed", method=shown(name), request_id=request_id)
        return self._describe_error(context.caller, InternalError(request_id), request_id)

    def _refusal(self, caller: C, call_id: Any, error: ServiceError, request_id: str) -> bytes:
        return _error_response(call_id, self._describe_error(caller, error, request_id))

    def _full_error(self, caller: C, error: ServiceError, status: int = 200) -> RpcAnswer:
        request_id = self._request_id(caller, None)
        return status, self._refusal(caller, None, error, request_id)


@cache
def _jsonrpcserver() -> tuple[Any, Any]:
    """Import jsonrpcserver's dispatcher and results with the first call: 20 ms, for jsonschema."""
    with warnings.catch_warnings():
        # On import the library reads its schema (unused here) by functions deprecated since 3.11.
        warnings.filterwarnings("ignore", "(read|open)_text is deprecated", DeprecationWarning)
        dispatcher = importlib.import_module("jsonrpcserver.async_dispatcher")
        return dispatcher, importlib.import_module("jsonrpcserver.result")


def _unknown_method(name: str, methods: Iterable[str]) -> UnknownMethod:
    guessable = name if len(name) <= _LONGEST_GUESSED_NAME else ""
    near = get_close_matches(guessable, methods, n=3, cutoff=_LIKENESS)
    if near:
        offer = f"The nearest: {', '.join(near)}."
        return UnknownMethod(
            f'There is no method "{shown(name)}". {offer}', details={"nearest": near}
        )
    return UnknownMethod(
        f'There is no method "{shown(name)}", nor one like it. See details for all methods.',
        details={"methods": sorted(methods)},
    )


def _id_of(element: Any) -> Any:
    """The id of an element, _NO_ID if it has none, None if it can't be written back unchanged."""
    call_id = element.get("id", _NO_ID) if type(element) is dict else None
    if call_id is _NO_ID or type(call_id) is str:
        return call_id
    return call_id if type(call_id) in _ID_TYPES and not _is_beyond_64_bits(call_id) else None


def _is_beyond_64_bits(call_id: Any) -> bool:
    return type(call_id) is int and not -(2**63) <= call_id < 2**63


def _problem(request: Any) -> ProtocolError | None:
    """The reason why ``request`` is no request (JSON-RPC 2.0, section 4), or None."""
    wrong = _wrong_member(request)
    if wrong is not None:
        return InvalidRequest(wrong)
    if _is_beyond_64_bits(request.get("id")):
        return InvalidJson("The id is an integer beyond 64 bits. Send it as a string.")
    return None


def _wrong_member(request: Any) -> str | None:
    if type(request) is not dict:
        return f"A request is an object, not {_KINDS[type(request)]}."
    if request.get("jsonrpc") != "2.0":
        return 'The member "jsonrpc" is missing or wrong. Send "jsonrpc": "2.0", a string.'
    if type(request.get("method")) is not str:
        return f'The member "method" is {_kind(request, "method")}. Send a name, as a string.'
    if type(request.get("id")) not in _ID_TYPES:
        return f'The member "id" is {_kind(request, "id")}. Send a string, a number or null.'
    if type(request.get("params")) not in _PARAMS_TYPES:
        return (
            f'The member "params" is {_kind(request, "params")}. Send an object, or leave it out.'
        )
    return None


def _kind(request: dict[str, Any], member: str) -> str:
    return _KINDS[type(request[member])] if member in request else "missing"


def _error_response(call_id: Any, error: dict[str, Any]) -> bytes:
    return strict_json.dumps({"jsonrpc": "2.0", "error": error, "id": call_id})
