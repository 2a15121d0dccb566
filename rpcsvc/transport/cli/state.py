"""The CLI's memory: the last session and order, in ``<data-dir>/cli-state.json``.

It also keeps which session went with which idempotency key. A retry must repeat its call exactly,
and the session that a first call left out is known to the second one: without this the retry
would be another call, and so a conflict.

What does not live here: orders themselves. Losing the file loses convenience, no money.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

STATE_NAME = "cli-state.json"
KEPT_KEYS = 100


class BrokenState(Exception):
    """The file is there but can't be used."""


@dataclass(frozen=True, slots=True)
class CliState:
    """What is remembered between commands.

    ``keys`` holds the session id that was sent with an idempotency key (None: none was sent), for
    the last KEPT_KEYS of them, the newest last.
    """

    session_id: str | None = None
    order_id: str | None = None
    keys: Mapping[str, str | None] = field(default_factory=dict)

    def session_for(self, key: str | None) -> str | None:
        """The session to send where none was given: that of the key's first call, or the last."""
        if key is not None and key in self.keys:
            return self.keys[key]
        return self.session_id

    def with_key(self, key: str, session_id: str | None) -> CliState:
        """This state, with the session that goes with ``key``."""
        others = [item for item in self.keys.items() if item[0] != key]
        return replace(self, keys=dict([*others, (key, session_id)][-KEPT_KEYS:]))


def load_state(data_dir: Path) -> CliState:
    """The remembered state; empty where there is none. Raises BrokenState."""
    path = data_dir / STATE_NAME
    try:
        return _read(json.loads(path.read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return CliState()
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BrokenState(
            f"{path} is not a state file that this version can use. Delete it, or add --stateless."
        ) from error


def save_state(data_dir: Path, state: CliState) -> None:
    """Replace the state whole: a reader sees the old or the new one, never half of it.

    Raises OSError, and keeps the old one then.
    """
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = data_dir / f"{STATE_NAME}.{os.getpid()}"
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            json.dump(asdict(state), file)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(data_dir / STATE_NAME)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def _read(value: Any) -> CliState:
    state = CliState(value["session_id"], value["order_id"], value.get("keys", {}))
    texts = (state.session_id, state.order_id, *state.keys.values())
    if not all(text is None or isinstance(text, str) for text in texts):
        raise TypeError("ids are strings")
    return state
