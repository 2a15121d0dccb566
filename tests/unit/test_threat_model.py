"""The tests that docs/operate/threat-model.md names exist, and each of its lines names one."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LINES = [
    line
    for line in (ROOT / "docs" / "operate" / "threat-model.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith("| against |")
]


def test_every_line_names_a_test_that_exists() -> None:
    assert LINES
    for line in LINES:
        named = re.findall(r"`(tests/[a-z0-9_/]+\.py)::(test_[a-z0-9_]+)`", line)
        assert named, line
        for path, test in named:
            assert re.search(rf"def {test}\(", (ROOT / path).read_text()), f"{path}::{test}"
