"""The command line against a server's socket, against its URL, and without one.

Tests of streams, signals and shells run the command in a process of its own.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tests.command_line import Done, clean_environ, run_here
from tests.e2e.processes import SETTINGS, Server, call, free_port, server, until
from tests.sandbox import EVM, MONERO

TOKEN = "correct-horse-battery-staple-of-some-length"
SWAP = ["--direction", "x2u", "--chain", "arbitrum", "--amount", "0.8", "--to", EVM]
BACK = ["--direction", "u2x", "--chain", "42161", "--amount", "150", "--to", MONERO]


class Cli:
    """Runs ``rpcsvc`` on a data directory, in a clean environment."""

    def __init__(self, data_dir: Path) -> None:
        self.data_dir = data_dir
        self.environ = {**clean_environ(), **SETTINGS, "RPCSVC_DATA_DIR": str(data_dir)}

    async def run(self, *arguments: str, **environ: str) -> Done:
        """A command in this process, with streams of its own."""
        return await asyncio.to_thread(run_here, arguments, {**self.environ, **environ})

    async def process(self, *arguments: str) -> Done:
        """A command in a process of its own."""
        return await self.in_shell("", *arguments)

    async def in_shell(self, redirection: str, *arguments: str) -> Done:
        """A command whose standard streams are not the usual ones."""
        return await asyncio.to_thread(
            subprocess.run,
            ["sh", "-c", f'"$@" {redirection}', "sh", sys.executable, "-m", "rpcsvc", *arguments],
            env=self.environ,
            capture_output=True,
            text=True,
            check=False,
            timeout=180,
        )

    async def ask(self, *arguments: str, **environ: str) -> dict[str, Any]:
        """The envelope of a call: the only output on stdout, with an empty stderr."""
        done = await self.run(*arguments, **environ)
        answer: dict[str, Any] = json.loads(done.stdout)
        assert done.stderr == ""
        assert done.returncode == (0 if answer["ok"] else 1)
        return answer

    async def until_over(self, *arguments: str, **environ: str) -> dict[str, Any]:
        async def over() -> dict[str, Any] | None:
            answer = await self.ask("agent:swap:status", *arguments, **environ)
            return answer if answer["state"] in ("completed", "terminal_failure") else None

        return await until(over)


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path / "data")


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server for tests that only read from it."""
    up = Server(tmp_path_factory.mktemp("shared") / "data")
    try:
        assert asyncio.run(up.ready())
        yield up
    finally:
        up.kill()


@contextmanager
def locked(data_dir: Path) -> Iterator[None]:
    """Another process that has the data directory, but has not begun to listen."""
    data_dir.mkdir(mode=0o700)
    with (data_dir / "rpcsvc.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@pytest.mark.parametrize(
    "swap", [SWAP, pytest.param(BACK, marks=pytest.mark.slow)], ids=["x2u", "u2x"]
)
async def test_a_swap_runs_from_plan_to_completed_without_a_server(
    cli: Cli, swap: list[str]
) -> None:
    plan = await cli.ask("agent:swap:plan", *swap, "--has-funds", "true")
    assert plan["state"] == "ready"
    assert (await cli.ask("agent:swap:quote", *swap[:-2]))["state"] == "quoted"
    made = await cli.ask("agent:swap:execute", *swap, "--idempotency-key", "k-0123456789abcd")
    assert made["state"] == "waiting_for_funding"
    assert (await cli.ask("sandbox:fund"))["ok"]
    answer = await cli.until_over()
    assert answer["state"] == "completed"
    assert answer["data"]["order"]["orderId"] == made["data"]["order"]["orderId"]


async def test_a_swap_runs_from_plan_to_completed_over_the_socket(cli: Cli) -> None:
    async with server(cli.data_dir, environ={"AGENT_RPC_TOKEN": TOKEN}) as up:
        made = await cli.ask("agent:swap:create", *SWAP, "--request-id", "mine")
        assert (made["state"], made["requestId"]) == ("waiting_for_funding", "mine")
        assert (await cli.ask("sandbox:fund"))["ok"]
        assert (await cli.until_over())["state"] == "completed"
        assert up.stop() == 0
    # and the same command goes on in process when the server is gone
    assert (await cli.ask("agent:swap:status"))["state"] == "completed"


