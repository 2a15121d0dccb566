"""The developer's controls of the sandbox: funding, faults, time, rates.

The controls act on the simulated chains, never on an order: the service finds out by itself, as it
would on real chains. They cover every row of "What happens to a deposit".
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final

from msgspec.structs import replace
from typing_extensions import override

from rpcsvc.clock import OffsetClock, iso8601
from rpcsvc.domain.addresses import evm_address_from_seed
from rpcsvc.domain.money import USDC, format_units, parse_amount
from rpcsvc.domain.order import AWAITS_DEPOSIT, Order
from rpcsvc.errors import AmountAboveMaximum, InvalidInput, MissingInput
from rpcsvc.ids import RandomBytes
from rpcsvc.orders.ports.venue import FaultKind, SandboxControls, SimulatedDeposit
from rpcsvc.settlement.sandbox.engine import SandboxEngine, asset_of
from rpcsvc.settlement.sandbox.ledger import (
    Fault,
    SandboxLedger,
    Setting,
    Tx,
    TxKind,
    TxState,
    on_current,
)

# The start of the year 2100: RFC 3339 has four digits for the year.
_LATEST_MS: Final = 4_102_444_800_000
# USDC units per XMR. What orders bring at these rates can still be stored.
_LOWEST_RATE: Final = 10_000
_HIGHEST_RATE: Final = 10**12

_SWITCHES = {
    FaultKind.ENGINE_DOWN: (Setting.ENGINE_DOWN, 1),
    FaultKind.ENGINE_UP: (Setting.ENGINE_DOWN, 0),
    FaultKind.RATES_DOWN: (Setting.RATES_DOWN, 1),
    FaultKind.RATES_UP: (Setting.RATES_DOWN, 0),
}


class SimulatedChains(SandboxControls):
    """Implements SandboxControls on the ledger of the simulated chains."""

    def __init__(
        self,
        ledger: SandboxLedger,
        engine: SandboxEngine,
        clock: OffsetClock,
        random: RandomBytes,
    ) -> None:
        self._ledger = ledger
        self._engine = engine
        self._clock = clock
        self._random = random
        self._deposit_faults: dict[FaultKind, Callable[[Order], Awaitable[None]]] = {
            FaultKind.REORGANISE_DEPOSIT: self._reorganise,
            FaultKind.DROP_DEPOSIT: self._drop,
            FaultKind.RESTORE_DEPOSIT: self._restore,
        }

    @override
    async def fund(self, order: Order, units: int | None) -> SimulatedDeposit:
        async with self._engine.moving:
            tx = await on_current(lambda: self._send(order, units))
        return SimulatedDeposit(tx.txid, tx.network, tx.recipient, tx.units)

    async def _send(self, order: Order, units: int | None) -> Tx:
        terms = order.terms
        sent = await self._ledger.transactions_to(terms.deposit_network, terms.deposit_address)
        tx = self._deposit(order, _due(order, sent) if units is None else units, len(sent))
        await self._require_room(tx)
        await self._ledger.broadcast_new(tx)
        return tx

    def _deposit(self, order: Order, units: int, number: int) -> Tx:
        """Make the next deposit. Of two at once only one gets its txid; the other is made again."""
        terms = order.terms
        sender = evm_address_from_seed(self._random(32)) if terms.senders_can_be_refunded else None
        return Tx(
            network=terms.deposit_network,
            txid=hashlib.sha256(f"{terms.deposit_address}/{number}".encode()).hexdigest(),
            kind=TxKind.DEPOSIT,
            recipient=terms.deposit_address,
            sender=sender,
            units=units,
            fee=0,
            broadcast_at=self._clock.now_ms(),
        )

    @override
    async def fault_on_order(self, kind: FaultKind, order: Order) -> None:
        if kind in self._deposit_faults:
            async with self._engine.moving:
                await on_current(lambda: self._deposit_faults[kind](order))
        else:
            await self._ledger.add_fault(order.order_id, Fault(kind.value))

    @override
    async def fault(self, kind: FaultKind, *, seconds: int | None, rate: str | None) -> None:
        if kind is FaultKind.ADVANCE_CLOCK:
            wanted = _required("seconds", seconds)
            async with self._engine.moving:  # else one of two at once would be lost
                await on_current(lambda: self._advance(wanted))
        elif kind is FaultKind.SET_RATE:
            await self._engine.change(Setting.USDC_PER_XMR, _rate(_required("rate", rate)))
        elif kind in _SWITCHES:
            await self._engine.change(*_SWITCHES[kind])
        else:
            await self._pause(paused=kind is FaultKind.PAUSE_BLOCKS)

    async def _advance(self, seconds: int) -> None:
        await self._engine.refresh()
        before = self._clock.offset_ms
        if self._clock.now_ms() + seconds * 1000 > _LATEST_MS:
            raise InvalidInput(
                f"seconds would take the sandbox's clock beyond {iso8601(_LATEST_MS)}. Start"
                " with a new data directory to begin again at the time of day.",
                field="seconds",
                received=seconds,
            )
        offset = before + seconds * 1000
        await self._engine.change(Setting.CLOCK_OFFSET_MS, offset, before)

    async def _pause(self, *, paused: bool) -> None:
        async with self._engine.moving:
            now = self._clock.now_ms()
            for chain in await self._ledger.chains():
                await self._ledger.put_chain(chain.pause(now) if paused else chain.resume(now))

    async def _reorganise(self, order: Order) -> None:
        """Take the blocks from the order's last deposit on away; their transactions are pooled."""
        tx = await self._last_deposit(order, TxState.MINED)
        above = await self._ledger.mined_above(tx.network, (tx.block_height or 0) - 1)
        await self._ledger.unmine(above, self._clock.now_ms())

    async def _drop(self, order: Order) -> None:
        """Remove the order's last deposit permanently, as if its inputs were spent elsewhere."""
        tx = await self._last_deposit(order, TxState.MINED, TxState.MEMPOOL)
        if tx.state is TxState.MINED:
            await self._reorganise(order)
            tx = replace(tx, state=TxState.MEMPOOL, block_height=None)
        await self._ledger.set_state(tx, TxState.DROPPED, self._clock.now_ms())

    async def _restore(self, order: Order) -> None:
        """A dropped deposit is in the pool again."""
        tx = await self._last_deposit(order, TxState.DROPPED)
        await self._require_room(tx)
        await self._ledger.set_state(tx, TxState.MEMPOOL, self._clock.now_ms())

    async def _require_room(self, tx: Tx) -> None:
        """Raise AmountAboveMaximum when the wallet's balance would be more than can be stored."""
        room, asset = await self._engine.room(tx.network), asset_of(tx.network)
        if tx.units > room:
            most = format_units(room, asset)
            raise AmountAboveMaximum(
                f"The sandbox's wallet can't hold so much. Send at most {most} {asset.symbol}.",
                field="amount",
                received=format_units(tx.units, asset),
                details={"maximum": most, "asset": asset.symbol},
            )

    async def _last_deposit(self, order: Order, *states: TxState) -> Tx:
        terms = order.terms
        txs = await self._ledger.transactions_to(terms.deposit_network, terms.deposit_address)
        for tx in reversed(txs):
            if tx.state in states:
                return tx
        raise InvalidInput(
            f"Order {order.order_id} has no deposit that is {' or '.join(states)}."
            " Fund it first with sandbox.fund.",
            field="orderId",
            received=order.order_id,
        )


def _due(order: Order, sent: Sequence[Tx]) -> int:
    """Return what is due, less what is on its way: sent, and not yet seen by the order."""
    seen = {item.key.txid for item in order.deposits if item.is_active}
    unseen = sum(tx.units for tx in sent if tx.state is not TxState.DROPPED and tx.txid not in seen)
    if order.due_units <= unseen or order.status not in AWAITS_DEPOSIT:
        raise InvalidInput(
            "Nothing is due on this order. Name an amount to send one anyway.", field="amount"
        )
    return order.due_units - unseen


def _rate(text: str) -> int:
    """Return USDC units per XMR. Raises InvalidInput for a price out of any test's range."""
    units = parse_amount(text, USDC, field="rate").units
    if not _LOWEST_RATE <= units <= _HIGHEST_RATE:
        low, high = (format_units(u, USDC) for u in (_LOWEST_RATE, _HIGHEST_RATE))
        raise InvalidInput(
            f"rate must be from {low} to {high} USDC for an XMR.",
            field="rate",
            received=text,
            allowed=[f"{low} to {high}"],
        )
    return units


def _required(field: str, value: Any) -> Any:
    if value is None:
        raise MissingInput(f"This fault needs {field}.", field=field)
    return value
