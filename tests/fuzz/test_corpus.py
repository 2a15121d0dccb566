"""Inputs of the corpus, old crashes among them, are read without a fault."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz.__main__ import CORPUS, NAMES
from tests.fuzz.targets import TARGETS

INPUTS = sorted(path for path in CORPUS.rglob("*") if path.is_file())


@pytest.mark.parametrize("path", INPUTS, ids=lambda path: f"{path.parent.name}-{path.name}")
def test_input_is_read_or_refused(path: Path) -> None:
    TARGETS[path.parent.name](path.read_bytes())


def test_each_target_has_a_corpus() -> None:
    assert sorted(TARGETS) == NAMES
    assert {path.parent.name for path in INPUTS} == set(NAMES)
