"""The CLI's memory: the last session and order, in ``<data-dir>/cli-state.json``.

What does not live here: orders themselves. Losing the file loses convenience, no money.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

STATE_NAME = "cli-state.json"


class BrokenState(Exception):
    """The file is there but can't be used."""


@dataclass(frozen=True, slots=True)
class CliState:
    """What is remembered between commands."""

    session_id: str | None = None
    order_id: str | None = None


def load_state(data_dir: Path) -> CliState:
    """The remembered state; empty where there is none. Raises BrokenState."""
    path = data_dir / STATE_NAME
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        session_id, order_id = value["session_id"], value["order_id"]
    except FileNotFoundError:
        return CliState()
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BrokenState(f"{path} can't be used. Delete it, or add --stateless.") from error
    if not all(item is None or isinstance(item, str) for item in (session_id, order_id)):
        raise BrokenState(f"{path} can't be used. Delete it, or add --stateless.")
    return CliState(session_id, order_id)


def save_state(data_dir: Path, state: CliState) -> None:
    """Replace the state whole: a reader sees the old or the new one, never half of it."""
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = data_dir / f"{STATE_NAME}.{os.getpid()}"
    fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(fd, "w", encoding="utf-8") as file:
        json.dump(asdict(state), file)
    fresh.replace(data_dir / STATE_NAME)
