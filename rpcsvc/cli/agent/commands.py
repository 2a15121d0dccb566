"""The commands of the operations, read from commands.json.

The operations themselves would take a command most of its time to import: the file is written
from their table by ``make generate``.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final, NamedTuple

FILE: Final = Path(__file__).parent / "commands.json"


class Input(NamedTuple):
    """One input. ``kind`` of its value is ``text``, ``integer`` or ``boolean``."""

    name: str
    option: str
    kind: str
    help: str | None


class Command(NamedTuple):
    """The command of one operation, as the table of operations declares it."""

    operation: str
    name: str
    summary: str
    idempotent: bool
    creates: bool
    sandbox_only: bool
    inputs: tuple[Input, ...]

    def takes(self, name: str) -> bool:
        """Whether the operation has an input of that name."""
        return any(each.name == name for each in self.inputs)


def commands() -> tuple[Command, ...]:
    """All of them, in the order of the table."""
    return tuple(
        Command(**{**row, "inputs": tuple(Input(**each) for each in row["inputs"])})
        for row in json.loads(FILE.read_bytes())
    )
