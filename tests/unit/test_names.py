"""Names that a reader meets in a list: those of tests, and of log events."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LONGEST = 60
LEVELS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})


def sources(folder: str) -> Iterator[str]:
    """The text of every module below a folder."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield path.read_text(encoding="utf-8")


def log_events() -> set[str]:
    return {
        node.args[0].value
        for source in sources("rpcsvc")
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in LEVELS
        and isinstance(node.func.value, ast.Name)
        and node.args
        and isinstance(node.args[0], ast.Constant)
        and isinstance(node.args[0].value, str)
    }


def test_test_names_have_sixty_characters_at_most() -> None:
    names = {
        name
        for source in sources("tests")
        for name in re.findall(r"^ *(?:async )?def (test_\w+)", source, re.MULTILINE)
    }
    assert len(names) > 1_000
    assert [name for name in sorted(names) if len(name) > LONGEST] == []


def test_log_events_are_words_with_underscores() -> None:
    events = log_events()
    assert len(events) > 100
    assert [
        event for event in sorted(events) if not re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", event)
    ] == []
