"""Which names the service answers to, so that no page reaches it by DNS rebinding.

A page of evil.example whose name is made to point at 127.0.0.1 is of the same origin as the service
for its browser; only the Host header tells them apart.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from aiohttp import HttpVersion11, web

from rpcsvc.errors import InvalidRequest, MisdirectedRequest
from rpcsvc.settings import Settings
from rpcsvc.settings_sources import parse_address

_HOST: Final = re.compile(r"(\[[^\]]*\]|[^:]*)(?::[0-9]*)?")
_SHOWN: Final = 100


def is_loopback_name(name: str) -> bool:
    """Whether a host name or address is this machine's for itself: localhost, 127.0.0.0/8, ::1."""
    address = parse_address(name)
    return name == "localhost" if address is None else address.is_loopback


class Hosts:
    """The names that a request may be for: the site's, loopback names, and ``allowed_hosts``."""

    def __init__(self, settings: Settings) -> None:
        site = urlsplit(settings.effective_site_url).hostname
        names = (site, settings.host, *settings.allowed_hosts)
        self._names = frozenset(_bare(name) for name in names if name)

    def require(self, request: web.Request) -> None:
        """Raise MisdirectedRequest for a name that is not served, by the Host header.

        HTTP/1.0 may leave the header out: no browser speaks it. HTTP/1.1 may not (RFC 9112,
        section 3.2): InvalidRequest.
        """
        given = request.headers.get("host")
        if given is None:
            if request.version >= HttpVersion11:
                raise InvalidRequest("The header host is missing. HTTP/1.1 needs one.")
            return
        match = _HOST.fullmatch(given)
        name = _bare(match[1]) if match else given
        if name not in self._names and not is_loopback_name(name):
            raise MisdirectedRequest(
                f"Nothing is served here for the host {given[:_SHOWN]!r}. Use the address under"
                " which the service is published. Its operator adds names to allowed_hosts.",
                details={"received": given[:_SHOWN]},
            )


def _bare(name: str) -> str:
    return name.strip("[]").rstrip(".").lower()
