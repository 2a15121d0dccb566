"""Settled XMR payments that are in no block any more, and money held back.

Node and wallet are played. The same on real daemons: tests/regtest/test_monero_reorg_recovery.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import (
    PaymentState,
    Purpose,
)
from rpcsvc.settlement.onchain.monero.monerod import (
    Submission,
)
from rpcsvc.settlement.onchain.monero.reorg_recovery import MoneroReorgRecovery
from rpcsvc.store.backends.sqlite.database import Database
from rpcsvc.store.monero import SqlMoneroLedger
from tests.logs import captured
from tests.unit.monero_reorgs import OPTIONS, Desk, Node, Wallet

MODULE = "rpcsvc.settlement.onchain.monero.reorg_recovery"


@pytest.fixture
async def desk(tmp_path: Path) -> AsyncIterator[Desk]:
    database = await Database.open(tmp_path)
    ledger, node, wallet = SqlMoneroLedger(database), Node(), Wallet()
    connection = MoneroConnection(cast("Any", node), cast("Any", wallet), ledger, OPTIONS)
    yield Desk(node, wallet, ledger, MoneroReorgRecovery(connection, ledger, OPTIONS))
    await database.close()


async def test_a_settled_payment_is_told_for_as_long_as_it_is_in_no_block(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that replaces blocks puts what was in them into its pool by itself."""
    logs = captured(monkeypatch, MODULE)
    made = await desk.put("tr_1", PaymentState.SETTLED, 98)
    await desk.look()
    assert desk.recovery.gone is None
    desk.node.known[made.txid] = None
    for _ in range(2 * OPTIONS.tracked_blocks):
        await desk.look(blocks=1)
        assert "payment tr_1 was settled and a reorganisation" in (desk.recovery.gone or "")
        assert "(in the pool)" in (desk.recovery.gone or "")
    events = [item["event"] for item in logs.entries]
    assert events.count("monero_settled_payment_is_gone") == 1
    assert desk.node.submitted == []
    desk.node.known[made.txid] = desk.node.top
    await desk.look(blocks=1)
    assert desk.recovery.gone is None
    assert await desk.height("tr_1") == desk.node.top - 1


async def test_what_the_node_has_not_is_handed_over_until_it_is_in_a_block(desk: Desk) -> None:
    made = await desk.put("tr_1", PaymentState.SETTLED, 98)
    desk.node.known.clear()
    desk.node.says = Submission.INVALID
    for _ in range(2):
        await desk.look(blocks=1)
        assert "published again (invalid)" in (desk.recovery.gone or "")
    assert await desk.height("tr_1") is None
    desk.node.says = Submission.ACCEPTED
    await desk.look()
    assert "published again (accepted)" in (desk.recovery.gone or "")
    await desk.look(blocks=1)
    assert "(in the pool)" in (desk.recovery.gone or "")
    assert desk.node.submitted == [made.txid] * 3
    desk.node.known[made.txid] = desk.node.top
    await desk.look(blocks=1)
    assert desk.recovery.gone is None


async def test_what_settled_long_ago_is_not_asked_about(desk: Desk) -> None:
    await desk.put("tr_1", PaymentState.SETTLED, desk.node.top + 1 - OPTIONS.tracked_blocks)
    await desk.put("tr_2", PaymentState.SETTLED, desk.node.top + 2 - OPTIONS.tracked_blocks)
    desk.node.known.clear()
    await desk.look()
    assert desk.node.submitted == ["tx tr_2"]


@pytest.mark.parametrize("state", [PaymentState.SETTLED, PaymentState.PUBLISHED])
async def test_what_waits_and_was_given_up_is_offered_anew_and_nothing_else(
    desk: Desk, state: PaymentState
) -> None:
    made = await desk.put("tr_1", state, None)
    other = await desk.put("tr_2", PaymentState.PUBLISHED, None)
    desk.node.known |= {made.txid: None, "a stranger's": None}
    desk.node.given_up = {made.txid, "a stranger's"}
    await desk.look()
    assert desk.node.flushed == desk.node.submitted == [made.txid]
    assert other.txid not in desk.node.submitted
    assert desk.recovery.problem is None


async def test_a_node_that_forgets_nothing_is_told_until_the_payment_is_mined(desk: Desk) -> None:
    made = await desk.put("tr_1", PaymentState.PUBLISHED, None)
    desk.node.given_up, desk.node.is_restricted = {made.txid}, True
    for _ in range(2):
        await desk.look(blocks=1)
        assert f"flush_txpool {made.txid}" in (desk.recovery.problem or "")
    assert desk.node.submitted == []
    await desk.ledger.put_payment(replace(made, height=desk.node.top))
    await desk.look(blocks=1)
    assert desk.recovery.problem is None


async def test_the_pool_is_asked_for_once_a_block_and_only_for_what_waits(desk: Desk) -> None:
    await desk.put("tr_1", PaymentState.PUBLISHED, 98)
    await desk.look()
    assert desk.node.pools == 0
    await desk.put("tr_2", PaymentState.PUBLISHED, None)
    for _ in range(3):
        await desk.look()
    assert desk.node.pools == 0, "it was looked at this block"
    await desk.look(blocks=1)
    await desk.look()
    assert desk.node.pools == 1


