"""The operation swap.check: compares a payment with the order that it is meant for."""

from __future__ import annotations

from msgspec.structs import replace

from rpcsvc import strict_json
from rpcsvc.clock import iso8601
from rpcsvc.domain.chains import MONERO_CHAIN_ID
from rpcsvc.domain.money import USDC, XMR, format_units, parse_any_amount
from rpcsvc.domain.order import AgentState, Order
from rpcsvc.domain.payment_check import (
    ExpectedPayment,
    Mismatch,
    Problem,
    ProposedPayment,
    Unreadable,
    differences,
    read_calldata,
    read_transaction,
    read_uri,
    require_no_secret,
)
from rpcsvc.errors import InvalidInput, InvalidJson
from rpcsvc.operations.dispatch import showable
from rpcsvc.operations.models import CheckResult, PaymentCheck, PaymentProblem
from rpcsvc.operations.params import CheckParams
from rpcsvc.operations.service import Answer, Call, Service, action
from rpcsvc.operations.swap import find_funding, look_again
from rpcsvc.operations.views import may_fund
from rpcsvc.orders.ports.wallets import NetworkNames
from rpcsvc.strict_json import Json

_WAYS = "Send one of: transaction; paymentUri; address, amount, asset and chain."
_MOST_DEPTH = 4


async def check(service: Service, params: CheckParams, _call: Call) -> Answer[CheckResult]:
    """Return whether the payment is the one that the order waits for.

    Raises OrderNotFound, and InvalidInput for what is signed or holds a key.
    """
    order, is_paying = await find_funding(service, params.order_id)
    names = service.views.profile.names(order.terms.deposit_asset, order.terms.chain)
    now = service.clock.now_ms()
    is_payable = may_fund(order, now) and not is_paying
    try:
        payment = _read(params, names)
    except Unreadable as problem:
        found: tuple[Mismatch, ...] = (Mismatch(Problem.UNREADABLE, str(problem)),)
    else:
        found = differences(payment, _due(order, names, is_payable=is_payable), now)
    asset = order.terms.deposit_asset
    checked = PaymentCheck(
        safe_to_send=not found,
        problems=[_problem(each) for each in found],
        amount_due=format_units(order.due_units, asset) if is_payable else None,
        expires_at=iso8601(order.terms.expires_at),
    )
    data = CheckResult(*service.views.common(), payment_check=checked)
    return Answer(AgentState.READY, data, [_next(order, is_safe=not found)])


def _read(params: CheckParams, names: NetworkNames) -> ProposedPayment:
    described = (params.address, params.amount, params.asset)
    ways = [params.transaction, params.payment_uri, next((d for d in described if d), None)]
    is_uri_alone = params.chain is None and params.contract is None
    if sum(way is not None for way in ways) != 1 or not (
        params.payment_uri is None or is_uri_alone
    ):
        raise Unreadable(f"One payment is checked at a time. {_WAYS}")
    if params.payment_uri is not None:
        payment = read_uri(params.payment_uri)
        require_no_secret(payment.address, "paymentUri")  # which may have been percent-encoded
        return payment
    if params.transaction is not None:
        return _transaction(params.transaction, params, names)
    return _described(params, names)


def _transaction(
    given: dict[str, object] | str, params: CheckParams, names: NetworkNames
) -> ProposedPayment:
    """The transaction to be signed; chain and contract are used if it names none itself."""
    if isinstance(given, str) and not given.lstrip().startswith("{"):
        payment = read_calldata(given.strip())
    else:
        payment = read_transaction(_json(given) if isinstance(given, str) else given)
    return replace(
        payment,
        token=params.contract if payment.token is None else payment.token,
        chain_id=_chain_id(params.chain, names) if payment.chain_id is None else payment.chain_id,
    )


def _json(text: str) -> dict[str, object]:
    try:
        found = strict_json.loads(text.encode("utf-8", "surrogatepass"), max_depth=_MOST_DEPTH)
    except InvalidJson:
        found = None
    if not isinstance(found, dict):
        raise Unreadable("The transaction is not one JSON object.")
    return found


def _described(params: CheckParams, names: NetworkNames) -> ProposedPayment:
    if params.address is None or params.amount is None or params.asset is None:
        raise Unreadable("The payment is not told whole: send address, amount and asset.")
    asset = XMR if params.asset == XMR.symbol else USDC
    is_xmr_alone = asset is XMR and params.chain is None
    chain_id = MONERO_CHAIN_ID if is_xmr_alone else _chain_id(params.chain, names)
    try:
        units = parse_any_amount(params.amount, asset).units
    except InvalidInput as problem:
        raise Unreadable(problem.message) from None
    return ProposedPayment(params.address, units, asset, chain_id, params.contract)


def _chain_id(chain: str | int | None, names: NetworkNames) -> int | None:
    """The number of a chain, or of the order's network by its name; -1 for any other name."""
    if chain is None or isinstance(chain, int):
        return chain
    if chain.isascii() and chain.isdigit() and len(chain) <= len(str(2**64)):
        return int(chain)
    return names.chain_id if chain.lower() == names.network.lower() else -1


def _due(order: Order, names: NetworkNames, *, is_payable: bool) -> ExpectedPayment:
    terms = order.terms
    return ExpectedPayment(
        address=terms.deposit_address,
        units=order.due_units,
        asset=terms.deposit_asset,
        chain_id=names.chain_id,
        token=names.token,
        is_payable=is_payable,
        closes_at=terms.expires_at,
    )


def _problem(found: Mismatch) -> PaymentProblem:
    return PaymentProblem(
        code=found.problem.value,
        message=found.message,
        expected=found.expected,
        received=showable(found.received),
    )


def _next(order: Order, *, is_safe: bool) -> Json:
    if is_safe:
        return action("sign_and_send", "It is what the order waits for: have it signed and sent.")
    text = "Don't have it signed. Make another payment from fundingInstructions."
    return look_again(order, text)
