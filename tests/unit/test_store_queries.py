"""The text of every query is in the subset of SQL that SQLite and PostgreSQL share."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import rpcsvc.settlement
import rpcsvc.store

STORE = Path(rpcsvc.store.__file__).parent
# The engines' own queries stand beside the code that uses them.
ENGINES = Path(rpcsvc.settlement.__file__).parent.rglob("*.py")
MODULES = [
    *sorted(STORE.glob("*.py")),
    *sorted(path for path in ENGINES if "rpcsvc.store.database import" in path.read_text()),
]
_SQL = re.compile(r"\b(SELECT|INSERT INTO|UPDATE|DELETE FROM|WHERE|ON CONFLICT|ORDER BY)\b")
# Syntax that only one of the two has, or that they interpret differently.
_NOT_SHARED = {
    "a place by position": r"\?",
    "INSERT OR": r"\bINSERT OR\b",
    "INDEXED BY": r"\bINDEXED BY\b",
    "COLLATE": r"\bCOLLATE\b",
    "rowid": r"\browid\b",
    "JSON": r"\bjson_\w+",
    "iif, ifnull, substr, glob": r"\b(iif|ifnull|substr|glob)\b",
    "PRAGMA": r"\bPRAGMA\b",
    "IS with a value": r"\bIS (NOT )?(?!NULL\b|NOT NULL\b|DISTINCT\b|NOT DISTINCT\b)[:\'\w]",
    "a name in double quotes": r'"',
    "CROSS JOIN with a condition": r"\bCROSS JOIN\b.*\bON\b",
    "max or min of two": r"\b(max|min)\([^()]*,",
    "a subquery without a name": r"\bFROM \([^()]*(\([^()]*\)[^()]*)*\)(?! AS \w)",
}


def texts(module: Path) -> list[tuple[int, str]]:
    """Every string of a module that looks like SQL; f-strings are joined without their fields."""
    found = []
    tree = ast.parse(module.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [str(p.value) if isinstance(p, ast.Constant) else "x" for p in node.values]
            found.append((node.lineno, "".join(parts)))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append((node.lineno, node.value))
    documented = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        and isinstance(node.body[0], ast.Expr)
    }
    prose = {
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and id(node) in documented
    }
    return [(line, text) for line, text in found if _SQL.search(text) and line not in prose]


def test_queries_are_found() -> None:
    assert sum(len(texts(module)) for module in MODULES) > 100


@pytest.mark.parametrize(
    ("name", "sql"),
    [
        ("a place by position", "SELECT 1 FROM orders WHERE seq = ?"),
        ("IS with a value", "UPDATE orders SET status = :a WHERE on_deadline IS NOT :b"),
        ("a name in double quotes", 'SELECT 1 FROM orders WHERE status = "failed"'),
        ("max or min of two", "UPDATE orders SET version = max(version, :v)"),
        ("a subquery without a name", "SELECT seq FROM (SELECT seq FROM orders) WHERE seq > 1"),
    ],
)
def test_what_is_not_shared_is_seen(name: str, sql: str) -> None:
    assert [each for each, pattern in _NOT_SHARED.items() if re.search(pattern, sql)] == [name]


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_queries_are_in_the_shared_subset(module: Path) -> None:
    wrong = [
        f"{module.name}:{line}: {name}: {text}"
        for line, text in texts(module)
        for name, pattern in _NOT_SHARED.items()
        if re.search(pattern, text, re.IGNORECASE if name != "a name in double quotes" else 0)
    ]
    assert wrong == []


@pytest.mark.parametrize("module", MODULES, ids=lambda path: path.stem)
def test_aggregates_know_no_backend(module: Path) -> None:
    assert "rpcsvc.store.backends" not in module.read_text()
