"""The OpenRPC document of the JSON-RPC methods, generated from the operation table and settings.

rpc.discover returns it as well. Schemas and examples come from schemas.py.
Source: OpenRPC 1.3.2, https://spec.open-rpc.org.
"""

from __future__ import annotations

from typing import Final

from rpcsvc import errors
from rpcsvc.errors import ServiceError
from rpcsvc.http import schemas
from rpcsvc.http.documents import links
from rpcsvc.http.documents.advice import ERROR
from rpcsvc.http.documents.agent import description
from rpcsvc.http.documents.recording import RecordedCall, of_site
from rpcsvc.http.gate import RPC_TOKEN_HEADER
from rpcsvc.http.openapi.document import TAGS, VERSION, contact, effect_sentence, tag_of
from rpcsvc.http.schemas import ref
from rpcsvc.http.site import API_ROOT, RPC_PATH, Site
from rpcsvc.operations.discovery import IDEMPOTENCY_KEY_SCHEMA
from rpcsvc.operations.inputs import IDEMPOTENCY_KEY
from rpcsvc.operations.narrowing import cases_of
from rpcsvc.operations.service import Example, Operation
from rpcsvc.strict_json import Json

OPENRPC: Final = "1.3.2"
DISCOVER: Final = "rpc.discover"
_META_SCHEMA: Final = "https://meta.open-rpc.org/"

# JSON-RPC errors of a call that was read; any other failure is a result with ok false.
_CALL_ERRORS: Final = (
    errors.InvalidRequest,
    errors.InvalidParams,
    errors.RateLimited,
    errors.InternalError,
)
# JSON-RPC errors of a message that is refused before a method is called.
_MESSAGE_ERRORS: Final = (
    errors.UnknownMethod,
    errors.InvalidJson,
    errors.PayloadTooLarge,
    errors.UnsupportedMediaType,
    errors.Unauthorized,
    errors.TlsRequired,
    errors.MisdirectedRequest,
)
ErrorClass = type[ServiceError]


def openrpc_document(site: Site) -> Json:
    """OpenRPC of ``/rpc``. It depends on nothing but the site."""
    shared = _shared_params(site)
    methods = [_method(site, operation, shared) for operation in site.operations]
    named = schemas.component_schemas(site)
    document = {
        "openrpc": OPENRPC,
        "info": {
            "title": f"{site.brand.name} JSON-RPC",
            "version": VERSION,
            "description": _introduction(site),
            "contact": contact(site),
        },
        "servers": [{"name": "rpc", "url": site.absolute(RPC_PATH), "summary": _admission(site)}],
        "externalDocs": {
            "description": "The whole flow on one page, with real requests and answers.",
            "url": site.absolute(links.LLMS_FULL),
        },
        "methods": [*methods, _discover()],
        "components": {
            "schemas": schemas.reachable(named, methods, shared),
            "contentDescriptors": shared,
            "errors": _errors(),
            "tags": _tags(site),
        },
    }
    # A copy: parts of it are kept by others, the recording and the operations' schemas.
    return of_site(site, document)


def _tags(site: Site) -> Json:
    names = {"discovery", *map(tag_of, site.operations)}
    return {name: {"name": name, "description": TAGS[name]} for name in TAGS if name in names}


def _introduction(site: Site) -> str:
    return "\n\n".join(
        (
            description(site),
            "POST JSON-RPC 2.0 as `application/json`. Params go by name. The result is the envelope"
            " of the operation, or of its failure. What an operation finds"
            " out by itself, an input that is wrong or an order that is not there, is a result"
            " whose `ok` is false; JSON-RPC errors are for messages that can't be carried out, and"
            " those of any method stand under `components.errors`."
            f" A batch may have {site.limits.batch} calls, a body {site.limits.body_bytes} bytes."
            " The schema `ErrorCode` says what each code means and what to do about it. Answers may"
            " gain fields, and states and codes may gain values, within this version: ignore what"
            " you don't know.",
        )
    )


def _admission(site: Site) -> str:
    if site.rpc_needs_token:
        return f"Needs the operator's token in the header {RPC_TOKEN_HEADER}."
    return "No token is set: answers local clients only."


def _method(site: Site, operation: Operation, shared: Json) -> Json:
    params = [
        {"$ref": f"#/components/contentDescriptors/{param['name']}"}
        if shared.get(param["name"]) == param
        else param
        for param in _params(site, operation)
    ]
    return {
        "name": site.rpc_method(operation),
        "summary": operation.summary,
        "description": _description(operation),
        "tags": [{"$ref": f"#/components/tags/{tag_of(operation)}"}],
        "paramStructure": "by-name",
        "params": params,
        "result": {
            "name": "answer",
            "schema": {"oneOf": [ref(schemas.envelope_name(operation)), ref("ErrorEnvelope")]},
        },
        "examples": _examples(site, operation),
    }


def _description(operation: Operation) -> str:
    parts = [effect_sentence(operation)]
    if operation.idempotent:
        parts.append(
            f"Send `{IDEMPOTENCY_KEY}` with a new value for each order, and the same"
            " value when the call is repeated: then a retry can't make a second order."
        )
    if operation.creates:
        parts.append("Not carried out as a notification: nobody would learn what was made.")
    if operation.errors:
        codes = ", ".join(f"`{code}`" for code in operation.errors)
        parts.append(f"Results with `ok` false have one of these codes: {codes}.")
    return " ".join(parts)


