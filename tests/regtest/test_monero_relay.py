"""Payouts that the service's node has and its peer lacks, or that node lacks and its peer has.

Both are real nodes. The peer mines: an unrelayed transaction stays unmined, as on the real network.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from rpcsvc.health import Health, Severity, texts_of
from rpcsvc.orders.ports.wallets import Outcome
from rpcsvc.settlement.onchain.monero.connection import MoneroConnection
from rpcsvc.settlement.onchain.monero.ledger import MoneroLedger
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient, NodeInfo, PoolTransaction
from rpcsvc.settlement.onchain.monero.presence import MoneroPayoutEnd
from rpcsvc.settlement.onchain.monero.records import Cursor, MoneroPayment, WalletRecord
from rpcsvc.settlement.onchain.monero.unrecorded import (
    NEWEST_BLOCK_MS,
    MoneroOutgoing,
    OutgoingUnknown,
)
from rpcsvc.settlement.onchain.unrecorded import NotAdopted, UnrecordedLedger
from rpcsvc.store.backends.sqlite.database import SqliteDatabase
from tests.e2e.processes import until
from tests.regtest.daemons import (
    COINBASE_LOCK,
    Monerod,
    WalletRpc,
    generate_blocks,
    new_wallet,
    pop_blocks,
)
from tests.regtest.payees import pay
from tests.regtest.treasury import OPTIONS, Treasury, treasury
from tests.sandbox import ManualClock

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

# An address that no wallet of these tests has.
PAYEE = (
    "44AFFq5kSiGBoZ4NMDwYtN18obc8AemS33DBLWs3H7otXft3"
    "XjrpDtQGv7SqSsaBYBb98uNbr2VBBEt7f2wfn3RVGQBEP3A"
)


@dataclass
class Pair:
    """The service's node with its wallet, and the peer that mines."""

    daemon: Monerod
    miner: Monerod
    own: Treasury
    node: MonerodClient
    peer: MonerodClient

    async def mine(self, blocks: int = 1) -> None:
        """Mine on the peer; the service's node follows."""
        address = await self.own.wallet.primary_address()
        await generate_blocks(self.peer, blocks, address)
        await until(self.is_level)

    async def is_level(self) -> bool:
        return (await self.node.info()).top_hash == (await self.peer.info()).top_hash

    async def waiting(self, txid: str | None) -> PoolTransaction | None:
        """The transaction in the pool of the service's node."""
        return next((item for item in await self.node.pool() if item.txid == txid), None)

    async def is_with_the_peer(self) -> bool:
        return bool(await self.peer.pool())

    async def restart(self) -> None:
        """Start the service's node again after it was killed."""
        await asyncio.to_thread(self.daemon.start)
        await until(self.is_level)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pair(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    home = tmp_path_factory.mktemp("pair")
    with (
        Monerod(home / "peer", peers=()) as miner,
        Monerod(home / "own", peers=(miner.p2p_port,)) as daemon,
        WalletRpc(home / "wallets", daemon) as wallets,
    ):
        await new_wallet(wallets)
        async with (
            MonerodClient(daemon.endpoint) as node,
            MonerodClient(miner.endpoint) as peer,
            treasury(wallets, home) as own,
        ):
            made = Pair(daemon, miner, own, node, peer)
            await made.mine(COINBASE_LOCK + 20)
            await own.adapter.maintain()
            yield made


async def test_a_payment_that_the_node_never_sent_on_is_relayed(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool has the transaction as not relayed, as after a kill of the node right after it
    accepted it. By itself the node never relays it.
    """
    transfer = await pair.own.prepared(pair.own.transfer(PAYEE))

    payment = await pair.own.ledger.payment(transfer.transfer_id)
    assert payment is not None

    async def take_only(_metadata: str) -> str:
        params = {"tx_as_hex": payment.raw, "do_not_relay": True}
        await pair.node.rpc.act_path("/send_raw_transaction", params)
        return transfer.txid or ""

    with monkeypatch.context() as patched:
        patched.setattr(pair.own.adapter_wallet, "relay", take_only)
        assert (await pair.own.adapter.payments.publish(transfer)).outcome is Outcome.PENDING
    await asyncio.to_thread(pair.daemon.kill)
    await pair.restart()
    seen = await pair.waiting(transfer.txid)
    assert seen is not None
    assert not seen.relayed
    await pair.mine(20)
    assert (await pair.own.adapter.payments.look_up(transfer)).outcome is Outcome.PENDING
    assert not await pair.is_with_the_peer()
    await pair.own.adapter.maintain()
    await until(pair.is_with_the_peer)
    await pair.mine(OPTIONS.settled_after)
    assert (await pair.own.adapter.payments.look_up(transfer)).outcome is Outcome.SETTLED


async def test_what_the_peers_have_lost_is_relayed_after_some_blocks(pair: Pair) -> None:
    """The node would do so by itself, after five minutes at the earliest."""
    transfer = await pair.own.prepared(pair.own.transfer(PAYEE))
    assert (await pay(pair.own, transfer)).outcome is Outcome.PENDING
    await until(pair.is_with_the_peer)
    await pair.peer.flush_pool()
    await pair.mine()
    await pair.own.adapter.maintain()
    await pair.mine(3)
    assert not await pair.is_with_the_peer()
    await pair.own.adapter.maintain()
    assert (
        "waits in the node's pool for 3 blocks"
        in (texts_of(await pair.own.adapter.conditions(), Severity.NOTE))[0]
    )
    assert Health.of(await pair.own.adapter.conditions()).ok
    await until(pair.is_with_the_peer)
    await pair.peer.flush_pool()
    await pair.mine(7)
    await pair.own.adapter.maintain()
    assert "waits in the node's pool for 10 blocks" in (
        Health.of(await pair.own.adapter.conditions()).detail or ""
    )
    await until(pair.is_with_the_peer)
    await pair.mine(OPTIONS.settled_after)
    assert (await pair.own.adapter.payments.look_up(transfer)).outcome is Outcome.SETTLED
    await pair.own.adapter.maintain()
    assert texts_of(await pair.own.adapter.conditions(), Severity.NOTE) == []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def settled(pair: Pair) -> MoneroPayment:
    """A payout that is settled."""
    transfer = await pair.own.prepared(pair.own.transfer(PAYEE))
    assert (await pay(pair.own, transfer)).outcome is Outcome.PENDING
    await until(pair.is_with_the_peer)
    await pair.mine(OPTIONS.settled_after)
    assert (await pair.own.adapter.payments.look_up(transfer)).outcome is Outcome.SETTLED
    payment = await pair.own.ledger.payment(transfer.transfer_id)
    assert payment is not None
    return payment


async def go_back(pair: Pair, height: int, wallet: str) -> NodeInfo:
    """Cut the peer off, have the service's node forget the blocks from ``height`` on, and restore
    its wallet from its words; return the node's state.
    """
    await asyncio.to_thread(pair.miner.kill)
    await pop_blocks(pair.node, (await pair.node.info()).height - height)
    await pair.node.flush_pool()
    seed = await pair.own.wallet.seed()
    await pair.own.wallet.close()
    await pair.own.wallet.restore(wallet, "", seed, 0)
    return await pair.node.info()


async def test_payout_that_a_late_node_lacks_is_not_ended(
    pair: Pair, settled: MoneroPayment
) -> None:
    """The payout is in a block of the peer. The node is at a block before it, and so is the wallet,
    which has none of the inputs.
    """
    own = pair.own
    await go_back(pair, 1, "again")
    connection = MoneroConnection(pair.node, own.adapter_wallet, own.ledger, own.options)

    async def annotate(_txid: str) -> None:
        raise AssertionError("nothing is signed")

    closing = MoneroPayoutEnd(connection, own.ledger, own.clock, own.options, annotate)
    with pytest.raises(NotAdopted, match="proves nothing"):
        await closing.end(settled)
    await asyncio.to_thread(pair.miner.start)
    await until(pair.is_level)
    with pytest.raises(NotAdopted, match="is in block"):
        await closing.end(settled)


async def test_wallet_restored_at_a_late_node_signs_nothing(
    pair: Pair, settled: MoneroPayment, tmp_path: Path
) -> None:
    """The payout is in a block of the peer, and in no books: the database is an older copy. Until
    the node has that block the wallet does not list the payout.
    """
    own, new = pair.own, await pair.node.info()
    assert settled.height is not None
    old = await go_back(pair, settled.height, "copy")
    database = await SqliteDatabase.open(tmp_path)
    ledger = MoneroLedger(database)
    await ledger.adopt_wallet(WalletRecord("fakechain", await own.wallet.primary_address(), 0))
    await ledger.acknowledge([], Cursor(old.height - 1, old.top_hash), -1)
    connection = MoneroConnection(pair.node, own.adapter_wallet, ledger, own.options)
    clock, unrecorded = ManualClock(), UnrecordedLedger(database)
    outgoing = MoneroOutgoing(connection, ledger, unrecorded, clock)
    newest = await pair.node.header_at(old.height - 1)
    assert newest is not None
    clock.now = newest.timestamp * 1000 + NEWEST_BLOCK_MS
    assert settled.txid not in await outgoing.unknown(), "a block this young is the newest"
    clock.now += 1000
    with pytest.raises(OutgoingUnknown):
        await outgoing.unknown()
    clock.now = newest.timestamp * 1000
    await ledger.acknowledge([], Cursor(new.height - 1, new.top_hash), -1)
    with pytest.raises(OutgoingUnknown):
        await outgoing.unknown()
    await asyncio.to_thread(pair.miner.start)
    await until(pair.is_level)
    assert settled.txid in await outgoing.unknown()
    await database.close()
