"""The tools that tools/list describes, made from the operation table, and the page of an order that
hosts show beside their results (an MCP App, SEP-1865).

The page loads nothing: a tool's result gives it the order, and the QR code to pay by in ``_meta``.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property
from typing import Final

import orjson

from rpcsvc.domain.money import USDC
from rpcsvc.http.documents import links
from rpcsvc.http.pages.rendering import Renderer, Texts, qr_image
from rpcsvc.http.schemas import camel, lifted, request_name
from rpcsvc.http.site import Site
from rpcsvc.operations.discovery import IDEMPOTENCY_KEY_SCHEMA, schemas_of
from rpcsvc.operations.inputs import IDEMPOTENCY_KEY
from rpcsvc.operations.lean import is_cut
from rpcsvc.operations.params import DETAIL, ORDER_ID_PATTERN, TICKET_ID_PATTERN
from rpcsvc.operations.service import Effect, Operation, Reply, Tool
from rpcsvc.operations.views import monero_uri
from rpcsvc.orders.quoted import PATTERN as DIGEST_PATTERN
from rpcsvc.strict_json import Json

SESSION_ID = "sessionId"
APP_MIME_TYPE: Final = "text/html;profile=mcp-app"
QR: Final = "order/qr"
_APP_HEADING: Final = "checkout.heading_"
# The page needs no origin beside itself.
_APP_META: Final[Json] = {"ui": {"csp": {}, "prefersBorder": True}}


def tools_of(operations: Iterable[Operation]) -> dict[str, Operation]:
    """The operations that are tools, by the tool's name."""
    return {op.tool.name: op for op in operations if op.tool is not None}


def instructions(site: Site) -> str:
    """The text that a model reads before it calls any tool."""
    found = tools_of(site.operations)
    names = ", ".join(f"{op.name} is {name}" for name, op in found.items())
    return (
        f"{site.brand.name} swaps XMR for USDC and USDC for XMR on behalf of a user. Order of"
        " calls: plan_swap until nothing is missing, get_quote, create_swap once the user agrees,"
        " then show the user data.fundingInstructions (exactly that amount, to that address,"
        " before data.order.expiresAt) and poll get_swap_status until state is completed or"
        " terminal_failure. Every address must be the user's own: ask for it, never take one from"
        " an example. Amounts are decimal strings. Answers are lean; with detail: full they"
        " have all fees, rules, warnings and the attestation. nextActions name operations:"
        f" {names}, swap.execute is create_swap, too. The rules of a tool are the resource that its"
        " description names."
    )


def rules_uri(site: Site, tool: str) -> str:
    """The address of a tool's rules; ``{tool}`` gives the template of all."""
    return f"rules://{site.brand.slug}/{tool}"


def rules_text(site: Site, operation: Operation, tool: Tool) -> str:
    """A tool's rules and arguments, and where its schemas stand in full."""
    arguments = _arguments(site, operation)["properties"]
    listed = [f"- `{name}`: {schema['description']}" for name, schema in arguments.items()]
    full = f"operation {camel(operation.name)} of {site.absolute(links.OPENAPI)}"
    parts = (f"# {tool.name}", tool.description, tool.rules, "\n".join(listed))
    return "\n\n".join([*filter(None, parts), f"Arguments and result in full: {full}\n"])


def described(site: Site, operation: Operation, tool: Tool, app_meta: Json) -> Json:
    """An entry of tools/list; ``app_meta`` links the app of those that have one.

    The schema of its results is left out: it is six times as long as the rest.
    """
    return {
        **({"_meta": app_meta} if tool.has_app else {}),
        "name": tool.name,
        "title": tool.title,
        "description": f"{tool.description} Rules: {rules_uri(site, tool.name)}",
        "inputSchema": input_schema(site, operation),
        "annotations": _annotations(operation, tool),
    }


def _annotations(operation: Operation, tool: Tool) -> Json:
    """The hints of a tool. Two of them mean nothing for one that only reads."""
    reads = operation.effect is Effect.READ
    writing = {"destructiveHint": tool.destructive, "idempotentHint": tool.repeatable}
    moves_money = operation.effect is Effect.MOVES_MONEY and not operation.sandbox_only
    return {"readOnlyHint": reads, **({} if reads else writing), "openWorldHint": moves_money}


def input_schema(site: Site, operation: Operation) -> Json:
    """The short schema of a tool's arguments, for a model: the service checks by the whole one."""
    left_out = _NOT_FOR_MODELS if operation.idempotent else (*_NOT_FOR_MODELS, *_CASES)
    whole = _arguments(site, operation)
    schema = _short({name: value for name, value in whole.items() if name not in left_out})
    if not is_cut(operation.result):
        del schema["properties"][DETAIL]
    return schema


