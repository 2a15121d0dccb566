"""POST /mcp: revisions, headers, tools, resources, tokens, origins."""

from __future__ import annotations

import base64
import json
import re
import uuid
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from tdqs.lint_server import lint_server
from tdqs.parse_tool_definitions import parse_tool_definitions

from rpcsvc.http.pages.rendering import qr_image
from rpcsvc.http.schemas import envelope_name, ref
from rpcsvc.operations.service import Operation
from rpcsvc.operations.table import OPERATIONS
from rpcsvc.orders.waits import LONGEST_WAIT_SECONDS
from tests.contract.described import check, openapi_of
from tests.contract.serving import EVM, MONERO, TOKEN, Served, placed, serving
from tests.mcp import HANDSHAKE, STATELESS, call, message, meta, stateless, swap

APPS = "io.modelcontextprotocol/ui"
APP = "ui://service/order"
TOOLS = {op.tool.name: op for op in OPERATIONS if op.tool is not None}


async def listed(served: Served) -> dict[str, Any]:
    answer = await stateless(served, "tools/list")
    return {tool["name"]: tool for tool in answer.body["result"]["tools"]}


# --- revisions ---


async def test_discover_lists_revisions_and_capabilities(served: Served) -> None:
    answer = await stateless(served, "server/discover")
    result = answer.body["result"]
    assert answer.status == 200
    assert result["supportedVersions"] == [STATELESS, *HANDSHAKE]
    assert set(result["capabilities"]) == {"tools", "resources", "extensions"}
    assert APPS in result["capabilities"]["extensions"]
    assert (result["resultType"], result["cacheScope"]) == ("complete", "public")
    assert result["_meta"]["io.modelcontextprotocol/serverInfo"]["name"] == "service"
    assert "mcp-session-id" not in answer.headers


@pytest.mark.parametrize(
    ("asked", "given"),
    [*((version, version) for version in HANDSHAKE), ("2024-11-05", HANDSHAKE[0])],
)
async def test_initialize_agrees_on_a_revision_without_a_session(
    served: Served, asked: str, given: str
) -> None:
    params = {"protocolVersion": asked, "capabilities": {}, "clientInfo": {}}
    answer = await served.raw(message("initialize", params), "/mcp")
    assert answer.body["result"]["protocolVersion"] == given
    assert "mcp-session-id" not in answer.headers
    note = json.dumps({"jsonrpc": "2.0", "method": "notifications/initialized"}).encode()
    done = await served.raw(note, "/mcp", mcp_protocol_version=given)
    assert (done.status, done.body) == (202, {})
    assert "x-service-signature" in done.headers
    tools = await served.raw(message("tools/list", {}), "/mcp", mcp_protocol_version=given)
    assert {tool["name"] for tool in tools.body["result"]["tools"]} == set(TOOLS)
    assert not {"resultType", "ttlMs", "cacheScope"} & set(tools.body["result"])


@pytest.mark.parametrize("method", ["initialize", "ping", "logging/setLevel", "no/such"])
async def test_stateless_revision_lacks_the_handshake_methods(served: Served, method: str) -> None:
    answer = await stateless(served, method)
    assert (answer.status, answer.body["error"]["code"]) == (404, -32601)


@pytest.mark.parametrize("missing", ["protocolVersion", "clientCapabilities"])
async def test_meta_without_a_required_key_is_refused(served: Served, missing: str) -> None:
    given = {key: value for key, value in meta().items() if not key.endswith(missing)}
    answer = await stateless(served, "server/discover", {"_meta": given})
    assert (answer.status, answer.body["error"]["code"]) == (400, -32602)
    assert missing in answer.body["error"]["message"]


async def test_unserved_revision_gets_the_served_ones(served: Served) -> None:
    answer = await stateless(
        served, "server/discover", {"_meta": meta("2030-01-01")}, mcp_protocol_version="2030-01-01"
    )
    error = answer.body["error"]
    assert (answer.status, error["code"]) == (400, -32022)
    assert error["data"]["supported"] == [STATELESS, *HANDSHAKE]
    assert error["data"]["requested"] == "2030-01-01"


