"""The engine that settles from the operator's own wallets: one chain adapter each for XMR and USDC.

Nothing is signed or published unless the guard (guard.py) lets it pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence

import orjson
import structlog
from msgspec.structs import replace

from rpcsvc.domain.chains import MONERO_NETWORK
from rpcsvc.domain.money import USDC, XMR, Asset, Money, format_units
from rpcsvc.domain.order import DepositKey, Transfer
from rpcsvc.domain.reservations import Holdings
from rpcsvc.errors import InvalidDestination, Unavailable
from rpcsvc.health import Health
from rpcsvc.orders.ports.wallets import (
    DepositSighting,
    Fees,
    NetworkNames,
    NetworkState,
    Observation,
    Outcome,
    Record,
    Verdict,
)
from rpcsvc.settlement.onchain.adapter import (
    AdapterWatch,
    ChainAdapter,
    Payments,
    ServedNetwork,
    each_of,
    together,
)
from rpcsvc.settlement.onchain.guard import PauseSwitch, PayoutGuard
from rpcsvc.settlement.onchain.journal.writer import PaymentJournal
from rpcsvc.settlement.onchain.monero.unrecorded import StartupReconciliation

log = structlog.get_logger(__name__)

Pause = Callable[[float], Awaitable[None]]


class OnchainEngine:
    """Implements Wallets with one adapter per asset.

    ``reconciliations``: the check that must pass once, by asset, before anything is signed for it.
    ``unserved``: what is wrong with orders that neither adapter serves; None: nothing. ``journal``:
    where payments are recorded before anything else; nothing is signed while it takes none.
    ``has_time``: whether the lease under which money is moved still has time.
    """

    def __init__(
        self,
        adapters: Sequence[ChainAdapter],
        guard: PayoutGuard,
        *,
        floors: Mapping[Asset, int],
        poll_ms: int,
        reconciliations: Mapping[Asset, StartupReconciliation] | None = None,
        unserved: Callable[[], Awaitable[str | None]] | None = None,
        journal: PaymentJournal | None = None,
        has_time: Callable[[], bool] = lambda: True,
    ) -> None:
        self._adapters = {adapter.asset: adapter for adapter in adapters}
        self._watches = {adapter.asset: AdapterWatch(adapter) for adapter in adapters}
        self._networks = {
            name: network for adapter in adapters for name, network in adapter.networks.items()
        }
        self.networks = frozenset(self._networks)
        self._guard = guard
        self._floors = floors
        self._reconciliations = dict(reconciliations or {})
        self._unserved = unserved
        self._journal = journal
        self._has_time = has_time
        self._faults: dict[Asset, str] = {}
        self.poll_ms = poll_ms

    async def start(self) -> None:
        """Connect both adapters. One that is not right is a matter of ``health``."""
        await asyncio.gather(*(adapter.start() for adapter in self._adapters.values()))

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(watch.close() for watch in self._watches.values()))
        await asyncio.gather(*(adapter.close() for adapter in self._adapters.values()))

    async def run(self, pause: Pause = asyncio.sleep) -> None:
        """Look after both adapters between passes, until cancelled. Neither waits for the other."""
        await asyncio.gather(
            *(self._maintain_loop(adapter, pause) for adapter in self._adapters.values())
        )

    async def _maintain_loop(self, adapter: ChainAdapter, pause: Pause) -> None:
        while True:
            if self._has_time():
                await self._inspect_first(adapter)
                await self._maintain(adapter)
            await pause(self.poll_ms / 1000)

    async def _maintain(self, adapter: ChainAdapter) -> None:
        """One round; a failure is logged, is in health, and the next round tries again."""
        try:
            await adapter.maintain()
            self._faults.pop(adapter.asset, None)
        except Exception as error:
            log.exception("upkeep_failed", asset=adapter.asset.symbol)
            self._faults[adapter.asset] = type(error).__name__

    async def _inspect_first(self, adapter: ChainAdapter) -> None:
        """Whatever was sent and is not on record is found even if nothing is to be signed."""
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

    def is_paused(self) -> bool:
        """Whether the operator has stopped all outgoing money."""
        return self._guard.paused() is not None

    # --- taking orders -------------------------------------------------------------------------

    def require_ready(self) -> None:
        """Raise errors.Unavailable when either adapter can't settle: a swap needs both."""
        self._guard.require_open()
        if self._journal is not None and not self._journal.is_usable:
            raise Unavailable("Payouts can't be recorded right now. Try again later.")
        for asset, adapter in self._adapters.items():
            adapter.require_ready()
            if self._watches[asset].is_blind():
                raise Unavailable(f"{asset.symbol} can't be settled right now. Try again later.")

    def deposit_address(self, asset: Asset) -> str:
        """A fresh deposit address. Raises errors.Unavailable when none is left."""
        return self._adapters[asset].deposit_address()

    def fees(self, deposit: Asset, payout: Asset, chain: str) -> Fees:
        """Network fees as the nodes report them. Raises errors.Unavailable before they have."""
        return Fees(self._side(payout, chain).fee(), self._side(deposit, chain).fee())

    def holdings(self, network: str) -> Holdings:
        """The spendable balance on a network.

        Raises errors.Unavailable while it is not known, and while the operator's inventory is below
        its floor.
        """
        found = self._of(network)
        held = found.holdings()
        if not self._above_floor(self._adapters[found.asset]).ok:
            raise Unavailable(
                f"The service is short of {found.asset.symbol} and takes no new orders for it."
                " Try again later."
            )
        return held

    def pooled(self, _address: str, _network: str) -> None:
        """None: the addresses are this wallet's own."""

    def states(self) -> dict[str, NetworkState]:
        """What the last look at each network found. One whose deposits are not seen is not up."""
        shown = {}
        for name, network in self._networks.items():
            state, watch = network.state(), self._watches[network.asset]
            shown[name] = state._replace(is_up=state.is_up and not watch.is_blind())
        return shown

    async def require_payable(self, network: str, address: str, *, field: str) -> None:
        """Raise errors.InvalidDestination for an address that the token does not pay."""
        if not await self._of(network).accepts(address):
            raise InvalidDestination(
                f"The token on {network} refuses to pay this address: it is on its issuer's"
                " blacklist. Send another address of the user.",
                field=field,
                received=address,
            )

    def names(self, asset: Asset, chain: str) -> NetworkNames:
        """The names of the network that takes a deposit of ``asset``."""
        return self._adapters[asset].names(chain)

    def estimated_seconds(self, deposit: Money, chain: str) -> int:
        """The deposit's confirmations, and a block for the payout; in seconds."""
        paid = USDC if deposit.asset is XMR else XMR
        waits = self._side(deposit.asset, chain).seconds(deposit.units)
        return waits + self._side(paid, chain).block_seconds

    # --- deposits ------------------------------------------------------------------------------

    async def observe(self) -> Observation:
        """Deposits on all networks that may have changed, of the adapters that answer in time."""
        return together(await asyncio.gather(*(w.observe() for w in self._watches.values())))

    async def acknowledge(self, sightings: Sequence[DepositSighting]) -> None:
        """Tell each adapter that these are committed, so that it moves its cursors."""
        looked = [
            adapter for asset, adapter in self._adapters.items() if self._watches[asset].has_looked
        ]
        await each_of(_acknowledge(adapter, sightings) for adapter in looked)

    async def confirmations(self, key: DepositKey) -> int:
        """The confirmations of a deposit now; 0 while it is in the pool or gone."""
        return await self._of(key.network).confirmations(key)

    async def confirmations_at(self, key: DepositKey, height: int) -> int:
        """The confirmations of a deposit when the newest block is at ``height``."""
        return await self._of(key.network).confirmations(key, height)

    def required_confirmations(self, network: str, units: int) -> int:
        """The confirmations after which deposits of ``units`` in all are final on this network."""
        return self._of(network).required_confirmations(units)

    # --- transfers -----------------------------------------------------------------------------

    def transfers_per_payment(self, network: str) -> int:
        """The most transfers that one transaction of a network may carry out."""
        return self._of(network).transfers_per_payment

    async def prepare(
        self, transfer: Transfer, companions: Sequence[Transfer], record: Record
    ) -> None:
        """Sign and record without publishing. Raises TransferRejected and errors.Unavailable."""
        network = self._of(transfer.network)
        if (known := await network.payments.recorded(transfer)) is not None:
            # The payment journal brought it back before its order planned it: it is out already.
            await record(known, None)
            return
        await self._guard.look()
        self._guard.require_open()
        if self._journal is not None:
            await self._journal.require_ready()
        async with self._guard.passing(transfer, companions) as together:
            if (poll := self._reconciliations.get(network.asset)) is not None:
                await poll.require_done()
            # Another caller's startup reconciliation may have paused payouts meanwhile, and leaves
            # this one nothing to find.
            self._guard.require_open()
            await network.payments.prepare(transfer, together, record)

    async def publish(self, transfer: Transfer) -> Verdict:
        """Publish the transfer's signed bytes, unless payouts are paused."""
        await self._guard.look()
        if self._guard.paused() is not None:
            return Verdict(Outcome.ABSENT, "payouts are paused")
        payments = self._of(transfer.network).payments
        return await _with_receipt(payments, transfer, await payments.publish(transfer))

    async def look_up(self, transfer: Transfer) -> Verdict:
        """The transfer's outcome on the network; with its receipt once it is settled."""
        payments = self._of(transfer.network).payments
        return await _with_receipt(payments, transfer, await payments.look_up(transfer))

    async def health(self) -> Health:
        """Whether everything can be settled, and if not, what is wrong."""
        checks = [("payouts", self._guard.health())]
        checks += [
            (adapter.asset.symbol, await adapter.health()) for adapter in self._adapters.values()
        ]
        checks += [(asset.symbol, watch.health()) for asset, watch in self._watches.items()]
        checks += [(asset.symbol, poll.health()) for asset, poll in self._reconciliations.items()]
        checks += [
            (adapter.asset.symbol, self._above_floor(adapter))
            for adapter in self._adapters.values()
        ]
        checks += [(asset.symbol, _upkeep(fault)) for asset, fault in self._faults.items()]
        checks += [("orders", await self._without_node())]
        if self._journal is not None:
            checks.append(("payouts", self._journal.health()))
        wrong = [f"{name}: {check.detail}" for name, check in checks if not check.ok]
        notes = [text for adapter in self._adapters.values() for text in await adapter.notes()]
        return Health(not wrong, "; ".join(wrong + notes) or None)

    async def _without_node(self) -> Health:
        """Whether all orders are of networks that a node serves: the others wait for ever."""
        try:
            problem = await self._unserved() if self._unserved else None
        except Unavailable:
            return Health(True)  # the database's own health tells
        return Health(problem is None, problem)

    def _above_floor(self, adapter: ChainAdapter) -> Health:
        """Whether the wallet holds what the operator wants it to hold at least."""
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


async def _acknowledge(adapter: ChainAdapter, sightings: Sequence[DepositSighting]) -> None:
    await adapter.acknowledge([item for item in sightings if item.key.network in adapter.networks])


def _upkeep(fault: str) -> Health:
    return Health(False, f"the upkeep has failed ({fault}): report upkeep_failed in the log")


async def _with_receipt(payments: Payments, transfer: Transfer, verdict: Verdict) -> Verdict:
    """Add the receipt of a settled transfer: without it, the transfer is not called settled."""
    if verdict.outcome is not Outcome.SETTLED:
        return verdict
    receipt = await payments.receipt(transfer)
    return replace(verdict, receipt=orjson.dumps(receipt).decode())
