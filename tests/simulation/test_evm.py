"""The model of an EVM chain, as the product's own client sees it."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Any, Final

import pytest
from msgspec.structs import replace

from rpcsvc.domain import usdc
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint
from rpcsvc.settlement.onchain.evm.keys import EvmSigner, TransactionPlan
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.evm.node_types import (
    EvmCall,
    EvmSubmission,
    LogFilter,
    Reverted,
    Tag,
)
from tests.simulation.daemons import Network
from tests.simulation.evm import GWEI, EvmChain, Holding
from tests.simulation.evm_node import EvmName, EvmNode
from tests.simulation.loop import new_loop

CHAIN_ID: Final = 421614
TOKEN: Final = usdc.read_address(bytes(12) + usdc.keccak256(b"token")[12:])
HOT, OWNER = EvmSigner(bytes([1] * 32)), EvmSigner(bytes([2] * 32))
PAYEE: Final = usdc.read_address(bytes(12) + usdc.keccak256(b"payee")[12:])
USDC: Final = 10**6

Story = Callable[[EvmClient, EvmChain, EvmNode], Awaitable[None]]


def on_chain(story: Story) -> None:
    """Run a story with a client of a node on a new chain."""
    loop, chance = new_loop(1), random.Random(1)
    holdings = {HOT.address: Holding(units=100 * USDC), OWNER.address: Holding(units=50 * USDC)}
    chain = EvmChain(CHAIN_ID, TOKEN, lambda: 1_700_000_000, chance, holdings)
    node, network = EvmNode(chain, chance), Network(loop, chance)
    node.relay_seconds = 0.0
    url = network.serve("evm", node)

    async def run() -> None:
        async with EvmClient(DaemonEndpoint("node", url)) as client:
            await story(client, chain, node)

    with network.carrying():
        loop.run_simulation(run())


def signed(nonce: int, data: bytes, *, max_fee: int = 3 * GWEI, gas: int = 200_000) -> bytes:
    plan = TransactionPlan(CHAIN_ID, nonce, TOKEN, gas, max_fee, GWEI // 10, data)
    return HOT.sign(plan).raw


async def balance(client: EvmClient, account: str, at: int | Tag = Tag.LATEST) -> int:
    return usdc.read_uint(await client.call(EvmCall(TOKEN, usdc.balance_of(account)), at))


def test_transfer_is_mined_with_its_event_and_fee() -> None:
    async def story(client: EvmClient, chain: EvmChain, _node: EvmNode) -> None:
        said = await client.submit(signed(0, usdc.transfer(PAYEE, 7 * USDC)))
        assert said.submission is EvmSubmission.ACCEPTED
        waiting = await client.transaction(said.txid)
        assert waiting is not None
        assert (waiting.sender, waiting.block_number) == (HOT.address, None)
        assert (await client.nonce(HOT.address), await client.nonce(HOT.address, Tag.LATEST)) == (
            1,
            0,
        )
        chain.mine()
        receipt = await client.receipt(said.txid)
        assert receipt is not None
        assert receipt.ok
        wanted = LogFilter(TOKEN, (usdc.TRANSFER_TOPIC, None, usdc.address_word(PAYEE)))
        (event,) = (await client.logs(wanted, 0, 1)).logs
        assert usdc.read_transfer(event.topics, event.data).units == 7 * USDC
        assert await balance(client, PAYEE) == 7 * USDC
        assert await balance(client, PAYEE, 0) == 0
        spent = 10**18 - await client.ether(HOT.address)
        assert spent == receipt.gas_used * receipt.gas_price

    on_chain(story)


def test_replacement_needs_a_higher_fee() -> None:
    async def story(client: EvmClient, chain: EvmChain, _node: EvmNode) -> None:
        data = usdc.transfer(PAYEE, 1)
        first = await client.submit(signed(0, data))
        again = await client.submit(signed(0, data))
        assert again.submission is EvmSubmission.KNOWN
        low = await client.submit(signed(0, usdc.transfer(PAYEE, 2)))
        assert low.submission is EvmSubmission.REPLACEMENT_UNDERPRICED
        plan = TransactionPlan(CHAIN_ID, 0, TOKEN, 200_000, 4 * GWEI, GWEI, data)
        higher = await client.submit(HOT.sign(plan).raw)
        assert higher.submission is EvmSubmission.ACCEPTED
        chain.mine()
        assert await client.receipt(first.txid) is None
        assert await client.receipt(higher.txid) is not None
        late = await client.submit(signed(0, data))
        assert late.submission is EvmSubmission.NONCE_TOO_LOW

    on_chain(story)


def test_reorganisation_brings_payments_back() -> None:
    async def story(client: EvmClient, chain: EvmChain, _node: EvmNode) -> None:
        kept = await client.submit(signed(0, usdc.transfer(PAYEE, 1)))
        gone = chain.send(OWNER.address, usdc.transfer(PAYEE, 2))
        chain.mine()
        old = await client.block(1)
        assert await balance(client, PAYEE) == 3
        made = chain.find(gone)
        assert made is not None
        chain.displace(made, 1)
        new = await client.block(1)
        assert old is not None
        assert new is not None
        assert old.hash != new.hash
        assert await balance(client, PAYEE) == 1
        assert await client.receipt(kept.txid) is not None
        assert await client.transaction(gone) is None
        assert chain.state.total("usdc") == 150 * USDC

    on_chain(story)


def test_node_loses_its_pool_and_keeps_what_it_takes_to_itself() -> None:
    async def story(client: EvmClient, chain: EvmChain, node: EvmNode) -> None:
        node.relays = False
        raw = signed(0, usdc.transfer(PAYEE, 1))
        said = await client.submit(raw)
        chain.mine()
        assert await client.transaction(said.txid) is not None
        assert await client.receipt(said.txid) is None
        node.restart()
        assert await client.transaction(said.txid) is None
        node.relays = True
        await client.submit(raw)
        await client.chain_id()
        chain.mine()
        assert await client.receipt(said.txid) is not None

    on_chain(story)


def block_of(name: EvmName, number: str) -> Any:
    call = ("eth_getBlockByNumber", [number, False])
    return name.one({"method": call[0], "params": call[1]}).call(*call)


def test_lagging_node_has_neither_block_nor_receipt() -> None:
    async def story(client: EvmClient, chain: EvmChain, node: EvmNode) -> None:
        said = await client.submit(signed(0, usdc.transfer(PAYEE, 1)))
        chain.mine()
        node.lag = 1
        head = await client.block()
        assert head is not None
        assert head.number == 0
        assert await client.block(1) is None
        assert await client.receipt(said.txid) is None
        name = EvmName([node, EvmNode(chain, random.Random(2))], random.Random(3))
        heads = {block_of(name, "latest")["number"] for _ in range(20)}
        assert heads == {"0x0", "0x1"}

    on_chain(story)


def test_node_that_keeps_a_branch_names_no_newest_block() -> None:
    async def story(client: EvmClient, chain: EvmChain, node: EvmNode) -> None:
        said = await client.submit(signed(0, usdc.transfer(PAYEE, 1)))
        before = chain.mine()
        node.keep(share=1.0)
        chain.forgotten = 1.0
        chain.reorganise(1)
        assert await client.block(1) is not None
        assert await client.receipt(said.txid) is not None
        name = EvmName([node, EvmNode(chain, random.Random(2))], random.Random(3))
        asked = {block_of(name, "0x1")["hash"] for _ in range(20)}
        assert asked == {before.hash, chain.blocks[1].hash}
        heads = {block_of(name, "latest")["hash"] for _ in range(20)}
        assert heads == {chain.top.hash}
        node.follow()
        assert await client.receipt(said.txid) is None

    on_chain(story)


def test_authorization_moves_the_owners_money_once() -> None:
    async def story(client: EvmClient, chain: EvmChain, _node: EvmNode) -> None:
        given = usdc.Authorization(OWNER.address, HOT.address, 5, 0, 2**40, bytes([9] * 32))
        signature = OWNER.sign_digest(usdc.receive_digest(chain.domain, given))
        data = usdc.receive_with_authorization(given, signature)
        assert await client.estimate_gas(EvmCall(TOKEN, data, HOT.address)) > 0
        await client.submit(signed(0, data))
        chain.mine()
        assert await balance(client, OWNER.address) == 50 * USDC - 5
        state = EvmCall(TOKEN, usdc.authorization_state(OWNER.address, given.nonce))
        assert usdc.read_bool(await client.call(state))
        with pytest.raises(Reverted, match="used"):
            await client.estimate_gas(EvmCall(TOKEN, data, HOT.address))
        other = replace(given, nonce=bytes(32))
        said = await client.submit(signed(1, usdc.receive_with_authorization(other, signature)))
        chain.mine()
        receipt = await client.receipt(said.txid)
        assert receipt is not None
        assert not receipt.ok
        assert await balance(client, OWNER.address) == 50 * USDC - 5

    on_chain(story)


def test_paused_token_and_blacklisted_account_move_nothing() -> None:
    async def story(client: EvmClient, chain: EvmChain, _node: EvmNode) -> None:
        for key in (("paused", ""), ("blacklisted", PAYEE.lower())):
            chain.state.set(key, 1, chain.top)
            call = EvmCall(TOKEN, usdc.transfer(PAYEE, 1), HOT.address)
            with pytest.raises(Reverted):
                await client.estimate_gas(call)
            chain.state.set(key, 0, chain.top)

    on_chain(story)
