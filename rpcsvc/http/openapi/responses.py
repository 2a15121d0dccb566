"""What the agent API's calls are refused with, as OpenAPI responses.

Responses that are the same for every operation which has them stand once, under components.
What does not live here: the meaning of errors (http/schemas.py).
"""

from __future__ import annotations

from rpcsvc import errors
from rpcsvc.http import schemas
from rpcsvc.http.openapi.parts import (
    ANY_BODY,
    ANY_CALL,
    ANY_OPERATION,
    BEFORE_CHARGE,
    ErrorClass,
    by_status,
    header_ref,
    header_refs,
    response,
)
from rpcsvc.http.schemas import ref
from rpcsvc.http.site import Site
from rpcsvc.operations.envelope import Json
from rpcsvc.operations.operation import Operation


def refusals(site: Site, operation: Operation) -> list[ErrorClass]:
    """Everything that a call of the operation may be refused with."""
    by_code = schemas.errors_by_code()
    found = [by_code[code] for code in operation.errors]
    found += [*ANY_OPERATION, *ANY_CALL]
    if operation.method == "POST":
        found += ANY_BODY
    if site.rate_limit.enabled:
        found.append(errors.RateLimited)
    return list(dict.fromkeys(found))


def error_responses(site: Site, operation: Operation) -> Json:
    """The refusals of an operation by HTTP status."""
    return {
        str(status): _error_response(site, operation, group)
        for status, group in by_status(refusals(site, operation)).items()
    }


def _error_response(site: Site, operation: Operation, group: list[ErrorClass]) -> Json:
    if len(group) == 1:
        return shared_response(group[0])
    return _refusal(site, group, operation)


def shared_response(cls: ErrorClass) -> Json:
    """A reference to the response of an error that stands under components."""
    return {"$ref": f"#/components/responses/{cls.__name__}"}


def _refusal(site: Site, group: list[ErrorClass], operation: Operation | None = None) -> Json:
    shown = schemas.refused(operation, {cls.code for cls in group})
    charged = not BEFORE_CHARGE.intersection(group)
    headers = header_refs(site, charged=charged and errors.InternalError not in group)
    if errors.MethodNotAllowed in group:
        headers["Allow"] = header_ref("Allow")
    if {errors.RateLimited, errors.Unavailable}.intersection(group):
        headers["Retry-After"] = header_ref("Retry-After")
    return response(schemas.error_lines(group), ref("ErrorEnvelope"), headers, shown)


def shared_responses(site: Site, offered: list[Operation]) -> Json:
    """The error responses that are the same for every operation which has them."""
    alone = {
        group[0]
        for operation in offered
        for group in by_status(refusals(site, operation)).values()
        if len(group) == 1
    }
    alone.update(ANY_CALL)
    ordered = sorted(alone, key=lambda cls: (cls.http_status, cls.__name__))
    return {cls.__name__: _refusal(site, [cls]) for cls in ordered}
