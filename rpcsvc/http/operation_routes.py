"""The operation tables over HTTP: REST paths of the agent API and the BFF, and POST /rpc.

An input where no code reads it is refused: an ignored idempotency key could make two orders.
Over TCP /rpc has the methods of the agent API; over the UNIX socket the admin methods as well.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from itertools import groupby
from typing import Any, Final, NamedTuple

import orjson
from aiohttp import web
from msgspec.structs import replace

from rpcsvc.domain.clients import Client, KnownClient
from rpcsvc.domain.integrators import Integrators
from rpcsvc.errors import (
    InputError,
    InternalError,
    InvalidInput,
    InvalidParams,
    InvalidRequest,
    ServiceError,
    TlsRequired,
    Unauthorized,
)
from rpcsvc.http.connection import ENDS_WITH_CALLER, Handler, connection_of
from rpcsvc.http.event_stream import EventStream, from_last_event, wants_events
from rpcsvc.http.gate import (
    CALLER,
    Caller,
    Gate,
    is_on_socket,
)
from rpcsvc.http.jsonrpc import JsonRpcServer, RpcMethod, error_object, full_error
from rpcsvc.http.messages import (
    JSON,
    OPERATION,
    error_headers,
    read_body,
    read_json_object,
    read_query,
    require_json,
    respond,
    respond_with,
    with_path,
)
from rpcsvc.http.x402 import with_payment
from rpcsvc.local_secret import OPERATOR_HEADER
from rpcsvc.operations.dispatch import Dispatcher
from rpcsvc.operations.inputs import IDEMPOTENCY_KEY, MOST_PROBLEMS, Problems, bare_key, read_key
from rpcsvc.operations.params import LONGEST_NAME, Params, plain_types
from rpcsvc.operations.service import Call, Effect, Operation, Reply
from rpcsvc.strict_json import Json

# An integer in a query, at most as long as a row id.
_DIGITS: Final = re.compile(r"-?[0-9]{1,18}", re.ASCII)
_OTHER_HEADERS: Final = frozenset({"x-api-key", "x-request-id"})

# "JSON-RPC 2.0 Transport: HTTP" names all three.
_MEDIA_TYPES: Final = frozenset({JSON, "application/json-rpc", "application/jsonrequest"})
# The session that the CLI remembers (operations/service.py, Call).
LOCAL_SESSION: Final = "x-agent-local-session"


def require_no_query(request: web.Request) -> None:
    """Raise an InputError or InputErrors for each name in the query of a POST."""
    if "?" not in request.raw_path:
        return
    given = dict(request.query)
    Problems(_in_query(name, given[name]) for name in list(given)[:MOST_PROBLEMS]).raise_found()


def require_no_query_of_rpc(request: web.Request) -> None:
    """Raise InvalidRequest for a query at /rpc or /mcp, where each call has its own params."""
    if "?" in request.raw_path and request.query:
        name = next(iter(request.query))[:LONGEST_NAME]
        raise InvalidRequest(
            f'The query has "{name}", and {request.path} reads nothing there. Send what a call'
            f" takes in its params, {IDEMPOTENCY_KEY} too."
        )


def require_key_header(request: web.Request) -> None:
    """Raise InvalidInput for an idempotency key in a wrong header, or for two keys."""
    for name in _key_headers(request.headers):
        if name.lower() != IDEMPOTENCY_KEY:
            raise InvalidInput(
                f"{name[:LONGEST_NAME]} is not read. Send the key as the header {IDEMPOTENCY_KEY}.",
                field=name[:LONGEST_NAME],
                received=request.headers[name],
                allowed=[IDEMPOTENCY_KEY],
            )
    if len(request.headers.getall(IDEMPOTENCY_KEY, ())) > 1:
        raise InvalidInput(
            f"The header {IDEMPOTENCY_KEY} occurs more than once. Send it once:"
            " which of the two counts would be a guess.",
            field=IDEMPOTENCY_KEY,
        )


def require_no_key_header(headers: Mapping[str, str]) -> None:
    """Raise InvalidInput for an idempotency key in a header at /rpc, where it is a param.

    In a batch a header's key could be for any of the calls.
    """
    if "idempot" not in " ".join(headers).lower():
        return
    for name in _key_headers(headers):
        raise InvalidInput(
            f"The header {name[:LONGEST_NAME]} is not read at /rpc. Send the key as the param"
            f" {IDEMPOTENCY_KEY} of the call that it is for.",
            field=name[:LONGEST_NAME],
            received=headers[name],
        )


def _key_headers(headers: Mapping[str, str]) -> list[str]:
    """The names of headers that look like an idempotency key, whatever their spelling."""
    return [name for name in headers if _means_key(name)]


def _means_key(name: str) -> bool:
    small = name.lower()
    return "idempot" in small and small.endswith("key")


def _in_query(name: str, value: str) -> InputError:
    shown = name[:LONGEST_NAME]
    return InvalidInput(
        f"{shown} is in the query, and a POST reads nothing there. {_place_of(name)}",
        field=shown,
        received=value,
    )


def _place_of(name: str) -> str:
    if _means_key(name):
        return f"The key goes into the header {IDEMPOTENCY_KEY} of calls that create an order."
    if name.lower() in _OTHER_HEADERS:
        return f"Send it as the header {name.lower()}."
    return "Send it in the JSON body."


# Adds to a call the caller that its request's headers name. Raises ServiceError.
Identify = Callable[[web.Request, Call], Call]


class OperationRoutes:
    """Makes the routes of a table under ``root``."""

    def __init__(
        self,
        gate: Gate,
        dispatcher: Dispatcher,
        root: str,
        *,
        transport: str,
        body_bytes: int,
        max_depth: int,
        identify: Identify = lambda _request, call: call,
    ) -> None:
        self._gate = gate
        self._dispatcher = dispatcher
        self._root = root
        self._body_bytes = body_bytes
        self._max_depth = max_depth
        self._identify = identify
        self._transport = transport

    def routes(self, operations: Iterable[Operation]) -> list[web.RouteDef]:
        """Return a route for each operation with a path, and a refusal of other methods there."""
        offered = sorted((op for op in operations if op.path), key=_path_of)
        found: list[web.RouteDef] = []
        for under, group in groupby(offered, _path_of):
            same, path = list(group), self._root + under
            found += [web.route(op.method, path, self._handler(op)) for op in same]
            found.append(web.route("*", path, _wrong_method(same)))
        return found

    def _handler(self, operation: Operation) -> Handler:
        numbers = numbers_of(operation.params)

        async def handle(request: web.Request) -> web.StreamResponse:
            request[OPERATION] = operation.name
            request[CALLER] = caller = self._gate.admit(request)
            key = request.headers.get(IDEMPOTENCY_KEY) if operation.idempotent else None
            call = Call(caller.request_id, idempotency_key=key, transport=self._transport)
            follow = operation.follow if wants_events(request) else None
            try:
                if self._gate.has_tokens:  # else what comes is for a gateway in front, or nobody
                    self._gate.identify(request, caller)
                call = replace(
                    call, namespace=caller.namespace, client=caller.client, known=caller.known
                )
                self._charge(caller, operation)
                call = self._identify(request, call)
                params = await self._params(operation, request, numbers)
                if follow is not None:
                    params = from_last_event(request, params)
            except ServiceError as error:
                reply = self._dispatcher.refuse(operation.name, error, call)
                return respond_with(reply, caller)
            if follow is not None or waits(operation, params):
                end_with_caller(request)
            if follow is None:
                reply = await self._dispatcher.run(operation, params, call)
                return respond_with(reply, caller)
            found = await self._dispatcher.follow(operation, follow, params, call)
            if isinstance(found, Reply):
                return respond_with(found, caller)
            if found is None:
                return respond(None, caller.request_id, status=204, headers=caller.headers)
            return EventStream(found, caller.request_id, caller.headers)

        return handle

    def _charge(self, caller: Caller, operation: Operation) -> None:
        """Charge the call to its budgets. Raises RateLimited."""
        if caller.known is None:
            self._gate.charge(caller, "orders" if operation.idempotent else "requests")
            return
        self._gate.charge(caller, "rpc")
        if operation.idempotent:
            self._gate.charge_order(caller)

    async def _params(
        self, operation: Operation, request: web.Request, numbers: Iterable[str]
    ) -> dict[str, Any]:
        if operation.method == "GET":
            return _with_numbers(read_query(request), numbers)
        require_no_query(request)
        if operation.idempotent:
            require_key_header(request)
        if operation.payable and not request.body_exists:
            body: dict[str, Any] = {}
        else:
            body = await read_json_object(request, self._body_bytes, self._max_depth)
        if operation.payable:
            body = with_payment(request, body)
        return with_path(request, body)


def waits(operation: Operation, params: Mapping[str, Any]) -> bool:
    """Return whether a call waits for an event and changes nothing."""
    return operation.effect is Effect.READ and "waitSec" in params


def end_with_caller(request: web.Request) -> None:
    """Cancel the handler of a request that only waits when its caller disconnects."""
    request[ENDS_WITH_CALLER] = True
    if request.transport is None:  # it has already disconnected
        request.task.cancel()


def numbers_of(model: type[Params]) -> tuple[str, ...]:
    """The integer params, which a query holds as text."""
    fields = {info.alias or name: info.annotation for name, info in model.model_fields.items()}
    kinds = {name: set(plain_types(annotation)) for name, annotation in fields.items()}
    return tuple(name for name, types in kinds.items() if int in types and str not in types)


def _with_numbers(params: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    for name in names:
        if name in params and _DIGITS.fullmatch(params[name]):
            params[name] = int(params[name])
    return params


def _path_of(operation: Operation) -> str:
    return operation.path


def _wrong_method(operations: list[Operation]) -> Handler:
    allowed = sorted(operation.method for operation in operations)

    async def handle(request: web.Request) -> web.StreamResponse:
        request[OPERATION] = operations[0].name
        raise web.HTTPMethodNotAllowed(request.method, allowed)

    return handle


def by_integrator(integrators: Integrators) -> Identify:
    """Attribute calls to the integrator of their ``x-api-key``. Raises Unauthorized."""

    def identify(request: web.Request, call: Call) -> Call:
        keys = request.headers.getall("x-api-key", ())
        if not keys:
            return call
        found = integrators.find(keys[0]) if len(keys) == 1 else None
        if found is None:
            raise Unauthorized(
                "This x-api-key is not known. Send the key that the operator gave you, once; or"
                " leave the header out to call without an integrator's fee.",
                header="x-api-key",
            )
        if call.known is not None:  # its limits hold, and its keys are its own
            return replace(call, integrator=found)
        client = Client("integrator", found.id)
        return replace(call, integrator=found, namespace=found.id, client=client)

    return identify


def refused(caller: Caller, error: ServiceError) -> web.Response:
    """A refusal before the body is read, with the HTTP status of the error."""
    headers = {**caller.headers, **error_headers(error)}
    refusal = full_error(error, caller.request_id)
    return respond(refusal, caller.request_id, status=error.http_status, headers=headers)


async def carry_out(
    dispatcher: Dispatcher,
    operation: Operation,
    caller: Caller,
    hint: str | None,
    params: dict[str, Any],
    *,
    transport: str,
    keyed_by_terms: bool = False,
    held_to: str | None = None,
) -> Reply:
    """The reply to one call in a JSON-RPC message. Its ``Retry-After`` is also set as a header.

    The idempotency key is taken out of ``params``.
    """
    call = Call(
        caller.request_id_for(hint),
        caller.namespace,
        client=caller.client,
        known=caller.known,
        local_session=caller.given.get(LOCAL_SESSION),
        keyed_by_terms=keyed_by_terms,
        transport=transport,
        held_to=held_to,
    )
    try:
        if operation.idempotent:
            call = replace(call, idempotency_key=_take_key(caller, params))
    except InvalidInput as error:
        reply = dispatcher.refuse(operation.name, error, call, params)
    else:
        reply = await dispatcher.run(operation, params, call)
    if reply.error is not None:
        caller.headers.update(error_headers(reply.error))
    if reply.replayed:
        caller.headers["idempotent-replayed"] = "true"
    return reply


class Methods(NamedTuple):
    """A table as JSON-RPC methods, its dispatcher, and the prefix of its method names."""

    dispatcher: Dispatcher
    operations: Iterable[Operation]
    prefix: str = ""


class RpcHttp:
    """The /rpc endpoint.

    ``admin`` methods exist over the UNIX socket only, for calls with the ``operator_proof`` of who
    can read the data directory: a proxy on the socket would pass on calls from the network.
    """

    def __init__(
        self,
        gate: Gate,
        public: Methods,
        admin: Methods,
        describe: Callable[[], bytes],
        *,
        operator_proof: str,
        body_bytes: int,
        max_batch: int,
        max_depth: int,
    ) -> None:
        self._gate = gate
        self._proof = operator_proof.encode()
        self._body_bytes = body_bytes
        methods = {**self._methods(public), "rpc.discover": self._discovery(describe)}
        make: Callable[[dict[str, RpcMethod[Caller]]], JsonRpcServer[Caller]] = partial(
            JsonRpcServer,
            max_batch=max_batch,
            max_depth=max_depth,
            describe_error=_described,
            request_id=Caller.request_id_for,
        )
        self._public = make(methods)
        self._of_operator = make({**methods, **self._methods(admin)})

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one POST."""
        try:
            caller = self._gate.admit(request)
        except TlsRequired as error:
            return refused(self._gate.unknown(request), error)
        try:
            caller.known = self._require_token(request, caller)
            self._gate.charge(caller, "rpc")
            require_no_query_of_rpc(request)
            require_json(request, self._body_bytes, _MEDIA_TYPES)
            body = await read_body(request, self._body_bytes)
        except ServiceError as error:
            return refused(caller, error)
        server = self._of_operator if self._is_operator(request) else self._public
        turn = connection_of(request).turns.take
        status, answer = await server.answer(body, caller, partial(end_with_caller, request), turn)
        request_id = caller.batch_request_id if body.lstrip()[:1] == b"[" else caller.request_id
        return respond(answer, request_id, status=status, headers=caller.headers)

    def _is_operator(self, request: web.Request) -> bool:
        if OPERATOR_HEADER not in request.headers or not is_on_socket(request):
            return False
        given = request.headers[OPERATOR_HEADER].encode("utf-8", "surrogateescape")
        return hmac.compare_digest(given, self._proof)

    def _require_token(self, request: web.Request, caller: Caller) -> KnownClient | None:
        """Return the client of the token. Raises Unauthorized, and RateLimited after too many."""
        try:
            return self._gate.require_token(request, caller)
        except Unauthorized:
            self._gate.note_wrong_token(caller)
            raise

    def _methods(self, table: Methods) -> dict[str, RpcMethod[Caller]]:
        run = table.dispatcher
        return {table.prefix + op.name: self._method(run, op) for op in table.operations}

    def _method(self, dispatcher: Dispatcher, operation: Operation) -> RpcMethod[Caller]:
        async def run(caller: Caller, hint: str | None, params: dict[str, Any]) -> Any:
            self._charge_again(caller)
            if operation.idempotent:
                self._gate.charge_order(caller)
            reply = await carry_out(dispatcher, operation, caller, hint, params, transport="rpc")
            if isinstance(reply.error, InternalError):
                raise reply.error
            return orjson.Fragment(reply.body)

        return RpcMethod(run, not operation.creates, partial(waits, operation))

    def _discovery(self, describe: Callable[[], bytes]) -> RpcMethod[Caller]:
        """``rpc.discover`` of the OpenRPC specification: the description of the methods."""

        async def call(caller: Caller, hint: str | None, params: dict[str, Any]) -> Any:
            self._charge_again(caller)
            caller.request_id_for(hint)
            if params:
                raise InvalidParams("rpc.discover takes no params. Send {}, or leave them out.")
            return orjson.Fragment(describe())

        return RpcMethod(call, runs_as_notification=True)

    def _charge_again(self, caller: Caller) -> None:
        """Charge one further call of a batch; the request was charged for the first."""
        caller.calls += 1
        if caller.calls > 1:
            self._gate.charge(caller, "rpc")


def _described(caller: Caller, error: ServiceError, request_id: str | None) -> Json:
    """The error object of one call. Its ``Retry-After`` is also set as a header."""
    caller.headers.update(error_headers(error))
    return error_object(error, request_id)


def _take_key(caller: Caller, params: dict[str, Any]) -> Any:
    """Remove the idempotency key from the params of a call that takes one, and return it.

    Raises InvalidInput for null, which would make an order that no retry finds again, and for a
    key in a header.
    """
    require_no_key_header(caller.given)
    if IDEMPOTENCY_KEY not in params:
        return None
    key = params.pop(IDEMPOTENCY_KEY)
    return read_key(key, caller.namespace) if key is None else bare_key(key)
