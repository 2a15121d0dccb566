"""The BFF's handlers: chains, quote, orders and tickets (spec 2.4, 4.4).

They serve the same orders as the agent API. Amounts are atomic units.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from decimal import Decimal
from functools import partial
from typing import NamedTuple

from msgspec import UNSET, Raw, UnsetType

from rpcsvc.clock import iso8601
from rpcsvc.domain.addresses import parse_evm_address, same_address
from rpcsvc.domain.chains import MONERO_CHAIN_ID, Chain
from rpcsvc.domain.money import (
    LONGEST_AMOUNT,
    USDC,
    XMR,
    Asset,
    Money,
    as_units,
    format_units,
    reported_limits,
)
from rpcsvc.domain.order import Order, OrderStatus, TwapPlan
from rpcsvc.domain.pricing import Direction, convert_floor, deposit_asset, payout_asset
from rpcsvc.errors import (
    AmountAboveMaximum,
    AmountBelowMinimum,
    InputError,
    InvalidInput,
    UnsupportedChain,
    UnsupportedToken,
)
from rpcsvc.operations import bff_models
from rpcsvc.operations.clients import require_worth
from rpcsvc.operations.inputs import (
    Problems,
    both_amounts,
    missing,
    read_destination,
    read_refund_address,
    read_session,
    require_signable,
    require_verified,
)
from rpcsvc.operations.ordering import PlacedOrder, place
from rpcsvc.operations.params import SupportParams
from rpcsvc.operations.service import Call, Flat, Service, Stored
from rpcsvc.operations.support import create_ticket
from rpcsvc.operations.swap import cancel_order, find_funding
from rpcsvc.operations.views import draft_fields, may_fund
from rpcsvc.orders.idempotency import Claim
from rpcsvc.orders.ports.venue import OrderRequest, QuoteRequest, VenueQuote
from rpcsvc.strict_json import Json, dumps

# The newest orders of a session that a list has at most.
LONGEST_LIST = 100
CREATE = "bff.orders.create"

# A chunk of 2^53 USD in USDC units: far more than any order, so the order is not split.
_MOST_CHUNK_UNITS = 2**53 * 10**USDC.decimals
# A percentage has two decimals: written by the same code as amounts are.
_PERCENT = Asset("%", 2)


class Pair(NamedTuple):
    """The swap: its direction, and the chain of the USDC side."""

    direction: Direction
    chain: Chain


async def chains(service: Service, _params: bff_models.Nothing, _call: Call) -> Flat:
    """The chains; Monero first. Raises Unavailable while an upstream has not listed its own."""
    known = service.venue.listed_chains()
    least = min(chain.min_swap_usd for chain in known)
    monero = bff_models.BffChain(MONERO_CHAIN_ID, "monero", XMR.symbol, least)
    evm = [bff_models.BffChain(c.chain_id, c.name, c.native_token, c.min_swap_usd) for c in known]
    return Flat(bff_models.BffChains([monero, *evm]))


async def quote(service: Service, params: bff_models.BffQuoteParams, call: Call) -> Flat:
    """A price for the amount at the current rate."""
    pair = _pair(service, params)
    amount = _amount(params, pair)
    with _in_bff_terms(service, params):
        if params.funding is not None:
            require_signable(pair.direction)
        request = QuoteRequest(
            *pair,
            amount,
            call.integrator,
            client=call.client,
            pays_gas=params.funding is not None,
            known=call.known,
        )
        found = await service.venue.quote(request)
        await require_worth(service, call.known, found)
    return Flat(_quote_view(found, call))


async def create_order(service: Service, params: bff_models.BffOrderParams, call: Call) -> Stored:
    """A new order, or the same one again under its idempotency key."""
    request = await _request(service, params, call)
    claim = None
    if call.idempotency_key is not None:
        claim = Claim(call.namespace, call.idempotency_key, CREATE, _fingerprint(request))
    with _in_bff_terms(service, params):
        return await place(service, lambda: request, claim, partial(_new_order, service))


async def get_order(service: Service, params: bff_models.BffOrderIdParams, _call: Call) -> Flat:
    """An order's current state. Raises OrderNotFound and VerificationFailed."""
    order, is_paying = await find_funding(service, params.order_id)
    service.venue.watch(order.order_id)
    require_verified(params.verify, order.terms.to_address)
    return _order(service, order, is_paying=is_paying)


