"""Whether a hot wallet may sign: its sent transactions by nonce, compared with the records.

The case of an older copy of the database is in tests/regtest/test_evm_nonces.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.errors import Unavailable
from rpcsvc.orders.ports.wallets import NonceGap
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint
from rpcsvc.settlement.onchain.evm.node import EvmClient, EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import EvmTransaction, Tag
from rpcsvc.settlement.onchain.evm.payment_ledger import EvmPaymentLedger
from rpcsvc.settlement.onchain.evm.payments import EvmNonces
from rpcsvc.settlement.onchain.pause import PauseSwitch
from rpcsvc.settlement.onchain.unrecorded import UnrecordedLedger
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.chain_options import evm_network
from tests.rows import statement
from tests.unit.evm_payments import HOT, NET, payment

NETWORK = evm_network(NET, 42161, "0xToken")


class Node(EvmClient):
    """A node with the hot wallet's transaction count, and transactions by their ids."""

    def __init__(self) -> None:
        super().__init__(DaemonEndpoint("node", "http://127.0.0.1:1"))
        self.pending = 0
        self.known: dict[str, EvmTransaction] = {}

    async def nonce(self, address: str, at: Any = Tag.PENDING) -> int:
        assert (address, at) == (HOT, Tag.PENDING)
        return self.pending

    async def transaction(self, txid: str) -> EvmTransaction | None:
        return self.known.get(txid)


@dataclass
class Rig:
    """The nonces of a hot wallet with a database."""

    database: SqliteDatabase
    switch: PauseSwitch
    node: Node = field(default_factory=Node)

    def __post_init__(self) -> None:
        self.payments = EvmPaymentLedger(self.database)
        connection, unrecorded = (
            EvmConnection(self.node, NETWORK),
            UnrecordedLedger(self.database),
        )
        self.now_ms = 0
        self.nonces = EvmNonces(
            connection, HOT, self.payments, unrecorded, self.switch, lambda: self.now_ms
        )

    async def next(self) -> int:
        """The nonce to sign with."""
        return await self.nonces.next(await self.nonces.pending())

    async def measured(self) -> NonceGap | None:
        """The present gap."""
        self.now_ms += 60_000
        await self.nonces.measure()
        return self.nonces.gap

    async def pay(self, count: int) -> None:
        """Add payments that are on record and on the node."""
        for nonce in range(count):
            await self.payments.add_payment(payment(f"tr_{nonce}", nonce))
        self.node.pending = count

    async def explain(self, txid: str, sender: str, nonce: int) -> None:
        """Annotate a transaction that the node knows as the operator's own."""
        await self.explain_unknown(txid)
        self.node.known[txid] = EvmTransaction(txid, sender, "0xTo", nonce, 0, b"", 7, "0x7")

    async def explain_unknown(self, txid: str) -> None:
        note = "INSERT INTO annotated_transactions (network, txid, note, at) VALUES (?, ?, 'me', 1)"
        await self.database.write([statement(note, (NET, txid))])


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    database = await SqliteDatabase.open(tmp_path)
    yield Rig(database, PauseSwitch(tmp_path))
    await database.close()


async def test_sends_before_the_first_check_are_unrecorded_if_it_paid(
    rig: Rig,
) -> None:
    """A database from before nonce checks: it has payments, and no acknowledged count."""
    await rig.pay(2)
    rig.node.pending = 3
    with pytest.raises(Unavailable, match="not on record"):
        await rig.next()
    assert rig.switch.reason() is not None


async def test_annotated_top_up_annotates_no_outgoing_transaction(
    rig: Rig,
) -> None:
    """The sender's nonce may equal that of a thief's transaction."""
    await rig.pay(1)
    assert await rig.next() == 1
    await rig.explain("0xtopup", sender="0xOperator", nonce=1)
    rig.node.pending = 2
    with pytest.raises(Unavailable, match="not on record"):
        await rig.next()


