"""Certificates of servers, checked by a process that imported aiohttp as the service does."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

from tests.receiver import receiving

CODE = """
import asyncio, sys
from rpcsvc.importing import Importing
with Importing():
    import rpcsvc.serving
from aiohttp import ClientSession
from rpcsvc.client.aio import AioTransport
from rpcsvc.client.transport import Endpoint, ServiceRequest
from rpcsvc.http_client import HttpRequest, NotReached, exchange

async def main(url):
    async with ClientSession() as session:
        try:
            print((await exchange(session, HttpRequest("GET", url, 10, 100))).status)
        except NotReached as error:
            print(type(error.cause).__name__)
    transport = AioTransport(Endpoint("service", url))
    try:
        async with transport.stream(ServiceRequest("GET", "/", seconds=10)) as answer:
            print(answer.status)
    except Exception as error:
        print(type(error).__name__)
    await transport.close()

print("rich" in sys.modules)
asyncio.run(main(sys.argv[1]))
"""


async def said(url: str, ca_file: Path) -> list[str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", CODE, url,
        env={**os.environ, "SSL_CERT_FILE": str(ca_file)},
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, _ = await process.communicate()
    return out.decode().split()


async def test_system_trust_takes_a_server_whose_ca_is_known(tmp_path: Path) -> None:
    async with receiving(tmp_path) as receiver:
        assert await said(receiver.url, receiver.ca_file) == ["False", "204", "204"]


async def test_system_trust_refuses_a_server_of_another_ca(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    async with receiving(tmp_path) as receiver, receiving(other) as unrelated:
        refused = ["False", "ClientConnectorCertificateError", "Unreachable"]
        assert await said(receiver.url, unrelated.ca_file) == refused
        assert receiver.received == []
