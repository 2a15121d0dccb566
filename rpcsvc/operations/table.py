"""The operation table: each operation declared once.

JSON-RPC methods, HTTP routes, CLI commands, schemas and documents are loops over it. What does
not live here: what the operations do (the handlers), how a call arrives (transport/).
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from rpcsvc.operations import cancelling, discovery, models, params, sandbox, support, swap
from rpcsvc.operations.envelope import Answer, Json
from rpcsvc.operations.examples import EVM, MONERO
from rpcsvc.operations.results import Stored
from rpcsvc.operations.service import Call, Service

Handler = Callable[[Service, Any, Call], Awaitable[Answer | Stored]]


class Effect(StrEnum):
    """What an operation does to the world."""

    READ = "read"
    WRITE = "write"
    MOVES_MONEY = "moves_money"


def option_of(wire_name: str) -> str:
    """The CLI's option for an input: ``--refund-address`` for ``refundAddress``."""
    return "--" + re.sub(r"([A-Z])", r"-\1", wire_name).lower()


@dataclass(frozen=True, slots=True)
class Example:
    """Params that work as they stand. ``"$orderId"`` stands for an order made just before, and
    ``"$sessionId"`` for its session.
    """

    name: str
    params: Json


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation. ``path`` is under /api/v1, or None when HTTPS does not offer it.

    ``errors`` are the codes that it can answer besides those of its transport.
    ``creates``: the answer tells what was made, so it does not run as a notification.
    """

    name: str
    summary: str
    params: type[params.Params]
    result: type[models.Result]
    handler: Handler
    effect: Effect
    method: str
    path: str | None
    examples: tuple[Example, ...]
    errors: tuple[str, ...] = ()
    idempotent: bool = False
    creates: bool = False
    sandbox_only: bool = False

    @property
    def command(self) -> str:
        """The CLI command (spec 1): ``agent:swap:plan``; sandbox commands have no prefix."""
        name = self.name.replace(".", ":")
        return name if self.sandbox_only else f"agent:{name}"


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

OPERATIONS: tuple[Operation, ...] = (
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
        path=None,
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
        handler=cancelling.cancel,
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


def operations_for(service: Service) -> list[Operation]:
    """The operations that a service offers: the sandbox's only with that engine."""
    return [op for op in OPERATIONS if service.sandbox is not None or not op.sandbox_only]
