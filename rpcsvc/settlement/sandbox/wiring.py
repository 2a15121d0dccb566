"""Connects the engine sandbox: simulated chains in the store, and the settings that it reads."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from rpcsvc.clock import OffsetClock
from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.domain.order import PERPS
from rpcsvc.domain.reservations import counted, uncounted
from rpcsvc.engine_context import EngineContext
from rpcsvc.orders.policy import MakeOrders
from rpcsvc.orders.ports.venue import VenueProfile
from rpcsvc.orders.settlement import Settlement, replica, settling_service
from rpcsvc.orders.withdrawals import WithdrawalLimits, read_allow_list
from rpcsvc.settings import Settings
from rpcsvc.settlement.sandbox.controls import SimulatedChains
from rpcsvc.settlement.sandbox.engine import SandboxEngine, SimulatedAuthorizations
from rpcsvc.settlement.sandbox.ledger import SandboxLedger


@asynccontextmanager
async def connect(context: EngineContext, make_orders: MakeOrders) -> AsyncIterator[Settlement]:
    """Settle on simulated chains, with a clock that can be moved and a developer's controls."""
    settings, tables = context.settings, context.tables
    clock, ledger = OffsetClock(context.clock), SandboxLedger(tables)
    engine = SandboxEngine(ledger, context.chains, clock, context.random, settings.sandbox)
    profile = VenueProfile(
        engine="sandbox",
        network="sandbox",
        chains=context.chains,
        monero_networks=frozenset(MoneroNetwork),
        names=engine.names,
        bridges=frozenset({PERPS}),
        is_simulated=True,
        takes_signatures=lambda: True,
    )
    orders = make_orders(profile, clock, uncounted if engine.holdings is None else counted)
    limits = WithdrawalLimits(_withdraw_to(settings, context.chains))
    authorizations = SimulatedAuthorizations(ledger, engine, clock)
    if context.lease.is_held:
        settlement = await settling_service(
            orders, engine, engine, limits, authorizations, engine.refresh
        )
    else:
        settlement = await replica(
            orders, engine, engine, engine, limits, authorizations, engine.refresh
        )
    yield replace(settlement, controls=SimulatedChains(ledger, engine, clock, context.random))


def check(settings: Settings, chains: ChainRegistry) -> None:
    """Raise SettingsError for addresses that withdrawals can't pay."""
    _withdraw_to(settings, chains)


def _withdraw_to(settings: Settings, chains: ChainRegistry) -> dict[str, tuple[str, ...]]:
    return read_allow_list(settings.inventory.withdraw_to, chains, frozenset(MoneroNetwork))
