"""Serving: a running service (bootstrap.py) on the network, until SIGTERM.

serve(settings)     the process from its start to SIGTERM or SIGINT
listening(running)  takes requests over TCP and the UNIX socket
web_app(running)    the HTTP surfaces, put together
ServiceManager      tells systemd that the service is ready, alive or stopping (sd_notify(3))
"""

from __future__ import annotations

import asyncio
import gc
import os
import shlex
import signal
import socket
import ssl
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import structlog
from aiohttp import web

from rpcsvc import __version__, ids
from rpcsvc.bootstrap import Reloaded, Running, running
from rpcsvc.domain.integrators import Integrators
from rpcsvc.health import Health
from rpcsvc.http import rates
from rpcsvc.http.discovery import DiscoveryHttp, Document, Sources, catalogue
from rpcsvc.http.documents import links, recording
from rpcsvc.http.edge import Cors, Edge, Hosts
from rpcsvc.http.gate import Gate
from rpcsvc.http.health import HealthRoutes
from rpcsvc.http.http_server import (
    AcceptFailures,
    Connections,
    EdgeRunner,
    Listener,
    raise_descriptor_limit,
)
from rpcsvc.http.mcp.interim import UserApproval
from rpcsvc.http.mcp.server import McpHttp
from rpcsvc.http.mcp.tools import OrderApp
from rpcsvc.http.messages import Refusals
from rpcsvc.http.metrics import Metrics
from rpcsvc.http.openapi.document import openapi_document
from rpcsvc.http.openrpc import openrpc_document
from rpcsvc.http.operation_routes import Methods, OperationRoutes, RpcHttp, by_integrator
from rpcsvc.http.pages.rendering import Catalogues, Renderer
from rpcsvc.http.pages.routes import PagesHttp
from rpcsvc.http.scrape import MetricsHttp, Readout
from rpcsvc.http.site import API_ROOT, BFF_ROOT, MCP_PATH, RPC_PATH, site_of
from rpcsvc.local_secret import operator_proof
from rpcsvc.logs import print_greeting
from rpcsvc.operations.dispatch import Dispatcher, Observer, flat_dispatcher
from rpcsvc.operations.service import Call, Reply
from rpcsvc.operations.table import BFF_OPERATIONS
from rpcsvc.orders.waits import Waits
from rpcsvc.settings import (
    RELOADED,
    Settings,
    SettingsError,
    changed_keys,
    check_bind,
    reloaded,
)
from rpcsvc.store.database import DatabaseInUse
from rpcsvc.store.operator_books import OperatorBooks
from rpcsvc.store.webhooks import WebhookStore

if TYPE_CHECKING:
    from rpcsvc.http.tracing import OrderTraces

log = structlog.get_logger(__name__)

SOCKET_NAME: Final = "rpcsvc.sock"
LONGEST_SOCKET_PATH: Final = 107  # sun_path of unix(7), less its final NUL
# How long a replica that takes over finishes what it answers. A create that is cut off is sent
# again with its key.
STANDBY_GRACE_SECONDS: Final = 1
# How long a connection may be idle between two requests. Longer than proxies keep theirs open.
IDLE_SECONDS: Final = 75
READY: Final = "READY=1"
ALIVE: Final = "WATCHDOG=1"
STOPPING: Final = "STOPPING=1"
# sd_watchdog_enabled(3) recommends half of the time; a third leaves room for a busy machine.
PINGS_PER_PERIOD: Final = 3

Pause = Callable[[float], Awaitable[None]]


