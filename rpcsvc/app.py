"""The composition root: the one place where the parts of the service are put together.

    running(settings)   everything but the network: store, engine, worker, operations
    web_app(running)    its HTTP surfaces

What does not live here: listening (serving.py), anything that decides or computes.
"""

from __future__ import annotations

import shlex
import stat
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import structlog
from aiohttp import web

from rpcsvc import ids
from rpcsvc.backend import Backend
from rpcsvc.chains_file import read_chains
from rpcsvc.client_secret import client_secret
from rpcsvc.clock import Clock, OffsetClock, SystemClock, day_of
from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.domain.integrators import Integrators
from rpcsvc.domain.money import USDC, XMR, parse_amount
from rpcsvc.domain.order import Timeouts
from rpcsvc.domain.pricing import ONE_USDC
from rpcsvc.http import strict_json
from rpcsvc.http.discovery import DiscoveryHttp
from rpcsvc.http.documents import recording
from rpcsvc.http.documents.catalogue import Sources, catalogue
from rpcsvc.http.edge import Cors, Edge, Hosts
from rpcsvc.http.gate import Gate, is_on_socket
from rpcsvc.http.health import HealthRoutes
from rpcsvc.http.messages import Refusals, require_framing
from rpcsvc.http.openapi.document import openapi_document
from rpcsvc.http.openrpc import openrpc_document
from rpcsvc.http.operation_routes import OperationRoutes, by_integrator
from rpcsvc.http.rpc_http import RpcHttp
from rpcsvc.http.site import API_ROOT, BFF_ROOT, Site, site_of
from rpcsvc.ids import RandomBytes, system_random
from rpcsvc.operations.attestation import attester
from rpcsvc.operations.bff_table import BFF_OPERATIONS
from rpcsvc.operations.dispatch import Dispatcher, agent_dispatcher, flat_dispatcher
from rpcsvc.operations.local import LocalService
from rpcsvc.operations.projection import project, view_key
from rpcsvc.operations.service import Policy, Service, Venue
from rpcsvc.operations.table import AGENT_OPERATIONS, OPERATIONS
from rpcsvc.operations.ticket_budget import TicketBudget
from rpcsvc.orders.deposits import DepositWatcher
from rpcsvc.orders.idempotency import Idempotency
from rpcsvc.orders.payouts import Payouts
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.orders.quarantine import Quarantine
from rpcsvc.orders.reservations import Reservations, payable_for
from rpcsvc.orders.retries import RetryRequests, follow_requests, retry_transfer
from rpcsvc.orders.scheduler.effects import EffectRunner
from rpcsvc.orders.scheduler.price_locks import PriceLocks
from rpcsvc.orders.scheduler.retention import Kept, Retention
from rpcsvc.orders.scheduler.worker import Worker
from rpcsvc.orders.unfunded import UnfundedLimits
from rpcsvc.orders.upstream.follower import Follower
from rpcsvc.orders.upstream.relay import Relay
from rpcsvc.settings import SandboxSettings, Settings, SettingsError, check_integrators
from rpcsvc.settlement.sandbox.controls import SandboxControls
from rpcsvc.settlement.sandbox.engine import SandboxEngine, SandboxOptions
from rpcsvc.settlement.upstream.wiring import upstream_engine
from rpcsvc.signing.key_files import KEYS_DIR
from rpcsvc.signing.key_ring import KeyRing
from rpcsvc.signing.response_signer import ResponseSigner
from rpcsvc.store.backends.sqlite.database import Database, OwnerLock
from rpcsvc.store.orders import SqliteOrderStore
from rpcsvc.store.other_engines import claim_of_another
from rpcsvc.store.sandbox import SqliteSandboxLedger

log = structlog.get_logger(__name__)

_DAY_MS = 86_400_000


@dataclass(frozen=True, slots=True)
class Running:
    """A service that is up, without its network side."""

    settings: Settings
    service: Service
    dispatcher: Dispatcher
    worker: Worker
    effects: EffectRunner
    database: Database
    signer: ResponseSigner | None


@asynccontextmanager
async def running(
    settings: Settings, *, clock: Clock | None = None, random: RandomBytes = system_random
) -> AsyncIterator[Running]:
    """The service on its data directory, owned exclusively, until the block ends.

    The worker is made, not started. Raises DataDirInUse, UnknownSchema, SigningKeyError and
    SettingsError.
    """
    check_integrators(settings)
    _make_data_dir(settings.data_dir)
    lock = OwnerLock(settings.data_dir)
    lock.acquire()
    try:
        database = await Database.open(settings.data_dir)
        try:
            _require_own(settings, database)
            base = clock or SystemClock()
            signer = _signer(settings, base, random)
            chains = read_chains(settings.chains_file)
            async with _backend(settings, database, chains, base, random) as backend:
                yield await _compose(settings, database, chains, backend, random, signer)
        finally:
            await database.close()
    finally:
        lock.release()


