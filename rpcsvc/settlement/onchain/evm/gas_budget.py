"""The most that gas for signed authorizations may cost in 24 hours, on all EVM networks together.

It bounds the gas that the service gives away: of authorizations whose order does not bear the gas,
and of those that failed. Gas that an order bears is bounded by the same amount, but only while its
payment may yet fail. Both are read from the payments on record, so that a restart forgets nothing.
Amounts are USDC units.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Final, NamedTuple

from rpcsvc.clock import Clock
from rpcsvc.domain.money import USDC, format_units, mul_div_ceil
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.evm.gas import CallCost
from rpcsvc.settlement.onchain.evm.ledger import EvmPaymentLedger, PaymentState

_DAY_MS: Final = 86_400_000
_WEI: Final = 10**18
_FAILED: Final = PaymentState.FAILED
_FINAL: Final = frozenset({PaymentState.SETTLED, PaymentState.FAILED})


class _Spent(NamedTuple):
    """Gas of 24 hours: given away, and borne by orders whose payment may yet fail."""

    given: int
    at_risk: int


class GasBudget:
    """``units`` are the budget; ``coin_prices``: USDC units for a whole coin, by network.

    ``spent`` is what was given away at the last look; None before one.
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
        self._held = {False: 0, True: 0}  # by whether the order bears it

    async def refresh(self) -> int:
        """What was given away in the last 24 hours, or may be. Raises errors.Unavailable."""
        return (await self._look()).given

    async def _look(self) -> _Spent:
        since, given, at_risk = self._clock.now_ms() - _DAY_MS, 0, 0
        for network, price in self._coin_prices.items():
            uses = await self._ledger.authorization_gas(network, since)
            l1_fee = self._l1_fees.get(network, 0)

            def cost(costs: list[int], price: int = price, l1_fee: int = l1_fee) -> int:
                return mul_div_ceil(sum(costs) + len(costs) * l1_fee, price, _WEI)

            given += cost([u.wei for u in uses if not u.is_paid or u.state is _FAILED])
            at_risk += cost([u.wei for u in uses if u.is_paid and u.state not in _FINAL])
        self.spent = given
        return _Spent(given, at_risk)

    async def require(self, network: str, cost: CallCost, *, is_paid: bool) -> None:
        """Raise errors.Unavailable when a call would cost more than is left."""
        async with self.spending(network, cost, is_paid=is_paid):
            pass

    @asynccontextmanager
    async def spending(self, network: str, cost: CallCost, *, is_paid: bool) -> AsyncIterator[None]:
        """Hold what a call may cost until its payment is on record.

        ``is_paid``: its order bears the gas. Raises errors.Unavailable when it is more than is
        left: calls that are made at the same moment, on any network, never pass the bound together.
        """
        self._l1_fees[network] = cost.l1_fee
        needed = mul_div_ceil(cost.gas + cost.l1_fee, self._coin_prices[network], _WEI)
        async with self._deciding:
            # Before the look: what comes on record meanwhile counts twice.
            held = self._held[is_paid]
            spent = await self._look()
            counted = spent.at_risk if is_paid else spent.given
            if max(counted + held + needed, spent.given) > self._units:
                raise Unavailable(
                    "The service pays no more gas for signed payments today. Pay the order as its"
                    " fundingInstructions say."
                )
            self._held[is_paid] += needed
        try:
            yield
        finally:
            self._held[is_paid] -= needed

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
