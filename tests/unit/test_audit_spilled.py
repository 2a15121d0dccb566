"""Spilled collections hold what lists and dicts do, and nothing of it is lost in a full file."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rpcsvc.audit import spilled
from rpcsvc.audit.spilled import SpilledDict, SpilledGroups, SpilledList
from rpcsvc.store.database import BooksUnreadable

KEYS = ("a", "b", "c", "d", "")
UNITS = st.integers(-(2**80), 2**80)


@pytest.fixture(params=[1, 3, 2_000])
def in_memory(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Entries of a collection that are in memory: with 1, nearly all are in files."""
    monkeypatch.setattr(spilled, "IN_MEMORY", request.param)
    monkeypatch.setattr(spilled, "_PAGE", 2)
    return int(request.param)


# --- collections ---------------------------------------------------------------------------------

unchanged = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.usefixtures("in_memory")
@given(st.lists(UNITS | st.integers(0, 9).map(lambda at: f"cut {at}"), max_size=30))
@unchanged
def test_list_has_its_values_in_sequence(steps: list[Any]) -> None:
    values, expected = SpilledList[int](int), list[int]()
    for step in steps:
        if isinstance(step, int):
            values.append(step)
            expected.append(step)
        else:
            length = int(step.removeprefix("cut "))
            values.cut(length)
            del expected[length:]
        assert (list(values), len(values)) == (expected, len(expected))


@pytest.mark.usefixtures("in_memory")
@given(st.lists(st.tuples(st.sampled_from(KEYS), UNITS | st.none()), max_size=30))
@unchanged
def test_groups_and_dict_hold_what_was_put_into_them(steps: list[tuple[str, int | None]]) -> None:
    """None is a look-up in between, after which a file has its index."""
    groups, last = SpilledGroups[str, int](int), SpilledDict[str, int](int)
    lists, values = dict[str, list[int]](), dict[str, int]()
    for key, value in steps:
        if value is None:
            assert (groups.get(key), last.get(key)) == (lists.get(key), values.get(key))
            continue
        groups.add(key, value)
        last[key] = value
        lists.setdefault(key, []).append(value)
        values[key] = value
    assert (dict(groups.items()), dict(last.items())) == (lists, values)
    assert list(groups) == list(last) == sorted(values)
    assert (len(groups), len(last), list(last.values())) == (
        len(values), len(values), [values[key] for key in sorted(values)]
    )  # fmt: skip
    assert [key in last for key in KEYS] == [key in values for key in KEYS]


@pytest.mark.usefixtures("in_memory")
def test_numbers_as_keys_are_ascending() -> None:
    assert list(SpilledDict(None, ((at, None) for at in (10, 9, 2, 100)))) == [2, 9, 10, 100]


def _full(values: Any) -> None:
    """Leave no room in the file of a collection."""
    file = values._file
    pages = file.fetch("PRAGMA page_count")[0][0]
    file.fetch(f"PRAGMA max_page_count = {pages}")


def test_write_without_room_is_an_error_and_loses_nothing(in_memory: int) -> None:
    size = in_memory
    values = SpilledList[str](str, map(str, range(size)))
    _full(values)
    added = 0
    with pytest.raises(BooksUnreadable, match=r"database or disk is full.*TMPDIR"):
        for _ in range(10_000):
            added += 1
            values.append("x" * 1_000)
    assert len(values) == size + added
    assert list(values)[size:] == ["x" * 1_000] * added


def test_dict_without_room_keeps_what_it_has(in_memory: int) -> None:
    found = SpilledDict[str, str](str)
    for number in range(in_memory):
        found[f"{number:05}"] = "y"
    assert "none" not in found, "this makes the index"
    _full(found)
    with pytest.raises(BooksUnreadable):
        for number in range(10_000):
            found[f"more {number:05}"] = "x" * 1_000
    assert found["00000"] == "y"
    assert found[f"more {0:05}"] == "x" * 1_000
