"""The command line with the service that it runs: all of the program but the probe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rpcsvc.app import local_service
from rpcsvc.cli.main import run
from rpcsvc.serving import serve


def run_command(words: Sequence[str], environ: Mapping[str, str]) -> int:
    """Carry out one command line; its exit status."""
    return run(words, environ, serve=serve, local=local_service)
