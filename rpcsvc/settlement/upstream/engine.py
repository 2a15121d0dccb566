"""An upstream: quotes, orders and their status, in the order layer's types."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from decimal import Decimal
from math import ceil
from typing import Final

import orjson
import structlog
from msgspec.structs import replace

from rpcsvc.domain.addresses import MoneroNetwork, same_address
from rpcsvc.domain.authorizations import SignedAuthorization
from rpcsvc.domain.bridge import DIRECTION_OF, BridgeKind, BridgeStatus
from rpcsvc.domain.chains import MONERO_CHAIN_ID, Chain
from rpcsvc.domain.money import MAX_UNITS, USDC, XMR, Asset, Money
from rpcsvc.domain.order import AWAITS_DEPOSIT, PERPS, OrderStatus, Report, Terms
from rpcsvc.domain.pricing import (
    ONE_USDC,
    ONE_XMR,
    Direction,
    deposit_asset,
    implied_rate,
)
from rpcsvc.domain.usdc import Domain
from rpcsvc.errors import (
    OrderNotCancellable,
    OrderNotFundable,
    ServiceError,
    Unavailable,
    UnsupportedChain,
    UnsupportedToken,
)
from rpcsvc.health import Health
from rpcsvc.orders.authorizations import Carried
from rpcsvc.orders.ports.venue import ExchangeRate, ExchangeRates
from rpcsvc.orders.ports.wallets import NetworkNames, Outcome
from rpcsvc.settlement.upstream import answers
from rpcsvc.settlement.upstream.answers import UNKNOWN, UpstreamQuote
from rpcsvc.settlement.upstream.calls import Upstream, offered_domain, payment_header
from rpcsvc.settlement.upstream.client import UpstreamClient
from rpcsvc.settlement.upstream.limits import Budget, Demand, Urgency
from rpcsvc.settlement.upstream.offered import ChainWatch, OfferedChains
from rpcsvc.settlement.upstream.requests import (
    Created,
    CreationUnknown,
    Offer,
    UpstreamRequest,
    UpstreamResting,
    UpstreamStatus,
)
from rpcsvc.settlement.upstream.transport import (
    BreakerOpen,
    BudgetSpent,
    PaymentWanted,
    UpstreamBroken,
    UpstreamError,
    UpstreamOutcomeUnknown,
    UpstreamRefused,
)
from rpcsvc.store.changes import Ticket

log = structlog.get_logger(__name__)

# A deposit that any upstream prices, to learn a rate by.
_FIRST_USDC: Final = 200 * ONE_USDC
# How long an upstream is left alone that does not say for how long.
_REST_MS = 5_000
# The answers to a signed payment by which it took nothing: malformed, refused, or not to be paid.
_TAKES_NOTHING = frozenset({400, 402, 409})

_BRIDGE_STATUS = {
    BridgeStatus.AWAITING_DEPOSIT: OrderStatus.AWAITING_DEPOSIT,
    BridgeStatus.PENDING_CONFIRMATIONS: OrderStatus.DEPOSIT_DETECTED,
    BridgeStatus.PROCESSING: OrderStatus.EXECUTING_SWAP,
    BridgeStatus.COMPLETED: OrderStatus.COMPLETED,
    BridgeStatus.FAILED: OrderStatus.FAILED,
    BridgeStatus.EXPIRED: OrderStatus.EXPIRED,
}
# Spec 3.4.
_TWAP_STATUSES = frozenset({"pending", "active", "completed", "failed"})

# Quotes asked for one exact payout.
MOST_QUOTES: Final = 6
# Outputs that differ by fewer units say more about rounding than about the price.
_LEAST_SPAN: Final = 1_000
_RETRY_SECONDS: Final = 5


class UpstreamEngine:
    """An upstream service. Raises errors.ServiceError when nothing was done there."""

    def __init__(
        self,
        client: UpstreamClient,
        upstream: Upstream,
        chains: OfferedChains,
        watch: ChainWatch,
        creations: Budget,
        monero: MoneroNetwork,
    ) -> None:
        self._monero = monero
        self._client = client
        self._creations = creations
        self._upstream = upstream
        self.watch = watch
        self.chains = chains
        # The last price of each direction and chain: deposit and payout units.
        self._last: dict[tuple[Direction, str], tuple[int, int]] = {}

    # --- orders ---

    @property
    def honours_keys(self) -> bool:
        """Whether a creation may be repeated with its key."""
        return self._upstream.dialect.keys

    @property
    def fixes_refund_addresses(self) -> bool:
        """Whether an order may be created with a refund address that is final."""
        return self._upstream.dialect.refund_addresses

    @property
    def takes_exact(self) -> bool:
        """Whether an order may name what is to arrive."""
        return self._upstream.dialect.exact

    def remember(self, ages_ms: list[int]) -> None:
        """Count orders of an earlier process, by their age, for the limit of creations."""
        self._creations.remember(ages_ms)

    async def quote(self, request: UpstreamRequest, most: int = MAX_UNITS) -> Offer:
        """The price of a swap. Raises errors.ServiceError.

        ``most``: the deposit units of an earlier quote for the same that is to arrive, if any.
        """
        # An upstream need not read longer numbers; its limit is below this one.
        amount = request.amount
        request = replace(request, amount=Money(min(amount.units, MAX_UNITS), amount.asset))
        try:
            if request.is_exact and not self.takes_exact:
                found = await self._exact_quote(request, most)
            else:
                found = await self._quote(request)
        except UpstreamError as error:
            raise self._refusal(request.chain, error) from error
        rate = implied_rate(request.direction, found.from_amount, found.to_amount)
        if found.to_amount <= 0 or rate > MAX_UNITS:
            raise Unavailable("The service that settles this gives no price now.")
        output = found.to_amount
        if request.is_exact:
            # A deposit that was found by quotes may bring a unit's worth more.
            output = request.amount.units
        return Offer(
            found.from_amount,
            output,
            min(found.min_received, output),
            found.estimated_seconds,
            found.funding_gas,
        )

    async def _quote(self, request: UpstreamRequest) -> answers.UpstreamQuote:
        urgency = Urgency.CREATION if request.to else Urgency.ROUTINE
        found = await self._upstream.quote(request, urgency)
        self._last[request.direction, request.chain.name] = found.from_amount, found.to_amount
        return found

    async def _exact_quote(self, request: UpstreamRequest, most: int) -> answers.UpstreamQuote:
        """The quote of a deposit that brings what is to arrive, found by other quotes.

        More than one deposit does, so that of an earlier quote is asked first: while the rate stays
        it is the one that is found again.
        """
        asset, wanted = deposit_asset(request.direction), request.amount.units

        async def quoted(units: int) -> answers.UpstreamQuote:
            return await self._quote(replace(request, amount=Money(units, asset)))

        if most < MAX_UNITS:
            return await exact_quote(wanted, most, wanted, quoted)
        if (request.direction, request.chain.name) not in self._last:
            least = 2 * request.chain.min_swap_usd * ONE_USDC
            await quoted(ONE_XMR if asset is XMR else max(least, _FIRST_USDC))
        return await exact_quote(wanted, *self._last[request.direction, request.chain.name], quoted)

    async def create(self, request: UpstreamRequest, key: str, *, resumed: bool) -> Created:
        """Make the order. Raises CreationUnknown, and errors.ServiceError when none was made."""
        await self.watch.require_network()
        make = self._create_bridge if request.chain.name == PERPS else self._create_swap
        try:
            return await make(request, key, resumed=resumed)
        except UpstreamOutcomeUnknown as error:
            raise CreationUnknown(
                error.reason, upstream_id=error.upstream_id, raw=error.raw
            ) from error
        except UpstreamError as error:
            raise self._refusal(request.chain, error) from error

    async def _create_bridge(self, request: UpstreamRequest, key: str, *, resumed: bool) -> Created:
        to_perps = request.direction is Direction.XMR_TO_USDC
        call = self._upstream.bridge_deposit if to_perps else self._upstream.bridge_withdraw
        made = await call(request.to, key=key, resumed=resumed)
        return Created(made.order_id, made.deposit_address, made.expires_at, made.raw)

    async def _create_swap(self, request: UpstreamRequest, key: str, *, resumed: bool) -> Created:
        made = await self._upstream.create_order(request, key=key, resumed=resumed)
        if not request.is_exact and made.deposit_amount != request.amount.units:
            raise CreationUnknown(
                f"the upstream asks for a deposit of {made.deposit_amount} units, not of"
                f" {request.amount.units}",
                upstream_id=made.order_id,
                raw=made.raw,
            )
        return Created(
            made.order_id,
            made.deposit_address,
            made.expires_at,
            made.raw,
            made.expected_output,
            made.deposit_amount,
            is_over=made.status is not UNKNOWN and made.status.is_terminal,
            funding_gas=made.funding_gas,
        )

    def _refusal(self, chain: Chain, error: UpstreamError) -> ServiceError:
        """The error for a caller, naming only chains and tokens that can be swapped here."""
        found = self._upstream.service_error(error)
        if isinstance(found, UnsupportedChain) and chain.name != PERPS:
            self.watch.ask_soon()
            return self.chains.refusal(chain)
        if isinstance(found, UnsupportedToken):
            found.allowed = _tradable(found.allowed, chain)
        return found

    async def bridge_rates(self) -> ExchangeRates:
        """The bridge's rates. Raises errors.ServiceError."""
        try:
            found = await self._upstream.bridge_rates()
        except UpstreamError as error:
            raise self._upstream.service_error(error) from error
        market = [ExchangeRate(each.exchange, each.rate, each.eta) for each in found.rates]
        own = found.wagyu_rate
        return ExchangeRates(market, ExchangeRate("upstream", own.rate, own.eta))

    async def pass_on(self, upstream_id: str, ticket: Ticket) -> None:
        """Open a ticket about an order there, with the owner's refund address."""
        try:
            await self._upstream.create_ticket(upstream_id, ticket)
        except UpstreamError as error:
            raise self._upstream.service_error(error) from error

    async def cancel(self, terms: Terms) -> UpstreamStatus | None:
        """End the order there; return how it stands then, as ``status`` reports it.

        Raises OrderNotCancellable, also where the upstream has no cancellation. May be repeated.
        """
        if "cancel_order" not in self._upstream.dialect.paths:
            raise _no_cancellation()
        try:
            found = await self._upstream.cancel_order(terms.upstream_id or "", terms.session_id)
        except UpstreamError as error:
            if isinstance(error, UpstreamRefused) and error.code == "unknown_method":
                raise _no_cancellation() from error  # an rpcsvc from before it had one
            raise self._upstream.service_error(error) from error
        return _status_of(terms, found)

    async def status(self, terms: Terms, *, is_watched: bool) -> UpstreamStatus | None:
        """The order as it stands; None when its status is not known, which is logged.

        Raises UpstreamResting while the upstream is left alone, and errors.ServiceError.
        """
        # The relay asks for it again by itself, and for others in between.
        urgency = Urgency.WATCHED if is_watched else Urgency.ROUTINE
        demand = Demand(urgency, is_repeated=False)
        poll = self._bridge_status if terms.is_bridge else self._swap_status
        try:
            return await poll(terms, demand)
        except (BreakerOpen, BudgetSpent) as error:
            raise UpstreamResting(error.reason, error.retry_after_ms or _REST_MS) from error
        except UpstreamError as error:
            raise self._upstream.service_error(error) from error

    async def _bridge_status(self, terms: Terms, demand: Demand) -> UpstreamStatus | None:
        found = await self._upstream.bridge_order(terms.upstream_id or "", demand=demand)
        if DIRECTION_OF[BridgeKind(found.kind)] is not terms.direction:
            raise _another("type")
        if found.status is UNKNOWN:
            _log_unknown(found.order_id, found.status_text)
            return None
        progress = {
            "amount": str(found.amount),
            "confirmations": found.confirmations,
            "requiredConfirmations": found.required_confirmations,
            "tx_out": found.tx_out,
        }
        report = Report(
            deposit_txid=found.tx_in,
            error=found.failure_reason,
            completed_at=found.completed_at,
            extra=orjson.dumps(progress).decode(),
        )
        status = _BRIDGE_STATUS[found.status]
        is_over = found.completed_at is not None or not self._upstream.dialect.times_ends
        if status is OrderStatus.FAILED and not is_over:
            status = OrderStatus.REFUNDING  # the bridge has no word of its own for it
        return UpstreamStatus(status, report, found.raw)

    async def _swap_status(self, terms: Terms, demand: Demand) -> UpstreamStatus | None:
        return _status_of(terms, await self._upstream.order(terms.upstream_id or "", demand=demand))

    # --- signed payments ---

    @property
    def takes_authorizations(self) -> bool:
        """Whether the upstream last said that signed authorizations can pay its USDC orders."""
        return "fund_order" in self._upstream.dialect.paths and self.watch.takes_signatures

    def contract(self, network: str) -> str:
        """The contract of USDC on a network."""
        return self.names(USDC, network).token or ""

    async def signing_domain(self, terms: Terms, due: int) -> Domain:
        """The EIP-712 domain for an authorization of ``due`` units to the order.

        Raises OrderNotFundable, also when the upstream's offer is not for this order.
        """
        try:
            await self._upstream.fund_order(terms.upstream_id or "", None)
        except PaymentWanted as wanted:
            return self._domain(wanted, terms, due)
        except UpstreamRefused as error:
            if error.code == OrderNotFundable.code:
                raise OrderNotFundable(error.message) from error
            raise self._upstream.service_error(error) from error
        except UpstreamError as error:
            raise self._upstream.service_error(error) from error
        raise OrderNotFundable(
            "A signed payment of the order is under way already. Ask for the order's status."
        )

    def _domain(self, wanted: PaymentWanted, terms: Terms, due: int) -> Domain:
        names = self.names(USDC, terms.chain)
        try:
            return offered_domain(wanted.required, terms, names, due)
        except UpstreamBroken as error:
            log.warning("upstream_offer_refused", order_id=terms.order_id, reason=error.reason)
            raise OrderNotFundable(
                "The service that settles this order asks for a payment of something else than is"
                " due here. Sign nothing: ask for the order's status, and pay as it says."
            ) from error

    async def pay_signed(
        self, terms: Terms, signed: SignedAuthorization, domain: Domain | None
    ) -> Carried:
        """Pass a signed authorization on; how far it came. May be repeated.

        FAILED only where the upstream says that it took nothing; PENDING while that is not known.
        """
        header = payment_header(terms, signed, self.names(USDC, terms.chain), domain)
        try:
            answer = await self._upstream.fund_order(terms.upstream_id or "", header)
        except UpstreamError as error:
            if isinstance(error, UpstreamRefused) and error.status in _TAKES_NOTHING:
                return Carried(Outcome.FAILED, reason=error.message)
            log.warning("authorization_unknown", order_id=terms.order_id, reason=error.reason)
            return Carried(Outcome.PENDING)
        return answer.carried

    # --- readiness and names ---

    async def start(self) -> None:
        """Learn chains and network; the upstream may be down while this service starts."""
        await self.watch.start()

    def require_ready(self) -> None:
        """Raise errors.Unavailable until the upstream's chains and network are known.

        Everything else is reported by the calls.
        """
        self.watch.require_known()

    async def health(self) -> Health:
        """Return whether the upstream answers, its chains are known, and it is on our network."""
        answers = self._client.health()
        return answers if not answers.ok else self.watch.health()

    def names(self, asset: Asset, chain: str) -> NetworkNames:
        """The networks by their names; test networks where the upstream uses them.

        A wallet that follows a payment URI can't send real funds to a simulated address then.
        """
        is_main = self._monero is MoneroNetwork.MAINNET
        if asset is XMR:
            name = "monero" if is_main else f"monero-{self._monero}"
            return NetworkNames(name, MONERO_CHAIN_ID, None)
        return NetworkNames.of_usdc(self.chains.resolve(chain), is_test=not is_main)


