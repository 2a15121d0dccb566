"""What to say of an option that a command does not have: the nearest one that it has.

What does not live here: which options there are (main.py and the modules of the commands).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Final

_OPTION: Final = re.compile(r"--[a-z][a-z-]*")
_KEY: Final = "--idempotency-key"


def unknown_words(words: Sequence[str], usage: str) -> str:
    """A usage error about ``words`` that a command left over; ``usage`` shows what it takes."""
    known = list(dict.fromkeys(_OPTION.findall(usage)))
    hints = [_hint(word.partition("=")[0], known) for word in words if word.startswith("--")]
    return " ".join([f"unrecognized arguments: {' '.join(words)}.", *filter(None, hints)])


def _hint(option: str, known: list[str]) -> str:
    if option == _KEY:
        return f"Only calls that create an order take {_KEY}."
    near = difflib.get_close_matches(option, known, n=1)
    return f"Did you mean {near[0]}?" if near else ""
