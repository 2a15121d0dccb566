"""The shared text of queries as SQLite takes it.

``:name`` is a value and ``IN :name`` a list of values; each text is compiled once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from operator import itemgetter
from typing import Any, Final, NamedTuple

import orjson

MAX_ROWS = 64

_PLACE: Final = re.compile(r"(?P<many>\bIN )?:(?P<name>[a-z]\w*)")
_INSERT: Final = re.compile(
    r"(?P<head>INSERT INTO .+? VALUES )(?P<row>\(.+?\))(?P<tail>(?: ON CONFLICT .+)?)", re.DOTALL
)


class Compiled(NamedTuple):
    """A text with ``?``, and how its values are put in order.

    ``insert``: of an INSERT of given values, what is before its row, the row, and what is after.
    """

    text: str
    bind: Callable[[Mapping[str, Any]], Sequence[Any]]
    insert: tuple[str, str, str] | None


@lru_cache(maxsize=1024)
def compiled(sql: str) -> Compiled:
    """The text as SQLite takes it. ``bind`` raises KeyError for a value that is not given."""
    places = [(found["name"], found["many"] is not None) for found in _PLACE.finditer(sql)]
    text = _PLACE.sub(_mark, sql)
    found = _INSERT.fullmatch(text)
    return Compiled(
        text,
        _binder(places),
        None if found is None else (found["head"], found["row"], found["tail"]),
    )


def inserts(insert: tuple[str, str, str], count: int) -> Iterator[tuple[str, int, int]]:
    """Texts that insert ``count`` rows, each with the number of its first row and of its rows.

    Sizes are powers of two: few texts to prepare.
    """
    start = 0
    while start < count:
        size = min(MAX_ROWS, 1 << ((count - start).bit_length() - 1))
        yield _of_rows(insert, size), start, size
        start += size


@lru_cache(maxsize=512)
def _of_rows(insert: tuple[str, str, str], size: int) -> str:
    head, row, tail = insert
    return head + ", ".join([row] * size) + tail


def _mark(found: re.Match[str]) -> str:
    return "?" if found["many"] is None else "IN (SELECT value FROM json_each(?))"


def _binder(places: list[tuple[str, bool]]) -> Callable[[Mapping[str, Any]], Sequence[Any]]:
    names = [name for name, _ in places]
    if any(many for _, many in places):
        return lambda values: [
            orjson.dumps(list(values[name])).decode() if many else values[name]
            for name, many in places
        ]
    if len(names) > 1:
        return itemgetter(*names)
    return lambda values: [values[name] for name in names]
