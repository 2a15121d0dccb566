"""Proves that a transaction of the hot wallet is the payment of a transfer, and records it as such.

It must be mined with success and sent by the hot wallet, and the token must show in it exactly the
transfer's units to its address. Sources: Ethereum JSON-RPC (execution-apis); ERC-20.
"""

from __future__ import annotations

from msgspec.structs import replace

from rpcsvc.clock import Clock
from rpcsvc.domain import usdc
from rpcsvc.domain.addresses import evm_checksum
from rpcsvc.domain.order import Transfer, TransferState
from rpcsvc.orders.ports.wallets import Record
from rpcsvc.settlement.onchain.evm.keys import SignedFields, signed_fields
from rpcsvc.settlement.onchain.evm.node import EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import Block, Receipt
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.records import (
    Attempt,
    EvmPayment,
    EvmPaymentOrder,
    EvmPaymentState,
    EvmPurpose,
)
from rpcsvc.settlement.onchain.unrecorded import (
    Adopted,
    NotAdopted,
    OpenTransfer,
    bare_txid,
    require_open,
    require_unsigned,
)
from rpcsvc.store.database import Rows

_BY_HASH = "eth_getTransactionByHash"


class EvmAdoption:
    """Adopts on one network; ``hot_wallet`` (EIP-55) is the one that pays.

    Every method may raise RpcFailure and ChainUnusable.
    """

    def __init__(
        self, connection: EvmConnection, ledger: EvmPaymentLedger, hot_wallet: str, clock: Clock
    ) -> None:
        self._connection = connection
        self._network = connection.network
        self._ledger = ledger
        self._hot = hot_wallet
        self._clock = clock

    async def adopt(self, wanted: OpenTransfer, txid: str, record: Record) -> Adopted:
        """Put on record that a transaction pays ``wanted``. Raises NotAdopted.

        A payment on record with its nonce gets one more attempt: its fee was raised after the copy
        of the database was made.
        """
        txid = bare_txid(txid, "0x")
        require_open(wanted.transfer)
        await self._connection.check()
        receipt = await self._mined(txid)
        self._require_event(wanted.transfer, receipt)
        fields = await self._signed(txid)
        attempt = await self._attempt(fields, receipt)
        known = await self._ledger.payment(wanted.transfer.transfer_id)
        if known is None:
            await self._require_free_nonce(fields.nonce)
            payment = self._payment(wanted.transfer, fields, attempt)

            async def commit(rows: Rows) -> None:
                await self._ledger.add_payment(payment, rows=rows)

            await record([payment.prepared], commit)
        else:
            await self._raise(wanted.transfer, known, fields, attempt)
            if wanted.transfer.state is TransferState.PLANNED:
                await record([known.prepared], None)
        extra = self._sent(receipt) - wanted.transfer.units
        first = attempt if known is None else known.attempts[0]
        return Adopted(first.txid, (wanted,), receipt.block_number, extra)

    # --- from the node -------------------------------------------------------------------------

    async def _mined(self, txid: str) -> Receipt:
        receipt = await self._connection.client.receipt(txid)
        name = self._network.name
        if receipt is None:
            raise NotAdopted(f"{txid} is not mined on {name}, as far as its node knows.")
        if not receipt.ok:
            raise NotAdopted(f"{txid} failed on {name}: it paid nothing.")
        block: Block | None = await self._connection.client.block(receipt.block_number)
        if block is None or block.hash != receipt.block_hash:
            raise NotAdopted(f"The block of {txid} on {name} is being replaced. Try again later.")
        return receipt

    def _events(self, receipt: Receipt) -> list[usdc.TransferEvent]:
        """The Transfer events that moved USDC from the hot wallet."""
        token, found = self._network.token.lower(), []
        for log in receipt.logs:
            if log.address.lower() == token and log.topics[:1] == (usdc.TRANSFER_TOPIC,):
                found.append(usdc.read_transfer(log.topics, log.data))
        return [item for item in found if item.sender.lower() == self._hot.lower()]

    def _sent(self, receipt: Receipt) -> int:
        return sum(item.units for item in self._events(receipt))

    def _require_event(self, transfer: Transfer, receipt: Receipt) -> None:
        events = self._events(receipt)
        to = [item.units for item in events if item.to.lower() == transfer.address.lower()]
        if transfer.units not in to:
            paid = f"{sum(to)} units" if to else "nothing"
            raise NotAdopted(
                f"{receipt.txid} pays {paid} of USDC from the hot wallet to the address of"
                f" {transfer.transfer_id}, which is for {transfer.units}."
            )

    async def _signed(self, txid: str) -> SignedFields:
        found = await self._connection.client.rpc.read(_BY_HASH, [txid])
        try:
            fields = signed_fields(found if isinstance(found, dict) else {})
        except ValueError as error:
            raise NotAdopted(f"The bytes of {txid} can't be put together: {error}.") from error
        if fields.sender != self._hot.lower():
            raise NotAdopted(f"{txid} was sent by {fields.sender}, not by {self._hot}.")
        if fields.value:
            raise NotAdopted(f"{txid} sends {fields.value} wei along, which no payout does.")
        return fields

    async def _attempt(self, fields: SignedFields, receipt: Receipt) -> Attempt:
        """Return the attempt as the service records one, dated by its block."""
        block = await self._connection.client.block(receipt.block_number)
        at = self._clock.now_ms() if block is None else block.timestamp * 1000
        return Attempt(fields.txid, fields.raw.hex(), fields.max_fee, fields.tip, at)

    # --- on record -----------------------------------------------------------------------------

    async def _raise(
        self, transfer: Transfer, known: EvmPayment, fields: SignedFields, attempt: Attempt
    ) -> None:
        """Record one more attempt of a payment on record. Raises NotAdopted."""
        name = known.payment_id
        if fields.txid in {item.txid for item in known.attempts}:
            require_unsigned(transfer, fields.txid)
            return
        if (known.sender.lower(), known.nonce) != (fields.sender, fields.nonce):
            raise NotAdopted(
                f"{name} has a signed payment on record already, with nonce {known.nonce};"
                f" {fields.txid} has nonce {fields.nonce}. It is not taken for it."
            )
        if known.state.is_over:
            raise NotAdopted(f"The payment of {name} on record is {known.state}, which is final.")
        await self._ledger.add_attempt(known, _above(known.latest, attempt))

    async def _require_free_nonce(self, nonce: int) -> None:
        for item in await self._ledger.payments_in(self._network.name, *EvmPaymentState):
            if (item.sender.lower(), item.nonce) == (self._hot.lower(), nonce):
                raise NotAdopted(
                    f"Its nonce {nonce} is on record for {item.payment_id}: look at that one first."
                )

    def _payment(self, transfer: Transfer, fields: SignedFields, attempt: Attempt) -> EvmPayment:
        order = EvmPaymentOrder(
            transfer.transfer_id, EvmPurpose.TRANSFER, transfer.address, transfer.units,
            evm_checksum(fields.to), fields.data, fields.gas,
        )  # fmt: skip
        made = EvmPayment(
            self._network.name, self._hot, fields.nonce, order, (attempt,), attempt.made_at
        )
        return replace(made, state=EvmPaymentState.PUBLISHED, published_at=attempt.made_at)


def _above(last: Attempt, mined: Attempt) -> Attempt:
    """Return the attempt as the books take it, where fees only rise: a later one has to outbid it.

    The service may have offered more since the copy was made, without the network getting it.
    """
    return replace(
        mined, max_fee=max(mined.max_fee, last.max_fee + 1), tip=max(mined.tip, last.tip + 1)
    )
