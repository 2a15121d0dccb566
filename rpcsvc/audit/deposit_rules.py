"""The rules for deposits: what the chain shows at an order's address is on it, and nothing else.

A deposit is compared by transaction, address, units and sender, each as often as it occurs. What
the service has not looked at yet, or is not deep enough, is pending. What does not live here: what
deposits were spent on (order_rules.py).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from rpcsvc.audit.order_rules import write_off
from rpcsvc.audit.records import (
    Arrival,
    DepositEntry,
    Difference,
    EvmFacts,
    MoneroFacts,
    OrderEntry,
    Watched,
)
from rpcsvc.domain.order import LIVE_TRANSFERS, DepositState, TransferState
from rpcsvc.domain.pricing import deposit_asset

# States of a transfer that has, or may have, spent the deposits it was planned for.
_SPENT: Final = LIVE_TRANSFERS | {TransferState.SETTLED}


@dataclass(frozen=True, slots=True)
class Shown:
    """The arrivals of one network, by address in lower case.

    Those in blocks up to ``due`` must be confirmed on their orders. ``stale``: the service has not
    seen yet that blocks were replaced, and may have on record what was in them.
    """

    arrivals: Mapping[str, list[Arrival]]
    due: int
    stale: bool


def shown(
    facts: MoneroFacts | EvmFacts, arrivals: Iterable[Arrival], watched: Watched | None
) -> Shown:
    """What is due is as deep as needed, seen from the last block that the service looked at."""
    by_address: dict[str, list[Arrival]] = defaultdict(list)
    for arrival in arrivals:
        by_address[_key(arrival.address)].append(arrival)
    if watched is None or facts.stale:
        return Shown(by_address, -1, stale=True)
    return Shown(by_address, min(facts.top, watched.upto) + 1 - facts.deposit_depth, stale=False)


def deposit_differences(
    order: OrderEntry, chain: Shown, pending: list[str], written_off: Collection[str] = ()
) -> Iterator[Difference]:
    """Where the order's deposits and its address on the chain do not agree.

    ``written_off``: transactions of this network that the operator has explained.
    """
    arrivals: dict[str, list[Arrival]] = defaultdict(list)
    for arrival in chain.arrivals.get(_key(order.deposit_address), ()):
        arrivals[arrival.txid].append(arrival)
    deposits: dict[str, list[DepositEntry]] = defaultdict(list)
    for deposit in order.deposits:
        is_lost = deposit.txid not in arrivals and _is_spent(order, deposit)
        if not (is_lost and deposit.txid in written_off):
            deposits[deposit.txid].append(deposit)
    unit = deposit_asset(order.direction).symbol
    if not chain.stale:
        yield from _unmined(order, arrivals, unit)
    for txid in sorted({*arrivals, *deposits}):
        yield from _of_one_transaction(
            chain, order, txid, arrivals.get(txid, []), deposits.get(txid, []), pending
        )


def _unmined(
    order: OrderEntry, arrivals: Mapping[str, list[Arrival]], unit: str
) -> Iterator[Difference]:
    """Deposits that were paid out for, and that a deep reorganisation put back into the pool."""
    for deposit in order.deposits:
        if not _is_spent(order, deposit):
            continue
        if any(item.block is None for item in arrivals.get(deposit.txid, ())):
            yield Difference("deposit_unmined", deposit.txid, str(deposit.units), "0", unit)


def _is_spent(order: OrderEntry, deposit: DepositEntry) -> bool:
    spent_on = order.transfer(deposit.transfer_id) if deposit.transfer_id else None
    return spent_on is not None and spent_on.state in _SPENT


def _of_one_transaction(
    chain: Shown,
    order: OrderEntry,
    txid: str,
    arrivals: list[Arrival],
    deposits: list[DepositEntry],
    pending: list[str],
) -> Iterator[Difference]:
    """Pair what is equal; judge what is left over on either side."""
    unit = deposit_asset(order.direction).symbol
    left = list(arrivals)
    odd: list[DepositEntry] = []
    for deposit in deposits:
        same = next((item for item in left if _same(item, deposit)), None)
        if same is None:
            odd.append(deposit)
            continue
        left.remove(same)
        yield from _judge(chain, same, deposit, unit, pending)
    claimed = [item for item in odd if item.state is DepositState.CONFIRMED]
    yield from _unmatched(chain, order, txid, left, claimed, pending)
    pending.extend(f"deposit {txid} is {item.state}" for item in odd if _is_open(item))


def _is_open(deposit: DepositEntry) -> bool:
    return deposit.state is DepositState.SEEN


def _unmatched(
    chain: Shown,
    order: OrderEntry,
    txid: str,
    left: list[Arrival],
    claimed: list[DepositEntry],
    pending: list[str],
) -> Iterator[Difference]:
    unit = deposit_asset(order.direction).symbol
    for arrival, deposit in zip(left, claimed, strict=False):
        if arrival.units != deposit.units:
            yield Difference("deposit_units", txid, str(arrival.units), str(deposit.units), unit)
        else:
            yield Difference(
                "deposit_sender", txid, arrival.sender or "none", deposit.sender or "none"
            )
    for deposit in claimed[len(left) :]:
        if chain.stale:
            pending.append(f"deposit {txid} was in a block that was replaced")
        else:
            told = write_off(order.deposit_network, txid) if _is_spent(order, deposit) else ""
            yield Difference("deposit_not_on_chain", txid, "0", str(deposit.units), unit, told)
    for arrival in left[len(claimed) :]:
        if _is_due(chain, arrival):
            yield Difference("deposit_missing", txid, str(arrival.units), "0", unit)
        else:
            pending.append(f"deposit {txid} is not on its order yet")


def _judge(
    chain: Shown, arrival: Arrival, deposit: DepositEntry, unit: str, pending: list[str]
) -> Iterator[Difference]:
    if deposit.state is DepositState.CONFIRMED:
        if arrival.block is None:
            pending.append(f"deposit {deposit.txid} waits to be mined again")
    elif _is_due(chain, arrival):
        yield Difference(
            "deposit_not_credited", deposit.txid, str(arrival.units), deposit.state.value, unit
        )
    else:
        pending.append(f"deposit {deposit.txid} is {deposit.state}")


def _is_due(chain: Shown, arrival: Arrival) -> bool:
    return arrival.block is not None and arrival.block <= chain.due and not arrival.timelocked


def _same(arrival: Arrival, deposit: DepositEntry) -> bool:
    if arrival.units != deposit.units:
        return False
    return _key(arrival.sender or "") == _key(deposit.sender or "")


def _key(address: str) -> str:
    """EVM addresses are the same in any case; Monero's are not."""
    return address.lower() if address.startswith("0x") else address
