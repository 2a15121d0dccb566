"""The operations swap.plan, quote, create, execute, status and cancel, and those of the sandbox.

``DEPOSIT_POLICY`` is what every quote states about wrong deposits (design part 3).
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import orjson
from msgspec import UNSET
from msgspec.structs import replace

from rpcsvc.clock import iso8601
from rpcsvc.domain.chains import Chain
from rpcsvc.domain.money import USDC, Money, format_units, parse_any_amount, require_storable
from rpcsvc.domain.order import AgentState, Order, OrderStatus
from rpcsvc.domain.pricing import Direction, deposit_asset, payout_asset
from rpcsvc.domain.settle_times import kind_of, kind_of_order
from rpcsvc.errors import MissingInput, OrderNotFound, Unavailable, VerificationFailed
from rpcsvc.operations import models
from rpcsvc.operations.clients import require_worth
from rpcsvc.operations.dispatch import head, missing_state, with_data
from rpcsvc.operations.inputs import (
    HINTS,
    Problems,
    SwapIntent,
    keyed_webhook,
    missing,
    read_intent,
    read_order_id,
    read_session,
    read_webhook,
    require_verified,
)
from rpcsvc.operations.ordering import PlacedOrder, place, status_answer
from rpcsvc.operations.params import (
    CancelParams,
    FaultParams,
    FundParams,
    PlanParams,
    PricedParams,
    QuoteParams,
    StatusParams,
    SwapParams,
)
from rpcsvc.operations.service import Answer, Call, SandboxService, Service, Stored, action
from rpcsvc.operations.views import observed_json, observed_view
from rpcsvc.orders.authorizations import Authorizations
from rpcsvc.orders.idempotency import Claim
from rpcsvc.orders.ports.venue import NEEDED, FaultKind, OrderRequest, QuoteRequest, VenueQuote
from rpcsvc.orders.quoted import (
    FIELD,
    QuotedTerms,
    percent_change,
    quote_terms,
    read_digest,
    write_digest,
)
from rpcsvc.strict_json import Json

_PAYEE: Final = {Direction.XMR_TO_USDC: "EVM", Direction.USDC_TO_XMR: "Monero"}
DEPOSIT_POLICY = [
    models.DepositPolicyRow(
        "exact",
        "Paid out at the quoted rate once it is confirmed, when first seen until priceLockedUntil.",
    ),
    models.DepositPolicyRow("over", "All of it is swapped, up to the maximum."),
    models.DepositPolicyRow("above_maximum", "All of it is refunded."),
    models.DepositPolicyRow(
        "under",
        "More may follow until expiresAt. Then a sum of at least the minimum is"
        " swapped, a smaller one refunded; what is worth no more than the fee of sending it back"
        " is held and shown.",
    ),
    models.DepositPolicyRow("several", "Deposits are summed, each at the rate of its own time."),
    models.DepositPolicyRow(
        "after_price_lock",
        "First seen after priceLockedUntil and before expiresAt: swapped at the rate of"
        " that moment if it brings at least minReceived in proportion, otherwise treated as late."
        " The lock ends early when the rate moves too far; what was seen by then keeps its rate.",
    ),
    models.DepositPolicyRow(
        "late",
        "Re-priced when first seen after expiresAt; swapped if the result is within"
        " minReceived in proportion, otherwise refunded.",
    ),
    models.DepositPolicyRow(
        "after_terminal", "Recorded, shown on the order, and refunded when worth more than the fee."
    ),
    models.DepositPolicyRow(
        "refund",
        "Goes to the refundAddress that the order was made with, and nowhere else."
        " Without one a USDC refund goes to the sender, and an XMR refund waits until the holder of"
        " the session names an address (actionRequired: refund_address).",
    ),
    models.DepositPolicyRow("reorganised_away", "The order steps back to awaiting_deposit."),
]


_NO_SESSION = (
    "sessionId is missing. Make a random UUID (version 4) for this order, from a random generator:"
    " it tells a repeated call from a new order, and is half of the order's secret."
)


def quote_view(service: Service, quote: VenueQuote) -> models.Quote:
    """``data.quote``: amounts as decimal strings, fees in the payout's asset."""
    payout = quote.payout_asset
    spread = quote.price.spread(quote.direction, quote.deposit.units)
    gas, lock_end = quote.funding_gas, quote.price_locked_until
    exact = quote.exact_output
    return models.Quote(
        direction=quote.direction.value,
        chain=quote.chain.name,
        chain_id=quote.chain.chain_id,
        deposit_asset=quote.deposit_asset.symbol,
        deposit_amount=format_units(quote.deposit.units, quote.deposit_asset),
        payout_asset=payout.symbol,
        expected_output=format_units(quote.expected_output, payout),
        receive_amount=UNSET if exact is None else format_units(exact, payout),
        min_received=format_units(quote.min_received, payout),
        rate=format_units(quote.rate.usdc_per_xmr, USDC),
        rate_as_of=iso8601(quote.rate.as_of),
        fees=models.QuoteFees(
            asset=payout.symbol,
            spread=format_units(spread, payout),
            network=format_units(quote.price.payout_fee, payout),
            refund_network=format_units(quote.fees.refund, quote.deposit_asset),
            refund_asset=quote.deposit_asset.symbol,
            funding=format_units(quote.price.funding_fee, payout) if gas else UNSET,
            funding_gas=format_units(gas, USDC) if gas else UNSET,
        ),
        estimated_time_seconds=quote.seconds,
        deposit_window_seconds=service.policy.deposit_window // 1000,
        price_locked_until=None if lock_end is None else iso8601(lock_end),
        deposit_policy=DEPOSIT_POLICY,
    )


