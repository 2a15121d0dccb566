"""Whether a transfer of USDC can be paid, looked at right before it is signed.

What does not live here: signing (payments.py), whether the gas is worth it (gas.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import structlog

from rpcsvc.domain.addresses import parse_evm_address
from rpcsvc.domain.order import Transfer
from rpcsvc.errors import InvalidDestination, Unavailable
from rpcsvc.orders.ports.wallets import TransferRejected
from rpcsvc.settlement.onchain.evm import usdc
from rpcsvc.settlement.onchain.evm.connection import EvmConnection
from rpcsvc.settlement.onchain.evm.gas import EvmGas
from rpcsvc.settlement.onchain.evm.node_types import Reverted
from rpcsvc.settlement.onchain.evm.payment_ledger import PaymentOrder, Purpose

log = structlog.get_logger(__name__)


class EvmChecks:
    """Checks transfers of one network. Everything may raise RpcFailure and ChainUnusable."""

    def __init__(
        self,
        connection: EvmConnection,
        gas: EvmGas,
        hot_wallet: str,
        is_ours: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._connection = connection
        self._network = connection.network
        self._gas = gas
        self._hot_wallet = hot_wallet
        self._is_ours = is_ours

    async def order_of(self, transfer: Transfer, owed: int) -> PaymentOrder:
        """The call that pays it. ``owed``: units that are signed for others and not mined yet.

        Raises TransferRejected for a destination that can't be paid; Unavailable while the token
        is paused or the hot wallet holds too little.
        """
        if transfer.network != self._network.name:
            raise LookupError(f"{transfer.transfer_id} is to be paid on {transfer.network}")
        recipient = await self._destination(transfer.address)
        await self._connection.check()
        if self._connection.paused:
            raise Unavailable(f"USDC on {self._network.name} is paused by its issuer.")
        if await self._connection.is_blacklisted(recipient):
            raise TransferRejected("the destination is on the token's blacklist")
        if await self._connection.balance(self._hot_wallet) < owed + transfer.units:
            raise Unavailable(f"Not enough USDC is left on {self._network.name} for this payment.")
        data = usdc.transfer(recipient, transfer.units)
        return PaymentOrder(
            transfer.transfer_id, Purpose.TRANSFER, recipient, transfer.units,
            self._network.token, data, await self._gas_for(data),
        )  # fmt: skip

    async def _destination(self, address: str) -> str:
        try:
            recipient = parse_evm_address(address, forbidden={self._network.token.lower()})
        except InvalidDestination as refused:
            raise TransferRejected(f"the destination can't be paid: {refused.message}") from refused
        if recipient == self._hot_wallet or await self._is_ours(recipient):
            raise TransferRejected("the destination is an address of the service itself")
        return recipient

    async def _gas_for(self, data: bytes) -> int:
        try:
            return await self._gas.estimate(self._network.token, data)
        except Reverted as error:
            log.warning("evm_payment_not_made", network=self._network.name, reason=str(error))
            raise Unavailable(
                f"The token on {self._network.name} refuses this payment just now."
            ) from error
