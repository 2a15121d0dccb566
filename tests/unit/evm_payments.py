"""Payments of the EVM hot wallet."""

from __future__ import annotations

from rpcsvc.settlement.onchain.evm.records import Attempt, EvmPayment, EvmPaymentOrder, EvmPurpose

GWEI = 10**9
NET = "arbitrum"
HOT = "0xHot"


def attempt(txid: str, gwei: int = 5) -> Attempt:
    return Attempt(txid, f"02{txid.encode().hex()}", gwei * GWEI, gwei * GWEI // 10, 1000 + gwei)


def payment(
    name: str, nonce: int, *, purpose: EvmPurpose = EvmPurpose.TRANSFER, network: str = NET
) -> EvmPayment:
    order = EvmPaymentOrder(name, purpose, "0xUser", 7, "0xToken", b"\xa9\x05", 65_000)
    return EvmPayment(network, HOT, nonce, order, (attempt(f"{network}-{name}"),), 1000)
