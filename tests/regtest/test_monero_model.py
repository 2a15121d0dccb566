"""The simulation's models of monerod and its wallet answer what the real daemons answer.

One script is played on both; an answer that differs is a fault of the model. Transactions,
addresses and key images are named by their order, heights count from the first block. Fees are left
out: the model's are flat.
"""

from __future__ import annotations

import asyncio
import random
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Iterable
from contextlib import AsyncExitStack
from typing import Any, Final

import pytest

from rpcsvc.domain.addresses import stagenet_subaddress
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint, NodeError
from rpcsvc.settlement.onchain.monero.monerod import MonerodClient
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import (
    Destination,
    Output,
    OutputFilter,
    PreparedPayment,
    WalletTransfer,
    WalletTransferKind,
)
from tests.regtest.daemons import (
    WALLET_NAME,
    WALLET_PASSWORD,
    Miner,
    Monerod,
    WalletRpc,
    kill_and_reopen,
    new_wallet,
    pop_blocks,
    run_apart,
)
from tests.simulation.daemons import Network
from tests.simulation.loop import new_loop
from tests.simulation.monero import SPENDABLE_AGE, MoneroChain, MonerodModel, Paid
from tests.simulation.monero_wallet import WalletModel

pytestmark = pytest.mark.slow

XMR: Final = 10**12
NOWHERE: Final = "ab" * 32
KINDS: Final = tuple(WalletTransferKind)
SPENT: Final = (WalletTransferKind.OUTGOING, WalletTransferKind.PENDING)


class Stage(ABC):
    """A chain whose blocks come on command, its node, and an empty wallet. ``payee``: foreign."""

    def __init__(self, node: MonerodClient, wallet: WalletClient, payee: str) -> None:
        self.node = node
        self.wallet = wallet
        self.payee = payee

    @abstractmethod
    async def mine(self, blocks: int = 1) -> None:
        """Let what waits be broadcast, and add blocks; the first has it."""

    @abstractmethod
    async def pop(self, blocks: int) -> None:
        """Take the newest blocks off the chain."""

    @abstractmethod
    async def give(self, address: str, *amounts: int) -> str:
        """Have somebody pay, and leave it in the pool; the transaction id."""

    @abstractmethod
    async def kill(self) -> None:
        """Kill the wallet's daemon, and open the wallet from its file."""


class ModelStage(Stage):
    """The models."""

    def __init__(
        self, daemon: MonerodModel, rpc: WalletModel, node: MonerodClient, wallet: WalletClient
    ) -> None:
        super().__init__(node, wallet, stagenet_subaddress(bytes([7] * 64)))
        self._daemon = daemon
        self._rpc = rpc

    async def mine(self, blocks: int = 1) -> None:
        await asyncio.sleep(self._daemon.stem_seconds)
        self._daemon.chain.mine(blocks)

    async def pop(self, blocks: int) -> None:
        self._daemon.chain.pop(blocks)

    async def give(self, address: str, *amounts: int) -> str:
        return self._daemon.chain.pay([Paid(address, amount) for amount in amounts]).txid

    async def kill(self) -> None:
        self._rpc.restart()
        await self.wallet.open(WALLET_NAME, "")


class RealStage(Stage):
    """The daemons."""

    def __init__(
        self, miner: Miner, rpc: WalletRpc, node: MonerodClient, wallet: WalletClient, payee: str
    ) -> None:
        super().__init__(node, wallet, payee)
        self._miner = miner
        self._rpc = rpc

    async def mine(self, blocks: int = 1) -> None:
        await self._miner.mine(blocks)

    async def pop(self, blocks: int) -> None:
        await pop_blocks(self.node, blocks)

    async def give(self, address: str, *amounts: int) -> str:
        return await self._miner.pay(address, *amounts)

    async def kill(self) -> None:
        await kill_and_reopen(self._rpc, self.wallet)


