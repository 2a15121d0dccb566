"""The composition root: the one place where the parts of the service are put together.

running(settings)   everything but the network: store, engine, worker, operations
web_app(running)    its HTTP surfaces
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
from typing import Final

import structlog
from aiohttp import web

from rpcsvc import ids
from rpcsvc.clock import Clock, SystemClock, day_of
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.domain.integrators import Integrators
from rpcsvc.domain.order import Timeouts
from rpcsvc.domain.pricing import ONE_USDC
from rpcsvc.durable_files import replace_file
from rpcsvc.engines import EngineParts, engine_of
from rpcsvc.http.discovery import DiscoveryHttp, Sources, catalogue
from rpcsvc.http.documents import recording
from rpcsvc.http.edge import Cors, Edge, Hosts
from rpcsvc.http.gate import Gate, is_on_socket
from rpcsvc.http.health import HealthRoutes
from rpcsvc.http.messages import Refusals, require_framing
from rpcsvc.http.openapi.document import openapi_document
from rpcsvc.http.openrpc import openrpc_document
from rpcsvc.http.operation_routes import Methods, OperationRoutes, RpcHttp, by_integrator
from rpcsvc.http.site import API_ROOT, BFF_ROOT, Site, site_of
from rpcsvc.ids import RandomBytes, system_random
from rpcsvc.operations.admin import Admin, admin_operations, treasury_operations
from rpcsvc.operations.dispatch import Dispatcher, LocalService, agent_dispatcher, flat_dispatcher
from rpcsvc.operations.ordering import project, view_key
from rpcsvc.operations.service import (
    Operation,
    Service,
    TicketBudget,
    ViewContext,
    attester,
    with_sandbox,
)
from rpcsvc.operations.table import AGENT_OPERATIONS, BFF_OPERATIONS, SANDBOX_OPERATIONS
from rpcsvc.orders.backend import Backend
from rpcsvc.orders.idempotency import Idempotency
from rpcsvc.orders.policy import Core, Kept, Policy, Retention
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.orders.scheduler.effects import retry_transfer
from rpcsvc.orders.scheduler.worker import Worker
from rpcsvc.orders.unfunded import UnfundedLimits
from rpcsvc.settings import Settings, SettingsError
from rpcsvc.settings_onchain import read_chains
from rpcsvc.signing.keys import KEYS_DIR, KeyRing
from rpcsvc.signing.response_signer import ResponseSigner
from rpcsvc.store.backends.sqlite.database import Database, OwnerLock
from rpcsvc.store.engines import claim_of_another
from rpcsvc.store.operator_books import SqlOperatorBooks
from rpcsvc.store.orders import SqlOrderStore

log = structlog.get_logger(__name__)

_DAY_MS = 86_400_000
_HASH_FILE: Final = "client-hash.key"
_HASH_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class Running:
    """A service that is up, without its network side."""

    settings: Settings
    service: Service
    dispatcher: Dispatcher
    admin: tuple[Operation, ...]
    worker: Worker
    backend: Backend
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
    _make_data_dir(settings.data_dir)
    lock = OwnerLock(settings.data_dir)
    lock.acquire()
    try:
        database = await Database.open(settings.data_dir)
        try:
            await _require_own(settings, database)
            base = clock or SystemClock()
            signer = _signer(settings, base, random)
            chains = read_chains(settings.chains_file)
            parts = EngineParts(settings, chains, base, random, database)
            async with engine_of(settings.engine).connected(parts) as backend:
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


async def _require_own(settings: Settings, database: Database) -> None:
    """Raises SettingsError when the orders on the data directory are another engine's."""
    claim = await claim_of_another(database, settings.engine)
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


