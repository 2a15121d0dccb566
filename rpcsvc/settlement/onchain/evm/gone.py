"""Proof that a settled USDC payout can't be mined any more.

Its nonce is spent, deep in the chain, by what did not pay it.
"""

from __future__ import annotations

from dataclasses import replace

from rpcsvc.orders.ports.wallets import Outcome
from rpcsvc.settlement.onchain.adoption import NotAdopted
from rpcsvc.settlement.onchain.evm.conditions import Conditions
from rpcsvc.settlement.onchain.evm.connection import EvmConnection
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPayment, PaymentState
from rpcsvc.settlement.onchain.evm.presence import EvmPresence


async def require_gone(connection: EvmConnection, payment: EvmPayment) -> None:
    """Raises NotAdopted when it may be mined yet; RpcFailure, ChainUnusable."""
    # What is settled is never called failed: ask of it as of one that is not.
    asked = replace(payment, state=PaymentState.PUBLISHED, inclusion=None)
    presence = EvmPresence(connection, Conditions(connection.network.name))
    verdict = (await presence.judge(asked)).verdict
    if verdict.outcome is Outcome.FAILED:
        return
    if verdict.outcome is Outcome.SETTLED:
        raise NotAdopted(f"its payment {payment.latest.txid} is on the chain: nothing is missing.")
    why = verdict.reason or f"nonce {payment.nonce} of the hot wallet is not spent yet"
    raise NotAdopted(f"it may be mined yet: {why}.")
