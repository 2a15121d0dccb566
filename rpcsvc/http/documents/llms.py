"""llms.txt, the overview that links to everything, and llms-full.txt, the whole API on one page.

Lists come from the enums, the operation table and the settings, answers from the recording.
Source: the llms.txt convention.
"""

from __future__ import annotations

import json

from rpcsvc.domain.order import AGENT_STATE_OF, AgentState, OnDeadline
from rpcsvc.errors import ProtocolError, ServiceError
from rpcsvc.http.documents import advice, links
from rpcsvc.http.documents.agent import description, flow, limits
from rpcsvc.http.documents.links import escape_markdown, link, page, table
from rpcsvc.http.documents.recording import Recording, on_network, show, show_elsewhere
from rpcsvc.http.documents.signatures import signature_check
from rpcsvc.http.gate import RPC_TOKEN_HEADER
from rpcsvc.http.site import API_ROOT, MCP_PATH, RPC_PATH, Site
from rpcsvc.operations.inputs import IDEMPOTENCY_KEY
from rpcsvc.operations.swap import DEPOSIT_POLICY
from rpcsvc.orders.ports.venue import NEEDED, FaultKind

_LISTED_ABOVE = (links.LLMS, links.QUICKSTART, links.LLMS_FULL, links.OPENAPI, links.OPENRPC)

_MINUTE = 60


def llms_txt(site: Site) -> bytes:
    """llms.txt as Markdown."""
    return page(
        title(site),
        description(site),
        summary(site),
        "## The flow",
        numbered(flow(site)),
        "## Start here",
        _links(site, (links.QUICKSTART, links.LLMS_FULL)),
        "## API descriptions",
        _links(site, (links.OPENAPI, links.OPENRPC)),
        "## Optional",
        _links(site, tuple(p for p in links.DESCRIPTIONS if p not in _LISTED_ABOVE)),
    )


def title(site: Site) -> str:
    """The page's only H1, and the summary that the convention wants as a quotation below it."""
    name, motto = escape_markdown(site.brand.name), escape_markdown(site.brand.motto)
    return f"# {name}\n\n> {motto or 'XMR and USDC swaps'}"


def summary(site: Site) -> str:
    """The list of what to know before the first call."""
    token = (
        f"with the header `{RPC_TOKEN_HEADER}`"
        if site.rpc_needs_token
        else "for local clients only, since no token is set"
    )
    variable = ", the token in `AGENT_RPC_TOKEN`" if site.rpc_needs_token else ""
    return "\n".join(
        (
            f"- HTTPS API: {site.absolute(API_ROOT)}, JSON bodies, no API key.",
            f"- JSON-RPC 2.0: POST {site.absolute(RPC_PATH)}, methods `{site.brand.slug}.*`,"
            f" {token}.",
            f"- MCP: {site.absolute(MCP_PATH)} (Streamable HTTP), or `{site.client} mcp"
            f" {site.client_target}` on stdio.",
            f"- Command line: `{site.client} agent:capabilities {site.client_target}`{variable}.",
            "- `x2u` sends XMR and receives USDC; `u2x` sends USDC and receives XMR.",
            "- Amounts are decimal strings of what the user sends, never JSON numbers.",
            f"- Send the header `{IDEMPOTENCY_KEY}` when you create an order: a repeated"
            " call then finds the order that the first one made.",
            "- Never fund an order on the user's behalf without asking them, and never change an"
            " address that they gave.",
        )
    )


def numbered(steps: list[str]) -> str:
    """A numbered list."""
    return "\n".join(f"{number}. {step}" for number, step in enumerate(steps, 1))


def document_list(site: Site) -> str:
    """The documents, each with its description."""
    return _links(site, tuple(links.DESCRIPTIONS))


def _links(site: Site, paths: tuple[str, ...]) -> str:
    return "\n".join(link(path, site.absolute(path), links.DESCRIPTIONS[path]) for path in paths)


