"""``rpcsvc treasury explain NETWORK TXID --note TEXT``: the operator's word on a transaction.

A withdrawal or a top-up by hand is on no record of the service, and a difference to the auditor.
Explained, it is not. What it moved is read from the chain, here to show it and by each audit
anew. It works beside a running service. What does not live here: what the auditor makes of it
(rpcsvc/audit).
"""

from __future__ import annotations

import asyncio
import sys
from typing import Final

from rpcsvc.audit.books import read_books
from rpcsvc.audit.hints import may_pay
from rpcsvc.audit.records import TransferEntry
from rpcsvc.chains_file import read_chains
from rpcsvc.cli.client import Unreachable
from rpcsvc.cli.context import FAILED, OK, Context, UsageError
from rpcsvc.cli.operator.output import onchain_settings, operator_books
from rpcsvc.clock import SystemClock
from rpcsvc.domain.money import USDC, XMR, format_units
from rpcsvc.domain.order import LIVE_TRANSFERS, TransferState
from rpcsvc.logs import configure_logging
from rpcsvc.settings import Settings
from rpcsvc.settlement.onchain import wiring
from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure
from rpcsvc.settlement.onchain.evm import usdc
from rpcsvc.settlement.onchain.evm.adapter import EvmNode
from rpcsvc.settlement.onchain.evm.node_types import EvmTransaction, Log, Receipt
from rpcsvc.settlement.onchain.monero.ledger import NETWORK as MONERO
from rpcsvc.settlement.onchain.monero.ledger import WalletRecord
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import TransferKind, WalletTransfer
from rpcsvc.settlement.onchain.unrecorded import NotAdopted, bare_txid
from rpcsvc.store import operator_books as books_of
from rpcsvc.store.backends.sqlite.snapshot import snapshot
from rpcsvc.store.books import BooksUnreadable
from rpcsvc.store.onchain_monero import SqliteMoneroLedger
from rpcsvc.store.operator_books import OperatorBooks

_SIGNED: Final = LIVE_TRANSFERS | {TransferState.SETTLED}
# More than there is of any coin.
_MOST_WEI: Final = 1 << 96


def explain(context: Context) -> int:
    """The command. Raises UsageError and Unreachable: nothing was changed."""
    settings, options = onchain_settings(context), context.options
    configure_logging(settings.log.format, "error")
    network = options.network
    try:
        txid = bare_txid(options.txid, "" if network == MONERO else "0x")
    except NotAdopted as error:
        raise UsageError(str(error)) from error
    try:
        if options.take_back:
            return _take_back(settings, network, txid)
        wei = _wei(network, options.internal_wei)
        return _explain(settings, network, txid, _note(options.note), wei)
    except BooksUnreadable as error:
        raise UsageError(str(error)) from error


def _note(text: str) -> str:
    note = " ".join(text.split())
    if not note:
        raise UsageError("--note must say what it was for: whoever reads the audit reads it.")
    return note


def _wei(network: str, wei: int) -> int:
    if wei and network == MONERO:
        raise UsageError("--internal-wei is for EVM networks: XMR has no contracts.")
    if not 0 <= wei < _MOST_WEI:
        raise UsageError(f"--internal-wei must be wei, from 0 and below 2^96, not {wei}.")
    return wei


def _take_back(settings: Settings, network: str, txid: str) -> int:
    with operator_books(settings):
        pass  # of a schema that has explanations
    if not books_of.take_back(settings.data_dir, network, txid):
        sys.stderr.write(f"rpcsvc: {txid} on {network} is not explained\n")
        return FAILED
    sys.stdout.write(f"{txid} is a difference again, if the service has no record of it.\n")
    return OK


def _explain(settings: Settings, network: str, txid: str, note: str, wei: int) -> int:
    with operator_books(settings) as books:
        known, recorded = books.explanation(network, txid), books.payment_with(txid)
    if known is not None:
        raise UsageError(f"{txid} is explained already: {known}. To change it: --take-back first.")
    waiting = [] if recorded is not None else _may_still_pay(settings, network, txid)
    if waiting:
        names = " ".join(item.transfer_id for item in waiting)
        sys.stderr.write(
            f"rpcsvc: not explained: {txid} may have paid {names}, which would be paid once more."
            f" Adopt it (rpcsvc payouts adopt), or close each: rpcsvc payouts close TRANSFER {txid}"
            " --note TEXT\n"
        )
        return FAILED
    moved = asyncio.run(_look(settings, network, txid, wei))
    if moved is None:
        moved = _lost(settings, network, txid)
    if moved is None:
        sys.stderr.write(
            f"rpcsvc: not explained: {network} shows no transaction {txid} that moved anything of"
            " the service's wallets\n"
        )
        return FAILED
    books_of.explain(settings.data_dir, network, txid, note, SystemClock().now_ms(), wei)
    sys.stdout.write(f"{txid} on {network}, {moved}: {note}\n")
    if recorded is not None:
        sys.stdout.write(
            f"It is on record as payment {recorded}: that is compared as before, and what the"
            " transaction moved besides is explained.\n"
        )
    return OK


