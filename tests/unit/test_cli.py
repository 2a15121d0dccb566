"""The command line: one envelope on stdout, the right exit status, and what it remembers."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.operations.table import OPERATIONS
from rpcsvc.transport.cli import build_parser

SWAP = {
    "direction": "x2u",
    "chain": "arbitrum",
    "amount": "0.8",
    "to": "0x52908400098527886E0F7030069857D2E4169EE7",
}


def rpcsvc(data_dir: Path, *arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("RPCSVC", "AGENT_RPC"))}
    return subprocess.run(
        [sys.executable, "-m", "rpcsvc", *arguments],
        env={**environ, "RPCSVC_DATA_DIR": str(data_dir)},
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )


def envelope(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def test_there_is_a_command_for_each_operation_and_an_option_for_each_field() -> None:
    for operation in OPERATIONS:
        if operation.name == "capabilities":
            assert operation.command == "agent:capabilities"
        options = build_parser().parse_args([operation.command])
        names = {info.alias or name for name, info in operation.params.model_fields.items()}
        assert {f"field_{name}" for name in names} <= set(vars(options))
        assert hasattr(options, "idempotency_key") == operation.idempotent


def test_an_order_runs_in_process_and_is_remembered(tmp_path: Path) -> None:
    made = rpcsvc(tmp_path, "agent:swap:execute", "--params", "-", stdin=json.dumps(SWAP))
    assert made.returncode == 0
    first = envelope(made)["data"]
    assert first["sessionSource"] == "generated"
    state = tmp_path / "cli-state.json"
    assert stat.S_IMODE(state.stat().st_mode) == 0o600
    assert json.loads(state.read_text())["order_id"] == first["order"]["orderId"]

    status = envelope(rpcsvc(tmp_path, "agent:swap:status"))
    assert status["data"]["order"]["orderId"] == first["order"]["orderId"]

    second = envelope(rpcsvc(tmp_path, "agent:swap:create", "--params", json.dumps(SWAP)))
    assert second["data"]["sessionId"] == first["sessionId"]
    assert second["data"]["sessionSource"] == "local"


def test_stateless_neither_reads_nor_writes_the_state(tmp_path: Path) -> None:
    state = tmp_path / "cli-state.json"
    state.write_text("broken")
    done = rpcsvc(tmp_path, "agent:swap:execute", "--stateless", "--params", json.dumps(SWAP))
    assert done.returncode == 0
    assert state.read_text() == "broken"
    refused = rpcsvc(tmp_path, "agent:swap:execute", "--params", json.dumps(SWAP))
    assert (refused.returncode, refused.stdout) == (2, "")
    assert "--stateless" in refused.stderr


def test_a_retry_with_its_key_finds_the_same_order(tmp_path: Path) -> None:
    arguments = ["agent:swap:create", "--idempotency-key", "k", "--stateless"]
    answers = [envelope(rpcsvc(tmp_path, *arguments, "--params", json.dumps(SWAP))) for _ in "ab"]
    assert answers[0]["data"] == answers[1]["data"]


def test_the_request_id_is_echoed(tmp_path: Path) -> None:
    done = rpcsvc(tmp_path, "agent:swap:plan", "--request-id", "mine", "--direction", "x2u")
    assert envelope(done)["requestId"] == "mine"
    assert envelope(done)["missingInputs"] == ["chain", "amount", "to"]


def test_a_failed_operation_exits_with_1_and_still_prints_its_envelope(tmp_path: Path) -> None:
    done = rpcsvc(tmp_path, "agent:swap:create", "--amount", "1,5")
    assert done.returncode == 1
    assert envelope(done)["ok"] is False


@pytest.mark.parametrize(
    "arguments",
    [
        ["agent:swap:nothing"],
        ["agent:swap:quote", "--idempotency-key", "k"],
        ["agent:swap:plan", "--has-funds", "perhaps"],
        ["agent:swap:plan", "--params", "[]"],
        ["agent:swap:plan", "--params", '{"a": 1, "a": 2}'],
        ["serve", "--port", "none"],
    ],
)
def test_a_wrong_command_line_exits_with_2_and_prints_nothing(
    tmp_path: Path, arguments: list[str]
) -> None:
    done = rpcsvc(tmp_path, *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr


def test_a_service_that_does_not_answer_exits_with_3(tmp_path: Path) -> None:
    done = rpcsvc(tmp_path, "agent:capabilities", "--url", "http://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (3, "")


def test_config_check_masks_secrets_and_names_origins(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rpcsvc", "config", "check"],
        env={**os.environ, "AGENT_RPC_TOKEN": "a-very-secret-token", "RPCSVC_PORT": "9999"},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 0
    assert "a-very-secret-token" not in done.stdout + done.stderr
    assert "env RPCSVC_PORT" in done.stdout


def test_the_demo_completes_both_orders(tmp_path: Path) -> None:
    done = rpcsvc(tmp_path, "demo")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("swap.status: completed") == 2
