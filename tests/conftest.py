"""Settings of all tests: Hypothesis draws the same examples in every run, without a deadline.

How long an example takes depends on the load of the machine. Tracebacks in the log are plain: rich,
which other packages install, takes a second to print one.
"""

from __future__ import annotations

import gc
import os
import stat
import sys
import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import pytest
import structlog
from hypothesis import HealthCheck, Phase, settings
from hypothesis.internal.conjecture import providers

from rpcsvc import settings_onchain
from rpcsvc.domain.chains import load_chains
from rpcsvc.store.backends.sqlite import database
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME
from tests.postgres import shared_server, stop_shared_server

settings.register_profile(
    "repeatable",
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
# Mutation testing asks whether an example fails, and not for the smallest.
settings.register_profile(
    "mutants", settings.get_profile("repeatable"), phases=(Phase.explicit, Phase.generate)
)
settings.load_profile("repeatable")

_configure = structlog.configure


def _configure_uncached(**how: Any) -> None:
    """A logger that keeps its first configuration would have it in all later tests."""
    _configure(**{**how, "cache_logger_on_first_use": False})


patch.object(structlog, "configure", _configure_uncached).start()
structlog.configure(
    processors=[
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.dev.ConsoleRenderer(
            colors=False, exception_formatter=structlog.dev.plain_traceback
        ),
    ],
    # Resolve sys.stderr at each write.
    logger_factory=lambda *_: structlog.WriteLogger(sys.stderr),
)
LOGGING: Final = structlog.get_config()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Undo what a command has set: its level would apply to all later tests of the process."""
    structlog.configure(**LOGGING)


# Hypothesis also draws numbers and texts that it finds in the modules loaded so far. These are
# others when one file runs than when all do, and others in each process of pytest-xdist.
patch.object(
    providers, "_get_local_constants", lambda: providers._local_constants, create=True
).start()


_prepare_file = database._prepare_file


@cache
def _new_file() -> tuple[int, bytes]:
    """Mode and content of a new database file, made once in each process."""
    with tempfile.TemporaryDirectory(prefix="rpcsvc-schema-") as folder:
        path = Path(folder) / DATABASE_NAME
        _prepare_file(path)
        return stat.S_IMODE(path.stat().st_mode), path.read_bytes()


def _prepare_by_copy(path: Path) -> None:
    """Give a database that does not exist the file that preparing it makes; prepare any other."""
    if path.exists():
        _prepare_file(path)
        return
    mode, content = _new_file()
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)


# Most tests open a new database, and it takes a hundred times as long to make one as to copy it.
patch.object(database, "_prepare_file", _prepare_by_copy).start()
# A table of chains never changes; each service reads its own.
patch.object(settings_onchain, "load_chains", cache(load_chains)).start()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest tests: else they run alone at the end."""
    items.sort(key=_seconds, reverse=True)


def _seconds(item: pytest.Item) -> int:
    """Seconds that a test takes, as its mark says: 0 for nearly all."""
    mark = item.get_closest_marker("slow")
    return 0 if mark is None else int(mark.kwargs.get("seconds", 0))


_RECURSION_LIMIT = sys.getrecursionlimit()

# Imported and collected objects stay until the end: keep the garbage collector from scanning them.
gc.disable()


def pytest_collection_finish() -> None:
    """Restore the recursion limit, which importing py_ecc raises (evm/keys.py)."""
    sys.setrecursionlimit(_RECURSION_LIMIT)
    gc.freeze()
    gc.enable()


def _shared_folder(factory: pytest.TempPathFactory, *, is_worker: bool) -> Path:
    """A folder that all workers of a run see."""
    base = factory.getbasetemp()
    return base.parent if is_worker else base


@pytest.fixture(scope="session")
def postgres(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], str]:
    """Call it for the URL of a PostgreSQL server, which is started if no test needed it before."""
    is_worker = hasattr(request.config, "workerinput")
    return partial(shared_server, _shared_folder(tmp_path_factory, is_worker=is_worker))


def pytest_sessionfinish(session: pytest.Session) -> None:
    """Stop the PostgreSQL server once every worker is done."""
    factory = getattr(session.config, "_tmp_path_factory", None)
    if factory is not None and not hasattr(session.config, "workerinput"):
        stop_shared_server(_shared_folder(factory, is_worker=False))
