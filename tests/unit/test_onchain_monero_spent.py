"""An XMR payment has failed only if the transaction that spent its inputs is found.

Node and wallet are fakes, which contradict themselves on command. The same on real daemons:
tests/regtest/test_monero_adapter_payouts.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from rpcsvc.orders.ports.wallets import Outcome, Verdict
from rpcsvc.settlement.onchain.daemon_rpc import ChainUnusable
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import (
    BlockHeader,
    NodeBlock,
    NodeBytes,
    NodeInfo,
    NodeTransaction,
    Spent,
)
from rpcsvc.settlement.onchain.monero.payments import MoneroPayments
from rpcsvc.settlement.onchain.monero.presence import MoneroPresence
from rpcsvc.settlement.onchain.monero.records import (
    Cursor,
    MoneroPayment,
    MoneroPaymentState,
    MoneroPurpose,
    WalletRecord,
)
from rpcsvc.settlement.onchain.monero.wallet_types import (
    Refreshed,
    SubaddressIndex,
    WalletTransfer,
    WalletTransferKind,
)
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.chain_options import monero_options

NOW = 1_700_000_000_000
OPTIONS = monero_options(nettype="fakechain", settled_after=3, failed_after=5)
SIGNED_AT = 3_000_000  # the height
OURS, RIVAL, OTHER = "ours", "rival", "other"
BODIES = {
    OURS: NodeBytes(OURS, "", ("image-1", "image-2"), SIGNED_AT),
    RIVAL: NodeBytes(RIVAL, "", ("image-2", "image-9"), SIGNED_AT),
    OTHER: NodeBytes(OTHER, "", ("image-7",), SIGNED_AT),
}


@dataclass
class Node:
    """A node that has image-2 as spent, and does not have our payment.

    ``mined``: its transactions with their height; None: in its pool.
    """

    top: int = SIGNED_AT
    mined: dict[str, int | None] = field(default_factory=dict)
    branch: str = ""
    asked: list[str] = field(default_factory=list)
    is_forgetful: bool = False

    async def info(self) -> NodeInfo:
        height = self.top + 1
        top = f"h{self.top}{self.branch}"
        return NodeInfo(height, top, "fakechain", True, False, True, height, 0, "0.18", 600_000)

    async def header_at(self, height: int) -> BlockHeader | None:
        if self.is_forgetful or height > self.top:
            return None
        return self._header(height)

    async def headers(self, first: int, last: int) -> list[BlockHeader]:
        return [self._header(height) for height in range(first, last + 1)]

    async def block_at(self, height: int) -> NodeBlock:
        txids = tuple(txid for txid, mined_at in self.mined.items() if mined_at == height)
        return NodeBlock(self._header(height), "miner", txids)

    def _header(self, height: int) -> BlockHeader:
        return BlockHeader(height, f"h{height}{self.branch}", f"h{height - 1}{self.branch}", 0)

    async def key_images(self, images: Sequence[str]) -> dict[str, Spent]:
        return {image: Spent.IN_CHAIN if image == "image-2" else Spent.UNSPENT for image in images}

    async def transactions(self, txids: Sequence[str]) -> dict[str, NodeTransaction]:
        assert list(txids) == [OURS]
        return {}

    async def bodies(self, txids: Sequence[str]) -> dict[str, NodeBytes]:
        self.asked += txids
        shown = [txid for txid in txids if txid in self.mined]
        return {
            txid: NodeBytes(txid, "", BODIES[txid].key_images, self.mined[txid]) for txid in shown
        }


@dataclass
class Wallet:
    """A wallet that lists its sent transactions by height after a refresh."""

    sent: dict[str, int] = field(default_factory=dict)
    primary: str = "4primary"
    is_fresh: bool = False

    async def primary_address(self) -> str:
        return self.primary

    async def refresh(self) -> Refreshed:
        self.is_fresh = True
        return Refreshed(0)

    async def transfers(
        self, from_height: int, kinds: Collection[WalletTransferKind]
    ) -> list[WalletTransfer]:
        assert tuple(kinds) == (WalletTransferKind.OUTGOING,)
        fresh, self.is_fresh = self.is_fresh, False
        index = SubaddressIndex(0, 0)
        return [
            WalletTransfer(
                WalletTransferKind.OUTGOING, txid, "4primary", index, 1, 1, height, 0, 0, 0, False,
                False,
            )
            for txid, height in self.sent.items()
            if fresh and height >= from_height
        ]  # fmt: skip


class Clock:
    def __init__(self) -> None:
        self.now = NOW

    def now_ms(self) -> int:
        return self.now


@dataclass
class Rig:
    node: Node
    wallet: Wallet
    clock: Clock
    ledger: MoneroLedger
    presence: MoneroPresence

    async def poll(self, blocks: int = 0) -> Verdict:
        """The verdict on the payment so many blocks later."""
        self.node.top += blocks
        self.clock.now += blocks * 120_000
        return await self.presence.verdict(await self.payment())

    async def payment(self) -> MoneroPayment:
        found = await self.ledger.payment("tr_1")
        assert found is not None
        return found

    def payments(self) -> MoneroPayments:
        node: Any = self.node
        wallet: Any = self.wallet
        return MoneroPayments(
            MoneroConnection(node, wallet, self.ledger, OPTIONS), self.ledger, self.clock, OPTIONS
        )

    def restart(self) -> None:
        self.presence = presence(self.node, self.wallet, self.ledger, self.clock)


def presence(node: Any, wallet: Any, ledger: MoneroLedger, clock: Clock) -> MoneroPresence:
    return MoneroPresence(MoneroConnection(node, wallet, ledger, OPTIONS), ledger, clock, OPTIONS)


@pytest.fixture
async def rig(tmp_path: Path) -> AsyncIterator[Rig]:
    database = await SqliteDatabase.open(tmp_path)
    ledger = MoneroLedger(database)
    await ledger.adopt_wallet(WalletRecord("fakechain", "4primary", 0))
    images = BODIES[OURS].key_images
    signed = MoneroPayment(
        "tr_1", MoneroPurpose.TRANSFER, "4x", 10**12, 5, OURS, "00", "meta", "key", images, NOW,
        MoneroPaymentState.PUBLISHED,
    )  # fmt: skip
    await ledger.add_payment(signed)
    node, wallet, clock = Node(), Wallet(), Clock()
    yield Rig(node, wallet, clock, ledger, presence(node, wallet, ledger, clock))
    await database.close()


async def test_spent_key_image_with_an_unshown_payment_proves_nothing(rig: Rig) -> None:
    """Two nodes behind a load balancer: one has the payment mined, the other is lagging."""
    rig.wallet.sent = {OURS: SIGNED_AT, OTHER: SIGNED_AT}
    rig.node.mined = {**rig.wallet.sent}
    for _ in range(3 * OPTIONS.failed_after):
        verdict = await rig.poll(blocks=1)
        assert verdict.outcome is Outcome.UNKNOWN
    assert "no other transaction" in verdict.reason
    payment = await rig.ledger.payment("tr_1")
    assert payment is not None
    assert payment.state is MoneroPaymentState.PUBLISHED
    assert await rig.ledger.live_key_images(payment.key_images) == set(payment.key_images)
    rig.clock.now += 3_600_000
    assert "something has spent an input of it" in (await rig.payments().conditions())[0].text


@pytest.mark.parametrize("restarts", [False, True])
async def test_it_has_failed_once_what_took_its_input_is_found_deep(
    rig: Rig, restarts: bool
) -> None:
    rig.wallet.sent = {RIVAL: SIGNED_AT + 1, OTHER: SIGNED_AT}
    rig.node.mined = {**rig.wallet.sent}
    for _ in range(OPTIONS.failed_after - 1):
        verdict = await rig.poll(blocks=1)
        assert (verdict.outcome, RIVAL in verdict.reason) == (Outcome.UNKNOWN, True)
        if restarts:
            rig.restart()
    verdict = await rig.poll(blocks=1)
    assert (verdict.outcome, RIVAL in verdict.reason) == (Outcome.FAILED, True)
    payment = await rig.ledger.payment("tr_1")
    assert payment is not None
    assert payment.state is MoneroPaymentState.FAILED


async def test_depth_counts_from_the_block_of_the_spend(
    rig: Rig,
) -> None:
    rig.wallet.sent = {RIVAL: SIGNED_AT + 1}
    rig.node.mined = {**rig.wallet.sent}
    await rig.ledger.put_payment(replace(await rig.payment(), height=SIGNED_AT))
    assert (await rig.poll(blocks=6)).outcome is Outcome.FAILED
    assert (await rig.payment()).conflict == Cursor(SIGNED_AT + 1, f"h{SIGNED_AT + 1}")
    assert (await rig.payment()).height is None


async def test_time_of_a_spent_input_is_reported(rig: Rig) -> None:
    """As long as the block of that moment is not reorged out; also over restarts."""
    await rig.ledger.put_payment(replace(await rig.payment(), height=SIGNED_AT))
    assert "(1 blocks ago at least)" in (await rig.poll()).reason
    assert (await rig.payment()).height is None
    assert "(5 blocks ago at least)" in (await rig.poll(blocks=4)).reason
    rig.restart()
    assert "(6 blocks ago at least)" in (await rig.poll(blocks=1)).reason
    rig.node.branch = "b"
    assert "(1 blocks ago at least)" in (await rig.poll(blocks=1)).reason
    rig.node.branch, rig.node.top = "c", SIGNED_AT - 2
    assert "(1 blocks ago at least)" in (await rig.poll()).reason


async def test_a_clock_that_was_set_back_hides_nothing(rig: Rig) -> None:
    rig.wallet.sent = {RIVAL: SIGNED_AT + 1}
    rig.node.mined = {**rig.wallet.sent}
    rig.clock.now -= 365 * 24 * 3_600_000
    assert (await rig.poll(blocks=9)).outcome is Outcome.FAILED


async def test_pool_transaction_has_spent_nothing_and_hides_nothing(rig: Rig) -> None:
    """Several nodes may answer one lookup: one has it in the pool, another in a block."""
    rig.wallet.sent = dict.fromkeys((OURS, RIVAL), SIGNED_AT + 1)
    rig.node.mined = {OURS: None, RIVAL: None}
    assert "no other transaction" in (await rig.poll(blocks=9)).reason
    rig.node.mined = {OURS: None, RIVAL: SIGNED_AT + 1}
    assert (await rig.poll(blocks=1)).outcome is Outcome.FAILED


async def test_a_block_that_the_node_does_not_have_proves_nothing(rig: Rig) -> None:
    """The node has reported a transaction in that block, which has been replaced since."""
    rig.wallet.sent = {RIVAL: SIGNED_AT + 1}
    rig.node.mined = {**rig.wallet.sent}
    rig.node.is_forgetful = True
    assert "no other transaction" in (await rig.poll(blocks=9)).reason


async def test_spender_on_a_replaced_branch_fails_no_payment(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One node has it in a block that the others, which name the top, have replaced."""
    rig.wallet.sent = {RIVAL: SIGNED_AT + 1}
    rig.node.mined = {**rig.wallet.sent}
    with monkeypatch.context() as patch:
        patch.setattr(rig.node, "block_at", Node(branch="b", mined={**rig.wallet.sent}).block_at)
        assert (await rig.poll(blocks=9)).outcome is Outcome.UNKNOWN
        assert (await rig.payment()).state is MoneroPaymentState.PUBLISHED
    assert (await rig.poll()).outcome is Outcome.FAILED


