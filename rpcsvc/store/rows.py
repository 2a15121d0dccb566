"""Rows as records, by the records' own declarations: a field is the column of its name.

A value that is not of its field's type is refused: no text becomes a number, and no number a text.
"""

from __future__ import annotations

from functools import cache
from typing import Any, Final, TypeVar

from msgspec import Struct, convert, to_builtins
from msgspec.structs import fields

from rpcsvc.store.database import Row

T = TypeVar("T", bound=Struct)

# Databases have no type for these.
_BOOLEANS: Final = {0: False, 1: True}


def from_row(kind: type[T], row: Row, **known: Any) -> T:
    """Return the record of a row.

    ``known`` are fields that have another name than their column, or none. Columns that are no
    field are ignored. Raises msgspec.ValidationError for a value of another type than its field.
    """
    values = fields_of(row)
    values |= known
    for name in _booleans_of(kind):
        if name in values:
            values[name] = _BOOLEANS.get(values[name], values[name])
    return convert(values, kind)


def to_row(item: Struct, **known: Any) -> dict[str, Any]:
    """Return the columns of a record: enumerations by value. ``known`` are columns that are no
    field, or have another form than theirs.
    """
    values: dict[str, Any] = to_builtins(item, builtin_types=(bytes,))
    values |= known
    return values


def fields_of(row: Row) -> dict[str, Any]:
    """Return a row as a dictionary: faster than reading many columns one by one."""
    if type(row) is dict:
        return row.copy()
    return dict(zip(row.keys(), row, strict=True))


@cache
def _booleans_of(kind: type[Struct]) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.type is bool)