async def plan(service: Service, params: PlanParams, call: Call) -> Answer[models.PlanResult]:
    """The known inputs of a swap, normalised, and the missing ones. Reserves nothing."""
    problems = Problems()
    intent = await read_intent(params, service, problems)
    if call.known is not None and intent.to is not None:
        with problems:
            call.known.require_destination(intent.to, field="to", caller=call.known)
    if not problems:
        with problems:
            await _require_possible(service, intent)
    if problems:
        wrong = problems.fields
        problems.add(*(missing(name) for name in intent.missing if name not in wrong))
    problems.raise_found()
    data = models.PlanResult(
        *service.views.common(), intent=_intent_view(intent, has_funds=params.has_funds)
    )
    if intent.missing:
        actions = [action(f"provide_{name}", HINTS[name]) for name in intent.missing]
        return Answer(missing_state(intent.missing), data, actions, missing_inputs=intent.missing)
    return Answer(AgentState.READY, data, _ready_actions(intent, has_funds=params.has_funds))


async def quote(service: Service, params: QuoteParams, call: Call) -> Answer[models.QuoteResult]:
    """A price for the amount at the current rate."""
    problems = Problems()
    intent = await read_intent(params, service, problems)
    _require_amount(params, problems)
    problems.raise_found()
    earlier = None
    if params.requote_of is not None:
        earlier = _quoted(params.requote_of, intent, field="requoteOf")
    request = QuoteRequest(
        *_swap_of(intent),
        client=call.client,
        pays_gas=intent.funding is not None,
        known=call.known,
    )
    found = await service.venue.quote(request)
    await require_worth(service, call.known, found)
    kind = kind_of(found.direction, found.chain.name, found.deposit.units, found.expected_output)
    observed = observed_view(await service.observed.of(kind))
    create = action(
        "provide_to",
        f"Ask the user for the {_PAYEE[found.direction]} address of the payout. Then call"
        " swap.execute with the same inputs, to, quoteDigest, and an idempotency key.",
    )
    terms = quote_terms(found, service.clock.now_ms())
    data = models.QuoteResult(
        *service.views.common(),
        quote=replace(quote_view(service, found), observed_time=observed),
        quote_digest=write_digest(terms),
        changed=UNSET if earlier is None else _changed(earlier, terms),
    )
    return Answer(AgentState.QUOTED, data, [create])


async def create(service: Service, params: SwapParams, call: Call) -> Stored:
    """A new order at the current rate, or the same one again under its idempotency key."""
    return await _open(service, params, call, "swap.create")


async def execute(service: Service, params: SwapParams, call: Call) -> Stored:
    """Quote and create in one call."""
    return await _open(service, params, call, "swap.execute")


