"""Serving: the process from its start to SIGTERM, and the command line around it.

serve(settings)               a running service (app.py), listening, until SIGTERM or SIGINT
run_command(words, environ)   all of the program but the probe
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import ssl
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import structlog
from aiohttp import web

from rpcsvc.app import Running, local_service, running, web_app
from rpcsvc.cli.main import run
from rpcsvc.http.http_server import (
    AcceptFailures,
    Connections,
    EdgeRunner,
    Listener,
    raise_descriptor_limit,
)
from rpcsvc.settings import Settings, SettingsError, check_bind

log = structlog.get_logger(__name__)

SOCKET_NAME: Final = "rpcsvc.sock"
LONGEST_SOCKET_PATH: Final = 107  # sun_path of unix(7), less its final NUL
# How long a connection may be idle between two requests. Longer than proxies keep theirs open.
IDLE_SECONDS: Final = 75


async def serve(settings: Settings) -> None:
    """Serve until SIGTERM or SIGINT; then finish what is in hand and close.

    Raises SettingsError, DataDirInUse, and OSError when the address can't be bound.
    """
    check_bind(settings)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    loop.set_exception_handler(AcceptFailures(time.monotonic))
    async with running(settings) as up:
        beat = asyncio.create_task(up.worker.run(), name="worker")
        beat.add_done_callback(lambda _task: stop.set())
        try:
            async with listening(up):
                _settle_garbage_collector()
                await stop.wait()
                log.info("stopping")
        finally:
            await up.worker.stop()
            await beat
    log.info("stopped")


def _settle_garbage_collector() -> None:
    """Leave what start-up made out of collections, and collect per many requests, not per few."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 50)


@asynccontextmanager
async def listening(up: Running) -> AsyncIterator[None]:
    """Take requests over TCP and the UNIX socket; at the end, finish what is in hand.

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
    runner = EdgeRunner(
        web_app(up),
        connections=connections,
        access_log=None,
        shutdown_timeout=settings.graceful_seconds,
        keepalive_timeout=IDLE_SECONDS,
        # What a caller began is finished though they hang up: an order whose commit is under way
        # is made, and what it promises of the wallets has to stay promised.
        handler_cancellation=False,
    )
    await runner.setup()
    watch = asyncio.create_task(connections.watch(), name="connections")
    try:
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
        watch.cancel()
        with suppress(asyncio.CancelledError):
            await watch


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
        log.warning("socket_path_too_long", path=str(path), longest=LONGEST_SOCKET_PATH)
        return
    with suppress(FileNotFoundError):
        path.unlink()  # noqa: ASYNC240 - one call at start; the owner lock is ours: whoever left it is gone
    before = os.umask(0o177)
    try:
        await web.UnixSite(runner, str(path)).start()
    finally:
        os.umask(before)


def run_command(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Carry out one command line; its exit status."""
    return run(words, environ, serve=serve, local=local_service)
