"""Which open transfers a transaction may have paid, by its amount only."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcsvc.audit.hints import MOST_AMOUNTS, MOST_PARTS, TooMany, parts_of


@given(st.lists(st.integers(1, 10**15), min_size=1, max_size=20), st.data())
def test_amounts_that_were_added_up_are_found(amounts: list[int], data: st.DataObject) -> None:
    chosen = data.draw(
        st.sets(st.sampled_from(range(len(amounts))), min_size=1, max_size=MOST_PARTS)
    )
    total = sum(amounts[index] for index in chosen)
    found = parts_of(total, amounts)
    assert found is not None
    assert sum(amounts[index] for index in found) == total
    assert len(set(found)) == len(found) <= len(chosen)


@given(st.lists(st.integers(1, 10**15).map(lambda n: n * 2), max_size=20), st.integers(0, 10**15))
def test_no_amounts_are_found_where_none_add_up(amounts: list[int], half: int) -> None:
    assert parts_of(half * 2 + 1, amounts) is None


def test_too_many_amounts_are_not_searched() -> None:
    amounts = [2 * n for n in range(1, MOST_AMOUNTS + 2)]
    assert parts_of(amounts[3] + amounts[9], amounts) is not None, "two are found among any number"
    with pytest.raises(TooMany):
        parts_of(3 * max(amounts) + 1, amounts)
