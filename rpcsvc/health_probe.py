"""``rpcsvc health`` over the UNIX socket: a probe runs it every few seconds.

It imports little, and of the standard library only what it needs. What it does not know (a URL, a
configuration file, wrong options) is left to the whole command line.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence

from rpcsvc.terminal import printable

SOCKET_NAME = "rpcsvc.sock"
DEFAULT_DATA_DIR = "./var"
PATHS = {"health": "/health", "ready": "/readyz", "live": "/livez"}
CONNECT_SECONDS = 2
ANSWER_SECONDS = 30
LARGEST_ANSWER = 2**20
# As cli/context.py has them.
OK, FAILED, USAGE, UNREACHABLE = 0, 1, 2, 3
# struct ucred of unix(7): process, user and group of the peer.
_PEER = struct.Struct("iII")
_OPTIONS = ("--check", "--data-dir")
_DATA_DIR = "RPCSVC_DATA_DIR"
_ELSEWHERE = (_DATA_DIR, "RPCSVC_URL", "RPCSVC_CONFIG")


class UntrustedSocket(Exception):
    """Somebody else listens on the data directory's socket."""


def probe(words: Sequence[str], environ: Mapping[str, str]) -> int | None:
    """Carry out ``rpcsvc health`` with these words; None when that is not for the probe."""
    options = _read(words)
    path = None if options is None else PATHS.get(options.get("--check", "health"))
    if options is None or path is None or any(map(_is_elsewhere, environ)):
        return None
    data_dir = options.get("--data-dir", environ.get(_DATA_DIR, DEFAULT_DATA_DIR))
    return ask(data_dir, path) if data_dir else None


def _is_elsewhere(name: str) -> bool:
    """Whether a variable says where the service is in a way that is not the probe's to read."""
    return name.upper() in _ELSEWHERE and name != _DATA_DIR


def _read(words: Sequence[str]) -> dict[str, str] | None:
    """The options by name; None for words that the probe does not know."""
    found: dict[str, str] = {}
    left = list(words)
    while left:
        name, _, value = left.pop(0).partition("=")
        if name not in _OPTIONS or name in found:
            return None
        if not value:
            if not left:
                return None
            value = left.pop(0)
        if not value or value.startswith("-"):
            return None
        found[name] = value
    return found


def ask(data_dir: str | os.PathLike[str], path: str) -> int:
    """Print what the service on a data directory answers to a GET; the exit status."""
    name = os.path.join(data_dir, SOCKET_NAME)  # noqa: PTH118 - pathlib costs a probe too much
    try:
        connection = connected(name, CONNECT_SECONDS)
    except UntrustedSocket as error:
        return _complain(str(error), USAGE)
    except OSError:
        return _complain(
            f"No service runs on the data directory {os.path.normpath(data_dir)}. Start one, or"
            " give --url.",
            UNREACHABLE,
        )
    try:
        with connection:
            connection.settimeout(ANSWER_SECONDS)
            connection.sendall(b"GET %b HTTP/1.0\r\nhost: localhost\r\n\r\n" % path.encode())
            status, body = _answer(connection)
    except (OSError, ValueError) as error:
        return _complain(f"No service answers at {name}: {error}.", UNREACHABLE)
    sys.stdout.write(printable(body.decode("utf-8", "replace")) + "\n")
    return OK if status == 200 else FAILED


def _answer(connection: socket.socket) -> tuple[int, bytes]:
    """Status and body, read to the end of the connection. Raises ValueError for what is no HTTP."""
    received = b""
    while piece := connection.recv(65536):
        received += piece
        if len(received) > LARGEST_ANSWER:
            raise ValueError(f"it answers with more than {LARGEST_ANSWER} bytes")
    head, end, body = received.partition(b"\r\n\r\n")
    protocol, _, status = head.partition(b" ")
    if not end or not protocol.startswith(b"HTTP/1.") or not status[:3].isdigit():
        raise ValueError("it does not answer in HTTP")
    for line in head.lower().split(b"\r\n"):
        name, _, value = line.partition(b":")
        if name == b"content-length" and len(body) < int(value):
            raise ValueError("its answer breaks off")
    return int(status[:3]), body


def connected(path: str, seconds: float | None) -> socket.socket:
    """A connected UNIX socket. Raises OSError, also for a path that is too long for one.

    Raises UntrustedSocket unless this user, root, or for root the directory's owner listens.
    """
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        made.settimeout(seconds)
        made.connect(path)
        _require_trusted(made, path)
    except (OSError, UntrustedSocket):
        made.close()
        raise
    return made


def _require_trusted(connection: socket.socket, path: str) -> None:
    owner = _listener_of(connection)
    ours = os.geteuid()
    trusted = {0, ours} if ours else {0, os.stat(os.path.dirname(path) or ".").st_uid}  # noqa: PTH116, PTH120 - as above
    if owner not in trusted:
        raise UntrustedSocket(
            f"User id {owner} listens on {path}, and you are {ours}: nothing was sent. Run the"
            " command as the service's user, or give the --data-dir of your own service."
        )


def _listener_of(connection: socket.socket) -> int:
    """The user id of the process that listens at the other end."""
    peer = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
    return int(_PEER.unpack(peer)[1])


def _complain(text: str, status: int) -> int:
    sys.stderr.write(printable(f"rpcsvc: {text}\n"))
    return status
