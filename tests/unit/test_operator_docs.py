"""Alerts and lines of docs/operate/alerts.md belong together; commands of pages exist."""

from __future__ import annotations

import argparse
import ast
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.audit.records import ETHER, ETHER_INCOME
from rpcsvc.cli.main import build_parser

ROOT = Path(__file__).parent.parent.parent
DOCS = ROOT / "docs"
ALERTS = (DOCS / "operate" / "alerts.md").read_text()
ALARMS = {"warning", "error", "exception", "critical"}
LEVELS = {"debug", "info", *ALARMS}
EVENT = re.compile(r"[a-z]+(_[a-z0-9]+)*")


@cache
def trees() -> dict[Path, ast.Module]:
    """The product's files, parsed."""
    return {file: ast.parse(file.read_text()) for file in sorted((ROOT / "rpcsvc").rglob("*.py"))}


def first_cells(head: str) -> list[str]:
    """The words in backticks in the first column of all tables with this head."""
    tables = re.findall(rf"^\| {head} \|.*\n\|[-|]+\|\n((?:\|.*\n)+)", ALERTS, re.MULTILINE)
    cells = re.findall(r"^\| (.*?) \|", "".join(tables), re.MULTILINE)
    return re.findall(r"`([^`]+)`", " ".join(cells))


# --- the log ---------------------------------------------------------------------------------


def levels_in(node: ast.AST) -> set[str]:
    """The log levels that an expression names, as attributes."""
    inside = ast.walk(node)
    return {each.attr for each in inside if isinstance(each, ast.Attribute)} & LEVELS


def chosen_levels(nodes: list[ast.AST]) -> dict[str, set[str]]:
    """Names assigned to a log method: ``write = log.warning if ... else log.info``."""
    return {
        target.id: levels
        for node in nodes
        if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call)
        for target in node.targets
        if isinstance(target, ast.Name) and (levels := levels_in(node.value))
    }


def logged(call: ast.Call, chosen: dict[str, set[str]]) -> tuple[set[str], str] | None:
    """The levels and the event of a log call, by any name of the logger."""
    said = [arg.value if isinstance(arg, ast.Constant) else None for arg in call.args[:2]]
    if isinstance(call.func, ast.Attribute) and call.func.attr in LEVELS:
        levels, event = {call.func.attr}, said[:1]
    elif isinstance(call.func, ast.Attribute) and call.func.attr == "log":
        levels, event = LEVELS, said[1:]  # the level comes in a variable
    elif isinstance(call.func, ast.Name) and call.func.id in chosen:
        levels, event = chosen[call.func.id], said[:1]
    elif said[:1] and said[0] in LEVELS:
        levels, event = {str(said[0])}, said[1:]  # _report("error", "event")
    else:
        return None
    if not event or not isinstance(event[0], str) or not EVENT.fullmatch(event[0]):
        return None
    return levels, event[0]


@cache
def events() -> dict[str, set[str]]:
    """Every event that the service logs, and the levels that it is logged at."""
    found: dict[str, set[str]] = {}
    for tree in trees().values():
        nodes = list(ast.walk(tree))
        chosen = chosen_levels(nodes)
        for node in nodes:
            if isinstance(node, ast.Call) and (entry := logged(node, chosen)):
                found.setdefault(entry[1], set()).update(entry[0])
    return found


def test_the_alarms_are_found_whoever_logs_them() -> None:
    found = {event for event, levels in events().items() if levels & ALARMS}
    assert len(found) > 60
    assert found >= {
        "order_quarantined",  # log.exception
        "rpc_method_failed",  # _logger.exception
        "database_unavailable",  # _report("error", ...)
        "order_transition",  # write(...), chosen before
        "library_log",  # log.log(level, ...)
    }
    assert "serving" in events()
    assert "serving" not in found


def test_every_alarm_is_documented() -> None:
    alarms = {event for event, levels in events().items() if levels & ALARMS}
    assert sorted(alarms - set(first_cells("event"))) == []


def test_no_documented_event_is_missing_in_the_code() -> None:
    named = first_cells("event")
    assert len(named) > 60
    assert sorted(set(named) - events().keys()) == []


def test_no_event_is_documented_twice() -> None:
    named = first_cells("event")
    assert sorted({event for event in named if named.count(event) > 1}) == []


# --- the audit -------------------------------------------------------------------------------


def kinds() -> set[str]:
    """The kinds of differences that the auditor's rules make."""
    named: set[str | None] = set()
    for file, tree in trees().items():
        if file.parent.name != "audit":
            continue
        for node in ast.walk(tree):
            match node:
                case ast.Call(func=ast.Name("Difference" | "_amounts"), args=[kind, *_]):
                    named.add(text_of(kind))
                case ast.Assign(targets=[ast.Name("kind")], value=ast.IfExp(_, one, other)):
                    named |= {text_of(one), text_of(other)}
                case ast.Assign(targets=[ast.Name("compared")], value=ast.Dict(keys)):
                    named |= {text_of(key) for key in keys if key}
                case ast.Assign(targets=[ast.Subscript(ast.Name("compared"), key)]):
                    named.add(text_of(key))
    return {kind for kind in named if kind} | {ETHER, ETHER_INCOME}


