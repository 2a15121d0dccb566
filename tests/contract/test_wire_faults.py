"""Requests that no well-behaved client sends: no 500, and no internals in the answers."""

from __future__ import annotations

import asyncio
import json
import random
import re
import sqlite3
from typing import Any

import pytest

from rpcsvc.http import messages as http_transport
from rpcsvc.operations.dispatch import Dispatcher
from tests.contract.serving import EVM, JSON, MONERO, SWAP, Served

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def served(shared: Served) -> Served:
    """One service: the calls below change nothing."""
    return shared


CREATE = "/api/v1/agent/swap/create"
PLAN = "/api/v1/agent/swap/plan"
CALL = b'{"jsonrpc":"2.0","id":1,"method":"service.swap.plan"}'


async def sent(served: Served, *lines: bytes, body: bytes = b"") -> tuple[int, bytes]:
    """Send raw bytes; status and body of the answer."""
    port = served.client.port
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = [*lines, b"host: localhost", b"connection: close"]
    writer.write(b"\r\n".join(head) + b"\r\n\r\n" + body)
    async with asyncio.timeout(180):
        answer = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = re.search(r"content-length: (\d+)", answer, re.I)
        content = await reader.readexactly(int(length[1]) if length else 0)
    writer.close()
    await writer.wait_closed()
    return int(answer.split()[1]), content


def posted(path: str, body: bytes, *headers: bytes) -> list[bytes]:
    return [
        b"POST %b HTTP/1.1" % path.encode(),
        b"content-type: application/json",
        b"content-length: %d" % len(body),
        *headers,
    ]


SWAP_BYTES = json.dumps(SWAP).encode()


@pytest.mark.parametrize("key", [b"caf\xe9", b"caf\xc3\xa9", b"\xff\xfe", b"", b"x" * 256, b"a\tb"])
async def test_an_idempotency_key_header_of_another_form_is_refused(
    served: Served, key: bytes
) -> None:
    lines = posted(CREATE, SWAP_BYTES, b"idempotency-key: " + key)
    status, body = await sent(served, *lines, body=SWAP_BYTES)
    assert status == 400
    assert json.loads(body)["validationErrors"][0]["field"] == "idempotency-key"
    assert served.count("orders") == 0


async def test_two_idempotency_key_headers_are_refused(served: Served) -> None:
    lines = posted(
        CREATE,
        SWAP_BYTES,
        b"idempotency-key: a-0123456789abcd",
        b"idempotency-key: b-0123456789abcd",
    )
    status, body = await sent(served, *lines, body=SWAP_BYTES)
    assert (status, json.loads(body)["error"]["code"]) == (400, "invalid_input")
    assert served.count("orders") == 0


@pytest.mark.parametrize("name", [b"x-request-id", b"x-agent-rpc-token", b"x-forwarded-for"])
async def test_header_values_that_are_not_text_do_no_harm(served: Served, name: bytes) -> None:
    for path, body in ((PLAN, b"{}"), ("/rpc", CALL)):
        status, answer = await sent(
            served, *posted(path, body, name + b": \xff\xfe\xe9"), body=body
        )
        assert status in (200, 401)
        assert b"\xff" not in answer


@pytest.mark.parametrize(
    "target",
    [
        b"/x%ff%00",
        b"/x%ed%a0%80",
        b"/api/v1/agent/swap/status/%ff",
        b"/api/v1/agent/swap/status/%ed%a0%80",
        b"/api/v1/agent/swap/status/..%2f..%2fetc",
        b"/api/v1/agent/capabilities?%ff=1&%ff=2",
        b"/api/v1/agent/swap/status/ord_1?verify=%ff",
        b"/api/v1/agent/swap/status/ord_1?orderId=ord_2",
        b"/api/v1/agent/swap/status/ord_1?verify=a&verify=b",
        b"/" + b"a" * 20_000,
        b"/x\xff",
        b"//evil.example/x",
    ],
    ids=lambda target: repr(target)[:40],
)
async def test_a_strange_target_is_a_client_s_error(served: Served, target: bytes) -> None:
    status, body = await sent(served, b"GET %b HTTP/1.1" % target)
    assert status in (400, 404)
    assert b"Traceback" not in body


async def test_unknown_query_parameter_is_named_with_the_nearest(
    served: Served,
) -> None:
    path = "/agent/swap/status/ord_" + "0" * 26
    answer = await served.http("GET", path, params={"verfy": EVM})
    assert answer.status == 400
    assert "Did you mean verify?" in answer.body["validationErrors"][0]["message"]