@pytest.mark.parametrize(
    "headers",
    [
        {"mcp_method": "tools/list"},
        {"mcp_name": "create_swap"},
        {"mcp_name": "=?base64?Z2V0X3F1b3Rl?=="},
        {"mcp_protocol_version": HANDSHAKE[0]},
    ],
)
async def test_headers_that_differ_from_the_body_are_refused(
    served: Served, headers: dict[str, str]
) -> None:
    params = {"name": "get_quote", "arguments": {}}
    answer = await stateless(served, "tools/call", params, **headers)
    assert (answer.status, answer.body["error"]["code"], answer.body["id"]) == (400, -32020, 7)


async def test_name_header_may_be_base64(served: Served) -> None:
    encoded = f"=?base64?{base64.b64encode(b'get_capabilities').decode()}?="
    params = {"name": "get_capabilities", "arguments": {}}
    answer = await stateless(served, "tools/call", params, mcp_name=encoded)
    assert answer.body["result"]["structuredContent"]["ok"]


async def test_only_post_of_one_message_is_taken(served: Served) -> None:
    for method in ("GET", "DELETE"):
        refused = await served.client.request(method, "/mcp")
        assert (refused.status, refused.headers["allow"]) == (405, "POST")
        assert (await refused.json())["error"]["code"] == -32600
    batch = await served.raw(b"[%b]" % message("ping", {}), "/mcp")
    assert (batch.status, batch.body["error"]["code"]) == (400, -32600)
    assert (await served.raw(b"{", "/mcp")).body["error"]["code"] == -32700


# --- tools ---


async def test_every_row_with_a_tool_is_listed_and_no_other(served: Served) -> None:
    found = await listed(served)
    assert set(found) == set(TOOLS)
    for name, tool in found.items():
        assert tool["annotations"]["readOnlyHint"] == (TOOLS[name].effect == "read")
        schema = tool["inputSchema"]
        jsonschema.Draft202012Validator.check_schema(schema)
        # Claude's API refuses a tool with one of these at the root of its schema.
        assert schema["type"] == "object"
        assert not {"anyOf", "oneOf", "allOf"} & set(schema)
        # A model gets this schema only: nothing in it may refer to another.
        assert "$ref" not in json.dumps(schema)


@pytest.mark.parametrize("version", [STATELESS, *HANDSHAKE])
async def test_tools_list_takes_little_of_a_models_context(served: Served, version: str) -> None:
    params = {"_meta": meta()} if version == STATELESS else {}
    method = {"mcp_method": "tools/list"} if version == STATELESS else {}
    body = message("tools/list", params)
    headers = {"mcp-protocol-version": version, "content-type": "application/json"}
    headers |= {name.replace("_", "-"): value for name, value in method.items()}
    answer = await served.client.post("/mcp", data=body, headers=headers)
    listing = await answer.read()
    assert len(json.loads(listing)["result"]["tools"]) == len(TOOLS)
    assert len(listing) <= 16_000


async def test_listing_says_how_a_session_is_made(served: Served) -> None:
    """Few hosts let a model read the rules: it would copy a session from an example."""
    said = {
        name: tool["inputSchema"]["properties"]["sessionId"]["description"]
        for name, tool in (await listed(served)).items()
        if TOOLS[name].idempotent
    }
    assert list(said) == ["create_swap"]
    for words in ("make", "random generator", "never one from an example", "the order's secret"):
        assert words in said["create_swap"]


async def test_description_has_two_sentences_and_names_its_rules(served: Served) -> None:
    for name, tool in (await listed(served)).items():
        text, rules = tool["description"].split(" Rules: ")
        assert rules == f"rules://service/{name}"
        assert text.endswith(".")
        assert len(re.findall(r"[.?!](?= |$)", text)) == 2, text


