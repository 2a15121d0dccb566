"""Writes small files so that they are on disk, complete or not at all, when the call returns.

The file and its directory are both synced.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path


def write_new(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file that is not there yet. Its name is on disk once ``sync_directory`` was called.

    Raises FileExistsError, also for a link that leads nowhere, and OSError; no file is left then.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(fd)
    except OSError:
        path.unlink(missing_ok=True)
        raise


def replace_file(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file, replacing any file of its name; a reader sees the old or the new one.

    Any number of processes may do so at once. Raises OSError.
    """
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    write_new(fresh, data, mode)
    try:
        fresh.replace(path)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise
    sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Have the names in a directory on disk, as they are now. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
