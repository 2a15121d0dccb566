"""The checkout page's contents: an order's terms and status, in words for the payer.

Anybody with the orderId may read the page. It shows what swap.status returns for that reader, and
the rate, the limits and the minimum output of the order; never the session.
"""

from __future__ import annotations

from typing import Any, Final, NamedTuple

from markupsafe import Markup
from msgspec import Struct

from rpcsvc.clock import iso8601
from rpcsvc.domain.money import USDC, XMR, Asset, format_units
from rpcsvc.domain.order import (
    AWAITS_DEPOSIT,
    REFUND_ADDRESS,
    REFUND_BLOCKED,
    DepositState,
    Order,
    OrderStatus,
    reasons_in,
)
from rpcsvc.domain.pricing import Direction
from rpcsvc.domain.settle_times import ObservedTime
from rpcsvc.http.pages.rendering import Texts, qr_svg
from rpcsvc.http.site import API_ROOT, Site
from rpcsvc.operations.models import StatusResult
from rpcsvc.operations.service import ViewContext
from rpcsvc.operations.views import status_data
from rpcsvc.orders.ports.venue import Confirmations, VenueProfile

REFRESH_SECONDS: Final = 15

_SWAP: Final = ("pay", "confirm", "swap", "done")
_REFUND: Final = ("pay", "refund", "refunded")


class PageTime(NamedTuple):
    """A time in ISO 8601 for programs, and as text for people."""

    iso: str
    text: str


class ProgressStep(NamedTuple):
    """A step of the swap; ``state``: done, now or later."""

    label: str
    state: str


class PaymentBox(NamedTuple):
    """The payment that is due: amount, address and deadline. ``contract`` is None for XMR."""

    amount: str
    address: str
    network: str
    chain_id: int
    contract: str | None
    uri: str
    qr: Markup
    expires: PageTime


class RefundRule(NamedTuple):
    """Who controls refunds; risky if that may be somebody other than the payer."""

    says: str
    address: str | None
    is_risky: bool


class Checkout(Struct, frozen=True):
    """The page, with the order's status answer.

    ``seconds_left`` of ``seconds_in_all``: the time to pay.
    ``refresh``: after how many seconds a page without a script reloads; 0: never.
    """

    status: StatusResult
    order_id: str
    mood: str
    heading: str
    says: str
    reason: str | None
    is_reason_english: bool
    removed: str
    steps: tuple[ProgressStep, ...]
    send: str
    receive: str
    send_network: str
    receive_network: str
    sent: str
    get_heading: str
    expected: str
    least: str
    cases: tuple[tuple[str, str], ...]
    to: str
    rate: str
    rate_note: str
    chunks: str
    observed: str
    pay: PaymentBox | None
    refund: RefundRule
    needs_refund_address: bool
    arrived: str
    missing: str
    confirmations: str
    verify_command: str
    is_live: bool
    events_path: str
    refresh: int
    seconds_left: int
    seconds_in_all: int
    now: PageTime