async def cancel(service: Service, params: bff_models.BffCancelParams, _call: Call) -> Flat:
    """The order after the cancellation. Raises as ``cancel_order`` does."""
    order = await cancel_order(service, params.order_id, params.session_id)
    return _order(service, order, is_paying=False)


def _order(service: Service, order: Order, *, is_paying: bool) -> Flat:
    now = service.clock.now_ms()
    awaits_rest = (
        order.status is OrderStatus.DEPOSIT_DETECTED and may_fund(order, now) and not is_paying
    )
    return Flat(
        bff_models.BffOrder(
            **draft_fields(order, now),
            refund_address=order.refund_to or UNSET,
            amount_due=str(order.due_units) if awaits_rest else UNSET,
        )
    )


async def list_orders(service: Service, params: bff_models.BffSessionParams, _call: Call) -> Flat:
    """The session's orders, newest first."""
    session = read_session(params.session, field="session") or ""
    found = await service.store.orders_of_session(session, LONGEST_LIST)
    return Flat(bff_models.BffOrders([_list_item(order) for order in found]))


async def open_ticket(service: Service, params: bff_models.BffTicketParams, call: Call) -> Flat:
    """Record a ticket; set the order's refund address when its owner asks for it."""
    given = {k: v for k, v in params.model_dump(by_alias=True).items() if v is not None}
    request = SupportParams.model_validate(given)
    answer = await create_ticket(service, request, call, tells_secret=False)
    ticket = answer.data.ticket
    return Flat(bff_models.BffTicket(ticket.ticket_id, ticket.created_at))


# --- reading ---


def _pair(service: Service, params: bff_models.BffQuoteParams) -> Pair:
    """Direction and chain. Raises UnsupportedChain and UnsupportedToken, or both as InputErrors."""
    to_usdc = params.from_chain_id == MONERO_CHAIN_ID
    if to_usdc == (params.to_chain_id == MONERO_CHAIN_ID):
        raise UnsupportedChain(
            "One side must be chain 0 (XMR), the other the chain of the USDC.",
            field="toChainId",
            received=params.to_chain_id,
            allowed=_chain_ids(service) if to_usdc else [MONERO_CHAIN_ID],
        )
    side, number = ("to", params.to_chain_id) if to_usdc else ("from", params.from_chain_id)
    chain = service.chains.by_id(number)
    if chain is None:
        raise _no_chain(f"{side}ChainId", number, _chain_ids(service))
    _require_tokens(params, chain, to_usdc=to_usdc)
    return Pair(Direction.XMR_TO_USDC if to_usdc else Direction.USDC_TO_XMR, chain)


def _chain_ids(service: Service) -> list[int]:
    return [chain.chain_id for chain in service.chains.all()]


def _no_chain(field: str, number: int, allowed: list[int]) -> UnsupportedChain:
    return UnsupportedChain(
        f"There is no chain {number} here. Send one of: {', '.join(map(str, allowed))}.",
        field=field,
        received=number,
        allowed=allowed,
    )


@contextmanager
def _in_bff_terms(service: Service, params: bff_models.BffQuoteParams) -> Iterator[None]:
    """Translate refusals that all surfaces share into the fields, numbers and units of the BFF."""
    try:
        yield
    except UnsupportedChain as refusal:
        to_usdc = params.from_chain_id == MONERO_CHAIN_ID
        side, number = ("to", params.to_chain_id) if to_usdc else ("from", params.from_chain_id)
        others = [other for other in _chain_ids(service) if other != number]
        raise _no_chain(f"{side}ChainId", number, others) from refusal
    except (AmountBelowMinimum, AmountAboveMaximum) as refusal:
        raise _amount_refused(refusal, params) from refusal


def _amount_refused(refusal: InputError, params: bff_models.BffQuoteParams) -> InputError:
    details = reported_limits(refusal.details or {}, as_units)
    field, received = _named(params)
    return type(refusal)(refusal.message, field=field, received=received, details=details)


