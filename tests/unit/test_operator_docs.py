"""docs/operations.md has a line for every alert of the engine onchain, and names no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from rpcsvc.transport.cli import build_parser

ROOT = Path(__file__).parent.parent.parent
TEXT = (ROOT / "docs" / "operations.md").read_text()
ONCHAIN = TEXT[TEXT.index("# The engine onchain") :]
ALARMS = {"warning", "error", "exception", "critical"}
# A phrase of every reason that health can give, to be found in code and page alike.
_CELLS = re.findall(r"^\| (`.*?) \|", ONCHAIN[ONCHAIN.index("| health says") :], re.MULTILINE)
PHRASES = re.findall(r"`([^`]+)`", "".join(_CELLS))


def alarms(*folders: str) -> Iterator[str]:
    """The events that these parts log at warning and above."""
    for folder in folders:
        for file in (ROOT / "rpcsvc" / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
                    continue
                target, first = node.func.value, node.args[:1]
                is_log = isinstance(target, ast.Name) and target.id == "log"
                if is_log and node.func.attr in ALARMS and isinstance(first[0], ast.Constant):
                    yield str(first[0].value)


def test_every_alarm_of_the_engine_is_explained() -> None:
    found = set(alarms("settlement/onchain", "rates", "audit"))
    assert len(found) > 15
    assert [event for event in sorted(found) if f"`{event}`" not in ONCHAIN] == []


def test_every_alarm_of_orders_and_store_is_explained() -> None:
    found = {event for event in alarms("orders", "store") if "upstream" not in event}
    found -= {"ticket_not_passed_on"}  # of the engine upstream, too
    assert [event for event in sorted(found) if f"`{event}`" not in TEXT] == []


def test_no_alarm_is_explained_that_does_not_exist() -> None:
    table = ONCHAIN[ONCHAIN.index("| event | means | do |") :]
    named = re.findall(r"`([a-z_]+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)))
    real = set(alarms("settlement/onchain", "rates", "audit"))
    assert [event for event in named if event not in real] == []


@pytest.mark.parametrize("phrase", [each for each in PHRASES if " " in each])
def test_what_health_says_is_quoted_as_it_is(phrase: str) -> None:
    source = "".join(
        re.sub(r'"\s*\n\s*f?"', "", file.read_text())
        for folder in ("settlement/onchain", "orders")
        for file in (ROOT / "rpcsvc" / folder).rglob("*.py")
    )
    pattern = re.escape(phrase).replace(r"Monero\ node", r"Monero\ \{which\}")
    pattern = pattern.replace(r"Monero\ wallet", r"Monero\ \{which\}")
    assert re.search(pattern, source), phrase


def test_every_command_of_the_pages_exists() -> None:
    pages = (ROOT / "docs" / name for name in ("operations.md", "onchain.md"))
    text = "".join(page.read_text() for page in pages)
    named = set(re.findall(r"`rpcsvc ([a-z]+(?::[a-z]+)*)", text))
    help_text = build_parser().format_help()
    for command in sorted(named):
        assert re.search(rf"^    {command}\b", help_text, re.MULTILINE), command