class Script:
    """Questions for a stage, and what it said."""

    def __init__(self, stage: Stage, first: int) -> None:
        self.node, self.wallet = stage.node, stage.wallet
        self._stage = stage
        self._first = first
        self._names: dict[str, int] = {}
        self.said: list[tuple[str, Any]] = []

    def note(self, what: str, answer: Any) -> None:
        """Note an answer."""
        self.said.append((what, answer))

    async def ask(self, what: str, answer: Awaitable[Any]) -> None:
        """Note an answer, or the code of its refusal."""
        try:
            self.note(what, await answer)
        except NodeError as error:
            self.note(what, f"refused with {error.code}")

    def name(self, known: str) -> int:
        """Return the number of a transaction or key image, by its first use."""
        return self._names.setdefault(known, len(self._names))

    async def prepared(self, units: int) -> PreparedPayment:
        """Sign a payment to the payee; its outputs are named."""
        made = await self.wallet.prepare([Destination(self._stage.payee, units)])
        self.note("prepared", (made.amount, [self.name(image) for image in made.key_images]))
        return made

    async def look_at(self, what: str, *made: PreparedPayment) -> None:
        """Note what node and wallet say before the wallet has refreshed, and after."""
        await self._look(what, made)
        await self.wallet.refresh()
        await self._look(f"{what}, refreshed", made)

    async def _look(self, what: str, made: Iterable[PreparedPayment]) -> None:
        for payment in made:
            self.note(what, await self.node_of(payment))
            entries = await self.wallet.transfer(payment.txid)
            self.note(what, [self._entry(item) for item in entries])
            await self.ask(what, self._received(payment))
            await self.ask(what, self._is_known_key(payment))
        pool = {item.txid: item.double_spend_seen for item in await self.node.pool()}
        self.note(what, sorted((self.name(txid), seen) for txid, seen in pool.items()))
        self.note(what, (await self.node.info()).height - self._first)
        self.note(what, await self.wallet.height() - self._first)
        listed = await self.wallet.transfers(self._first, KINDS)
        self.note(what, sorted(self._entry(item) for item in listed))
        for which in OutputFilter:
            outputs = await self.wallet.outputs(which)
            self.note(what, sorted(self._output(item) for item in outputs))
        fees = sum(item.fee for item in listed if item.kind in SPENT)
        held = await self.wallet.balance()
        self.note(what, (held.total + fees, held.blocks_to_unlock))
        total, address = await self.wallet.total()
        self.note(what, (total + fees, self.name(address)))

    async def node_of(self, made: PreparedPayment) -> Any:
        """Return the node's answers on a payment and its inputs."""
        images = await self.node.key_images(made.key_images)
        states = [state.name for state in images.values()]
        found = (await self.node.transactions([made.txid])).get(made.txid)
        if found is None:
            return states
        body = await self.node.transaction_bytes(made.txid)
        assert body is not None
        assert (body.raw, body.key_images) == (made.raw, made.key_images)
        if found.height is None:
            return (states, found.in_pool, found.double_spend_seen)
        block, info = await self.node.block_at(found.height), await self.node.info()
        above = await self.node.headers(found.height, info.height - 1)
        assert block is not None
        assert (above[0], above[-1].hash) == (block.header, info.top_hash)
        assert [each.previous for each in above[1:]] == [each.hash for each in above[:-1]]
        height = found.height - self._first
        return (states, found.double_spend_seen, height, len(above), made.txid in block.txids)

    async def _received(self, made: PreparedPayment) -> Any:
        check = await self.wallet.check_key(made.txid, made.tx_key, self._stage.payee)
        return (check.received, check.in_pool, check.confirmations)

    async def _is_known_key(self, made: PreparedPayment) -> bool:
        return await self.wallet.tx_key(made.txid) == made.tx_key

    async def submit(self, what: str, raw: str) -> None:
        """Publish a transaction through the node, and note its answer."""
        self.note(what, (await self.node.submit(raw)).submission.value)

    async def look_lost(self, what: str, made: PreparedPayment) -> None:
        """Note what is known of a payment that no pool has, over three refreshes."""
        for _ in range(3):
            await self.wallet.refresh()
            self.note(what, await self.node_of(made))
            listed = await self.wallet.transfer(made.txid)
            self.note(what, [self._entry(item) for item in listed])
            outputs = await self.wallet.outputs()
            self.note(what, sorted(self._output(item) for item in outputs))

    def _entry(self, item: WalletTransfer) -> Any:
        height = -1 if item.height is None else item.height - self._first
        return (
            item.kind.value, self.name(item.txid), tuple(item.index), item.amount, height,
            item.confirmations, item.unlock_time, item.locked, item.double_spend_seen,
        )  # fmt: skip

    def _output(self, item: Output) -> Any:
        is_change = item.amount % (XMR // 1000) != 0
        return (
            tuple(item.index), 0 if is_change else item.amount, item.spent, item.unlocked,
            item.frozen, item.height - self._first,
        )  # fmt: skip


async def play(stage: Stage) -> list[tuple[str, Any]]:
    """Play all scenes one after the other; what was said."""
    await stage.wallet.refresh()
    script = Script(stage, (await stage.node.info()).height)
    await deposits(script, stage)
    await payment(script, stage)
    await double_spends(script, stage)
    await forgetting(script, stage)
    await popped_blocks(script, stage)
    await lost_payment(script, stage)
    await refusals(script, stage)
    return script.said


async def unlocked(stage: Stage) -> None:
    """Mine until change can be spent, and have the wallet know and keep it."""
    await stage.mine(SPENDABLE_AGE)
    await stage.wallet.refresh()
    await stage.wallet.store()


async def deposits(script: Script, stage: Stage) -> None:
    """Money comes to two addresses by one transaction and another: pooled, mined, unlocked."""
    made = await stage.wallet.create_addresses(2)
    script.note("addresses", [item.index for item in made])
    listed = await stage.wallet.addresses([item.index.minor for item in made])
    script.note("the same", listed == made)
    for item in made:
        await script.ask("index", stage.wallet.index_of(item.address))
    await script.ask("foreign", stage.wallet.index_of(stage.payee))
    await script.look_at("nothing")
    script.name(await stage.give(made[0].address, XMR, XMR))
    await script.look_at("pooled")
    await stage.mine()
    await script.look_at("mined")
    script.name(await stage.give(made[1].address, 2 * XMR))
    await stage.mine()
    await script.look_at("two")
    txid = await stage.give(made[1].address, 2 * XMR)
    script.name(txid)
    await stage.wallet.refresh()
    await stage.node.flush_pool([txid])
    await script.look_at("flushed")
    await stage.mine()
    await script.look_at("flushed, a block later")
    for blocks in (SPENDABLE_AGE - 4, 1, 1, 1):
        await stage.mine(blocks)
        await script.look_at("older")
    await stage.wallet.store()


async def payment(script: Script, stage: Stage) -> None:
    """A payment is signed, relayed, mined and proven."""
    made = await script.prepared(2 * XMR + XMR // 2)
    script.note("unpublished", await script.node_of(made))
    await script.look_at("unpublished")
    await stage.wallet.relay(made.metadata)
    await script.look_at("relayed", made)
    await stage.mine()
    await script.look_at("paid", made)
    proof = await stage.wallet.prove_payment(made.txid, stage.payee, "one")
    for message in ("one", "two"):
        check = await stage.wallet.check_proof(made.txid, stage.payee, proof, message)
        script.note("proof", (check.valid, check.received if check.valid else None))
    await stage.mine(SPENDABLE_AGE)
    await script.look_at("change", made)
    await stage.wallet.store()


async def double_spends(script: Script, stage: Stage) -> None:
    """The first of two payments of the same inputs is taken."""
    first, second = await script.prepared(XMR // 10), await script.prepared(XMR // 5)
    await script.submit("first", first.raw)
    await script.submit("second", second.raw)
    await script.submit("garbage", "00")
    await script.look_at("submitted", first)
    await stage.mine()
    await script.submit("first, mined", first.raw)
    await script.submit("second, mined", second.raw)
    script.note("second", await script.node_of(second))
    await stage.wallet.refresh()
    listed = await stage.wallet.transfer(first.txid)
    script.note("of another wallet file", [(item.kind.value, item.amount) for item in listed])
    await unlocked(stage)


async def forgetting(script: Script, stage: Stage) -> None:
    """A wallet that was killed knows what it stored, and what the chain tells."""
    (address,) = await stage.wallet.create_addresses(1)
    made = await script.prepared(XMR // 10)
    await stage.wallet.relay(made.metadata)
    await stage.kill()
    script.note("again", await stage.wallet.create_addresses(1) == [address])
    await stage.wallet.store()
    await script.look_at("forgotten", made)
    await stage.mine()
    await script.look_at("mined", made)
    await unlocked(stage)


async def popped_blocks(script: Script, stage: Stage) -> None:
    """A payment whose block is taken off waits again; the wallet learns it with the next block."""
    made = await script.prepared(XMR // 10)
    await stage.wallet.relay(made.metadata)
    await stage.mine()
    await script.look_at("mined", made)
    await stage.pop(1)
    await script.look_at("popped", made)
    await stage.mine(2)
    await script.look_at("mined again", made)
    await unlocked(stage)


async def lost_payment(script: Script, stage: Stage) -> None:
    """A wallet hopes for a payment that the pool lost, for some minutes."""
    made = await script.prepared(XMR // 10)
    await stage.wallet.relay(made.metadata)
    await stage.wallet.refresh()
    await stage.node.flush_pool([made.txid])
    await script.look_lost("flushed", made)
    await stage.mine()
    await script.look_lost("flushed, a block later", made)
    await script.submit("flushed", made.raw)
    await stage.mine()
    await script.look_at("mined after all", made)
    await unlocked(stage)


async def refusals(script: Script, stage: Stage) -> None:
    """The wallet says why it can't."""
    wallet = stage.wallet
    await script.ask("too much", wallet.prepare([Destination(stage.payee, 100 * XMR)]))
    await script.ask("no address", wallet.prepare([Destination("4" + "A" * 94, 1)]))
    await script.ask("unknown", wallet.transfer(NOWHERE))
    await script.ask("no key", wallet.tx_key(NOWHERE))
    await script.ask("no proof", wallet.prove_payment(NOWHERE, stage.payee))
    await script.ask("beyond", wallet.addresses([999]))
    held = await wallet.outputs()
    for output in held:
        await wallet.freeze(output.key_image)
    await script.ask("frozen", wallet.prepare([Destination(stage.payee, 1)]))
    script.note("frozen", (await wallet.balance()).total)
    for output in held:
        await wallet.thaw(output.key_image)
    await script.ask("no image", wallet.freeze(NOWHERE))
    height = (await stage.node.info()).height
    await script.ask("beyond the top", stage.node.header_at(height))
    await script.ask("beyond the top", stage.node.block_at(height))
    await script.ask("beyond the top", stage.node.headers(height - 1, height))
    await script.prepared(XMR // 10)
    await wallet.close()
    await script.ask("closed", wallet.height())
    await script.ask("no file", wallet.open("nothing", WALLET_PASSWORD))


def on_model() -> list[tuple[str, Any]]:
    """Play on the models."""
    loop, chance = new_loop(1), random.Random(1)
    chain = MoneroChain(lambda: 1_700_000_000 + int(loop.time()), chance)
    daemon, network = MonerodModel(chain, "stagenet", chance), Network(loop, chance)
    rpc = WalletModel(daemon, chance)
    at = DaemonEndpoint("node", network.serve("monerod", daemon))
    wallet_at = DaemonEndpoint("wallet", network.serve("wallet", rpc), serial=True)

    async def run() -> list[tuple[str, Any]]:
        async with MonerodClient(at) as node, WalletClient(wallet_at) as wallet:
            await wallet.open(WALLET_NAME, "")
            return await play(ModelStage(daemon, rpc, node, wallet))

    with network.carrying():
        return loop.run_simulation(run())


async def on_daemons(monerod: Monerod, miner: Miner, rpc: WalletRpc) -> list[tuple[str, Any]]:
    """Play on the daemons, with a new wallet."""
    await new_wallet(rpc)
    async with AsyncExitStack() as stack:
        bank = await stack.enter_async_context(WalletClient(miner.bank.endpoint))
        node = await stack.enter_async_context(MonerodClient(monerod.endpoint))
        wallet = await stack.enter_async_context(WalletClient(rpc.endpoint))
        return await play(RealStage(miner, rpc, node, wallet, await bank.primary_address()))


def test_models_of_monerod_and_wallet_answer_as_the_daemons(
    monerod: Monerod, miner: Miner, wallet_rpc: WalletRpc
) -> None:
    real, modelled = run_apart(on_daemons(monerod, miner, wallet_rpc)), on_model()
    assert [pair for pair in zip(modelled, real, strict=True) if pair[0] != pair[1]] == []
