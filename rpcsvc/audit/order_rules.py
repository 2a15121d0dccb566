"""The rules for one order: its own arithmetic, and its transfers against what the chains show.

deposits = payouts at the order's price + refunds + fees + what is held, all in whole units; one
payout at most; every transfer to whom the order names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Final

from msgspec import Struct, field

from rpcsvc.audit.records import (
    MONERO,
    DepositEntry,
    Difference,
    OrderEntry,
    PaymentEntry,
    Sighting,
    TransferEntry,
)
from rpcsvc.domain.addresses import same_address
from rpcsvc.domain.order import DepositState, TransferKind, TransferState
from rpcsvc.domain.pricing import Direction, deposit_asset, exact_output, payout_asset

# A mined payment that is in no block for this many blocks is lost until the opposite is shown.
_LONG_BLOCKS: Final = 30
_ABANDONED: Final = (TransferState.FAILED, TransferState.CANCELLED)


# --- the order's own arithmetic --------------------------------------------------------------


def order_differences(order: OrderEntry, written_off: Collection[str] = ()) -> Iterator[Difference]:
    """Contradictions within the books of one order.

    ``written_off``: transactions on the deposit's network that the operator has annotated.
    """
    yield from _spending(order, written_off)
    payouts = [t for t in order.transfers if t.kind is TransferKind.PAYOUT and _counts(t)]
    if len(payouts) > 1:
        yield Difference("payouts", order.order_id, "at most 1", str(len(payouts)))
    if order.status == "completed" and not any(_is_settled(t) for t in payouts):
        yield Difference("payouts", order.order_id, "a settled payout", "none")
    yield from _destinations(order)
    for transfer in order.transfers:
        if _counts(transfer):
            yield from _amount(order, transfer)
    if order.fills and payouts:
        yield from _chunks(order, payouts[-1])


def _counts(transfer: TransferEntry) -> bool:
    return transfer.state not in _ABANDONED


def _is_settled(transfer: TransferEntry) -> bool:
    return transfer.state is TransferState.SETTLED


def _spending(order: OrderEntry, written_off: Collection[str]) -> Iterator[Difference]:
    """Each deposit is held, or was spent once, on something that was or may be sent."""
    for deposit in order.deposits:
        if deposit.transfer_id is None:
            continue
        spent_on = order.transfer(deposit.transfer_id)
        if spent_on is None and _is_being_filled(order):
            continue
        if spent_on is None or not _counts(spent_on):
            state = "no transfer" if spent_on is None else spent_on.state.value
            yield Difference("deposit_spent", deposit.txid, "a transfer that counts", state)
        elif deposit.state is DepositState.REMOVED and deposit.txid not in written_off:
            kind = "deposit_lost_early" if deposit.is_early else "deposit_lost"
            yield Difference(
                kind,
                deposit.txid,
                str(deposit.units),
                "0",
                _unit_in(order),
                write_off(order.deposit_network, deposit.txid),
            )
    network = {d.network for d in order.deposits} - {order.deposit_network}
    if network:
        yield Difference(
            "deposit_network", order.order_id, order.deposit_network, ", ".join(sorted(network))
        )


def write_off(network: str, txid: str) -> str:
    """The command that writes off a deposit that vanished after its payout was signed."""
    return (
        f"if it stays away, the loss is yours: rpcsvc treasury explain {network} {txid} --note TEXT"
    )


def _is_being_filled(order: OrderEntry) -> bool:
    """Return whether deposits are assigned to a payout that is planned after the last chunk."""
    return order.status == "executing_swap"


def _destinations(order: OrderEntry) -> Iterator[Difference]:
    """Payouts go to the order's address, refunds to the named one or to who sent the deposit."""
    odd = []
    for transfer in order.transfers:
        is_payout = transfer.kind is TransferKind.PAYOUT
        network = order.payout_network if is_payout else order.deposit_network
        if transfer.network != network:
            yield Difference("network", transfer.transfer_id, network, transfer.network)
        if is_payout and not same_address(transfer.address, order.to_address):
            yield _destination(transfer, order.to_address)
        elif not is_payout and not _is_refundable_to(order, transfer):
            odd.append(transfer)
    if len({item.address for item in odd}) > order.replaced:
        for item in odd:
            named = order.agreed_refund_address or order.refund_address
            yield _destination(item, named or "a sender")


def _destination(transfer: TransferEntry, expected: str) -> Difference:
    return Difference("destination", transfer.transfer_id, expected, transfer.address)


