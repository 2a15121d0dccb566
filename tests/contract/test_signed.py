"""Every response of a real server is signed over its bytes and the request that it answers."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientResponse
from yarl import URL

from rpcsvc.verify import (
    BadSignature,
    DigestMismatch,
    Exchange,
    Expected,
    TermsMismatch,
    UnknownKey,
    verify_attestation,
    verify_response,
)
from tests.command_line import clean_environ, run_here
from tests.contract.serving import SWAP, TOKEN, Served, serving
from tests.contract.signatures import Json, jwks

API = "/api/v1"
JSON = {"content_type": "application/json"}
ORDER = json.dumps(SWAP).encode()


def call(method: str, params: Json | None = None) -> bytes:
    return json.dumps(
        {"jsonrpc": "2.0", "id": "1", "method": method, "params": params or {}}
    ).encode()


async def exchanged(
    served: Served, method: str, target: str, body: bytes = b"", **headers: str
) -> Exchange:
    """Send a request, and keep the parts that a verifier needs."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    url = URL(served.url + target, encoded=True)
    session = served.client.session
    async with session.request(method, url, data=body or None, headers=named) as answer:
        return await kept(answer, method, target, body)


async def kept(answer: ClientResponse, method: str, target: str, body: bytes) -> Exchange:
    return Exchange(
        method=method,
        target=target,
        request_body=body,
        status=answer.status,
        headers={name.lower(): value for name, value in answer.headers.items()},
        body=await answer.read(),
    )


REQUESTS: dict[str, tuple[str, str, bytes, dict[str, str], int]] = {
    "a read": ("GET", f"{API}/agent/capabilities", b"", {}, 200),
    "a query": ("GET", f"{API}/agent/swap/status/ord_1?verify=0x%20a", b"", {}, 400),
    "an order": ("POST", f"{API}/agent/swap/execute", ORDER, JSON, 200),
    "a refusal": ("POST", f"{API}/agent/swap/execute", b'{"amount":1}', JSON, 400),
    "no JSON": ("POST", f"{API}/agent/swap/plan", b"{", JSON, 400),
    "the wrong media type": ("POST", f"{API}/agent/swap/plan", b"{}", {}, 415),
    "the wrong method": ("PUT", f"{API}/agent/swap/plan", b"{}", JSON, 405),
    "no such path": ("GET", "/nowhere?x=%ff", b"", {}, 404),
    "a document": ("GET", "/llms.txt", b"", {}, 200),
    "a document's head": ("HEAD", "/.well-known/agent.json", b"", {}, 200),
    "a preflight": (
        "OPTIONS",
        f"{API}/agent/swap/plan",
        b"",
        {"origin": "http://localhost:3000", "access_control_request_method": "POST"},
        204,
    ),
    "the agent API's health": ("GET", f"{API}/health", b"", {}, 200),
    "a GET with a body": ("GET", f"{API}/agent/capabilities", b"[]", JSON, 200),
    "JSON-RPC": ("POST", "/rpc", call("service.capabilities"), JSON, 200),
    "a batch": ("POST", "/rpc", b"[" + call("service.capabilities") + b",1]", JSON, 200),
    "a notification": (
        "POST", "/rpc", b'{"jsonrpc":"2.0","method":"service.capabilities"}', JSON, 204,
    ),
    "a JSON-RPC fault": ("POST", "/rpc", call("service.nothing"), JSON, 200),
}  # fmt: skip


@pytest.mark.parametrize("name", REQUESTS)
async def test_every_kind_of_response_verifies(served: Served, name: str) -> None:
    method, target, body, headers, status = REQUESTS[name]

    exchange = await exchanged(served, method, target, body, **headers)

    assert exchange.status == status
    verified = verify_response(exchange, await jwks(served), now=datetime.now(UTC))
    assert verified.key_retired_at is None


