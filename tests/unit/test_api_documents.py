"""The OpenAPI and OpenRPC documents as functions of the site: complete and consistent."""

from __future__ import annotations

import copy
import json
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import orjson
import pytest
from msgspec.structs import replace
from openapi_spec_validator import validate

from rpcsvc import errors
from rpcsvc.domain.addresses import MoneroNetwork, subaddress_on
from rpcsvc.http import schemas
from rpcsvc.http.documents import advice, links
from rpcsvc.http.documents.advice import error_classes
from rpcsvc.http.documents.agent import agent
from rpcsvc.http.openapi.document import openapi_document
from rpcsvc.http.openrpc import openrpc_document
from rpcsvc.http.site import API_ROOT, BFF_ROOT, Site, site_of
from rpcsvc.operations.discovery import schemas_of
from rpcsvc.operations.table import BFF_OPERATIONS, OPERATIONS
from rpcsvc.settings import RateLimitSettings
from tests.contract.described import resolved
from tests.sandbox import EVM, MONERO, sandbox

Json = dict[str, Any]


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with sandbox(tmp_path) as running:
        yield site_of(running.up.settings, running.up.service)


def without_sandbox(site: Site) -> Site:
    kept = tuple(op for op in site.operations if not op.sandbox_only)
    return replace(site, operations=kept)


