"""Hints for an unrecorded transaction: the transfers of a restored database that it may have paid.

The proof is made by ``rpcsvc payouts adopt``, which asks the chain.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Final

from rpcsvc.audit.records import Books, OrderEntry, TransferEntry
from rpcsvc.domain.addresses import same_address
from rpcsvc.domain.order import TransferKind, TransferState

MOST_PARTS: Final = 15  # recipients of one Monero transaction, besides the change
# Both halves of so many amounts make 2^17 sums each: a fraction of a second.
MOST_AMOUNTS: Final = 34

Paid = Sequence[tuple[str, int]]
_ABANDONED = (TransferState.FAILED, TransferState.CANCELLED)


class TooMany(Exception):
    """More amounts than can be searched."""


def parts_of(total: int, amounts: Sequence[int]) -> tuple[int, ...] | None:
    """The indices of the fewest amounts that add up to ``total``; None when none do.

    At most MOST_PARTS of them. Raises TooMany when there are more than MOST_AMOUNTS to choose from.
    """
    usable = [index for index, amount in enumerate(amounts) if 0 < amount <= total]
    for count in (1, 2):
        for chosen in combinations(usable, count):
            if sum(amounts[index] for index in chosen) == total:
                return chosen
    if len(usable) > MOST_AMOUNTS:
        raise TooMany
    middle = len(usable) // 2
    left, right = _sums(usable[:middle], amounts), _sums(usable[middle:], amounts)
    found = [
        (*chosen, *right[total - part])
        for part, chosen in left.items()
        if total - part in right and len(chosen) + len(right[total - part]) <= MOST_PARTS
    ]
    return min(found, key=len) if found else None


def _sums(indices: Sequence[int], amounts: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """Return each sum that some of the amounts make, with the fewest that make it."""
    sums: dict[int, tuple[int, ...]] = {0: ()}
    for index in indices:
        more = {part + amounts[index]: (*chosen, index) for part, chosen in sums.items()}
        for part, chosen in more.items():
            if part not in sums or len(chosen) < len(sums[part]):
                sums[part] = chosen
    return sums


def unpaid_in(books: Books, network: str, txid: str, paid: Paid) -> list[TransferEntry]:
    """Return the open transfers whose address and units are among what the transaction paid.
    Excludes transfers that already have the transaction on record.
    """
    return [
        transfer
        for transfer in books.unsettled_transfers
        if transfer.network == network
        and not transfer.state.is_final
        and txid not in books.signed.get((network, transfer.transfer_id), ())
        and _is_in(transfer, paid)
    ]


def hint(books: Books, network: str, txid: str, paid: Paid, units: int) -> str:
    """A guess at the transaction, and what to do; empty when nothing on record resembles it.

    ``paid`` is empty when a wallet has forgotten whom it paid ``units`` to.
    """
    if found := may_pay(books, network, txid, paid, units):
        names = " or ".join(item.transfer_id for item in found)
        adopt = f"rpcsvc payouts adopt {found[0].transfer_id} {txid}"
        if paid:
            return f"looks like the payment of transfer {names}: adopt it with: {adopt}"
        return _forgotten(found, txid, units, adopt)
    return next(_less_alike(books, network, paid), "")


def may_pay(books: Books, network: str, txid: str, paid: Paid, units: int) -> list[TransferEntry]:
    """Return the open transfers that a transaction may have paid.

    For a wallet that was restored from its words, only the amount tells, less what was closed with
    the transaction: all open transfers where it can't rule one out.
    """
    if paid:
        return unpaid_in(books, network, txid, paid)
    transfers = [
        item
        for item in books.unsettled_transfers
        if item.network == network and (network, item.transfer_id) not in books.signed
    ]
    unpaid = [item for item in transfers if not item.state.is_final]
    units -= sum(item.units for item in transfers if item.txid == txid)
    if alike := [item for item in unpaid if item.units == units]:
        return alike
    try:
        parts = parts_of(units, [item.units for item in unpaid])
    except TooMany:
        return [item for item in unpaid if item.units <= units]
    return [unpaid[index] for index in parts or ()]


def _forgotten(found: Sequence[TransferEntry], txid: str, units: int, adopt: str) -> str:
    """Advice on a transaction of a wallet that has forgotten whom it paid."""
    names = " and ".join(item.transfer_id for item in found)
    close = " ".join(
        f"rpcsvc payouts close {item.transfer_id} {txid} --note TEXT;" for item in found
    )
    if all(item.units == units for item in found):
        what = f"pays as much as transfer {' or '.join(item.transfer_id for item in found)} is for"
    elif sum(item.units for item in found) == units:
        what = f"pays as much as transfers {names} are for together"
    else:
        what = f"may pay any of the {len(found)} transfers that are open: too many to tell"
    return (
        f"{what}, to whom the wallet has forgotten: without its key, ask who was paid, and close"
        " what was:"
        f" {close} with its key adopt it: {adopt} --tx-key KEY"
    )


def _less_alike(books: Books, network: str, paid: Paid) -> Iterator[str]:
    addresses = [address for address, _ in paid]
    for order, transfer in _transfers(books, network):
        if transfer.state in _ABANDONED and _is_in(transfer, paid) and not order.is_over:
            yield (
                f"looks like the payment of transfer {transfer.transfer_id}, which was abandoned"
                " since: do not resume payouts before its order's refund is settled by hand"
            )
    for order, transfer in _transfers(books, network):
        if not transfer.state.is_final and _is_one_of(transfer.address, addresses):
            yield (
                f"pays the address of transfer {transfer.transfer_id} of {order.order_id}, not"
                f" its {transfer.units} units: do not resume payouts before this is settled by hand"
            )
    for order in books.unsettled:
        no_payout = all(item.kind is not TransferKind.PAYOUT for item in order.transfers)
        is_here = order.payout_network == network and _is_one_of(order.to_address, addresses)
        if no_payout and is_here and not order.is_over:
            yield (
                f"pays the address of {order.order_id}, which has no payout yet: with payouts"
                " paused, let the service find its deposit, then audit again"
            )


def _transfers(books: Books, network: str) -> Iterator[tuple[OrderEntry, TransferEntry]]:
    for order in books.unsettled:
        for transfer in order.transfers:
            if transfer.network == network:
                yield order, transfer


def _is_in(transfer: TransferEntry, paid: Paid) -> bool:
    return any(
        units == transfer.units and same_address(address, transfer.address)
        for address, units in paid
    )


def _is_one_of(address: str, addresses: Sequence[str]) -> bool:
    return any(same_address(address, each) for each in addresses)
