"""Every way in which a call of an upstream can fail.

    UpstreamError
    +-- NeverSent                nothing left this service
    |   +-- BudgetSpent              the published limit leaves no room now
    |   +-- BreakerOpen              the upstream was found down a moment ago
    |   +-- NotAnId                  no upstream can have given that id
    +-- UpstreamRefused          it understood and said no: nothing was done
    |   +-- PaymentWanted            it asks for a payment of x402, and says for which
    +-- NoAnswer                 a read got no usable answer; it changed nothing
    +-- UpstreamBroken           an answer that can't be understood; it names the field
    +-- UpstreamOutcomeUnknown   a creating call was sent, and may have been carried out

``may_have_acted`` decides over money: only UpstreamOutcomeUnknown says yes, and then the call must
not be repeated without its idempotency key. Reasons are fit for logs and for the operator: bounded,
without keys or whole addresses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Final

from msgspec import Struct, field

from rpcsvc.domain.unfunded import TICKETS_REASON, UNFUNDED_REASON

# What is kept of an answer for audit. A good answer is some 2 KB.
RAW_LIMIT: Final = 65_536


def is_about_unfunded(details: Mapping[str, Any]) -> bool:
    """Whether another rpcsvc refuses because of orders without a deposit."""
    return details.get("reason") == UNFUNDED_REASON


def is_about_calls(details: Mapping[str, Any]) -> bool:
    """Whether HTTP 429 is about the number of calls, and not about what another rpcsvc counts
    beside them.
    """
    return details.get("reason") not in (UNFUNDED_REASON, TICKETS_REASON)


class UpstreamError(Exception):
    """A call to the upstream that did not give what was asked.

    ``reason`` is for the operator. ``retry_after_ms`` is how long the upstream asked to be left
    alone, if it did. ``retryable``: the same read may succeed later. ``raw``: the answer, bounded.
    """

    may_have_acted: ClassVar[bool] = False

    def __init__(
        self,
        reason: str,
        *,
        retry_after_ms: int | None = None,
        retryable: bool = True,
        raw: bytes = b"",
    ) -> None:
        super().__init__(reason)
        self.reason = reason
        self.retry_after_ms = retry_after_ms
        self.retryable = retryable
        self.raw = raw[:RAW_LIMIT]


class NeverSent(UpstreamError):
    """No byte of the call left this service: nothing can have happened."""


class BudgetSpent(NeverSent):
    """The published limit leaves no room soon enough; ``retry_after_ms`` says when it does."""


class BreakerOpen(NeverSent):
    """The upstream failed repeatedly and is left alone until ``retry_after_ms`` have passed."""


class NotAnId(NeverSent):
    """An id of a form that no upstream gives; it would not be safe in a path."""


class UpstreamRefused(UpstreamError):
    """The upstream understood the call and refused it, in its own error form: nothing was done.

    ``message`` and ``details`` are the upstream's words: bounded, and not yet fit for a caller.
    ``code`` is None where the dialect has no codes.
    """

    def __init__(
        self,
        status: int,
        remote: RemoteError,
        *,
        retry_after_ms: int | None = None,
        raw: bytes = b"",
    ) -> None:
        named = f" ({remote.code})" if remote.code else ""
        super().__init__(
            f"The upstream refused with HTTP {status}{named}: {remote.message}",
            retry_after_ms=retry_after_ms,
            retryable=status == 429,
            raw=raw,
        )
        self.status = status
        self.code = remote.code
        self.message = remote.message
        self.details = remote.details


class PaymentWanted(UpstreamRefused):
    """HTTP 402: no payment came, or it was refused. ``required`` is the header PAYMENT-REQUIRED."""

    required: str = ""


class NoAnswer(UpstreamError):
    """A time-out, a lost connection, or HTTP 5xx. For a read, that is all there is to it."""


class UpstreamBroken(UpstreamError):
    """An answer that can't be understood or trusted; ``field`` is the wrong part, if it is one."""

    def __init__(
        self, reason: str, *, field: str | None = None, retryable: bool = False, raw: bytes = b""
    ) -> None:
        super().__init__(reason, retryable=retryable, raw=raw)
        self.field = field


class UpstreamOutcomeUnknown(UpstreamError):
    """Something that creates was sent and may have been done.

    ``upstream_id`` is the new order's id, where the answer shows one although it is otherwise
    unusable. ``safe_to_repeat``: it carried an idempotency key that the upstream honours, so that
    the same call with the same key can't create a second one.
    """

    may_have_acted = True

    def __init__(
        self,
        reason: str,
        *,
        safe_to_repeat: bool,
        upstream_id: str | None = None,
        retry_after_ms: int | None = None,
        raw: bytes = b"",
    ) -> None:
        super().__init__(reason, retry_after_ms=retry_after_ms, retryable=safe_to_repeat, raw=raw)
        self.safe_to_repeat = safe_to_repeat
        self.upstream_id = upstream_id


class RemoteError(Struct, frozen=True):
    """An upstream's error as its dialect words it. ``code`` is None where there are no codes."""

    code: str | None
    message: str
    details: Mapping[str, Any] = field(default_factory=dict)
