"""Builds an upstream engine from the settings: client, budgets, breaker, dialect."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from rpcsvc import strict_json
from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.domain.order import PERPS
from rpcsvc.engines import EngineParts
from rpcsvc.orders.backend import Backend, upstream_backend
from rpcsvc.orders.ports.venue import VenueProfile
from rpcsvc.settings import Settings, SettingsError, UpstreamSettings
from rpcsvc.settlement.upstream import dialects
from rpcsvc.settlement.upstream.answers import Networks
from rpcsvc.settlement.upstream.calls import Dialect, Upstream
from rpcsvc.settlement.upstream.client import UpstreamClient, system_timing
from rpcsvc.settlement.upstream.engine import UpstreamEngine
from rpcsvc.settlement.upstream.exchange import ClientOptions, base_url
from rpcsvc.settlement.upstream.limits import (
    CALLS_PER_MINUTE,
    CREATIONS_PER_MINUTE,
    Breaker,
    Budget,
    shared,
)
from rpcsvc.settlement.upstream.offered import ChainWatch, NetworkCheck, OfferedChains

# The default limits of another rpcsvc, less a fifth for others behind the same address.
BFF_CALLS_PER_MINUTE = 240
BFF_CREATIONS_PER_MINUTE = 24


@asynccontextmanager
async def connected(parts: EngineParts) -> AsyncIterator[Backend]:
    """The upstream as a venue. Raises SettingsError."""
    check(parts.settings, parts.chains)
    settings = parts.settings.upstream
    monero = MoneroNetwork(settings.monero_network)
    async with upstream_engine(settings, parts.chains, strict_json.loads) as engine:
        profile = VenueProfile(
            engine="upstream",
            network=monero.value,
            chains=engine.chains,
            monero_networks=frozenset({monero}),
            names=engine.names,
            bridges=frozenset({PERPS}),
        )
        yield upstream_backend(profile, engine, parts.clock)


def check(settings: Settings, _chains: ChainRegistry) -> None:
    """Raise SettingsError for an address that can't be called, and for integrators: the upstream
    sets the price, so no fee of theirs can be taken here.
    """
    if settings.integrators:
        raise SettingsError(
            [
                "integrators: with engine upstream the price is the upstream's, and no fee of an"
                " integrator can be taken here; configure them there"
            ]
        )
    client_options(settings.upstream)


@asynccontextmanager
async def upstream_engine(
    settings: UpstreamSettings, chains: ChainRegistry, loads: Callable[[bytes], Any]
) -> AsyncIterator[UpstreamEngine]:
    """The engine, connected as long as the block lasts. Raises SettingsError."""
    dialect, options = dialect_of(settings), client_options(settings)
    timing = system_timing()
    is_bff = settings.dialect == "bff"
    most = settings.creations_per_minute or (
        BFF_CREATIONS_PER_MINUTE if is_bff else CREATIONS_PER_MINUTE
    )
    creations = Budget(most, now=timing.now_ms, sleep=timing.sleep_ms, reserved=min(3, most - 1))
    calls, prices = shared(
        settings.calls_per_minute or (BFF_CALLS_PER_MINUTE if is_bff else CALLS_PER_MINUTE),
        now=timing.now_ms,
        sleep=timing.sleep_ms,
    )
    client = UpstreamClient(
        options,
        loads=loads,
        read_error=dialect.read_error,
        creations=creations,
        calls=calls,
        prices=prices,
        breaker=Breaker(),
        timing=timing,
    )
    monero = MoneroNetwork(settings.monero_network)
    networks = Networks((monero,), chains.token_contracts)
    async with client:
        upstream = Upstream(client, dialect, networks)
        offered = OfferedChains(chains)
        check = NetworkCheck(upstream, monero) if upstream.tells_network else None
        watch = ChainWatch(upstream, offered, timing, network=check)
        try:
            yield UpstreamEngine(client, upstream, offered, watch, creations, monero)
        finally:
            await watch.close()


def dialect_of(settings: UpstreamSettings) -> Dialect:
    """The dialect that the upstream is called in."""
    return dialects.BFF if settings.dialect == "bff" else dialects.V1


def client_options(settings: UpstreamSettings) -> ClientOptions:
    """Where it is and how it is called, checked. Raises SettingsError."""
    if not settings.url:
        raise SettingsError(["upstream.url: received nothing; engine upstream needs an address"])
    key = settings.api_key
    try:
        options = ClientOptions(
            dialect_of(settings).base_url(settings.url),
            api_key=key.get_secret_value() if key else None,
            plain_http=settings.plain_http,
        )
        base_url(options)  # refuses what can't be called
    except ValueError as error:
        raise SettingsError([f"upstream: {error}"]) from error
    return options
