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


def closed_document(document: Json) -> Json:
    """The document with its named schemas closed."""
    shut = copy.deepcopy(document)
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
        _LAST[id(document)] = document, closed(document["components"]["schemas"])
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
