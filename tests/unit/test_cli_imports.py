"""What a command of the CLI imports, and that a branch of its tree is as it is in the whole tree.

A probe runs ``rpcsvc health`` every few seconds: what it imports is what it costs.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer
from typing import Any

import pytest

from rpcsvc.cli import client
from rpcsvc.cli import main as cli
from rpcsvc.cli.main import build_parser, run
from rpcsvc.operations.table import OPERATIONS
from rpcsvc.settings_plain import PLAIN

# Runs a command line, then writes its exit status and what it imported.
RUN = """
import sys
before = set(sys.modules)
from rpcsvc.__main__ import main
try:
    main()
except SystemExit as ended:
    status = ended.code
loaded = sorted(set(sys.modules) - before)
import json
sys.stderr.write(json.dumps([status, loaded]))
"""
CONTAINER = {"RPCSVC_HOST": "0.0.0.0", "RPCSVC_PORT": "8443"}
SIDECAR = {
    "RPCSVC_HOST": "127.0.0.1",
    "RPCSVC_PORT": "8080",
    "AGENT_RPC_TOKEN": "correct-horse-battery",
}
TREE = build_parser()


class Probed(BaseHTTPRequestHandler):
    """Answers as a healthy service does."""

    def do_GET(self) -> None:
        self.wfile.write(b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{"status":"ok"}')


@contextmanager
def listening(data_dir: Path) -> Iterator[None]:
    """What a running service looks like from outside."""
    data_dir.mkdir(mode=0o700)
    with ThreadingUnixStreamServer(str(data_dir / "rpcsvc.sock"), Probed) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield
        finally:
            server.shutdown()
            thread.join()


def carried_out(cwd: Path, *words: str, **environ: str) -> tuple[int, str, set[str]]:
    """The exit status of a command line, its stdout, and the modules that it imported."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, *words],
        capture_output=True, text=True, check=True, cwd=cwd, env=environ,
    )  # fmt: skip
    status, modules = json.loads(done.stderr.splitlines()[-1])
    return status, done.stdout, set(modules)


