"""Chains: the configured ones, by every name that callers may use, and no others."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcsvc.domain.chains import ChainRegistry, load_chains
from rpcsvc.errors import InputError, InvalidInput, UnsupportedChain

TOML = (Path(__file__).parent.parent.parent / "config" / "chains.toml").read_text()


@pytest.fixture(scope="module")
def chains() -> ChainRegistry:
    return load_chains(TOML)


def test_the_six_chains_are_there_with_their_numbers(chains: ChainRegistry) -> None:
    assert {chain.name: chain.chain_id for chain in chains.all()} == {
        "arbitrum": 42161,
        "ethereum": 1,
        "base": 8453,
        "optimism": 10,
        "polygon": 137,
        "avalanche": 43114,
    }


@pytest.mark.parametrize("value", ["arbitrum", "Arbitrum", "ARB", "arbitrum-one", 42161, "42161"])
def test_a_chain_has_many_names(chains: ChainRegistry, value: object) -> None:
    assert chains.resolve(value).chain_id == 42161


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        ("arbitrun", "arbitrum"),
        ("optimsm", "optimism"),
        (0, "always Monero"),
        ("monero", "always Monero"),
        (5, "Send one of: arbitrum"),
        ("\uff14\uff12161", "Send one of"),
        ("9" * 30, "Send one of"),
    ],
)
def test_an_unknown_chain_is_told_what_there_is(
    chains: ChainRegistry, value: object, hint: str
) -> None:
    with pytest.raises(UnsupportedChain, match=hint):
        chains.resolve(value)


@pytest.mark.parametrize("value", [True, 1.0, None, [], {}])
def test_a_chain_is_named_by_a_string_or_a_whole_number(
    chains: ChainRegistry, value: object
) -> None:
    with pytest.raises(InvalidInput):
        chains.resolve(value)


@given(st.one_of(st.text(max_size=60), st.integers()))
def test_any_other_value_is_an_input_error(value: object) -> None:
    registry = load_chains(TOML)
    try:
        chain = registry.resolve(value)
    except InputError:
        return
    assert chain in registry.all()


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        ('native_token = "ETH"', "", "native_token is missing"),
        ("confirmations = 20", "confirmations = 20\nextra = 1", "extra is not known"),
        ("chain_id = 42161", 'chain_id = "42161"', "chain_id must be a int"),
        ("chain_id = 10\n", "chain_id = 1\n", "both claim 1"),
        ('aliases = ["eth",', 'aliases = ["arb",', "both claim 'arb'"),
        ("0xaf88d065e77c8cC2239327C5EDb3A432268e5831",
         "0xAF88d065e77c8cC2239327C5EDb3A432268e5831", "EIP-55"),
        ("[chains.arbitrum]", "[other]\n[chains.arbitrum]", "nothing else"),
    ],
)  # fmt: skip
def test_a_wrong_file_is_refused_with_the_place(before: str, after: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        load_chains(TOML.replace(before, after, 1))
