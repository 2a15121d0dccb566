"""``rpcsvc`` on the command line. Puts the CLI and the service together; decides nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rpcsvc.cli.main import run

if TYPE_CHECKING:
    from rpcsvc.operations.dispatch import LocalService
    from rpcsvc.settings import Settings


async def _serve(settings: Settings) -> None:
    from rpcsvc.serving import serve  # noqa: PLC0415 - most commands need no server

    await serve(settings)


@asynccontextmanager
async def _local(settings: Settings) -> AsyncIterator[LocalService]:
    from rpcsvc.app import local_service  # noqa: PLC0415 - most commands need no server

    async with local_service(settings) as service:
        yield service


def _open_standard_streams() -> None:
    """Put the null device in the place of each that was closed, for Python then has None there.

    What is said is lost, as the caller wanted; what is asked for is done. And no other file gets
    a number under which something is written that is not meant for it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123 - never closed


def main() -> None:
    """The console script."""
    _open_standard_streams()
    sys.exit(run(sys.argv[1:], os.environ, serve=_serve, local=_local))


if __name__ == "__main__":
    main()
