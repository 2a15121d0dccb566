"""The benchmark's rows for real daemons on a machine without these."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.bench import onchain
from tests.bench.__main__ import QUICK, Bench
from tests.bench.report import Report, table


@pytest.fixture
def found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Report:
    monkeypatch.setattr(onchain, "missing", lambda: ["anvil", "monerod"])
    report = Report({})
    Bench(QUICK, tmp_path, report).on_chains(["watching", "create-onchain"])
    return report


def test_report_lists_what_missing_daemons_left_unmeasured(found: Report) -> None:
    assert "not measured: create-onchain, watching (not installed: anvil, monerod;" in table(found)


def test_where_the_daemons_are_missing_the_run_does_not_fail(found: Report) -> None:
    found.conclude()
    assert found.problems == []
    assert found.readings == []


def test_parts_not_run_are_not_reported(tmp_path: Path) -> None:
    report = Report({})
    Bench(QUICK, tmp_path, report).on_chains(["create"])
    assert report.remarks == []