class CheckoutWriter:
    """Writes the page of an order as it stands at ``now`` (ms), in one language."""

    def __init__(
        self,
        site: Site,
        views: ViewContext,
        texts: Texts,
        order: Order,
        confirmations: Confirmations | None,
        now: int,
        observed: ObservedTime | None,
        *,
        is_paying: bool,
    ) -> None:
        self._site = site
        self._views = views
        self._say = texts.say
        self._observed = "" if observed is None else observed_in_words(texts, *observed)
        self._order = order
        self._terms = order.terms
        self._confirmations = confirmations
        self._now = now
        self._status = status_data(views, order, now, is_paying=is_paying)
        self._twap = self._status.order.twap or None
        self._is_paying = is_paying

    def page(self, *, may_refresh: bool = True) -> Checkout:
        """The whole page."""
        order, terms, key = self._order, self._terms, self._key()
        needs_address = self._status.action_required == REFUND_ADDRESS
        is_live = self._is_live()
        reason, is_reason_english = self._reason()
        return Checkout(
            status=self._status,
            order_id=order.order_id,
            mood=_MOODS[key],
            heading=self._say(f"checkout.heading_{key}"),
            says=self._say(
                f"checkout.says_{key}",
                **_only(key, "partial", arrived=self._arrived(), missing=self._missing()),
                **_only(key, "completed", amount=self._paid_out()),
                **_only(key, "swapping_chunks", **self._chunk_counts()),
            ),
            reason=reason,
            is_reason_english=is_reason_english,
            removed=self._removed(),
            steps=self._steps(),
            send=terms.deposit_asset.symbol,
            receive=terms.payout_asset.symbol,
            send_network=self._network(terms.deposit_asset),
            receive_network=self._network(terms.payout_asset),
            sent=_amount(terms.deposit_amount, terms.deposit_asset),
            get_heading=self._say(
                "checkout.get_agreed" if order.status.is_terminal else "checkout.get_heading"
            ),
            expected=_amount(terms.expected_output, terms.payout_asset),
            least=_amount(terms.min_received, terms.payout_asset),
            cases=self._cases(),
            to=terms.to_address,
            rate=self._say("checkout.rate_is", rate=format_units(terms.price.rate, USDC)),
            rate_note=self._rate_note(),
            chunks=self._chunks(),
            observed="" if order.status.is_terminal else self._observed,
            pay=self._payment(),
            refund=self._refund_rule(),
            needs_refund_address=needs_address,
            arrived=self._arrived(),
            missing=self._missing(),
            confirmations=self._confirmed(),
            verify_command=self._verify_command(),
            is_live=is_live,
            events_path=f"{API_ROOT}/agent/swap/events/{order.order_id}?after={order.version}",
            # A form that is being filled in must not vanish.
            refresh=REFRESH_SECONDS if is_live and may_refresh and not needs_address else 0,
            seconds_left=max(0, terms.expires_at - self._now) // 1000,
            seconds_in_all=max(1, (terms.expires_at - terms.created_at) // 1000),
            now=moment(self._now, self._now),
        )

    def _key(self) -> str:
        """The text key of the order: its status, or a special case of it."""
        order = self._order
        if order.status in AWAITS_DEPOSIT and order.due_units > 0:
            if self._is_paying:
                return "signed_payment"
            if self._status.funding_instructions is None:
                return "window_over"
            is_part_paid = order.due_units < order.terms.deposit_amount
            return "partial" if is_part_paid else OrderStatus.AWAITING_DEPOSIT.value
        if (
            order.status is OrderStatus.EXECUTING_SWAP
            and self._twap is not None
            and self._twap.status == "active"
        ):
            return "swapping_chunks"
        action = self._status.action_required
        return action if action in (REFUND_ADDRESS, REFUND_BLOCKED) else order.status.value

    def _is_live(self) -> bool:
        """Return whether the order may still change."""
        return not self._order.status.is_terminal or any(
            not transfer.state.is_final for transfer in self._order.transfers
        )

    def _steps(self) -> tuple[ProgressStep, ...]:
        at = _STEP_OF.get(self._order.status)
        if at is None:
            return ()
        labels, now = at
        if self._status.amount_due is not None:
            now = 0
        return tuple(
            ProgressStep(
                self._say(f"checkout.step_{label}"),
                "done" if number < now else "now" if number == now else "later",
            )
            for number, label in enumerate(labels)
        )

    def _network(self, asset: Asset) -> str:
        return network_title(self._views.profile, asset, self._terms.chain)

    def _payment(self) -> PaymentBox | None:
        funding = self._status.funding_instructions
        if funding is None:
            return None
        names = self._views.profile.names(self._terms.deposit_asset, self._terms.chain)
        is_xmr = self._terms.deposit_asset is XMR
        address, uri = funding.deposit_address, funding.payment_uri
        return PaymentBox(
            amount=funding.amount,
            address=address,
            network=self._network(self._terms.deposit_asset),
            chain_id=names.chain_id,
            contract=names.token,
            uri=uri,
            # Several wallets send an EIP-681 link of an ERC-20 transfer to the token's contract,
            # which loses the money: the code of such a payment is the bare address.
            qr=qr_svg(
                uri if is_xmr else address,
                self._say("checkout.qr_xmr" if is_xmr else "checkout.qr_usdc"),
            ),
            expires=moment(self._terms.expires_at, self._now),
        )

    def _refund_rule(self) -> RefundRule:
        terms = self._terms
        if terms.refund_address is not None:
            return RefundRule(self._say("checkout.refund_agreed"), terms.refund_address, False)
        if self._order.refund_to is not None:
            return RefundRule(self._say("checkout.refund_named"), self._order.refund_to, False)
        if terms.senders_can_be_refunded:
            return RefundRule(self._say("checkout.refund_sender"), None, False)
        if self._status.funding_instructions is not None:
            return RefundRule(self._say("checkout.refund_session"), None, True)
        return RefundRule(self._say("checkout.refund_secret"), None, False)

    def _cases(self) -> tuple[tuple[str, str], ...]:
        """The fate of a late, small, large or wrong payment (network, token)."""
        terms = self._terms
        if terms.upstream_id is not None:
            limits = self._say("checkout.case_upstream_says")
            little, much = limits, limits
        else:
            least = _amount(terms.min_deposit, terms.deposit_asset)
            most = _amount(terms.max_deposit, terms.deposit_asset)
            little = self._say("checkout.case_little_says", minimum=least)
            much = self._say("checkout.case_much_says", maximum=most)
        late, wrong = self._say("checkout.case_late_says"), self._say("checkout.case_wrong_says")
        says = {"late": late, "little": little, "much": much, "wrong": wrong}
        return tuple((self._say(f"checkout.case_{name}"), text) for name, text in says.items())

    def _rate_note(self) -> str:
        if self._status.funding_instructions is None:
            return ""
        if self._terms.upstream_id is not None:
            return self._say("checkout.rate_upstream")
        lock_end = self._order.price_locked_until
        if self._now >= lock_end:
            return self._say("checkout.rate_unlocked")
        return self._say("checkout.rate_locked", time=moment(lock_end, self._now).text)

    def _chunks(self) -> str:
        is_chunked = self._twap is not None and self._twap.enabled
        return self._say("checkout.chunks", **self._chunk_counts()) if is_chunked else ""

    def _chunk_counts(self) -> dict[str, int]:
        if self._twap is None:
            return {"done": 0, "total": 0}
        return {"done": self._twap.chunks_completed, "total": self._twap.chunks_total}

    def _reason(self) -> tuple[str | None, bool]:
        """The reason for a missing payout, and whether its text is English on every page."""
        message = self._order.error_message
        if message is None or self._order.status in AWAITS_DEPOSIT:
            return None, False
        texts = [self._say(f"checkout.reason_{reason.value}") for reason in reasons_in(message)]
        return (" ".join(texts), False) if texts else (message, True)

    def _removed(self) -> str:
        """Deposits removed by a reorg, which the payer may have to send again."""
        gone = sum(d.units for d in self._order.deposits if d.state is DepositState.REMOVED)
        if not gone or self._order.status is OrderStatus.COMPLETED:
            return ""
        return self._say("checkout.removed", amount=_amount(gone, self._terms.deposit_asset))

    def _arrived(self) -> str:
        units = sum(deposit.units for deposit in self._order.deposits if deposit.is_active)
        if self._terms.upstream_id is not None:  # which reports what is due, not each deposit
            units = self._terms.deposit_amount - self._order.due_units
        return _amount(units, self._terms.deposit_asset)

    def _missing(self) -> str:
        due = self._status.amount_due
        return "" if due is None else f"{due} {self._terms.deposit_asset.symbol}"

    def _confirmed(self) -> str:
        """Confirmations while the order waits for them; an upstream does not report them."""
        found = self._confirmations
        if self._order.status is not OrderStatus.DEPOSIT_DETECTED or found is None:
            return ""
        return self._say("checkout.confirmations_of", have=found.fewest, need=found.required)

    def _paid_out(self) -> str:
        payout, report = self._order.payout, self._order.report
        units = payout.units if payout else report.output if report else None
        return _amount(units or 0, self._terms.payout_asset)

    def _verify_command(self) -> str:
        """The command that checks the saved terms, with placeholders for what the payer knows."""
        terms = self._terms
        sent, received = terms.deposit_asset.symbol, terms.payout_asset.symbol
        by_session = terms.refund_address is None
        proof = "--session YOUR_SESSION_ID" if by_session else f"--refund-to YOUR_{sent}_ADDRESS"
        amount = format_units(terms.deposit_amount, terms.deposit_asset)
        lines = (
            f"{self._site.client} verify attestation - < {terms.order_id}.jws",
            f"--issuer {self._site.url} --direction {Direction(terms.direction).value}",
            f"--chain-id {terms.chain_id} --amount {amount}",
            f"--to YOUR_{received}_ADDRESS {proof}",
            "--deposit-address ADDRESS_YOU_WERE_GIVEN",
        )
        return " \\\n  ".join(lines)


def observed_in_words(texts: Texts, p50_seconds: int, p95_seconds: int, samples: int) -> str:
    """The measured times of like swaps, in whole minutes, rounded up."""
    half, most = -(-p50_seconds // 60), -(-p95_seconds // 60)
    return texts.say("checkout.observed", half=half, most=most, samples=samples)


def network_title(profile: VenueProfile, asset: Asset, chain: str) -> str:
    """The network of an asset in a swap with USDC on ``chain``, as people name it."""
    names = profile.names(asset, chain)
    known = profile.chains.by_id(names.chain_id)
    if asset is USDC and known is not None:
        return known.display_name
    return names.network.replace("-", " ").title()


def moment(at: int, now: int) -> PageTime:
    """A time (ms); with its date only if that is not the date of ``now``."""
    iso = iso8601(at)
    same_day = iso[:10] == iso8601(now)[:10]
    return PageTime(iso, f"{iso[11:16]} UTC" if same_day else f"{iso[:10]} {iso[11:16]} UTC")


def _amount(units: int, asset: Asset) -> str:
    return f"{format_units(units, asset)} {asset.symbol}"


def _only(key: str, wanted: str, **values: Any) -> dict[str, Any]:
    return values if key == wanted else {}


# By status: the steps of an order, and the index of the current one (past the end: all done).
_STEP_OF: Final = {
    OrderStatus.AWAITING_DEPOSIT: (_SWAP, 0),
    OrderStatus.DEPOSIT_DETECTED: (_SWAP, 1),
    OrderStatus.DEPOSIT_CONFIRMED: (_SWAP, 2),
    OrderStatus.EXECUTING_SWAP: (_SWAP, 2),
    OrderStatus.COMPLETED: (_SWAP, 4),
    OrderStatus.REFUNDING: (_REFUND, 1),
    OrderStatus.REFUNDED: (_REFUND, 3),
}
_MOODS: Final = {
    "awaiting_deposit": "waiting",
    "partial": "waiting",
    "signed_payment": "going",
    "window_over": "bad",
    "deposit_detected": "going",
    "deposit_confirmed": "going",
    "executing_swap": "going",
    "swapping_chunks": "going",
    "completed": "good",
    "refunding": "going",
    REFUND_ADDRESS: "needs",
    REFUND_BLOCKED: "bad",
    "refunded": "good",
    "failed": "bad",
    "expired": "bad",
}
