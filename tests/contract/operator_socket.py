"""Calls of admin methods over the UNIX socket, as the commands of the operator send them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp

from rpcsvc.local_secret import operator_headers
from tests.contract.serving import Served
from tests.operator_cli import on_socket


class Socket:
    """Calls over the UNIX socket."""

    def __init__(self, session: aiohttp.ClientSession, proof: dict[str, str]) -> None:
        self._session = session
        self.proof = proof

    async def call(self, method: str, params: Any) -> Any:
        """The answer to a call as commands send it."""
        return await (await self.send(method, params, self.proof)).json()

    async def send(
        self, method: str, params: Any, headers: dict[str, str]
    ) -> aiohttp.ClientResponse:
        message = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
        return await self._session.post("http://localhost/rpc", json=message, headers=headers)


@asynccontextmanager
async def over_socket(served: Served) -> AsyncIterator[Socket]:
    async with on_socket(served.up):
        data_dir = served.up.settings.data_dir
        connector = aiohttp.UnixConnector(str(data_dir / "rpcsvc.sock"))
        async with aiohttp.ClientSession(connector=connector) as session:
            yield Socket(session, operator_headers(data_dir))
