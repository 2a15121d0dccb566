"""How the command line handles answers of the service, of a gateway, and ones that are cut off.

It calls an HTTP server with scripted answers.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.cli.agent import operations
from rpcsvc.cli.agent.operations import CliState, load_state
from rpcsvc.cli.context import Context
from rpcsvc.cli.main import build_parser, run
from rpcsvc.client import blocking
from rpcsvc.client.blocking import finished, rpc_calls
from rpcsvc.client.transport import endpoint_of
from rpcsvc.errors import RateLimited
from rpcsvc.operations.dispatch import failure
from tests.command_line import clean_environ
from tests.operator_cli import Envelopes

SWAP = ["--direction", "x2u", "--chain", "42161", "--amount", "0.8", "--to", "0xabc"]
SESSION = "3f2b8c1e-7d64-4f0a-9c1b-2a5e8d7f6c90"
OTHER = "11111111-2222-4333-8444-555555555555"
ORDER = "ord_" + "0" * 26
EXECUTE = ["agent:swap:execute", *SWAP, "--idempotency-key", "k-0123456789abcd"]

Json = dict[str, Any]


class Upstream:
    """Gives scripted answers to POSTs, repeating the last; keeps path and body of each."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, bytes]] = []
        self.sessions: list[str | None] = []
        self.answers: list[tuple[int, bytes]] = []
        upstream = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                upstream.sessions.append(self.headers["x-agent-local-session"])
                body = self.rfile.read(int(self.headers["content-length"]))
                upstream.asked.append((self.path, body))
                answers = upstream.answers
                self.reply(*(answers.pop(0) if len(answers) > 1 else answers[0]))

            def do_GET(self) -> None:
                self.reply(*upstream.answers[0])

            def reply(self, status: int, text: bytes) -> None:
                self.send_response(status)
                self.send_header("content-length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: Any) -> None:
                """Write nothing: the tests check stderr."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answer(self, *messages: Any, status: int = 200) -> None:
        self.answers = [(status, json.dumps(message).encode()) for message in messages]

    def sent(self, index: int) -> Json:
        message: Json = json.loads(self.asked[index][1])
        return message


@pytest.fixture
def upstream() -> Iterator[Upstream]:
    made = Upstream()
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


class Cli(Envelopes):
    """The command line and its output."""

    def __init__(self, data_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.data_dir = data_dir
        self._capsys = capsys

    def __call__(self, *words: str, **settings: str) -> int:
        environ = {"RPCSVC_DATA_DIR": str(self.data_dir), **settings}
        status = run(words, environ, serve=_never, local=_never, private=_never)
        self.out, self.err = self._capsys.readouterr()
        return status


def _never(*_: Any) -> Any:
    raise AssertionError("no service is needed in this process")


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path / "data", capsys)


def result(data: Json, **more: Any) -> Json:
    """A JSON-RPC response that holds an envelope."""
    envelope = {"ok": True, "operation": "x", "state": "ready", "data": data, **more}
    return {"jsonrpc": "2.0", "id": 1, "result": envelope}


def refusal(code: str, *, retryable: bool) -> Json:
    """A JSON-RPC error as this service writes it."""
    data = {"code": code, "message": "Why.", "retryable": retryable, "requestId": "theirs"}
    error = {"code": -32001, "message": "Why.", "data": data}
    return {"jsonrpc": "2.0", "id": None, "error": error}


# --- answers of other servers ----------------------------------------------------------------

GATEWAYS = [
    {"error": {"message": "upstream timed out"}},
    {"error": {"code": 504, "message": "upstream timed out"}},
    {"error": {"code": "timeout", "message": "upstream timed out"}, "jsonrpc": "2.0"},
    {"error": {"code": True, "message": "m", "data": {"code": "timeout"}}, "jsonrpc": "2.0"},
    # Another JSON-RPC server.
    {"error": {"code": -32603, "message": "upstream timed out"}, "jsonrpc": "2.0", "id": 1},
    {"error": {"code": -32603, "message": "m", "data": {"code": 1}}, "jsonrpc": "2.0", "id": 1},
    {"result": {"ok": False, "data": {}}},
]


@pytest.mark.parametrize("status", [200, 408, 500, 502, 503, 504])
@pytest.mark.parametrize("body", GATEWAYS, ids=str)
def test_gateway_error_says_that_the_order_may_exist(
    cli: Cli, upstream: Upstream, body: Json, status: int
) -> None:
    upstream.answer(body, status=status)
    assert cli(*EXECUTE, "--url", upstream.url) == 3
    assert (cli.refusal["ok"], cli.err.count("\n")) == (False, 1)
    assert f"(HTTP {status}) is not this service's /rpc" in cli.err
    assert "may have been carried out: repeat it with the same idempotency key" in cli.err
    assert len(upstream.asked) == 1


@pytest.mark.parametrize(
    ("status", "is_elsewhere"),
    [(301, True), (404, True), (405, True), (401, False), (413, False), (429, False)],
)
def test_refusal_on_the_way_says_that_nothing_was_carried_out(
    cli: Cli, upstream: Upstream, status: int, is_elsewhere: bool
) -> None:
    upstream.answer({"error": {"message": "no"}}, status=status)
    assert cli(*EXECUTE, "--url", upstream.url) == 3
    assert "may have been carried out" not in cli.err
    hint = "Give the service's root URL, such as http://127.0.0.1:8080"
    assert (hint in cli.err) == is_elsewhere


def test_the_services_own_internal_error_stays_its_answer(cli: Cli, upstream: Upstream) -> None:
    upstream.answer(refusal("internal_error", retryable=True), status=500)
    assert cli(*EXECUTE, "--url", upstream.url) == 1
    assert (cli.answer["state"], cli.answer["error"]["retryable"]) == ("internal_error", True)


@pytest.mark.parametrize(
    ("given", "root"),
    [
        ("/api/v1", ""),
        ("/api/v1/", ""),
        ("/base/api/v1", "/base"),
        ("/base", "/base"),
        ("/my-api/v1", "/my-api/v1"),
        ("/api/v1/more", "/api/v1/more"),
    ],
)
def test_the_base_url_of_the_agent_api_names_the_service_too(given: str, root: str) -> None:
    assert endpoint_of("https://swap.example" + given).url == "https://swap.example" + root


def test_a_call_to_the_base_url_of_the_agent_api_arrives(cli: Cli, upstream: Upstream) -> None:
    upstream.answer(result({}))
    assert cli("agent:capabilities", "--url", upstream.url + "/api/v1") == 0
    assert upstream.asked[0][0] == "/rpc"


# --- refused JSON-RPC messages as envelopes ----------------------------------------------------


def test_repeatable_failure_is_retryable_as_in_the_envelopes(cli: Cli, upstream: Upstream) -> None:
    upstream.answer(refusal("rate_limited", retryable=True), status=429)
    assert cli("agent:capabilities", "--url", upstream.url) == 1
    own = json.loads(failure("capabilities", RateLimited("Why."), "theirs", cli.answer["data"]))
    assert cli.answer == own
    assert [step["action"] for step in own["nextActions"]] == ["retry"]


def test_error_that_is_not_retryable_offers_no_retry(cli: Cli, upstream: Upstream) -> None:
    upstream.answer(refusal("unauthorized", retryable=False), status=401)
    assert cli("agent:capabilities", "--url", upstream.url) == 1
    assert cli.answer["nextActions"] == []


def test_network_of_a_url_is_not_read_from_local_settings(cli: Cli, upstream: Upstream) -> None:
    upstream.answer(refusal("unauthorized", retryable=False), status=401)
    assert cli("agent:capabilities", "--url", upstream.url) == 1
    assert list(cli.answer["data"]) == ["network", "sessionId", "sessionSource"]
    assert cli.answer["data"]["network"] is None


@pytest.mark.parametrize(
    ("settings", "network"),
    [
        ({}, "sandbox"),
        ({"RPCSVC_ENGINE": "upstream", "RPCSVC_UPSTREAM__MONERO_NETWORK": "stagenet"}, "stagenet"),
        ({"RPCSVC_ENGINE": "onchain", "RPCSVC_ONCHAIN__MONERO_NETWORK": "regtest"}, "regtest"),
    ],
    ids=["sandbox", "upstream", "onchain"],
)
def test_server_of_the_data_directory_uses_its_network(
    cli: Cli,
    upstream: Upstream,
    settings: dict[str, str],
    network: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    upstream.answer(refusal("internal_error", retryable=True), status=500)
    by_socket = endpoint_of(upstream.url)  # a socket to Cli, which gives no --url
    monkeypatch.setattr(operations, "find_endpoint", lambda *_: by_socket)
    assert cli("agent:capabilities", **settings) == 1
    assert cli.answer["data"]["network"] == network


# --- modules that a call loads ----------------------------------------------------------------

HEAVY = {
    "Cryptodome", "aiohttp", "aiosqlite", "asyncio", "jinja2", "jsonrpcserver", "monero", "nacl",
    "pydantic", "sqlite3", "structlog", "rpcsvc.domain", "rpcsvc.operations", "rpcsvc.orders",
    "rpcsvc.settings", "rpcsvc.signing", "rpcsvc.store",
}  # fmt: skip


def test_call_loads_no_module_that_only_the_service_needs(
    upstream: Upstream, tmp_path: Path
) -> None:
    """Importing any of them takes longer than the call."""
    upstream.answer(result({}))
    words = ["agent:swap:plan", "--direction", "x2u", "--url", upstream.url]
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "rpcsvc", *words],
        env={**clean_environ(), "RPCSVC_DATA_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=True,
    )
    loaded = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "rpcsvc.client.blocking" in loaded
    assert HEAVY & loaded == set()


@pytest.mark.parametrize("url", [(), ("--url", "http://127.0.0.1:1")], ids=["socket", "url"])
def test_service_without_settings_is_that_of_the_defaults(
    url: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = build_parser().parse_args(["agent:swap:plan", *url])
    context = Context(options, {}, _never, _never, _never)
    assumed = operations.service_of(context)
    monkeypatch.setattr(Context, "data_dir_alone", lambda _self: None)
    assert assumed == operations.service_of(context)


@pytest.mark.parametrize(
    "settings",
    [
        {"RPCSVC_PORT": "no"},
        {"RPCSVC_PROT": "1"},
        {"rpcsvc_data_dir": "d"},
        {"RPCSVC_DATA_DIR": ""},
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_call_with_a_bad_setting_sends_nothing(
    cli: Cli, upstream: Upstream, settings: dict[str, str]
) -> None:
    upstream.answer(result({}))
    assert cli("agent:swap:plan", "--url", upstream.url, **settings) == 2
    assert upstream.asked == []


# --- requests --------------------------------------------------------------------------------


def test_message_of_8000_characters_fits_in_any_script(cli: Cli, upstream: Upstream) -> None:
    upstream.answer(result({}))
    message = "\U0001f980" * 8_000
    assert cli("agent:support:create", "--message", message, "--url", upstream.url) == 0
    assert len(upstream.asked[0][1]) < 64 * 1024
    assert upstream.sent(0)["params"]["message"] == message


def test_lone_surrogate_is_sent_escaped_to_be_refused(upstream: Upstream) -> None:
    upstream.answer(result({}))
    calls = rpc_calls(endpoint_of(upstream.url), None)
    finished(calls.call("swap.list", {"sessionId": "\ud83e"}))
    assert b'"\\ud83e"' in upstream.asked[0][1]


# --- memory ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "data",
    [
        {"order": None},
        {"order": []},
        {"order": {"orderId": 5}, "sessionId": SESSION},
        {"order": {"orderId": ORDER}, "sessionId": {}},
    ],
    ids=json.dumps,
)
def test_an_answer_that_is_no_order_is_shown_and_not_remembered(
    cli: Cli, upstream: Upstream, data: Json
) -> None:
    upstream.answer(result(data))
    assert cli(*EXECUTE, "--url", upstream.url) == 0
    assert cli.answer["data"] == data
    assert load_state(cli.data_dir, upstream.url) == CliState()


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_an_answer_that_is_no_json_is_not_shown(
    cli: Cli, upstream: Upstream, constant: str
) -> None:
    upstream.answer(result({"amount": float(constant)}))
    assert cli(*EXECUTE, "--url", upstream.url) == 3
    assert cli.refusal["state"] == "unavailable"


def test_oversized_answer_is_not_read_to_its_end(
    cli: Cli, upstream: Upstream, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(blocking, "LARGEST_ANSWER", 1000)
    upstream.answer(result({"text": "x" * 1000}))
    assert cli("agent:capabilities", "--url", upstream.url) == 3
    assert "more than 1000 bytes" in cli.err
    assert cli("health", "--url", upstream.url) == 3
    assert "more than 1000 bytes" in cli.err


def test_health_escapes_control_characters_of_an_answer(cli: Cli, upstream: Upstream) -> None:
    upstream.answers = [(200, b"\x1b]0;owned\x07\x1b[2J{\n}")]
    assert cli("health", "--url", upstream.url) == 0
    assert cli.out == "\\u001b]0;owned\\u0007\\u001b[2J{\n}\n"
