"""The composition root: puts the parts of the service together around a connected engine.

running(settings)         everything but the network: store, engine, worker, operations
local_service(settings)   the same, for calls from within this process
"""

from __future__ import annotations

import asyncio
import shlex
import stat
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import structlog
from msgspec import Struct

from rpcsvc import engine_context
from rpcsvc.clock import DAY_MS, Clock, SystemClock
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.domain.clients import Clients, Credential, default_credentials
from rpcsvc.domain.order import Timeouts
from rpcsvc.domain.pricing import ONE_USDC
from rpcsvc.domain.reservations import Counting, UnfundedLimits
from rpcsvc.domain.webhooks import Targets
from rpcsvc.engine_context import EngineContext
from rpcsvc.engines import ENGINES
from rpcsvc.ids import RandomBytes, system_random
from rpcsvc.local_secret import local_secret
from rpcsvc.operations.admin import RECORDS, bound
from rpcsvc.operations.approvals import APPROVALS
from rpcsvc.operations.clients import CLIENTS, require_scopes
from rpcsvc.operations.dispatch import Dispatcher, LocalService, agent_dispatcher
from rpcsvc.operations.ordering import project, view_key
from rpcsvc.operations.service import (
    Operation,
    Service,
    TicketBudget,
    ViewContext,
    Webhooks,
    attester,
    with_sandbox,
)
from rpcsvc.operations.support import TICKETS
from rpcsvc.operations.table import (
    AGENT_OPERATIONS,
    BFF_OPERATIONS,
    OPERATIONS,
    SANDBOX_OPERATIONS,
)
from rpcsvc.operations.transfers import TRANSFERS, Transfers
from rpcsvc.operations.webhooks import WEBHOOKS, event_body
from rpcsvc.operations.withdrawals import WITHDRAWALS
from rpcsvc.orders.idempotency import Idempotency
from rpcsvc.orders.policy import Orders, Policy, Retention
from rpcsvc.orders.ports.venue import VenueProfile
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.orders.published_rates import RateRule
from rpcsvc.orders.scheduler.effects import retry_transfer
from rpcsvc.orders.scheduler.worker import Worker
from rpcsvc.orders.settlement import Readings, Settlement
from rpcsvc.orders.waits import Waits
from rpcsvc.orders.webhooks import Deliverer
from rpcsvc.settings import Settings, SettingsError
from rpcsvc.settings_clients import credentials
from rpcsvc.settings_onchain import read_chains
from rpcsvc.signing import KEYS_DIR, KeyRing, ResponseSigner
from rpcsvc.store.approvals import ApprovalStore
from rpcsvc.store.backends import open_database
from rpcsvc.store.backends.sqlite.database import OwnerLock
from rpcsvc.store.checks import engine_conflict
from rpcsvc.store.database import Database, DatabaseInUse, Tables
from rpcsvc.store.leases import (
    SETTLER,
    Fenced,
    Lease,
    LeaseKeeper,
    Leases,
    LeaseTaken,
    Watch,
    holder_name,
)
from rpcsvc.store.operator_books import OperatorBooks
from rpcsvc.store.orders import OrderStore
from rpcsvc.store.replicas import RateRows
from rpcsvc.store.settle_times import ObservedTimes
from rpcsvc.store.webhooks import WebhookStore
from rpcsvc.webhook_sender import WebhookSender, webhook_sender

log = structlog.get_logger(__name__)


