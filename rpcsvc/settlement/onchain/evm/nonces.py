"""Which nonce the hot wallet of one network signs with next, and whether it may sign at all.

The network's count of its transactions is never above what the database knows, since each is
committed before it is published. Where it is, something that is not on record has sent: the
database is an older copy, or the key is in other hands (unrecorded.py).
"""

from __future__ import annotations

from typing import Final

from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.evm.conditions import Conditions
from rpcsvc.settlement.onchain.evm.connection import EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import Tag
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.guard import PauseSwitch
from rpcsvc.settlement.onchain.unrecorded import UnrecordedLedger, pause_for, reason_of

_NONCE: Final = "nonce"


class EvmNonces:
    """The nonces of one hot wallet on one network. What asks the node may raise RpcFailure."""

    def __init__(
        self,
        connection: EvmConnection,
        sender: str,
        payments: EvmPaymentLedger,
        unrecorded: UnrecordedLedger,
        switch: PauseSwitch,
    ) -> None:
        self._connection = connection
        self._network = connection.network.name
        self._sender = sender
        self._payments = payments
        self._unrecorded = unrecorded
        self._switch = switch
        self._wallet = f"the hot wallet on {self._network}"
        self._conditions = Conditions(self._network)
        self._has_looked = False

    def conditions(self) -> list[str]:
        """What the operator should know, in words."""
        return self._conditions.texts()

    async def next(self) -> int:
        """The nonce to sign with; only for who holds the network's one writer.

        Raises errors.Unavailable while there are transactions that are not on record, and the
        operator has not looked at them.
        """
        # In this order: what is committed meanwhile can only be more.
        pending = await self._connection.client.nonce(self._sender, Tag.PENDING)
        own = await self._payments.next_nonce(self._network, self._sender)
        problem = await self._problem(own, pending)
        self._conditions.set(_NONCE, problem)
        self._has_looked = True
        if problem is not None:
            raise Unavailable(
                f"The hot wallet on {self._network} has sent what is not on record. Nothing is"
                " signed with it before the operator has looked."
            )
        return max(pending, own)

    async def reconcile(self) -> None:
        """Find out once after a start whether it may sign, and pause payouts if not.

        And again as long as it may not: once the operator has let money out, health is well.
        """
        if self._has_looked and not self._conditions.texts():
            return
        try:
            await self.next()
        except Unavailable:
            # It has looked: the condition tells. It has not: the database, or the node, will tell.
            if not self._has_looked:
                raise

    async def _problem(self, own: int, pending: int) -> str | None:
        told = await self._told(own, pending)
        if pending <= own:
            return None
        if await self._has_strangers(max(own, told), pending):
            if pause_for(self._switch, self._wallet):
                await self._unrecorded.acknowledge_nonce(self._network, self._sender, pending)
        elif self._switch.reason() != reason_of(self._wallet):
            return None
        return (
            f"something else sends from the hot wallet on {self._network}: the network is at nonce"
            f" {pending}, this service at {own}"
        )

    async def _told(self, own: int, pending: int) -> int:
        """Up to which nonce the operator was told. At first: all from before the service."""
        told = await self._unrecorded.acknowledged_nonce(self._network, self._sender)
        if told is None:
            told = own or pending
            await self._unrecorded.acknowledge_nonce(self._network, self._sender, told)
        return told

    async def _has_strangers(self, first: int, end: int) -> bool:
        """Whether a nonce from ``first`` on, below ``end``, was not used by the operator's hand."""
        if first >= end:
            return False
        explained: set[int] = set()
        for txid in await self._unrecorded.explained(self._network):
            made = await self._connection.client.transaction(txid)
            if made is not None and made.sender.lower() == self._sender.lower():
                explained.add(made.nonce)
        return not explained.issuperset(range(first, end))
