"""Makes a venue, and the worker beside it, of an engine.

An engine's package gives a ``Backend``: from ``wallets_backend``, from ``upstream_backend``, or one
of its own around a Venue. Deposits, payouts and price locks run only where there are wallets.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rpcsvc.clock import Clock
from rpcsvc.orders.deposits import DepositWatcher, ScanProgress
from rpcsvc.orders.inventory import ClientLimits, Inventory, SimulatedInventory, WalletInventory
from rpcsvc.orders.local_venue import LocalVenue
from rpcsvc.orders.payouts import Payouts
from rpcsvc.orders.policy import Core
from rpcsvc.orders.ports.operator import Treasury
from rpcsvc.orders.ports.upstream import UpstreamPort
from rpcsvc.orders.ports.venue import RateSource, SandboxControls, Venue, VenueProfile
from rpcsvc.orders.ports.wallets import Holdings, Wallets
from rpcsvc.orders.processor import Quarantine
from rpcsvc.orders.reservations import UNCOUNTED, ReservationBook, Reservations
from rpcsvc.orders.scheduler.deadlines import Deadlines, PriceLocks
from rpcsvc.orders.scheduler.effects import EffectRunner
from rpcsvc.orders.scheduler.worker import Loop, Worker
from rpcsvc.orders.upstream.follower import Follower
from rpcsvc.orders.upstream.relay import Relay
from rpcsvc.orders.upstream.venue import UpstreamVenue


class Settlement(NamedTuple):
    """Where orders are made, and what moves them on."""

    venue: Venue
    worker: Worker


@dataclass(frozen=True, slots=True)
class Backend:
    """An engine that is connected. ``open`` starts it and makes its venue, once.

    ``engine`` is its own object: wallets, or the upstream. ``clock`` is that of orders.
    ``reservations`` follow each commit of an order. ``controls``: what a developer may provoke.
    ``paused``: why payouts are paused, None if they are not. ``treasury``: the wallets as the
    operator sees them.
    """

    profile: VenueProfile
    engine: Any
    clock: Clock
    open: Callable[[Core], Awaitable[Settlement]]
    reservations: ReservationBook = UNCOUNTED
    controls: SandboxControls | None = None
    paused: Callable[[], str | None] = lambda: None
    treasury: Treasury | None = None


class Stock(NamedTuple):
    """What wallets may be asked to pay: who counts it, and who decides."""

    reservations: Reservations | None
    inventory: Callable[[Core], Inventory]


def unlimited() -> Stock:
    """Simulated wallets: nothing is counted, and every order is taken."""
    return Stock(None, lambda _core: SimulatedInventory())


def stocked(holdings: Callable[[str], Holdings]) -> Stock:
    """Wallets that hold what ``holdings`` gives for a network."""
    book = Reservations()

    def inventory(core: Core) -> Inventory:
        return WalletInventory(holdings, book, core.policy.unfunded, core.clock, core.secret)

    return Stock(book, inventory)


def wallets_backend(
    profile: VenueProfile,
    wallets: Wallets,
    rates: RateSource,
    clock: Clock,
    stock: Stock,
    loops: Sequence[Loop] = (),
) -> Backend:
    """The backend of an engine with wallets. ``loops`` run beside the worker."""

    async def open_(core: Core) -> Settlement:
        await wallets.start()
        return await _local(core, profile, wallets, rates, stock, loops)

    return Backend(profile, wallets, clock, open_, stock.reservations or UNCOUNTED)


async def _local(
    core: Core,
    profile: VenueProfile,
    wallets: Wallets,
    rates: RateSource,
    stock: Stock,
    loops: Sequence[Loop],
) -> Settlement:
    store, processor, clock, policy = core.store, core.processor, core.clock, core.policy
    quarantine = Quarantine()
    watcher = DepositWatcher(store, wallets, processor, rates, quarantine, clock)
    if stock.reservations is not None:
        stock.reservations.follow(watcher.progress.is_complete)
        await stock.reservations.load(store, clock.now_ms())
    inventory = stock.inventory(core)
    effects = EffectRunner(
        store,
        processor,
        Payouts(store, wallets, processor, clock, quarantine),
        rates,
        clock,
        poll_ms=wallets.poll_ms,
        payable=inventory.payable_for,
    )
    locks = PriceLocks(store, processor, rates, quarantine, clock, break_bps=policy.lock_break_bps)
    deadlines = Deadlines(
        store, processor, watcher.progress, quarantine, clock, is_paused=wallets.is_paused
    )
    worker = Worker(
        (watcher.reconcile, core.retention.clean, locks.break_due, deadlines.keep),
        quarantine,
        runners=(effects,),
        loops=loops,
    )  # fmt: skip
    venue = LocalVenue(core, profile, wallets, rates, inventory, watcher.progress, worker.wake)
    return Settlement(venue, worker)


def upstream_backend(profile: VenueProfile, upstream: UpstreamPort, clock: Clock) -> Backend:
    """The backend of an engine that has another service settle its orders."""
    reservations = Reservations()

    async def open_(core: Core) -> Settlement:
        await upstream.start()
        return await _upstream(core, profile, upstream, reservations)

    return Backend(profile, upstream, clock, open_, reservations)


async def _upstream(
    core: Core, profile: VenueProfile, upstream: UpstreamPort, reservations: Reservations
) -> Settlement:
    store, processor, clock, policy = core.store, core.processor, core.clock, core.policy
    unwatched = ScanProgress((), clock)
    reservations.follow(unwatched.is_complete)
    await reservations.load(store, clock.now_ms())
    follower = Follower(store, processor, upstream, clock)
    relay = Relay(store, upstream, clock, follower)
    await relay.recover()
    await follower.recover()
    quarantine = Quarantine()
    deadlines = Deadlines(store, processor, unwatched, quarantine, clock)
    worker = Worker(
        (core.retention.clean, deadlines.keep), quarantine, loops=(relay.run, follower.run)
    )
    limits = ClientLimits(
        reservations, policy.unfunded, lambda _network: policy.reservable, clock, core.secret
    )
    venue = UpstreamVenue(core, profile, upstream, relay, follower, limits, reservations)
    return Settlement(venue, worker)
