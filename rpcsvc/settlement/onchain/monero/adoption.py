"""Proves that a transaction of the XMR wallet is the payment of transfers, and records it as such.

The wallet must list it as its own, the node must have it, and its key must show that it paid each
address exactly the transfer's units. Source: the daemon and wallet RPC documentation at
getmonero.org.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from rpcsvc.orders.ports.store import Rows
from rpcsvc.orders.ports.wallets import PreparedTransfer, Record
from rpcsvc.settlement.onchain.daemon_rpc import NodeError
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import (
    MoneroLedger,
    Payee,
    Payment,
    PaymentState,
    Purpose,
)
from rpcsvc.settlement.onchain.monero.monerod import NodeBytes
from rpcsvc.settlement.onchain.monero.wallet_types import TransferKind, WalletCode, WalletTransfer
from rpcsvc.settlement.onchain.unrecorded import (
    Adopted,
    NotAdopted,
    OpenTransfer,
    bare_txid,
    require_open,
    require_unsigned,
)

_OURS: Final = (TransferKind.OUTGOING, TransferKind.PENDING)


@dataclass(frozen=True, slots=True)
class _Found:
    """A transaction, as wallet and node have it."""

    sent: WalletTransfer
    bytes: NodeBytes
    key: str


class MoneroAdoption:
    """Looks at one wallet and its node, both open. Everything raises RpcFailure, ChainUnusable."""

    def __init__(self, connection: MoneroConnection, ledger: MoneroLedger) -> None:
        self._connection = connection
        self._wallet = connection.wallet
        self._ledger = ledger

    async def adopt(
        self,
        wanted: OpenTransfer,
        others: Sequence[OpenTransfer],
        txid: str,
        key: str | None,
        record: Record,
    ) -> Adopted:
        """Put on record that the transaction pays ``wanted``, and those of ``others`` it pays too.

        ``key`` is the transaction's; without one the wallet is asked. Raises NotAdopted.
        """
        txid = bare_txid(txid, "")
        if (known := await self._known(wanted, txid)) is not None:
            await record(PreparedTransfer(txid, known.raw, (wanted.transfer.transfer_id,)))
            return Adopted(txid, (wanted,), known.height)
        found = await self._find(txid, key)
        received = await self._received(found, wanted.transfer.address)
        if received != wanted.transfer.units:
            raise NotAdopted(
                f"{txid} pays {received} piconero to the address of {wanted.transfer.transfer_id},"
                f" which is for {wanted.transfer.units}."
            )
        paid = [wanted, *await self._also_paid(found, wanted, others)]
        payment = _payment(found, paid)
        if taken := await self._ledger.live_key_images(payment.key_images):
            raise NotAdopted(
                f"{txid} spends what another payment on record spends ({len(taken)} key images)."
            )

        async def commit(rows: Rows) -> None:
            await self._ledger.add_payment(payment, rows)

        names = tuple(item.transfer.transfer_id for item in paid)
        await record(PreparedTransfer(txid, payment.raw, names), commit)
        return Adopted(txid, tuple(paid), found.bytes.height, found.sent.amount - payment.units)

    async def _known(self, wanted: OpenTransfer, txid: str) -> Payment | None:
        """This payment, if it is on record and the order does not know it yet. Raises NotAdopted
        when the transfer has another one, or knows this one.
        """
        require_open(wanted.transfer)
        known = await self._ledger.payment(wanted.transfer.transfer_id)
        if known is None:
            return None
        if known.txid != txid:
            raise NotAdopted(
                f"{wanted.transfer.transfer_id} has a signed payment on record already,"
                f" {known.txid}: a second one is not taken for it."
            )
        require_unsigned(wanted.transfer, txid)
        return known

    # --- what node and wallet say --------------------------------------------------------------

    async def _find(self, txid: str, key: str | None) -> _Found:
        await self._connection.check_node()
        await self._connection.check_wallet()
        await self._wallet.refresh()
        listed = [item for item in await self._wallet.transfer(txid) if item.kind in _OURS]
        if not listed:
            raise NotAdopted(f"{txid} is not a payment that the XMR wallet knows as its own.")
        found = await self._connection.node.transaction_bytes(txid)
        if found is None:
            raise NotAdopted(f"The Monero node has no transaction {txid}, in a block or waiting.")
        if not found.raw:
            raise NotAdopted(
                f"The Monero node has pruned {txid}: ask one that keeps whole transactions"
                " (onchain.monerod_url)."
            )
        return _Found(listed[0], found, key or await self._own_key(txid))

    async def _own_key(self, txid: str) -> str:
        try:
            return await self._wallet.tx_key(txid)
        except NodeError as error:
            if error.code != WalletCode.NO_TX_KEY:
                raise
            raise NotAdopted(
                f"The wallet does not have the key of {txid}, which proves whom it paid. Give it"
                " with --tx-key, from the receipt of the payout or from where it was made."
            ) from error

    async def _received(self, found: _Found, address: str) -> int:
        """Piconero that the transaction paid to an address, by its key."""
        try:
            check = await self._wallet.check_key(found.sent.txid, found.key, address)
        except NodeError as error:
            if error.code in (WalletCode.UNKNOWN, WalletCode.WRONG_TX_KEY):
                raise NotAdopted(
                    f"The key is not that of {found.sent.txid}: {error.text}"
                ) from error
            raise
        return check.received

    async def _also_paid(
        self, found: _Found, wanted: OpenTransfer, others: Sequence[OpenTransfer]
    ) -> list[OpenTransfer]:
        """Open transfers that the transaction pays besides: the service pays several at once."""
        left = found.sent.amount - wanted.transfer.units
        addresses, also = {wanted.transfer.address}, []
        for item in others:
            transfer = item.transfer
            if not 0 < transfer.units <= left or transfer.address in addresses:
                continue
            if await self._ledger.payment(transfer.transfer_id) is not None:
                continue
            if await self._received(found, transfer.address) == transfer.units:
                left -= transfer.units
                addresses.add(transfer.address)
                also.append(item)
        return also


def _payment(found: _Found, paid: Sequence[OpenTransfer]) -> Payment:
    """The record as the service makes one, at the step after publication."""
    transfers = [item.transfer for item in paid]
    at, txid = found.sent.timestamp * 1000, found.sent.txid
    alone = len(transfers) == 1
    return Payment(
        payment_id=transfers[0].transfer_id if alone else f"batch-{txid}",
        purpose=Purpose.TRANSFER,
        address=transfers[0].address,
        units=sum(item.units for item in transfers),
        fee=found.sent.fee,
        txid=txid,
        raw=found.bytes.raw,
        # Only what was never relayed is relayed by the wallet, and needs them.
        metadata="",
        tx_key=found.key,
        key_images=tuple(sorted(found.bytes.key_images)),
        prepared_at=at,
        state=PaymentState.PUBLISHED,
        relayed_at=at,
        height=found.bytes.height,
        batch=()
        if alone
        else tuple(Payee(item.transfer_id, item.address, item.units) for item in transfers),
    )
