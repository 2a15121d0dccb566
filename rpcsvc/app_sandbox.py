"""The composition root's part for the engine sandbox: simulated chains in the store."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from msgspec.structs import replace

from rpcsvc.clock import OffsetClock
from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.domain.money import USDC, XMR, parse_amount
from rpcsvc.domain.order import PERPS
from rpcsvc.engine_parts import EngineParts
from rpcsvc.orders.backend import (
    Backend,
    Gasless,
    Joined,
    Outlet,
    Settler,
    unlimited,
    wallets_backend,
)
from rpcsvc.orders.ports.venue import VenueProfile
from rpcsvc.orders.withdrawals import read_allow_list
from rpcsvc.settings import SandboxSettings, Settings
from rpcsvc.settlement.sandbox.controls import SimulatedChains
from rpcsvc.settlement.sandbox.engine import SandboxEngine, SandboxOptions
from rpcsvc.settlement.sandbox.gasless import SimulatedAuthorizations
from rpcsvc.settlement.sandbox.ledger import SandboxLedger
from rpcsvc.store.gasless import FundingStore
from rpcsvc.store.withdrawals import WithdrawalStore


@asynccontextmanager
async def connected(parts: EngineParts) -> AsyncIterator[Backend]:
    """The simulated chains, with a clock that can be moved and the controls of a developer."""
    clock = OffsetClock(parts.clock)
    ledger = SandboxLedger(parts.database)
    options = _options(parts.settings.sandbox)
    engine = SandboxEngine(ledger, parts.chains, clock, parts.random, options)
    profile = VenueProfile(
        engine="sandbox",
        network="sandbox",
        chains=parts.chains,
        monero_networks=frozenset(MoneroNetwork),
        names=engine.names,
        bridges=frozenset({PERPS}),
        is_simulated=True,
    )
    gasless = Gasless(FundingStore(parts.database), SimulatedAuthorizations(ledger, engine, clock))
    outlet = Outlet(WithdrawalStore(parts.database), _withdraw_to(parts.settings, parts.chains))
    backend = wallets_backend(
        profile,
        Settler(engine, unlimited(), engine.refresh),
        Joined(engine, unlimited(), engine.refresh),
        engine,
        clock,
        outlet,
        gasless,
    )
    yield replace(backend, controls=SimulatedChains(ledger, engine, clock, parts.random))


def check(settings: Settings, chains: ChainRegistry) -> None:
    """Raise SettingsError for addresses that withdrawals can't pay."""
    _options(settings.sandbox)
    _withdraw_to(settings, chains)


def _withdraw_to(settings: Settings, chains: ChainRegistry) -> dict[str, tuple[str, ...]]:
    return read_allow_list(settings.inventory.withdraw_to, chains, frozenset(MoneroNetwork))


def _options(sandbox: SandboxSettings) -> SandboxOptions:
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