async def status(
    service: Service, params: StatusParams, call: Call
) -> Answer[models.StatusResult] | Stored:
    """An order's current state. Raises OrderNotFound and VerificationFailed."""
    order_id = read_order_id(params.order_id)
    service.venue.watch(order_id)
    if params.wait_sec:
        await _wait_for_change(service, params, call)
    view = await service.store.status_view(order_id, service.clock.now_ms())
    if view is not None:
        require_verified(params.verify, view.to_address)
        if view.kind is None:
            return Stored(view.body)
        # Added when it is sent: the stored answer is as old as the order's last event.
        found = await service.observed.of(view.kind)
        return Stored(with_data(view.body, "observedTime", observed_json(found)))
    order, is_paying = await find_funding(service, order_id)
    require_verified(params.verify, order.terms.to_address)
    answer = status_answer(service.views, order, service.clock.now_ms(), is_paying=is_paying)
    if order.status.is_terminal:
        return answer
    observed = observed_view(await service.observed.of(kind_of_order(order)))
    return replace(answer, data=replace(answer.data, observed_time=observed))


async def _wait_for_change(service: Service, params: StatusParams, call: Call) -> None:
    """Wait until the order has changed since ``sinceCursor``, by default since now."""
    order = await find_order(service, params.order_id)
    since = order.version if params.since_cursor is None else params.since_cursor
    await service.waits.history(order.order_id, since, params.wait_sec, call.client)


async def is_being_paid(authorizations: Authorizations, order_id: str) -> bool:
    """Return whether a signed payment of the order is under way.

    Read the order afterwards: if the payment just ended, the order then has its deposit.
    """
    return await authorizations.unresolved(order_id) is not None


async def find_funding(service: Service, order_id: str) -> tuple[Order, bool]:
    """The order, and whether a signed payment of it is under way. Raises as ``find_order``."""
    is_paying = await is_being_paid(service.venue.authorizations, read_order_id(order_id))
    return await find_order(service, order_id), is_paying


async def find_order(service: Service, order_id: str) -> Order:
    """The order of a swap. Raises InvalidInput and OrderNotFound."""
    order = await find_any_order(service, order_id)
    if order.terms.is_bridge:
        raise _no_order(order_id)
    return order


async def find_any_order(service: Service, order_id: str) -> Order:
    """The order, of a swap or of the bridge. Raises InvalidInput and OrderNotFound."""
    order = await service.store.order(read_order_id(order_id))
    if order is None:
        raise _no_order(order_id)
    return order


def require_owner(order: Order, session_id: str) -> Order:
    """The order, if the caller knows its session. Raises InvalidInput and VerificationFailed."""
    session = read_session(session_id) or ""
    if not hmac.compare_digest(order.terms.session_id.encode(), session.encode()):
        raise VerificationFailed(
            "sessionId is not the one of this order. Send the sessionId that create or execute"
            " answered."
        )
    return order


def look_again(order: Order, description: str) -> Json:
    """The next action that reads an order; swap.status does not serve those of the bridge."""
    if order.terms.is_bridge:
        where = f"Ask for it at GET /bff/v1/bridge/order/{order.order_id}."
        return action("poll_bridge_order", f"{description} {where}")
    return action("poll_status", description, "swap.status", {"orderId": order.order_id})


def _no_order(order_id: str) -> OrderNotFound:
    return OrderNotFound(
        f"There is no order {order_id}. Send the orderId that create or execute answered."
    )


# --- plan ---


async def _require_possible(service: Service, intent: SwapIntent) -> None:
    """Raise an InputError for an unusable chain or funding, or an amount outside the limits, as
    far as they are known.
    """
    if intent.chain is not None:
        service.venue.profile.require_offered(intent.chain)
    if intent.funding is not None:
        service.venue.profile.require_authorizations()
    if intent.named is not None:
        await _require_within_limits(service, intent, intent.named)


async def _require_within_limits(service: Service, intent: SwapIntent, amount: Money) -> None:
    """Raise AmountBelowMinimum or AmountAboveMaximum, as far as the limits are known."""
    direction, chain = intent.direction, intent.chain
    if direction is not None and chain is not None:
        with suppress(Unavailable):
            await service.venue.check_amount(direction, chain, amount)
    require_storable(amount, field="amount" if intent.receive_amount is None else "receiveAmount")


