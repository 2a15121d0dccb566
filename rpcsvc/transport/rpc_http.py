"""POST /rpc: the token gate, and the operation table as JSON-RPC methods ``<slug>.*``.

What does not live here: JSON-RPC itself (jsonrpc.py), what an operation does (operations/).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from aiohttp import web

from rpcsvc.errors import InternalError, ServiceError
from rpcsvc.operations.dispatch import Dispatcher
from rpcsvc.operations.service import Call
from rpcsvc.operations.table import Operation
from rpcsvc.transport.gate import SOCKET_CLIENT, Gate, Visitor
from rpcsvc.transport.http import error_headers, read_body, require_json, respond
from rpcsvc.transport.jsonrpc import JsonRpcServer, RpcMethod, request_id_from, whole_error

IDEMPOTENCY_KEY = "idempotency-key"


@dataclass(slots=True)
class Caller:
    """The HTTP request that a JSON-RPC message came in, while it is being answered."""

    visitor: Visitor
    namespace: str
    budget_of: str | None
    fallback_id: str
    answered_id: str | None = None
    calls: int = 0


class RpcHttp:
    """The /rpc endpoint."""

    def __init__(
        self,
        gate: Gate,
        dispatcher: Dispatcher,
        operations: list[Operation],
        *,
        slug: str,
        body_bytes: int,
        max_batch: int,
        max_depth: int,
    ) -> None:
        self._gate = gate
        self._dispatcher = dispatcher
        self._body_bytes = body_bytes
        methods = {f"{slug}.{op.name}": self._method(op) for op in operations}
        self._server: JsonRpcServer[Caller] = JsonRpcServer(
            methods, max_batch=max_batch, max_depth=max_depth, request_id=_request_id
        )

    async def handle(self, request: web.Request) -> web.StreamResponse:
        """Answer one POST."""
        visitor = self._gate.admit(request)
        request["visitor"] = visitor
        fallback_id = self._gate.new_request_id()
        try:
            by_token = self._gate.require_token(request, visitor)
            client = self._budget_of(request, visitor, by_token=by_token)
            self._gate.charge(visitor, "rpc", client)
            require_json(request, self._body_bytes)
            body = await read_body(request, self._body_bytes)
        except ServiceError as error:
            request_id = visitor.request_id or fallback_id
            headers = {**visitor.headers, **error_headers(error)}
            refusal = whole_error(error, request_id)
            return respond(refusal, request_id, status=error.http_status, headers=headers)
        caller = Caller(visitor, "rpc" if by_token else "public", client, fallback_id)
        answer = await self._server.answer(body, caller)
        request_id = visitor.request_id or caller.answered_id or fallback_id
        return respond(answer.body, request_id, status=answer.status, headers=visitor.headers)

    def _budget_of(self, request: web.Request, visitor: Visitor, *, by_token: bool) -> str | None:
        """Whose budget pays: a token's, the socket's, or (None) the client address's."""
        if by_token:
            return "token:" + request.headers["x-agent-rpc-token"]
        return SOCKET_CLIENT if visitor.address == SOCKET_CLIENT else None

    def _method(self, operation: Operation) -> RpcMethod[Caller]:
        async def call(caller: Caller, hint: str | None, params: dict[str, Any]) -> Any:
            self._charge_again(caller)
            key = params.pop(IDEMPOTENCY_KEY, None) if operation.idempotent else None
            request_id = _request_id(caller, hint)
            reply = await self._dispatcher.run(
                operation, params, Call(request_id, caller.namespace, key)
            )
            if isinstance(reply.error, InternalError):
                raise reply.error
            if reply.replayed:
                caller.visitor.headers["idempotent-replayed"] = "true"
            return orjson.Fragment(reply.body)

        return RpcMethod(call, runs_as_notification=not operation.creates)

    def _charge_again(self, caller: Caller) -> None:
        """The request has paid for its first call; each further one of a batch pays for itself."""
        caller.calls += 1
        if caller.calls > 1:
            self._gate.charge(caller.visitor, "rpc", caller.budget_of)


def _request_id(caller: Caller, hint: str | None) -> str:
    """The header's request id, else the JSON-RPC id if it is fit for one, else a new one."""
    if caller.visitor.request_id:
        return caller.visitor.request_id
    chosen = request_id_from(hint) if hint is not None else caller.fallback_id
    caller.answered_id = chosen
    return chosen
