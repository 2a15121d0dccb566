"""Where an upstream is and how patient its client is, checked before anything is sent.

What does not live here: reading the settings (wiring.py).
"""

from __future__ import annotations

import re
import ssl
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Final

from yarl import URL

_HEADER_VALUE: Final = re.compile(r"[!-~]{1,512}", re.ASCII)


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
