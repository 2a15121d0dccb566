"""Makes an engine's venue and worker.

An engine's package gives a ``Backend``: from ``wallets_backend``, from ``upstream_backend``, or one
of its own around a Venue. Deposits, payouts and price locks run only where there are wallets.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from rpcsvc.clock import Clock
from rpcsvc.domain.money import Asset
from rpcsvc.domain.reservations import Counting, Holdings, counted, uncounted
from rpcsvc.domain.unfunded import Reserved
from rpcsvc.orders.deposits import DepositWatcher, ScanProgress
from rpcsvc.orders.gasless import ClientLimit, GaslessFunding
from rpcsvc.orders.inventory import ClientLimits, Inventory, SimulatedInventory, WalletInventory
from rpcsvc.orders.local_venue import Intake, LocalVenue
from rpcsvc.orders.payouts import Payouts
from rpcsvc.orders.policy import Core
from rpcsvc.orders.ports.gasless import GaslessWallets
from rpcsvc.orders.ports.operator import Treasury
from rpcsvc.orders.ports.upstream import UpstreamPort
from rpcsvc.orders.ports.venue import Rate, RateSource, SandboxControls, Venue, VenueProfile
from rpcsvc.orders.ports.wallets import NetworkState, OrderingWallets, Wallets
from rpcsvc.orders.processor import KeyedLocks, Quarantine
from rpcsvc.orders.published_rates import PublishedRates
from rpcsvc.orders.scheduler.deadlines import Deadlines, ExpiredReservations, PriceLocks
from rpcsvc.orders.scheduler.effects import EffectRunner
from rpcsvc.orders.scheduler.worker import TICK_MS, Loop, Step, Worker
from rpcsvc.orders.upstream.authorizations import POLL_MS, RelayedAuthorizations
from rpcsvc.orders.upstream.follower import Follower
from rpcsvc.orders.upstream.relay import Relay
from rpcsvc.orders.upstream.venue import UpstreamVenue
from rpcsvc.orders.withdrawals import AllowList, Wallet, Withdrawals
from rpcsvc.store.changes import PooledOrder
from rpcsvc.store.gasless import FundingStore
from rpcsvc.store.leases import Watch
from rpcsvc.store.withdrawals import WithdrawalStore


class Readings(NamedTuple):
    """State of an engine in memory, for metrics; None where an engine has no such thing.

    ``scan_lags``: ms by network. ``rate`` and ``holdings`` raise errors.Unavailable. ``reserved``
    and ``holdings`` take a network of ``networks``, and are in atomic units.
    """

    networks: frozenset[str] = frozenset()
    scan_lags: Callable[[], Mapping[str, int]] = dict
    rate: Callable[[], Rate] | None = None
    reserved: Callable[[str], Awaitable[Reserved]] | None = None
    holdings: Callable[[str], Holdings] | None = None


class Settlement(NamedTuple):
    """The venue, its worker, the readings of both, and the operator's own transfers."""

    venue: Venue
    worker: Worker
    readings: Readings = Readings()
    withdrawals: Withdrawals | None = None


class LastAudit(NamedTuple):
    """When (``steady_ms``) the last audit was made, and how many differences it found.

    Before the first: when audits began, and None.
    """

    at: int
    differences: int | None


class Backend(Struct, frozen=True):
    """An engine that is connected. ``open`` starts it and makes its venue, once.

    ``join`` makes the venue of a replica that waits for the lease: it takes orders, and another
    replica settles them.
    ``engine`` is its own object: wallets, or the upstream. ``clock`` is that of orders.
    ``counting``: what orders reserve. ``controls``: what a developer may provoke.
    ``paused``: why payouts are paused, None if they are not. ``last_audit``: None without audits.
    ``treasury``: the wallets as the operator sees them. ``states``: what is known of networks now.
    ``rate_spread_bps``: how far apart the sources of the rate are; None where that is not known.
    ``authorization_gas``: what gas for signed authorizations took of its daily budget, as a share.
    ``watch``: called by a standby while another replica settles; None: there is nothing to see.
    """

    profile: VenueProfile
    engine: Any
    clock: Clock
    open: Callable[[Core], Awaitable[Settlement]]
    join: Callable[[Core], Awaitable[Settlement]]
    counting: Counting = uncounted
    controls: SandboxControls | None = None
    paused: Callable[[], str | None] = lambda: None
    last_audit: Callable[[], LastAudit | None] = lambda: None
    treasury: Treasury | None = None
    states: Callable[[], Mapping[str, NetworkState]] = dict
    rate_spread_bps: Callable[[], int | None] = lambda: None
    authorization_gas: Callable[[], float | None] = lambda: None
    watch: Watch | None = None


