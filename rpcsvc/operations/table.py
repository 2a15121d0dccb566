"""The tables of operations: the agent API, the sandbox's additions, and the BFF (spec 4.4).

Examples hold one Monero address, which ``on_network`` encodes for the served network.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Final, TypeVar, cast

from rpcsvc.domain.addresses import MoneroNetwork, subaddress_on
from rpcsvc.domain.chains import MONERO_CHAIN_ID
from rpcsvc.operations import (
    bff,
    bff_models,
    bridge,
    discovery,
    events,
    funding,
    models,
    params,
    payment_check,
    session,
    support,
    swap,
    tools,
    webhooks,
)
from rpcsvc.operations.service import Effect, Example, Operation
from rpcsvc.strict_json import Json

T = TypeVar("T")

EVM: Final = "0x52908400098527886E0F7030069857D2E4169EE7"
MONERO: Final = (
    "888tNkZrPN6JsEgekjMnABU4TBzc2Dt29EPAvkRxbANsAnjyPbb3iQ1YBRk1UXcdRsiKc"
    "9dhwMVgN5S9cQUiyoogDavup3H"
)


def on_network(value: T, network: str) -> T:
    """A deep copy of a JSON value whose examples fit a service on ``network``."""
    return cast("T", _copy(value, _monero(network)))


def _copy(value: Any, monero: str) -> Any:
    if isinstance(value, str):
        return value.replace(MONERO, monero)
    if isinstance(value, dict):
        return {name: _copy(each, monero) for name, each in value.items()}
    return [_copy(each, monero) for each in value] if isinstance(value, list | tuple) else value


@lru_cache(maxsize=8)
def _monero(network: str) -> str:
    """The example's address; a sandbox takes those of all networks, a regtest chain mainnet's."""
    named = [each for each in MoneroNetwork if each == network]
    return subaddress_on(MONERO, named[0]) if named else MONERO


_X2U: Json = {"direction": "x2u", "chain": "arbitrum", "amount": "0.8"}
_U2X: Json = {"direction": "u2x", "chain": "arbitrum", "amount": "150"}
_EXACT: Json = {"direction": "x2u", "chain": "arbitrum", "receiveAmount": "100"}
_SWAP_ERRORS = (
    "missing_input", "invalid_input", "unsupported_direction", "unsupported_chain",
    "amount_below_minimum", "amount_above_maximum", "unavailable",
)  # fmt: skip
_QUOTE_ERRORS = (
    *_SWAP_ERRORS,
    "rate_limited",  # what unfunded orders may reserve
    "spend_limit",
)
_DESTINATION_ERRORS = ("invalid_destination", "destination_not_allowed")
_ORDER_ERRORS = (
    *_QUOTE_ERRORS, *_DESTINATION_ERRORS, "idempotency_conflict", "quote_changed",
    "approval_required",
)  # fmt: skip
_STATUS_ERRORS = (
    "missing_input", "invalid_input", "order_not_found", "verification_failed", "unavailable",
)  # fmt: skip
_CHECK_ERRORS = ("missing_input", "invalid_input", "order_not_found", "unavailable")
_WAIT_ERRORS = (*_CHECK_ERRORS, "rate_limited")
_TICKET_ERRORS = (
    "missing_input", "invalid_input", *_DESTINATION_ERRORS, "rate_limited", "unavailable",
)  # fmt: skip
_NO_TICKET: Final = "ticket_not_found"
CANCEL_ERRORS = (*_STATUS_ERRORS, "order_not_cancellable")
_SANDBOX_ERRORS = (
    "missing_input", "invalid_input", "amount_above_maximum", "order_not_found", "unavailable",
)  # fmt: skip

AGENT_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        name="capabilities",
        summary="What the service can do: chains, directions, limits, policy.",
        params=params.DetailParams,
        result=models.CapabilitiesResult,
        handler=discovery.capabilities,
        effect=Effect.READ,
        method="GET",
        path="/agent/capabilities",
        examples=(Example("all", {}),),
        errors=("invalid_input",),
        tool=tools.GET_CAPABILITIES,
    ),
    Operation(
        name="schemas",
        summary="JSON Schemas of every operation's params and result.",
        params=params.DetailParams,
        result=models.SchemasResult,
        handler=discovery.schemas,
        effect=Effect.READ,
        method="GET",
        examples=(Example("all", {}),),
        errors=("invalid_input",),
    ),
    Operation(
        name="swap.plan",
        summary="Validate what is known of a swap and name what is missing.",
        params=params.PlanParams,
        result=models.PlanResult,
        handler=swap.plan,
        effect=Effect.READ,
        method="POST",
        path="/agent/swap/plan",
        examples=(
            Example("nothing known", {}),
            Example("destination missing", {**_X2U, "hasFunds": True}),
            Example("ready", {**_X2U, "to": EVM, "hasFunds": True}),
            Example("ready the other way", {**_U2X, "to": MONERO, "hasFunds": False}),
        ),
        errors=(*_SWAP_ERRORS, *_DESTINATION_ERRORS),
        tool=tools.PLAN_SWAP,
    ),
    Operation(
        name="swap.quote",
        summary="Price an amount at the current rate.",
        params=params.QuoteParams,
        result=models.QuoteResult,
        handler=swap.quote,
        effect=Effect.READ,
        method="POST",
        path="/agent/swap/quote",
        examples=(
            Example("XMR to USDC", _X2U),
            Example("USDC to XMR", _U2X),
            Example("100 USDC arrive", _EXACT),
        ),
        errors=_QUOTE_ERRORS,
        tool=tools.GET_QUOTE,
    ),
    Operation(
        name="swap.create",
        summary="Create an order and get its funding instructions.",
        params=params.SwapParams,
        result=models.OrderResult,
        handler=swap.create,
        effect=Effect.MOVES_MONEY,
        method="POST",
        path="/agent/swap/create",
        examples=(
            Example("XMR to USDC", {**_X2U, "to": EVM}),
            Example("USDC to XMR", {**_U2X, "to": MONERO}),
        ),
        errors=_ORDER_ERRORS,
        idempotent=True,
        creates=True,
        tool=tools.CREATE_SWAP,
    ),
    Operation(
        name="swap.execute",
        summary="Quote and create in one call.",
        params=params.SwapParams,
        result=models.OrderResult,
        handler=swap.execute,
        effect=Effect.MOVES_MONEY,
        method="POST",
        path="/agent/swap/execute",
        examples=(
            Example("XMR to USDC", {**_X2U, "to": EVM}),
            Example("USDC to XMR", {**_U2X, "to": MONERO}),
            Example("with a refund address", {**_X2U, "to": EVM, "refundAddress": MONERO}),
        ),
        errors=_ORDER_ERRORS,
        idempotent=True,
        creates=True,
    ),
    Operation(
        name="swap.status",
        summary="An order as it stands.",
        params=params.StatusParams,
        result=models.StatusResult,
        handler=swap.status,
        effect=Effect.READ,
        method="GET",
        path="/agent/swap/status/{orderId}",
        examples=(
            Example("by id", {"orderId": "$orderId"}),
            Example("verified", {"orderId": "$orderId", "verify": EVM}),
            Example("after a change", {"orderId": "$orderId", "sinceCursor": 0, "waitSec": 25}),
        ),
        errors=(*_STATUS_ERRORS, "rate_limited"),
        tool=tools.GET_SWAP_STATUS,
    ),
    Operation(
        name="swap.cancel",
        summary="End an order that no deposit was sent to.",
        params=params.CancelParams,
        result=models.StatusResult,
        handler=swap.cancel,
        effect=Effect.WRITE,
        method="POST",
        path="/agent/swap/cancel/{orderId}",
        examples=(
            Example("an unfunded order", {"orderId": "$orderId", "sessionId": "$sessionId"}),
        ),
        errors=CANCEL_ERRORS,
        tool=tools.CANCEL_SWAP,
    ),
    Operation(
        name="swap.events",
        summary="What happened to an order since a cursor; waits for the next event if asked to.",
        params=params.EventsParams,
        result=models.EventsResult,
        handler=events.events,
        effect=Effect.READ,
        method="GET",
        path="/agent/swap/events/{orderId}",
        examples=(
            Example("all", {"orderId": "$orderId"}),
            Example("with a wait", {"orderId": "$orderId", "after": 0, "waitSec": 25}),
        ),
        errors=_WAIT_ERRORS,
        follow=events.follow,
    ),
    Operation(
        name="swap.list",
        summary="The orders of a session, newest first.",
        params=params.ListParams,
        result=models.ListResult,
        handler=session.list_orders,
        effect=Effect.READ,
        method="GET",
        path="/agent/swap/list",
        examples=(
            Example("the newest", {"sessionId": "$sessionId"}),
            Example("those before one", {"sessionId": "$sessionId", "after": "$orderId"}),
        ),
        errors=("missing_input", "invalid_input", "order_not_found", "unavailable"),
        tool=tools.LIST_SWAPS,
    ),
    Operation(
        name="swap.check",
        summary="Check a payment before it is signed: address, token, chain, amount, time.",
        params=params.CheckParams,
        result=models.CheckResult,
        handler=payment_check.check,
        effect=Effect.READ,
        method="POST",
        path="/agent/swap/check/{orderId}",
        examples=(
            Example("a payment URI", {"orderId": "$orderId", "paymentUri": f"monero:{MONERO}"}),
            Example(
                "an address and an amount",
                {"orderId": "$orderId", "address": MONERO, "amount": "0.8", "asset": "XMR"},
            ),
        ),
        errors=_CHECK_ERRORS,
        tool=tools.CHECK_PAYMENT,
    ),
    Operation(
        name="swap.fund",
        summary="Pay a USDC order by a signature and without gas (x402).",
        params=params.FundingParams,
        result=models.FundingResult,
        handler=funding.fund,
        effect=Effect.MOVES_MONEY,
        method="POST",
        path="/agent/swap/fund/{orderId}",
        examples=(Example("what to sign", {"orderId": "$orderId"}),),
        errors=(
            *_CHECK_ERRORS,
            "idempotency_conflict",
            "order_not_fundable",
            "payment_required",
            "payment_refused",
            "destination_not_allowed",
        ),
        payable=True,
        pays=True,
        tool=tools.FUND_SWAP,
    ),
    Operation(
        name="swap.refundAddress",
        summary="Name where a refund goes that waits for an address.",
        params=params.RefundAddressParams,
        result=models.RefundAddressResult,
        handler=session.set_refund_address,
        effect=Effect.WRITE,
        method="POST",
        path="/agent/swap/refund-address/{orderId}",
        examples=(
            Example(
                "an XMR refund",
                {"orderId": "$orderId", "sessionId": "$sessionId", "address": MONERO},
            ),
        ),
        errors=(*_STATUS_ERRORS, *_DESTINATION_ERRORS),
        tool=tools.SET_REFUND_ADDRESS,
    ),
    Operation(
        name="swap.webhookDeliveries",
        summary="What was sent to an order's webhook, and what came of it.",
        params=params.DeliveriesParams,
        result=models.DeliveriesResult,
        handler=webhooks.deliveries,
        effect=Effect.READ,
        method="GET",
        path="/agent/swap/webhook-deliveries/{orderId}",
        examples=(Example("of an order", {"orderId": "$orderId", "sessionId": "$sessionId"}),),
        errors=_STATUS_ERRORS,
    ),
    Operation(
        name="support.create",
        summary="Open a support ticket, write to one, or give a refund address.",
        params=params.SupportParams,
        result=models.SupportResult,
        handler=support.create_ticket,
        effect=Effect.WRITE,
        method="POST",
        path="/agent/support/tickets",
        examples=(
            Example("a question", {"message": "How long does a swap take?"}),
            Example("about an order", {"message": "Where is my payout?", "orderId": "$orderId"}),
        ),
        errors=(*_TICKET_ERRORS, _NO_TICKET),
        creates=True,
        tool=tools.CREATE_SUPPORT_TICKET,
    ),
    Operation(
        name="support.get",
        summary="A support ticket and what was answered.",
        params=params.TicketParams,
        result=models.TicketResult,
        handler=support.get_ticket,
        effect=Effect.READ,
        method="POST",
        path="/agent/support/tickets/{ticketId}",
        examples=(Example("a ticket", {"ticketId": "$ticketId", "ticketSecret": "$ticketSecret"}),),
        errors=("missing_input", "invalid_input", _NO_TICKET, "unavailable"),
        tool=tools.GET_SUPPORT_TICKET,
    ),
)

SANDBOX_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        name="sandbox.fund",
        summary="Sandbox: send a simulated deposit to an order.",
        params=params.FundParams,
        result=models.FundResult,
        handler=swap.fund,
        effect=Effect.MOVES_MONEY,
        method="POST",
        path="/sandbox/fund",
        examples=(Example("part of it", {"orderId": "$orderId", "amount": "0.1"}),),
        errors=_SANDBOX_ERRORS,
        sandbox_only=True,
        pays=True,
        tool=tools.SANDBOX_FUND,
    ),
    Operation(
        name="sandbox.fault",
        summary="Sandbox: provoke a fault, move the clock, change the rate.",
        params=params.FaultParams,
        result=models.FaultResult,
        handler=swap.fault,
        effect=Effect.WRITE,
        method="POST",
        path="/sandbox/fault",
        examples=(
            Example("a failing payout", {"fault": "payout_fails", "orderId": "$orderId"}),
            Example("a new rate", {"fault": "set_rate", "rate": "165"}),
        ),
        errors=_SANDBOX_ERRORS,
        sandbox_only=True,
        tool=tools.SANDBOX_FAULT,
    ),
)


# All operations that the command line and the sandbox's documents describe.
OPERATIONS: tuple[Operation, ...] = (*AGENT_OPERATIONS, *SANDBOX_OPERATIONS)


# Only for reading: an order made with it would be everybody's.
_SESSION = "3f2b8c1e-7d64-4f0a-9c1b-2a5e8d7f6c90"
_PAIR: Json = {
    "fromChainId": MONERO_CHAIN_ID,
    "toChainId": 42161,
    "fromToken": "XMR",
    "toToken": "$usdc",
    "fromAmount": "800000000000",
}
_BFF_QUOTE_ERRORS = (
    "missing_input", "invalid_input", "unsupported_chain", "unsupported_token",
    "amount_below_minimum", "amount_above_maximum", "unavailable", "unauthorized", "rate_limited",
    "spend_limit",
)  # fmt: skip
_BRIDGE_ERRORS = (
    "missing_input", "invalid_input", *_DESTINATION_ERRORS, "idempotency_conflict", "unavailable",
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
        errors=_BFF_QUOTE_ERRORS,
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
        errors=(
            *_BFF_QUOTE_ERRORS,
            *_DESTINATION_ERRORS,
            "idempotency_conflict",
            "approval_required",
        ),
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
        errors=_TICKET_ERRORS,
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
