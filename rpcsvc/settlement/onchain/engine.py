"""The engine that settles from the operator's own wallets: one chain adapter each for XMR and USDC.

Nothing is signed or published unless ``PayoutGuard`` lets it pass: not while payouts are paused,
and no transfer over a cap, which waits, and health says why.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Final, NamedTuple

import orjson
import structlog
from msgspec import Struct
from msgspec.structs import replace
from typing_extensions import override

from rpcsvc.clock import DAY_MS, Clock
from rpcsvc.domain.chains import MONERO_NETWORK
from rpcsvc.domain.events import order_of
from rpcsvc.domain.money import USDC, XMR, Asset, Money, format_units
from rpcsvc.domain.order import DepositKey, Transfer
from rpcsvc.domain.reservations import Holdings
from rpcsvc.errors import InvalidDestination, Unavailable
from rpcsvc.health import Health, Severity, texts_of
from rpcsvc.orders.ports.wallets import (
    DepositSighting,
    LacksFunds,
    NetworkNames,
    NetworkState,
    Observation,
    Outcome,
    Record,
    Verdict,
    Wallets,
)
from rpcsvc.settlement.onchain.adapter import (
    ChainAdapter,
    NetworkWatch,
    Payments,
    ServedNetwork,
    each_of,
    together,
)
from rpcsvc.settlement.onchain.journal.writer import PaymentJournal
from rpcsvc.settlement.onchain.monero.unrecorded import StartupReconciliation
from rpcsvc.settlement.onchain.pause import PauseSwitch, SharedPause
from rpcsvc.store.database import Tables

log = structlog.get_logger(__name__)

Pause = Callable[[float], Awaitable[None]]


# A transfer that waits for a cap is tried at least once a minute (orders/scheduler/effects.py): one
# that was not tried for this long was cancelled, or waits for something else.
_ASKS_AGAIN_MS: Final = 5 * 60 * 1000
# How long a scan that is done waits for that of another asset.
_BESIDE_SECONDS: Final = 0.2
_IN_MEMORY: Final = "in memory only, since the switch can't be written: do not restart the service"
_SENT: Final = {
    "XMR": "SELECT coalesce(sum(units), 0) AS units FROM monero_payments"
    " WHERE purpose = 'transfer' AND prepared_at >= :at AND state <> 'failed'",
    "USDC": "SELECT coalesce(sum(units), 0) AS units FROM evm_payments"
    " WHERE purpose = 'transfer' AND prepared_at >= :at AND state <> 'failed'",
}
# Payments that are out, of transfers whose ids lie between two. One that was closed by the
# operator's word may be mined after all; not one with the block of a conflict: that displaced it.
# A transfer that was itself closed is the operator's to pay.
_OUT: Final = (
    "SELECT p.payment_id AS transfer_id, p.txid, p.address, p.units FROM monero_payments AS p"
    " WHERE (p.state IN ('relaying', 'published', 'settled')"
    "  OR p.conflict_height IS NULL AND p.txid IN (SELECT txid FROM closed_by_hand)"
    "  OR p.payment_id IN (SELECT transfer_id FROM closed_by_hand))"
    "  AND p.payment_id > :after AND p.payment_id < :before"
    " UNION ALL SELECT e.transfer_id, p.txid, e.address, e.units FROM monero_payees AS e"
    " JOIN monero_payments AS p ON p.payment_id = e.payment_id"
    " WHERE (p.state IN ('relaying', 'published', 'settled')"
    "  OR p.conflict_height IS NULL AND p.txid IN (SELECT txid FROM closed_by_hand)"
    "  OR e.transfer_id IN (SELECT transfer_id FROM closed_by_hand))"
    "  AND e.transfer_id > :after AND e.transfer_id < :before"
    " UNION ALL SELECT p.payment_id, a.txid, p.recipient, p.units FROM evm_payments AS p"
    " JOIN evm_attempts AS a ON a.payment_id = p.payment_id AND a.number = 1"
    " WHERE p.state IN ('published', 'settled')"
    "  AND p.payment_id > :after AND p.payment_id < :before"
)
_STATES: Final = "SELECT transfer_id, state FROM transfers WHERE order_id = :order_id"
_NOT_PAID: Final = ("planned", "failed", "cancelled")


class Caps(Struct, frozen=True):
    """The most of one asset that goes out in one transfer, and within 24 hours; atomic units."""

    per_transfer: int
    per_day: int


# A deposit that is not on record yet, or an output of a payment that is not mined, may be missing
# for a while.
_LACKS_MS: Final = 60_000


class _WaitingTransfer(NamedTuple):
    """A transfer that waits, when it was last asked for, and from when on health tells (ms)."""

    problem: str
    at: int
    told_from: int = 0


class SignedPayments:
    """Sums the payments of the service's wallets."""

    def __init__(self, database: Tables) -> None:
        self._db = database

    async def sent_since(self, asset: Asset, at: int) -> int:
        """Return the atomic units signed for orders since ``at`` (ms), over all networks."""
        row = await self._db.fetch_one(_SENT["XMR" if asset is XMR else "USDC"], at=at)
        return int(row["units"]) if row else 0

    async def unmatched(self, transfer: Transfer) -> str | None:
        """Return a recorded payment that conflicts with the transfer's order, in words; None if
        there is none.

        The payment journal may restore a payment for an order that an older copy of the database
        carries on differently: the next transfer would pay a second time.
        """
        order_id = order_of(transfer.transfer_id)
        out = await self._db.fetch(_OUT, after=f"{order_id}/", before=f"{order_id}0")
        known = await self._db.fetch(_STATES, order_id=order_id) if out else []
        states = {row["transfer_id"]: row["state"] for row in known}
        for row in out:
            if row["transfer_id"] == transfer.transfer_id:
                paid = (row["address"].lower(), row["units"])
                same = paid == (transfer.address.lower(), transfer.units)
            else:
                same = states.get(row["transfer_id"], "planned") not in _NOT_PAID
            if not same:
                return (
                    f"{row['txid']} paid {row['units']} units for {row['transfer_id']} of this"
                    " order, which the database has otherwise: settle it, then rpcsvc payouts close"
                    f" {transfer.transfer_id} {row['txid']} --note TEXT"
                )
        return None