def _make_data_dir(path: Path) -> None:
    """Raises SettingsError for one that others may use: who can swap a file in it can steal."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise SettingsError(
            [
                f"data_dir: {path} has mode {mode:04o}: others than its owner may use it. Run:"
                f" chmod 700 {shlex.quote(str(path))}"
            ]
        )


def _require_own(settings: Settings, database: Database) -> None:
    """Raises SettingsError when the orders on the data directory are another engine's."""
    claim = claim_of_another(database, settings.engine)
    if claim is not None:
        other, why = claim
        raise SettingsError(
            [
                f"engine: received {settings.engine}; allowed: {other}, on the data directory"
                f" {settings.data_dir}: {why}. Give the settings of that service, or another"
                " data_dir."
            ]
        )


def _signer(settings: Settings, clock: Clock, random: RandomBytes) -> ResponseSigner | None:
    """What signs, by the real clock: a sandbox's time machine must not make answers look old."""
    if not settings.signing.enabled:
        return None
    ring = KeyRing.load_or_create(settings.data_dir / KEYS_DIR, clock, random)
    return ResponseSigner(ring, clock, slug=settings.brand.slug)


@asynccontextmanager
async def _backend(
    settings: Settings,
    database: Database,
    chains: ChainRegistry,
    base_clock: Clock,
    random: RandomBytes,
) -> AsyncIterator[Backend]:
    if settings.engine == "upstream":
        async with upstream_engine(settings.upstream, chains, strict_json.loads) as engine:
            monero = MoneroNetwork(settings.upstream.monero_network)
            networks = frozenset({monero})
            yield Backend(
                engine,
                engine,
                base_clock,
                monero.value,
                networks,
                upstream=engine,
                offered=engine.chains,
                reservations=Reservations(),
            )
        return
    if settings.engine == "onchain":
        from rpcsvc.app_onchain import onchain_backend  # noqa: PLC0415 - no other engine needs it

        async with onchain_backend(settings, database, chains, base_clock) as backend:
            yield backend
        return
    clock = OffsetClock(base_clock)
    ledger = SqliteSandboxLedger(database)
    sandbox = SandboxEngine(ledger, chains, clock, random, _sandbox_options(settings.sandbox))
    controls = SandboxControls(ledger, sandbox, clock, random)
    networks = frozenset(MoneroNetwork)
    yield Backend(sandbox, sandbox, clock, sandbox.name, networks, sandbox=controls)


async def _compose(
    settings: Settings,
    database: Database,
    chains: ChainRegistry,
    backend: Backend,
    random: RandomBytes,
    signer: ResponseSigner | None,
) -> Running:
    engine, clock = backend.engine, backend.clock
    await engine.start()
    venue = Venue(backend.network, engine, is_simulated=backend.sandbox is not None)
    if signer is not None:
        issuer = settings.effective_site_url
        attest = attester(signer.attest, chains, network=venue.network, issuer=issuer)
        venue = replace(venue, attest=attest)
    store = SqliteOrderStore(database, _view_key(venue, chains, signer))
    reservations = backend.reservations
    processor = OrderProcessor(store, clock, partial(project, venue), reservations)
    quarantine = Quarantine()
    watcher = DepositWatcher(store, engine, processor, backend.rates, quarantine, clock)
    if reservations is not None:
        reservations.follow(watcher.progress.is_complete)
        await reservations.load(store, clock.now_ms())
    payouts = Payouts(store, engine, processor, clock, quarantine)
    effects = EffectRunner(
        store,
        processor,
        payouts,
        backend.rates,
        clock,
        poll_ms=engine.poll_ms,
        payable=partial(payable_for, store, engine, reservations),
    )
    relay = None
    if backend.upstream is not None:
        follower = Follower(store, processor, backend.upstream, clock)
        relay = Relay(store, backend.upstream, clock, follower)
        await relay.recover()
        await follower.recover()
    retry = partial(retry_transfer, hurry=effects.hurry, processor=processor)
    retries = partial(follow_requests, RetryRequests(settings.data_dir), retry)
    worker = Worker(
        store,
        processor,
        watcher,
        effects,
        clock,
        is_paused=engine.is_paused,
        beside=(*backend.beside, retries, *((relay.run, relay.follower.run) if relay else ())),
    )
    worker.on_beat(Retention(store, clock, _kept(settings)).clean)
    if relay is None:
        break_bps = settings.orders.lock_break_bps
        locks = PriceLocks(store, processor, backend.rates, quarantine, clock, break_bps=break_bps)
        worker.on_beat(locks.break_due)
    support = settings.support
    now = clock.now_ms()
    budget = TicketBudget(
        support.tickets_per_client,
        support.bytes_per_day,
        now,
        await store.tickets_taken(day_of(now)),
    )
    service = Service(
        operations=AGENT_OPERATIONS if backend.sandbox is None else OPERATIONS,
        ticket_budget=budget,
        venue=venue,
        store=store,
        engine=engine,
        rates=backend.rates,
        processor=processor,
        idempotency=Idempotency(store),
        chains=backend.offered or chains,
        monero_networks=backend.monero_networks,
        policy=_policy(settings),
        clock=clock,
        random=random,
        wake=worker.wake,
        sandbox=backend.sandbox,
        relay=relay,
        reservations=reservations,
        client_secret=client_secret(settings.data_dir, random),
    )
    return Running(settings, service, agent_dispatcher(service), worker, effects, database, signer)


