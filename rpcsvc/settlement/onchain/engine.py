"""The engine that settles from the operator's own wallets: XMR on one side, USDC on the other.

Both sides together are a SettlementEngine (orders/ports.py): each call goes to the side whose
asset or network it is about, and nothing leaves before the guard has let it pass.
What does not live here: the sides (monero/side.py, evm/side.py), rates (rates/), the guard's
rules (guard.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace

import orjson
import structlog

from rpcsvc.domain.money import Asset, format_units
from rpcsvc.domain.order import DepositKey, Transfer
from rpcsvc.errors import InvalidDestination, Unavailable
from rpcsvc.orders.ports import (
    DepositSighting,
    Fees,
    Health,
    Holdings,
    NetworkNames,
    Observation,
    Outcome,
    Record,
    Verdict,
)
from rpcsvc.settlement.onchain.each import each_of, together
from rpcsvc.settlement.onchain.guard import PayoutGuard
from rpcsvc.settlement.onchain.journal.writer import PaymentJournal
from rpcsvc.settlement.onchain.monero.startup_reconciliation import StartupReconciliation
from rpcsvc.settlement.onchain.side import Side
from rpcsvc.settlement.onchain.side_watch import SideWatch

log = structlog.get_logger(__name__)

Pause = Callable[[float], Awaitable[None]]


class OnchainEngine:
    """Implements SettlementEngine with one side per asset.

    ``reconciliations``: what has to be looked at once, by asset, before anything is signed for it.
    ``unserved``: what is wrong with orders that neither side serves; None: nothing. ``journal``:
    where payments are recorded before anything else; nothing is signed while it takes none.
    """

    name = "onchain"
    bridges: frozenset[str] = frozenset()

    def __init__(
        self,
        sides: Sequence[Side],
        guard: PayoutGuard,
        *,
        floors: Mapping[Asset, int],
        poll_ms: int,
        reconciliations: Mapping[Asset, StartupReconciliation] | None = None,
        unserved: Callable[[], str | None] = lambda: None,
        journal: PaymentJournal | None = None,
    ) -> None:
        self._sides = {side.asset: side for side in sides}
        self._watches = {side.asset: SideWatch(side) for side in sides}
        self.networks = frozenset[str]().union(*(side.networks for side in sides))
        self._guard = guard
        self._floors = floors
        self._reconciliations = dict(reconciliations or {})
        self._unserved = unserved
        self._journal = journal
        self._faults: dict[Asset, str] = {}
        self.poll_ms = poll_ms

    async def start(self) -> None:
        """Connect both sides. One that is not right is a matter of ``health``."""
        await asyncio.gather(*(side.start() for side in self._sides.values()))

    async def close(self) -> None:
        """Let go of connections."""
        await asyncio.gather(*(watch.close() for watch in self._watches.values()))
        await asyncio.gather(*(side.close() for side in self._sides.values()))

    async def run(self, pause: Pause = asyncio.sleep) -> None:
        """Look after both sides between passes, until cancelled. Neither waits for the other."""
        await asyncio.gather(*(self._look_after(side, pause) for side in self._sides.values()))

    async def _look_after(self, side: Side, pause: Pause) -> None:
        while True:
            await self._look_first(side)
            await self._maintain(side)
            await pause(self.poll_ms / 1000)

    async def _maintain(self, side: Side) -> None:
        """One round; a failure is logged, is in health, and the next round tries again."""
        try:
            await side.maintain()
            self._faults.pop(side.asset, None)
        except Exception as error:
            log.exception("upkeep_failed", asset=side.asset.symbol)
            self._faults[side.asset] = type(error).__name__

    async def _look_first(self, side: Side) -> None:
        """Whatever was sent and is not on record is found even if nothing is to be signed."""
        look = self._reconciliations.get(side.asset)
        if look is None:
            return
        try:
            await look.require_done()
        except Unavailable as reason:
            log.info("reconciliation_postponed", asset=side.asset.symbol, reason=reason.message)
        except Exception:
            log.exception("upkeep_failed", asset=side.asset.symbol)

    def is_paused(self) -> bool:
        """Whether the operator has stopped all outgoing money."""
        return self._guard.paused() is not None

    # --- taking orders -------------------------------------------------------------------------

    def require_ready(self) -> None:
        """Raise errors.Unavailable when either side can't settle: a swap needs both."""
        self._guard.require_open()
        if self._journal is not None and not self._journal.is_usable:
            raise Unavailable("Payouts can't be recorded right now. Try again later.")
        for asset, side in self._sides.items():
            side.require_ready()
            if self._watches[asset].is_blind():
                raise Unavailable(f"{asset.symbol} can't be settled right now. Try again later.")

    def deposit_address(self, asset: Asset) -> str:
        """A fresh deposit address. Raises errors.Unavailable when none is left."""
        return self._sides[asset].deposit_address()

    def fees(self, deposit: Asset, payout: Asset, chain: str) -> Fees:
        """Network fees as the nodes tell them. Raises errors.Unavailable before they have."""
        return Fees(self._sides[payout].fee(chain), self._sides[deposit].fee(chain))

    def holdings(self, network: str) -> Holdings | None:
        """What the wallet on a network can pay. Raises errors.Unavailable while it is not known,
        and while the operator's inventory is below its floor.
        """
        side = self._of(network)
        held = side.holdings(network)
        if not self._above_floor(side).ok:
            raise Unavailable(
                f"The service is short of {side.asset.symbol} and takes no new orders for it."
                " Try again later."
            )
        return held

    async def require_payable(self, network: str, address: str, *, field: str) -> None:
        """Raise errors.InvalidDestination for an address that the token does not pay."""
        if not await self._of(network).accepts(network, address):
            raise InvalidDestination(
                f"The token on {network} refuses to pay this address: it is on its issuer's"
                " blacklist. Send another address of the user.",
                field=field,
                received=address,
            )

    def names(self, asset: Asset, chain: str) -> NetworkNames:
        """What to call the network that a deposit of ``asset`` is made on."""
        return self._sides[asset].names(chain)

    def estimated_seconds(self, deposit: Asset, chain: str) -> int:
        """The deposit's confirmations, and a block for the payout; in seconds."""
        paid = next(side for asset, side in self._sides.items() if asset is not deposit)
        return self._sides[deposit].seconds(chain) + paid.block_seconds(chain)

    # --- deposits ------------------------------------------------------------------------------

    async def observe(self) -> Observation:
        """Deposits on all networks that may have changed, of the sides that answer in time."""
        return together(await asyncio.gather(*(w.observe() for w in self._watches.values())))

    async def acknowledge(self, sightings: Sequence[DepositSighting]) -> None:
        """These are committed: each side moves its cursors."""
        looked = [side for asset, side in self._sides.items() if self._watches[asset].has_looked]
        await each_of(_acknowledge(side, sightings) for side in looked)

    def confirmations(self, key: DepositKey) -> int:
        """How many confirmations a deposit has now; 0 while it is in the pool or gone."""
        return self._of(key.network).confirmations(key)

    def required_confirmations(self, network: str) -> int:
        """How many confirmations make a deposit on this network final."""
        return self._of(network).required_confirmations(network)

    # --- transfers -----------------------------------------------------------------------------

    def transfers_per_payment(self, network: str) -> int:
        """How many transfers one transaction of a network may carry out."""
        return self._of(network).transfers_per_payment(network)

    async def prepare(
        self, transfer: Transfer, companions: Sequence[Transfer], record: Record
    ) -> None:
        """Sign and record without publishing. Raises TransferRejected and errors.Unavailable."""
        side = self._of(transfer.network)
        if (known := side.recorded(transfer)) is not None:
            # The payment journal brought it back before its order planned it: it is out already.
            await record(known)
            return
        self._guard.require_open()
        if self._journal is not None:
            await self._journal.require_ready()
        with self._guard.passing(transfer, companions) as together:
            if (look := self._reconciliations.get(side.asset)) is not None:
                await look.require_done()
            # Payouts may have been paused meanwhile: by another caller's first look, which leaves
            # this one nothing to find.
            self._guard.require_open()
            await side.prepare(transfer, together, record)

    async def publish(self, transfer: Transfer) -> Verdict:
        """Hand the transfer's own bytes to the network, unless payouts are paused."""
        if self._guard.paused() is not None:
            return Verdict(Outcome.ABSENT, "payouts are paused")
        side = self._of(transfer.network)
        return await _with_receipt(side, transfer, await side.publish(transfer))

    async def look_up(self, transfer: Transfer) -> Verdict:
        """What the network says of the transfer; with its receipt once it is settled."""
        side = self._of(transfer.network)
        return await _with_receipt(side, transfer, await side.look_up(transfer))

    def health(self) -> Health:
        """Whether everything can be settled, and if not, what is wrong."""
        checks = [("payouts", self._guard.health())]
        checks += [(side.asset.symbol, side.health()) for side in self._sides.values()]
        checks += [(asset.symbol, watch.health()) for asset, watch in self._watches.items()]
        checks += [(asset.symbol, look.health()) for asset, look in self._reconciliations.items()]
        checks += [(side.asset.symbol, self._above_floor(side)) for side in self._sides.values()]
        checks += [(asset.symbol, _upkeep(fault)) for asset, fault in self._faults.items()]
        checks += [("orders", self._without_node())]
        if self._journal is not None:
            checks.append(("payouts", self._journal.health()))
        wrong = [f"{name}: {check.detail}" for name, check in checks if not check.ok]
        notes = [text for side in self._sides.values() for text in side.notes()]
        return Health(not wrong, "; ".join(wrong + notes) or None)

    def _without_node(self) -> Health:
        """Whether all orders are of networks that a node serves: the others wait for ever."""
        try:
            problem = self._unserved()
        except Unavailable:
            return Health(True)  # the database's own health tells
        return Health(problem is None, problem)

    def _above_floor(self, side: Side) -> Health:
        """Whether the wallet holds what the operator wants it to hold at least."""
        floor = self._floors[side.asset]
        try:
            held = side.total()
        except Unavailable:
            return Health(True)  # not known: that is the side's own health
        if held >= floor:
            return Health(True)
        shown = format_units(held, side.asset), format_units(floor, side.asset)
        return Health(False, f"the wallet holds {shown[0]}, below the floor of {shown[1]}")

    def _of(self, network: str) -> Side:
        for side in self._sides.values():
            if network in side.networks:
                return side
        raise Unavailable(f"No node serves {network}: onchain.nodes has to name one.")


async def _acknowledge(side: Side, sightings: Sequence[DepositSighting]) -> None:
    await side.acknowledge([item for item in sightings if item.key.network in side.networks])


def _upkeep(fault: str) -> Health:
    return Health(False, f"the upkeep has failed ({fault})")


async def _with_receipt(side: Side, transfer: Transfer, verdict: Verdict) -> Verdict:
    """A settled transfer is not called so before what proves it is at hand."""
    if verdict.outcome is not Outcome.SETTLED:
        return verdict
    receipt = await side.receipt(transfer)
    return replace(verdict, receipt=orjson.dumps(receipt).decode())
