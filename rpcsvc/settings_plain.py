"""What is known of the settings without pydantic: their error, where the data directory is, and
what is never shown of a URL.

A probe runs every few seconds, and pydantic takes longer to import than all else that a probe does.
So the few settings that a container is usually given are read here, where their form is right
beyond doubt. All else, wrong or merely rare, is left to settings.py, which alone judges it.
What does not live here: every other setting, and what a setting may hold (settings.py).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

DEFAULT_DATA_DIR: Final = Path("./var")
_DATA_DIR: Final = "RPCSVC_DATA_DIR"
_OCTET: Final = r"(?:0|[1-9][0-9]?|1[0-9][0-9])"

# Variables, and forms of their values that settings.py is sure to take: by far not all that it
# takes. None is here whose being right depends on another one.
PLAIN: Final[Mapping[str, str]] = {
    _DATA_DIR: r"[ -~]+",
    "RPCSVC_CONFIG": r"",
    "RPCSVC_URL": r"[ -~]*",
    "RPCSVC_HOST": r"[a-z0-9](?:[a-z0-9.-]{0,60}[a-z0-9])?",
    "RPCSVC_PORT": r"[1-9][0-9]{0,3}|[1-5][0-9]{4}",
    "RPCSVC_ENGINE": r"sandbox|upstream|onchain",
    "RPCSVC_SITE_URL": r"https://[a-z0-9](?:[a-z0-9.-]{0,60}[a-z0-9])?",
    "RPCSVC_TRUSTED_PROXIES": rf"{_OCTET}(?:\.{_OCTET}){{3}}",
    "RPCSVC_LOG__FORMAT": r"auto|json|console",
    "RPCSVC_LOG__LEVEL": r"debug|info|warning|error|critical",
    "AGENT_RPC_TOKEN": r"[!-+\--~]{16,1024}",  # one token, so no comma
}
# Up to the last @: a password may hold what ends the host of a URL, such as a slash.
_USERINFO: Final = re.compile(r"//\S*@")
_OURS: Final = ("RPCSVC_", "AGENT_RPC_TOKEN")


class SettingsError(Exception):
    """The settings can't be used; ``problems`` holds one line for each thing to mend."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = tuple(problems)


def without_userinfo(text: str) -> str:
    """The text, with no user name or password in the URLs that it holds."""
    return _USERINFO.sub("//********@", text)


def plain_data_dir(
    config_file: Path | None, environ: Mapping[str, str], flag: str | None
) -> Path | None:
    """The data directory, as load_settings would have it; None when that has to be asked.

    ``flag`` is what --data-dir gives.
    """
    ours = {name: text for name, text in environ.items() if name.upper().startswith(_OURS)}
    if config_file is not None or not all(map(_is_plain, ours, ours.values())):
        return None
    named = environ.get(_DATA_DIR) if flag is None else flag
    if named is None:
        return DEFAULT_DATA_DIR
    return Path(named) if _is_plain(_DATA_DIR, named) else None


def _is_plain(name: str, text: str) -> bool:
    return name in PLAIN and re.fullmatch(PLAIN[name], text) is not None
