"""Whether USDC can be paid: the blacklist before an order is made, all checks before signing."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Final

import structlog

from rpcsvc.clock import steady_ms
from rpcsvc.domain.addresses import parse_evm_address
from rpcsvc.domain.order import Transfer
from rpcsvc.errors import InvalidDestination, Unavailable
from rpcsvc.orders.ports.wallets import TransferRejected
from rpcsvc.settlement.onchain.adapter import ChainUnusable
from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure
from rpcsvc.settlement.onchain.evm import usdc
from rpcsvc.settlement.onchain.evm.connection import EvmConnection
from rpcsvc.settlement.onchain.evm.gas import EvmGas
from rpcsvc.settlement.onchain.evm.ledger import PaymentOrder, Purpose
from rpcsvc.settlement.onchain.evm.node_types import Reverted

log = structlog.get_logger(__name__)

# How long an order waits for the answer; a slow node keeps nobody from ordering.
WAIT_SECONDS: Final = 0.5
KEPT_MS: Final = 60_000
_MOST_KEPT: Final = 4_096


class Blacklist:
    """The blacklist of one token, as its node tells it."""

    def __init__(self, connection: EvmConnection, now_ms: Callable[[], int] = steady_ms) -> None:
        self._connection = connection
        self._now_ms = now_ms
        self._kept: OrderedDict[str, tuple[int, bool]] = OrderedDict()
        self._has_none = False  # the token has no such function

    async def has(self, address: str) -> bool:
        """Whether the address is on it; False, with a line in the log, when the node does not
        answer in time.
        """
        if self._has_none:
            return False
        now, key = self._now_ms(), address.lower()
        kept = self._kept.get(key)
        if kept is not None and now - kept[0] < KEPT_MS:
            return kept[1]
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                found = await self._connection.is_blacklisted(address)
        except ChainUnusable:
            self._has_none = True
            log.info("blacklist_not_found", network=self._connection.network.name)
            return False
        except (TimeoutError, RpcFailure) as failure:
            reason = str(failure) or f"no answer within {WAIT_SECONDS} s"
            log.warning("blacklist_not_asked", network=self._connection.network.name, reason=reason)
            return False
        self._keep(key, now, found=found)
        return found

    def _keep(self, key: str, now: int, *, found: bool) -> None:
        self._kept[key] = (now, found)
        self._kept.move_to_end(key)
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)


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
