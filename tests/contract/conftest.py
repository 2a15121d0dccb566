"""Fixtures of the contract tests."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest
import pytest_asyncio

from rpcsvc.settlement.upstream import wiring
from rpcsvc.settlement.upstream.transport import ClientOptions
from tests.contract.faulty_line import FaultyLine, faulty_line
from tests.contract.serving import Served, serving
from tests.contract.sidecar import beside
from tests.e2e.patched import POLLING
from tests.postgres import new_database

# All tests of a service of their own run on both databases; on PostgreSQL those of creating,
# retrying, reading, following and cancelling orders are quick tests, the others slow ones.
_QUICK = {"test_cancel", "test_envelope", "test_event_stream", "test_idempotency"}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test once on each database."""
    if "database_url" in metafunc.fixturenames:
        is_quick = metafunc.module.__name__.rpartition(".")[2] in _QUICK
        marks = () if is_quick else (pytest.mark.slow,)
        databases = ["sqlite", pytest.param("postgresql", marks=marks)]
        metafunc.parametrize("database_url", databases, indirect=True)


@pytest.fixture
async def database_url(
    request: pytest.FixtureRequest, postgres: Callable[[], str]
) -> AsyncIterator[str | None]:
    """The URL of a new PostgreSQL database where the test is parametrised so; None: SQLite."""
    if getattr(request, "param", "sqlite") == "sqlite":
        yield None
        return
    async with new_database(postgres()) as url:
        yield url


@pytest.fixture
async def served(tmp_path: Path, database_url: str | None) -> AsyncIterator[Served]:
    """A service without token and rate limits."""
    async with serving(tmp_path, database_url=database_url) as ready:
        yield ready


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Served]:
    """A service for all tests of a module: for calls that change nothing.

    The module names it ``served``, and runs its tests in its loop:
    ``pytestmark = pytest.mark.asyncio(loop_scope="module")``.
    """
    async with serving(tmp_path_factory.mktemp("shared")) as ready:
        yield ready


@pytest.fixture
def short_retries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses between looks at payments, and before a lost call is sent again."""
    monkeypatch.setattr(wiring, "POLL_MS", 100)
    monkeypatch.setattr(wiring, "ClientOptions", partial(ClientOptions, backoff_ms=25))


@pytest.fixture
def short_pauses(short_retries: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten the pauses between polls of an upstream, too.

    Not for payments of a new order: the first poll may change it while they are checked.
    """
    for constant, value in POLLING.items():
        monkeypatch.setattr(constant, value)


@pytest.fixture
async def line(served: Served) -> AsyncIterator[FaultyLine]:
    """A proxy to the service that may lose calls."""
    async with faulty_line(served.url) as found:
        yield found


@pytest.fixture
async def central(tmp_path: Path) -> AsyncIterator[Served]:
    """The service that a sidecar passes orders on to."""
    async with serving(tmp_path / "central") as ready:
        yield ready


@pytest.fixture
async def sidecar(central: Served, tmp_path: Path) -> AsyncIterator[Served]:
    """A sidecar of ``central``."""
    async with beside(central, tmp_path / "sidecar") as ready:
        yield ready
