"""Inputs and results of the client, as pydantic models. Unknown fields of later versions
are kept.
"""

from __future__ import annotations

import uuid
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic.alias_generators import to_camel


class Model(BaseModel):
    """Names are camelCase on the wire. Amounts are decimal strings unless said otherwise."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="allow", frozen=True
    )


def _new_id() -> str:
    return str(uuid.uuid4())


class Swap(Model):
    """A swap that is to be made, once: made again from the same Swap, it is the same order.

    ``amount`` is what is sent, or ``receive_amount``, in its place, what is to arrive exactly.
    ``session_id`` is half of the order's secret, and ``idempotency_key`` tells a repeated call from
    a new order: keep the Swap (``model_dump_json``) until the order is known. ``refund_address`` is
    where refunds go; name one for XMR, which hides its sender. With ``quote_digest`` and
    ``min_received`` or ``max_deposit``, see ``held_to``, no order of worse terms is made or
    believed. ``webhook`` is a URL that the order's events are sent to, or its ``url`` and
    ``secret`` (docs/use/webhooks.md). With ``funding`` x402 the gas of ``SwapClient.fund`` is in
    the quote (docs/use/x402.md).
    """

    model_config = ConfigDict(extra="forbid")

    direction: Literal["x2u", "u2x"]
    chain: str | int
    amount: str | None = None
    receive_amount: str | None = None
    to: str
    refund_address: str | None = None
    session_id: str = Field(default_factory=_new_id)
    idempotency_key: str = Field(default_factory=_new_id)
    quote_digest: str | None = None
    min_received: str | None = None
    max_deposit: str | None = None
    webhook: str | dict[str, str] | None = None
    funding: Literal["x402"] | None = None

    @model_validator(mode="after")
    def _names_one_amount(self) -> Self:
        if (self.amount is None) == (self.receive_amount is None):
            raise ValueError("give amount, for what is sent, or receive_amount, for what arrives")
        return self

    def held_to(self, quote: Quote) -> Swap:
        """The swap with the digest of the quote: its terms must not get worse."""
        held = {"quote_digest": quote.digest, "min_received": quote.min_received}
        if self.receive_amount is not None:
            held["max_deposit"] = quote.deposit_amount
        return self.model_copy(update=held)

    def terms(self) -> dict[str, Any]:
        """The params of a quote."""
        named, amount = "amount", self.amount
        if amount is None:
            named, amount = "receiveAmount", self.receive_amount
        terms = {"direction": self.direction, "chain": self.chain, named: amount}
        return terms if self.funding is None else {**terms, "funding": self.funding}

    def wanted(self) -> dict[str, Any]:
        """The params of an order."""
        given = {
            "refundAddress": self.refund_address,
            "quoteDigest": self.quote_digest,
            "webhook": self.webhook,
        }
        named = {name: value for name, value in given.items() if value is not None}
        return {**self.terms(), "to": self.to, "sessionId": self.session_id, **named}


class Quote(Model):
    """A price at the current rate. With its ``digest`` no worse order is made."""

    direction: str
    chain: str
    chain_id: int
    deposit_asset: str
    deposit_amount: str
    payout_asset: str
    expected_output: str
    min_received: str
    rate: str
    receive_amount: str | None = None
    digest: str | None = None


class Funding(Model):
    """The amount to send, where to and until when. Show the warnings to the payer."""

    deposit_address: str
    amount: str
    amount_display: str
    asset: str
    network: str
    chain_id: int
    expires_at: str
    payment_uri: str
    warnings: list[str]


class Order(Model):
    """An order. Its amounts are atomic units as strings, as on the wire."""

    order_id: str
    status: str
    deposit_address: str
    deposit_amount: str
    to_address: str
    expected_output: str
    created_at: str
    expires_at: str
    checkout_url: str | None = None
    refund_address: str | None = None
    receive_amount: str | None = None
    attestation: str | None = None


class Placed(Model):
    """A new order: how to pay it, and the session that is its secret."""

    order: Order
    funding: Funding = Field(alias="fundingInstructions")
    quote: Quote
    session_id: str

    @property
    def order_id(self) -> str:
        """The order's id."""
        return self.order.order_id


class Deposit(Model):
    """A deposit on record."""

    txid: str
    amount: str
    status: str


class Transfer(Model):
    """A payout or a refund."""

    kind: str
    address: str
    amount: str
    asset: str
    status: str
    txid: str | None


class Status(Model):
    """An order as it stands. ``cursor`` is that of its last event."""

    state: str
    order: Order
    cursor: int
    funding: Funding | None = Field(alias="fundingInstructions")
    amount_due: str | None
    deposits: list[Deposit]
    transfers: list[Transfer]
    outcome: str | None
    action_required: str | None

    @property
    def is_over(self) -> bool:
        """Whether the order is completed, refunded, failed or expired."""
        return self.outcome is not None


class Restored(Model):
    """An order found by the secret. Its amounts are decimal strings."""

    order_id: str
    session_id: str
    state: str
    status: str
    direction: str
    chain: str
    deposit_asset: str
    deposit_amount: str
    payout_asset: str
    expected_output: str
    to_address: str
    created_at: str
    expires_at: str
    completed_at: str | None


class Event(Model):
    """Something that happened to an order, and how it stood then."""

    cursor: int
    at: str
    type: str
    state: str
    status: str


class PaymentMade(Model):
    """A signed payment as the network has it. ``amount`` is in atomic units."""

    transaction: str
    network: str
    payer: str
    amount: str


class Funded(Model):
    """An order after a signed payment. Without ``payment`` the outcome is not known: wait."""

    order: Order
    payment: PaymentMade | None = Field(alias="paymentResponse")


class Webhook(Model):
    """The webhook of an order; ``ended``: its receiver answered 410."""

    url: str
    state: str
    failing_since: str | None


class Delivery(Model):
    """A message to a webhook: the event with the cursor ``sequence``."""

    message_id: str
    sequence: int
    type: str
    state: str
    attempts: int
    last_status: int | None
    last_error: str | None
    next_attempt_at: str | None


class Deliveries(Model):
    """The webhook of an order, None where it has none, and its newest messages, oldest first."""

    webhook: Webhook | None
    deliveries: list[Delivery]