def references(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        if isinstance(value.get("$ref"), str):
            yield value["$ref"]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            yield from references(item)


def test_the_openapi_document_is_valid(site: Site) -> None:
    validate(openapi_document(site))
    validate(openapi_document(without_sandbox(site)))


@pytest.mark.parametrize("make", [openapi_document, openrpc_document])
def test_references_resolve_and_every_part_is_referenced(site: Site, make: Any) -> None:
    for offered in (site, without_sandbox(site)):
        document = make(offered)
        parts = {
            f"#/components/{kind}/{name}"
            for kind, named in document["components"].items()
            for name in named
        }
        used = set(references(document))
        # Security schemes are referred to by name.
        used |= {p for p in parts if p.startswith("#/components/securitySchemes/")}
        assert used <= parts
        unused = {part for part in parts - used if not part.startswith("#/components/errors/")}
        assert not unused


@pytest.mark.parametrize("make", [openapi_document, openrpc_document])
def test_document_renders_the_same_regardless_of_the_last_one(site: Site, make: Any) -> None:
    first = make(site)
    kept = copy.deepcopy(first)
    spoil(first)
    assert make(site) == kept


def spoil(value: Any) -> None:
    """Change everything that can be changed in place."""
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    for part in list(parts):
        spoil(part)
    if isinstance(value, dict | list):
        value.clear()


# Bytes as served.
MOST = [(openapi_document, 150_000), (openrpc_document, 90_000), (agent, 30_000)]


@pytest.mark.parametrize(("make", "most"), MOST)
def test_document_is_no_larger_than_agreed(site: Site, make: Any, most: int) -> None:
    assert len(orjson.dumps(make(site))) < most


def test_descriptions_of_codes_stand_once(site: Site) -> None:
    text = json.dumps(openapi_document(site))
    for cls in error_classes():
        assert text.count(json.dumps(advice.ERROR[cls.code])[1:-1]) == 1, cls.code


def test_only_operations_with_a_path_are_described(site: Site) -> None:
    for offered in (site, without_sandbox(site)):
        paths = openapi_document(offered)["paths"]
        offered_ops = [op for op in offered.operations if op.path]
        expected = {(f"{API_ROOT}{op.path}", op.method.lower()) for op in offered_ops}
        expected |= {(links.HEALTH, "get"), (links.QUICKSTART, "get"), (links.RATES_JSON, "get")}
        expected |= {(BFF_ROOT + op.path, op.method.lower()) for op in BFF_OPERATIONS}
        expected.add((f"{BFF_ROOT}/health", "get"))
        assert {(path, method) for path, item in paths.items() for method in item} == expected


def test_without_the_sandbox_engine_nothing_of_it_is_described(site: Site) -> None:
    document = openapi_document(without_sandbox(site))
    assert "sandbox" not in [tag["name"] for tag in document["tags"]]
    assert not [name for name in document["components"]["schemas"] if "Sandbox" in name]
    methods = [method["name"] for method in openrpc_document(without_sandbox(site))["methods"]]
    assert not [name for name in methods if "sandbox" in name]


def test_paths_are_whole_and_the_server_is_the_site(site: Site) -> None:
    document = openapi_document(replace(site, url="https://swap.example"))
    assert [server["url"] for server in document["servers"]] == ["https://swap.example"]
    for path, item in document["paths"].items():
        assert path.startswith((f"{API_ROOT}/", f"{BFF_ROOT}/")) or path == links.RATES_JSON
        assert not [method for method, call in item.items() if "servers" in call]


def test_calls_are_open_where_none_says_otherwise(site: Site) -> None:
    document = openapi_document(site)
    assert document["security"] == []
    calls = [(path, call) for path, item in document["paths"].items() for call in item.values()]
    asked = {path: call["security"] for path, call in calls if "security" in call}
    assert asked
    assert all(path.startswith(BFF_ROOT) and {} in needed for path, needed in asked.items())


def test_links_give_parameters_by_expression(site: Site) -> None:
    found = [
        link
        for item in openapi_document(site)["paths"].values()
        for call in item.values()
        for response in call["responses"].values()
        for link in response.get("links", {}).values()
    ]
    assert found
    for link in found:
        assert set(link) == {"operationId", "description", "parameters"}
        assert all(value.startswith("$response.") for value in link["parameters"].values())


def test_operation_ids_are_unique_and_names_for_programs(site: Site) -> None:
    ids = [
        operation["operationId"]
        for item in openapi_document(site)["paths"].values()
        for operation in item.values()
    ]
    assert len(set(ids)) == len(ids)
    assert all(name.isidentifier() for name in ids)
    assert "swapExecute" in ids


def test_every_error_of_the_table_has_its_status_and_its_meaning(site: Site) -> None:
    document = openapi_document(site)
    by_code = schemas.errors_by_code()
    for op in site.operations:
        if not op.path:
            continue
        declared = document["paths"][f"{API_ROOT}{op.path}"][op.method.lower()]["responses"]
        for code in op.errors:
            status = str(by_code[code].http_status)
            response = resolved(document, declared.get(status, declared["default"]))
            assert f"`{code}`" in response["description"], (op.name, code)


def test_the_error_codes_are_those_of_the_error_tree(site: Site) -> None:
    listed = openapi_document(site)["components"]["schemas"]["ErrorCode"]["enum"]
    assert set(listed) == {cls.code for cls in error_classes()}
    assert len(set(listed)) == len(listed)


def test_brand_address_and_contact_come_from_the_settings(site: Site) -> None:
    brand = site.brand.model_copy(update={"slug": "acme", "name": "Acme"})
    other = replace(
        site,
        brand=brand,
        url="https://swap.example",
        domain="swap.example",
        contact="mailto:ops@swap.example",
    )
    document, rpc = openapi_document(other), openrpc_document(other)
    assert document["servers"][0]["url"] == "https://swap.example"
    assert rpc["servers"][0]["url"] == "https://swap.example/rpc"
    assert document["info"]["contact"]["email"] == "ops@swap.example"
    assert "x-acme-signature" in document["components"]["headers"]
    assert {m["name"].partition(".")[0] for m in rpc["methods"]} == {"acme", "rpc"}
    assert "127.0.0.1" not in json.dumps(document) + json.dumps(rpc)
    assert "x-service-" not in json.dumps(document)


def test_without_rate_limits_none_are_described(site: Site) -> None:
    off = replace(site, rate_limit=RateLimitSettings(enabled=False))
    # For unfunded orders and for waits.
    bounded = {
        (root + (op.path or ""), op.method)
        for root, operations in ((API_ROOT, off.operations), (BFF_ROOT, BFF_OPERATIONS))
        for op in operations
        if "rate_limited" in op.errors
    }
    for path, item in openapi_document(off)["paths"].items():
        for method, described in item.items():
            is_bounded = (path, method.upper()) in bounded
            assert ("429" in described["responses"]) == is_bounded, path
    used_up = [openapi_document(s)["components"]["responses"]["RateLimited"] for s in (site, off)]
    assert ["RateLimit" in response["headers"] for response in used_up] == [True, False]
    assert all(
        "429" in item["get"]["responses"]
        for path, item in openapi_document(site)["paths"].items()
        if path == f"{API_ROOT}/agent/capabilities"
    )


def test_examples_name_a_chain_that_the_installation_has(site: Site) -> None:
    only = replace(site, chains=tuple(chain for chain in site.chains if chain.name == "ethereum"))
    paths = openapi_document(only)["paths"]
    for name in ("plan", "quote", "create"):
        body = paths[f"{API_ROOT}/agent/swap/{name}"]["post"]["requestBody"]["content"][
            "application/json"
        ]
        chains = {e["value"].get("chain", "ethereum") for e in body["examples"].values()}
        assert chains == {"ethereum"}


def test_params_are_closed_and_answers_may_gain_fields(site: Site) -> None:
    named = openapi_document(site)["components"]["schemas"]
    requests = [
        name for name in named if "Request" in name or name in {"TwapConfig", "WebhookParams"}
    ]
    assert {"PlanRequest", "SwapRequestBase", "SwapRequest", "SupportRequest"} <= set(requests)
    for name, schema in named.items():
        assert (schema.get("additionalProperties") is False) == (name in requests), name


def test_schema_name_is_unique_across_operations(site: Site) -> None:
    seen: Json = {}
    for operation in OPERATIONS:
        result = schemas_of(operation, site.networks)["result"]
        for name, part in result.get("$defs", {}).items():
            assert seen.setdefault(name, part) == part, name
    assert len(seen) > 10


def test_inputs_are_described_for_the_networks_served(site: Site) -> None:
    on = replace(site, chains=site.chains[:1], monero_networks=frozenset({MoneroNetwork.STAGENET}))
    named = schemas.component_schemas(on)
    described = named["SwapRequest"]
    assert described["properties"]["chain"]["enum"] == ["arbitrum"]
    whole = {**described, "components": {"schemas": named}}
    takes = jsonschema.Draft202012Validator(whole).is_valid
    swap = {"direction": "u2x", "chain": "arbitrum", "amount": "150"}
    assert not takes({**swap, "to": MONERO})
    assert takes({**swap, "to": subaddress_on(MONERO, MoneroNetwork.STAGENET)})


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "amount",
            ["0.8", "150", "0.000000000001", "9999999999999"],
            ["0", "0.0", "0.0000000000001"],
        ),
        ("to", [EVM, MONERO], ["", EVM[:-1], "0x" + "0" * 40, f"3{MONERO[1:]}"]),
        ("chain", ["arbitrum", "base"], ["solana", 0, True]),
        ("direction", ["x2u", "u2x"], ["up", None]),
    ],
)
def test_a_param_of_openrpc_takes_what_any_direction_takes(
    site: Site, name: str, good: list[Any], bad: list[Any]
) -> None:
    document = openrpc_document(site)
    methods = document["methods"]
    params = next(m["params"] for m in methods if m["name"].endswith("swap.execute"))
    found = [resolved(document, param) for param in params]
    described = next(param["schema"] for param in found if param["name"] == name)
    takes = jsonschema.Draft202012Validator(described).is_valid
    assert [takes(value) for value in good] == [True] * len(good)
    assert [takes(value) for value in bad] == [False] * len(bad)


