"""The composition root's part for the engine onchain: wallets, rates, and the auditor beside them.

The packages of the extra ``onchain`` are imported only when a key is first needed.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from msgspec.structs import replace

from rpcsvc.audit.auditor import audit_loop
from rpcsvc.audit.books import reader_of
from rpcsvc.clock import SystemClock
from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.engine_parts import EngineParts
from rpcsvc.ids import system_random
from rpcsvc.orders.backend import (
    Backend,
    Gasless,
    Joined,
    Outlet,
    Settler,
    stocked,
    wallets_backend,
)
from rpcsvc.orders.ports.venue import VenueProfile
from rpcsvc.orders.ports.wallets import OrderingWallets
from rpcsvc.orders.shared_wallets import PublishedWallets, WalletPublisher
from rpcsvc.orders.withdrawals import read_allow_list
from rpcsvc.rates.sources import rate_source
from rpcsvc.settings import Settings, SettingsError
from rpcsvc.settlement.onchain import wiring
from rpcsvc.settlement.onchain.adapter import ChainUnusable
from rpcsvc.settlement.onchain.evm.adapter import Ledgers
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.gas import OpeningLedger
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.guard import PauseRow, PauseSwitch, SharedPause, SignedPayments
from rpcsvc.settlement.onchain.journal.writer import PaymentJournal
from rpcsvc.settlement.onchain.journal_replay import JournalWatch, open_journal
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.records import NETWORK as MONERO
from rpcsvc.settlement.onchain.unrecorded import UnrecordedLedger
from rpcsvc.store.checks import UnservedOrders
from rpcsvc.store.gasless import FundingStore
from rpcsvc.store.replicas import SharedWallets
from rpcsvc.store.withdrawals import WithdrawalStore
from rpcsvc.treasury.planning import read_targets
from rpcsvc.treasury.wallets import OnchainTreasury


@asynccontextmanager
async def connected(given: EngineParts) -> AsyncIterator[Backend]:
    """Both adapters, rates and audits, running. Raises SettingsError for what a node refuses."""
    settings, chains, clock, database = given.settings, given.chains, given.clock, given.database
    rates = rate_source(settings.rates, clock)
    served = wiring.served_chains(settings.onchain, chains)
    networks = {MONERO, *(chain.name for chain in served.all())}
    # One for all: a pause that can't be written holds in this object alone.
    switch = PauseSwitch(settings.data_dir)
    journal = PaymentJournal(
        wiring.journal_options(settings.onchain, settings.data_dir),
        clock,
        system_random,
        lease=given.lease.on_record,
    )
    row = None if given.lease.is_alone else PauseRow(database)
    shared = None if row is None else SharedPause(row, switch, clock)
    if shared is not None:
        await shared.look()
    if given.lease.is_held:
        watched = None if given.watched is None else given.watched.marks
        alone = given.lease.is_alone
        await open_journal(journal, database, clock, switch, watched, is_alone=alone)
    parts = wiring.Parts(
        data_dir=settings.data_dir,
        switch=switch,
        chains=chains,
        clock=clock,
        monero_ledger=MoneroLedger(database, journal, row),
        evm_ledgers=Ledgers(
            EvmDepositLedger(database, journal),
            EvmPaymentLedger(database, journal, row),
            UnrecordedLedger(database),
            OpeningLedger(database),
        ),
        signed=SignedPayments(database),
        unserved=(await UnservedOrders.find(database, networks)).problem,
        lease=given.lease,
        journal=journal,
        shared=shared,
    )
    treasury = OnchainTreasury(settings, database, clock, switch.reason, rates.source)
    name, monero = settings.onchain.monero_network, _monero_networks(settings)
    outlet = Outlet(
        WithdrawalStore(database),
        read_allow_list(settings.inventory.withdraw_to, served, monero),
        {asset: caps.per_transfer for asset, caps in wiring.caps(settings.onchain).items()},
    )
    books = reader_of(settings.data_dir, database if settings.postgresql_url else None)
    async with (
        AsyncExitStack() as after,
        wiring.onchain_engine(settings.onchain, parts) as onchain,
        audit_loop(settings.onchain, served, books, switch) as audits,
    ):
        after.push_async_callback(journal.close)  # the engine gives addresses back before
        engine, rows = onchain.engine, SharedWallets(database)
        published = PublishedWallets(rows, engine, given.random)
        publisher = WalletPublisher(
            rows, engine, engine.holdings, served, wiring.pool_size(settings.onchain)
        )
        ordering: OrderingWallets = engine if given.lease.is_held else published
        authorizations = wiring.OnchainAuthorizations(ordering.require_ready, onchain.usdc)
        rate_loop = [rates.run] if rates.run else []
        beside = [engine.run, audits.run, journal.run, *rate_loop]
        beside += [shared.run] if shared else []
        try:
            backend = wallets_backend(
                VenueProfile(
                    engine="onchain",
                    network=name,
                    chains=served,
                    monero_networks=monero,
                    names=engine.names,
                ),
                Settler(engine, stocked(engine.holdings), publisher.publish, beside),
                Joined(
                    published,
                    stocked(published.holdings),
                    published.refresh,
                    [onchain.usdc.look, *rate_loop],
                    published.pooled,
                ),
                rates.source,
                clock,
                outlet,
                Gasless(FundingStore(database), authorizations, engine.poll_ms),
            )
            yield replace(
                backend,
                paused=switch.reason,
                last_audit=lambda: audits.last if given.lease.is_held else None,
                treasury=treasury,
                states=ordering.states,
                rate_spread_bps=rates.spread_bps,
                authorization_gas=authorizations.gas_share,
                watch=JournalWatch(database, shared),
            )
        except ChainUnusable as found:
            raise SettingsError([f"onchain: {found}"]) from found


def _monero_networks(settings: Settings) -> frozenset[MoneroNetwork]:
    """Whose addresses are good. Those of a regtest chain are those of mainnet."""
    name = settings.onchain.monero_network
    return frozenset({MoneroNetwork.MAINNET if name == "regtest" else MoneroNetwork(name)})


def check(settings: Settings, chains: ChainRegistry) -> None:
    """Raise SettingsError for what a start would refuse, without asking a node or a wallet."""
    onchain = settings.onchain
    wiring.monero_options(onchain)
    wiring.monero_clients(onchain)
    served = wiring.served_chains(onchain, chains)
    wiring.evm_nodes(onchain, served)
    read_targets(settings.inventory, served)
    read_allow_list(settings.inventory.withdraw_to, served, _monero_networks(settings))
    rate_source(settings.rates, SystemClock())
