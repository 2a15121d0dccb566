"""Views of orders for callers: ``data`` of create, execute and status.

``data.order`` has the draft order fields of spec 2.4 with amounts in atomic units, as over the BFF.
Fields for people beside it are decimal strings.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import msgspec
import orjson
from msgspec import UNSET, Raw, UnsetType

from rpcsvc import strict_json
from rpcsvc.clock import iso8601
from rpcsvc.domain import twap
from rpcsvc.domain.money import USDC, XMR, Asset, format_units
from rpcsvc.domain.order import (
    AGENT_STATE_OF,
    AWAITS_DEPOSIT,
    REFUND_ADDRESS,
    AgentState,
    Deposit,
    Order,
    OrderStatus,
    Report,
    Transfer,
    TransferState,
    TwapPlan,
)
from rpcsvc.domain.settle_times import ObservedTime
from rpcsvc.operations import models
from rpcsvc.operations.service import ViewContext, action
from rpcsvc.strict_json import Json

_LOCK_WARNING = (
    "The rate is locked until priceLockedUntil, which comes earlier if the market moves far. A"
    " deposit that is first seen later is swapped at the rate of that moment, or refunded if the"
    " result would be below minReceived."
)
_EXPIRED_WINDOW = "The deposit window is over. Don't send anything to this address any more."
_SIGN = (
    "If the user's wallet signs typed data: this call says what to sign, and takes the signed"
    " payment (x402). It costs the user no gas."
)
_SIGNED_PAYMENT = (
    "A signed payment of the order is under way. Don't send or sign anything else: its deposit"
    " shows here, or the order asks to be funded again."
)


def draft_fields(order: Order, now: int) -> dict[str, Any]:
    """The fields that an order has on every surface (spec 2.4).

    ``now`` in ms, for the time that its chunks still take.
    """
    terms = order.terms
    seen, exact = order.report or _own_report(order), terms.receive_amount
    return {
        "order_id": terms.order_id,
        "status": order.status,
        "deposit_address": terms.deposit_address,
        "deposit_token_symbol": terms.deposit_asset.symbol,
        "deposit_amount": str(terms.deposit_amount),
        "to_address": terms.to_address,
        "expected_output": str(terms.expected_output),
        "deposit_chain_id": 0 if terms.deposit_asset is XMR else terms.chain_id,
        "deposit_tx_hash": seen.deposit_txid,
        "actual_output": None if seen.output is None else str(seen.output),
        "error_message": order.error_message,
        "refund_tx_hash": seen.refund_txid,
        "created_at": iso8601(terms.created_at),
        "completed_at": iso8601(order.completed_at) if order.completed_at else None,
        "twap": twap_view(order, now),
        "receive_amount": UNSET if exact is None else str(exact),
    }


def observed_view(found: ObservedTime | None) -> models.ObservedTimeView | None:
    """``observedTime``, from measured settle times."""
    return None if found is None else models.ObservedTimeView(*found)


@lru_cache(maxsize=256)
def observed_json(found: ObservedTime | None) -> bytes:
    """``observedTime`` as JSON."""
    return strict_json.dumps(observed_view(found))


def may_fund(order: Order, now: int) -> bool:
    """Return whether the user may still send; the address is valid until ``expiresAt``."""
    awaits = order.status in AWAITS_DEPOSIT and order.due_units > 0
    return awaits and now < order.terms.expires_at


def order_view(views: ViewContext, order: Order, now: int, *, is_paying: bool) -> models.OrderView:
    """``data.order``."""
    # Show no address that must not be paid any more.
    attest = views.attest if may_fund(order, now) and not is_paying else None
    return models.OrderView(
        **draft_fields(order, now),
        expires_at=iso8601(order.terms.expires_at),
        refund_address=order.refund_to,
        price_locked_until=_price_locked_until(order),
        checkout_url=views.checkout_url(order.order_id),
        deadline_at=UNSET if order.deadline_at is None else iso8601(order.deadline_at),
        on_deadline=order.on_deadline or UNSET,
        attestation=UNSET if attest is None else attest(order.terms),
    )


def _price_locked_until(order: Order) -> str | None:
    """The end of the price lock; None for an order that an upstream settles."""
    return None if order.terms.upstream_id is not None else iso8601(order.price_locked_until)


def _own_report(order: Order) -> Report:
    """The report that an upstream would give, for an order that is settled here."""
    deposit = next((d for d in order.deposits if d.is_active), None)
    refund = next((t for t in reversed(order.refunds) if t.txid), None)
    payout = order.payout
    settled = payout is not None and payout.state is TransferState.SETTLED
    return Report(
        deposit_txid=deposit.key.txid if deposit else None,
        output=payout.units if payout and settled else None,
        refund_txid=mined_txid(refund) if refund else None,
    )


def funding_view(views: ViewContext, order: Order) -> models.FundingInstructions:
    """``data.fundingInstructions``: the amount still due, its address and its deadline."""
    terms = order.terms
    names = views.profile.names(terms.deposit_asset, terms.chain)
    amount = format_units(order.due_units, terms.deposit_asset)
    return models.FundingInstructions(
        deposit_address=terms.deposit_address,
        amount=amount,
        amount_display=f"{amount} {terms.deposit_asset.symbol}",
        asset=terms.deposit_asset.symbol,
        network=names.network,
        chain_id=names.chain_id,
        price_locked_until=_price_locked_until(order),
        expires_at=iso8601(terms.expires_at),
        payment_uri=_payment_uri(order, names.chain_id, names.token),
        warnings=_warnings(views, order, names.network),
    )


def _payment_uri(order: Order, chain_id: int, token: str | None) -> str:
    """A ``monero:`` URI, or an ``ethereum:`` one for an ERC-20 transfer (EIP-681)."""
    terms = order.terms
    if token is None:
        amount = format_units(order.due_units, terms.deposit_asset)
        return monero_uri(terms.deposit_address, amount)
    return (
        f"ethereum:{token}@{chain_id}/transfer"
        f"?address={terms.deposit_address}&uint256={order.due_units}"
    )


def monero_uri(address: str, amount: str) -> str:
    """A ``monero:`` URI for an amount in whole XMR."""
    return f"monero:{address}?tx_amount={amount}"


def _warnings(views: ViewContext, order: Order, network: str) -> list[str]:
    asset = order.terms.deposit_asset.symbol
    warnings = [
        f"Send exactly this amount of {asset}, on {network} only, before expiresAt.",
        *([] if order.terms.upstream_id else [_LOCK_WARNING]),
        "The address is for this order alone: don't send to it again later.",
        _refund_warning(order),
    ]
    if views.profile.is_simulated:
        warnings.insert(0, "Sandbox: simulated money. Never send real funds to this address.")
    return warnings


def _refund_warning(order: Order) -> str:
    """The warning about who gets a refund."""
    terms = order.terms
    if terms.refund_address is not None:
        return f"A refund goes to {terms.refund_address} and nowhere else. Check that it is yours."
    if terms.senders_can_be_refunded:
        return (
            "A refund goes back to the address that sent the money. If that is an exchange's, make"
            " a new order with refundAddress instead."
        )
    return (
        "This order has no refund address: whoever holds its sessionId decides where a refund goes."
        " Don't pay an order that somebody else made for you: make one with refundAddress, your"
        " own Monero address."
    )


def deposit_view(order: Order, deposit: Deposit) -> models.DepositView:
    """An entry of ``data.deposits``."""
    return models.DepositView(
        txid=deposit.key.txid,
        amount=format_units(deposit.units, order.terms.deposit_asset),
        status=deposit.state,
        first_seen_at=iso8601(deposit.first_seen_at),
        rate=None if deposit.rate is None else format_units(deposit.rate, USDC),
        use=_use(order, deposit),
    )


def _use(order: Order, deposit: Deposit) -> str:
    if deposit.is_dust:
        return "dust"
    transfer = order.transfer(deposit.transfer_id) if deposit.transfer_id else None
    return transfer.kind.value if transfer else "undecided"


def transfer_view(transfer: Transfer) -> models.TransferView:
    """An entry of ``data.transfers``."""
    return models.TransferView(
        kind=transfer.kind,
        address=transfer.address,
        amount=format_units(transfer.units, transfer.asset),
        asset=transfer.asset.symbol,
        status=transfer.state,
        txid=mined_txid(transfer),
    )


def mined_txid(transfer: Transfer) -> str | None:
    """The transaction that settled a transfer; before that, the first one signed."""
    if transfer.receipt is not None:
        return str(orjson.loads(transfer.receipt)["txid"])
    return transfer.txid


def _receipt(order: Order) -> models.ReceiptView | None:
    payout = order.payout
    if order.status is not OrderStatus.COMPLETED or payout is None or payout.receipt is None:
        return None
    return msgspec.json.decode(payout.receipt, type=models.ReceiptView)


def status_data(
    views: ViewContext, order: Order, now: int, *, is_paying: bool = False
) -> models.StatusResult:
    """``data`` of status, for anybody.

    ``is_paying``: a signed payment is under way, and nothing else is to be sent.
    """
    awaits = may_fund(order, now) and not is_paying
    due = format_units(order.due_units, order.terms.deposit_asset) if awaits else None
    return models.StatusResult(
        *views.common(),
        order=order_view(views, order, now, is_paying=is_paying),
        cursor=order.version,
        funding_instructions=funding_view(views, order) if awaits else None,
        amount_due=due,
        deposits=[deposit_view(order, d) for d in order.deposits],
        transfers=[
            transfer_view(t) for t in order.transfers if t.state is not TransferState.CANCELLED
        ],
        outcome=order.status if order.status.is_terminal else None,
        action_required=_action_required(order),
        receipt=_receipt(order),
    )


def _action_required(order: Order) -> str | None:
    return REFUND_ADDRESS if awaits_upstream_refund(order) else order.action_required


def status_actions(
    views: ViewContext, order: Order, now: int, *, is_paying: bool = False
) -> list[Json]:
    """``nextActions`` for an order's current state; ``is_paying`` as for ``status_data``."""
    state = AGENT_STATE_OF[order.status]
    actions = _actions_of_state(views, order, state, now, is_paying=is_paying)
    if _action_required(order) == REFUND_ADDRESS:
        actions.insert(0, _give_refund_address(order))
    return actions


