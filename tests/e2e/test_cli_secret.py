"""Commands with ``--secret-file``: against a server's socket and URL, and without a server."""

from __future__ import annotations

import asyncio
import json
import os
import re
import stat
import threading
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.cli.agent import operations
from rpcsvc.cli.agent.secret_file import sessions_at
from rpcsvc.cli.context import UsageError
from rpcsvc.client.errors import refusal
from tests.command_line import Done, clean_environ, run_here
from tests.e2e.processes import SETTINGS, server
from tests.sandbox import EVM

SWAP = ["--direction", "x2u", "--chain", "arbitrum", "--amount", "0.8", "--to", EVM]
SITE = "http://127.0.0.1:8080"
SECRET = bytes(range(32)).hex()


class Cli:
    """Runs ``rpcsvc`` on a data directory, with a secret."""

    def __init__(self, data_dir: Path, secret: Path) -> None:
        self.secret = secret
        self.environ = {**clean_environ(), **SETTINGS, "RPCSVC_DATA_DIR": str(data_dir)}

    async def run(self, command: str, *arguments: str, **environ: str) -> Done:
        words = [command, *arguments, "--secret-file", str(self.secret)]
        return await asyncio.to_thread(run_here, words, {**self.environ, **environ})

    async def ask(self, command: str, *arguments: str, **environ: str) -> dict[str, Any]:
        done = await self.run(command, *arguments, **environ)
        assert done.returncode == 0, done.stderr
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    async def create(self, *arguments: str, **environ: str) -> tuple[str, str]:
        data = (await self.ask("agent:swap:create", *SWAP, *arguments, **environ))["data"]
        assert data["sessionSource"] == "local"
        return data["order"]["orderId"], data["sessionId"]

    async def restore(self, *arguments: str, **environ: str) -> set[tuple[str, str]]:
        answer = await self.ask("agent:swap:restore", *arguments, **environ)
        assert (answer["operation"], answer["state"]) == ("swap.restore", "ready")
        return {(each["orderId"], each["sessionId"]) for each in answer["data"]["orders"]}


@pytest.fixture
def cli(tmp_path: Path) -> Cli:
    return Cli(tmp_path / "data", tmp_path / "swap.secret")


async def test_orders_are_restored_after_the_state_is_lost(cli: Cli, tmp_path: Path) -> None:
    async with server(tmp_path / "data") as up:
        first = await cli.run("agent:swap:create", *SWAP)
        assert "Keep a copy" in first.stderr
        data = json.loads(first.stdout)["data"]
        made = {(data["order"]["orderId"], data["sessionId"]), await cli.create()}
        (tmp_path / "data" / "cli-state.json").unlink()
        made |= {await cli.create(), await cli.create("--stateless")}
        assert len({session for _, session in made}) == 4
        assert await cli.restore() == made
        elsewhere = Cli(tmp_path / "elsewhere", cli.secret)
        none = await elsewhere.run("agent:swap:restore", "--url", up.url)  # another address
        assert (none.returncode, json.loads(none.stdout)["data"]["orders"]) == (0, [])
        assert f"No order of this secret at {up.url}." in none.stderr
        assert "give --url" in none.stderr
        there = await elsewhere.create("--url", up.url)
        assert await elsewhere.restore("--url", up.url) == {there}
        assert await cli.restore(RPCSVC_SITE_URL=up.url) == {there}


async def test_retry_with_its_key_finds_the_same_order_and_session(
    cli: Cli, tmp_path: Path
) -> None:
    key = ["--idempotency-key", "k-0123456789abcdef"]
    made = await cli.create(*key)
    assert await cli.create(*key) == made  # the state has the first session by now
    (tmp_path / "data" / "cli-state.json").unlink()
    assert await cli.create(*key) == made
    assert await cli.restore() == {made}


async def test_order_is_found_after_the_service_lost_its_store(cli: Cli, tmp_path: Path) -> None:
    session = sessions_at(cli.secret, SITE, makes=True)
    remembered = [session.take() for _ in range(20)][-1]
    state = {"session_id": remembered, "order_id": "ord_01JEXAMPLE"}
    (tmp_path / "data").mkdir(mode=0o700)
    (tmp_path / "data" / "cli-state.json").write_text(json.dumps(state))
    made = await cli.create()
    assert await cli.restore() == {made}


