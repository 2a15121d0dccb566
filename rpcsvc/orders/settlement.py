"""Puts the venue and the worker of an engine with wallets together.

``settling_service`` is for the replica that settles, ``replica`` for one that takes orders while
another settles.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, NamedTuple

from msgspec import Struct

from rpcsvc.domain.reservations import Holdings, Reserved
from rpcsvc.orders.authorizations import Authorizations, AuthorizationWallets
from rpcsvc.orders.deposits import DepositWatcher, ScanProgress
from rpcsvc.orders.inventory import Inventory, SimulatedInventory, WalletInventory
from rpcsvc.orders.local_venue import LocalVenue
from rpcsvc.orders.payouts import Payouts
from rpcsvc.orders.policy import Orders
from rpcsvc.orders.ports.venue import Rate, RateSource, SandboxControls, Venue
from rpcsvc.orders.ports.wallets import NetworkState, OrderingWallets, Wallets
from rpcsvc.orders.processor import KeyedLocks, Quarantine
from rpcsvc.orders.published_rates import PublishedRates
from rpcsvc.orders.scheduler.effects import EffectRunner
from rpcsvc.orders.scheduler.worker import Deadlines, ExpiredReservations, PriceLocks, Step, Worker
from rpcsvc.orders.withdrawals import WithdrawalLimits, Withdrawals
from rpcsvc.store.authorizations import AuthorizationStore
from rpcsvc.store.leases import Watch
from rpcsvc.store.replicas import RateRows
from rpcsvc.store.withdrawals import WithdrawalStore


class LastAudit(NamedTuple):
    """When (``steady_ms``) the last audit was made, and how many differences it found.

    Before the first: when audits began, and None.
    """

    at: int
    differences: int | None


class Readings(Struct, frozen=True):
    """State of an engine in memory, for metrics; None where an engine has no such thing.

    ``scan_lags``: ms by network. ``rate`` and ``holdings`` raise errors.Unavailable. ``reserved``
    and ``holdings`` take a network of ``networks``, and are in atomic units. ``at_risk``: USDC
    units paid out for deposits that are not final, by network and part. ``states``: of each
    network. ``paused``: why payouts are paused, None if they are not. ``rate_spread_bps``: how far
    apart the sources of the rate are. ``authorization_gas``: the share of its daily budget that gas
    for signed authorizations took.
    """

    networks: frozenset[str] = frozenset()
    scan_lags: Callable[[], Mapping[str, int]] = dict
    rate: Callable[[], Rate] | None = None
    reserved: Callable[[str], Awaitable[Reserved]] | None = None
    holdings: Callable[[str], Holdings] | None = None
    at_risk: Callable[[], Awaitable[Mapping[tuple[str, str], int]]] | None = None
    states: Callable[[], Mapping[str, NetworkState]] = dict
    paused: Callable[[], str | None] = lambda: None
    last_audit: Callable[[], LastAudit | None] = lambda: None
    rate_spread_bps: Callable[[], int | None] = lambda: None
    authorization_gas: Callable[[], float | None] = lambda: None


class Settlement(Struct, frozen=True):
    """A connected engine with the venue and the worker of its orders.

    ``engine`` is its own object: wallets, or an upstream. ``rates``: None where it sets no price.
    ``withdrawals`` are the operator's, where there are wallets; ``controls`` are a
    developer's. A standby calls ``watch`` while another replica settles; None: nothing to see.
    """

    orders: Orders
    engine: Any
    venue: Venue
    worker: Worker
    readings: Readings = Readings()
    rates: RateSource | None = None
    withdrawals: Withdrawals | None = None
    controls: SandboxControls | None = None
    watch: Watch | None = None


async def settling_service(
    orders: Orders,
    wallets: Wallets,
    rates: RateSource,
    limits: WithdrawalLimits,
    authorizations: AuthorizationWallets,
    exchange: Step,
) -> Settlement:
    """Start the wallets, and settle orders with them.

    Where there are other replicas, each pass begins with ``exchange``: it reads what they have
    changed, or publishes what they need.
    """
    await wallets.start()
    store, processor, clock, policy = orders.store, orders.processor, orders.clock, orders.policy
    quarantine = Quarantine()
    watcher = DepositWatcher(store, wallets, processor, rates, quarantine, clock, policy.finality)
    inventory = _inventory(orders, wallets)
    published = _published(orders, rates)
    payouts = Payouts(
        store, wallets, inventory, processor, clock, quarantine, watcher.progress, orders.lease
    )
    withdrawals = Withdrawals(
        WithdrawalStore(orders.tables), orders, wallets, wallets, limits, payouts.writers
    )
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
    funding = authorization_funding(orders, authorizations, wallets.poll_ms)
    shared = () if orders.lease.is_alone else (exchange, effects.find)
    worker = Worker(
        (
            *shared,
            watcher.reconcile,
            expired.end,
            published.publish,
            orders.retention.clean,
            locks.break_due,
            deadlines.keep,
        ),
        quarantine,
        runners=(effects,),
        loops=(withdrawals.run, funding.run),
    )
    venue = LocalVenue(
        orders, wallets, inventory, watcher.progress, published, worker.wake, funding
    )
    readings = Readings(
        networks=wallets.networks,
        scan_lags=watcher.progress.lags,
        rate=rates.rate,
        reserved=None if wallets.holdings is None else store.reserved,
        holdings=wallets.holdings,
        at_risk=store.at_risk,
    )
    return Settlement(
        orders, wallets, venue, worker, readings, rates=rates, withdrawals=withdrawals
    )


async def replica(
    orders: Orders,
    engine: Wallets,
    wallets: OrderingWallets,
    rates: RateSource,
    limits: WithdrawalLimits,
    authorizations: AuthorizationWallets,
    refresh: Step,
) -> Settlement:
    """Take orders by ``wallets`` while another replica settles them; ``engine`` is not started.

    ``refresh`` reads what the others have changed: now, and in each pass.
    """
    await refresh()
    worker = Worker((refresh,), Quarantine())
    venue = LocalVenue(
        orders,
        wallets,
        _inventory(orders, wallets),
        ScanProgress((), orders.clock),
        _published(orders, rates),
        worker.wake,
        authorization_funding(orders, authorizations, engine.poll_ms),
    )
    withdrawals = Withdrawals(
        WithdrawalStore(orders.tables), orders, engine, wallets, limits, KeyedLocks()
    )
    return Settlement(orders, engine, venue, worker, rates=rates, withdrawals=withdrawals)


def authorization_funding(
    orders: Orders, wallets: AuthorizationWallets, poll_ms: int
) -> Authorizations:
    """Fund orders by signed authorizations, which ``wallets`` carry out."""
    return Authorizations(
        orders.store,
        AuthorizationStore(orders.tables),
        wallets,
        orders.clock,
        poll_ms,
        orders.lease,
        lambda: orders.policy.unfunded.address_authorizations_a_day,
        orders.secret,
    )


def _inventory(orders: Orders, wallets: OrderingWallets) -> Inventory:
    if wallets.holdings is None:
        return SimulatedInventory()
    policy = orders.policy
    return WalletInventory(wallets.holdings, orders.store, policy, orders.clock, orders.secret)


def _published(orders: Orders, rates: RateSource) -> PublishedRates:
    return PublishedRates(RateRows(orders.tables), rates, orders.policy.rate_rule, orders.lease)
