"""The BFF (spec 4.4) under /bff/v1: a loop over its rows of the operation table.

What does not live here: what a call does (operations/bff.py), who may come in (gate.py).
"""

from __future__ import annotations

from typing import Any

from aiohttp import web

from rpcsvc.domain.integrators import Integrator, Integrators
from rpcsvc.errors import ServiceError, Unauthorized
from rpcsvc.http.gate import VISITOR, Gate
from rpcsvc.http.messages import (
    Handler,
    read_json_object,
    read_query,
    respond_with,
    with_path,
)
from rpcsvc.http.misplaced import IDEMPOTENCY_KEY, require_key_header, require_no_query
from rpcsvc.http.site import BFF_ROOT
from rpcsvc.operations.bff_table import BffOperation
from rpcsvc.operations.dispatch import FlatDispatcher
from rpcsvc.operations.service import Call
from rpcsvc.orders.unfunded import Client


class BffHttp:
    """Routes of the BFF."""

    def __init__(
        self,
        gate: Gate,
        dispatcher: FlatDispatcher,
        integrators: Integrators,
        *,
        body_bytes: int,
        max_depth: int,
    ) -> None:
        self._gate = gate
        self._dispatcher = dispatcher
        self._integrators = integrators
        self._body_bytes = body_bytes
        self._max_depth = max_depth

    def routes(self, operations: tuple[BffOperation, ...]) -> list[web.RouteDef]:
        """One route for each operation."""
        return [web.route(op.method, BFF_ROOT + op.path, self._handler(op)) for op in operations]

    def _handler(self, operation: BffOperation) -> Handler:
        async def handle(request: web.Request) -> web.StreamResponse:
            visitor = self._gate.admit(request)
            request[VISITOR] = visitor
            request_id = visitor.request_id or self._gate.new_request_id()
            call = Call(request_id, client=visitor.client)
            try:
                self._gate.charge(visitor, "orders" if operation.idempotent else "requests")
                call = self._identified(operation, request, call)
                params = await self._params(operation, request)
            except ServiceError as error:
                reply = self._dispatcher.refuse(operation.name, error, call)
            else:
                reply = await self._dispatcher.run(operation, params, call)
            return respond_with(reply, visitor, call.request_id)

        return handle

    def _identified(self, operation: BffOperation, request: web.Request, call: Call) -> Call:
        """The call with its integrator and idempotency key. Raises Unauthorized, InvalidInput."""
        integrator = self._integrator(request)
        if integrator is not None:
            client = Client("integrator", integrator.id)
            call = call._replace(integrator=integrator, namespace=integrator.id, client=client)
        if operation.idempotent:
            require_key_header(request)
            call = call._replace(idempotency_key=request.headers.get(IDEMPOTENCY_KEY))
        return call

    def _integrator(self, request: web.Request) -> Integrator | None:
        keys = request.headers.getall("x-api-key", ())
        if not keys:
            return None
        found = self._integrators.find(keys[0]) if len(keys) == 1 else None
        if found is None:
            raise Unauthorized(
                "This x-api-key is not known. Send the key that the operator gave you, once; or"
                " leave the header out to call without an integrator's fee.",
                header="x-api-key",
            )
        return found

    async def _params(self, operation: BffOperation, request: web.Request) -> dict[str, Any]:
        if operation.method == "GET":
            return read_query(request)
        require_no_query(request)
        body = await read_json_object(request, self._body_bytes, self._max_depth)
        return with_path(request, body)
