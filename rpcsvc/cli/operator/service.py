"""Shared by operator commands: calls of the running service over its socket, and output."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from rpcsvc.cli.context import FAILED, OK, Context, Json, UsageError, complain, say
from rpcsvc.client.blocking import finished, rpc_calls
from rpcsvc.client.errors import Unreachable
from rpcsvc.client.transport import Endpoint, socket_endpoint
from rpcsvc.local_secret import operator_headers
from rpcsvc.settings import Settings
from rpcsvc.store.backends import open_database
from rpcsvc.store.checks import Progress
from rpcsvc.store.database import Database, DatabaseUnusable
from rpcsvc.store.schema import UnknownSchema
from rpcsvc.terminal import printable

# Seconds. Long: a command may wait for nodes, or for a wallet that scans blocks first.
SECONDS: Final = 600
_OF_THE_CALLER: Final = frozenset(
    {"invalid_input", "missing_input", "invalid_destination", "idempotency_conflict"}
)


def onchain_settings(context: Context) -> Settings:
    """The settings of a service with engine onchain. Raises UsageError for another engine."""
    settings = context.settings()
    if settings.engine != "onchain":
        raise UsageError(
            f'The engine is {settings.engine}; this is for engine = "onchain" (RPCSVC_ENGINE),'
            " with the settings of [onchain]. See docs/operate/onchain.md."
        )
    return settings


@asynccontextmanager
async def server_database(settings: Settings) -> AsyncIterator[Database]:
    """The database of ``database_url``, beside running replicas. Raises UsageError."""
    try:
        database = await open_database(settings.data_dir, settings.postgresql_url)
    except (DatabaseUnusable, UnknownSchema) as error:
        raise UsageError(str(error)) from error
    try:
        yield database
    finally:
        await database.close()


def print_json(value: Json) -> int:
    """Print one JSON object; returns the exit status."""
    say(json.dumps(value, indent=2) + "\n")
    return OK


def refuse(text: str) -> int:
    """Print the reason of a refusal to stderr; returns the exit status."""
    complain(f"rpcsvc: {text}\n")
    return FAILED


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows as lines with aligned columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows with aligned columns."""
    say("".join(f"{line}\n" for line in aligned(rows)))


def show_progress(text: str) -> None:
    """Show the progress of a long command on a terminal line that the next text replaces."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\033[K{printable(text)}")
        sys.stderr.flush()


def show_share(what: str, done: int, total: int) -> None:
    """Show on the terminal's line how much of a step is done."""
    show_progress(f"{what}: {_percent(done, total)} %")


def add_progress(parser: ArgumentParser) -> None:
    """Add the flag that ``reporter`` reads."""
    parser.add_argument(
        "--progress", action="store_true",
        help="print how far it is to stderr, also if that is no terminal",
    )  # fmt: skip


def reporter(context: Context) -> Progress:
    """Return what shows progress: each step on the terminal's line, or whole tenths as lines."""
    if not context.options.progress:
        return show_share
    said = set[tuple[str, int]]()

    def report(what: str, done: int, total: int) -> None:
        tenth = what, _percent(done, total) // 10 * 10
        if tenth not in said:
            said.add(tenth)
            complain(f"{what}: {tenth[1]} %\n")

    return report


def _percent(done: int, total: int) -> int:
    return 100 * done // total if total else 100


def end_progress() -> None:
    """Clear the progress line."""
    show_progress("")


def is_running(settings: Settings) -> bool:
    """Return whether a service answers on the data directory."""
    return socket_endpoint(settings.data_dir) is not None


def service_socket(settings: Settings) -> Endpoint:
    """The socket of the service that answers on the data directory.

    Raises Unreachable and UntrustedSocket.
    """
    endpoint = socket_endpoint(settings.data_dir)
    if endpoint is None:
        raise Unreachable(
            f"No service runs on the data directory {settings.data_dir}. This command asks the"
            " running service; start it with rpcsvc serve."
        )
    return endpoint


def ask_service(settings: Settings, method: str, params: Json) -> Json:
    """The answer of an admin method. Raises UsageError for a wrong input, else Unreachable."""
    endpoint = service_socket(settings)
    calls = rpc_calls(endpoint, None)
    try:
        proof = operator_headers(settings.data_dir)
    except OSError as error:
        raise Unreachable(
            f"The secret of the service in {settings.data_dir} can't be read"
            f" ({error.strerror or error}). Run the command as the service's user."
        ) from error
    answer = finished(calls.call_method(f"admin.{method}", params, headers=proof, seconds=SECONDS))
    failed: Any = answer.get("error")
    if failed is None:
        return answer
    if failed["code"] in _OF_THE_CALLER:
        raise UsageError(failed["message"])
    raise Unreachable(failed["message"])
