"""The schemas of every document that is served are in a form that foreign clients can read."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from rpcsvc.http.documents import links
from tests.contract.serving import SWAP, Served
from tests.mcp import stateless

pytestmark = pytest.mark.asyncio(loop_scope="module")
Json = dict[str, Any]


@pytest.fixture(scope="module")
def served(shared: Served) -> Served:
    """One service: the calls below change nothing."""
    return shared


async def documents(served: Served) -> dict[str, Any]:
    """Every served document with schemas, by its name."""
    paths = (links.OPENAPI, links.OPENRPC, links.AGENT)
    return {
        **{path: await (await served.client.get(path)).json() for path in paths},
        "tools/list": (await stateless(served, "tools/list")).body["result"],
        "schemas": (await served.rpc("schemas", {})).body["result"]["data"],
    }


def parts(value: Any, where: str) -> Iterator[tuple[str, Json]]:
    """Every object in a document, with its place."""
    if isinstance(value, dict):
        yield where, value
        for name, part in value.items():
            yield from parts(part, f"{where}/{name}")
    if isinstance(value, list):
        for at, part in enumerate(value):
            yield from parts(part, f"{where}/{at}")


async def test_no_enum_has_values_of_two_types(served: Served) -> None:
    """Null is a type of its own: Gemini refuses such an enum, and generators miscompile it."""
    found = 0
    for name, document in (await documents(served)).items():
        for where, part in parts(document, name):
            if isinstance(part.get("enum"), list):
                found += 1
                assert len({type(value) for value in part["enum"]}) == 1, where
    assert found > 20


async def test_pattern_stands_beside_the_type_of_text(served: Served) -> None:
    found = 0
    for name, document in (await documents(served)).items():
        for where, part in parts(document, name):
            if isinstance(part.get("pattern"), str):
                found += 1
                assert part.get("type") in ("string", ["string", "null"]), where
    assert found > 20


async def test_no_choice_stands_beside_properties(served: Served) -> None:
    """Generators take it for a choice of types, and lose the properties."""
    for name, document in (await documents(served)).items():
        for where, part in parts(document, name):
            if isinstance(part.get("properties"), dict):
                assert not {"anyOf", "oneOf"} & part.keys(), where


@pytest.mark.parametrize("chain", ["arbitrum", "arb", "ARBITRUM", 42161, 42161.0, "42161"])
async def test_chain_is_taken_by_name_alias_and_number(served: Served, chain: Any) -> None:
    price = {name: SWAP[name] for name in ("direction", "amount")}
    answer = await served.rpc("swap.quote", {**price, "chain": chain})
    assert answer.body["result"]["data"]["quote"]["chain"] == "arbitrum"
