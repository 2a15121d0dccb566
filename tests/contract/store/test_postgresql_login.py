"""libpq's options in the URL of the database: TLS, and a file with passwords."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import asyncpg
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from rpcsvc.errors import Unavailable
from rpcsvc.store.backends.postgresql.database import PostgresqlDatabase
from rpcsvc.store.database import DatabaseUnusable
from tests.postgres import new_database, own_server

# SSLRequest of the protocol: its length, and a code in place of a version.
_SSL_REQUEST: Final = b"\x00\x00\x00\x08\x04\xd2\x16\x2f"
REFUSED: Final = (Unavailable, DatabaseUnusable)


def certificate(folder: Path, name: str) -> Path:
    """A file with a key and a self-signed certificate for a host."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(name)]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    path = folder / f"{name}.pem"
    path.write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        + made.public_bytes(serialization.Encoding.PEM)
    )
    return path


@asynccontextmanager
async def encrypted(server: str, certificate: Path) -> AsyncIterator[str]:
    """A TLS proxy before a server without TLS; its address, as ``host:port/database``."""
    parts = urlsplit(server)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        assert await reader.readexactly(len(_SSL_REQUEST)) == _SSL_REQUEST
        writer.write(b"S")
        try:
            await writer.start_tls(context)
        except (OSError, ssl.SSLError):  # the client refuses the certificate
            writer.close()
            return
        theirs, ours = await asyncio.open_connection(parts.hostname, parts.port)
        with suppress(OSError):
            await asyncio.gather(passed(reader, ours), passed(theirs, writer))

    listener = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    try:
        yield f"localhost:{port}{parts.path}"
    finally:
        listener.close()
        await listener.wait_closed()


async def passed(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy bytes until the end of the stream."""
    while data := await reader.read(65_536):
        writer.write(data)
        await writer.drain()
    writer.close()


async def is_let_in(url: str) -> bool:
    """Whether the database accepts a connection with this URL."""
    try:
        database = await PostgresqlDatabase.open(url)
    except REFUSED:
        return False
    found = await database.fetch("SELECT 1 AS one")
    await database.close()
    return [row["one"] for row in found] == [1]


@pytest.fixture
async def server(postgres: Callable[[], str]) -> AsyncIterator[str]:
    """The URL of a database, without TLS and password."""
    async with new_database(postgres()) as url:
        yield url


async def test_verify_full_wants_this_host_of_this_authority(server: str, tmp_path: Path) -> None:
    ours, other = certificate(tmp_path, "localhost"), certificate(tmp_path, "db.example")
    async with encrypted(server, ours) as place:
        url = f"postgresql://postgres@{place}?sslmode=verify-full&sslrootcert="
        assert await is_let_in(f"{url}{ours}")
        assert not await is_let_in(f"{url}{other}"), "of another authority"
    async with encrypted(server, other) as place:
        url = f"postgresql://postgres@{place}?sslrootcert={other}&sslmode="
        assert await is_let_in(f"{url}verify-ca")
        assert not await is_let_in(f"{url}verify-full"), "for another host"


async def test_required_tls_is_enforced(server: str) -> None:
    assert await is_let_in(f"{server}?sslmode=prefer")
    assert not await is_let_in(f"{server}?sslmode=require")


@pytest.fixture
def guarded() -> Iterator[str]:
    """Host and port of a server that asks the role ``clerk`` for a password."""
    with own_server() as server:
        rules = server.folder / "data/pg_hba.conf"
        guard = "host all clerk 127.0.0.1/32 scram-sha-256\n"
        rules.write_text(guard + rules.read_text())
        server.stop()
        server.start()
        yield f"127.0.0.1:{server.port}"


async def test_password_is_read_from_the_passfile(guarded: str, tmp_path: Path) -> None:
    admin = await asyncpg.connect(f"postgresql://postgres@{guarded}/postgres")
    await admin.execute("CREATE ROLE clerk LOGIN PASSWORD 'correct horse'")
    await admin.execute("CREATE DATABASE clerk OWNER clerk TEMPLATE template0 ENCODING 'UTF8'")
    await admin.close()
    url = f"postgresql://clerk@{guarded}/clerk?passfile="
    for name, password in (("right", "correct horse"), ("wrong", "battery staple")):
        path = tmp_path / name
        path.write_text(f"{guarded}:clerk:clerk:{password}\n")
        path.chmod(0o600)
        assert await is_let_in(f"{url}{path}") == (name == "right")
