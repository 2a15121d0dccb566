"""The command line in this process: options, inputs, memory, transports, output.

It calls a fake service that records requests; tests/e2e/test_cli.py has real ones.
"""

from __future__ import annotations

import json
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.cli.agent.operations import KEPT_SERVICES, CliState, load_state, read_params, save_state
from rpcsvc.cli.main import build_parser, run
from rpcsvc.client.blocking import connection_to
from rpcsvc.client.transport import endpoint_of
from rpcsvc.errors import Unavailable
from rpcsvc.operations.discovery import ENVELOPE_SCHEMA
from rpcsvc.operations.dispatch import LocalService
from rpcsvc.operations.service import Operation
from rpcsvc.operations.table import OPERATIONS
from rpcsvc.settings import Settings
from rpcsvc.settlement.onchain.evm.keys import OnchainExtraMissing
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, DataDirInUse
from rpcsvc.store.backends.sqlite.migrations import migrate
from rpcsvc.store.schema import UnknownSchema
from tests.operator_cli import Envelopes

SESSION = "3f2b8c1e-7d64-4f0a-9c1b-2a5e8d7f6c90"
OTHER = "11111111-2222-4333-8444-555555555555"
ORDER = "ord_" + "0" * 26
SWAP = ["--direction", "x2u", "--chain", "42161", "--amount", "0.8", "--to", "0xabc"]

Json = dict[str, Any]


def envelope(operation: str, data: Json, *, ok: bool = True) -> Json:
    return {"ok": ok, "operation": operation, "state": "ready", "data": data, "requestId": "r"}


