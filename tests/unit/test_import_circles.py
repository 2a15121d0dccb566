"""No modules of the product import each other in a circle, for the type checker alone included."""

from __future__ import annotations

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import rpcsvc

PACKAGE = Path(rpcsvc.__file__).parent


def name_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in PACKAGE.rglob("*.py")}


def imported(path: Path) -> set[str]:
    """The product's modules that a module imports, wherever in it that is."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {name if name in MODULES else node.module for name in names}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & MODULES.keys()


def require_order(graph: dict[str, set[str]]) -> None:
    TopologicalSorter(graph).prepare()


def test_circle_of_two_modules_is_found() -> None:
    with pytest.raises(CycleError):
        require_order({"a": {"b"}, "b": {"a"}})


def test_modules_import_each_other_in_no_circle() -> None:
    require_order({name: imported(path) for name, path in MODULES.items()})
