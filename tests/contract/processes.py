"""The service as a process of its own, forked as ``tests.e2e.forking`` says."""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from tests.e2e import forking, processes


class Child:
    """One process of ``rpcsvc``, and what it writes to its standard error."""

    def __init__(self, arguments: tuple[str, ...], log: Path) -> None:
        self._log = log
        self._process = forking.start("rpcsvc", arguments, os.environ, log)

    def terminate(self) -> None:
        self._process.terminate()

    async def ended(self) -> tuple[int | None, str]:
        """Wait for its end; its exit status, and its log."""
        await asyncio.to_thread(self._process.join, processes.TIMEOUT_SECONDS)
        return self._process.exitcode, self._log.read_text()

    async def logged(self, word: str) -> None:
        """Wait until the log has a word."""

        async def is_logged() -> bool:
            is_over = self._process.exitcode is not None
            text = self._log.read_text()
            assert word in text or not is_over, f"the server ended: {text}"
            return word in text

        await processes.until(is_logged)


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[Child]:
    with tempfile.TemporaryDirectory(prefix="rpcsvc-log-") as folder:
        child = Child(arguments, Path(folder) / "log")
        try:
            yield child
        finally:
            child.terminate()
            await child.ended()


def free_port() -> str:
    return str(processes.free_port())
