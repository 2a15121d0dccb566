"""The operations of the BFF (spec 4.4). Paths are under /bff/v1."""

from __future__ import annotations

from rpcsvc.domain.chains import MONERO_CHAIN_ID
from rpcsvc.operations import bff, bff_models, bridge
from rpcsvc.operations.envelope import Json
from rpcsvc.operations.examples import EVM, MONERO
from rpcsvc.operations.operation import Effect, Example, Operation
from rpcsvc.operations.table import CANCEL_ERRORS

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

BFF_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        name="bff.chains",
        summary="The chains that can be swapped from and to; 0 is XMR.",
        params=bff_models.Nothing,
        result=bff_models.BffChains,
        handler=bff.chains,
        effect=Effect.READ,
        method="GET",
        path="/chains",
        examples=(Example("example", {}),),
    ),
    Operation(
        name="bff.quote",
        summary="Price an amount at the current rate.",
        params=bff_models.BffQuoteParams,
        result=bff_models.BffQuote,
        handler=bff.quote,
        effect=Effect.READ,
        method="POST",
        path="/quote",
        examples=(Example("example", _PAIR),),
        errors=_QUOTE_ERRORS,
    ),
    Operation(
        name=bff.CREATE,
        summary="Create an order and get its deposit address.",
        params=bff_models.BffOrderParams,
        result=bff_models.BffNewOrder,
        handler=bff.create_order,
        effect=Effect.MOVES_MONEY,
        method="POST",
        path="/orders",
        examples=(Example("example", {**_PAIR, "toAddress": EVM}),),
        errors=(*_QUOTE_ERRORS, "invalid_destination", "idempotency_conflict"),
        idempotent=True,
    ),
    Operation(
        name="bff.orders.get",
        summary="An order as it stands.",
        params=bff_models.BffOrderIdParams,
        result=bff_models.BffOrder,
        handler=bff.get_order,
        effect=Effect.READ,
        method="GET",
        path="/orders/{orderId}",
        examples=(Example("example", {"orderId": "$orderId", "verify": EVM}),),
        errors=("invalid_input", "order_not_found", "verification_failed"),
    ),
    Operation(
        name="bff.orders.cancel",
        summary="End an order that no deposit was sent to.",
        params=bff_models.BffCancelParams,
        result=bff_models.BffOrder,
        handler=bff.cancel,
        effect=Effect.WRITE,
        method="POST",
        path="/orders/{orderId}/cancel",
        examples=(Example("example", {"orderId": "$orderId", "sessionId": "$sessionId"}),),
        errors=CANCEL_ERRORS,
    ),
    Operation(
        name="bff.orders.list",
        summary="A session's orders, newest first.",
        params=bff_models.BffSessionParams,
        result=bff_models.BffOrders,
        handler=bff.list_orders,
        effect=Effect.READ,
        method="GET",
        path="/orders",
        examples=(Example("example", {"session": _SESSION}),),
        errors=("missing_input", "invalid_input"),
    ),
    Operation(
        name="bff.support",
        summary="Open a support ticket, or give a refund address.",
        params=bff_models.BffTicketParams,
        result=bff_models.BffTicket,
        handler=bff.open_ticket,
        effect=Effect.WRITE,
        method="POST",
        path="/support/tickets",
        examples=(
            Example(
                "example",
                {
                    "orderId": None,
                    "sessionId": None,
                    "walletAddress": None,
                    "category": "question",
                    "message": "How long does a swap take?",
                },
            ),
        ),
        errors=("missing_input", "invalid_input", "invalid_destination", "unavailable"),
    ),
    Operation(
        name="bff.bridge.rates",
        summary="What the bridge to the perpetuals exchange gives for XMR now.",
        params=bff_models.Nothing,
        result=bff_models.BridgeRates,
        handler=bridge.rates,
        effect=Effect.READ,
        method="GET",
        path="/bridge/rates",
        examples=(Example("example", {}),),
        errors=("unavailable",),
    ),
    Operation(
        name="bff.bridge.deposit",
        summary="Create a bridge order from XMR to the perpetuals exchange.",
        params=bff_models.BridgeDepositParams,
        result=bff_models.BridgeOpened,
        handler=bridge.deposit,
        effect=Effect.MOVES_MONEY,
        method="POST",
        path="/bridge/deposit",
        examples=(Example("example", {"toAddress": EVM}),),
        errors=_BRIDGE_ERRORS,
        idempotent=True,
    ),
    Operation(
        name="bff.bridge.withdraw",
        summary="Create a bridge order from the perpetuals exchange to XMR.",
        params=bff_models.BridgeWithdrawParams,
        result=bff_models.BridgeOpened,
        handler=bridge.withdraw,
        effect=Effect.MOVES_MONEY,
        method="POST",
        path="/bridge/withdraw",
        examples=(Example("example", {"toAddress": MONERO}),),
        errors=_BRIDGE_ERRORS,
        idempotent=True,
    ),
    Operation(
        name="bff.bridge.order",
        summary="A bridge order as it stands.",
        params=bff_models.BridgeOrderIdParams,
        result=bff_models.BridgeOrderView,
        handler=bridge.order,
        effect=Effect.READ,
        method="GET",
        path="/bridge/order/{orderId}",
        examples=(Example("example", {"orderId": "$orderId"}),),
        errors=("invalid_input", "order_not_found"),
    ),
)
