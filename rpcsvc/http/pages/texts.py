"""The texts of the pages: one catalogue for each language, chosen by the reader's preferences.

A catalogue is a TOML file in ``texts/``; a translation is one more file there. Every catalogue has
the keys of the English one and no others.
"""

from __future__ import annotations

import string
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

ENGLISH: Final = "en"
FOLDER: Final = Path(__file__).with_name("texts")


@dataclass(frozen=True, slots=True)
class Texts:
    """The texts of one language by key, such as ``checkout.pay_before``.

    ``dir`` is the direction of its script: ltr or rtl.
    """

    lang: str
    dir: str
    entries: Mapping[str, str]

    def say(self, key: str, **values: object) -> str:
        """One text with its blanks filled in. Raises KeyError for an unknown key or blank."""
        return self.entries[key].format(**values)


class Catalogues:
    """All languages. Raises ValueError for a catalogue that is not a translation of English."""

    def __init__(self, folder: Path = FOLDER) -> None:
        self._by_tag = {each.lang.lower(): each for each in map(_read, sorted(folder.iterdir()))}
        english = self._by_tag[ENGLISH]
        for texts in self._by_tag.values():
            _require_same(texts, english)

    def choose(self, accept_language: str) -> Texts:
        """The language that a reader likes most of those there are (RFC 9110, section 12.5.4).

        English for a reader who names none of them.
        """
        ranges = [_quality(part) for part in accept_language.lower().split(",")[:32]]
        for _, tag in sorted(ranges, key=lambda each: -each[0]):
            found = self._by_tag.get(tag) or self._by_tag.get(tag.partition("-")[0])
            if found is not None:
                return found
        return self._by_tag[ENGLISH]


def _quality(part: str) -> tuple[float, str]:
    tag, _, weight = part.strip().partition(";")
    try:
        return float(weight.strip().removeprefix("q=") or 1), tag.strip()
    except ValueError:
        return 0.0, tag.strip()


@cache
def _read(path: Path) -> Texts:
    groups = tomllib.loads(path.read_text(encoding="utf-8"))
    lang, direction = groups.pop("lang"), groups.pop("dir")
    entries = {f"{g}.{name}": text for g, texts in groups.items() for name, text in texts.items()}
    return Texts(lang, direction, entries)


def _require_same(texts: Texts, english: Texts) -> None:
    for key in texts.entries.keys() | english.entries.keys():
        ours, theirs = english.entries.get(key), texts.entries.get(key)
        if ours is None or theirs is None or _blanks(ours) != _blanks(theirs):
            raise ValueError(f"texts/{texts.lang}.toml: {key} is not as texts/en.toml has it")


def _blanks(text: str) -> set[str | None]:
    return {blank for _, blank, _, _ in string.Formatter().parse(text) if blank is not None}
