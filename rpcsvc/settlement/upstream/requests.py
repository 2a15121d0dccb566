"""The bodies of requests to an upstream (spec 2.4). Amounts in atomic units."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class QuoteBody:
    """Quote request of spec 2.4. ``from_amount`` in atomic units; chain id 0 is Monero."""

    from_chain_id: int
    to_chain_id: int
    from_token: str
    to_token: str
    from_amount: int


@dataclass(frozen=True, slots=True)
class TwapRequest:
    """twapConfig of spec 2.4, a chunk in USDC units; what is None is left out."""

    disabled: bool | None = None
    chunk_usdc: int | None = None
    interval_ms: int | None = None


@dataclass(frozen=True, slots=True)
class OrderBody(QuoteBody):
    """Order create request of spec 2.4, and the final refund address of another rpcsvc's BFF."""

    to_address: str = field(repr=False)
    session_id: str | None = field(default=None, repr=False)
    twap: TwapRequest | None = None
    refund_address: str | None = field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class TicketBody:
    """Support ticket request of spec 2.4."""

    message: str
    category: str
    order_id: str | None = None
    session_id: str | None = field(default=None, repr=False)
    wallet_address: str | None = field(default=None, repr=False)
