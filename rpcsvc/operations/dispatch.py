"""Runs an operation of any table: takes params, returns one finished reply, also for exceptions.

An ``Envelope`` formats the answers of a table. The agent API has one shape for every answer (spec
2.1): it is rendered once, as JSON bytes without its request id (the *head*). Request id and error
are appended when it is sent, so an idempotent replay has the same bytes under a new request id.

``LocalService`` calls operations inside this process, for the CLI and the demo.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final, Protocol

import orjson
import structlog
from msgspec.structs import replace

from rpcsvc import errors, strict_json
from rpcsvc.domain.order import AgentState
from rpcsvc.errors import (
    ApprovalRequired,
    InputError,
    InputErrors,
    InternalError,
    MissingInput,
    PaymentRequired,
    ServiceError,
)
from rpcsvc.operations.inputs import bare_key, is_session_id, parse_call
from rpcsvc.operations.lean import lean_head
from rpcsvc.operations.models import ApprovalResult, Result
from rpcsvc.operations.params import DETAIL, LEAN
from rpcsvc.operations.service import (
    Answer,
    Call,
    Effect,
    Flat,
    Follow,
    Operation,
    Parts,
    Reply,
    Service,
    Stored,
    ViewContext,
    action,
)
from rpcsvc.orders.ports.venue import Venue
from rpcsvc.orders.scheduler.worker import Worker
from rpcsvc.strict_json import Json

log = structlog.get_logger(__name__)

ROUNDS: Final = 4
_BEAT_SECONDS: Final = 0.1

Outcome = Answer[Any] | Flat | Stored
# The operation, the call, its reply, and its seconds; None if it was refused before it ran.
Observer = Callable[[str, Call, Reply, float | None], None]


def unobserved(_operation: str, _call: Call, _reply: Reply, _seconds: float | None) -> None:
    """Observe nothing."""


class Envelope(Protocol):
    """Formats the answers of a table."""

    def answer(self, operation: Operation, result: Outcome, call: Call, *, lean: bool) -> Reply:
        """The reply with what a handler returned; ``lean`` if the caller asked for no more."""
        ...

    def refuse(self, operation: str, error: ServiceError, call: Call, params: Json) -> Reply:
        """The reply that says why a call failed; ``params`` as far as they were read."""
        ...


class AgentEnvelope:
    """The format of the agent API (spec 2.1): one shape, with network, session and request id."""

    def __init__(self, views: ViewContext) -> None:
        self._views = views

    def answer(self, operation: Operation, result: Outcome, call: Call, *, lean: bool) -> Reply:
        """The reply with what a handler returned; ``lean`` if the caller asked for no more."""
        if isinstance(result, Flat):
            raise TypeError(f"{operation.name}: a flat answer has no place in an envelope")
        whole = result.head if isinstance(result, Stored) else head(operation.name, result)
        body = finish(lean_head(operation.result, whole) if lean else whole, call.request_id)
        if isinstance(result, Stored):
            return Reply(body, replayed=result.replayed)
        is_unknown = result.settlement is not None and result.settlement.response is None
        return Reply(body, 202 if is_unknown else 200, settlement=result.settlement)

    def refuse(self, operation: str, error: ServiceError, call: Call, params: Json) -> Reply:
        """The reply that says why a call failed."""
        common = self._views.common(_given_session(params), call)
        data = Result(*common)
        if isinstance(error, ApprovalRequired) and error.details is not None:
            data = ApprovalResult(*common, approval=error.details["approval"])
        body = failure(operation, error, call.request_id, data)
        return Reply(body, error.http_status, error=error)


class FlatEnvelope:
    """The format of the BFF: no envelope; errors have one key (spec 2.3)."""

    def answer(self, operation: Operation, result: Outcome, _call: Call, *, lean: bool) -> Reply:  # noqa: ARG002 - has one form only
        """The reply with what a handler returned."""
        if isinstance(result, Stored):
            return Reply(result.head, replayed=result.replayed)
        if isinstance(result, Flat):
            return Reply(strict_json.dumps(result.body))
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
        if call.local_session is not None:
            params, call = _with_local_session(operation, params, call)
        try:
            _require_scope(operation, call)
            parsed = await parse_call(operation.params, params, call, self._service)
            result = await operation.handler(self._service, parsed, call)
            lean = vars(parsed).get(DETAIL) == LEAN
            reply = self._envelope.answer(operation, result, call, lean=lean)
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
            _require_scope(operation, call)
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


def _require_scope(operation: Operation, call: Call) -> None:
    """Raise Forbidden for an operation that the client of the call may not use."""
    if call.known is not None:
        call.known.require_scope(operation.name, operation.scope)


def _with_local_session(operation: Operation, params: Json, call: Call) -> tuple[Json, Call]:
    """The params with the local session if none was sent; otherwise the call without it."""
    takes_session = "session_id" in operation.params.model_fields
    if not takes_session or params.get("sessionId") is not None:
        return params, replace(call, local_session=None)
    return {**params, "sessionId": call.local_session}, call


def _given_session(params: Json) -> str | None:
    """The session of a failed call; None for an invalid one."""
    session = params.get("sessionId")
    return session.lower() if isinstance(session, str) and is_session_id(session) else None


def _log(operation: Operation, reply: Reply, call: Call, started: int) -> None:
    log.info(
        "operation",
        operation=operation.name,
        request_id=call.request_id,
        client=None if call.known is None else call.known.name,
        status=reply.http_status,
        code=code_of(reply.error) if reply.error else None,
        replayed=reply.replayed,
        ms=round((time.perf_counter_ns() - started) / 1e6, 2),
    )


# --- the agent envelope and flat errors, as bytes ---


def head(operation: str, answer: Answer[Any]) -> bytes:
    """The envelope without its request id."""
    return strict_json.dumps(
        {
            "ok": answer.ok,
            "operation": operation,
            "state": answer.state.value,
            "missingInputs": answer.missing_inputs,
            "validationErrors": answer.validation_errors,
            "nextActions": answer.next_actions,
            "data": answer.data,
        }
    )


def with_data(head_bytes: bytes, name: str, value: bytes) -> bytes:
    """The envelope without its request id, with one more field of ``data``, which has others."""
    return b'%b,"%b":%b}}' % (head_bytes[:-2], name.encode(), value)


def finish(head_bytes: bytes, request_id: str) -> bytes:
    """The whole envelope of a good answer."""
    # Request ids are [A-Za-z0-9._:-]: they need no escaping.
    return b'%b,"requestId":"%b"}' % (head_bytes[:-1], request_id.encode())


def failure(operation: str, error: ServiceError, request_id: str, data: Result | Json) -> bytes:
    """The whole envelope of a failed call: an ErrorEnvelope (spec 2.3) and an envelope at once."""
    answer = Answer[Any](
        state=state_of(error),
        data=data,
        next_actions=_remedies(error),
        missing_inputs=[p.field for p in _problems(error) if isinstance(p, MissingInput)],
        validation_errors=[
            describe(p) for p in _problems(error) if not isinstance(p, MissingInput)
        ],
        ok=False,
    )
    whole = finish(head(operation, answer), request_id)
    return b'%b,"error":%b}' % (whole[:-1], orjson.dumps(error_object(error)))


def flat_failure(error: ServiceError) -> bytes:
    """``{"error": {code, message, details?}}``: how the BFF reports a failure (spec 2.3)."""
    problems = _problems(error)
    described = {"code": code_of(error), "message": error.message}
    details = dict(error_object(error).get("details", {}))
    if problems:
        details["problems"] = [describe(p) for p in problems]
    return orjson.dumps({"error": {**described, **({"details": details} if details else {})}})


def error_object(error: ServiceError) -> Json:
    """``{code, message, retryable, details?}``; details name the limit or the allowed values."""
    described: Json = {
        "code": code_of(error),
        "message": error.message,
        "retryable": error.retryable,
    }
    details = dict(error.details or {})
    problems = _problems(error)
    for problem in problems:
        details |= problem.details or {}
    if len(problems) == 1 and problems[0].allowed is not None:
        # With several problems, each entry of validationErrors has its own field's details.
        details.setdefault("allowed", problems[0].allowed)
    if details:
        described["details"] = details
    return described


def code_of(error: ServiceError) -> str:
    """The error's code; of several problems, the first that is not just a missing input."""
    if isinstance(error, InputErrors):
        return _leading(error.problems).code
    return error.code


