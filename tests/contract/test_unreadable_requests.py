"""Requests that aiohttp refuses before routing get the service's own error format."""

from __future__ import annotations

import asyncio
import inspect
import json
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from aiohttp import web

from rpcsvc.http.edge import BatchSigner
from rpcsvc.verify import BadSignature, Exchange, verify_response
from tests.contract.serving import Served, serving
from tests.contract.signatures import jwks
from tests.logs import logs_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def served(shared: Served) -> Served:
    """One service: the calls below change nothing."""
    return shared


PLAN = "/api/v1/agent/swap/plan"
ENVELOPE = [
    "ok", "operation", "state", "missingInputs", "validationErrors", "nextActions", "data",
    "requestId", "error",
]  # fmt: skip
OF_THE_MACHINERY = (b"aiohttp", b"python", b"brotli", b"zstandard", b"traceback", b"secret")


class Got(NamedTuple):
    """One response."""

    status: int
    headers: dict[str, str]
    body: bytes

    def to(self, method: str, target: str, body: bytes) -> Exchange:
        """The response as an answer to that request."""
        return Exchange(
            method=method,
            target=target,
            request_body=body,
            status=self.status,
            headers=self.headers,
            body=self.body,
        )


async def answers(served: Served, raw: bytes) -> list[Got]:
    """Every response to bytes sent as they are, until the server closes the connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.client.port)
    writer.write(raw)
    found = []
    async with asyncio.timeout(30):
        with suppress(asyncio.IncompleteReadError):
            while True:
                found.append(await _read(reader))
    writer.close()
    return found


async def _read(reader: asyncio.StreamReader) -> Got:
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    first, *lines = head.removesuffix("\r\n\r\n").split("\r\n")
    pairs = (line.split(": ", 1) for line in lines)
    headers = {name.lower(): value for name, value in pairs}
    body = await reader.readexactly(int(headers.get("content-length", 0)))
    return Got(int(first.split()[1]), headers, body)


def post(*headers: bytes, to: str = PLAN, method: str = "POST") -> bytes:
    line = f"{method} {to} HTTP/1.1".encode()
    head = [line, b"host: localhost", b"content-type: application/json", b"content-length: 2"]
    return b"\r\n".join([*head, *headers, b"", b"{}"])


UNREADABLE: dict[str, tuple[bytes, int, str]] = {
    "a long header": (post(b"x-long: " + b"a" * 9000), 400, "invalid_request"),
    "a long target": (post(to="/" + "a" * 9000), 400, "invalid_request"),
    "too many headers": (post(*[b"a: b"] * 300), 400, "invalid_request"),
    "no ASCII in the path": (b"GET /caf\xe9 HTTP/1.1\r\n\r\n", 400, "invalid_request"),
    "no ASCII in the query": (b"GET /livez?\xff HTTP/1.1\r\n\r\n", 400, "invalid_request"),
    "two content types": (post(b"content-type: text/plain"), 400, "invalid_request"),
    "two lengths": (post(b"content-length: 5"), 400, "invalid_request"),
    "no HTTP": (b"hello\r\n\r\n", 400, "invalid_request"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400, "invalid_request"),
    "HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 400, "invalid_request"),
}


def must_be_ours(got: Got, status: int, code: str, state: str = "invalid_input") -> None:
    """Require an ErrorEnvelope that is also an envelope, and that does not reveal aiohttp."""
    assert got.status == status
    assert got.headers["server"] == "rpcsvc"
    assert got.headers["content-type"] == "application/json"
    reported = json.loads(got.body)
    assert list(reported) == ENVELOPE
    assert (reported["ok"], reported["state"], reported["error"]["code"]) == (False, state, code)
    assert reported["requestId"] == got.headers["x-request-id"]
    whole = (json.dumps(got.headers).encode() + got.body).lower()
    assert [word for word in OF_THE_MACHINERY if word in whole] == []


@pytest.mark.parametrize("name", UNREADABLE)
async def test_unreadable_request_gets_an_envelope(served: Served, name: str) -> None:
    raw, status, code = UNREADABLE[name]

    (got,) = await answers(served, raw)

    must_be_ours(got, status, code)


async def test_unreadable_request_is_answered_without_a_request_id(
    served: Served,
) -> None:
    (got,) = await answers(served, UNREADABLE["no HTTP"][0])

    keys = await jwks(served)
    verify_response(got.to("UNKNOWN", "/", b""), keys, now=datetime.now(UTC))
    with pytest.raises(BadSignature):
        verify_response(got.to("POST", PLAN, b""), keys)


async def test_unreadable_request_gets_its_envelope_without_signing(
    tmp_path: Path,
) -> None:
    async with serving(tmp_path, signing__enabled=False) as served:
        (got,) = await answers(served, b"hello\r\n\r\n")

    must_be_ours(got, 400, "invalid_request")
    assert not [name for name in got.headers if "sign" in name]


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd", "identity, gzip"])
@pytest.mark.parametrize("path", [PLAN, "/rpc", "/livez", "/nowhere", "/bff/v1/swap/quote"])
async def test_encoded_body_is_refused_unread(served: Served, path: str, encoding: str) -> None:
    """A body that decompresses to a thousand times its size must not stop the service."""
    raw = post(b"content-encoding: " + encoding.encode(), to=path)

    (got,) = await answers(served, raw)

    assert got.status == 415
    assert got.headers["connection"] == "close"
    assert b"without content-encoding" in got.body


@pytest.mark.parametrize("path", [PLAN, "/rpc", "/bff/v1/quote"])
async def test_wrong_content_type_is_refused_unread(served: Served, path: str) -> None:
    """The refusal does not wait for the body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", served.client.port)
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\n"
    writer.write(head.encode() + b"content-length: 100\r\n\r\n")

    async with asyncio.timeout(5):
        got = await _read(reader)

    assert got.status == 415
    verify_response(got.to("POST", path, b"whatever"), await jwks(served), now=datetime.now(UTC))
    writer.transport.abort()


