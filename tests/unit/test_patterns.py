"""Every regular expression of the product takes time that grows with its text, and no faster."""

from __future__ import annotations

import ast
import importlib
import pkgutil
import re
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from re import _constants as ops
from re import _parser as parser
from typing import Any, NamedTuple

from pydantic import BaseModel

import rpcsvc
from rpcsvc.domain import payment_check
from rpcsvc.domain.addresses import EVM_PATTERN
from rpcsvc.operations.inputs import key_pattern

ROOT = Path(__file__).parents[2]
# They read the program's own SQL, and nothing else.
OF_OWN_TEXT = {"rpcsvc.store.backends.postgresql.schema", "rpcsvc.store.backends.sqlite.database"}
CALLS = {"match", "search", "fullmatch", "split", "findall", "finditer", "sub", "subn"}
WHOLE, BEGINNING, PARTS = "fullmatch", "match", "finditer"
REPEATS = {ops.MAX_REPEAT, ops.MIN_REPEAT, ops.POSSESSIVE_REPEAT}
UNITS = ["a", "0", " ", "a ", "/", '"']
ENDS = ["", "\n", "\x00"]
# Characters of a text. A quadratic pattern takes 30 ms for the longest, a cubic one seconds.
LENGTHS = (22, 128, 1_024, 8_192)
# What takes no longer is linear whatever the ratio: so short a time says more of the machine.
QUICK_SECONDS = 0.01
# Twice the text takes twice the time; four times, if it is quadratic.
MOST_TIMES = 3


class Pattern(NamedTuple):
    """A pattern, and how the product uses it."""

    place: str
    compiled: re.Pattern[Any]
    uses: frozenset[str]

    def __str__(self) -> str:
        return f"{self.place}:{self.compiled.pattern!r}"


def modules() -> Iterator[Any]:
    for found in pkgutil.walk_packages(rpcsvc.__path__, "rpcsvc."):
        if not found.name.endswith("__main__"):
            yield importlib.import_module(found.name)


def within(value: Any, depth: int = 3) -> Iterator[re.Pattern[Any]]:
    """The patterns that a value is or holds."""
    if isinstance(value, re.Pattern):
        yield value
    elif depth and isinstance(value, tuple | list | set | frozenset):
        for part in value:
            yield from within(part, depth - 1)
    elif depth and isinstance(value, dict):
        yield from within([*value, *value.values()], depth)


def of_models(module: Any) -> Iterator[re.Pattern[Any]]:
    """The patterns that pydantic checks fields of a module's models by."""
    for value in vars(module).values():
        if isinstance(value, type) and issubclass(value, BaseModel):
            for field in value.model_fields.values():
                for rule in _rules(field.annotation, field.metadata):
                    if isinstance(text := getattr(rule, "pattern", None), str):
                        yield re.compile(text)


def _rules(annotation: Any, metadata: Iterable[Any]) -> Iterator[Any]:
    yield from metadata
    for rule in getattr(annotation, "__metadata__", ()):
        yield rule
        yield from getattr(rule, "metadata", ())
    for part in getattr(annotation, "__args__", ()):
        yield from _rules(part, ())


