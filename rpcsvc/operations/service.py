"""What an operation works with: the parts of the running service, and the call at hand.

What does not live here: putting the parts together (app.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from rpcsvc.clock import Clock
from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.domain.integrators import Integrator
from rpcsvc.domain.order import Terms, Timeouts
from rpcsvc.errors import Unavailable
from rpcsvc.ids import RandomBytes
from rpcsvc.operations.operation import Operation
from rpcsvc.operations.ticket_budget import TicketBudget
from rpcsvc.orders.idempotency import Idempotency
from rpcsvc.orders.ports.health import Health
from rpcsvc.orders.ports.rates import RateSource
from rpcsvc.orders.ports.store import OrderStore
from rpcsvc.orders.ports.wallets import Holdings, SettlementEngine
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.orders.reservations import UPSTREAM, Reservations
from rpcsvc.orders.unfunded import Client, UnfundedLimits
from rpcsvc.orders.upstream.relay import Relay
from rpcsvc.settlement.sandbox.controls import SandboxControls

# The user that the service runs as: through the UNIX socket, or in one process with it.
SOCKET = Client("socket")
# The terms of an order as a signed text that can be passed on; None where signing is off.
Attest = Callable[[Terms], str]


@dataclass(frozen=True, slots=True)
class Policy:
    """The operator's terms: fees and limits in bps and whole USD, times in milliseconds."""

    spread_bps: int
    min_received_bps: int
    max_swap_usd: int
    bridge_min_usd: int
    deposit_window: int
    price_lock: int
    timeouts: Timeouts
    unfunded: UnfundedLimits
    # What an upstream may reserve for this service, in USDC units.
    reservable: int = 0


@dataclass(frozen=True, slots=True)
class Venue:
    """Where orders settle, and who vouches for their terms: what their views need to know."""

    network: str
    engine: SettlementEngine
    is_simulated: bool
    attest: Attest | None = None


@dataclass(frozen=True, slots=True)
class Service:
    """The running service as operations see it. ``sandbox`` and ``relay`` are there only with the
    engine that they belong to.
    """

    operations: tuple[Operation, ...]
    venue: Venue
    store: OrderStore
    engine: SettlementEngine
    rates: RateSource
    processor: OrderProcessor
    idempotency: Idempotency
    chains: ChainRegistry
    monero_networks: frozenset[MoneroNetwork]
    policy: Policy
    clock: Clock
    random: RandomBytes
    wake: Callable[[], None]
    sandbox: SandboxControls | None
    ticket_budget: TicketBudget
    # Keys the hashes of clients' names.
    client_secret: bytes
    relay: Relay | None = None
    reservations: Reservations | None = None

    def stored(self, client: Client) -> str:
        """What is kept of a client with its unfunded orders; empty where none are counted."""
        return "" if self.reservations is None else client.stored(self.client_secret)

    def wallet(self, network: str) -> int | None:
        """What the wallet of a network holds beside what funded orders may still take, in units.

        None where the engine has no wallet of its own. Raises errors.Unavailable while it is not
        known.
        """
        if network == UPSTREAM:
            return self.policy.reservable
        held = self.engine.holdings(network)
        if held is None or self.reservations is None:
            return None
        return max(0, held.free + held.locked - self.reservations.funded(network))

    def payable(self, network: str) -> Holdings | None:
        """What can be paid out on a network beside what open orders may still take.

        None where the engine has no wallet of its own. Raises errors.Unavailable while it is not
        known.
        """
        held = self.engine.holdings(network)
        if held is None or self.reservations is None:
            return held
        return replace(held, free=max(0, held.free - self.reservations.on(network)))

    def reservable(self, network: str, client: Client) -> int | None:
        """The most payout units that a client's next order may take on a network; None as above."""
        held, wallet = self.payable(network), self.wallet(network)
        if held is None or wallet is None or self.reservations is None:
            return None if held is None else held.free
        bounds, stored = self.policy.unfunded, self.stored(client)
        return min(held.free, self.reservations.unfunded.room(bounds, stored, network, wallet))

    def rates_health(self) -> Health:
        """Whether there is a fresh rate; an upstream prices each amount itself."""
        if self.relay is not None:
            return Health(True)
        try:
            self.rates.rate()
        except Unavailable as error:
            return Health(False, error.message)
        return Health(True)


class Call(NamedTuple):
    """One call: who asks, under which idempotency key, and which integrator brings it.

    ``local_session`` is the session that the CLI remembers. It stands in for a sessionId that the
    caller did not send, and is no part of what an idempotency key stands for.
    ``client`` is whose unfunded orders a new one is counted with; by default this process.
    """

    request_id: str
    namespace: str = "public"
    idempotency_key: str | None = None
    integrator: Integrator | None = None
    local_session: str | None = None
    client: Client = SOCKET
