"""Values with secrets."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from io import StringIO

from rich.console import Console

import rpcsvc
from rpcsvc.redacted import Redacted


class Key(Redacted, frozen=True):
    HIDDEN = frozenset({"secret"})

    name: str
    secret: str


def test_redacted_value_prints_no_secret() -> None:
    key, printed = Key("mine", "hush"), StringIO()
    Console(file=printed).print(key)
    assert repr(key) == "Key(name='mine')"
    assert "mine" in printed.getvalue()
    assert "hush" not in printed.getvalue()


def subclasses(of: type[Redacted]) -> Iterator[type[Redacted]]:
    for each in of.__subclasses__():
        yield each
        yield from subclasses(each)


def test_hidden_fields_exist() -> None:
    """A name that no field has would hide nothing."""
    for module in pkgutil.walk_packages(rpcsvc.__path__, "rpcsvc."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found = list(subclasses(Redacted))
    assert len(found) > 5
    for each in found:
        assert set(each.__struct_fields__) >= each.HIDDEN