def in_functions(tree: ast.Module) -> Iterator[tuple[re.Pattern[Any], str | None]]:
    """The patterns that are written in functions, such as ``re.sub("a+", ...)``, and their uses."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        for node in ast.walk(function):
            called = _called(node)
            if called is None or called[0] != "re" or called[1] not in {*CALLS, "compile"}:
                continue
            pattern = _written(node.args[0])  # type: ignore[attr-defined] # it is a call
            if pattern is not None:
                yield pattern, None if called[1] == "compile" else called[1]


def _called(node: ast.AST) -> tuple[str, str] | None:
    """Name and attribute of a call such as ``_NAME.fullmatch(...)`` or ``_NAMES[1].match(...)``."""
    if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
        return None
    on = node.func.value
    on = on.value if isinstance(on, ast.Subscript) else on
    return (on.id, node.func.attr) if isinstance(on, ast.Name) else None


def _written(node: ast.expr) -> re.Pattern[Any] | None:
    """The pattern of a literal; numbers that are put into it are 9."""
    if isinstance(node, ast.Constant):
        return re.compile(node.value)
    if isinstance(node, ast.JoinedStr):
        parts = [part.value if isinstance(part, ast.Constant) else "9" for part in node.values]
        return re.compile("".join(map(str, parts)))
    return None


@cache
def collected() -> list[Pattern]:
    """Every pattern of the product. One whose uses are not found counts as used in every way."""
    uses: dict[re.Pattern[Any], set[str]] = {}
    places: dict[re.Pattern[Any], str] = {}
    for module in modules():
        if module.__name__ in OF_OWN_TEXT:
            continue
        tree = ast.parse(Path(module.__file__).read_text(encoding="utf-8"))
        own = vars(module)
        found = [(each, None) for each in [*within(list(own.values())), *of_models(module)]]
        for pattern, use in [*found, *in_functions(tree)]:
            places.setdefault(pattern, module.__name__)
            uses.setdefault(pattern, set()).update({use} if use else ())
        for name, use in filter(None, map(_called, ast.walk(tree))):
            for pattern in within(own.get(name)) if use in CALLS else ():
                uses[pattern].add(use)
    return [
        Pattern(place, pattern, frozenset(uses[pattern] or {WHOLE, PARTS}))
        for pattern, place in places.items()
    ]


def sample(tree: Any) -> str:
    """A text that the parsed pattern takes, but for what it looks around for."""
    return "".join(_of(op, value) for op, value in tree)


def _of(op: Any, value: Any) -> str:
    if op in REPEATS:
        return sample(value[2]) * max(int(value[0]), 1)
    read: Callable[[Any], str] | None = {
        ops.LITERAL: chr,
        ops.NOT_LITERAL: lambda _: "!",
        ops.ANY: lambda _: "x",
        ops.IN: _member,
        ops.BRANCH: lambda branch: sample(branch[1][0]),
        ops.SUBPATTERN: lambda group: sample(group[-1]),
    }.get(op)
    return read(value) if read else ""


def _member(allowed: Any) -> str:
    if allowed[0][0] is ops.NEGATE:
        return "!"
    op, value = allowed[0]
    if op is ops.LITERAL:
        return chr(value)
    if op is ops.RANGE:
        return chr(value[0])
    return {ops.CATEGORY_DIGIT: "0", ops.CATEGORY_SPACE: " "}.get(value, "a")


def pumped(tree: Any, before: str = "") -> Iterator[tuple[str, str]]:
    """The way to each repetition of a parsed pattern, and the repeated part."""
    for op, value in tree:
        if op in REPEATS:
            yield before, sample(value[2])
            yield from pumped(value[2], before)
        elif op is ops.SUBPATTERN:
            yield from pumped(value[-1], before)
        elif op is ops.BRANCH:
            for branch in value[1]:
                yield before, sample(branch)
                yield from pumped(branch, before)
        elif op in (ops.ASSERT, ops.ASSERT_NOT):
            yield from pumped(value[1], before)
        before += _of(op, value)
    yield "", before


def texts(pattern: re.Pattern[Any]) -> Iterator[tuple[str, str, str]]:
    """Beginning, unit and end of repetitive texts."""
    own = {each for each in pumped(parser.parse(pattern.pattern, pattern.flags)) if each[1]}
    own |= {("", before) for before, _ in own if before}  # what leads to a repetition, repeated
    spaced = {(before, f"{unit} ") for before, unit in own}
    for before, unit in [*sorted(own | spaced), *(("", unit) for unit in UNITS)]:
        yield from ((before, unit, end) for end in ENDS)


def seconds(pattern: Pattern, text: str) -> float:
    """CPU seconds of a pattern on a text, used as the product uses it."""
    compiled = pattern.compiled
    given: Any = text.encode() if isinstance(compiled.pattern, bytes) else text
    began = time.thread_time()
    if pattern.uses & {WHOLE, BEGINNING}:
        compiled.fullmatch(given)
    if pattern.uses - {WHOLE, BEGINNING}:
        deque(compiled.finditer(given), maxlen=0)
    return time.thread_time() - began


def grows_faster(pattern: Pattern, before: str, unit: str, end: str) -> bool:
    """Whether twice the text takes more than about twice the time."""
    for length in LENGTHS:
        times = length // len(unit)
        text, half = before + unit * times + end, before + unit * (times // 2) + end
        if seconds(pattern, text) > QUICK_SECONDS:
            whole = min(seconds(pattern, text) for _ in range(3))
            least = min(seconds(pattern, half) for _ in range(3))
            return whole > QUICK_SECONDS and whole > MOST_TIMES * least
    return False


def test_pattern_takes_linear_time() -> None:
    """In one test: to name each pattern would read the whole product in every process of pytest."""
    slow = [
        (str(pattern), text)
        for pattern in collected()
        for text in texts(pattern.compiled)
        if grows_faster(pattern, *text)
    ]

    assert slow == []


def test_patterns_of_callers_texts_are_among_them() -> None:
    """The walk finds what stands in modules, in containers, in models and in calls."""
    found = {pattern.compiled.pattern for pattern in collected()}
    assert {payment_check._SECRET_KEY.pattern, EVM_PATTERN, key_pattern(16), "[.-]"} <= found


def test_pattern_that_takes_quadratic_time_is_found() -> None:
    for text, use in ((".*(raw|auth).*", WHOLE), ("//\\S*@", PARTS), ("(a+)+b", WHOLE)):
        pattern = Pattern("", re.compile(text), frozenset({use}))
        assert any(grows_faster(pattern, *each) for each in texts(pattern.compiled)), text
