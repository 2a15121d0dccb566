"""A caller that resets its connection before its request is read is not trusted as local."""

from __future__ import annotations

import contextlib
import json
import socket
import sqlite3
import struct
from pathlib import Path

from tests.contract.serving import SWAP, TOKEN
from tests.e2e.processes import Server

CALLERS = 100
# On close, reset the connection: to the server it has no peer address from then on.
RESET = struct.pack("ii", 1, 0)


def call(port: int, number: int) -> None:
    """Create an order without a token and reset the connection at once."""
    message = {"jsonrpc": "2.0", "id": number, "method": "service.swap.create", "params": SWAP}
    body = json.dumps(message).encode()
    head = (
        f"POST /rpc HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    with socket.create_connection(("127.0.0.1", port)) as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
        connection.sendall(head.encode() + body)


async def test_disconnected_caller_is_not_mistaken_for_the_socket(
    tmp_path: Path,
) -> None:
    server = Server(tmp_path / "data", environ={"AGENT_RPC_TOKEN": TOKEN})
    try:
        await server.ready()
        for number in range(CALLERS):
            call(server.port, number)
    finally:
        assert server.stop() == 0
    with contextlib.closing(sqlite3.connect(tmp_path / "data" / "rpcsvc.db")) as db:
        assert db.execute("SELECT count(*) FROM orders").fetchone() == (0,)
