"""The tree of errors that a caller can meet, each with its code, status and retry rule.

    ServiceError
    +-- ProtocolError          the message could not be read or admitted; no operation ran
    |   +-- InvalidJson            body is not JSON as RFC 8259 and this service's limits have it
    |   +-- InvalidRequest         JSON, but not a request
    |   |   +-- HeaderMismatch         MCP: a header says another thing than the body
    |   |   +-- UnsupportedProtocolVersion  MCP: a revision that is not served
    |   |   +-- MissingCapability      MCP: the client does not declare what the call needs
    |   +-- InvalidParams          JSON-RPC ``params`` is not an object
    |   +-- UnknownMethod          no operation of that name or path
    |   +-- MethodNotAllowed       a path of this service, but not with that HTTP method
    |   +-- RequestTimeout         body stalled on its way
    |   +-- PayloadTooLarge        body or batch over its limit
    |   +-- UnsupportedMediaType   body is not declared as application/json
    |   +-- Unauthorized           RPC token or integrator's key missing or wrong
    |   +-- TlsRequired            plain HTTP through a trusted proxy
    |   +-- MisdirectedRequest     the Host header names somebody else
    |   |   +-- ForbiddenOrigin        MCP: sent by a page of another site
    |   +-- RateLimited            the caller's budget is used up
    +-- InputError             one field of a call is missing or wrong
    |   +-- MissingInput
    |   +-- InvalidInput
    |   +-- AmountBelowMinimum / AmountAboveMaximum
    |   +-- UnsupportedChain / UnsupportedDirection / UnsupportedToken
    |   +-- InvalidDestination
    |   +-- DestinationNotAllowed  not among the destinations of the client that calls
    +-- InputErrors            several of them at once
    +-- OperationError         the call was good; the operation could not do it
        +-- VerificationFailed
        +-- Forbidden              the client that calls lacks the scope
        +-- SpendLimit             the order is above a limit of the client that calls
        +-- ApprovalRequired       a person has to approve the order first
        +-- OrderNotFound
        +-- OrderNotCancellable
        +-- OrderNotFundable
        +-- PaymentRequired        x402: nothing was paid yet
        |   +-- PaymentRefused         x402: the signed payment will not do
        +-- IdempotencyConflict
        +-- QuoteChanged
        +-- Unavailable            an engine, node, store or rate source is down
        +-- InternalError          a fault of the service; its message never says which
Codes, HTTP statuses and JSON-RPC codes are binding: clients are tested against them.
SettingsError is the operator's, and no caller meets it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar


class SettingsError(Exception):
    """The settings can't be used; ``problems`` holds one line for each thing to mend."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def showable(text: str) -> str:
    """Return the text with lone surrogates escaped, which no encoder takes.

    Headers and arguments that are not UTF-8 hold them.
    """
    return text if text.isascii() else text.encode("utf-8", "backslashreplace").decode()


def _showable_json(value: Any) -> Any:
    if isinstance(value, str):
        return showable(value)
    if isinstance(value, Mapping):
        return {_showable_json(name): _showable_json(part) for name, part in value.items()}
    return [_showable_json(part) for part in value] if isinstance(value, list | tuple) else value


class ServiceError(Exception):
    """A failure with everything a transport needs to report it.

    ``message`` is safe to show to a caller. ``details`` must hold JSON values only. Both are made
    ``showable``: they may quote what a caller sent. ``retry_after`` is in whole seconds.
    """

    code: ClassVar[str]
    state: ClassVar[str]
    http_status: ClassVar[int]
    rpc_code: ClassVar[int | None] = None
    retryable: ClassVar[bool] = False

    def __init__(
        self,
        message: str,
        *,
        details: Mapping[str, Any] | None = None,
        retry_after: int | None = None,
    ) -> None:
        self.message = showable(message)
        super().__init__(self.message)
        self.details: dict[str, Any] | None = _showable_json(details) if details else None
        self.retry_after = retry_after


class ProtocolError(ServiceError):
    """The message could not be read or admitted; no operation ran."""

    state = "invalid_input"