async def test_command_lines_in_the_documents_work_as_they_stand(cli: Cli, tmp_path: Path) -> None:
    environ = {"AGENT_RPC_TOKEN": TOKEN, "RPCSVC_BRAND__SLUG": "acme"}
    async with server(cli.data_dir, environ=environ) as up, aiohttp.ClientSession() as session:

        async def page(path: str) -> str:
            async with session.get(up.url + path) as answer:
                return await answer.text()

        usage = json.loads(await page("/.well-known/agent.json"))["transports"]["cli"]["usage"]
        full = await page("/llms-full.txt")
        lines = [usage, *_command_lines(full), *_command_lines(await page("/llms.txt"))]
        assert len(lines) == 4
        assert all(' --token "$AGENT_RPC_TOKEN"' in line for line in lines)
        elsewhere = Cli(tmp_path / "client")
        answers = [await _typed(elsewhere, line) for line in dict.fromkeys(lines)]
        assert all(answer["ok"] for answer in answers)
        # JSON-RPC uses the command's key; HTTPS has a key of its own.
        made = next(a["data"]["order"] for a in answers if a["operation"] == "swap.execute")
        https, rpc = (
            re.findall(rf'idempotency-key{mark} "?([0-9a-f-]+)', full)[0] for mark in (":", '":')
        )
        assert https != rpc
        assert f"--idempotency-key {rpc}" in full
        _, _, message = full.partition("POST /rpc ")[2].partition("\n\n")
        headers = {"x-agent-rpc-token": TOKEN, "content-type": "application/json"}
        async with session.post(
            f"{up.url}/rpc", data=message.partition("\n```")[0], headers=headers
        ) as again:
            assert (await again.json())["result"]["data"]["order"] == made


def _command_lines(page: str) -> list[str]:
    return re.findall(r"[^\n`]*rpcsvc agent:[a-z:]+ --url [^\n`]*", page)


async def _typed(cli: Cli, line: str) -> dict[str, Any]:
    """Run a line from a document in a shell, unchanged; its envelope."""
    program = shlex.quote(sys.executable)
    done = await asyncio.to_thread(
        subprocess.run,
        ["sh", "-c", f'rpcsvc() {{ {program} -m rpcsvc "$@"; }}\n{line}'],
        env={**cli.environ, "AGENT_RPC_TOKEN": TOKEN},
        capture_output=True,
        text=True,
        check=False,
        timeout=180,
    )
    assert done.stderr == ""
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


@pytest.mark.slow
async def test_a_url_is_asked_with_the_token(cli: Cli, tmp_path: Path) -> None:
    elsewhere = Cli(tmp_path / "client")
    async with server(cli.data_dir, environ={"AGENT_RPC_TOKEN": TOKEN}) as up:
        refused = await elsewhere.ask("agent:swap:create", *SWAP, "--url", up.url)
        assert (refused["ok"], refused["error"]["code"]) == (False, "unauthorized")
        wrong = await elsewhere.ask("agent:capabilities", "--url", up.url, "--token", "no")
        assert wrong["error"]["code"] == "unauthorized"
        where = {"RPCSVC_URL": up.url, "AGENT_RPC_TOKEN": TOKEN}
        made = await elsewhere.ask("agent:swap:create", *SWAP, **where)
        assert (await elsewhere.ask("sandbox:fund", **where))["ok"]
        assert (await elsewhere.until_over(**where))["state"] == "completed"
    # the client keeps its own memory file and creates nothing else
    assert [path.name for path in elsewhere.data_dir.iterdir()] == ["cli-state.json"]
    state = json.loads((elsewhere.data_dir / "cli-state.json").read_text())
    assert state["order_id"] is None
    assert state["elsewhere"][up.url]["order_id"] == made["data"]["order"]["orderId"]


async def test_every_way_to_the_service_gives_the_same_plan(cli: Cli, shared: Server) -> None:
    words = ["agent:swap:plan", *SWAP, "--request-id", "same", "--compact"]
    in_process = await cli.run(*words)
    over_socket = await Cli(shared.data_dir).run(*words)
    over_url = await cli.run(*words, "--url", shared.url)
    assert in_process.stdout == over_socket.stdout == over_url.stdout