async def _compose(
    settings: Settings,
    database: Database,
    chains: ChainRegistry,
    backend: Backend,
    random: RandomBytes,
    signer: ResponseSigner | None,
) -> Running:
    clock, views = backend.clock, ViewContext(backend.profile)
    if signer is not None:
        issuer = settings.effective_site_url
        attest = attester(signer.attest, chains, network=views.network, issuer=issuer)
        views = replace(views, attest=attest)
    store = SqlOrderStore(database, _view_key(views, chains, signer))
    processor = OrderProcessor(store, clock, partial(project, views), backend.reservations)
    secret = client_secret(settings.data_dir, random)
    retention = Retention(store, clock, _kept(settings))
    policy = _policy(settings)
    venue, worker = await backend.open(
        Core(store, processor, policy, retention, clock, random, secret)
    )
    retry = partial(retry_transfer, hurry=worker.hurry, processor=processor)
    admin = admin_operations(Admin(SqlOperatorBooks(database), retry, backend.paused))
    if backend.treasury is not None:
        admin += treasury_operations(backend.treasury)
    support, now = settings.support, clock.now_ms()
    budget = TicketBudget(
        support.tickets_per_client,
        support.bytes_per_day,
        now,
        await store.tickets_taken(day_of(now)),
    )
    service = Service(
        operations=AGENT_OPERATIONS,
        venue=venue,
        views=views,
        store=store,
        processor=processor,
        idempotency=Idempotency(store),
        policy=policy,
        clock=clock,
        random=random,
        wake=worker.wake,
        ticket_budget=budget,
        client_secret=secret,
    )
    if backend.controls is not None:
        service = with_sandbox(service, SANDBOX_OPERATIONS, backend.controls)
    dispatcher = agent_dispatcher(service)
    return Running(settings, service, dispatcher, admin, worker, backend, database, signer)


def _kept(settings: Settings) -> Kept:
    orders = settings.orders
    return Kept(
        responses=orders.idempotency_days * _DAY_MS,
        tickets=settings.support.keep_days * _DAY_MS,
        unpaid=orders.unpaid_keep_days * _DAY_MS,
        unpaid_bytes=orders.unpaid_bytes,
    )


def _view_key(
    views: ViewContext, chains: ChainRegistry, signer: ResponseSigner | None
) -> Callable[[], str]:
    """Under which key status answers hold now: after a rotation they are attested anew."""
    rendering = view_key(replace(views, attest=None), [chain.name for chain in chains.all()])
    return lambda: rendering if signer is None else f"{rendering}-{signer.kid[:16]}"


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
        lock_break_bps=orders.lock_break_bps,
    )


@asynccontextmanager
async def local_service(settings: Settings) -> AsyncIterator[LocalService]:
    """The service for calls from within this process. Raises DataDirInUse."""
    async with running(settings) as up:
        await up.worker.recover()
        yield LocalService(up.dispatcher, up.service.venue, up.worker)
        await up.worker.stop()


def client_secret(data_dir: Path, random: RandomBytes) -> bytes:
    """The key that client addresses of unfunded orders are hashed with, made when there is none.

    It is in ``data_dir`` and not in the database, so that a copy of that tells no addresses.
    Without the old one clients are counted anew, which costs nothing else. Raises OSError.
    """
    path = data_dir / _HASH_FILE
    if path.exists() and len(found := path.read_bytes()) == _HASH_BYTES:
        return found
    fresh = random(_HASH_BYTES)
    replace_file(path, fresh)
    return fresh


def web_app(up: Running) -> Edge:
    """All HTTP surfaces over a running service, to be served by http_server.EdgeRunner."""
    settings = up.settings
    gate = Gate(settings, up.service.random, time.monotonic)
    limits = settings.limits
    operations = up.service.operations
    site = site_of(settings, up.service)
    sources = _sources(site, up.signer, up.service.random)
    flat = flat_dispatcher(up.service)
    rpc = RpcHttp(
        gate,
        Methods(up.dispatcher, operations, f"{settings.brand.slug}."),
        Methods(flat, up.admin),
        sources.openrpc,
        body_bytes=limits.body_bytes,
        max_batch=limits.batch,
        max_depth=limits.depth,
    )
    discovery = DiscoveryHttp(gate, up.service.clock, catalogue(site, sources))
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
