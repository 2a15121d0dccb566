"""The sandbox port: what a developer may provoke on the simulated chains, by its wire names."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple, Protocol

from rpcsvc.domain.order import Order

# USDC per XMR, from 0.01 to 1000000, with no more decimals than USDC has.
RATE_PATTERN: Final = (
    r"^(0\.(0[1-9][0-9]{0,4}|[1-9][0-9]{0,5})|[1-9][0-9]{0,5}(\.[0-9]{1,6})?|1000000(\.0{1,6})?)$"
)


class FaultKind(StrEnum):
    """The faults by their wire names."""

    PAYOUT_FAILS = "payout_fails"
    PAYOUT_UNKNOWN_SENT = "payout_unknown_sent"
    PAYOUT_UNKNOWN_LOST = "payout_unknown_lost"
    REFUND_FAILS = "refund_fails"
    REORGANISE_DEPOSIT = "reorganise_deposit"
    DROP_DEPOSIT = "drop_deposit"
    RESTORE_DEPOSIT = "restore_deposit"
    PAUSE_BLOCKS = "pause_blocks"
    RESUME_BLOCKS = "resume_blocks"
    ADVANCE_CLOCK = "advance_clock"
    SET_RATE = "set_rate"
    ENGINE_DOWN = "engine_down"
    ENGINE_UP = "engine_up"
    RATES_DOWN = "rates_down"
    RATES_UP = "rates_up"


# What a fault can't do without, by its wire name.
NEEDED: Final = {
    FaultKind.PAYOUT_FAILS: "orderId",
    FaultKind.PAYOUT_UNKNOWN_SENT: "orderId",
    FaultKind.PAYOUT_UNKNOWN_LOST: "orderId",
    FaultKind.REFUND_FAILS: "orderId",
    FaultKind.REORGANISE_DEPOSIT: "orderId",
    FaultKind.DROP_DEPOSIT: "orderId",
    FaultKind.RESTORE_DEPOSIT: "orderId",
    FaultKind.ADVANCE_CLOCK: "seconds",
    FaultKind.SET_RATE: "rate",
}


class SimulatedDeposit(NamedTuple):
    """A deposit on its way; ``units`` are atomic."""

    txid: str
    network: str
    recipient: str
    units: int


class SandboxControls(Protocol):
    """The developer's hand in the simulated chains. It never acts on an order itself."""

    async def fund(self, order: Order, units: int | None) -> SimulatedDeposit:
        """Send ``units``, or else what is still due, from a simulated user to the deposit address.

        Raises InvalidInput when nothing is due, and AmountAboveMaximum when the wallet could not
        hold it.
        """
        ...

    async def fault_on_order(self, kind: FaultKind, order: Order) -> None:
        """Provoke a fault of one order's deposit, or of its next payout or refund."""
        ...

    async def fault(self, kind: FaultKind, *, seconds: int | None, rate: str | None) -> None:
        """Provoke a fault of the whole sandbox. Raises MissingInput and InvalidInput."""
        ...
