"""docs/operate/economics.md: the bound holds on random price paths, the figures are current."""

from __future__ import annotations

import pytest

from tools.economics import BREAK_BPS, ROOT, SPREAD_BPS, Played, bound, figures, plot, with_figures


@pytest.fixture(scope="module")
def played() -> list[Played]:
    return figures()


def test_no_order_loses_more_than_the_bound(played: list[Played]) -> None:
    for each in played:
        assert each.with_lock <= bound(BREAK_BPS, each.lag, SPREAD_BPS)


def test_paths_cost_more_without_the_lock_and_its_break(played: list[Played]) -> None:
    """Otherwise the paths would not test the lock."""
    assert max(each.with_lock_of_window for each in played) > 5 * max(
        each.with_lock for each in played
    )


def test_the_page_shows_the_figures_of_the_script(played: list[Played]) -> None:
    """If it fails, run python -m tools.economics."""
    page = (ROOT / "docs" / "operate" / "economics.md").read_text()
    assert page == with_figures(page, played)
    assert (ROOT / "docs" / "operate" / "economics.svg").read_text() == plot(played)
