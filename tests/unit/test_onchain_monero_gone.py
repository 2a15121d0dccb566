"""``rpcsvc payouts close`` of a signed XMR payout: only one that can't be mined any more is closed.

Node and wallet are fakes. The same on real daemons: tests/regtest/test_monero_reorg_recovery.py.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from rpcsvc.settlement.onchain.daemon_rpc import NodeError, TooLarge
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import MoneroSubmission, NodeInfo, Spent
from rpcsvc.settlement.onchain.monero.presence import MoneroPayoutEnd, MoneroReorgRecovery
from rpcsvc.settlement.onchain.monero.records import Cursor, MoneroPaymentState
from rpcsvc.settlement.onchain.monero.wallet_types import (
    Output,
    OutputFilter,
    PreparedPayment,
    SubaddressIndex,
)
from rpcsvc.settlement.onchain.unrecorded import NotAdopted
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.sandbox import ManualClock
from tests.unit.monero_reorgs import OPTIONS, ReorgNode, ReorgRig, ReorgWallet

IMAGE = "image of tr_1"


@dataclass
class RefusingNode(ReorgNode):
    """A node that refuses submissions. ``spent``: where each key image was seen."""

    says: MoneroSubmission = MoneroSubmission.INVALID
    spent: dict[str, Spent] = field(default_factory=dict)

    async def key_images(self, images: Sequence[str]) -> dict[str, Spent]:
        return {image: self.spent.get(image, Spent.UNSPENT) for image in images}


@dataclass
class OwnWallet(ReorgWallet):
    """``does``: its calls, in order; ``has_spent``: key images of outputs that it has as spent."""

    has_spent: tuple[str, ...] = ()
    does: list[str] = field(default_factory=list)
    is_locked: bool = False
    has_spent_most: bool = False
    scanned: int = 101
    on_refresh: Callable[[], None] = lambda: None

    async def outputs(self, which: OutputFilter = OutputFilter.AVAILABLE) -> list[Output]:
        if which is OutputFilter.AVAILABLE:
            return await super().outputs()
        if self.has_spent_most:
            raise TooLarge("wallet", "incoming_transfers", "the answer has over 33554432 bytes")
        index = SubaddressIndex(0, 0)
        return [Output("tx", 1, index, 1, item, 9, True, True, False) for item in self.has_spent]

    async def refresh(self) -> None:
        self.on_refresh()

    async def rescan_spent(self) -> None: ...

    async def height(self) -> int:
        return self.scanned

    async def primary_address(self) -> str:
        return "4own"

    async def prepare_sweep(self, image: str, address: str) -> PreparedPayment:
        if self.is_locked:
            raise NodeError("wallet", "sweep_single", -37, "not enough unlocked money")
        self.does.append(f"sign {image} to {address}")
        return PreparedPayment("rival", 5, 1, 1500, "00", "metadata", "key", (image,))

    async def relay(self, metadata: str) -> str:
        self.does.append(f"relay {metadata}")
        return "rival"

    async def store(self) -> None:
        self.does.append("store")


class CheckedConnection(MoneroConnection):
    """A connection whose daemons pass every check."""

    async def check_node(self) -> NodeInfo:
        return await self.node.info()

    async def check_wallet(self) -> None: ...


@dataclass
class Ending:
    rig: ReorgRig
    node: RefusingNode
    wallet: OwnWallet
    gone: MoneroPayoutEnd
    by_word: MoneroPayoutEnd

    async def end(self) -> str | None:
        return await self.gone.end(await self.rig.known("tr_1"))

    async def end_by_word(self) -> str | None:
        return await self.by_word.end(await self.rig.known("tr_1"))

    async def refused(self, why: str) -> None:
        with pytest.raises(NotAdopted, match=why):
            await self.end()
        assert self.wallet.does == []


@pytest.fixture
async def ending(tmp_path: Path) -> AsyncIterator[Ending]:
    """A settled payout that is in no block and no pool, and whose bytes the node refuses."""
    database = await SqliteDatabase.open(tmp_path)
    ledger, node, wallet = MoneroLedger(database), RefusingNode(), OwnWallet()
    connection = CheckedConnection(cast("Any", node), cast("Any", wallet), ledger, OPTIONS)
    rig = ReorgRig(node, wallet, ledger, MoneroReorgRecovery(connection, ledger, OPTIONS))

    async def annotate(txid: str) -> None:
        wallet.does.append(f"explain {txid}")

    gone, by_word = (
        MoneroPayoutEnd(connection, ledger, ManualClock(), OPTIONS, annotate, is_by_word=is_by_word)
        for is_by_word in (False, True)
    )
    await rig.put("tr_1", MoneroPaymentState.SETTLED, None)
    yield Ending(rig, node, wallet, gone, by_word)
    await database.close()


async def test_end_spends_inputs_that_nothing_has_spent(ending: Ending) -> None:
    """The transaction is annotated as our own before it is relayed."""
    ending.wallet.images, ending.wallet.frozen = (IMAGE,), {IMAGE}
    assert await ending.end() == "rival"
    assert ending.wallet.does == [
        f"sign {IMAGE} to 4own",
        "explain rival",
        "relay metadata",
        "store",
    ]
    assert ending.wallet.frozen == set()
    assert ending.node.submitted == ["tx tr_1"], "the same bytes are tried once more before that"


async def test_end_waits_for_inputs_that_are_locked(ending: Ending) -> None:
    ending.wallet.images, ending.wallet.is_locked = (IMAGE,), True
    await ending.refused("locked for ten blocks")


async def test_end_takes_no_absence_of_inputs_for_a_proof(ending: Ending) -> None:
    """Node and wallet may be late, and the payout mined: a node that has its block says so."""
    await ending.refused(f"proves nothing: tx tr_1 may be mined.*{IMAGE}.*--unproven")
    ending.node.known["tx tr_1"] = 100
    await ending.refused("is in block 100")


async def test_end_without_inputs_takes_the_operators_word(ending: Ending) -> None:
    assert await ending.end_by_word() is None
    assert ending.by_word.took_word
    assert ending.wallet.does == []


async def test_end_by_word_refuses_what_the_wallet_has_as_spent(ending: Ending) -> None:
    ending.wallet.has_spent = (IMAGE,)
    with pytest.raises(NotAdopted, match="one of them is late"):
        await ending.end_by_word()


async def test_end_by_word_needs_no_list_of_all_that_was_spent(ending: Ending) -> None:
    ending.wallet.has_spent_most = True
    await ending.refused("--unproven")
    assert await ending.end_by_word() is None


async def test_end_by_word_refuses_a_node_behind_the_scan(ending: Ending) -> None:
    await ending.rig.ledger.acknowledge([], Cursor(101, "h101"), -1)
    with pytest.raises(NotAdopted, match="has read block 101: the node is late"):
        await ending.end_by_word()


async def test_end_by_word_refuses_a_wallet_behind_its_node(ending: Ending) -> None:
    ending.wallet.scanned = 100
    with pytest.raises(NotAdopted, match="the wallet is at height 100, the node at 101"):
        await ending.end_by_word()


async def test_end_by_word_spends_inputs_that_the_wallet_has(ending: Ending) -> None:
    ending.wallet.images = (IMAGE,)
    assert await ending.end_by_word() == "rival"


async def test_end_closes_nothing_that_a_block_may_just_have_mined(ending: Ending) -> None:
    """The wallet has none of its inputs, since the payment itself has spent them by now."""

    def mine() -> None:
        ending.node.top += 1
        ending.node.known["tx tr_1"] = ending.node.top

    ending.wallet.on_refresh = mine
    await ending.refused("a block came")
    await ending.refused("is in block 101")


async def test_end_waits_for_payments_that_may_bring_the_inputs_back(ending: Ending) -> None:
    await ending.rig.put("tr_2", MoneroPaymentState.PUBLISHED, None)
    await ending.refused("tr_2 is not mined either")


async def test_end_refuses_what_the_node_takes_again(ending: Ending) -> None:
    ending.node.says = MoneroSubmission.ACCEPTED
    await ending.refused("the node said: accepted")
    await ending.refused("is in the node's pool")


@pytest.mark.parametrize(
    "says",
    [
        MoneroSubmission.BUSY,
        MoneroSubmission.KNOWN,
        MoneroSubmission.FEE_TOO_LOW,
        MoneroSubmission.DOUBLE_SPEND,
    ],
)
async def test_end_takes_no_other_answer_for_a_refusal(
    ending: Ending, says: MoneroSubmission
) -> None:
    ending.node.says = says
    await ending.refused("may be mined yet")


async def test_end_waits_for_a_spender_in_the_pool(ending: Ending) -> None:
    ending.node.spent = {IMAGE: Spent.IN_POOL}
    await ending.refused("waits to be mined")