class PayoutGuard:
    """Holds transfers back by the pause and the caps. ``shared``: the pause of all replicas."""

    def __init__(
        self,
        switch: PauseSwitch,
        caps: Mapping[Asset, Caps],
        signed: SignedPayments,
        clock: Clock,
        shared: SharedPause | None = None,
    ) -> None:
        self.switch = switch
        self._shared = shared
        self._caps = caps
        self._signed = signed
        self._clock = clock
        self._held: dict[str, _WaitingTransfer] = {}
        self._lacking: dict[str, _WaitingTransfer] = {}
        # Units that are being signed: wallets work side by side, and their books don't have it yet.
        self._passing = Counter[Asset]()
        # Held from the sums of the books until a transfer counts: two wallets may pay one asset.
        self._counting = asyncio.Lock()

    def paused(self) -> str | None:
        """Return why payouts are paused; None when they are not."""
        return self.switch.reason()

    async def look(self) -> None:
        """Read the pause that another replica may have made. Raises errors.Unavailable."""
        if self._shared is not None:
            await self._shared.look()

    def require_open(self) -> None:
        """Raise errors.Unavailable while payouts are paused."""
        if self.paused() is not None:
            raise Unavailable("Payouts are paused by the operator. Try again later.")

    @asynccontextmanager
    async def passing(
        self, transfer: Transfer, companions: Sequence[Transfer] = ()
    ) -> AsyncIterator[list[Transfer]]:
        """Let a transfer pass to be signed, with those of ``companions`` that may go along.

        Within the block they count for all others. Raises errors.Unavailable for a transfer that
        is too large, or too much for one day.
        """
        async with self._counting:
            sent = await self._sent(transfer.asset)
            await self._require_within_caps(transfer, sent)
            passed = await self._within_caps(companions, sent + transfer.units)
            units = sum(item.units for item in (transfer, *passed))
            self._passing[transfer.asset] += units
        try:
            yield passed
        finally:
            self._passing[transfer.asset] -= units

    async def _sent(self, asset: Asset) -> int:
        """Return the units of a day, those that are being signed included."""
        # In this order: a payment committed meanwhile counts twice, rather than not at all.
        passing = self._passing[asset]
        return passing + await self._signed.sent_since(asset, self._clock.now_ms() - DAY_MS)

    async def _require_within_caps(self, transfer: Transfer, sent: int) -> None:
        problem = await self._signed.unmatched(transfer) or self._over(transfer, sent)
        self._require_none(transfer, problem)

    async def require_matched(self, transfer: Transfer) -> None:
        """Raise errors.Unavailable for a transfer whose order has a conflicting payment."""
        self._require_none(transfer, await self._signed.unmatched(transfer))

    def _require_none(self, transfer: Transfer, problem: str | None) -> None:
        self._held.pop(transfer.transfer_id, None)
        if problem is not None:
            self._held[transfer.transfer_id] = _WaitingTransfer(problem, self._clock.now_ms())
            raise Unavailable(f"Transfer {transfer.transfer_id} waits: {problem}.")

    @contextmanager
    def noting_lack(self, transfer: Transfer) -> Iterator[None]:
        """Have health tell of a transfer that the block raises LacksFunds for, if that lasts."""
        name = transfer.transfer_id
        try:
            yield
        except LacksFunds as lack:
            before, now = self._lacking.get(name), self._clock.now_ms()
            problem = (
                f"the wallet on {transfer.network} lacks {lack.missing.display()}: send it there,"
                " then rpcsvc treasury explain the transaction"
            )
            told_from = now + _LACKS_MS if before is None else before.told_from
            self._lacking[name] = _WaitingTransfer(problem, now, told_from)
            raise
        # Not before: while it is tried again, or can't be tried, it still lacks them.
        self._lacking.pop(name, None)

    async def _within_caps(self, transfers: Sequence[Transfer], sent: int) -> list[Transfer]:
        """Return the transfers that may go out in addition to ``sent``; the others stay queued."""
        passed: list[Transfer] = []
        for transfer in transfers:
            if self._over(transfer, sent) is None and (
                await self._signed.unmatched(transfer) is None
            ):
                passed.append(transfer)
                sent += transfer.units
        return passed

    def _over(self, transfer: Transfer, sent: int) -> str | None:
        """Return the cap that a transfer exceeds after the ``sent`` units of a day."""
        caps, asset = self._caps[transfer.asset], transfer.asset
        if transfer.units > caps.per_transfer:
            return _over("the cap per transfer", caps.per_transfer, asset)
        if sent + transfer.units > caps.per_day:
            return _over("the cap per day", caps.per_day, asset)
        return None

    def health(self) -> Health:
        """Return whether money may go out, and if not, the reason."""
        reason = self.paused()
        if reason is not None:
            lost = "" if self.switch.is_written else f" ({_IN_MEMORY})"
            return Health(False, f"paused: {reason}{lost}")
        now = self._clock.now_ms()
        self._held, self._lacking = _asked_for(self._held, now), _asked_for(self._lacking, now)
        lacking = {name: each for name, each in self._lacking.items() if each.told_from <= now}
        waiting = self._held | lacking
        if waiting:
            transfer_id, first = next(iter(waiting.items()))
            return Health(False, f"{transfer_id} waits: {first.problem} ({len(waiting)} in all)")
        return Health(True)