@pytest.mark.slow
async def test_a_retry_with_its_key_finds_its_order_on_every_way(cli: Cli) -> None:
    words = ["agent:swap:create", *SWAP, "--idempotency-key", "once-0123456789a"]
    first = await cli.ask(*words)
    assert (await cli.ask(*words))["data"] == first["data"]
    async with server(cli.data_dir) as up:
        assert (await cli.ask(*words))["data"] == first["data"]
        assert (await cli.ask(*words, "--url", up.url))["data"] == first["data"]
        other = await cli.ask(*words[:-2], "--idempotency-key", "twice-0123456789")
        assert other["data"]["order"]["orderId"] != first["data"]["order"]["orderId"]
        assert other["data"]["sessionId"] == first["data"]["sessionId"]
        assert other["data"]["sessionSource"] == "local"
        assert (await cli.ask(*words))["data"] == first["data"]


async def test_key_of_another_transport_finds_its_order_despite_state(
    cli: Cli,
) -> None:
    async with server(cli.data_dir) as up:
        swap = dict(zip(_names(), SWAP[1::2], strict=True))
        first = await call(up, "swap.create", {**swap, "idempotency-key": "once-0123456789a"})
        assert (await cli.ask("agent:swap:create", *SWAP))["ok"]  # a session is remembered now
        words = ["agent:swap:create", *SWAP, "--idempotency-key", "once-0123456789a"]
        for _ in range(2):
            assert (await cli.ask(*words))["data"] == first["data"]
        await cli.ask(
            "agent:swap:create", *SWAP, "--stateless", "--idempotency-key", "other-0123456789"
        )
        await cli.ask("agent:swap:create", *SWAP, "--idempotency-key", "other-0123456789")
        # Inputs that the CLI fills in are not bound to the key, whichever transport a retry uses.
        remembered = await cli.ask(
            "agent:swap:create", *SWAP, "--idempotency-key", "third-0123456789"
        )
        assert remembered["data"]["sessionSource"] == "local"
        again = await call(up, "swap.create", {**swap, "idempotency-key": "third-0123456789"})
        assert again["data"] == remembered["data"]
        by_url = await cli.ask(*words[:-1], "third-0123456789", "--stateless", "--url", up.url)
        assert by_url["data"] == remembered["data"]
        assert await asyncio.to_thread(_count_orders, up) == 4


async def test_blanks_around_a_key_are_no_part_of_it(cli: Cli) -> None:
    words = ["agent:swap:create", *SWAP, "--stateless", "--idempotency-key"]
    first = await cli.ask(*words, " once-0123456789a ")
    assert (await cli.ask(*words, "once-0123456789a"))["data"] == first["data"]


async def test_a_key_with_another_amount_is_a_conflict(cli: Cli) -> None:
    words = ["agent:swap:create", "--idempotency-key", "once-0123456789a"]
    assert (await cli.ask(*words, *SWAP))["ok"]
    conflict = await cli.ask(*words, *SWAP[:5], "0.9", *SWAP[6:])
    assert conflict["state"] == "idempotency_conflict"
    assert conflict["error"]["details"]["fields"] == ["amount"]


@pytest.mark.slow
async def test_a_command_that_settles_writes_no_log(cli: Cli) -> None:
    assert (await cli.ask("agent:swap:create", *SWAP))["ok"]
    assert (await cli.ask("sandbox:fund", "--amount", "400"))["ok"]

    async def waits_for_an_address() -> bool:
        answer = await cli.ask("agent:swap:status")  # runs due effects in its own process
        return bool(answer["data"]["actionRequired"] == "refund_address")

    await until(waits_for_an_address)


@pytest.mark.slow
async def test_support_uses_the_remembered_order_for_a_refund(cli: Cli) -> None:
    assert (await cli.ask("agent:swap:create", *SWAP))["ok"]
    assert (await cli.ask("sandbox:fund", "--amount", "400"))["ok"]
    async with server(cli.data_dir):

        async def waits_for_an_address() -> bool:
            answer = await cli.ask("agent:swap:status")
            return bool(answer["data"]["actionRequired"] == "refund_address")

        await until(waits_for_an_address)
        ticket = await cli.ask(
            "agent:support:create", "--message", "back, please", "--wallet-address", MONERO
        )
        assert ticket["data"]["sessionSource"] == "local"
        over = await cli.until_over()
    assert (over["state"], over["data"]["outcome"]) == ("terminal_failure", "refunded")


