"""An engine is a package and one line of the registry: no other module imports it."""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import cast

import pytest

from rpcsvc.engines import ENGINES, EngineFacts
from tests.sandbox import EVM, sandbox

ROOT = Path(__file__).parent.parent.parent
PACKAGES = ROOT / "rpcsvc" / "settlement"
# Features for real wallets only: auditor, treasury, commands about wallets and receipts.
IMPORTERS = {"onchain": ("rpcsvc.audit.", "rpcsvc.treasury.", "rpcsvc.cli.")}


@cache
def imported(path: Path) -> set[str]:
    """The modules that a file imports, also within functions."""
    text = path.read_text(encoding="utf-8")
    if "rpcsvc.settlement" not in text:  # parsing takes long
        return set()
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts)


def importers_of(engine: str) -> list[str]:
    """The modules outside an engine's package that import from it."""
    package = f"rpcsvc.settlement.{engine}"
    return [
        name_of(path)
        for path in sorted((ROOT / "rpcsvc").rglob("*.py"))
        if not name_of(path).startswith(package)
        and any(f"{module}.".startswith(f"{package}.") for module in imported(path))
    ]


def test_each_engine_has_a_package_and_a_line_of_the_registry() -> None:
    packages = {path.parent.name for path in PACKAGES.glob("*/__init__.py")}
    assert packages == set(ENGINES)


@pytest.mark.parametrize("engine", ENGINES)
def test_engine_is_imported_by_its_own_parts_only(engine: str) -> None:
    allowed = IMPORTERS.get(engine, ())
    assert [name for name in importers_of(engine) if not name.startswith(allowed)] == []


@pytest.mark.parametrize("engine", ENGINES)
def test_engine_module_connects_and_checks(engine: str) -> None:
    module = import_module(ENGINES[engine].module)
    assert callable(module.connect)
    assert callable(module.check)


async def test_engine_that_only_quotes_is_a_module_and_a_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = EngineFacts("tests.unit.quoting_engine")
    monkeypatch.setitem(cast("dict[str, EngineFacts]", ENGINES), "quoting", line)
    swap = {"direction": "x2u", "chain": "arbitrum", "amount": "2"}
    async with sandbox(tmp_path, flags={"engine": "quoting"}) as box:
        quote = await box.call("swap.quote", **swap)
        order = await box.call("swap.execute", **swap, to=EVM)
        await box.catch_up()
    assert quote["data"]["network"] == "quoting"
    assert quote["data"]["quote"]["expectedOutput"] == "300"
    assert order["error"]["code"] == "unavailable"


async def test_sandbox_network_is_known_before_it_is_loaded(tmp_path: Path) -> None:
    async with sandbox(tmp_path) as box:
        assert box.up.settings.network == box.up.service.views.network
