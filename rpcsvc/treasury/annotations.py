"""Annotations: the operator's notes on transactions that were made by hand.

The service has no record of a withdrawal or top-up by hand, so the auditor reports a difference
until it is annotated. Its amounts are read from the chain, here for display and again by each
audit.
"""

from __future__ import annotations

import asyncio
from typing import Final

from msgspec import Struct

from rpcsvc.audit.books import read_books, read_books_of
from rpcsvc.audit.hints import may_pay
from rpcsvc.audit.records import Books, TransferEntry
from rpcsvc.clock import Clock
from rpcsvc.domain import usdc
from rpcsvc.domain.money import USDC, XMR, format_units
from rpcsvc.domain.order import LIVE_TRANSFERS, TransferState
from rpcsvc.errors import InvalidInput, Unavailable
from rpcsvc.settings import Settings
from rpcsvc.settings_onchain import read_chains
from rpcsvc.settlement.onchain import wiring
from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure
from rpcsvc.settlement.onchain.evm.adapter import EvmNode
from rpcsvc.settlement.onchain.evm.node_types import EvmTransaction, Log, Receipt
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.records import NETWORK as MONERO
from rpcsvc.settlement.onchain.monero.records import WalletRecord
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import WalletTransferKind
from rpcsvc.settlement.onchain.unrecorded import NotAdopted, bare_txid
from rpcsvc.store.database import Tables
from rpcsvc.store.operator_books import OperatorBooks

_SIGNED: Final = LIVE_TRANSFERS | {TransferState.SETTLED}
# More than there is of any coin.
_MOST_WEI: Final = 1 << 96


class Noted(Struct, frozen=True):
    """The outcome of a note on a transaction.

    ``moved``: what the transaction moved, in words. ``recorded``: the payment that it is on record
    as. ``refused``: why nothing was changed.
    """

    txid: str
    note: str | None = None
    moved: str | None = None
    recorded: str | None = None
    refused: str | None = None


def _has_open(books: Books) -> bool:
    """Return whether an XMR transfer is open. Unpacking many orders takes a thread."""
    return any(
        item.network == MONERO and not item.state.is_final
        for order in books.orders
        for item in order.transfers
    )


def _lost_deposit(books: Books, network: str, txid: str) -> str | None:
    for order in books.orders:
        for deposit in order.deposits:
            spent_on = order.transfer(deposit.transfer_id)
            is_signed = spent_on is not None and spent_on.state in _SIGNED
            if (deposit.network, deposit.txid) == (network, txid) and is_signed:
                return (
                    f"a deposit of {deposit.units} units for {order.order_id} that the chain"
                    " does not show any more"
                )
    return None


