"""Reports why a command can't open the data directory, or run the service itself."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager

from rpcsvc.cli.context import UsageError
from rpcsvc.client.errors import Unreachable
from rpcsvc.engines import ENGINES
from rpcsvc.settings import Settings
from rpcsvc.signing import SigningKeyError
from rpcsvc.store.backends.sqlite.database import DataDirInUse
from rpcsvc.store.database import DatabaseInUse, DatabaseUnusable
from rpcsvc.store.schema import UnknownSchema


@contextmanager
def in_process(settings: Settings) -> Iterator[None]:
    """Guard a command that runs the whole service in this process.

    Raises Unreachable for an engine that signs: the start of a service sends due payments, which a
    command must not do. Otherwise raises as ``opening``.
    """
    if ENGINES[settings.engine].signs:
        raise Unreachable(
            f"No service answers on the data directory {settings.data_dir}. With engine"
            f" {settings.engine} only the service itself moves money: start it with rpcsvc serve,"
            " or give --url."
        )
    with opening(settings):
        yield


@contextmanager
def opening(settings: Settings) -> Iterator[None]:
    """Turn the reasons why the service can't run in this process into one-line errors.

    Raises Unreachable if another process has the data directory, else UsageError.
    """
    try:
        yield
    except DataDirInUse as error:
        raise Unreachable(
            f"Another process has the data directory {settings.data_dir}, but does not answer on"
            " its socket. Wait until it has started or stopped, or give --url."
        ) from error
    except DatabaseInUse as error:
        raise Unreachable(str(error)) from error
    except (DatabaseUnusable, UnknownSchema, SigningKeyError) as error:
        if isinstance(error, DatabaseUnusable) and settings.database_url is None:
            raise UsageError(_unusable(settings, error)) from error
        raise UsageError(str(error)) from error
    except BrokenPipeError:
        raise  # the error is stdout's, not the data directory's
    except (OSError, sqlite3.Error) as error:
        raise UsageError(_unusable(settings, error)) from error


def _unusable(settings: Settings, error: Exception) -> str:
    return (
        f"The data directory {settings.data_dir} can't be used: {error}."
        " Give another one with --data-dir, or check it with: rpcsvc db check"
    )
