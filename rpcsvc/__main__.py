"""The entry point ``rpcsvc``: connects the command line with the service."""

from __future__ import annotations

import os
import sys

from rpcsvc.health_probe import probe
from rpcsvc.importing import Importing

TYPE_CHECKING = False  # as in typing, whose import costs a probe too much
if TYPE_CHECKING:
    from asyncio import Event
    from collections.abc import Callable
    from contextlib import AbstractAsyncContextManager

    from rpcsvc.operations.dispatch import LocalService
    from rpcsvc.settings import Settings


def _open_standard_streams() -> None:
    """Open the null device for each standard stream that the caller has closed.

    Python has None there, which breaks every print; and the next file to be opened would get the
    descriptor of the stream, and what is printed to it.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115, PTH123 - never closed


async def _serve(settings: Settings, load: Callable[[], Settings]) -> None:
    with Importing():
        from rpcsvc.serving import serve  # noqa: PLC0415 - most commands do without

    await serve(settings, load)


def _local(settings: Settings) -> AbstractAsyncContextManager[LocalService]:
    with Importing():
        from rpcsvc.bootstrap import local_service  # noqa: PLC0415 - as above

    return local_service(settings)


def _private(settings: Settings) -> AbstractAsyncContextManager[Event]:
    with Importing():
        from rpcsvc.serving import serving_privately  # noqa: PLC0415 - as above

    return serving_privately(settings)


def main() -> None:
    """The console script. A command imports no more than it needs, and a probe hardly anything."""
    _open_standard_streams()
    words = sys.argv[1:]
    status = probe(words[1:], os.environ) if words[:1] == ["health"] else None
    if status is None:
        with Importing():
            from rpcsvc.cli.main import run  # noqa: PLC0415 - a probe does without

        status = run(words, os.environ, serve=_serve, local=_local, private=_private)
    sys.exit(status)


if __name__ == "__main__":
    main()