@pytest.mark.parametrize(
    ("written", "target"),
    [
        ("http://swap.example/api/v1/health?a=%7e", "/api/v1/health?a=%7e"),
        ("HTTPS://swap.example:8443?a=/b", "/?a=/b"),
        ("/api/v1/health?a=http://swap.example/b", "/api/v1/health?a=http://swap.example/b"),
    ],
)
async def test_scheme_and_host_in_a_target_are_not_signed(
    served: Served, written: str, target: str
) -> None:
    """Proxies may change them; a verifier has its own path and query."""
    reader, writer = await asyncio.open_connection(
        served.client.server.host, served.client.server.port
    )
    writer.write(f"GET {written} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n".encode())
    head, _, body = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    status, *lines = head.decode().split("\r\n")

    exchange = Exchange(
        method="GET",
        target=target,
        request_body=b"",
        status=int(status.split()[1]),
        headers=[(name, value) for name, _, value in (line.partition(": ") for line in lines)],
        body=body,
    )

    verify_response(exchange, await jwks(served), now=datetime.now(UTC))


async def test_a_caller_without_a_token_gets_a_signed_no(tmp_path: Path) -> None:
    async with serving(tmp_path, {"AGENT_RPC_TOKEN": TOKEN}) as served:
        exchange = await exchanged(served, "POST", "/rpc", call("service.schemas"), **JSON)

        assert exchange.status == 401
        verify_response(exchange, await jwks(served), now=datetime.now(UTC))


async def test_without_signing_nothing_is_signed(tmp_path: Path) -> None:
    async with serving(tmp_path, signing__enabled=False) as served:
        exchange = await exchanged(served, "POST", f"{API}/agent/swap/execute", ORDER, **JSON)

        assert not [name for name in dict(exchange.headers) if "sign" in name]
        assert "attestation" not in json.loads(exchange.body)["data"]["order"]
        assert await jwks(served) == {"keys": []}
        assert not (tmp_path / "keys").exists()


async def test_unchanged_document_is_signed_without_its_body(served: Served) -> None:
    first = await exchanged(served, "GET", "/openapi.json")
    etag = dict(first.headers)["etag"]

    again = await exchanged(served, "GET", "/openapi.json", if_none_match=etag)

    assert (again.status, again.body) == (304, b"")
    verify_response(again, await jwks(served), now=datetime.now(UTC))


@pytest.mark.parametrize("path", [f"{API}/agent/swap/plan", "/no/such"])
async def test_a_body_too_long_to_be_read_is_signed_for_as_unread(
    served: Served, path: str
) -> None:
    exchange = await exchanged(served, "POST", path, b" " * 100_000, **JSON)
    assert exchange.status == 413
    keys = await jwks(served)
    verify_response(exchange, keys)
    verify_response(changed(exchange, request_body=b"another"), keys)
    with pytest.raises(BadSignature):
        verify_response(changed(exchange, status=400), keys)


async def test_a_refused_token_is_signed_for_as_unread(tmp_path: Path) -> None:
    async with serving(tmp_path, {"AGENT_RPC_TOKEN": TOKEN}) as served:
        exchange = await exchanged(served, "POST", "/rpc", ORDER, **JSON)
        assert exchange.status == 401
        keys = await jwks(served)
        verify_response(changed(exchange, request_body=b""), keys)


def changed(exchange: Exchange, **parts: Any) -> Exchange:
    names = ("method", "target", "request_body", "status", "headers", "body")
    return Exchange(**{**{name: getattr(exchange, name) for name in names}, **parts})


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("method", "PUT"),
        ("target", f"{API}/agent/swap/execute?"),
        ("request_body", ORDER.replace(b"x2u", b"u2x")),
        ("status", 201),
    ],
)
async def test_an_answer_to_another_request_is_caught(
    served: Served, part: str, value: Any
) -> None:
    exchange = await exchanged(served, "POST", f"{API}/agent/swap/execute", ORDER, **JSON)

    with pytest.raises(BadSignature):
        verify_response(changed(exchange, **{part: value}), await jwks(served))


async def test_a_swapped_deposit_address_is_caught(served: Served) -> None:
    mine, other = [
        await exchanged(served, "POST", f"{API}/agent/swap/execute", ORDER, **JSON)
        for _ in range(2)
    ]
    swapped = mine.body.replace(deposit_address(mine), deposit_address(other))
    assert len(swapped) == len(mine.body)

    with pytest.raises(DigestMismatch):
        verify_response(changed(mine, body=swapped), await jwks(served))


