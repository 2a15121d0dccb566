"""Orders, their terms, deposits and events."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st
from msgspec.structs import replace

from rpcsvc.domain import events as ev
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.order import (
    DepositKey,
    Order,
    Terms,
    Timeouts,
    TwapPlan,
)
from rpcsvc.domain.pricing import Direction, Price
from rpcsvc.store.changes import Change, HistoryEntry, StatusView, StoredResponse

NOW = 1_000_000
HOUR = 3_600_000
XMR_UNIT = 10**12
TIMEOUTS = Timeouts(late_window=HOUR // 4, confirm=24 * HOUR, prepare=900_000,
                    payout_check=600_000, refund_reminder=7 * 24 * HOUR)  # fmt: skip


def terms(direction: Direction = Direction.XMR_TO_USDC, twap_plan: TwapPlan | None = None) -> Terms:
    price = Price(rate=165_000_000, spread_bps=50, payout_fee=1_000, min_received_bps=9_900)
    to_usdc = direction is Direction.XMR_TO_USDC
    amount = XMR_UNIT if to_usdc else 150_000_000
    return Terms(
        order_id="ord_1",
        session_id="s",
        direction=direction,
        chain="arbitrum",
        chain_id=42161,
        deposit_network="monero" if to_usdc else "arbitrum",
        payout_network="arbitrum" if to_usdc else "monero",
        deposit_address="deposit here",
        to_address="pay here",
        deposit_amount=amount,
        expected_output=price.output(direction, amount),
        min_received=price.min_received(direction, amount),
        min_deposit=amount // 10,
        max_deposit=amount * 10,
        price=price,
        refund_fee=amount // 1000,
        created_at=NOW,
        expires_at=NOW + HOUR,
        timeouts=TIMEOUTS,
        twap=twap_plan,
    )


IN_CHUNKS = TwapPlan(chunk_units=40_000_000, interval_ms=1_000)


def key(n: int) -> DepositKey:
    return DepositKey("network", f"tx{n}", 0)


# --- random events ---------------------------------------------------------------------------

Draw = Callable[[st.SearchStrategy[int]], int]


def random_event(draw: Draw, order: Order, now: int, fresh: int) -> ev.Event:
    """A random event for the order, which the machine may have to refuse."""
    deposits = [d.key for d in order.deposits] or [key(0)]
    transfers = [t.transfer_id for t in order.transfers] or ["ord_1/payout/1"]
    deposit = deposits[draw(st.integers(0, len(deposits) - 1))]
    transfer = transfers[draw(st.integers(0, len(transfers) - 1))]
    units = max(
        1, order.terms.deposit_amount * draw(st.sampled_from([0, 5, 9, 50, 100, 300, 2000])) // 100
    )
    choices: list[ev.Event] = [
        ev.DepositSeen(key(fresh), units, "sender" if draw(st.integers(0, 1)) else None, now),
        ev.DepositSeen(deposit, units, None, now),
        ev.DepositConfirmed(deposit),
        ev.DepositConfirmed(deposit),
        ev.DepositRemoved(deposit),
        ev.Repriced(draw(st.sampled_from([1, 120_000_000, 165_000_000, 200_000_000]))),
        ev.RefundAddressGiven(f"refund here {draw(st.integers(0, 2))}"),
        ev.TransferPrepared(transfer, f"id of {transfer}", "00"),
        ev.TransferPublished(transfer),
        ev.TransferUnknown(transfer, "lost"),
        ev.TransferSettled(transfer),
        ev.TransferFailed(transfer, "reverted"),
    ]
    if order.terms.twap is not None:
        index = len(order.fills) - draw(st.sampled_from([0, 0, 0, 1]))
        rate = draw(st.sampled_from([120_000_000, 164_500_000, 165_000_000, 166_000_000]))
        choices += [ev.ChunkFilled(index, rate)] * 4 + [ev.FillingStopped(index)]
    if order.deadline_at is not None and now >= order.deadline_at:
        choices.append(ev.DeadlinePassed())
    return choices[draw(st.integers(0, len(choices) - 1))]


VIEW = StatusView(b'{"view":1}', NOW + 1000)


def fresh(number: int = 1) -> Order:
    agreed = replace(terms(), order_id=f"ord_{number}", deposit_address=f"address {number}")
    return open_order(agreed)


def created(order: Order, response: StoredResponse | None = None) -> Change:
    entry = HistoryEntry(1, NOW, "OrderCreated", order.status.value, {})
    return Change(order=order, view=VIEW, is_new=True, history=entry, response=response)


def response(key: str) -> StoredResponse:
    return StoredResponse("public", key, "swap.create", {"amount": "1"}, b'{"ok":true}', NOW)
