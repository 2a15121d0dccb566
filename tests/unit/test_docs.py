"""The documents are right: links, names of files and functions, and the README's commands."""

from __future__ import annotations

import asyncio
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.operations.table import OPERATIONS
from rpcsvc.orders.ports.venue import FaultKind
from tests.e2e.processes import Server

ROOT = Path(__file__).parent.parent.parent
USE, DEVELOP = ROOT / "docs" / "use", ROOT / "docs" / "develop"
ARCHITECTURE, TRIPS = DEVELOP / "architecture.md", DEVELOP / "trips.md"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def found(pattern: str, path: Path) -> set[Any]:
    """Matches of a pattern in a file; it has to match."""
    matches = set(re.findall(pattern, path.read_text(), re.MULTILINE))
    assert matches, f"{path} has no {pattern}"
    return matches


def links(pattern: str) -> list[tuple[Path, Any]]:
    """Matches of a pattern in each page."""
    matches = [(page, each) for page in PAGES for each in re.findall(pattern, page.read_text())]
    assert len(matches) > len(PAGES)
    return matches


def test_every_relative_link_leads_somewhere() -> None:
    for page, target in links(r"\]\(([^)#:]+)(?:#[^)]*)?\)"):
        assert (page.parent / target).exists(), f"{page.name}: {target}"


def anchors(page: Path) -> set[str]:
    """The names that headings of a page are linked by."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_to_a_heading_finds_it() -> None:
    for page, (target, anchor) in links(r"\]\(([\w./-]*)#([^)]+)\)"):
        there = anchors(page.parent / target if target else page)
        assert anchor in there, f"{page.name}: {target}#{anchor}"


# Folders that other targets write, and git ignores.
MADE = {"node_modules", "generated"}


def test_every_page_named_in_code_exists() -> None:
    sources = [ROOT / "Makefile", ROOT / ".gitignore", ROOT / "pyproject.toml"]
    for folder in ("rpcsvc", "tests", "tools", "config", ".ci"):
        sources += [
            path
            for path in (ROOT / folder).rglob("*")
            if path.is_file() and not MADE & {*path.parts} and path.suffix != ".pyc"
        ]
    named = {
        (path, page)
        for path in sources
        for page in re.findall(rb"docs/[\w./-]+\.md", path.read_bytes())
    }
    assert len(named) > 20
    for path, page in named:
        assert (ROOT / page.decode()).exists(), f"{path}: {page.decode()}"


def test_each_shelf_of_the_docs_has_an_index_of_its_pages() -> None:
    for shelf in (USE, DEVELOP, ROOT / "docs" / "operate"):
        index = (shelf / "README.md").read_text()
        for page in set(shelf.glob("*.md")) - {shelf / "README.md"}:
            assert f"]({page.name})" in index, page


@pytest.mark.parametrize("page", [ARCHITECTURE, TRIPS], ids=lambda page: page.stem)
def test_page_names_existing_files(page: Path) -> None:
    for name in found(r"`((?:rpcsvc|tests|config)/[\w/.]+)`", page):
        assert (ROOT / name).exists(), name


@pytest.mark.parametrize("page", [ARCHITECTURE, TRIPS], ids=lambda page: page.stem)
def test_page_names_existing_methods(page: Path) -> None:
    classes = {}
    for file in (ROOT / "rpcsvc").rglob("*.py"):
        if file.name != "__main__.py":
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            classes.update(vars(importlib.import_module(name.removesuffix(".__init__"))))
    for owner, method in found(r"`([A-Z]\w+)\.(\w+)`", page):
        assert hasattr(classes[owner], method), f"{owner}.{method}"


# Words in backticks that are values: statuses, a table, engines, settings, names in a module.
VALUES = {"completed", "prepared", "effects", "onchain", "upstream"}
VALUES |= {"engine", "name", "payment", "tool", "CHAINS", "_MODULES"}


@pytest.mark.parametrize("page", [ARCHITECTURE, TRIPS], ids=lambda page: page.stem)
def test_page_names_existing_functions_and_classes(page: Path) -> None:
    defined = {
        name
        for file in (ROOT / "rpcsvc").rglob("*.py")
        for name in re.findall(r"^ *(?:async def|def|class) (\w+)", file.read_text(), re.MULTILINE)
    }
    assert found(r"`([A-Za-z_]\w*)`", page) - defined - VALUES == set()


def test_architecture_page_names_existing_modules_of_folders() -> None:
    there = {file.name for file in (ROOT / "rpcsvc" / "settlement" / "onchain").rglob("*.py")}
    assert found(r"`(\w+\.py)`", ARCHITECTURE) <= there


def test_use_pages_name_every_operation_and_fault() -> None:
    calls, sandbox = ((USE / name).read_text() for name in ("calls.md", "sandbox.md"))
    for operation in OPERATIONS:
        assert f"`service.{operation.name}`" in calls
        assert not operation.path or operation.path in calls
    for fault in FaultKind:
        assert f"`{fault}`" in sandbox


def test_pages_name_existing_make_targets() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for page, target in links(r"`make ([\w-]+)"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{page.name}: {target}"


def test_testing_page_names_every_make_target() -> None:
    targets = set(re.findall(r"^([\w-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    named = found(r"^\| `make ([\w-]+)` \|", DEVELOP / "testing.md")
    assert targets == named


def commands_of(page: Path) -> str:
    """The shell blocks of a page in order, without those that start a server or the demo."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    return "\n".join(block for block in blocks if not block.startswith("make "))


def output_of(page: Path, folder: Path) -> str:
    """Run the shell blocks of a page against a server of its own; return stdout and stderr."""
    server = Server(folder / "data")
    try:
        assert asyncio.run(server.ready())
        script = commands_of(page).replace("http://127.0.0.1:8080", server.url)
        script = script.replace(".venv/bin/rpcsvc", f"{sys.executable} -m rpcsvc")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=ROOT,
            env={**os.environ, "RPCSVC_DATA_DIR": str(folder / "data")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout + done.stderr
    finally:
        server.kill()


def test_readme_commands_swap(tmp_path: Path) -> None:
    output = output_of(ROOT / "README.md", tmp_path)
    for shown in ('"expectedOutput":"131.29"', '"transfer.settled"', '"state":"completed"'):
        assert shown in output


def test_calls_page_commands_swap(tmp_path: Path) -> None:
    output = output_of(USE / "calls.md", tmp_path)
    for shown in ("needs_destination", '"expectedOutput":"0.904445454544"', '"state":"completed"'):
        assert shown in output


def test_sandbox_page_commands_work(tmp_path: Path) -> None:
    assert '"ok": true' in output_of(USE / "sandbox.md", tmp_path)
