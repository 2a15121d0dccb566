"""Tasks of MCP 2026-07-28: waiting for the end of an order, as the order's own state.

A task is an order, and its id is the order's: nothing else is stored, so every replica knows it and
it outlives any restart. Cancelling a task ends no swap.
Source: the extension io.modelcontextprotocol/tasks, revision 2026-07-28.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import orjson

from rpcsvc.errors import InputError, InputErrors, InternalError, InvalidParams, OrderNotFound
from rpcsvc.http.documents.links import operation_named
from rpcsvc.http.operation_routes import Caller, carry_out
from rpcsvc.http.site import Site
from rpcsvc.operations.dispatch import Dispatcher
from rpcsvc.operations.envelope import Json, Reply
from rpcsvc.operations.service import Operation
from rpcsvc.orders.waits import LONGEST_WAIT_SECONDS

_OVER: Final = frozenset({"completed", "terminal_failure"})
_POLL_MS: Final = 5_000


class OrderTask(NamedTuple):
    """The state of a task, and the answer of swap.status that it was read from."""

    view: Json
    reply: Reply

    @property
    def is_over(self) -> bool:
        """Whether the order has ended, or waits for an address of its user's."""
        return bool(self.view["status"] == "completed")


class OrderTasks:
    """Makes tasks out of orders."""

    def __init__(self, site: Site, dispatcher: Dispatcher) -> None:
        self._dispatcher = dispatcher
        self.operation = operation_named(site, "swap.status")
        self._events = operation_named(site, "swap.events")

    def is_wait(self, operation: Operation, arguments: Json) -> bool:
        """Whether a tool's call waits for an order, with a valid time to wait."""
        seconds = arguments.get("waitSec")
        is_valid = type(seconds) is int and 0 < seconds <= LONGEST_WAIT_SECONDS
        return operation is self.operation and is_valid

    async def begin(self, caller: Caller, hint: str | None, arguments: Json) -> OrderTask | Reply:
        """The task that a wait turns into; a reply where the order can't be told of."""
        return await self._task(caller, hint, {**arguments, "waitSec": 0})

    async def get(self, caller: Caller, hint: str | None, params: Json) -> OrderTask:
        """The task that ``params`` name. Raises InvalidParams and InternalError."""
        found = await self._task(caller, hint, {"orderId": params.get("taskId")})
        if isinstance(found, OrderTask):
            return found
        if isinstance(found.error, (InputError, InputErrors, OrderNotFound)):
            raise InvalidParams("There is no such task. A taskId is the orderId of its order.")
        raise InternalError(caller.request_id)

    async def _task(self, caller: Caller, hint: str | None, params: Json) -> OrderTask | Reply:
        reply = await carry_out(self._dispatcher, self.operation, caller, hint, params)
        if reply.error is not None:
            return reply
        told = orjson.loads(reply.body)
        data, actions = told["data"], told["nextActions"]
        order = data["order"]
        last = {"orderId": order["orderId"], "after": data["cursor"] - 1}
        log = await carry_out(self._dispatcher, self._events, caller, hint, last)
        if log.error is not None:
            return log
        is_over = told["state"] in _OVER or data["actionRequired"] is not None
        view = {
            "taskId": order["orderId"],
            "status": "completed" if is_over else "working",
            "statusMessage": actions[0]["description"] if actions else told["state"],
            "createdAt": order["createdAt"],
            "lastUpdatedAt": orjson.loads(log.body)["data"]["events"][-1]["at"],
            "ttlMs": None,
            "pollIntervalMs": _POLL_MS,
        }
        return OrderTask(view, reply)
