"""POST /rpc: the token gate, and the operation tables as JSON-RPC methods.

Over TCP these are those of the agent API; over the UNIX socket the admin methods as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Final, NamedTuple

import orjson
from aiohttp import web

from rpcsvc.errors import (
    InternalError,
    InvalidInput,
    InvalidParams,
    ServiceError,
    TlsRequired,
    Unauthorized,
)
from rpcsvc.http.gate import (
    SOCKET_CLIENT,
    Gate,
    RequestContext,
    given_request_id,
    is_private,
    is_request_id,
)
from rpcsvc.http.jsonrpc import JsonRpcServer, RpcMethod, error_object, whole_error
from rpcsvc.http.messages import JSON, error_headers, read_body, require_json, respond
from rpcsvc.http.stray_inputs import IDEMPOTENCY_KEY, require_no_key_header, require_no_query_of_rpc
from rpcsvc.operations.dispatch import Dispatcher
from rpcsvc.operations.envelope import Json
from rpcsvc.operations.inputs import bare_key, read_key
from rpcsvc.operations.operation import Operation
from rpcsvc.operations.service import Call
from rpcsvc.orders.unfunded import Client

# "JSON-RPC 2.0 Transport: HTTP" names all three.
_MEDIA_TYPES: Final = frozenset({JSON, "application/json-rpc", "application/jsonrequest"})
# The session that the CLI remembers (operations/service.py, Call).
LOCAL_SESSION: Final = "x-agent-local-session"


@dataclass(slots=True)
class Caller:
    """The HTTP request that a JSON-RPC message came in, while it is being answered."""

    context: RequestContext
    headers: Mapping[str, str]
    namespace: str
    budget_of: str | None
    client: Client
    new_request_id: Callable[[], str]
    calls: int = 0
    _fallback_id: str | None = None
    _last_id: str | None = None

    @property
    def request_id(self) -> str:
        """The request id of the whole exchange, for the response header."""
        return self.context.request_id or self._last_id or self._fallback()

    @property
    def batch_request_id(self) -> str:
        """The same of a batch, whose calls have request ids of their own."""
        return self.context.request_id or self.new_request_id()

    def request_id_for(self, hint: str | None) -> str:
        """The header's request id, else the JSON-RPC id if it is fit for one, else a new one."""
        given = self.context.request_id
        if given is not None:
            return given
        self._last_id = hint if is_request_id(hint) else self._fallback()
        return self._last_id

    def _fallback(self) -> str:
        if self._fallback_id is None:
            self._fallback_id = self.new_request_id()
        return self._fallback_id


class Methods(NamedTuple):
    """A table as JSON-RPC methods, what runs it, and how their names begin."""

    dispatcher: Dispatcher
    operations: Iterable[Operation]
    prefix: str = ""


