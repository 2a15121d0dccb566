"""``SwapClient``: makes and follows orders, and verifies every answer with the issuer's keys.

``SyncSwapClient`` is the same for programs without an event loop; it is not thread-safe.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing
from inspect import isawaitable
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from rpcsvc import verify
from rpcsvc.client import x402
from rpcsvc.client.blocking import BlockingTransport, finished
from rpcsvc.client.calls import Calls, Retries, Trust
from rpcsvc.client.errors import (
    OutcomeUnknown,
    PaymentUnknown,
    RateLimited,
    Refused,
    Unavailable,
    Unreachable,
    Unverified,
)
from rpcsvc.client.feed import Feed
from rpcsvc.client.models import Deliveries, Event, Funded, Placed, Quote, Restored, Status, Swap
from rpcsvc.client.sessions import Sessions
from rpcsvc.client.transport import Endpoint, Json, Transport, endpoint_of, socket_endpoint
from rpcsvc.client.x402 import Signer

CHAINS: Final = x402.CHAINS
# Events at which an order may be over, or need its owner.
_DECISIVE: Final = frozenset({"completed", "terminal_failure", "refunding"})
_SANDBOX: Final = "sandbox"


class SwapClient:
    """A client of the service at ``url``; ``async with`` opens and closes it.

    With ``kid`` only signatures of that key are accepted. Without it, those of the keys that the
    service publishes at first, and of later ones that it lists beside the first current key.
    ``issuer`` is the site address in attestations, by default ``url``. With a ``token`` calls go
    to /rpc. ``verify_answers=False`` trusts the connection alone. With a ``secret``, as of
    ``new_secret``, make swaps with ``new_swap``: ``restore`` finds their orders by it alone.
    """

    @staticmethod
    def _transport_to(endpoint: Endpoint) -> Transport:
        from rpcsvc.client.aio import AioTransport  # noqa: PLC0415 - SyncSwapClient does without

        return AioTransport(endpoint)

    def __init__(  # noqa: PLR0913 - each option has a default and is given by its name
        self,
        url: str,
        *,
        token: str | None = None,
        kid: str | None = None,
        jwks: Json | None = None,
        issuer: str | None = None,
        slug: str = "service",
        verify_answers: bool = True,
        retries: Retries | None = None,
        secret: str | None = None,
    ) -> None:
        self._endpoint = endpoint_of(url)
        self._token = token
        self._issuer = (issuer or self._endpoint.url).rstrip("/")
        self._sessions = None if secret is None else Sessions(secret, self._issuer)
        self._has_searched = False
        self._trust = Trust(slug, kid, jwks, verify_answers)
        self._retries = retries or Retries()
        self._open: Calls | None = None

    @classmethod
    def on_socket(cls, data_dir: Path, issuer: str, **options: Any) -> Self:
        """A client of the service that runs on a data directory, over its UNIX socket.

        ``issuer`` is its site address. Raises Unreachable, and UntrustedSocket if somebody else
        listens there.
        """
        endpoint = socket_endpoint(data_dir)
        if endpoint is None:
            raise Unreachable(f"No service runs on {data_dir}.", may_be_done=False)
        client = cls(endpoint.url, issuer=issuer, **options)
        client._endpoint = endpoint
        return client

    async def __aenter__(self) -> Self:
        self._open = Calls(
            self._transport_to(self._endpoint),
            over_rpc=self._token is not None,
            trust=self._trust,
            retries=self._retries,
            token=self._token,
        )
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._calls.transport.close()
        self._open = None

    @property
    def _calls(self) -> Calls:
        if self._open is None:
            raise RuntimeError("the client is not open: use it in an async with block")
        return self._open

    async def call(self, operation: str, **params: Any) -> Json:
        """The envelope of any operation, such as ``call("swap.plan", direction="x2u")``.

        Raises Refused, Unreachable and Unverified, as all calls here do.
        """
        return await self._calls.call(operation, params)

    async def quote(self, swap: Swap) -> Quote:
        """A price at the current rate."""
        data = (await self._calls.call("swap.quote", swap.terms()))["data"]
        return Quote.model_validate({**data["quote"], "digest": data["quoteDigest"]})

    async def create(self, swap: Swap, *, quote: Quote | None = None) -> Placed:
        """Create the order of the swap, or return it if it exists.

        With a ``quote`` no order with worse terms is made (raises QuoteChanged). Raises
        OutcomeUnknown if no answer came: call again with the ``swap`` of the error. To survive a
        crash, store ``swap.held_to(quote)`` first and create that. The order's attestation is
        checked against the swap, unless ``verify_answers`` is off. Raises ValueError, before
        anything is sent, for a session that ``restore`` would not find.
        """
        await self._require_own_session(swap)
        if quote is not None:
            swap = swap.held_to(quote)
        expected = self._expected(swap)
        try:
            envelope = await self._calls.call(
                "swap.create", swap.wanted(), key=swap.idempotency_key
            )
        except Unreachable as error:
            if not error.may_be_done:
                raise
            raise OutcomeUnknown(str(error), swap) from error
        placed = Placed.model_validate(envelope["data"])
        if self._sessions is not None:
            self._sessions.note_order(swap.session_id)
        if expected is not None:
            await self._check(placed, expected)
        return placed

    async def new_swap(self, **terms: Any) -> Swap:
        """A swap with the next session of the secret. The first one searches as ``restore`` does.

        ``terms`` are the fields of Swap. Raises ValueError without a secret.
        """
        sessions = self._with_secret()
        if not self._has_searched:
            await self.restore()
        return Swap(**terms, session_id=sessions.take())

    async def restore(self) -> list[Restored]:
        """All orders made with the secret at this service, oldest session first.

        It asks for sessions until 20 in a row have no order. Limits are waited for as in each call.
        Raises ValueError without a secret.
        """

        async def ask(params: Json) -> Json:
            return dict((await self._calls.call("swap.list", params))["data"])

        found = await self._with_secret().search(ask)
        self._has_searched = True
        return [Restored.model_validate(order) for order in found]

    def _with_secret(self) -> Sessions:
        if self._sessions is None:
            raise ValueError("The client has no secret: make it with SwapClient(url, secret=...).")
        return self._sessions

    async def _require_own_session(self, swap: Swap) -> None:
        """Raise ValueError if the client has a secret, and the swap a session of another origin."""
        if self._sessions is None or self._sessions.includes(swap.session_id):
            return
        await self.restore()  # another client with this secret may have made orders meanwhile
        if not self._sessions.includes(swap.session_id):
            raise ValueError(
                "restore() would not find the swap's session_id: it is not of this client's secret,"
                " or more than 20 after the last one with an order. Make the swap with"
                " new_swap(...), or use a client without a secret."
            )

    async def status(self, order_id: str, *, verify_to: str | None = None) -> Status:
        """The current status of an order; ``verify_to``: refused unless it pays to this address."""
        check = {} if verify_to is None else {"verify": verify_to}
        return _status(await self._calls.call("swap.status", {"orderId": order_id, **check}))

    async def events(self, order_id: str, *, after: int = 0) -> AsyncGenerator[Event]:
        """The events after a cursor, each once, as they come, until nothing more can happen.

        Events are hints: get the status before you act on one.
        """
        async with aclosing(Feed(self._calls, order_id, after).events()) as events:
            async for event in events:
                yield event

    async def wait(self, order_id: str) -> Status:
        """Wait until the order is over or ``action_required`` is set; returns its status."""
        async with aclosing(self.events(order_id)) as events:
            async for event in events:
                if event.state in _DECISIVE:
                    status = await self.status(order_id)
                    if status.is_over or status.action_required is not None:
                        return status
        return await self.status(order_id)

    async def cancel(self, order_id: str, session_id: str) -> Status:
        """Cancel an order without deposits."""
        params = {"orderId": order_id, "sessionId": session_id}
        return _status(await self._calls.call("swap.cancel", params))

    async def set_refund_address(self, order_id: str, session_id: str, address: str) -> bool:
        """Set the address of a refund that waits for one; returns whether it was accepted."""
        params = {"orderId": order_id, "sessionId": session_id, "address": address}
        envelope = await self._calls.call("swap.refundAddress", params)
        return bool(envelope["data"]["refundAddress"]["accepted"])

    async def fund(
        self, swap: Swap, placed: Placed, payer: str, sign: x402.Signer, *, attempt: int = 1
    ) -> Funded:
        """Pay the due amount of a USDC order by one signature of ``payer``, without gas (x402).

        ``sign`` gets the typed data (EIP-712), checked: the USDC contract of the swap's chain, the
        attested deposit address, the due amount. Without ``payment`` in the result, wait, and pay
        nothing else. If the outcome is unknown, call it again with the same ``payer``: all
        signatures of one ``attempt`` have the same nonce, and the token contract accepts a nonce
        once for each payer (EIP-3009). Raises PaymentUnknown if no answer came, PaymentRefused,
        and Refused (``order_not_fundable``) if nothing is due.
        """
        params = {"orderId": placed.order_id}
        try:
            return _funded(await self._calls.call("swap.fund", params))
        except Refused as error:
            if error.code != "payment_required":
                raise
            required = error.details.get("paymentRequired") or {}
        due = await self._bill(swap, placed)
        offer = x402.offer_of(required, due)
        nonce = x402.nonce_of(placed.order_id, placed.session_id, attempt)
        now = int(self._trust.now().timestamp())
        data = x402.typed_data(offer, due, payer, nonce, now)
        signature = sign(data)
        if isawaitable(signature):
            signature = await signature
        return await self.send_payment(placed.order_id, x402.payment(offer, data, signature))

    async def send_payment(self, order_id: str, payment: Json) -> Funded:
        """Send a signed payment, such as that of PaymentUnknown; it pays once.

        Raises PaymentUnknown, PaymentRefused, and Refused (``order_not_fundable``) if nothing is
        due.
        """
        params = {"orderId": order_id, "payment": payment}
        try:
            return _funded(await self._calls.call("swap.fund", params))
        except (Unreachable, Unavailable, RateLimited, Unverified) as error:
            raise PaymentUnknown(str(error), order_id, payment) from error

    async def webhook_deliveries(self, order_id: str, session_id: str) -> Deliveries:
        """The webhook of an order, and its newest deliveries."""
        params = {"orderId": order_id, "sessionId": session_id}
        envelope = await self._calls.call("swap.webhookDeliveries", params)
        return Deliveries.model_validate(envelope["data"])

    async def sandbox_fund(self, order_id: str, amount: str | None = None) -> Json:
        """Sandbox: send a simulated deposit, by default the due amount. Never retried."""
        some = {} if amount is None else {"amount": amount}
        params = {"orderId": order_id, **some}
        envelope = await self._calls.call("sandbox.fund", params)
        return dict(envelope["data"]["transaction"])

    async def _bill(self, swap: Swap, placed: Placed) -> x402.Bill:
        """The payment due on the order, checked against the swap. Raises Unverified."""
        chain_id = _chain_id(swap.chain)
        network = x402.MAINNET if placed.funding.chain_id == chain_id else _SANDBOX
        most, expected = int(placed.order.deposit_amount), self._expected(swap)
        if expected is not None:
            terms = await self._check(placed, expected)
            network, most = terms.network, terms.deposit_amount
        named = swap.amount or swap.max_deposit
        if named is not None:
            most = min(most, x402.units_of(named))
        status = await self.status(placed.order_id)
        units = x402.units_of(status.amount_due or "0")
        if units > most:
            raise Unverified(
                verify.TermsMismatch("More is due than the swap's amount.", ("amountDue",))
            )
        to = placed.funding.deposit_address
        return x402.bill(chain_id, to, units, network)

    def _expected(self, swap: Swap) -> verify.Expected | None:
        """The order that the caller expects from the swap. Raises BadInput."""
        if not self._trust.is_on:
            return None
        return verify.Expected(
            direction=swap.direction,
            chain_id=_chain_id(swap.chain),
            amount=swap.amount,
            to=swap.to,
            issuer=self._issuer,
            refund_to=swap.refund_address,
            session=swap.session_id,
            min_received=swap.min_received,
            receive_amount=swap.receive_amount,
            max_deposit=swap.max_deposit,
        )

    async def _check(self, placed: Placed, expected: verify.Expected) -> verify.OrderTerms:
        """The attested terms. Raises Unverified unless they match the expected order."""
        trust = self._trust
        address = placed.funding.deposit_address

        def check(jwks: Json) -> verify.OrderTerms:
            found = verify.verify_attestation(
                placed.order.attestation or "",
                jwks,
                expected,
                now=trust.now(),
                pinned_kid=trust.kid,
            )
            if (found.terms.deposit_address, found.terms.order_id) != (address, placed.order_id):
                raise verify.TermsMismatch(
                    "The attestation is of another order than the answer.", ("depositAddress",)
                )
            return found.terms

        try:
            return await self._calls.with_keys(check)
        except verify.VerificationError as error:
            raise Unverified(error) from error


def _status(envelope: Json) -> Status:
    return Status.model_validate({**envelope["data"], "state": envelope["state"]})


def _funded(envelope: Json) -> Funded:
    return Funded.model_validate(envelope["data"])


def _chain_id(chain: str | int) -> int:
    """The number of a chain, from this client's own table. Raises BadInput."""
    text = str(chain).lower()
    if text in CHAINS:
        return CHAINS[text].chain_id
    if not (text.isascii() and text.isdigit()):
        raise verify.BadInput(
            f"chain must be one of {', '.join(CHAINS)}, or a chain's number, not {chain!r}."
        )
    return int(text)


