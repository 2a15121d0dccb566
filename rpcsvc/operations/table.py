"""The operations of the agent API, and those that only the sandbox has."""

from __future__ import annotations

from rpcsvc.operations import discovery, models, params, sandbox, support, swap
from rpcsvc.operations.envelope import Json
from rpcsvc.operations.examples import EVM, MONERO
from rpcsvc.operations.operation import Effect, Example, Operation

_X2U: Json = {"direction": "x2u", "chain": "arbitrum", "amount": "0.8"}
_U2X: Json = {"direction": "u2x", "chain": 42161, "amount": "150"}
_SWAP_ERRORS = (
    "missing_input", "invalid_input", "unsupported_direction", "unsupported_chain",
    "amount_below_minimum", "amount_above_maximum", "unavailable",
)  # fmt: skip
_QUOTE_ERRORS = (*_SWAP_ERRORS, "rate_limited")  # what unfunded orders may reserve
_ORDER_ERRORS = (*_QUOTE_ERRORS, "invalid_destination", "idempotency_conflict")
_STATUS_ERRORS = (
    "missing_input", "invalid_input", "order_not_found", "verification_failed", "unavailable",
)  # fmt: skip
CANCEL_ERRORS = (*_STATUS_ERRORS, "order_not_cancellable")
_SANDBOX_ERRORS = (
    "missing_input", "invalid_input", "amount_above_maximum", "order_not_found", "unavailable",
)  # fmt: skip

AGENT_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        name="capabilities",
        summary="What the service can do: chains, directions, limits, policy.",
        params=params.NoParams,
        result=models.CapabilitiesResult,
        handler=discovery.capabilities,
        effect=Effect.READ,
        method="GET",
        path="/agent/capabilities",
        examples=(Example("all", {}),),
        errors=("invalid_input",),
    ),
    Operation(
        name="schemas",
        summary="JSON Schemas of every operation's params and result.",
        params=params.NoParams,
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
        errors=(*_SWAP_ERRORS, "invalid_destination"),
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
        examples=(Example("XMR to USDC", _X2U), Example("USDC to XMR", _U2X)),
        errors=_QUOTE_ERRORS,
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
        ),
        errors=_STATUS_ERRORS,
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
    ),
    Operation(
        name="support.create",
        summary="Open a support ticket, or give a refund address.",
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
        errors=("missing_input", "invalid_input", "invalid_destination", "unavailable"),
        creates=True,
    ),
)

SANDBOX_OPERATIONS: tuple[Operation, ...] = (
    Operation(
        name="sandbox.fund",
        summary="Sandbox: send a simulated deposit to an order.",
        params=params.FundParams,
        result=models.FundResult,
        handler=sandbox.fund,
        effect=Effect.MOVES_MONEY,
        method="POST",
        path="/sandbox/fund",
        examples=(Example("part of it", {"orderId": "$orderId", "amount": "0.1"}),),
        errors=_SANDBOX_ERRORS,
        sandbox_only=True,
    ),
    Operation(
        name="sandbox.fault",
        summary="Sandbox: provoke a fault, move the clock, change the rate.",
        params=params.FaultParams,
        result=models.FaultResult,
        handler=sandbox.fault,
        effect=Effect.WRITE,
        method="POST",
        path="/sandbox/fault",
        examples=(
            Example("a failing payout", {"fault": "payout_fails", "orderId": "$orderId"}),
            Example("a new rate", {"fault": "set_rate", "rate": "165"}),
        ),
        errors=_SANDBOX_ERRORS,
        sandbox_only=True,
    ),
)


# What the command line and the documents of the sandbox know.
OPERATIONS: tuple[Operation, ...] = (*AGENT_OPERATIONS, *SANDBOX_OPERATIONS)
