"""URLs as they may be shown."""

from __future__ import annotations

import re
from typing import Final

_USERINFO: Final = re.compile(r"//\S*@")


def without_userinfo(text: str) -> str:
    """The text, with no user name or password in the URLs that it holds."""
    return _USERINFO.sub("//********@", text)
