"""The operation swap.fund: a USDC order paid by one signature and without gas (x402, EIP-3009)."""

from __future__ import annotations

from typing import Final

from rpcsvc.domain.addresses import same_address
from rpcsvc.domain.authorizations import (
    LEAST_SECONDS,
    OFFER_SECONDS,
    AuthorizationRefused,
    Due,
    Reason,
    Refusal,
    SignedAuthorization,
    refusal,
)
from rpcsvc.domain.clients import KnownClient
from rpcsvc.domain.money import USDC
from rpcsvc.domain.order import AGENT_STATE_OF, DepositState, Order
from rpcsvc.errors import (
    IdempotencyConflict,
    OrderNotFundable,
    PaymentRefused,
    PaymentRequired,
)
from rpcsvc.operations.models import FundingResult, PaymentResponse
from rpcsvc.operations.ordering import status_answer
from rpcsvc.operations.params import FundingParams
from rpcsvc.operations.service import (
    Answer,
    Call,
    Service,
    ViewContext,
    X402Settlement,
    action,
)
from rpcsvc.operations.swap import find_order, look_again
from rpcsvc.operations.views import may_fund
from rpcsvc.operations.x402 import (
    EXACT,
    FIELD,
    PaymentRequirements,
    network_id,
    read_payment,
    required,
    requirements,
)
from rpcsvc.orders.authorizations import Authorizations
from rpcsvc.store.authorizations import AuthorizationRecord, AuthorizationState
from rpcsvc.strict_json import Json

# An offer has to leave the payer some time to sign.
_LEAST_OFFER_SECONDS: Final = 2 * LEAST_SECONDS
_NONCE_USED: Final = Refusal(
    Reason.NONCE_USED, "The payer used this nonce for another payment: sign a new one."
)


