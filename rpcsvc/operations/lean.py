"""Lean answers: an envelope whose ``data`` has only what the next call needs.

A lean answer is cut from the full one when it is sent. Stored answers stay whole: a retry of an
idempotent call gets as much as it asks for, whatever the first call asked for.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, Final, TypeAlias, get_args

import orjson
from msgspec import Struct
from msgspec.structs import fields
from pydantic.alias_generators import to_camel

from rpcsvc.operations.models import Result, View
from rpcsvc.strict_json import Json
from rpcsvc.verify import b64url

# The names that an object keeps, each with the shape of its value; None: the value stays whole.
Shape: TypeAlias = "Mapping[str, Shape | None]"

_ORDER_ID: Final = "orderId"
_TRANSFERS: Final = "transfers"
_SESSION: Final = "sessionId"
_ATTESTATION: Final = "attestation"
_DIGEST: Final = "attestationDigest"
# Next actions whose name, operation and data say all that their description does.
_PLAIN: Final = frozenset(
    {
        "ask_user_to_fund",
        "cancel_order",
        "create_support_ticket",
        "fund_by_signature",
        "plan",
        "poll_status",
        "quote",
        "report_completed",
        "simulate_deposit",
    }
)


def lean_head(result: type[Struct], head: bytes) -> bytes:
    """Return the envelope ``head`` of a good answer with the fields that lean answers keep.

    Of transfers these are the newest payout and the newest refund.
    """
    envelope = orjson.loads(head)
    data, shape = envelope["data"], _shape(result)
    order = data.get("order") or {}
    if _ATTESTATION in order:
        digest = hashlib.sha256(order[_ATTESTATION].encode()).digest()
        order[_DIGEST] = b64url(digest)
    if _TRANSFERS in data:  # late deposits may be refunded one by one
        newest = {each["kind"]: each for each in data[_TRANSFERS]}
        data[_TRANSFERS] = list(newest.values())
    named = order.get(_ORDER_ID)
    same = envelope["operation"]
    is_again = "changed" in data  # the earlier quote has described the steps
    envelope["nextActions"] = [
        _lean_action(each, named, same, is_again=is_again) for each in envelope["nextActions"]
    ]
    envelope["data"] = data if shape is None else _kept(data, shape)
    return orjson.dumps(envelope)


def is_cut(result: type[Struct]) -> bool:
    """Return whether lean answers have less of this result."""
    return _shape(result) is not None


def _lean_action(action: Json, order_id: str | None, same: str, *, is_again: bool) -> Json:
    """Leave out what the action's name says or an earlier answer has said, and the params of a call
    about ``data.order``.

    A call about it that is the ``same`` as this one needs no name.
    """
    if action["action"] not in _PLAIN and not is_again:
        return action
    is_about_it = order_id is not None and action.get("params", {}).get(_ORDER_ID) == order_id
    left_out = {"description"} | ({"params"} if is_about_it else set())
    if is_about_it and action.get("operation") == same:
        left_out.add("operation")
    return {name: value for name, value in action.items() if name not in left_out}


def _kept(value: Any, shape: Shape) -> Any:
    if isinstance(value, list):
        return [_kept(each, shape) for each in value]
    if not isinstance(value, dict):
        return value
    found = {}
    for name, each in value.items():
        if name not in shape or (each in (None, []) and name != _SESSION):
            continue
        inner = shape[name]
        found[name] = each if inner is None else _kept(each, inner)
    return found


@cache
def _shape(view: type[Struct]) -> Shape | None:
    """Return the names that a view keeps; None if it and its parts stay whole."""
    kept = view.lean if issubclass(view, View) else None
    common = Result.__struct_fields__
    shape = {
        field.encode_name: next(filter(None, map(_shape, _views_in(field.type))), None)
        for field in fields(view)
        if kept is None or field.name in kept or field.name in common
    }
    for part, dot, name in (each.partition(".") for each in kept or ()):
        if dot:
            shape[part] = {**(shape[part] or {}), to_camel(name): None}
    return shape if kept is not None or any(shape.values()) else None


def _views_in(annotation: Any) -> Iterator[type[Struct]]:
    if isinstance(annotation, type) and issubclass(annotation, Struct):
        yield annotation
    for each in get_args(annotation):
        yield from _views_in(each)
