"""The checker of what clients saw: it finds what no correct service can have answered."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.e2e.histories import SeenOrder, violations


@st.composite
def valid_histories(draw: st.DrawFn) -> list[SeenOrder]:
    """Calls of one order, each taking effect at a moment between its begin and its end."""
    moments = draw(st.lists(st.integers(0, 1000), min_size=1, max_size=12))
    seen, version = [], 0
    for moment in sorted(moments):
        version += draw(st.integers(0, 2))
        began, ended = (draw(st.integers(0, 50)) for _ in range(2))
        is_create = version > 0 and draw(st.booleans())
        shown = None if is_create else version
        seen.append(SeenOrder("key", "ord", shown, moment - began, moment + ended))
    return draw(st.permutations(seen))


@given(valid_histories())
def test_history_of_a_correct_service_has_no_violation(history: list[SeenOrder]) -> None:
    assert violations(history) == []


@given(valid_histories(), st.integers(1, 9))
def test_answer_that_goes_back_is_a_violation(history: list[SeenOrder], by: int) -> None:
    last = max(each.ended for each in history)
    newest = max(1 if each.version is None else each.version for each in history)
    stale = SeenOrder("key", "ord", newest - by, last + 1, last + 2)
    assert violations([*history, stale]) != []


@pytest.mark.parametrize(
    ("other", "is_wrong"),
    [
        (SeenOrder("key", "ord", 1, 5, 6), False),
        (SeenOrder("key", "ord", None, 5, 6), False),
        (SeenOrder("key", "another", 1, 5, 6), True),
        (SeenOrder("another", "ord", 1, 5, 6), True),
        (SeenOrder("key", "ord", 0, 5, 6), True),
        (SeenOrder("key", "ord", 0, 3, 6), False),
        (SeenOrder("another", "another", 0, 5, 6), False),
    ],
)
def test_key_and_order_belong_together(other: SeenOrder, *, is_wrong: bool) -> None:
    assert bool(violations([SeenOrder("key", "ord", None, 1, 4), other])) == is_wrong
