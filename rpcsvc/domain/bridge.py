"""The bridge: XMR to and from a perpetuals exchange (spec 2.4, 3.3).

A bridge order is an order of the one order machine, on a chain of its own: ``deposit`` swaps XMR
into USDC on an account of the exchange (an address in EVM form), ``withdraw`` the reverse. It takes
any amount from its minimum to its maximum.
"""

from __future__ import annotations

from enum import StrEnum

from rpcsvc.domain.chains import Chain
from rpcsvc.domain.money import USDC
from rpcsvc.domain.order import PERPS, Order, OrderStatus
from rpcsvc.domain.pricing import Direction


class BridgeKind(StrEnum):
    """Which way a bridge order goes."""

    DEPOSIT = "deposit"
    WITHDRAW = "withdraw"


class BridgeStatus(StrEnum):
    """The status of a bridge order (spec 3.3)."""

    AWAITING_DEPOSIT = "awaiting_deposit"
    PENDING_CONFIRMATIONS = "pending_confirmations"
    PROCESSING = "processing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"

    @property
    def is_failure(self) -> bool:
        """True when the order ended without a payout."""
        return self in (BridgeStatus.FAILED, BridgeStatus.EXPIRED)


DIRECTION_OF = {
    BridgeKind.DEPOSIT: Direction.XMR_TO_USDC,
    BridgeKind.WITHDRAW: Direction.USDC_TO_XMR,
}

# A refunded order has failed: the spec has no status of its own for it.
STATUS_OF = {
    OrderStatus.AWAITING_DEPOSIT: BridgeStatus.AWAITING_DEPOSIT,
    OrderStatus.DEPOSIT_DETECTED: BridgeStatus.PENDING_CONFIRMATIONS,
    OrderStatus.DEPOSIT_CONFIRMED: BridgeStatus.PROCESSING,
    OrderStatus.EXECUTING_SWAP: BridgeStatus.PROCESSING,
    OrderStatus.COMPLETED: BridgeStatus.COMPLETED,
    OrderStatus.REFUNDING: BridgeStatus.FAILED,
    OrderStatus.REFUNDED: BridgeStatus.FAILED,
    OrderStatus.FAILED: BridgeStatus.FAILED,
    OrderStatus.EXPIRED: BridgeStatus.EXPIRED,
}


def kind_of(order: Order) -> BridgeKind:
    """The direction of a bridge order."""
    to_perps = order.terms.direction is Direction.XMR_TO_USDC
    return BridgeKind.DEPOSIT if to_perps else BridgeKind.WITHDRAW


def perps_chain(min_usd: int) -> Chain:
    """The exchange as the chain of a bridge order. No caller can name it as one of a swap."""
    return Chain(
        name=PERPS,
        display_name="Perpetuals exchange",
        chain_id=1337,
        aliases=(),
        native_token=USDC.symbol,
        usdc_contract="",
        min_swap_usd=min_usd,
        confirmations=1,
        block_time_ms=1_000,
        test_network=PERPS,
        test_chain_id=1337,
        test_usdc_contract="",
    )