class InvalidJson(ProtocolError):
    """The body is not JSON: duplicate keys, NaN, Infinity, bad UTF-8 and depth over 32 included."""

    code = "invalid_json"
    http_status = 400
    rpc_code = -32700


class InvalidRequest(ProtocolError):
    """The body is JSON but not a JSON-RPC request, or not a JSON object."""

    code = "invalid_request"
    http_status = 400
    rpc_code = -32600


class HeaderMismatch(InvalidRequest):
    """A header of an MCP request is missing or differs from the body (MCP 2026-07-28)."""

    rpc_code = -32020


class UnsupportedProtocolVersion(InvalidRequest):
    """The request is of an MCP revision that is not served; ``details`` list those that are."""

    rpc_code = -32022


class MissingCapability(InvalidRequest):
    """An MCP client calls something that it has not declared; ``details`` name the capability."""

    rpc_code = -32021


class InvalidParams(ProtocolError):
    """JSON-RPC ``params`` is not an object (the only form that this service takes)."""

    code = "invalid_request"
    http_status = 400
    rpc_code = -32602


class UnknownMethod(ProtocolError):
    """No operation has that JSON-RPC method name or HTTP path."""

    code = "unknown_method"
    state = "not_found"
    http_status = 404
    rpc_code = -32601


class MethodNotAllowed(ProtocolError):
    """The path exists, but not with that HTTP method."""

    code = "invalid_request"
    http_status = 405


class RequestTimeout(ProtocolError):
    """The body of a request stalled on its way."""

    code = "invalid_request"
    http_status = 408
    rpc_code = -32600


class PayloadTooLarge(ProtocolError):
    """The body is over 64 KiB or the batch has over 50 elements."""

    code = "payload_too_large"
    http_status = 413
    rpc_code = -32600


class UnsupportedMediaType(ProtocolError):
    """A body was sent that is not declared as ``application/json``."""

    code = "unsupported_media_type"
    http_status = 415
    rpc_code = -32600


class Unauthorized(ProtocolError):
    """The RPC token, or an integrator's key, is missing or wrong; ``header`` is where it goes."""

    code = "unauthorized"
    http_status = 401
    rpc_code = -32001

    def __init__(self, message: str, *, header: str) -> None:
        super().__init__(message)
        self.header = header


class TlsRequired(ProtocolError):
    """A request came over plain HTTP where TLS is required."""

    code = "tls_required"
    http_status = 403
    rpc_code = -32001


class MisdirectedRequest(ProtocolError):
    """A request is for a host name that is not this service's."""

    code = "misdirected_request"
    http_status = 421
    rpc_code = -32600


class ForbiddenOrigin(MisdirectedRequest):
    """The Origin header names a site whose pages may not call /mcp."""

    http_status = 403


class RateLimited(ProtocolError):
    """The caller's request budget is used up, or too much is reserved by unfunded orders.

    ``retry_after`` says when to come back.
    """

    code = "rate_limited"
    state = "rate_limited"
    http_status = 429
    rpc_code = -32029
    retryable = True


class InputError(ServiceError):
    """One field of a call is missing or wrong.

    ``received`` and ``allowed`` are JSON values for the caller; ``field`` is the wire name.
    """

    state = "invalid_input"
    http_status = 400

    def __init__(
        self,
        message: str,
        *,
        field: str,
        received: Any = None,
        allowed: Any = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message, details=details)
        self.field = field
        self.received = received
        self.allowed = allowed


class MissingInput(InputError):
    """A required field was not sent."""

    code = "missing_input"
    state = "needs_input"


class InvalidInput(InputError):
    """A field has the wrong type or form, or its name is not known."""

    code = "invalid_input"


class AmountBelowMinimum(InputError):
    """The amount is under the least that this pair swaps; ``details`` name the limit."""

    code = "amount_below_minimum"


class AmountAboveMaximum(InputError):
    """The amount is over the most that this pair swaps; ``details`` name the limit."""

    code = "amount_above_maximum"


class UnsupportedChain(InputError):
    """The chain is not one of the configured networks."""

    code = "unsupported_chain"


