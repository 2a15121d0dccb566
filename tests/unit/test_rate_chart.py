"""The chart of recent rates: the positions of its points, and the gaps of its line."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from rpcsvc.http.pages.front import HEIGHT, SPAN_MS, STEP_MS, WIDTH, RateChart, rate_chart
from rpcsvc.store.replicas import RateRow

NOW = 1_800_000_000_000
_POINT = re.compile(r"([ML])(-?\d+) (-?\d+)(?:h0)?")


def row(rate: int, age_ms: int) -> RateRow:
    return RateRow(rate, NOW - age_ms, age_ms, token=1)


def points(chart: RateChart | None) -> list[tuple[str, int, int]]:
    assert chart is not None
    assert _POINT.sub("", chart.path) == ""
    return [(kind, int(x), int(y)) for kind, x, y in _POINT.findall(chart.path)]


def test_fewer_than_two_rates_make_no_chart() -> None:
    assert rate_chart([]) is None
    assert rate_chart([row(165_000_000, 0)]) is None


def test_rates_rise_to_the_top_and_time_runs_to_the_right() -> None:
    chart = rate_chart([row(164_000_000, STEP_MS), row(165_500_000, 0)])
    (begins, left, low), (goes_on, right, high) = points(chart)
    assert (begins, goes_on, right) == ("M", "L", WIDTH)
    assert left < right
    assert low > high
    assert chart is not None
    assert (chart.least, chart.most) == ("164", "165.5")


def test_line_is_broken_where_nothing_was_published() -> None:
    rows = [row(165, 5 * STEP_MS), row(165, 2 * STEP_MS), row(165, STEP_MS)]
    assert [kind for kind, _, _ in points(rate_chart(rows))] == ["M", "M", "L"]


def test_rate_that_never_moves_is_a_line_in_the_middle() -> None:
    chart = rate_chart([row(165, STEP_MS), row(165, 0)])
    assert {y for _, _, y in points(chart)} == {HEIGHT // 2}


@given(
    st.lists(
        st.tuples(st.integers(1, 10**15), st.integers(-5_000, SPAN_MS)), min_size=2, max_size=9
    )
)
def test_every_point_is_within_the_chart(drawn: list[tuple[int, int]]) -> None:
    rows = [row(rate, age) for rate, age in sorted(drawn, key=lambda each: -each[1])]
    found = points(rate_chart(rows))
    assert len(found) == len(rows)
    assert all(0 <= x <= WIDTH and 0 < y < HEIGHT for _, x, y in found)
    assert [x for _, x, _ in found] == sorted(x for _, x, _ in found)
