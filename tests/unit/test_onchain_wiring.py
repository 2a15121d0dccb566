"""What the settings of the engine onchain come to in the options of its sides."""

from __future__ import annotations

import pytest

from rpcsvc.settings_onchain import OnchainSettings
from rpcsvc.settlement.onchain.wiring import evm_options, monero_options


def test_the_pools_are_as_large_as_the_settings_say() -> None:
    settings = OnchainSettings(xmr_addresses=2_000, usdc_addresses=600)
    xmr, usdc = monero_options(settings), evm_options(settings)
    assert (xmr.pool_target, xmr.pool_low, xmr.reserve) == (2_000, 1_500, 500)
    assert (usdc.pool_target, usdc.pool_low) == (600, 300)


@pytest.mark.parametrize("addresses", [64, 65, 256, 100_000])
def test_more_addresses_are_never_reserved_than_the_pool_is_made_for(addresses: int) -> None:
    settings = OnchainSettings(xmr_addresses=addresses, usdc_addresses=addresses)
    xmr, usdc = monero_options(settings), evm_options(settings)
    assert 0 < xmr.reserve <= xmr.pool_target == addresses
    assert 0 < xmr.pool_low <= xmr.pool_target
    assert 0 < usdc.pool_low <= usdc.pool_target == addresses


def test_by_default_a_burst_of_a_hundred_orders_finds_addresses_ready() -> None:
    assert monero_options(OnchainSettings()).reserve // 2 >= 100
