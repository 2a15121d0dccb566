"""The published rates of the last day as a small line chart: coordinates and a caption, no SVG."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from rpcsvc.domain.money import USDC, format_units
from rpcsvc.orders.ports.rates import RateRow

SPAN_MS: Final = 24 * 3_600_000
STEP_MS: Final = 10 * 60_000
WIDTH: Final = 960
HEIGHT: Final = 160
_MARGIN: Final = 8


class RateChart(NamedTuple):
    """The ``path`` of an SVG that is WIDTH wide and HEIGHT high, and its extremes in USDC."""

    path: str
    least: str
    most: str
    width: int = WIDTH
    height: int = HEIGHT


def rate_chart(rows: Sequence[RateRow]) -> RateChart | None:
    """A chart of rows that are one step apart, oldest first; None for fewer than two.

    Its right edge is now. The line is broken where a step has no rate.
    """
    if len(rows) < 2:
        return None
    rates = [row.usdc_per_xmr for row in rows]
    least, most = min(rates), max(rates)
    path, before = [], None
    for row in rows:
        x = WIDTH - min(max(row.age_ms, 0), SPAN_MS) * WIDTH // SPAN_MS
        is_next = before is not None and row.at - before < 2 * STEP_MS
        # A line of no length is drawn as a dot, so a step between two breaks is seen as well.
        path.append(f"L{x} {_y(row, least, most)}" if is_next else f"M{x} {_y(row, least, most)}h0")
        before = row.at
    return RateChart("".join(path), format_units(least, USDC), format_units(most, USDC))


def _y(row: RateRow, least: int, most: int) -> int:
    if least == most:
        return HEIGHT // 2
    above = (row.usdc_per_xmr - least) * (HEIGHT - 2 * _MARGIN) // (most - least)
    return HEIGHT - _MARGIN - above
