"""Settled XMR payments that were reorged out, and frozen outputs.

Node and wallet are fakes. The same on real daemons: tests/regtest/test_monero_reorg_recovery.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec.structs import replace

from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import (
    MoneroSubmission,
)
from rpcsvc.settlement.onchain.monero.presence import MoneroReorgRecovery
from rpcsvc.settlement.onchain.monero.records import MoneroPaymentState, MoneroPurpose
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.logs import captured
from tests.unit.monero_reorgs import OPTIONS, ReorgNode, ReorgRig, ReorgWallet

LIVE = [state for state in MoneroPaymentState if not state.is_over]
MODULE = "rpcsvc.settlement.onchain.monero.presence"


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[ReorgRig]:
    database = await SqliteDatabase.open(tmp_path)
    ledger, node, wallet = MoneroLedger(database), ReorgNode(), ReorgWallet()
    connection = MoneroConnection(cast("Any", node), cast("Any", wallet), ledger, OPTIONS)
    yield ReorgRig(node, wallet, ledger, MoneroReorgRecovery(connection, ledger, OPTIONS))
    await database.close()


async def test_settled_payment_is_reported_while_it_is_in_no_block(
    rig: ReorgRig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node that replaces blocks returns their transactions to its pool by itself."""
    logs = captured(monkeypatch, MODULE)
    made = await rig.put("tr_1", MoneroPaymentState.SETTLED, 98)
    await rig.poll()
    assert not rig.faults
    rig.node.known[made.txid] = None
    for _ in range(2 * OPTIONS.tracked_blocks):
        await rig.poll(blocks=1)
        assert "payment tr_1 was settled and a reorganisation" in rig.faults
        assert "(in the pool)" in rig.faults
    events = [item["event"] for item in logs.entries]
    assert events.count("monero_settled_payment_dropped") == 1
    assert rig.node.submitted == []
    rig.node.known[made.txid] = rig.node.top
    await rig.poll(blocks=1)
    assert not rig.faults
    assert await rig.height("tr_1") == rig.node.top - 1


async def test_payment_that_is_just_being_mined_is_not_dropped(rig: ReorgRig) -> None:
    """A settled payment that a reorganisation returned to the pool is mined again."""
    made = await rig.put("tr_1", MoneroPaymentState.SETTLED, None)
    rig.node.known[made.txid] = rig.node.top
    rig.node.misses = {made.txid}
    await rig.poll()
    assert rig.node.submitted == []
    assert not rig.faults
    assert await rig.height("tr_1") == rig.node.top


async def test_payment_missing_at_the_node_is_resent_until_mined(rig: ReorgRig) -> None:
    made = await rig.put("tr_1", MoneroPaymentState.SETTLED, 98)
    rig.node.known.clear()
    rig.node.says = MoneroSubmission.INVALID
    for _ in range(2):
        await rig.poll(blocks=1)
        for _ in range(3):
            await rig.poll()
            assert "published again (invalid)" in rig.faults
    assert await rig.height("tr_1") is None
    assert rig.node.submitted == [made.txid] * 2, "what is invalid is so until the next block"
    rig.node.says = MoneroSubmission.ACCEPTED
    await rig.poll(blocks=1)
    assert "published again (accepted)" in rig.faults
    await rig.poll(blocks=1)
    assert "(in the pool)" in rig.faults
    assert rig.node.submitted == [made.txid] * 3
    rig.node.known[made.txid] = rig.node.top
    await rig.poll(blocks=1)
    assert not rig.faults


async def test_what_settled_long_ago_is_not_asked_about(rig: ReorgRig) -> None:
    await rig.put("tr_1", MoneroPaymentState.SETTLED, rig.node.top + 1 - OPTIONS.tracked_blocks)
    await rig.put("tr_2", MoneroPaymentState.SETTLED, rig.node.top + 2 - OPTIONS.tracked_blocks)
    rig.node.known.clear()
    await rig.poll()
    assert rig.node.submitted == ["tx tr_2"]


