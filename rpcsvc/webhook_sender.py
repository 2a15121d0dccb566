"""Sends one webhook message over HTTPS, signed, to public addresses only.

Each address is checked as its connection is made, so a name that resolves otherwise a moment later
gains nothing. No redirect is followed, and no body is read. Looking a name up and exchanging the
message have a time limit each.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import cached_property
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from aiohttp import (
    BaseConnector,
    ClientConnectorCertificateError,
    ClientConnectorDNSError,
    ClientConnectorError,
    ClientError,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    TCPConnector,
    TraceConfig,
)
from aiohttp.abc import AbstractResolver, ResolveResult
from typing_extensions import override
from yarl import URL

from rpcsvc import __version__
from rpcsvc.clock import Clock
from rpcsvc.domain.webhooks import (
    DeliveryAttempt,
    Targets,
    Webhook,
    as_address,
    sign_v1,
    sign_v1a,
    signed_content,
)

if TYPE_CHECKING:
    import pycares

SECONDS: Final = 15.0
LOOKUP_SECONDS: Final = 5.0
# When a name server is asked again, each time after twice as long, and how often it is asked.
_TRY_SECONDS: Final = 1.5
_TRIES: Final = 2
_NOT_PUBLIC: Final = "The host's address is not public."
_AGENT: Final = f"rpcsvc/{__version__}"

# Signs with the service's own key; None where signing is off.
Sign = Callable[[bytes], bytes]


class _Resolver(AbstractResolver):
    """Asks the system's name servers, or given ones, by c-ares.

    A name whose server is silent holds up no other, as it would on threads: their number is
    limited, and a look-up on a thread can't be given up.
    """

    def __init__(self, name_servers: Sequence[str], seconds: float) -> None:
        self._name_servers = name_servers
        self._seconds = seconds
        self._opened: pycares.Channel | None = None

    @override
    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[pycares.AddrInfoResult] = loop.create_future()

        def answered(result: pycares.AddrInfoResult | None, error: int | None) -> None:
            with suppress(RuntimeError):  # the event loop is closed: nobody waits
                loop.call_soon_threadsafe(_settle, answer, result, error)

        channel = self._channel()
        channel.getaddrinfo(host, port, family=family, type=socket.SOCK_STREAM, callback=answered)
        try:
            async with asyncio.timeout(self._seconds):
                found = await answer
        except TimeoutError:
            raise OSError(errno.ETIMEDOUT, f"no answer within {self._seconds:g} s") from None
        return [
            ResolveResult(
                hostname=host,
                host=node.addr[0].decode(),
                port=port,
                family=node.family,
                proto=node.protocol,
                flags=socket.AI_NUMERICHOST,
            )
            for node in found.nodes
        ]

    def _channel(self) -> pycares.Channel:
        if self._opened is None:
            # Loading it takes 30 ms: not at the start of each command.
            import pycares  # noqa: PLC0415 - see above

            self._opened = pycares.Channel(
                servers=self._name_servers or None, timeout=_TRY_SECONDS, tries=_TRIES
            )
        return self._opened

    @override
    async def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


def _settle(
    answer: asyncio.Future[pycares.AddrInfoResult],
    result: pycares.AddrInfoResult | None,
    error: int | None,
) -> None:
    if answer.done():  # given up
        return
    if result is None:
        answer.set_exception(OSError(error, "the name server gave no address"))
    else:
        answer.set_result(result)


def _clocked(seconds: float) -> TraceConfig:
    """Have a request's clock stand still while its name is looked up, and then begin.

    The clock is the request's ``trace_request_ctx``. A look-up has a time limit of its own.
    """

    async def stop(_session: ClientSession, request: SimpleNamespace, _params: object) -> None:
        request.trace_request_ctx.reschedule(None)

    async def begin(_session: ClientSession, request: SimpleNamespace, _params: object) -> None:
        now = asyncio.get_running_loop().time()
        request.trace_request_ctx.reschedule(now + seconds)

    config = TraceConfig()
    config.on_dns_resolvehost_start.append(stop)
    config.on_dns_resolvehost_end.append(begin)
    return config


class WebhookSender:
    """Sends messages. Made by ``webhook_sender``."""

    def __init__(
        self,
        public: ClientSession,
        onion: ClientSession | None,
        sign: Sign | None,
        clock: Clock,
        *,
        seconds: float = SECONDS,
    ) -> None:
        self._public = public
        self._onion = onion
        self._sign = sign
        self._clock = clock
        self._seconds = seconds

    @cached_property
    def _trust(self) -> ssl.SSLContext:
        """The system's certificates. Reading them takes longer than most commands do."""
        return ssl.create_default_context()

    async def send(self, webhook: Webhook, message_id: str, body: bytes) -> DeliveryAttempt:
        """Send a message and return the outcome. Raises nothing that a receiver can cause."""
        session = self._onion if webhook.is_onion else self._public
        if session is None:
            return DeliveryAttempt(None, "The service has no proxy to Tor any more.")
        headers = self._headers(webhook, message_id, body)
        try:
            async with (
                asyncio.timeout(self._seconds) as clock,
                session.post(
                    URL(webhook.url),
                    data=body,
                    headers=headers,
                    allow_redirects=False,
                    ssl=self._trust,
                    trace_request_ctx=clock,
                ) as response,
            ):
                asked = response.headers.get("retry-after", "")
                status = response.status
                response.close()  # its body says nothing
        except TimeoutError:
            return DeliveryAttempt(None, f"No answer within {self._seconds:g} s.")
        except (ClientConnectorError, ClientConnectorCertificateError) as error:
            return DeliveryAttempt(None, _unconnected(error))
        except (ClientError, OSError, ValueError):
            return DeliveryAttempt(None, "The connection was lost, or the answer was not HTTP.")
        return DeliveryAttempt(
            status, _problem(status), retry_after_ms(asked, self._clock.now_ms())
        )

    def _headers(self, webhook: Webhook, message_id: str, body: bytes) -> dict[str, str]:
        second = self._clock.now_ms() // 1000
        content = signed_content(message_id, second, body)
        signatures = [] if self._sign is None else [sign_v1a(self._sign(content))]
        if webhook.secret is not None:
            signatures.append(sign_v1(webhook.secret, content))
        return {
            "content-type": "application/json",
            "user-agent": _AGENT,
            "webhook-id": message_id,
            "webhook-timestamp": str(second),
            "webhook-signature": " ".join(signatures),
        }