def test_nullable_values_are_lists_of_types(site: Site) -> None:
    named = schemas.component_schemas(site)
    assert named["SwapRequest"]["properties"]["quoteDigest"]["type"] == ["string", "null"]
    assert named["PlanRequest"]["properties"]["amount"]["anyOf"][1] == {"type": "null"}
    assert named["CheckRequest"]["properties"]["chain"]["type"] == ["string", "integer", "null"]
    given = named["PlanRequest"]["properties"]["direction"]
    assert given == {"anyOf": [schemas.ref("Direction"), {"type": "null"}]}
    needed = {"type": "string", "enum": ["refund_address", "refund_blocked"]}
    status = named["StatusResult"]["allOf"][1]["properties"]
    assert status["actionRequired"]["anyOf"] == [needed, {"type": "null"}]
    assert status["actionRequired"]["description"]
    text = json.dumps(named)
    assert '"title"' not in text
    assert "$defs" not in text
    assert "(spec" not in text
    assert "(design" not in text


def test_idempotency_key_is_a_header_or_a_json_rpc_param(site: Site) -> None:
    document = openapi_document(site)
    assert "idempotency-key" not in document["components"]["schemas"]["SwapRequest"]["properties"]
    create = document["paths"][f"{API_ROOT}/agent/swap/create"]["post"]
    assert {"$ref": "#/components/parameters/IdempotencyKey"} in create["parameters"]
    conflict = str(errors.IdempotencyConflict.http_status)
    assert conflict in create["responses"]
    quote = document["paths"][f"{API_ROOT}/agent/swap/quote"]["post"]
    assert conflict not in quote["responses"]


def test_examples_say_to_replace_the_order_id(site: Site) -> None:
    document = openapi_document(site)
    status = document["paths"][f"{API_ROOT}/agent/swap/status/{{orderId}}"]["get"]
    parameter = resolved(document, status["parameters"][0])
    assert parameter["example"] == schemas.example_order_id()
    assert schemas.OWN_ORDER in parameter["description"]
