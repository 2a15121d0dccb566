"""The service as a process of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tests.e2e import processes

# --- real processes --------------------------------------------------------------------------


@asynccontextmanager
async def process(*arguments: str) -> AsyncIterator[asyncio.subprocess.Process]:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rpcsvc", *arguments, stderr=subprocess.PIPE
    )
    try:
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
        await child.communicate()


async def logged(child: asyncio.subprocess.Process, word: bytes) -> None:
    assert child.stderr is not None
    async with asyncio.timeout(180):
        while True:
            line = await child.stderr.readline()
            assert line, "the server ended"
            if word in line:
                return


def free_port() -> str:
    return str(processes.free_port())
