"""Usage errors for words that no command takes, with the nearest that one does."""

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


def unknown_choice(word: str, known: Sequence[str], program: str) -> str:
    """A usage error about a ``word`` in whose place one of ``known`` is needed."""
    near = difflib.get_close_matches(word, known, n=3)
    hint = f" Did you mean {_one_of(near)}?" if near else ""
    return f"there is no {word!r}.{hint} {program} --help lists all"


def _hint(option: str, known: list[str]) -> str:
    if option == _KEY:
        return f"Only calls that create an order take {_KEY}."
    # A short form says which one is meant; a likeness only guesses.
    begun = [name for name in known if name.startswith(option)]
    near = begun or difflib.get_close_matches(option, known, n=1)
    return f"Did you mean {_one_of(near)}?" if near else ""


def _one_of(names: Sequence[str]) -> str:
    *others, last = names
    return f"{', '.join(others)} or {last}" if others else last
