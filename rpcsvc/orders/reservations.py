"""What open orders may still take out of the operator's wallets, network by network.

It follows the commits of the one process that writes orders. A reservation of an unfunded order
ends when the order expires; a later deposit is swapped only if the wallet can pay for it then.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Final, Protocol

from rpcsvc.clock import day_of
from rpcsvc.domain.deposit_rules import units_by_rate
from rpcsvc.domain.order import AWAITS_DEPOSIT, Deposit, Order, OrderStatus, Transfer, TransferState
from rpcsvc.domain.pricing import Direction
from rpcsvc.orders.ports.store import OrderStore
from rpcsvc.orders.unfunded import OrdersToday, Reservation, UnfundedOrders

# Atomic units by network.
Units = dict[str, int]
IsComplete = Callable[[str, str, int], bool]
# Stands for the wallets of an upstream: reservations there are counted in USDC units.
UPSTREAM: Final = "upstream"

_OVER: Final = (TransferState.SETTLED, TransferState.FAILED, TransferState.CANCELLED)


def reservations_of(order: Order) -> Units:
    """Atomic units by network that an order may still be paid: its output, and what it sent in.

    A deposit counts until its payout is settled, since it may have to go back; what waits for a
    refund address, also of an order that is over, until its refund is settled. All of it together
    is more than can become due; the difference is the margin.
    """
    reserved: Units = defaultdict(int)
    for transfer in order.transfers:
        if transfer.state not in _OVER:
            reserved[transfer.network] += transfer.units + transfer.fee
    if _may_be_paid_out(order):
        reserved[order.terms.payout_network] += _output(order)
    reserved[order.terms.deposit_network] += _returnable(order)
    return {network: units for network, units in reserved.items() if units}


def unfunded_units(order: Order) -> int:
    """Of what an order reserves, the payout units for deposits that have not come.

    Of an order that an upstream settles, its worth in USDC units; what it is worth that takes any
    amount (bridge) is not known.
    """
    if order.status not in AWAITS_DEPOSIT:
        return 0
    if order.terms.upstream_id is not None:
        return _relayed_worth(order)
    if not _may_be_paid_out(order):
        return 0
    return max(0, _output(order) - _output_with(order, 0))


def funded_reservations_of(order: Order) -> Units:
    """What an order needs whose reservation has ended: nothing for deposits that have not come."""
    reserved, network = reservations_of(order), order.terms.payout_network
    return {**reserved, network: reserved.get(network, 0) - unfunded_units(order)}


def _relayed_worth(order: Order) -> int:
    terms = order.terms
    if order.status is not OrderStatus.AWAITING_DEPOSIT or terms.is_bridge:
        return 0
    is_usdc_paid = terms.direction is Direction.XMR_TO_USDC
    return terms.expected_output if is_usdc_paid else terms.deposit_amount


def _may_be_paid_out(order: Order) -> bool:
    """Whether a payout may yet be planned: not while, or after, all of it is sent back."""
    if order.status.is_terminal or order.status is OrderStatus.REFUNDING:
        return False
    return order.payout is None or order.payout.state is TransferState.FAILED


def _returnable(order: Order) -> int:
    """Deposit units that may have to go back and that are in no refund yet."""
    if _is_paid(order.payout):
        return order.pending_units + order.leftover
    return sum(deposit.units for deposit in _not_refunded(order))


def _not_refunded(order: Order) -> list[Deposit]:
    refunds = {refund.transfer_id for refund in order.refunds}
    return [
        deposit
        for deposit in order.deposits
        if deposit.is_active and not deposit.is_dust and deposit.transfer_id not in refunds
    ]


def _output(order: Order) -> int:
    """What the order pays out, with its fee, if all that came so far is swapped.

    More than the maximum is refunded: nobody holds up a wallet by sending it.
    """
    return _output_with(order, max(0, order.terms.deposit_amount - _returnable(order)))


def _output_with(order: Order, missing: int) -> int:
    """The payout and its fee for the deposits that came, each at its rate, and ``missing`` more at
    the locked rate.
    """
    terms, came = order.terms, _not_refunded(order)
    by_rate = Counter(units_by_rate(came, terms.price.rate))
    by_rate[terms.price.rate] += missing
    total = by_rate.total()
    if total == 0:
        return 0
    if total > terms.max_deposit:
        by_rate = Counter({terms.price.rate: terms.max_deposit})
    return terms.price.payout(terms.direction, by_rate)[0] + terms.price.payout_fee


def _is_paid(payout: Transfer | None) -> bool:
    return payout is not None and payout.state is TransferState.SETTLED


class ReservationBook(Protocol):
    """Follows the commits of orders."""

    def holding(self, order: Order, client: str = "") -> AbstractContextManager[None]:
        """Count a new order while it is being committed; not any more if that fails."""
        ...

    def note(self, order: Order, client: str | None = None) -> None:
        """The order was committed as it is now; ``client`` of a new one is who asked for it."""
        ...


class _Uncounted:
    """For wallets that take every order."""

    def holding(self, order: Order, client: str = "") -> AbstractContextManager[None]:  # noqa: ARG002 - not counted
        """Count nothing."""
        return nullcontext()

    def note(self, order: Order, client: str | None = None) -> None:
        """Count nothing."""


UNCOUNTED: Final[ReservationBook] = _Uncounted()


class Reservations:
    """The reservations of all open orders, and of them those of unfunded ones."""

    def __init__(self) -> None:
        self._of: dict[str, Units] = {}
        self._total: Units = defaultdict(int)
        self._is_complete: IsComplete = _nothing_is_known
        self.unfunded = UnfundedOrders()
        self.today = OrdersToday()

    def follow(self, is_complete: IsComplete) -> None:
        """End reservations as deposits become known: ``is_complete`` of an order id (empty: any),
        a network and a time (ms) says whether all that came until then is on record.
        """
        self._is_complete = is_complete

    async def load(self, store: OrderStore, now: int) -> None:
        """Count what is open in the store, orders that are over and still owe a refund included."""
        self.today = OrdersToday(now, await store.orders_made(day_of(now)))
        clients = await store.unfunded_clients()
        pending = {order_id for order_id, _effect in await store.pending_effects()}
        for order_id in pending.union(await store.open_orders()):
            order = await store.order(order_id)
            if order is not None:
                self.note(order, clients.get(order_id, ""))

    def note(self, order: Order, client: str | None = None) -> None:
        """The order was committed as it is now; ``client`` of a new one is who asked for it."""
        order_id = order.order_id
        if client is None:
            client = self.unfunded.client_of(order_id)
        reservation = self._reservation(order, client)
        self.unfunded.put(order_id, reservation)
        self._replace(order_id, self._reserved(order, is_reserved=reservation is not None))

    def on(self, network: str) -> int:
        """What may still be taken on a network."""
        self._end_expired()
        return self._total[network]

    def funded(self, network: str) -> int:
        """What may still be taken on a network for money that has come."""
        return self.on(network) - self.unfunded.units(network)

    def beside(self, order: Order) -> int:
        """What other orders may still take on the network that an order is paid on."""
        network = order.terms.payout_network
        return self.on(network) - self._of.get(order.order_id, {}).get(network, 0)

    @contextmanager
    def holding(self, order: Order, client: str = "") -> Iterator[None]:
        """Count an order while it is being committed; not any more if that fails.

        One whose caller is cancelled is committed all the same, and stays counted.
        """
        self.note(order, client)
        self.today.add(client, order.terms.created_at)
        try:
            yield
        except Exception:
            self.today.add(client, order.terms.created_at, -1)
            self._replace(order.order_id, {})
            self.unfunded.put(order.order_id, None)
            raise

    @contextmanager
    def asking(self, order_id: str, reservation: Reservation) -> Iterator[None]:
        """Count an order that an upstream is being asked for."""
        pending = f"asked {order_id}"
        self.unfunded.put(pending, reservation)
        try:
            yield
        finally:
            self.unfunded.put(pending, None)

    def _reservation(self, order: Order, client: str) -> Reservation | None:
        terms, units = order.terms, unfunded_units(order)
        if self._is_complete(order.order_id, terms.deposit_network, terms.expires_at):
            return None
        if terms.upstream_id is not None:
            awaits = order.status is OrderStatus.AWAITING_DEPOSIT
            return _reserved_by(order, client, UPSTREAM, units) if awaits else None
        return _reserved_by(order, client, terms.payout_network, units) if units else None

    def _reserved(self, order: Order, *, is_reserved: bool) -> Units:
        if order.terms.upstream_id is not None:
            return {}  # the upstream pays
        return reservations_of(order) if is_reserved else funded_reservations_of(order)

    def _end_expired(self) -> None:
        for order_id, held in self.unfunded.expired(self._is_complete):
            reserved = self._of.get(order_id)
            if reserved is not None:
                left = reserved.get(held.network, 0) - held.units
                self._replace(order_id, {**reserved, held.network: left})

    def _replace(self, order_id: str, reserved: Units) -> None:
        for network, units in self._of.pop(order_id, {}).items():
            self._total[network] -= units
        if reserved:
            self._of[order_id] = reserved
        for network, units in reserved.items():
            self._total[network] += units


def _reserved_by(order: Order, client: str, network: str, units: int) -> Reservation:
    terms = order.terms
    return Reservation(network, units, client, terms.deposit_network, terms.expires_at)


def _nothing_is_known(_order_id: str, _network: str, _at: int) -> bool:
    return False