async def test_another_wallet_is_not_asked_what_it_has_sent(rig: Rig) -> None:
    rig.wallet.primary, rig.wallet.sent = "4other", {RIVAL: SIGNED_AT + 1}
    rig.node.mined = {**rig.wallet.sent}
    with pytest.raises(ChainUnusable, match="another wallet"):
        await rig.poll(blocks=9)
    assert (await rig.payment()).state is MoneroPaymentState.PUBLISHED


async def test_one_that_waits_to_be_mined_again_has_taken_nothing(rig: Rig) -> None:
    rig.wallet.sent = {RIVAL: SIGNED_AT + 1}
    rig.node.mined = {**rig.wallet.sent}
    assert RIVAL in (await rig.poll(blocks=4)).reason
    rig.node.mined, rig.node.branch = {}, "b"
    assert (await rig.poll(blocks=5)).outcome is Outcome.UNKNOWN
    rig.node.mined = {RIVAL: SIGNED_AT + 9}
    assert "2 of 5" in (await rig.poll(blocks=1)).reason


async def test_a_search_in_vain_is_made_once_a_block(rig: Rig) -> None:
    rig.wallet.sent = {OTHER: SIGNED_AT}
    rig.node.mined = {**rig.wallet.sent}
    for _ in range(3):
        await rig.poll()
    assert rig.node.asked == [OTHER]
    await rig.poll(blocks=1)
    assert rig.node.asked == [OTHER, OTHER]


async def test_a_service_that_was_down_for_long_looks_as_far_back(rig: Rig) -> None:
    rig.wallet.sent = {RIVAL: SIGNED_AT + 1, OTHER: 1}
    rig.node.mined = {**rig.wallet.sent}
    assert (await rig.poll(blocks=50_000)).outcome is Outcome.FAILED
    assert rig.node.asked == [RIVAL], "what was sent long before it was signed is left alone"