async def rules_of(served: Served, name: str) -> str:
    uri = f"rules://service/{name}"
    answer = await stateless(served, "resources/read", {"uri": uri})
    (content,) = answer.body["result"]["contents"]
    assert (content["uri"], content["mimeType"]) == (uri, "text/markdown")
    return str(content["text"])


async def test_rules_of_tools_are_resources_of_a_template(served: Served) -> None:
    answer = await stateless(served, "resources/templates/list")
    (template,) = answer.body["result"]["resourceTemplates"]
    assert template["uriTemplate"] == "rules://service/{tool}"
    items = openapi_of(served)["paths"].values()
    tools = await listed(served)
    described = {each["operationId"] for item in items for each in item.values()}
    for name, operation in TOOLS.items():
        text = await rules_of(served, name)
        assert operation.tool is not None
        assert operation.tool.description in text
        for argument, schema in tools[name]["inputSchema"]["properties"].items():
            assert f"- `{argument}`: {schema['description'].removesuffix('.')}" in text
        (linked,) = re.findall(r"in full: operation (\w+) of \S+/openapi\.json$", text, re.M)
        assert linked in described
    for second_sentence in (
        "that of EIP-55", "Recommended for XMR", "docs/use/webhooks.md",
        "an exchange may not credit",
    ):  # fmt: skip
        assert second_sentence in await rules_of(served, "create_swap")
    for unknown in ("rules://service/swap", "rules://service/{tool}", "rules://other/get_quote"):
        refused = await stateless(served, "resources/read", {"uri": unknown})
        assert refused.body["error"]["code"] == -32602


ASPECTS = ("Effects", "Auth", "Limits", "Second call", "On failure")


async def test_tools_promise_no_more_than_lean_answers_have(served: Served) -> None:
    tools = await listed(served)
    for text in (tools["get_quote"]["description"], await rules_of(served, "get_quote")):
        assert re.search(r"with\s+detail full [a-z ]*fee", text)
    assert "policy" not in tools["get_capabilities"]["description"]
    assert "with detail full its deposit policy" in await rules_of(served, "get_capabilities")


async def test_tool_rules_say_five_things_each(served: Served) -> None:
    for name, tool in (await listed(served)).items():
        said = _aspects(await rules_of(served, name))
        assert tuple(said) == ASPECTS, name
        assert all(len(text) > 10 and text.endswith(".") for text in said.values()), name
        reads = TOOLS[name].effect == "read"
        assert said["Effects"].startswith("changes nothing") == reads, name
        needed = tool["inputSchema"].get("required", [])
        for secret in {"sessionId", "orderId"} & set(needed):
            assert secret in said["Auth"] or "of the order" in said["Auth"], (name, secret)
        assert "error.retryable" in said["On failure"], name


async def test_tool_rules_name_their_own_limits(served: Served) -> None:
    said = {name: _aspects(await rules_of(served, name)) for name in TOOLS}
    for name, limit in {
        "create_swap": "orders a minute and a day",
        "get_swap_status": f"waitSec is at most {LONGEST_WAIT_SECONDS}",
        "list_swaps": "100 orders a page",
        "fund_swap": "payments a day",
        "create_support_ticket": "tickets a day",
    }.items():
        assert limit in said.pop(name)["Limits"], name
    assert all("calls a minute" in each["Limits"] for each in said.values())


def _aspects(rules: str) -> dict[str, str]:
    """The paragraph after each label of the rules, in order."""
    found = re.findall(rf"^({'|'.join(ASPECTS)}): (.*)$", rules, re.MULTILINE)
    assert len(found) == len(dict(found))
    return dict(found)


