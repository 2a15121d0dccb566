"""Refuses inputs at a place where nothing reads them: a dropped idempotency key makes two orders.

Each refusal names what came and where it belongs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aiohttp import web

from rpcsvc.errors import InputError, InvalidInput, InvalidRequest
from rpcsvc.operations.validation_messages import LONGEST_NAME, MOST_PROBLEMS, combined

IDEMPOTENCY_KEY: Final = "idempotency-key"
_OTHER_HEADERS: Final = frozenset({"x-api-key", "x-request-id"})


def require_no_query(request: web.Request) -> None:
    """Raise an InputError or InputErrors for each name in the query of a POST."""
    if "?" not in request.raw_path:
        return
    given = dict(request.query)
    problems = [_in_query(name, given[name]) for name in list(given)[:MOST_PROBLEMS]]
    if problems:
        raise combined(problems)


def require_no_query_of_rpc(request: web.Request) -> None:
    """Raise InvalidRequest for a query at /rpc, where each call has its own params."""
    if "?" in request.raw_path and request.query:
        name = next(iter(request.query))[:LONGEST_NAME]
        raise InvalidRequest(
            f'The query has "{name}", and /rpc reads nothing there. Send what a call takes in its'
            f" params, {IDEMPOTENCY_KEY} too."
        )


def require_key_header(request: web.Request) -> None:
    """Raise InvalidInput for an idempotency key in another header than its own, or for two."""
    for name in _key_headers(request.headers):
        if name.lower() != IDEMPOTENCY_KEY:
            raise InvalidInput(
                f"{name[:LONGEST_NAME]} is not read. Send the key as the header {IDEMPOTENCY_KEY}.",
                field=name[:LONGEST_NAME],
                received=request.headers[name],
                allowed=[IDEMPOTENCY_KEY],
            )
    if len(request.headers.getall(IDEMPOTENCY_KEY, ())) > 1:
        raise InvalidInput(
            f"The header {IDEMPOTENCY_KEY} occurs more than once. Send it once:"
            " which of the two counts would be a guess.",
            field=IDEMPOTENCY_KEY,
        )


def require_no_key_header(headers: Mapping[str, str]) -> None:
    """Raise InvalidInput for an idempotency key in a header at /rpc, where it is a param.

    In a batch it could not be told which call a header's key is for.
    """
    for name in _key_headers(headers):
        raise InvalidInput(
            f"The header {name[:LONGEST_NAME]} is not read at /rpc. Send the key as the param"
            f" {IDEMPOTENCY_KEY} of the call that it is for.",
            field=name[:LONGEST_NAME],
            received=headers[name],
        )


def _key_headers(headers: Mapping[str, str]) -> list[str]:
    """The names of headers that can only mean an idempotency key, however they are spelt."""
    return [name for name in headers if _means_key(name)]


def _means_key(name: str) -> bool:
    small = name.lower()
    return "idempot" in small and small.endswith("key")


def _in_query(name: str, value: str) -> InputError:
    shown = name[:LONGEST_NAME]
    return InvalidInput(
        f"{shown} is in the query, and a POST reads nothing there. {_place_of(name)}",
        field=shown,
        received=value,
    )


def _place_of(name: str) -> str:
    if _means_key(name):
        return f"The key goes into the header {IDEMPOTENCY_KEY} of calls that create an order."
    if name.lower() in _OTHER_HEADERS:
        return f"Send it as the header {name.lower()}."
    return "Send it in the JSON body."
