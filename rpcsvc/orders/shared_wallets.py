"""Wallets that one replica settles from while the others take orders.

The replica that settles publishes the state of its wallets, and fills a pool of deposit addresses
(``WalletPublisher``). The others price and make orders by those rows (``PublishedWallets``); the
transaction of each order takes its address from the pool and compares the state once more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Final, Protocol

from typing_extensions import override

from rpcsvc.clock import steady_ms
from rpcsvc.domain.chains import MONERO_NETWORK
from rpcsvc.domain.money import USDC, XMR, Asset, Money
from rpcsvc.domain.order import DepositKey
from rpcsvc.domain.reservations import Holdings
from rpcsvc.errors import Unavailable
from rpcsvc.health import Health
from rpcsvc.ids import RandomBytes
from rpcsvc.orders.ports.wallets import NetworkState, OrderingWallets
from rpcsvc.store.changes import PooledOrder
from rpcsvc.store.replicas import PublishedState, SharedWallets, WalletState

# How often states are published, and read.
EVERY_MS: Final = 1_000
# Orders are taken by a state that is no older: for a while after the replica that settles is gone.
MAX_AGE_MS: Final = 60_000
# At most this share of the pool is made at once: the replica that settles takes orders, too.
_PORTION: Final = 4


class WalletPublisher:
    """Publishes the wallets of the replica that settles, and keeps the pool of addresses filled.

    ``holdings`` of a network raises errors.Unavailable. ``pool_size``: addresses of each asset.

    The first publication empties the pool: after a restore of the database, its addresses may be
    those of orders that the copy lacks. The wallet does not give them out again.
    """

    def __init__(
        self,
        rows: SharedWallets,
        wallets: OrderingWallets,
        holdings: Callable[[str], Holdings],
        pool_size: int,
        steady: Callable[[], int] = steady_ms,
    ) -> None:
        self._rows = rows
        self._wallets = wallets
        self._holdings = holdings
        self._pool_size = pool_size
        self._steady = steady
        self._next_at = 0
        self._has_begun = False

    async def publish(self) -> int:
        """Publish if that is due; returns 0, because no work follows from it."""
        now = self._steady()
        if self._has_begun and now < self._next_at:
            return 0
        self._next_at = now + EVERY_MS
        # None with the first publication: if it failed again and again, they would all be lost.
        filled = (XMR, USDC) if self._has_begun else ()
        added = {asset: await self._added(asset) for asset in filled}
        await self._rows.publish(list(self._states()), added, is_first=not self._has_begun)
        self._has_begun = True
        return 0

    async def _added(self, asset: Asset) -> list[str]:
        """Return addresses for the pool. Nobody gets them if they can't be committed."""
        left = len(await self._rows.addresses(asset))
        portion = max(1, self._pool_size // _PORTION)
        added = list[str]()
        with suppress(Unavailable):  # the refusal says so
            while len(added) < min(self._pool_size - left, portion):
                added.append(self._wallets.deposit_address(asset))
        return added

    def _states(self) -> Iterator[WalletState]:
        refusal = _why(self._wallets.require_ready)
        for network, state in self._wallets.states().items():
            held, shortage = self._held(network)
            yield WalletState(
                network,
                state.is_up,
                state.node_height,
                self._fee(network),
                held,
                shortage,
                refusal,
            )

    def _held(self, network: str) -> tuple[Holdings | None, str | None]:
        try:
            return self._holdings(network), None
        except Unavailable as error:
            return None, error.message

    def _fee(self, network: str) -> int | None:
        try:
            return self._wallets.fee(network)
        except Unavailable:
            return None


def _why(require: Callable[[], None]) -> str | None:
    try:
        require()
    except Unavailable as error:
        return error.message
    return None


class WalletFacts(Protocol):
    """The facts that a replica knows by itself, from its settings, the nodes and the books.

    The methods do what those of OrderingWallets do.
    """

    networks: frozenset[str]

    def is_paused(self) -> bool:
        """Return whether the operator has stopped all outgoing money."""
        ...

    async def require_payable(self, network: str, address: str, *, field: str) -> None:
        """Raise errors.InvalidDestination for an address that is known not to be payable."""
        ...

    def estimated_seconds(self, deposit: Money, chain: str) -> int:
        """Return the typical time of a swap, in seconds."""
        ...

    def required_confirmations(self, network: str, units: int) -> int:
        """Return the confirmations after which deposits of ``units`` in all count."""
        ...

    async def confirmations_at(self, key: DepositKey, height: int) -> int:
        """Return the confirmations of a deposit when the newest block is at ``height``."""
        ...


class PublishedWallets(OrderingWallets):
    """The wallets by the states that the replica which settles has published.

    States from before this object's first look don't count, nor do states older than one already
    seen: a restored database has them, and a pool with addresses that orders may have.
    """

    def __init__(
        self,
        rows: SharedWallets,
        facts: WalletFacts,
        random: RandomBytes,
        steady: Callable[[], int] = steady_ms,
    ) -> None:
        self.networks = facts.networks
        self._rows = rows
        self._facts = facts
        self._random = random
        self._steady = steady
        self._since: int | None = None
        self._states: dict[str, PublishedState] = {}
        self._pool: dict[Asset, list[str]] = {XMR: [], USDC: []}
        self._read_at = 0

    async def refresh(self) -> int:
        """Read states and pool if that is due; returns 0, because no work follows from it."""
        now = self._steady()
        if self._since is None:
            self._since = await self._rows.now_ms()
        elif now - self._read_at < EVERY_MS:
            return 0
        since = self._since
        found = [each for each in await self._rows.states() if each.published_at >= since]
        pool = {asset: await self._rows.addresses(asset) for asset in (XMR, USDC)}
        self._states = {each.state.network: each for each in found}
        self._pool = pool if found else {XMR: [], USDC: []}
        # One publication's rows may be a few ms apart.
        self._since = max(since, min((each.published_at for each in found), default=since))
        self._read_at = now
        return 0

    @override
    def pooled(self, address: str, network: str) -> PooledOrder:
        return PooledOrder(address, network, self._since or 0, MAX_AGE_MS)

    # --- taking orders -------------------------------------------------------------------------

    @override
    def is_paused(self) -> bool:
        return self._facts.is_paused()

    @override
    def require_ready(self) -> None:
        for network in self.networks:
            if (refusal := self._state(network).refusal) is not None:
                raise Unavailable(refusal)
        for asset, addresses in self._pool.items():
            if not addresses:
                raise _no_address(asset)

    @override
    def deposit_address(self, asset: Asset) -> str:
        pool = self._pool[asset]
        if not pool:
            raise _no_address(asset)
        chosen = int.from_bytes(self._random(4)) % len(pool)
        pool[chosen], pool[-1] = pool[-1], pool[chosen]
        return pool.pop()

    @override
    def fee(self, network: str) -> int:
        fee = self._state(network).fee
        if fee is None:
            asset = XMR if network == MONERO_NETWORK else USDC
            raise Unavailable(
                f"{asset.symbol} on {network} can't be settled right now. Try again later."
            )
        return fee

    @override
    def holdings(self, network: str) -> Holdings:
        state = self._state(network)
        if state.holdings is None:
            raise Unavailable(state.shortage or f"What can be paid on {network} is not known yet.")
        return state.holdings

    @override
    async def require_payable(self, network: str, address: str, *, field: str) -> None:
        await self._facts.require_payable(network, address, field=field)

    @override
    def estimated_seconds(self, deposit: Money, chain: str) -> int:
        return self._facts.estimated_seconds(deposit, chain)

    # --- orders --------------------------------------------------------------------------------

    @override
    async def confirmations(self, key: DepositKey) -> int:
        found = self._states.get(key.network)
        height = None if found is None else found.state.height
        return 0 if height is None else await self._facts.confirmations_at(key, height)

    @override
    def required_confirmations(self, network: str, units: int) -> int:
        return self._facts.required_confirmations(network, units)

    @override
    def states(self) -> Mapping[str, NetworkState]:
        return {network: self._shown(network) for network in self.networks}

    def _shown(self, network: str) -> NetworkState:
        try:
            state = self._state(network)
        except Unavailable:
            return NetworkState(is_up=False)
        return NetworkState(is_up=state.is_up, node_height=state.height)

    @override
    async def health(self) -> Health:
        why = _why(self.require_ready)
        return Health(why is None, why)

    def _state(self, network: str) -> WalletState:
        """The last published state. Raises errors.Unavailable if it is too old."""
        found = self._states.get(network)
        if found is None or found.age_ms + self._steady() - self._read_at >= MAX_AGE_MS:
            raise Unavailable(
                f"The replica that settles has published no fresh state of {network}. Try again"
                " later.",
                retry_after=1,
            )
        return found.state


def _no_address(asset: Asset) -> Unavailable:
    return Unavailable(
        f"No {asset.symbol} deposit address is ready. Try again in a moment.", retry_after=1
    )
