"""The file of a secret that sessions are derived from: 64 hex digits, for its owner's eyes only."""

from __future__ import annotations

import os
import secrets
import stat
from pathlib import Path
from typing import Final

from rpcsvc.cli.context import UsageError, complain
from rpcsvc.client.sessions import BadSecret, Sessions, new_secret
from rpcsvc.durable_files import sync_directory, write_new

_LONGEST: Final = 4096


def sessions_at(path: Path, issuer: str, *, makes: bool) -> Sessions:
    """The sessions of the secret in a file; ``makes``: a missing file is made with a new one.

    Raises UsageError for a file that is missing, that others may read, or that holds no secret.
    """
    try:
        if makes and not path.exists():
            _make(path)
        text = _read(path)
    except FileNotFoundError as error:
        advice = "Make its folder first" if makes else "Give the file that you created orders with"
        raise UsageError(f"There is no file {path}. {advice}.") from error
    except OSError as error:
        raise UsageError(f"{path} can't be used: {error.strerror or error}.") from error
    try:
        return Sessions(text, issuer)
    except BadSecret as error:
        raise UsageError(f"{path}: {error}") from error


def _make(path: Path) -> None:
    """Write a new secret unless another process is faster. Raises OSError."""
    secret = new_secret()
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    write_new(fresh, f"{secret}\n".encode())
    try:
        path.hardlink_to(fresh)
        sync_directory(path.parent)
    except FileExistsError:
        return
    finally:
        fresh.unlink()
    complain(f"rpcsvc: made {path}. Keep a copy in a safe place: it brings your orders back.\n")


def _read(path: Path) -> str:
    """The text of a private file. Raises OSError, and UsageError if others may read it."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        found = os.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise UsageError(f"{path} is no regular file.")
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise UsageError(
                f"{path} has mode {stat.S_IMODE(found.st_mode):04o} and belongs to user"
                f" {found.st_uid}: others may read it. Own it, and give it mode 0600:"
                f" chmod 600 {path}"
            )
        return file.read(_LONGEST).decode("latin-1").strip()
