"""The interface of a chain adapter: one asset, XMR or USDC, on the networks that carry it.

The engine (engine.py) hands each call to the adapter of the asset or network that it is about.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from rpcsvc.domain.money import Asset
from rpcsvc.domain.order import DepositKey, Transfer
from rpcsvc.orders.ports.health import Health
from rpcsvc.orders.ports.wallets import (
    DepositSighting,
    Holdings,
    NetworkNames,
    Observation,
    PreparedTransfer,
    Record,
    Verdict,
)


class ChainAdapter(Protocol):
    """One asset on the networks that carry it. Units are atomic ones of that asset.

    The promises of orders/ports/wallets.SettlementEngine hold here too: any exception other than
    TransferRejected means that the outcome is not known.
    """

    asset: Asset
    # Whose deposits and transfers belong to this adapter.
    networks: frozenset[str]

    async def start(self) -> None:
        """Connect, check that the nodes are on the right networks, load, catch up."""
        ...

    async def close(self) -> None:
        """Let go of connections."""
        ...

    def require_ready(self) -> None:
        """Raise errors.Unavailable when orders of this asset can't be taken now."""
        ...

    def deposit_address(self) -> str:
        """A fresh address from those made ahead. Raises errors.Unavailable when none is left."""
        ...

    def fee(self, chain: str) -> int:
        """What a transfer costs the operator in a swap with USDC on ``chain``, with a margin.

        Raises errors.Unavailable before it is known.
        """
        ...

    def holdings(self, network: str) -> Holdings:
        """What the wallet can pay on a network. Raises errors.Unavailable before it is known."""
        ...

    async def accepts(self, network: str, address: str) -> bool:
        """Whether an address can be paid on a network, as far as that is known within a second."""
        ...

    def total(self) -> int:
        """All that the wallet holds, locked or not. Raises errors.Unavailable before the first
        look.
        """
        ...

    def names(self, chain: str) -> NetworkNames:
        """What to call the network on which a deposit for an order of ``chain`` is made."""
        ...

    def seconds(self, chain: str) -> int:
        """How long a deposit takes to be confirmed, typically."""
        ...

    def block_seconds(self, chain: str) -> int:
        """How long a block takes, typically, rounded up."""
        ...

    async def observe(self) -> Observation:
        """Deposits that may have changed since they were last acknowledged, recomputed."""
        ...

    async def acknowledge(self, sightings: Sequence[DepositSighting]) -> None:
        """These are committed: cursors may move, final ones need not be shown again."""
        ...

    def transfers_per_payment(self, network: str) -> int:
        """How many transfers one transaction of a network may carry out."""
        ...

    async def recorded(self, transfer: Transfer) -> PreparedTransfer | None:
        """The transfer's payment if it is on record: the payment journal brought it back, and its
        order has planned the transfer since. Raises TransferRejected when it failed.
        """
        ...

    async def prepare(
        self, transfer: Transfer, companions: Sequence[Transfer], record: Record
    ) -> None:
        """Sign and ``record`` without publishing. Raises TransferRejected; after anything else
        nothing is on record, and it may be retried.
        """
        ...

    async def publish(self, transfer: Transfer) -> Verdict:
        """Hand the transfer's own bytes to the network; the same bytes may be handed over again."""
        ...

    async def look_up(self, transfer: Transfer) -> Verdict:
        """What the network says of the transfer's transaction id."""
        ...

    async def receipt(self, transfer: Transfer) -> dict[str, Any]:
        """What proves a settled transfer, as agents are told it.

        Raises errors.Unavailable when it can't be made now.
        """
        ...

    async def confirmations(self, key: DepositKey) -> int:
        """How many confirmations a deposit has now; 0 while it is in the pool or gone."""
        ...

    def required_confirmations(self, network: str) -> int:
        """How many confirmations make a deposit on this network final."""
        ...

    async def maintain(self) -> None:
        """Work between passes: make addresses ahead, sweep, note what the operator must know."""
        ...

    async def health(self) -> Health:
        """Whether this adapter can settle now."""
        ...

    async def notes(self) -> list[str]:
        """What the operator should see to in time; no order has to wait for it."""
        ...
