"""Which orders the operator's wallets can take on: new ones, and those of late deposits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from rpcsvc.clock import Clock
from rpcsvc.domain.chains import Chain
from rpcsvc.domain.money import Money, format_units
from rpcsvc.domain.order import Order
from rpcsvc.domain.pricing import Direction, convert_floor, payout_asset
from rpcsvc.errors import AmountAboveMaximum, Unavailable
from rpcsvc.orders.client_limits import ClientLimits
from rpcsvc.orders.ports.rates import Rate
from rpcsvc.orders.ports.venue import network_of
from rpcsvc.orders.ports.wallets import Holdings
from rpcsvc.orders.reservations import Reservations
from rpcsvc.orders.unfunded import Client, UnfundedLimits


class Inventory(Protocol):
    """Decides which orders the wallets can take on."""

    def stored(self, client: Client) -> str:
        """What is kept of a client with its unfunded orders; empty where none are counted."""
        ...

    def require(
        self,
        client: Client,
        direction: Direction,
        chain: Chain,
        amount: Money,
        needed: int,
        rate: Rate,
    ) -> None:
        """Refuse an order that can't be paid, or that reserves too much before a deposit.

        ``needed``: payout units with their fee. Raises Unavailable when the wallet will be able to
        pay before long, AmountAboveMaximum when it holds less, and RateLimited.
        """
        ...

    def room(self, client: Client, network: str) -> int | None:
        """The most payout units that a client's next order may take; None: no limit.

        Raises errors.Unavailable while it is not known.
        """
        ...

    def payable_for(self, order: Order) -> int | None:
        """Payout units, fee included, that can be paid for an order now or when outputs unlock.

        None: no limit. Raises errors.Unavailable while it is not known.
        """
        ...


class SimulatedInventory:
    """No limit: a simulated wallet that runs dry is one of the faults to try out."""

    def stored(self, client: Client) -> str:  # noqa: ARG002 - no order is counted
        """Nothing."""
        return ""

    def require(
        self,
        client: Client,
        direction: Direction,
        chain: Chain,
        amount: Money,
        needed: int,
        rate: Rate,
    ) -> None:
        """Take every order."""

    def room(self, client: Client, network: str) -> int | None:  # noqa: ARG002 - no limit
        """No limit."""
        return None

    def payable_for(self, order: Order) -> int | None:  # noqa: ARG002 - no limit
        """No limit."""
        return None


class WalletInventory:
    """The wallets' holdings less what open orders may still take out of them.

    ``holdings`` gives those of a network; it raises errors.Unavailable while they are not known.
    """

    def __init__(
        self,
        holdings: Callable[[str], Holdings],
        reservations: Reservations,
        bounds: UnfundedLimits,
        clock: Clock,
        secret: bytes,
    ) -> None:
        self._holdings = holdings
        self._reservations = reservations
        self._clients = ClientLimits(reservations, bounds, self._wallet, clock, secret)

    def stored(self, client: Client) -> str:
        """What is kept of a client with its unfunded orders."""
        return self._clients.stored(client)

    def require(
        self,
        client: Client,
        direction: Direction,
        chain: Chain,
        amount: Money,
        needed: int,
        rate: Rate,
    ) -> None:
        """As Inventory says."""
        network = network_of(payout_asset(direction), chain)
        held = self._payable(network)
        if needed > held.free:
            raise _not_payable(held, direction, chain, amount, needed, rate)
        self._clients.require(client, amount, network, needed)

    def room(self, client: Client, network: str) -> int | None:
        """As Inventory says."""
        return min(self._payable(network).free, self._clients.room(client, network))

    def payable_for(self, order: Order) -> int | None:
        """As Inventory says."""
        held = self._holdings(order.terms.payout_network)
        return max(0, held.free + held.locked - self._reservations.beside(order))

    def _payable(self, network: str) -> Holdings:
        """What can be paid out on a network beside what open orders may still take."""
        held = self._holdings(network)
        return replace(held, free=max(0, held.free - self._reservations.on(network)))

    def _wallet(self, network: str) -> int:
        """What the wallet holds beside what funded orders may still take, in units."""
        held = self._holdings(network)
        return max(0, held.free + held.locked - self._reservations.funded(network))


def payable_deposit(direction: Direction, free: int, rate: Rate) -> int:
    """A deposit, in its own units, whose output is surely no more than ``free`` payout units."""
    return convert_floor(direction.reverse, free, rate.usdc_per_xmr)


def _not_payable(
    held: Holdings, direction: Direction, chain: Chain, amount: Money, needed: int, rate: Rate
) -> Unavailable | AmountAboveMaximum:
    payout = payout_asset(direction)
    maximum = payable_deposit(direction, held.free, rate)
    shown = {
        "maxNow": format_units(maximum, amount.asset),
        "asset": amount.asset.symbol,
        "secondsToUnlock": held.seconds_to_unlock if held.locked else None,
    }
    if needed <= held.free + held.locked:
        return Unavailable(
            f"The service can pay out {format_units(held.free, payout)} {payout.symbol} on"
            f" {network_of(payout, chain)} now, and more within {held.seconds_to_unlock} s. Send at"
            f" most {shown['maxNow']} {amount.asset.symbol}, or try again then.",
            details=shown,
            retry_after=max(1, held.seconds_to_unlock),
        )
    return AmountAboveMaximum(
        f"{amount.display()} is more than the service can pay for on {network_of(payout, chain)}"
        f" now: at most {shown['maxNow']} {amount.asset.symbol}.",
        field="amount",
        received=format_units(amount.units, amount.asset),
        details=shown,
    )
