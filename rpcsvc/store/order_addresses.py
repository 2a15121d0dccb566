"""Finding the order that has a deposit address, by an index on how addresses begin and end.

What does not live here: why the index is so narrow (migrations 0003 and 0019).
"""

from __future__ import annotations

from typing import Final

from rpcsvc.store.database import Tables

# How much of each end of an address the index orders_by_address_ends holds.
_END: Final = 9


def _ends(column: str) -> str:
    """What the index holds of an address in a column, as SQL: to the letter, or it is not used."""
    return f"substr({column}, 1, {_END}) || substr({column}, -{_END})"


_SELECT: Final = (
    "SELECT order_id, deposit_network, deposit_address FROM orders"  # noqa: S608 - constants
    f" WHERE {_ends('deposit_address')} = ?"
)


def order_given(database: Tables, address: str) -> tuple[str, str] | None:
    """The order that has an address, and its deposit network. Raises errors.Unavailable."""
    row = database.read_one(_SELECT, (address[:_END] + address[-_END:],))
    # Not in the query: SQLite would put the address into substr() as well, and pass the index by.
    return (row[0], row[1]) if row is not None and row[2] == address else None


def order_has(column: str) -> str:
    """The condition that the order ``o`` has the address in a column of another table.

    Letter case counts, whatever the collation of that column.
    """
    return f"{_ends('o.deposit_address')} = {_ends(column)} AND o.deposit_address = {column}"