class Reloaded:
    """The settings that hold, with the clients and the terms that are made from them.

    Those in settings.RELOADED are replaced while the service runs, and ``followers`` are told so.
    Raises SettingsError.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.clients = Clients(_known_clients(settings))
        self.policy = _policy(settings)
        self.followers: list[Callable[[], None]] = []

    def replace(self, settings: Settings) -> None:
        """Hold what the settings say, for the calls that come. Raises SettingsError, and then
        nothing has changed.
        """
        clients, policy = _known_clients(settings), _policy(settings)
        self.clients.replace(clients)
        self.policy.take(policy)
        self.settings = settings
        for follow in self.followers:
            follow()


def _known_clients(settings: Settings) -> list[Credential]:
    """Return the clients that the settings know by a token. Raises SettingsError."""
    tokens = [each.get_secret_value() for each in settings.agent_rpc_tokens]
    found = credentials(settings.clients)
    require_scopes(found, (*OPERATIONS, *BFF_OPERATIONS))
    return [*default_credentials(tokens), *found]


class Running(Struct, frozen=True):
    """A service that is up, without its network side.

    ``engine`` and ``watch`` are those of the Settlement. Without the ``lease`` held, the service
    takes orders that another process settles.
    """

    settings: Settings
    service: Service
    dispatcher: Dispatcher
    admin: tuple[Operation, ...]
    worker: Worker
    engine: Any
    readings: Readings
    database: Database
    signer: ResponseSigner | None
    lease: Lease
    watch: Watch | None
    held: Reloaded


# What a replica serves while another one settles, and it waits for the lease.
Standby: TypeAlias = Callable[[Running], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def running(
    settings: Settings,
    *,
    clock: Clock | None = None,
    random: RandomBytes = system_random,
    stop: asyncio.Event | None = None,
    standby: Standby | None = None,
    held: Reloaded | None = None,
) -> AsyncIterator[Running]:
    """Run the service on its data directory, owned exclusively, until the block ends.

    While another process holds the lease, this one waits until it may, or until ``stop`` is set,
    and runs ``standby`` meanwhile; without ``stop`` it does not wait. The worker is made, not
    started. ``held``: by default that of the settings. Raises DatabaseInUse, DatabaseUnusable,
    UnknownSchema, SigningKeyError and SettingsError.
    """
    chains = read_chains(settings.chains_file)
    engine_context.check(settings, chains)
    _make_data_dir(settings.data_dir)
    lock = OwnerLock(settings.data_dir)
    lock.acquire()
    try:
        database = await open_database(settings.data_dir, settings.postgresql_url)
        try:
            async with running_on(
                database, settings, chains, clock or SystemClock(), random, stop, standby, held
            ) as up:
                yield up
        finally:
            await database.close()
    finally:
        lock.release()


@asynccontextmanager
async def running_on(
    database: Database,
    settings: Settings,
    chains: ChainRegistry,
    clock: Clock,
    random: RandomBytes,
    stop: asyncio.Event | None = None,
    standby: Standby | None = None,
    held: Reloaded | None = None,
) -> AsyncIterator[Running]:
    """Run the service on an open database, under its lease, until the block ends.

    Raises as ``running``, which opens the database and owns the data directory.
    """
    signer = _signer(settings, clock, random)
    held = held or Reloaded(settings)

    def context(tables: Tables, lease: Lease) -> EngineContext:
        return EngineContext(settings, chains, clock, random, tables, lease, watch)

    keeper, watch = LeaseKeeper(Leases(database), holder_name(random), database.lease_ms), None
    try:
        async with AsyncExitStack() as meanwhile:
            if (lease := await _free_lease(keeper, stop)) is None:
                waiting = context(database, Lease(SETTLER, 0, 0))
                up = await meanwhile.enter_async_context(
                    _connected(waiting, database, signer, held)
                )
                if standby is not None:
                    await meanwhile.enter_async_context(standby(up))
                watch = up.watch
                lease = await keeper.take(stop, watch)
            leading = context(Fenced(database, lease), lease)
            async with keeper.kept(lease), _connected(leading, database, signer, held) as up:
                await meanwhile.aclose()
                yield up
    except LeaseTaken as taken:
        raise DatabaseInUse(
            f"Another process already serves this database: {taken}. Ask that one, with --url."
        ) from taken


async def _free_lease(keeper: LeaseKeeper, stop: asyncio.Event | None) -> Lease | None:
    """Return the lease if it is free now, or None if the caller may wait for it."""
    try:
        return await keeper.take()
    except LeaseTaken:
        if stop is None:
            raise
        return None


@asynccontextmanager
async def _connected(
    context: EngineContext, database: Database, signer: ResponseSigner | None, held: Reloaded
) -> AsyncIterator[Running]:
    """Put the service together around its engine, connected until the block ends."""
    await _require_own(context.settings, context.tables)
    async with AsyncExitStack() as stack:
        sender = await stack.enter_async_context(_sender(context.settings, context.clock, signer))
        make_orders = partial(_orders, context, signer, held.policy)
        settlement = await stack.enter_async_context(engine_context.connect(context, make_orders))
        wallets: tuple[Operation, ...] = ()
        if ENGINES[context.settings.engine].signs:
            from rpcsvc.treasury.operations import TREASURY  # noqa: PLC0415 - as below
            from rpcsvc.treasury.wallets import overseen  # noqa: PLC0415 - loads the auditor

            overseeing = overseen(context, settlement)
            settlement, treasury = await stack.enter_async_context(overseeing)
            wallets = bound(TREASURY, treasury)
        yield _compose(context, database, settlement, signer, sender, held, wallets)


def _make_data_dir(path: Path) -> None:
    """Raise SettingsError for a folder that others may use: who swaps a file in it can steal."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise SettingsError(
            [
                f"data_dir: {path} has mode {mode:04o}: others than its owner may use it. Run:"
                f" chmod 700 {shlex.quote(str(path))}"
            ]
        )