class Annotations:
    """Adds and removes notes, one at a time, over a database that this process owns."""

    def __init__(self, settings: Settings, database: Tables, clock: Clock) -> None:
        self._settings = settings
        self._db = database
        self._books = OperatorBooks(database)
        self._clock = clock
        self._lock = asyncio.Lock()

    async def add(self, network: str, txid: str, note: str, wei: int) -> Noted:
        """Note what a transaction was. Raises InvalidInput and Unavailable: nothing was changed.

        Refused when it may have paid an open transfer, or moved nothing of the service's wallets.
        """
        txid, note, wei = _txid(network, txid), _note(note), _wei(network, wei)
        async with self._lock:
            known = await self._books.annotation(network, txid)
            if known is not None:
                raise InvalidInput(
                    f"{txid} is explained already: {known}. To change it: --take-back first.",
                    field="txid",
                )
            recorded = await self._books.payment_with(txid)
            waiting = [] if recorded is not None else await self._may_still_pay(network, txid)
            if waiting:
                names = " ".join(item.transfer_id for item in waiting)
                return Noted(
                    txid=txid,
                    refused=f"{txid} may have paid {names}, which would be paid once more. Adopt it"
                    " (rpcsvc payouts adopt), or close each: rpcsvc payouts close TRANSFER"
                    f" {txid} --note TEXT",
                )
            moved = await self.poll(network, txid, wei) or await self._lost(network, txid)
            if moved is None:
                return Noted(
                    txid=txid,
                    refused=f"{network} shows no transaction {txid} that moved anything of the"
                    " service's wallets",
                )
            await self._books.annotate(network, txid, note, self._clock.now_ms(), wei)
            return Noted(txid=txid, note=note, moved=moved, recorded=recorded)

    async def remove(self, network: str, txid: str) -> Noted:
        """Forget a note. Raises InvalidInput."""
        txid = _txid(network, txid)
        async with self._lock:
            if await self._books.annotation(network, txid) is None:
                refused = f"{txid} on {network} is not explained"
                return Noted(txid=txid, refused=refused)
            await self._books.remove_annotation(network, txid)
        return Noted(txid=txid)

    async def _may_still_pay(self, network: str, txid: str) -> list[TransferEntry]:
        """Return the open XMR transfers that a transaction may have paid.

        An annotation would not keep the service from paying them. What an EVM transaction paid is
        on the chain, and the audit sees it.
        """
        if network != MONERO:
            return []
        books = await self._audited()
        if not await asyncio.to_thread(_has_open, books):
            return []
        _, wallet = wiring.monero_clients(self._settings.onchain)
        try:
            async with wallet:
                await wallet.refresh()
                found = await wallet.transfer(txid)
        except RpcFailure as error:
            raise _not_asked(network, error) from error
        units = sum(item.amount for item in found if item.kind is WalletTransferKind.OUTGOING)
        if not units:
            return []
        return await asyncio.to_thread(may_pay, books, network, txid, (), units)

    async def _audited(self) -> Books:
        """Return all orders and payments, as the auditor reads them: in a thread, since it reads
        all.
        """
        if self._settings.postgresql_url is not None:
            return await read_books_of(self._db)
        return await asyncio.to_thread(read_books, self._settings.data_dir)

    async def _lost(self, network: str, txid: str) -> str | None:
        """In words: it brought a deposit that a payout is signed for, and is gone; else None."""
        return await asyncio.to_thread(_lost_deposit, await self._audited(), network, txid)

    # --- what it moved -------------------------------------------------------------------------

    async def poll(self, network: str, txid: str, wei: int) -> str | None:
        """The transaction's effect on the service's wallets, in words; None if it has none.

        Raises Unavailable.
        """
        try:
            if network == MONERO:
                return await self._read_monero(txid)
            return await self._read_chain(network, txid, wei)
        except RpcFailure as error:
            raise _not_asked(network, error) from error

    async def _read_monero(self, txid: str) -> str | None:
        known = await MoneroLedger(self._db).wallet()
        _, wallet = wiring.monero_clients(self._settings.onchain)
        async with wallet:
            if known is not None:
                await _require_same_wallet(wallet, known)
            await wallet.refresh()
            found = await wallet.transfer(txid)
        sent = sum(i.amount + i.fee for i in found if i.kind is WalletTransferKind.OUTGOING)
        came = sum(i.amount for i in found if i.kind is WalletTransferKind.INCOMING)
        if not sent and not came:
            return None
        parts = (("sent", sent), ("received", came))
        said = [f"{word} {format_units(units, XMR)} XMR" for word, units in parts if units]
        return ", ".join(said)

    async def _read_chain(self, network: str, txid: str, wei: int) -> str | None:
        node = self._node(network)
        async with node.client:
            receipt = await node.client.receipt(txid)
            made = await node.client.transaction(txid)
        if receipt is None or made is None:
            return None
        sent, came = await self._units(receipt.logs, node.network.token)
        ours = await self._books.is_own_address(made.sender)
        ether = await self._ether(made, receipt)
        if wei and receipt.ok:
            ether.append(f"received {wei} wei from contracts, as you say")
        if not (sent or came or ours or ether):
            return None
        parts = (("sent", sent), ("received", came))
        said = [f"{word} {format_units(units, USDC)} USDC" for word, units in parts if units]
        return ", ".join(said + ether) or "moved no USDC"

    async def _ether(self, made: EvmTransaction, receipt: Receipt) -> list[str]:
        """The ether that it moved from or to the hot wallet, in words; without its fee."""
        is_from = await self._books.is_hot_wallet(made.sender)
        is_to = made.to is not None and await self._books.is_hot_wallet(made.to)
        if not made.value or not receipt.ok or is_from == is_to:
            return []
        return [f"{'sent' if is_from else 'received'} {made.value} wei"]

    async def _units(self, logs: tuple[Log, ...], token: str) -> tuple[int, int]:
        """USDC units that left the service's addresses, and that came from elsewhere."""
        sent, came = 0, 0
        for log in logs:
            if log.address.lower() != token.lower() or log.topics[:1] != (usdc.TRANSFER_TOPIC,):
                continue
            event = usdc.read_transfer(log.topics, log.data)
            is_from = await self._books.is_own_address(event.sender)
            is_to = await self._books.is_own_address(event.to)
            sent += event.units if is_from and not is_to else 0
            came += event.units if is_to and not is_from else 0
        return sent, came

    def _node(self, network: str) -> EvmNode:
        chains = read_chains(self._settings.chains_file)
        served = wiring.served_chains(self._settings.onchain, chains)
        nodes = wiring.evm_nodes(self._settings.onchain, served)
        for node in nodes:
            if node.network.name == network:
                return node
        names = ", ".join([MONERO, *(node.network.name for node in nodes)])
        raise InvalidInput(f"NETWORK must be one of {names}, not {network[:40]}.", field="network")


def _txid(network: str, text: str) -> str:
    try:
        return bare_txid(text, "" if network == MONERO else "0x")
    except NotAdopted as error:
        raise InvalidInput(str(error), field="txid") from error


def _note(text: str) -> str:
    note = " ".join(text.split())
    if not note:
        raise InvalidInput(
            "--note must say what it was for: whoever reads the audit reads it.", field="note"
        )
    return note


def _wei(network: str, wei: int) -> int:
    if wei and network == MONERO:
        raise InvalidInput(
            "--internal-wei is for EVM networks: XMR has no contracts.", field="internalWei"
        )
    if not 0 <= wei < _MOST_WEI:
        raise InvalidInput(
            f"--internal-wei must be wei, from 0 and below 2^96, not {wei}.", field="internalWei"
        )
    return wei


async def _require_same_wallet(wallet: WalletClient, known: WalletRecord) -> None:
    """Raise Unavailable when another XMR wallet is open than the service's own."""
    address = await wallet.primary_address()
    if address != known.primary_address:
        raise Unavailable(
            f"Another XMR wallet is open: its primary address begins with {address[:12]}, that of"
            f" the first start with {known.primary_address[:12]}. Nothing was changed."
        )


def _not_asked(network: str, error: RpcFailure) -> Unavailable:
    return Unavailable(f"{network} can't be asked: {error}. Nothing was changed.")
