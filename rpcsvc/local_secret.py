"""The secret in the data directory: who can read it is the operator.

It keys the hashes of clients' names, and commands prove by it that they may call admin methods. It
is not in the database, so a copy of the database reveals no addresses.
"""

from __future__ import annotations

import hmac
from pathlib import Path
from typing import Final

from rpcsvc.durable_files import replace_file
from rpcsvc.ids import RandomBytes

OPERATOR_HEADER: Final = "x-agent-operator"
_NAME: Final = "client-hash.key"
_BYTES: Final = 32


def local_secret(data_dir: Path, random: RandomBytes) -> bytes:
    """Return the secret, made when there is none. Raises OSError.

    Without the old one clients are counted again from zero, which costs nothing else.
    """
    path = data_dir / _NAME
    if path.exists() and len(found := path.read_bytes()) == _BYTES:
        return found
    fresh = random(_BYTES)
    replace_file(path, fresh)
    return fresh


def operator_proof(secret: bytes) -> str:
    """Return what the header of an operator's call must hold."""
    return hmac.digest(secret, b"call admin methods", "sha256").hex()


def operator_headers(data_dir: Path) -> dict[str, str]:
    """Return the headers of a call of the service on a data directory. Raises OSError."""
    return {OPERATOR_HEADER: operator_proof((data_dir / _NAME).read_bytes())}
