"""Names and texts of the MCP tools, by which a model chooses and calls them.

Each text says what the tool changes, what it needs, what a second call does and what to do on
failure. Schemas and annotations follow from the operation's row.
"""

from __future__ import annotations

from typing import Final

from rpcsvc.operations.service import Tool

_ON_FAILURE: Final = (
    " On failure read error.message and validationErrors, correct the arguments and call again;"
    " if error.retryable is true, repeat the same call later."
)

GET_CAPABILITIES: Final = Tool(
    "get_capabilities",
    "Get capabilities",
    "Lists the chains, directions, current limits, rate and deposit policy of this swap service."
    " Call it first, when limits or chains matter. Changes nothing, needs no account; a second call"
    " gives the values of that moment." + _ON_FAILURE,
)
PLAN_SWAP: Final = Tool(
    "plan_swap",
    "Plan a swap",
    "Checks what is known of a swap between XMR and USDC so far, and names what is missing in"
    " missingInputs. Every argument may be left out. Use it to find out what to ask the user."
    " Changes nothing and locks no price; call it as often as the plan changes. For a price use"
    " get_quote." + _ON_FAILURE,
)
GET_QUOTE: Final = Tool(
    "get_quote",
    "Get a quote",
    "Prices an amount at the current rate: what the user would receive, the least they would"
    " receive, fees, and what happens to a deposit in every case. Show it to the user before"
    " create_swap, and pass data.quoteDigest on to that. Changes nothing and locks no price; a"
    " second call gives the price of that moment." + _ON_FAILURE,
)
CREATE_SWAP: Final = Tool(
    "create_swap",
    "Create a swap order",
    "Creates an order at the current rate and answers its deposit address, exact amount and expiry"
    " (data.fundingInstructions). No money moves until the user pays that address; an unpaid order"
    " expires by itself and costs nothing. Call it only after the user has agreed to a quote and"
    " named their own address as to; always name a refundAddress for XMR, which hides its sender."
    " sessionId is a UUID (version 4) that you make for this order with a random generator, never"
    " one from an example: with orderId it is the order's secret, so keep it. A second call with"
    " the same terms and sessionId answers the same order and makes no other, so repeat it when no"
    " answer came; a new sessionId makes a new order. With quoteDigest (of get_quote) the order is"
    " refused as quote_changed if its terms would be worse than those of the quote: quote again,"
    " and ask the user again. A webhook is only for an https server that you run: otherwise follow"
    " the order with get_swap_status. Order creations are limited per minute and per client."
    + _ON_FAILURE,
    has_app=True,
)
GET_SWAP_STATUS: Final = Tool(
    "get_swap_status",
    "Get the status of a swap",
    "Answers an order as it stands: state, deposits, payout, refund, deadline. After the user"
    " has paid, call it with waitSec 25 and the last cursor as sinceCursor: it answers"
    " when the order has changed. Go on until state is completed or terminal_failure. With"
    " verify, an order that pays to another address is refused: don't fund that one. Changes"
    " nothing." + _ON_FAILURE,
    has_app=True,
)
CANCEL_SWAP: Final = Tool(
    "cancel_swap",
    "Cancel an unpaid swap",
    "Ends an order that no deposit was sent to; this can't be undone. Needs the sessionId of the"
    " order. It is refused once a deposit was seen: that is swapped or refunded. Don't cancel if"
    " the user may have paid already. A second call answers the same ended order." + _ON_FAILURE,
    destructive=True,
)
LIST_SWAPS: Final = Tool(
    "list_swaps",
    "List a session's swaps",
    "Lists the orders that were made with a sessionId, newest first, so that you find one again"
    " whose orderId was lost. Pages by after. Changes nothing." + _ON_FAILURE,
)
CHECK_PAYMENT: Final = Tool(
    "check_payment",
    "Check a payment before it is signed",
    "Holds a payment that a wallet is about to sign against what the order waits for: address,"
    " token contract, chain, amount and time. Send an unsigned transaction, a payment URI, or"
    " address, amount, asset and chain. Have it signed only if data.paymentCheck.safeToSend is"
    " true. Never send a signed transaction, a key or a seed. Changes nothing." + _ON_FAILURE,
)
FUND_SWAP: Final = Tool(
    "fund_swap",
    "Pay a USDC order by a signature",
    "Pays what is due on an order that waits for USDC, without gas: the user's wallet signs, and"
    " the service sends (x402, EIP-3009). Without a payment it fails as payment_required, and"
    " error.details.paymentRequired says what to sign; send the signed PaymentPayload as payment,"
    ' or as _meta["x402/payment"]. Have it signed only after the user agreed to the order. A second'
    " call with the same payment pays nothing more and answers how it stands; while"
    " data.paymentResponse is null the outcome is not known: sign no other payment, and watch the"
    " order." + _ON_FAILURE,
    has_app=True,
)
SET_REFUND_ADDRESS: Final = Tool(
    "set_refund_address",
    "Name a refund address",
    "Names where a refund goes, once data.actionRequired of get_swap_status is refund_address. Ask"
    " the user for their own address; it can't be changed afterwards. Needs the sessionId of the"
    " order. A second call with the same address answers the same." + _ON_FAILURE,
    destructive=True,
)
CREATE_SUPPORT_TICKET: Final = Tool(
    "create_support_ticket",
    "Create a support ticket",
    "Leaves a message for the operator: on terminal_failure, or when the user needs a person. With"
    " orderId and sessionId of an order whose actionRequired is refund_address, walletAddress sets"
    " where the refund goes, once. A second call makes a second ticket, and tickets are limited per"
    " day: don't repeat one that was answered." + _ON_FAILURE,
    repeatable=False,
)
SANDBOX_FUND: Final = Tool(
    "sandbox_fund",
    "Sandbox: pay an order",
    "Sends a simulated deposit to an order, by default what is still due. Only simulated money"
    " moves. A second call pays a second time." + _ON_FAILURE,
    repeatable=False,
)
SANDBOX_FAULT: Final = Tool(
    "sandbox_fault",
    "Sandbox: provoke a fault",
    "Provokes a fault on the simulated chains, moves their clock or sets the rate, so that an agent"
    " can be tested with every outcome. It affects all orders of the sandbox. A second call"
    " provokes it again." + _ON_FAILURE,
    destructive=True,
    repeatable=False,
)