async def test_only_money_of_payments_that_can_never_be_made_is_let_go(desk: Desk) -> None:
    """The operator's own frozen outputs stay so, and so does what a live payment spends."""
    await desk.put("tr_1", PaymentState.FAILED, None)
    await desk.put("tr_2", PaymentState.PUBLISHED, None)
    images = ("image of tr_1", "image of tr_2", "the operator's")
    desk.wallet.images, desk.wallet.frozen = images, set(images)
    await desk.look()
    assert desk.wallet.frozen == {"image of tr_2", "the operator's"}
    await desk.look(blocks=1)
    assert desk.wallet.frozen == {"image of tr_2", "the operator's"}


# --- what waits in the pool ----------------------------------------------------------------------


async def test_an_unrelayed_payment_is_relayed_with_the_next_block(desk: Desk) -> None:
    """A node that is killed between taking a transaction and relaying it never relays it."""
    made = await desk.put("tr_1", PaymentState.PUBLISHED, None)
    desk.node.known["a stranger's"] = None
    desk.node.unrelayed = {made.txid, "a stranger's"}
    await desk.look()
    assert desk.node.relayed == [made.txid]
    await desk.look(blocks=1)
    assert desk.node.relayed == [made.txid], "once it is relayed it has time to be mined"
    assert desk.node.submitted == desk.node.flushed == []
    assert desk.recovery.waiting is None


async def test_a_payment_pending_for_three_blocks_is_relayed_with_each(desk: Desk) -> None:
    """Its peers may have lost it. Health says since when, and is degraded after ten blocks."""
    made = await desk.put("tr_1", PaymentState.PUBLISHED, None)
    for blocks in range(3):
        await desk.look(blocks=min(blocks, 1))
        assert (desk.node.relayed, desk.recovery.waiting) == ([], None)
    for blocks in range(3, 10):
        await desk.look(blocks=1)
        assert f"published at 1970-01-01T00:00:01.000Z, waits in the node's pool for {blocks}" in (
            desk.recovery.waiting or ""
        )
        assert desk.recovery.overdue is None
    await desk.look(blocks=1)
    assert "waits in the node's pool for 10 blocks" in (desk.recovery.overdue or "")
    assert desk.node.relayed == [made.txid] * 8
    await desk.ledger.put_payment(replace(made, height=desk.node.top))
    desk.node.known[made.txid] = desk.node.top
    await desk.look(blocks=1)
    assert (desk.recovery.waiting, desk.recovery.overdue) == (None, None)


async def test_blocks_are_counted_anew_after_a_payment_was_mined_and_lost(desk: Desk) -> None:
    made = await desk.put("tr_1", PaymentState.PUBLISHED, None)
    await desk.look()
    await desk.look(blocks=2)
    await desk.ledger.put_payment(replace(made, height=desk.node.top))
    await desk.look(blocks=1)
    await desk.ledger.put_payment(replace(made, height=None))
    await desk.look(blocks=1)
    assert desk.node.relayed == []


async def test_a_node_that_does_not_relay_names_the_command(desk: Desk) -> None:
    made = await desk.put("tr_1", PaymentState.PUBLISHED, None)
    desk.node.unrelayed, desk.node.is_restricted = {made.txid}, True
    await desk.look()
    assert f"relay_tx {made.txid}" in (desk.recovery.problem or "")
    desk.node.is_restricted = False
    await desk.look(blocks=1)
    assert desk.recovery.problem is None


# --- gone for good -------------------------------------------------------------------------------


@pytest.mark.parametrize("state", [PaymentState.SETTLED, PaymentState.PUBLISHED])
async def test_a_split_that_can_not_be_mined_again_is_given_up(
    desk: Desk, state: PaymentState
) -> None:
    """A payment of the wallet to itself whose input is gone. One of an order is never given up."""
    await desk.put("upkeep", state, None, Purpose.UPKEEP)
    await desk.put("tr_1", state, None)
    desk.node.known.clear()
    desk.node.says = Submission.INVALID
    await desk.look()
    for _ in range(OPTIONS.failed_after - 1):
        await desk.look(blocks=1)
    assert (await desk.known("upkeep")).state is state
    await desk.look(blocks=1)
    assert (await desk.known("upkeep")).state is PaymentState.FAILED
    assert (await desk.known("tr_1")).state is state
    assert await desk.ledger.live_key_images(["image of upkeep", "image of tr_1"]) == {
        "image of tr_1"
    }


async def test_a_split_that_comes_back_in_time_is_kept(desk: Desk) -> None:
    made = await desk.put("upkeep", PaymentState.SETTLED, None, Purpose.UPKEEP)
    desk.node.says = Submission.INVALID
    for _ in range(3):
        desk.node.known.clear()
        for _ in range(OPTIONS.failed_after - 1):
            await desk.look(blocks=1)
        desk.node.known[made.txid] = desk.node.top
        await desk.look(blocks=1)
    assert (await desk.known("upkeep")).state is PaymentState.SETTLED
    assert desk.recovery.gone is None
