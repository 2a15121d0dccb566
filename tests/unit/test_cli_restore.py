"""The commands after a restored backup, and annotations: their refusals."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rpcsvc.audit.books import read_books
from rpcsvc.audit.records import Annotation
from rpcsvc.audit.spilled import SpilledList
from rpcsvc.domain.order import TransferState
from rpcsvc.settlement.onchain import wiring
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.records import WalletRecord
from rpcsvc.settlement.onchain.monero.wallet_types import (
    SubaddressIndex,
    WalletTransfer,
    WalletTransferKind,
)
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, OwnerLock, SqliteDatabase
from rpcsvc.store.operator_books import OperatorBooks
from rpcsvc.treasury import annotations as annotating
from rpcsvc.treasury.annotations import Annotations
from tests.operator_cli import Cli, listening
from tests.unit.audit_world import X2U, World

OK, FAILED, USAGE, UNREACHABLE = 0, 1, 2, 3
TXID = "ab" * 32


@pytest.fixture
def cli(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(tmp_path, capsys, "onchain")


def make_database(data_dir: Path) -> None:
    async def make() -> None:
        await (await SqliteDatabase.open(data_dir)).close()

    asyncio.run(make())


def _sql(script: str) -> Callable[[Path], None]:
    def run(path: Path) -> None:
        with closing(sqlite3.connect(path)) as database:
            database.executescript(script)

    return run


def _without_last_page(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4096])


def _with_a_log(path: Path) -> None:
    path.with_name(f"{path.name}-wal").write_bytes(b"commits")


def _empty_database(path: Path) -> None:
    path.unlink()
    _sql("VACUUM")(path)


NO_BACKUP: list[tuple[Callable[[Path], object], str]] = [
    (lambda path: path.write_bytes(b""), "it is empty"),
    (_empty_database, "it is empty"),
    (lambda path: path.write_bytes(b"a letter"), "can't be read"),
    (lambda path: path.unlink(), "no such file"),
    (_without_last_page, "the file"),
    (_sql("DROP TABLE webhook_deliveries"), "not complete"),
    (_sql("DROP TRIGGER transfers_keep_what_they_are"), "lacks the trigger transfers_keep"),
    (_sql("DROP INDEX orders_by_deadline"), "lacks the index orders_by_deadline"),
    (_sql("DROP VIEW order_events"), "lacks the view order_events"),
    (_sql("ALTER TABLE tickets DROP COLUMN wallet_address"), "lacks the column tickets.wallet"),
    (_sql("PRAGMA application_id = 7"), "another program"),
    (_sql("PRAGMA user_version = 99"), "run the newer"),
    (_with_a_log, "wal_checkpoint"),
]


@pytest.mark.parametrize(("spoil", "reason"), NO_BACKUP)
def test_restore_refuses_what_is_no_whole_backup(
    cli: Cli, tmp_path: Path, spoil: Callable[[Path], object], reason: str
) -> None:
    cli.environ["RPCSVC_ENGINE"] = "sandbox"
    make_database(cli.data_dir)
    copy = tmp_path / "copy"
    assert cli("db", "backup", str(copy)) == OK
    before = database_files(cli.data_dir)
    spoil(copy)
    assert cli("db", "restore", str(copy)) == USAGE
    assert reason in cli.err
    assert database_files(cli.data_dir) == before


def database_files(data_dir: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in data_dir.glob(f"{DATABASE_NAME}*")}


def test_restore_takes_a_backup(cli: Cli, tmp_path: Path) -> None:
    cli.environ["RPCSVC_ENGINE"] = "sandbox"
    make_database(cli.data_dir)
    copy = tmp_path / "copy"
    assert cli("db", "backup", str(copy)) == OK
    assert cli("db", "restore", str(copy)) == OK
    assert "The copy is in place." in cli.out


def test_restored_copy_takes_no_log_of_a_lost_database(cli: Cli, tmp_path: Path) -> None:
    """The service was killed, and its database was moved away without the log beside it."""
    cli.environ["RPCSVC_ENGINE"] = "sandbox"
    make_database(cli.data_dir)
    copy, path = tmp_path / "copy", cli.data_dir / DATABASE_NAME
    assert cli("db", "backup", str(copy)) == OK
    log = path.with_name(f"{DATABASE_NAME}-wal")
    with closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute("INSERT INTO payout_pause (id, reason, paused_at) VALUES (1, 'x', 1)")
        commits = log.read_bytes()
    path.unlink()
    log.write_bytes(commits)
    assert cli("db", "restore", str(copy)) == OK
    with closing(sqlite3.connect(path)) as database:
        assert database.execute("SELECT reason FROM payout_pause").fetchall() == []
    (kept,) = cli.data_dir.glob(f"{DATABASE_NAME}-wal.replaced-*")
    assert kept.read_bytes() == commits


CHANGING = [
    ("payouts", "adopt", "ord_1/payout/1", TXID),
    ("onchain", "skip-addresses", "5"),
    ("onchain", "reread", "arbitrum", "--from", "5"),
]


@pytest.mark.parametrize("command", CHANGING)
def test_recovery_is_refused_beside_a_running_service(cli: Cli, command: tuple[str, ...]) -> None:
    make_database(cli.data_dir)
    with listening(cli.data_dir):
        assert cli(*command) == USAGE
    assert "Stop it first" in cli.err


@pytest.mark.parametrize("command", CHANGING)
def test_a_service_that_starts_is_not_disturbed_either(cli: Cli, command: tuple[str, ...]) -> None:
    make_database(cli.data_dir)
    lock = OwnerLock(cli.data_dir)
    lock.acquire()
    try:
        assert cli(*command) == UNREACHABLE
    finally:
        lock.release()


@pytest.mark.parametrize("command", CHANGING)
def test_no_database_is_made_by_the_way(cli: Cli, command: tuple[str, ...]) -> None:
    assert cli(*command) == USAGE
    assert "no database" in cli.err
    assert not (cli.data_dir / DATABASE_NAME).exists()


@pytest.mark.parametrize(
    "command", [*CHANGING, ("treasury", "explain", "monero", TXID, "--note", "x")]
)
def test_onchain_commands_refuse_another_engine(cli: Cli, command: tuple[str, ...]) -> None:
    cli.environ["RPCSVC_ENGINE"] = "sandbox"
    assert cli(*command) == USAGE
    assert "onchain" in cli.err


def test_a_transfer_that_does_not_exist_is_not_adopted(cli: Cli) -> None:
    make_database(cli.data_dir)
    assert cli("payouts", "adopt", "ord_1/payout/1", TXID) == USAGE
    assert "There is no transfer ord_1/payout/1" in cli.err


@pytest.mark.parametrize("count", ["0", "-1", "1.5", "100001", "many", "٣"])
def test_how_many_addresses_are_skipped_is_a_number(cli: Cli, count: str) -> None:
    assert cli("onchain", "skip-addresses", "--", count) == USAGE
    assert "1 to 100000" in cli.err


@pytest.mark.parametrize("block", ["-1", "0x10", "latest", "1" * 16, "٣"])
def test_from_where_deposits_are_read_again_is_a_block(cli: Cli, block: str) -> None:
    assert cli("onchain", "reread", "arbitrum", f"--from={block}") == USAGE
    assert "number of a block" in cli.err


# --- annotations -------------------------------------------------------------------------------


def shows(monkeypatch: pytest.MonkeyPatch, said: str | None) -> None:
    async def poll(*_: Any) -> str | None:
        return said

    monkeypatch.setattr(Annotations, "poll", poll)


def annotated(data_dir: Path) -> list[tuple[str, str, str]]:
    with closing(sqlite3.connect(data_dir / DATABASE_NAME)) as reader:
        return reader.execute("SELECT network, txid, note FROM annotated_transactions").fetchall()


def test_annotation_is_kept_shown_and_removed(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    make_database(cli.data_dir)
    shows(monkeypatch, "sent 2.5 XMR")
    assert cli("treasury", "explain", "monero", TXID.upper(), "--note", " to  cold ") == OK
    assert cli.out == f"{TXID} on monero, sent 2.5 XMR: to cold\n"
    assert annotated(cli.data_dir) == [("monero", TXID, "to cold")]
    assert cli("treasury", "explain", "monero", TXID, "--note", "another") == USAGE
    assert "to cold" in cli.err
    assert cli("treasury", "explain", "monero", TXID, "--take-back") == OK
    assert annotated(cli.data_dir) == []
    assert cli("treasury", "explain", "monero", TXID, "--take-back") == FAILED


class OpenWallet:
    """The open wallet of monero-wallet-rpc, which has sent TXID."""

    def __init__(self, address: str) -> None:
        self.address = address

    async def __aenter__(self) -> OpenWallet:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def primary_address(self) -> str:
        return self.address

    async def refresh(self) -> None:
        pass

    async def transfer(self, txid: str) -> list[WalletTransfer]:
        sent = WalletTransfer(
            WalletTransferKind.OUTGOING, txid, self.address, SubaddressIndex(0, 0), 2 * 10**12,
            10**11, 100, 9, 1, 0, locked=False, double_spend_seen=False,
        )  # fmt: skip
        return [sent]


@pytest.mark.parametrize(("shown", "status"), [("sent 2.5 XMR", OK), (None, FAILED)])
def test_annotation_reads_orders_beside_the_loop(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, shown: str | None, status: int
) -> None:
    make_database(cli.data_dir)
    shows(monkeypatch, shown)
    read, threads = SpilledList.__iter__, set[threading.Thread]()

    def watched(values: SpilledList[Any]) -> Iterator[Any]:
        threads.add(threading.current_thread())
        return read(values)

    monkeypatch.setattr(SpilledList, "__iter__", watched)
    assert cli("treasury", "explain", "monero", TXID, "--note", "to cold") == status
    assert threads
    assert threading.main_thread() not in threads


@pytest.mark.parametrize("recorded", [None, "4" + "a" * 94])
def test_transaction_of_another_wallet_is_not_annotated(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, recorded: str | None
) -> None:
    opened = OpenWallet("4" + "b" * 94)
    monkeypatch.setattr(wiring, "monero_clients", lambda _settings: (None, opened))

    async def meet(address: str) -> None:
        database = await SqliteDatabase.open(cli.data_dir)
        await MoneroLedger(database).adopt_wallet(WalletRecord("mainnet", address, 0))
        await database.close()

    if recorded is None:
        make_database(cli.data_dir)
    else:
        asyncio.run(meet(recorded))
    say = ("treasury", "explain", "monero", TXID, "--note", "to cold")
    if recorded is not None:
        assert cli(*say) == UNREACHABLE
        assert "Another XMR wallet is open" in cli.err
        assert annotated(cli.data_dir) == []
        opened.address = recorded
    assert cli(*say) == OK
    assert cli.out.startswith(f"{TXID} on monero, sent 2.1 XMR")


@pytest.mark.parametrize("state", [TransferState.PUBLISHED, TransferState.PLANNED])
def test_lost_deposit_is_written_off_once_its_payout_is_signed(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, state: TransferState
) -> None:
    make_database(cli.data_dir)
    shows(monkeypatch, None)
    world = World()
    order = world.pay_out(world.deposit(world.order(X2U), 7), state)
    world.keep(replace(order, deposits=(replace(order.deposits[0], txid=TXID),)))
    monkeypatch.setattr(annotating, "read_books", lambda _data_dir: world.books())
    is_signed = state is TransferState.PUBLISHED
    say = ("treasury", "explain", "monero", TXID, "--note", "the loss is ours")
    assert cli(*say) == (OK if is_signed else FAILED)
    assert len(annotated(cli.data_dir)) == is_signed
    assert (f"a deposit of 7 units for {order.order_id}" in cli.out) is is_signed


def test_annotation_keeps_income_from_contracts_in_wei(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_database(cli.data_dir)
    shows(monkeypatch, "received 7 wei from contracts, as you say")
    wei = 10**20 + 7  # more than an integer of SQLite holds
    say = ("treasury", "explain", "arbitrum", TXID, "--note", "x", "--internal-wei")
    assert cli(*say, str(wei)) == OK
    (reported,) = read_books(cli.data_dir).annotations
    assert reported == Annotation("arbitrum", "0x" + TXID, "x", wei)


def test_transaction_that_no_chain_has_is_not_annotated(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_database(cli.data_dir)
    shows(monkeypatch, None)
    assert cli("treasury", "explain", "arbitrum", TXID, "--note", "x") == FAILED
    assert annotated(cli.data_dir) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("monero", TXID), ("monero", TXID, "--note", "  "), ("monero", "ab", "--note", "x"),
        ("monero", TXID, "--note", "x", "--take-back"),
        ("monero", TXID, "--note", "x", "--internal-wei", "1"),
        ("arbitrum", TXID, "--note", "x", "--internal-wei", "-1"),
        ("arbitrum", TXID, "--note", "x", "--internal-wei", str(2**96)),
    ],
)  # fmt: skip
def test_annotation_needs_a_transaction_and_a_note(cli: Cli, arguments: tuple[str, ...]) -> None:
    make_database(cli.data_dir)
    assert cli("treasury", "explain", *arguments) == USAGE
    assert annotated(cli.data_dir) == []


def test_the_data_directory_may_be_given_before_the_action(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shows(monkeypatch, "sent 1 XMR")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    make_database(elsewhere)
    assert cli(
        "treasury", "--data-dir", str(elsewhere), "explain", "monero", TXID, "--note", "x"
    ) == OK  # fmt: skip
    assert len(annotated(elsewhere)) == 1


def test_annotation_without_a_database_makes_no_database(cli: Cli) -> None:
    assert cli("treasury", "explain", "monero", TXID, "--note", "x") == USAGE
    assert "no database" in cli.err
    assert not (cli.data_dir / DATABASE_NAME).exists()


async def test_annotation_is_not_changed_silently(tmp_path: Path, database: SqliteDatabase) -> None:
    books = OperatorBooks(database)
    for note in ("x", "y"):
        await books.annotate("monero", TXID, note, 1)
    assert await books.annotation("monero", TXID) == "x"
    assert await books.annotation("arbitrum", TXID) is None
    with (
        closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as writer,
        pytest.raises(sqlite3.IntegrityError, match="withdrawn, not changed"),
    ):
        writer.execute("UPDATE annotated_transactions SET note = 'y'")
