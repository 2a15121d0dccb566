"""Universes under a seed: kept seeds hold, the same seed gives the same trace, and checks bite."""

from __future__ import annotations

import pytest

from tests.simulation.cuts import cut
from tests.simulation.runs import run
from tests.simulation.universe import Faults

KILLS = Faults(kill=3e-4, pause=1e-4, away=5e-5, payment=0.3, delay_ms=5)


@pytest.mark.parametrize("engine", ["sandbox", "onchain"])
def test_one_seed_gives_one_trace(engine: str) -> None:
    first, second = (run(13, 5, engine=engine) for _ in range(2))
    assert first.trace == second.trace
    assert first.trace != run(14, 5, engine=engine).trace


@pytest.mark.parametrize("seed", [3, 6])
def test_onchain_money_is_conserved_under_faults(seed: int) -> None:
    outcome = run(seed, 10, engine="onchain")
    assert outcome.violations == []
    assert outcome.counts["daemons"] > 0


@pytest.mark.parametrize("seed", [3, 12, 15])
def test_money_is_conserved_under_kills(seed: int) -> None:
    outcome = run(seed, 40, KILLS)
    assert outcome.violations == []
    assert outcome.counts["kills"] > 0
    assert outcome.orders == 40


@pytest.mark.parametrize("effects", [(), (30,), (45, 60)])
def test_scenario_ends_well_wherever_it_is_cut(effects: tuple[int, ...]) -> None:
    outcome = cut("payout-of-usdc", effects)
    assert outcome.violations == []
    assert outcome.counts["kills"] == len(effects)
