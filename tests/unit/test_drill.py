"""``rpcsvc drill restore``: its report on backups; it changes nothing of a live service."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.audit.records import AuditReport, Difference, Unfit
from rpcsvc.cli.recovery import drill
from rpcsvc.domain.pricing import Direction
from rpcsvc.settings import Settings
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, DataDirInUse, OwnerLock
from rpcsvc.store.checks import Progress
from tests.operator_cli import Cli, served
from tests.unit.journaled import WALLET, JournaledBooks, opened, xmr_payment

OK, FAILED, USAGE = 0, 1, 2
SOUND = AuditReport((), (), (), orders=1, payments=1)


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    (tmp_path / "scratch").mkdir()
    data_dir = tmp_path / "data"
    data_dir.mkdir(mode=0o700)
    return Cli(data_dir, capsys)


def files(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Modification time, size and inode of every file; sockets are not opened."""
    found = [(path, path.lstat()) for path in sorted(folder.rglob("*"))]
    return {path: (at.st_mtime_ns, at.st_size, at.st_ino) for path, at in found}


async def drilled(cli: Cli, backup: Path, *more: str) -> Any:
    """The report, with its exit status as ``exit``. Requires that the scratch directory is gone."""
    scratch = cli.data_dir.parent / "scratch"
    status = await cli.ask(
        "drill", "restore", str(backup), "--scratch", str(scratch), "--json", *more
    )
    assert list(scratch.iterdir()) == []
    return {**json.loads(cli.out), "exit": status}


async def sandbox_backup(cli: Cli) -> Path:
    """A backup of a service with an order that is over, and one that awaits its deposit."""
    backup = cli.data_dir.parent / "backup.db"
    async with served(cli.data_dir) as box:
        paid = await box.order("x2u")
        await box.order("u2x")
        await paid.fund()
        await box.settle(8)
        assert await cli.ask("db", "backup", str(backup)) == OK
    return backup


# --- the sandbox -------------------------------------------------------------------------------


async def test_drill_reports_a_backup_beside_its_service(cli: Cli) -> None:
    backup = await sandbox_backup(cli)
    async with served(cli.data_dir) as box:
        await box.order("u2x")  # since the backup
        before, copy = files(cli.data_dir), backup.read_bytes()
        with pytest.raises(DataDirInUse):
            OwnerLock(cli.data_dir).acquire()
        report = await drilled(cli, backup)
        assert (files(cli.data_dir), backup.read_bytes()) == (before, copy)
    assert report.pop("ageSeconds") > 0
    assert report.pop("newestEvent").endswith("Z")
    assert report == {
        "ok": True, "exit": OK, "backup": str(backup), "refused": None, "orders": 2,
        "openOrders": {"awaiting_deposit": 1}, "transfers": {"settled": 1}, "inDoubt": 0,
        "startRefused": None, "journal": None, "continues": {}, "problems": [],
        "audit": None, "notAudited": None,
    }  # fmt: skip
    assert await cli.ask("drill", "restore", str(backup)) == OK
    assert "orders: 2; open: 1 awaiting_deposit\n" in cli.out
    assert cli.out.endswith(f"A restore of {backup} would succeed.\n")


