"""Where a CLI call goes: a URL, the socket of a server on this data directory, or this process.

What does not live here: which calls there are (cli.py), the state file (cli_state.py).
"""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

SOCKET_NAME = "rpcsvc.sock"
TIMEOUT_SECONDS = 30
Json = dict[str, Any]


class Unreachable(Exception):
    """No service answers there."""


class _UnixConnection(http.client.HTTPConnection):
    """HTTP over a UNIX socket."""

    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=TIMEOUT_SECONDS)
        self._path = str(path)

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT_SECONDS)
        self.sock.connect(self._path)


def socket_of(data_dir: Path) -> Path | None:
    """The socket of a server that runs on the data directory, if one answers."""
    path = data_dir / SOCKET_NAME
    probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        probe.connect(str(path))
    except OSError:
        return None
    else:
        return path
    finally:
        probe.close()


def connection_to(url: str) -> http.client.HTTPConnection:
    """A connection to a service's root URL. Raises Unreachable for a URL that can't be one."""
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise Unreachable(f"{url} is not an http:// or https:// address.")
    if parts.scheme == "https":
        context = ssl.create_default_context()
        return http.client.HTTPSConnection(
            parts.hostname, parts.port, timeout=TIMEOUT_SECONDS, context=context
        )
    return http.client.HTTPConnection(parts.hostname, parts.port, timeout=TIMEOUT_SECONDS)


def connection_to_socket(path: Path) -> http.client.HTTPConnection:
    """A connection to the socket of a local server."""
    return _UnixConnection(path)


def call_rpc(
    connection: http.client.HTTPConnection,
    method: str,
    params: Json,
    *,
    request_id: str | None,
    token: str | None,
) -> Json:
    """Send one JSON-RPC call; the envelope, also of a call that was refused as a message.

    Raises Unreachable.
    """
    headers = {"content-type": "application/json"}
    if token:
        headers["x-agent-rpc-token"] = token
    if request_id:
        headers["x-request-id"] = request_id
    message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    try:
        connection.request("POST", "/rpc", json.dumps(message), headers)
        answer = json.loads(connection.getresponse().read())
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise Unreachable(f"The service does not answer: {error}.") from error
    finally:
        connection.close()
    if "result" in answer:
        return dict(answer["result"])
    return _refused(method, answer["error"])


def _refused(method: str, error: Json) -> Json:
    """A JSON-RPC error as an envelope: whoever reads stdout finds one shape only."""
    data = error.get("data", {})
    code = data.get("code", "internal_error")
    known_state = code in ("rate_limited", "internal_error")
    return {
        "ok": False,
        "operation": method.split(".", 1)[-1],
        "state": code if known_state else "invalid_input",
        "missingInputs": [],
        "validationErrors": [],
        "nextActions": [],
        "data": {},
        "requestId": data.get("requestId", ""),
        "error": {
            "code": code,
            "message": error.get("message", ""),
            "retryable": data.get("retryable", False),
        },
    }
