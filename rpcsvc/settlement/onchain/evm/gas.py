"""What the hot wallet of one network pays for gas, and what it holds: asked of the node.

Costs are wei, prices wei per gas. What does not live here: the arithmetic (fees.py), the
payments (payments.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import structlog

from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.daemon_rpc import NodeError, RpcFailure
from rpcsvc.settlement.onchain.evm import usdc
from rpcsvc.settlement.onchain.evm.connection import EvmConnection
from rpcsvc.settlement.onchain.evm.fees import (
    USUAL_GAS,
    GasPrice,
    first_price,
    is_too_low,
    price_of,
    raised_price,
    with_margin,
)
from rpcsvc.settlement.onchain.evm.l1_fee import L1Fee
from rpcsvc.settlement.onchain.evm.node_types import EvmCall
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPayment, PaymentOrder, Purpose

log = structlog.get_logger(__name__)

# An account that holds nothing: a transfer to it writes a new balance, which costs the most.
_NOBODY: Final = usdc.read_address(bytes(12) + usdc.keccak256(b"nobody")[12:])
# An amount of many digits: where bytes are paid for, it costs the most.
_MUCH: Final = 2**40 - 1


@dataclass(frozen=True, slots=True)
class HotBalances:
    """What the hot wallet held at a block: wei and USDC units."""

    ether: int
    usdc: int
    block_number: int


class EvmGas:
    """Gas of one network. Everything that asks may raise RpcFailure and ChainUnusable.

    ``hot`` is the hot wallet's balances at the last look; None before one. ``problem``: why it is
    not known what a payout costs, for the operator; None: it is known, or nobody has looked.
    ``is_blacklisted``: the token moved nothing for the hot wallet at the last look.
    """

    def __init__(self, connection: EvmConnection, hot_wallet: str) -> None:
        self._connection = connection
        self._network = connection.network
        self._hot_wallet = hot_wallet
        self._l1 = L1Fee(connection)
        self._gas = with_margin(USUAL_GAS)
        self._price: GasPrice | None = None
        self._l1_fee: int | None = None
        self.hot: HotBalances | None = None
        self.problem: str | None = None
        self.is_blacklisted = False

    async def estimate(self, to: str, data: bytes) -> int:
        """The gas limit for a call of the hot wallet. Raises Reverted."""
        return with_margin(
            await self._connection.client.estimate_gas(EvmCall(to, data, self._hot_wallet))
        )

    async def first_price(self, order: PaymentOrder) -> GasPrice:
        """What a new transaction offers. Raises Unavailable when it would cost too much."""
        left = self._network.highest_fee - await self._l1.of(order)
        moment = await self._connection.client.fees()
        price = first_price(moment, order.gas, left)
        if price is None:
            log.warning("evm_gas_too_dear", network=self._network.name, base_fee=moment.base_fee)
            raise Unavailable(f"Gas on {self._network.name} is too dear for a payment right now.")
        return price

    async def raised_price(self, payment: EvmPayment) -> GasPrice | None:
        """What a payment's replacement offers; None when it would cost too much."""
        left = self._network.highest_fee - await self._l1.of(payment.order)
        return raised_price(
            _price(payment), await self._connection.client.fees(), self._network.bump_percent,
            payment.order.gas, left,
        )  # fmt: skip

    async def needed(
        self, order: PaymentOrder, price: GasPrice, waiting: Sequence[EvmPayment]
    ) -> int:
        """Wei that the hot wallet may need for a new call, besides those that wait to be mined.

        Raises Unavailable while the L1 part is not known. For that, each counts as the longest.
        """
        orders = [order, *(item.order for item in waiting)]
        longest = max(orders, key=lambda item: len(item.data))
        l1_fees = len(orders) * await self._l1.of(longest)
        return order.gas * price.max_fee + sum(item.most_fee for item in waiting) + l1_fees

    async def is_too_low(self, payment: EvmPayment) -> bool:
        """Whether the next block would not take the payment for its price."""
        return is_too_low(_price(payment), await self._connection.client.fees())

    async def look(self) -> None:
        """Note the fees of the moment and the hot wallet's balances."""
        top = await self._connection.check()
        moment = await self._connection.client.fees()
        ether = await self._connection.client.ether(self._hot_wallet)
        units = await self._connection.balance(self._hot_wallet)
        self.is_blacklisted = await self._connection.is_blacklisted(self._hot_wallet)
        await self._look_at_l1()
        self.hot = HotBalances(ether, units, top.number)
        self._price = price_of(moment)
        try:
            # Anew each time: on some networks it holds the price of another one's space.
            self._gas = await self.estimate(self._network.token, usdc.transfer(_NOBODY, 1))
        except NodeError as error:
            # An empty hot wallet, or a paused token: what it took before is near enough.
            log.debug("evm_gas_not_estimated", network=self._network.name, reason=str(error))

    async def _look_at_l1(self) -> None:
        """Note what the L1 takes for a payout. What was known before is not good for ever."""
        data = usdc.transfer(_NOBODY, _MUCH)
        token = self._network.token
        usual = PaymentOrder("look", Purpose.TRANSFER, _NOBODY, _MUCH, token, data, self._gas)
        try:
            self._l1_fee = await self._l1.of(usual)
            self.problem = None
        except Unavailable as error:
            self._l1_fee, self.problem = None, error.message
        except RpcFailure as failure:
            self._l1_fee, self.problem = None, str(failure)
            raise

    def payout_cost(self) -> int:
        """Wei that a payout costs at the last look, with margin. Raises Unavailable before one."""
        if self._price is None or self._l1_fee is None:
            raise Unavailable(f"The fees on {self._network.name} are not known yet.")
        return self._gas * self._price.max_fee + self._l1_fee


def _price(payment: EvmPayment) -> GasPrice:
    return GasPrice(payment.latest.max_fee, payment.latest.tip)