async def test_identity_encoding_is_no_encoding(served: Served) -> None:
    raw = post(b"content-encoding: identity", b"connection: close")

    (got,) = await answers(served, raw)

    assert got.status == 200


async def test_http_1_0_with_transfer_encoding_is_closed(served: Served) -> None:
    """RFC 9112, section 6.1: its framing is faulty, whatever the connection header says."""
    raw = f"POST {PLAN} HTTP/1.0\r\nhost: localhost\r\nconnection: keep-alive\r\n".encode()
    raw += (
        b"content-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n"
    )

    (got,) = await answers(served, raw + post())

    must_be_ours(got, 400, "invalid_request")


@pytest.mark.parametrize("framing", [b"content-length: 1000000000", b"transfer-encoding: chunked"])
async def test_refused_body_is_read_no_further(served: Served, framing: bytes) -> None:
    """A client that goes on sending a refused body is cut off after about a megabyte."""
    _, writer = await asyncio.open_connection("127.0.0.1", served.client.port)
    writer.write(b"POST /rpc HTTP/1.1\r\nhost: localhost\r\ncontent-type: text/plain\r\n" + framing)
    writer.write(b"\r\n\r\n")
    block = b" " * 65_536
    if b"chunked" in framing:
        block = b"%x\r\n%s\r\n" % (len(block), block)

    with pytest.raises(ConnectionError):
        async with asyncio.timeout(10):
            while True:
                writer.write(block)
                await writer.drain()

    writer.transport.abort()


