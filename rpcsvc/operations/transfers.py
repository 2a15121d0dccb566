"""The admin methods of payouts and refunds: lists them, tries again, sets refund addresses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any, Final, Literal

import orjson
import structlog
from pydantic import Field

from rpcsvc.clock import iso8601
from rpcsvc.domain.addresses import parse_evm_address, parse_monero_address
from rpcsvc.domain.money import ASSETS, format_units
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
from rpcsvc.errors import InvalidInput
from rpcsvc.logs import shorten_addresses
from rpcsvc.operations import support
from rpcsvc.operations.admin import MOST_LISTED, admin_row
from rpcsvc.operations.params import Params, SupportParams
from rpcsvc.operations.service import Call, Cli, Confirmation, Effect, Flat, Service
from rpcsvc.store.operator_books import BookedTransfer, OperatorBooks, Signed
from rpcsvc.strict_json import Json

log = structlog.get_logger(__name__)

# --- params ------------------------------------------------------------------------------------

_STATES: Final = {
    "pending": tuple(state for state in TransferState if state not in FINAL_TRANSFERS),
    "all": tuple(TransferState),
}
_ONE: Final = {"transfer_id": "TRANSFER"}


class TransfersParams(Params):
    """Which transfers to list. ``state``: pending, all, or a state of transfers."""

    state: Annotated[
        Literal[
            "pending", "all", "planned", "prepared", "published", "unknown", "settled", "failed",
            "cancelled",
        ],
        Field(description="pending: not final yet (default)"),
    ] = "pending"  # fmt: skip
    limit: Annotated[int, Field(ge=1, le=MOST_LISTED, description="how many at most (100)")] = 100
    full: Annotated[bool, Field(description="do not shorten addresses")] = False


class TransferParams(Params):
    """Name a transfer; ``full`` addresses are not shortened."""

    transfer_id: Annotated[str, Field(description="its id, from payouts list")]
    full: Annotated[bool, Field(description="do not shorten the address")] = False


class RefundParams(Params):
    """The address that an order's deposit goes back to."""

    order_id: Annotated[str, Field(description="the order's id")]
    address: Annotated[str, Field(description="on the deposit's network")]


# --- the next step of a transfer ---------------------------------------------------------------


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
    """Return whether the transfer is a refund that the agreed refund address refused."""
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
    """Say when an unsigned payout is cancelled."""
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

# --- the handlers ------------------------------------------------------------------------------


class Transfers:
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

    async def list_transfers(self, _service: Service, params: TransfersParams, _call: Call) -> Flat:
        """Payouts and refunds, the newest first."""
        states = _STATES.get(params.state) or (TransferState(params.state),)
        paused = self._paused()
        found = await self._books.transfers(states, params.limit)
        views = []
        for item in found:
            views.append(await self._view(item, paused, full=params.full))
            await asyncio.sleep(0)  # there may be thousands, and the service has other work
        return Flat({"paused": paused, "transfers": views})

    async def show_transfer(self, service: Service, params: TransferParams, _call: Call) -> Flat:
        """Describe one payout or refund. Raises InvalidInput."""
        item = await self._find(service, params.transfer_id)
        paused = self._paused()
        view = await self._view(item, paused, full=params.full)
        return Flat({**view, "receipt": receipt_of(item), "paused": paused})

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
        return Flat({"refused": None})

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

    async def _view(self, item: BookedTransfer, paused: str | None, *, full: bool) -> Json:
        signed = await self._books.signed(item.transfer_id)
        asset = ASSETS[item.asset]
        return {
            "transferId": item.transfer_id,
            "orderId": item.order_id,
            "orderStatus": item.order_status.value,
            "kind": item.kind,
            "state": item.state.value,
            "amount": f"{format_units(item.units, asset)} {asset.symbol}",
            "units": str(item.units),
            "network": item.network,
            "address": item.address if full else shorten_addresses(item.address),
            "txid": next((each.txid for each in signed if each.block is not None), item.txid),
            "attempts": [
                {
                    "txid": each.txid,
                    "at": iso8601(each.made_at),
                    "wallet": each.wallet_state,
                    "block": each.block,
                }
                for each in signed
            ],
            "since": iso8601(item.since),
            "reason": item.reason,
            "next": next_of(item, signed, paused),
        }

    # --- refund addresses ----------------------------------------------------------------------

    async def preview_refund(self, service: Service, params: RefundParams, _call: Call) -> Flat:
        """The refund that would be made, and its address. Raises InvalidInput."""
        return Flat((await self._refund(service, params))[1])

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
                "walletAddress": view["address"],
            }
        )
        answer = await support.create_ticket(service, request, call, tells_secret=False)
        given = answer.data.refund_address
        if given is None or not given.accepted:
            view["refused"] = "the order does not wait any more"
        return Flat(view)

    async def _refund(self, service: Service, params: RefundParams) -> tuple[Order, Json]:
        order = await _waiting_order(service, params.order_id)
        address = _address(service, order, params.address)
        if await self._books.is_own_address(address):
            raise InvalidInput(
                "address: that is an address of the service itself.", field="address"
            )
        asset = order.terms.deposit_asset
        amount = f"{format_units(waiting_units(order), asset)} {asset.symbol}"
        view = {
            "orderId": order.order_id,
            "amount": amount,
            "address": address,
            "refused": None,
        }
        return order, view


def _refused(reason: str) -> Flat:
    return Flat({"refused": reason})


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
    """The address, normalised, of the deposit's network. Raises InvalidDestination."""
    if order.terms.senders_can_be_refunded:
        contracts = service.chains.token_contracts
        return parse_evm_address(text, field="address", forbidden=contracts)
    return parse_monero_address(text, field="address", networks=service.monero_networks).text


TRANSFERS: Final = (
    admin_row(
        "payouts.list",
        TransfersParams,
        Transfers.list_transfers,
        cli=Cli(
            "payouts list",
            "payouts and refunds, the newest first",
            {"state": "--state", "limit": "--limit N", "full": "--full"},
            prints="a table",
            rows="transfers",
            columns={
                "TRANSFER": "{transferId}",
                "STATE": "{state}",
                "AMOUNT": "{amount}",
                "NETWORK": "{network}",
                "TO": "{address}",
                "TRANSACTION": "{txid}",
                "SINCE": "{since}",
            },
        ),
    ),
    admin_row(
        "payouts.show",
        TransferParams,
        Transfers.show_transfer,
        cli=Cli(
            "payouts show", "everything about one payout or refund", {**_ONE, "full": "--full"}
        ),
    ),
    admin_row(
        "payouts.retry",
        TransferParams,
        Transfers.retry_transfer,
        Effect.MOVES_MONEY,
        Cli(
            "payouts retry",
            "retry a pending one now",
            _ONE,
            done="{transferId} is retried now. Follow it with: rpcsvc payouts show {transferId}",
        ),
    ),
    admin_row("refunds.preview", RefundParams, Transfers.preview_refund),
    admin_row(
        "refunds.set",
        RefundParams,
        Transfers.set_refund,
        Effect.MOVES_MONEY,
        Cli(
            "refund",
            "set the address that an order's deposit goes back to, if it waits for one",
            {"order_id": "ORDER", "address": "--to ADDR"},
            done="{orderId} is refunded to {address}. Follow it with: rpcsvc payouts list",
            refused="not set: {refused}",
            confirmation=Confirmation(
                "refunds.preview",
                "{orderId}: {amount}, less the network's fee, go to\n  {address}\n"
                "This can't be taken back.",
                "{amount} would go to {address}.",
            ),
        ),
    ),
)
