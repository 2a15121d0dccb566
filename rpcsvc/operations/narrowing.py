"""JSON Schemas that narrow inputs by direction, network and asset.

They derive from the validating code (domain/). Descriptions state what no schema can express:
checksums, limits that move with the rate, addresses of the service or of a token.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, NamedTuple

from pydantic import BeforeValidator

from rpcsvc.domain.addresses import EVM_PATTERN, ZERO_ADDRESS, MoneroNetwork, monero_pattern
from rpcsvc.domain.chains import Chain
from rpcsvc.domain.money import MAX_UNITS, XMR, Asset
from rpcsvc.operations.envelope import Json

_NULL: Final = {"type": "null"}


def as_integer(value: Any) -> Any:
    """Converts 42161.0 to 42161, since JSON has one kind of number and some languages write all as
    floats.

    JSON Schema calls both an integer (2020-12, Validation, section 6.1.1).
    """
    is_whole = isinstance(value, float) and abs(value) < 2**53 and value.is_integer()
    return int(value) if is_whole else value


# Type of whole numbers that callers send; fractions are refused.


WHOLE: Final = BeforeValidator(as_integer)


class Networks(NamedTuple):
    """The networks that an installation serves."""

    chains: tuple[Chain, ...]
    monero: frozenset[MoneroNetwork]


def narrowed(schema: Json, cases: list[Json]) -> Json:
    """A model's schema that also requires one of the cases.

    Constraints that all cases share move to the property itself. Null is left to the types.
    """
    cases = [_of_model(schema, case) for case in cases]
    for name, narrow in _common(cases).items():
        schema["properties"][name] = _both(schema["properties"][name], narrow)
        for case in cases:
            del case["properties"][name]
    return {**schema, "anyOf": cases} if len(cases) > 1 else schema


def _of_model(schema: Json, case: Json) -> Json:
    """A case reduced to the properties that the model has."""
    known = {n: s for n, s in case["properties"].items() if n in schema["properties"]}
    return {**case, "properties": known}


def _common(cases: list[Json]) -> Json:
    first, *others = [case["properties"] for case in cases] or [{}]
    return {n: s for n, s in first.items() if all(other.get(n) == s for other in others)}


def _both(typed: Json, narrow: Json) -> Json:
    if "enum" in narrow and _NULL in typed.get("anyOf", ()):
        narrow = {**narrow, "enum": [*narrow["enum"], None]}
    return {**typed, **narrow}


# --- single values ---


def amount(*assets: Asset) -> Json:
    """Schema of a decimal above zero that can be stored, with no more decimals than one of the
    assets.
    """
    decimals = max(asset.decimals for asset in assets)
    digits = max(len(str(MAX_UNITS // 10**asset.decimals)) for asset in assets)
    return {
        "pattern": rf"^(0|[1-9][0-9]{{0,{digits - 1}}})(\.[0-9]{{1,{decimals}}})?$",
        "not": {"type": "string", "pattern": "^[0.]+$"},
    }


def chain(networks: Networks) -> Json:
    """Schema of a chain: its name, alias, number, or number as a string."""
    return {
        "enum": [
            name
            for chain in networks.chains
            for name in (chain.name, *chain.aliases, chain.chain_id, str(chain.chain_id))
        ]
    }


def address(asset: Asset, networks: Networks) -> Json:
    """Schema of an address on the asset's network."""
    if asset is XMR:
        return {"pattern": monero_pattern(networks.monero)}
    return {"pattern": EVM_PATTERN, "not": {"const": ZERO_ADDRESS}}


def any_address(assets: Iterable[Asset], networks: Networks) -> Json:
    """Schema of an address on the network of one of the assets."""
    return {"anyOf": [address(asset, networks) for asset in assets]}
