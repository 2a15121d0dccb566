"""Which of a token's Transfer events pay us, and how much.

An event that was not asked for, or that can't be read, is no answer of a node: BadAnswer.
What does not live here: asking for events, and where on the chain they are (deposits.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import structlog

from rpcsvc.settlement.onchain.daemon_rpc import BadAnswer
from rpcsvc.settlement.onchain.evm.connection import EvmConnection
from rpcsvc.settlement.onchain.evm.deposit_ledger import LARGEST_DEPOSIT, EvmDepositLedger
from rpcsvc.settlement.onchain.evm.node_types import Log, LogFilter, LogRange, Receipt
from rpcsvc.settlement.onchain.evm.usdc import TRANSFER_TOPIC, TransferEvent, read_transfer
from rpcsvc.settlement.onchain.unusable import ChainUnusable

log = structlog.get_logger(__name__)

_LOGS = "eth_getLogs"
_RECEIPT = "eth_getTransactionReceipt"


class Paid(NamedTuple):
    """What one event paid to one of our addresses, in USDC units."""

    address_index: int
    address: str
    units: int
    sender: str


class EventReader:
    """Reads the events of one network's token. ``wanted`` is what a node is to be asked for."""

    def __init__(self, connection: EvmConnection, ledger: EvmDepositLedger) -> None:
        self._node = connection.client.rpc.endpoint.name
        self._network = connection.network
        self._ledger = ledger
        self.wanted = LogFilter(connection.network.token, (TRANSFER_TOPIC,))

    async def paying(self, piece: LogRange) -> list[Log]:
        """The events of some blocks that are deposits. All others are told by their bytes alone.

        Raises BadAnswer; ChainUnusable when the address pool was not loaded.
        """
        recipients = [self._recipient(item, piece) for item in piece.logs]
        ours = {item.address.lower() for item in await self._ledger.ours(set(recipients))}
        logs = [item for item, to in zip(piece.logs, recipients, strict=True) if to in ours]
        return [item for item, _ in await self._payments(logs, _LOGS)]

    async def paid_by(self, receipt: Receipt) -> dict[int, Paid]:
        """What a transaction pays to us, by the place of the event within it.

        Raises BadAnswer; ChainUnusable when the address pool was not loaded.
        """
        indices = [item.log_index for item in receipt.logs]
        if indices != sorted(set(indices)):
            raise self._bad(_RECEIPT, "has events in disorder")
        if not receipt.ok:
            return {}
        events = [item for item in receipt.logs if self._is_transfer(item)]
        paid = await self._payments(events, _RECEIPT)
        return {receipt.position_of(item.log_index): what for item, what in paid}

    def _recipient(self, item: Log, piece: LogRange) -> str:
        """Whom an event pays, in lower case."""
        asked = piece.first <= item.block_number <= piece.last and self._is_transfer(item)
        if not asked or len(item.topics) != 3:
            raise self._bad(_LOGS, f"has an event of {item.txid} that was not asked for")
        return "0x" + item.topics[2][12:].hex()

    def _is_transfer(self, item: Log) -> bool:
        return item.address == self._network.token and item.topics[:1] == (TRANSFER_TOPIC,)

    async def _payments(self, logs: Iterable[Log], method: str) -> list[tuple[Log, Paid]]:
        """Those Transfer events that are deposits, with what each paid.

        The service's own transfers are none, nor is one of nothing: anyone may send as many of
        those as they like.
        """
        events = [(item, self._event(item, method)) for item in logs]
        if not events:
            return []
        parties = {name for _, event in events for name in (event.sender, event.to)}
        ours = {item.address: item.index for item in await self._ledger.ours(parties)}
        own = {*ours, await self._hot_address()}
        paid = []
        for item, event in events:
            index = ours.get(event.to)
            if index is None or event.sender in own or not self._is_credible(item, event):
                continue
            paid.append((item, Paid(index, event.to, event.units, event.sender)))
        return paid

    def _is_credible(self, item: Log, event: TransferEvent) -> bool:
        if event.units > LARGEST_DEPOSIT:
            # More than there is of USDC: the token is not what it says, or the node lies.
            log.error("evm_deposit_too_large", network=self._network.name, txid=item.txid)
        return 0 < event.units <= LARGEST_DEPOSIT

    def _event(self, item: Log, method: str) -> TransferEvent:
        try:
            return read_transfer(item.topics, item.data)
        except ValueError as error:
            raise self._bad(method, f"has a broken event of {item.txid}") from error

    async def _hot_address(self) -> str:
        wallet = await self._ledger.wallet()
        if wallet is None:
            raise ChainUnusable("the mnemonic is not recorded yet: the address pool was not loaded")
        return wallet.hot_address

    def _bad(self, method: str, problem: str) -> BadAnswer:
        return BadAnswer(self._node, method, f"the answer {problem}")