def test_every_audit_finding_is_documented_once() -> None:
    named = first_cells("the audit finds")
    assert len(named) > 30
    assert sorted(named) == sorted(kinds())


# --- health ----------------------------------------------------------------------------------


def docstrings(tree: ast.AST) -> set[int]:
    """The ids of the nodes that are docstrings."""
    bodies = (node.body for node in ast.walk(tree) if hasattr(node, "body"))
    firsts = (body[0] for body in bodies if isinstance(body, list) and body)
    return {id(node.value) for node in firsts if isinstance(node, ast.Expr)}


def text_of(node: ast.AST) -> str | None:
    """The text of a literal, with ``{}`` for its fields."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "{}" for part in node.values)
    return None


@cache
def sentences() -> str:
    """All string literals of the modules that health uses, without docstrings."""
    folders = ("settlement", "orders", "rates", "store", "http", "operations")
    found = []
    for file, tree in trees().items():
        if file.relative_to(ROOT / "rpcsvc").parts[0] in folders:
            skipped = docstrings(tree)
            texts = (text_of(node) for node in ast.walk(tree) if id(node) not in skipped)
            found += [text for text in texts if text]
    return "\n".join(found)


@pytest.mark.parametrize("phrase", first_cells("health says"))
def test_what_health_says_is_quoted_as_it_is(phrase: str) -> None:
    which = re.sub(r"^the Monero (node|wallet)", "the Monero {}", phrase)
    known = re.sub(r"^the (wallet|mnemonic) is not recorded", "the {} is not recorded", which)
    assert any(each in sentences() for each in (phrase, which, known)), phrase


# --- commands --------------------------------------------------------------------------------


def commands(text: str) -> Iterator[str]:
    """The command lines of a page: in backticks within a line, and in blocks."""
    blocks = re.findall(r"```.*?```", text, re.DOTALL)
    for block in blocks:
        text = text.replace(block, "")
        for line in block.replace("\\\n", " ").splitlines():
            yield from (
                found.split(" | ")[0] for found in re.findall(r"(?:^|/)rpcsvc ([a-z].*)", line)
            )
    for span in re.findall(r"`(?:[^`\n]*/)?rpcsvc ([a-z][^`]*)`", text):
        yield " ".join(span.split())


PAGES = sorted({*ROOT.glob("*.md"), *DOCS.rglob("*.md")} - {*(DOCS / "generated").iterdir()})
LINES = sorted({line for page in PAGES for line in commands(page.read_text())})


@cache
def tree() -> argparse.ArgumentParser:
    """The program's parser."""
    return build_parser()


def below(parser: argparse.ArgumentParser) -> Any:
    """The action with the subcommands of a command; None if it has none."""
    groups = (each for each in parser._actions if isinstance(each, argparse._SubParsersAction))
    return next(groups, None)


def problem_of(line: str) -> str | None:
    """The problem of a command line of a page; None if the program accepts it.

    Arguments may be left out, as when a page only names a command. ``...``: any further words.
    """
    parser, values, words = tree(), 0, iter(shlex.split(line))
    for word in words:
        if word == "...":
            return None
        group = below(parser)
        if word.startswith("--"):
            if word not in parser._option_string_actions:
                return f"no option {word}"
            if parser._option_string_actions[word].nargs != 0:
                next(words)
        elif group is None:
            values += 1
        elif word in group.choices:
            parser = group.choices[word]
        else:
            return f"no command {word}"
    return problem_at_the_end(parser, values)


def problem_at_the_end(parser: argparse.ArgumentParser, values: int) -> str | None:
    """A missing or surplus argument at the end of a command line."""
    group = below(parser)
    if group is not None:
        return "a command is missing" if group.required else None
    taken = sum(not action.option_strings for action in parser._actions)
    return f"{values} arguments, not {taken}" if values > taken else None


@pytest.mark.parametrize("line", LINES)
def test_every_command_of_the_pages_exists(line: str) -> None:
    assert problem_of(line) is None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("nonsense", "no command nonsense"),
        ("payouts nonsense", "no command nonsense"),
        ("payouts", "a command is missing"),
        ("payouts pause --because TEXT", "no option --because"),
        ("refund ORDER ADDR", "2 arguments, not 1"),
        ("treasury", None),
        ("db backup", None),
        ("payouts ...", None),
    ],
)
def test_a_command_that_does_not_exist_is_noticed(line: str, problem: str | None) -> None:
    assert problem_of(line) == problem


def test_commands_are_found_wherever_a_page_gives_them() -> None:
    assert set(LINES) >= {
        "payouts ...",  # in a line
        "keys rotate --revoke",  # over the end of a line
        "db backup DEST",
        "agent:capabilities --compact",  # in a block
    }
    assert len(LINES) > 40


def test_every_test_that_the_reorg_page_names_exists() -> None:
    named = set(re.findall(r"`(test_\w+)`", (DOCS / "operate" / "reorgs.md").read_text()))
    files = (path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    made = {name for text in files for name in re.findall(r"def (test_\w+)\(", text)}
    assert len(named) > 20
    assert named <= made
