"""URLs as they may be shown."""

from __future__ import annotations

import re
from typing import Final

_WORD: Final = re.compile(r"\S+")


def without_userinfo(text: str) -> str:
    """Return the text without the user names and passwords of the URLs in it."""
    return _WORD.sub(_masked, text)


def _masked(word: re.Match[str]) -> str:
    head, slashes, rest = word[0].partition("//")
    return f"{head}//********@{rest.rpartition('@')[2]}" if slashes and "@" in rest else word[0]
