"""A node counts as checked only if no call failed meanwhile: another may have taken over."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rpcsvc.domain import usdc
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.daemon_rpc import (
    DaemonEndpoint,
    NodeError,
    NotSent,
    Resting,
    TooManyCalls,
)
from rpcsvc.settlement.onchain.evm.node import EvmClient, EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import Block, EvmCall, Tag
from rpcsvc.settlement.onchain.thresholds import DepthTag, Threshold
from tests.chain_options import evm_network

TOKEN = "0xaf88d065e77c8cC2239327C5EDb3A432268e5831"
HEAD = Block(7, "0x" + "07" * 32, "0x" + "06" * 32, 1_800_000_000, 1)
DOMAIN = usdc.Domain("USD Coin", "2", 42161, TOKEN)


def text(value: str) -> bytes:
    """A string as a contract returns it (ABI)."""
    data = value.encode()
    return usdc.uint_word(32) + usdc.uint_word(len(data)) + data.ljust(32, b"\0")


ANSWERS = {
    usdc.DECIMALS: usdc.uint_word(6),
    usdc.NAME: text("USD Coin"),
    usdc.VERSION: text("2"),
    usdc.DOMAIN_SEPARATOR: DOMAIN.separator(),
    usdc.PAUSED: usdc.uint_word(0),
}


class Node(EvmClient):
    """A node with a scripted newest block."""

    def __init__(self) -> None:
        super().__init__(DaemonEndpoint("node", "http://127.0.0.1:1"))
        self.chain, self.head = 42161, HEAD
        self.answers = asyncio.Event()
        self.answers.set()
        self.was_asked = asyncio.Event()
        self.refused: set[Tag] = set()
        self.lacked: set[Tag] = set()

    async def chain_id(self) -> int:
        return self.chain

    async def code(self, address: str, at: Any = Tag.LATEST) -> bytes:
        assert (address, at) == (TOKEN, Tag.LATEST)
        return b"\x01"

    async def block(self, at: Any = Tag.LATEST) -> Block | None:
        if at is not Tag.LATEST:
            return self._tagged(at)
        self.was_asked.set()
        await self.answers.wait()
        return self.head

    def _tagged(self, tag: Tag) -> Block | None:
        if tag in self.refused:
            raise NodeError("node", "eth_getBlockByNumber", -39001, "Unknown block")
        return None if tag in self.lacked else self.head

    async def call(self, call: EvmCall, at: Any = Tag.LATEST) -> bytes:
        assert at is Tag.LATEST
        return ANSWERS[call.data]


def fail(connection: EvmConnection) -> None:
    """Have another call fail on a dead node."""
    with pytest.raises(Unavailable), connection.watched():
        raise NotSent("node", "eth_call", "not reached")


@pytest.mark.parametrize("how", ["refused", "lacked"])
async def test_node_without_the_tag_of_deposits_is_unusable(how: str) -> None:
    node = Node()
    getattr(node, how).add(Tag.FINALIZED)
    await EvmConnection(node, evm_network("arbitrum", 42161, TOKEN)).check()
    tiers = (Threshold(0, 1), Threshold(9, DepthTag.FINALIZED))
    connection = EvmConnection(node, evm_network("arbitrum", 42161, TOKEN, thresholds=tiers))
    with pytest.raises(Unavailable), connection.watched():
        await connection.check()
    assert "the node of arbitrum names no block of the tag finalized" in str(connection.problem)
    getattr(node, how).clear()
    await connection.check()


async def test_check_begun_before_a_failure_does_not_clear_it() -> None:
    node = Node()
    connection = EvmConnection(node, evm_network("arbitrum", 42161, TOKEN))
    await connection.check()
    node.answers.clear()
    node.was_asked.clear()
    early = asyncio.create_task(connection.check())
    await node.was_asked.wait()
    fail(connection)
    node.chain = 1
    node.answers.set()

    with pytest.raises(Unavailable):
        await early

    assert connection.problem is not None
    with pytest.raises(Unavailable), connection.watched():
        await connection.check()
    assert "wrong network: the node of arbitrum is on chain 1" in connection.problem


async def test_a_check_after_the_failure_makes_it_right_again() -> None:
    connection = EvmConnection(Node(), evm_network("arbitrum", 42161, TOKEN))
    await connection.check()
    fail(connection)
    assert await connection.check() == HEAD
    assert connection.problem is None


async def test_node_that_asks_for_fewer_calls_is_checked_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    connection = EvmConnection(Node(), evm_network("arbitrum", 42161, TOKEN))
    await connection.check()
    for failure in (TooManyCalls("node", "any", "HTTP status 429"), Resting("node", "any", "")):
        with pytest.raises(Unavailable), connection.watched():
            raise failure
        assert "the node of arbitrum asks for fewer calls" in str(connection.problem)

    async def asked_again() -> int:
        raise AssertionError("the chain was checked before")

    monkeypatch.setattr(connection.client, "chain_id", asked_again)
    assert await connection.check() == HEAD
    assert connection.problem is None


async def test_stalled_chain_is_reported_though_its_node_answers() -> None:
    node, now = Node(), [0]
    connection = EvmConnection(node, evm_network("arbitrum", 42161, TOKEN, block_seconds=12.0))
    connection._stall_detector._steady = lambda: now[0]
    assert (connection.stall(), connection.block_age()) == (None, None), "nobody has looked"
    assert connection.height() is None
    await connection.check()
    now[0] = 20 * 60_000 - 1
    await connection.check()
    assert connection.block_age() == now[0]
    assert (connection.problem, connection.stall()) == (None, None)
    now[0] += 1
    await connection.check()
    assert connection.stall() == "the node of arbitrum has shown no new block for 20 minutes"
    node.head = replace(HEAD, number=6)  # another node of a load balancer, lagging more
    await connection.check()
    assert connection.stall() is not None
    assert connection.height() == 6
    node.head = replace(HEAD, number=8)
    await connection.check()
    assert connection.stall() is None
