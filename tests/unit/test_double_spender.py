"""A double spender on every chain: what he takes stays within the bound, and would not without it.

He orders, waits for the payout, and takes his deposits back by a reorganisation. On Monero he has a
share of the hash power, and reaches a depth with the odds of the gambler's ruin; elsewhere the
sequencer or the validators err as often as stated. Deposits are confirmed, and payouts planned, by
the service on a database; the chains and the count of what he took are the model's.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final, NamedTuple

import pytest

from rpcsvc.domain.finality import FinalityLimits
from rpcsvc.domain.pricing import ONE_XMR, Direction
from rpcsvc.settings_onchain import OnchainSettings, read_chains
from rpcsvc.settlement.onchain.thresholds import Thresholds
from rpcsvc.settlement.onchain.wiring import evm_nodes, monero_options, served_chains
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.sandbox import ManualClock
from tests.unit.early_deposits import RATE, USD, EarlyExchange, TieredChains, paid_usd
from tests.unit.orders import HOUR, NOW

ROUNDS: Final = 25
# A pool that replaced 18 blocks of Monero had about this share.
HASH_POWER: Final = 0.35
# How often a block of another chain is followed by a fault, and goes with some before it.
FAULTS: Final = 0.4
BOUND: Final = FinalityLimits(700 * USD, 200 * USD, {"monero": 80 * USD}, HOUR)
UNBOUNDED: Final = FinalityLimits(10**15, 10**15, {}, 0)


class Outcome(NamedTuple):
    """USDC units that the spender took, by network, and the orders that were paid."""

    lost: dict[str, int]
    completed: int


def shipped_tiers() -> dict[str, Thresholds]:
    """The tiers that the service has as it is shipped, with a lower one for XMR."""
    chains = read_chains(None)
    nodes = tuple(f"{chain.name}=http://127.0.0.1:1" for chain in chains.all())
    settings = OnchainSettings(nodes=nodes, xmr_confirmations=("0=1", "0.5=10", "50=20"))
    made = evm_nodes(settings, served_chains(settings, chains))
    tiers = {node.network.name: node.network.thresholds for node in made}
    return {**tiers, "monero": monero_options(settings).thresholds}


def reached(chance: random.Random, network: str, final: int) -> int:
    """The depth that the spender reorganises in a round, below finality; 0: he fails."""
    if network != "monero":
        return chance.randrange(1, final) if chance.random() < FAULTS else 0
    depth = chance.choice([1, 1, 2, 4])
    odds = (HASH_POWER / (1 - HASH_POWER)) ** depth
    return min(depth, final - 1) if chance.random() < odds else 0


async def attack(folder: Path, limits: FinalityLimits, seed: int) -> Outcome:
    """Play the spender among other payers on all chains."""
    chance, tiers = random.Random(seed), shipped_tiers()
    chains = TieredChains(tiers, dict.fromkeys(tiers, 1_000))
    clock = ManualClock(NOW)
    database = await SqliteDatabase.open(folder)
    names: list[str] = []
    try:
        exchange = EarlyExchange(database, chains, limits, clock)
        for number in range(ROUNDS):
            for network in sorted(tiers):
                name = f"{number}{network}"
                is_xmr = network == "monero"
                usd = chance.choice([20, 50, 80, 150, 300, 2_000]) * USD
                units = usd * ONE_XMR // RATE if is_xmr else usd
                direction = Direction.XMR_TO_USDC if is_xmr else Direction.USDC_TO_XMR
                chain = "arbitrum" if is_xmr else network
                order = await exchange.open(name, direction, chain, units)
                chains.pay(network, f"tx {name}", order.terms.deposit_address, units)
                names.append(name)
            await exchange.settle()
            assert sum((await exchange.store.at_risk()).values()) <= limits.total
            for network, thresholds in tiers.items():
                final = thresholds[-1].depth
                assert isinstance(final, int)
                chains.reorganise(network, reached(chance, network, final))
                chains.grow(network, chance.randrange(1, 4))
            await exchange.settle()
            clock.now += chance.randrange(2 * HOUR)
        assert await exchange.problems() == []
        lost, completed = dict.fromkeys(tiers, 0), 0
        gone = {key.txid: key.network for key, item in chains.placed.items() if item.block is None}
        for name in names:
            paid = paid_usd(await exchange.order(name))
            completed += paid > 0
            if (taken := gone.get(f"tx {name}")) is not None:
                lost[taken] += paid
    finally:
        await database.close()
    return Outcome(lost, completed)


@pytest.mark.parametrize("seed", range(3))
async def test_losses_never_pass_the_bound(tmp_path: Path, seed: int) -> None:
    outcome = await attack(tmp_path, BOUND, seed)
    assert all(
        units <= BOUND.networks.get(network, BOUND.each) for network, units in outcome.lost.items()
    )
    assert 0 < sum(outcome.lost.values()) <= BOUND.total
    assert outcome.completed > ROUNDS, "honest payers are served"


async def test_losses_would_pass_the_bound_without_it(tmp_path: Path) -> None:
    """The same spender with the same luck: the bound is what stops him."""
    outcome = await attack(tmp_path, UNBOUNDED, 0)
    early = ("arbitrum", "base", "optimism", "ethereum", "avalanche", "monero")
    bounds = {network: BOUND.networks.get(network, BOUND.each) for network in early}
    assert all(outcome.lost[network] > most for network, most in bounds.items()), outcome.lost
    assert sum(outcome.lost.values()) > BOUND.total