async def test_remembered_session_costs_one_call(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    await cli.create()
    asked: list[dict[str, Any]] = []
    listed = operations._listed

    def counted(context: Any, service: Any, params: dict[str, Any]) -> dict[str, Any]:
        asked.append(params)
        return listed(context, service, params)

    monkeypatch.setattr(operations, "_listed", counted)
    _, session = await cli.create()
    assert [each["limit"] for each in asked] == [1]
    assert asked[0]["sessionId"] != session


async def test_ticket_takes_no_secret_and_goes_with_its_orders_session(
    cli: Cli,
) -> None:
    _, session = await cli.create()
    refused = await cli.run("agent:support:create", "--message", "late")
    assert refused.returncode == 2
    assert "--secret-file" in refused.stderr
    words = ["agent:support:create", "--message", "late"]
    done = await asyncio.to_thread(run_here, words, cli.environ)
    assert json.loads(done.stdout)["data"]["sessionId"] == session


async def test_session_beside_a_secret_is_a_usage_error(cli: Cli) -> None:
    session = "3f2b8c1e-7d64-4f0a-9c1b-2a5e8d7f6c90"
    for words in (["--session-id", session], ["--params", json.dumps({"sessionId": session})]):
        done = await cli.run("agent:swap:create", *SWAP, *words)
        assert done.returncode == 2
        assert "--secret-file or a session id" in done.stderr
    assert not cli.secret.exists()


@pytest.mark.parametrize(
    ("words", "operation"),
    [(["agent:swap:create", *SWAP], "swap.create"), (["agent:swap:restore"], "swap.restore")],
)
async def test_refused_search_is_reported_as_the_command(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, words: list[str], operation: str
) -> None:
    def refuse(*_call: Any) -> dict[str, Any]:
        error = {"code": "unavailable", "message": "down", "retryable": True}
        raise refusal({"ok": False, "operation": "swap.list", "error": error}, None)

    monkeypatch.setattr(operations, "_listed", refuse)
    sessions_at(cli.secret, SITE, makes=True)
    done = await cli.run(*words)
    answer = json.loads(done.stdout)
    assert (done.returncode, answer["ok"], answer["operation"]) == (1, False, operation)


async def test_restore_makes_no_secret_and_says_which_file_to_give(cli: Cli) -> None:
    done = await cli.run("agent:swap:restore")
    assert (done.returncode, json.loads(done.stdout)["operation"]) == (2, "swap.restore")
    assert "There is no file" in done.stderr
    assert not cli.secret.exists()


# --- the file --------------------------------------------------------------------------------


def test_secret_file_is_private_and_random(tmp_path: Path) -> None:
    made = [tmp_path / name for name in ("one", "other")]
    for path in made:
        sessions_at(path, SITE, makes=True)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert re.fullmatch("[0-9a-f]{64}\n", path.read_text())
    assert made[0].read_text() != made[1].read_text()
    assert sorted(tmp_path.iterdir()) == made


def test_processes_that_make_the_file_at_once_have_one_secret(tmp_path: Path) -> None:
    path, found = tmp_path / "secret", list[str]()
    ready = threading.Barrier(8)

    def make() -> None:
        ready.wait()
        found.append(sessions_at(path, SITE, makes=True).take())

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [sessions_at(path, SITE, makes=False).take()] * 8


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o660, 0o644])
def test_file_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET)
    path.chmod(mode)
    with pytest.raises(UsageError, match=f"mode {mode:04o}.*chmod 600"):
        sessions_at(path, SITE, makes=True)


@pytest.mark.parametrize("text", ["", "hunter2", "00" * 32, SECRET + SECRET, "\x00" * 10_000])
def test_file_without_a_secret_is_refused_and_kept(tmp_path: Path, text: str) -> None:
    path = tmp_path / "secret"
    path.write_text(text)
    path.chmod(0o600)
    with pytest.raises(UsageError, match="openssl rand"):
        sessions_at(path, SITE, makes=True)
    assert path.read_text() == text


def test_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o600)
    for path in (tmp_path, tmp_path / "pipe"):
        with pytest.raises(UsageError, match=r"no regular file|directory"):
            sessions_at(path, SITE, makes=True)
    with pytest.raises(UsageError, match="There is no file"):
        sessions_at(tmp_path / "no" / "secret", SITE, makes=True)