def _kept(settings: Settings) -> Kept:
    orders = settings.orders
    return Kept(
        responses=orders.idempotency_days * _DAY_MS,
        tickets=settings.support.keep_days * _DAY_MS,
        unpaid=orders.unpaid_keep_days * _DAY_MS,
        unpaid_bytes=orders.unpaid_bytes,
    )


def _view_key(
    venue: Venue, chains: ChainRegistry, signer: ResponseSigner | None
) -> Callable[[], str]:
    """Under which key status answers hold now: after a rotation they are attested anew."""
    rendering = view_key(replace(venue, attest=None), [chain.name for chain in chains.all()])
    return lambda: rendering if signer is None else f"{rendering}-{signer.kid[:16]}"


def _sandbox_options(sandbox: SandboxSettings) -> SandboxOptions:
    def units(xmr: str, usdc: str) -> dict[str, int]:
        return {
            asset.symbol: parse_amount(text, asset).units
            for asset, text in ((XMR, xmr), (USDC, usdc))
        }

    return SandboxOptions(
        block_ms={"XMR": sandbox.xmr_block_ms, "USDC": sandbox.usdc_block_ms},
        confirmations={"XMR": sandbox.xmr_confirmations, "USDC": sandbox.usdc_confirmations},
        fees=units(sandbox.xmr_payout_fee, sandbox.usdc_payout_fee),
        inventory=units(sandbox.xmr_float, sandbox.usdc_float),
        usdc_per_xmr=parse_amount(sandbox.usdc_per_xmr, USDC).units,
        rate_path=sandbox.rate_path_bps,
        rate_step_ms=sandbox.rate_step_seconds * 1000,
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
        ),
        reservable=settings.upstream.reservable_usd * ONE_USDC,
    )


@asynccontextmanager
async def local_service(settings: Settings) -> AsyncIterator[LocalService]:
    """The service for calls from within this process. Raises DataDirInUse."""
    async with running(settings) as up:
        await up.effects.recover()
        relay = up.service.relay
        follower = relay.follower if relay else None
        yield LocalService(up.dispatcher, up.worker, up.effects, follower)
        await up.worker.stop()


def web_app(up: Running) -> Edge:
    """All HTTP surfaces over a running service, to be served by http_server.EdgeRunner."""
    settings = up.settings
    gate = Gate(settings, up.service.random, time.monotonic)
    limits = settings.limits
    operations = up.service.operations
    site = site_of(settings, up.service)
    sources = _sources(site, up.signer, up.service.random)
    rpc = RpcHttp(
        gate,
        up.dispatcher,
        operations,
        sources.openrpc,
        slug=settings.brand.slug,
        body_bytes=limits.body_bytes,
        max_batch=limits.batch,
        max_depth=limits.depth,
    )
    discovery = DiscoveryHttp(gate, up.service.clock, catalogue(site, sources))
    flat = flat_dispatcher(up.service)
    surface = partial(OperationRoutes, gate, body_bytes=limits.body_bytes, max_depth=limits.depth)
    agent = surface(up.dispatcher, API_ROOT)
    bff = surface(flat, BFF_ROOT, identify=by_integrator(Integrators(settings.integrators)))
    routes = web.Application(client_max_size=limits.body_bytes)
    routes.add_routes([web.post("/rpc", rpc.handle)])
    routes.add_routes(agent.routes(operations))
    routes.add_routes(bff.routes(BFF_OPERATIONS))
    routes.add_routes(discovery.routes())
    routes.add_routes(HealthRoutes(gate, up.service, up.worker, up.database, up.signer).routes())
    return Edge(
        routes,
        Refusals(gate, up.dispatcher, flat),
        _check(settings),
        Cors(
            discovery.paths,
            site.signature_headers,
            settings.allowed_origins if settings.is_loopback_only else None,
        ),
        up.signer,
        body_bytes=limits.body_bytes,
    )


def _check(settings: Settings) -> Callable[[web.Request], None]:
    """What every request is refused by, by its headers alone; the socket answers to any host."""
    hosts = Hosts(settings)

    def check(request: web.Request) -> None:
        if not is_on_socket(request):
            hosts.require(request)
        require_framing(request)

    return check


def _sources(site: Site, signer: ResponseSigner | None, random: RandomBytes) -> Sources:
    return Sources(
        openapi=partial(openapi_document, site),
        openrpc=partial(openrpc_document, site),
        jwks=signer.jwks if signer else lambda: {"keys": []},
        recording=recording.load,
        new_key=partial(ids.session_id, random),
    )
