"""Runs an operation of any table: takes params, returns one finished reply, also for exceptions.

An ``Envelope`` formats the answers of a table. ``LocalService`` calls operations inside this
process, for the CLI and the demo.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, Protocol

import orjson
import structlog

from rpcsvc.errors import InternalError, ServiceError
from rpcsvc.operations.envelope import (
    Answer,
    Json,
    Reply,
    code_of,
    failure,
    finish,
    flat_failure,
    head,
)
from rpcsvc.operations.inputs import bare_key, is_session_id, parse_call
from rpcsvc.operations.service import (
    NO_SESSION,
    Call,
    Effect,
    Flat,
    Follow,
    Operation,
    Parts,
    Service,
    Stored,
    ViewContext,
    session_source,
    with_session,
)
from rpcsvc.orders.ports.venue import Venue
from rpcsvc.orders.scheduler.worker import Worker

log = structlog.get_logger(__name__)

Result = Answer | Flat | Stored
# The operation, the call, its reply, and its seconds; None if it was refused before it ran.
Observer = Callable[[str, Call, Reply, float | None], None]


def unobserved(_operation: str, _call: Call, _reply: Reply, _seconds: float | None) -> None:
    """Observe nothing."""


class Envelope(Protocol):
    """Formats the answers of a table."""

    def answer(self, operation: Operation, result: Result, call: Call) -> Reply:
        """The reply with what a handler returned."""
        ...

    def refuse(self, operation: str, error: ServiceError, call: Call, params: Json) -> Reply:
        """The reply that says why a call failed; ``params`` as far as they were read."""
        ...


class AgentEnvelope:
    """The format of the agent API (spec 2.1): one shape, with network, session and request id."""

    def __init__(self, views: ViewContext) -> None:
        self._views = views

    def answer(self, operation: Operation, result: Result, call: Call) -> Reply:
        """The reply with what a handler returned."""
        if isinstance(result, Stored):
            return Reply(finish(result.head, call.request_id), replayed=result.replayed)
        if isinstance(result, Flat):
            raise TypeError(f"{operation.name}: a flat answer has no place in an envelope")
        if "sessionSource" not in result.data:
            data = with_session(self._views, result.data, NO_SESSION)
            result = result._replace(data=data)
        body = finish(head(operation.name, result), call.request_id)
        is_unknown = result.settlement is not None and result.settlement.response is None
        return Reply(body, 202 if is_unknown else 200, settlement=result.settlement)

    def refuse(self, operation: str, error: ServiceError, call: Call, params: Json) -> Reply:
        """The reply that says why a call failed."""
        data = with_session(self._views, {}, _given_session(params, call))
        body = failure(operation, error, call.request_id, data)
        return Reply(body, error.http_status, error=error)


class FlatEnvelope:
    """The format of the BFF: no envelope; errors have one key (spec 2.3)."""

    def answer(self, operation: Operation, result: Result, _call: Call) -> Reply:
        """The reply with what a handler returned."""
        if isinstance(result, Stored):
            return Reply(result.head, replayed=result.replayed)
        if isinstance(result, Flat):
            return Reply(orjson.dumps(result.body))
        raise TypeError(f"{operation.name}: an {type(result).__name__} has no flat form")

    def refuse(self, _operation: str, error: ServiceError, _call: Call, _params: Json) -> Reply:
        """The reply that says why a call failed."""
        return Reply(flat_failure(error), error.http_status, error=error)


class Dispatcher:
    """Runs operations on a service. ``observe`` is called with each reply; it must not raise."""

    def __init__(self, service: Service, envelope: Envelope) -> None:
        self._service = service
        self._envelope = envelope
        self.observe: Observer = unobserved

    async def run(self, operation: Operation, params: dict[str, Any], call: Call) -> Reply:
        """The reply to a call. Raises nothing but CancelledError."""
        started = time.perf_counter_ns()
        params, call = _with_local_session(operation, params, call)
        try:
            parsed = await parse_call(operation.params, params, call, self._service)
            result = await operation.handler(self._service, parsed, call)
            reply = self._envelope.answer(operation, result, call)
        except Exception as error:  # noqa: BLE001 - it is answered for, and logged
            reply = self._failed(operation, error, call, params)
        self._note(operation, reply, call, started)
        return reply

    async def follow(
        self, operation: Operation, follow: Follow, params: dict[str, Any], call: Call
    ) -> Parts | Reply | None:
        """The stream of an operation; None if it sends nothing; a reply if the call is refused."""
        started, found = time.perf_counter_ns(), None
        try:
            parsed = await parse_call(operation.params, params, call, self._service)
            found = await follow(self._service, parsed, call)
        except Exception as error:  # noqa: BLE001 - it is answered for, and logged
            reply = self._failed(operation, error, call, params)
        else:
            reply = Reply(b"")
        self._note(operation, reply, call, started)
        return found if reply.error is None else reply

    def _failed(self, operation: Operation, error: Exception, call: Call, params: Json) -> Reply:
        if not isinstance(error, ServiceError):
            log.error(
                "operation_failed",
                operation=operation.name,
                request_id=call.request_id,
                exc_info=error,
            )
            error = InternalError(call.request_id)
        return self._envelope.refuse(operation.name, error, call, params)

    def _note(self, operation: Operation, reply: Reply, call: Call, started: int) -> None:
        self.observe(operation.name, call, reply, (time.perf_counter_ns() - started) / 1e9)
        if reply.error is not None or operation.effect is not Effect.READ:
            _log(operation, reply, call, started)

    def refuse(
        self, operation: str, error: ServiceError, call: Call, params: Json | None = None
    ) -> Reply:
        """The reply to a call that is refused before it runs; ``params`` as far as they
        were read.
        """
        reply = self._envelope.refuse(operation, error, call, params or {})
        self.observe(operation, call, reply, None)
        return reply


def agent_dispatcher(service: Service) -> Dispatcher:
    """The dispatcher of the agent API."""
    return Dispatcher(service, AgentEnvelope(service.views))


def flat_dispatcher(service: Service) -> Dispatcher:
    """The dispatcher of the BFF."""
    return Dispatcher(service, FlatEnvelope())


def _with_local_session(operation: Operation, params: Json, call: Call) -> tuple[Json, Call]:
    """The params with the local session if none was sent; otherwise the call without it."""
    if call.local_session is None:
        return params, call
    takes_session = "session_id" in operation.params.model_fields
    if not takes_session or params.get("sessionId") is not None:
        return params, call._replace(local_session=None)
    return {**params, "sessionId": call.local_session}, call


def _given_session(params: Json, call: Call) -> tuple[str | None, str]:
    """The session of a failed call, and its source; an invalid one is left out."""
    session = params.get("sessionId")
    if not isinstance(session, str) or not is_session_id(session):
        return NO_SESSION
    return session.lower(), session_source(call)


def _log(operation: Operation, reply: Reply, call: Call, started: int) -> None:
    log.info(
        "operation",
        operation=operation.name,
        request_id=call.request_id,
        status=reply.http_status,
        code=code_of(reply.error) if reply.error else None,
        replayed=reply.replayed,
        ms=round((time.perf_counter_ns() - started) / 1e6, 2),
    )


ROUNDS = 4
_BEAT_SECONDS = 0.1


class LocalService:
    """A service that this process owns."""

    def __init__(self, dispatcher: Dispatcher, venue: Venue, worker: Worker) -> None:
        self._dispatcher = dispatcher
        self._venue = venue
        self._worker = worker

    async def call(
        self,
        operation: Operation,
        params: dict[str, Any],
        request_id: str,
        key: str | None,
        local_session: str | None = None,
    ) -> bytes:
        """The envelope of one call. Runs overdue work of the service before and after it.

        The order that the call is about is updated first.
        """
        await self.catch_up()
        # Nothing else updates the order here, and its user would still be asked to pay.
        await self._venue.refresh(str(params.get("orderId")))
        call = Call(request_id, idempotency_key=bare_key(key), local_session=local_session)
        running = asyncio.create_task(self._dispatcher.run(operation, params, call))
        while not running.done():
            await asyncio.wait({running}, timeout=_BEAT_SECONDS)
            await self.catch_up()  # a call that waits for an event needs the worker to produce it
        return running.result().body

    async def catch_up(self) -> None:
        """Run overdue work of the worker: deposits, deadlines, effects."""
        for _ in range(ROUNDS):
            await self._worker.tick()
            await self._worker.drain()

    async def settle_for(self, seconds: float) -> None:
        """Run passes of the worker for a while."""
        deadline = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < deadline:
            await self.catch_up()
            await asyncio.sleep(0.1)
