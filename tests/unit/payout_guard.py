"""The caps of the payout guard, and transfers to be signed."""

from __future__ import annotations

from dataclasses import dataclass, field

from rpcsvc.domain.money import USDC, XMR, Asset
from rpcsvc.domain.order import Transfer
from rpcsvc.settlement.onchain.engine import Caps, SignedPayments

CAPS = {XMR: Caps(10, 100), USDC: Caps(1_000, 5_000)}


@dataclass
class SignedBooks(SignedPayments):
    """Books of wallets that paid ``sent`` units within a day, and have no unmatched payment."""

    sent: int = 0
    since: list[int] = field(default_factory=list)

    async def sent_since(self, _asset: Asset, at: int) -> int:
        self.since.append(at)
        return self.sent

    async def unmatched(self, _transfer: Transfer) -> str | None:
        return None