def _require_tokens(params: bff_models.BffQuoteParams, chain: Chain, *, to_usdc: bool) -> None:
    xmr, usdc = ("from", "to") if to_usdc else ("to", "from")
    given = {"from": params.from_token, "to": params.to_token}
    problems = Problems()
    if given[xmr] != XMR.symbol:
        problems.add(_wrong_token(f"{xmr}Token", given[xmr], XMR.symbol, "chain 0"))
    if not _is_contract(given[usdc], chain):
        problems.add(_wrong_token(f"{usdc}Token", given[usdc], chain.usdc_contract, chain.name))
    problems.raise_found()


def _is_contract(token: str, chain: Chain) -> bool:
    try:
        return same_address(parse_evm_address(token, field="token"), chain.usdc_contract)
    except InputError:
        return False


def _wrong_token(field: str, received: str, supported: str, where: str) -> UnsupportedToken:
    return UnsupportedToken(
        f"{field} is not a token that is swapped on {where}. Send {supported}.",
        field=field,
        received=received,
        allowed=[supported],
    )


def _named(params: bff_models.BffQuoteParams) -> tuple[str, str]:
    """The input that names the amount, and its value. Raises MissingInput, and InvalidInput."""
    if params.to_amount is None:
        if params.from_amount is None:
            raise missing("fromAmount")
        return "fromAmount", params.from_amount
    if params.from_amount is not None:
        raise both_amounts("toAmount", "fromAmount", params.to_amount)
    return "toAmount", params.to_amount


def _amount(params: bff_models.BffQuoteParams, pair: Pair) -> Money:
    """The named amount, in the asset of the deposit or of the payout. Raises as ``_named``."""
    field, text = _named(params)
    asset = deposit_asset(pair.direction) if field == "fromAmount" else payout_asset(pair.direction)
    if not (text.isascii() and text.isdigit()) or text[0] == "0":
        raise InvalidInput(
            f"{field} must be a whole number of atomic units above 0 as a string: one"
            f' {asset.symbol} is "{10**asset.decimals}".',
            field=field,
            received=text,
        )
    if len(text) > LONGEST_AMOUNT:
        raise InvalidInput(
            f"{field} is too long: send at most {LONGEST_AMOUNT} digits.",
            field=field,
            received=text,
            allowed={"maximumLength": LONGEST_AMOUNT},
        )
    return Money(int(text), asset)


async def _request(service: Service, params: bff_models.BffOrderParams, call: Call) -> OrderRequest:
    pair = _pair(service, params)
    problems, refund_to = Problems(), None
    with problems:
        session = read_session(params.session_id)
    with problems:
        to = await read_destination(params.to_address, pair.direction, service, field="toAddress")
    if params.refund_address is not None:
        with problems:
            refund_to = await read_refund_address(params.refund_address, pair.direction, service)
    if params.funding is not None:
        with problems:
            require_signable(pair.direction)
    problems.raise_found()
    amount = _amount(params, pair)
    plan = _plan(params)
    who = call.client
    return OrderRequest(
        *pair,
        amount,
        to,
        session,
        plan,
        call.integrator,
        refund_to,
        who,
        to_field="toAddress",
        pays_gas=params.funding is not None,
        known=call.known,
    )


def _plan(params: bff_models.BffOrderParams) -> TwapPlan | None:
    """How to swap in chunks; None: at once. Raises InvalidInput for an exact output in chunks."""
    config = params.twap_config
    if params.to_amount is not None and config is not None and not config.disabled:
        raise InvalidInput(
            "toAmount can't be promised to an order that is swapped in chunks: each has the rate of"
            ' its moment. Leave twapConfig out, or send {"disabled": true}; or send fromAmount.',
            field="toAmount",
            received=params.to_amount,
        )
    config = config or bff_models.TwapConfig()
    if config.disabled or params.to_amount is not None:
        return None
    # The digits that the caller wrote, not the nearest binary fraction.
    sent = Decimal(repr(config.chunk_size_usd)) * 10**USDC.decimals
    return TwapPlan(int(min(sent, _MOST_CHUNK_UNITS)), int(config.interval_ms))


