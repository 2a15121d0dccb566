"""Names that a reader meets in a list: those of tests, and of log events."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
LONGEST = 60
LEVELS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})


def nodes(folder: str) -> Iterator[ast.AST]:
    """Every node of every module below a folder."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        yield from ast.walk(ast.parse(path.read_text(encoding="utf-8")))


def log_events() -> set[str]:
    return {
        node.args[0].value
        for node in nodes("rpcsvc")
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
        node.name
        for node in nodes("tests")
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.name.startswith("test_")
    }
    assert len(names) > 1_000
    assert [name for name in sorted(names) if len(name) > LONGEST] == []


def test_log_events_are_words_with_underscores() -> None:
    events = log_events()
    assert len(events) > 100
    assert [
        event for event in sorted(events) if not re.fullmatch(r"[a-z0-9]+(_[a-z0-9]+)*", event)
    ] == []