class Stock(NamedTuple):
    """What wallets may be asked to pay: how it is counted, and who decides."""

    counting: Counting
    inventory: Callable[[Core], Inventory]
    holdings: Callable[[str], Holdings] | None = None


def unlimited() -> Stock:
    """Simulated wallets: nothing is counted, and every order is accepted."""
    return Stock(uncounted, lambda _core: SimulatedInventory())


def stocked(holdings: Callable[[str], Holdings]) -> Stock:
    """Wallets that hold what ``holdings`` gives for a network."""

    def inventory(core: Core) -> Inventory:
        return WalletInventory(holdings, core.store, core.policy.unfunded, core.clock, core.secret)

    return Stock(counted, inventory, holdings)


class Gasless(NamedTuple):
    """Who keeps signed authorizations, who carries them out, and how often to look at them."""

    store: FundingStore
    wallets: GaslessWallets
    poll_ms: int = TICK_MS


class Outlet(NamedTuple):
    """Who keeps withdrawals, the addresses that they may pay, and the most units of each."""

    store: WithdrawalStore
    allowed: AllowList
    caps: Mapping[Asset, int] = MappingProxyType({})


class Settler(NamedTuple):
    """What the replica that settles works with.

    ``exchange``, in each pass: it reads what other replicas have changed, or publishes what they
    need. ``loops`` run beside the passes.
    """

    wallets: Wallets
    stock: Stock
    exchange: Step
    loops: Sequence[Loop] = ()


class Joined(NamedTuple):
    """What a replica takes orders by that does not settle.

    ``refresh``, in each pass: it reads what others have changed. ``loops`` run beside the passes.
    ``pooled``: as Intake has it.
    """

    wallets: OrderingWallets
    stock: Stock
    refresh: Step
    loops: Sequence[Loop] = ()
    pooled: Callable[[str, str], PooledOrder] | None = None


def wallets_backend(
    profile: VenueProfile,
    settler: Settler,
    joined: Joined,
    rates: RateSource,
    clock: Clock,
    outlet: Outlet,
    gasless: Gasless,
) -> Backend:
    """The backend of an engine with wallets."""
    profile = replace(profile, takes_signatures=lambda: True)

    async def open_(core: Core) -> Settlement:
        await settler.wallets.start()
        return await _settling(core, profile, settler, rates, outlet, gasless)

    async def join(core: Core) -> Settlement:
        await joined.refresh()
        wallets, stock = joined.wallets, joined.stock
        worker = Worker((joined.refresh,), Quarantine(), loops=joined.loops)
        published = PublishedRates(core.rates, rates, core.policy.rate_rule, core.lease)
        unwatched = ScanProgress((), core.clock)
        intake = Intake(wallets, stock.inventory(core), unwatched, joined.pooled)
        venue = LocalVenue(core, profile, intake, published, worker.wake, _funding(core, gasless))
        wallet = _wallet(profile, settler.wallets, wallets, stock, outlet, KeyedLocks())
        withdrawals = Withdrawals(outlet.store, core.store, wallet, core.clock, core.lease)
        return Settlement(venue, worker, withdrawals=withdrawals)

    return Backend(profile, settler.wallets, clock, open_, join, settler.stock.counting)


def _funding(core: Core, gasless: Gasless) -> GaslessFunding:
    limit = ClientLimit(core.policy.unfunded.address_authorizations_a_day, core.secret)
    return GaslessFunding(
        core.store, gasless.store, gasless.wallets, core.clock, limit, gasless.poll_ms, core.lease
    )


def _wallet(
    profile: VenueProfile,
    wallets: Wallets,
    ordering: OrderingWallets,
    stock: Stock,
    outlet: Outlet,
    writers: KeyedLocks,
) -> Wallet:
    """What withdrawals need of the wallets."""
    chain = profile.chains.all()[0].name
    return Wallet(wallets, ordering, outlet.allowed, stock.holdings, chain, writers, outlet.caps)