def _shared_params(site: Site) -> Json:
    """The params that several operations have, each in its most frequent form, by name."""
    found = [param for operation in site.operations for param in _params(site, operation)]
    often = sorted((p for p in found if found.count(p) > 1), key=found.count)
    return {param["name"]: param for param in often}


def _params(site: Site, operation: Operation) -> list[Json]:
    described = schemas.params_schema(site, operation)
    params = [
        _content(name, _alone(described, name), required=name in described.get("required", ()))
        for name in described["properties"]
    ]
    if operation.idempotent:
        key = {k: v for k, v in IDEMPOTENCY_KEY_SCHEMA.items() if k != "description"}
        text = (
            "A UUID made for this order. 16 to 255 printable ASCII characters, shared with HTTPS;"
            " 1 to 255 where the server has a token, whose keys are apart from those of HTTPS."
        )
        params.append(_content(IDEMPOTENCY_KEY, {**key, "description": text}))
    return params


def _alone(described: Json, name: str) -> Json:
    """A param's schema by itself: what any case allows, as OpenRPC can't say what goes together."""
    schema: Json = described["properties"][name]
    cases = [case["properties"].get(name, {}) for case in cases_of(described)]
    branches = [branch for case in cases for branch in case.get("anyOf", [case])]
    forms = [schemas.without_null(branch) for branch in branches if branch != schemas.NULL]
    if not forms or not all("pattern" in form for form in forms):
        return schema  # which says the same, or as much as holds in every case
    different = [form for at, form in enumerate(forms) if form not in forms[:at]]
    null = [schemas.NULL] if isinstance(schema["type"], list) else []
    return {**schema, "anyOf": [*different, *null]}


def _content(name: str, schema: Json, *, required: bool = False) -> Json:
    """A content descriptor; its schema's description becomes its own."""
    described = {"description": schema["description"]} if "description" in schema else {}
    bare = {key: value for key, value in schema.items() if key != "description"}
    return {"name": name, **described, "required": required, "schema": bare}


def _examples(site: Site, operation: Operation) -> list[Json]:
    """The recorded calls whose answers the OpenAPI document shows; where there are none, the calls
    of the table, which that document has all.

    Idempotency keys are left out: a key that stands in a document is used by all of its readers.
    """
    answered = schemas.shown(operation)
    recorded = [(answered, _good_example(site, operation))] if answered else []
    recorded += [
        (exchange, site.absolute(f"{links.OPENAPI}#/components/examples/{exchange.name}/value"))
        for exchange in schemas.exchanges(operation)
        if exchange.answer.get("error", {}).get("code")
        not in (None, errors.IdempotencyConflict.code)
    ]
    if recorded:
        return [_recorded(exchange, address) for exchange, address in recorded]
    return [_unanswered(each, schemas.params_of(site, each)) for each in operation.examples]


def _good_example(site: Site, operation: Operation) -> str:
    """The place where an operation's answer is shown: the OpenAPI document, or the call itself."""
    path = f"{API_ROOT}{operation.path}"
    if operation.method == "GET" and operation.params.asks_nothing():
        return site.absolute(path)
    call = f"{path.replace('/', '~1')}/{operation.method.lower()}"
    content = "responses/200/content/application~1json/example"
    return site.absolute(f"{links.OPENAPI}#/paths/{call}/{content}")


def _recorded(exchange: RecordedCall, address: str) -> Json:
    note = (schemas.OWN_ORDER,) if schemas.needs_order(exchange) else ()
    return {
        "name": exchange.name,
        "description": " ".join((f"{schemas.label(exchange)}: {address}", *note)),
        "params": _values(exchange.params),
    }


def _unanswered(example: Example, params: Json) -> Json:
    note = {"description": schemas.OWN_ORDER} if schemas.needs_order(example) else {}
    return {"name": example.name, **note, "params": _values(params)}


def _values(params: Json) -> list[Json]:
    return [{"name": name, "value": value} for name, value in params.items()]


def _discover() -> Json:
    return {
        "name": DISCOVER,
        "summary": "This document.",
        "description": "The OpenRPC description of this service.",
        "tags": [{"$ref": "#/components/tags/discovery"}],
        "paramStructure": "by-name",
        "params": [],
        "result": {
            "name": "document",
            "description": f"An OpenRPC document, see {_META_SCHEMA}.",
            "schema": {
                "type": "object",
                "required": ["openrpc", "info", "methods"],
                "properties": {
                    "openrpc": {"const": OPENRPC},
                    "info": {"type": "object"},
                    "methods": {"type": "array", "items": {"type": "object"}},
                },
            },
        },
    }


def _errors() -> Json:
    """The JSON-RPC errors by the names of their classes; ``data.code`` tells those of one apart."""
    return {
        cls.__name__: {
            "code": cls.rpc_code,
            "message": ERROR[cls.code],
            "data": {"code": cls.code, "retryable": cls.retryable},
        }
        for cls in (*_MESSAGE_ERRORS, *_CALL_ERRORS)
    }
