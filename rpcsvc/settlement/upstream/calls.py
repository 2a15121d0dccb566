"""The calls of an upstream in both dialects, and the caller's error when one fails."""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import orjson
import structlog
from msgspec import Struct
from msgspec.structs import replace

from rpcsvc.client import x402
from rpcsvc.client.errors import Unverified
from rpcsvc.domain.authorizations import OFFER_SECONDS, SignedAuthorization
from rpcsvc.domain.chains import MONERO_CHAIN_ID
from rpcsvc.domain.money import USDC, XMR, as_decimal, format_units, reported_limits
from rpcsvc.domain.order import Terms
from rpcsvc.domain.pricing import ONE_USDC, Direction
from rpcsvc.domain.usdc import Domain
from rpcsvc.errors import (
    AmountAboveMaximum,
    AmountBelowMinimum,
    InputError,
    InvalidDestination,
    OrderNotCancellable,
    OrderNotFound,
    ServiceError,
    Unavailable,
    UnsupportedChain,
    UnsupportedToken,
    VerificationFailed,
)
from rpcsvc.orders.authorizations import Carried
from rpcsvc.orders.ports.wallets import NetworkNames, Outcome
from rpcsvc.settlement.upstream import answers
from rpcsvc.settlement.upstream.answers import ParsedAnswer, Part, PayableNetworks, Text
from rpcsvc.settlement.upstream.client import Parse, UpstreamClient
from rpcsvc.settlement.upstream.limits import Demand, Urgency
from rpcsvc.settlement.upstream.requests import UpstreamRequest
from rpcsvc.settlement.upstream.transport import (
    NeverSent,
    NotAnId,
    RemoteError,
    UpstreamAnswer,
    UpstreamBroken,
    UpstreamCall,
    UpstreamError,
    UpstreamRefused,
    is_about_unfunded,
)
from rpcsvc.store.changes import Ticket

log = structlog.get_logger(__name__)

# The name and version of USDC, which authorizations are signed for.
_USUAL: Final = ("USD Coin", "2")

T = TypeVar("T")

_NOT_NOW: Final = "The service that settles this can't be used now. Try again later."
_NO_MORE_UNFUNDED: Final = (
    "The service that settles this reserves no more now for orders without a deposit. Fund or"
    " cancel an order, or try again later."
)

_INPUT_ERRORS: Final[dict[str, tuple[type[InputError], str]]] = {
    "amount_below_minimum": (AmountBelowMinimum, "amount"),
    "amount_above_maximum": (AmountAboveMaximum, "amount"),
    "unsupported_chain": (UnsupportedChain, "chain"),
    "unsupported_token": (UnsupportedToken, "token"),
    "invalid_destination": (InvalidDestination, "to"),
}
_WORDS: Final = {
    "amount_below_minimum": "The amount is under the least that is swapped. Send a larger one.",
    "amount_above_maximum": "The amount is over the most that is swapped. Send a smaller one.",
    "unsupported_chain": "That chain is not supported. Name another one.",
    "unsupported_token": "That token is not supported. Name another one.",
    "invalid_destination": "The destination address is refused. Check it against its source.",
    "order_not_found": "There is no such order. Check its id.",
    "verification_failed": "verify is not the order's destination address.",
    "order_not_cancellable": "A deposit was seen, or the order is over. Ask for its status.",
}
# What a refusal may be to a caller, who can mend it. Others are between this service and its
# upstream (a wrong API key, a limit, a key conflict), and to the caller they are `unavailable`.
CALLER_CODES: Final = frozenset(_WORDS)
_OWN_FIELDS: Final = ("field", "received", "allowed")


# --- payments by x402 ----------------------------------------------------------------------------


class _Extra(Part):
    name: Text
    version: Text


class _Settlement(Part):
    transaction: Text


class _Paid(Part):
    payment_response: _Settlement | None


class FundingAnswer(ParsedAnswer):
    """A payment that was taken; without ``payment_response`` its outcome is not known yet."""

    data: _Paid

    @property
    def carried(self) -> Carried:
        """The outcome of the payment."""
        response = self.data.payment_response
        if response is None:
            return Carried(Outcome.PENDING)
        return Carried(Outcome.SETTLED, response.transaction)


