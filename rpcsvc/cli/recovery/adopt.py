"""``rpcsvc payouts adopt TRANSFER TXID``: records a transaction of the own wallet as a transfer's.

For a database that was restored from a copy and does not know what was paid since. The chain is
asked whether the transaction pays just that transfer. The service must not be running.
"""

from __future__ import annotations

import sys
from contextlib import AsyncExitStack

from rpcsvc.cli.context import FAILED, OK, Context, UsageError
from rpcsvc.cli.operator.service import onchain_settings
from rpcsvc.cli.recovery.owner import with_database
from rpcsvc.clock import SystemClock
from rpcsvc.domain.events import order_of
from rpcsvc.domain.money import format_units
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.settings import Settings
from rpcsvc.settings_onchain import read_chains
from rpcsvc.settlement.onchain import wiring
from rpcsvc.settlement.onchain.evm.adoption import EvmAdoption
from rpcsvc.settlement.onchain.evm.connection import EvmConnection
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import NETWORK as MONERO
from rpcsvc.settlement.onchain.monero.unrecorded import MoneroAdoption
from rpcsvc.settlement.onchain.unrecorded import Adopted, NotAdopted, OpenTransfer
from rpcsvc.store.backends.sqlite.database import Database
from rpcsvc.store.database import StoreConflict
from rpcsvc.store.evm_deposits import SqlEvmDepositLedger
from rpcsvc.store.evm_payments import SqlEvmPaymentLedger
from rpcsvc.store.monero import SqlMoneroLedger
from rpcsvc.store.orders import SqlOrderStore


def adopt(context: Context) -> int:
    """The command. Raises UsageError and Unreachable: nothing was changed."""
    settings, options = onchain_settings(context), context.options

    async def work(database: Database) -> Adopted:
        return await _Adoption(settings, database).run(
            options.transfer, options.txid, options.tx_key
        )

    try:
        done = with_database(settings, work)
    except NotAdopted as refused:
        sys.stderr.write(f"rpcsvc: not adopted: {refused}\n")
        return FAILED
    except StoreConflict as conflict:
        sys.stderr.write(f"rpcsvc: not adopted: the books refuse it: {conflict}\n")
        return FAILED
    _print(done)
    return OK


def _print(done: Adopted) -> None:
    where = "waits to be mined" if done.block is None else f"is in block {done.block}"
    for item in done.transfers:
        paid = item.transfer
        amount = f"{format_units(paid.units, paid.asset)} {paid.asset.symbol}"
        sys.stdout.write(
            f"{paid.transfer_id} of {item.order_id}: {amount}, paid by {done.txid}, which {where}\n"
        )
    asset, network = done.transfers[0].transfer.asset, done.transfers[0].transfer.network
    if done.other_units:
        sys.stdout.write(
            f"The transaction pays {format_units(done.other_units, asset)} {asset.symbol} more than"
            " that. If it was to orders that the database has lost: rpcsvc treasury explain"
            f" {network} {done.txid} --note TEXT\n"
        )
    sys.stdout.write("It is not paid again. See what else there is: rpcsvc audit\n")


async def find_transfer(database: Database, transfer_id: str) -> OpenTransfer:
    """A transfer and its order. Raises UsageError."""
    order = await SqlOrderStore(database, lambda: "").order(order_of(transfer_id))
    transfer = order.transfer(transfer_id) if order else None
    if order is None or transfer is None:
        raise UsageError(
            f"There is no transfer {transfer_id}. They are listed by: rpcsvc payouts list"
        )
    return OpenTransfer(order.order_id, transfer)


class _Adoption:
    """One adoption over an open database that nobody else writes."""

    def __init__(self, settings: Settings, database: Database) -> None:
        self._settings = settings
        self._db = database
        self._clock = SystemClock()
        # A status answer is made when it is asked for next.
        store = SqlOrderStore(database, lambda: "")
        self._record = OrderProcessor(store, self._clock, lambda _order: None).record

    async def run(self, transfer_id: str, txid: str, key: str | None) -> Adopted:
        """Prove it and put it on record. Raises NotAdopted."""
        opened = await find_transfer(self._db, transfer_id)
        if opened.transfer.network == MONERO:
            return await self._monero(opened, txid, key)
        return await self._evm(opened, txid)

    async def _planned(self, network: str, but: str) -> list[OpenTransfer]:
        """What else waits to be paid on a network, oldest first."""
        rows = await self._db.fetch(
            "SELECT transfer_id FROM transfers WHERE network = :network AND state = 'planned'"
            " AND transfer_id <> :but ORDER BY seq",
            network=network,
            but=but,
        )
        return [await find_transfer(self._db, row["transfer_id"]) for row in rows]

    async def _monero(self, opened: OpenTransfer, txid: str, key: str | None) -> Adopted:
        settings = self._settings.onchain
        node, wallet = wiring.monero_clients(settings)
        ledger = SqlMoneroLedger(self._db)
        connection = MoneroConnection(node, wallet, ledger, wiring.monero_options(settings))
        others = await self._planned(MONERO, opened.transfer.transfer_id)
        async with node, wallet:
            adoption = MoneroAdoption(connection, ledger)
            return await adoption.adopt(opened, others, txid, key, self._record)

    async def _evm(self, opened: OpenTransfer, txid: str) -> Adopted:
        settings, name = self._settings.onchain, opened.transfer.network
        chains = read_chains(self._settings.chains_file)
        nodes = wiring.evm_nodes(settings, wiring.served_chains(settings, chains))
        served = next((node for node in nodes if node.network.name == name), None)
        wallet = await SqlEvmDepositLedger(self._db).wallet()
        if served is None or wallet is None:
            raise UsageError(f"onchain.nodes names no node for {name}, or no wallet is on record.")
        connection, ledger = (
            EvmConnection(served.client, served.network),
            SqlEvmPaymentLedger(self._db),
        )
        async with AsyncExitStack() as clients:
            await clients.enter_async_context(served.client)
            adoption = EvmAdoption(connection, ledger, wallet.hot_address, self._clock)
            return await adoption.adopt(opened, txid, self._record)
