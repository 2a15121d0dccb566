"""The hot wallet's opening balance: recorded once, at a block that is not reorged out."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.audit.books import read_books
from rpcsvc.audit.records import OpeningEntry
from rpcsvc.settlement.onchain.evm.gas import EvmOpening, Opening, OpeningLedger
from rpcsvc.settlement.onchain.evm.node_types import Tag
from rpcsvc.store.backends.sqlite.database import DATABASE_NAME, SqliteDatabase
from tests.rows import statement
from tests.unit.evm_chain import HOT, NETWORK, Chain, CheckedConnection

WEI = 10**20 + 1  # beyond SQLite's integers


class Node(Chain):
    """A simulated chain whose hot wallet has sent ``sent`` transactions."""

    sent = 2
    reorganise_while_asked = False

    async def nonce(self, address: str, at: Any = Tag.PENDING) -> int:
        assert (address, at) == (HOT, self.head)
        return self.sent

    async def ether(self, address: str, at: Any = Tag.LATEST) -> int:
        assert (address, at) == (HOT, self.head)
        if self.reorganise_while_asked:
            self.replace_from(self.head, 77)
        return WEI - self.sent


@pytest.fixture
def ledger(database: SqliteDatabase) -> OpeningLedger:
    return OpeningLedger(database)


async def poll(opening: EvmOpening, node: Node) -> None:
    block = await node.block()
    assert block is not None
    await opening.poll(block)


def opening_of(node: Node, ledger: OpeningLedger) -> EvmOpening:
    return EvmOpening(CheckedConnection(node, NETWORK), HOT, ledger)


async def known(ledger: OpeningLedger) -> Opening | None:
    return await ledger.opening(NETWORK.name, HOT)


async def test_opening_balance_is_kept_and_the_auditor_reads_it(
    ledger: OpeningLedger, database: SqliteDatabase, tmp_path: Path
) -> None:
    node = Node()
    node.mine(count=5)
    opening = opening_of(node, ledger)
    assert await known(ledger) is None
    await poll(opening, node)
    first = Opening(5, node.hash_of(5), 2, WEI - 2)
    assert await known(ledger) == first

    node.sent = 3
    node.mine(count=NETWORK.failed_after + 5)
    await poll(opening, node)
    await poll(opening_of(node, ledger), node)  # after a start
    assert await known(ledger) == first

    wallet = "INSERT INTO evm_wallet (id, hot_address, reserved_to) VALUES (1, ?, 0)"
    await database.write([statement(wallet, (HOT.lower(),))])
    assert read_books(tmp_path).openings == {
        NETWORK.name: OpeningEntry(5, first.block_hash, 2, WEI - 2)
    }


async def test_a_block_that_is_replaced_takes_its_balance_with_it(
    ledger: OpeningLedger,
) -> None:
    node = Node()
    node.mine(count=5)
    opening = opening_of(node, ledger)
    await poll(opening, node)
    node.replace_from(5, 9)
    node.sent = 1
    node.mine(count=2)
    await poll(opening, node)
    assert await known(ledger) == Opening(7, node.hash_of(7), 1, WEI - 1)


async def test_a_block_that_the_node_lacks_is_waited_for(ledger: OpeningLedger) -> None:
    node = Node()
    node.mine(count=5)
    opening = opening_of(node, ledger)
    await poll(opening, node)
    first = await known(ledger)
    node.lag = 3
    await poll(opening, node)
    assert await known(ledger) == first


async def test_block_replaced_while_it_is_read_is_not_used(
    ledger: OpeningLedger,
) -> None:
    node = Node()
    node.mine(count=5)
    node.reorganise_while_asked = True
    opening = opening_of(node, ledger)
    await poll(opening, node)
    assert await known(ledger) is None
    node.reorganise_while_asked = False
    await poll(opening, node)
    assert await known(ledger) is not None


async def test_once_it_is_deep_nothing_is_asked(ledger: OpeningLedger) -> None:
    node = Node()
    node.mine(count=5)
    opening = opening_of(node, ledger)
    await poll(opening, node)
    node.mine(count=NETWORK.failed_after)
    await poll(opening, node)
    node.asked.clear()
    await poll(opening, node)
    assert node.asked == ["block"], "the newest, by this test"


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE evm_openings SET wei = '1'",
        "UPDATE evm_openings SET block_hash = 'x', sender = 'y'",
        "DELETE FROM evm_openings",
        "INSERT INTO evm_openings VALUES ('base', 'x', 1, 'h', 0, '')",
        "INSERT INTO evm_openings VALUES ('base', 'x', 1, 'h', 0, '1.0')",
        "INSERT INTO evm_openings VALUES ('base', 'x', 1, 'h', -1, '1')",
        "INSERT INTO annotated_transactions VALUES ('base', 'x', 'n', 1, '-1')",
    ],
)
async def test_the_database_refuses_what_can_not_be(
    ledger: OpeningLedger, tmp_path: Path, statement: str
) -> None:
    await ledger.record("arbitrum", HOT, Opening(1, "h", 0, 5))
    with (
        closing(sqlite3.connect(tmp_path / DATABASE_NAME)) as writer,
        pytest.raises(sqlite3.IntegrityError),
    ):
        writer.execute(statement)