async def serve(settings: Settings, load: Callable[[], Settings]) -> None:
    """Serve until SIGTERM or SIGINT; then finish running requests and close.

    On SIGHUP, ``load`` gives the settings as they are then. Raises SettingsError, DataDirInUse,
    OSError when the address can't be bound, and LeaseLost once the lease counts no more.
    """
    check_bind(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    held = Reloaded(settings)
    loop.add_signal_handler(signal.SIGHUP, reload_settings, held, settings, load)
    loop.set_exception_handler(AcceptFailures(time.monotonic))
    manager = service_manager(os.environ)
    standby = partial(_standing_by, manager)
    try:
        async with running(settings, stop=stop, standby=standby, held=held) as up:
            # Neither a database that is down nor a daemon would come back by a restart.
            up.worker.beside(partial(manager.ping, up.worker.stall))
            async with _traces(up) as traces, _working(up, stop), listening(up, traces=traces):
                _settle_garbage_collector()
                greeting = _greeting(up, Path(sys.argv[0]).as_posix())
                print_greeting(settings.log.format, greeting)
                manager.notify(READY, f"STATUS=Serving {settings.effective_site_url}")
                await stop.wait()
                manager.notify(STOPPING)
                log.info("stopping")
    except DatabaseInUse:
        if not stop.is_set():
            raise
        return
    log.info("stopped")
    if up.lease.lost.is_set():
        raise up.lease.loss


def reload_settings(held: Reloaded, started: Settings, load: Callable[[], Settings]) -> None:
    """Take the settings in RELOADED as they are now, for the calls that come.

    Settings with a problem change nothing. Every other setting keeps the value of the start; the
    log names those that have changed.
    """
    try:
        settings = load()
        held.replace(reloaded(started, settings))
    except SettingsError as error:
        log.error("settings_reload_refused", problems=list(error.problems))  # noqa: TRY400 - no fault here
        return
    log.info("settings_reloaded", clients=[each.name for each in held.clients.listed])
    for key in changed_keys(started, settings):
        if key not in RELOADED:
            log.warning("setting_needs_restart", key=key)


def _traces(up: Running) -> AbstractAsyncContextManager[OrderTraces | None]:
    """Return the sink of spans while a block runs; None where no collector is configured."""
    endpoint = up.settings.telemetry.otlp_endpoint
    if not endpoint:
        return nullcontext()
    from rpcsvc.http.tracing import exporting  # noqa: PLC0415 - of the extra "otel"

    return exporting(endpoint, up.settings.engine, up.service.clock, up.service.random)


def _greeting(up: Running, program: str) -> str:
    """The greeting, with the engine, a command to try and the page of ``program``."""
    settings, is_simulated = up.settings, up.service.venue.profile.is_simulated
    what = "simulated chains, no real money" if is_simulated else settings.database
    command = "demo" if is_simulated else "top"
    name = program if program.endswith("/rpcsvc") else "rpcsvc"
    return (
        f"\nrpcsvc {__version__} serves with the engine {settings.engine} ({what}); Ctrl-C ends it"
        f"\nTry:  {shlex.join([name, command, '--data-dir', str(settings.data_dir)])}"
        f"\nPage: {settings.effective_site_url}/\n\n"
    )


@asynccontextmanager
async def _standing_by(manager: ServiceManager, up: Running) -> AsyncIterator[None]:
    """A standby works and listens, and is ready and alive, until the block ends."""
    grace = STANDBY_GRACE_SECONDS
    async with _working(up, asyncio.Event()), listening(up, graceful_seconds=grace):
        manager.notify(READY, f"STATUS=Standing by on {up.settings.effective_site_url}")
        pings = asyncio.create_task(manager.ping(up.worker.stall), name="watchdog")
        try:
            yield
        finally:
            pings.cancel()
            await asyncio.gather(pings, return_exceptions=True)


@asynccontextmanager
async def serving_privately(settings: Settings) -> AsyncIterator[asyncio.Event]:
    """The service on the UNIX socket of its data directory alone, until the block ends.

    The event is set when it has ended by itself. Raises as ``serve``.
    """
    ended = asyncio.Event()
    async with running(settings) as up, _working(up, ended), listening(up, tcp=False):
        yield ended


@asynccontextmanager
async def _working(up: Running, ended: asyncio.Event) -> AsyncIterator[None]:
    """The worker runs until the block ends; ``ended`` is set when it, or the lease, has ended."""
    beat = asyncio.create_task(up.worker.run(), name="worker")
    lost = asyncio.create_task(up.lease.lost.wait(), name="lease lost")
    for each in (beat, lost):
        each.add_done_callback(lambda _task: ended.set())
    try:
        yield
    finally:
        lost.cancel()
        await up.worker.stop()
        await beat


def _settle_garbage_collector() -> None:
    """Leave what start-up made out of collections, and collect per many requests, not per few."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@asynccontextmanager
async def listening(
    up: Running,
    *,
    tcp: bool = True,
    graceful_seconds: int | None = None,
    traces: OrderTraces | None = None,
) -> AsyncIterator[None]:
    """Accept requests over TCP, if configured, and the UNIX socket; at the end, finish running
    requests.

    That takes ``graceful_seconds`` at most, by default those of the settings. ``traces`` gets the
    calls and the orders' events.
    Raises OSError when the address can't be bound, and SettingsError for a certificate.
    """
    settings = up.settings
    connections = Connections(
        most=settings.limits.connections,
        most_per_client=settings.limits.connections_per_address,
        descriptors=raise_descriptor_limit(),
        proxies=settings.trusted_proxies,
        now=time.monotonic,
    )
    up.service.waits.most = connections.most // 2
    runner = EdgeRunner(
        web_app(up, traces),
        connections=connections,
        access_log=None,
        shutdown_timeout=graceful_seconds or settings.graceful_seconds,
        keepalive_timeout=IDLE_SECONDS,
        # A call is finished though its caller hangs up: an order whose commit is under way
        # is made, and its reservations have to be kept.
        handler_cancellation=False,
    )
    await runner.setup()
    loops = [asyncio.create_task(connections.watch(), name="connections")]
    if settings.postgresql_url is not None:  # other processes may commit there, too
        loops.append(asyncio.create_task(up.service.waits.follow_log(), name="waits"))
    try:
        if tcp:
            context = _tls(settings)
            for listener in await _listeners(settings, connections):
                await web.SockSite(runner, listener, ssl_context=context).start()
        await _listen_on_socket(runner, settings.data_dir / SOCKET_NAME)
        log.info(
            "serving",
            url=settings.effective_site_url,
            engine=settings.engine,
            data_dir=str(settings.data_dir),
        )
        yield
    finally:
        await runner.cleanup()
        for task in loops:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task


async def _listeners(settings: Settings, connections: Connections) -> list[Listener]:
    """A listening socket for each address of the host. Raises OSError when one can't be bound."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(
        settings.host, settings.port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    listeners: list[Listener] = []
    try:
        for family, address in dict.fromkeys((row[0], row[4]) for row in found):
            listeners.append(connections.listen(family, address))
    except OSError:
        for listener in listeners:
            listener.close()
        raise
    return listeners


def _tls(settings: Settings) -> ssl.SSLContext | None:
    if settings.tls_cert is None:
        return None
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(settings.tls_cert, settings.tls_key)
    except OSError as error:
        raise SettingsError([f"tls_cert, tls_key: {error.strerror or error}"]) from error
    return context


async def _listen_on_socket(runner: web.AppRunner, path: Path) -> None:
    if len(os.fsencode(path)) > LONGEST_SOCKET_PATH:
        log.warning("socket_path_refused", path=str(path), longest=LONGEST_SOCKET_PATH)
        return
    with suppress(FileNotFoundError):
        path.unlink()  # noqa: ASYNC240 - one call at start; the owner lock is ours: whoever left it is gone
    before = os.umask(0o177)
    try:
        await web.UnixSite(runner, str(path)).start()
    finally:
        os.umask(before)


def _observe(up: Running, flat: Dispatcher, metrics: Metrics, traces: OrderTraces | None) -> None:
    """Have calls, the orders' events and commits counted, and traced where that is wanted."""
    calls: Observer = metrics.call
    up.service.processor.on_commit(metrics.order)
    up.database.on_commit(metrics.committed)
    if traces is not None:
        up.service.processor.on_commit(traces.order)
        calls = _both(metrics.call, traces.call)
    up.dispatcher.observe = flat.observe = calls


def _both(first: Observer, second: Observer) -> Observer:
    def observe(operation: str, call: Call, reply: Reply, seconds: float | None) -> None:
        first(operation, call, reply, seconds)
        second(operation, call, reply, seconds)

    return observe


def web_app(up: Running, traces: OrderTraces | None = None) -> Edge:
    """All HTTP surfaces over a running service, to be served by http_server.EdgeRunner."""
    settings = up.settings
    gate = Gate(up.held.settings, up.service.clients, up.service.random, time.monotonic)
    limits = settings.limits
    operations = up.service.operations
    site = site_of(settings, up.service)
    flat, metrics = flat_dispatcher(up.service), Metrics()
    _observe(up, flat, metrics, traces)
    discovery = DiscoveryHttp(gate, up.service.clock, _documents(up))
    rpc = RpcHttp(
        gate,
        Methods(up.dispatcher, operations, f"{settings.brand.slug}."),
        Methods(flat, up.admin),
        partial(discovery.body, links.OPENRPC),
        operator_proof=operator_proof(up.service.client_secret),
        body_bytes=limits.body_bytes,
        max_batch=limits.batch,
        max_depth=limits.depth,
    )

    def follow() -> None:
        gate.follow(up.held.settings.rate_limit)
        discovery.renew(_documents(up))

    up.held.followers.append(follow)
    renderer = Renderer(site)
    mcp = McpHttp(
        gate,
        up.dispatcher,
        site,
        discovery.caches,
        UserApproval(up.service.client_secret),
        OrderApp(site, renderer, Catalogues().choose("")),
        settings.allowed_origins,
    )
    surface = partial(OperationRoutes, gate, body_bytes=limits.body_bytes, max_depth=limits.depth)
    agent = surface(up.dispatcher, API_ROOT, transport="http")
    bff = surface(
        flat, BFF_ROOT, transport="bff", identify=by_integrator(Integrators(settings.integrators))
    )
    routes = web.Application(client_max_size=limits.body_bytes)
    routes.on_shutdown.append(partial(_end_waits, up.service.waits))
    routes.add_routes([web.post(RPC_PATH, rpc.handle), web.post(MCP_PATH, mcp.handle)])
    routes.add_routes(agent.routes(operations))
    routes.add_routes(bff.routes(BFF_OPERATIONS))
    routes.add_routes(discovery.routes())
    health = HealthRoutes(gate, up.service, up.worker, up.database, up.signer)
    routes.add_routes(health.routes())
    pages = PagesHttp(gate, up.service, up.dispatcher, site, renderer, health)
    routes.add_routes(pages.routes())
    kept = settings.rates.every_seconds
    routes.add_routes(rates.RatesHttp(gate, up.service.venue, up.service.clock, kept).routes())
    books, clock = OperatorBooks(up.database), up.service.clock
    messages, waits = WebhookStore(up.database), up.service.waits
    readout = Readout(
        settings.engine, up.readings, books, messages, health.checks, waits, up.lease, clock
    )
    routes.add_routes(MetricsHttp(gate, metrics, readout).routes())
    return Edge(
        routes,
        Refusals(gate, up.dispatcher, flat, time.monotonic),
        Hosts(settings),
        Cors(
            discovery.paths | rates.PATHS,
            site.signature_headers,
            settings.allowed_origins if settings.is_loopback_only else None,
        ),
        up.signer,
        body_bytes=limits.body_bytes,
        observe=metrics.response,
        direct={("POST", RPC_PATH): rpc.handle},
    )


async def _end_waits(waits: Waits, _routes: web.Application) -> None:
    """Answer those who wait for events: the service stops."""
    waits.end()


def _documents(up: Running) -> tuple[Document, ...]:
    """The documents of the service with the settings that hold."""
    site = site_of(up.held.settings, up.service)
    return catalogue(
        site,
        Sources(
            openapi=partial(openapi_document, site),
            openrpc=partial(openrpc_document, site),
            jwks=up.signer.jwks if up.signer else lambda: {"keys": []},
            recording=recording.load,
            new_key=partial(ids.session_id, up.service.random),
        ),
    )


# --- the service manager --------------------------------------------------------------------------


class ServiceManager:
    """The socket of the service manager, and how often it expects a ping.

    Without an address nothing is sent.
    """

    def __init__(
        self, address: str | None, watchdog_seconds: float | None, pause: Pause = asyncio.sleep
    ) -> None:
        self._address = address
        self._watchdog_seconds = watchdog_seconds
        self._pause = pause

    def notify(self, *states: str) -> None:
        """Send states, such as ``READY``. A message that can't be sent is logged."""
        if not self._address:
            return
        # A leading @ stands for the NUL of an abstract address (unix(7)).
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto("\n".join(states).encode(), address)
        except OSError as error:
            log.warning("service_manager_unreachable", reason=error.strerror or str(error))

    async def ping(self, health: Callable[[], Health]) -> None:
        """Ping as often as the watchdog expects, while ``health`` is ok; returns without one."""
        if self._watchdog_seconds is None:
            return
        was_ok = True
        while True:
            found = health()
            if found.ok:
                self.notify(ALIVE)
            elif was_ok:
                log.error("watchdog_ping_withheld", reason=found.detail)
            was_ok = found.ok
            await self._pause(self._watchdog_seconds / PINGS_PER_PERIOD)


def service_manager(environ: Mapping[str, str]) -> ServiceManager:
    """The manager that the environment names. Raises ValueError for a malformed watchdog time."""
    microseconds = int(environ.get("WATCHDOG_USEC", "0"))
    is_ours = environ.get("WATCHDOG_PID", str(os.getpid())) == str(os.getpid())
    seconds = microseconds / 1_000_000 if microseconds and is_ours else None
    return ServiceManager(environ.get("NOTIFY_SOCKET"), seconds)
