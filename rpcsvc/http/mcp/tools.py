"""Tools as tools/list describes them: from the operation table, nothing by hand.

Claude's API refuses ``anyOf`` at the root of a tool's input schema, and clients pass it on as it
is; so the cases of an operation are a chain of if, then and else, which means the same.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from rpcsvc.http.schemas import lifted, params_schema
from rpcsvc.http.site import Site
from rpcsvc.operations.discovery import ENVELOPE_SCHEMA, IDEMPOTENCY_KEY_SCHEMA, schemas_of
from rpcsvc.operations.envelope import Json
from rpcsvc.operations.service import Effect, Operation, Tool

SESSION_ID = "sessionId"


def tools_of(operations: Iterable[Operation]) -> dict[str, Operation]:
    """The operations that are tools, by the tool's name."""
    return {op.tool.name: op for op in operations if op.tool is not None}


def instructions(site: Site) -> str:
    """What a model should know before it calls any tool."""
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
    """One entry of tools/list; ``app_meta`` links the app of those that have one."""
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
    """The operation's params, and what MCP has beside: a required session where orders are made."""
    schema = params_schema(site, operation)
    if operation.idempotent:
        properties = schema["properties"]
        session = {**properties[SESSION_ID], "type": "string"}
        properties = {**properties, SESSION_ID: session, "idempotency-key": _KEY}
        required = [*schema.get("required", ()), SESSION_ID]
        schema = {**schema, "properties": properties, "required": required}
    return _branched(schema)


_KEY: Json = {
    **IDEMPOTENCY_KEY_SCHEMA,
    "description": "Leave it out: terms and sessionId are the key then. A value of its own, such as"
    " a UUID, makes a second order with the same terms and sessionId.",
}


def _branched(schema: Json) -> Json:
    """``anyOf`` at the root as a chain of conditions: on the property that tells cases apart, if
    there is one, so that what is wrong is told of the case that was meant.
    """
    cases = schema.get("anyOf")
    if cases is None:
        return schema
    *before, chain = cases
    for case in reversed(before):
        name, chosen = next(iter(case["properties"].items()))
        if "const" in chosen or "enum" in chosen:
            condition = {"properties": {name: chosen}, "required": [name]}
            chain = {"if": condition, "then": case, "else": chain}
        else:
            chain = {"if": case, "else": chain}
    return {**{key: value for key, value in schema.items() if key != "anyOf"}, **chain}


def output_schema(site: Site, operation: Operation) -> Json:
    """The envelope: with the operation's data when ``ok`` is true, with an error when not."""
    result = schemas_of(operation, site.networks)["result"]
    parts: Any = json.dumps(lifted(result, is_answer=True))
    return {
        **ENVELOPE_SCHEMA,
        "if": {"properties": {"ok": {"const": True}}},
        "then": {"properties": {"data": {"$ref": f"#/$defs/{result['title']}"}}},
        "else": {"required": ["error"]},
        "$defs": json.loads(parts.replace("#/components/schemas/", "#/$defs/")),
    }
