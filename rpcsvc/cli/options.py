"""Options that several commands of the CLI have."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


class Once(argparse.Action):
    """An input is given once: which of two amounts counts would be a guess."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - argparse gives it
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002 - as above
    ) -> None:
        """Take the value, or refuse the second one."""
        if getattr(namespace, self.dest, None) is not None:
            raise argparse.ArgumentError(self, "is given twice")
        setattr(namespace, self.dest, values)


class Text(Once):
    """An input that is text, whatever bytes a shell lets through. Paths may hold any: use Once."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Take the value once, or refuse one that no JSON, header or database can hold."""
        if isinstance(values, str) and not _is_utf8(values):
            # It is not shown: it may be a token.
            raise argparse.ArgumentError(
                self, "holds a byte that is not UTF-8. Give it in UTF-8, as all text here is."
            )
        super().__call__(parser, namespace, values, option_string)


def _is_utf8(text: str) -> bool:
    """Whether an argument was UTF-8: Python keeps a byte that was not as half a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def add_common(parser: argparse.ArgumentParser) -> None:
    """Where the settings come from."""
    parser.add_argument(
        "--config", action=Once, type=Path, metavar="FILE", help="TOML file with settings"
    )
    parser.add_argument(
        "--data-dir", action=Once, metavar="DIR", help="where the service keeps its data"
    )


def add_target(group: Any) -> None:
    """Where a call goes."""
    group.add_argument("--url", action=Text, help="the service's root URL (RPCSVC_URL)")
    group.add_argument("--token", action=Text, help="for /rpc (AGENT_RPC_TOKEN)")