def awaits_upstream_refund(order: Order) -> bool:
    """Return whether an upstream may wait for an XMR address: it reports only one it has."""
    is_going_back = order.status is OrderStatus.REFUNDING or _was_swapped_in_part(order.report)
    return is_going_back and order.refund_to is None and may_be_refunded_upstream(order)


def may_be_refunded_upstream(order: Order) -> bool:
    """Return whether an upstream may still use an address, also for deposits after the order's end.

    Its last report on a finished order may be old, because nobody polls it any more.
    """
    over = order.status.is_terminal or order.status is OrderStatus.REFUNDING
    terms = order.terms
    is_open = terms.upstream_id is not None and terms.refund_address is None
    return over and is_open and terms.deposit_asset is XMR


def _was_swapped_in_part(report: Report | None) -> bool:
    """Return whether a part of the deposit was not swapped, and nothing was sent back yet."""
    if report is None or report.extra is None or report.refund_txid is not None:
        return False
    return report.output is not None and orjson.loads(report.extra).get("status") == "failed"


def _actions_of_state(
    views: ViewContext, order: Order, state: AgentState, now: int, *, is_paying: bool
) -> list[Json]:
    poll = action(
        "poll_status",
        "Ask again until the state is completed or terminal_failure.",
        "swap.status",
        {"orderId": order.order_id},
    )
    if state is AgentState.COMPLETED:
        return [action("report_completed", "Tell the user that the payout has settled.")]
    if state is AgentState.TERMINAL_FAILURE:
        return [_open_ticket(order)]
    if order.status in AWAITS_DEPOSIT and order.due_units > 0:
        if is_paying:
            return [action("await_signed_payment", _SIGNED_PAYMENT), poll]
        return [*_funding_actions(views, order, now), poll, *_cancel_actions(order)]
    return [poll]


