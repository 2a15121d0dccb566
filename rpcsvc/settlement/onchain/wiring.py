"""Connects the engine onchain, and reads its settings: clients, keys, options, both adapters."""

from __future__ import annotations

import shlex
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Final

from msgspec.structs import replace
from pydantic import SecretStr

from rpcsvc.clock import SystemClock
from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.domain.chains import Chain, ChainRegistry
from rpcsvc.domain.money import USDC, XMR, Asset, as_units, parse_amount
from rpcsvc.domain.reservations import counted
from rpcsvc.engine_context import EngineContext
from rpcsvc.errors import Unavailable
from rpcsvc.orders.policy import MakeOrders
from rpcsvc.orders.ports.venue import VenueProfile
from rpcsvc.orders.ports.wallets import NetworkNames, OrderingWallets
from rpcsvc.orders.settlement import Settlement, replica, settling_service
from rpcsvc.orders.shared_wallets import PublishedWallets, WalletPublisher
from rpcsvc.orders.withdrawals import WithdrawalLimits, read_allow_list
from rpcsvc.rates.sources import rate_source
from rpcsvc.settings import Settings, SettingsError
from rpcsvc.settings_onchain import ALL_NETWORKS, EACH_NETWORK, InventorySettings, OnchainSettings
from rpcsvc.settlement.onchain.daemon_rpc import ChainUnusable, DaemonEndpoint, HasTime, always
from rpcsvc.settlement.onchain.engine import Caps, OnchainEngine, PayoutGuard, SignedPayments
from rpcsvc.settlement.onchain.evm.adapter import (
    EvmAdapter,
    EvmNode,
    Ledgers,
    OnchainAuthorizations,
)
from rpcsvc.settlement.onchain.evm.deposit_ledger import EvmDepositLedger
from rpcsvc.settlement.onchain.evm.gas import OpeningLedger
from rpcsvc.settlement.onchain.evm.keys import HdKeys, KeyFileRefused, read_mnemonic
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.records import EvmNetwork
from rpcsvc.settlement.onchain.journal.files import FOLDER
from rpcsvc.settlement.onchain.journal.writer import JournalOptions, PaymentJournal
from rpcsvc.settlement.onchain.journal_replay import (
    JournalWatch,
    open_journal,
    pause_restored,
)
from rpcsvc.settlement.onchain.monero.adapter import MoneroAdapter
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient
from rpcsvc.settlement.onchain.monero.records import NETWORK as MONERO
from rpcsvc.settlement.onchain.monero.records import MoneroOptions
from rpcsvc.settlement.onchain.monero.unrecorded import MoneroOutgoing, StartupReconciliation
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.pause import PauseRow, PauseSwitch, SharedPause
from rpcsvc.settlement.onchain.thresholds import (
    DepthTag,
    Threshold,
    Thresholds,
    read_thresholds,
)
from rpcsvc.settlement.onchain.unrecorded import UnrecordedLedger
from rpcsvc.store.checks import UnservedOrders
from rpcsvc.store.finality import FinalityRows, loss_problem
from rpcsvc.store.leases import DatabaseReplaced
from rpcsvc.store.replicas import SharedWallets

KEY_FILE: Final = "evm-mnemonic"
_WEI: Final = 10**18
# More orders than half of this, in the time that a commit takes, find no XMR address ready.
_LEAST_RESERVE: Final = 256
# Confirmations of what took the inputs of an XMR payout.
_FAILED_AFTER: Final = 30


