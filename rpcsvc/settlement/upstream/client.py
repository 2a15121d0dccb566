"""One HTTP call to an upstream: bounded, strict, and honest about whether it may have acted.

A read is repeated with growing, random pauses until it succeeds or its time is up. A call that
creates something is sent once; it is sent again only with an idempotency key that the upstream
honours, and once an attempt may have acted, no later refusal can take that back. Every call has its
own connection: the upstream may be closing a kept one at that moment, and then nobody could tell
whether the call had arrived. A few calls a minute can afford it.

What does not live here: paths and shapes (bff.py, v1.py), budgets (budget.py), the breaker
(breaker.py). Redirects are not followed, nor are proxies or netrc files of the environment used,
so that the API key goes to the configured address and nowhere else.
"""

from __future__ import annotations

import asyncio
import os
import re
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from ipaddress import ip_address
from random import SystemRandom
from types import TracebackType
from typing import Any, Final, TypeVar

import orjson
import structlog
from aiohttp import (
    ClientConnectorError,
    ClientError,
    ClientHandlerType,
    ClientOSError,
    ClientRequest,
    ClientResponse,
    ClientSession,
    ClientTimeout,
    ConnectionTimeoutError,
    DummyCookieJar,
    InvalidURL,
    ServerDisconnectedError,
    TCPConnector,
)
from yarl import URL

from rpcsvc.errors import InvalidJson
from rpcsvc.logs import MASK, shorten_addresses
from rpcsvc.orders.ports import Health
from rpcsvc.settlement.upstream.breaker import Breaker, Permit
from rpcsvc.settlement.upstream.budget import Budget, Demand, Slot
from rpcsvc.settlement.upstream.models import (
    RAW_LIMIT,
    NeverSent,
    NoAnswer,
    OutcomeUnknown,
    Refused,
    RemoteError,
    UpstreamBroken,
    UpstreamError,
)

T = TypeVar("T")
Loads = Callable[[bytes], Any]
ReadError = Callable[[Any], RemoteError | None]
log = structlog.get_logger(__name__)

_CHUNK: Final = 65_536
_LONGEST_REASON: Final = 300
_LONGEST_PAUSE_MS: Final = 600_000
_JSON_TYPE: Final = re.compile(r"application/(?:[a-z0-9.+-]+\+)?json\s*(?:;.*)?", re.ASCII | re.I)
_ID: Final = re.compile(r'"orderId"\s*:\s*"([A-Za-z0-9_][A-Za-z0-9._:-]{0,127})"', re.ASCII)
_HEADER_VALUE: Final = re.compile(r"[!-~]{1,512}", re.ASCII)
_IDEMPOTENCY_KEY: Final = re.compile(r"[ -~]{1,255}", re.ASCII)
_KEY_CODES: Final = frozenset({None, "unauthorized"})
# A proxy may answer these for a call that it has passed on.
_NOT_A_REFUSAL: Final = frozenset({408, 425, 499})


@dataclass(frozen=True, slots=True)
class Timing:
    """Where time, waiting and chance come from. ``random`` gives numbers in [0, 1)."""

    now_ms: Callable[[], int]
    sleep_ms: Callable[[int], Awaitable[None]]
    random: Callable[[], float]


