"""What the operator's commands share: which engine there must be, what runs, how a table looks.

What does not live here: the commands (onchain.py, treasury.py, payouts.py,
refund.py).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rpcsvc.cli.client import socket_endpoint
from rpcsvc.cli.context import Context, Json, UsageError

if TYPE_CHECKING:
    from rpcsvc.settings import Settings
    from rpcsvc.store.operator_books import OperatorBooks


def onchain_settings(context: Context) -> Settings:
    """The settings of an on-chain service. Raises UsageError for another engine."""
    settings = context.settings()
    if settings.engine != "onchain":
        raise UsageError(
            f'The engine is {settings.engine}; this is for engine = "onchain" (RPCSVC_ENGINE),'
            " with the settings of [onchain]. docs/onchain.md begins at the beginning."
        )
    return settings


def is_running(settings: Settings) -> bool:
    """Whether a service answers on the data directory."""
    return socket_endpoint(settings.data_dir) is not None


@contextmanager
def operator_books(settings: Settings) -> Iterator[OperatorBooks]:
    """The books as they are now. Raises UsageError when they can't be read."""
    from rpcsvc.store.backends.sqlite.snapshot import snapshot  # noqa: PLC0415
    from rpcsvc.store.books import BooksUnreadable  # noqa: PLC0415 - help needs no database
    from rpcsvc.store.operator_books import OperatorBooks  # noqa: PLC0415

    try:
        with snapshot(settings.data_dir) as taken:
            yield OperatorBooks(taken)
    except BooksUnreadable as error:
        raise UsageError(str(error)) from error


def print_json(value: Json) -> None:
    """One JSON object on stdout."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Rows with their columns below each other."""
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
