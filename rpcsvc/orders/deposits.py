"""Reconciles deposits: what the chain shows against what the order has on record.

Each pass turns the differences into events, so a restart, a missed block or a reorg need no code of
their own. It costs per changed deposit, not per open order, and takes ``DEPOSITS_PER_PASS`` of an
order at most: anyone may send an order thousands of tiny ones. A deposit that is not final is
confirmed only within the bounds of domain/finality.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Final

import structlog

from rpcsvc.clock import Clock
from rpcsvc.domain.events import DepositConfirmed, DepositRemoved, DepositSeen, ImpossibleTransition
from rpcsvc.domain.finality import FINAL_ONLY, Exposure, FinalityLimits, counts_early, worth
from rpcsvc.domain.machine import DECIDED_BY_DEPOSITS
from rpcsvc.domain.order import DepositKey, DepositState, Order
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.orders.ports.venue import RateSource
from rpcsvc.orders.ports.wallets import DepositSighting, Wallets
from rpcsvc.orders.processor import OrderProcessor, Quarantine
from rpcsvc.store.orders import OrderStore

log = structlog.get_logger(__name__)

TRIES = 3
# Most deposits of one order recorded per pass.
DEPOSITS_PER_PASS = 20

DepositEvent = DepositSeen | DepositConfirmed | DepositRemoved
Observed = list[tuple[str, DepositSighting]]  # with the id of the order that each is for

# A scan takes milliseconds; of a network that catches up, some minutes.
_LAGGING_AFTER_MS: Final = 10 * 60_000


def events_of(
    order: Order, sighting: DepositSighting, rate: int | None = None
) -> list[DepositEvent]:
    """The events that bring the order's record of a deposit up to what the chain shows.

    ``rate`` is the current one, in USDC units per XMR; None when there is none.
    """
    known = order.deposit(sighting.key)
    before = known.state if known else DepositState.REMOVED
    if before is sighting.state:
        return []
    events: list[DepositEvent] = []
    if before is not DepositState.REMOVED and sighting.state is not DepositState.CONFIRMED:
        events.append(DepositRemoved(sighting.key))
        before = DepositState.REMOVED
    if before is DepositState.REMOVED and sighting.state is not DepositState.REMOVED:
        events.append(
            DepositSeen(sighting.key, sighting.units, sighting.sender, sighting.first_seen_at, rate)
        )
    if sighting.state is DepositState.CONFIRMED:
        events.append(DepositConfirmed(sighting.key))
    return events


class DepositWatcher:
    """Turns deposit sightings into events of orders. ``progress``: of the scans."""

    def __init__(
        self,
        store: OrderStore,
        engine: Wallets,
        processor: OrderProcessor,
        rates: RateSource,
        quarantine: Quarantine,
        clock: Clock,
        finality: FinalityLimits = FINAL_ONLY,
    ) -> None:
        self._finality = finality
        # Those that have waited longest come first.
        self._awaiting_finality: dict[DepositKey, None] = {}
        self._store = store
        self._engine = engine
        self._processor = processor
        self._rates = rates
        self._clock = clock
        self.quarantine = quarantine
        self.progress = ScanProgress(engine.networks, clock, engine.is_paused)

    async def reconcile(self) -> int:
        """One pass; returns the number of events. Safe to repeat at any time.

        All deposits are recorded before any is confirmed. Otherwise the first of several that came
        during an outage would decide the order without the others.
        """
        found = await self._engine.observe()
        observed, unattributed = await self._by_order(found.sightings)
        seen, recorded = await self._record(observed, confirming=False)
        confirmable = await self._confirmable(
            recorded, found.complete_until, _remaining(observed, recorded)
        )
        confirmed, done = await self._record(confirmable, confirming=True)
        # Only now may the engine forget them: every event above is committed.
        await self._engine.acknowledge(
            [
                *unattributed,
                *(item for _, item in done if item.key not in self._awaiting_finality),
            ]
        )
        self.progress.advance(found.complete_until, _remaining(observed, done))
        await self._free_final()
        return seen + confirmed

    async def _free_final(self) -> None:
        """Take deposits that have become final out of the sum at risk."""
        final = [key for key in await self._store.unfinal() if await self._is_final(key)]
        if final:
            await self._store.free_final(final)

    async def _is_final(self, key: DepositKey) -> bool:
        try:
            return await self._engine.is_final(key)
        except Unavailable:
            return False  # its network has no node now: the deposit stays at risk

    async def _confirmable(
        self, recorded: Observed, complete: Mapping[str, int], remaining: Mapping[str, str]
    ) -> Observed:
        """Return the deposits that may be confirmed now.

        A deposit confirmed past an order's time decides on the order: it waits while another
        deposit of the order may be unseen, or is not on record.
        """
        return [
            (order_id, sighting)
            for order_id, sighting in recorded
            if (order_id not in remaining and sighting.key.network in complete)
            or sighting.state is not DepositState.CONFIRMED
            or not await self._is_over(order_id)
        ]

    def _rate(self) -> int | None:
        """The rate for a deposit that is recorded now; None: it is priced when it is decided."""
        try:
            return self._rates.rate().usdc_per_xmr
        except Unavailable:
            return None

    async def _is_over(self, order_id: str) -> bool:
        """Return whether the order's offer has run out."""
        order = await self._store.order(order_id)
        return order is not None and order.terms.expires_at <= self._clock.now_ms()

    async def _by_order(
        self, sightings: Iterable[DepositSighting]
    ) -> tuple[Observed, list[DepositSighting]]:
        """Pair each sighting with its order, and list the sightings that belong to none."""
        observed, unattributed = [], []
        for sighting in sightings:
            network = sighting.key.network
            order_id = await self._store.order_id_of_deposit_address(network, sighting.address)
            if order_id is None:
                log.warning("unattributed_deposit_found", network=network, txid=sighting.key.txid)
                unattributed.append(sighting)
            else:
                observed.append((order_id, sighting))
        return observed, unattributed

    async def _record(self, observed: Observed, *, confirming: bool) -> tuple[int, Observed]:
        """Bring the orders up to what the chain shows; confirm deposits only if ``confirming``.

        Returns the number of events, and the sightings that were recorded: the rest is for the next
        pass. Deposits that wait for finality have a share of their own, in the order in which they
        began to wait: else any twenty of them would keep the others of their order waiting.
        """
        count, recorded = 0, []
        handled: Counter[tuple[str, bool]] = Counter()
        for order_id, sighting in self._longest_waiting_first(observed):
            share = (order_id, sighting.key in self._awaiting_finality)
            if handled[share] >= DEPOSITS_PER_PASS:
                continue
            step = (sighting.key, confirming)
            with self.quarantine.isolate(order_id, step):
                events = await self._record_one(order_id, sighting, confirming=confirming)
                count += events
                handled[share] += events > 0
            handled[share] += confirming and sighting.key in self._awaiting_finality
            if not self.quarantine.is_broken(order_id, step):
                recorded.append((order_id, sighting))
        return count, recorded

    def _longest_waiting_first(self, observed: Observed) -> Observed:
        ranks = {key: rank for rank, key in enumerate(self._awaiting_finality)}
        return sorted(observed, key=lambda each: ranks.get(each[1].key, len(ranks)))

    async def _record_one(
        self, order_id: str, sighting: DepositSighting, *, confirming: bool
    ) -> int:
        """Record one sighting; return the number of events.

        Raises ImpossibleTransition when it can't be recorded: then the engine shows it again.
        """
        for remaining in reversed(range(TRIES)):
            order = await self._store.order(order_id)
            if order is None:
                raise LookupError(f"order {order_id} has an address, but is not in the store")
            changes = events_of(order, sighting, self._rate())
            if not changes:
                self._awaiting_finality.pop(sighting.key, None)  # another process has recorded it
            events = [
                judged
                for event in changes
                if (judged := await self._judged(order, event, confirming=confirming)) is not None
            ]
            try:
                for event in events:
                    await self._processor.apply(order_id, event)
            except ImpossibleTransition as refused:
                if not remaining:
                    raise
                # Another event changed the order in between: compare with its new version.
                log.info("deposit_event_postponed", order_id=order_id, reason=str(refused))
            else:
                break
        return len(events)

    async def _judged(
        self, order: Order, event: DepositEvent, *, confirming: bool
    ) -> DepositEvent | None:
        """Return the event as it may be applied now; None for a confirmation that has to wait.

        A deposit that is not final is confirmed if the sum at risk has room for it. Otherwise it
        waits until it is final, and the engine shows it again.
        """
        if not isinstance(event, DepositConfirmed):
            self._awaiting_finality.pop(event.key, None)
            return event
        if not confirming:
            return None
        if await self._engine.is_final(event.key):
            self._awaiting_finality.pop(event.key, None)
            return event
        if await self._may_count_early(order, event.key):
            self._awaiting_finality.pop(event.key, None)
            return DepositConfirmed(event.key, is_final=False)
        if event.key not in self._awaiting_finality:
            self._awaiting_finality[event.key] = None
            log.info("deposit_awaits_finality", order_id=order.order_id, txid=event.key.txid)
        return None

    async def _may_count_early(self, order: Order, key: DepositKey) -> bool:
        deposit = order.deposit(key)
        if deposit is None or not counts_early(order, deposit):
            return False
        exposure = Exposure(key, worth(order, deposit), self._finality.on(key.network))
        return await self._store.may_count(exposure, self._clock.now_ms())