def _is_refundable_to(order: OrderEntry, transfer: TransferEntry) -> bool:
    """Return whether a refund may go to its address.

    It must be the agreed address. Without one, it must be the address that the order's owner named,
    or for USDC the sender of a deposit.
    """
    if order.agreed_refund_address is not None:
        return same_address(transfer.address, order.agreed_refund_address)
    if order.refund_address and same_address(transfer.address, order.refund_address):
        return True
    if order.direction is not Direction.USDC_TO_XMR:
        return False
    # A refund that failed has let its deposits go, and what chunks left over is of any of them.
    any_deposit = not _counts(transfer) or bool(order.fills)
    return any(
        deposit.sender is not None
        and same_address(transfer.address, deposit.sender)
        and (any_deposit or deposit.transfer_id == transfer.transfer_id)
        for deposit in order.deposits
    )


def _amount(order: OrderEntry, transfer: TransferEntry) -> Iterator[Difference]:
    spent = sum(d.units for d in order.deposits if d.transfer_id == transfer.transfer_id)
    if transfer.kind is TransferKind.REFUND:
        yield from _refund_amount(order, transfer, spent)
    elif not order.fills:
        yield from _payout_amount(order, transfer)


def _refund_amount(order: OrderEntry, transfer: TransferEntry, spent: int) -> Iterator[Difference]:
    compared = {
        "refund_fee": (order.refund_fee, transfer.fee),
        "integrator_fee": (0, transfer.integrator_fee),
    }
    if not order.fills:
        compared["refund"] = (spent - transfer.fee, transfer.units)
    # What chunks left over goes back with whole deposits: _chunks adds that up.
    yield from _compared(transfer, compared, _unit_in(order))


def _payout_amount(order: OrderEntry, transfer: TransferEntry) -> Iterator[Difference]:
    """Compare a payout with its deposits: each at its own rate, or at one of the order's."""
    spent = [d for d in order.deposits if d.transfer_id == transfer.transfer_id]
    rates = (*reversed(order.rates), order.price.rate)
    due = [_due(order, spent, rate) for rate in rates]
    output, share = next((each for each in due if each[0] == transfer.units), due[0])
    compared = {
        "payout": (output, transfer.units),
        "payout_fee": (order.price.payout_fee, transfer.fee),
        "integrator_fee": (share, transfer.integrator_fee),
    }
    yield from _compared(transfer, compared, payout_asset(order.direction).symbol)


def _due(order: OrderEntry, spent: Collection[DepositEntry], fallback: int) -> tuple[int, int]:
    """The payout of deposits, and the integrator's fee; ``fallback`` is the rate of late ones."""
    output, share = order.price.payout(order.direction, _units_by_rate(spent, fallback))
    if order.receive_amount is not None:
        excess = sum(deposit.units for deposit in spent) - order.deposit_amount
        is_priced = all(deposit.rate is not None for deposit in spent)
        output = exact_output(output, order.receive_amount, excess, is_priced=is_priced)
    return output, share


def _units_by_rate(deposits: Iterable[DepositEntry], fallback: int) -> dict[int, int]:
    found: Counter[int] = Counter()
    for deposit in deposits:
        found[fallback if deposit.rate is None else deposit.rate] += deposit.units
    return dict(found)


def _chunks(order: OrderEntry, payout: TransferEntry) -> Iterator[Difference]:
    """Chunks of a TWAP order make its payout; with the rest and refunds, its deposits."""
    spent = sum(d.units for d in order.deposits if d.transfer_id == payout.transfer_id)
    output, share, swapped = 0, 0, 0
    for fill in order.fills:
        price = order.price.at(fill.rate)
        output += price.exchanged(order.direction, fill.units)
        share += price.integrator_fee(order.direction, fill.units)
        swapped += fill.units
    # The fixed fee is spread over the chunks by the deposits that they took.
    output -= order.price.fixed_fee * swapped // spent if spent else 0
    compared = {
        "payout": (output, payout.units),
        "payout_fee": (order.price.payout_fee, payout.fee),
        "integrator_fee": (share, payout.integrator_fee),
    }
    yield from _compared(payout, compared, payout_asset(order.direction).symbol)
    yield from _left_over(order, spent - swapped)


def _left_over(order: OrderEntry, due: int) -> Iterator[Difference]:
    """Compare the unswapped rest with the order's leftover and its refunds."""
    if any(d.state is DepositState.REMOVED for d in order.deposits):
        return  # deposits that are gone keep back what was left of them
    refunds = {
        t.transfer_id: t.units + t.fee
        for t in order.transfers
        if t.kind is TransferKind.REFUND and _counts(t)
    }
    whole = sum(d.units for d in order.deposits if d.transfer_id in refunds)
    found = sum(refunds.values()) - whole + order.leftover
    if found != due:
        yield Difference("leftover", order.order_id, str(due), str(found), _unit_in(order))


def _compared(
    transfer: TransferEntry, values: Mapping[str, tuple[int, int]], unit: str
) -> Iterator[Difference]:
    for kind, (due, found) in values.items():
        if due != found:
            yield _amounts(kind, transfer, due, found, unit)