@pytest.mark.parametrize("state", [MoneroPaymentState.SETTLED, MoneroPaymentState.PUBLISHED])
async def test_only_waiting_abandoned_payments_are_offered_again(
    rig: ReorgRig, state: MoneroPaymentState
) -> None:
    made = await rig.put("tr_1", state, None)
    other = await rig.put("tr_2", MoneroPaymentState.PUBLISHED, None)
    rig.node.known |= {made.txid: None, "a stranger's": None}
    rig.node.dropped = {made.txid, "a stranger's"}
    await rig.poll()
    assert rig.node.flushed == rig.node.submitted == [made.txid]
    assert other.txid not in rig.node.submitted
    assert not rig.notes


async def test_node_that_never_forgets_is_reported_until_mined(rig: ReorgRig) -> None:
    made = await rig.put("tr_1", MoneroPaymentState.PUBLISHED, None)
    rig.node.dropped, rig.node.is_restricted = {made.txid}, True
    for _ in range(2):
        await rig.poll(blocks=1)
        assert f"flush_txpool {made.txid}" in rig.notes
    assert rig.node.submitted == []
    await rig.ledger.put_payment(replace(made, height=rig.node.top))
    await rig.poll(blocks=1)
    assert not rig.notes


async def test_pool_is_read_once_a_block_and_only_for_waiting_ones(rig: ReorgRig) -> None:
    await rig.put("tr_1", MoneroPaymentState.PUBLISHED, 98)
    await rig.poll()
    assert rig.node.pools == 0
    await rig.put("tr_2", MoneroPaymentState.PUBLISHED, None)
    for _ in range(3):
        await rig.poll()
    assert rig.node.pools == 0, "it was looked at this block"
    await rig.poll(blocks=1)
    await rig.poll()
    assert rig.node.pools == 1


async def test_only_money_of_payments_that_can_never_be_made_is_let_go(rig: ReorgRig) -> None:
    """Outputs frozen by the operator, and inputs of live payments, stay frozen."""
    await rig.put("tr_1", MoneroPaymentState.FAILED, None)
    await rig.put("tr_2", MoneroPaymentState.PUBLISHED, None)
    images = ("image of tr_1", "image of tr_2", "the operator's")
    rig.wallet.images, rig.wallet.frozen = images, set(images)
    await rig.poll()
    assert rig.wallet.frozen == {"image of tr_2", "the operator's"}
    await rig.poll(blocks=1)
    assert rig.wallet.frozen == {"image of tr_2", "the operator's"}


# --- pending in the pool -------------------------------------------------------------------------


async def test_an_unrelayed_payment_is_relayed_with_the_next_block(rig: ReorgRig) -> None:
    """A node that is killed between accepting and relaying a transaction never relays it."""
    made = await rig.put("tr_1", MoneroPaymentState.PUBLISHED, None)
    rig.node.known["a stranger's"] = None
    rig.node.unrelayed = {made.txid, "a stranger's"}
    await rig.poll()
    assert rig.node.relayed == [made.txid]
    await rig.poll(blocks=1)
    assert rig.node.relayed == [made.txid], "once it is relayed it has time to be mined"
    assert rig.node.submitted == rig.node.flushed == []
    assert not rig.notes


async def test_a_payment_pending_for_three_blocks_is_relayed_with_each(rig: ReorgRig) -> None:
    """Its peers may have lost it. Health has the time, and is degraded after ten blocks."""
    made = await rig.put("tr_1", MoneroPaymentState.PUBLISHED, None)
    for blocks in range(3):
        await rig.poll(blocks=min(blocks, 1))
        assert (rig.node.relayed, rig.notes) == ([], "")
    for blocks in range(3, 10):
        await rig.poll(blocks=1)
        assert (
            f"published at 1970-01-01T00:00:01.000Z, waits in the node's pool for {blocks}"
            in rig.notes
        )
        assert not rig.faults
    await rig.poll(blocks=1)
    assert "waits in the node's pool for 10 blocks" in rig.faults
    assert rig.node.relayed == [made.txid] * 8
    await rig.ledger.put_payment(replace(made, height=rig.node.top))
    rig.node.known[made.txid] = rig.node.top
    await rig.poll(blocks=1)
    assert (rig.notes, rig.faults) == ("", "")