def offered_domain(header: str, terms: Terms, names: NetworkNames, due: int) -> Domain:
    """Return the EIP-712 domain to sign for, by the header PAYMENT-REQUIRED. Raises UpstreamBroken.

    An offer is taken only if it pays the due amount to this order's own address, in its asset and
    on its network; any other offer is passed on to nobody.
    """
    token = names.token or ""
    bill = x402.Bill(names.chain_id, token, terms.deposit_address, due)
    try:
        offer = x402.offer_of(orjson.loads(base64.b64decode(header, validate=True)), bill)
        extra = _Extra.model_validate(offer["extra"])
    except (ValueError, Unverified) as error:
        raise UpstreamBroken(
            "The upstream's answer is not as agreed: PAYMENT-REQUIRED has no offer that pays what"
            " is due to the order's own address.",
            field="PAYMENT-REQUIRED",
        ) from error
    return Domain(extra.name, extra.version, names.chain_id, token)


def payment_header(
    terms: Terms, signed: SignedAuthorization, names: NetworkNames, domain: Domain | None
) -> str:
    """Return the header PAYMENT-SIGNATURE of an authorization for the order of these terms.

    Without ``domain``, after a restart, the usual name is sent: an earlier payment is found by its
    nonce, and name and version are for the signer alone.
    """
    given = signed.authorization
    name, version = (domain.name, domain.version) if domain else _USUAL
    offer = {
        "scheme": "exact",
        "network": f"eip155:{names.chain_id}",
        "amount": str(given.units),
        "asset": names.token,
        "payTo": terms.deposit_address,
        "maxTimeoutSeconds": OFFER_SECONDS,
        "extra": {"name": name, "version": version, "assetTransferMethod": "eip3009"},
    }
    message = {
        "from": given.source,
        "to": given.to,
        "value": given.units,
        "validAfter": given.valid_after,
        "validBefore": given.valid_before,
        "nonce": f"0x{given.nonce.hex()}",
    }
    payment = x402.payment(offer, {"message": message}, signed.signature)
    return base64.b64encode(orjson.dumps(payment)).decode()


# --- calls ---------------------------------------------------------------------------------------


class Dialect(Struct, frozen=True):
    """The differences between upstreams.

    ``paths`` come after the base address, by the names of the calls; ``base_url`` gives that of the
    configured URL. ``keys``: idempotency keys are honoured. ``cuts_usdc``:
    orders that pay USDC in are cut into chunks too, so that they have a twapConfig.
    ``exact``: a quote and an order may name what is to arrive (toAmount).
    ``refund_addresses``: an order may be created with a final refundAddress. ``code_of``
    gives a refusal one of CALLER_CODES, or None where nothing is certain. ``messages_for_users``:
    the dialect guarantees error messages that are safe to show (spec 7). ``times_ends``: an order
    that is over has the time at which it ended. ``*_per_minute``: its published limits for one
    client address.
    """

    name: str
    base_url: Callable[[str], str]
    paths: Mapping[str, str]
    keys: bool
    cuts_usdc: bool
    exact: bool
    refund_addresses: bool
    read_error: Callable[[Any], RemoteError | None]
    code_of: Callable[[UpstreamRefused], str | None]
    messages_for_users: bool
    times_ends: bool
    creations_per_minute: int
    calls_per_minute: int


