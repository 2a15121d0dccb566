"""A table of chains."""

from __future__ import annotations

from pathlib import Path

TOML = (Path(__file__).parent.parent.parent / "config" / "chains.toml").read_text()