def _status_of(terms: Terms, found: answers.StatusAnswer) -> UpstreamStatus | None:
    # A payment from or to another address says nothing about this order's money.
    if not same_address(found.to_address, terms.to_address):
        raise _another("toAddress")
    if not same_address(found.deposit_address, terms.deposit_address):
        raise _another("depositAddress")
    # Nobody may be asked for more than the order's deposit.
    if found.amount_due is not None and found.amount_due > terms.deposit_amount:
        raise _another("amountDue")
    if found.status is UNKNOWN:
        _log_unknown(found.order_id, found.status_text)
        return None
    report = Report(
        deposit_txid=found.deposit_tx_hash,
        output=found.actual_output,
        refund_txid=found.refund_tx_hash,
        error=found.error_message,
        completed_at=found.completed_at,
        extra=_twap_text(found.twap),
        refund_address=found.refund_address,
        due=found.amount_due if found.status in AWAITS_DEPOSIT else None,
    )
    return UpstreamStatus(found.status, report, found.raw)


def _no_cancellation() -> OrderNotCancellable:
    return OrderNotCancellable(
        "The service that settles this order has no cancellation. Don't send anything: the order"
        " ends by itself at expiresAt."
    )


def _another(field: str) -> UpstreamBroken:
    return UpstreamBroken(
        f"The upstream's answer is not as agreed: {field} is not that of the order.", field=field
    )


