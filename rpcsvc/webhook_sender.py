"""Sends one webhook message over HTTPS, signed, to public addresses only.

Each address is checked as its connection is made, so a name that resolves otherwise a moment later
gains nothing. No redirect is followed, and no body is read.
"""

from __future__ import annotations

import asyncio
import errno
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from datetime import UTC
from email.utils import parsedate_to_datetime
from functools import cached_property
from typing import Any, Final

from aiohttp import (
    BaseConnector,
    ClientConnectorCertificateError,
    ClientConnectorError,
    ClientError,
    ClientSession,
    ClientTimeout,
    DummyCookieJar,
    TCPConnector,
)
from aiohttp.abc import AbstractResolver, ResolveResult
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

SECONDS: Final = 15.0
_LOOKUPS: Final = 16
_NOT_PUBLIC: Final = "The host's address is not public."
_AGENT: Final = f"rpcsvc/{__version__}"

# Signs with the service's own key; None where signing is off.
Sign = Callable[[bytes], bytes]


class _Resolver(AbstractResolver):
    """The system's resolver on threads of its own: a slow name server holds up nothing else."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_LOOKUPS, thread_name_prefix="webhook-dns")

    async def resolve(
        self, host: str, port: int = 0, family: socket.AddressFamily = socket.AF_UNSPEC
    ) -> list[ResolveResult]:
        """All addresses of a name. Raises OSError."""
        loop = asyncio.get_running_loop()
        found = await loop.run_in_executor(
            self._threads, lookup, host, port, family, socket.SOCK_STREAM
        )
        return [
            ResolveResult(
                hostname=host,
                host=str(address[0]),
                port=port,
                family=kind,
                proto=proto,
                flags=socket.AI_NUMERICHOST,
            )
            for kind, _, proto, _, address in found
        ]

    async def close(self) -> None:
        """Let go of the threads; a lookup that hangs is left to its end."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def lookup(host: str, port: int, family: int, kind: int) -> list[Any]:
    """What the system's resolver answers."""
    return socket.getaddrinfo(host, port, family=family, type=kind)


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
                asyncio.timeout(self._seconds),
                session.post(
                    URL(webhook.url),
                    data=body,
                    headers=headers,
                    allow_redirects=False,
                    ssl=self._trust,
                ) as response,
            ):
                asked = response.headers.get("retry-after", "")
                status = response.status
                response.close()  # its body says nothing
        except TimeoutError:
            return DeliveryAttempt(None, f"No answer within {self._seconds:g} s.")
        except ClientConnectorCertificateError:
            return DeliveryAttempt(None, "The TLS certificate is not valid for this host.")
        except ClientConnectorError as error:
            is_refused = error.os_error.errno == errno.EACCES
            return DeliveryAttempt(
                None, _NOT_PUBLIC if is_refused else "No connection could be made."
            )
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


def _problem(status: int) -> str | None:
    if 200 <= status < 300:
        return None
    if 300 <= status < 400:
        return f"Status {status}: redirects are not followed."
    return f"Status {status}."


def retry_after_ms(text: str, now: int) -> int | None:
    """A Retry-After header, seconds or a date; None for anything else."""
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
) -> AsyncIterator[WebhookSender]:
    """A sender, until the block ends. ``onion_proxy``: the SOCKS proxy of Tor, as a URL."""
    resolver = _Resolver()
    public = TCPConnector(
        resolver=resolver,
        use_dns_cache=False,
        force_close=True,
        limit=0,
        socket_factory=guarded(targets),
    )
    try:
        async with _session(public) as direct:
            if not onion_proxy:
                yield WebhookSender(direct, None, sign, clock, seconds=seconds)
                return
            async with _session(_onion_connector(onion_proxy)) as hidden:
                yield WebhookSender(direct, hidden, sign, clock, seconds=seconds)
    finally:
        await resolver.close()


def _session(connector: BaseConnector) -> ClientSession:
    return ClientSession(
        connector=connector,
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
