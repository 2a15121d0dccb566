"""Advice for agents on each state and each error code."""

from __future__ import annotations

from collections.abc import Iterator

from rpcsvc.domain.order import AgentState, OnDeadline
from rpcsvc.errors import ServiceError

STATE: dict[AgentState, str] = {
    AgentState.NEEDS_INPUT: "Inputs are missing. Ask the user for what `missingInputs` names.",
    AgentState.NEEDS_DESTINATION: "Only `to` is missing. Ask the user where the payout goes.",
    AgentState.READY: "Everything needed is there. Go on with the next action.",
    AgentState.QUOTED: "Show the user the price and the fees, then create the order.",
    AgentState.WAITING_FOR_FUNDING: "The order waits for the deposit. Show the user"
    " `data.fundingInstructions`, then poll.",
    AgentState.DEPOSIT_DETECTED: "A deposit was seen and waits for confirmations. Poll; if"
    " `data.amountDue` is not null, more has to be sent.",
    AgentState.SWAP_PROCESSING: "The payout is on its way. Poll.",
    AgentState.REFUNDING: "The deposit goes back. Poll; if `data.actionRequired` is"
    " `refund_address`, ask the user for one and send it with swap.refundAddress; if it is"
    " `refund_blocked`, the network refuses the refund address, and the operator tries again.",
    AgentState.COMPLETED: "Terminal. The payout is final; tell the user.",
    AgentState.TERMINAL_FAILURE: "Terminal. `data.outcome` is `expired`, `refunded` or `failed`."
    " Tell the user, and open a support ticket if they need help.",
    AgentState.TICKET_CREATED: "The ticket is on record. Keep its `ticketId` and"
    " `data.ticketSecret`, give both to the user, and look for an answer with support.get.",
    AgentState.APPROVAL_REQUIRED: "A person has to grant `data.approval`. Then repeat the call with"
    " the same idempotency key.",
    AgentState.INVALID_INPUT: "Something sent is wrong. `validationErrors` says which field, what"
    " came and what is allowed; where it is empty, `error.message` does. Correct it and send it"
    " again.",
    AgentState.IDEMPOTENCY_CONFLICT: "The idempotency key belongs to another payload. Use a new"
    " key for a new order.",
    AgentState.NOT_FOUND: "There is no such order, ticket, method or path. Check what you sent.",
    AgentState.VERIFICATION_FAILED: "`verify` is not this order's destination: don't fund it,"
    " somebody may have given you another order's id. Or the `sessionId` is not this order's.",
    AgentState.RATE_LIMITED: "Too many calls, or too much reserved by orders without a deposit."
    " Wait for `Retry-After` seconds.",
    AgentState.UNAVAILABLE: "A part of the service is down for now. Wait for `Retry-After`"
    " seconds and repeat the same call, with the same idempotency key if it had one.",
    AgentState.INTERNAL_ERROR: "The service failed. Repeat the same call, with the same"
    " idempotency key if it had one; if it goes on, give the operator the `requestId`.",
}

ERROR: dict[str, str] = {
    "invalid_json": "Send one JSON document in UTF-8, no key twice, no NaN or Infinity, not"
    " nested too deeply.",
    "invalid_request": "Read the message: the body must be a JSON object (over JSON-RPC a request"
    " with `params` as an object), or the HTTP method is not one of this path.",
    "unknown_method": "Check the method's name or the path.",
    "payload_too_large": "Send less: see the limits below.",
    "unsupported_media_type": "Send `content-type: application/json`.",
    "unauthorized": "Over JSON-RPC send the operator's token, or use the HTTPS API, which needs"
    " none. Over the BFF send the `x-api-key` that the operator gave out, or leave it out.",
    "tls_required": "Use https.",
    "misdirected_request": "Use the address under which the service is published; the Host header"
    " has to be its name.",
    "rate_limited": "Wait for `Retry-After` seconds, then repeat the call. With `details.reason`"
    " `unfunded_orders`: fund or cancel an order (swap.cancel), and it may succeed at once. With"
    " `tickets`: name the `orderId` and `sessionId` of an order that was paid, if there is one.",
    "missing_input": "Ask the user for the fields in `missingInputs` (over the BFF in"
    " `details.problems`).",
    "invalid_input": "Correct the fields in `validationErrors` (over the BFF in"
    " `details.problems`). Amounts are strings; unknown fields are refused, and the nearest known"
    " name is given.",
    "amount_below_minimum": "Send at least `details.minimum`.",
    "amount_above_maximum": "Send at most `details.maximum`, or split the swap into several"
    " orders; or at most `details.maxNow`, if that is there: the service can't pay for more now.",
    "unsupported_chain": "Choose one of `details.allowed`.",
    "unsupported_direction": "Send `x2u` or `u2x`.",
    "unsupported_token": "Only XMR and the chain's USDC are swapped.",
    "invalid_destination": "Ask the user for the address again; don't correct it yourself. A"
    " checksum that fails means that a character is wrong.",
    "destination_not_allowed": "Send one of `allowed`, or have the operator add the address.",
    "forbidden": "The token lacks the scope `details.scope`. Ask the operator.",
    "spend_limit": "Order at most `details.leftUsd`, or come back after `details.freeAt`.",
    "approval_required": "Once `details.approval.id` is granted, repeat the call with its key.",
    "verification_failed": "The order pays to another address than the one in `verify`: don't"
    " fund it. Or the `sessionId` is not the one that the order was made in.",
    "order_not_cancellable": "Ask for the order's status: what was sent to it is swapped or"
    " refunded.",
    "order_not_fundable": "It can't be paid by signing: not here, it waits for XMR, nothing is due,"
    " or a signed payment is under way. Ask for the order's status.",
    "payment_required": "Have the user's wallet sign an entry of"
    " `details.paymentRequired.accepts`, and send the same call with the payment (x402).",
    "payment_refused": "Nothing was taken. `details.paymentRequired.error` says why; sign a new"
    " payment, of what is in `accepts` now.",
    "order_not_found": "Check the `orderId`. Nothing is known of it here.",
    "ticket_not_found": "Send `ticketId` and `ticketSecret` as support.create answered them.",
    "idempotency_conflict": "The key was used with another payload; `details` name the fields"
    " that differ. For a new order use a new key, for a retry the same payload.",
    "quote_changed": "No order was made: `details.worse` names what is worse than in the quote of"
    " `quoteDigest`. Get a new quote, and let the user decide.",
    "unavailable": "Wait for `Retry-After` seconds and repeat the call, with its idempotency key if"
    " it had one. Nothing was done, unless the message says that this is not known yet.",
    "internal_error": "Repeat the call, with its idempotency key if it had one: either the first"
    " call did everything or nothing.",
}

ON_DEADLINE: dict[OnDeadline, str] = {
    OnDeadline.EXPIRE: "The order ends as `expired`.",
    OnDeadline.SWAP_OR_REFUND: "What is confirmed by then is swapped if it is at least the"
    " minimum, otherwise refunded.",
    OnDeadline.REFUND: "The deposit is refunded.",
    OnDeadline.REPUBLISH: "The same signed transaction is published again, never another one.",
    OnDeadline.REMIND: "The operator is reminded that the refund needs an address.",
    OnDeadline.ASK_UPSTREAM: "It asks the service that settles the order again.",
}


def error_classes() -> list[type[ServiceError]]:
    """Return the errors with a code, in the order of the tree."""
    return list(_with_code(ServiceError))


def _with_code(parent: type[ServiceError]) -> Iterator[type[ServiceError]]:
    for child in parent.__subclasses__():
        if "code" in vars(child):
            yield child
        yield from _with_code(child)
