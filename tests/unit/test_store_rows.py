"""Rows as records: strict types, booleans as integers, and fields that are no column."""

from __future__ import annotations

from collections.abc import Iterator
from sqlite3 import Row, connect

import pytest
from msgspec import Struct, ValidationError

from rpcsvc.domain.order import TransferState
from rpcsvc.store.database import from_row, to_row


class Record(Struct, frozen=True):
    """A record of each kind of column."""

    units: int
    state: TransferState
    is_dust: bool
    raw: bytes
    sender: str | None = None
    parts: tuple[int, ...] = ()


RECORD = Record(2**63 - 1, TransferState.SETTLED, True, b"\x00\xff", None, (1, 2))


@pytest.fixture(name="rows")
def _rows() -> Iterator[list[Row]]:
    database = connect(":memory:")
    database.row_factory = Row
    values = to_row(RECORD)
    columns = "SELECT :units AS units, :state AS state, :is_dust AS is_dust, :raw AS raw"
    yield database.execute(f"{columns}, :sender AS sender, 7 AS seq", values).fetchall()
    database.close()


def test_record_reads_back_as_it_was_written(rows: list[Row]) -> None:
    assert from_row(Record, rows[0], parts=(1, 2)) == RECORD


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("units", "1"), ("units", 1.5), ("units", True), ("units", None),
        ("state", "spent"), ("is_dust", 2), ("is_dust", "1"), ("raw", 1), ("sender", 1),
    ],
)  # fmt: skip
def test_row_with_a_value_of_another_type_is_refused(name: str, value: object) -> None:
    row = {**to_row(RECORD), name: value}
    with pytest.raises(ValidationError, match=name):
        from_row(Record, row)


def test_row_is_left_as_it_was() -> None:
    row = to_row(RECORD)
    from_row(Record, row, units=1)
    assert row == to_row(RECORD)


def test_to_row_prefers_known_columns() -> None:
    assert to_row(RECORD, units=1, seq=2) | {"units": RECORD.units} == to_row(RECORD) | {"seq": 2}