def llms_full(site: Site, recording: Recording) -> bytes:
    """llms-full.txt, with EXAMPLE_KEY and RPC_EXAMPLE_KEY as the keys of its examples."""
    recording = on_network(recording, site.network)
    sections = (
        ("In short", summary(site)),
        ("The flow", numbered(flow(site))),
        ("Operations", _operations(site)),
        ("Inputs", _inputs(site)),
        ("A swap from start to end", _swap(site, recording)),
        (
            "The same over JSON-RPC and on the command line",
            show_elsewhere(site, recording["execute"]),
        ),
        ("The envelope", _envelope()),
        ("States", _states()),
        ("Errors", _errors(site, recording)),
        ("Funding", _funding(site)),
        ("What happens to a deposit", _deposits(site)),
        ("When it does not work out", _failures(site, recording)),
        ("Idempotency", _idempotency(site, recording)),
        ("Limits", _limits(site)),
        ("Sandbox", _sandbox(site, recording) if site.is_simulated else ""),
        ("Checking signatures", signature_check(site)),
        ("Documents", document_list(site)),
    )
    parts = [part for name, text in sections if text for part in (f"## {name}", text)]
    return page(title(site), description(site), *parts)


def _operations(site: Site) -> str:
    columns = ("operation", "HTTPS", "JSON-RPC", "command", "what it does")
    rows = [
        (
            op.name,
            f"`{op.method} {API_ROOT}{op.path}`" if op.path else "",
            f"`{site.rpc_method(op)}`",
            f"`rpcsvc {op.command}`",
            op.summary,
        )
        for op in site.operations
    ]
    return table(columns, rows)


def _inputs(site: Site) -> str:
    chains = table(
        ("`chain`", "number", "also called", "USDC contract", "least swap"),
        [
            (c.name, c.chain_id, ", ".join(c.aliases), f"`{c.usdc_contract}`",
             f"{c.min_swap_usd} USD")
            for c in site.chains
        ],
    )  # fmt: skip
    rules = "\n".join(
        (
            "- `direction`: `x2u` (XMR to USDC) or `u2x` (USDC to XMR).",
            "- `chain`: the USDC side, whichever the direction; a name, another name or a number"
            " from the table below.",
            "- `amount`: a decimal string above 0 of what the user sends, XMR (at most 12"
            ' decimals) for `x2u`, USDC (at most 6) for `u2x`. `"0.8"`, not `0.8`.',
            "- `to`: where the payout goes. For `x2u` an EVM address; in mixed case its EIP-55"
            " checksum must hold. For `u2x` a Monero address: standard, subaddress or integrated.",
            "- `hasFunds` (plan only): whether the user has the funds ready.",
            "- `sessionId` (create, execute): a UUID (version 4) of yours; without it one is made."
            " Keep it: together with the `orderId` it proves that the order is yours.",
            "- Any other field is refused by name.",
        )
    )
    most = f"The most that one order swaps is worth {site.max_swap_usd} USD."
    return f"{rules}\n\n{chains}\n\n{most} Capabilities give both limits at the current rate."


def _swap(site: Site, recording: Recording) -> str:
    steps = (
        ("Nothing is known yet", "plan-nothing-known"),
        ("The destination is missing", "plan-no-destination"),
        ("Everything is known", "plan-ready"),
        ("The price", "quote"),
        ("The order", "execute"),
        ("Waiting for the deposit", "status-waiting_for_funding"),
        ("The deposit is seen", "status-deposit_detected"),
        ("The payout is on its way", "status-swap_processing"),
        ("Done", "status-completed"),
    )
    intro = (
        "Recorded on a sandbox with the default settings; ids, addresses, times and rates are"
        " others each time. Only `0.8` XMR, `arbitrum` and `to` were chosen by the user."
    )
    shown = [f"### {name}\n\n{show(site, recording[key])}" for name, key in steps]
    return "\n\n".join((intro, *shown))


