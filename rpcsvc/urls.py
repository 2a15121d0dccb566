"""URLs as they may be shown, and hosts that are this machine."""

from __future__ import annotations

import ipaddress
import re
from functools import lru_cache
from typing import Final

# Callers repeat few names.
_HOSTS_KEPT: Final = 64
_WORD: Final = re.compile(r"\S+")


@lru_cache(maxsize=_HOSTS_KEPT)
def is_loopback(host: str) -> bool:
    """Return whether a host name or address is this machine's: localhost, 127.0.0.0/8, ::1."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def without_userinfo(text: str) -> str:
    """Return the text without the user names and passwords of the URLs in it."""
    return _WORD.sub(_masked, text)


def _masked(word: re.Match[str]) -> str:
    head, slashes, rest = word[0].partition("//")
    return f"{head}//********@{rest.rpartition('@')[2]}" if slashes and "@" in rest else word[0]
