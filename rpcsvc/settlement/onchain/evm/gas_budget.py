"""The most that gas for signed authorizations may cost in 24 hours, on all EVM networks together.

It is reckoned from the payments on record, so that a restart forgets nothing. Amounts are USDC
units.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final

from rpcsvc.clock import Clock
from rpcsvc.domain.money import USDC, format_units, mul_div_ceil
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.evm.gas import CallCost
from rpcsvc.settlement.onchain.evm.ledger import EvmPaymentLedger, Purpose

_DAY_MS: Final = 86_400_000
_WEI: Final = 10**18


class GasBudget:
    """``units`` are the budget; ``coin_prices``: USDC units for a whole coin, by network.

    ``spent`` is what the last look found; None before one.
    """

    def __init__(
        self, units: int, coin_prices: Mapping[str, int], ledger: EvmPaymentLedger, clock: Clock
    ) -> None:
        self._units = units
        self._coin_prices = coin_prices
        self._ledger = ledger
        self._clock = clock
        # No receipt's fee for L1 is kept: each payment counts with what the last one may have cost.
        self._l1_fees: dict[str, int] = {}
        self.spent: int | None = None
        self._deciding = asyncio.Lock()
        self._held = 0

    async def refresh(self) -> int:
        """What the authorizations of the last 24 hours cost, or may. Raises errors.Unavailable."""
        since, units = self._clock.now_ms() - _DAY_MS, 0
        for network, price in self._coin_prices.items():
            costs = await self._ledger.gas_since(network, Purpose.AUTHORIZATION, since)
            wei = sum(costs) + len(costs) * self._l1_fees.get(network, 0)
            units += mul_div_ceil(wei, price, _WEI)
        self.spent = units
        return units

    async def require(self, network: str, cost: CallCost) -> None:
        """Raise errors.Unavailable when a call would cost more than is left."""
        async with self.spending(network, cost):
            pass

    @asynccontextmanager
    async def spending(self, network: str, cost: CallCost) -> AsyncIterator[None]:
        """Hold what a call may cost until its payment is on record.

        Raises errors.Unavailable when that is more than is left: calls that are made at the same
        moment, on any network, never pass the budget together.
        """
        self._l1_fees[network] = cost.l1_fee
        needed = mul_div_ceil(cost.gas + cost.l1_fee, self._coin_prices[network], _WEI)
        async with self._deciding:
            held = self._held  # before the look: what comes on record meanwhile counts twice
            if await self.refresh() + held + needed > self._units:
                raise Unavailable(
                    "The service pays no more gas for signed payments today. Pay the order as its"
                    " fundingInstructions say."
                )
            self._held += needed
        try:
            yield
        finally:
            self._held -= needed

    def share(self) -> float | None:
        """What is spent, as a share of the budget; None before the first look."""
        return None if self.spent is None else self.spent / self._units

    def problem(self) -> str | None:
        """That most of it is spent, for the operator; None: it is not."""
        if self.spent is None or 10 * self.spent < 9 * self._units:
            return None
        spent, units = format_units(self.spent, USDC), format_units(self._units, USDC)
        return (
            f"gas for signed payments took {spent} of the {units} USD that"
            " onchain.authorization_gas_usd allows in 24 hours"
        )