def _envelope() -> str:
    rows = (
        ("`ok`", "The operation did what it was asked. A plan with missing inputs is a good plan."),
        ("`operation`", "Which operation answered."),
        ("`state`", "Where things stand; see the states."),
        ("`missingInputs`", "Names of the fields that are still needed."),
        ("`validationErrors`", "`{field, code, message, allowed?, received?}` for each problem."),
        ("`nextActions`", "What to do next. `operation` and `params`, where given, are a call"
         " that can be sent as it stands."),
        ("`data`", "What the operation found."),
        (
            "`requestId`",
            "Your `x-request-id`; without one the JSON-RPC `id`, if it is a string; else a"
            " generated one. Quote it to the operator.",
        ),
        ("`error`", "On failure only: `{code, message, retryable, details?}`."),
    )  # fmt: skip
    return table(("field", "meaning"), rows)


def _states() -> str:
    agent = table(("state", "what to do"), [(f"`{s.value}`", advice.STATE[s]) for s in AgentState])
    orders = table(
        ("`data.order.status`", "state"),
        [(f"`{status}`", f"`{state}`") for status, state in AGENT_STATE_OF.items()],
    )
    deadlines = table(
        ("`onDeadline`", "what the service does by itself at `deadlineAt`"),
        [(f"`{d.value}`", advice.ON_DEADLINE[d]) for d in OnDeadline],
    )
    return f"{agent}\n\n{orders}\n\n{deadlines}"


def _errors(site: Site, recording: Recording) -> str:
    rows = [
        (
            f"`{error.code}`",
            error.http_status,
            _over_rpc(error),
            "yes" if error.retryable else "no",
            advice.ERROR[error.code],
        )
        for error in advice.error_classes()
    ]
    columns = ("code", "HTTP", "JSON-RPC", "retry the same call", "what to do")
    shown = "\n\n".join(show(site, recording[n]) for n in ("error-amount", "error-destination"))
    # Clients can't tell two classes with the same code and status apart.
    return f"{table(columns, dict.fromkeys(rows))}\n\n{shown}"


def _over_rpc(error: type[ServiceError]) -> str:
    """The form of an error over JSON-RPC: an error with a number, or a result."""
    if error.rpc_code is not None:
        return str(error.rpc_code)
    return "" if issubclass(error, ProtocolError) else "result"


def _funding(site: Site) -> str:
    minutes = site.deposit_window_seconds // _MINUTE
    return "\n".join(
        (
            "- Show the user `data.fundingInstructions` as it is: `amountDisplay`,"
            " `depositAddress`, `network`, `expiresAt` and every line of `warnings`.",
            "- `paymentUri` is what a wallet opens: `monero:` or `ethereum:` (EIP-681).",
            f"- The deposit is awaited for {minutes} minutes. When it is first seen counts, not"
            " when it is confirmed.",
            *_lock(site),
            "- The amount must arrive in full: what a wallet or exchange takes comes on top.",
            "- `data.order` has amounts in atomic units (1 XMR is 10^12, 1 USDC is 10^6); all"
            " other amounts are decimal strings.",
            "- Before the user pays, check that `data.order.toAddress` is the address they gave."
            " Later, `?verify=<address>` on status does it for you.",
        )
    )


def _lock(site: Site) -> list[str]:
    if site.price_lock_seconds is None:
        return []
    return [
        f"- The rate is locked for {site.price_lock_seconds} seconds, until"
        " `priceLockedUntil`, and for less when the market moves far: then `priceLockedUntil` moves"
        " to an earlier time. A deposit that is first seen later is swapped at the rate of that"
        " moment if it brings at least `minReceived` in proportion; each deposit on record has its"
        " `rate`. So let the user pay soon."
    ]


def _deposits(site: Site) -> str:
    rows = [(f"`{row.case}`", row.action) for row in DEPOSIT_POLICY]
    late = site.late_window_seconds
    return (
        f"{table(('case', 'what the service does'), rows)}\n\nLate deposits are watched for"
        f" {late} seconds after `expiresAt`; then the order expires."
    )


