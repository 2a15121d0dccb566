"""Running an operation: params in, one finished envelope out, whatever happens.

Every transport comes through here. What does not live here: protocols (transport/).
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import orjson
import structlog

from rpcsvc.errors import InternalError, ServiceError
from rpcsvc.operations.envelope import Json, Reply, code_of, failure, finish, flat_failure, head
from rpcsvc.operations.inputs import is_session_id, parse_call
from rpcsvc.operations.params import Params
from rpcsvc.operations.results import NO_SESSION, Flat, Stored, session_source, with_session
from rpcsvc.operations.service import Call, Service
from rpcsvc.operations.table import Effect

log = structlog.get_logger(__name__)


class Row(Protocol):
    """What running an operation takes of its row in a table (table.py, bff_table.py)."""

    @property
    def name(self) -> str:
        """The operation's name."""
        ...

    @property
    def params(self) -> type[Params]:
        """The model of its params."""
        ...

    @property
    def handler(self) -> Callable[[Service, Any, Call], Awaitable[Any]]:
        """What carries it out."""
        ...

    @property
    def effect(self) -> Effect:
        """What it does to the world."""
        ...


class Dispatcher:
    """Runs operations on a service; their answers are envelopes."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def run(self, operation: Row, params: dict[str, Any], call: Call) -> Reply:
        """The reply to a call. Raises nothing but CancelledError."""
        started = time.perf_counter_ns()
        params, call = _with_local_session(operation, params, call)
        try:
            parsed = parse_call(operation.params, params, call, self._service)
            reply = self._reply(
                operation, await operation.handler(self._service, parsed, call), call
            )
        except ServiceError as error:
            reply = self.refuse(operation.name, error, call, params)
        except Exception:
            log.exception("operation_failed", operation=operation.name, request_id=call.request_id)
            reply = self.refuse(operation.name, InternalError(call.request_id), call, params)
        if reply.error is not None or operation.effect is not Effect.READ:
            _log(operation, reply, call, started)
        return reply

    def refuse(
        self, operation: str, error: ServiceError, call: Call, params: Json | None = None
    ) -> Reply:
        """The reply that says why a call failed; ``params`` as far as they were read."""
        data = with_session(self._service.venue, {}, _given_session(params or {}, call))
        body = failure(operation, error, call.request_id, data)
        return Reply(body, error.http_status, error=error)

    def _reply(self, operation: Row, result: Any, call: Call) -> Reply:
        if isinstance(result, Stored):
            return Reply(finish(result.head, call.request_id), replayed=result.replayed)
        if "sessionSource" not in result.data:
            data = with_session(self._service.venue, result.data, NO_SESSION)
            result = result._replace(data=data)
        return Reply(finish(head(operation.name, result), call.request_id))


class FlatDispatcher(Dispatcher):
    """Runs the BFF's operations; their answers have no envelope, and errors one key (spec 2.3)."""

    def refuse(
        self,
        operation: str,  # noqa: ARG002 - the base class's parameter
        error: ServiceError,
        call: Call,  # noqa: ARG002 - the base class's parameter
        params: Json | None = None,  # noqa: ARG002 - the base class's parameter
    ) -> Reply:
        """The reply that says why a call failed."""
        return Reply(flat_failure(error), error.http_status, error=error)

    def _reply(self, operation: Row, result: Any, call: Call) -> Reply:  # noqa: ARG002 - the base class's parameter
        if isinstance(result, Stored):
            return Reply(result.head, replayed=result.replayed)
        if isinstance(result, Flat):
            return Reply(orjson.dumps(result.body))
        raise TypeError(f"a {type(result).__name__} has no place in the BFF")


def _with_local_session(operation: Row, params: Json, call: Call) -> tuple[Json, Call]:
    """The params with the local session where none was sent; else the call without it."""
    takes_session = "session_id" in operation.params.model_fields
    if call.local_session is None or not takes_session or params.get("sessionId") is not None:
        return params, call._replace(local_session=None)
    return {**params, "sessionId": call.local_session}, call


def _given_session(params: Json, call: Call) -> tuple[str | None, str]:
    """The session of a call that failed, and where it came from; one that is none is left out."""
    session = params.get("sessionId")
    if not isinstance(session, str) or not is_session_id(session):
        return NO_SESSION
    return session.lower(), session_source(call)


def _log(operation: Row, reply: Reply, call: Call, started: int) -> None:
    log.info(
        "operation",
        operation=operation.name,
        request_id=call.request_id,
        status=reply.http_status,
        code=code_of(reply.error) if reply.error else None,
        replayed=reply.replayed,
        ms=round((time.perf_counter_ns() - started) / 1e6, 2),
    )
