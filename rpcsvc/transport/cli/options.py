"""Options that several commands of the CLI have.

What does not live here: options of a single command (where that is), what comes of them
(context.py).
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


class Once(argparse.Action):
    """An input is given once: which of two amounts counts would be a guess."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Take the value, or refuse the second one."""
        if getattr(namespace, self.dest) is not None:
            parser.error(f"argument {option_string}: is given twice")
        setattr(namespace, self.dest, values)


def add_common(parser: argparse.ArgumentParser) -> None:
    """Where the settings come from."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    parser.add_argument("--data-dir", metavar="DIR", help="where the service keeps its data")


def add_target(group: Any) -> None:
    """Where a call goes."""
    group.add_argument("--url", help="the service's root URL (RPCSVC_URL)")
    group.add_argument("--token", help="for /rpc (AGENT_RPC_TOKEN)")