class FakeService(LocalService):
    """Answers with sessions and orders like the service, and keeps the requests."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, Json, str, str | None]] = []
        self.sessions: list[str | None] = []
        self.failure: Exception | None = None
        self.ok = True
        self.note = ""

    async def call(
        self,
        operation: Operation,
        params: Json,
        request_id: str,
        key: str | None,
        local_session: str | None = None,
    ) -> bytes:
        self.sessions.append(local_session)
        self.calls.append((operation.name, params, request_id, key))
        if self.failure is not None:
            raise self.failure
        return json.dumps(self._answer(operation, params)).encode()

    def _answer(self, operation: Operation, params: Json) -> Json:
        given = params.get("sessionId")
        data: Json = {"sessionId": given, "sessionSource": "request" if given else "none"}
        if operation.name in ("swap.create", "swap.execute"):
            if not given:
                data = {"sessionId": SESSION, "sessionSource": "generated"}
            data["order"] = {"orderId": ORDER}
        elif operation.name == "swap.status":
            data["order"] = {"orderId": params.get("orderId")}
        return envelope(operation.name, {**data, "note": self.note}, ok=self.ok)


class Cli(Envelopes):
    """The command line with a fake service, on a data directory."""

    def __init__(self, data_dir: Path, output: pytest.CaptureFixture[bytes]) -> None:
        self.data_dir = data_dir
        self.service = FakeService()
        self.environ: dict[str, str] = {}
        self.opening: Exception | None = None
        self.served: list[Settings] = []
        self.out, self.err = b"", ""
        self._output = output

    def __call__(self, *arguments: str) -> int:
        environ = {"RPCSVC_DATA_DIR": str(self.data_dir), **self.environ}
        try:
            return run(
                arguments, environ, serve=self._serve, local=self._local, private=NotImplemented
            )
        except SystemExit as usage:
            assert isinstance(usage.code, int)
            return usage.code
        finally:
            captured = self._output.readouterr()
            self.out, self.err = captured.out, captured.err.decode()

    async def _serve(self, settings: Settings, _load: Callable[[], Settings]) -> None:
        if self.opening is not None:
            raise self.opening
        self.served.append(settings)

    @asynccontextmanager
    async def _local(self, _settings: Settings) -> AsyncIterator[LocalService]:
        if self.opening is not None:
            raise self.opening
        yield self.service

    @property
    def sent(self) -> Json:
        return self.service.calls[-1][1]

    @property
    def state(self) -> Json:
        state: Json = json.loads((self.data_dir / "cli-state.json").read_text())
        return state


@pytest.fixture
def cli(tmp_path: Path, capsysbinary: pytest.CaptureFixture[bytes]) -> Cli:
    return Cli(tmp_path / "data", capsysbinary)


# --- commands and options --------------------------------------------------------------------


def test_the_commands_are_those_that_the_specification_names() -> None:
    assert [operation.command for operation in OPERATIONS] == [
        "agent:capabilities",
        "agent:schemas",
        "agent:swap:plan",
        "agent:swap:quote",
        "agent:swap:create",
        "agent:swap:execute",
        "agent:swap:status",
        "agent:swap:cancel",
        "agent:swap:events",
        "agent:swap:list",
        "agent:swap:check",
        "agent:swap:fund",
        "agent:swap:refund-address",
        "agent:swap:webhook-deliveries",
        "agent:support:create",
        "agent:support:get",
        "sandbox:fund",
        "sandbox:fault",
    ]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_there_is_an_option_for_each_field(operation: Operation) -> None:
    options = build_parser().parse_args([operation.command])
    names = {info.alias or name for name, info in operation.params.model_fields.items()}
    assert {f"field_{name}" for name in names} <= set(vars(options))
    assert read_params(options) == {}


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_every_example_can_be_typed_as_options(operation: Operation) -> None:
    for example in operation.examples:
        words = [operation.command]
        for name, value in example.params.items():
            flag = "--" + "".join(f"-{c.lower()}" if c.isupper() else c for c in name)
            words += [flag, json.dumps(value) if isinstance(value, bool) else str(value)]
        typed = read_params(build_parser().parse_args(words))
        # A chain's number may stay text: the service takes it as a numeric string.
        as_text = {k: str(v) if k == "chain" else v for k, v in example.params.items()}
        assert typed == as_text


def test_only_create_and_execute_take_an_idempotency_key(cli: Cli) -> None:
    for operation in OPERATIONS:
        wanted = operation.name in ("swap.create", "swap.execute")
        status = cli(operation.command, "--idempotency-key", "k-0123456789abcd")
        assert (status != 2) == wanted, operation.name
        assert ("--idempotency-key" in cli.err) != wanted


@pytest.mark.parametrize(
    ("words", "value"), [([], True), (["true"], True), (["false"], False)], ids=str
)
def test_a_boolean_option_is_sent_as_a_boolean(cli: Cli, words: list[str], value: bool) -> None:
    assert cli("agent:swap:plan", "--has-funds", *words, "--direction", "x2u") == 0
    assert cli.sent == {"direction": "x2u", "hasFunds": value}


def test_a_whole_number_option_is_sent_as_a_number(cli: Cli) -> None:
    assert cli("sandbox:fault", "--fault", "advance_clock", "--seconds", "60") == 0
    assert cli.sent == {"fault": "advance_clock", "seconds": 60}


@pytest.mark.parametrize("text", ["1_000", " 1", "1.0", "1e3", "٣", "\uff19", "0x10", "", "9" * 19])
def test_a_number_in_another_form_is_a_usage_error(cli: Cli, text: str) -> None:
    assert cli("sandbox:fault", "--fault", "advance_clock", "--seconds", text) == 2
    assert cli.service.calls == []
    assert "whole number" in cli.err


@pytest.mark.parametrize(
    "words",
    [
        ["--amount", "1", "--amount", "2"],
        ["--params", "{}", "--params", "{}"],
        ["--idempotency-key", "a-0123456789abcd", "--idempotency-key", "b-0123456789abcd"],
    ],
    ids=lambda words: str(words[0]),
)
def test_an_input_that_is_given_twice_is_a_usage_error(cli: Cli, words: list[str]) -> None:
    assert cli("agent:swap:create", *words) == 2
    assert "is given twice" in cli.err
    assert cli.service.calls == []


def test_options_are_written_out_in_full(cli: Cli) -> None:
    assert cli("agent:swap:plan", "--amo", "1") == 2
    assert "--amo" in cli.err


def test_the_order_to_fund_may_be_named_by_place(cli: Cli) -> None:
    assert cli("sandbox:fund", ORDER, "--amount", "0.1") == 0
    assert cli.sent == {"orderId": ORDER, "amount": "0.1"}
    assert cli("sandbox:fund", ORDER, "--order-id", "ord_another") == 2
    assert "give one" in cli.err


def test_a_command_is_needed(cli: Cli) -> None:
    assert cli() == 2
    assert cli.refusal["operation"] == "unknown"
    assert cli("agent:swap:nothing") == 2
    assert cli.refusal["operation"] == "unknown"
    assert cli("db") == 2
    assert cli.out == b""


def test_unknown_command_gets_the_nearest_and_no_list(cli: Cli) -> None:
    assert cli("agent:swap:plam", "--request-id", "mine", "--session-id", SESSION) == 2
    assert cli.refusal["error"]["code"] == "invalid_request"
    assert "Did you mean agent:swap:plan" in cli.err
    assert "agent:capabilities" not in cli.err
    assert (cli.answer["requestId"], cli.answer["data"]["sessionId"]) == ("mine", SESSION)
    assert cli("db", "chek") == 2
    assert "Did you mean check?" in cli.err


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda o: o.command)
def test_stdout_is_one_envelope_with_exit_2_and_3_too(cli: Cli, operation: Operation) -> None:
    given: list[str] = []
    for name, value in {"--request-id": "mine", "--url": "http://127.0.0.1:1"}.items():
        given += [name, value]
    for status, words, state, code, retryable in (
        (2, ["--bogus"], "invalid_input", "invalid_request", False),
        (2, ["--params", "[]"], "invalid_input", "invalid_request", False),
        (3, [], "unavailable", "unavailable", True),
    ):
        assert cli(operation.command, *given, *words) == status
        refused = cli.refusal
        assert list(refused) == [*ENVELOPE_SCHEMA["required"], "error"]
        assert (refused["ok"], refused["operation"]) == (False, operation.name)
        assert (refused["state"], refused["requestId"]) == (state, "mine")
        assert (refused["error"]["code"], refused["error"]["retryable"]) == (code, retryable)
        assert refused["data"] == {"network": None, "sessionId": None, "sessionSource": "none"}


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["verify", "response"], "verified"),
        (["verify", "attestation"], "verified"),
        (["verify", "nothing"], "verified"),
        (["receipt", "verify"], "proven"),
    ],
)
def test_stdout_of_a_check_that_can_not_be_made_is_one_object(
    cli: Cli, words: list[str], answer: str
) -> None:
    assert cli(*words, "--bogus") == 2
    assert cli.answer[answer] is False


# --- inputs as one object --------------------------------------------------------------------


def test_single_options_win_over_params(cli: Cli) -> None:
    whole = json.dumps({"direction": "u2x", "amount": "1", "chain": 42161})
    assert cli("agent:swap:plan", "--amount", "2", "--params", whole) == 0
    assert cli.sent == {"direction": "u2x", "amount": "2", "chain": 42161}


@pytest.mark.parametrize(
    "text",
    ["[]", "1", "", "{", '{"a": 1, "a": 2}', '{"a": NaN}', "[" * 100_000, '{"a": "\\ud800"}'],
)
def test_params_other_than_one_json_object_are_a_usage_error(cli: Cli, text: str) -> None:
    assert cli("agent:swap:plan", "--params", text) == 2
    assert cli.refusal["ok"] is False
    assert "--params" in cli.err


def test_params_from_standard_input_must_be_utf_8(tmp_path: Path) -> None:
    def plan(given: bytes) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run(
            [sys.executable, "-m", "rpcsvc", "agent:swap:plan", "--params", "-"],
            env={"RPCSVC_DATA_DIR": str(tmp_path), "LC_ALL": "C", "PYTHONIOENCODING": "ascii"},
            input=given,
            capture_output=True,
            check=False,
        )

    done = plan('{"direction": "x2é"}'.encode())
    assert done.returncode == 1
    assert json.loads(done.stdout.decode())["validationErrors"][0]["received"] == "x2é"
    refused = plan(b'{"direction": "x2\xe9"}')
    assert (refused.returncode, json.loads(refused.stdout)["ok"]) == (2, False)
    assert b"not UTF-8" in refused.stderr


def test_a_key_within_params_is_the_idempotency_key(cli: Cli) -> None:
    assert (
        cli("agent:swap:create", *SWAP, "--params", '{"idempotency-key": "k-0123456789abcd"}') == 0
    )
    assert cli.service.calls[-1][3] == "k-0123456789abcd"
    assert "idempotency-key" not in cli.sent
    assert cli("agent:swap:plan", "--params", '{"idempotency-key": "k-0123456789abcd"}') == 0
    assert cli.sent == {"idempotency-key": "k-0123456789abcd"}  # for the service to refuse by name


def test_a_key_that_is_null_in_params_is_not_left_out_in_silence(cli: Cli) -> None:
    assert cli("agent:swap:create", *SWAP, "--params", '{"idempotency-key": null}') == 2
    assert cli.service.calls == []
    assert "idempotency-key is null" in cli.err


# --- memory ----------------------------------------------------------------------------------


def test_a_created_order_is_remembered_in_a_private_file(cli: Cli) -> None:
    assert cli("agent:swap:create", *SWAP) == 0
    assert cli.answer["data"]["sessionSource"] == "generated"
    assert cli.state == {"session_id": SESSION, "order_id": ORDER}
    assert stat.S_IMODE((cli.data_dir / "cli-state.json").stat().st_mode) == 0o600
    assert [path.name for path in cli.data_dir.iterdir()] == ["cli-state.json"]


@pytest.mark.parametrize("command", ["agent:swap:create", "agent:swap:execute"])
def test_the_remembered_session_goes_beside_the_params(cli: Cli, command: str) -> None:
    save_state(cli.data_dir, CliState(OTHER, "ord_before"))
    assert cli(command, *SWAP) == 0
    assert "sessionId" not in cli.sent
    assert cli.service.sessions == [OTHER]


def test_given_session_is_used_verbatim_and_becomes_the_last(cli: Cli) -> None:
    save_state(cli.data_dir, CliState(SESSION, "ord_before"))
    assert cli("agent:swap:create", *SWAP, "--session-id", OTHER) == 0
    assert cli.sent["sessionId"] == OTHER
    assert cli.answer["data"]["sessionSource"] == "request"
    assert cli.state["session_id"] == OTHER


def test_the_last_order_is_meant_where_none_is_named(cli: Cli) -> None:
    save_state(cli.data_dir, CliState(SESSION, ORDER))
    cli("agent:swap:status")
    assert cli.sent == {"orderId": ORDER}
    cli("sandbox:fund")
    assert cli.sent == {"orderId": ORDER}
    cli("agent:support:create", "--message", "where is it?")
    assert cli.sent == {"message": "where is it?", "orderId": ORDER}
    assert cli.service.sessions[-1] == SESSION
    cli("agent:swap:status", "--order-id", "ord_named")
    assert cli.sent == {"orderId": "ord_named"}
    cli("agent:swap:plan")
    assert cli.sent == {}


def test_status_of_another_order_does_not_change_the_last(cli: Cli) -> None:
    save_state(cli.data_dir, CliState(SESSION, ORDER))
    cli("agent:swap:status", "--order-id", "ord_named")
    cli("agent:support:create", "--message", "m", "--session-id", OTHER)
    assert cli.state == {"session_id": SESSION, "order_id": ORDER}


def test_a_failed_call_leaves_the_memory_alone(cli: Cli) -> None:
    cli.service.ok = False
    assert cli("agent:swap:create", *SWAP) == 1
    assert not (cli.data_dir / "cli-state.json").exists()


def test_stateless_neither_reads_nor_writes_the_state(cli: Cli) -> None:
    cli.data_dir.mkdir(mode=0o700)
    state = cli.data_dir / "cli-state.json"
    state.write_text("broken")
    assert (
        cli("agent:swap:create", *SWAP, "--stateless", "--idempotency-key", "k-0123456789abcd") == 0
    )
    assert "sessionId" not in cli.sent
    assert state.read_text() == "broken"
    state.unlink()
    assert (
        cli("agent:swap:create", *SWAP, "--stateless", "--idempotency-key", "k-0123456789abcd") == 0
    )
    assert list(cli.data_dir.iterdir()) == []


@pytest.mark.parametrize(
    "text",
    [
        "broken",
        "[]",
        "{}",
        "null",
        '{"session_id": 1, "order_id": null}',
        '{"session_id": "line\\nbreak", "order_id": null}',
        '{"session_id": null, "order_id": null, "elsewhere": []}',
        '{"session_id": null, "order_id": null, "elsewhere": {"https://a.example": {}}}',
        "[" * 100_000,
        "\udcff",
    ],
    ids=lambda text: text[:20],
)
def test_broken_state_file_is_a_usage_error_with_advice(cli: Cli, text: str) -> None:
    cli.data_dir.mkdir(mode=0o700)
    (cli.data_dir / "cli-state.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert cli("agent:swap:status") == 2
    assert cli.refusal["ok"] is False
    assert "cli-state.json" in cli.err
    assert "Delete it, or add --stateless" in cli.err
    assert cli.service.calls == []


def test_the_state_of_an_earlier_version_without_keys_is_read(tmp_path: Path) -> None:
    (tmp_path / "cli-state.json").write_text('{"session_id": "s", "order_id": "o"}')
    assert load_state(tmp_path) == CliState("s", "o")


def test_state_of_one_service_is_sent_to_no_other(cli: Cli, stub: Stub) -> None:
    made = {"sessionId": SESSION, "sessionSource": "generated", "order": {"orderId": ORDER}}
    stub.answers({"jsonrpc": "2.0", "id": 1, "result": envelope("swap.create", made)})
    assert (
        cli("agent:swap:create", *SWAP, "--idempotency-key", "k-0123456789abcd", "--url", stub.url)
        == 0
    )
    assert cli.service.calls == []

    assert cli("agent:swap:create", *SWAP, "--idempotency-key", "k2-0123456789abc") == 0
    assert "sessionId" not in cli.sent
    save_state(cli.data_dir, CliState(OTHER, "ord_here"))
    for words in (["agent:swap:status"], ["agent:support:create", "--message", "m"]):
        cli(*words)
        assert cli.sent["orderId"] == "ord_here"
        cli(*words, "--url", stub.url.replace("http://", "HTTP://") + "/api/v1/")
        assert stub.requests[-1][2]["params"]["orderId"] == ORDER
        cli(*words, "--url", f"{stub.url}/another")
        assert "orderId" not in stub.requests[-1][2]["params"]
        assert "x-agent-local-session" not in stub.requests[-1][1]
    assert (
        cli("agent:swap:create", *SWAP, "--idempotency-key", "k-0123456789abcd", "--url", stub.url)
        == 0
    )
    assert "sessionId" not in stub.requests[-1][2]["params"]
    assert stub.requests[-1][1]["x-agent-local-session"] == SESSION


def test_services_that_were_called_long_ago_are_forgotten(tmp_path: Path) -> None:
    save_state(tmp_path, CliState("here"))
    for number in range(KEPT_SERVICES + 1):
        save_state(tmp_path, CliState(str(number)), f"https://{number}.example")
    assert load_state(tmp_path) == CliState("here")
    assert load_state(tmp_path, "https://0.example") == CliState()
    assert load_state(tmp_path, "https://1.example") == CliState("1")


def test_an_answer_is_printed_even_if_it_cannot_be_remembered(cli: Cli) -> None:
    cli.data_dir.write_text("a file where the data directory should be")
    assert cli("agent:swap:create", *SWAP) == 0
    assert cli.answer["data"]["order"]["orderId"] == ORDER
    assert "could not be saved" in cli.err


# --- output ----------------------------------------------------------------------------------


def test_answer_is_one_line_without_a_terminal_unless_pretty(cli: Cli) -> None:
    cli("agent:capabilities")
    compact = cli.out
    assert compact.count(b"\n") == 1
    cli("agent:capabilities", "--compact")
    assert cli.out == compact
    cli("agent:capabilities", "--pretty")
    assert cli.out.count(b"\n") > 5
    assert json.loads(cli.out) == json.loads(compact)
    assert cli("agent:capabilities", "--pretty", "--compact") == 2


@pytest.mark.parametrize("text", ["é 漢", "\U0001f980", "half a pair: \ud83e", '"\\\n\0'])
def test_cli_prints_any_text_as_json_in_utf_8(cli: Cli, text: str) -> None:
    cli.service.note = text
    assert cli("agent:capabilities") == 0
    assert json.loads(cli.out.decode())["data"]["note"] == text


def test_an_operation_that_answers_not_ok_exits_with_1(cli: Cli) -> None:
    cli.service.ok = False
    assert cli("agent:capabilities") == 1
    assert cli.answer["ok"] is False


def test_good_request_id_is_passed_on_and_a_bad_one_replaced(cli: Cli) -> None:
    cli("agent:capabilities", "--request-id", "mine:1")
    assert cli.service.calls[-1][2] == "mine:1"
    for bad in ("", "a b", "é", "x" * 129):
        cli("agent:capabilities", "--request-id", bad)
        assert cli.service.calls[-1][2].startswith("req_")


def test_a_service_error_before_the_operation_is_an_envelope(cli: Cli) -> None:
    cli.service.failure = Unavailable("The order book can't be read.")
    assert cli("agent:capabilities", "--request-id", "mine") == 1
    answer = cli.answer
    assert (answer["state"], answer["requestId"]) == ("unavailable", "mine")
    assert answer["error"]["retryable"] is True
    assert answer["data"]["network"] == "sandbox"
    assert [step["action"] for step in answer["nextActions"]] == ["retry"]


@pytest.mark.parametrize(
    ("error", "status", "text"),
    [
        (DataDirInUse("in use"), 3, "does not answer on its socket"),
        (UnknownSchema("newer schema"), 2, "newer schema"),
        (PermissionError(13, "Permission denied"), 2, "--data-dir"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_unopenable_data_directory_is_reported_in_one_line(
    cli: Cli, error: Exception, status: int, text: str
) -> None:
    cli.opening = error
    for command in (["agent:capabilities"], ["demo", "--data-dir", str(cli.data_dir)]):
        assert cli(*command) == status
        assert (cli.out == b"") is (command[0] == "demo")
        assert text in cli.err
        assert cli.err.count("\n") == 1


# --- transports ------------------------------------------------------------------------------


class Stub:
    """An HTTP server with one answer to every POST; it keeps the requests."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, dict[str, str], Json]] = []
        self.status, self.body = 200, b""
        stub = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                sent = self.rfile.read(int(self.headers["content-length"]))
                headers = {name.lower(): value for name, value in self.headers.items()}
                stub.requests.append((self.path, headers, json.loads(sent)))
                self.send_response(stub.status)
                self.send_header("content-length", str(len(stub.body)))
                self.end_headers()
                self.wfile.write(stub.body)

            def log_message(self, *_: Any) -> None:
                """Write nothing: the tests check stderr."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"

    def answers(self, message: Any, status: int = 200) -> None:
        self.status, self.body = status, json.dumps(message).encode()


@pytest.fixture
def stub() -> Iterator[Stub]:
    made = Stub()
    made.answers({"jsonrpc": "2.0", "id": 1, "result": envelope("x", {})})
    thread = threading.Thread(target=made.server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


def test_url_call_is_json_rpc_with_key_token_and_request_id(cli: Cli, stub: Stub) -> None:
    arguments = [
        "--idempotency-key",
        "k-0123456789abcd",
        "--token",
        "secret",
        "--request-id",
        "mine",
    ]
    assert cli("agent:swap:create", *SWAP, *arguments, "--url", stub.url + "/base/") == 0
    path, headers, message = stub.requests[0]
    assert path == "/base/rpc"
    assert headers["x-agent-rpc-token"] == "secret"
    assert headers["x-request-id"] == "mine"
    assert headers["content-type"] == "application/json"
    assert message["jsonrpc"] == "2.0"
    assert message["method"] == "service.swap.create"
    assert message["params"] == {
        "direction": "x2u",
        "chain": "42161",
        "amount": "0.8",
        "to": "0xabc",
        "idempotency-key": "k-0123456789abcd",
    }
    assert cli.service.calls == []


def test_the_demo_makes_no_order_where_money_is_real(cli: Cli, stub: Stub) -> None:
    data = {"network": "mainnet", "quote": {}, "order": {"orderId": ORDER}}
    stub.answers({"jsonrpc": "2.0", "id": 1, "result": envelope("x", data)})
    assert cli("demo", "--url", stub.url) == 1
    assert b"the demo is for a sandbox" in cli.out
    assert [message["method"] for _, _, message in stub.requests] == ["service.swap.plan"]


FOREIGN: list[Json] = [
    envelope("x", {}),
    envelope("x", {"network": "sandbox"}),
    {**envelope("x", {"network": "sandbox"}), "missingInputs": "to"},
    {**envelope("x", {"network": "sandbox"}), "missingInputs": []},
    {**envelope("x", {"network": "sandbox"}), "state": ["ready"]},
    envelope("x", {}, ok=False),
    {**envelope("x", {}, ok=False), "error": "no"},
]


@pytest.mark.parametrize("answer", FOREIGN)
def test_the_demo_stops_at_a_service_that_is_another(cli: Cli, stub: Stub, answer: Json) -> None:
    stub.answers({"jsonrpc": "2.0", "id": 1, "result": answer})
    assert cli("demo", "--url", stub.url) == 1
    assert b"The demo stops: another service" in cli.out


def test_the_demo_gives_the_terminal_no_orders_of_a_stranger(cli: Cli, stub: Stub) -> None:
    error = {"code": "unavailable", "message": "\x1b[2J\x07gone"}
    answer = {**envelope("x", {}, ok=False), "error": error}
    stub.answers({"jsonrpc": "2.0", "id": 1, "result": answer})
    assert cli("demo", "--url", stub.url) == 1
    assert rb"swap.plan answered unavailable: \u001b[2J\u0007gone" in cli.out


HOSTILE = "\x9b2J\x7f\u202eegnahcxe\u2069"


@pytest.mark.parametrize("pretty", ["--pretty", "--compact"])
def test_operation_gives_the_terminal_no_orders_of_a_stranger(
    cli: Cli, stub: Stub, pretty: str
) -> None:
    answer = envelope("x", {"brand": HOSTILE, HOSTILE: "Zoë"})
    stub.body = json.dumps(
        {"jsonrpc": "2.0", "id": 1, "result": answer}, ensure_ascii=False
    ).encode()
    assert cli("agent:capabilities", pretty, "--url", stub.url) == 0
    assert cli.answer["data"] == {"brand": HOSTILE, HOSTILE: "Zoë"}
    shown = cli.out.decode()
    assert "Zoë" in shown
    assert all(line.isprintable() for line in shown.split("\n"))


def test_url_and_token_can_come_from_the_environment(cli: Cli, stub: Stub) -> None:
    token = "a-token-of-good-length-for-a-server"
    cli.environ = {"RPCSVC_URL": stub.url, "AGENT_RPC_TOKEN": f"{token},an-older-token-to-rotate"}
    assert cli("agent:capabilities") == 0
    assert stub.requests[0][1]["x-agent-rpc-token"] == token
    assert "x-request-id" not in stub.requests[0][1]
    cli("agent:capabilities", "--token", "another")
    assert stub.requests[1][1]["x-agent-rpc-token"] == "another"


def test_the_methods_carry_the_brand(cli: Cli, stub: Stub) -> None:
    cli.environ = {"RPCSVC_BRAND__SLUG": "acme"}
    assert cli("agent:swap:plan", "--url", stub.url) == 0
    assert stub.requests[0][2]["method"] == "acme.swap.plan"


@pytest.mark.parametrize(
    ("code", "state"),
    [
        ("unauthorized", "invalid_input"),
        ("unknown_method", "not_found"),
        ("rate_limited", "rate_limited"),
        ("internal_error", "internal_error"),
        ("invalid_json", "invalid_input"),
    ],
)
def test_a_json_rpc_error_becomes_an_envelope(cli: Cli, stub: Stub, code: str, state: str) -> None:
    data = {"code": code, "retryable": True, "requestId": "theirs", "details": {"limit": 3}}
    error = {"code": -32001, "message": "What to do.", "data": data}
    stub.answers({"jsonrpc": "2.0", "id": None, "error": error}, 401)
    assert cli("agent:swap:create", *SWAP, "--url", stub.url) == 1
    assert cli.answer == {
        "ok": False,
        "operation": "swap.create",
        "state": state,
        "missingInputs": [],
        "validationErrors": [],
        "nextActions": [
            {
                "action": "retry",
                "description": "Send the same call again later, with the same idempotency key"
                " if it had one.",
            }
        ],
        "data": {"network": None, "sessionId": None, "sessionSource": "none"},
        "requestId": "theirs",
        "error": {
            "code": code,
            "message": "What to do.",
            "retryable": True,
            "details": {"limit": 3},
        },
    }
    assert not (cli.data_dir / "cli-state.json").exists()


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"<html>",
        b"\xff",
        b"[]",
        b"null",
        b"{}",
        b'{"result": null}',
        b'{"result": {}}',
        b'{"result": {"ok": 1, "data": {}}}',
        b'{"result": {"ok": true, "data": []}}',
        b'{"error": "no"}',
        b'{"error": {}}',
        b"[" * 100_000,
    ],
    ids=lambda body: body[:24].decode("latin-1"),
)
def test_an_answer_that_is_not_the_services_exits_with_3(cli: Cli, stub: Stub, body: bytes) -> None:
    stub.status, stub.body = 404, body
    assert cli("agent:capabilities", "--url", stub.url) == 3
    assert cli.refusal["ok"] is False
    assert "(HTTP 404) is not this service's /rpc" in cli.err


def test_server_that_hangs_up_exits_3_and_warns_it_may_have_run(cli: Cli) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def hang_up() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(65_536)

        thread = threading.Thread(target=hang_up)
        thread.start()
        port = listener.getsockname()[1]
        status = cli("agent:capabilities", "--url", f"http://127.0.0.1:{port}")
        thread.join()
    assert (status, cli.refusal["state"]) == (3, "unavailable")
    assert "may have been carried out" in cli.err


def test_nobody_at_the_url_exits_with_3(cli: Cli) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        assert cli("agent:capabilities", "--url", f"http://127.0.0.1:{port}") == 3
    assert (cli.refusal["ok"], cli.err.count("\n")) == (False, 1)
    assert "No service answers at" in cli.err


@pytest.mark.parametrize(
    "url",
    [
        "somewhere",
        "ftp://host",
        "http://",
        "http://host:port",
        "http://host:99999",
        "http://ho st",
        "http://[::1",
        "http://user:password@host",
        "http://host/?q",
        "http://host/#f",
        "http://host/é",
        "http://host/a b",
    ],
)
def test_a_url_that_cannot_be_one_is_a_usage_error(cli: Cli, url: str) -> None:
    assert cli("agent:capabilities", "--url", url) == 2
    assert (cli.refusal["ok"], cli.err.count("\n")) == (False, 1)
    assert "root URL" in cli.err


@pytest.mark.parametrize(
    "url", ["http://swap.example", "http://192.0.2.1:8080", "http://127.0.0.1.swap.example"]
)
@pytest.mark.parametrize("command", ["agent:capabilities", "health"])
def test_plain_http_is_spoken_on_this_machine_only(cli: Cli, command: str, url: str) -> None:
    """A man in the middle could read the token, and answer with his own deposit address."""
    assert cli(command, "--url", url, "--token", "a-token-that-is-long-enough") == 2
    assert (cli.out == b"", cli.err.count("\n")) == (command == "health", 1)
    assert "use https://" in cli.err


@pytest.mark.parametrize("host", ["localhost", "127.0.0.2:8080", "[::1]"])
def test_plain_http_is_good_enough_on_this_machine(host: str) -> None:
    connection = connection_to(endpoint_of(f"http://{host}"))
    named, _, port = host.rpartition(":") if host.endswith("8080") else (host, "", "80")
    assert (connection.host, connection.port) == (named.strip("[]"), int(port))


def test_an_https_url_is_called_over_tls() -> None:
    endpoint = endpoint_of("https://swap.example/base/")
    connection = connection_to(endpoint)
    assert (endpoint.url, connection.port) == ("https://swap.example/base", 443)
    assert type(connection).__name__ == "HTTPSConnection"


@pytest.mark.parametrize("token", ["é", "a\nb", "\udcff"])
def test_a_token_that_no_header_can_hold_is_a_usage_error(cli: Cli, stub: Stub, token: str) -> None:
    assert cli("agent:capabilities", "--url", stub.url, "--token", token) == 2
    assert stub.requests == []
    assert token not in cli.err


def test_a_socket_file_that_nobody_listens_on_is_passed_by(cli: Cli) -> None:
    cli.data_dir.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(cli.data_dir / "rpcsvc.sock"))
    assert cli("agent:capabilities") == 0
    assert len(cli.service.calls) == 1


# --- the commands that run the service -------------------------------------------------------


def test_serve_passes_its_flags_on(cli: Cli) -> None:
    assert cli("serve", "--port", "9999", "--data-dir", str(cli.data_dir), "--host", "::1") == 0
    (settings,) = cli.served
    assert (settings.host, settings.port, settings.data_dir) == ("::1", 9999, cli.data_dir)


@pytest.mark.parametrize(
    "error",
    [DataDirInUse("in use"), UnknownSchema("newer"), OSError(98, "Address already in use")],
    ids=lambda error: type(error).__name__,
)
def test_a_service_that_cannot_start_is_a_usage_error(cli: Cli, error: Exception) -> None:
    cli.opening = error
    assert cli("serve") == 2
    assert cli.err.count("\n") == 1


@pytest.mark.parametrize("word", ["none", "-1", "65536", "80 80"])
def test_a_port_that_is_none_is_a_usage_error(cli: Cli, word: str) -> None:
    assert cli("serve", "--port", word) == 2
    assert "port" in cli.err
    assert cli.served == []


def test_config_check_masks_secrets_and_names_origins(cli: Cli) -> None:
    cli.environ = {"AGENT_RPC_TOKEN": "a-very-secret-token", "RPCSVC_PORT": "9999"}
    assert cli("config", "check") == 0
    assert b"a-very-secret-token" not in cli.out
    assert b"env RPCSVC_PORT" in cli.out


def test_config_check_fails_on_what_serve_would_refuse(cli: Cli) -> None:
    cli.environ = {"RPCSVC_HOST": "192.0.2.1"}
    assert cli("config", "check") == 2
    assert b"192.0.2.1" in cli.out
    assert cli.err


_ONCHAIN = {"RPCSVC_ENGINE": "onchain", "RPCSVC_ONCHAIN__NODES": "arbitrum=http://127.0.0.1:1"}
_UPSTREAM = {"RPCSVC_ENGINE": "upstream", "RPCSVC_UPSTREAM__URL": "https://a.example"}


@pytest.mark.parametrize(
    ("environ", "named"),
    [
        ({"RPCSVC_ENGINE": "onchain"}, "onchain.nodes"),
        ({**_ONCHAIN, "RPCSVC_ONCHAIN__NODES": "arbitrun=http://127.0.0.1:1"}, "onchain.nodes"),
        ({**_ONCHAIN, "RPCSVC_ONCHAIN__USDC_CONFIRMATIONS": "etherium=0=9"}, "onchain.usdc"),
        ({**_ONCHAIN, "RPCSVC_ONCHAIN__XMR_CONFIRMATIONS": "1=10"}, "onchain"),
        ({**_ONCHAIN, "RPCSVC_ONCHAIN__XMR_CONFIRMATIONS": "0=ten"}, "onchain.xmr_confirmations"),
        ({**_ONCHAIN, "RPCSVC_ONCHAIN__GAS_PRICES": "POL=2"}, "onchain.gas_prices"),
        ({**_ONCHAIN, "RPCSVC_ONCHAIN__WALLET_URL": "nowhere"}, "onchain"),
        ({**_ONCHAIN, "RPCSVC_RATES__SOURCES": "kraken"}, "rates"),
        ({"RPCSVC_ENGINE": "upstream"}, "upstream.url"),
        ({**_UPSTREAM, "RPCSVC_UPSTREAM__URL": "http://a.example"}, "upstream"),
        ({**_UPSTREAM, "RPCSVC_INTEGRATORS": "a:1:" + "0" * 64}, "integrators"),
        ({"RPCSVC_CHAINS_FILE": "no such file"}, "chains_file"),
        ({"RPCSVC_CHAINS_FILE": __file__}, "chains_file"),
    ],
)
def test_config_check_refuses_what_the_engines_would_refuse(
    cli: Cli, environ: dict[str, str], named: str
) -> None:
    cli.environ = environ
    assert cli("config", "check") == 2
    assert b"env RPCSVC_" in cli.out
    assert cli.err.startswith(f"rpcsvc: {named}")


@pytest.mark.parametrize("environ", [_ONCHAIN, _UPSTREAM])
def test_config_check_takes_what_the_engines_take(cli: Cli, environ: dict[str, str]) -> None:
    cli.environ = environ
    assert cli("config", "check") == 0


@pytest.mark.parametrize("url", ["http://u:k3y@127.0.0.1:1", "https://u:k3y/k3y@127.0.0.1:1/"])
def test_a_password_in_a_url_is_not_shown(cli: Cli, url: str) -> None:
    assert cli("agent:capabilities", "--url", url) == 2
    assert "127.0.0.1:1" in cli.err
    assert "k3y" not in cli.err


def test_db_check_without_a_database_exits_with_1(cli: Cli) -> None:
    assert cli("db", "check") == 1
    assert b"there is no database" in cli.out


def test_db_backup_without_a_database_exits_with_2(cli: Cli, tmp_path: Path) -> None:
    assert cli("db", "backup", str(tmp_path / "copy")) == 2
    assert "There is no database" in cli.err


def test_db_backup_tells_its_progress_on_request(cli: Cli, tmp_path: Path) -> None:
    cli.data_dir.mkdir(mode=0o700)
    with closing(sqlite3.connect(cli.data_dir / DATABASE_NAME, isolation_level=None)) as made:
        migrate(made)
    assert cli("db", "backup", "--progress", str(tmp_path / "copy")) == 0
    assert "copying: 100 %\nchecking the file: 0 %\n" in cli.err
    assert "checking the books: 90 %\n" in cli.err
    assert cli("db", "check") == 0
    assert cli.err == "", "no terminal"


def test_asking_a_server_loads_no_server() -> None:
    code = (
        "import sys, rpcsvc.__main__;"
        "print({'aiohttp', 'aiosqlite', 'jsonrpcserver', 'sqlite3'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


# --- engine onchain --------------------------------------------------------------------------


@pytest.mark.parametrize("command", [("agent:capabilities",), ("demo",)], ids=lambda c: c[0])
def test_no_command_becomes_the_service_of_real_wallets(cli: Cli, command: tuple[str, ...]) -> None:
    cli.environ = {"RPCSVC_ENGINE": "onchain"}
    assert cli(*command, "--data-dir", str(cli.data_dir)) == 3
    assert cli.service.calls == []
    assert "rpcsvc serve" in cli.err


def test_a_missing_extra_is_said_in_a_line(cli: Cli) -> None:
    cli.opening = OnchainExtraMissing("eth_account")
    assert cli("serve") == 2
    assert "rpcsvc[onchain]" in cli.err
    assert cli.err.count("\n") == 1