async def test_tool_definitions_pass_the_linter(served: Served) -> None:
    """The rules of the Tool Definition Quality Score."""
    listing = {"tools": list((await listed(served)).values())}
    report = lint_server(server_name="service", tools=parse_tool_definitions(listing).tools)
    # The first asks of each tool with as many required inputs as create_swap whether a cheaper one
    # does the same. Schemas of results are in the OpenAPI document: here they took 68 of 98 kB.
    waived = {"shadow-candidate", "no-output-schema"}
    found = [each for each in report.findings if each.rule not in waived]
    assert not found, [each.message for each in found]
    assert len(report.tools) == len(TOOLS)


@pytest.mark.parametrize("operation", TOOLS.values(), ids=lambda op: op.name)
async def test_tools_take_their_examples_as_their_schemas_say(
    served: Served, operation: Operation
) -> None:
    assert operation.tool is not None
    schemas = (await listed(served))[operation.tool.name]
    for example in operation.examples:
        arguments = await placed(served, example.params, in_usdc=operation.payable)
        if operation.idempotent:
            arguments["sessionId"] = str(uuid.uuid4())
        jsonschema.Draft202012Validator(schemas["inputSchema"]).validate(arguments)
        result = await call(served, operation.tool.name, arguments)
        envelope = result["structuredContent"]
        if not operation.payable:  # no example has a signature of the reader
            assert (envelope["ok"], result["isError"]) == (True, False), envelope
        assert json.loads(result["content"][-1]["text"]) == envelope
        assert envelope["operation"] == operation.name
        name = envelope_name(operation) if envelope["ok"] else "ErrorEnvelope"
        check(openapi_of(served), ref(name), envelope)


async def test_failed_operation_is_an_error_with_the_envelope(served: Served) -> None:
    result = await call(served, "get_quote", {"direction": "x2u", "chain": "tron", "amount": "1"})
    assert result["isError"]
    assert result["structuredContent"]["error"]["code"] == "unsupported_chain"
    check(openapi_of(served), ref("ErrorEnvelope"), result["structuredContent"])


async def test_unknown_tool_or_arguments_of_another_kind_are_refused(served: Served) -> None:
    for params in ({"name": "get_qote"}, {"name": "get_quote", "arguments": []}):
        answer = await stateless(served, "tools/call", params)
        assert (answer.status, answer.body["error"]["code"]) == (400, -32602)


@pytest.mark.parametrize(
    "wrong",
    [
        {"chain": "tron"},
        {"amount": "0.0"},
        {"amount": 0.8},
        {"to": MONERO},
        {"direction": "sideways"},
        {"sessionId": None},
        {"colour": "red"},
        {"webhook": 1},
    ],
)
async def test_input_schema_refuses_what_the_service_refuses(
    served: Served, wrong: dict[str, Any]
) -> None:
    schema = (await listed(served))["create_swap"]["inputSchema"]
    arguments = {**swap(), **wrong}
    assert not jsonschema.Draft202012Validator(schema).is_valid(arguments)
    assert (await call(served, "create_swap", arguments))["isError"]
    assert served.count("orders") == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"webhook": {"url": "http://example.com/"}},
        {"webhook": {"url": "https://example.com/", "colour": "red"}},
        {"sessionId": "3f2b8c1e-7d64-1f0a-9c1b-2a5e8d7f6c90"},
        {"direction": "u2x", "amount": "150", "to": MONERO[:-1]},
    ],
)
async def test_service_checks_what_the_short_schema_leaves_open(
    served: Served, wrong: dict[str, Any]
) -> None:
    assert (await call(served, "create_swap", {**swap(), **wrong}))["isError"]
    assert served.count("orders") == 0


# --- one order for one intent ---


async def test_repeated_create_makes_one_order(served: Served) -> None:
    arguments = swap()
    same = {**arguments, "amount": "0.80", "chain": 42161, "to": EVM.lower()}
    ids = {order_of(await call(served, "create_swap", each)) for each in (arguments, same)}
    assert (len(ids), served.count("orders")) == (1, 1)


