"""The container, built from config/Containerfile and started with the image's configuration."""

from __future__ import annotations

import os
import shutil
import signal
import ssl
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest

from tests.container.images import Buildah, descendants, is_root, uid_of
from tests.e2e.processes import free_port, until
from tests.receiver import make_certificates

UID = 10001
MISSING = "needs root, buildah and mmdebstrap: run tools/container/install"


@pytest.fixture(scope="module")
def buildah(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Buildah]:
    """Buildah with the image built."""
    if not (is_root() and shutil.which("buildah") and shutil.which("mmdebstrap")):
        if os.environ.get("CONTAINER_REQUIRED"):
            pytest.fail(MISSING)
        pytest.skip(MISSING)
    builder = Buildah(tmp_path_factory.mktemp("images"))
    try:
        builder.build()
        yield builder
    finally:
        builder.call("rm", "--all")
        builder.call("rmi", "--all", "--force")


@pytest.fixture
def container(buildah: Buildah) -> Iterator[str]:
    """A container of the image."""
    made = buildah.call("from", "localhost/rpcsvc")
    yield made
    buildah.call("rm", made)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A volume owned by the service's user."""
    folder = tmp_path / "data"
    folder.mkdir(mode=0o700)
    os.chown(folder, UID, UID)
    for parent in folder.parents[:3]:  # pytest makes them private to its own user
        parent.chmod(0o755)
    return folder


def test_image_says_how_it_is_run(buildah: Buildah) -> None:
    config = buildah.config()
    assert config["User"] == "rpcsvc"
    assert config["StopSignal"] == "SIGTERM"
    assert list(config["Volumes"]) == ["/data"]
    assert config["Healthcheck"]["Test"][-2:] == ["--check", "live"]


def test_image_has_every_extra(buildah: Buildah, container: str) -> None:
    modules = "asyncpg, aiohttp_socks, eth_account, opentelemetry.sdk, rich.live"
    python = "/opt/rpcsvc/bin/python"
    buildah.call("run", "--isolation", "chroot", container, "--", python, "-c", f"import {modules}")


async def test_container_serves_a_swap_and_stops_in_order(
    buildah: Buildah, container: str, data: Path, tmp_path: Path
) -> None:
    config = buildah.config()
    authority, chain = make_certificates(tmp_path)
    chain.chmod(0o644)
    port, log = free_port(), tmp_path / "log"
    volumes = [f"--volume={data}:/data", f"--volume={tmp_path}:/tls:ro"]
    tls = ["--tls-cert", "/tls/server.pem", "--tls-key", "/tls/server.pem"]
    process = buildah.start(
        container, *volumes, "--network", "host", "--env", f"RPCSVC_PORT={port}",
        "--", *config["Entrypoint"], *tls, log=log,
    )  # fmt: skip
    trusted = ssl.create_default_context(cafile=str(authority))

    async def answers() -> bool:
        assert process.poll() is None, log.read_text()
        url = f"https://127.0.0.1:{port}/readyz"
        try:
            async with aiohttp.ClientSession() as session, session.get(url, ssl=trusted) as answer:
                return answer.status == 200
        except aiohttp.ClientError:
            return False

    def inside(*words: str) -> str:
        return buildah.call("run", "--isolation", "chroot", *volumes, container, "--", *words)

    try:
        await until(answers, seconds=60)
        inside(*config["Healthcheck"]["Test"][1:])
        assert "completed" in inside("/opt/rpcsvc/bin/rpcsvc", "demo", "--data-dir", "/data")
        *_, service = descendants(process.pid)
        assert uid_of(service) == UID
        os.kill(service, signal.SIGTERM)
        assert process.wait(60) == 0, log.read_text()
        assert '"event":"stopped"' in log.read_text()
    finally:
        for pid in descendants(process.pid) if process.poll() is None else ():
            os.kill(pid, signal.SIGKILL)
        process.wait(30)


def test_container_refuses_plain_http_to_others(
    buildah: Buildah, container: str, data: Path, tmp_path: Path
) -> None:
    log = tmp_path / "log"
    process = buildah.start(
        container, f"--volume={data}:/data", "--", *buildah.config()["Entrypoint"], log=log
    )
    assert process.wait(60) == 2
    assert "tls_cert" in log.read_text()