def _intent_view(intent: SwapIntent, *, has_funds: bool | None) -> models.Intent:
    direction, chain, amount = intent.direction, intent.chain, intent.amount
    receive = intent.receive_amount
    return models.Intent(
        direction=direction.value if direction else None,
        chain=chain.name if chain else None,
        chain_id=chain.chain_id if chain else None,
        amount=amount.text() if amount else None,
        receive_amount=receive.text() if receive else UNSET,
        send=deposit_asset(direction).symbol if direction else None,
        receive=payout_asset(direction).symbol if direction else None,
        to=intent.to,
        has_funds=has_funds,
        funding=intent.funding,
    )


def _ready_actions(intent: SwapIntent, *, has_funds: bool | None) -> list[Json]:
    direction, chain, amount = _swap_of(intent)
    named = "amount" if intent.receive_amount is None else "receiveAmount"
    base = {"direction": direction.value, "chain": chain.name, named: amount.text()}
    if intent.funding is not None:
        base["funding"] = intent.funding
    actions = [
        action("quote", "See the price before deciding.", "swap.quote", base),
        action(
            "execute",
            "Create the order; add an idempotency key so that a retry is safe, and the user's own"
            f" {deposit_asset(direction).symbol} address as refundAddress, where refunds go.",
            "swap.execute",
            {**base, "to": intent.to},
        ),
    ]
    if has_funds is False:
        sent = deposit_asset(direction).symbol
        needed = amount.display() if intent.amount else f"the quote's depositAmount of {sent}"
        first = action("obtain_funds", f"The user needs {needed} before the deposit"
                       f" window starts: get {sent} first.")  # fmt: skip
        actions.insert(0, first)
    return actions


# --- create and execute ---


def _swap_of(intent: SwapIntent) -> tuple[Direction, Chain, Money]:
    """Direction, chain and the named amount, which the params guarantee."""
    direction, chain, amount = intent.direction, intent.chain, intent.named
    if direction is None or chain is None or amount is None:
        raise Problems(missing(name) for name in intent.missing if name != "to").error
    return direction, chain, amount


async def _open(service: Service, params: SwapParams, call: Call, operation: str) -> Stored:
    problems = Problems()
    intent = await read_intent(params, service, problems)
    _require_amount(params, problems)
    with problems:
        session = read_session(params.session_id)
    if call.keyed_by_terms and params.session_id is None:
        problems.add(MissingInput(_NO_SESSION, field="sessionId"))
    with problems:
        webhook = read_webhook(params.webhook, service)
    digests = [each for each in (params.quote_digest, call.held_to) if each is not None]
    with problems:
        held = [_quoted(each, intent) for each in digests]
    problems.raise_found()
    to, refund_to = intent.to or "", intent.refund_address
    request = OrderRequest(
        *_swap_of(intent),
        to,
        session,
        refund_address=refund_to,
        client=call.client,
        webhook=webhook,
        pays_gas=intent.funding is not None,
        known=call.known,
    )
    if held:
        least = max(each.expected_output for each in held)
        most = min(each.amount for each in held)
        request = replace(request, least=least, most=most, accept=partial(_require_kept, held))
    claim = None
    digest = params.quote_digest
    shown = _fingerprint(intent, None if call.local_session else session, digest)
    shown |= keyed_webhook(webhook)
    key = call.idempotency_key
    if key is None and call.keyed_by_terms:
        key = _terms_key(_fingerprint(intent, session, digest))
    if key is not None:
        claim = Claim(call.namespace, key, operation, shown)
    source = call.session_source if session else "generated"
    write = partial(_order_answer, service, source, operation)
    return await place(service, lambda: request, claim, write)


def _changed(before: QuotedTerms, now: QuotedTerms) -> models.QuoteChange:
    """The changes between two quotes of one swap."""
    return models.QuoteChange(
        quoted_at=iso8601(before.at),
        rate=percent_change(before.rate, now.rate),
        expected_output=percent_change(before.expected_output, now.expected_output),
        deposit_amount=percent_change(before.amount, now.amount),
    )


def _require_amount(params: PricedParams, problems: Problems) -> None:
    """Add the problem of a call that names no amount."""
    if params.amount is None and params.receive_amount is None:
        problems.add(missing("amount"))


def _quoted(digest: str, intent: SwapIntent, *, field: str = FIELD) -> QuotedTerms:
    """The terms of an earlier quote. Raises InvalidInput for those of another swap."""
    quoted = read_digest(digest, field=field)
    direction, chain, amount = intent.direction, intent.chain, intent.named
    if direction is not None and chain is not None and amount is not None:
        pays_gas = intent.funding is not None
        quoted.require_for(direction, chain.chain_id, amount, pays_gas=pays_gas, field=field)
    return quoted


