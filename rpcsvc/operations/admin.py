"""The admin methods of the running service, over its UNIX socket only.

An answer is a plain JSON object. A request that the current state forbids is answered with
``refused`` and the reason; a wrong input is an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

import orjson
import structlog

from rpcsvc.clock import iso8601
from rpcsvc.domain.addresses import parse_evm_address, parse_monero_address
from rpcsvc.domain.money import USDC, XMR, format_units
from rpcsvc.domain.order import (
    FINAL_TRANSFERS,
    REFUND_ADDRESS,
    REFUND_BLOCKED,
    OnDeadline,
    Order,
    TransferKind,
    TransferState,
)
from rpcsvc.domain.refunds import waiting_units
from rpcsvc.domain.withdrawals import is_withdrawal
from rpcsvc.errors import InputError, InvalidInput
from rpcsvc.logs import shorten_addresses
from rpcsvc.operations import session
from rpcsvc.operations.admin_models import (
    AdminOutcome,
    AdminResult,
    AdminTicket,
    AdminTransfer,
    AnnotationParams,
    AnnotationResult,
    AttemptView,
    ClaimParams,
    Closed,
    ClosedClaim,
    ClosedTicket,
    DoubtList,
    DoubtView,
    FeesReport,
    FeesView,
    OneTicket,
    RefundParams,
    RefundView,
    TicketHead,
    TicketList,
    TicketParams,
    TransactionParams,
    TransferDetails,
    TransferList,
    TransferParams,
    TransfersParams,
    TreasuryPlan,
    TreasuryView,
)
from rpcsvc.operations.params import NoParams, Params, SupportParams
from rpcsvc.operations.service import Call, Effect, Flat, Operation, Service
from rpcsvc.orders.ports.operator import Treasury
from rpcsvc.store.operator_books import BookedTransfer, OperatorBooks, Signed

PENDING: Final = tuple(state for state in TransferState if state not in FINAL_TRANSFERS)


def receipt_of(item: BookedTransfer) -> dict[str, Any] | None:
    """The receipt that proves a transfer."""
    return None if item.receipt is None else dict(orjson.loads(item.receipt))


def next_of(item: BookedTransfer, signed: Sequence[Signed], paused: str | None) -> str:
    """The next step of a transfer, in words."""
    off_chain = _off_chain(item, signed)
    if off_chain is not None:
        return off_chain
    if item.state.is_final:
        return _ended(item)
    if paused is not None and item.state is not TransferState.PUBLISHED:
        return f"nothing while payouts are paused{_cancellation(item)}"
    return f"{_NEXT[item.state]}{_cancellation(item)}"


def is_blocked(item: BookedTransfer) -> bool:
    """Whether the transfer is a refund that the agreed refund address refused."""
    failed = item.state is TransferState.FAILED and item.kind == TransferKind.REFUND.value
    return failed and item.action_required == REFUND_BLOCKED


def _off_chain(item: BookedTransfer, signed: Sequence[Signed]) -> str | None:
    """The next step for a settled transfer that a reorganisation removed from its chain."""
    is_settled = item.state is TransferState.SETTLED and bool(signed)
    if not is_settled or any(each.block is not None for each in signed):
        return None
    return (
        "a reorganisation took it off its chain, and the same bytes are published again; if health"
        f" names it for hours: rpcsvc payouts close {item.transfer_id} --note TEXT"
    )


def _cancellation(item: BookedTransfer) -> str:
    """Says when an unsigned payout is cancelled."""
    is_payout = item.kind == TransferKind.PAYOUT.value
    waits = item.state is TransferState.PLANNED and item.on_deadline is OnDeadline.REFUND
    if not (is_payout and waits and item.deadline_at is not None):
        return ""
    return f"; if it is not signed by {iso8601(item.deadline_at)}, the order is refunded"


def _ended(item: BookedTransfer) -> str:
    if item.state is TransferState.SETTLED:
        return "nothing: it is paid, and its network calls it final"
    if item.state is TransferState.CANCELLED:
        return "nothing: it was cancelled before it was signed, and the deposit is refunded"
    if is_blocked(item):
        again = f"rpcsvc payouts retry {item.transfer_id}"
        return f"the agreed refund address refused it; to try once more: {again}"
    if item.action_required is not None:
        return f"waits for an address: rpcsvc refund {item.order_id} --to ADDRESS"
    return "nothing for this one: what it was to pay goes back by a refund of the order"


_NEXT: Final = {
    TransferState.PLANNED: "it is signed as soon as its wallet can; tried again within a minute",
    TransferState.PREPARED: "the signed bytes are published",
    TransferState.PUBLISHED: "its network is asked until the transaction is deep enough",
    TransferState.UNKNOWN: (
        "its network is asked for the transaction; if it is not there, the same bytes are"
        " published again"
    ),
}


log = structlog.get_logger(__name__)

PREFIX: Final = "admin."
_ASSETS: Final = {asset.symbol: asset for asset in (XMR, USDC)}
# The states by which transfers can be listed.
STATES: Final[Mapping[str, tuple[TransferState, ...]]] = {
    "pending": PENDING,
    "all": tuple(TransferState),
    **{state.value: (state,) for state in TransferState},
}

# --- the handlers ------------------------------------------------------------------------------


class Admin:
    """The handlers over the records of the running service.

    ``retry``: whether a transfer waited, or its order's refused refund, and goes on now.
    ``paused``: why payouts are paused, None if they are not.
    """

    def __init__(
        self,
        books: OperatorBooks,
        retry: Callable[[str], Awaitable[bool]],
        paused: Callable[[], str | None],
    ) -> None:
        self._books = books
        self._retry = retry
        self._paused = paused

    # --- payouts and refunds -------------------------------------------------------------------

    async def list_transfers(self, _service: Service, params: TransfersParams, _call: Call) -> Flat:
        """Payouts and refunds, the newest first. Raises InvalidInput."""
        states = STATES.get(params.state)
        if states is None:
            raise InvalidInput(
                f"state must be one of {', '.join(STATES)}.", field="state", received=params.state
            )
        paused = self._paused()
        found = await self._books.transfers(states, params.limit)
        views = []
        for item in found:
            views.append(await self._view(item, paused, full=params.full))
            await asyncio.sleep(0)  # there may be thousands, and the service has other work
        return TransferList(paused=paused, transfers=views).flat()

    async def show_transfer(self, service: Service, params: TransferParams, _call: Call) -> Flat:
        """Everything about one payout or refund. Raises InvalidInput."""
        item = await self._find(service, params.transfer_id)
        paused = self._paused()
        view = await self._view(item, paused, full=params.full)
        details = TransferDetails(**dict(view), receipt=receipt_of(item), paused=paused)
        return details.flat()

    async def retry_transfer(self, service: Service, params: TransferParams, _call: Call) -> Flat:
        """Retry a pending transfer now instead of after its pause. Raises InvalidInput."""
        wanted = params.transfer_id
        item = await self._find(service, wanted)
        paused = self._paused()
        if item.state.is_final and not is_blocked(item):
            return _refused(
                f"{wanted} is {item.state.value}, which is final: {next_of(item, [], paused)}."
            )
        if paused is not None:
            return _refused(f"Payouts are paused ({paused}): first rpcsvc payouts resume")
        waited = await self._retry(wanted)
        log.info("transfer_retried", transfer_id=wanted[:80], waited=waited)
        return AdminOutcome().flat()

    async def _find(self, service: Service, wanted: str) -> BookedTransfer:
        found = await self._books.transfer(wanted)
        if found is not None:
            return found
        if is_withdrawal(wanted):
            raise InvalidInput(
                f"{wanted[:80]} is the id of a withdrawal, which the service carries out by itself:"
                " rpcsvc treasury withdrawals",
                field="transferId",
            )
        order = await service.store.order(wanted)
        if order is None:
            raise InvalidInput(
                f"There is no transfer {wanted[:80]}. They are listed by: rpcsvc payouts list",
                field="transferId",
            )
        names = ", ".join(item.transfer_id for item in order.transfers) or "none"
        raise InvalidInput(f"{wanted} is an order; its transfers: {names}", field="transferId")

    async def _view(self, item: BookedTransfer, paused: str | None, *, full: bool) -> AdminTransfer:
        signed = await self._books.signed(item.transfer_id)
        asset = _ASSETS[item.asset]
        return AdminTransfer(
            transfer_id=item.transfer_id,
            order_id=item.order_id,
            order_status=item.order_status.value,
            kind=item.kind,
            state=item.state.value,
            amount=f"{format_units(item.units, asset)} {asset.symbol}",
            units=str(item.units),
            network=item.network,
            address=item.address if full else shorten_addresses(item.address),
            txid=next((each.txid for each in signed if each.block is not None), item.txid),
            attempts=[
                AttemptView(
                    txid=each.txid,
                    at=iso8601(each.made_at),
                    wallet=each.wallet_state,
                    block=each.block,
                )
                for each in signed
            ],
            since=iso8601(item.since),
            reason=item.reason,
            next=next_of(item, signed, paused),
        )

    # --- refund addresses ----------------------------------------------------------------------

    async def preview_refund(self, service: Service, params: RefundParams, _call: Call) -> Flat:
        """The refund that would be made, and its address. Raises InvalidInput."""
        return (await self._refund(service, params))[1].flat()

    async def set_refund(self, service: Service, params: RefundParams, call: Call) -> Flat:
        """Set the address that an order's deposit goes back to. Raises InvalidInput.

        It is the event that the order's owner causes by a support request.
        """
        order, view = await self._refund(service, params)
        request = SupportParams.model_validate(
            {
                "message": "The operator set the refund address.",
                "category": "operator",
                "orderId": order.order_id,
                "sessionId": order.terms.session_id,
                "walletAddress": view.address,
            }
        )
        answer = await session.create_ticket(service, request, call)
        given = answer.data.get("refundAddress")
        if not given or not given["accepted"]:
            view.refused = "the order does not wait any more"
        return view.flat()

    async def _refund(self, service: Service, params: RefundParams) -> tuple[Order, RefundView]:
        order = await _waiting_order(service, params.order_id)
        address = _address(service, order, params.address)
        if await self._books.is_own_address(address):
            raise InvalidInput("--to: that is an address of the service itself.", field="address")
        asset = order.terms.deposit_asset
        amount = f"{format_units(waiting_units(order), asset)} {asset.symbol}"
        return order, RefundView(order_id=order.order_id, amount=amount, address=address)

    # --- integrators, claims, tickets ----------------------------------------------------------

    async def report_fees(self, _service: Service, _params: NoParams, _call: Call) -> Flat:
        """What integrators have earned by settled payouts."""
        rows = [
            FeesView(
                integrator=each.integrator,
                asset=each.asset,
                amount=format_units(each.units, _ASSETS[each.asset]),
                payouts=each.payouts,
            )
            for each in await self._books.integrator_fees()
        ]
        return FeesReport(fees=rows).flat()

    async def list_doubts(self, _service: Service, _params: NoParams, _call: Call) -> Flat:
        """Upstream orders that may have been made."""
        rows = [
            DoubtView(**{**each._asdict(), "created_at": iso8601(each.created_at)})
            for each in await self._books.doubts()
        ]
        return DoubtList(in_doubt=rows).flat()

    async def close_claim(self, service: Service, params: ClaimParams, _call: Call) -> Flat:
        """End a claim that was looked up. Raises InvalidInput when it is not in doubt."""
        note = _words(params.note, "--note must say what was found: no other record of it is kept.")
        reason = f"closed by the operator at {iso8601(service.clock.now_ms())}: {note}"
        if not await self._books.close_claim(params.order_id, reason):
            raise InvalidInput(
                f"no upstream order {params.order_id[:60]} is in doubt. rpcsvc relays lists those;"
                " one whose call is still under way can't be closed.",
                field="orderId",
            )
        return Closed(closed=ClosedClaim(order_id=params.order_id, reason=reason)).flat()

    async def list_tickets(self, _service: Service, _params: NoParams, _call: Call) -> Flat:
        """All tickets without their messages, oldest first."""
        rows = [
            TicketHead(**{k: v for k, v in dict(each).items() if k != "message"})
            for each in await self._tickets()
        ]
        return TicketList(tickets=rows).flat()

    async def show_ticket(self, _service: Service, params: TicketParams, _call: Call) -> Flat:
        """One ticket with its message. Raises InvalidInput."""
        for each in await self._tickets():
            if each.ticket_id == params.ticket_id:
                return OneTicket(ticket=each).flat()
        raise _no_ticket(params.ticket_id)

    async def close_ticket(self, _service: Service, params: TicketParams, _call: Call) -> Flat:
        """Delete a ticket that was dealt with. Raises InvalidInput."""
        if not await self._books.close_ticket(params.ticket_id):
            raise _no_ticket(params.ticket_id)
        return Closed(closed=ClosedTicket(ticket_id=params.ticket_id)).flat()

    async def _tickets(self) -> list[AdminTicket]:
        return [
            AdminTicket(**{**each._asdict(), "created_at": iso8601(each.created_at)})
            for each in await self._books.tickets()
        ]


def _refused(reason: str) -> Flat:
    return AdminOutcome(refused=reason).flat()


def _words(text: str, otherwise: str) -> str:
    """A note as one line. Raises InvalidInput for an empty one."""
    note = " ".join(text.split())
    if not note:
        raise InvalidInput(otherwise, field="note")
    return note


def _no_ticket(ticket_id: str) -> InvalidInput:
    return InvalidInput(
        f"there is no ticket {ticket_id[:60]}. rpcsvc tickets list names them all.",
        field="ticketId",
    )


async def _waiting_order(service: Service, order_id: str) -> Order:
    """The order. Raises InvalidInput when it does not wait for a refund address."""
    order = await service.store.order(order_id)
    if order is None:
        raise InvalidInput(f"There is no order {order_id[:80]}.", field="orderId")
    if order.action_required == REFUND_ADDRESS:
        return order
    refunds = ", ".join(f"{item.transfer_id} ({item.state.value})" for item in order.refunds)
    if order.terms.refund_address is not None:
        raise InvalidInput(
            f"{order_id} was made with the refund address {order.terms.refund_address}: its"
            " refunds go there and nowhere else. To try one that failed again: rpcsvc payouts"
            f" retry TRANSFER. Its refunds: {refunds or 'none'}.",
            field="orderId",
        )
    raise InvalidInput(
        f"{order_id} is {order.status.value} and does not wait for a refund address."
        f" Its refunds: {refunds or 'none'}. An address that was given is not changed.",
        field="orderId",
    )


def _address(service: Service, order: Order, text: str) -> str:
    """The address, normalised, of the deposit's network. Raises InvalidInput."""
    try:
        if order.terms.senders_can_be_refunded:
            contracts = service.chains.token_contracts
            return parse_evm_address(text, field="--to", forbidden=contracts)
        return parse_monero_address(text, field="--to", networks=service.monero_networks).text
    except InputError as error:
        raise InvalidInput(f"--to: {error.message}", field="address") from error


