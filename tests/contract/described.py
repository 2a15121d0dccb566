"""Validates real answers by the API documents, with no undescribed fields.

The published schemas allow further fields in answers. Here they are closed: an answer may have no
field that its schema does not name.
"""

from __future__ import annotations

import copy
import re
from functools import cache
from typing import Any

import jsonschema

from rpcsvc.http.openapi.document import openapi_document
from rpcsvc.http.site import Site, site_of
from tests.contract.serving import Served

Json = dict[str, Any]


@cache
def _openapi(site: Site) -> Json:
    return openapi_document(site)


def openapi_of(served: Served) -> Json:
    """The OpenAPI document of a service. Don't change it: equal services share one."""
    return _openapi(site_of(served.up.settings, served.up.service))


def closed(schema: Any) -> Any:
    """The schema with ``additionalProperties`` false in every object that lists properties."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    shut = {key: closed(value) for key, value in schema.items()}
    if isinstance(shut.get("properties"), dict) and shut.get("type") == "object":
        shut.setdefault("additionalProperties", False)
    return shut


def flat(named: Json) -> Json:
    """Named schemas in which those that add to another one have its properties, too."""
    return {name: _flat(schema, named) for name, schema in named.items()}


def _flat(schema: Json, named: Json) -> Json:
    if "allOf" not in schema or "properties" in schema:
        return schema
    parts = [named[p["$ref"].rpartition("/")[2]] if "$ref" in p else p for p in schema["allOf"]]
    return {
        "type": "object",
        "properties": {name: each for part in parts for name, each in part["properties"].items()},
        "required": [name for part in parts for name in part["required"]],
    }


ANY_CALL = (403, 405, 413, 415, 421, 500)  # what the default responses are of
_WHOLE: dict[int, tuple[Json, Json]] = {}


def whole(document: Json) -> Json:
    """The document with what it says once in each place where it holds.

    The headers of every response are on each response, the default response of an operation
    stands under each of its statuses, schemas that add to another one have its properties, and
    plain types stand where they are referred to: generators infer more from that.
    """
    if id(document) not in _WHOLE:
        _WHOLE.clear()
        _WHOLE[id(document)] = document, _unfolded(document)
    return _WHOLE[id(document)][1]


def _unfolded(document: Json) -> Json:
    unfolded = copy.deepcopy(document)
    shared = unfolded["components"]["responses"]
    every = {n: h for n, h in shared["Refused"]["headers"].items() if n != "Allow"}
    used_up = shared.get("RateLimited", {}).get("headers", {})
    budget = {n: h for n, h in used_up.items() if n.startswith("RateLimit")}
    for name in budget:
        unfolded["components"]["headers"][name]["required"] = True
    for path, item in unfolded["paths"].items():
        for called in item.values():
            anything = called["responses"].pop("default")
            responses = {str(status): anything for status in ANY_CALL} | called["responses"]
            for status, response in responses.items():
                is_charged = int(status) not in ANY_CALL and not path.endswith("/health")
                headers = {**every, **(budget if is_charged else {})}
                described = resolved(unfolded, response)
                own = described.get("headers", {})
                responses[status] = {**described, "headers": {**headers, **own}}
            called["responses"] = responses
            called["parameters"] = [resolved(unfolded, each) for each in called["parameters"]]
    named = unfolded["components"]["schemas"] = flat(unfolded["components"]["schemas"])
    return dict(inlined(unfolded, named))


FIXED = {"const", "enum"}


def inlined(value: Any, named: Json) -> Any:
    """A part of the document with plain types in the places of references to them."""
    if isinstance(value, list):
        return [inlined(each, named) for each in value]
    if not isinstance(value, dict):
        return value
    schema = named.get(str(value.get("$ref")).rpartition("/")[2], {})
    if isinstance(schema.get("type"), str) and schema["type"] != "object" and "enum" not in schema:
        return schema
    found = {key: inlined(each, named) for key, each in value.items()}
    match found:
        case {"anyOf": [{"type": str(kind), **rest}, {"type": "null"}]} if not FIXED & rest.keys():
            return {**rest, "type": [kind, "null"]}
    return found


def closed_document(document: Json) -> Json:
    """The whole document with its named schemas closed."""
    shut = copy.deepcopy(whole(document))
    shut["components"]["schemas"] = closed(shut["components"]["schemas"])
    return shut


def resolved(document: Json, value: Json) -> Json:
    """The target of a reference in the document; any other value unchanged."""
    while "$ref" in value:
        target: Any = document
        for part in value["$ref"].removeprefix("#/").split("/"):
            target = target[part]
        value = target
    return value


# The closed schemas of the last document. The document is kept with them, so that no other object
# can have its id meanwhile.
_LAST: dict[int, tuple[Json, Json]] = {}


def _closed_schemas(document: Json) -> Json:
    if id(document) not in _LAST:
        _LAST.clear()
        _LAST[id(document)] = document, closed(flat(document["components"]["schemas"]))
    return _LAST[id(document)][1]


def check(document: Json, schema: Json, value: Any) -> None:
    """Raise ValidationError unless the value matches the document's schema, closed."""
    whole = {**closed(schema), "components": {"schemas": _closed_schemas(document)}}
    validator = jsonschema.Draft202012Validator(
        whole, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
    )
    validator.validate(value)


def check_response(
    document: Json, path: str, method: str, status: int, headers: Any, body: Any
) -> None:
    """Raise AssertionError or ValidationError unless the document declares the response."""
    document = whole(document)
    declared = document["paths"][path][method]["responses"]
    assert str(status) in declared, f"{method} {path} declares no {status}: {body}"
    response = resolved(document, declared[str(status)])
    for name, reference in response.get("headers", {}).items():
        check_header(document, name, resolved(document, reference), headers.get(name))
    if "content" not in response:
        assert not body
        return
    assert headers["content-type"].partition(";")[0] in response["content"]
    check(document, response["content"]["application/json"]["schema"], body)


def check_header(document: Json, name: str, header: Json, value: str | None) -> None:
    if value is None:
        assert not header.get("required"), f"{name} is missing"
        return
    check(document, header["schema"], value)


def filled(path: str, params: Json) -> tuple[str, Json]:
    """A path with its parameters filled in, and the other params."""
    left = dict(params)
    for name in re.findall(r"\{(\w+)\}", path):
        path = path.replace(f"{{{name}}}", str(left.pop(name)))
    return path, left
