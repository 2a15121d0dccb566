"""One HTTP exchange with an upstream: bounded, strict, and classified by what it proves.

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

Every call has its own connection: the upstream may be closing a kept one at that moment, and then
nobody could tell whether the call had arrived. A few calls a minute can afford it. Redirects are
not followed, nor are proxies or netrc files of the environment used, so that the API key goes to
the configured address and nowhere else. The bodies of requests are those of spec 2.4, amounts in
atomic units.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, ClassVar, Final

import orjson
from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientHandlerType,
    ClientOSError,
    ClientRequest,
    ClientResponse,
    ClientSession,
    DummyCookieJar,
    ServerDisconnectedError,
    TCPConnector,
)
from msgspec import Struct, field
from yarl import URL

from rpcsvc import strict_json
from rpcsvc.domain.reservations import TICKETS_REASON, UNFUNDED_REASON
from rpcsvc.errors import InvalidJson
from rpcsvc.http_client import (
    HttpRequest,
    NotReached,
    ReplyLost,
    ReplyTimedOut,
    ReplyTooLarge,
    exchange,
)
from rpcsvc.logs import MASK, shorten_addresses
from rpcsvc.redacted import Redacted
from rpcsvc.urls import is_loopback

# Bytes of an answer kept for audit. A good answer is some 2 KB.
RAW_LIMIT: Final = 65_536

_HEADER_VALUE: Final = re.compile(r"[!-~]{1,512}", re.ASCII)

_LONGEST_REASON: Final = 300
_LONGEST_PAUSE_MS: Final = 600_000
_JSON_TYPE: Final = re.compile(r"application/(?:[a-z0-9.+-]+\+)?json\s*(?:;.*)?", re.ASCII | re.I)
# A proxy may answer these for a call that it has passed on.
_NOT_A_REFUSAL: Final = frozenset({408, 425, 499})


# --- failures ------------------------------------------------------------------------------------


def is_about_unfunded(details: Mapping[str, Any]) -> bool:
    """Return whether another rpcsvc refuses because of orders without a deposit."""
    return details.get("reason") == UNFUNDED_REASON


def is_about_calls(details: Mapping[str, Any]) -> bool:
    """Return whether HTTP 429 is about the number of calls, and not about what another rpcsvc
    counts beside them.
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


# --- the exchange --------------------------------------------------------------------------------


class ClientOptions(Redacted, frozen=True):
    """The address of the upstream, and the time limits of calls in milliseconds.

    ``connect_ms``, ``read_ms`` and ``create_ms`` bound one attempt. ``read_total_ms`` and
    ``create_total_ms`` bound what comes before the last attempt: waiting for the budget,
    failed attempts, and the pauses between them.

    ``url`` is https; plain http is taken for loopback only, unless ``plain_http`` says that the
    network in between is trusted: whoever can change an answer there can change where users pay.
    """

    HIDDEN = frozenset({"api_key"})

    url: str
    api_key: str | None
    plain_http: bool
    connect_ms: int = 5_000
    read_ms: int = 15_000
    create_ms: int = 30_000
    read_total_ms: int = 20_000
    create_total_ms: int = 45_000
    max_bytes: int = 1_048_576
    attempts: int = 4
    backoff_ms: int = 250
    longest_backoff_ms: int = 8_000


ReadError = Callable[[Any], RemoteError | None]


def base_url(options: ClientOptions) -> str:
    """The checked base address, without a final slash. Raises ValueError that says what to do."""
    url = URL(options.url)
    if url.scheme not in ("https", "http") or not url.host:
        raise ValueError("the upstream's URL must begin with https:// and name a host")
    if url.user is not None or url.password is not None or url.query_string or url.fragment:
        raise ValueError(
            "the upstream's URL must have no user, query or fragment: the API key has its own"
            " setting"
        )
    if url.scheme == "http" and not (options.plain_http or is_loopback(url.host)):
        raise ValueError(
            "the upstream's URL must begin with https://: over plain http anyone on the way could"
            " replace the deposit addresses"
        )
    _check_options(options)
    return str(url).rstrip("/")


def _check_options(options: ClientOptions) -> None:
    if not 0 < options.connect_ms < min(options.read_ms, options.create_ms):
        raise ValueError("connect_ms must be less than read_ms and create_ms")
    if options.attempts < 1 or options.max_bytes < 1:
        raise ValueError("attempts and max_bytes must be at least 1")
    if options.api_key is not None and not _HEADER_VALUE.fullmatch(options.api_key):
        raise ValueError("the upstream's API key must be printable ASCII without spaces")


