"""The address of a service: a URL, or the UNIX socket of its data directory."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, urlsplit

from rpcsvc.health_probe import CONNECT_SECONDS, SOCKET_NAME, connected
from rpcsvc.urls import without_userinfo

ROOT_URLS: Final = "such as http://127.0.0.1:8080 or https://swap.example/base"
_AGENT_API: Final = "/api/v1"
_ON_SOCKET: Final = "http://localhost"


class BadUrl(Exception):
    """The text is not the root URL of a service."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A service that can be called: its name for messages, and its root URL without a slash.

    With a ``socket`` the connection goes there, whatever the URL's host is.
    """

    name: str
    url: str
    socket: Path | None = None

    @property
    def takes_token(self) -> bool:
        """False for the socket, whose file mode controls access."""
        return self.socket is None


def find_endpoint(url: str | None, data_dir: Path) -> Endpoint | None:
    """The service at ``url``, else the one that listens on the data directory, else None.

    Raises BadUrl and UntrustedSocket.
    """
    return endpoint_of(url) if url else socket_endpoint(data_dir)


def endpoint_of(url: str) -> Endpoint:
    """The service at a root URL, a path in it included; or at the base URL of its agent API.

    Its ``url`` is normalised. Raises BadUrl.
    """
    try:
        parts = urlsplit(url)
        _require_root(parts)
    except ValueError as error:
        # The parser's message may quote a password in the URL.
        why = "it must not have a user name" if "@" in url else error
        raise BadUrl(
            f"{without_userinfo(url)!r} is not a service's root URL ({why}). Give one, {ROOT_URLS}."
        ) from error
    # The specification's base_url ends so; /rpc is beside it, at the root.
    path = parts.path.rstrip("/").removesuffix(_AGENT_API)
    return Endpoint(url, f"{parts.scheme}://{parts.netloc.lower()}{path}")


def socket_endpoint(data_dir: Path) -> Endpoint | None:
    """The server that listens on the data directory's socket, if one does.

    Raises UntrustedSocket.
    """
    path = data_dir / SOCKET_NAME
    try:
        connected(str(path), CONNECT_SECONDS).close()
    except OSError:
        return None
    return Endpoint(str(path), _ON_SOCKET, path)


def _require_root(parts: SplitResult) -> None:
    """Raise ValueError unless these are the parts of a root URL."""
    host, _ = parts.hostname, parts.port  # the port is read here
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError("it must begin with http:// or https:// and a host")
    if not host.isprintable() or " " in host:
        raise ValueError("its host must not have blanks")
    if parts.query or parts.fragment or parts.username is not None:
        raise ValueError("it must not have a user name, ? or #")
    if not parts.path.isascii() or not parts.path.isprintable() or " " in parts.path:
        raise ValueError("its path must be percent-encoded")
    if parts.scheme == "http" and not is_this_machine(host):
        raise ValueError(
            "over plain HTTP anybody on the way could take the token and replace a deposit"
            " address, except on this machine; use https://"
        )


def is_this_machine(host: str) -> bool:
    """Whether ``host`` is a loopback name or address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