@asynccontextmanager
async def connect(context: EngineContext, make_orders: MakeOrders) -> AsyncIterator[Settlement]:
    """Settle from the operator's wallets, or take orders while another replica does.

    Raises SettingsError, also when a node refuses a call. The packages of the extra ``onchain`` are
    imported only when a key is first needed.
    """
    settings, clock, lease = context.settings.onchain, context.clock, context.lease
    rates = rate_source(context.settings.rates, clock)
    rate_loops = [rates.run] if rates.run else []
    served = served_chains(settings, context.chains)
    limits = WithdrawalLimits(
        _withdraw_to(context.settings, served),
        {asset: each.per_transfer for asset, each in caps(settings).items()},
    )
    # Engine and auditor share it: a pause that can't be written holds in this object alone.
    switch = PauseSwitch(context.settings.data_dir)
    row = None if lease.is_alone else PauseRow(context.tables)
    shared = None if row is None else SharedPause(row, switch, clock)
    if shared is not None:
        await shared.look()
    journal = await _journal(context, switch, shared)
    async with AsyncExitStack() as closing:
        closing.push_async_callback(journal.close)
        guard = PayoutGuard(switch, caps(settings), SignedPayments(context.tables), clock, shared)
        usdc = _evm_adapter(context, served, journal, row, switch)
        engine = await _engine(context, usdc, journal, row, guard)
        closing.push_async_callback(engine.close)  # gives addresses back to the journal
        profile = VenueProfile(
            engine="onchain",
            network=settings.monero_network,
            chains=served,
            monero_networks=_monero_networks(settings),
            names=engine.names,
            takes_signatures=lambda: True,
        )
        orders = make_orders(profile, clock, counted)
        rows = SharedWallets(context.tables)
        wallets: OrderingWallets
        if lease.is_held:
            wallets = engine
            authorizations = OnchainAuthorizations(engine, usdc)
            publisher = WalletPublisher(rows, engine, engine.holdings, pool_size(settings))
            try:
                settlement = await settling_service(
                    orders, engine, rates.source, limits, authorizations, publisher.publish
                )
            except ChainUnusable as found:
                raise SettingsError([f"onchain: {found}"]) from found
            loops = [engine.run, journal.run, *rate_loops]
            settlement.worker.beside(partial(journal.compare, context.tables))
            loops += [shared.run] if shared else []
        else:
            usdc.open()
            wallets = published = PublishedWallets(rows, engine, context.random)
            authorizations = OnchainAuthorizations(published, usdc)
            settlement = await replica(
                orders, engine, published, rates.source, limits, authorizations, published.refresh
            )
            loops = [usdc.look, *rate_loops]
        for loop in loops:
            settlement.worker.beside(loop)
        readings = replace(
            settlement.readings,
            states=wallets.states,
            paused=switch.reason,
            rate_spread_bps=rates.spread_bps,
            authorization_gas=authorizations.gas_share,
        )
        watch = JournalWatch(context.tables, journal, shared)
        yield replace(settlement, readings=readings, watch=watch)


async def _journal(
    context: EngineContext, switch: PauseSwitch, shared: SharedPause | None
) -> PaymentJournal:
    """Make the payment journal, opened under the lease, which its lines are written under."""
    options = journal_options(context.settings.onchain, context.settings.data_dir)
    lease, watched, clock = context.lease, context.watched, context.clock

    async def replaced() -> None:
        try:
            if shared is not None:
                with suppress(Unavailable):  # the pause is in this replica's file
                    await pause_restored(switch, shared)
        finally:  # it is called once: also if its caller was cancelled
            lease.lose(DatabaseReplaced)

    journal = PaymentJournal(
        options, clock, context.random, lease=lease.on_record, on_replaced=replaced
    )
    if lease.is_held:
        marks = None if watched is None else watched.marks
        await open_journal(journal, context.tables, clock, switch, marks, shared=shared)
    return journal


def _evm_adapter(
    context: EngineContext,
    served: ChainRegistry,
    journal: PaymentJournal,
    row: PauseRow | None,
    switch: PauseSwitch,
) -> EvmAdapter:
    settings, tables = context.settings.onchain, context.tables
    try:
        keys = HdKeys(read_mnemonic(key_path(settings, context.settings.data_dir)))
    except KeyFileRefused as error:
        raise SettingsError([f"onchain.key_file: {error} Make one: rpcsvc onchain init"]) from error
    ledgers = Ledgers(
        EvmDepositLedger(tables, journal),
        EvmPaymentLedger(tables, journal, row),
        UnrecordedLedger(tables),
        OpeningLedger(tables),
    )
    nodes = evm_nodes(settings, served, context.lease.has_time)
    return EvmAdapter(nodes, context.chains, keys, ledgers, context.clock, settings, switch)