@pytest.mark.parametrize("path", [PLAN, "/rpc"])
async def test_a_body_that_never_arrives_is_not_waited_for(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_transport, "BODY_SECONDS", 0.05)
    lines = [b"POST %b HTTP/1.1" % path.encode(), b"content-type: application/json"]
    for declared, part, expected in (
        (b"content-length: 9", b"{", 408),
        (b"transfer-encoding: chunked", b"zz", 400),
    ):
        status, _ = await sent(served, *lines, declared, body=part)
        assert status == expected


async def test_other_http_methods_get_the_allowed_one(served: Served) -> None:
    for method in ("HEAD", "PUT", "DELETE", "OPTIONS", "PATCH", "GET"):
        for path in ("/rpc", PLAN):
            response = await served.client.request(method, path)
            assert (response.status, response.headers["allow"]) == (405, "POST")
    assert (await served.client.head("/health")).status == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/livez"), ("GET", "/no/such"), ("GET", "/openapi.json"), ("POST", "/rpc"),
     ("POST", CREATE), ("PUT", "/health")],
)  # fmt: skip
async def test_no_response_reveals_software_versions(
    served: Served, method: str, path: str
) -> None:
    answer = await served.client.request(method, path, data=b"{", headers=JSON)
    assert answer.headers["server"] == "rpcsvc"


async def test_internal_error_reveals_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise sqlite3.OperationalError("no such table: orders in /var/lib/secret.sqlite3")

    monkeypatch.setattr("rpcsvc.operations.dispatch.parse_call", fail)
    over_http = await served.post("/agent/swap/create", SWAP, x_request_id="mine")
    over_rpc = await served.rpc("swap.create", SWAP, x_request_id="mine")
    assert over_http.status == 500
    assert over_http.body["state"] == "internal_error"
    assert (over_rpc.status, over_rpc.body["error"]["code"]) == (200, -32603)
    for answer in (over_http, over_rpc):
        assert "mine" in answer.body["error"]["message"]
        for word in ("secret", "table", "sqlite", "Traceback", "rpcsvc"):
            assert word not in json.dumps(answer.body)


async def test_fault_outside_any_operation_leaks_no_internals(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> Any:
        raise sqlite3.OperationalError("no such table: orders in /var/lib/secret.sqlite3")

    monkeypatch.setattr(Dispatcher, "run", fail)
    answer = await served.post("/agent/swap/plan", {}, x_request_id="mine")
    assert (answer.status, answer.body["requestId"]) == (500, "mine")
    assert "secret" not in json.dumps(answer.body)


VALUES: list[Any] = [
    None, True, False, 0, -1, 1, 2**53, 2**63 - 1, -(2**63), 0.1, -0.0, 1e308, "", " ", "x2u",
    "u2x", "0.8", "150", "1e9", "arbitrum", "42161", 42161, EVM, EVM.lower(), MONERO, "\x00",
    "\x1b[31m", "\u202e", "\U0001f4b0" * 40, "٣", "ord_" + "0" * 26, "9" * 5000, [], {}, [[]],
    {"a": 1}, "'; DROP TABLE orders; --", "set_rate", "advance_clock", "%s%n", "../../etc/passwd",
]  # fmt: skip
NAMES = [
    "direction", "chain", "amount", "to", "hasFunds", "sessionId", "orderId", "verify", "message",
    "category", "walletAddress", "fault", "seconds", "rate", "idempotency-key", "", "__class__",
    "self", "params", "x" * 300,
]  # fmt: skip
POSTS = {
    "swap.plan": "/agent/swap/plan",
    "swap.quote": "/agent/swap/quote",
    "swap.create": "/agent/swap/create",
    "swap.execute": "/agent/swap/execute",
    "support.create": "/agent/support/tickets",
    "sandbox.fund": "/sandbox/fund",
}


@pytest.mark.parametrize("seed", range(4))
async def test_both_transports_judge_any_input_alike_without_failing(
    served: Served, seed: int
) -> None:
    chance = random.Random(seed)
    for _ in range(100):
        name = chance.choice(list(POSTS))
        params = {n: chance.choice(VALUES) for n in chance.sample(NAMES, chance.randint(0, 6))}
        if chance.random() < 0.5:
            params = {**SWAP, **params}
        over_rpc = (await served.rpc(name, params)).body["result"]
        over_http = await served.post(POSTS[name], params)
        assert over_http.status != 500, (name, params)
        assert over_rpc["state"] != "internal_error"
        if "idempotency-key" not in params:
            assert over_http.body["state"] == over_rpc["state"], (name, params)
            assert over_http.body["validationErrors"] == over_rpc["validationErrors"]


async def test_a_charset_beside_the_content_type_is_let_pass(served: Served) -> None:
    headers = {**JSON, "content-type": "application/json; charset=utf-8"}
    for path, body in ((PLAN, b"{}"), ("/rpc", CALL)):
        response = await served.client.post(path, data=body, headers=headers)
        assert response.status == 200