def _log_unknown(upstream_id: str, status: str) -> None:
    log.warning("upstream_status_unknown", upstream_id=upstream_id, status=status[:64])


def _tradable(tokens: object, chain: Chain) -> list[str]:
    """Return the tokens named by the upstream that are swapped here on the chain."""
    ours = {XMR.symbol.lower(), chain.usdc_contract.lower()}
    named = tokens if isinstance(tokens, list) else []
    return [token for token in named if isinstance(token, str) and token.lower() in ours]


def _twap_text(twap: answers.UpstreamTwap | None) -> str | None:
    """Return the twap object of spec 2.4 as it was on the wire, but for the remaining time.

    None while its status is none of ``_TWAP_STATUSES``.
    """
    if twap is None or twap.status not in _TWAP_STATUSES:
        return None
    return orjson.dumps(
        {
            "enabled": twap.enabled,
            "status": twap.status,
            "chunksCompleted": twap.chunks_completed,
            "chunksTotal": twap.chunks_total,
            "filledQty": _number(twap.filled_qty),
            "totalQty": _number(twap.total_qty),
            "chunkSizeUsd": _number(twap.chunk_size_usd),
            "intervalMs": _number(twap.interval_ms),
            "estimatedTimeRemainingMs": _number(_whole_intervals(twap)),
        }
    ).decode()


