"""Orders of clients that a person has to approve: asked for, decided, and used once.

A grant is for these very terms: direction, chain, amount, addresses and key, at a rate that is no
worse than the one shown by more than TOLERANCE_BPS.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Final

import orjson
import structlog
from pydantic import Field

from rpcsvc import ids
from rpcsvc.clock import DAY_MS, iso8601
from rpcsvc.domain.clients import (
    TOLERANCE_BPS,
    Approval,
    ApprovalState,
    KnownClient,
)
from rpcsvc.domain.integrators import Integrator
from rpcsvc.domain.money import USDC, format_units
from rpcsvc.domain.order import TwapPlan
from rpcsvc.errors import ApprovalRequired, Forbidden, InvalidInput, RateLimited
from rpcsvc.operations.admin import admin_row
from rpcsvc.operations.params import NoParams, Params
from rpcsvc.operations.service import Call, Cli, Effect, Flat, Service
from rpcsvc.orders.idempotency import Claim
from rpcsvc.orders.ports.venue import OrderRequest, VenueQuote
from rpcsvc.store.database import StaleWrite, StoreConflict
from rpcsvc.strict_json import Json

log = structlog.get_logger(__name__)

# How long a person may take, and a grant may be used.
LIFETIME_MS: Final = DAY_MS
# Approvals of one client that may wait at once.
MOST_PENDING: Final = 20
MOST_LISTED: Final = 200


class Unapproved(Exception):
    """An order at this quote, of this worth in USDC units, needs an approval that it has not."""

    def __init__(self, quote: VenueQuote, units: int) -> None:
        super().__init__()
        self.quote = quote
        self.units = units


async def approved(
    service: Service, request: OrderRequest, claim: Claim | None, wanted: Unapproved
) -> Approval:
    """The grant for the order. Raises ApprovalRequired after asking for one, unless that is done.

    Raises Forbidden for an order that was denied, RateLimited where too many of the client wait,
    and StaleWrite where another process was faster.
    """
    known, now = request.known, service.clock.now_ms()
    if known is None:
        raise TypeError("only orders of clients wait for an approval")
    key, terms = "" if claim is None else claim.key, _digest(request)
    deposit, output = _amounts(wanted.quote)
    before = await service.approvals.holding(known.name, terms, key, now)
    if before is not None and before.state is ApprovalState.DENIED:
        raise Forbidden(
            f"The operator has denied this order ({before.approval_id}). Do not send it again"
            f" before {iso8601(before.expires_at)}; ask the user or the operator.",
            details={"approval": _refused(before)},
        )
    if before is not None and before.covers(deposit, output):
        if before.state is ApprovalState.GRANTED:
            return before
        raise _required(known, before)
    if await service.approvals.pending(now, known.name) >= MOST_PENDING:
        raise RateLimited(
            f"{MOST_PENDING} orders of the client {known.name} wait for an approval, the most at"
            " once. Have the operator decide on them first.",
            details={"reason": "approvals"},
            retry_after=60,
        )
    approval = Approval(
        approval_id=ids.approval_id(service.random),
        client=known.name,
        key=key,
        terms=terms,
        state=ApprovalState.PENDING,
        requested_at=now,
        expires_at=now + LIFETIME_MS,
        deposit=deposit,
        output=output,
        shown=_shown(request, wanted),
    )
    try:
        replaced = None if before is None else before.approval_id
        await service.approvals.ask(approval, replaced, MOST_PENDING)
    except StoreConflict:
        raise StaleWrite from None
    log.warning("approval_requested", approval_id=approval.approval_id, client=known.name)
    raise _required(known, approval)


def _digest(request: OrderRequest) -> str:
    """A hash of what the caller named. The rate and the session are no part of it."""
    named = [
        request.direction.value,
        request.chain.chain_id,
        request.amount.asset.symbol,
        request.amount.units,
        request.to,
        request.refund_address,
        request.pays_gas,
        None if request.twap is None else [request.twap.chunk_units, request.twap.interval_ms],
        None if request.integrator is None else request.integrator.id,
    ]
    return hashlib.sha256(orjson.dumps(named)).hexdigest()


def _amounts(quote: VenueQuote) -> tuple[int, int]:
    return quote.deposit.units, quote.expected_output


def _shown(request: OrderRequest, wanted: Unapproved) -> Json:
    """The terms as a person reads them."""
    quote = wanted.quote
    return {
        "direction": quote.direction.value,
        "chain": quote.chain.name,
        "worthUsd": format_units(wanted.units, USDC),
        "depositAmount": f"{format_units(quote.deposit.units, quote.deposit_asset)}"
        f" {quote.deposit_asset.symbol}",
        "expectedOutput": f"{format_units(quote.expected_output, quote.payout_asset)}"
        f" {quote.payout_asset.symbol}",
        "to": request.to,
        "refundAddress": request.refund_address,
        "funding": "x402, whose gas the quote pays for" if request.pays_gas else None,
        "twap": None if request.twap is None else _twap_in_words(request.twap, quote),
        "integrator": None if request.integrator is None else _in_words(request.integrator),
    }


def _in_words(integrator: Integrator) -> str:
    whole, part = divmod(integrator.fee_bps, 100)
    return f"{integrator.id}, {whole}.{part:02} % of the output"


def _twap_in_words(plan: TwapPlan, quote: VenueQuote) -> str:
    part = f"{format_units(plan.chunk_units, quote.deposit_asset)} {quote.deposit_asset.symbol}"
    return f"chunks of {part} every {plan.interval_ms // 1_000} s, each at the rate of its moment"


def _required(known: KnownClient, approval: Approval) -> ApprovalRequired:
    limit = format_units(known.approve_above or 0, USDC)
    reason = (
        f"The order is worth {approval.shown['worthUsd']} USD, and above {limit} orders of the"
        f" client {known.name} wait for a person. A grant holds for these inputs and this key,"
        f" while the rate is at most {TOLERANCE_BPS // 100} % worse than"
        f" {approval.shown['depositAmount']} for {approval.shown['expectedOutput']}."
    )
    view = {"id": approval.approval_id, "reason": reason, "expiresAt": iso8601(approval.expires_at)}
    return ApprovalRequired(
        f"{reason} No order was made. Once {approval.approval_id} is granted, send the same call"
        f" with the same idempotency key, before {view['expiresAt']}.",
        details={"approval": view},
    )


def _refused(approval: Approval) -> Json:
    """A denied approval as its client sees it: who denied it is the operator's own record."""
    return {
        "id": approval.approval_id,
        "state": approval.state.value,
        "expiresAt": iso8601(approval.expires_at),
    }