async def _engine(
    context: EngineContext,
    usdc: EvmAdapter,
    journal: PaymentJournal,
    row: PauseRow | None,
    guard: PayoutGuard,
) -> OnchainEngine:
    settings, tables, clock = context.settings.onchain, context.tables, context.clock
    clients = monero_clients(settings, context.lease.has_time)
    ledger = MoneroLedger(tables, journal, row)
    options = monero_options(settings)
    xmr = MoneroAdapter(*clients, ledger, clock, options)
    reconciliations = {}
    # An operator who wants no audits, or no pause for their findings, wants no reconciliation.
    if settings.audit_seconds and settings.pause_on_difference:
        unrecorded = UnrecordedLedger(tables)
        outgoing = MoneroOutgoing(
            xmr.connection, ledger, unrecorded, clock, mines_on_demand=options.mines_on_demand
        )
        first = StartupReconciliation(outgoing, unrecorded, guard.switch, clock)
        reconciliations[XMR] = first
        xmr.hold_upkeep(first.require_done)
    unserved = await UnservedOrders.find(tables, frozenset((*xmr.networks, *usdc.networks)))
    return OnchainEngine(
        (xmr, usdc),
        guard,
        floors=floors(settings),
        poll_ms=settings.poll_ms,
        reconciliations=reconciliations,
        looks={
            "orders": unserved.problem,
            "deposits": lambda: loss_problem(FinalityRows(tables), clock.now_ms()),
        },
        journal=journal,
        has_time=context.lease.has_time,
    )


def check(settings: Settings, chains: ChainRegistry) -> None:
    """Raise SettingsError for settings that a start would refuse. Asks no node and no wallet."""
    onchain = settings.onchain
    monero_options(onchain)
    monero_clients(onchain)
    served = served_chains(onchain, chains)
    evm_nodes(onchain, served)
    read_targets(settings.inventory, served)
    _withdraw_to(settings, served)
    rate_source(settings.rates, SystemClock())


def served_chains(settings: OnchainSettings, chains: ChainRegistry) -> ChainRegistry:
    """Return the chains that have a node. Raises SettingsError."""
    nodes = _pairs(settings.nodes)
    known = {chain.name: chain for chain in chains.all()}
    unknown = sorted(set(nodes) - set(known))
    if unknown or not nodes:
        received = ", ".join(unknown) or "nothing"
        raise SettingsError(
            [
                f"onchain.nodes: received {received}; allowed: chain=URL, of the chains"
                f" {', '.join(known)}, such as arbitrum=http://127.0.0.1:8545"
            ]
        )
    # A name that is no chain's would leave the deposits of the meant chain at the default.
    named = {text.split("=", 1)[0] for text in settings.usdc_confirmations}
    if unknown := sorted(named - set(known)):
        raise SettingsError(
            [
                f"onchain.usdc_confirmations: received {', '.join(unknown)}; allowed: names of the"
                f" chains {', '.join(known)}"
            ]
        )
    bounded = {text.split("=", 1)[0] for text in settings.unfinal_usd}
    if unknown := sorted(bounded - {*known, MONERO, ALL_NETWORKS, EACH_NETWORK}):
        raise SettingsError(
            [
                f"onchain.unfinal_usd: received {', '.join(unknown)}; allowed: {ALL_NETWORKS},"
                f" {EACH_NETWORK}, {MONERO}, and names of the chains {', '.join(known)}"
            ]
        )
    return ChainRegistry(known[name] for name in nodes)


def journal_options(settings: OnchainSettings, data_dir: Path) -> JournalOptions:
    """The locations of the payment journal. Raises SettingsError."""
    folder = data_dir / FOLDER
    if folder in settings.journal_places:
        raise SettingsError(
            [
                f"onchain.journal_places: received {folder}, where the journal is anyway; allowed:"
                " folders on other disks"
            ]
        )
    try:
        command = tuple(shlex.split(settings.journal_command))
    except ValueError as error:
        raise SettingsError(
            [f"onchain.journal_command: {error}; allowed: a program and its arguments, quoted"]
        ) from error
    return JournalOptions(folder, settings.journal_places, command)


