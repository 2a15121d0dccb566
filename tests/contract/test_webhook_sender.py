"""The sender of webhooks against real sockets: addresses, certificates, time limits."""

from __future__ import annotations

import asyncio
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
from tests.name_server import NameServer, name_server
from tests.receiver import HOST, Receiver, receiving
from tests.sandbox import ManualClock

LOOPBACK = Targets((ip_network("127.0.0.0/8"),))
ONE_ADDRESS = Targets((ip_network("127.0.0.1/32"),))
NOT_PUBLIC = DeliveryAttempt(None, "The host's address is not public.")
NOT_LOOKED_UP = DeliveryAttempt(None, "The host's name could not be looked up.")


@pytest.fixture
async def receiver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Receiver]:
    async with receiving(tmp_path) as ready:
        monkeypatch.setenv("SSL_CERT_FILE", str(ready.ca_file))
        yield ready


@asynccontextmanager
async def sending(targets: Targets = LOOPBACK, **options: Any) -> AsyncIterator[WebhookSender]:
    def sign(_content: bytes) -> bytes:
        return b"s" * 64

    async with webhook_sender(targets, sign, ManualClock(), **options) as sender:
        yield sender


@asynccontextmanager
async def resolving(
    *answers: list[str], targets: Targets = LOOPBACK, **options: Any
) -> AsyncIterator[tuple[WebhookSender, NameServer]]:
    """A sender, and a name server that answers each look-up of HOST with the next of the lists."""
    names = {HOST: list(answers), "other.example.net": list(answers)}
    async with (
        name_server(names if answers else {}) as server,
        sending(targets, name_servers=[server.address], **options) as sender,
    ):
        yield sender, server


async def sent(sender: WebhookSender, url: str) -> DeliveryAttempt:
    return await sender.send(Webhook(url), "msg_1_1", b"{}")


async def test_a_name_is_checked_by_its_certificate(receiver: Receiver) -> None:
    async with resolving(["127.0.0.1"]) as (sender, _):
        port = receiver.port
        assert await sent(sender, f"https://{HOST}:{port}/") == DeliveryAttempt(204)
        other = await sent(sender, f"https://other.example.net:{port}/")
        assert other.error == "The TLS certificate is not valid for this host."
    assert len(receiver.received) == 1


@pytest.mark.parametrize(
    "address", ["127.0.0.1", "::ffff:127.0.0.1", "::1", "10.0.0.1", "169.254.169.254"]
)
async def test_a_name_of_a_private_address_is_not_called(receiver: Receiver, address: str) -> None:
    async with resolving([address], targets=Targets()) as (sender, server):
        assert await sent(sender, f"https://{HOST}:{receiver.port}/") == NOT_PUBLIC
    assert server.asked == [HOST]
    assert receiver.received == []


async def test_a_private_address_itself_is_not_called(receiver: Receiver) -> None:
    async with sending(Targets()) as sender:
        for host in ("127.0.0.1", "[::ffff:127.0.0.1]", "[::1]"):
            assert await sent(sender, f"https://{host}:{receiver.port}/") == NOT_PUBLIC
    assert receiver.received == []


async def test_a_name_that_is_rebound_is_checked_each_time(receiver: Receiver) -> None:
    """Each connection is checked by its own lookup, and made to the address of that lookup."""
    answers = (["127.0.0.1"], ["127.0.0.2"], ["127.0.0.1"])
    async with resolving(*answers, targets=ONE_ADDRESS) as (sender, server):
        url = f"https://{HOST}:{receiver.port}/"
        assert [await sent(sender, url) for _ in range(3)] == [
            DeliveryAttempt(204), NOT_PUBLIC, DeliveryAttempt(204),
        ]  # fmt: skip
    assert server.asked == [HOST] * 3


async def test_of_several_addresses_only_permitted_ones_are_called(receiver: Receiver) -> None:
    answer = ["127.0.0.2", "10.0.0.1", "127.0.0.1"]
    async with resolving(answer, targets=ONE_ADDRESS) as (sender, _):
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


async def test_a_name_that_is_not_found_is_a_failure() -> None:
    async with resolving([]) as (sender, _):
        assert await sent(sender, f"https://{HOST}/") == NOT_LOOKED_UP


async def test_silent_name_server_is_left_in_time(receiver: Receiver) -> None:
    """The look-up has a time limit of its own, and takes none of the exchange's."""
    receiver.hold = asyncio.Event()
    async with resolving(["127.0.0.1"], lookup_seconds=0.5, seconds=0.2) as (sender, _):
        assert await sent(sender, "https://silent.example.net/") == NOT_LOOKED_UP
        failed = await sent(sender, f"https://{HOST}:{receiver.port}/")
        assert failed == DeliveryAttempt(None, "No answer within 0.2 s.")


async def test_slow_look_up_takes_no_time_of_the_exchange(receiver: Receiver) -> None:
    async with resolving(["127.0.0.1"], seconds=0.5) as (sender, server):
        server.delay = 0.7
        assert await sent(sender, f"https://{HOST}:{receiver.port}/") == DeliveryAttempt(204)


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
    async with (
        server,
        sending(Targets(onion=True), onion_proxy=f"socks5://127.0.0.1:{port}") as sender,
    ):
        assert await sent(sender, f"http://{host}/hook") == DeliveryAttempt(202)
    assert asked == [b"\x05\x01\x00\x03" + host.encode() + (80).to_bytes(2, "big")]


async def test_without_a_proxy_no_onion_service_is_looked_up() -> None:
    async with resolving(["127.0.0.1"]) as (sender, server):
        failed = await sent(sender, f"http://{'a' * 56}.onion/hook")
    assert failed.error == "The service has no proxy to Tor any more."
    assert server.asked == []
