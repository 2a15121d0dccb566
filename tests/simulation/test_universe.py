"""Universes under a seed: kept seeds hold, the same seed gives the same trace, and checks bite."""

from __future__ import annotations

import pytest

from tests.simulation.cuts import cut
from tests.simulation.runs import run
from tests.simulation.universe import Faults

KILLS = Faults(kill=3e-4, pause=1e-4, away=5e-5, payment=0.3, delay_ms=5)


@pytest.mark.parametrize("engine", ["sandbox", "onchain"])
def test_one_seed_gives_one_trace(engine: str) -> None:
    first, second = (run(21, 3, engine=engine) for _ in range(2))
    assert first.trace == second.trace
    assert first.trace != run(5, 2, engine=engine).trace


@pytest.mark.parametrize(
    ("seed", "people"),
    [
        # Deposits taken back by deep branches while the replicas were down.
        (23, ["kills", "reorganisations", "robberies", "messages", "events"]),
        # The operator pauses and withdraws, and payees are banned; somebody pays by signing.
        (41, ["kills", "daemons", "drills", "withdrawals", "bans", "signed"]),
    ],
)
def test_onchain_money_is_conserved_under_faults(seed: int, people: list[str]) -> None:
    outcome = run(seed, 10, engine="onchain")
    assert outcome.violations == []
    assert [name for name in people if not outcome.counts[name]] == []


def test_money_is_conserved_under_kills() -> None:
    outcome = run(12, 40, KILLS)
    assert outcome.violations == []
    assert outcome.counts["kills"] > 0
    assert outcome.orders == 40


@pytest.mark.parametrize("effects", [(), (30,), (45, 60)])
def test_scenario_ends_well_wherever_it_is_cut(effects: tuple[int, ...]) -> None:
    outcome = cut("payout-of-usdc", effects)
    assert outcome.violations == []
    assert outcome.counts["kills"] == len(effects)
