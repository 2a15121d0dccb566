"""JSON Schemas that narrow inputs by direction, network and asset.

They derive from the validating code (domain/). Descriptions state what no schema can express:
checksums, limits that move with the rate, addresses of the service or of a token.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from pydantic import BeforeValidator

from rpcsvc.domain.addresses import EVM_PATTERN, ZERO_ADDRESS, MoneroNetwork, monero_pattern
from rpcsvc.domain.chains import Chain
from rpcsvc.domain.money import MAX_UNITS, XMR, Asset, decimal_pattern
from rpcsvc.strict_json import Json, as_integer

_NULL: Final = {"type": "null"}


# Type of whole numbers that callers send; fractions are refused.
WHOLE: Final = BeforeValidator(as_integer)


class Networks(NamedTuple):
    """The networks that an installation serves."""

    chains: tuple[Chain, ...]
    monero: frozenset[MoneroNetwork]


def narrowed(schema: Json, cases: list[Json]) -> Json:
    """Return a model's schema that also requires one of the cases, as a chain of conditions.

    Constraints that all cases share move to the property itself. The first property of each case
    distinguishes it from the others, except the last case, which holds for the rest.
    """
    cases = [_of_model(schema, case) for case in cases]
    for name, narrow in _common(cases).items():
        schema["properties"][name] = _both(schema["properties"][name], narrow)
        for case in cases:
            del case["properties"][name]
    if len(cases) < 2:
        return schema
    return {**schema, **chained([_with_null(schema, case) for case in cases])}


def chained(cases: list[Json]) -> Json:
    """Return cases as a chain of ``if``, ``then`` and ``else``.

    It says what ``anyOf`` would say. Claude's API refuses ``anyOf`` at the root of a tool's input
    schema, and client generators read it as a choice of types that have no other properties.
    """
    *before, chain = cases
    for case in reversed(before):
        (name, chosen), *others = case["properties"].items()
        condition = {"properties": {name: chosen}, "required": [name]}
        chain = {"if": condition, "then": {**case, "properties": dict(others)}, "else": chain}
    return chain


def cases_of(schema: Json) -> Iterator[Json]:
    """Yield the cases of a schema that ``narrowed`` returned."""
    while "then" in schema:
        yield schema["then"]
        schema = schema["else"]
        if "then" not in schema:
            yield schema


def _of_model(schema: Json, case: Json) -> Json:
    """Return a case reduced to the properties that the model has."""
    known = {n: s for n, s in case["properties"].items() if n in schema["properties"]}
    return {**case, "properties": known}


def _with_null(schema: Json, case: Json) -> Json:
    """Return a case that takes null for the values that may be left out."""
    optional = {
        name
        for name, typed in schema["properties"].items()
        if _NULL in typed.get("anyOf", ()) and name not in case.get("required", ())
    }
    properties = {n: _or_null(s) if n in optional else s for n, s in case["properties"].items()}
    return {**case, "properties": properties}


def _or_null(narrow: Json) -> Json:
    if not {"type", "anyOf"} & narrow.keys():
        return narrow
    return {"anyOf": [*narrow.get("anyOf", [narrow]), _NULL]}


def _common(cases: list[Json]) -> Json:
    first, *others = [case["properties"] for case in cases] or [{}]
    return {n: s for n, s in first.items() if all(other.get(n) == s for other in others)}


def _both(typed: Json, narrow: Json) -> Json:
    """Return a property's schema with a narrower one of the same type; null stays."""
    if "anyOf" not in typed:
        return {**typed, **narrow}
    branches = [b if b == _NULL else {**b, **narrow} for b in typed["anyOf"]]
    return {**typed, "anyOf": branches}


def one_of(first: str, other: str) -> Json:
    """Schema that requires one of two properties, and not both. It can't stand beside properties:
    see ``chained``.
    """
    return {"oneOf": [{"properties": {name: {"const": None}}} for name in (first, other)]}


def not_both(first: str, other: str) -> Json:
    """Schema that refuses two properties together; as ``one_of``."""
    return {"anyOf": one_of(first, other)["oneOf"]}


# --- single values ---


def amount(*assets: Asset) -> Json:
    """Schema of a decimal string that can be stored, with no more decimals than one of the
    assets.
    """
    decimals = max(asset.decimals for asset in assets)
    digits = max(len(str(MAX_UNITS // 10**asset.decimals)) for asset in assets)
    return {"type": "string", "pattern": f"^{decimal_pattern(digits, decimals)}$"}


def chain(networks: Networks) -> Json:
    """Schema of a chain by its name.

    Aliases and numbers are accepted, too, and are left out: an enum of more than one type is
    refused by Gemini, and client generators make code of it that does not compile.
    """
    return {"type": "string", "enum": [chain.name for chain in networks.chains]}


def address(asset: Asset, networks: Networks) -> Json:
    """Schema of an address on the asset's network."""
    if asset is XMR:
        return {"type": "string", "pattern": monero_pattern(networks.monero)}
    return {"type": "string", "pattern": EVM_PATTERN, "not": {"const": ZERO_ADDRESS}}


def any_address(assets: Iterable[Asset], networks: Networks) -> Json:
    """Schema of an address on the network of one of the assets."""
    return {"anyOf": [address(asset, networks) for asset in assets]}