def _asked_for(waiting: Mapping[str, _WaitingTransfer], now: int) -> dict[str, _WaitingTransfer]:
    """Drop transfers that are no longer tried, or were noted before the clock was set back."""
    return {
        transfer_id: each
        for transfer_id, each in waiting.items()
        if abs(now - each.at) <= _ASKS_AGAIN_MS
    }


def _over(cap: str, units: int, asset: Asset) -> str:
    return f"it is over {cap} of {format_units(units, asset)} {asset.symbol}"


class OnchainEngine(Wallets):
    """Settles by one adapter for each asset, and by their networks.

    ``reconciliations``: the check that must pass once, by asset, before anything is signed for it.
    ``looks`` into the database give problems for the operator, by name; None: nothing. ``journal``
    records payments before anything else does; nothing is signed while it takes none. ``has_time``:
    whether the lease under which money is moved still has time.
    """

    def __init__(
        self,
        adapters: Sequence[ChainAdapter],
        guard: PayoutGuard,
        *,
        floors: Mapping[Asset, int],
        poll_ms: int,
        reconciliations: Mapping[Asset, StartupReconciliation] | None = None,
        looks: Mapping[str, Callable[[], Awaitable[str | None]]] | None = None,
        journal: PaymentJournal | None = None,
        has_time: Callable[[], bool] = lambda: True,
    ) -> None:
        self._adapters = {adapter.asset: adapter for adapter in adapters}
        self._networks = {
            name: network for adapter in adapters for name, network in adapter.networks.items()
        }
        self._watches = {name: NetworkWatch(name, each) for name, each in self._networks.items()}
        self.networks = frozenset(self._networks)
        self._guard = guard
        self._floors = floors
        self._reconciliations = dict(reconciliations or {})
        self._looks = looks or {}
        self._journal = journal
        self._has_time = has_time
        self._faults: dict[str, str] = {}
        self.poll_ms = poll_ms

    @override
    async def start(self) -> None:
        await asyncio.gather(*(adapter.start() for adapter in self._adapters.values()))

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(watch.close() for watch in self._watches.values()))
        await asyncio.gather(*(adapter.close() for adapter in self._adapters.values()))

    async def run(self, pause: Pause = asyncio.sleep) -> None:
        """Look after the adapters between passes, until cancelled."""
        await asyncio.gather(
            *(
                self._maintain_loop(adapter, name, pause)
                for adapter in self._adapters.values()
                for name in adapter.upkeep
            )
        )

    async def _maintain_loop(self, adapter: ChainAdapter, name: str, pause: Pause) -> None:
        while True:
            if self._has_time():
                await self._inspect_first(adapter)
                await self._maintain(adapter, name)
            await pause(self.poll_ms / 1000)

    async def _maintain(self, adapter: ChainAdapter, name: str) -> None:
        """Run one round; a failure is logged, is in health, and the next round tries again."""
        try:
            await adapter.upkeep[name]()
            self._faults.pop(name, None)
        except Exception as error:
            log.exception("upkeep_failed", upkeep=name)
            self._faults[name] = type(error).__name__

    async def _inspect_first(self, adapter: ChainAdapter) -> None:
        """Find sent transactions that are not on record, even if nothing is to be signed."""
        poll = self._reconciliations.get(adapter.asset)
        if poll is None:
            return
        try:
            await poll.require_done()
        except Unavailable as reason:
            log.info("reconciliation_postponed", asset=adapter.asset.symbol, reason=reason.message)
        except Exception:
            log.exception("upkeep_failed", asset=adapter.asset.symbol)

    @property
    def switch(self) -> PauseSwitch:
        """The switch that stops all outgoing money."""
        return self._guard.switch

    @override
    def is_paused(self) -> bool:
        return self._guard.paused() is not None

    # --- taking orders -------------------------------------------------------------------------

    @override
    def require_ready(self) -> None:
        self._guard.require_open()
        if self._journal is not None and not self._journal.is_usable:
            raise Unavailable("Payouts can't be recorded right now. Try again later.")
        for asset, adapter in self._adapters.items():
            adapter.require_ready()
            if all(self._watches[name].is_blind() for name in adapter.networks):
                raise Unavailable(f"{asset.symbol} can't be settled right now. Try again later.")

    @override
    def deposit_address(self, asset: Asset) -> str:
        return self._adapters[asset].deposit_address()

    @override
    def fee(self, network: str) -> int:
        found = self._of(network)
        if self._watches[network].is_blind():
            raise Unavailable(
                f"{found.asset.symbol} on {network} can't be settled right now. Try again later."
            )
        return found.fee()

    @override
    def holdings(self, network: str) -> Holdings:
        found = self._of(network)
        held = found.holdings()
        if not self._above_floor(self._adapters[found.asset]).ok:
            raise Unavailable(
                f"The service is short of {found.asset.symbol} and takes no new orders for it."
                " Try again later."
            )
        return held

    @override
    def pooled(self, _address: str, _network: str) -> None:
        pass

    @override
    def states(self) -> dict[str, NetworkState]:
        shown = {}
        for name, network in self._networks.items():
            state, watch = network.state(), self._watches[name]
            shown[name] = state._replace(is_up=state.is_up and not watch.is_blind())
        return shown

    @override
    async def require_payable(self, network: str, address: str, *, field: str) -> None:
        if not await self._of(network).accepts(address):
            raise InvalidDestination(
                f"The token on {network} refuses to pay this address: it is on its issuer's"
                " blacklist. Send another address of the user.",
                field=field,
                received=address,
            )

    def names(self, asset: Asset, chain: str) -> NetworkNames:
        """Return the names of the network that takes a deposit of ``asset``."""
        return self._adapters[asset].names(chain)

    @override
    def estimated_seconds(self, deposit: Money, chain: str) -> int:
        paid = USDC if deposit.asset is XMR else XMR
        waits = self._side(deposit.asset, chain).seconds(deposit.units)
        return waits + self._side(paid, chain).block_seconds

    # --- deposits ------------------------------------------------------------------------------

    @override
    async def observe(self) -> Observation:
        # Once one scan has news, or the others take longer, these go on, and the next pass shows
        # what they find: a deposit that is confirmed waits for no other network's node.
        looks = [asyncio.create_task(watch.observe()) for watch in self._watches.values()]
        try:
            ended, others = await asyncio.wait(looks, return_when=asyncio.FIRST_COMPLETED)
            if others and not any(look.result().sightings for look in ended):
                await asyncio.wait(others, timeout=_BESIDE_SECONDS)
        finally:
            for each in looks:
                each.cancel()
            found = await asyncio.gather(*looks, return_exceptions=True)
        return together(each for each in found if isinstance(each, Observation))

    @override
    async def acknowledge(self, sightings: Sequence[DepositSighting]) -> None:
        await each_of(
            network.acknowledge([item for item in sightings if item.key.network == name])
            for name, network in self._networks.items()
            if self._watches[name].has_looked
        )

    @override
    async def confirmations(self, key: DepositKey) -> int:
        return await self._of(key.network).confirmations(key)

    async def confirmations_at(self, key: DepositKey, height: int) -> int:
        """Return the confirmations of a deposit when the newest block is at ``height``."""
        return await self._of(key.network).confirmations(key, height)

    @override
    def required_confirmations(self, network: str, units: int) -> int:
        return self._of(network).required_confirmations(units)

    @override
    async def is_final(self, key: DepositKey) -> bool:
        return await self._of(key.network).is_final(key)

    # --- transfers -----------------------------------------------------------------------------

    @override
    def signed_together(self, network: str) -> int:
        return self._of(network).signed_together

    @override
    def carried_at_once(self, network: str) -> int:
        # Also for one that no node serves: its transfers are tried, and wait, as others do.
        found = self._networks.get(network)
        return 1 if found is None else found.carried_at_once

    @override
    async def prepare(
        self,
        transfer: Transfer,
        companions: Sequence[Transfer],
        record: Record,
        leaves: Mapping[str, int],
    ) -> Sequence[Transfer]:
        network = self._of(transfer.network)
        try:
            known = await network.payments.recorded(transfer)
        except LookupError:
            # A restored copy plans its order in another way: health says what to do.
            await self._guard.require_matched(transfer)
            raise
        if known is not None:
            # The payment journal brought it back before its order planned it: it is out already.
            await record([known], None)
            return []
        await self._guard.look()
        self._guard.require_open()
        if self._journal is not None:
            await self._journal.require_ready()
        async with self._guard.passing(transfer, companions) as passed:
            if (poll := self._reconciliations.get(network.asset)) is not None:
                await poll.require_done()
            # Another caller's startup reconciliation may have paused payouts meanwhile, and leaves
            # this one nothing to find.
            self._guard.require_open()
            with self._guard.noting_lack(transfer):
                left = await network.payments.prepare(transfer, passed, record, leaves)
        return [*left, *(each for each in companions if each not in passed)]

    @override
    async def publish(self, transfer: Transfer) -> Verdict:
        await self._guard.look()
        if self._guard.paused() is not None:
            return Verdict(Outcome.ABSENT, "payouts are paused")
        payments = self._of(transfer.network).payments
        return await _with_receipt(payments, transfer, await payments.publish(transfer))

    @override
    async def look_up(self, transfer: Transfer) -> Verdict:
        payments = self._of(transfer.network).payments
        return await _with_receipt(payments, transfer, await payments.look_up(transfer))

    @override
    async def health(self) -> Health:
        checks = [("payouts", self._guard.health())]
        found = {item.asset.symbol: await item.conditions() for item in self._adapters.values()}
        checks += [(symbol, Health.of(conditions)) for symbol, conditions in found.items()]
        checks += [(name, watch.health()) for name, watch in self._watches.items()]
        checks += [(asset.symbol, poll.health()) for asset, poll in self._reconciliations.items()]
        checks += [
            (adapter.asset.symbol, self._above_floor(adapter))
            for adapter in self._adapters.values()
        ]
        checks += [(name, _upkeep(fault)) for name, fault in self._faults.items()]
        checks += [(name, await _told(look)) for name, look in self._looks.items()]
        if self._journal is not None:
            checks.append(("payouts", self._journal.health()))
        wrong = [f"{name}: {check.detail}" for name, check in checks if not check.ok]
        notes = [text for each in found.values() for text in texts_of(each, Severity.NOTE)]
        return Health(not wrong, "; ".join(wrong + notes) or None)

    def _above_floor(self, adapter: ChainAdapter) -> Health:
        """Return whether the wallet holds at least the operator's floor."""
        floor = self._floors[adapter.asset]
        try:
            held = adapter.total()
        except Unavailable:
            return Health(True)  # not known: that is the adapter's own health
        if held >= floor:
            return Health(True)
        shown = format_units(held, adapter.asset), format_units(floor, adapter.asset)
        return Health(False, f"the wallet holds {shown[0]}, below the floor of {shown[1]}: fund it")

    def _of(self, network: str) -> ServedNetwork:
        """Return a network by its name. Raises errors.Unavailable for one without a node."""
        found = self._networks.get(network)
        if found is None:
            raise Unavailable(f"No node serves {network}: onchain.nodes has to name one.")
        return found

    def _side(self, asset: Asset, chain: str) -> ServedNetwork:
        """Return the network that carries ``asset`` in a swap with USDC on ``chain``."""
        return self._of(MONERO_NETWORK if asset is XMR else chain)


async def _told(look: Callable[[], Awaitable[str | None]]) -> Health:
    """Return the health of a look into the database."""
    try:
        problem = await look()
    except Unavailable:
        return Health(True)  # the database's own health tells
    return Health(problem is None, problem)


def _upkeep(fault: str) -> Health:
    return Health(False, f"the upkeep has failed ({fault}): report upkeep_failed in the log")


async def _with_receipt(payments: Payments, transfer: Transfer, verdict: Verdict) -> Verdict:
    """Add the receipt of a settled transfer: without it, the transfer is not called settled."""
    if verdict.outcome is not Outcome.SETTLED:
        return verdict
    receipt = await payments.receipt(transfer)
    return replace(verdict, receipt=orjson.dumps(receipt).decode())
