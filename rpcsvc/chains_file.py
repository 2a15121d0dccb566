"""Where the table of chains is read from: the configured file, or the one that comes with rpcsvc.

What does not live here: what the table means (domain/chains.py).
"""

from __future__ import annotations

from importlib import resources
from pathlib import Path


def chains_toml(configured: Path | None) -> str:
    """The text of the table. Raises OSError."""
    if configured is not None:
        return configured.read_text(encoding="utf-8")
    packaged = resources.files("rpcsvc") / "config" / "chains.toml"
    if packaged.is_file():
        return packaged.read_text(encoding="utf-8")
    # An editable install keeps the file where it is edited.
    checkout = Path(__file__).parent.parent / "config" / "chains.toml"
    return checkout.read_text(encoding="utf-8")