class UnsupportedDirection(InputError):
    """The direction is neither ``x2u`` nor ``u2x``."""

    code = "unsupported_direction"


class UnsupportedToken(InputError):
    """The token is neither XMR nor the chain's USDC."""

    code = "unsupported_token"


class InvalidDestination(InputError):
    """The destination address can't or must not be paid."""

    code = "invalid_destination"


class DestinationNotAllowed(InputError):
    """The address is not among those that the settings allow the client's orders to pay."""

    code = "destination_not_allowed"


class InputErrors(ServiceError):
    """Several fields are missing or wrong; reported together, so that one retry can mend all."""

    code = "invalid_input"
    state = "invalid_input"
    http_status = 400

    def __init__(self, problems: Sequence[InputError]) -> None:
        super().__init__(" ".join(problem.message for problem in problems))
        self.problems = tuple(problems)


class OperationError(ServiceError):
    """The call was good, but the operation could not do what it asks."""


class VerificationFailed(OperationError):
    """``verify`` is not the order's destination address, or the session not the order's."""

    code = "verification_failed"
    state = "verification_failed"
    http_status = 403


class Forbidden(OperationError):
    """The client that calls lacks the scope of the operation; ``details`` name it."""

    code = "forbidden"
    state = "invalid_input"
    http_status = 403


class SpendLimit(OperationError):
    """The order is above a limit of its client; ``details`` say which, and when it is free."""

    code = "spend_limit"
    state = "invalid_input"
    http_status = 403


class ApprovalRequired(OperationError):
    """A person has to approve the order first; ``details.approval`` has its id and its end."""

    code = "approval_required"
    state = "approval_required"
    http_status = 403


class OrderNotFound(OperationError):
    """No order has that id."""

    code = "order_not_found"
    state = "not_found"
    http_status = 404


class TicketNotFound(OperationError):
    """No ticket has that id, or the secret is not the ticket's."""

    code = "ticket_not_found"
    state = "not_found"
    http_status = 404


class OrderNotCancellable(OperationError):
    """A deposit was seen, the order is over, or its upstream has no cancellation."""

    code = "order_not_cancellable"
    state = "invalid_input"
    http_status = 409


class OrderNotFundable(OperationError):
    """The order can't be paid by a signed authorization: not here, not it, or not now."""

    code = "order_not_fundable"
    state = "invalid_input"
    http_status = 409


class PaymentRequired(OperationError):
    """No payment came with the call; ``details.paymentRequired`` says what to sign (x402)."""

    code = "payment_required"
    state = "waiting_for_funding"
    http_status = 402

    def __init__(self, message: str, required: Mapping[str, Any]) -> None:
        super().__init__(message, details={"paymentRequired": required})
        self.required = required


class PaymentRefused(PaymentRequired):
    """The signed payment is unsuitable; nothing was sent. ``details`` name the reason and what is
    accepted.
    """

    code = "payment_refused"


class IdempotencyConflict(OperationError):
    """The idempotency key was used before with another payload; ``details`` name the fields."""

    code = "idempotency_conflict"
    state = "idempotency_conflict"
    http_status = 409


class QuoteChanged(OperationError):
    """The terms are worse than those of the quote; ``details`` name the worse ones."""

    code = "quote_changed"
    state = "invalid_input"
    http_status = 409


class Unavailable(OperationError):
    """An engine, node, store or rate source is down for now.

    Nothing was done, or the message says that what an upstream did is not known.
    """

    code = "unavailable"
    state = "unavailable"
    http_status = 503
    retryable = True

    def __init__(
        self, message: str, *, details: Mapping[str, Any] | None = None, retry_after: int = 5
    ) -> None:
        super().__init__(message, details=details, retry_after=retry_after)


class InternalError(OperationError):
    """A fault of the service itself. The fixed text is all that a caller learns."""

    code = "internal_error"
    state = "internal_error"
    http_status = 500
    rpc_code = -32603
    retryable = True

    def __init__(self, request_id: str) -> None:
        super().__init__(
            "The service failed to answer this request. Repeat it, with the same idempotency key if"
            f" it had one, or give this request id to the operator: {request_id}"
        )