class _Blocking(SwapClient):
    """Its calls never suspend."""

    _transport_to = staticmethod(BlockingTransport)


class SyncSwapClient:
    """SwapClient with blocking calls; ``with`` opens and closes it."""

    def __init__(self, url: str, **options: Any) -> None:
        self._client = _Blocking(url, **options)

    def __enter__(self) -> Self:
        finished(self._client.__aenter__())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        finished(self._client.__aexit__(kind, error, trace))

    def call(self, operation: str, **params: Any) -> Json:
        """See SwapClient.call."""
        return finished(self._client.call(operation, **params))

    def quote(self, swap: Swap) -> Quote:
        """See SwapClient.quote."""
        return finished(self._client.quote(swap))

    def create(self, swap: Swap, *, quote: Quote | None = None) -> Placed:
        """See SwapClient.create."""
        return finished(self._client.create(swap, quote=quote))

    def new_swap(self, **terms: Any) -> Swap:
        """See SwapClient.new_swap."""
        return finished(self._client.new_swap(**terms))

    def restore(self) -> list[Restored]:
        """See SwapClient.restore."""
        return finished(self._client.restore())

    def status(self, order_id: str, *, verify_to: str | None = None) -> Status:
        """See SwapClient.status."""
        return finished(self._client.status(order_id, verify_to=verify_to))

    def events(self, order_id: str, *, after: int = 0) -> Iterator[Event]:
        """See SwapClient.events."""
        feed = self._client.events(order_id, after=after)

        async def following() -> Event | None:
            return await anext(feed, None)

        try:
            while (event := finished(following())) is not None:
                yield event
        finally:
            finished(feed.aclose())

    def wait(self, order_id: str) -> Status:
        """See SwapClient.wait."""
        return finished(self._client.wait(order_id))

    def cancel(self, order_id: str, session_id: str) -> Status:
        """See SwapClient.cancel."""
        return finished(self._client.cancel(order_id, session_id))

    def set_refund_address(self, order_id: str, session_id: str, address: str) -> bool:
        """See SwapClient.set_refund_address."""
        return finished(self._client.set_refund_address(order_id, session_id, address))

    def fund(
        self, swap: Swap, placed: Placed, payer: str, sign: Signer, *, attempt: int = 1
    ) -> Funded:
        """See SwapClient.fund."""
        return finished(self._client.fund(swap, placed, payer, sign, attempt=attempt))

    def send_payment(self, order_id: str, payment: Json) -> Funded:
        """See SwapClient.send_payment."""
        return finished(self._client.send_payment(order_id, payment))

    def webhook_deliveries(self, order_id: str, session_id: str) -> Deliveries:
        """See SwapClient.webhook_deliveries."""
        return finished(self._client.webhook_deliveries(order_id, session_id))

    def sandbox_fund(self, order_id: str, amount: str | None = None) -> Json:
        """See SwapClient.sandbox_fund."""
        return finished(self._client.sandbox_fund(order_id, amount))
