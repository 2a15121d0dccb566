"""The sender of webhooks against real sockets: addresses, certificates, time limits."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from ipaddress import ip_network
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from rpcsvc import webhook_sender as module
from rpcsvc.domain.webhooks import DeliveryAttempt, Targets, Webhook
from rpcsvc.webhook_sender import WebhookSender, webhook_sender
from tests.receiver import HOST, Receiver, receiving
from tests.sandbox import ManualClock

LOOPBACK = Targets((ip_network("127.0.0.0/8"),))
NOT_PUBLIC = DeliveryAttempt(None, "The host's address is not public.")
Lookup = list[tuple[Any, ...]]


@pytest.fixture
async def receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Receiver]:
    async with receiving(tmp_path) as ready:
        monkeypatch.setenv("SSL_CERT_FILE", str(ready.ca_file))
        yield ready


@asynccontextmanager
async def sending(
    targets: Targets = LOOPBACK, seconds: float = 15, proxy: str = ""
) -> AsyncIterator[WebhookSender]:
    def sign(_content: bytes) -> bytes:
        return b"s" * 64

    made = webhook_sender(targets, sign, ManualClock(), seconds=seconds, onion_proxy=proxy)
    async with made as sender:
        yield sender


async def sent(sender: WebhookSender, url: str) -> DeliveryAttempt:
    return await sender.send(Webhook(url), "msg_1_1", b"{}")


def resolving(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Answer DNS lookups with the next of the answers each; returns the names looked up."""
    asked: list[str] = []

    def lookup(host: str, port: int, _family: int, kind: int) -> Lookup:
        asked.append(host)
        addresses = answers[min(len(asked), len(answers)) - 1]
        return [
            (
                socket.AF_INET6 if ":" in address else socket.AF_INET,
                kind,
                6,
                "",
                (address, port, 0, 0) if ":" in address else (address, port),
            )
            for address in addresses
        ]

    monkeypatch.setattr(module, "lookup", lookup)
    return asked


async def test_a_name_is_checked_by_its_certificate(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving(monkeypatch, ["127.0.0.1"])
    async with sending() as sender:
        port = receiver.port
        assert await sent(sender, f"https://{HOST}:{port}/") == DeliveryAttempt(204)
        other = await sent(sender, f"https://other.example.net:{port}/")
        assert other.error == "The TLS certificate is not valid for this host."
    assert len(receiver.received) == 1


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "::ffff:127.0.0.1", "::1", "10.0.0.1", "169.254.169.254"]
)
async def test_a_name_of_a_private_address_is_not_called(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, address: str
) -> None:
    asked = resolving(monkeypatch, [address])
    async with sending(Targets()) as sender:
        assert await sent(sender, f"https://{HOST}:{receiver.port}/") == NOT_PUBLIC
    assert asked == [HOST]
    assert receiver.received == []


async def test_a_private_address_itself_is_not_called(receiver: Receiver) -> None:
    async with sending(Targets()) as sender:
        for host in ("127.0.0.1", "[::ffff:127.0.0.1]", "[::1]"):
            assert await sent(sender, f"https://{host}:{receiver.port}/") == NOT_PUBLIC
    assert receiver.received == []


async def test_a_name_that_is_rebound_is_checked_each_time(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each connection is checked by its own lookup, and made to the address of that lookup."""
    asked = resolving(monkeypatch, ["127.0.0.1"], ["127.0.0.2"], ["127.0.0.1"])
    async with sending(Targets((ip_network("127.0.0.1/32"),))) as sender:
        url = f"https://{HOST}:{receiver.port}/"
        assert [await sent(sender, url) for _ in range(3)] == [
            DeliveryAttempt(204), NOT_PUBLIC, DeliveryAttempt(204),
        ]  # fmt: skip
    assert asked == [HOST] * 3


async def test_of_several_addresses_only_permitted_ones_are_called(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    resolving(monkeypatch, ["127.0.0.2", "10.0.0.1", "127.0.0.1"])
    async with sending(Targets((ip_network("127.0.0.1/32"),))) as sender:
        assert await sent(sender, f"https://{HOST}:{receiver.port}/") == DeliveryAttempt(204)


async def test_a_receiver_that_does_not_answer_is_left_in_time(receiver: Receiver) -> None:
    receiver.hold = asyncio.Event()
    async with sending(seconds=0.2) as sender:
        assert await sent(sender, receiver.url) == DeliveryAttempt(None, "No answer within 0.2 s.")


async def test_an_endless_body_is_not_read(receiver: Receiver) -> None:
    class Endless(web.StreamResponse):
        async def write_eof(self, data: bytes = b"") -> None:
            while True:
                await self.write(b"x" * 65_536)

    receiver.answer = lambda _got: Endless()
    async with sending() as sender, asyncio.timeout(10):
        assert await sent(sender, receiver.url) == DeliveryAttempt(200)


async def test_an_endless_head_is_a_failure(receiver: Receiver) -> None:
    receiver.answer = lambda _got: web.Response(headers={"x-long": "x" * 100_000})
    async with sending() as sender, asyncio.timeout(10):
        failed = await sent(sender, receiver.url)
    assert failed.error == "The connection was lost, or the answer was not HTTP."


async def test_where_nobody_listens_there_is_no_connection(receiver: Receiver) -> None:
    async with sending() as sender:
        failed = await sent(sender, "https://127.0.0.1:1/")
    assert failed == DeliveryAttempt(None, "No connection could be made.")


async def test_a_name_that_is_not_found_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(*_args: object) -> Lookup:
        raise socket.gaierror(socket.EAI_NONAME, "unknown")

    monkeypatch.setattr(module, "lookup", lookup)
    async with sending() as sender:
        failed = await sent(sender, f"https://{HOST}/")
    assert failed == DeliveryAttempt(None, "No connection could be made.")


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("120", 120),
        ("Thu, 20 Nov 2025 22:34:20 GMT", 60),
        ("Thu, 20 Nov 2024 22:34:20 GMT", 0),
        ("soon", None),
        ("", None),
        ("-5", None),
        ("99999999999999", 999_999_999),
    ],
)
async def test_retry_after_is_read_as_seconds_or_a_date(text: str, seconds: int | None) -> None:
    found = module.retry_after_ms(text, 1_763_678_000_000)
    assert found == (None if seconds is None else seconds * 1000)


async def test_an_onion_service_is_called_through_the_proxy() -> None:
    """A SOCKS proxy that resolves the name itself, and an HTTP server behind it."""
    asked: list[bytes] = []

    async def proxy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        count = (await reader.readexactly(2))[1]
        await reader.readexactly(count)
        writer.write(b"\x05\x00")
        head = await reader.readexactly(5)
        asked.append(head[:4] + await reader.readexactly(head[4] + 2))
        writer.write(b"\x05\x00\x00\x01\x00\x00\x00\x00\x00\x00")
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 202 Accepted\r\ncontent-length: 0\r\n\r\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(proxy, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    host = f"{'a' * 56}.onion"
    async with server, sending(Targets(onion=True), proxy=f"socks5://127.0.0.1:{port}") as sender:
        assert await sent(sender, f"http://{host}/hook") == DeliveryAttempt(202)
    assert asked == [b"\x05\x01\x00\x03" + host.encode() + (80).to_bytes(2, "big")]


async def test_without_a_proxy_no_onion_service_is_looked_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = resolving(monkeypatch, ["127.0.0.1"])
    async with sending() as sender:
        failed = await sent(sender, f"http://{'a' * 56}.onion/hook")
    assert failed.error == "The service has no proxy to Tor any more."
    assert asked == []
