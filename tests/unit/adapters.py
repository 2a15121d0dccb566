"""Fake chain adapters with scripted behaviour."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rpcsvc.domain.money import USDC, XMR, Asset
from rpcsvc.domain.order import DepositKey, DepositState, Transfer, TransferKind
from rpcsvc.domain.reservations import Holdings
from rpcsvc.errors import Unavailable
from rpcsvc.health import Condition, Health
from rpcsvc.orders.ports.wallets import (
    DepositSighting,
    NetworkState,
    Observation,
    PreparedTransfer,
    Verdict,
)
from rpcsvc.settlement.onchain.engine import Caps

CAPS = {XMR: Caps(100, 1000), USDC: Caps(100, 1000)}
FLOORS = {XMR: 50, USDC: 0}


class FakeAdapter:
    """An adapter for one asset on one network, and that network; it records its calls."""

    prepare: Any
    known: PreparedTransfer | None = None

    def __init__(self, asset: Asset, network: str, verdict: Verdict) -> None:
        self.asset, self.network, self.verdict = asset, network, verdict
        self.networks, self.payments, self.block_seconds = {network: self}, self, len(network)
        self.asked: list[str] = []
        self.acknowledged: list[DepositSighting] = []
        self.held = 60
        self.found: list[Condition] = []
        self.maintain: Any = None
        self.upkeep: dict[str, Any] = {asset.symbol: self._maintain}

    async def _maintain(self) -> None:
        await self.maintain()

    async def recorded(self, _transfer: Transfer) -> PreparedTransfer | None:
        return self.known

    def require_ready(self) -> None:
        if not Health.of(self.found).ok:
            raise Unavailable("not ready")

    def fee(self) -> int:
        return len(self.network) if self.asset is USDC else 1

    def holdings(self) -> Holdings:
        return Holdings(self.held, 0, 0)

    def state(self) -> NetworkState:
        return NetworkState(self.held)

    def total(self) -> int:
        return self.held

    async def observe(self) -> Observation:
        key = DepositKey(self.network, "tx", 0)
        shown = DepositSighting(key, "a", 1, None, 0, DepositState.SEEN)
        return Observation([shown], {self.network: 7})

    async def acknowledge(self, sightings: Sequence[DepositSighting]) -> None:
        self.acknowledged += sightings

    async def look_up(self, transfer: Transfer) -> Verdict:
        self.asked.append(f"look_up {transfer.transfer_id}")
        return self.verdict

    async def publish(self, transfer: Transfer) -> Verdict:
        self.asked.append(f"publish {transfer.transfer_id}")
        return self.verdict

    async def receipt(self, transfer: Transfer) -> dict[str, Any]:
        self.asked.append(f"receipt {transfer.transfer_id}")
        return {"txid": "mined"}

    async def conditions(self) -> list[Condition]:
        return self.found


def transfer(network: str = "arbitrum") -> Transfer:
    asset = XMR if network == "monero" else USDC
    return Transfer("t", TransferKind.PAYOUT, network, asset, "to", 5, 1)
