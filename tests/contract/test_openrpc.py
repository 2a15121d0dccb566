"""The OpenRPC document is valid and right about the methods: every example is sent."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from referencing import Registry, Resource
from referencing.jsonschema import DRAFT7

from rpcsvc.http.openrpc import openrpc_document
from rpcsvc.http.site import Site, site_of
from rpcsvc.operations import dispatch
from tests.contract.described import Json, check, resolved
from tests.contract.serving import BACK, SWAP, TOKEN, Answer, Served, serving, with_live_ticket

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def served(shared: Served) -> Served:
    """One service: the calls below change nothing."""
    return shared


DATA = Path(__file__).parent / "data"
META_SCHEMAS = ("openrpc-meta-schema-1.14.9.json", "json-schema-tools-meta-schema-1.8.0.json")
ORDER_ID = re.compile(r"ord_[0-9A-Z]{26}")


@cache
def _openrpc(site: Site) -> Json:
    return openrpc_document(site)


def document_of(served: Served) -> Json:
    return _openrpc(site_of(served.up.settings, served.up.service))


def method_named(document: Json, name: str) -> Json:
    method = next(method for method in document["methods"] if method["name"] == name)
    return {**method, "params": [resolved(document, param) for param in method["params"]]}


def examples(document: Json) -> Iterator[tuple[Json, Json]]:
    for method in document["methods"]:
        for example in method.get("examples", ()):
            yield method, example


async def shown(served: Served, example: Json) -> Json | None:
    """The answer that an example refers to, None where it refers to none."""
    address = re.search(r"https?://\S+", example.get("description", ""))
    if address is None:
        return None
    root = site_of(served.up.settings, served.up.service).url
    path, _, pointer = address[0].removeprefix(root).partition("#")
    answer = await (await served.client.get(path)).json()
    for part in pointer.split("/")[1:]:
        answer = answer[part.replace("~1", "/")]
    return dict(answer)


def params_in(example: Json) -> Json:
    return {param["name"]: param["value"] for param in example["params"]}


async def call(served: Served, method: str, params: Any) -> Json:
    """A method's result, validated by the document."""
    name = method.partition(".")[2]
    answer = await served.rpc(name, params)
    result: Json = answer.body["result"]
    document = document_of(served)
    check(document, method_named(document, method)["result"]["schema"], result)
    return result


async def test_the_document_is_valid_by_the_meta_schema_of_openrpc(served: Served) -> None:
    meta, schemas = (json.loads((DATA / name).read_text()) for name in META_SCHEMAS)
    resource = Resource.from_contents(schemas, default_specification=DRAFT7)
    # One schema refers to the other with and without a slash at the end.
    addresses = (schemas["$id"], schemas["$id"].rstrip("/"))
    registry: Any = Registry().with_resources((address, resource) for address in addresses)
    document = document_of(served)
    jsonschema.Draft7Validator(meta, registry=registry).validate(document)
    assert document["openrpc"] in meta["properties"]["openrpc"]["enum"]


async def test_every_method_of_the_server_is_described(served: Served) -> None:
    document = document_of(served)
    named = [method["name"] for method in document["methods"]]
    offered = [f"service.{op.name}" for op in served.up.service.operations]
    assert named == [*offered, "rpc.discover"]


async def test_every_example_is_answered_as_shown(served: Served) -> None:
    """Examples about an order are sent with a new order, whose state may differ."""
    sent = 0
    for method, example in examples(document_of(served)):
        params = params_in(example)
        if "payment" in params:  # signed for the recorded order
            continue
        made = BACK if method["name"].endswith(".fund") and "amount" not in params else SWAP
        sendable = await with_live_order(served, params, made)
        result = await call(served, method["name"], sendable)
        # No example has a signature of the reader.
        unsigned: Json = {"ok": not method["name"].endswith("swap.fund")}
        answer = await shown(served, example) or unsigned
        assert result["ok"] == answer["ok"], (example["name"], result)
        if sendable == params and "state" in answer:
            assert result["state"] == answer["state"]
            assert result.get("error", {}).get("code") == answer.get("error", {}).get("code")
        sent += 1
    assert sent >= 22


