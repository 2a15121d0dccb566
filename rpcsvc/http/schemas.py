"""Shared by the OpenAPI and OpenRPC documents: named schemas, examples, errors by code.

The schemas are the operations' models, moved to ``#/components/schemas`` in the form that client
generators read best. The examples are the table's calls and the answers of the recorded swaps.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Annotated, Any, Final, get_origin

import msgspec
from msgspec import Meta
from pydantic import BaseModel, TypeAdapter

from rpcsvc.domain.money import USDC, XMR
from rpcsvc.domain.order import AgentState
from rpcsvc.errors import ServiceError
from rpcsvc.http.documents import recording
from rpcsvc.http.documents.advice import ERROR, STATE, error_classes
from rpcsvc.http.documents.agent import example_swap
from rpcsvc.http.documents.recording import RecordedCall
from rpcsvc.http.site import Site
from rpcsvc.operations import bff_models, models, narrowing, params
from rpcsvc.operations.discovery import schemas_of
from rpcsvc.operations.inputs import IDEMPOTENCY_KEY
from rpcsvc.operations.narrowing import Networks
from rpcsvc.operations.service import Example, Operation
from rpcsvc.operations.table import OPERATIONS
from rpcsvc.strict_json import Json

NULL: Final[Json] = {"type": "null"}
_ROOT: Final = "#/components/schemas/"
ORDER_ID: Final = "orderId"
_PLACEHOLDER: Final = "$orderId"
_TICKET_ID: Final = "ticketId"
OWN_ORDER: Final = "Send the orderId of an order of your own."
# Notes for readers of the code, such as "(spec 2.3)", are removed from the document.
_INTERNAL_NOTE: Final = re.compile(r"\s?\((?:spec|design)[^()]*\)")
_KEY_PROPERTY: Final = IDEMPOTENCY_KEY


# --- names ---

_DROPPED: Final = frozenset({"title", "$defs"})
# Each of these keywords applies to one type only, so other types can be beside it.
_OF_ONE_TYPE: Final = frozenset({"type", "minimum", "maximum"})


def ref(name: str) -> Json:
    """A reference to a named schema."""
    return {"$ref": _ROOT + name}


def pascal(name: str) -> str:
    """``swap.plan`` as ``SwapPlan``."""
    return "".join(part.capitalize() for part in re.split(r"[.-]", name))


def camel(name: str) -> str:
    """``swap.plan`` as ``swapPlan``."""
    whole = pascal(name)
    return whole[0].lower() + whole[1:]


def envelope_name(operation: Operation) -> str:
    """The name of an operation's success envelope."""
    return f"{pascal(operation.name)}Envelope"


def request_name(operation: Operation) -> str:
    """The name of an operation's params (spec 2.3)."""
    return _title(operation.params)


@cache
def _title(model: type[BaseModel]) -> str:
    return str(model.model_json_schema()["title"])


# --- schemas ---


def component_schemas(site: Site) -> Json:
    """The named schemas of the operations, sorted by name."""
    found = _envelope_parts()
    for operation in site.operations:
        described = schemas_of(operation, site.networks)
        found |= lifted(described["params"], is_answer=False)
        found[request_name(operation)] = in_body(found[request_name(operation)], operation.path)
        found |= lifted(described["result"], is_answer=True)
        title = described["result"]["title"]
        found[title] = _added_to("Data", found["Data"], found[title])
        found[envelope_name(operation)] = envelope(
            {"ok": {"const": True}, "operation": {"const": operation.name}, "data": ref(title)}
        )
    return dict(sorted(with_named_types(site, found).items()))


def _added_to(name: str, base: Json, schema: Json) -> Json:
    """An object's schema as a named one and what it has beside that."""
    properties = {n: s for n, s in schema["properties"].items() if n not in base["properties"]}
    required = [n for n in schema["required"] if n not in base["required"]]
    own = {"type": "object", "required": required, "properties": properties}
    return {"description": schema["description"], "allOf": [ref(name), own]}


@cache
def _named_types(networks: Networks) -> dict[str, tuple[str, Json]]:
    """The types that the models name, and addresses, by the text of their schemas."""
    types = {
        name: _tidy(_type_schema(annotated), is_answer=True)
        for module in (models, params, bff_models)
        for name, annotated in vars(module).items()
        if get_origin(annotated) is Annotated and not name.startswith("_")
    }
    types["EvmAddress"] = narrowing.address(USDC, networks)
    types["MoneroAddress"] = narrowing.address(XMR, networks)
    # One that says no more than its type needs no name.
    return {_text_of(schema): (name, schema) for name, schema in types.items() if len(schema) > 1}


