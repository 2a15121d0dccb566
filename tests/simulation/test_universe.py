"""Universes under a seed: kept seeds hold, the same seed gives the same trace, and checks bite."""

from __future__ import annotations

import pytest

from tests.simulation.universe import Faults, run

KILLS = Faults(kill=3e-4, pause=1e-4, away=5e-5, payment=0.3, delay_ms=5)


def test_one_seed_gives_one_trace() -> None:
    first, second = run(13, 10), run(13, 10)
    assert first.trace == second.trace
    assert first.trace != run(14, 10).trace


@pytest.mark.parametrize("seed", [3, 12, 15])
def test_money_is_conserved_under_kills(seed: int) -> None:
    outcome = run(seed, 40, KILLS)
    assert outcome.violations == []
    assert outcome.counts["kills"] > 0
    assert outcome.orders == 40