def _amounts(
    kind: str, transfer: TransferEntry, expected: int, found: int, unit: str
) -> Difference:
    return Difference(kind, transfer.transfer_id, str(expected), str(found), unit)


def _unit_in(order: OrderEntry) -> str:
    return deposit_asset(order.direction).symbol


# --- its transfers on the chain --------------------------------------------------------------


class ChainCoverage(Struct, frozen=True):
    """The networks that were asked, and those of them with replaced blocks that nobody noted.

    ``tops``: the newest block of each. ``closed``: transfers that no chain shows as paid, since
    the operator says that they are.
    """

    networks: frozenset[str]
    stale: frozenset[str]
    tops: Mapping[str, int] = field(default_factory=dict)
    closed: frozenset[str] = frozenset()

    def has_waited(self, payment: PaymentEntry) -> bool:
        """Whether a payment has been off its chain for longer than a reorganisation takes."""
        top = self.tops.get(payment.network)
        return top is not None and payment.block is not None and top - payment.block > _LONG_BLOCKS


def transfer_differences(
    subject: str,
    transfers: Sequence[TransferEntry],
    payments: Mapping[str, PaymentEntry],
    seen: Mapping[str, Sighting],
    asked: ChainCoverage,
    pending: list[str],
) -> Iterator[Difference]:
    """Differences between transfers, of an order or a withdrawal, and the wallets and chains.

    What the chain may yet change is appended to ``pending``.
    """
    mined_payouts = 0
    for transfer in transfers:
        if transfer.network not in asked.networks:
            continue
        payment = payments.get(transfer.transfer_id)
        found = seen.get(transfer.transfer_id) if payment else None
        if transfer.transfer_id in asked.closed:
            yield from _closed(transfer, found)
            continue
        yield from _payment(transfer, payment)
        if found is None and transfer.network in asked.stale:
            pending.append(f"{transfer.transfer_id} may have been in a block that was replaced")
            continue
        if payment and found and found.block is None and asked.has_waited(payment):
            # It may look alive in the pool for as long as the node keeps it there.
            found = None
        yield from _on_chain(transfer, found, pending)
        is_mined = found is not None and found.block is not None and found.paid > 0
        mined_payouts += transfer.kind is TransferKind.PAYOUT and is_mined
    if mined_payouts > 1:
        yield Difference("paid_twice", subject, "at most 1", str(mined_payouts))


def _closed(transfer: TransferEntry, found: Sighting | None) -> Iterator[Difference]:
    """Yield a difference if a transfer that the operator has closed is paid on its chain."""
    if found is not None and found.block is not None and found.paid:
        unit = "XMR" if transfer.network == MONERO else "USDC"
        yield _amounts("paid_though_closed", transfer, 0, found.paid, unit)


def _payment(transfer: TransferEntry, payment: PaymentEntry | None) -> Iterator[Difference]:
    """Compare a transfer with the wallet's record of it."""
    if payment is None:
        if transfer.txid is not None:
            yield Difference("payment", transfer.transfer_id, transfer.txid, "no payment on record")
        return
    unit = "XMR" if payment.tx_key is not None else "USDC"
    if not same_address(payment.recipient, transfer.address):
        yield Difference("recipient", transfer.transfer_id, transfer.address, payment.recipient)
    if payment.units != transfer.units:
        yield _amounts("payment_units", transfer, transfer.units, payment.units, unit)
    if transfer.txid is not None and transfer.txid not in payment.txids[:1]:
        first = payment.txids[0] if payment.txids else "none"
        yield Difference("payment_txid", transfer.transfer_id, transfer.txid, first)


def _on_chain(
    transfer: TransferEntry, found: Sighting | None, pending: list[str]
) -> Iterator[Difference]:
    unit = "XMR" if transfer.network == MONERO else "USDC"
    settled = _is_settled(transfer)
    if found is None and settled:
        yield Difference(
            "not_on_chain", transfer.transfer_id, str(transfer.units), "0", unit,
            "it is published again by itself; if it stays away: rpcsvc payouts close"
            f" {transfer.transfer_id} --note TEXT",
        )  # fmt: skip
        return
    paid = 0 if found is None else found.paid
    due = transfer.units if _counts(transfer) else 0
    if _is_open(transfer, found) or (found is not None and found.block is None):
        pending.append(f"{transfer.transfer_id} is {transfer.state}")
    is_mined = found is not None and found.block is not None
    if is_mined and paid != due and (paid or settled):
        kind = "paid_on_chain" if _counts(transfer) else "paid_though_abandoned"
        yield _amounts(kind, transfer, due, paid, unit)


def _is_open(transfer: TransferEntry, found: Sighting | None) -> bool:
    """Return whether the order waits for the chain's last word."""
    return transfer.state.may_be_live or (found is not None and not transfer.state.is_final)
