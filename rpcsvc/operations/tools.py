"""Names and texts of the MCP tools, by which a model chooses and calls them.

A description has two sentences, because a model reads all of them before it asks anything. The
rules of a tool are a resource: its use, effects, needs, limits, a second call, and failure.
"""

from __future__ import annotations

from typing import Final

from rpcsvc.operations.service import Tool

_NONE: Final = "changes nothing and moves no money."
_PUBLIC: Final = "no account and no secret."
_CALLS: Final = (
    "calls a minute of your network address, or of your token; rate_limited says when to come back."
)
_FAILURE: Final = (
    "read error.message and validationErrors, correct the arguments and call again; if"
    " error.retryable is true, repeat the same call later."
)


def _rules(
    purpose: str,
    *,
    effects: str = _NONE,
    auth: str = _PUBLIC,
    limits: str = _CALLS,
    again: str,
    failure: str = _FAILURE,
) -> str:
    return (
        f"{purpose}\n\nEffects: {effects}\n\nAuth: {auth}\n\nLimits: {limits}\n\n"
        f"Second call: {again}\n\nOn failure: {failure}"
    )


GET_CAPABILITIES: Final = Tool(
    "get_capabilities",
    "Get capabilities",
    "Lists chains, directions, limits and rate of the service. Changes nothing; call it first when"
    " limits or chains matter.",
    _rules(
        "Lists the chains, directions, current limits and rate of this swap service, and with"
        " detail full its deposit policy. Call it first, when limits or chains matter.",
        again="gives the values of that moment.",
    ),
)
PLAN_SWAP: Final = Tool(
    "plan_swap",
    "Plan a swap",
    "Checks what is known of a swap between XMR and USDC so far, and names what is missing in"
    " missingInputs. Changes nothing; use it to find out what to ask the user, and get_quote"
    " for a price.",
    _rules(
        "Checks what is known of a swap between XMR and USDC so far, and names what is missing in"
        " missingInputs. Every argument may be left out. Use it to find out what to ask the user;"
        " for a price use get_quote.",
        effects=f"{_NONE} No price is locked.",
        again="checks again; call it as often as the plan changes.",
    ),
)
GET_QUOTE: Final = Tool(
    "get_quote",
    "Get a quote",
    "Prices an amount now: what the user would receive, at least, and with detail full all fees."
    " Changes nothing; show it to the user before create_swap, and pass data.quoteDigest on to"
    " that.",
    _rules(
        "Prices an amount at the current rate: what the user would receive after all fees, and the"
        " least they would receive; with detail full each fee, and what happens to a deposit in"
        " every case. With receiveAmount in place of amount it says what to send for exactly that"
        " to arrive. Show it to the user before create_swap, and pass data.quoteDigest on to that.",
        effects=f"{_NONE} No price is locked.",
        again="gives the price of that moment.",
    ),
)
CREATE_SWAP: Final = Tool(
    "create_swap",
    "Create a swap order",
    "Makes an order and answers its deposit address, exact amount and expiry in"
    " data.fundingInstructions; no money moves until the user pays. Call it only once the"
    " user agrees to a quote and names their own address as to, for XMR a refundAddress too;"
    " repeat it unchanged when no answer came, which makes no second order.",
    _rules(
        "Creates an order at the current rate and answers its deposit address, exact amount and"
        " expiry (data.fundingInstructions). Call it only after the user has agreed to a quote and"
        " named their own address as to; always name a refundAddress for XMR, which hides its"
        " sender. With quoteDigest (of get_quote) the order is refused as quote_changed if its"
        " terms would be worse than those of the quote: quote again, and ask the user again. Tell"
        " the user to send exactly that amount, once and on that network only. Without"
        " refundAddress a USDC refund goes back to the address that paid, which an exchange may not"
        " credit, and whoever holds sessionId decides where an XMR refund goes. With detail full"
        " the answer has the warnings of the order. A webhook is only for an https server that you"
        " run: otherwise follow the order with get_swap_status.",
        effects="makes one order. No money moves until the user pays that address; an unpaid order"
        " expires by itself and costs nothing.",
        auth="no account. sessionId is a UUID (version 4) that you make for this order with a"
        " random generator, never one from an example: with orderId it is the order's secret, so"
        " keep it.",
        limits="orders a minute and a day, and unpaid ones at a time, of your network address or"
        " token; amounts as get_capabilities lists them.",
        again="the same terms, quoteDigest and sessionId answer the same order and make no other,"
        " so repeat the call unchanged when no answer came; a new quoteDigest or sessionId makes a"
        " new order.",
    ),
    has_app=True,
)
GET_SWAP_STATUS: Final = Tool(
    "get_swap_status",
    "Get the status of a swap",
    "Answers an order as it stands: state, deposits, payout, refund, deadline. Changes"
    " nothing; after the user has paid, call it with waitSec 25 and the last cursor as"
    " sinceCursor until state is completed or terminal_failure.",
    _rules(
        "Answers an order as it stands: state, deposits, payout, refund, deadline. After the user"
        " has paid, call it with waitSec 25 and the last cursor as sinceCursor: it answers when the"
        " order has changed. Go on until state is completed or terminal_failure. With verify, an"
        " order that pays to another address is refused: don't fund that one.",
        auth="the orderId alone.",
        limits=f"waitSec is at most 25, and so many calls may wait at once; {_CALLS}",
        again="answers the order as it stands then.",
    ),
    has_app=True,
)
CANCEL_SWAP: Final = Tool(
    "cancel_swap",
    "Cancel an unpaid swap",
    "Ends an order that no deposit was sent to, which can't be undone. Don't cancel if the"
    " user may have paid already.",
    _rules(
        "Ends an order that no deposit was sent to. Don't cancel if the user may have paid"
        " already.",
        effects="the order ends, which can't be undone. It is refused once a deposit was seen: that"
        " is swapped or refunded.",
        auth="the sessionId of the order.",
        again="answers the same ended order.",
    ),
    destructive=True,
)
LIST_SWAPS: Final = Tool(
    "list_swaps",
    "List a session's swaps",
    "Lists the orders that were made with a sessionId, newest first. Changes nothing; use it"
    " to find an order whose orderId was lost.",
    _rules(
        "Lists the orders that were made with a sessionId, newest first, so that you find one again"
        " whose orderId was lost.",
        auth="the sessionId that they were made with.",
        limits=f"100 orders a page, 20 by default, continued by after; {_CALLS}",
        again="lists them as they stand then.",
    ),
)
CHECK_PAYMENT: Final = Tool(
    "check_payment",
    "Check a payment before it is signed",
    "Compares a payment that a wallet is about to sign with what the order waits for; changes"
    " nothing. Have it signed only if data.paymentCheck.safeToSend is true, and never send a"
    " signed transaction, a key or a seed.",
    _rules(
        "Holds a payment that a wallet is about to sign against what the order waits for: address,"
        " token contract, chain, amount and time. Send an unsigned transaction, calldata with chain"
        " and contract, a payment URI, or address, amount, asset and chain. Have it signed only if"
        " data.paymentCheck.safeToSend is true. Never send a signed transaction, a key or a seed.",
        auth="the orderId alone.",
        again="checks again, against what is due then; call it again after each change.",
    ),
)
FUND_SWAP: Final = Tool(
    "fund_swap",
    "Pay a USDC order by a signature",
    "Pays what is due on a USDC order by the user's signature, without gas (x402); without"
    " payment, error.details.paymentRequired says what to sign. Have it signed only after the"
    " user agreed to the order, and while data.paymentResponse is null sign no other payment.",
    _rules(
        "Pays what is due on an order that waits for USDC, without gas: the user's wallet signs,"
        " and the service sends (x402, EIP-3009). Without a payment it fails as payment_required,"
        " and error.details.paymentRequired says what to sign; send the signed PaymentPayload as"
        ' payment, or as _meta["x402/payment"]. Have it signed only after the user agreed to the'
        " order.",
        effects="with a payment, the signer's USDC goes to the order's deposit address, which can't"
        " be undone.",
        auth="the orderId, and the payer's signature over exactly what is due.",
        limits="payments a day of your network address, unless you have a token; one payment of an"
        " order at a time; it may be used 30 s to 1 h after it is signed.",
        again="the same payment pays nothing more and answers how it stands; while"
        " data.paymentResponse is null the outcome is not known: sign no other payment, and watch"
        " the order.",
        failure=f"after payment_refused nothing was taken, and the message says why; {_FAILURE}",
    ),
    has_app=True,
)
SET_REFUND_ADDRESS: Final = Tool(
    "set_refund_address",
    "Name a refund address",
    "Names where a refund goes, once data.actionRequired of get_swap_status is"
    " refund_address; it can't be changed afterwards. Ask the user for their own address.",
    _rules(
        "Names where a refund goes, once data.actionRequired of get_swap_status is refund_address."
        " Ask the user for their own address.",
        effects="the refund is sent there; it can't be changed afterwards.",
        auth="the sessionId of the order.",
        again="the same address answers the same; another one is not taken.",
    ),
    destructive=True,
)
CREATE_SUPPORT_TICKET: Final = Tool(
    "create_support_ticket",
    "Create a support ticket",
    "Leaves a message for the operator, on terminal_failure or when the user needs a person, or"
    " continues a ticket. Each call leaves one, so don't repeat one that was answered.",
    _rules(
        "Leaves a message for the operator: on terminal_failure, or when the user needs a person."
        " With orderId and sessionId of an order whose actionRequired is refund_address,"
        " walletAddress sets where the refund goes, once. With ticketId and ticketSecret, the"
        " message goes to that ticket.",
        effects="a person reads the ticket; no money moves but by walletAddress.",
        auth="no account; with walletAddress the sessionId of the order.",
        limits="tickets a day of your network address or token, and 8000 characters of message.",
        again="leaves a second message: don't repeat one that was answered.",
    ),
    repeatable=False,
)
GET_SUPPORT_TICKET: Final = Tool(
    "get_support_ticket",
    "Read a support ticket",
    "Returns a ticket with the operator's answers. Changes nothing.",
    _rules(
        "Returns a ticket with all messages, the operator's answers among them.",
        effects="changes nothing.",
        auth="the ticketId and the ticketSecret of create_support_ticket.",
        again="reads it again; the order's event support.replied says when that is worth it.",
    ),
)
SANDBOX_FUND: Final = Tool(
    "sandbox_fund",
    "Sandbox: pay an order",
    "Sends a simulated deposit to an order, by default what is still due; no real money"
    " moves. A second call pays a second time.",
    _rules(
        "Sends a simulated deposit to an order, by default what is still due.",
        effects="simulated money moves, and no other.",
        auth="the orderId alone.",
        again="pays a second time.",
    ),
    repeatable=False,
)
SANDBOX_FAULT: Final = Tool(
    "sandbox_fault",
    "Sandbox: provoke a fault",
    "Provokes a fault on the simulated chains, moves their clock or sets the rate, to test an"
    " agent with every outcome. It may affect all orders of the sandbox, and no real money.",
    _rules(
        "Provokes a fault on the simulated chains, moves their clock or sets the rate, so that an"
        " agent can be tested with every outcome.",
        effects="all orders of the sandbox may be affected; no real money is.",
        auth="no account; the orderId for a fault of one order.",
        again="provokes it again.",
    ),
    destructive=True,
    repeatable=False,
)