async def test_another_session_key_or_digest_makes_another_order(served: Served) -> None:
    first = swap()
    terms = {name: first[name] for name in ("direction", "chain", "amount")}
    quote = (await call(served, "get_quote", terms))["structuredContent"]["data"]
    held = {**first, "quoteDigest": quote["quoteDigest"]}
    others = [swap(), {**first, "idempotency-key": str(uuid.uuid4())}, held]
    ids = {order_of(await call(served, "create_swap", each)) for each in (first, *others)}
    assert len(ids) == 4
    assert order_of(await call(served, "create_swap", held)) in ids
    tool = (await listed(served))["create_swap"]
    again = _aspects(await rules_of(served, "create_swap"))["Second call"]
    key = tool["inputSchema"]["properties"]["idempotency-key"]["description"]
    for part in ("quoteDigest", "sessionId"):
        assert part in again, part
        assert part in key, part


async def test_create_without_a_session_asks_for_one(served: Served) -> None:
    arguments = {**swap(), "idempotency-key": str(uuid.uuid4())}
    del arguments["sessionId"]
    result = await call(served, "create_swap", arguments)
    assert result["structuredContent"]["missingInputs"] == ["sessionId"]
    assert served.count("orders") == 0


def order_of(result: dict[str, Any]) -> str:
    return str(result["structuredContent"]["data"]["order"]["orderId"])


# --- resources ---


async def test_documents_are_resources(served: Served) -> None:
    found = (await stateless(served, "resources/list")).body["result"]["resources"]
    documents = [resource for resource in found if resource["uri"] != APP]
    assert len(documents) > 1
    for resource in documents:
        answer = await stateless(served, "resources/read", {"uri": resource["uri"]})
        (content,) = answer.body["result"]["contents"]
        assert content["mimeType"] == resource["mimeType"]
        path = resource["uri"].removeprefix(served.up.settings.effective_site_url)
        response = await served.client.get(path)
        private = response.headers["cache-control"].startswith("no-store")
        assert answer.body["result"]["cacheScope"] == ("private" if private else "public")
        assert private or content["text"] == await response.text()


async def test_tools_of_an_order_lead_to_its_app(served: Served) -> None:
    found = await listed(served)
    linked = {name for name, tool in found.items() if "_meta" in tool}
    assert linked == {"create_swap", "fund_swap", "get_swap_status"}
    assert all(found[name]["_meta"] == {"ui": {"resourceUri": APP}} for name in linked)
    resources = (await stateless(served, "resources/list")).body["result"]["resources"]
    (resource,) = [each for each in resources if each["uri"] == APP]
    answer = await stateless(served, "resources/read", {"uri": APP})
    (content,) = answer.body["result"]["contents"]
    assert content["mimeType"] == resource["mimeType"] == "text/html;profile=mcp-app"
    assert content["_meta"] == resource["_meta"] == {"ui": {"csp": {}, "prefersBorder": True}}
    assert "default-src &#39;none&#39;" in content["text"]
    assert "://" not in content["text"]


@pytest.mark.parametrize("direction", ["x2u", "u2x"])
async def test_app_gets_the_payment_uri(served: Served, direction: str) -> None:
    shows = {"_meta": meta(extensions={APPS: {"mimeTypes": ["text/html;profile=mcp-app"]}})}
    made = await call(served, "create_swap", swap(direction), **shows)
    funding = made["structuredContent"]["data"]["fundingInstructions"]
    paid_by = funding["depositAddress"]
    if direction == "x2u":
        paid_by = f"monero:{paid_by}?tx_amount={funding['amount']}"
    assert made["_meta"]["order/qr"] == qr_image(paid_by)
    order = {"orderId": order_of(made)}
    assert "order/qr" not in (await call(served, "get_swap_status", order))["_meta"]
    params = {"name": "get_swap_status", "arguments": order}
    shaken = await served.raw(message("tools/call", params), "/mcp")
    assert shaken.body["result"]["_meta"] == {"order/qr": qr_image(paid_by)}
    refused = await call(served, "create_swap", {**swap(direction), "amount": "0"}, **shows)
    assert "order/qr" not in refused["_meta"]