def _unconnected(error: ClientConnectorError | ClientConnectorCertificateError) -> str:
    """Return why no connection was made."""
    if isinstance(error, ClientConnectorCertificateError):
        return "The TLS certificate is not valid for this host."
    if isinstance(error, ClientConnectorDNSError):
        return "The host's name could not be looked up."
    return _NOT_PUBLIC if error.os_error.errno == errno.EACCES else "No connection could be made."


def _problem(status: int) -> str | None:
    if 200 <= status < 300:
        return None
    if 300 <= status < 400:
        return f"Status {status}: redirects are not followed."
    return f"Status {status}."


def retry_after_ms(text: str, now: int) -> int | None:
    """Return the milliseconds of a Retry-After header, seconds or a date; None otherwise."""
    if text.isascii() and text.isdigit():
        return int(text[:9]) * 1000
    try:
        moment = parsedate_to_datetime(text)
    except (ValueError, TypeError, IndexError, OverflowError):
        return None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    return max(0, int(moment.timestamp() * 1000) - now)


def guarded(targets: Targets) -> Callable[[Any], socket.socket]:
    """Makes the socket of a connection. Raises PermissionError for an address that is refused."""

    def make(info: Any) -> socket.socket:
        family, kind, proto, _, target = info
        address = as_address(str(target[0]))
        if address is None or not targets.permits(address):
            raise PermissionError(errno.EACCES, _NOT_PUBLIC)
        return socket.socket(family, kind, proto)

    return make


@asynccontextmanager
async def webhook_sender(
    targets: Targets,
    sign: Sign | None,
    clock: Clock,
    *,
    onion_proxy: str = "",
    seconds: float = SECONDS,
    lookup_seconds: float = LOOKUP_SECONDS,
    name_servers: Sequence[str] = (),
) -> AsyncIterator[WebhookSender]:
    """A sender, until the block ends. ``onion_proxy``: the SOCKS proxy of Tor, as a URL.

    ``name_servers``: addresses, with ports, of those to ask; by default the system's.
    """
    resolver = _Resolver(name_servers, lookup_seconds)
    public = TCPConnector(
        resolver=resolver,
        use_dns_cache=False,
        force_close=True,
        limit=0,
        socket_factory=guarded(targets),
    )
    try:
        async with _session(public, [_clocked(seconds)]) as direct:
            if not onion_proxy:
                yield WebhookSender(direct, None, sign, clock, seconds=seconds)
                return
            async with _session(_onion_connector(onion_proxy)) as hidden:
                yield WebhookSender(direct, hidden, sign, clock, seconds=seconds)
    finally:
        await resolver.close()


def _session(connector: BaseConnector, traces: list[TraceConfig] | None = None) -> ClientSession:
    return ClientSession(
        connector=connector,
        trace_configs=traces,
        cookie_jar=DummyCookieJar(),
        timeout=ClientTimeout(total=None),
        auto_decompress=False,
        trust_env=False,
    )


def _onion_connector(proxy: str) -> BaseConnector:
    """Names are resolved by the proxy: onion services have no address. Raises ImportError."""
    from aiohttp_socks import ProxyConnector  # noqa: PLC0415 - of the extra "tor"

    found: BaseConnector = ProxyConnector.from_url(proxy, rdns=True, force_close=True)
    return found
