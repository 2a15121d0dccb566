"""A disk that can be full: what is synced then fails, as where blocks are given out late."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest


class Disk:
    """``is_full``: nothing can be synced. ``synced``: the files and directories that were."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full = False
        self.directories_fail = False
        self.synced: list[Path] = []
        self._sync = os.fsync
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _fsync(self, fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if self.is_full or (self.directories_fail and path.is_dir()):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.synced.append(path)
        self._sync(fd)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """The disk of this test."""
    return Disk(monkeypatch)
