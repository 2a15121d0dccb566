"""The mutants of a module, by mutmut's operators, and planting one into the running process.

Texts for people are not mutated: sentences in errors are held where they are served. Properties
are, which mutmut by itself leaves out.
"""

from __future__ import annotations
import __future__

import ast
import importlib
import inspect
import textwrap
from collections.abc import Iterator
from difflib import ndiff
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Final, NamedTuple

import libcst as cst
from libcst.metadata import MetadataWrapper, PositionProvider
from mutmut.mutation.file_mutation import MutationVisitor, deep_replace
from mutmut.mutation.mutators import mutation_operators
from mutmut.mutation.pragma_handling import IgnoredCode

_ANNOTATIONS_AS_TEXT: Final = __future__.annotations.compiler_flag


class RuleMutant(NamedTuple):
    """One change of one function. ``line`` is where it begins, ``lines`` those of the function.

    ``owner`` is the class, empty for a function of the module; ``source`` the function, changed.
    """

    module: str
    owner: str
    function: str
    line: int
    lines: range
    old: str
    new: str
    source: str

    @property
    def name(self) -> str:
        """The module's name within its package."""
        return self.module.rpartition(".")[2]

    @property
    def place(self) -> str:
        """The function's name, with its class and module."""
        return ".".join(filter(None, (self.name, self.owner, self.function)))


class _Visitor(MutationVisitor):
    def _skip_node_and_children(self, node: cst.CSTNode) -> bool:
        if isinstance(node, cst.FunctionDef):
            return False
        return _is_text(node) or bool(super()._skip_node_and_children(node))

    def _create_mutations(self, node: cst.CSTNode) -> None:
        before = len(self.mutations)
        super()._create_mutations(node)
        self.mutations[before:] = [
            each for each in self.mutations[before:] if not _takes_text(node, each.mutated_node)
        ]


def _is_text(node: cst.CSTNode) -> bool:
    """Return whether it is a literal for people: one with a space in it."""
    if isinstance(node, cst.SimpleString):
        return " " in node.value
    if isinstance(node, cst.FormattedString):
        texts = [part for part in node.parts if isinstance(part, cst.FormattedStringText)]
        return any(" " in part.value for part in texts)
    return isinstance(node, cst.ConcatenatedString)


def _takes_text(node: cst.CSTNode, mutated: cst.CSTNode) -> bool:
    if isinstance(node, cst.Assign | cst.AnnAssign):
        return node.value is not None and _is_text(node.value)
    if not isinstance(node, cst.Call) or not isinstance(mutated, cst.Call):
        return False
    left = {id(each) for each in mutated.args}
    return any(_is_text(each.value) for each in node.args if id(each) not in left)


def mutants_of(path: Path, module: str) -> Iterator[RuleMutant]:
    """The mutants of the module's functions, in the order of its lines."""
    wrapper = MetadataWrapper(cst.parse_module(path.read_text(encoding="utf-8")))
    visitor = _Visitor(mutation_operators, IgnoredCode(set(), set(), set()))
    wrapper.visit(visitor)
    positions = wrapper.resolve(PositionProvider)
    owners = {
        function: statement.name.value
        for statement in wrapper.module.body
        if isinstance(statement, cst.ClassDef)
        for function in statement.body.body
    }
    for each in visitor.mutations:
        function = each.contained_by_top_level_function
        if not isinstance(function, cst.FunctionDef):
            continue
        changed = deep_replace(function, each.original_node, each.mutated_node)
        assert isinstance(changed, cst.FunctionDef)
        old, new = (wrapper.module.code_for_node(node) for node in (function, changed))
        if old == new:
            continue
        position = positions[function]
        marked = list(ndiff(old.splitlines(), new.splitlines()))
        where = positions.get(each.original_node, position).start.line
        yield RuleMutant(
            module, owners.get(function, ""), function.name.value,
            where, range(position.start.line, position.end.line + 1),
            _joined(marked, "- "), _joined(marked, "+ "), textwrap.dedent(new),
        )  # fmt: skip


def _joined(marked: list[str], sign: str) -> str:
    return " ".join(line[2:].strip() for line in marked if line.startswith(sign))


def plant(mutant: RuleMutant) -> None:
    """Give the function the mutant's code, wherever it was imported, and empty all caches."""
    module = importlib.import_module(mutant.module)
    source, names = mutant.source, dict(vars(module))
    if mutant.owner:
        source = f"class {mutant.owner}:\n{textwrap.indent(source, '    ')}"
    exec(
        compile(source, f"<{mutant.place}>", "exec", _ANNOTATIONS_AS_TEXT, dont_inherit=True), names
    )
    here = vars(names[mutant.owner]) if mutant.owner else names
    there = vars(getattr(module, mutant.owner)) if mutant.owner else vars(module)
    new, old = _bare(here[mutant.function]), _bare(there[mutant.function])
    old.__code__ = new.__code__
    old.__defaults__, old.__kwdefaults__ = new.__defaults__, new.__kwdefaults__
    for each in vars(module).values():
        if hasattr(each, "cache_clear"):
            each.cache_clear()
    if not mutant.owner:
        _assign_again(module, mutant.function)


def _assign_again(module: ModuleType, function: str) -> None:
    """Run the assignments of the module that use the function, which ran with the module."""
    for statement in ast.parse(inspect.getsource(module)).body:
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        if isinstance(statement, ast.Assign | ast.AnnAssign) and function in names:
            assignment = ast.Module([statement], [])
            exec(compile(assignment, module.__name__, "exec"), vars(module))


def _bare(found: Any) -> FunctionType:
    """Return the function within a property, a class method or a cache."""
    for inside in ("fget", "__func__", "__wrapped__"):
        found = getattr(found, inside, None) or found
    assert isinstance(found, FunctionType)
    return found
