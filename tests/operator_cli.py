"""The operator's command line, and a service on the socket of its data directory."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from msgspec.structs import replace
from structlog.testing import capture_logs

from rpcsvc.bootstrap import Running
from rpcsvc.cli.main import run
from rpcsvc.http.http_server import EdgeRunner
from rpcsvc.operations.dispatch import LocalService
from rpcsvc.operations.service import Operation
from rpcsvc.serving import web_app
from rpcsvc.settings import Settings
from tests.sandbox import Sandbox, sandbox

Local = Callable[[Settings], AbstractAsyncContextManager[LocalService]]


class Envelopes:
    """The output of a command of an operation."""

    out: Any
    err: str

    @property
    def answer(self) -> Any:
        return json.loads(self.out)

    @property
    def refusal(self) -> Any:
        """The envelope of a call without an answer, validated by the schema of envelopes."""
        answer = self.answer
        assert list(answer)[-2:] == ["requestId", "error"]
        assert answer["error"]["message"] in self.err.replace("\n", " ")
        return answer


class Cli:
    """The command line on a data directory, of one engine or another."""

    def __init__(
        self, data_dir: Path, output: pytest.CaptureFixture[str], engine: str = "sandbox"
    ) -> None:
        self.data_dir = data_dir
        self.environ = {"RPCSVC_ENGINE": engine}
        self.out, self.err = "", ""
        self._output = output

    def __call__(self, *arguments: str, local: Local | None = None) -> int:
        environ = {**self.environ, "RPCSVC_DATA_DIR": str(self.data_dir)}
        self._output.readouterr()
        try:
            return run(arguments, environ, serve=_never, local=local or _never, private=_never)
        except SystemExit as usage:
            assert isinstance(usage.code, int)
            return usage.code
        finally:
            self.out, self.err = self._output.readouterr()

    async def ask(self, *arguments: str) -> int:
        """Run a command beside a service in this process; its exit status."""
        return await asyncio.to_thread(self, *arguments)

    async def json(self, *arguments: str) -> Any:
        """The JSON output of a command that calls a service in this process."""
        assert await self.ask(*arguments) == 0, self.err
        return json.loads(self.out)


def _never(*_: Any) -> Any:
    raise AssertionError("no service is needed")


@contextmanager
def listening(data_dir: Path) -> Iterator[None]:
    """Listen on the service's socket, without ever answering."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(data_dir / "rpcsvc.sock"))
        made.listen()
        yield


@asynccontextmanager
async def on_socket(up: Running) -> AsyncIterator[None]:
    """Serve on the socket of the data directory."""
    runner = EdgeRunner(web_app(up), access_log=None)
    await runner.setup()
    try:
        await web.UnixSite(runner, str(up.settings.data_dir / "rpcsvc.sock")).start()
        with capture_logs():  # a real service has streams of its own
            yield
    finally:
        await runner.cleanup()


@asynccontextmanager
async def served(
    data_dir: Path, more: Callable[[Running], tuple[Operation, ...]] = lambda _up: ()
) -> AsyncIterator[Sandbox]:
    """A sandbox on a socket; ``more`` admin methods than it has."""
    async with sandbox(data_dir) as box:
        up = replace(box.up, admin=(*box.up.admin, *more(box.up)))
        async with on_socket(up):
            yield box
