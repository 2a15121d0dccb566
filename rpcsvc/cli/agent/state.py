"""The CLI's memory: the last session and order, in ``<data-dir>/cli-state.json``.

Each service has a memory of its own: that of the data directory, and each that was called by its
URL. A session and an order together are the owner's secret, which no other service is to learn.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

STATE_NAME = "cli-state.json"
KEPT_SERVICES = 20
# The service of the data directory, whether it runs or not.
HERE = ""


class BrokenState(Exception):
    """The file is there but can't be used."""


@dataclass(frozen=True, slots=True)
class CliState:
    """What is remembered of one service between commands."""

    session_id: str | None = None
    order_id: str | None = None


def load_state(data_dir: Path, service: str = HERE) -> CliState:
    """What is remembered of a service; empty where there is nothing. Raises BrokenState."""
    return _load(data_dir).get(service, CliState())


def save_state(data_dir: Path, state: CliState, service: str = HERE) -> None:
    """Replace what is remembered of a service; of others, the last KEPT_SERVICES are kept.

    The file is replaced whole: a reader sees the old or the new one, never half of it. Raises
    BrokenState and OSError, and keeps the old one then.
    """
    others = {name: kept for name, kept in _load(data_dir).items() if name != service}
    text = json.dumps(_written({**others, service: state}))
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = data_dir / f"{STATE_NAME}.{os.getpid()}"
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(data_dir / STATE_NAME)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def _load(data_dir: Path) -> dict[str, CliState]:
    path = data_dir / STATE_NAME
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        elsewhere = value.get("elsewhere", {})
        return {HERE: _read(value), **{name: _read(kept) for name, kept in elsewhere.items()}}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BrokenState(
            f"{path} is not a state file that this version can use. Delete it, or add --stateless."
        ) from error


def _written(states: Mapping[str, CliState]) -> dict[str, Any]:
    elsewhere = {name: asdict(state) for name, state in states.items() if name != HERE}
    kept = dict([*elsewhere.items()][-KEPT_SERVICES:])
    here = asdict(states.get(HERE, CliState()))
    return {**here, "elsewhere": kept} if kept else here


def _read(value: Any) -> CliState:
    state = CliState(value["session_id"], value["order_id"])
    if not all(text is None or _is_plain(text) for text in (state.session_id, state.order_id)):
        raise TypeError("ids are printable ASCII")
    return state


def _is_plain(text: Any) -> bool:
    """Whether a header can hold it."""
    return isinstance(text, str) and text.isascii() and text.isprintable()