def _failures(site: Site, recording: Recording) -> str:
    steps = (
        ("The user never paid", "unfunded-end"),
        ("A ticket", "ticket"),
        ("Too little came, and the refund needs an address", "refund-asked"),
        ("The refund address", "refund-address"),
        ("Refunded", "refund-terminal_failure"),
    )
    intro = (
        "No order waits forever: `deadlineAt` and `onDeadline` say what the service does by"
        " itself. What is decided by deposits waits for longer while their network can't be seen."
        " Instead of polling, let the service answer when something has happened: `waitSec` on"
        " status, or the order's events as `text/event-stream`."
        " An order that is made with `refundAddress` refunds to it and nowhere else: name one."
        " XMR hides its sender, so without it a refund of XMR needs an address from the order's"
        " owner, who is whoever knows both `orderId` and `sessionId`."
    )
    shown = [f"### {name}\n\n{show(site, recording[key])}" for name, key in steps]
    return "\n\n".join((intro, *shown))


def _idempotency(site: Site, recording: Recording) -> str:
    rules = "\n".join(
        (
            f"- Over HTTPS the header `{IDEMPOTENCY_KEY}`, over JSON-RPC a param of that"
            " name, on the command line `--idempotency-key`; create and execute only; a UUID"
            " made for this order. 16 to 255 printable ASCII characters: who knows the key can have"
            " the order's session.",
            _who_shares_keys(site),
            "- The same key with the same payload gives the first answer again, with the header"
            " `idempotent-replayed: true`. A copy that arrives while the first is still under way"
            " waits for it.",
            "- The same key with another payload is refused.",
            "- A call that failed validation uses up no key.",
            f"- Keys are kept for {site.idempotency_days} days; that of an order that ended"
            " without a deposit may be free earlier.",
            "- After a time-out or a lost connection, repeat the call with the same key.",
        )
    )
    return f"{rules}\n\n{show(site, recording['error-conflict'])}"


def _who_shares_keys(site: Site) -> str:
    """The bullet on the namespaces of keys (design part 3)."""
    https = (
        "- All callers over HTTPS share their keys; on the BFF each integrator (`x-api-key`) has"
        " keys of its own."
    )
    if not site.rpc_needs_token:
        return f"{https} JSON-RPC and the command line share those of HTTPS."
    return (
        f"{https} JSON-RPC and the command line with a token share others, the same for all tokens,"
        " of 1 to 255 characters. So the same key over HTTPS and with a token makes two orders:"
        " repeat a call over the way that it was made."
    )


def _limits(site: Site) -> str:
    known = limits(site)
    lines = [
        f"- Body: {known['bodyBytes']} bytes. JSON-RPC batch: {known['batchCalls']} calls."
        f" JSON nesting: {known['jsonDepth']} levels.",
        *(
            f"- `{row['budget']}`: {row['limit']} in {row['windowSeconds']} seconds per"
            f" {row['per']}, for {row['for']}."
            for row in known["rateLimits"]
        ),
    ]
    if known["rateLimits"]:
        lines.append(
            "- Answers carry `RateLimit` and `RateLimit-Policy`; a refused one is HTTP 429 with"
            " `Retry-After`."
        )
    return "\n".join(lines)


def _sandbox(site: Site, recording: Recording) -> str:
    faults = [
        (f"`{kind.value}`", f"`{NEEDED[kind]}`" if kind in NEEDED else "") for kind in FaultKind
    ]
    example = json.dumps({"fault": FaultKind.ADVANCE_CLOCK.value, "seconds": 3600})
    return "\n\n".join(
        (
            "This installation simulates its chains: no deposit is real, and addresses are of test"
            " networks. `sandbox.fund` sends a deposit from a simulated user; without `amount` it"
            " sends what is still due. Blocks take a second or less, so a swap takes a few"
            " seconds.",
            show(site, recording["fund"]),
            f"`sandbox.fault` provokes what goes wrong in life, such as `{example}`:",
            table(("fault", "needs"), faults),
        )
    )