# --- the table ---------------------------------------------------------------------------------


def admin_operations(admin: Admin) -> tuple[Operation, ...]:
    """The methods that every service has."""
    return (
        admin_row("payouts.list", TransfersParams, TransferList, admin.list_transfers),
        admin_row("payouts.show", TransferParams, TransferDetails, admin.show_transfer),
        admin_row(
            "payouts.retry", TransferParams, AdminOutcome, admin.retry_transfer, Effect.MOVES_MONEY
        ),
        admin_row("refunds.preview", RefundParams, RefundView, admin.preview_refund),
        admin_row("refunds.set", RefundParams, RefundView, admin.set_refund, Effect.MOVES_MONEY),
        admin_row("integrators.report", NoParams, FeesReport, admin.report_fees),
        admin_row("relays.list", NoParams, DoubtList, admin.list_doubts),
        admin_row("relays.close", ClaimParams, Closed, admin.close_claim, Effect.WRITE),
        admin_row("tickets.list", NoParams, TicketList, admin.list_tickets),
        admin_row("tickets.show", TicketParams, OneTicket, admin.show_ticket),
        admin_row("tickets.close", TicketParams, Closed, admin.close_ticket, Effect.WRITE),
    )


def treasury_operations(treasury: Treasury) -> tuple[Operation, ...]:
    """The methods of a service with wallets of its own."""

    async def show(_service: Service, _params: NoParams, _call: Call) -> Flat:
        """The wallets' holdings, and the amounts reserved, owed, swept and spent on fees."""
        return TreasuryView.model_validate(await treasury.view()).flat()

    async def plan(_service: Service, _params: NoParams, _call: Call) -> Flat:
        """The inventory of each network beside its target, and the moves that would reach it."""
        return TreasuryPlan.model_validate(await treasury.plan()).flat()

    async def annotate(_service: Service, params: AnnotationParams, _call: Call) -> Flat:
        """Annotate a transaction that was made by hand."""
        given = (params.network, params.txid, params.note, params.internal_wei)
        return AnnotationResult(**(await treasury.annotate(*given))._asdict()).flat()

    async def remove(_service: Service, params: TransactionParams, _call: Call) -> Flat:
        """Remove an annotation."""
        done = await treasury.remove_annotation(params.network, params.txid)
        return AnnotationResult(**done._asdict()).flat()

    return (
        admin_row("treasury.show", NoParams, TreasuryView, show),
        admin_row("treasury.plan", NoParams, TreasuryPlan, plan),
        admin_row("treasury.annotate", AnnotationParams, AnnotationResult, annotate, Effect.WRITE),
        admin_row("treasury.unannotate", TransactionParams, AnnotationResult, remove, Effect.WRITE),
    )


def admin_row(
    name: str,
    params: type[Params],
    result: type[AdminResult],
    handler: Callable[[Service, Any, Call], Awaitable[Flat]],
    effect: Effect = Effect.READ,
) -> Operation:
    """The row of an admin method, whose summary is the handler's docstring."""
    summary = (handler.__doc__ or "").partition("\n")[0].partition(" Raises")[0]
    return Operation(PREFIX + name, summary, params, result, handler, effect)
