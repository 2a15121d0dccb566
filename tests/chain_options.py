"""The options of the chain adapters, as the settings' defaults make them, with changes."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from rpcsvc.settings_onchain import OnchainSettings
from rpcsvc.settlement.onchain import wiring
from rpcsvc.settlement.onchain.evm.records import EvmNetwork
from rpcsvc.settlement.onchain.monero.records import MoneroOptions
from rpcsvc.settlement.onchain.thresholds import Threshold


def monero_options(**changes: Any) -> MoneroOptions:
    """Return options of the XMR adapter. Raises ValueError."""
    return replace(wiring.monero_options(OnchainSettings()), **changes)


def evm_network(name: str, chain_id: int, token: str, **changes: Any) -> EvmNetwork:
    """Return a network of 12 seconds a block. Raises ValueError.

    ``confirmations``: a number of blocks, or a tag, that deposits of any amount wait for.
    """
    if (count := changes.pop("confirmations", None)) is not None:
        changes["thresholds"] = (Threshold(0, count),)
    made = EvmNetwork(
        name, chain_id, token, thresholds=(Threshold(0, 20),), settled_after=20, failed_after=60,
        block_seconds=12.0, highest_fee=5 * 10**15, gas_reserve=2 * 10**15, sweep_units=10**6,
        l1_fee_oracle=None,
    )  # fmt: skip
    return replace(made, **changes)
