"""Builds config/Containerfile with buildah, and runs the image. Needs root."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
CONTAINERFILE: Final = ROOT / "config" / "Containerfile"
IMAGE: Final = "localhost/rpcsvc"
# Debian's Python, under the path that the official image has.
PACKAGES: Final = "python3,python3-venv,python-is-python3,ca-certificates"
# pip's settings on this machine: a build uses the same registries.
PIP_FILES: Final = (Path("/etc/pip.conf"), Path("/etc/ssl/certs"))


class Buildah:
    """Calls buildah with a storage of its own."""

    def __init__(self, storage: Path) -> None:
        self._storage = storage
        self._program = [
            "buildah", "--root", str(storage / "root"), "--runroot", str(storage / "run"),
        ]  # fmt: skip

    def call(self, *words: str, seconds: float = 300) -> str:
        """Its stdout. Raises CalledProcessError with its output."""
        done = subprocess.run(
            [*self._program, *words], capture_output=True, text=True, timeout=seconds, check=False
        )
        if done.returncode:
            raise AssertionError(f"buildah {words[0]}: {done.stderr[-4000:]}")
        return done.stdout.strip()

    def start(self, container: str, *words: str, log: Path) -> subprocess.Popen[bytes]:
        """A command in a container; ``words`` are options, then ``--`` and the command."""
        with log.open("wb") as output:
            return subprocess.Popen(
                [*self._program, "run", "--isolation", "chroot", *words[: words.index("--")],
                 container, *words[words.index("--") :]],
                stdout=output, stderr=output,
            )  # fmt: skip

    def config(self) -> dict[str, Any]:
        """The image's configuration in Docker's format, which has health checks."""
        found = json.loads(self.call("inspect", "--type", "image", IMAGE))
        return dict(found["Docker"]["config"])

    def build(self) -> None:
        """Build the image, on the base image that it names if a registry is reachable."""
        (base,) = set(re.findall(r"^FROM (\S+)", CONTAINERFILE.read_text(), re.MULTILINE))
        if not self._pulled(base):
            self._make(base)
        places = [place for path in PIP_FILES for place in (path, *_named_in(path))]
        volumes = [f"--volume={place}:{place}:ro" for place in dict.fromkeys(places)]
        self.call(
            "build", "--isolation", "chroot", "--format", "docker", "--pull-never",
            "--network", "host", *volumes, "--file", str(CONTAINERFILE), "--tag", IMAGE, str(ROOT),
            seconds=900,
        )  # fmt: skip

    def _pulled(self, base: str) -> bool:
        try:
            self.call("pull", "--quiet", base)
        except AssertionError:
            return False
        return True

    def _make(self, base: str) -> None:
        """Make a base image of that name from Debian's packages."""
        archive = self._storage / "base.tar"
        making = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={PACKAGES}"]
        subprocess.run([*making, _release(), str(archive)], check=True, timeout=600)
        container = self.call("from", "scratch")
        self.call("add", container, str(archive), "/")
        self.call("commit", "--quiet", "--rm", container, base)
        archive.unlink()


def _release() -> str:
    """The code name of this machine's Debian."""
    (name,) = re.findall(r"^VERSION_CODENAME=(\w+)$", Path("/etc/os-release").read_text(), re.M)
    return str(name)


def _named_in(path: Path) -> Iterator[Path]:
    """Directories that a file of settings names."""
    if path.is_file():
        for name in re.findall(r"(?<![\w/])/[\w./-]+", path.read_text()):
            if (named := Path(name)).is_dir():
                # .../simple is an index of files beside it.
                yield named.parent if named.name == "simple" else named


def descendants(pid: int) -> list[int]:
    """The processes under one, nearest first."""
    found, left = [], [pid]
    while left:
        parent = left.pop(0)
        for task in Path(f"/proc/{parent}/task").iterdir():
            left += map(int, (task / "children").read_text().split())
        found.append(parent)
    return found[1:]


def is_root() -> bool:
    """Whether images can be built here."""
    return os.geteuid() == 0


def uid_of(pid: int) -> int:
    """The user id of a process."""
    return Path(f"/proc/{pid}").stat().st_uid