def _remaining(observed: Observed, done: Observed) -> dict[str, str]:
    """Return the orders with sightings that are not fully recorded, each with the network."""
    keys = {sighting.key for _, sighting in done}
    return {
        order_id: sighting.key.network
        for order_id, sighting in observed
        if sighting.key not in keys
    }


class ScanProgress:
    """Progress on the ``networks`` whose deposits are watched, none at the start.

    ``is_paused``: whether outgoing money is stopped. Often for a branch that took deposits deeper
    than finality: once payouts are resumed, no payment is based on a scan from before.
    """

    def __init__(
        self, networks: Iterable[str], clock: Clock, is_paused: Callable[[], bool] = lambda: False
    ) -> None:
        self._clock = clock
        self._is_paused = is_paused
        self._was_paused = False
        self._resumed_at = 0
        # Networks without a scan since then. Not by the times of scans: the clock may be set.
        self._unseen = set[str]()
        self._since = clock.now_ms()
        self._complete_until = dict.fromkeys(networks, 0)
        self._lagging: dict[str, str] = {}

    @property
    def complete_until(self) -> Mapping[str, int]:
        """Return the time until which all deposits are on record, by network, except those of
        ``lagging`` orders; 0 for networks without a scan since payouts were resumed.
        """
        self._look_for_resume()
        return {
            network: 0 if network in self._unseen else until
            for network, until in self._complete_until.items()
        }

    def is_current(self, network: str) -> bool:
        """Return whether a scan that began since payouts were resumed last has shown all deposits
        of a network. True where nothing is scanned, and where payouts were never paused.
        """
        self._look_for_resume()
        return network not in self._unseen

    def _look_for_resume(self) -> None:
        was_paused, self._was_paused = self._was_paused, self._is_paused()
        now = self._clock.now_ms()
        if was_paused and not self._was_paused:
            self._resumed_at, self._unseen = now, set(self._complete_until)
        self._resumed_at = min(self._resumed_at, now)  # the clock may have been set back

    @property
    def lagging(self) -> frozenset[str]:
        """Ids of orders with a deposit that was seen and is not on record yet."""
        return frozenset(self._lagging)

    def advance(self, complete_until: Mapping[str, int], remaining: Mapping[str, str]) -> None:
        """Record a scan whose deposits are on record, except those of the orders ``remaining``.

        ``complete_until`` as in Observation; ``remaining`` maps order ids to networks.
        """
        # A network without a complete scan may not have shown the remaining deposits again.
        still = {order: at for order, at in self._lagging.items() if at not in complete_until}
        self._lagging = {**still, **remaining}
        self._complete_until.update(complete_until)
        self._look_for_resume()
        self._unseen -= {name for name, at in complete_until.items() if at >= self._resumed_at}

    def covers(self, order: Order) -> bool:
        """Whether the scan has passed the order's deadline. True where nothing is scanned."""
        if order.deadline_at is None or order.on_deadline not in DECIDED_BY_DEPOSITS:
            return True
        until = self.complete_until.get(order.terms.deposit_network, order.deadline_at)
        return order.deadline_at <= until and order.order_id not in self._lagging

    def lags(self) -> dict[str, int]:
        """Return how far (ms) the scan of each network is behind, at most since the start."""
        now = self._clock.now_ms()
        return {
            network: now - max(until, self._since)
            for network, until in self._complete_until.items()
        }

    def behind(self) -> dict[str, int]:
        """The networks whose scan is minutes behind, and how far (ms)."""
        return {name: lag for name, lag in self.lags().items() if lag >= _LAGGING_AFTER_MS}

    def health(self) -> Health:
        """Return the health: not ok while the scan of a network is minutes behind."""
        behind = self.behind()
        network = max(behind, key=lambda name: behind[name], default=None)
        if network is None:
            return Health(True)
        return Health(
            False,
            f"Deposit scan of {network} is {behind[network] // 60_000} min behind; deadlines on"
            " this network are suspended.",
        )
