"""The universe of the engine sandbox, whose chains are in the database."""

from __future__ import annotations

import random
from typing import Final

from tests.e2e.audit import differences
from tests.simulation.universe import Order, Universe, evm_address, monero_address

# What a payer sends, by direction: exact, short, below the minimum, over, far over.
PAYMENTS: Final = {
    "x2u": [None, None, None, "0.3", "0.00005", "1", "400"],
    "u2x": [None, None, None, "60", "0.01", "200", "60000"],
}


class SandboxUniverse(Universe):
    """People pay by the operations of the sandbox, which also makes payments fail."""

    chains = ("arbitrum", "base")

    def destination(self, direction: str, number: int) -> str:
        """Where a person wants to be paid."""
        return evm_address(number) if direction == "x2u" else monero_address(number)

    def refund_address(self, order: Order, attempt: int) -> str:
        """Where an orderer wants a refund."""
        own = order.number, "refund", attempt
        return monero_address(*own) if order.direction == "x2u" else evm_address(*own)

    async def pay(self, order: Order, chance: random.Random) -> None:
        """Pay, perhaps after the payout was made to fail."""
        amount = chance.choice(PAYMENTS[order.direction])
        if chance.random() < self.faults.payment:
            fault = chance.choice(
                ["payout_fails", "payout_unknown_sent", "payout_unknown_lost", "refund_fails"]
            )
            await self.call("sandbox.fault", chance, fault=fault, orderId=order.order_id)
        await self.call(
            "sandbox.fund",
            chance,
            once=True,
            orderId=order.order_id,
            **({"amount": amount} if amount else {}),
        )

    async def differences(self) -> list[str]:
        """Differences between orders and simulated chains."""
        return differences(self.server.connection)