def _require_kept(held: Sequence[QuotedTerms], quote: VenueQuote) -> None:
    """Raise QuoteChanged unless the new quote is as good as every quote that the order must
    keep.
    """
    for terms in held:
        terms.require_kept(quote)


def _fingerprint(intent: SwapIntent, session: str | None, digest: str | None) -> Json:
    direction, chain, amount = _swap_of(intent)
    held = {} if digest is None else {FIELD: digest}
    if intent.funding is not None:
        held["funding"] = intent.funding
    return {
        "direction": direction.value,
        "chain": chain.chain_id,
        "amount" if intent.receive_amount is None else "receiveAmount": str(amount.units),
        "to": intent.to,
        "sessionId": session,
        "refundAddress": intent.refund_address,
        **held,
    }


def _terms_key(fingerprint: Json) -> str:
    """An idempotency key from the terms and the session, so only who knows the session finds it."""
    written = orjson.dumps(fingerprint, option=orjson.OPT_SORT_KEYS)
    return f"terms-{hashlib.sha256(written).hexdigest()}"


def _order_answer(service: Service, source: str, operation: str, placed: PlacedOrder) -> bytes:
    """The envelope of a new order, without its request id."""
    status = placed.status
    if status is None or status.data.funding_instructions is None:
        raise TypeError("the new order of a swap has a status answer, and asks for its deposit")
    data = models.OrderResult(
        service.views.network,
        placed.order.terms.session_id,
        source,
        order=status.data.order,
        funding_instructions=status.data.funding_instructions,
        quote=quote_view(service, placed.quote),
    )
    return head(operation, Answer(status.state, data, status.next_actions))


async def cancel(service: Service, params: CancelParams, call: Call) -> Answer[models.StatusResult]:
    """The order after the cancellation. Raises as ``cancel_order`` does."""
    order = await cancel_order(service, params.order_id, params.session_id)
    answer = status_answer(service.views, order, service.clock.now_ms())
    source, session = call.session_source, order.terms.session_id
    return replace(answer, data=replace(answer.data, session_id=session, session_source=source))


async def cancel_order(service: Service, order_id: str, session_id: str) -> Order:
    """End an order that waits for its first deposit. One that has expired stays as it is.

    Raises OrderNotFound (orders of the bridge included), VerificationFailed for another session,
    OrderNotCancellable once a deposit was seen, and Unavailable.
    """
    order = require_owner(await find_order(service, order_id), session_id)
    if order.status is OrderStatus.EXPIRED:
        return order
    return await service.venue.cancel(order)


async def fund(
    service: SandboxService, params: FundParams, _call: Call
) -> Answer[models.FundResult]:
    """Send a simulated deposit; by default what is still due."""
    order = await find_any_order(service, params.order_id)
    asset = order.terms.deposit_asset
    units = None if params.amount is None else parse_any_amount(params.amount, asset).units
    tx = await service.controls.fund(order, units)
    service.wake()
    transaction = models.TransactionView(
        txid=tx.txid,
        network=tx.network,
        to=tx.recipient,
        amount=format_units(tx.units, asset),
        asset=asset.symbol,
    )
    data = models.FundResult(*service.views.common(), transaction=transaction)
    poll = look_again(order, "Watch the order until it is completed or has failed.")
    return Answer(AgentState.READY, data, [poll])


async def fault(
    service: SandboxService, params: FaultParams, _call: Call
) -> Answer[models.FaultResult]:
    """Provoke a fault, move the clock, or change the rate."""
    kind = FaultKind(params.fault)
    if params.order_id is not None:
        read_order_id(params.order_id)
    if NEEDED.get(kind) == "orderId":
        if params.order_id is None:
            raise missing("orderId")
        await service.controls.fault_on_order(kind, await find_any_order(service, params.order_id))
    else:
        await service.controls.fault(kind, seconds=params.seconds, rate=params.rate)
    service.wake()
    now = iso8601(service.clock.now_ms())
    data = models.FaultResult(*service.views.common(), fault=kind.value, now=now)
    return Answer(AgentState.READY, data)