class Upstream:
    """One upstream's calls, typed.

    Reads raise NeverSent, UpstreamRefused, NoAnswer or UpstreamBroken; creations raise NeverSent,
    UpstreamRefused or UpstreamOutcomeUnknown. ``service_error`` turns them into what a caller may
    see.
    """

    def __init__(self, client: UpstreamClient, dialect: Dialect, networks: PayableNetworks) -> None:
        self._client = client
        self.dialect = dialect
        self._networks = networks

    async def capabilities(
        self, demand: Demand, *, total_ms: int | None = None
    ) -> answers.Capabilities:
        """Return its network (sandbox, mainnet, stagenet, ...) and its offer."""
        call = replace(self._call("capabilities"), takes_key=False)
        return await self._client.read(
            call, answers.Capabilities.read, demand=demand, total_ms=total_ms
        )

    async def chains(
        self, demand: Demand | None = None, *, total_ms: int | None = None
    ) -> answers.UpstreamChains:
        """The chains that it offers."""
        return await self._client.read(
            self._call("chains"),
            answers.UpstreamChains.read,
            demand=demand or Demand(),
            total_ms=total_ms,
        )

    async def quote(
        self, request: UpstreamRequest, urgency: Urgency = Urgency.ROUTINE
    ) -> answers.UpstreamQuote:
        """A price. POST, but it changes nothing."""
        call = self._call("quote", body=_quote_body(request))
        demand = Demand(urgency, is_price=True)
        return await self._read(call, lambda a: answers.quote(a, request), demand)

    async def create_order(
        self, request: UpstreamRequest, *, key: str, resumed: bool = False
    ) -> answers.UpstreamOrder:
        """A new order. ``key`` is passed on where the dialect honours it.

        ``resumed``: an earlier call with this key had no known outcome. Raises ValueError for that
        where keys are not honoured: there, such an order is for the operator to look up.
        """
        body = _order_body(request, cuts_usdc=self.dialect.cuts_usdc)
        call = self._call("create_order", body=body)
        return await self._create(
            call, lambda a: answers.order(a, request, self._networks), key, resumed=resumed
        )

    async def order(self, order_id: str, *, demand: Demand | None = None) -> answers.StatusAnswer:
        """An order's current state."""
        call = self._call("order", order_id)
        return await self._read(call, lambda a: answers.status(a, order_id, self._networks), demand)

    async def cancel_order(self, order_id: str, session_id: str) -> answers.StatusAnswer:
        """End an order that no deposit was sent to. Safe to repeat."""
        call = self._call("cancel_order", order_id, body={"sessionId": session_id})
        return await self._read(call, lambda a: answers.status(a, order_id, self._networks))

    async def fund_order(self, order_id: str, payment: str | None) -> FundingAnswer:
        """Pay an order by a signed payment: safe to repeat, since its nonce is used once.

        Raises PaymentWanted for none, and for one that is refused.
        """
        call = self._call("fund_order", order_id, body={})
        call = replace(call, payment=payment, takes_key=False)
        return await self._read(call, FundingAnswer.read)

    async def create_ticket(self, order_id: str, ticket: Ticket) -> answers.UpstreamTicket:
        """A support ticket: sent once, because no key keeps it from being opened twice."""
        body = {
            "orderId": order_id,
            "sessionId": ticket.session_id,
            "walletAddress": ticket.wallet_address,
            "category": ticket.category,
            "message": ticket.message,
        }
        call = self._call("create_ticket", body=body)
        return await self._client.create(
            call, answers.UpstreamTicket.read, key=None, demand=Demand(Urgency.ROUTINE)
        )

    async def bridge_rates(self) -> answers.UpstreamBridgeRates:
        """The bridge's rates."""
        demand = Demand(is_price=True)
        return await self._read(
            self._call("bridge_rates"), answers.UpstreamBridgeRates.read, demand
        )

    async def bridge_deposit(
        self, to_address: str, *, key: str, resumed: bool = False
    ) -> answers.BridgeOrder:
        """A bridge order that takes XMR and credits an address on the exchange."""
        call = self._call("bridge_deposit", body={"toAddress": to_address})
        return await self._create(
            call, self._bridge_reader(to_address, pays_monero=True), key, resumed=resumed
        )

    async def bridge_withdraw(
        self, to_address: str, *, key: str, resumed: bool = False
    ) -> answers.BridgeOrder:
        """A bridge order that takes funds on the exchange and pays XMR."""
        call = self._call("bridge_withdraw", body={"toAddress": to_address})
        return await self._create(
            call, self._bridge_reader(to_address, pays_monero=False), key, resumed=resumed
        )

    async def bridge_order(
        self, order_id: str, *, demand: Demand | None = None
    ) -> answers.BridgeOrderStatus:
        """A bridge order's current state."""
        call = self._call("bridge_order", order_id)
        return await self._read(call, lambda a: answers.bridge_status_of(a, order_id), demand)

    # --- helpers ---

    def _call(
        self,
        name: str,
        order_id: str | None = None,
        *,
        body: Mapping[str, Any] | None = None,
    ) -> UpstreamCall:
        path = self.dialect.paths.get(name)
        if path is None:
            raise NeverSent(
                f"An upstream of dialect {self.dialect.name} has no call {name}.", retryable=False
            )
        if order_id is not None:
            if not answers.is_id(order_id):
                raise NotAnId("That is not an id that an upstream gives.", retryable=False)
            path = path.replace("{id}", order_id)
        return UpstreamCall(name, "GET" if body is None else "POST", path, body)

    async def _read(self, call: UpstreamCall, parse: Parse[T], demand: Demand | None = None) -> T:
        return await self._client.read(call, parse, demand=demand or Demand())

    async def _create(self, call: UpstreamCall, parse: Parse[T], key: str, *, resumed: bool) -> T:
        return await self._client.create(
            call,
            parse,
            key=key if self.dialect.keys else None,
            demand=Demand(Urgency.CREATION),
            resumed=resumed,
        )

    def _bridge_reader(self, to_address: str, *, pays_monero: bool) -> Parse[answers.BridgeOrder]:
        def read(answer: UpstreamAnswer) -> answers.BridgeOrder:
            return answers.bridge_order(answer, to_address, self._networks, pays_monero=pays_monero)

        return read

    def service_error(self, error: UpstreamError) -> ServiceError:
        """The error for a caller (errors.py): Unavailable unless the caller can mend it.

        UpstreamOutcomeUnknown gives Unavailable too. It must be on record for the operator by then.
        The reason is for the log alone.
        """
        if isinstance(error, NotAnId):
            return OrderNotFound(_WORDS["order_not_found"])
        if isinstance(error, UpstreamRefused) and (code := self.dialect.code_of(error)) is not None:
            words = error.message if self.dialect.messages_for_users else _WORDS[code]
            return _caller_error(code, words, error.details)
        if not isinstance(error, UpstreamRefused):  # whose words are in the log already
            log.warning("upstream_call_failed", reason=error.reason)
        seconds = -(-(error.retry_after_ms or 5_000) // 1000)
        about_unfunded = isinstance(error, UpstreamRefused) and is_about_unfunded(error.details)
        return Unavailable(
            _NO_MORE_UNFUNDED if about_unfunded else _NOT_NOW, retry_after=max(1, seconds)
        )


def _quote_body(request: UpstreamRequest) -> dict[str, Any]:
    """The quote request of spec 2.4, in which chain id 0 is Monero."""
    chain = request.chain
    ends = [(MONERO_CHAIN_ID, XMR.symbol), (chain.chain_id, chain.usdc_contract)]
    if request.direction is Direction.USDC_TO_XMR:
        ends.reverse()
    (source, sent), (target, wanted) = ends
    body = {
        "fromChainId": source,
        "toChainId": target,
        "fromToken": sent,
        "toToken": wanted,
        "toAmount" if request.is_exact else "fromAmount": str(request.amount.units),
    }
    return body | {"funding": "x402"} if request.pays_gas else body


def _order_body(request: UpstreamRequest, *, cuts_usdc: bool) -> dict[str, Any]:
    """The order create request of spec 2.4, and the refund address of another rpcsvc's BFF."""
    body = {**_quote_body(request), "toAddress": request.to, "sessionId": request.session_id}
    if request.refund_address is not None:
        body["refundAddress"] = request.refund_address
    # Spec 8: XMR orders only.
    if cuts_usdc or request.direction is Direction.XMR_TO_USDC:
        twap = request.twap
        body["twapConfig"] = (
            {"disabled": True}
            if twap is None
            else {"chunkSizeUsd": _usd(twap.chunk_units), "intervalMs": twap.interval_ms}
        )
    return body


def _usd(units: int) -> int | float:
    """USDC units as a number of dollars; a float of so few digits is written digit for digit."""
    return float(format_units(units, USDC)) if units % ONE_USDC else units // ONE_USDC


def _caller_error(code: str, words: str, details: Mapping[str, Any]) -> ServiceError:
    if code == "order_not_found":
        return OrderNotFound(words)
    if code == "verification_failed":
        return VerificationFailed(words)
    if code == "order_not_cancellable":
        return OrderNotCancellable(words, details=details)
    kind, field = _INPUT_ERRORS[code]
    # Its problems name the fields of its own surface.
    rest = {k: v for k, v in details.items() if k not in (*_OWN_FIELDS, "problems")}
    return kind(
        words,
        field=str(details.get("field", field)),
        received=details.get("received"),
        allowed=details.get("allowed"),
        details=reported_limits(rest, as_decimal),
    )