def _fingerprint(request: OrderRequest) -> Json:
    shown = {
        "fromChainId": 0 if request.direction is Direction.XMR_TO_USDC else request.chain.chain_id,
        "toChainId": request.chain.chain_id if request.direction is Direction.XMR_TO_USDC else 0,
        "toAmount" if request.priced.is_exact else "fromAmount": str(request.amount.units),
        "toAddress": request.to,
        "sessionId": request.session_id,
        "twapConfig": request.twap and [_chunk_usd(request.twap), request.twap.interval_ms],
        "refundAddress": request.refund_address,
    }
    return shown | {"funding": "x402"} if request.pays_gas else shown


def _chunk_usd(plan: TwapPlan) -> int | str:
    """The chunk size for the fingerprint; an int for whole dollars, as keys from before fractions
    have it.
    """
    dollars, fraction = divmod(plan.chunk_units, 10**USDC.decimals)
    return format_units(plan.chunk_units, USDC) if fraction else dollars


# --- writing ---


def _usd(units: int, asset: Asset, rate: int) -> str:
    """The value of an amount in dollars as a decimal string; one USDC counts as one."""
    worth = convert_floor(Direction.XMR_TO_USDC, units, rate) if asset is XMR else units
    return format_units(worth, USDC)


def _quote_view(found: VenueQuote, call: Call) -> bff_models.BffQuote:
    rate, payout = found.rate.usdc_per_xmr, found.payout_asset
    integrator_fee: bff_models.IntegratorFee | UnsetType = UNSET
    if call.integrator is not None:
        fee = found.price.integrator_fee(found.direction, found.deposit.units)
        integrator_fee = bff_models.IntegratorFee(
            percent=Raw(format_units(call.integrator.fee_bps, _PERCENT).encode()),
            amount=str(fee),
            amount_usd=_usd(fee, payout, rate),
        )
    return bff_models.BffQuote(
        from_amount=str(found.deposit.units),
        from_amount_usd=_usd(found.deposit.units, found.deposit_asset, rate),
        from_symbol=found.deposit_asset.symbol,
        to_amount=str(found.expected_output),
        to_amount_usd=_usd(found.expected_output, payout, rate),
        to_symbol=payout.symbol,
        estimated_time=found.seconds,
        min_received=str(found.min_received),
        integrator_fee=integrator_fee,
        funding_gas=_funding_gas(found.funding_gas),
    )


def _new_order(service: Service, placed: PlacedOrder) -> bytes:
    """The create response (spec 2.4)."""
    terms, exact = placed.order.terms, placed.order.terms.receive_amount
    is_xmr = terms.deposit_asset is XMR
    return dumps(
        bff_models.BffNewOrder(
            order_id=terms.order_id,
            deposit_address=terms.deposit_address,
            deposit_chain=terms.deposit_network,
            deposit_chain_id=MONERO_CHAIN_ID if is_xmr else terms.chain_id,
            deposit_token=XMR.symbol if is_xmr else placed.quote.chain.usdc_contract,
            deposit_token_symbol=terms.deposit_asset.symbol,
            deposit_amount=str(terms.deposit_amount),
            to_address=terms.to_address,
            expected_output=str(terms.expected_output),
            expires_at=iso8601(terms.expires_at),
            status=placed.order.status,
            checkout_url=service.views.checkout_url(terms.order_id),
            refund_address=placed.order.refund_to or UNSET,
            funding_gas=_funding_gas(terms.funding_gas),
            receive_amount=UNSET if exact is None else str(exact),
        )
    )


def _funding_gas(units: int) -> str | UnsetType:
    """The gas that a price has in it, if any."""
    return str(units) if units else UNSET


def _list_item(order: Order) -> bff_models.BffListItem:
    terms = order.terms
    numbers = {XMR: MONERO_CHAIN_ID, USDC: terms.chain_id}
    sent, received = terms.deposit_asset, payout_asset(terms.direction)
    return bff_models.BffListItem(
        id=terms.order_id,
        from_chain_id=numbers[sent],
        from_token_symbol=sent.symbol,
        from_amount=str(terms.deposit_amount),
        to_chain_id=numbers[received],
        to_token_symbol=received.symbol,
        to_amount_expected=str(terms.expected_output),
        to_address=terms.to_address,
        status=order.status,
        created_at=iso8601(terms.created_at),
        completed_at=iso8601(order.completed_at) if order.completed_at else None,
    )
