"""The BFF's rows of the operation table (spec 4.4): each call declared once.

Routes and the OpenAPI document are loops over it. What does not live here: the agent API's rows
(table.py), the handlers (bff.py).
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from rpcsvc.domain.chains import MONERO_CHAIN_ID
from rpcsvc.operations import bff, bff_models, bridge, bridge_models
from rpcsvc.operations.envelope import Json
from rpcsvc.operations.examples import EVM, MONERO
from rpcsvc.operations.params import Params
from rpcsvc.operations.results import Flat, Stored
from rpcsvc.operations.service import Call, Service
from rpcsvc.operations.table import CANCEL_ERRORS, Effect

Handler = Callable[[Service, Any, Call], Awaitable[Flat | Stored]]


@dataclass(frozen=True, eq=False)
class BffOperation:
    """One call of the BFF. ``path`` is under /bff/v1; ``errors`` as in table.Operation.

    ``example`` holds params that work as they stand: ``"$usdc"`` stands for a chain's contract,
    ``"$orderId"`` for an order made just before, ``"$sessionId"`` for its session.
    """

    name: str
    summary: str
    params: type[Params]
    result: type[BaseModel]
    handler: Handler
    effect: Effect
    method: str
    path: str
    example: Json
    errors: tuple[str, ...] = ()
    idempotent: bool = False
    tag: str = "bff"


# To ask with only: an order made with it would be everybody's.
_SESSION = "3f2b8c1e-7d64-4f0a-9c1b-2a5e8d7f6c90"
_PAIR: Json = {
    "fromChainId": MONERO_CHAIN_ID,
    "toChainId": 42161,
    "fromToken": "XMR",
    "toToken": "$usdc",
    "fromAmount": "800000000000",
}
_QUOTE_ERRORS = (
    "missing_input", "invalid_input", "unsupported_chain", "unsupported_token",
    "amount_below_minimum", "amount_above_maximum", "unavailable", "unauthorized", "rate_limited",
)  # fmt: skip
_BRIDGE_ERRORS = (
    "missing_input", "invalid_input", "invalid_destination", "idempotency_conflict", "unavailable",
    "rate_limited",
)  # fmt: skip

BFF_OPERATIONS: tuple[BffOperation, ...] = (
    BffOperation(
        name="bff.chains",
        summary="The chains that can be swapped from and to; 0 is XMR.",
        params=bff_models.Nothing,
        result=bff_models.BffChains,
        handler=bff.chains,
        effect=Effect.READ,
        method="GET",
        path="/chains",
        example={},
    ),
    BffOperation(
        name="bff.quote",
        summary="Price an amount at the current rate.",
        params=bff_models.BffQuoteParams,
        result=bff_models.BffQuote,
        handler=bff.quote,
        effect=Effect.READ,
        method="POST",
        path="/quote",
        example=_PAIR,
        errors=_QUOTE_ERRORS,
    ),
    BffOperation(
        name=bff.CREATE,
        summary="Create an order and get its deposit address.",
        params=bff_models.BffOrderParams,
        result=bff_models.BffNewOrder,
        handler=bff.create_order,
        effect=Effect.MOVES_MONEY,
        method="POST",
        path="/orders",
        example={**_PAIR, "toAddress": EVM},
        errors=(*_QUOTE_ERRORS, "invalid_destination", "idempotency_conflict"),
        idempotent=True,
    ),
    BffOperation(
        name="bff.orders.get",
        summary="An order as it stands.",
        params=bff_models.BffOrderIdParams,
        result=bff_models.BffOrder,
        handler=bff.get_order,
        effect=Effect.READ,
        method="GET",
        path="/orders/{orderId}",
        example={"orderId": "$orderId", "verify": EVM},
        errors=("invalid_input", "order_not_found", "verification_failed"),
    ),
    BffOperation(
        name="bff.orders.cancel",
        summary="End an order that no deposit was sent to.",
        params=bff_models.BffCancelParams,
        result=bff_models.BffOrder,
        handler=bff.cancel,
        effect=Effect.WRITE,
        method="POST",
        path="/orders/{orderId}/cancel",
        example={"orderId": "$orderId", "sessionId": "$sessionId"},
        errors=CANCEL_ERRORS,
    ),
    BffOperation(
        name="bff.orders.list",
        summary="A session's orders, newest first.",
        params=bff_models.BffSessionParams,
        result=bff_models.BffOrders,
        handler=bff.list_orders,
        effect=Effect.READ,
        method="GET",
        path="/orders",
        example={"session": _SESSION},
        errors=("missing_input", "invalid_input"),
    ),
    BffOperation(
        name="bff.support",
        summary="Open a support ticket, or give a refund address.",
        params=bff_models.BffTicketParams,
        result=bff_models.BffTicket,
        handler=bff.open_ticket,
        effect=Effect.WRITE,
        method="POST",
        path="/support/tickets",
        example={
            "orderId": None,
            "sessionId": None,
            "walletAddress": None,
            "category": "question",
            "message": "How long does a swap take?",
        },
        errors=("missing_input", "invalid_input", "invalid_destination", "unavailable"),
    ),
    BffOperation(
        name="bff.bridge.rates",
        summary="What the bridge to the perpetuals exchange gives for XMR now.",
        params=bff_models.Nothing,
        result=bridge_models.BridgeRates,
        handler=bridge.rates,
        effect=Effect.READ,
        method="GET",
        path="/bridge/rates",
        example={},
        errors=("unavailable",),
    ),
    BffOperation(
        name="bff.bridge.deposit",
        summary="Create a bridge order from XMR to the perpetuals exchange.",
        params=bridge_models.BridgeDepositParams,
        result=bridge_models.BridgeOpened,
        handler=bridge.deposit,
        effect=Effect.MOVES_MONEY,
        method="POST",
        path="/bridge/deposit",
        example={"toAddress": EVM},
        errors=_BRIDGE_ERRORS,
        idempotent=True,
    ),
    BffOperation(
        name="bff.bridge.withdraw",
        summary="Create a bridge order from the perpetuals exchange to XMR.",
        params=bridge_models.BridgeWithdrawParams,
        result=bridge_models.BridgeOpened,
        handler=bridge.withdraw,
        effect=Effect.MOVES_MONEY,
        method="POST",
        path="/bridge/withdraw",
        example={"toAddress": MONERO},
        errors=_BRIDGE_ERRORS,
        idempotent=True,
    ),
    BffOperation(
        name="bff.bridge.order",
        summary="A bridge order as it stands.",
        params=bridge_models.BridgeOrderIdParams,
        result=bridge_models.BridgeOrderView,
        handler=bridge.order,
        effect=Effect.READ,
        method="GET",
        path="/bridge/order/{orderId}",
        example={"orderId": "$orderId"},
        errors=("invalid_input", "order_not_found"),
    ),
)