async def test_endless_trailers_are_refused(served: Served) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.client.port)
    writer.write(
        f"POST {PLAN} HTTP/1.1\r\nhost: [::1]\r\ncontent-type: application/json\r\n".encode()
    )
    writer.write(b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n" + b"a: b\r\n" * 10_000)

    async with asyncio.timeout(10):
        got = await _read(reader)

    must_be_ours(got, 400, "invalid_request")
    writer.transport.abort()


async def test_good_connection_that_turns_to_rubbish_is_answered(
    served: Served,
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", served.client.port)
    writer.write(post())
    assert (await _read(reader)).status == 200

    writer.write(b"\x00\x01\x02\r\n\r\n")
    must_be_ours(await _read(reader), 400, "invalid_request")

    assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("expected", [b"foo", b"100-continue, foo", b"\xff"])
@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", PLAN), ("POST", "/no/such"), ("PUT", PLAN)],
)
async def test_an_expectation_that_can_t_be_met_gets_an_envelope(
    served: Served, method: str, path: str, expected: bytes
) -> None:
    raw = post(b"expect: " + expected, b"connection: close", to=path, method=method)

    (got,) = await answers(served, raw)

    must_be_ours(got, 400, "invalid_request")
    assert "100-continue" in json.loads(got.body)["error"]["message"]
    verify_response(got.to(method, path, b"{}"), await jwks(served), now=datetime.now(UTC))


async def refused(served: Served, head: bytes, body: bytes = b"") -> tuple[int, Any]:
    """Status and error of the answer to a request with that head."""
    raw = b"%b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (head, len(body), body)
    (got,) = await answers(served, raw)
    return got.status, json.loads(got.body)["error"]


async def test_host_that_is_not_utf_8_is_misdirected(served: Served) -> None:
    for path in (b"/livez", b"/rpc", b"/bff/v1/chains", b"/nowhere"):
        status, error = await refused(served, b"GET %b HTTP/1.1\r\nhost: a\xff" % path)

        assert status == 421
        assert "a\\udcff" in error["message"]


async def test_origin_that_is_not_utf_8_is_refused_by_mcp(served: Served) -> None:
    status, error = await refused(served, POST_MCP + b"\r\norigin: \xff", LIST_TOOLS)

    assert (status, error["data"]["details"]["received"]) == (403, "\\udcff")


async def test_mcp_revision_that_is_not_utf_8_is_not_served(served: Served) -> None:
    status, error = await refused(served, POST_MCP + b"\r\nmcp-protocol-version: \xff", LIST_TOOLS)

    assert (status, error["code"], error["data"]["requested"]) == (400, -32022, "\\udcff")


async def test_origin_that_is_not_utf_8_is_no_origin_of_this_machine(served: Served) -> None:
    for origin, is_let_in in ((b"http://localhost", True), (b"http://\xff@localhost", False)):
        (got,) = await answers(served, post(b"connection: close", b"origin: " + origin))

        assert ("access-control-allow-origin" in got.headers) is is_let_in


POST_MCP = b"POST /mcp HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json"
LIST_TOOLS = b'{"jsonrpc": "2.0", "id": 1, "method": "tools/list"}'


@pytest.mark.parametrize("path", [PLAN, "/rpc", "/bff/v1/quote", "/mcp"])
@pytest.mark.parametrize(
    ("given", "is_read"),
    [
        (b"Application/JSON ; charset=utf-8", True),
        (b"application/json;a*" + b"(" * 200, True),
        (b"application/json;" + b'"' * 200, True),
        (b"application/json;a=" + b"b" * 240, False),
        (b"application/json;" + b'"' * 8_000, False),
        (b"application/json, text/plain", False),
        (b"application/json\xff", False),
        (b"", False),
    ],
)
async def test_media_type_is_read_up_to_its_parameters(
    served: Served, path: str, given: bytes, is_read: bool
) -> None:
    head = b"POST %b HTTP/1.1\r\nhost: localhost\r\ncontent-type: %b" % (path.encode(), given)
    (got,) = await answers(served, head + b"\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{}")

    assert got.status in ((200, 400) if is_read else (415,))


async def test_no_answer_leaves_its_media_type_to_guesses(served: Served) -> None:
    preflight = b"origin: http://localhost\r\naccess-control-request-method: POST"
    close = b"connection: close"
    requests = [
        post(close),
        post(close, to="/nowhere"),
        post(close, method="PUT"),
        post(close, preflight, method="OPTIONS"),
        post(close, b"content-encoding: gzip"),
        post(close, to="/rpc"),
        post(close, to="/mcp"),
        post(close, to="/llms.txt", method="GET"),
        post(close, to="/", method="GET"),
        post(close, to="/orders/1", method="GET"),
        post(close, to="/metrics", method="GET"),
        post(close, to="/health", method="GET"),
        b"hello\r\n\r\n",
    ]
    for raw in requests:
        (got,) = await answers(served, raw)
        assert got.headers["x-content-type-options"] == "nosniff", raw


async def test_refusals_before_any_limit_are_logged_once_a_minute(served: Served) -> None:
    """A request is of a few bytes, and charged to nobody."""
    with logs_of("rpcsvc.http.messages") as logs:
        for raw in (b"GET / HTTP/1.1\r\nhost: evil.example\r\n\r\n", b"hello\r\n\r\n"):
            for _ in range(50):
                await answers(served, raw)

    assert len(logs) <= 2  # one of each code, unless a test before had it logged


@pytest.mark.parametrize(
    ("header", "method", "status"),
    [
        (b"expect: foo", "POST", 400),
        (b"x-nothing: here", "PUT", 405),
        (b"content-encoding: gzip", "POST", 415),
    ],
)
async def test_early_refusal_at_rpc_is_a_json_rpc_error(
    served: Served, header: bytes, method: str, status: int
) -> None:
    (got,) = await answers(served, post(header, b"connection: close", to="/rpc", method=method))

    reported = json.loads(got.body)
    assert (got.status, reported["jsonrpc"], reported["id"]) == (status, "2.0", None)
    assert reported["error"]["code"] == -32600


async def test_client_that_waits_for_100_continue_gets_it(served: Served) -> None:
    go_on, got = await answers(served, post(b"expect: 100-continue", b"connection: close"))

    assert (go_on.status, go_on.headers, got.status) == (100, {}, 200)


async def test_error_while_answering_reveals_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(*_: Any) -> None:
        raise RuntimeError("secret")

    monkeypatch.setattr(BatchSigner, "sign", fail)

    (got,) = await answers(served, post())

    must_be_ours(got, 500, "internal_error", "internal_error")
    verify_response(got.to("POST", PLAN, b"{}"), served.up.signer.jwks())  # type: ignore[union-attr]


async def test_aiohttp_asks_its_connection_about_unreadable_requests() -> None:
    asked = inspect.signature(web.RequestHandler.handle_error)

    assert list(asked.parameters) == ["self", "request", "status", "exc", "message"]
    source = inspect.getsource(web.RequestHandler)
    assert "self.handle_error(" in source
    assert "RequestHandler(self, loop=" in inspect.getsource(web.Server.__call__)
