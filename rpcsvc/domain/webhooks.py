"""The rules of webhooks: which URLs and addresses are called, what is signed, when to try again.

Source: Standard Webhooks 1.0.0 (https://www.standardwebhooks.com/).
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import re
from ipaddress import (
    IPv4Address,
    IPv4Network,
    IPv6Address,
    IPv6Network,
    ip_address,
    ip_network,
)
from typing import Final, NamedTuple
from urllib.parse import SplitResult, urlsplit

from msgspec import Struct

from rpcsvc.errors import InvalidInput
from rpcsvc.redacted import Redacted

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

LONGEST_URL: Final = 1_000
SECRET_PREFIX: Final = "whsec_"  # noqa: S105 - every secret begins so
PUBLIC_PREFIX: Final = "whpk_"
LEAST_SECRET: Final = 24
MOST_SECRET: Final = 64
DAY_MS: Final = 86_400_000
FIRST_PAUSE_MS: Final = 5_000
GONE: Final = 410

# For readers of schemas: URLs of public names alone, and base64 with or without its padding.
URL_PATTERN: Final = (
    r"^https://([a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?\.)+[a-z]{2,63}"
    r"(:(80|443|102[4-9]|10[3-9][0-9]|1[1-9][0-9]{2}|[2-9][0-9]{3}|[1-5][0-9]{4}|6[0-4][0-9]{3}))?"
    r"([/?][!$-\[\]-~]*)?$"
)
_B64: Final = "[A-Za-z0-9+/]"
SECRET_PATTERN: Final = (
    f"^{SECRET_PREFIX}({_B64}{{4}}){{8,20}}"
    f"({_B64}{{4}}|({_B64}{{4}})?{_B64}{{2}}(==)?|{_B64}{{3}}=?)?$"
)

_PRINTABLE: Final = re.compile(r"[!-~]+")
_NAME: Final = re.compile(r"(?!-)[a-z0-9_-]{1,63}(?<!-)(\.(?!-)[a-z0-9_-]{1,63}(?<!-))*")
_ONION: Final = re.compile(r"([a-z0-9-]+\.)*[a-z2-7]{56}\.onion")
# In addition to the private networks of IANA's registries: old tunnels that carry any IPv4 address,
# the addresses of clouds' metadata services, and the network of documentation (RFC 9637).
_REFUSED: Final = tuple(
    map(
        ip_network,
        [
            "192.0.0.0/24",
            "192.88.99.0/24",
            "168.63.129.16/32",
            "2001::/23",
            "2002::/16",
            "3fff::/20",
        ],
    )
)
# Below it are the ports of other services, such as mail: they are not called by strangers' wish.
_LEAST_PORT: Final = 1024
_WEB_PORTS: Final = (80, 443)
_GLOBAL_UNICAST: Final = IPv6Network("2000::/3")


class Webhook(Redacted, frozen=True):
    """The URL for the events of an order, and the secret (``whsec_``) of a caller that gave one.

    Both were checked by ``read_url`` and ``read_secret``. ``client`` is who named it, as stored
    (domain/reservations.py).
    """

    HIDDEN = frozenset({"secret"})

    url: str
    secret: str | None = None
    client: str = ""

    @property
    def receiver(self) -> str:
        """Host and port: receivers of one are bounded together."""
        parts = urlsplit(self.url)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return f"{self._host}:{port}"

    @property
    def is_onion(self) -> bool:
        """Whether the receiver is an onion service."""
        return is_onion(self._host)

    @property
    def _host(self) -> str:
        return (urlsplit(self.url).hostname or "").rstrip(".")


class Targets(Struct, frozen=True):
    """The addresses that may be called: public ones, and the networks that the operator allows.

    ``onion``: whether there is a proxy that reaches onion services. ``ports``: the ports below 1024
    that the operator allows in addition to 80 and 443.
    """

    allowed: tuple[Network, ...] = ()
    onion: bool = False
    ports: tuple[int, ...] = ()

    def permits(self, address: Address) -> bool:
        """Return whether a connection may be made to an address."""
        if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        if any(address in network for network in self.allowed):
            return True
        if any(address in network for network in _REFUSED):
            return False
        if isinstance(address, IPv6Address) and address not in _GLOBAL_UNICAST:
            return False
        return address.is_global and not (address.is_multicast or address.is_reserved)


def is_onion(host: str) -> bool:
    """Return whether a host, in lower case, is named by its key in the Tor network."""
    return host.endswith(".onion")


def as_address(host: str) -> Address | None:
    """The IP address that a URL's host is; None for a name."""
    try:
        return ip_address(host)
    except ValueError:
        return None


def read_url(text: str, targets: Targets, *, name: str) -> str:
    """A URL that events may be sent to. Raises InvalidInput.

    What a name resolves to is judged when a connection is made (``Targets.permits``).
    """
    problem = _problem_of(text, targets)
    if problem is None:
        return text
    raise InvalidInput(
        f"{name} {problem}",
        field=name,
        received=text[: 2 * LONGEST_URL],
        allowed="an https URL of a public host, such as https://agent.example/hooks/swaps",
    )


def _problem_of(text: str, targets: Targets) -> str | None:
    """The problem of a URL, and what to send instead; None if it is good."""
    if len(text) > LONGEST_URL:
        return f"is too long: send at most {LONGEST_URL} characters."
    parts = _split(text)
    if parts is None:
        return (
            "is not a URL. Send one such as https://agent.example/hooks/swaps, in ASCII: a name"
            " in another script in its xn-- form, other characters as %XX."
        )
    host = (parts.hostname or "").rstrip(".")
    if "@" in parts.netloc or parts.fragment:
        return "must have no user name, password or fragment. Put a token into its path or query."
    problem_of_port = _problem_of_port(parts.port, targets)
    if is_onion(host):
        return problem_of_port or _problem_of_onion(parts.scheme, host, targets)
    if parts.scheme != "https":
        return "must begin with https://. Events are not sent in the clear."
    return problem_of_port or _problem_of_host(host, targets)


