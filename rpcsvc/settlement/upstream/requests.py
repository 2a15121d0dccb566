"""Requests to an upstream, its answers and its failures, in the order layer's terms."""

from __future__ import annotations

from typing import NamedTuple

from rpcsvc.domain.chains import Chain
from rpcsvc.domain.money import Money
from rpcsvc.domain.order import OrderStatus, Report, TwapPlan
from rpcsvc.domain.pricing import Direction, payout_asset
from rpcsvc.redacted import Redacted


class UpstreamRequest(Redacted, frozen=True):
    """A swap to be quoted or ordered; ``amount`` is what is sent or, in the payout's asset, what is
    to arrive exactly. ``twap`` None: at once. ``refund_address``: refunds of the
    order go there and nowhere else. ``pays_gas``: the order bears the gas of a signed payment.
    """

    HIDDEN = frozenset({"to", "session_id", "refund_address"})

    direction: Direction
    chain: Chain
    amount: Money
    to: str = ""
    session_id: str = ""
    twap: TwapPlan | None = None
    refund_address: str | None = None
    pays_gas: bool = False

    @property
    def is_exact(self) -> bool:
        """Whether the amount is what is to arrive."""
        return self.amount.asset is payout_asset(self.direction)


class Offer(NamedTuple):
    """A price, in payout units, for a deposit, in its units, and how long the swap takes.

    ``funding_gas``: USDC units of gas for a signed payment, which the output is after.
    """

    deposit: int
    expected_output: int
    min_received: int
    seconds: int
    funding_gas: int = 0


class Created(NamedTuple):
    """The order that the upstream made.

    ``expires_at``: ms since the epoch. ``expected_output``: payout units; None of a bridge order,
    which takes any deposit. ``deposit``: the units that it asks for. ``is_over``: it was over in
    the answer already. ``funding_gas`` as in an offer.
    """

    upstream_id: str
    deposit_address: str
    expires_at: int
    raw: bytes
    expected_output: int | None = None
    deposit: int = 0
    is_over: bool = False
    funding_gas: int = 0


class CreationUnknown(Exception):
    """The upstream may have made the order, or not. ``raw`` is its answer, if it gave one."""

    def __init__(self, reason: str, *, upstream_id: str | None = None, raw: bytes = b"") -> None:
        super().__init__(reason)
        self.reason = reason
        self.upstream_id = upstream_id
        self.raw = raw


class UpstreamResting(Exception):
    """The upstream takes no calls now; try again in ``wait_ms``."""

    def __init__(self, reason: str, wait_ms: int) -> None:
        super().__init__(reason)
        self.reason = reason
        self.wait_ms = wait_ms


class UpstreamStatus(NamedTuple):
    """An order as the upstream reports it; ``raw`` is its answer, for audit."""

    status: OrderStatus
    report: Report
    raw: bytes