async def test_blocks_are_counted_again_after_a_mined_payment_is_lost(rig: ReorgRig) -> None:
    made = await rig.put("tr_1", MoneroPaymentState.PUBLISHED, None)
    await rig.poll()
    await rig.poll(blocks=2)
    await rig.ledger.put_payment(replace(made, height=rig.node.top))
    await rig.poll(blocks=1)
    await rig.ledger.put_payment(replace(made, height=None))
    await rig.poll(blocks=1)
    assert rig.node.relayed == []


async def test_a_node_that_does_not_relay_names_the_command(rig: ReorgRig) -> None:
    made = await rig.put("tr_1", MoneroPaymentState.PUBLISHED, None)
    rig.node.unrelayed, rig.node.is_restricted = {made.txid}, True
    await rig.poll()
    assert f"relay_tx {made.txid}" in rig.notes
    rig.node.is_restricted = False
    await rig.poll(blocks=1)
    assert not rig.notes


# --- reorged out permanently ----------------------------------------------------------------------


@pytest.mark.parametrize("state", LIVE)
async def test_split_that_can_not_be_mined_again_is_abandoned(
    rig: ReorgRig, state: MoneroPaymentState
) -> None:
    """A payment of the wallet to itself whose input is gone."""
    await rig.put("upkeep", state, None, MoneroPurpose.UPKEEP)
    rig.node.known.clear()
    rig.node.says = MoneroSubmission.INVALID
    await rig.poll()
    for _ in range(OPTIONS.failed_after - 1):
        await rig.poll(blocks=1)
    assert (await rig.known("upkeep")).state is state
    await rig.poll(blocks=1)
    assert (await rig.known("upkeep")).state is MoneroPaymentState.FAILED
    assert await rig.ledger.live_key_images(["image of upkeep"]) == set()


@pytest.mark.parametrize("state", LIVE)
async def test_payout_that_can_not_be_mined_is_never_abandoned(
    rig: ReorgRig, state: MoneroPaymentState
) -> None:
    await rig.put("tr_1", state, None)
    rig.node.known.clear()
    rig.node.says = MoneroSubmission.INVALID
    for _ in range(2 * OPTIONS.failed_after):
        await rig.poll(blocks=1)
    assert (await rig.known("tr_1")).state is state
    assert await rig.ledger.live_key_images(["image of tr_1"]) == {"image of tr_1"}


async def test_lost_split_names_no_command_and_hides_no_payout(rig: ReorgRig) -> None:
    await rig.put("upkeep", MoneroPaymentState.SETTLED, None, MoneroPurpose.UPKEEP)
    rig.node.says = MoneroSubmission.INVALID
    await rig.poll(blocks=1)
    blocks = OPTIONS.failed_after
    assert rig.faults.endswith(f"if it stays away: it counts as failed after {blocks} blocks")
    await rig.put("tr_1", MoneroPaymentState.SETTLED, None)
    await rig.put("more upkeep", MoneroPaymentState.SETTLED, None, MoneroPurpose.UPKEEP)
    await rig.poll(blocks=1)
    assert rig.faults.endswith("if it stays away: rpcsvc payouts close tr_1 --note TEXT")


async def test_a_split_that_comes_back_in_time_is_kept(rig: ReorgRig) -> None:
    made = await rig.put("upkeep", MoneroPaymentState.SETTLED, None, MoneroPurpose.UPKEEP)
    rig.node.says = MoneroSubmission.INVALID
    for _ in range(3):
        rig.node.known.clear()
        for _ in range(OPTIONS.failed_after - 1):
            await rig.poll(blocks=1)
        rig.node.known[made.txid] = rig.node.top
        await rig.poll(blocks=1)
    assert (await rig.known("upkeep")).state is MoneroPaymentState.SETTLED
    assert not rig.faults
