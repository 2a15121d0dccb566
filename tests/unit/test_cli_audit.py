"""``rpcsvc audit``: its output and exit status."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rpcsvc.audit.records import Annotated, AuditReport, Difference, Unfit
from rpcsvc.cli.main import run
from rpcsvc.cli.operator import audit as cli_audit
from rpcsvc.settings import Settings
from rpcsvc.store.checks import Progress
from rpcsvc.store.database import BooksUnreadable

OK, FAILED, USAGE, UNREACHABLE = 0, 1, 2, 3
WRONG = AuditReport(
    (
        Difference("payout", "ord_1/payout/1", "12", "11", "USDC"),
        Difference("destination", "ord_2/refund/1", "4a", "4b"),
    ),
    ("deposit tx is seen",),
    ("arbitrum was not compared",),
    orders=2,
    payments=3,
)


async def nothing(_settings: Settings, _load: Callable[[], Settings]) -> None:
    raise AssertionError


def audit(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, made: AuditReport | Exception, *flags: str
) -> int:
    async def fake(_settings: Settings, progress: Progress, *, full: bool) -> AuditReport:
        assert full is ("--full" in flags)
        progress("comparing 2 orders with the chains", 1, 2)
        if isinstance(made, Exception):
            raise made
        return made

    monkeypatch.setattr(cli_audit, "audited", fake)
    environ = {"RPCSVC_ENGINE": "onchain"}
    argv = ["audit", "--data-dir", str(tmp_path), *flags]
    return run(argv, environ, serve=nothing, local=NotImplemented, private=NotImplemented)


def test_differences_are_a_table_and_status_1(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(monkeypatch, tmp_path, WRONG) == FAILED
    assert capsys.readouterr().out.splitlines() == [
        "DIFFERENCE   WHERE           EXPECTED  FOUND",
        "payout       ord_1/payout/1  12        11     USDC",
        "destination  ord_2/refund/1  4a        4b",
        "pending: deposit tx is seen",
        "note: arbitrum was not compared",
        "2 orders, 3 payments: 2 differences, 1 pending",
    ]


def test_audit_prints_one_json_object(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(monkeypatch, tmp_path, WRONG, "--json") == FAILED
    said = json.loads(capsys.readouterr().out)
    assert (said["ok"], said["orders"], len(said["differences"])) == (False, 2, 2)
    assert said["differences"][0] == {
        "kind": "payout", "subject": "ord_1/payout/1", "expected": "12", "found": "11",
        "unit": "USDC",
    }  # fmt: skip


def test_hint_and_annotations_are_shown_in_words(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = AuditReport(
        (
            Difference(
                "unrecorded_payment", "tx", "0", "7", "XMR", "looks like a payment: adopt it"
            ),
        ),
        annotated=(
            Annotated("monero", "ab", 2_500_000_000_000, 0, "XMR", "to the cold wallet"),
            Annotated("arbitrum", "0xcd", 1_000_000, 2_000_000, "USDC", "both ways"),
            Annotated("arbitrum", "0xef", 0, 0, "USDC", "ether"),
        ),
    )
    assert audit(monkeypatch, tmp_path, report) == FAILED
    assert capsys.readouterr().out.splitlines()[2:6] == [
        "tx looks like a payment: adopt it",
        "explained: monero ab: sent 2.5 XMR: to the cold wallet",
        "explained: arbitrum 0xcd: sent 1 USDC, received 2 USDC: both ways",
        "explained: arbitrum 0xef: moved no USDC: ether",
    ]
    assert audit(monkeypatch, tmp_path, report, "--json") == FAILED
    said = json.loads(capsys.readouterr().out)
    assert said["differences"][0]["hint"] == "looks like a payment: adopt it"
    assert said["explained"][0]["sent"] == 2_500_000_000_000


def test_pending_alone_is_well(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert audit(monkeypatch, tmp_path, AuditReport(pending=("a",)), "--json", "--full") == OK
    assert json.loads(capsys.readouterr().out)["ok"] is True


@pytest.mark.parametrize(
    ("failure", "status"),
    [(Unfit("another wallet"), UNREACHABLE), (BooksUnreadable("no database"), USAGE)],
)
def test_audit_that_fails_reports_the_reason_and_no_difference(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    failure: Exception,
    status: int,
) -> None:
    assert audit(monkeypatch, tmp_path, failure) == status
    assert str(failure) in capsys.readouterr().err


def test_another_engine_has_nothing_to_audit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ["audit", "--data-dir", str(tmp_path)]
    assert run(argv, {}, serve=nothing, local=NotImplemented, private=NotImplemented) == USAGE
    assert "The engine is sandbox" in capsys.readouterr().err


def test_progress_is_shown_on_a_terminal_and_cleared(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit(monkeypatch, tmp_path, WRONG)
    assert capsys.readouterr().err == "", "a pipe gets none"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    audit(monkeypatch, tmp_path, Unfit("the wallet is closed"))
    shown = capsys.readouterr().err
    assert shown.startswith("\r\033[Kcomparing 2 orders with the chains: 50 %\r\033[K")


def test_progress_of_an_audit_is_whole_tenths_as_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    audit(monkeypatch, tmp_path, WRONG, "--progress")
    assert capsys.readouterr().err == "comparing 2 orders with the chains: 50 %\n"