async def _settling(
    core: Core,
    profile: VenueProfile,
    settler: Settler,
    rates: RateSource,
    outlet: Outlet,
    gasless: Gasless,
) -> Settlement:
    wallets, stock = settler.wallets, settler.stock
    store, processor, clock, policy = core.store, core.processor, core.clock, core.policy
    quarantine = Quarantine()
    watcher = DepositWatcher(store, wallets, processor, rates, quarantine, clock)
    inventory = stock.inventory(core)
    published = PublishedRates(core.rates, rates, policy.rate_rule, core.lease)
    payouts = Payouts(store, wallets, processor, clock, quarantine, core.lease)
    wallet = _wallet(profile, wallets, wallets, stock, outlet, payouts.writers)
    withdrawals = Withdrawals(outlet.store, core.store, wallet, clock, core.lease)
    effects = EffectRunner(
        store,
        processor,
        payouts,
        rates,
        clock,
        poll_ms=wallets.poll_ms,
        payable=inventory.payable_for,
    )
    locks = PriceLocks(store, processor, rates, quarantine, clock, break_bps=policy.lock_break_bps)
    deadlines = Deadlines(
        store, processor, watcher.progress, quarantine, clock, is_paused=wallets.is_paused
    )
    expired = ExpiredReservations(store, watcher.progress, clock)
    funding = _funding(core, gasless)
    shared = () if core.lease.is_alone else (settler.exchange, effects.find)
    worker = Worker(
        (
            *shared,
            watcher.reconcile,
            expired.end,
            published.publish,
            core.retention.clean,
            locks.break_due,
            deadlines.keep,
        ),
        quarantine,
        runners=(effects,),
        loops=(*settler.loops, withdrawals.run, funding.run),
    )
    intake = Intake(wallets, inventory, watcher.progress)
    venue = LocalVenue(core, profile, intake, published, worker.wake, funding)
    readings = Readings(
        wallets.networks,
        watcher.progress.lags,
        rates.rate,
        None if stock.holdings is None else store.reserved,
        stock.holdings,
    )
    return Settlement(venue, worker, readings, withdrawals)


def upstream_backend(
    profile: VenueProfile, upstream: UpstreamPort, clock: Clock, authorizations: FundingStore
) -> Backend:
    """The backend of an engine that has another service settle its orders."""

    async def open_(core: Core) -> Settlement:
        await upstream.start()
        funding = _funding(
            core, Gasless(authorizations, RelayedAuthorizations(core.store, upstream), POLL_MS)
        )
        return await _upstream(core, profile, upstream, funding)

    return Backend(profile, upstream, clock, open_, open_, counted)


async def _upstream(
    core: Core, profile: VenueProfile, upstream: UpstreamPort, funding: GaslessFunding
) -> Settlement:
    store, clock, policy, lease = core.store, core.clock, core.policy, core.lease
    follower = Follower(store, core.processor, upstream, clock)
    follow = follower.follow if lease.is_held else _followed_elsewhere
    relay = Relay(store, upstream, clock, follow)
    await relay.recover(is_alone=lease.is_alone)
    if lease.is_held:
        await follower.recover()
        worker = _upstream_settler(core, relay, follower, funding)
    else:
        worker = Worker((), Quarantine(), loops=(relay.run,))
    limits = ClientLimits(
        store, policy.unfunded, lambda _network, _reserved: policy.reservable, clock, core.secret
    )
    venue = UpstreamVenue(core, profile, upstream, relay, follower, limits, funding)
    return Settlement(venue, worker)


def _upstream_settler(
    core: Core, relay: Relay, follower: Follower, funding: GaslessFunding
) -> Worker:
    store, clock, quarantine = core.store, core.clock, Quarantine()
    unwatched = ScanProgress((), clock)
    return Worker(
        (
            *(() if core.lease.is_alone else (follower.find,)),
            relay.find,
            ExpiredReservations(store, unwatched, clock).end,
            core.retention.clean,
            Deadlines(store, core.processor, unwatched, quarantine, clock).keep,
        ),
        quarantine,
        loops=(relay.run, follower.run, funding.run),
    )


def _followed_elsewhere(_order_id: str) -> None:
    """The replica that settles finds new orders by itself."""