async def _require_own(settings: Settings, database: Tables) -> None:
    """Raise SettingsError when the orders on the data directory are another engine's."""
    claim = await engine_conflict(database, settings.engine)
    if claim is not None:
        other, why = claim
        raise SettingsError(
            [
                f"engine: received {settings.engine}; allowed: {other}, on {settings.database}:"
                f" {why}. Give the settings of that service, or another"
                f" {'database_url' if settings.postgresql_url else 'data_dir'}."
            ]
        )


def _signer(settings: Settings, clock: Clock, random: RandomBytes) -> ResponseSigner | None:
    """Sign answers by the real clock: a sandbox's time machine must not make them look old."""
    if not settings.signing.enabled:
        return None
    ring = KeyRing.load_or_create(settings.data_dir / KEYS_DIR, clock, random)
    return ResponseSigner(ring, clock, slug=settings.brand.slug)


def _targets(settings: Settings) -> Targets:
    """Return the addresses that webhooks may call."""
    found = settings.webhooks
    return Targets(found.allowed_networks, bool(found.onion_proxy), found.allowed_ports)


def _sender(
    settings: Settings, clock: Clock, signer: ResponseSigner | None
) -> AbstractAsyncContextManager[WebhookSender]:
    """Send webhooks by the real clock: receivers compare it with theirs."""
    sign = None if signer is None else signer.sign_message
    return webhook_sender(
        _targets(settings), sign, clock, onion_proxy=settings.webhooks.onion_proxy
    )


def _orders(
    context: EngineContext,
    signer: ResponseSigner | None,
    policy: Policy,
    profile: VenueProfile,
    clock: Clock,
    counting: Counting,
) -> Orders:
    """Make the store, the processor and the terms of an engine's orders."""
    settings, tables, random = context.settings, context.tables, context.random
    views = _views(context, signer, profile)
    store = OrderStore(tables, view_key(views, context.chains, signer))
    processor = OrderProcessor(store, clock, partial(project, views), counting, policy.finality)
    kept, history = settings.orders, settings.orders.history_keep_days
    retention = Retention(
        store,
        clock,
        keep_responses_ms=kept.idempotency_days * DAY_MS,
        keep_tickets_ms=settings.support.keep_days * DAY_MS,
        keep_unpaid_ms=kept.unpaid_keep_days * DAY_MS,
        keep_history_ms=None if history is None else history * DAY_MS,
        unpaid_bytes=kept.unpaid_bytes,
    )
    return Orders(
        profile=profile,
        tables=tables,
        store=store,
        processor=processor,
        policy=policy,
        retention=retention,
        clock=clock,
        random=random,
        secret=local_secret(settings.data_dir, random),
        lease=context.lease,
    )


def _views(
    context: EngineContext, signer: ResponseSigner | None, profile: VenueProfile
) -> ViewContext:
    """Show orders under the venue's names, with attested terms where there are keys."""
    issuer = context.settings.effective_site_url
    if signer is None:
        return ViewContext(profile, issuer)
    attest = attester(signer.attest, context.chains, network=profile.network, issuer=issuer)
    return ViewContext(profile, issuer, attest=attest)