def state_of(error: ServiceError) -> AgentState:
    """The envelope's state for an error."""
    problems = _problems(error)
    if problems and all(isinstance(p, MissingInput) for p in problems):
        return missing_state([p.field for p in problems])
    return AgentState(_leading(problems).state if problems else error.state)


def missing_state(fields: Sequence[str]) -> AgentState:
    """``needs_destination`` when only ``to`` is missing, else ``needs_input``."""
    return AgentState.NEEDS_DESTINATION if list(fields) == ["to"] else AgentState.NEEDS_INPUT


def describe(problem: InputError) -> Json:
    """An entry of ``validationErrors``."""
    entry: Json = {"field": problem.field, "code": problem.code, "message": problem.message}
    if problem.allowed is not None:
        entry["allowed"] = problem.allowed
    entry["received"] = showable(problem.received)
    return entry


def showable(value: Any) -> Any:
    """A caller's value made safe to send back: short, and readable by every JSON parser."""
    if isinstance(value, str):
        return errors.showable(value if len(value) <= 128 else value[:125] + "...")
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return value if abs(value) < 2**53 else str(value)[:128]
    return "an array" if isinstance(value, list) else "an object"


def _problems(error: ServiceError) -> tuple[InputError, ...]:
    if isinstance(error, InputErrors):
        return error.problems
    return (error,) if isinstance(error, InputError) else ()


def _leading(problems: Iterable[InputError]) -> InputError:
    ordered = list(problems)
    return next((p for p in ordered if not isinstance(p, MissingInput)), ordered[0])


def _remedies(error: ServiceError) -> list[Json]:
    problems = _problems(error)
    if problems:
        return [_remedy(p) for p in problems]
    if isinstance(error, PaymentRequired):
        return [
            action(
                "sign_payment",
                "Have the user's wallet sign an entry of details.paymentRequired.accepts (x402),"
                " and send the same call again with that as payment.",
            )
        ]
    if isinstance(error, ApprovalRequired):
        return [
            action(
                "wait_for_approval",
                "A person decides. Then send the same call again, with the same idempotency key.",
            )
        ]
    if error.retryable:
        return [
            action(
                "retry",
                "Send the same call again later, with the same idempotency key if it had one.",
            )
        ]
    return []


def _remedy(problem: InputError) -> Json:
    if isinstance(problem, MissingInput):
        return action(f"provide_{problem.field}", problem.message)
    return action(f"correct_{problem.field}", problem.message)


# --- calls in this process ---


class LocalService:
    """A service that this process owns. The worker runs every ``beat_seconds`` of a call."""

    def __init__(
        self,
        dispatcher: Dispatcher,
        venue: Venue,
        worker: Worker,
        beat_seconds: float = _BEAT_SECONDS,
    ) -> None:
        self._dispatcher = dispatcher
        self._venue = venue
        self._worker = worker
        self._beat_seconds = beat_seconds

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
            await asyncio.wait({running}, timeout=self._beat_seconds)
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
