"""The shared text of queries as PostgreSQL takes it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

_PLACE: Final = re.compile(r"(?P<many>\b(?:NOT )?IN )?:(?P<name>[a-z]\w*)")
# PostgreSQL takes no column as the number of rows of a subquery.
_BOUNDED: Final = re.compile(r"\b(LIMIT|OFFSET) :")
_ONE_OF: Final = {"IN ": "= ANY(${})", "NOT IN ": "<> ALL(${})"}


class Compiled(NamedTuple):
    """A text with ``$1``, the values that it takes in order, and which of them are lists.

    ``batches``: many calls can be made by one query (``batched``).
    """

    text: str
    names: tuple[str, ...]
    lists: frozenset[str]
    batches: bool

    def bind(self, values: Mapping[str, Any]) -> list[Any]:
        """The values in order. Raises KeyError for one that is not given."""
        if not self.lists:
            return [values[name] for name in self.names]
        return [list(values[n]) if n in self.lists else values[n] for n in self.names]


@lru_cache(maxsize=1024)
def compiled(sql: str) -> Compiled:
    """The text as PostgreSQL takes it: a name that comes twice is one parameter."""
    names: list[str] = []
    lists = set()

    def mark(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in names:
            names.append(name)
        place = names.index(name) + 1
        if found["many"] is None:
            return f"${place}"
        lists.add(name)
        return _ONE_OF[found["many"]].format(place)

    text = _PLACE.sub(mark, sql)
    batches = bool(names) and not lists and _BOUNDED.search(sql) is None
    return Compiled(text, tuple(names), frozenset(lists), batches)


# The column of a batched query that says which call a row is for.
CALL: Final = "call_"


@lru_cache(maxsize=1024)
def batched(text: str, types: Sequence[str]) -> str:
    """One query for many calls of ``text``, whose parameters are of these types.

    It takes an array for each parameter. Rows of one call are in the order of the query: a subquery
    with ORDER BY is run for one call after the other.
    """
    arrays = ", ".join(f"${n}::{name}[]" for n, name in enumerate(types, 1))
    columns = ", ".join(f"p{n}" for n in range(1, len(types) + 1))
    inner = re.sub(r"\$(\d+)", r"calls.p\1", text)
    return (
        f"SELECT calls.{CALL}, answers.* FROM unnest({arrays}) WITH ORDINALITY"
        f" AS calls ({columns}, {CALL}) CROSS JOIN LATERAL ({inner}) AS answers"
    )