def _arguments(site: Site, operation: Operation) -> Json:
    """The schema of the operation's params with MCP's additions: where orders are made, a required
    session and the idempotency key.
    """
    parts = lifted(schemas_of(operation, site.networks)["params"], is_answer=False)
    schema: Json = parts[request_name(operation)]
    if not operation.idempotent:
        return schema
    session = {**schema["properties"][SESSION_ID], "description": _OWN_SESSION}
    properties = {**schema["properties"], SESSION_ID: session, IDEMPOTENCY_KEY: _KEY}
    required = [*schema.get("required", ()), SESSION_ID]
    return {**schema, "properties": properties, "required": required}


# In the listing, because few hosts let a model read resources.
_OWN_SESSION: Final = (
    "A UUID of version 4 that you make for this order with a random generator, never one from an"
    " example: with orderId it is the order's secret, so keep it."
)
_KEY: Json = {
    **IDEMPOTENCY_KEY_SCHEMA,
    "description": "Leave it out: terms, quoteDigest and sessionId are the key then. A value of its"
    " own, such as a UUID, makes a second order with the same ones.",
}
_CASES: Final = ("if", "then", "else")
_NOT_FOR_MODELS: Final = ("description", "$defs")
_LONGEST_PATTERN: Final = 60
_COPIED: Final = (ORDER_ID_PATTERN, TICKET_ID_PATTERN, DIGEST_PATTERN)
_OBJECT: Final[Json] = {"type": "object"}
_NULL: Final[Json] = {"type": "null"}


def _short(schema: Json) -> Json:
    """A schema without nulls, lengths, single exceptions, long patterns, those of what is copied
    and not made up, and the fields of nested objects.

    The first sentence of a description stays; the rules have all of it.
    """
    short: Json = {}
    for name, value in schema.items():
        match name, value:
            case (("minLength" | "maxLength" | "allOf"), _) | ("not", {"const": _}):
                continue
            case "description", str():
                short[name] = f"{value.partition('. ')[0].removesuffix('.')}."
            case "pattern", str() if len(value) > _LONGEST_PATTERN or value in _COPIED:
                continue
            case "properties", dict():
                short[name] = {key: _short_property(each) for key, each in value.items()}
            case (("if" | "then" | "else"), dict()):
                short[name] = _short(value)
            case "type", [*kinds, "null"]:
                short[name] = kinds[0] if len(kinds) == 1 else kinds
            case _:
                short[name] = value
    return short


def _short_property(schema: Json) -> Json:
    """The schema of an argument, where it is not null."""
    others = {name: value for name, value in schema.items() if name != "anyOf"}
    choices = [_short_property(each) for each in schema.get("anyOf", ()) if each != _NULL]
    match choices:
        case []:
            is_object = schema.get("type") == "object" or "$ref" in schema
            return {**_OBJECT} if is_object else _short(schema)
        case [only]:
            return {**only, **_short(others)}
        case _:
            return {**_short(others), "anyOf": choices}


# --- the app -----------------------------------------------------------------------------------


class OrderApp:
    """The page of an order, as a resource."""

    def __init__(self, site: Site, renderer: Renderer, texts: Texts) -> None:
        self.uri = f"ui://{site.brand.slug}/order"
        headings = {
            key.removeprefix(_APP_HEADING): text
            for key, text in texts.entries.items()
            if key.startswith(_APP_HEADING)
        }
        self._renderer = renderer
        self._texts = texts
        self._values = {
            "name": site.brand.name,
            "version": site.version,
            "tool": "get_swap_status",
            "qr": QR,
            "headings": headings,
            "stale": texts.say("common.stale"),
            "cancelled": texts.say("app.cancelled"),
        }

    @cached_property
    def _html(self) -> str:
        return self._renderer.app("app", self._texts, self._values)

    @property
    def tool_meta(self) -> Json:
        """``_meta`` of a tool whose results the page shows."""
        return {"ui": {"resourceUri": self.uri}}

    def resource(self) -> Json:
        """The page's entry in resources/list."""
        return {
            "uri": self.uri,
            "name": "order",
            "description": "an order: state, amount, address and QR code, shown by the host",
            "mimeType": APP_MIME_TYPE,
            "_meta": _APP_META,
        }

    def contents(self) -> Json:
        """The page as resources/read answers it."""
        return {"uri": self.uri, "mimeType": APP_MIME_TYPE, "text": self._html, "_meta": _APP_META}


def result_meta(reply: Reply) -> Json:
    """``_meta`` of a tool's result: the QR code of the payment that is due, if any.

    Several wallets send an EIP-681 link to the token's contract, which loses the money: for USDC it
    is the code of the bare address.
    """
    funding = None if reply.error else orjson.loads(reply.body)["data"].get("fundingInstructions")
    if not funding:
        return {}
    address = funding["depositAddress"]
    is_usdc = funding["asset"] == USDC.symbol
    return {QR: qr_image(address if is_usdc else monero_uri(address, funding["amount"]))}