async def with_live_order(served: Served, params: Json, order: Json = SWAP) -> Json:
    """The params with a new order in place of a recorded one."""
    text = json.dumps(params)
    if not ORDER_ID.search(text):
        return await with_live_ticket(served, params)
    made = (await call(served, "service.swap.create", order))["data"]
    found: Json = json.loads(ORDER_ID.sub(made["order"]["orderId"], text))
    return {**found, **({"sessionId": made["sessionId"]} if "sessionId" in found else {})}


async def test_every_answer_shown_is_as_its_schema_says(served: Served) -> None:
    document, answered = document_of(served), 0
    for method, example in examples(document):
        answer = await shown(served, example)
        if answer is not None:
            check(document, method["result"]["schema"], answer)
            answered += 1
    assert answered > 15


async def test_every_example_keeps_to_the_params_it_shows(served: Served) -> None:
    document = document_of(served)
    every = list(examples(document))
    assert len(every) > 20
    for method, example in every:
        params = [resolved(document, param) for param in method["params"]]
        described = {param["name"]: param for param in params}
        given = params_in(example)
        assert {name for name, param in described.items() if param["required"]} <= set(given)
        for name, value in given.items():
            check(document, described[name]["schema"], value)


async def test_examples_carry_no_idempotency_key_to_be_shared(
    served: Served,
) -> None:
    document = document_of(served)
    assert all("idempotency-key" not in params_in(example) for _, example in examples(document))
    for name in ("swap.create", "swap.execute"):
        params = method_named(document, f"service.{name}")["params"]
        assert params[-1]["name"] == "idempotency-key"


def declared(document: Json, answer: Answer) -> bool:
    """Whether the document declares an answer's error."""
    listed = document["components"]["errors"].values()
    error = answer.body["error"]
    said = {"code": error["data"]["code"], "retryable": error["data"]["retryable"]}
    return (error["code"], said) in [(e["code"], e["data"]) for e in listed]


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b"1",
        b'{"jsonrpc":"2.0","id":1}',
        b" " * 70_000,
        b"[%b]" % b",".join([b"1"] * 51),
    ],
    ids=["half", "empty batch", "number", "no method", "too large", "too many"],
)
async def test_a_message_that_can_t_be_read_gets_a_declared_error(
    served: Served, body: bytes
) -> None:
    assert declared(document_of(served), await served.raw(body))


async def test_call_that_cannot_run_gets_an_error_of_its_method(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise RuntimeError

    document = document_of(served)
    assert declared(document, await served.rpc("swap.plan", [1]))
    assert declared(document, await served.rpc("swap.plan", 1))
    assert declared(document, await served.rpc("swap.plam", {}))
    monkeypatch.setattr(dispatch, "parse_call", fail)
    assert declared(document, await served.rpc("swap.plan", {}))


async def test_who_is_not_let_in_gets_a_declared_error(tmp_path: Path) -> None:
    settings: dict[str, Any] = {
        "rate_limit__enabled": True,
        "rate_limit__rpc_requests_per_minute": 1,
        "trusted_proxies": "127.0.0.0/8",
    }
    async with serving(tmp_path, {"AGENT_RPC_TOKEN": TOKEN}, **settings) as served:
        document = document_of(served)
        assert "token" in document["servers"][0]["summary"]
        over_tls = {"x_forwarded_proto": "https"}
        good = {**over_tls, "x_agent_rpc_token": TOKEN}
        assert declared(document, await served.rpc("swap.plan", {}, **over_tls))
        assert declared(document, await served.rpc("swap.plan", {}, **over_tls, host="evil.com"))
        assert declared(document, await served.rpc("swap.plan", {}, x_forwarded_for="203.0.113.7"))
        assert declared(document, await served.raw(b"{}", **good, content_type="text/plain"))
        assert declared(document, await served.rpc("swap.plan", {}, **good))


async def test_refusal_over_json_rpc_is_a_result_of_its_schema(served: Served) -> None:
    for name, params in (
        ("swap.quote", {}),
        ("swap.create", {**SWAP, "amount": "0.01", "what": None}),
        ("swap.status", {"orderId": "ord_" + "0" * 26}),
        ("swap.create", {**SWAP, "idempotency-key": "\n"}),
    ):
        result = await call(served, f"service.{name}", params)
        assert result["ok"] is False
