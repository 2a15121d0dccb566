"""Names of classes, tests and log events, and which modules tests import."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent.parent
LONGEST = 60
FOREIGN = frozenset({"generated", "node_modules", "site-packages"})
LEVELS = frozenset({"debug", "info", "warning", "error", "exception", "critical"})


def modules(folder: str) -> Iterator[Path]:
    """Every module below a folder, but what other targets have written there."""
    for path in sorted((ROOT / folder).rglob("*.py")):
        if FOREIGN.isdisjoint(path.parts):
            yield path


def sources(folder: str) -> Iterator[str]:
    """The text of every module below a folder."""
    return (path.read_text(encoding="utf-8") for path in modules(folder))


DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


class Named(NamedTuple):
    """The classes that a module defines, the events that it logs, how its docstrings begin."""

    classes: list[str]
    events: list[str]
    beginnings: list[str]


@cache
def named_in(path: Path) -> Named:
    found = Named([], [], [])
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            found.beginnings.append(text.splitlines()[0])
        if isinstance(node, ast.ClassDef):
            found.classes.append(node.name)
        elif (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in LEVELS
            and isinstance(node.func.value, ast.Name)
            and node.args
            and isinstance(node.args[0], ast.Constant)
            and isinstance(node.args[0].value, str)
        ):
            found.events.append(node.args[0].value)
    return found


def log_events() -> set[str]:
    return {event for path in (ROOT / "rpcsvc").rglob("*.py") for event in named_in(path).events}


def imported_modules(source: str) -> Iterator[str]:
    """The dotted names that a module imports; of ``from a import b`` it is ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (each.name for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            folder = "tests." * bool(node.level) + (node.module or "")
            yield from (f"{folder}.{each.name}" for each in node.names)


# A module is parsed, which takes long, only if a test is named where something is imported.
IMPORT_OF_A_TEST = re.compile(r"\bimport\b(?:[^\n(]*|\s*\([^)]*)\btest_|\bfrom\b[^\n]*\btest_")


def imported_tests(source: str) -> set[str]:
    """The test modules that a module imports."""
    if IMPORT_OF_A_TEST.search(source) is None:
        return set()
    return {name for name in imported_modules(source) if re.match(r"tests\.(\w*\.)*test_\w+", name)}


def test_test_modules_are_not_imported() -> None:
    assert {name for source in sources("tests") for name in imported_tests(source)} == set()


@pytest.mark.parametrize(
    "line",
    [
        "import tests.contract.test_events",
        "from tests.contract.test_events import ordered",
        "from tests.contract import test_events",
        "def ordered():\n    from tests.contract.test_events import ordered",
        "from .test_events import ordered",
        "from . import test_events",
        "from tests.contract import (\n    bff,\n    test_events,\n)",
    ],
)
def test_import_of_a_test_module_is_found(line: str) -> None:
    assert imported_tests(line)
    assert not imported_tests("from aiohttp.test_utils import TestClient")


def class_names(paths: Iterable[Path]) -> Counter[str]:
    """How many classes of each name modules define."""
    return Counter(name for path in paths for name in named_in(path).classes)


def test_class_name_has_one_meaning() -> None:
    """The libraries for clients name for their users what the service names so, too."""
    service = ROOT / "rpcsvc"
    names = class_names(
        path
        for path in service.rglob("*.py")
        if not {"client", "verify.py"} & set(path.relative_to(service).parts)
    )
    assert len(names) > 500
    assert [name for name, count in names.items() if count > 1] == []


def test_class_name_of_a_test_helper_has_one_meaning() -> None:
    """The benchmark has helpers of its own, which tests don't use."""
    tests = ROOT / "tests"
    names = class_names(
        path
        for path in tests.rglob("*.py")
        if not path.name.startswith("test_") and "bench" not in path.relative_to(tests).parts
    )
    assert len(names) > 50
    assert [name for name, count in names.items() if count > 1] == []


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


# A reader of such a docstring has to find out first what is spoken of.
POINTING = frozenset({"What", "Those", "Of", "Such", "It"})


@pytest.mark.parametrize("folder", ["rpcsvc", "tests", "tools"])
def test_docstring_begins_with_a_verb_or_a_noun(folder: str) -> None:
    assert [
        line
        for path in modules(folder)
        for line in named_in(path).beginnings
        if line.split()[0].rstrip(",.:") in POINTING
    ] == []
