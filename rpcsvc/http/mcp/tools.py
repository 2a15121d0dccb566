"""The tools that tools/list describes, made from the operation table, and the page of an order that
hosts show beside their results (an MCP App, SEP-1865).

The page loads nothing: a tool's result gives it the order, and the QR code to pay by in ``_meta``.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from functools import cached_property
from typing import Final

import orjson

from rpcsvc.domain.money import USDC
from rpcsvc.http.pages.rendering import Renderer, Texts, qr_image
from rpcsvc.http.schemas import lifted, ref, request_name
from rpcsvc.http.site import Site
from rpcsvc.operations.discovery import ENVELOPE_SCHEMA, IDEMPOTENCY_KEY_SCHEMA, schemas_of
from rpcsvc.operations.inputs import IDEMPOTENCY_KEY
from rpcsvc.operations.service import Effect, Operation, Reply, Tool
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
        " before expiresAt) and poll get_swap_status until state is completed or"
        " terminal_failure. Every address must be the user's own: ask for it, never take one from"
        " an example. Amounts are decimal strings. nextActions name operations:"
        f" {names}, swap.execute is create_swap, too."
    )


def described(site: Site, operation: Operation, tool: Tool, app_meta: Json) -> Json:
    """An entry of tools/list; ``app_meta`` links the app of those that have one."""
    return {
        **({"_meta": app_meta} if tool.has_app else {}),
        "name": tool.name,
        "title": tool.title,
        "description": tool.description,
        "inputSchema": input_schema(site, operation),
        "outputSchema": output_schema(site, operation),
        "annotations": {
            "title": tool.title,
            "readOnlyHint": operation.effect is Effect.READ,
            "destructiveHint": tool.destructive,
            "idempotentHint": tool.repeatable,
            "openWorldHint": operation.effect is Effect.MOVES_MONEY and not operation.sandbox_only,
        },
    }


def input_schema(site: Site, operation: Operation) -> Json:
    """The schema of the operation's params with MCP's additions: where orders are made, a required
    session and the idempotency key.
    """
    parts = lifted(schemas_of(operation, site.networks)["params"], is_answer=False)
    schema = parts.pop(request_name(operation))
    if operation.idempotent:
        properties = schema["properties"]
        session = {**properties[SESSION_ID], "type": "string"}
        properties = {**properties, SESSION_ID: session, IDEMPOTENCY_KEY: _KEY}
        required = [*schema.get("required", ()), SESSION_ID]
        schema = {**schema, "properties": properties, "required": required}
    return _whole(schema, parts)


_KEY: Json = {
    **IDEMPOTENCY_KEY_SCHEMA,
    "description": "Leave it out: terms, quoteDigest and sessionId are the key then. A value of its"
    " own, such as a UUID, makes a second order with the same ones.",
}


def output_schema(site: Site, operation: Operation) -> Json:
    """The envelope: with the operation's data when ``ok`` is true, with an error when not."""
    result = schemas_of(operation, site.networks)["result"]
    schema = {
        **ENVELOPE_SCHEMA,
        "if": {"properties": {"ok": {"const": True}}},
        "then": {"properties": {"data": ref(result["title"])}},
        "else": {"required": ["error"]},
    }
    return _whole(schema, lifted(result, is_answer=True))


def _whole(schema: Json, parts: Json) -> Json:
    """The schema with the named ones that it refers to: a tool has no other document."""
    text = json.dumps({**schema, "$defs": parts} if parts else schema)
    whole: Json = json.loads(text.replace(ref("")["$ref"], "#/$defs/"))
    return whole


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
    is_usdc = funding["asset"] == USDC.symbol
    return {QR: qr_image(funding["depositAddress" if is_usdc else "paymentUri"])}
