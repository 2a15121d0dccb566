"""Chains: only the configured ones, by every name that callers may use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rpcsvc.domain.chains import Chain, ChainRegistry, load_chains, network_of
from rpcsvc.domain.money import USDC, XMR
from rpcsvc.errors import InputError, InvalidInput, UnsupportedChain
from tests.unit.chain_tables import TOML


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
def test_unknown_chain_gets_the_list(chains: ChainRegistry, value: object, hint: str) -> None:
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
        ("chain_id = 42161", 'chain_id = "42161"', "chain_id must be a whole number"),
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


@pytest.mark.parametrize("value", ["0", "XMR", "Monero"])
def test_monero_as_a_chain_gets_the_other_side(chains: ChainRegistry, value: object) -> None:
    with pytest.raises(UnsupportedChain, match="chain is the USDC side"):
        chains.resolve(value)


def test_an_unknown_chain_is_offered_near_names_and_all_names(chains: ChainRegistry) -> None:
    with pytest.raises(UnsupportedChain) as caught:
        chains.resolve("optimsm", field="toChain")
    assert caught.value.field == "toChain"
    assert caught.value.details == {"nearest": ["optimism"]}
    assert caught.value.allowed == [chain.name for chain in chains.all()]


def test_number_too_long_for_python_is_refused_like_any_other(
    chains: ChainRegistry,
) -> None:
    with pytest.raises(UnsupportedChain, match="more than 64 bits"):
        chains.resolve(10**5000)


def test_the_usdc_contracts_are_those_that_circle_publishes(chains: ChainRegistry) -> None:
    assert {chain.name: chain.usdc_contract for chain in chains.all()} == {
        "arbitrum": "0xaf88d065e77c8cC2239327C5EDb3A432268e5831",
        "ethereum": "0xA0b86991c6218b36c1d19D4a2e9Eb0cE3606eB48",
        "base": "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913",
        "optimism": "0x0b2C639c533813f4Aa9D7837CAf62653d097Ff85",
        "polygon": "0x3c499c542cEF5E3811e1192ce70d8cC03d5c3359",
        "avalanche": "0xB97EF9Ef8734C71904D8002F8b6Bc66Dd9c48a6E",
    }


def test_usdc_is_found_on_chains_and_on_test_networks(chains: ChainRegistry) -> None:
    for chain in chains.all():
        assert chains.usdc_on(chain.chain_id) == chain.usdc_contract
        assert chains.usdc_on(chain.test_chain_id) == chain.test_usdc_contract
    assert chains.usdc_on(2) is None


def test_no_test_network_is_a_network_where_funds_are_real(chains: ChainRegistry) -> None:
    real = {chain.chain_id for chain in chains.all()}
    assert real.isdisjoint(chain.test_chain_id for chain in chains.all())
    contracts = {chain.usdc_contract.lower() for chain in chains.all()}
    assert contracts.isdisjoint(chain.test_usdc_contract.lower() for chain in chains.all())


def test_only_op_stack_chains_name_the_l1_fee_oracle(
    chains: ChainRegistry,
) -> None:
    oracles = {chain.name: chain.l1_fee_oracle for chain in chains.all()}
    assert {name: oracle for name, oracle in oracles.items() if oracle is not None} == {
        "base": "0x420000000000000000000000000000000000000F",
        "optimism": "0x420000000000000000000000000000000000000F",
    }


ARBITRUM_USDC = "0xaf88d065e77c8cC2239327C5EDb3A432268e5831"


@pytest.mark.parametrize(
    ("before", "after", "complaint"),
    [
        (ARBITRUM_USDC, "0x12", "chains.arbitrum.usdc_contract has 4 characters"),
        (ARBITRUM_USDC, "0x" + "0" * 40, "chains.arbitrum.usdc_contract is the zero address"),
        (ARBITRUM_USDC, "0x" + "zz" * 20, "chains.arbitrum.usdc_contract .* not a hex digit"),
        ('aliases = ["arb",', 'aliases = ["7",', "chains.arbitrum: .* unlike '7'"),
        ('aliases = ["arb",', 'aliases = ["",', "chains.arbitrum: .* unlike ''"),
        ('aliases = ["arb",', 'aliases = ["XMR",', "chains.arbitrum: 'XMR' is the other side"),
        ('aliases = ["arb",', 'aliases = ["BASE",', "both claim 'base'"),
        ("min_swap_usd = 10\n", "min_swap_usd = 0\n", "min_swap_usd must be a whole number above"),
        ("min_swap_usd = 10\n", "min_swap_usd = true\n", "must be a whole number above 0"),
        ("min_swap_usd = 10\n", "min_swap_usd = 1.5\n", "must be a whole number above 0"),
        ("0x420000000000000000000000000000000000000F", "", "base.l1_fee_oracle must be a string"),
        (
            '"0x420000000000000000000000000000000000000F"',
            "7",
            "base.l1_fee_oracle must be a string",
        ),
        (
            "0x420000000000000000000000000000000000000F",
            "0x420000000000000000000000000000000000000f",
            "base.l1_fee_oracle must be a checksummed",
        ),
        ("l1_fee_oracle = ", "l1_oracle = ", "base.l1_oracle is not known"),
        ("[chains.arbitrum]", "[chains]\nmoon = 1\n[chains.arbitrum]", "chains.moon must be a tab"),
        ("[chains.arbitrum]", "[chains.arbitrum", "line 12"),
    ],
)
def test_what_no_caller_could_use_or_nobody_owns_is_refused(
    before: str, after: str, complaint: str
) -> None:
    assert before in TOML
    with pytest.raises(ValueError, match=complaint):
        load_chains(TOML.replace(before, after, 1))


def test_chain_is_found_by_its_number_alone(chains: ChainRegistry) -> None:
    arbitrum = chains.resolve("arbitrum")
    assert chains.by_id(42161) is arbitrum
    assert chains.by_id(2) is None
    assert arbitrum.usdc_contract.lower() in chains.token_contracts
    assert arbitrum.test_usdc_contract.lower() in chains.token_contracts
    assert len(chains.token_contracts) == 2 * len(chains.all())


def test_asset_moves_on_its_own_network(chains: ChainRegistry) -> None:
    base = chains.resolve("base")
    assert network_of(XMR, base) == "monero"
    assert network_of(USDC, base) == "base"


@pytest.mark.parametrize("value", [True, 1.0, None])
def test_refusal_of_another_type_shows_what_came(chains: ChainRegistry, value: object) -> None:
    for field in ("chain", "toChain"):
        with pytest.raises(InvalidInput, match=f"^{field} must be a chain name") as caught:
            chains.resolve(value, field=field)
        assert (caught.value.field, caught.value.received) == (field, value)
    with pytest.raises(InvalidInput) as caught:
        chains.resolve(value)
    assert caught.value.field == "chain"


def test_unknown_chain_is_shown_short(chains: ChainRegistry) -> None:
    with pytest.raises(UnsupportedChain, match=f"^'{'z' * 40}' is not") as caught:
        chains.resolve("z" * 41)
    error = caught.value
    assert (error.field, error.received, error.details) == ("chain", "z" * 41, None)
    assert "Did you mean" not in error.message
    with pytest.raises(UnsupportedChain, match=f"^'{2**64 - 1}' is not"):
        chains.resolve(2**64 - 1)
    with pytest.raises(UnsupportedChain, match=r"^'a number of more than 64 bits' is not"):
        chains.resolve(2**64)
    with pytest.raises(UnsupportedChain, match=r"Did you mean arbitrum or arbitrum-one\?"):
        chains.resolve("ARBITRUM-")
    with pytest.raises(UnsupportedChain, match=r"chain\. Send one of: arbitrum, "):
        chains.resolve("zzz")
    with pytest.raises(UnsupportedChain) as caught:
        chains.resolve("arbitru")
    assert len(caught.value.details["nearest"]) == 2  # type: ignore[index]
    with pytest.raises(UnsupportedChain, match="toChain is the USDC side"):
        chains.resolve(0, field="toChain")


def test_chain_is_read_with_all_its_keys() -> None:
    table = f'''
[chains.moon]
display_name = "Moon"
chain_id = 7
aliases = ["luna", "Lu na"]
native_token = "MOO"
usdc_contract = "{ARBITRUM_USDC}"
min_swap_usd = 3
confirmations = 4
block_time_ms = 5
test_network = "moon-test"
test_chain_id = 8
test_usdc_contract = "{ARBITRUM_USDC}"
'''
    expected = Chain(
        name="moon", display_name="Moon", chain_id=7, aliases=("luna", "Lu na"),
        native_token="MOO", usdc_contract=ARBITRUM_USDC, min_swap_usd=3, confirmations=4,
        block_time_ms=5, test_network="moon-test", test_chain_id=8,
        test_usdc_contract=ARBITRUM_USDC,
    )  # fmt: skip
    assert load_chains(table).all() == (expected,)
    assert load_chains(table + "safe_seconds = 1\n").all()[0].safe_seconds == 1
    more = 'deposit_confirmations = ["1:5"]\nsafe_seconds = 9\nfinalized_seconds = 10\n'
    assert load_chains(table + more).all() == (
        replace(expected, deposit_confirmations=("1:5",), safe_seconds=9, finalized_seconds=10),
    )
    for key, bad, wanted in (
        ("safe_seconds", "0", "a whole number above 0, not 0"),
        ("safe_seconds", '"9"', "a whole number above 0, not '9'"),
        ("deposit_confirmations", "[1]", r"a list of strings, not \[1\]"),
        ("deposit_confirmations", '"1"', "a list of strings, not '1'"),
    ):
        with pytest.raises(ValueError, match=rf"^chains\.moon\.{key} must be {wanted}$"):
            load_chains(f"{table}{key} = {bad}\n")
    with pytest.raises(ValueError, match=r"display_name must be a string that is not empty"):
        load_chains(table.replace('"Moon"', '""'))
    with pytest.raises(ValueError, match=r"^chains\.moon\.chain_id is missing"):
        load_chains(table.replace("chain_id = 7\n", "colour = 1\n"))
    second = table.replace("moon", "mars").replace("= 7", "= 9").replace("= 8", "= 7")
    with pytest.raises(ValueError, match=r"^chains moon and mars both claim 'luna'$"):
        load_chains(table + second)


@pytest.mark.parametrize("text", ["", "x = 1", "[chains]", "chains = 1", "[chain.a]\nb = 1"])
def test_file_without_chains_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="nothing else"):
        load_chains(text)
