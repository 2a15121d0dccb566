"""``rpcsvc`` on the command line. Puts the CLI and the service together; decides nothing."""

from __future__ import annotations

import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

from rpcsvc.transport.cli.main import run

if TYPE_CHECKING:
    from rpcsvc.operations.local import LocalService
    from rpcsvc.settings import Settings


async def _serve(settings: Settings) -> None:
    from rpcsvc.serving import serve  # noqa: PLC0415 - a command that asks a server needs none of it

    await serve(settings)


@asynccontextmanager
async def _local(settings: Settings) -> AsyncIterator[LocalService]:
    from rpcsvc.app import local_service  # noqa: PLC0415 - as above

    async with local_service(settings) as service:
        yield service


def main() -> None:
    """The console script."""
    sys.exit(run(sys.argv[1:], os.environ, serve=_serve, local=_local))


if __name__ == "__main__":
    main()