@pytest.mark.slow
async def test_locked_data_directory_without_a_socket_exits_with_3(cli: Cli) -> None:
    with locked(cli.data_dir):
        for words in (["agent:capabilities"], ["demo", "--data-dir", str(cli.data_dir)]):
            done = await cli.run(*words)
            assert (done.returncode, done.stdout == "") == (3, words[0] == "demo")
            assert "does not answer on its socket" in done.stderr
        second = await cli.process("serve", "--port", str(free_port()))
    assert (second.returncode, second.stdout) == (2, "")


@pytest.mark.slow
async def test_the_socket_file_of_a_killed_server_is_passed_by(cli: Cli) -> None:
    async with server(cli.data_dir) as up:
        made = await cli.ask("agent:swap:create", *SWAP)
        up.kill()
    assert (cli.data_dir / "rpcsvc.sock").exists()
    answer = await cli.ask("agent:swap:status")
    assert answer["data"]["order"]["orderId"] == made["data"]["order"]["orderId"]


@pytest.mark.slow
async def test_an_order_that_the_server_settles_is_seen_by_everyone(cli: Cli) -> None:
    async with server(cli.data_dir) as up:
        made = await call(up, "swap.create", dict(zip(_names(), SWAP[1::2], strict=True)))
        order_id = made["data"]["order"]["orderId"]
        assert (await cli.ask("sandbox:fund", order_id))["ok"]
        assert (await cli.until_over("--order-id", order_id))["state"] == "completed"


def _names() -> list[str]:
    return [flag.removeprefix("--") for flag in SWAP[::2]]


async def test_taken_port_is_reported_in_one_line(cli: Cli, shared: Server) -> None:
    done = await cli.process("serve", "--port", str(shared.port))
    assert (done.returncode, done.stdout) == (2, "")
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"rpcsvc: can't serve on 127.0.0.1:{shared.port}")
    assert "Traceback" not in done.stderr


@pytest.mark.slow
async def test_a_check_and_a_backup_work_beside_a_running_server(cli: Cli, tmp_path: Path) -> None:
    copy = tmp_path / "copy.db"
    async with server(cli.data_dir):
        made = await cli.ask("agent:swap:create", *SWAP)
        check = await cli.run("db", "check")
        assert (check.returncode, check.stdout, check.stderr) == (0, "ok\n", "")
        backup = await cli.run("db", "backup", str(copy))
        assert (backup.returncode, backup.stdout) == (0, f"{copy}\n")
        again = await cli.run("db", "backup", str(copy))
        assert (again.returncode, again.stdout) == (2, "")
        assert (await cli.ask("agent:swap:status"))["ok"]
    with closing(sqlite3.connect(copy)) as database:
        rows = database.execute("SELECT order_id FROM orders").fetchall()
    assert rows == [(made["data"]["order"]["orderId"],)]


async def test_damaged_database_is_reported_without_a_traceback(cli: Cli, tmp_path: Path) -> None:
    cli.data_dir.mkdir(mode=0o700)
    (cli.data_dir / "rpcsvc.db").write_bytes(b"this is no database" * 100)
    check = await cli.run("db", "check")
    assert (check.returncode, check.stderr) == (1, "")
    assert "file is not a database" in check.stdout
    for words in (["db", "backup", str(tmp_path / "copy")], ["agent:capabilities"]):
        done = await cli.run(*words)
        assert (done.returncode, done.stdout == "") == (2, words[0] == "db")
        assert "file is not a database" in done.stderr
        assert "Traceback" not in done.stderr


async def test_demo_completes_both_orders_and_leaves_nothing_behind(cli: Cli) -> None:
    done = await cli.process("demo")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("--> swap.status: completed") == 2
    assert done.stdout.count("payout of") == 2
    assert "Both orders completed." in done.stdout
    assert not cli.data_dir.exists()