def _may_still_pay(settings: Settings, network: str, txid: str) -> list[TransferEntry]:
    """The open XMR transfers that a transaction may have paid: explained, it would not keep the
    service from paying them. What an EVM transaction paid is on the chain, and the audit sees it.
    """
    books = read_books(settings.data_dir)
    transfers = [item for order in books.orders for item in order.transfers]
    if network != MONERO or all(t.state.is_final for t in transfers if t.network == MONERO):
        return []

    async def sent() -> list[WalletTransfer]:
        _, wallet = wiring.monero_clients(settings.onchain)
        async with wallet:
            await wallet.refresh()
            return await wallet.transfer(txid)

    try:
        found = asyncio.run(sent())
    except RpcFailure as error:
        raise Unreachable(f"{network} can't be asked: {error}. Nothing was changed.") from error
    units = sum(item.amount for item in found if item.kind is TransferKind.OUTGOING)
    return may_pay(books, network, txid, (), units) if units else []


def _lost(settings: Settings, network: str, txid: str) -> str | None:
    """In words: it brought a deposit that a payout is signed for, and is gone. None: it did not."""
    for order in read_books(settings.data_dir).orders:
        for deposit in order.deposits:
            spent_on = order.transfer(deposit.transfer_id)
            is_signed = spent_on is not None and spent_on.state in _SIGNED
            if (deposit.network, deposit.txid) == (network, txid) and is_signed:
                return (
                    f"a deposit of {deposit.units} units for {order.order_id} that the chain does"
                    " not show any more"
                )
    return None


async def _look(settings: Settings, network: str, txid: str, wei: int) -> str | None:
    """What it moved of the service's wallets, in words; None when the chain shows nothing."""
    try:
        if network == MONERO:
            return await _look_at_monero(settings, txid)
        return await _look_at_chain(settings, network, txid, wei)
    except RpcFailure as error:
        raise Unreachable(f"{network} can't be asked: {error}. Nothing was changed.") from error


async def _look_at_monero(settings: Settings, txid: str) -> str | None:
    with snapshot(settings.data_dir) as taken:
        known = await SqliteMoneroLedger(taken).wallet()
    _, wallet = wiring.monero_clients(settings.onchain)
    async with wallet:
        if known is not None:
            await _require_same_wallet(wallet, known)
        await wallet.refresh()
        found = await wallet.transfer(txid)
    sent = sum(i.amount + i.fee for i in found if i.kind is TransferKind.OUTGOING)
    came = sum(i.amount for i in found if i.kind is TransferKind.INCOMING)
    if not sent and not came:
        return None
    parts = (("sent", sent), ("received", came))
    said = [f"{word} {format_units(units, XMR)} XMR" for word, units in parts if units]
    return ", ".join(said)


async def _require_same_wallet(wallet: WalletClient, known: WalletRecord) -> None:
    """What another wallet did is nothing that the service's one can be short of."""
    address = await wallet.primary_address()
    if address != known.primary_address:
        raise Unreachable(
            f"Another XMR wallet is open: its primary address begins with {address[:12]}, that of"
            f" the first start with {known.primary_address[:12]}. Nothing was changed."
        )


async def _look_at_chain(settings: Settings, network: str, txid: str, wei: int) -> str | None:
    node = _node(settings, network)
    async with node.client:
        receipt = await node.client.receipt(txid)
        made = await node.client.transaction(txid)
    if receipt is None or made is None:
        return None
    with operator_books(settings) as books:
        sent, came = _units(receipt.logs, node.network.token, books)
        ours = books.is_own_address(made.sender)
        ether = _ether(made, receipt, books)
    if wei and receipt.ok:
        ether.append(f"received {wei} wei from contracts, as you say")
    if not (sent or came or ours or ether):
        return None
    parts = (("sent", sent), ("received", came))
    said = [f"{word} {format_units(units, USDC)} USDC" for word, units in parts if units]
    return ", ".join(said + ether) or "moved no USDC"


def _ether(made: EvmTransaction, receipt: Receipt, books: OperatorBooks) -> list[str]:
    """What it sent along with it from the hot wallet, or to it, in words; without its fee."""
    is_from = books.is_hot_wallet(made.sender)
    is_to = made.to is not None and books.is_hot_wallet(made.to)
    if not made.value or not receipt.ok or is_from == is_to:
        return []
    return [f"{'sent' if is_from else 'received'} {made.value} wei"]


def _units(logs: tuple[Log, ...], token: str, books: OperatorBooks) -> tuple[int, int]:
    """USDC units that left the service's addresses, and that came from elsewhere."""
    sent, came = 0, 0
    for log in logs:
        if log.address.lower() != token.lower() or log.topics[:1] != (usdc.TRANSFER_TOPIC,):
            continue
        event = usdc.read_transfer(log.topics, log.data)
        is_from, is_to = books.is_own_address(event.sender), books.is_own_address(event.to)
        sent += event.units if is_from and not is_to else 0
        came += event.units if is_to and not is_from else 0
    return sent, came


def _node(settings: Settings, network: str) -> EvmNode:
    chains = read_chains(settings.chains_file)
    nodes = wiring.evm_nodes(settings.onchain, wiring.served_chains(settings.onchain, chains))
    for node in nodes:
        if node.network.name == network:
            return node
    names = ", ".join([MONERO, *(node.network.name for node in nodes)])
    raise UsageError(f"NETWORK must be one of {names}, not {network[:40]}.")
