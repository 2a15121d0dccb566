"""The HTTPS agent API (spec 4.1) under /api/v1: a loop over the operation table.

What does not live here: what an operation does (operations/), who may come in (gate.py).
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from rpcsvc.errors import ServiceError
from rpcsvc.http.gate import VISITOR, Gate, Visitor
from rpcsvc.http.messages import (
    OPERATION,
    Handler,
    read_json_object,
    read_query,
    respond_with,
    with_path,
)
from rpcsvc.http.misplaced import IDEMPOTENCY_KEY, require_key_header, require_no_query
from rpcsvc.http.site import API_ROOT
from rpcsvc.operations.dispatch import Dispatcher
from rpcsvc.operations.service import Call
from rpcsvc.operations.table import Effect, Operation


class AgentHttp:
    """Routes of the agent API."""

    def __init__(
        self, gate: Gate, dispatcher: Dispatcher, *, body_bytes: int, max_depth: int
    ) -> None:
        self._gate = gate
        self._dispatcher = dispatcher
        self._body_bytes = body_bytes
        self._max_depth = max_depth

    def routes(self, operations: list[Operation]) -> list[web.RouteDef]:
        """One route for each operation that has a path."""
        offered = [(op, API_ROOT + op.path) for op in operations if op.path is not None]
        return [
            route
            for op, path in offered
            for route in (
                web.route(op.method, path, self._handler(op)),
                web.route("*", path, _wrong_method(op)),
            )
        ]

    def _handler(self, operation: Operation) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            request[OPERATION] = operation.name
            visitor = self._gate.admit(request)
            request[VISITOR] = visitor
            call = self._call(operation, request, visitor)
            try:
                self._gate.charge(visitor, _budget(operation))
                params = await self._params(operation, request)
            except ServiceError as error:
                reply = self._dispatcher.refuse(operation.name, error, call)
            else:
                reply = await self._dispatcher.run(operation, params, call)
            return respond_with(reply, visitor, call.request_id)

        return handle

    def _call(self, operation: Operation, request: web.Request, visitor: Visitor) -> Call:
        key = request.headers.get(IDEMPOTENCY_KEY) if operation.idempotent else None
        request_id = visitor.request_id or self._gate.new_request_id()
        return Call(request_id, "public", key, client=visitor.client)

    async def _params(self, operation: Operation, request: web.Request) -> dict[str, Any]:
        if operation.method == "GET":
            return read_query(request)
        require_no_query(request)
        if operation.idempotent:
            require_key_header(request)
        body = await read_json_object(request, self._body_bytes, self._max_depth)
        return with_path(request, body)


def _wrong_method(operation: Operation) -> Handler:
    async def handle(request: web.Request) -> web.StreamResponse:
        request[OPERATION] = operation.name
        raise web.HTTPMethodNotAllowed(request.method, [operation.method])

    return handle


def _budget(operation: Operation) -> str:
    creates_order = operation.effect is Effect.MOVES_MONEY and operation.idempotent
    return "orders" if creates_order else "requests"