class UpstreamCall(Redacted, frozen=True):
    """One call. ``name`` is for logs; ``path`` begins with / and comes after the base address.

    ``takes_key``: it is made with the API key, if there is one. ``payment``: the header
    PAYMENT-SIGNATURE (x402).
    """

    HIDDEN = frozenset({"body", "payment"})

    name: str
    method: str
    path: str
    body: Mapping[str, Any] | None = None
    takes_key: bool = True
    payment: str | None = None


class UpstreamAnswer(Struct, frozen=True):
    """A successful answer: the JSON value and the bytes that it was read from."""

    value: Any
    raw: bytes

    @property
    def kept(self) -> bytes:
        """The part of the bytes that is kept for audit."""
        return self.raw[:RAW_LIMIT]


class RawReply(Struct, frozen=True):
    """An HTTP response, not judged yet."""

    status: int
    media_type: str
    retry_after_ms: int | None
    body: bytes
    payment_required: str | None = None


class UpstreamTransport:
    """Sends calls, each once, and judges the answers. Used as a context manager.

    ``read_error`` understands the dialect's error bodies.
    """

    def __init__(self, options: ClientOptions, read_error: ReadError) -> None:
        self._options = options
        self._base = base_url(options)
        self._read_error = read_error
        self._session: ClientSession | None = None

    async def __aenter__(self) -> UpstreamTransport:
        self._session = ClientSession(
            connector=TCPConnector(force_close=True),
            cookie_jar=DummyCookieJar(),
            auto_decompress=False,
            headers={"Accept": "application/json", "Accept-Encoding": "identity"},
            middlewares=(_once,),
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    async def send(self, call: UpstreamCall, key: str | None, *, creates: bool) -> RawReply:
        """Send the call and take its whole answer. Raises NeverSent, NoAnswer, UpstreamBroken."""
        options = self._options
        limit_ms = options.create_ms if creates else options.read_ms
        if self._session is None:
            raise NeverSent("The client is closed.", retryable=False)
        request = HttpRequest(
            call.method,
            self._base + call.path,
            seconds=limit_ms / 1000,
            most_bytes=options.max_bytes,
            body=None if call.body is None else orjson.dumps(call.body),
            headers=self._headers(call, key),
            connect_seconds=options.connect_ms / 1000,
        )
        try:
            reply = await exchange(self._session, request, self._require_plain)
        except NotReached as error:
            raise NeverSent(f"No connection to the upstream: {_what(error.cause)}.") from error
        except ReplyTimedOut as error:
            raise NoAnswer(f"No whole answer within {limit_ms} ms.") from error
        except ReplyTooLarge as error:
            problem = f"The answer is larger than {options.max_bytes} bytes."
            raise UpstreamBroken(problem, raw=error.body) from error
        except ReplyLost as error:
            raise NoAnswer(f"The connection was lost: {_what(error.cause)}.") from error
        kind = reply.headers.get("Content-Type", "")
        wanted = reply.headers.get("PAYMENT-REQUIRED")
        return RawReply(reply.status, kind, _retry_after_ms(reply.headers), reply.body, wanted)

    def _headers(self, call: UpstreamCall, key: str | None) -> dict[str, str]:
        headers = {}
        if call.body is not None:
            headers["Content-Type"] = "application/json"
        if self._options.api_key is not None and call.takes_key:
            headers["x-api-key"] = self._options.api_key
        if key is not None:
            headers["idempotency-key"] = key
        if call.payment is not None:
            headers["PAYMENT-SIGNATURE"] = call.payment
        return headers

    def _require_plain(self, response: ClientResponse) -> None:
        """Raise UpstreamBroken for an answer that is compressed, unasked."""
        encoding = response.headers.get("Content-Encoding", "identity").lower()
        if encoding != "identity":
            response.close()
            raise UpstreamBroken(f"The answer is encoded as {self._safe(encoding)}, unasked.")

    def is_call_limit(self, reply: RawReply) -> bool:
        """Return whether the upstream refuses more calls of any kind."""
        if reply.status != 429:
            return False
        remote = self._remote(reply)
        return remote is None or is_about_calls(remote.details)

    def judge(self, reply: RawReply) -> UpstreamAnswer:
        """The answer if it is a good one. Raises UpstreamRefused, NoAnswer or UpstreamBroken."""
        if reply.status >= 500:
            raise NoAnswer(
                self._http_words(reply), retry_after_ms=reply.retry_after_ms, raw=reply.body
            )
        if 300 <= reply.status < 400:
            raise UpstreamBroken(
                f"The upstream redirects (HTTP {reply.status}). Redirects are not followed:"
                " configure the address that it redirects to.",
                raw=reply.body,
            )
        if reply.status >= 400:
            raise self._no(reply)
        return UpstreamAnswer(self._json(reply), reply.body)

    def _no(self, reply: RawReply) -> UpstreamError:
        """HTTP 4xx: a refusal if it is in the dialect's own form."""
        remote = self._remote(reply)
        if remote is not None and reply.status == 402 and reply.payment_required is not None:
            wanted = PaymentWanted(reply.status, remote, raw=reply.body)
            wanted.required = reply.payment_required
            return wanted
        if remote is not None and reply.status not in _NOT_A_REFUSAL:
            return UpstreamRefused(
                reply.status, remote, retry_after_ms=reply.retry_after_ms, raw=reply.body
            )
        words = self._http_words(reply)
        if reply.status == 429 or reply.status in _NOT_A_REFUSAL:
            return NoAnswer(words, retry_after_ms=reply.retry_after_ms, raw=reply.body)
        return UpstreamBroken(f"{words} Is the configured address right?", raw=reply.body)

    def _http_words(self, reply: RawReply) -> str:
        remote = self._remote(reply)
        words = f": {remote.message}" if remote else ", without an error that this dialect has."
        return f"HTTP {reply.status}{words}"

    def _remote(self, reply: RawReply) -> RemoteError | None:
        """The dialect's error in the body, made fit for logs, or None."""
        try:
            remote = self._read_error(self._json(reply))
        except UpstreamBroken:
            return None
        if remote is None:
            return None
        details = {k: self._safe(v) if isinstance(v, str) else v for k, v in remote.details.items()}
        code = None if remote.code is None else self._safe(remote.code)
        return RemoteError(code, self._safe(remote.message), details)

    def _json(self, reply: RawReply) -> Any:
        if not _JSON_TYPE.fullmatch(reply.media_type):
            kind = self._safe(reply.media_type) or "nothing"
            raise UpstreamBroken(
                f"HTTP {reply.status} came as {kind}, not as application/json.",
                retryable=True,
                raw=reply.body,
            )
        try:
            return strict_json.loads(reply.body)
        except InvalidJson as error:
            raise UpstreamBroken(
                f"HTTP {reply.status} came with a body that is not JSON:"
                f" {self._safe(error.message)}",
                retryable=True,
                raw=reply.body,
            ) from error

    def _safe(self, text: str) -> str:
        """An upstream's words, fit for a log: bounded, printable, no key, no whole address."""
        text = text[: 4 * _LONGEST_REASON]
        if self._options.api_key:
            text = text.replace(self._options.api_key, MASK)
        printable = "".join(c if c.isprintable() else " " for c in text)
        return shorten_addresses(printable)[:_LONGEST_REASON]


class _Lost(ClientError):
    """The connection was lost after the call had been sent, or part of it."""


async def _once(request: ClientRequest, handler: ClientHandlerType) -> ClientResponse:
    """Keep aiohttp from sending a lost GET a second time by itself, past budget and breaker."""
    try:
        return await handler(request)
    except ClientConnectorError:
        raise
    except (ClientOSError, ServerDisconnectedError) as error:
        raise _Lost(_what(error)) from error


def _what(error: BaseException) -> str:
    """A description of a connection failure, without addresses of ours or theirs."""
    if isinstance(error, _Lost):
        return str(error)
    number = getattr(error, "errno", None)
    reason = f" ({os.strerror(number)})" if isinstance(number, int) and number > 0 else ""
    return type(error).__name__ + reason


def _retry_after_ms(headers: Mapping[str, str]) -> int | None:
    """Retry-After (RFC 9110, 10.2.3), bounded; a date counts from the answer's own Date."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        seconds = int(text[:9])
    else:
        try:
            then, now = (parsedate_to_datetime(t) for t in (text, headers.get("Date", "")))
            seconds = int((then - now).total_seconds())
        except (ValueError, TypeError, OverflowError):
            return None
    return min(max(0, seconds) * 1000, _LONGEST_PAUSE_MS)