def deposit_address(exchange: Exchange) -> bytes:
    address: str = json.loads(exchange.body)["data"]["order"]["depositAddress"]
    return address.encode()


async def test_attestation_holds_only_for_what_was_ordered(served: Served) -> None:
    made = (await served.post("/agent/swap/execute", SWAP)).body
    order, keys = made["data"]["order"], await jwks(served)
    mine = {
        "direction": SWAP["direction"],
        "chain_id": 42161,
        "amount": SWAP["amount"],
        "to": SWAP["to"],
        "issuer": served.up.settings.effective_site_url,
        "deposit_address": order["depositAddress"],
        "order_id": order["orderId"],
        "network": "sandbox",
        "session": made["data"]["sessionId"],
    }

    found = verify_attestation(order["attestation"], keys, Expected(**mine), now=datetime.now(UTC))

    assert found.terms.expires_at == made["data"]["fundingInstructions"]["expiresAt"]
    assert str(found.terms.expected_output) == order["expectedOutput"]
    assert found.expired is False
    with pytest.raises(TermsMismatch):
        verify_attestation(
            order["attestation"], keys, Expected(**{**mine, "amount": SWAP["amount"] + "1"})
        )


async def test_status_and_replay_carry_the_same_attestation(served: Served) -> None:
    first = await served.post("/agent/swap/create", SWAP, idempotency_key="k-0123456789abcd")
    order = first.body["data"]["order"]
    again = await served.post("/agent/swap/create", SWAP, idempotency_key="k-0123456789abcd")
    polled = await served.http("GET", f"/agent/swap/status/{order['orderId']}")

    attestations = {a.body["data"]["order"]["attestation"] for a in (first, again, polled)}
    assert len(attestations) == 1


async def rotate(served: Served, *options: str) -> Json:
    words = ["keys", "rotate", *options, "--data-dir", str(served.up.settings.data_dir)]
    rotated = await asyncio.to_thread(run_here, words, clean_environ())
    assert rotated.returncode == 0
    answer: Json = json.loads(rotated.stdout)
    return answer


async def test_next_key_is_served_while_the_current_one_signs(served: Served) -> None:
    (current,) = (await jwks(served))["keys"]
    prepared = await rotate(served)

    while len(keys := (await jwks(served))["keys"]) == 1:
        pass

    assert [key["kid"] for key in keys] == [current["kid"], prepared["kid"]]
    assert keys[1]["signsFrom"] == prepared["signsFrom"]
    assert verify_response(await exchanged(served, "GET", "/llms.txt"), {"keys": [current]})


async def test_rotation_now_is_seamless_for_clients_that_refetch(
    served: Served,
) -> None:
    before, old_keys = await exchanged(served, "GET", "/llms.txt"), await jwks(served)
    await rotate(served, "--now")

    while True:
        after = await exchanged(served, "GET", "/llms.txt")
        try:
            verify_response(after, old_keys)
        except UnknownKey:
            break

    keys = await jwks(served)
    verify_response(after, keys, now=datetime.now(UTC))
    assert verify_response(before, keys).key_retired_at is not None
    assert {key["kid"] for key in old_keys["keys"]} < {key["kid"] for key in keys["keys"]}


async def test_status_answers_are_attested_again_after_a_rotation(served: Served) -> None:
    made = (await served.post("/agent/swap/create", SWAP)).body["data"]
    order = made["order"]
    signer = served.up.signer
    assert signer is not None
    ring = signer._ring
    ring.rotate()
    signer._begin(signer._second)

    polled = await served.http("GET", f"/agent/swap/status/{order['orderId']}")

    again = polled.body["data"]["order"]["attestation"]
    assert again != order["attestation"]
    expected = Expected(
        direction=SWAP["direction"], chain_id=42161, amount=SWAP["amount"], to=SWAP["to"],
        issuer=served.up.settings.effective_site_url, session=made["sessionId"],
    )  # fmt: skip
    assert verify_attestation(again, ring.jwks(), expected).kid == signer.kid
    assert verify_attestation(order["attestation"], ring.jwks(), expected).kid != signer.kid