def _funding_actions(views: ViewContext, order: Order, now: int) -> list[Json]:
    if now >= order.terms.expires_at:
        return [action("stop_funding", _EXPIRED_WINDOW)]
    due = format_units(order.due_units, order.terms.deposit_asset)
    ask = action(
        "ask_user_to_fund",
        f"Ask the user to send {due} {order.terms.deposit_asset.symbol} to"
        f" {order.terms.deposit_address} before {iso8601(order.terms.expires_at)}.",
    )
    asks = [ask]
    if views.profile.takes_authorizations and order.terms.deposit_asset is USDC:
        asks.append(action("fund_by_signature", _SIGN, "swap.fund", {"orderId": order.order_id}))
    if not views.profile.is_simulated:
        return asks
    simulate = action(
        "simulate_deposit",
        "Sandbox only: send the amount that is due from a simulated user.",
        "sandbox.fund",
        {"orderId": order.order_id},
    )
    return [*asks, simulate]


def _cancel_actions(order: Order) -> list[Json]:
    """The action has no complete params: the status answer must not reveal the session."""
    if order.deposits or order.status is not OrderStatus.AWAITING_DEPOSIT:
        return []
    description = (
        "If the user does not want the swap any more, send swap.cancel with the orderId and the"
        " order's sessionId before anything is paid."
    )
    return [action("cancel_order", description)]