def _type_schema(annotated: Any) -> Json:
    """The schema of a type: results annotate with Meta, params with pydantic's Field."""
    if any(isinstance(each, Meta) for each in annotated.__metadata__):
        return msgspec.json.schema(annotated)
    return TypeAdapter(annotated).json_schema()


def _text_of(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def with_named_types(site: Site, schemas: Json) -> Json:
    """Schemas that refer to each type that the models name, and these types."""
    used: Json = {}
    named = _named_types(site.networks)
    return {**{n: _with_references(s, named, used) for n, s in schemas.items()}, **used}


def _with_references(value: Any, named: dict[str, tuple[str, Json]], used: Json) -> Any:
    """A part of a schema with references to named types, which are noted in ``used``."""
    if isinstance(value, list):
        return [_with_references(each, named, used) for each in value]
    if not isinstance(value, dict):
        return value
    for schema in (value, without_null(value)):
        if (found := named.get(_text_of(schema))) is not None:
            name, used[name] = found[0], found[1]
            return ref(name) if schema is value else {"anyOf": [ref(name), NULL]}
    return {key: _with_references(each, named, used) for key, each in value.items()}


def in_path(name: str, path: str | None) -> bool:
    """Return whether a param is part of an operation's path."""
    return f"{{{name}}}" in (path or "")


def in_body(schema: Json, path: str | None) -> Json:
    """The schema of params without those of the path."""
    names = [name for name in schema["properties"] if not in_path(name, path)]
    rest = {key: value for key, value in schema.items() if key != "required"}
    required = [name for name in schema.get("required", ()) if name in names]
    properties = {name: schema["properties"][name] for name in names}
    return {**rest, "properties": properties, **({"required": required} if required else {})}


def params_schema(site: Site, operation: Operation) -> Json:
    """An operation's params in the documents' form, without the idempotency key."""
    parts = lifted(schemas_of(operation, site.networks)["params"], is_answer=False)
    return dict(parts[request_name(operation)])


def envelope(own: Json) -> Json:
    """The envelope (spec 2.1) with properties of its own."""
    added = {"type": "object", "required": list(own), "properties": own}
    return {"allOf": [ref("Envelope"), added]}


_APPROVAL: Final[Json] = {
    "type": "object",
    "description": "With approval_required: id, reason, expiresAt.",
}


def error_schema() -> Json:
    """ErrorEnvelope (spec 2.3), which is an agent envelope as well."""
    own = {
        "ok": {"const": False},
        "operation": {"type": "string"},
        "data": {"allOf": [ref("Data")], "properties": {"approval": _APPROVAL}},
        "error": ref("Failure"),
    }
    return {"description": "The answer when the call failed.", **envelope(own)}


def _envelope_parts() -> Json:
    codes = list(dict.fromkeys(cls.code for cls in error_classes()))
    return {
        "AgentState": {
            "type": "string",
            "enum": [state.value for state in AgentState],
            "description": _meanings({state.value: STATE[state] for state in AgentState}),
        },
        "ErrorCode": {
            "type": "string",
            "enum": codes,
            "description": _meanings({code: ERROR[code] for code in codes}),
        },
        "Failure": _described(
            "What went wrong.",
            {
                "code": ref("ErrorCode"),
                "message": _text("For people: what was wrong and what to send instead."),
                "retryable": _flag("Whether the same call may succeed later."),
                "details": {
                    "type": "object",
                    "additionalProperties": True,
                    "description": "For programs: limits, allowed values, names of fields.",
                },
            },
            optional=("details",),
        ),
        "InputProblem": _described(
            "One input that is wrong.",
            {
                "field": _text("The input's name."),
                "code": ref("ErrorCode"),
                "message": _text("What came and what to send instead."),
                "allowed": {"description": "What is allowed, where that can be listed."},
                "received": {"description": "What came; long values are shortened."},
            },
            optional=("allowed",),
        ),
        "NextAction": _described(
            "A step to take. With operation and params it is a call that can be sent as it stands."
            " Lean answers leave out what name and order say: the description, the orderId.",
            {
                "action": _text("A short name of the step."),
                "description": _text("The step in words."),
                "operation": _text("The operation to call."),
                "params": {
                    "type": "object",
                    "additionalProperties": True,
                    "description": "The operation's params.",
                },
            },
            optional=("description", "operation", "params"),
        ),
        "Envelope": _described(
            "What every answer has beside ok, operation and data.",
            {
                "state": ref("AgentState"),
                "missingInputs": _list_of({"type": "string"}, "Names of the missing inputs."),
                "validationErrors": _list_of(ref("InputProblem"), "What is wrong with the inputs."),
                "nextActions": _list_of(ref("NextAction"), "What to do next."),
                "requestId": _text("As in the header x-request-id."),
            },
        ),
        "Data": {
            **lifted(models.schema_of(models.Result), is_answer=True)["Result"],
            "description": "What every data has; a failed call gives no more.",
        },
        "ErrorEnvelope": error_schema(),
    }


def _described(description: str, properties: Json, optional: tuple[str, ...] = ()) -> Json:
    return {
        "type": "object",
        "description": description,
        "required": [name for name in properties if name not in optional],
        "properties": properties,
    }


def _text(description: str) -> Json:
    return {"type": "string", "description": description}


def _flag(description: str) -> Json:
    return {"type": "boolean", "description": description}


def _list_of(items: Json, description: str) -> Json:
    return {"type": "array", "items": items, "description": description}


def _meanings(texts: dict[str, str]) -> str:
    """A Markdown list, or a sentence where there is one only."""
    lines = [f"`{word}`: {text}" for word, text in texts.items()]
    return lines[0] if len(lines) == 1 else "\n".join(f"- {line}" for line in lines)


def reachable(schemas: Json, *roots: Any) -> Json:
    """The named schemas that the roots refer to, directly or through others."""
    wanted: set[str] = set()
    left = set(_names_in(roots))
    while left:
        name = left.pop()
        wanted.add(name)
        left |= set(_names_in(schemas[name])) - wanted
    return {name: schema for name, schema in schemas.items() if name in wanted}


def _names_in(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        target = value.get("$ref")
        if isinstance(target, str) and target.startswith(_ROOT):
            yield target.removeprefix(_ROOT)
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from _names_in(item)


# --- pydantic's schemas in the documents' form ---


def lifted(schema: Json, *, is_answer: bool) -> Json:
    """A model's schema and those nested in it, by name.

    Answers lose ``additionalProperties: false``: they may gain fields within a version, and a
    client must not break on them. Params keep it, since the service refuses unknown properties.
    """
    parts = {**schema.get("$defs", {}), schema["title"]: schema}
    return {name: _tidy(part, is_answer=is_answer) for name, part in parts.items()}


def _tidy(schema: Json, *, is_answer: bool) -> Json:
    """A schema without titles and null defaults, its choices as lists of types."""
    tidied: Json = {}
    # The branches first: what is said of all of them stands.
    for key, value in sorted(schema.items(), key=lambda item: item[0] != "anyOf"):
        if key in _DROPPED or (key, value) == ("default", None):
            continue
        if is_answer and (key, value) == ("additionalProperties", False):
            continue
        tidied |= _tidy_keyword(key, value, is_answer=is_answer)
    return tidied


def _tidy_keyword(key: str, value: Any, *, is_answer: bool) -> Json:
    match key, value:
        case "$ref", _:
            value = value.replace("#/$defs/", _ROOT)
        case "description", _:
            value = _INTERNAL_NOTE.sub("", value).replace("``", "`")
        case "properties", _:
            named = {n: _tidy(v, is_answer=is_answer) for n, v in value.items()}
            value = {n: v for n, v in named.items() if n != _KEY_PROPERTY}
        case "anyOf", _:
            return _choice([_tidy(branch, is_answer=is_answer) for branch in value])
        case "allOf", _:
            value = [_tidy(part, is_answer=is_answer) for part in value]
        case (("items" | "additionalProperties" | "if" | "then" | "else"), dict()):
            value = _tidy(value, is_answer=is_answer)
    return {key: value}


def _choice(branches: list[Json]) -> Json:
    """``anyOf`` of plain types as one schema with a list of types; nullable is one of them.

    An enum stays a branch beside null: all of its values are of one type.
    """
    others = [branch for branch in branches if branch != NULL]
    if len(others) == 1 and NULL in branches and others[0].keys() & {"enum", "const"}:
        described = {k: v for k, v in others[0].items() if k == "description"}
        chosen = {k: v for k, v in others[0].items() if k not in described}
        return {**described, "anyOf": [chosen, NULL]}
    if len(others) == 1 and "type" in others[0]:
        return _nullable(others[0]) if NULL in branches else others[0]
    if all(branch.keys() <= _OF_ONE_TYPE for branch in others):
        merged = {key: value for branch in others for key, value in branch.items()}
        return {**merged, "type": [branch["type"] for branch in branches]}
    return {"anyOf": branches}


def _nullable(schema: Json) -> Json:
    types = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
    return {**schema, "type": [*types, "null"]}


def without_null(schema: Json) -> Json:
    """A nullable schema without null; any other one as it is."""
    others = [branch for branch in schema.get("anyOf", ()) if branch != NULL]
    if len(others) == 1:
        return {**{key: value for key, value in schema.items() if key != "anyOf"}, **others[0]}
    match schema.get("type"):
        case [kind, "null"]:
            return {**schema, "type": kind}
    return schema


# --- errors ---


def errors_by_code() -> dict[str, type[ServiceError]]:
    """The error of each code, the one that it stands for."""
    found: dict[str, type[ServiceError]] = {}
    for cls in error_classes():
        found.setdefault(cls.code, cls)
    return found


# --- examples ---


def exchanges(operation: Operation) -> list[RecordedCall]:
    """The recorded calls of an operation, the first of each kind: state, or error code."""
    kinds: dict[str, RecordedCall] = {}
    for exchange in recording.load().values():
        if exchange.operation == operation.name:
            kind = exchange.answer.get("error", {}).get("code") or exchange.answer["state"]
            kinds.setdefault(kind, exchange)
    return list(kinds.values())


def shown(operation: Operation) -> RecordedCall | None:
    """The shortest of the recorded answers with the operation's result, if it gave that one.

    A result that several operations have is shown once.
    """
    having = [each.name for each in OPERATIONS if each.result is operation.result]
    recorded = [e for e in recording.load().values() if e.answer["ok"] and e.operation in having]
    shortest = min(recorded, key=lambda exchange: len(_text_of(exchange.answer)), default=None)
    return shortest if shortest and shortest.operation == operation.name else None


def refused(codes: set[str]) -> list[RecordedCall]:
    """A recorded call for each of the error codes that has one."""
    found: dict[str, RecordedCall] = {}
    for exchange in recording.load().values():
        code = exchange.answer.get("error", {}).get("code")
        if code in codes:
            found.setdefault(code, exchange)
    return list(found.values())


def example_order_id() -> str:
    """The order id in the examples: of a recorded order, which no installation knows.

    To send such an example, replace it by the id of an order of your own.
    """
    return str(next(_recorded_values("order"))["orderId"])


def placed(value: Any) -> Any:
    """A value of an example, with placeholders replaced by those of a recorded order or ticket."""
    if value == _PLACEHOLDER:
        return example_order_id()
    if value == "$ticketId":
        return next(each["ticketId"] for each in _recorded_values("ticket"))
    if value in ("$sessionId", "$ticketSecret"):
        return str(next(_recorded_values(value.removeprefix("$"))))
    return value


def _recorded_values(name: str) -> Iterator[Any]:
    """The values of that name in recorded answers, which no installation knows."""
    return filter(None, (e.answer["data"].get(name) for e in recording.load().values()))


def label(exchange: RecordedCall) -> str:
    """A short description of a recorded call."""
    answer = exchange.answer
    word = answer["error"]["code"] if "error" in answer else answer["state"]
    return f"Recorded on the sandbox: {word}"


def params_of(site: Site, example: Example) -> Json:
    """An example's params as they can be sent to this installation, but for the order's id."""
    params = dict(example.params)
    if "chain" in params and not _has_chain(site, params["chain"]):
        fitting = example_swap(site)
        params["chain"] = fitting["chain"]
        if "amount" in params and params["direction"] == fitting["direction"]:
            params["amount"] = fitting["amount"]
    usdc = site.chains[0].usdc_contract
    return {n: usdc if value == "$usdc" else placed(value) for n, value in params.items()}


def needs_order(call: Example | RecordedCall) -> bool:
    """Return whether an example is about an order that has to be made first."""
    return ORDER_ID in call.params


def _has_chain(site: Site, wanted: str | int) -> bool:
    return any(wanted in (chain.name, chain.chain_id) for chain in site.chains)
