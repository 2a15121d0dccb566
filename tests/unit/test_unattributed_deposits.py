"""Money at an order's address on another network than the order's: nobody's deposit, and listed."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.evm.adapter import EvmAdapter, Ledgers
from rpcsvc.settlement.onchain.evm.connection import EvmOptions
from rpcsvc.settlement.onchain.guard import PauseSwitch
from rpcsvc.settlement.onchain.unrecorded import UnattributedDeposit
from rpcsvc.store.backends.sqlite.database import Database as SqliteDatabase
from rpcsvc.store.database import Database
from rpcsvc.store.wallets import SqlUnrecordedLedger
from tests.rows import statement
from tests.sandbox import ManualClock, sandbox

_ADDRESS = "INSERT INTO evm_addresses VALUES (?, ?)"
_DEPOSIT = "INSERT INTO evm_deposits VALUES (?, ?, 0, ?, 2500000, '0xUser', 1000, 7, 'h', ?, 0)"
_SAYS = "UPDATE evm_deposits SET acknowledged = ? WHERE txid = ?"


async def write(database: Database, *rows: tuple[str, tuple[object, ...]]) -> None:
    await database.write([statement(sql, values) for sql, values in rows])


class Side(EvmAdapter):
    """The notes of one that serves these networks."""

    def __init__(self, ledger: Any) -> None:
        anything = cast("Any", None)
        ledgers = Ledgers(anything, anything, ledger, anything)
        switch = PauseSwitch(Path())
        super().__init__([], anything, anything, ledgers, ManualClock(), EvmOptions(), switch)
        self.networks = frozenset({"arbitrum", "base"})


async def test_deposit_on_another_network_names_the_order_it_fits(
    tmp_path: Path,
) -> None:
    async with sandbox(tmp_path) as box:
        placed = await box.order("u2x")
        order = await box.up.service.store.order(placed.order_id)
        assert order is not None
        address, database = order.terms.deposit_address, box.up.database
        await write(
            database,
            (_ADDRESS, (1, address)),
            (_ADDRESS, (2, "0xLost")),
        )
        await write(
            database,
            (_DEPOSIT, ("arbitrum", "own", 1, "confirmed")),
            (_DEPOSIT, ("base", "astray", 1, "seen")),
            (_DEPOSIT, ("arbitrum", "lost", 2, "confirmed")),
        )
        ledger = SqlUnrecordedLedger(database)
        lost = UnattributedDeposit("arbitrum", "lost", "0xLost", 2_500_000, None)
        assert await ledger.unattributed_deposits() == [lost], "one is not confirmed yet"
        await write(database, (_SAYS, ("confirmed", "astray")))
        astray = UnattributedDeposit("base", "astray", address, 2_500_000, placed.order_id)
        assert await ledger.unattributed_deposits() == [lost, astray]

        side = Side(ledger)
        (note,) = await side.notes()
        assert note.startswith("2 deposits of 5 USDC in all are of no order: lost on arbitrum")
        explained = (
            "INSERT INTO annotated_transactions (network, txid, note, at)"
            " VALUES (?, ?, 'sent back', 1)"
        )
        await write(database, (explained, ("arbitrum", "lost")))
        assert (
            f"astray on base came to the address of order {placed.order_id}"
            in (await side.notes())[0]
        )

        await write(database, (_SAYS, ("removed", "astray")))
        assert (await ledger.unattributed_deposits(), await side.notes()) == ([], [])


async def test_xmr_at_the_address_of_a_lost_order_is_told(tmp_path: Path) -> None:
    database = await SqliteDatabase.open(tmp_path)
    deposit = (
        "INSERT INTO monero_deposits (txid, minor, units, unlock_time, first_seen_at, height,"
        " acknowledged, watched) VALUES ('tx', 1, 7, 0, 1, 9, ?, 1)"
    )
    await write(database, ("INSERT INTO monero_addresses VALUES (1, '8Lost')", ()))
    await write(database, (deposit, ("seen",)))
    ledger = SqlUnrecordedLedger(database)
    assert await ledger.unattributed_deposits() == []
    says = "UPDATE monero_deposits SET acknowledged = ?"
    await write(database, (says, ("confirmed",)))
    assert await ledger.unattributed_deposits() == [
        UnattributedDeposit("monero", "tx", "8Lost", 7, None)
    ]
    assert await Side(ledger).notes() == [], "it is not USDC"
    await write(database, (says, ("removed",)))
    assert await ledger.unattributed_deposits() == []
    await database.close()


async def test_a_database_that_is_down_is_no_matter_of_notes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    database = await SqliteDatabase.open(tmp_path)
    ledger = SqlUnrecordedLedger(database)

    def down() -> list[UnattributedDeposit]:
        raise Unavailable("locked")

    monkeypatch.setattr(ledger, "unattributed_deposits", down)
    assert await Side(ledger).notes() == []
    await database.close()