async def test_annotation_of_a_transaction_the_node_forgot_is_void(
    rig: Rig,
) -> None:
    await rig.pay(1)
    await rig.explain_unknown("0xpruned")
    await rig.explain("0xmine", sender=HOT.upper(), nonce=1)
    rig.node.pending = 2
    assert await rig.next() == 2
    rig.node.pending = 3
    with pytest.raises(Unavailable, match="not on record"):
        await rig.next()


async def test_nonce_gap_counts_what_others_sent_until_annotated(rig: Rig) -> None:
    await rig.pay(2)
    assert await rig.measured() == NonceGap(0, 0, 0)
    await rig.next()
    rig.node.pending = 4
    assert await rig.measured() == NonceGap(2, 2, 0)
    assert rig.switch.reason() is None, "measuring decides on nothing"
    await rig.explain("0xmine", sender=HOT, nonce=2)
    assert await rig.measured() == NonceGap(2, 1, 0)


async def test_nonce_gap_counts_what_payouts_are_paused_for(rig: Rig) -> None:
    """The transaction is acknowledged by then, but counts as unannotated until payouts resume."""
    await rig.pay(2)
    rig.node.pending = 3
    with pytest.raises(Unavailable):
        await rig.next()
    assert await rig.measured() == NonceGap(1, 1, 0)
    rig.switch.resume()
    await rig.nonces.reconcile()
    assert await rig.measured() == NonceGap(1, 0, 0)


async def test_nonce_gap_counts_nonces_that_no_payment_waits_with(rig: Rig) -> None:
    """The operator's own transaction was dropped, and a payment was signed after it."""
    await rig.payments.add_payment(payment("tr_0", 0))
    await rig.payments.add_payment(payment("tr_2", 2))
    rig.node.pending = 1
    assert await rig.measured() == NonceGap(-2, 0, 1)
    rig.node.pending = 0
    assert await rig.measured() == NonceGap(-3, 0, 1)


async def test_nonce_gap_is_measured_once_a_minute(rig: Rig) -> None:
    await rig.measured()
    rig.node.pending, rig.now_ms = 5, rig.now_ms + 59_999
    await rig.nonces.measure()
    assert rig.nonces.gap == NonceGap(0, 0, 0)


@pytest.mark.parametrize("paused", [None, "another reason"])
async def test_nonce_without_record_below_later_payments_is_found(
    rig: Rig, paused: str | None
) -> None:
    """A restored copy lacks a payment that was adopted by hand; the journal brought later ones."""
    await rig.pay(2)
    await rig.next()
    for nonce in (3, 4):
        await rig.payments.add_payment(payment(f"tr_{nonce}", nonce))
    rig.node.pending = 5
    rig = Rig(rig.database, rig.switch, rig.node)  # a start
    if paused is not None:
        rig.switch.pause(paused)
        with pytest.raises(Unavailable, match="not on record"):
            await rig.next()
        assert rig.switch.reason() == paused
        rig.switch.resume()
    for _ in range(2):
        with pytest.raises(Unavailable, match="not on record"):
            await rig.next()
    assert "does not know" in (rig.switch.reason() or "")
    assert rig.nonces.conditions() != []
    rig.switch.resume()
    assert await rig.next() == 5
    rig = Rig(rig.database, rig.switch, rig.node)
    assert await rig.next() == 5, "acknowledged"


async def test_annotated_nonce_below_later_payments_pauses_nothing(rig: Rig) -> None:
    await rig.pay(1)
    await rig.next()
    await rig.explain("0xmine", sender=HOT, nonce=1)
    await rig.payments.add_payment(payment("tr_2", 2))
    rig.node.pending = 3
    for _ in range(2):
        rig = Rig(rig.database, rig.switch, rig.node)
        assert await rig.next() == 3
        rig.node.known.clear()  # of years ago
    assert rig.switch.reason() is None