def _whole_intervals(twap: answers.UpstreamTwap) -> Decimal:
    """The remaining time in whole intervals, so that not every poll adds a line of history."""
    interval, left = ceil(twap.interval_ms) or 1, ceil(twap.estimated_time_remaining_ms)
    return Decimal(interval * -(-left // interval))


def _number(value: object) -> orjson.Fragment:
    """A decimal digit for digit."""
    return orjson.Fragment(format(value, "f").encode())


# --- exact payouts --------------------------------------------------------------------------------


async def exact_quote(
    wanted: int, deposit: int, output: int, quote: Callable[[int], Awaitable[UpstreamQuote]]
) -> UpstreamQuote:
    """A quote whose payout is ``wanted`` units, or more by what one unit more or less brings.

    ``deposit`` and ``output`` are a price of before, which may be old. Raises Unavailable while the
    rate does not stay for as long as it takes, and what ``quote`` raises.
    """
    gained, spent = output, deposit
    for _ in range(MOST_QUOTES):
        units = deposit - (output - wanted) * spent // gained
        found = await quote(min(max(1, units), MAX_UNITS))
        more = found.to_amount - wanted
        gained, spent = _slope(found, deposit, output)
        if more >= 0 and more * spent < gained + spent:
            return found
        deposit, output = found.from_amount, found.to_amount
    raise Unavailable(
        "The rate moves too fast to say what to send for exactly this amount. Try again, or name"
        " the amount that is sent.",
        retry_after=_RETRY_SECONDS,
    )


def _slope(found: UpstreamQuote, deposit: int, output: int) -> tuple[int, int]:
    """Payout units, and the deposit units that bring them: by two prices, if they can be of one
    rate, else by the last one. A fixed fee makes a part of a deposit bring more than its share.
    """
    gained, spent = found.to_amount - output, found.from_amount - deposit
    if spent < 0:
        gained, spent = -gained, -spent
    share = found.to_amount * spent
    if gained >= _LEAST_SPAN and share <= gained * found.from_amount <= 2 * share:
        return gained, spent
    return found.to_amount, found.from_amount