class RpcHttp:
    """The /rpc endpoint. ``admin`` methods are there over the UNIX socket only."""

    def __init__(
        self,
        gate: Gate,
        public: Methods,
        admin: Methods,
        describe: Callable[[], Json],
        *,
        body_bytes: int,
        max_batch: int,
        max_depth: int,
    ) -> None:
        self._gate = gate
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
        self._on_socket = make({**methods, **self._methods(admin)})

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one POST."""
        try:
            context = self._gate.admit(request)
        except TlsRequired as error:
            return self._refuse(RequestContext("", given_request_id(request)), error)
        try:
            by_token = self._require_token(request, context)
            client = self._budget_of(request, context, by_token=by_token)
            self._gate.charge(context, "rpc", client)
            require_no_query_of_rpc(request)
            require_json(request, self._body_bytes, _MEDIA_TYPES)
            body = await read_body(request, self._body_bytes)
        except ServiceError as error:
            return self._refuse(context, error)
        namespace = "rpc" if by_token else "public"
        who = Client("token", client) if by_token and client else context.client
        caller = Caller(context, request.headers, namespace, client, who, self._gate.new_request_id)
        server = self._on_socket if is_private(request) else self._public
        answer = await server.answer(body, caller)
        request_id = caller.batch_request_id if body.lstrip()[:1] == b"[" else caller.request_id
        return respond(answer.body, request_id, status=answer.status, headers=context.headers)

    def _require_token(self, request: web.Request, context: RequestContext) -> bool:
        """As Gate.require_token. Raises RateLimited for too many wrong ones."""
        try:
            return self._gate.require_token(request, context)
        except Unauthorized:
            self._gate.note_wrong_token(context)
            raise

    def _refuse(self, context: RequestContext, error: ServiceError) -> web.Response:
        """What is refused before its body is read: the HTTP status tells it, too."""
        request_id = context.request_id or self._gate.new_request_id()
        headers = {**context.headers, **error_headers(error)}
        refusal = whole_error(error, request_id)
        return respond(refusal, request_id, status=error.http_status, headers=headers)

    def _budget_of(
        self, request: web.Request, context: RequestContext, *, by_token: bool
    ) -> str | None:
        """Whose budget pays: a token's, the socket's, or (None) the client address's."""
        if by_token:
            return "token:" + request.headers["x-agent-rpc-token"]
        return SOCKET_CLIENT if context.address == SOCKET_CLIENT else None

    def _methods(self, table: Methods) -> dict[str, RpcMethod[Caller]]:
        run = table.dispatcher
        return {table.prefix + op.name: self._method(run, op) for op in table.operations}

    def _method(self, dispatcher: Dispatcher, operation: Operation) -> RpcMethod[Caller]:
        async def run(caller: Caller, hint: str | None, params: dict[str, Any]) -> Any:
            self._charge_again(caller)
            call = Call(
                caller.request_id_for(hint),
                caller.namespace,
                client=caller.client,
                local_session=caller.headers.get(LOCAL_SESSION),
            )
            try:
                if operation.idempotent:
                    call = call._replace(idempotency_key=_take_key(caller, params))
            except InvalidInput as error:
                reply = dispatcher.refuse(operation.name, error, call, params)
            else:
                reply = await dispatcher.run(operation, params, call)
            if isinstance(reply.error, InternalError):
                raise reply.error
            caller.context.headers.update(error_headers(reply.error))
            if reply.replayed:
                caller.context.headers["idempotent-replayed"] = "true"
            return orjson.Fragment(reply.body)

        return RpcMethod(run, runs_as_notification=not operation.creates)

    def _discovery(self, describe: Callable[[], Json]) -> RpcMethod[Caller]:
        """``rpc.discover`` of the OpenRPC specification: the description of the methods."""
        written = cache(lambda: orjson.dumps(describe()))

        async def call(caller: Caller, hint: str | None, params: dict[str, Any]) -> Any:
            self._charge_again(caller)
            caller.request_id_for(hint)
            if params:
                raise InvalidParams("rpc.discover takes no params. Send {}, or leave them out.")
            return orjson.Fragment(written())

        return RpcMethod(call, runs_as_notification=True)

    def _charge_again(self, caller: Caller) -> None:
        """The request has paid for its first call; each further one of a batch pays for itself."""
        caller.calls += 1
        if caller.calls > 1:
            self._gate.charge(caller.context, "rpc", caller.budget_of)


def _described(caller: Caller, error: ServiceError, request_id: str | None) -> Json:
    """The error object of one call; what it says of coming back is said in the headers, too."""
    caller.context.headers.update(error_headers(error))
    return error_object(error, request_id)


def _take_key(caller: Caller, params: dict[str, Any]) -> Any:
    """The idempotency key of a call that takes one, out of its params, as a header would carry it.

    Raises InvalidInput for null, which would make an order that no retry finds again, and for a
    key in a header.
    """
    require_no_key_header(caller.headers)
    if IDEMPOTENCY_KEY not in params:
        return None
    key = params.pop(IDEMPOTENCY_KEY)
    return read_key(key, caller.namespace) if key is None else bare_key(key)