def foreign(modules: set[str]) -> set[str]:
    """The packages among them that neither Python brings nor this project."""
    return {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - {"rpcsvc"}


def named(modules: set[str], *packages: str) -> set[str]:
    """Those of the packages that are among the modules."""
    return {each for each in packages if each in modules}


# --- the probe -------------------------------------------------------------------------------


@pytest.mark.parametrize("environ", [{}, CONTAINER, SIDECAR], ids=["bare", "container", "sidecar"])
@pytest.mark.parametrize("check", ["health", "ready", "live"])
def test_a_probe_imports_no_library(tmp_path: Path, check: str, environ: dict[str, str]) -> None:
    data_dir = tmp_path / "d"
    with listening(data_dir):
        status, out, modules = carried_out(
            tmp_path, "health", "--check", check, RPCSVC_DATA_DIR=str(data_dir), **environ
        )

    assert (status, json.loads(out)) == (0, {"status": "ok"})
    assert foreign(modules) == set()
    assert named(modules, "asyncio", "sqlite3", "rpcsvc.settings", "rpcsvc.operations") == set()


def test_the_probe_of_a_service_that_is_not_there_imports_no_library_either(tmp_path: Path) -> None:
    status, out, modules = carried_out(tmp_path, "health", "--data-dir", "nowhere")

    assert (status, out) == (3, "")
    assert foreign(modules) == set()


def test_the_probe_takes_the_data_directory_from_a_file_as_other_commands_do(
    tmp_path: Path,
) -> None:
    data_dir = tmp_path / "d"
    (tmp_path / "rpcsvc.toml").write_text(f'data_dir = "{data_dir}"\n')
    with listening(data_dir):
        status, out, _ = carried_out(tmp_path, "health", RPCSVC_CONFIG="rpcsvc.toml")

    assert (status, json.loads(out)) == (0, {"status": "ok"})


@pytest.mark.parametrize("name", ["RPCSVC_PORT", "RPCSVC_SANDBOX__XMR_FLOAT", "RPCSVC_NOPE"])
def test_the_probe_refuses_a_wrong_setting_as_other_commands_do(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = {"RPCSVC_DATA_DIR": str(tmp_path), name: "x"}
    ends = [
        (run(line, environ, serve=_never, local=_never), capsys.readouterr())
        for line in (["health"], ["config", "check"])
    ]

    assert ends[0] == ends[1]
    assert ends[0][0] == 2
    assert name in ends[0][1].err


def _never(*_: Any) -> Any:
    raise AssertionError("no service is needed")


def test_the_shipped_probes_give_what_is_read_without_a_library() -> None:
    config = Path(__file__).parents[2] / "config"
    text = (config / "Containerfile").read_text() + (config / "sidecar.yaml").read_text()
    for name in (*CONTAINER, *SIDECAR, "RPCSVC_DATA_DIR"):
        assert name in text
        assert name in PLAIN


# --- branches --------------------------------------------------------------------------------


def branches(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands of a parser, by name."""
    actions: list[Any] = parser._actions
    return {
        name: branch
        for action in actions
        if isinstance(action, argparse._SubParsersAction)
        for name, branch in action.choices.items()
    }


def helps(parser: argparse.ArgumentParser) -> list[str]:
    """The help of a command and of all that hangs below it."""
    below = branches(parser).values()
    return [parser.format_help(), *(text for branch in below for text in helps(branch))]


@pytest.mark.parametrize("name", branches(TREE))
def test_a_branch_says_what_it_does_in_the_whole_tree(name: str) -> None:
    assert helps(branches(build_parser(name))[name]) == helps(branches(TREE)[name])


def test_the_whole_tree_has_every_branch_under_its_name() -> None:
    operations = [operation.command for operation in OPERATIONS]
    assert list(branches(TREE)) == [*cli._BRANCHES, *operations]


def test_what_is_no_command_is_answered_with_all_of_them() -> None:
    for word in ("helth", "-h", "--", ""):
        assert list(branches(build_parser(word))) == list(branches(TREE))


@pytest.mark.parametrize(
    "words",
    [
        ["--version", "no-command"],
        ["health", "--version"],
        ["health", "too", "many"],
        ["health", "--check", "nothing"],
        ["health", "--data", "abbreviated"],
        ["keys"],
        ["payouts", "pause"],
        ["treasury", "explain", "--note"],
    ],
    ids=" ".join,
)
def test_a_branch_ends_a_bad_command_line_as_the_whole_tree_does(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    ends = []
    for parser in (build_parser(words[0]), TREE):
        with pytest.raises(SystemExit) as ended:
            parser.parse_args(words)
        ends.append((ended.value.code, capsys.readouterr()))

    assert ends[0] == ends[1]


def test_socket_of_another_user_is_sent_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever listens there could take the token, and show deposit addresses of their own."""
    with listening(tmp_path / "data"):
        assert client.socket_endpoint(tmp_path / "data") is not None
        monkeypatch.setattr(client, "_listener_of", lambda _connection: 54_321)
        with pytest.raises(client.UntrustedSocket, match="54321 listens"):
            client.socket_endpoint(tmp_path / "data")


def test_no_token_is_sent_over_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, str]] = []

    def post(_endpoint: object, _body: bytes, headers: dict[str, str]) -> tuple[int, bytes]:
        sent.append(headers)
        raise client.Unreachable("enough")

    monkeypatch.setattr(client, "_post", post)
    with listening(tmp_path / "data"):
        by_socket = client.socket_endpoint(tmp_path / "data")
    assert by_socket is not None
    for endpoint in (by_socket, client.endpoint_of("http://127.0.0.1:1")):
        with pytest.raises(client.Unreachable):
            client.call_rpc(endpoint, "service.x", {}, request_id=None, token="a secret")
    assert ["x-agent-rpc-token" in headers for headers in sent] == [False, True]
