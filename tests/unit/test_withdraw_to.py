"""``inventory.withdraw_to``: the addresses that withdrawals may pay."""

from __future__ import annotations

import pytest

from rpcsvc.domain.addresses import MoneroNetwork, evm_checksum
from rpcsvc.errors import SettingsError
from rpcsvc.orders.withdrawals import read_allow_list
from rpcsvc.settings import Settings, load_settings
from rpcsvc.settings_onchain import read_chains
from tests.sandbox import EVM, MONERO

OTHER = "0x" + "0b" * 20
CHAINS = read_chains(None)


def settings(text: str) -> Settings:
    environ = {"RPCSVC_INVENTORY__WITHDRAW_TO": text}
    return load_settings(config_file=None, environ=environ, flags={}).settings


def read(text: str) -> dict[str, tuple[str, ...]]:
    given = settings(text).inventory.withdraw_to
    return read_allow_list(given, CHAINS, frozenset({MoneroNetwork.MAINNET}))


def test_withdraw_to_gives_addresses_by_network() -> None:
    found = read(f"arbitrum={EVM.lower()},Monero={MONERO},arbitrum={OTHER},arbitrum={EVM}")
    assert found == {"arbitrum": (EVM, evm_checksum(OTHER)), "monero": (MONERO,)}
    assert read("") == {}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (f"nowhere={EVM}", "received 'nowhere'; allowed: monero, "),
        (f"arbitrum={MONERO}", "arbitrum: .*Monero address where an EVM address is needed"),
        (f"monero={EVM}", "monero: "),
        ("arbitrum=0x12", "arbitrum: .*characters"),
        (f"arbitrum={CHAINS.resolve('arbitrum').usdc_contract}", "arbitrum: "),
    ],
)
def test_withdraw_to_without_an_address_is_refused_at_start(text: str, problem: str) -> None:
    with pytest.raises(SettingsError, match=f"inventory.withdraw_to: {problem}"):
        read(text)


def test_withdraw_to_of_another_monero_network_is_refused() -> None:
    given = settings(f"monero={MONERO}").inventory.withdraw_to
    with pytest.raises(SettingsError, match="is for mainnet"):
        read_allow_list(given, CHAINS, frozenset({MoneroNetwork.STAGENET}))


@pytest.mark.parametrize("text", [EVM, "arbitrum=", "arbitrum=a b"])
def test_withdraw_to_is_pairs(text: str) -> None:
    with pytest.raises(SettingsError, match="withdraw_to"):
        settings(text)
