"""The secret under which client addresses of unfunded orders are hashed.

It is not in the database, so that a copy of that tells no addresses.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from rpcsvc.durable_files import replace_file
from rpcsvc.ids import RandomBytes

FILE: Final = "client-hash.key"
_BYTES: Final = 32


def client_secret(data_dir: Path, random: RandomBytes) -> bytes:
    """The key in ``data_dir``, made when there is none. Raises OSError.

    Without the old one clients are counted anew, which costs nothing else.
    """
    path = data_dir / FILE
    if path.exists() and len(found := path.read_bytes()) == _BYTES:
        return found
    fresh = random(_BYTES)
    replace_file(path, fresh)
    return fresh
