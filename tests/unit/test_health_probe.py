"""``rpcsvc health``: its output and its CPU time.

Probes run ``rpcsvc health`` every few seconds, and imports dominate its CPU time.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from socketserver import ThreadingUnixStreamServer

import pytest

from rpcsvc import health_probe
from rpcsvc.__main__ import main
from rpcsvc.client import transport as client
from rpcsvc.client.blocking import BlockingTransport, finished, rpc_calls
from rpcsvc.client.errors import Unreachable
from rpcsvc.client.transport import ServiceRequest
from rpcsvc.health_probe import probe

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


WELL = b'HTTP/1.1 200 OK\r\ncontent-length: 15\r\n\r\n{"status":"ok"}'


@contextmanager
def listening(data_dir: Path, answer: bytes = WELL) -> Iterator[None]:
    """Answer like a running service on its socket."""

    class Probed(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.wfile.write(answer)

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


def not_of_the_probe(modules: set[str]) -> set[str]:
    """The third-party packages among the modules."""
    return {name.partition(".")[0] for name in modules} - sys.stdlib_module_names - {"rpcsvc"}


def named(modules: set[str], *packages: str) -> set[str]:
    """The packages that are among the modules."""
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
    assert not_of_the_probe(modules) == set()
    assert named(modules, "asyncio", "sqlite3", "rpcsvc.settings", "rpcsvc.operations") == set()


def test_probe_of_a_missing_service_imports_no_library(tmp_path: Path) -> None:
    status, out, modules = carried_out(tmp_path, "health", "--data-dir", "nowhere")

    assert (status, out) == (3, "")
    assert not_of_the_probe(modules) == set()


@pytest.mark.parametrize(
    "words", [["agent:swap:plan"], ["payouts", "list"], ["treasury"], ["health"]]
)
def test_command_that_asks_a_service_imports_none(tmp_path: Path, words: list[str]) -> None:
    status, _, modules = carried_out(tmp_path, *words, "--help")

    assert status == 0
    assert named(modules, "aiohttp", "jsonrpcserver", "rpcsvc.bootstrap", "rpcsvc.audit") == set()


def test_verify_imports_no_library_and_no_service(tmp_path: Path) -> None:
    status, _, modules = carried_out(tmp_path, "verify", "attestation", "--help")

    assert status == 0
    assert not_of_the_probe(modules) == set()
    assert named(modules, "asyncio", "rpcsvc.settings", "rpcsvc.domain") == set()


def test_start_builds_no_model_of_an_operation() -> None:
    """The first call of an operation builds it. The garbage collector is on again after imports."""
    code = (
        "import gc, rpcsvc.importing\n"
        "with rpcsvc.importing.Importing(): import rpcsvc.serving\n"
        "from rpcsvc.operations.table import OPERATIONS\n"
        "print(gc.isenabled(), sum(each.params.__pydantic_complete__ for each in OPERATIONS))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "True 0\n"


def test_probe_leaves_options_it_does_not_read_to_the_cli(tmp_path: Path) -> None:
    data_dir = tmp_path / "d"
    (tmp_path / "rpcsvc.toml").write_text(f'data_dir = "{data_dir}"\n')
    with listening(data_dir):
        status, out, _ = carried_out(tmp_path, "health", RPCSVC_CONFIG="rpcsvc.toml")

    assert (status, json.loads(out)) == (0, {"status": "ok"})


@pytest.mark.parametrize(
    ("words", "status"),
    [
        (["--help"], 0),
        (["--check", "nothing"], 2),
        (["--data", "abbreviated"], 2),
        (["too", "many"], 2),
        (["--check"], 2),
        (["--data-dir", ""], 2),
        (["--url", "ftp://swap.example"], 2),
        (["--check", "live", "--check", "ready"], 3),
    ],
)
def test_probe_leaves_other_words_to_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], status: int
) -> None:
    assert probe(words, {}) is None
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "environ", {})
    monkeypatch.setattr(sys, "argv", ["rpcsvc", "health", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == status


@pytest.mark.parametrize(
    ("answer", "status", "says"),
    [
        (b"HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nsick", 1, ""),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nok", 3, "its answer breaks off"),
        (b"HTTP/1.1 200 OK\r\n", 3, "does not answer in HTTP"),
        (b"SSH-2.0-OpenSSH\r\n\r\n", 3, "does not answer in HTTP"),
        (b"", 3, "does not answer in HTTP"),
    ],
)
def test_probe_prints_why_an_answer_is_unusable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answer: bytes, status: int, says: str
) -> None:
    with listening(tmp_path / "d", answer):
        assert probe(["--data-dir", str(tmp_path / "d")], {}) == status
    assert says in capsys.readouterr().err


def test_probe_takes_the_cpu_of_four_bare_starts_at_most(tmp_path: Path) -> None:
    """The least of several runs, beside a bare interpreter: machines differ, and have other
    load.
    """

    def least(*arguments: str) -> float:
        return min(cpu_ms(*arguments) for _ in range(7))

    with listening(tmp_path / "d"):
        asked = least("-m", "rpcsvc", "health", "--data-dir", str(tmp_path / "d"))
    assert asked < 4 * least("-c", "pass")


def cpu_ms(*arguments: str) -> float:
    """CPU time of a Python process, of user and system."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return 1000 * (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)


def test_socket_of_another_user_is_sent_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another user could read the token, and answer with his own deposit addresses."""
    with listening(tmp_path / "data"):
        assert client.socket_endpoint(tmp_path / "data") is not None
        monkeypatch.setattr(health_probe, "_listener_of", lambda _connection: 54_321)
        with pytest.raises(health_probe.UntrustedSocket, match="54321 listens"):
            client.socket_endpoint(tmp_path / "data")


def test_no_token_is_sent_over_the_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ServiceRequest] = []

    async def exchange(_transport: object, sent: ServiceRequest) -> None:
        made.append(sent)
        raise Unreachable("enough")

    monkeypatch.setattr(BlockingTransport, "exchange", exchange)
    with listening(tmp_path / "data"):
        by_socket = client.socket_endpoint(tmp_path / "data")
    assert by_socket is not None
    for endpoint in (by_socket, client.endpoint_of("http://127.0.0.1:1")):
        with pytest.raises(Unreachable, match="enough"):
            finished(rpc_calls(endpoint, "a secret").call("capabilities", {}))
    assert ["x-agent-rpc-token" in sent.headers for sent in made] == [False, True]
