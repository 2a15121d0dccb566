"""Runs an operation of any table: params in, one finished reply out, also for an exception.

An ``Envelope`` gives the answers of a table their form. ``LocalService`` calls operations inside
this process, for the CLI and the demo.
"""

from __future__ import annotations

import asyncio
import time
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
    Operation,
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


class Envelope(Protocol):
    """The form of the answers of a table."""

    def answer(self, operation: Operation, result: Result, call: Call) -> Reply:
        """The reply with what a handler returned."""
        ...

    def refuse(self, operation: str, error: ServiceError, call: Call, params: Json) -> Reply:
        """The reply that says why a call failed; ``params`` as far as they were read."""
        ...


class AgentEnvelope:
    """The agent API's answers (spec 2.1): one shape, with network, session and request id."""

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
        return Reply(finish(head(operation.name, result), call.request_id))

    def refuse(self, operation: str, error: ServiceError, call: Call, params: Json) -> Reply:
        """The reply that says why a call failed."""
        data = with_session(self._views, {}, _given_session(params, call))
        body = failure(operation, error, call.request_id, data)
        return Reply(body, error.http_status, error=error)


class FlatEnvelope:
    """Answers without an envelope; errors have one key (spec 2.3)."""

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
    """Runs operations on a service."""

    def __init__(self, service: Service, envelope: Envelope) -> None:
        self._service = service
        self._envelope = envelope

    async def run(self, operation: Operation, params: dict[str, Any], call: Call) -> Reply:
        """The reply to a call. Raises nothing but CancelledError."""
        started = time.perf_counter_ns()
        params, call = _with_local_session(operation, params, call)
        try:
            parsed = await parse_call(operation.params, params, call, self._service)
            result = await operation.handler(self._service, parsed, call)
            reply = self._envelope.answer(operation, result, call)
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
        return self._envelope.refuse(operation, error, call, params or {})


def agent_dispatcher(service: Service) -> Dispatcher:
    """The dispatcher of the agent API."""
    return Dispatcher(service, AgentEnvelope(service.views))


def flat_dispatcher(service: Service) -> Dispatcher:
    """The dispatcher of the BFF."""
    return Dispatcher(service, FlatEnvelope())


def _with_local_session(operation: Operation, params: Json, call: Call) -> tuple[Json, Call]:
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
        """The envelope of one call, with whatever was due before and after it carried out.

        The order that it is about is brought up to date before.
        """
        await self.catch_up()
        # Nobody else asks: the order would stay as it was made, and its user be sent to pay.
        await self._venue.refresh(str(params.get("orderId")))
        call = Call(request_id, idempotency_key=bare_key(key), local_session=local_session)
        reply = await self._dispatcher.run(operation, params, call)
        await self.catch_up()
        return reply.body

    async def catch_up(self) -> None:
        """Do what a server would have done by now: deposits, deadlines, effects."""
        for _ in range(ROUNDS):
            await self._worker.tick()
            await self._worker.drain()

    async def settle_for(self, seconds: float) -> None:
        """Run the worker's passes for a while."""
        deadline = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < deadline:
            await self.catch_up()
            await asyncio.sleep(0.1)