def system_timing() -> Timing:
    """The machine's monotonic clock and chance."""

    async def sleep_ms(ms: int) -> None:
        await asyncio.sleep(ms / 1000)

    return Timing(lambda: time.monotonic_ns() // 1_000_000, sleep_ms, SystemRandom().random)


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Where the upstream is, and how patient this client is. Times in milliseconds.

    ``connect_ms``, ``read_ms`` and ``create_ms`` bound one attempt. ``read_patience_ms`` and
    ``create_patience_ms`` bound what comes before the last attempt: waiting for the budget,
    failed attempts, and the pauses between them.

    ``url`` is https; plain http is taken for loopback only, unless ``plain_http`` says that the
    network in between is trusted: whoever can change an answer there can change where users pay.
    """

    url: str
    api_key: str | None = field(default=None, repr=False)
    plain_http: bool = False
    tls: ssl.SSLContext | None = field(default=None, repr=False)
    connect_ms: int = 5_000
    read_ms: int = 15_000
    create_ms: int = 30_000
    read_patience_ms: int = 20_000
    create_patience_ms: int = 45_000
    max_bytes: int = 1_048_576
    attempts: int = 4
    backoff_ms: int = 250
    longest_backoff_ms: int = 8_000


@dataclass(frozen=True, slots=True)
class Call:
    """One call. ``name`` is for logs; ``path`` begins with / and comes after the base address."""

    name: str
    method: str
    path: str
    query: Mapping[str, str] = field(default_factory=dict, repr=False)
    body: Mapping[str, Any] | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class Answer:
    """A successful answer: the JSON value and the bytes that it was read from."""

    value: Any
    raw: bytes

    @property
    def kept(self) -> bytes:
        """The part of the bytes that is kept for audit."""
        return self.raw[:RAW_LIMIT]


Parse = Callable[[Answer], T]


class UpstreamClient:
    """Sends calls to one upstream. Used as a context manager.

    ``loads`` reads JSON strictly and raises errors.InvalidJson. ``read_error`` understands the
    dialect's error bodies. ``creations`` and ``calls`` are the two budgets.
    """

    def __init__(
        self,
        options: ClientOptions,
        *,
        loads: Loads,
        read_error: ReadError,
        creations: Budget,
        calls: Budget,
        breaker: Breaker,
        timing: Timing,
    ) -> None:
        self._options = options
        self._base = _base_url(options)
        self._loads = loads
        self._read_error = read_error
        self._creations = creations
        self._calls = calls
        self._breaker = breaker
        self._timing = timing
        self._session: ClientSession | None = None
        self._key_refused: int | None = None

    async def __aenter__(self) -> UpstreamClient:
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

    def health(self) -> Health:
        """Whether the upstream answers us, and if not, why."""
        if self._key_refused is not None:
            detail = f"The upstream refuses our API key (HTTP {self._key_refused})."
            return Health(ok=False, detail=detail)
        return self._breaker.health(self._timing.now_ms())

    # --- the two kinds of calls ---

    async def read(
        self, call: Call, parse: Parse[T], *, demand: Demand, patience_ms: int | None = None
    ) -> T:
        """Send a call that changes nothing, as often as it takes within ``patience_ms``.

        Raises NeverSent, Refused, NoAnswer or UpstreamBroken.
        """
        deadline = self._deadline(patience_ms, self._options.read_patience_ms)
        attempt = 0
        while True:
            attempt += 1
            try:
                answer = await self._admitted(call, demand, deadline, creates=False)
                break
            except UpstreamError as error:
                if not await self._repeats(call, attempt, error, deadline):
                    raise
        return _parsed(answer, parse)

    async def create(
        self,
        call: Call,
        parse: Parse[T],
        *,
        key: str | None,
        demand: Demand,
        resumed: bool = False,
        patience_ms: int | None = None,
    ) -> T:
        """Send a call that creates something: once, or with ``key`` until its outcome is known.

        ``key`` is the idempotency key; None for an upstream that has none. ``resumed``: an earlier
        call with this key ended in OutcomeUnknown, so that a refusal now proves nothing.

        Raises NeverSent or Refused when nothing was created, and OutcomeUnknown otherwise, for an
        answer that can't be understood too. Any other exception, a cancellation included, leaves
        the outcome as unknown.
        """
        if resumed and key is None:
            raise ValueError("without an idempotency key a creation can't be sent again")
        if key is not None and not _IDEMPOTENCY_KEY.fullmatch(key):
            raise ValueError("an idempotency key is 1 to 255 printable ASCII characters")
        unknown = _unknown_before() if resumed else None
        deadline = self._deadline(patience_ms, self._options.create_patience_ms)
        attempt = 0
        while True:
            attempt += 1
            try:
                answer = await self._admitted(call, demand, deadline, creates=True, key=key)
                return _parsed(answer, parse)
            except (NoAnswer, UpstreamBroken) as error:
                failure: UpstreamError = error
                unknown = _unknown(error, unknown, safe_to_repeat=key is not None)
            except (NeverSent, Refused) as error:
                if unknown is None:
                    raise
                failure = error
            if key is None or not await self._repeats(call, attempt, failure, deadline):
                raise unknown from failure

    # --- one attempt ---

    async def _admitted(
        self, call: Call, demand: Demand, deadline: int, *, creates: bool, key: str | None = None
    ) -> Answer:
        """One attempt, once breaker and budget let it through."""
        # A creation that can't be repeated does not find out whether the upstream is back.
        may_probe = not creates or key is not None
        budget = self._creations if creates else self._calls
        now = self._timing.now_ms()
        self._breaker.check(now, may_probe=may_probe)
        with await budget.slot(demand, max_wait_ms=max(0, deadline - now)) as slot:
            permit = self._permit(slot, may_probe=may_probe)
            return await self._reported(call, key, creates=creates, permit=permit, budget=budget)

    def _permit(self, slot: Slot, *, may_probe: bool) -> Permit:
        try:
            return self._breaker.admit(self._timing.now_ms(), may_probe=may_probe)
        except NeverSent:
            slot.give_back()
            raise

    async def _reported(
        self, call: Call, key: str | None, *, creates: bool, permit: Permit, budget: Budget
    ) -> Answer:
        """One attempt, with its outcome told to breaker, budget and health."""
        try:
            reply = await self._exchange(call, key, creates=creates)
            if reply.status == 429 and reply.retry_after_ms:
                budget.pause(reply.retry_after_ms)
            answer = self._judge(reply)
        except Refused as error:
            permit.succeeded()
            about_key = error.status in (401, 403) and error.code in _KEY_CODES
            self._key_refused = error.status if about_key else None
            log.warning("upstream_refused", call=call.name, reason=error.reason)
            raise
        except UpstreamError as error:
            permit.failed(error.reason, self._timing.now_ms())
            raise
        except BaseException:
            permit.abandoned()
            raise
        permit.succeeded()
        self._key_refused = None
        return answer

    async def _exchange(self, call: Call, key: str | None, *, creates: bool) -> _Reply:
        """Send the call and take its whole answer. Raises NeverSent, NoAnswer, UpstreamBroken."""
        options = self._options
        limit_ms = options.create_ms if creates else options.read_ms
        if self._session is None:
            raise NeverSent("The client is closed.", retryable=False)
        try:
            async with (
                asyncio.timeout(limit_ms / 1000),
                self._session.request(
                    call.method,
                    self._url(call),
                    data=None if call.body is None else orjson.dumps(call.body),
                    headers=self._headers(call, key),
                    timeout=ClientTimeout(total=None, connect=options.connect_ms / 1000),
                    allow_redirects=False,
                    ssl=options.tls or True,
                ) as response,
            ):
                return await self._reply(response)
        except (ClientConnectorError, ConnectionTimeoutError, InvalidURL) as error:
            raise NeverSent(f"No connection to the upstream: {_what(error)}.") from error
        except TimeoutError as error:
            raise NoAnswer(f"No whole answer within {limit_ms} ms.") from error
        except (ClientError, OSError) as error:
            raise NoAnswer(f"The connection was lost: {_what(error)}.") from error

    def _url(self, call: Call) -> URL:
        return URL(self._base + call.path).with_query(dict(call.query))

    def _headers(self, call: Call, key: str | None) -> dict[str, str]:
        headers = {}
        if call.body is not None:
            headers["Content-Type"] = "application/json"
        if self._options.api_key is not None:
            headers["x-api-key"] = self._options.api_key
        if key is not None:
            headers["idempotency-key"] = key
        return headers

    async def _reply(self, response: ClientResponse) -> _Reply:
        encoding = response.headers.get("Content-Encoding", "identity").lower()
        if encoding != "identity":
            response.close()
            raise UpstreamBroken(f"The answer is encoded as {self._safe(encoding)}, unasked.")
        body = await self._body(response)
        kind = response.headers.get("Content-Type", "")
        return _Reply(response.status, kind, _retry_after_ms(response.headers), body)

    async def _body(self, response: ClientResponse) -> bytes:
        """The body, up to the limit. Raises UpstreamBroken without reading what is over it."""
        limit = self._options.max_bytes
        body = bytearray()
        if (response.content_length or 0) <= limit:
            async for chunk in response.content.iter_chunked(_CHUNK):
                body += chunk
                if len(body) > limit:
                    break
            else:
                return bytes(body)
        response.close()
        raise UpstreamBroken(f"The answer is larger than {limit} bytes.", raw=bytes(body))

    # --- what an answer means ---

    def _judge(self, reply: _Reply) -> Answer:
        """The answer if it is a good one. Raises Refused, NoAnswer or UpstreamBroken."""
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
        return Answer(self._json(reply), reply.body)

    def _no(self, reply: _Reply) -> UpstreamError:
        """HTTP 4xx: a refusal if it is in the dialect's own form."""
        remote = self._remote(reply)
        if remote is not None and reply.status not in _NOT_A_REFUSAL:
            return Refused(
                reply.status, remote, retry_after_ms=reply.retry_after_ms, raw=reply.body
            )
        words = self._http_words(reply)
        if reply.status == 429 or reply.status in _NOT_A_REFUSAL:
            return NoAnswer(words, retry_after_ms=reply.retry_after_ms, raw=reply.body)
        return UpstreamBroken(f"{words} Is the configured address right?", raw=reply.body)

    def _http_words(self, reply: _Reply) -> str:
        remote = self._remote(reply)
        words = f": {remote.message}" if remote else ", without an error that this dialect has."
        return f"HTTP {reply.status}{words}"

    def _remote(self, reply: _Reply) -> RemoteError | None:
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

    def _json(self, reply: _Reply) -> Any:
        if not _JSON_TYPE.fullmatch(reply.content_type):
            kind = self._safe(reply.content_type) or "nothing"
            raise UpstreamBroken(
                f"HTTP {reply.status} came as {kind}, not as application/json.",
                retryable=True,
                raw=reply.body,
            )
        try:
            return self._loads(reply.body)
        except InvalidJson as error:
            raise UpstreamBroken(
                f"HTTP {reply.status} came with a body that is not JSON:"
                f" {self._safe(error.message)}",
                retryable=True,
                raw=reply.body,
            ) from error

    # --- small things ---

    def _deadline(self, patience_ms: int | None, usual_ms: int) -> int:
        return self._timing.now_ms() + (usual_ms if patience_ms is None else patience_ms)

    def _pause_ms(self, attempt: int, error: UpstreamError) -> int:
        """Exponential backoff with full jitter, after what the upstream asked for."""
        options = self._options
        most = min(options.longest_backoff_ms, options.backoff_ms << (attempt - 1))
        return (error.retry_after_ms or 0) + int(self._timing.random() * most)

    async def _repeats(self, call: Call, attempt: int, error: UpstreamError, deadline: int) -> bool:
        """Whether to try again: waits first if so."""
        pause = self._pause_ms(attempt, error)
        in_time = self._timing.now_ms() + pause <= deadline
        if not (error.retryable and in_time and attempt < self._options.attempts):
            return False
        log.warning(
            "upstream_retry", call=call.name, attempt=attempt, in_ms=pause, reason=error.reason
        )
        await self._timing.sleep_ms(pause)
        return True

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


@dataclass(frozen=True, slots=True)
class _Reply:
    """What came over HTTP, unjudged."""

    status: int
    content_type: str
    retry_after_ms: int | None
    body: bytes


def _parsed(answer: Answer, parse: Parse[T]) -> T:
    """The answer as its type; an UpstreamBroken that comes of it keeps the bytes."""
    try:
        return parse(answer)
    except UpstreamBroken as error:
        error.raw = answer.kept
        raise


def _unknown_before() -> OutcomeUnknown:
    return OutcomeUnknown("An earlier attempt had no known outcome.", safe_to_repeat=True)


def _unknown(
    error: UpstreamError, earlier: OutcomeUnknown | None, *, safe_to_repeat: bool
) -> OutcomeUnknown:
    found = _ID.search(error.raw.decode("utf-8", "replace"))
    known = earlier.upstream_id if earlier else None
    return OutcomeUnknown(
        f"It was sent, and may have been done: {error.reason}",
        safe_to_repeat=safe_to_repeat,
        upstream_id=found[1] if found else known,
        retry_after_ms=error.retry_after_ms,
        raw=error.raw,
    )


def _what(error: Exception) -> str:
    """What went wrong with a connection, without addresses of ours or theirs."""
    if isinstance(error, _Lost):
        return str(error)
    number = getattr(error, "errno", None)
    reason = f" ({os.strerror(number)})" if isinstance(number, int) and number > 0 else ""
    return type(error).__name__ + reason


def _base_url(options: ClientOptions) -> str:
    """The checked base address, without a final slash. Raises ValueError that says what to do."""
    url = URL(options.url)
    if url.scheme not in ("https", "http") or not url.host:
        raise ValueError("the upstream's URL must begin with https:// and name a host")
    if url.user is not None or url.password is not None or url.query_string or url.fragment:
        raise ValueError(
            "the upstream's URL must have no user, query or fragment: the API key has its own"
            " setting"
        )
    if url.scheme == "http" and not (options.plain_http or _is_loopback(url.host)):
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


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _retry_after_ms(headers: Mapping[str, str]) -> int | None:
    """Retry-After (RFC 9110, 10.2.3), bounded; a date counts from the answer's own Date."""
    text = headers.get("Retry-After", "").strip()
    if text.isascii() and text.isdigit():
        seconds = int(text[:9])
    else:
        try:
            then, now = (parsedate_to_datetime(t) for t in (text, headers.get("Date", "")))
            seconds = int((then - now).total_seconds())
        except (ValueError, TypeError):
            return None
    return min(max(0, seconds) * 1000, _LONGEST_PAUSE_MS)
