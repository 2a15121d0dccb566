"""The token's blacklist is asked before an order, within a bounded time."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from rpcsvc.domain import usdc
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint, NodeError, TimedOut
from rpcsvc.settlement.onchain.evm.adapter import KEPT_MS, WAIT_SECONDS, Blacklist
from rpcsvc.settlement.onchain.evm.node import EvmClient, EvmConnection
from rpcsvc.settlement.onchain.evm.node_types import EvmCall, Reverted, Tag
from tests.chain_options import evm_network
from tests.logs import logs_of

TOKEN = "0x0b2C639c533813f4Aa9D7837CAf62653d097Ff85"
LISTED = "0x833589fCD6eDb6E08f4c7C32D4f71b54bdA02913"
OTHER = "0x52908400098527886E0F7030069857D2E4169EE7"


class Node(EvmClient):
    """Lists one address; ``problem`` is raised instead, ``hangs`` never answers."""

    def __init__(self) -> None:
        super().__init__(DaemonEndpoint("node", "http://127.0.0.1:1"))
        self.problem: Exception | None = None
        self.hangs = False
        self.asked = 0

    async def call(self, call: EvmCall, at: Any = Tag.LATEST) -> bytes:
        self.asked += 1
        if self.hangs:
            await asyncio.Event().wait()
        if self.problem is not None:
            raise self.problem
        return usdc.uint_word(int(call.data == usdc.is_blacklisted(LISTED)))


class Clock:
    now = 0

    def __call__(self) -> int:
        return self.now


def blacklist(node: Node, clock: Clock) -> Blacklist:
    return Blacklist(EvmConnection(node, evm_network("optimism", 10, TOKEN)), clock)


async def test_listed_address_is_reported_and_cached() -> None:
    node, clock = Node(), Clock()
    found = blacklist(node, clock)
    for address in (LISTED, LISTED.lower()):
        assert await found.has(address)
    assert not await found.has(OTHER)
    assert node.asked == 2
    clock.now = KEPT_MS
    node.problem = TimedOut("node", "eth_call", "no answer in time")
    assert not await found.has(LISTED)
    node.problem = None
    assert await found.has(LISTED), "what was not answered is not remembered"


async def test_a_node_that_hangs_keeps_no_order_for_long() -> None:
    node = Node()
    node.hangs = True
    began = time.monotonic()
    with logs_of("rpcsvc.settlement.onchain.evm.adapter") as lines:
        assert not await blacklist(node, Clock()).has(LISTED)
    assert WAIT_SECONDS * 0.9 < time.monotonic() - began < 5
    (line,) = [line for line in lines if line["event"] == "blacklist_check_failed"]
    assert line["network"] == "optimism"


async def test_a_token_without_a_blacklist_is_asked_once() -> None:
    node = Node()
    node.problem = Reverted(NodeError("node", "eth_call", 3, "execution reverted"))
    found = blacklist(node, Clock())
    for _ in range(3):
        assert not await found.has(LISTED)
    assert node.asked == 1
