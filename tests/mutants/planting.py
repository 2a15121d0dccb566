"""Plants a mutant into a copy of the tree."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final

from tests.mutants.catalogue import Mutant

ROOT: Final = Path(__file__).parents[2]
_COPIED: Final = ("rpcsvc", "tests", "config", "pyproject.toml")


def module_of(mutant: Mutant, root: Path = ROOT) -> Path:
    """The module that the mutant's passage stands in. Raises LookupError unless that is one."""
    found = [
        path
        for path in sorted((root / "rpcsvc").rglob("*.py"))
        for _ in range(path.read_text(encoding="utf-8").count(mutant.old))
    ]
    if len(found) != 1:
        raise LookupError(f"the passage of {mutant.name} occurs {len(found)} times")
    return found[0]


@contextmanager
def planted(mutant: Mutant | None) -> Iterator[Path]:
    """A copy of the tree with the mutant in it; without one, as it is."""
    with TemporaryDirectory(prefix="rpcsvc-mutant-") as folder:
        root = Path(folder)
        for name in _COPIED:
            source = ROOT / name
            if source.is_dir():
                shutil.copytree(
                    source, root / name, ignore=shutil.ignore_patterns("__pycache__", "regtest")
                )
            else:
                shutil.copy2(source, root / name)
        if mutant is not None:
            path = module_of(mutant, root)
            text = path.read_text(encoding="utf-8")
            path.write_text(text.replace(mutant.old, mutant.new), encoding="utf-8")
        yield root
