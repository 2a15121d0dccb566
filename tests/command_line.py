"""Runs the command line in this process, and captures its streams."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr, redirect_stdout
from typing import Any
from unittest.mock import patch

from rpcsvc.bootstrap import local_service
from rpcsvc.cli.main import run

Done = subprocess.CompletedProcess[str]


def clean_environ() -> dict[str, str]:
    """The environment without settings of the service."""
    return {k: v for k, v in os.environ.items() if not k.startswith(("RPCSVC", "AGENT_RPC"))}


def run_here(arguments: Sequence[str], environ: Mapping[str, str], typed: str = "") -> Done:
    """Run ``rpcsvc`` with the arguments. Blocking; the standard streams are the process's own."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    given = patch.object(sys, "stdin", io.StringIO(typed))
    with redirect_stdout(out), redirect_stderr(err), given:
        status = run(arguments, environ, serve=_never, local=local_service, private=_never)
    stdout, stderr = (stream.buffer.getvalue().decode() for stream in (out, err))
    return Done(arguments, status, stdout, stderr)


def _never(*_: object) -> Any:
    raise AssertionError("serve runs in a process of its own")