# --- the operator --------------------------------------------------------------------------------


class DecisionParams(Params):
    """Name an approval, and who decides."""

    approval_id: str
    by: Annotated[
        str, Field(min_length=1, max_length=64, description="who decides; stored with the time")
    ]


async def list_approvals(service: Service, _params: NoParams, _call: Call) -> Flat:
    """Orders that wait for a person, and past decisions, the newest first."""
    found = await service.approvals.newest(MOST_LISTED)
    return Flat({"approvals": [_view(each) for each in found]})


async def grant(service: Service, params: DecisionParams, _call: Call) -> Flat:
    """Let the order be made, once. Raises InvalidInput where nothing waits under that id."""
    return await _decide(service, params, ApprovalState.GRANTED)


async def deny(service: Service, params: DecisionParams, _call: Call) -> Flat:
    """Refuse the order for as long as the approval holds, also where a grant was not used yet.

    Raises InvalidInput as ``grant``.
    """
    return await _decide(service, params, ApprovalState.DENIED)


async def _decide(service: Service, params: DecisionParams, state: ApprovalState) -> Flat:
    now, by = service.clock.now_ms(), " ".join(params.by.split())
    if not by:
        raise InvalidInput("by must say who decides.", field="by")
    if not await service.approvals.decide(params.approval_id, state, by, now):
        raise InvalidInput(
            f"no approval {params.approval_id[:60]} waits for a decision. rpcsvc approvals list"
            " shows those that do.",
            field="approvalId",
        )
    log.warning("approval_decided", approval_id=params.approval_id, state=state.value, by=by)
    found = await service.approvals.find(params.approval_id)
    return Flat({"decided": None if found is None else _view(found)})


def _view(approval: Approval) -> Json:
    decided = approval.decided_at
    return {
        "id": approval.approval_id,
        "client": approval.client,
        "state": approval.state.value,
        **approval.shown,
        "requestedAt": iso8601(approval.requested_at),
        "expiresAt": iso8601(approval.expires_at),
        "decidedAt": None if decided is None else iso8601(decided),
        "decidedBy": approval.decided_by,
        "orderId": approval.order_id,
    }


_DECISION: Final = {"approval_id": "APPROVAL_ID", "by": "--by NAME"}
APPROVALS: Final = (
    admin_row(
        "approvals.list",
        NoParams,
        list_approvals,
        cli=Cli("approvals list", "orders that wait for a person, and past decisions"),
    ),
    admin_row(
        "approvals.grant",
        DecisionParams,
        grant,
        Effect.WRITE,
        Cli("approvals grant", "let an order be made, once", _DECISION),
    ),
    admin_row(
        "approvals.deny",
        DecisionParams,
        deny,
        Effect.WRITE,
        Cli("approvals deny", "refuse an order, or withdraw a grant that was not used", _DECISION),
    ),
)
