"""Errors of the client library, all subclasses of ClientError."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from rpcsvc.client.models import Swap
    from rpcsvc.verify import VerificationError


class ClientError(Exception):
    """A call failed."""


class Refused(ClientError):
    """The service answered ``ok: false``. ``retryable``: the same call may succeed later.

    ``envelope`` is that answer. ``retry_after`` is in seconds, None where the service did not say.
    """

    def __init__(
        self, error: Mapping[str, Any], envelope: Mapping[str, Any], retry_after: float | None
    ) -> None:
        self.envelope = dict(envelope)
        self.code = str(error.get("code"))
        self.message = str(error.get("message"))
        self.retryable = error.get("retryable") is True
        self.details: Mapping[str, Any] = error.get("details") or {}
        self.problems: Sequence[Mapping[str, Any]] = envelope.get("validationErrors") or []
        self.missing: Sequence[str] = envelope.get("missingInputs") or []
        self.request_id = str(envelope.get("requestId"))
        self.retry_after = retry_after
        super().__init__(f"{self.code}: {self.message}")


class InputRefused(Refused):
    """An input is missing or wrong."""


class OrderNotFound(Refused):
    """No order has that id."""


class IdempotencyConflict(Refused):
    """The idempotency key was used for another swap; ``details`` name what differs."""


class QuoteChanged(Refused):
    """The terms are worse than the quote. Get a new quote, and ask the user again."""


class PaymentRefused(Refused):
    """A signed payment is invalid, or failed permanently. No money moved.

    ``reason`` is an error code of x402. After ``transaction_failed`` sign another payment, with
    the next ``attempt``.
    """

    @property
    def reason(self) -> str:
        """The error code of x402."""
        return str(self.details.get("paymentRequired", {}).get("error"))


class RateLimited(Refused):
    """The caller's rate limit is exhausted."""


class Unavailable(Refused):
    """The service can't carry out the call for now."""


_BY_CODE: Final[Mapping[str, type[Refused]]] = {
    "idempotency_conflict": IdempotencyConflict,
    "order_not_found": OrderNotFound,
    "payment_refused": PaymentRefused,
    "quote_changed": QuoteChanged,
    "rate_limited": RateLimited,
    "unavailable": Unavailable,
}


def refusal(envelope: Mapping[str, Any], retry_after: float | None) -> Refused:
    """The error for an envelope with ``ok: false``."""
    described = envelope.get("error")
    error = described if isinstance(described, Mapping) else {}  # any server may answer there
    has_problems = bool(envelope.get("validationErrors") or envelope.get("missingInputs"))
    kind = _BY_CODE.get(str(error.get("code")), InputRefused if has_problems else Refused)
    return kind(error, envelope, retry_after)


class Unreachable(ClientError):
    """The service did not answer. ``may_be_done``: the call may have been carried out."""

    def __init__(self, message: str, *, may_be_done: bool = False) -> None:
        super().__init__(message)
        self.may_be_done = may_be_done


class OutcomeUnknown(Unreachable):
    """An order may exist. Call ``create`` again with the same ``swap``: it makes no second one."""

    def __init__(self, message: str, swap: Swap) -> None:
        super().__init__(message, may_be_done=True)
        self.swap = swap


class PaymentUnknown(Unreachable):
    """A signed payment may be under way. Send the same one again (``send_payment``): it pays once.

    Sign no other payment yourself. ``fund`` is safe to call again with the same ``payer`` and
    ``attempt``: it uses the same nonce.
    """

    def __init__(self, message: str, order_id: str, payment: Mapping[str, Any]) -> None:
        super().__init__(message, may_be_done=True)
        self.order_id = order_id
        self.payment = dict(payment)


class Unverified(ClientError):
    """An answer can't be trusted; ``cause`` says why. Send no money because of it."""

    def __init__(self, cause: VerificationError) -> None:
        super().__init__(f"{cause.code}: {cause.message}")
        self.cause = cause
