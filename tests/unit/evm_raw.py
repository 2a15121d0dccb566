"""Signed EVM transactions."""

from __future__ import annotations

from typing import Any

from rpcsvc.domain import usdc
from rpcsvc.settlement.onchain.evm.keys import EvmSigner, TransactionPlan
from tests.unit.evm_chain import TOKEN, USER

GWEI = 10**9
HOT = EvmSigner(b"\x01" * 32)
STRANGER = EvmSigner(b"\x02" * 32)


def signed(by: EvmSigner = HOT, nonce: int = 4, fee: int = 5, **more: Any) -> dict[str, Any]:
    """A transaction that calls the token, in the JSON form of a node."""
    plan = TransactionPlan(
        chain_id=42161, nonce=nonce, to=more.pop("to", TOKEN), gas=60_000, max_fee=fee * GWEI,
        tip=fee * GWEI // 10, data=usdc.transfer(USER, 50), value=more.pop("value", 0),
    )  # fmt: skip
    made = by._account.sign_transaction(
        {"type": 2, "chainId": plan.chain_id, "nonce": plan.nonce, "to": plan.to, "gas": plan.gas,
         "maxFeePerGas": plan.max_fee, "maxPriorityFeePerGas": plan.tip, "data": plan.data,
         "value": plan.value}
    )  # fmt: skip
    return {
        "hash": by.sign(plan).txid, "type": "0x2", "chainId": hex(plan.chain_id),
        "nonce": hex(plan.nonce), "from": by.address, "to": plan.to.lower(), "gas": hex(plan.gas),
        "maxFeePerGas": hex(plan.max_fee), "maxPriorityFeePerGas": hex(plan.tip),
        "value": hex(plan.value), "input": "0x" + plan.data.hex(), "accessList": [],
        "yParity": hex(made.v), "r": hex(made.r), "s": hex(made.s),
    }  # fmt: skip
