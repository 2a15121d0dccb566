"""The HTTP routes of an operation table: the agent API (spec 4.1), and the BFF (spec 4.4)."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import groupby
from typing import Any

from aiohttp import web

from rpcsvc.domain.integrators import Integrators
from rpcsvc.errors import ServiceError, Unauthorized
from rpcsvc.http.gate import REQUEST_CONTEXT, Gate
from rpcsvc.http.messages import (
    OPERATION,
    Handler,
    read_json_object,
    read_query,
    respond_with,
    with_path,
)
from rpcsvc.http.stray_inputs import IDEMPOTENCY_KEY, require_key_header, require_no_query
from rpcsvc.operations.dispatch import Dispatcher
from rpcsvc.operations.operation import Operation
from rpcsvc.operations.service import Call
from rpcsvc.orders.unfunded import Client

# The call with what the headers of its request say of the caller. Raises ServiceError.
Identify = Callable[[web.Request, Call], Call]


class OperationRoutes:
    """Makes the routes of a table under ``root``."""

    def __init__(
        self,
        gate: Gate,
        dispatcher: Dispatcher,
        root: str,
        *,
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

    def routes(self, operations: Iterable[Operation]) -> list[web.RouteDef]:
        """One route for each operation that has a path, and a refusal of other methods there."""
        offered = sorted((op for op in operations if op.path), key=_path_of)
        found: list[web.RouteDef] = []
        for under, group in groupby(offered, _path_of):
            same, path = list(group), self._root + under
            found += [web.route(op.method, path, self._handler(op)) for op in same]
            found.append(web.route("*", path, _wrong_method(same)))
        return found

    def _handler(self, operation: Operation) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            request[OPERATION] = operation.name
            context = self._gate.admit(request)
            request[REQUEST_CONTEXT] = context
            key = request.headers.get(IDEMPOTENCY_KEY) if operation.idempotent else None
            request_id = context.request_id or self._gate.new_request_id()
            call = Call(request_id, idempotency_key=key, client=context.client)
            try:
                self._gate.charge(context, "orders" if operation.idempotent else "requests")
                call = self._identify(request, call)
                params = await self._params(operation, request)
            except ServiceError as error:
                reply = self._dispatcher.refuse(operation.name, error, call)
            else:
                reply = await self._dispatcher.run(operation, params, call)
            return respond_with(reply, context, request_id)

        return handle

    async def _params(self, operation: Operation, request: web.Request) -> dict[str, Any]:
        if operation.method == "GET":
            return read_query(request)
        require_no_query(request)
        if operation.idempotent:
            require_key_header(request)
        body = await read_json_object(request, self._body_bytes, self._max_depth)
        return with_path(request, body)


def _path_of(operation: Operation) -> str:
    return operation.path


def _wrong_method(operations: list[Operation]) -> Handler:
    allowed = sorted(operation.method for operation in operations)

    async def handle(request: web.Request) -> web.StreamResponse:
        request[OPERATION] = operations[0].name
        raise web.HTTPMethodNotAllowed(request.method, allowed)

    return handle


def by_integrator(integrators: Integrators) -> Identify:
    """The call in the name of the integrator whose ``x-api-key`` it has. Raises Unauthorized."""

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
        client = Client("integrator", found.id)
        return call._replace(integrator=found, namespace=found.id, client=client)

    return identify
