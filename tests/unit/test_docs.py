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

from rpcsvc.operations.table import OPERATIONS
from rpcsvc.orders.ports.venue import FaultKind
from tests.e2e.processes import Server

ROOT = Path(__file__).parent.parent.parent
ARCHITECTURE = ROOT / "docs" / "develop" / "architecture.md"
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])


def found(pattern: str, path: Path) -> set[Any]:
    """What a pattern matches in a file; it has to match."""
    matches = set(re.findall(pattern, path.read_text(), re.MULTILINE))
    assert matches, f"{path} has no {pattern}"
    return matches


def links(pattern: str) -> list[tuple[Path, Any]]:
    """What a pattern matches in each page."""
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


def test_every_file_that_the_architecture_page_names_exists() -> None:
    for name in found(r"`((?:rpcsvc|tests)/[\w/.]+)`", ARCHITECTURE):
        assert (ROOT / name).exists(), name


def test_every_method_that_the_architecture_page_names_exists() -> None:
    classes = {}
    for file in (ROOT / "rpcsvc").rglob("*.py"):
        if file.name != "__main__.py":
            name = ".".join(file.relative_to(ROOT).with_suffix("").parts)
            classes.update(vars(importlib.import_module(name.removesuffix(".__init__"))))
    for owner, method in found(r"`([A-Z]\w+)\.(\w+)`", ARCHITECTURE):
        assert hasattr(classes[owner], method), f"{owner}.{method}"


# Words in backticks on the architecture page that are values: statuses, a table, engines.
VALUES = {"completed", "prepared", "effects", "onchain", "upstream"}


def test_architecture_page_names_existing_functions_and_classes() -> None:
    defined = {
        name
        for file in (ROOT / "rpcsvc").rglob("*.py")
        for name in re.findall(r"^ *(?:async def|def|class) (\w+)", file.read_text(), re.MULTILINE)
    }
    assert found(r"`([A-Za-z_]\w*)`", ARCHITECTURE) - defined - VALUES == set()


def test_architecture_page_names_existing_modules_of_folders() -> None:
    there = {file.name for file in (ROOT / "rpcsvc" / "settlement" / "onchain").rglob("*.py")}
    assert found(r"`(\w+\.py)`", ARCHITECTURE) <= there


def test_the_readme_names_every_operation_and_fault() -> None:
    text = (ROOT / "README.md").read_text()
    for operation in OPERATIONS:
        assert f"`service.{operation.name}`" in text
        assert not operation.path or operation.path in text
    for fault in FaultKind:
        assert f"`{fault}`" in text


def test_the_makefile_has_the_targets_that_the_readme_names() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in found(r"`make ([\w-]+)`", ROOT / "README.md"):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def readme_commands() -> str:
    """The README's shell blocks in order, without those that start a server or the demo."""
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return "\n".join(block for block in blocks if not block.startswith("make "))


def test_the_readme_s_commands_work_as_they_stand(tmp_path: Path) -> None:
    server = Server(tmp_path / "data")
    try:
        assert asyncio.run(server.ready())
        script = readme_commands().replace("http://127.0.0.1:8080", server.url)
        script = script.replace(".venv/bin/rpcsvc", f"{sys.executable} -m rpcsvc")
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=ROOT,
            env={**os.environ, "RPCSVC_DATA_DIR": str(tmp_path / "data")},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert done.stderr.count("completed") == 2
        assert "131.29" in done.stdout
        assert "0.904445454544" in done.stdout
    finally:
        server.kill()