def _open_ticket(order: Order) -> Json:
    why = order.error_message or f"The order is {order.status.value}."
    return action(
        "create_support_ticket",
        f"Tell the user what happened, and open a ticket if they need help: {why}",
        "support.create",
        {"message": f"Order {order.order_id} is {order.status.value}. {why}",
         "orderId": order.order_id},
    )  # fmt: skip


def _give_refund_address(order: Order) -> Json:
    return action(
        "provide_refund_address",
        f"Ask the user for a {order.terms.deposit_asset.symbol} address for the refund and send it"
        " with swap.refundAddress as address, together with orderId and the order's sessionId."
        " It can't be changed afterwards.",
    )


def twap_view(order: Order, now: int) -> models.Twap | UnsetType:
    """The progress at ``now`` (ms) of an order that is swapped in chunks.

    It is the upstream's report on an order that it settles.
    """
    if order.report is not None and order.report.extra is not None:
        return msgspec.json.decode(order.report.extra, type=models.Twap)
    plan = order.terms.twap
    if plan is None:
        return UNSET
    asset = order.terms.deposit_asset
    total = _total(order)
    chunks = len(twap.chunks(order, total))
    return models.Twap(
        enabled=chunks >= twap.LEAST_CHUNKS,
        status=_status(order, chunks),
        chunks_completed=len(order.fills),
        chunks_total=chunks,
        filled_qty=_number(twap.swapped_units(order), asset),
        total_qty=_number(total, asset),
        chunk_size_usd=_number(plan.chunk_units, USDC),
        interval_ms=Raw(b"%d" % plan.interval_ms),
        estimated_time_remaining_ms=Raw(b"%d" % _remaining(order, plan, chunks, now)),
    )


def _total(order: Order) -> int:
    """Deposit units that are, were, or will be swapped if everything goes as agreed."""
    payout_id = order.payout.transfer_id if order.payout else None
    spent = sum(d.units for d in order.deposits if payout_id and d.transfer_id == payout_id)
    return spent or twap.total_of(order) or order.terms.deposit_amount


def _status(order: Order, chunks: int) -> str:
    if len(order.fills) == chunks and not _payout_failed(order):
        return "completed"
    if twap.is_filling(order):
        return "active"
    was_stopped = bool(order.fills) or order.status is OrderStatus.REFUNDING
    return "failed" if was_stopped or order.status.is_terminal else "pending"


def _payout_failed(order: Order) -> bool:
    return order.payout is not None and order.payout.state is TransferState.FAILED


def _remaining(order: Order, plan: TwapPlan, chunks: int, now: int) -> int:
    """Time until the last chunk in ms: the wait for the next one and an interval for each
    after it.
    """
    left = chunks - len(order.fills)
    if twap.is_filling(order):
        return max(0, twap.due_at(order) - now) + (left - 1) * plan.interval_ms
    waiting = _status(order, chunks) == "pending"
    return (left - 1) * plan.interval_ms if waiting else 0


def _number(units: int, asset: Asset) -> Raw:
    return Raw(format_units(units, asset).encode())
