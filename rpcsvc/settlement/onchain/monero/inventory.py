"""The XMR wallet's holdings, and the splitting and consolidation of its outputs.

Anybody may send dust to a deposit address. With more outputs than one answer can list (some 66,000)
only the wallet's own address is listed, which no customer knows, and sums come from the balance.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Hashable, Sequence
from heapq import nlargest
from typing import Final

import structlog
from msgspec import Struct
from msgspec.structs import replace

from rpcsvc.clock import Clock, iso8601
from rpcsvc.domain.money import XMR, format_units
from rpcsvc.errors import Unavailable
from rpcsvc.health import Condition, notes
from rpcsvc.settlement.onchain.backoff import Backoff
from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.monerod import NodeInfo
from rpcsvc.settlement.onchain.monero.payments import MoneroFees, MoneroPayments
from rpcsvc.settlement.onchain.monero.records import (
    MoneroOptions,
    MoneroPayment,
    MoneroPaymentOrder,
    MoneroPurpose,
)
from rpcsvc.settlement.onchain.monero.wallet import (
    Held,
    read_held,
)
from rpcsvc.settlement.onchain.monero.wallet_types import Output

log = structlog.get_logger(__name__)

TOO_MANY_OUTPUTS: Final = (
    "the XMR wallet has more outputs than one answer can list: orders get only what is at its own"
    " address; stop the service and sweep the rest there"
)


_MOST_PARTS: Final = 14  # and the change
_MOST_INPUTS: Final = 40
_INPUT_WEIGHT: Final = 800
_BASE_WEIGHT: Final = 2000
_BLOCK_SECONDS: Final = 120
# Changes between two blocks by none of our payments: a lock that ends at a time of day, a wallet
# that was restarted.
_LOOK_AGAIN_MS: Final = 60_000
# The wallet works for seconds on a payment of many inputs, and does nothing else meanwhile.
_FIRST_PAUSE_MS: Final = 60_000
_LONGEST_PAUSE_MS: Final = 3_600_000
_UPKEEP: Final = "upkeep"


class _Upkeep(Struct, frozen=True):
    """A payment of the wallet to itself with this number of ``inputs``; ``what`` describes it."""

    order: MoneroPaymentOrder
    inputs: int
    what: str


class Available(Struct, frozen=True):
    """The wallet's balance at a height. ``max_now`` can be paid now, after the fee.

    ``locked`` units unlock within ``seconds_to_unlock``; ``outputs`` counts the unlocked ones,
    of the wallet's own address alone where there are too many to list.
    """

    height: int
    unlocked: int
    locked: int
    max_now: int
    outputs: int
    seconds_to_unlock: int


class MoneroInventory:
    """Looks after the outputs of the wallet."""

    def __init__(
        self,
        connection: MoneroConnection,
        payments: MoneroPayments,
        fees: MoneroFees,
        clock: Clock,
        options: MoneroOptions,
    ) -> None:
        self._connection = connection
        self._payments = payments
        self._fees = fees
        self._clock = clock
        self._options = options
        self._available: Available | None = None
        self._outputs: list[Output] = []
        self._large = 0
        self._spendable = 0
        self._seen: tuple[str, Hashable] | None = None
        self._seen_at = 0
        self._backoff = Backoff(clock.now_ms, _FIRST_PAUSE_MS, _LONGEST_PAUSE_MS)
        self._has_too_many = False
        self._require_signable: Callable[[], Awaitable[None]] | None = None
        # Why outputs are not split or joined now.
        self._postponed: str | None = None

    @property
    def is_known(self) -> bool:
        """Whether the outputs were listed once: before that no order can be taken."""
        return self._available is not None

    @property
    def available(self) -> Available:
        """The balance at the last refresh. Raises errors.Unavailable before the first."""
        if self._available is None:
            raise Unavailable("What the XMR wallet holds is not known yet. Try again in a moment.")
        return self._available

    def conditions(self) -> list[Condition]:
        """Return notes for the operator: nothing waits for the outputs."""
        return notes(TOO_MANY_OUTPUTS if self._has_too_many else None, self._postponed)

    def outputs(self) -> int | None:
        """The number of spendable outputs; None before the first refresh."""
        return None if self._available is None else self._available.outputs

    async def poll(self, info: NodeInfo) -> None:
        """Count the outputs when they may have changed: listing many takes long. Raises
        RpcFailure.
        """
        fee, now = self._fees.typical(), self._clock.now_ms()
        seen = (info.top_hash, await self._payments.under_way())
        if seen != self._seen or not 0 <= now - self._seen_at < _LOOK_AGAIN_MS:
            self._count(info, await read_held(self._connection.wallet, info.height))
            self._seen, self._seen_at = seen, now
        # The fee is of the moment.
        self._available = replace(self.available, max_now=max(0, self._spendable - fee))

    def _count(self, info: NodeInfo, held: Held) -> None:
        self._outputs = [item for item in held.outputs if item.unlocked]
        self._large = sum(item.amount >= self._options.output_units for item in held.outputs)
        # The most that one transaction of an accepted size can spend.
        self._spendable = sum(nlargest(_MOST_INPUTS, (item.amount for item in self._outputs)))
        self._available = Available(
            height=info.height,
            unlocked=held.unlocked,
            locked=held.locked,
            max_now=0,
            outputs=len(self._outputs),
            seconds_to_unlock=held.blocks_to_unlock * _BLOCK_SECONDS,
        )
        if not held.is_complete and not self._has_too_many:
            log.warning("monero_outputs_exceeded", unlocked=held.unlocked, locked=held.locked)
        self._has_too_many = not held.is_complete

    def hold(self, until: Callable[[], Awaitable[None]]) -> None:
        """Have nothing signed while ``until`` raises errors.Unavailable."""
        self._require_signable = until

    async def keep_up(self) -> bool:
        """Split or join outputs where needed; return whether a payment was published.

        Raises RpcFailure, and errors.Unavailable when the wallet can't do it now.
        """
        if await self._payments.finish_upkeep() or await self._payments.is_busy():
            return False
        upkeep = self._consolidation() or self._split()
        if upkeep is None:
            self._backoff.forget(_UPKEEP)
            self._postponed = None
            return False
        if not self._is_due(upkeep):
            return False
        if self._require_signable is not None:
            await self._require_signable()
        payment = await self._signed(upkeep)
        log.info(
            "monero_upkeep_started",
            txid=payment.txid, parts=upkeep.order.parts, fee=payment.fee,
        )  # fmt: skip
        await self._payments.finish_upkeep()
        return True

    def _is_due(self, upkeep: _Upkeep) -> bool:
        """Whether it may be signed now: its fee is estimated before the wallet works on it."""
        fee, highest = (
            self._fees.estimate(upkeep.inputs, upkeep.order.parts),
            self._options.highest_fee,
        )
        if fee > highest:
            self._postpone(
                f"{upkeep.what} would take a fee of about {format_units(fee, XMR)} XMR, and the"
                f" service gives {format_units(highest, XMR)} at most: wait, it is done once the"
                " network's fee has fallen"
            )
            return False
        return self._backoff.is_due(_UPKEEP, self._decided_by(upkeep))

    async def _signed(self, upkeep: _Upkeep) -> MoneroPayment:
        """Have it signed and recorded. Raises as ``keep_up`` does, and rests after that."""
        try:
            payment = await self._payments.prepare_upkeep(upkeep.order)
        except (RpcFailure, Unavailable) as error:
            pause = self._backoff.note(_UPKEEP, self._decided_by(upkeep))
            again = iso8601(self._clock.now_ms() + pause)
            reason = error.message if isinstance(error, Unavailable) else str(error)
            self._postpone(
                f"{upkeep.what} was refused ({reason.rstrip('.')}) and is tried again at {again}:"
                " if it goes on, read the log of monero-wallet-rpc"
            )
            raise
        self._backoff.forget(_UPKEEP)
        self._postponed = None
        return payment

    def _decided_by(self, upkeep: _Upkeep) -> Hashable:
        """Return the facts that decide on a refusal: the network's fee, and the outputs."""
        order = upkeep.order
        return self._fees.per_byte, order.units, order.parts, order.from_indices

    def _postpone(self, text: str) -> None:
        if self._postponed is None:
            log.warning("monero_upkeep_postponed", reason=text)
        self._postponed = text

    def _split(self) -> _Upkeep | None:
        """Return a payment that cuts the largest output into the missing ones, none under the set
        size.

        Locked outputs count: they come back by themselves. A few missing are not worth a fee.
        """
        options = self._options
        missing = options.outputs_target - self._large
        if missing <= options.outputs_target // 4 or not self._outputs:
            return None
        largest = max(self._outputs, key=lambda item: item.amount)
        room = largest.amount - self._fees.of_weight(options.typical_weight * 2)
        parts = min(missing, _MOST_PARTS, room // options.output_units - 1)
        if parts < 1:
            return None
        share = room // (parts + 1)
        order = self._order(share * parts, parts, (largest.index.minor,))
        return _Upkeep(order, 1, f"cutting an output of the XMR wallet into {parts + 1}")

    def _consolidation(self) -> _Upkeep | None:
        """Put the smallest together when there are too many."""
        options = self._options
        # Only where an address has nothing large: there the wallet can't choose that instead.
        large_at = {item.index for item in self._outputs if item.amount >= options.output_units}
        # Outputs worth less than their fee stay: anyone may send any number of them.
        least = self._fees.of_weight(_INPUT_WEIGHT)
        small = sorted(
            (item for item in self._outputs if item.index not in large_at and item.amount > least),
            key=lambda item: item.amount,
        )
        if options.outputs_target == 0 or len(small) <= options.dusty_outputs:
            return None
        inputs = small[:_MOST_INPUTS]
        units = _sum(inputs) - self._fees.of_weight(_BASE_WEIGHT + _INPUT_WEIGHT * len(inputs))
        if units <= 0:
            return None
        indices = sorted({item.index.minor for item in inputs})
        order = self._order(units, 1, tuple(indices))
        return _Upkeep(order, len(inputs), f"joining {len(inputs)} outputs of the XMR wallet")

    def _order(self, units: int, parts: int, indices: tuple[int, ...]) -> MoneroPaymentOrder:
        return MoneroPaymentOrder(
            payment_id=f"upkeep-{self._clock.now_ms()}",
            purpose=MoneroPurpose.UPKEEP,
            address=self._connection.primary_address,
            units=units,
            parts=parts,
            from_indices=indices,
        )


def _sum(outputs: Sequence[Output]) -> int:
    return sum(item.amount for item in outputs)