async def test_demo_interrupted_at_its_start_leaves_nothing_behind(
    cli: Cli, tmp_path: Path
) -> None:
    folder = tmp_path / "temporary"
    folder.mkdir(mode=0o700)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rpcsvc", "demo",
        env={**cli.environ, "TMPDIR": str(folder)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        # A background job of a shell ignores SIGINT, and its children inherit that.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip
    async with asyncio.timeout(180):
        while not list(folder.glob("rpcsvc-demo-*/rpcsvc.db")):  # noqa: ASYNC110 - a file
            await asyncio.sleep(0)
        process.send_signal(signal.SIGINT)
        _, complaint = await process.communicate()
    assert (process.returncode, complaint) == (130, b"")
    assert list(folder.iterdir()) == []


@pytest.mark.slow
async def test_the_demo_runs_against_a_server_by_socket_and_by_url(cli: Cli) -> None:
    async with server(cli.data_dir, environ={"AGENT_RPC_TOKEN": TOKEN}) as up:
        by_socket = await cli.run("demo", "--data-dir", str(cli.data_dir))
        assert (by_socket.returncode, by_socket.stderr) == (0, "")
        by_url = await cli.run("demo", "--url", up.url, "--token", TOKEN)
        assert (by_url.returncode, by_url.stderr) == (0, "")
        refused = await cli.run("demo", "--url", up.url)
        assert refused.returncode == 1
        assert "The demo stops: swap.plan answered unauthorized" in refused.stdout
        orders = await asyncio.to_thread(_count_orders, up)
    assert orders == 4


def _count_orders(up: Server) -> int:
    uri = f"{(up.data_dir / 'rpcsvc.db').as_uri()}?mode=ro"
    with closing(sqlite3.connect(uri, uri=True)) as database:
        (count,) = database.execute("SELECT count(*) FROM orders").fetchone()
    return int(count)


async def test_a_reader_that_goes_away_leaves_no_traceback(cli: Cli) -> None:
    """``rpcsvc agent:schemas --pretty | head -1``"""
    read_end, write_end = os.pipe()
    os.close(read_end)
    try:
        done = await asyncio.to_thread(
            subprocess.run,
            [sys.executable, "-m", "rpcsvc", "agent:schemas", "--pretty"],
            env=cli.environ,
            stdout=write_end,
            stderr=subprocess.PIPE,
            check=False,
            timeout=180,
        )
    finally:
        os.close(write_end)
    assert (done.returncode, done.stderr) == (3, b"")


async def test_order_with_an_unwritable_answer_is_not_called_refused(cli: Cli) -> None:
    """Exit status 1 means that there is no order: a script would create another one."""
    words = ["agent:swap:execute", *SWAP, "--idempotency-key", "k-0123456789abcd"]
    done = await cli.in_shell(">/dev/full", *words)
    assert done.returncode == 3
    assert done.stderr.startswith("rpcsvc: The answer can't be written to stdout: No space left")
    assert done.stderr.count("\n") == 1
    made = await cli.ask("agent:swap:status")
    assert (await cli.ask(*words))["data"]["order"]["orderId"] == made["data"]["order"]["orderId"]


@pytest.mark.parametrize(
    ("closed", "words", "status"),
    [
        ("<&-", ["agent:swap:plan", "--params", "-"], 2),
        ("<&-", ["verify", "attestation", "-", "--chain-id", "1", "--issuer", "http://127.0.0.1:1",
                 "--jwks", "/dev/null", *SWAP[:2], *SWAP[4:]], 1),
        (">&-", ["agent:swap:plan"], 0),
        (">&-", ["config", "check"], 0),
        ("2>&-", ["agent:swap:plan"], 0),
        ("2>&-", ["agent:swap:plan", "--params", "{"], 2),
    ],
)  # fmt: skip
async def test_a_closed_stream_is_an_empty_one(
    cli: Cli, closed: str, words: list[str], status: int
) -> None:
    done = await cli.in_shell(closed, *words)
    assert done.returncode == status
    assert "Traceback" not in done.stderr


async def test_health_asks_a_running_server_and_never_becomes_one(
    tmp_path: Path, shared: Server
) -> None:
    cli = Cli(tmp_path / "data")

    without = await cli.process("health")
    assert (without.returncode, without.stdout) == (3, "")
    assert not cli.data_dir.exists()

    for check in ("health", "ready", "live"):
        answer = await Cli(shared.data_dir).process("health", "--check", check)
        assert answer.returncode == 0, answer.stderr
        assert json.loads(answer.stdout)["status"] == "ok"
