"""Service processes forked from one that has imported the service: each start saves its imports.

They differ from new processes in that alone. With each engine some test starts a new one, which
has only what it imports by itself.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import get_context
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Final

# What ``serve`` imports with any engine, on either database.
PRELOADED: Final = (
    "asyncpg",
    "eth_account",
    "rpcsvc.cli.main",
    "rpcsvc.serving",
    "rpcsvc.settlement.onchain.wiring",
    "rpcsvc.settlement.sandbox.wiring",
    "rpcsvc.settlement.upstream.wiring",
    "rpcsvc.store.backends.postgresql",
    "rpcsvc.store.backends.sqlite.database",
    "rpcsvc.treasury.wallets",
)
_FORKED: Final = get_context("forkserver")
_FORKED.set_forkserver_preload(list(PRELOADED))
_NEW: Final = get_context("spawn")


def start(
    module: str,
    words: Sequence[str],
    environ: Mapping[str, str],
    log: Path,
    *,
    is_new: bool = False,
) -> BaseProcess:
    """``python -m module words`` in an environment, its standard error in ``log``.

    ``is_new``: a process of its own. It is terminated when this process ends.
    """
    log.write_bytes(b"")
    given = (module, [*words], dict(environ), str(log))
    made = _NEW.Process if is_new else _FORKED.Process
    process = made(target=_run, args=given, daemon=True)
    process.start()
    return process


def _run(module: str, words: list[str], environ: dict[str, str], log: str) -> None:
    os.environ.clear()
    os.environ.update(environ)
    os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND), sys.stderr.fileno())
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)
