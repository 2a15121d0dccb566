"""``rpcsvc`` as the operator of a stack runs it."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from typing import Any, NamedTuple

from tests.e2e import processes
from tests.regtest.exchange import Exchange


class CommandResult(NamedTuple):
    """Exit status and output of a command."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


async def admin(stack: Exchange, method: str, **params: Any) -> Any:
    """The result of a method of the running service, for polls: a command takes 0.6 s of CPU."""
    return await processes.admin(stack.data_dir, method, params)


async def command(stack: Exchange, *arguments: str, typed: str = "") -> CommandResult:
    """``rpcsvc`` as the operator runs it; ``typed`` is on its standard input."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "rpcsvc", *arguments, "--data-dir", str(stack.data_dir),
        env={**os.environ, **stack.environ()}, stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    out, err = await process.communicate(typed.encode())
    assert process.returncode is not None
    return CommandResult(process.returncode, out.decode(), err.decode())