def _split(text: str) -> SplitResult | None:
    """Return the parts of a URL, or None if it is not one."""
    try:
        parts = urlsplit(text)
        has_host = bool((parts.hostname or "").rstrip(".")) and parts.port != 0
    except ValueError:
        return None
    return parts if has_host and _PRINTABLE.fullmatch(text) and "\\" not in text else None


def _problem_of_port(port: int | None, targets: Targets) -> str | None:
    if port is None or port >= _LEAST_PORT or port in (*_WEB_PORTS, *targets.ports):
        return None
    return f"names port {port}. Send a URL at port 443, 80, or {_LEAST_PORT} and above."


def _problem_of_onion(scheme: str, host: str, targets: Targets) -> str | None:
    if not targets.onion:
        return (
            "is an onion service, and this service has no proxy to Tor. Send an https URL of a"
            " public host."
        )
    if not _ONION.fullmatch(host):
        return "is no onion service of version 3: 56 characters before .onion."
    # Tor encrypts the connection, and the name is the key of the service.
    return None if scheme in ("http", "https") else "must begin with https:// or http://."


def _problem_of_host(host: str, targets: Targets) -> str | None:
    address = as_address(host)
    if address is not None:
        if targets.permits(address):
            return None
        return f"names {host}, which is no public address. Send the URL of a public host."
    if not _NAME.fullmatch(host):
        return "has a host that is no name: letters, digits, dots and hyphens."
    if not targets.allowed and ("." not in host or host.endswith(".localhost")):
        return f"names {host}, which is no public host. Send the URL of a public host."
    return None


def read_secret(text: str, *, name: str) -> str:
    """A symmetric secret. Raises InvalidInput, which does not show it."""
    if len(_key_of(text)) not in range(LEAST_SECRET, MOST_SECRET + 1):
        raise InvalidInput(
            f"{name} must be {SECRET_PREFIX} and the base64 of {LEAST_SECRET} to {MOST_SECRET}"
            " random bytes. Leave it out to check the service's own signature (v1a) instead.",
            field=name,
            allowed=f"{SECRET_PREFIX} and base64",
        )
    return text


def _key_of(secret: str) -> bytes:
    """Return the bytes of a secret, or none if the text is not a secret."""
    if not secret.startswith(SECRET_PREFIX):
        return b""
    text = secret.removeprefix(SECRET_PREFIX)
    try:
        return base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    except (binascii.Error, ValueError):
        return b""


def secret_digest(secret: str) -> str:
    """The digest that stands for a secret in an idempotency fingerprint."""
    return hashlib.sha256(secret.encode()).hexdigest()


def signed_content(message_id: str, second: int, body: bytes) -> bytes:
    """The signed bytes: id, time and body. An id has no full stop."""
    return f"{message_id}.{second}.".encode() + body


def sign_v1(secret: str, content: bytes) -> str:
    """The symmetric signature (HMAC-SHA256) as it stands in ``webhook-signature``."""
    digest = hmac.new(_key_of(secret), content, hashlib.sha256).digest()
    return f"v1,{base64.b64encode(digest).decode()}"


def sign_v1a(signature: bytes) -> str:
    """An Ed25519 signature as it stands in ``webhook-signature``."""
    return f"v1a,{base64.b64encode(signature).decode()}"


def public_key(raw: bytes) -> str:
    """An Ed25519 public key as Standard Webhooks writes it."""
    return PUBLIC_PREFIX + base64.b64encode(raw).decode()


def message_id(order_id: str, sequence: int) -> str:
    """Return the id of an event's message, which is the same at each attempt."""
    return f"msg_{order_id.removeprefix('ord_')}_{sequence}"


# --- attempts ----------------------------------------------------------------------------------


class DeliveryAttempt(NamedTuple):
    """The result of sending a message: a status, or the error.

    ``retry_after_ms``: how long the receiver asks to be left alone.
    """

    status: int | None
    error: str | None = None
    retry_after_ms: int | None = None

    @property
    def is_delivered(self) -> bool:
        """Whether the receiver has taken it."""
        return self.status is not None and 200 <= self.status < 300


class Standing(NamedTuple):
    """The state of a webhook: failed attempts in a row, since when, and when to try again.

    ``is_ended``: the receiver wants no more.
    """

    failures: int = 0
    failing_since: int | None = None
    due_at: int = 0
    is_ended: bool = False


class DeliveryVerdict(NamedTuple):
    """The next state of a delivery (delivered, pending, dead) and of its webhook."""

    state: str
    standing: Standing


def judge(attempt: DeliveryAttempt, before: Standing, now: int) -> DeliveryVerdict:
    """The pauses double from 5 s on. After 24 h of failure a delivery is dead.

    Those behind it are then tried once each, and are dead too unless the receiver is back.
    """
    if attempt.is_delivered:
        return DeliveryVerdict("delivered", Standing())
    failures = before.failures + 1
    since = now if before.failing_since is None else min(now, before.failing_since)
    if attempt.status == GONE:
        return DeliveryVerdict("dead", Standing(failures, since, is_ended=True))
    end = since + DAY_MS
    if now >= end:
        return DeliveryVerdict("dead", Standing(failures, since))
    due = min(end, now + FIRST_PAUSE_MS * 2 ** min(failures - 1, 20))
    asked = min(DAY_MS, attempt.retry_after_ms or 0)
    return DeliveryVerdict("pending", Standing(failures, since, max(due, now + asked)))
