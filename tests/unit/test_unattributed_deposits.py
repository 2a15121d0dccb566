"""Deposits that belong to no order, also at an order's address on another network."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast
from unittest.mock import AsyncMock, Mock

import pytest

from rpcsvc.errors import Unavailable
from rpcsvc.settings_onchain import OnchainSettings
from rpcsvc.settlement.onchain.evm.adapter import EvmAdapter, Ledgers
from rpcsvc.settlement.onchain.pause import PauseSwitch
from rpcsvc.settlement.onchain.unrecorded import UnattributedDeposit, UnrecordedLedger
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from rpcsvc.store.database import Database
from tests.rows import statement
from tests.sandbox import ManualClock, sandbox

_ADDRESS = "INSERT INTO evm_addresses VALUES (?, ?)"
_DEPOSIT = "INSERT INTO evm_deposits VALUES (?, ?, 0, ?, 2500000, '0xUser', 1000, 7, 'h', ?, 0)"
_ACKNOWLEDGE = "UPDATE evm_deposits SET acknowledged = ? WHERE txid = ?"


async def write(database: Database, *rows: tuple[str, tuple[object, ...]]) -> None:
    await database.write([statement(sql, values) for sql, values in rows])


class NotingAdapter(EvmAdapter):
    """An adapter for two networks without conditions, and its ledger of unrecorded transactions."""

    def __init__(self, ledger: Any) -> None:
        anything = cast("Any", None)
        ledgers = Ledgers(anything, anything, ledger, anything)
        switch = PauseSwitch(Path())
        super().__init__([], anything, anything, ledgers, ManualClock(), OnchainSettings(), switch)
        well = Mock(conditions=AsyncMock(return_value=[]))
        self.networks = dict.fromkeys(("arbitrum", "base"), well)


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
            (_DEPOSIT, ("base", "elsewhere", 1, "seen")),
            (_DEPOSIT, ("arbitrum", "lost", 2, "confirmed")),
        )
        ledger = UnrecordedLedger(database)
        lost = UnattributedDeposit("arbitrum", "lost", "0xLost", 2_500_000, None)
        assert await ledger.unattributed_deposits() == [lost], "one is not confirmed yet"
        await write(database, (_ACKNOWLEDGE, ("confirmed", "elsewhere")))
        misdirected = UnattributedDeposit("base", "elsewhere", address, 2_500_000, placed.order_id)
        assert await ledger.unattributed_deposits() == [lost, misdirected]

        adapter = NotingAdapter(ledger)
        (note,) = await adapter.conditions()
        assert note.text.startswith("2 deposits of 5 USDC in all are of no order: lost on arbitrum")
        annotation = (
            "INSERT INTO annotated_transactions (network, txid, note, at)"
            " VALUES (?, ?, 'sent back', 1)"
        )
        await write(database, (annotation, ("arbitrum", "lost")))
        assert (
            f"elsewhere on base came to the address of order {placed.order_id}"
            in (await adapter.conditions())[0].text
        )

        await write(database, (_ACKNOWLEDGE, ("removed", "elsewhere")))
        assert (await ledger.unattributed_deposits(), await adapter.conditions()) == ([], [])


async def test_xmr_at_the_address_of_a_lost_order_is_listed(tmp_path: Path) -> None:
    database = await SqliteDatabase.open(tmp_path)
    deposit = (
        "INSERT INTO monero_deposits (txid, minor, units, unlock_time, first_seen_at, height,"
        " acknowledged, watched) VALUES ('tx', 1, 7, 0, 1, 9, ?, 1)"
    )
    await write(database, ("INSERT INTO monero_addresses VALUES (1, '8Lost')", ()))
    await write(database, (deposit, ("seen",)))
    ledger = UnrecordedLedger(database)
    assert await ledger.unattributed_deposits() == []
    acknowledge = "UPDATE monero_deposits SET acknowledged = ?"
    await write(database, (acknowledge, ("confirmed",)))
    assert await ledger.unattributed_deposits() == [
        UnattributedDeposit("monero", "tx", "8Lost", 7, None)
    ]
    assert await NotingAdapter(ledger).conditions() == [], "it is not USDC"
    await write(database, (acknowledge, ("removed",)))
    assert await ledger.unattributed_deposits() == []
    await database.close()


async def test_unreachable_database_yields_no_notes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    database = await SqliteDatabase.open(tmp_path)
    ledger = UnrecordedLedger(database)

    def down() -> list[UnattributedDeposit]:
        raise Unavailable("locked")

    monkeypatch.setattr(ledger, "unattributed_deposits", down)
    assert await NotingAdapter(ledger).conditions() == []
    await database.close()
