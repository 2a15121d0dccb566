"""The composition root's part for the engine onchain: wallets, rates, and the auditor beside them.

A module of its own, since no other engine needs what it imports: app.py imports it late. The
packages of the extra ``onchain`` come later still, when a key is first needed (evm/keys.py).
What does not live here: anything that decides or computes.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from rpcsvc.audit.auditor import audit_loop
from rpcsvc.backend import Backend
from rpcsvc.clock import Clock
from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.ids import system_random
from rpcsvc.orders.reservations import Reservations
from rpcsvc.rates.wiring import rate_source
from rpcsvc.settings import Settings, SettingsError
from rpcsvc.settlement.onchain import wiring
from rpcsvc.settlement.onchain.adapter import ChainUnusable
from rpcsvc.settlement.onchain.evm.adapter import Ledgers
from rpcsvc.settlement.onchain.guard import PauseSwitch
from rpcsvc.settlement.onchain.journal.writer import PaymentJournal
from rpcsvc.settlement.onchain.monero.ledger import NETWORK as MONERO
from rpcsvc.store.backends.sqlite.database import Database
from rpcsvc.store.journal_replay import open_journal
from rpcsvc.store.journaled import (
    JournaledEvmDepositLedger,
    JournaledEvmPaymentLedger,
    JournaledMoneroLedger,
)
from rpcsvc.store.onchain_books import OnchainBooks
from rpcsvc.store.onchain_evm_openings import SqliteOpeningLedger
from rpcsvc.store.onchain_unrecorded import SqliteUnrecordedLedger
from rpcsvc.store.unserved_orders import UnservedOrders


@asynccontextmanager
async def onchain_backend(
    settings: Settings, database: Database, chains: ChainRegistry, clock: Clock
) -> AsyncIterator[Backend]:
    """Both adapters, rates and audits, running. Raises SettingsError for what a node refuses."""
    rates = rate_source(settings.rates, clock)
    served = wiring.served_chains(settings.onchain, chains)
    networks = {MONERO, *(chain.name for chain in served.all())}
    # One for all: a pause that can't be written holds in this object alone.
    switch = PauseSwitch(settings.data_dir)
    journal = PaymentJournal(
        wiring.journal_options(settings.onchain, settings.data_dir), clock, system_random
    )
    await open_journal(journal, database, clock, switch)
    parts = wiring.Parts(
        data_dir=settings.data_dir,
        switch=switch,
        chains=chains,
        clock=clock,
        monero_ledger=JournaledMoneroLedger(database, journal),
        evm_ledgers=Ledgers(
            JournaledEvmDepositLedger(database, journal),
            JournaledEvmPaymentLedger(database, journal),
            SqliteUnrecordedLedger(database),
            SqliteOpeningLedger(database),
        ),
        signed=OnchainBooks(database),
        unserved=(await UnservedOrders.find(database, networks)).problem,
        journal=journal,
    )
    name = settings.onchain.monero_network
    # Addresses of a regtest chain are those of mainnet.
    monero = MoneroNetwork.MAINNET if name == "regtest" else MoneroNetwork(name)
    async with (
        AsyncExitStack() as after,
        wiring.onchain_engine(settings.onchain, parts) as engine,
        audit_loop(settings.onchain, served, settings.data_dir, switch) as audits,
    ):
        after.push_async_callback(journal.close)  # the engine gives addresses back before
        beside = (engine.run, audits.run, journal.run, *((rates.run,) if rates.run else ()))
        try:
            yield Backend(
                engine,
                rates.source,
                clock,
                name,
                frozenset({monero}),
                beside=beside,
                reservations=Reservations(),
                offered=served,
            )
        except ChainUnusable as found:
            raise SettingsError([f"onchain: {found}"]) from found
