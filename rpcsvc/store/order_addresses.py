"""Finding the order that has a deposit address, by an index on how addresses begin and end.

What does not live here: why the index is so narrow (migrations 0003 and 0019).
"""

from __future__ import annotations

from typing import Final

from rpcsvc.store.database import Tables

# How much of each end of an address the index orders_by_address_ends holds.
_END: Final = 9


_SELECT: Final = (
    "SELECT order_id, deposit_network, deposit_address FROM orders WHERE deposit_address_ends = ?"
)


def order_given(database: Tables, address: str) -> tuple[str, str] | None:
    """The order that has an address, and its deposit network. Raises errors.Unavailable."""
    row = database.read_one(_SELECT, (address[:_END] + address[-_END:],))
    # Not in the query: SQLite would put the address into substr() as well, and pass the index by.
    return (row[0], row[1]) if row is not None and row[2] == address else None


def order_has(table: str) -> str:
    """The condition that the order ``o`` has the address of a row of another table."""
    return f"o.deposit_address_ends = {table}.address_ends AND o.deposit_address = {table}.address"
