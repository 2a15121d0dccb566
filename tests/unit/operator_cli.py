"""The operator's commands on a data directory."""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.cli.main import run
from rpcsvc.operations.dispatch import LocalService
from rpcsvc.settings import Settings

Local = Callable[[Settings], AbstractAsyncContextManager[LocalService]]


class Cli:
    """The command line on a data directory, of one engine or another."""

    def __init__(self, data_dir: Path, output: pytest.CaptureFixture[str]) -> None:
        self.data_dir = data_dir
        self.engine = "sandbox"
        self.out, self.err = "", ""
        self._output = output

    def __call__(self, *arguments: str, local: Local | None = None) -> int:
        environ = {"RPCSVC_DATA_DIR": str(self.data_dir), "RPCSVC_ENGINE": self.engine}
        self._output.readouterr()
        try:
            return run(arguments, environ, serve=_never, local=local or _never)
        except SystemExit as usage:
            assert isinstance(usage.code, int)
            return usage.code
        finally:
            self.out, self.err = self._output.readouterr()

    def json(self, *arguments: str) -> Any:
        assert self(*arguments) == 0, self.err
        return json.loads(self.out)


def _never(*_: Any) -> Any:
    raise AssertionError("no service is needed")


@contextmanager
def listening(data_dir: Path) -> Iterator[None]:
    """What a running service looks like from outside."""
    with socket.socket(socket.AF_UNIX) as made:
        made.bind(str(data_dir / "rpcsvc.sock"))
        made.listen()
        yield