async def test_drill_keeps_its_copy_from_others(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    backup = await sandbox_backup(cli)
    backup.chmod(0o644)
    modes: list[int] = []

    def checked(settings: Settings, scratch: Path) -> Settings:
        modes.extend(path.stat().st_mode & 0o777 for path in (scratch, scratch / DATABASE_NAME))
        raise RuntimeError("no report is made")

    monkeypatch.setattr(drill, "_within", checked)
    with pytest.raises(RuntimeError, match="no report"):
        await drilled(cli, backup)
    assert modes == [0o700, 0o600]
    assert list((cli.data_dir.parent / "scratch").iterdir()) == []


def cut_short(backup: Path) -> None:
    backup.write_bytes(backup.read_bytes()[:-8192])


def overwritten(backup: Path) -> None:
    data = bytearray(backup.read_bytes())
    data[4096:] = b"\xff" * (len(data) - 4096)
    backup.write_bytes(data)


def no_database(backup: Path) -> None:
    backup.write_text("not a database")


def emptied(backup: Path) -> None:
    backup.write_bytes(b"")


def with_a_log(backup: Path) -> None:
    backup.with_name(f"{backup.name}-wal").write_bytes(b"commits")


@pytest.mark.parametrize("damage", [cut_short, overwritten, no_database, emptied, with_a_log])
async def test_drill_names_why_a_damaged_backup_is_refused(
    cli: Cli, damage: Callable[[Path], None]
) -> None:
    backup = await sandbox_backup(cli)
    damage(backup)
    report = await drilled(cli, backup)
    assert (report["exit"], report["ok"]) == (FAILED, False)
    assert report["refused"]
    assert await cli.ask("drill", "restore", str(backup)) == FAILED
    assert cli.out.startswith("A restore would be refused: ")


async def test_drill_names_books_that_do_not_add_up(cli: Cli) -> None:
    backup = await sandbox_backup(cli)
    with closing(sqlite3.connect(backup)) as writer, writer:
        text = "SELECT sql FROM sqlite_schema WHERE name = 'transfers_keep_what_they_are'"
        (trigger,) = writer.execute(text).fetchone()
        writer.execute("DROP TRIGGER transfers_keep_what_they_are")
        writer.execute("UPDATE transfers SET address = '0xElsewhere'")
        writer.execute(trigger)
    report = await drilled(cli, backup)
    assert (report["exit"], report["refused"]) == (FAILED, None)
    assert any("another address than was ordered" in text for text in report["problems"])
    assert await cli.ask("drill", "restore", str(backup)) == FAILED
    assert "another address than was ordered" in cli.out
    assert "needs manual steps" in cli.out


async def test_drill_says_that_another_engine_would_not_start(cli: Cli) -> None:
    backup = await sandbox_backup(cli)
    cli.environ["RPCSVC_ENGINE"] = "upstream"
    report = await drilled(cli, backup)
    assert report["exit"] == FAILED
    assert report["startRefused"].startswith("it is for engine sandbox")


def test_drill_needs_a_file_of_sqlite_and_room(cli: Cli, tmp_path: Path) -> None:
    assert cli("drill", "restore", str(tmp_path / "none")) == USAGE
    assert "rpcsvc db backup makes one" in cli.err
    backup = tmp_path / "backup"
    backup.touch()
    assert cli("drill", "restore", str(backup), "--scratch", str(tmp_path / "none")) == USAGE
    assert "--scratch" in cli.err
    cli.environ["RPCSVC_DATABASE_URL"] = "postgresql://nobody@127.0.0.1:9/none"
    assert cli("drill", "restore", str(backup)) == USAGE
    assert "pg_restore" in cli.err


# --- real wallets ------------------------------------------------------------------------------


def audits(monkeypatch: pytest.MonkeyPatch, *found: AuditReport | Exception) -> list[Settings]:
    """Script the reports of audits, repeating the last; returns the settings of each audit."""
    asked: list[Settings] = []

    async def audited(settings: Settings, progress: Progress) -> AuditReport:
        progress("reading the books", 0, 1)
        asked.append(settings)
        one = found[min(len(asked), len(found)) - 1]
        if isinstance(one, Exception):
            raise one
        return one

    monkeypatch.setattr(drill, "audited", audited)
    return asked


async def signed_since(cli: Cli, books: JournaledBooks) -> Path:
    """A backup of an order with a planned payout, which is signed after it."""
    await books.monero.adopt_wallet(WALLET)
    order = await books.funded(await books.ordered(Direction.USDC_TO_XMR))
    backup = books.copy(cli.data_dir.parent / "backup.db")
    await books.monero.add_payment(xmr_payment(order, "aa" * 32))
    return backup


async def test_drill_adopts_what_was_signed_since_in_scratch_alone(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, touched = cli.data_dir.parent / "place", cli.data_dir.parent / "touched"
    cli.environ = {
        "RPCSVC_ENGINE": "onchain",
        "RPCSVC_ONCHAIN__JOURNAL_PLACES": str(place),
        "RPCSVC_ONCHAIN__JOURNAL_COMMAND": f"tee {touched}",
    }
    asked = audits(monkeypatch, SOUND)
    async with opened(cli.data_dir) as books:
        backup = await signed_since(cli, books)
        before = files(cli.data_dir)
        report = await drilled(cli, backup)
        assert files(cli.data_dir) == before
    assert (report["exit"], report["refused"], report["problems"]) == (OK, None, [])
    (payment,) = report["journal"]["payments"]
    assert report["journal"] == {
        "payments": [payment], "orders": [payment], "lost": [], "refused": []
    }  # fmt: skip
    assert (report["transfers"], report["continues"]) == ({"planned": 1}, {"prepared": 1})
    assert [each.data_dir.parent.name for each in asked] == ["scratch"]
    assert (place.exists(), touched.exists()) == (False, False)


@pytest.mark.parametrize(
    ("found", "says"),
    [
        (Unfit("no node answers"), "not audited: no node answers"),
        (
            AuditReport((Difference("payout", "ord_1/payout/1", "12", "11", "USDC"),), (), ()),
            "payout ord_1/payout/1: 11, not 12",
        ),
    ],
)
async def test_drill_fails_unless_the_audit_agrees(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, found: AuditReport | Exception, says: str
) -> None:
    cli.environ["RPCSVC_ENGINE"] = "onchain"
    audits(monkeypatch, found)
    async with opened(cli.data_dir) as books:
        backup = await signed_since(cli, books)
    assert await cli.ask("drill", "restore", str(backup)) == FAILED
    assert says in cli.out


async def test_drill_shows_on_a_terminal_what_it_does(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.environ["RPCSVC_ENGINE"] = "onchain"
    audits(monkeypatch, Unfit("no node answers"))
    async with opened(cli.data_dir) as books:
        backup = await signed_since(cli, books)
    assert await cli.ask("drill", "restore", str(backup)) == FAILED
    assert "\r" not in cli.err, "a pipe gets none"
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert await cli.ask("drill", "restore", str(backup)) == FAILED
    steps = (
        "copying the backup to a scratch directory",
        "checking the books",
        "reading the books: 0 %",
    )
    # A logger that an earlier test has used keeps that test's level.
    shown = [text.partition("{")[0] for text in cli.err.split("\r\033[K")[1:]]
    assert shown == [*steps, ""]
    assert "\r" not in cli.out


def differs(*subjects: str) -> AuditReport:
    return AuditReport(
        tuple(Difference("unrecorded_payment", each, "", "1") for each in subjects), (), ()
    )


@pytest.mark.parametrize(
    ("second", "left"),
    [(SOUND, []), (differs("c"), []), (differs("a", "c"), ["a"]), (Unfit("gone"), [])],
)
async def test_drill_reports_differences_found_twice(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, second: AuditReport | Exception, left: list[str]
) -> None:
    """Payments that a running service signs after its journal was read are no differences."""
    cli.environ["RPCSVC_ENGINE"] = "onchain"
    asked = audits(monkeypatch, differs("a", "b"), second)
    async with opened(cli.data_dir) as books:
        backup = await signed_since(cli, books)
        report = await drilled(cli, backup)
    assert len({each.data_dir for each in asked}) == 2
    is_ok = not left and isinstance(second, AuditReport)
    assert (report["ok"], report["exit"]) == (is_ok, OK if is_ok else FAILED)
    found = report["audit"]["differences"] if report["audit"] else []
    assert [each["subject"] for each in found] == left


async def test_drill_needs_the_journal_that_a_restore_needs(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    cli.environ["RPCSVC_ENGINE"] = "onchain"
    audits(monkeypatch, SOUND)
    async with opened(cli.data_dir) as books:
        backup = await signed_since(cli, books)
    elsewhere = cli.data_dir.parent / "elsewhere"
    (cli.data_dir / "journal").rename(elsewhere)
    report = await drilled(cli, backup)
    assert report["exit"] == FAILED
    assert "no payment journal" in report["refused"]
    report = await drilled(cli, backup, "--journal", str(elsewhere))
    assert (report["exit"], len(report["journal"]["payments"])) == (OK, 1)
