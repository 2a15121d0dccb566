"""The BFF's half of the OpenAPI document, generated from its operation table."""

from __future__ import annotations

from typing import Final

from pydantic import BaseModel

from rpcsvc import errors
from rpcsvc.http import schemas
from rpcsvc.http.openapi.parts import (
    ANY_BODY,
    ANY_CALL,
    ANY_OPERATION,
    JSON,
    ErrorClass,
    by_status,
    header_ref,
    header_refs,
    parameter_ref,
    response,
)
from rpcsvc.http.schemas import ref
from rpcsvc.http.site import BFF_ROOT, Site
from rpcsvc.operations import bff_models
from rpcsvc.operations.envelope import Json
from rpcsvc.operations.service import Effect, Operation
from rpcsvc.operations.table import BFF_OPERATIONS

INTEGRATOR_KEY: Final = "integratorKey"


def integrator_key() -> Json:
    """The security scheme of integrators."""
    return {
        "type": "apiKey",
        "in": "header",
        "name": "x-api-key",
        "description": "Names an integrator, whose fee is part of the price. No call needs it.",
    }


def bff_paths(site: Site) -> Json:
    """Every call of the BFF by path."""
    paths: Json = {f"{BFF_ROOT}/health": {"get": _health(site)}}
    for operation in BFF_OPERATIONS:
        item = paths.setdefault(BFF_ROOT + operation.path, {})
        item[operation.method.lower()] = _operation(site, operation)
    return paths


def bff_schemas(site: Site) -> Json:
    """The named schemas of the BFF."""
    found: Json = {}
    for operation in BFF_OPERATIONS:
        whole = operation.params.input_schema(site.networks)
        found |= schemas.lifted(whole, is_answer=False)
        if "properties" in whole:
            found[whole["title"]] = schemas.in_body(found[whole["title"]], operation.path)
        found |= schemas.lifted(_schema_of(operation.result), is_answer=True)
    found |= schemas.lifted(_schema_of(bff_models.BffHealth), is_answer=True)
    found["BffError"] = _error_schema()
    return found


def _schema_of(model: type[BaseModel]) -> Json:
    schema: Json = model.model_json_schema(by_alias=True)
    return schema


def _error_schema() -> Json:
    failure = {
        "type": "object",
        "required": ["code", "message"],
        "properties": {
            "code": ref("ErrorCode"),
            "message": {"type": "string", "description": "What was wrong and what to send."},
            "details": {
                "type": "object",
                "additionalProperties": True,
                "description": "For programs: limits, allowed values, problems by field.",
            },
        },
    }
    return {
        "type": "object",
        "description": "The answer when the call failed.",
        "required": ["error"],
        "properties": {"error": failure},
    }


def _operation(site: Site, operation: Operation) -> Json:
    takes_key = "unauthorized" in operation.errors
    called: Json = {
        "operationId": schemas.camel(operation.name),
        "tags": ["bff"],
        "summary": operation.summary,
        "description": operation.summary + (" Changes nothing." if _only_reads(operation) else ""),
        "parameters": _parameters(site, operation),
        "responses": _responses(site, operation),
    }
    if takes_key:
        called["security"] = [{}, {INTEGRATOR_KEY: []}]
    if operation.method == "POST":
        value = _in_body(_example(site, operation), operation)
        called["requestBody"] = {
            "required": True,
            "content": {
                JSON: {
                    "schema": ref(_schema_of(operation.params)["title"]),
                    "examples": {"example": {"summary": operation.summary, "value": value}},
                }
            },
        }
    return called


def _only_reads(operation: Operation) -> bool:
    return operation.effect is Effect.READ


def _example(site: Site, operation: Operation) -> Json:
    """Params that can be sent to this installation."""
    usdc = site.chains[0].usdc_contract
    return {
        name: usdc if value == "$usdc" else schemas.placed(value)
        for name, value in operation.examples[0].params.items()
    }


def _in_body(params: Json, operation: Operation) -> Json:
    return {k: v for k, v in params.items() if not schemas.in_path(k, operation.path)}


def _parameters(site: Site, operation: Operation) -> list[Json]:
    shared = [parameter_ref("RequestId")]
    if operation.idempotent:
        shared.append(parameter_ref("IdempotencyKey"))
    whole = operation.params.input_schema(site.networks)
    schema = schemas.lifted(whole, is_answer=False)[whole["title"]]
    example = _example(site, operation)
    found = [
        _parameter(operation, name, described, required=name in schema.get("required", ()))
        for name, described in schema.get("properties", {}).items()
        if operation.method == "GET" or schemas.in_path(name, operation.path)
    ]
    for parameter in found:
        if parameter["name"] in example:
            parameter["example"] = example[parameter["name"]]
    return [*found, *shared]


def _parameter(operation: Operation, name: str, described: Json, *, required: bool) -> Json:
    schema = {k: v for k, v in schemas.without_null(described).items() if k != "description"}
    return {
        "name": name,
        "in": "path" if schemas.in_path(name, operation.path) else "query",
        "required": required,
        "description": described["description"],
        "schema": schema,
    }


def _responses(site: Site, operation: Operation) -> Json:
    headers = header_refs(site, charged=True, replayable=operation.idempotent)
    good = response(operation.summary, ref(operation.result.__name__), headers, ())
    by_code = schemas.errors_by_code()
    refusals: list[ErrorClass] = [by_code[code] for code in operation.errors]
    refusals += [*ANY_OPERATION, *ANY_CALL, errors.Unauthorized]
    if operation.method == "POST":
        refusals += ANY_BODY
    if site.rate_limit.enabled:
        refusals.append(errors.RateLimited)
    groups = by_status(dict.fromkeys(refusals))
    return {"200": good, **{str(s): _refusal(site, group) for s, group in groups.items()}}


def _refusal(site: Site, group: list[ErrorClass]) -> Json:
    headers = header_refs(site, charged=False)
    if errors.MethodNotAllowed in group:
        headers["Allow"] = header_ref("Allow")
    if {errors.RateLimited, errors.Unavailable}.intersection(group):
        headers["Retry-After"] = header_ref("Retry-After")
    if errors.Unauthorized in group:
        headers["WWW-Authenticate"] = header_ref("WWW-Authenticate")
    return response(schemas.error_lines(group), ref("BffError"), headers, ())


def _health(site: Site) -> Json:
    headers = header_refs(site, charged=False)
    groups = by_status(ANY_CALL)
    return {
        "operationId": "bffHealth",
        "tags": ["bff"],
        "summary": "Whether the service is well.",
        "description": "Whether the service is well and may take orders. Changes nothing.",
        "parameters": [parameter_ref("RequestId")],
        "responses": {
            "200": response("It is well.", ref("BffHealth"), headers, ()),
            **{str(status): _refusal(site, group) for status, group in groups.items()},
            "503": response("It is not well.", ref("BffHealth"), headers, ()),
        },
    }
