"""The files in config/ that other programs read: the systemd unit, the container, the sidecar."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFIG = Path(__file__).parents[2] / "config"
UNIT = (CONFIG / "rpcsvc.service").read_text()
SIDECAR = (CONFIG / "sidecar.yaml").read_text()
CONTAINER = (CONFIG / "Containerfile").read_text()
PROGRAM = "/opt/rpcsvc/.venv/bin/rpcsvc"


def usage(*command: str) -> str:
    """What the program says of a command of its own."""
    asked = [sys.executable, "-m", "rpcsvc", *command, "--help"]
    return subprocess.run(asked, capture_output=True, text=True, check=True).stdout


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_takes_the_unit_without_a_word(tmp_path: Path) -> None:
    unit = tmp_path / "rpcsvc.service"
    unit.write_text(UNIT.replace(PROGRAM, sys.executable))
    asked = ["systemd-analyze", "verify", str(unit)]
    done = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def test_the_unit_starts_the_server_with_options_that_it_has() -> None:
    (line,) = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
    program, command, *options = shlex.split(line)
    assert (program, command) == (PROGRAM, "serve")
    known = usage("serve")
    assert all(option in known for option in options if option.startswith("--"))


def test_the_service_may_not_write_where_others_read() -> None:
    assert "UMask=0077" in UNIT
    assert "StateDirectoryMode=0700" in UNIT


def test_the_probes_ask_what_the_program_answers() -> None:
    commands = re.findall(r"command: \[(.*)\]", SIDECAR)
    commands += re.findall(r"HEALTHCHECK .* CMD \[(.*)\]", CONTAINER)
    assert len(commands) == 3
    known = usage("health")
    for command in commands:
        _, name, option, value = re.findall(r"[^\s,\"]+", command)
        assert name == "health"
        assert option in known
        assert value in known
