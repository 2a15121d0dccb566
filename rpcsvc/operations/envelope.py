"""The agent envelope: one shape for every answer (spec 2.1).

An answer is rendered once, as JSON bytes without its request id (the *head*). Request id and error
are appended when it is sent, so an idempotent replay has the same bytes under a new request id.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import orjson

from rpcsvc import errors
from rpcsvc.domain.order import AgentState
from rpcsvc.errors import InputError, InputErrors, MissingInput, PaymentRequired, ServiceError

Json = dict[str, Any]


class X402Settlement(NamedTuple):
    """The SettlementResponse of an x402 payment; None while the outcome is unknown."""

    response: Json | None


class Answer(NamedTuple):
    """The result of an operation. ``next_actions`` hold calls that can be sent as they stand.

    ``settlement`` is set if the order is paid by x402.
    """

    state: AgentState
    data: Json
    next_actions: Sequence[Json] = ()
    missing_inputs: Sequence[str] = ()
    validation_errors: Sequence[Json] = ()
    ok: bool = True
    settlement: X402Settlement | None = None


class Reply(NamedTuple):
    """An answer ready to send: the envelope's JSON bytes, and what the transport adds."""

    body: bytes
    http_status: int = 200
    replayed: bool = False
    error: ServiceError | None = None
    settlement: X402Settlement | None = None


def action(
    name: str, description: str, operation: str | None = None, params: Json | None = None
) -> Json:
    """One next action; with an operation, a call that can be sent as it stands."""
    step: Json = {"action": name, "description": description}
    if operation is not None:
        step |= {"operation": operation, "params": params or {}}
    return step


def head(operation: str, answer: Answer) -> bytes:
    """The envelope without its request id."""
    return orjson.dumps(
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


def finish(head_bytes: bytes, request_id: str) -> bytes:
    """The whole envelope of a good answer."""
    # Request ids are [A-Za-z0-9._:-]: they need no escaping.
    return b'%b,"requestId":"%b"}' % (head_bytes[:-1], request_id.encode())


def failure(operation: str, error: ServiceError, request_id: str, data: Json) -> bytes:
    """The whole envelope of a failed call: an ErrorEnvelope (spec 2.3) and an envelope at once."""
    answer = Answer(
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
    """One entry of ``validationErrors``."""
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
