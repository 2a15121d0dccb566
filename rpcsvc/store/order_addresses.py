"""Finding the order that a deposit address was given to, by the index on how addresses begin.

What does not live here: why the index is so narrow (migration 0003).
"""

from __future__ import annotations

from typing import Final

from rpcsvc.store.sqlite import Tables

# How much of an address the index orders_by_address_start holds.
_START: Final = 18
_SELECT: Final = (
    "SELECT order_id, deposit_network, deposit_address FROM orders"  # noqa: S608 - constants
    f" WHERE substr(deposit_address, 1, {_START}) = ?"
)


def order_given(database: Tables, address: str) -> tuple[str, str] | None:
    """The order that has an address, and its deposit network. Raises errors.Unavailable."""
    row = database.read_one(_SELECT, (address[:_START],))
    # Not in the query: SQLite would put the address into substr() as well, and pass the index by.
    return (row[0], row[1]) if row is not None and row[2] == address else None


def order_has(column: str) -> str:
    """The condition that the order ``o`` has the address in a column of another table.

    Letter case counts, whatever the collation of that column.
    """
    start = f"substr(o.deposit_address, 1, {_START}) = substr({column}, 1, {_START})"
    return f"{start} AND o.deposit_address = {column}"
