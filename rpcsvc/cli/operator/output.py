"""What the operator's commands share: which engine there must be, and how answers are printed."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence

from rpcsvc.cli.context import FAILED, OK, Context, Json, UsageError
from rpcsvc.settings import Settings


def onchain_settings(context: Context) -> Settings:
    """The settings of an on-chain service. Raises UsageError for another engine."""
    settings = context.settings()
    if settings.engine != "onchain":
        raise UsageError(
            f'The engine is {settings.engine}; this is for engine = "onchain" (RPCSVC_ENGINE),'
            " with the settings of [onchain]. docs/onchain.md begins at the beginning."
        )
    return settings


def print_json(value: Json) -> int:
    """One JSON object on stdout; the exit status."""
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
    return OK


def refuse(text: str) -> int:
    """Say on stderr why something was not done; the exit status."""
    sys.stderr.write(f"rpcsvc: {text}\n")
    return FAILED


def print_table(rows: Sequence[Sequence[str]]) -> None:
    """Rows with their columns below each other."""
    if not rows:
        return
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write("  ".join(cells).rstrip() + "\n")
