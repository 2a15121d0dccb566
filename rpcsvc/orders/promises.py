"""What open orders may still take out of the operator's wallets, network by network.

It follows the commits of the one process that writes orders, so it is what the store says, without
asking it. What does not live here: what the wallets hold (the engine), who is refused for it
(operations/quoting.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rpcsvc.domain.order import Order, Transfer
from rpcsvc.domain.states import OrderStatus, TransferState
from rpcsvc.orders.ports import OrderStore

Claims = dict[str, int]

_OVER: Final = (TransferState.SETTLED, TransferState.FAILED, TransferState.CANCELLED)


def claims_of(order: Order) -> Claims:
    """Atomic units by network that an order may still be paid: its output, and what it sent in.

    A deposit counts until its payout is settled, since it may have to go back; what waits for a
    refund address, also of an order that is over, until its refund is settled. All of it together
    is more than can become due; the difference is the margin.
    """
    claims: Claims = defaultdict(int)
    for transfer in order.transfers:
        if transfer.state not in _OVER:
            claims[transfer.network] += transfer.units + transfer.fee
    if _may_be_paid_out(order):
        claims[order.terms.payout_network] += _output(order)
    claims[order.terms.deposit_network] += _returnable(order)
    return {network: units for network, units in claims.items() if units}


def _may_be_paid_out(order: Order) -> bool:
    """Whether a payout may yet be planned: not while, or after, all of it is sent back."""
    if order.status.is_terminal or order.status is OrderStatus.REFUNDING:
        return False
    return order.payout is None or order.payout.state is TransferState.FAILED


def _returnable(order: Order) -> int:
    """Deposit units that may have to go back and that no refund has taken up yet."""
    if _is_paid(order.payout):
        return order.pending_units + order.leftover
    refunds = {refund.transfer_id for refund in order.refunds}
    return sum(
        deposit.units
        for deposit in order.deposits
        if deposit.is_active and not deposit.is_dust and deposit.transfer_id not in refunds
    )


def _output(order: Order) -> int:
    """What the order pays out, with its fee, if all that came so far is swapped.

    More than the maximum is refunded: nobody holds up a wallet by sending it.
    """
    terms = order.terms
    swapped = min(max(_returnable(order), terms.deposit_amount), terms.max_deposit)
    return terms.price.output(terms.direction, swapped) + terms.price.payout_fee


def _is_paid(payout: Transfer | None) -> bool:
    return payout is not None and payout.state is TransferState.SETTLED


class Promises:
    """The sum of all claims."""

    def __init__(self) -> None:
        self._of: dict[str, Claims] = {}
        self._total: Claims = defaultdict(int)

    def load(self, store: OrderStore) -> None:
        """Count what is open in the store, orders that are over and still owe a refund included."""
        pending = {order_id for order_id, _effect in store.pending_effects()}
        for order_id in pending.union(store.open_orders()):
            order = store.order(order_id)
            if order is not None:
                self.note(order)

    def note(self, order: Order) -> None:
        """The order was committed as it is now."""
        self._replace(order.order_id, claims_of(order))

    def on(self, network: str) -> int:
        """What may still be taken on a network."""
        return self._total[network]

    @contextmanager
    def holding(self, order: Order) -> Iterator[None]:
        """Count an order while it is being committed; not any more if that fails.

        One whose caller is cancelled is committed all the same, and stays counted.
        """
        self.note(order)
        try:
            yield
        except Exception:
            self._replace(order.order_id, {})
            raise

    def _replace(self, order_id: str, claims: Claims) -> None:
        for network, units in self._of.pop(order_id, {}).items():
            self._total[network] -= units
        if claims:
            self._of[order_id] = claims
        for network, units in claims.items():
            self._total[network] += units
