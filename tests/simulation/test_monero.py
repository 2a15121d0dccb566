"""The models of monerod and monero-wallet-rpc, as the product's own clients see them."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Final, NamedTuple

import pytest

from rpcsvc.domain.addresses import stagenet_subaddress
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint, NodeError
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient, MoneroSubmission, Spent
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import (
    Destination,
    OutputFilter,
    PreparedPayment,
    WalletCode,
    WalletTransferKind,
)
from tests.simulation.daemons import Network
from tests.simulation.loop import new_loop
from tests.simulation.monero import (
    SPENDABLE_AGE,
    MoneroChain,
    MonerodModel,
    MonerodName,
    Paid,
)
from tests.simulation.monero_wallet import WalletModel, address_of

XMR: Final = 10**12
PAYEE: Final = stagenet_subaddress(bytes([7] * 64))


class World(NamedTuple):
    chain: MoneroChain
    daemon: MonerodModel
    node: MonerodClient
    wallet_rpc: WalletModel
    wallet: WalletClient

    async def fund(self, *amounts: int) -> None:
        self.chain.pay([Paid(address_of(0), amount) for amount in amounts])
        self.chain.mine(SPENDABLE_AGE)
        await self.wallet.refresh()

    async def prepared(self, units: int = XMR // 2, to: str = PAYEE) -> PreparedPayment:
        return await self.wallet.prepare([Destination(to, units)])

    async def reopened(self) -> None:
        self.wallet_rpc.restart()
        await self.wallet.open(WalletModel.FILE, "")

    async def sent(self, txid: str) -> list[WalletTransferKind]:
        return [item.kind for item in await self.wallet.transfer(txid)]

    async def relayed(self) -> None:
        await asyncio.sleep(self.daemon.stem_seconds)


def in_world(story: Callable[[World], Awaitable[None]]) -> None:
    """Run a story with clients of a new node and wallet."""
    loop, chance = new_loop(1), random.Random(1)
    chain = MoneroChain(lambda: 1_700_000_000 + int(loop.time()), chance)
    daemon, network = MonerodModel(chain, "stagenet", chance), Network(loop, chance)
    wallet_rpc = WalletModel(daemon, chance)
    at = DaemonEndpoint("node", network.serve("monerod", daemon))
    wallet_at = DaemonEndpoint("wallet", network.serve("wallet", wallet_rpc), serial=True)

    async def run() -> None:
        async with MonerodClient(at) as node, WalletClient(wallet_at) as wallet:
            await wallet.open(WalletModel.FILE, "")
            await story(World(chain, daemon, node, wallet_rpc, wallet))

    with network.carrying():
        loop.run_simulation(run())


def test_deposit_is_pooled_then_mined_then_unlocked() -> None:
    async def story(world: World) -> None:
        (at,) = await world.wallet.create_addresses(1)
        made = world.chain.pay([Paid(at.address, XMR), Paid(at.address, XMR)])
        await world.wallet.refresh()
        (pooled,) = await world.wallet.transfers(0)
        assert (pooled.kind, pooled.amount) == (WalletTransferKind.POOL, 2 * XMR)
        assert (pooled.index, pooled.height) == (at.index, None)
        world.chain.mine()
        await world.wallet.refresh()
        (mined,) = await world.wallet.transfers(1)
        assert (mined.kind, mined.txid, mined.height) == (
            WalletTransferKind.INCOMING,
            made.txid,
            1,
        )
        assert await world.wallet.transfers(2) == []
        assert not any(item.unlocked for item in await world.wallet.outputs())
        world.chain.mine(SPENDABLE_AGE - 1)
        await world.wallet.refresh()
        assert all(item.unlocked for item in await world.wallet.outputs())
        assert await world.wallet.height() == (await world.node.info()).height

    in_world(story)


def test_payment_reaches_payee_change_and_proofs() -> None:
    async def story(world: World) -> None:
        await world.fund(XMR)
        made = await world.prepared()
        image = made.key_images[0]
        assert await world.node.key_images([image]) == {image: Spent.UNSPENT}
        await world.wallet.relay(made.metadata)
        assert await world.node.key_images([image]) == {image: Spent.IN_POOL}
        world.chain.mine()
        assert (await world.node.transactions([made.txid]))[made.txid].in_pool, "not broadcast"
        await world.relayed()
        world.chain.mine()
        assert await world.node.key_images([image]) == {image: Spent.IN_CHAIN}
        await world.wallet.refresh()
        assert await world.sent(made.txid) == [WalletTransferKind.OUTGOING]
        assert (await world.wallet.balance()).total == XMR - XMR // 2 - made.fee
        assert (await world.wallet.check_key(made.txid, made.tx_key, PAYEE)).received == XMR // 2
        proof = await world.wallet.prove_payment(made.txid, PAYEE, "one")
        assert (await world.wallet.check_proof(made.txid, PAYEE, proof, "one")).valid
        assert not (await world.wallet.check_proof(made.txid, PAYEE, proof, "two")).valid

    in_world(story)


def test_one_of_two_payments_of_the_same_inputs_is_taken() -> None:
    async def story(world: World) -> None:
        await world.fund(XMR)
        first, second = await world.prepared(), await world.prepared()
        assert first.key_images == second.key_images
        assert (await world.node.submit(first.raw)).submission is MoneroSubmission.ACCEPTED
        again = await world.node.submit(first.raw)
        assert again.submission is MoneroSubmission.DOUBLE_SPEND, "hidden by Dandelion++"
        await world.relayed()
        assert (await world.node.submit(first.raw)).submission is MoneroSubmission.KNOWN
        assert (await world.node.submit(second.raw)).submission is MoneroSubmission.DOUBLE_SPEND
        world.chain.mine()
        assert (await world.node.submit(first.raw)).submission is MoneroSubmission.KNOWN
        assert (await world.node.submit(second.raw)).submission is MoneroSubmission.DOUBLE_SPEND
        assert (await world.node.submit("00")).submission is MoneroSubmission.REFUSED

    in_world(story)


def test_wallet_forgets_what_it_did_not_store() -> None:
    async def story(world: World) -> None:
        await world.fund(XMR)
        await world.wallet.store()
        (address,) = await world.wallet.create_addresses(1)
        made = await world.prepared()
        await world.wallet.relay(made.metadata)
        await world.reopened()
        assert await world.wallet.create_addresses(1) == [address]
        again = await world.prepared()
        assert again.key_images == made.key_images
        with pytest.raises(NodeError) as refused:
            await world.wallet.relay(again.metadata)
        assert refused.value.code == WalletCode.TRANSFER_FAILED
        with pytest.raises(NodeError) as forgotten:
            await world.wallet.tx_key(made.txid)
        assert forgotten.value.code == WalletCode.NO_TX_KEY
        await world.relayed()
        world.chain.mine()
        await world.wallet.refresh()
        assert await world.sent(made.txid) == [WalletTransferKind.OUTGOING]

    in_world(story)


def test_stored_payment_survives_a_restart_of_the_wallet() -> None:
    async def story(world: World) -> None:
        await world.fund(XMR)
        made = await world.prepared()
        await world.wallet.relay(made.metadata)
        await world.wallet.store()
        await world.reopened()
        assert await world.wallet.tx_key(made.txid) == made.tx_key
        assert await world.sent(made.txid) == [WalletTransferKind.PENDING]

    in_world(story)


def test_payment_missing_from_the_pool_frees_its_inputs() -> None:
    async def story(world: World) -> None:
        await world.fund(XMR)
        made = await world.prepared()
        await world.wallet.relay(made.metadata)
        assert await world.wallet.outputs() == []
        await world.node.flush_pool([made.txid])
        for seconds in (0, 501):
            await asyncio.sleep(seconds)
            world.chain.mine()
            assert await world.sent(made.txid) == [WalletTransferKind.PENDING]
            await world.wallet.refresh()
        assert await world.sent(made.txid) == [WalletTransferKind.FAILED]
        assert [item.key_image for item in await world.wallet.outputs()] == list(made.key_images)

    in_world(story)


def test_popped_blocks_return_payments_to_the_pool() -> None:
    async def story(world: World) -> None:
        world.chain.mine()
        await world.fund(XMR)
        made = world.chain.blocks[2].mined[0]
        height = await world.wallet.height()
        world.chain.doomed[made.txid] = None
        world.chain.pop(SPENDABLE_AGE)
        await world.wallet.refresh()
        assert await world.wallet.height() == height
        assert [item.txid for item in await world.wallet.transfers(0)] == [made.txid]
        assert await world.node.transactions([made.txid]) == {}
        world.chain.mine()
        await world.wallet.refresh()
        assert await world.wallet.transfers(0) == []
        assert await world.wallet.height() == (await world.node.info()).height

    in_world(story)


def test_bytes_are_refused_while_their_inputs_are_off_the_chain() -> None:
    async def story(world: World) -> None:
        await world.fund(XMR)
        made = await world.prepared()
        world.chain.pop(SPENDABLE_AGE)
        assert (await world.node.submit(made.raw)).submission is MoneroSubmission.INVALID
        world.chain.mine(SPENDABLE_AGE)
        assert (await world.node.submit(made.raw)).submission is MoneroSubmission.ACCEPTED

    in_world(story)


def test_payment_once_invalid_waits_to_be_offered_again() -> None:
    async def story(world: World) -> None:
        await world.fund(XMR)
        made = await world.prepared()
        await world.node.submit(made.raw)
        await world.relayed()
        world.chain.pop(2)
        world.chain.mine(5)
        (waiting,) = await world.node.pool()
        assert (waiting.txid, waiting.abandoned) == (made.txid, True)
        await world.node.flush_pool([made.txid])
        assert (await world.node.submit(made.raw)).submission is MoneroSubmission.ACCEPTED
        await world.relayed()
        world.chain.mine()
        assert await world.node.pool() == []

    in_world(story)


def test_restarted_node_keeps_what_it_has_not_relayed_to_itself() -> None:
    async def story(world: World) -> None:
        await world.fund(XMR)
        made = await world.prepared()
        await world.node.submit(made.raw)
        world.daemon.restart()
        await world.relayed()
        world.chain.mine(3)
        (waiting,) = await world.node.pool()
        assert not waiting.relayed
        await world.node.relay([made.txid])
        world.chain.mine()
        assert await world.node.pool() == []

    in_world(story)


def test_frozen_and_swept_outputs() -> None:
    async def story(world: World) -> None:
        await world.fund(XMR, XMR)
        first, second = await world.wallet.outputs(OutputFilter.ALL)
        await world.wallet.freeze(first.key_image)
        assert (await world.prepared()).key_images == (second.key_image,)
        with pytest.raises(NodeError) as short:
            await world.prepared(3 * XMR)
        assert short.value.code == WalletCode.NOT_ENOUGH_MONEY
        await world.wallet.thaw(first.key_image)
        swept = await world.wallet.prepare_sweep(first.key_image, PAYEE)
        assert (swept.key_images, swept.amount) == ((first.key_image,), XMR - swept.fee)

    in_world(story)


def test_double_spend_of_a_payer_takes_the_deposit_away() -> None:
    async def story(world: World) -> None:
        made = world.chain.pay([Paid(address_of(0), XMR)])
        world.chain.mine()
        world.chain.doomed[made.txid] = None
        world.chain.pop(1)
        world.chain.pay([Paid(PAYEE, XMR)], made.images[0])
        world.chain.mine(2)
        assert await world.node.transactions([made.txid]) == {}
        await world.wallet.refresh()
        assert await world.wallet.transfers(0) == []
        late = await world.node.submit(made.raw)
        assert late.submission is MoneroSubmission.DOUBLE_SPEND

    in_world(story)


@pytest.mark.parametrize("grows", [0.0, 1.0])
def test_node_that_keeps_a_branch_names_no_newest_block(grows: float) -> None:
    async def story(world: World) -> None:
        (at,) = await world.wallet.create_addresses(1)
        made = world.chain.pay([Paid(at.address, XMR)])
        world.chain.mine(3)
        before = await world.node.block_at(1)
        assert before is not None
        assert before.txids == (made.txid,)
        world.daemon.keep(share=1.0, grows=grows)
        world.chain.doomed[made.txid] = None
        world.chain.pop(3)
        other = world.chain.pay([Paid(at.address, 2 * XMR)])
        world.chain.mine(5)
        assert await world.node.block_at(1) == before
        assert (await world.node.transactions([made.txid]))[made.txid].height == 1
        assert (await world.node.transactions([other.txid]))[other.txid].in_pool
        await world.wallet.refresh()
        heights = {item.amount: item.height for item in await world.wallet.transfers(0)}
        assert heights == {XMR: 1, 2 * XMR: None}
        assert await world.wallet.height() == (6 if grows else 4)
        name = MonerodName(
            [world.daemon, MonerodModel(world.chain, "stagenet", random.Random(2))],
            random.Random(3),
        )
        nodes = [name.one({"method": "get_info"}) for _ in range(20)]
        tops = {node.call("get_info", {})["top_block_hash"] for node in nodes}
        assert tops == {world.chain.top.hash}
        nodes = [name.one({"method": "get_block"}) for _ in range(20)]
        found = {node.call("get_block", {"height": 1})["block_header"]["hash"] for node in nodes}
        assert found == {before.header.hash, world.chain.blocks[1].hash}
        world.daemon.follow()
        await world.wallet.refresh()
        assert [item.txid for item in await world.wallet.transfers(0)] == [other.txid]
        assert await world.node.transactions([made.txid]) == {}

    in_world(story)