def key_path(settings: OnchainSettings, data_dir: Path) -> Path:
    """The path of the mnemonic."""
    return settings.key_file or data_dir / KEY_FILE


# --- XMR -------------------------------------------------------------------------------------


def monero_clients(
    settings: OnchainSettings, has_time: HasTime = always
) -> tuple[MonerodClient, WalletClient]:
    """Build unopened clients of monerod and monero-wallet-rpc. Raises SettingsError."""
    node = _endpoint(
        "monerod", settings.monerod_url, settings.monerod_username, settings.monerod_password
    )
    wallet = _endpoint(
        "monero-wallet-rpc",
        settings.wallet_url,
        settings.wallet_username,
        settings.wallet_password,
        serial=True,
    )
    return MonerodClient(node, has_time=has_time), WalletClient(wallet, has_time=has_time)


def monero_options(settings: OnchainSettings) -> MoneroOptions:
    """The options of the XMR adapter. Raises SettingsError."""
    regtest = settings.monero_network == "regtest"
    ahead = settings.xmr_addresses
    try:
        return MoneroOptions(
            nettype="fakechain" if regtest else settings.monero_network,
            wallet_file=settings.wallet_file or None,
            wallet_password=_revealed(settings.wallet_file_password) or "",
            thresholds=_within_bounds(
                settings,
                MONERO,
                read_thresholds("onchain.xmr_confirmations", settings.xmr_confirmations, XMR),
            ),
            settled_after=settings.xmr_settled_after,
            # A rival of a payout is final no earlier than a payout is.
            failed_after=max(_FAILED_AFTER, settings.xmr_settled_after),
            pool_target=ahead,
            pool_low=ahead * 3 // 4,
            reserve=min(ahead, max(_LEAST_RESERVE, ahead // 4)),
            outputs_target=settings.xmr_outputs,
            output_units=parse_amount(settings.xmr_output, XMR).units,
        )
    except ValueError as error:
        raise SettingsError([f"onchain: {error}"]) from error


# --- USDC ------------------------------------------------------------------------------------


def evm_nodes(
    settings: OnchainSettings, chains: ChainRegistry, has_time: HasTime = always
) -> list[EvmNode]:
    """Build one node, with an unopened client, for each of ``chains``. Raises SettingsError."""
    urls, prices = _pairs(settings.nodes), _pairs(settings.gas_prices)
    nodes = []
    for chain in chains.all():
        price = prices.get(chain.native_token)
        if price is None:
            raise SettingsError(
                [
                    f"onchain.gas_prices: received none for {chain.native_token}, which gas on"
                    f" {chain.name} is paid in; allowed: {chain.native_token}=price in USD"
                ]
            )
        coin_price = parse_amount(price, USDC).units
        endpoint = _endpoint(f"node of {chain.name}", urls[chain.name], "", None)
        client = EvmClient(endpoint, has_time=has_time)
        nodes.append(EvmNode(_network(settings, chain, coin_price), client, coin_price))
    return nodes


def _network(settings: OnchainSettings, chain: Chain, coin_price: int) -> EvmNetwork:
    names = NetworkNames.of_usdc(chain, is_test=settings.has_test_networks)
    highest_fee = settings.highest_gas_usd * 10**USDC.decimals * _WEI // coin_price
    depth = chain.confirmations
    seconds = {
        tag: seconds
        for tag, seconds in (
            (DepthTag.SAFE, chain.safe_seconds),
            (DepthTag.FINALIZED, chain.finalized_seconds),
        )
        if seconds is not None
    }
    return EvmNetwork(
        name=chain.name,
        chain_id=names.chain_id,
        token=names.token or "",
        thresholds=_usdc_thresholds(settings, chain, seconds),
        tag_seconds=seconds,
        settled_after=depth,
        failed_after=depth * 3,
        block_seconds=chain.block_time_ms / 1000,
        highest_fee=highest_fee,
        gas_reserve=highest_fee // 10,
        sweep_units=parse_amount(settings.sweep_usdc, USDC).units,
        l1_fee_oracle=chain.l1_fee_oracle,
    )


def _usdc_thresholds(
    settings: OnchainSettings, chain: Chain, allowed: Collection[DepthTag]
) -> Thresholds:
    """The thresholds of deposits on a chain: of the settings, or else of the table of chains."""
    pairs = (text.split("=", 1) for text in settings.usdc_confirmations)
    if given := [value for name, value in pairs if name == chain.name]:
        where = f"onchain.usdc_confirmations of {chain.name}"
    else:
        given = list(chain.deposit_confirmations or (f"0={chain.confirmations}",))
        where = f"chains_file: deposit_confirmations of {chain.name}"
    found = read_thresholds(where, given, USDC, allowed)
    return _within_bounds(settings, chain.name, found)


# --- both ------------------------------------------------------------------------------------


def _within_bounds(settings: OnchainSettings, network: str, thresholds: Thresholds) -> Thresholds:
    """The thresholds of a network; the final one alone where nothing may be at risk."""
    if all(most for _, most in settings.finality.on(network)):
        return thresholds
    return (Threshold(0, thresholds[-1].depth),)


def _monero_networks(settings: OnchainSettings) -> frozenset[MoneroNetwork]:
    """The networks whose addresses are good. Addresses of a regtest chain are those of mainnet."""
    name = settings.monero_network
    return frozenset({MoneroNetwork.MAINNET if name == "regtest" else MoneroNetwork(name)})


def _withdraw_to(settings: Settings, served: ChainRegistry) -> dict[str, tuple[str, ...]]:
    monero = _monero_networks(settings.onchain)
    return read_allow_list(settings.inventory.withdraw_to, served, monero)


def caps(settings: OnchainSettings) -> Mapping[Asset, Caps]:
    """Return the caps on outgoing money, by asset. Raises errors.InputError."""

    def units(text: str, asset: Asset) -> int:
        return parse_amount(text, asset).units

    return {
        XMR: Caps(units(settings.xmr_per_transfer, XMR), units(settings.xmr_per_day, XMR)),
        USDC: Caps(units(settings.usdc_per_transfer, USDC), units(settings.usdc_per_day, USDC)),
    }


def pool_size(settings: OnchainSettings) -> int:
    """The number of addresses of each asset that are kept for replicas that do not settle."""
    return max(1, min(settings.xmr_addresses, settings.usdc_addresses) // 4)


def floors(settings: OnchainSettings) -> Mapping[Asset, int]:
    """Return the lowest wanted balance of the wallets, by asset. Raises errors.InputError."""
    given = {XMR: settings.xmr_floor, USDC: settings.usdc_floor}
    return {
        asset: parse_amount(text, asset).units if text.strip("0.") else 0
        for asset, text in given.items()
    }


def read_targets(settings: InventorySettings, served: ChainRegistry) -> dict[str, int]:
    """Units to keep free by network. Raises SettingsError for a network that is not served."""
    networks = (MONERO, *(chain.name for chain in served.all()))
    targets, problems = {}, []
    for given in settings.targets:
        name, _, amount = given.partition("=")
        network, asset = name.lower(), XMR if name.lower() == MONERO else USDC
        if network not in networks:
            problems.append(f"inventory.targets: received {name!r}; allowed: {', '.join(networks)}")
        elif len(amount.partition(".")[2]) > asset.decimals:
            problems.append(
                f"inventory.targets: received {given!r}; allowed: at most {asset.decimals}"
                f" decimals of {asset.symbol}"
            )
        else:
            targets[network] = int(as_units(amount, asset))
    if problems:
        raise SettingsError(problems)
    return targets


def _endpoint(
    name: str, url: str, username: str, password: SecretStr | None, *, serial: bool = False
) -> DaemonEndpoint:
    try:
        return DaemonEndpoint(
            name, url, username or None, _revealed(password) if username else None, serial=serial
        )
    except ValueError as error:
        raise SettingsError([f"onchain: {error}"]) from error


def _revealed(secret: SecretStr | None) -> str | None:
    return None if secret is None else secret.get_secret_value()


def _pairs(texts: tuple[str, ...]) -> dict[str, str]:
    return dict(text.split("=", 1) for text in texts)
