"""Text printed for a terminal gives it no orders, and hides nothing."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from rpcsvc.logs import configure_logging
from rpcsvc.terminal import printable

CLI = Path(__file__).parent.parent.parent / "rpcsvc" / "cli"
# ESC, DEL, C1 (CSI), bidi override and isolate, zero-width, line separator, tag, lone surrogate.
HOSTILE = "\x1b[2J\x7f\x9b31m\u202eabc\u2066\u200b\u2028\U000e0041\ud800"


@given(st.text())
def test_printable_json_stays_the_same_json(text: str) -> None:
    written = printable(json.dumps({"a": text}, ensure_ascii=False, indent=2))
    assert json.loads(written) == {"a": text}
    assert all(line.isprintable() for line in written.split("\n"))


def test_printable_shows_letters_and_escapes_the_rest() -> None:
    assert printable("Zoë 日本 👍\n") == "Zoë 日本 👍\n"
    assert printable(HOSTILE) == (
        r"\u001b[2J\u007f\u009b31m\u202eabc\u2066\u200b\u2028\udb40\udc41\ud800"
    )


# The progress line and the screen of "top" are orders of ours; "mcp" speaks to a program.
DIRECT = {"context.py", "agent/mcp.py", "agent/operations.py", "operator/service.py"}


def test_commands_write_through_the_functions_that_escape() -> None:
    writing = re.compile(r"sys\.std(?:out|err)(?:\.buffer)?\.write\(|\bprint\(")
    found = {
        str(path.relative_to(CLI))
        for path in CLI.rglob("*.py")
        if writing.search(path.read_text(encoding="utf-8"))
    }
    assert found == DIRECT


@pytest.fixture
def _log_settings() -> object:
    kept = structlog.get_config()
    yield
    structlog.configure(**kept)


@pytest.mark.usefixtures("_log_settings")
@pytest.mark.parametrize("log_format", ["console", "json"])
def test_log_gives_the_terminal_no_orders(log_format: str, monkeypatch: pytest.MonkeyPatch) -> None:
    written = io.StringIO()
    monkeypatch.setattr(sys, "stderr", written)
    configure_logging(log_format, "info")
    hostile = HOSTILE.removesuffix("\ud800")
    structlog.get_logger().info("host_refused", host=hostile, hosts=[hostile])
    structlog.get_logger().error("failed", exc_info=ValueError(hostile))
    shown = written.getvalue()
    assert "202e" in shown
    assert all(line.isprintable() for line in shown.split("\n"))