async def fund(service: Service, params: FundingParams, call: Call) -> Answer[FundingResult]:
    """Submit the signed payment; without one, raise PaymentRequired that says what to sign.

    Raises OrderNotFound, InvalidInput for a malformed payment, PaymentRefused for an unsuitable
    one, IdempotencyConflict for a name that stands for another one, and OrderNotFundable. A
    repeated payment gets the current outcome.
    """
    order = await find_order(service, params.order_id)
    authorizations = service.venue.authorizations
    if order.terms.deposit_asset is not USDC:
        raise _not_fundable(order, "The order waits for XMR, and only USDC is paid by signing")
    payment = None if params.payment is None else read_payment(params.payment)
    known = None if payment is None else await authorizations.find(order, payment.signed)
    if payment is not None and known is not None and _is_repeated(known, order, payment.signed):
        return await _outcome(service, authorizations, order, known)
    if payment is not None and payment.payment_id is not None:
        await _require_unnamed(authorizations, payment.signed, payment.payment_id)
    record = await authorizations.unresolved(order.order_id)
    if payment is None:
        if record is not None:
            return _answer(service, order, record)
        offer = _offer(service, order, await _due(service, authorizations, order))
        raise PaymentRequired(
            "The order is not paid yet. Sign an entry of details.paymentRequired.accepts, and send"
            " the same call with the payment.",
            _required(service.views, order, offer),
        )
    if call.known is not None:
        _require_payee(call.known, order, payment.signed)
    if record is not None:
        raise _not_fundable(order, "Another signed payment of the order is under way")
    due = await _due(service, authorizations, order)
    offer = _offer(service, order, due)
    wrong = _NONCE_USED if known else _unlike(payment.accepted, offer)
    wrong = wrong or refusal(payment.signed, due, service.clock.now_ms() // 1_000)
    if wrong is not None:
        raise _refused(service.views, order, offer, wrong)
    try:
        paid = await authorizations.pay(
            order, payment.signed, payment.payment_id, call.client, service.waits
        )
    except AuthorizationRefused as error:
        raise _refused(service.views, order, offer, error.refusal) from None
    service.wake()
    return await _outcome(service, authorizations, order, paid)


def _require_payee(known: KnownClient, order: Order, signed: SignedAuthorization) -> None:
    """Raise DestinationNotAllowed for an order that pays or refunds what its payer may not.

    Without a refund address, a refund goes back to who signs.
    """
    known.require_destination(order.terms.to_address, field="to", caller=known)
    refund_to = order.refund_to or signed.authorization.source
    known.require_destination(refund_to, field="refundAddress", caller=known)


def _is_repeated(known: AuthorizationRecord, order: Order, signed: SignedAuthorization) -> bool:
    """Return whether a payment is the one on record under its nonce."""
    return known.order_id == order.order_id and known.signed.is_same_payment(signed)


async def _require_unnamed(
    authorizations: Authorizations, signed: SignedAuthorization, payment_id: str
) -> None:
    """Raise IdempotencyConflict for a name under which the payer has signed something else."""
    if await authorizations.is_named(signed, payment_id):
        raise IdempotencyConflict(
            f"The payer has signed another payment as {payment_id}. Send that payment again to"
            " learn what became of it, or sign this one with a new id.",
            details={"fields": [f"{FIELD}.payload"]},
        )


async def _outcome(
    service: Service, authorizations: Authorizations, order: Order, record: AuthorizationRecord
) -> Answer[FundingResult]:
    """The answer to a payment on record. Raises PaymentRefused for one that failed."""
    order = await find_order(service, order.order_id)
    if record.state is AuthorizationState.FAILED:
        wrong = Refusal(Reason.FAILED, f"{record.reason} Nothing was taken: sign a new payment.")
        offer = _offer(service, order, await _due(service, authorizations, order))
        raise _refused(service.views, order, offer, wrong)
    return _answer(service, order, record)


def _answer(service: Service, order: Order, record: AuthorizationRecord) -> Answer[FundingResult]:
    is_paying = record.state in (AuthorizationState.RECORDED, AuthorizationState.SENT)
    now = service.clock.now_ms()
    status = status_answer(service.views, order, now, is_paying=is_paying)
    settlement = None
    if record.txid is not None and not _is_removed(order, record.txid):
        names = service.views.profile.names(USDC, order.terms.chain)
        settlement = _settlement(record.txid, record, names.chain_id)
    data = FundingResult(
        *service.views.common(), order=status.data.order, payment_response=settlement
    )
    if settlement is not None:
        text = "The payment is made: watch the order until it is completed or has failed."
        steps = [look_again(order, text)]
    else:  # two steps, because lean answers leave out the words of the second
        text = "It is not known yet what became of the payment. Send or sign no other one."
        steps = [action("await_signed_payment", text), look_again(order, "Watch the order.")]
    return Answer(
        AGENT_STATE_OF[order.status], data, steps, settlement=X402Settlement(settlement, now)
    )


def _is_removed(order: Order, txid: str) -> bool:
    """Return whether a reorganisation took the payment's deposit off its chain."""
    return any(
        deposit.key.txid == txid and deposit.state is DepositState.REMOVED
        for deposit in order.deposits
    )


def _settlement(txid: str, record: AuthorizationRecord, chain_id: int) -> PaymentResponse:
    return PaymentResponse(
        success=True,
        transaction=txid,
        network=network_id(chain_id),
        payer=record.key.payer,
        amount=str(record.signed.authorization.units),
    )


# --- what is to be signed --------------------------------------------------------------------


async def _due(service: Service, authorizations: Authorizations, order: Order) -> Due:
    """The payment that is due now. Raises OrderNotFundable."""
    if not may_fund(order, service.clock.now_ms()):
        raise _not_fundable(order, "Nothing is due on the order any more")
    if _seconds_left(service, order) < _LEAST_OFFER_SECONDS:
        raise _not_fundable(order, "The deposit window closes in less than a minute")
    return Due(order.terms.deposit_address, order.due_units, await authorizations.token(order))


def _offer(service: Service, order: Order, due: Due) -> PaymentRequirements:
    return requirements(due, min(OFFER_SECONDS, _seconds_left(service, order)))


def _seconds_left(service: Service, order: Order) -> int:
    return (order.terms.expires_at - service.clock.now_ms()) // 1_000


def _unlike(accepted: PaymentRequirements, offer: PaymentRequirements) -> Refusal | None:
    """The refusal of a payment that accepts something else than is offered; None if it fits."""
    if accepted.scheme != EXACT:
        return Refusal(Reason.SCHEME, f"accepted.scheme has to be {EXACT}.")
    if accepted.network != offer.network:
        return Refusal(Reason.NETWORK, f"accepted.network has to be {offer.network}.")
    alike = (
        same_address(accepted.asset, offer.asset)
        and same_address(accepted.pay_to, offer.pay_to)
        and accepted.amount == offer.amount
    )
    if not alike:
        return Refusal(
            Reason.REQUIREMENTS,
            f"accepted has to be {offer.amount} units of {offer.asset} to {offer.pay_to}.",
        )
    return None


def _required(
    views: ViewContext, order: Order, offer: PaymentRequirements, why: str | None = None
) -> Json:
    url = views.fund_url(order.order_id)
    return required(url, f"The USDC deposit of order {order.order_id}", offer, why)


def _refused(
    views: ViewContext, order: Order, offer: PaymentRequirements, wrong: Refusal
) -> PaymentRefused:
    return PaymentRefused(wrong.message, _required(views, order, offer, wrong.reason.value))


def _not_fundable(order: Order, why: str) -> OrderNotFundable:
    return OrderNotFundable(
        f"{why}. Ask for the order's status: it says what is due, and how it is paid.",
        details={"status": order.status.value},
    )