async def test_unknown_resource_is_refused_with_its_uri(served: Served) -> None:
    answer = await stateless(served, "resources/read", {"uri": "file:///etc/passwd"})
    assert (answer.status, answer.body["error"]["code"]) == (400, -32602)
    assert answer.body["error"]["data"]["uri"] == "file:///etc/passwd"


async def test_card_and_catalogue_lead_to_the_endpoint(served: Served) -> None:
    catalogue = await (await served.client.get("/.well-known/ai-catalog.json")).json()
    (entry,) = catalogue["entries"]
    root = served.up.settings.effective_site_url
    response = await served.client.get(entry["url"].removeprefix(root))
    assert response.content_type == entry["type"] == "application/mcp-server-card+json"
    card = await response.json()
    (remote,) = card["remotes"]
    assert remote["url"] == f"{root}/mcp"
    assert remote["supportedProtocolVersions"] == [STATELESS, *HANDSHAKE]
    agent = await (await served.client.get("/agent.json")).json()
    assert agent["transports"]["mcp"]["url"] == remote["url"]
    assert agent["links"]["mcpServerCard"] == entry["url"]
    assert agent["links"]["aiCatalog"].endswith("/.well-known/ai-catalog.json")


# --- access and rate limits ---


async def test_pages_of_other_sites_are_refused(served: Served) -> None:
    answer = await stateless(served, "server/discover", origin="https://evil.example")
    assert answer.status == 403
    assert "access-control-allow-origin" not in answer.headers
    for origin in (served.up.settings.effective_site_url, "http://localhost:3000"):
        assert (await stateless(served, "server/discover", origin=origin)).status == 200


async def test_allowed_origins_may_call(tmp_path: Path) -> None:
    page = "https://app.example.com"
    async with serving(tmp_path, allowed_origins=page) as served:
        assert (await stateless(served, "server/discover", origin=page)).status == 200


@pytest.mark.parametrize("name", ["x_agent_rpc_token", "authorization"])
async def test_token_is_optional_but_must_be_right(tmp_path: Path, name: str) -> None:
    scheme = "Bearer " if name == "authorization" else ""
    async with serving(tmp_path, {"AGENT_RPC_TOKEN": TOKEN}) as served:
        arguments = {**swap(), "idempotency-key": "short"}
        params = {"name": "create_swap", "arguments": arguments}
        by_token = await stateless(served, "tools/call", params, **{name: scheme + TOKEN})
        assert not by_token.body["result"]["isError"]
        public = await call(served, "create_swap", arguments)
        assert public["structuredContent"]["error"]["code"] == "invalid_input"
        wrong = await stateless(served, "tools/call", params, **{name: scheme + "guess"})
        assert (wrong.status, wrong.body["error"]["code"]) == (401, -32001)


async def test_public_limits_hold_without_a_token(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"rate_limit__enabled": True, "rate_limit__orders_per_minute": 1}
    async with serving(tmp_path, {"AGENT_RPC_TOKEN": TOKEN}, **limits) as served:
        assert not (await call(served, "create_swap", swap()))["isError"]
        refused = await call(served, "create_swap", swap())
        assert refused["structuredContent"]["error"]["code"] == "rate_limited"
        params = {"name": "create_swap", "arguments": swap()}
        answer = await stateless(served, "tools/call", params, x_agent_rpc_token=TOKEN)
        assert not answer.body["result"]["isError"]
        assert served.count("orders") == 2


async def test_request_limit_is_refused_by_status(tmp_path: Path) -> None:
    limits: dict[str, Any] = {"rate_limit__enabled": True, "rate_limit__requests_per_minute": 1}
    async with serving(tmp_path, **limits) as served:
        assert (await stateless(served, "server/discover")).status == 200
        refused = await stateless(served, "server/discover")
        assert (refused.status, refused.body["error"]["code"]) == (429, -32029)
        assert int(refused.headers["retry-after"]) > 0
