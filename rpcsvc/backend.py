"""What the composition root needs of an engine, whichever it is.

What does not live here: making one (app.py, app_onchain.py).
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

from rpcsvc.clock import Clock
from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.orders.ports.rates import RateSource
from rpcsvc.orders.ports.upstream import UpstreamVenue
from rpcsvc.orders.ports.wallets import SettlementEngine
from rpcsvc.orders.reservations import Reservations
from rpcsvc.settlement.sandbox.controls import SandboxControls


@dataclass(frozen=True, slots=True)
class Backend:
    """What settles orders, and what depends on it."""

    engine: SettlementEngine
    rates: RateSource
    clock: Clock
    network: str
    monero_networks: frozenset[MoneroNetwork]
    beside: tuple[Callable[[], Coroutine[Any, Any, None]], ...] = ()
    reservations: Reservations | None = None
    sandbox: SandboxControls | None = None
    upstream: UpstreamVenue | None = None
    offered: ChainRegistry | None = None
