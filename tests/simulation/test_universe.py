"""Universes under a seed: kept seeds hold, the same seed gives the same trace, and checks bite."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path

import pytest

from tests.simulation.cuts import SCENARIOS, CutUniverse, cut
from tests.simulation.runs import CutShort, run, run_made, runs_made
from tests.simulation.universe import Faults, Universe

KILLS = Faults(kill=3e-4, pause=1e-4, away=5e-5, payment=0.3, delay_ms=5)


@pytest.mark.parametrize("engine", ["sandbox", "onchain"])
def test_one_seed_gives_one_trace(engine: str) -> None:
    first, second = (run(21, 1, engine=engine) for _ in range(2))
    assert first.trace == second.trace


def test_two_seeds_give_two_traces() -> None:
    assert run(21, 0).trace != run(5, 0).trace


@pytest.mark.parametrize(
    ("seed", "people"),
    [
        # Deposits are taken back by deep branches, one after its payout: the loss is told.
        (34, "kills cheats losses withdrawals kept"),
        # The operator restores a copy, withdraws and rotates keys, and people verify and sign.
        (5, "kills restores rotations withdrawals signed http"),
        # The database fails over below the replicas, and payees are banned.
        (21, "kills failovers bans cheats withdrawals http"),
        # Monero nodes that lack blocks answer alone, and deposits are robbed.
        (40, "kills late robberies"),
        # There are two EVM chains: one hangs, and people pay on the wrong one.
        (15, "hangs misdirected reorganisations signed http"),
    ],
)
def test_onchain_money_is_conserved_under_faults(seed: int, people: str) -> None:
    outcome = run(seed, 6, engine="onchain")
    assert outcome.violations == []
    assert [name for name in people.split() if not outcome.counts[name]] == []


def test_money_is_conserved_under_kills() -> None:
    outcome = run(12, 15, KILLS)
    assert outcome.violations == []
    assert outcome.counts["kills"] > 0
    assert outcome.orders == 15


@pytest.mark.parametrize("effects", [(), (45, 60)])
def test_scenario_ends_well_wherever_it_is_cut(effects: tuple[int, ...]) -> None:
    outcome = cut("payout-of-usdc", effects)
    assert outcome.violations == []
    assert outcome.counts["kills"] == len(effects)


def test_forks_run_as_universes_of_their_own() -> None:
    scenario = SCENARIOS["payout-of-usdc"]
    outcomes = list(runs_made([partial(CutUniverse, scenario=scenario, forks=(20, 45, 70))], 1))
    assert [each.struck for each in outcomes] == [(20,), (45,), (70,), ()]
    alone = [cut("payout-of-usdc", each.struck) for each in outcomes]
    assert [each.trace for each in outcomes] == [each.trace for each in alone]


def test_restored_copy_pays_nothing_again() -> None:
    outcome = cut("restored-withdrawal", [10])
    assert outcome.violations == []


def test_fail_over_to_a_late_standby_pays_nothing_again() -> None:
    outcome = cut("fail-over", [22])
    assert outcome.violations == []
    assert outcome.counts["failovers"] == 1


@pytest.mark.parametrize(
    ("scenario", "effect", "closed"),
    [
        ("lost-inputs", 60, "unproven"),
        pytest.param("lost-input", 60, "rivals", marks=pytest.mark.slow),
    ],
)
def test_payout_that_lost_its_inputs_is_closed(scenario: str, effect: int, closed: str) -> None:
    outcome = cut(scenario, [effect])
    assert outcome.violations == []
    assert outcome.counts[closed] > 0


@pytest.mark.slow
def test_network_that_hangs_does_not_hold_up_the_other_one() -> None:
    outcome = cut("hung-network", [1])
    assert outcome.violations == []


@pytest.mark.slow
def test_resumed_payouts_wait_for_a_scan_of_their_deposits() -> None:
    outcome = cut("resumed", [60])
    assert outcome.violations == []
    assert outcome.counts["robberies"] > 0


def never_made(_folder: Path) -> Universe:
    signal.pause()
    raise AssertionError("there was no signal")


def test_run_that_is_not_over_in_time_says_nothing() -> None:
    with pytest.raises(CutShort):
        run_made(never_made, 1, is_over=lambda: True)
