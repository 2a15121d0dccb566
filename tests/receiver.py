"""A receiver of webhooks: a real HTTPS server on loopback, certified by a CA of the test."""

from __future__ import annotations

import asyncio
import datetime
import ipaddress
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

from aiohttp import web
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

HOST = "hooks.example.net"
_FROM = datetime.datetime(2020, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(2060, 1, 1, tzinfo=datetime.UTC)


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])


def _signs_certificates() -> x509.KeyUsage:
    return x509.KeyUsage(
        key_cert_sign=True, crl_sign=True,
        digital_signature=False, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip


def make_certificates(folder: Path) -> tuple[Path, Path]:
    """A CA's certificate, and the chain with key of a server at HOST and 127.0.0.1.

    With what RFC 5280, sections 4.2.1.1 to 4.2.1.3, asks of them: Python 3.13 checks it.
    """
    ca_key, key = (ec.generate_private_key(ec.SECP256R1()) for _ in range(2))
    base = x509.CertificateBuilder().not_valid_before(_FROM).not_valid_after(_UNTIL)
    ca = (
        base.subject_name(_named("test CA"))
        .issuer_name(_named("test CA"))
        .public_key(ca_key.public_key())
        .serial_number(1)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .add_extension(_signs_certificates(), critical=True)
        .add_extension(
            x509.SubjectKeyIdentifier.from_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    names = x509.SubjectAlternativeName(
        [x509.DNSName(HOST), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
    )
    leaf = (
        base.subject_name(_named(HOST))
        .issuer_name(ca.subject)
        .public_key(key.public_key())
        .serial_number(2)
        .add_extension(names, critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_public_key(ca_key.public_key()), critical=False
        )
        .sign(ca_key, hashes.SHA256())
    )
    ca_file, chain = folder / "ca.pem", folder / "server.pem"
    ca_file.write_bytes(ca.public_bytes(serialization.Encoding.PEM))
    chain.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + leaf.public_bytes(serialization.Encoding.PEM)
    )
    return ca_file, chain


class Received(NamedTuple):
    """One request."""

    path: str
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def sequence(self) -> int:
        return int(self.json["data"]["sequence"])


Answering = Callable[[Received], web.StreamResponse]


class Receiver:
    """Keeps the requests; answers 204 unless ``answer`` says otherwise."""

    def __init__(self, ca_file: Path) -> None:
        self.ca_file = ca_file
        self.port = 0
        self.received: list[Received] = []
        self.answer: Answering = lambda _received: web.Response(status=204)
        self.hold: asyncio.Event | None = None
        self._came = asyncio.Condition()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}/hook"

    async def handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        names = {name.lower(): value for name, value in request.headers.items()}
        received = Received(request.path_qs, names, body)
        async with self._came:
            self.received.append(received)
            self._came.notify_all()
        if self.hold is not None:
            await self.hold.wait()
        return self.answer(received)

    async def until(self, count: int, seconds: float = 60) -> list[Received]:
        """Wait for so many requests."""
        async with asyncio.timeout(seconds), self._came:
            await self._came.wait_for(lambda: len(self.received) >= count)
        return list(self.received)

    def sequences(self) -> list[int]:
        return [each.sequence for each in self.received]


@asynccontextmanager
async def receiving(folder: Path) -> AsyncIterator[Receiver]:
    """A receiver on a free port of loopback."""
    ca_file, chain = make_certificates(folder)
    receiver = Receiver(ca_file)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(chain)
    app = web.Application()
    app.router.add_route("*", "/{tail:.*}", receiver.handle)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
    await site.start()
    receiver.port = runner.addresses[0][1]
    try:
        yield receiver
    finally:
        if receiver.hold is not None:
            receiver.hold.set()
        await runner.cleanup()