def _compose(
    context: EngineContext,
    database: Database,
    settlement: Settlement,
    signer: ResponseSigner | None,
    sender: WebhookSender,
    held: Reloaded,
    wallets: tuple[Operation, ...],
) -> Running:
    settings, tables, settles = context.settings, context.tables, context.lease.is_held
    orders, venue, worker = settlement.orders, settlement.venue, settlement.worker
    store, processor = orders.store, orders.processor
    views = _views(context, signer, orders.profile)
    wake = worker.wake_transfer if settles else store.wake_transfer
    retry = partial(retry_transfer, wake=wake, processor=processor)
    messages = WebhookStore(tables)
    deliverer = Deliverer(
        messages,
        partial(event_body, store, views, venue.authorizations),
        sender.send,
        context.clock,
    )
    processor.on_commit(deliverer.observe)
    if settles:
        worker.beside(deliverer.run)
    books = OperatorBooks(tables)
    admin = bound(TRANSFERS, Transfers(books, retry, settlement.readings.paused))
    admin += bound(RECORDS, books) + bound(CLIENTS, held.clients) + APPROVALS + TICKETS + WEBHOOKS
    admin += wallets
    if settlement.withdrawals is not None:
        admin += bound(WITHDRAWALS, settlement.withdrawals)
    support = settings.support
    budget = TicketBudget(support.tickets_per_client, support.bytes_per_day)
    # A wait is never idle, so its connection makes no room: other requests keep half of them.
    waits = Waits(store, settings.limits.connections // 2)
    processor.on_commit(waits.observe)
    venue.authorizations.on_outcome(waits.wake)
    service = Service(
        operations=AGENT_OPERATIONS,
        venue=venue,
        views=views,
        store=store,
        rates=RateRows(tables),
        processor=processor,
        idempotency=Idempotency(store),
        policy=orders.policy,
        clock=orders.clock,
        random=orders.random,
        wake=worker.wake,
        ticket_budget=budget,
        client_secret=orders.secret,
        waits=waits,
        observed=ObservedTimes(tables, orders.clock),
        webhooks=Webhooks(
            _targets(settings),
            messages,
            lambda: None if signer is None else signer.webhook_key,
            deliverer.wake,
        ),
        clients=held.clients,
        approvals=ApprovalStore(tables),
    )
    if settlement.controls is not None:
        service = with_sandbox(service, SANDBOX_OPERATIONS, settlement.controls)
    return Running(
        settings=settings,
        service=service,
        dispatcher=agent_dispatcher(service),
        admin=admin,
        worker=worker,
        engine=settlement.engine,
        readings=settlement.readings,
        database=database,
        signer=signer,
        lease=context.lease,
        watch=settlement.watch,
        held=held,
    )


def _policy(settings: Settings) -> Policy:
    orders = settings.orders
    return Policy(
        spread_bps=orders.spread_bps,
        min_received_bps=orders.min_received_bps,
        max_swap_usd=orders.max_swap_usd,
        bridge_min_usd=orders.bridge_min_usd,
        deposit_window=orders.deposit_window_seconds * 1000,
        price_lock=orders.effective_price_lock_seconds * 1000,
        timeouts=Timeouts(
            late_window=orders.effective_late_window_seconds * 1000,
            confirm=orders.confirm_timeout_seconds * 1000,
            prepare=orders.prepare_timeout_seconds * 1000,
            payout_check=orders.payout_check_seconds * 1000,
            refund_reminder=orders.refund_reminder_seconds * 1000,
        ),
        unfunded=UnfundedLimits(
            share=orders.unfunded_share,
            address_total_share=orders.unfunded_address_total_share,
            address_share=orders.unfunded_address_share,
            address_orders=orders.unfunded_address_orders,
            token_share=orders.unfunded_token_share,
            token_orders=orders.unfunded_token_orders,
            address_orders_a_day=orders.address_orders_a_day,
            address_authorizations_a_day=orders.address_authorizations_a_day,
        ),
        rate_rule=RateRule(settings.rates.max_spread_bps, settings.rates.max_age_ms),
        reservable=settings.upstream.reservable_usd * ONE_USDC,
        lock_break_bps=orders.lock_break_bps,
        finality=settings.onchain.finality,
    )


@asynccontextmanager
async def local_service(settings: Settings) -> AsyncIterator[LocalService]:
    """Run the service for calls from within this process. Raises DatabaseInUse."""
    async with running(settings) as up:
        await up.worker.recover()
        yield LocalService(up.dispatcher, up.service.venue, up.worker)
        await up.worker.stop()
