"""The files in config/ that other programs read: the systemd unit, the container, the sidecar."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from rpcsvc.cli.main import build_parser
from rpcsvc.orders.scheduler.effects import STOP_SECONDS
from rpcsvc.settings import Settings

CONFIG = Path(__file__).parents[2] / "config"
UNIT = (CONFIG / "rpcsvc.service").read_text()
SIDECAR = (CONFIG / "sidecar.yaml").read_text()
CONTAINER = (CONFIG / "Containerfile").read_text()
OPERATIONS = (CONFIG.parent / "docs" / "operate" / "operations.md").read_text()
PROGRAM = "/opt/rpcsvc/.venv/bin/rpcsvc"


def usage(*command: str) -> str:
    """The help of one of the program's commands."""
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


def test_service_user_exists_while_the_service_is_stopped() -> None:
    (user,) = re.findall(r"^User=(.*)$", UNIT, re.MULTILINE)
    assert "DynamicUser" not in UNIT
    (made,) = re.findall(r"^#   useradd --system .* (\S+)$", UNIT, re.MULTILINE)
    assert made == user
    # The page has this line, and a command as that user on the unit's files.
    assert re.search(rf"^useradd --system .* {user}$", OPERATIONS, re.MULTILINE)
    (line,) = re.findall(r"^ExecStart=(.*)$", UNIT, re.MULTILINE)
    options = line.partition(" serve ")[2]
    assert f"sudo -u {user} {PROGRAM} payouts list {options}\n" in OPERATIONS


@pytest.mark.parametrize(
    "line",
    [
        "Type=notify",
        "WatchdogSec=180",
        "RestartSec=5",
        "StartLimitIntervalSec=0",
        "LimitCORE=0",
        "LimitNOFILE=65536",
        "MemoryMax=2G",
    ],
)
def test_the_service_comes_back_and_keeps_its_memory_to_itself(line: str) -> None:
    assert f"\n{line}\n" in UNIT


@pytest.mark.parametrize(
    "line",
    [
        "PrivateMounts=yes",
        "SystemCallFilter=@system-service\nSystemCallFilter=~@privileged @resources",
        "SystemCallErrorNumber=EPERM",
        "IPAddressDeny=link-local multicast",
    ],
)
def test_unit_restricts_calls_mounts_and_addresses(line: str) -> None:
    assert f"\n{line}\n" in UNIT


def test_stop_timeouts_cover_the_time_the_service_needs() -> None:
    """Requests in flight, then payouts under way, then the database: else it would be killed."""
    (unit,) = re.findall(r"^TimeoutStopSec=(\d+)$", UNIT, re.MULTILINE)
    (pod,) = re.findall(r"terminationGracePeriodSeconds: (\d+)$", SIDECAR, re.MULTILINE)
    needed = Settings.model_fields["graceful_seconds"].default + STOP_SECONDS + 5
    assert min(int(unit), int(pod)) >= needed


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_finds_little_left_to_restrict() -> None:
    asked = ["systemd-analyze", "security", "--offline=yes", str(CONFIG / "rpcsvc.service")]
    done = subprocess.run([*asked, "--threshold=12"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:]


@pytest.mark.parametrize(
    "line",
    [
        "  automountServiceAccountToken: false",
        "    runAsNonRoot: true",
        "    seccompProfile: {type: RuntimeDefault}",
        "        allowPrivilegeEscalation: false",
        "        readOnlyRootFilesystem: true",
        "        capabilities: {drop: [ALL]}",
    ],
)
def test_the_pod_may_do_little_and_asks_kubernetes_nothing(line: str) -> None:
    assert f"\n{line}\n" in SIDECAR


# --- probes ----------------------------------------------------------------------------------


def check_of(command: str) -> str:
    """The health check of a probe, read from its command line by the program."""
    program, *words = re.findall(r"[^\s,\"]+", command)
    assert program.endswith("/rpcsvc")
    return str(build_parser().parse_args(words).check)


@pytest.mark.parametrize(("probe", "asks"), [("readiness", "ready"), ("liveness", "live")])
def test_each_probe_of_the_sidecar_asks_its_own_question(probe: str, asks: str) -> None:
    (command,) = re.findall(rf"{probe}Probe:\n\s+exec:\n\s+command: \[(.*)\]", SIDECAR)
    assert check_of(command) == asks


def test_a_container_that_is_paused_is_well() -> None:
    (command,) = re.findall(r"HEALTHCHECK .* CMD \[(.*)\]", CONTAINER)
    assert check_of(command) == "live"


# --- the container's packages ----------------------------------------------------------------


def pins(name: str) -> dict[str, Version]:
    """The packages of a requirements file; fails if one has no hashes."""
    blocks = re.split(r"\n(?=[A-Za-z0-9])", (CONFIG / name).read_text())[1:]
    found: dict[str, Version] = {}
    for block in blocks:
        pinned = Requirement(block.partition(" \\\n")[0])
        (specifier,) = pinned.specifier
        assert specifier.operator == "=="
        assert re.search(r"--hash=sha256:[0-9a-f]{64}\b", block)
        found[canonicalize_name(pinned.name)] = Version(specifier.version)
    return found


def asked_for(name: str) -> list[str]:
    """The requirements of pyproject.toml for the packages that a requirements file pins."""
    project = tomllib.loads((CONFIG.parent / "pyproject.toml").read_text())
    if name == "requirements-build.txt":
        return list(project["build-system"]["requires"])
    extras = project["project"]["optional-dependencies"]
    served = (extras[name] for name in extras if name not in ("bench", "dev", "fuzz", "mutation"))
    return [*project["project"]["dependencies"], *chain.from_iterable(served)]


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-build.txt"])
def test_the_pinned_packages_are_what_the_project_asks_for(name: str) -> None:
    pinned = pins(name)
    for each in map(Requirement, asked_for(name)):
        version = pinned.get(canonicalize_name(each.name))
        assert version is not None, f"{each.name} is not pinned: make lock"
        assert version in each.specifier, f"{each} is pinned to {version}: make lock"


@pytest.mark.parametrize("name", ["requirements.txt", "requirements-build.txt"])
def test_pinned_packages_name_no_registry(name: str) -> None:
    text = (CONFIG / name).read_text()
    assert "://" not in text
    assert "index" not in text
    assert "@ " not in text


def test_every_dependency_has_an_upper_bound() -> None:
    for each in map(Requirement, asked_for("requirements.txt")):
        assert any(bound.operator == "<" for bound in each.specifier), str(each)


def test_the_container_fetches_nothing_without_a_hash() -> None:
    steps = re.split(r"&&|\n", CONTAINER.replace("\\\n", ""))
    commands = [step for step in steps if "/pip " in step]
    assert len(commands) == 4
    for command in commands:
        assert "--require-hashes" in command or "--no-deps" in command
        assert "/pip wheel" not in command or "--no-build-isolation" in command
