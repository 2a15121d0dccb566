"""The port of wallets that one replica settles from while others take orders: rows of the database.

Units are atomic ones of the network's asset; times are ms by the database's clock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from rpcsvc.domain.money import Asset
from rpcsvc.orders.ports.wallets import Holdings


class WalletState(NamedTuple):
    """The wallet of a network, as the replica that settles from it sees it.

    ``fee``: of a transfer; None while it is not known. ``holdings``: None while they are not known,
    or too low; ``shortage`` says so to a caller then. ``refusal``: why no order is taken now; None:
    orders are taken. ``height``: of the newest block that the node showed.
    """

    network: str
    is_up: bool
    height: int | None
    fee: int | None
    holdings: Holdings | None
    shortage: str | None
    refusal: str | None


class PublishedState(NamedTuple):
    """A state with the time when it was published, and how long ago that was (ms)."""

    state: WalletState
    published_at: int
    age_ms: int


class SharedWallets(Protocol):
    """Keeps wallet states and the pool of deposit addresses. All may raise errors.Unavailable."""

    async def now_ms(self) -> int:
        """The time by the database's clock."""
        ...

    async def publish(
        self,
        states: Sequence[WalletState],
        addresses: Mapping[Asset, Sequence[str]],
        *,
        is_first: bool,
    ) -> None:
        """Put the states in place of the earlier ones, and add addresses to the pool.

        ``is_first`` empties the pool before that.
        """
        ...

    async def states(self) -> list[PublishedState]:
        """The state of each network."""
        ...

    async def addresses(self, asset: Asset) -> list[str]:
        """The addresses in the pool."""
        ...
