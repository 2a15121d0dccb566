"""The adapters' options from the settings of the engine onchain."""

from __future__ import annotations

from typing import Any

import pytest

from rpcsvc.domain.chains import load_chains
from rpcsvc.settings import SettingsError
from rpcsvc.settings_onchain import OnchainSettings, chains_toml
from rpcsvc.settlement.onchain.evm.records import EvmNetwork
from rpcsvc.settlement.onchain.thresholds import DepthTag, Threshold
from rpcsvc.settlement.onchain.wiring import (
    evm_nodes,
    monero_options,
    served_chains,
)


def test_the_pool_is_as_large_as_the_settings_say() -> None:
    settings = OnchainSettings(xmr_addresses=2_000)
    xmr = monero_options(settings)
    assert (xmr.pool_target, xmr.pool_low, xmr.reserve) == (2_000, 1_500, 500)


@pytest.mark.parametrize("addresses", [64, 65, 256, 100_000])
def test_reserved_addresses_never_exceed_the_pool(addresses: int) -> None:
    xmr = monero_options(OnchainSettings(xmr_addresses=addresses))
    assert 0 < xmr.reserve <= xmr.pool_target == addresses
    assert 0 < xmr.pool_low <= xmr.pool_target


def test_default_pool_serves_a_burst_of_a_hundred_orders() -> None:
    assert monero_options(OnchainSettings()).reserve // 2 >= 100


@pytest.mark.parametrize(("settled", "failed"), [(1, 30), (10, 30), (30, 30), (31, 31), (200, 200)])
def test_xmr_payout_fails_no_shallower_than_it_settles(settled: int, failed: int) -> None:
    """Otherwise payout and refund could both be paid if the spender of its input is reorged out."""
    options = monero_options(OnchainSettings(xmr_settled_after=settled))
    assert (options.settled_after, options.failed_after) == (settled, failed)


def test_network_uses_the_oracle_of_its_chain_or_none() -> None:
    nodes = ("arbitrum=http://127.0.0.1:1", "base=http://127.0.0.1:2")
    settings = OnchainSettings(nodes=nodes)
    chains = load_chains(chains_toml(None))
    made = evm_nodes(settings, served_chains(settings, chains))
    assert {node.network.name: node.network.l1_fee_oracle for node in made} == {
        "arbitrum": None,
        "base": "0x420000000000000000000000000000000000000F",
    }


@pytest.mark.parametrize("monero", ["mainnet", "stagenet", "testnet", "regtest"])
def test_usdc_is_of_test_networks_where_the_xmr_is(monero: Any) -> None:
    """Otherwise real USDC could be paid for XMR that is worth nothing."""
    settings = OnchainSettings(monero_network=monero, nodes=("arbitrum=http://127.0.0.1:1",))
    chains = load_chains(chains_toml(None))
    network = evm_nodes(settings, served_chains(settings, chains))[0].network
    has_test_networks = monero in ("stagenet", "testnet")
    chain = chains.resolve("arbitrum")
    assert network.name == "arbitrum"
    assert (network.chain_id, network.token) == (
        (chain.test_chain_id, chain.test_usdc_contract)
        if has_test_networks
        else (chain.chain_id, chain.usdc_contract)
    )
    assert settings.has_test_networks is has_test_networks


@pytest.mark.parametrize("name", ["etherum", "Ethereum", "eth"])
def test_finality_for_what_is_no_chain_is_refused_not_left_out(name: str) -> None:
    chains = load_chains(chains_toml(None))
    nodes = ("ethereum=http://127.0.0.1:1",)
    given = ("arbitrum=0=20", f"{name}=0=finalized")
    problem = f"onchain.usdc_confirmations: received {name}; .*ethereum"
    with pytest.raises(SettingsError, match=problem):
        served_chains(OnchainSettings(nodes=nodes, usdc_confirmations=given), chains)
    given = ("arbitrum=0=20", "ethereum=0=finalized")
    made = served_chains(OnchainSettings(nodes=nodes, usdc_confirmations=given), chains)
    assert [chain.name for chain in made.all()] == ["ethereum"]


_WAITED = {
    "arbitrum": 20, "ethereum": 12, "base": 20, "optimism": 20, "polygon": 64, "avalanche": 12,
}  # fmt: skip


def network(name: str, *given: str) -> EvmNetwork:
    """A network of the table of chains that is shipped, with ``usdc_confirmations``."""
    nodes = (f"{name}=http://127.0.0.1:1",)
    settings = OnchainSettings(nodes=nodes, usdc_confirmations=given)
    chains = load_chains(chains_toml(None))
    return evm_nodes(settings, served_chains(settings, chains))[0].network


def test_usdc_confirmations_replace_those_of_the_chain_alone() -> None:
    given = ("arbitrum=0=2", "arbitrum=900.5=safe", "base=0=7")
    assert network("arbitrum", *given).thresholds == (
        Threshold(0, 2),
        Threshold(900_500_000, DepthTag.SAFE),
    )
    assert network("base", *given).thresholds == (Threshold(0, 7),)
    assert network("polygon", *given).thresholds == (Threshold(0, 64),)


@pytest.mark.parametrize("bounds", [(), ("all=500",), ("each=500",), ("all=9", "base=9", "each=0")])
def test_without_a_bound_only_final_deposits_count(bounds: tuple[str, ...]) -> None:
    """The quoted time is then that of finality, too."""
    nodes = ("arbitrum=http://127.0.0.1:1",)
    settings = OnchainSettings(nodes=nodes, unfinal_usd=bounds)
    served = served_chains(settings, load_chains(chains_toml(None)))
    (node,) = evm_nodes(settings, served)
    assert node.network.thresholds == (Threshold(0, 20),)
    assert monero_options(settings).thresholds == (Threshold(0, 20),)


def test_bound_on_what_is_no_network_is_refused() -> None:
    nodes = ("arbitrum=http://127.0.0.1:1",)
    settings = OnchainSettings(nodes=nodes, unfinal_usd=("all=9", "arbitrun=9"))
    with pytest.raises(SettingsError, match=r"onchain.unfinal_usd: received arbitrun; .*monero"):
        served_chains(settings, load_chains(chains_toml(None)))


def test_shipped_tiers_end_with_what_was_always_waited_for() -> None:
    given = {name: network(name).thresholds for name in _WAITED}
    assert {name: tiers[-1].depth for name, tiers in given.items()} == _WAITED
    assert all(tiers[-1].units <= 500 * 10**6 for tiers in given.values())


@pytest.mark.parametrize(
    ("chain", "tag"), [("polygon", "safe"), ("avalanche", "safe"), ("avalanche", "finalized")]
)
def test_tag_that_says_nothing_on_a_chain_is_refused(chain: str, tag: str) -> None:
    with pytest.raises(SettingsError, match=f"usdc_confirmations of {chain}: received '0={tag}'"):
        network(chain, f"{chain}=0={tag}")


@pytest.mark.parametrize("count", ["1_0", "\uff11\uff10", "+10", " 10", "", "1e1"])
def test_confirmations_that_are_no_plain_number_are_refused(count: str) -> None:
    with pytest.raises(SettingsError, match="xmr_confirmations"):
        monero_options(OnchainSettings(xmr_confirmations=(f"0={count}",)))
