"""A disk that can be full: fsync fails, as with delayed allocation."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest


class Disk:
    """``is_full``: every fsync fails. ``synced``: the files and directories synced so far.

    ``sizes``: what each of them had when it was synced last.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self.directories_fail = False
        self.synced: list[Path] = []
        self.sizes: dict[Path, int] = {}
        self._sync = os.fsync
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if self.is_full or (self.directories_fail and path.is_dir()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.synced.append(path)
        self.sizes[path] = os.fstat(fd).st_size
        self._sync(fd)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """The disk of this test."""
    return Disk(monkeypatch)
