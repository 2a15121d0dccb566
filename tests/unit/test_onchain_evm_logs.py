"""The events of a range of blocks: which node listed them, and how far it is shown to be."""

from __future__ import annotations

from typing import Any

import pytest

from rpcsvc.domain import usdc
from rpcsvc.settlement.onchain.daemon_rpc import (
    BadAnswer,
    BatchRefused,
    Call,
    DaemonEndpoint,
    NodeError,
)
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.evm.node_types import LogFilter
from rpcsvc.settlement.onchain.evm.records import BlockPoint
from tests.unit.evm_chain import TOKEN

WANTED = LogFilter(TOKEN, (usdc.TRANSFER_TOPIC,))
HASH, OTHER = "0x" + "a1" * 32, "0x" + "b2" * 32
REFUSAL = NodeError("node", "any", -32600, "no batches")


def block(number: int, given: str = HASH) -> dict[str, str]:
    return {"number": hex(number), "hash": given, "parentHash": OTHER, "timestamp": "0x1"}


def event(number: int, given: str = HASH) -> dict[str, Any]:
    return {
        "address": TOKEN, "topics": [], "data": "0x", "transactionHash": OTHER,
        "blockNumber": hex(number), "blockHash": given, "logIndex": "0x0",
    }  # fmt: skip


class Rpc:
    """A node with scripted answers. ``asked``: what was sent to it, by exchange."""

    endpoint = DaemonEndpoint("node", "http://127.0.0.1:1")

    def __init__(
        self, found: Any, events: Any, refusal: Exception | None = None, *, before: Any = None
    ) -> None:
        self._answers, self._refusal = [found, before, events], refusal
        self.alone: Any = {"eth_getBlockByNumber": found, "eth_getLogs": events}
        self.asked: list[list[str]] = []

    async def read_all(self, calls: list[Call]) -> list[Any]:
        self.asked.append([method for method, _ in calls])
        if self._refusal is not None:
            raise self._refusal
        return self._answers if len(calls) == len(self._answers) else self._answers[::2]

    async def read(self, method: str, _params: Any) -> Any:
        self.asked.append([method])
        return self.alone[method]


async def proven(rpc: Any) -> BlockPoint | None:
    client = EvmClient(Rpc.endpoint)
    client.rpc = rpc
    return (await client.logs(WANTED, 5, 9)).proven


async def test_events_and_the_last_block_are_one_batch() -> None:
    rpc = Rpc(block(9), [])
    assert await proven(rpc) == BlockPoint(9, HASH)
    assert rpc.asked == [["eth_getBlockByNumber", "eth_getLogs"]]


@pytest.mark.parametrize(
    ("before", "follows"), [(block(4), True), (block(4, OTHER), False), (None, None)]
)
async def test_block_before_a_range_is_compared_in_its_batch(
    before: Any, *, follows: bool | None
) -> None:
    client, rpc = EvmClient(Rpc.endpoint), Rpc(block(9), [], before=before)
    client.rpc = rpc  # type: ignore[assignment]
    found = await client.logs(WANTED, 5, 9, BlockPoint(4, HASH))
    assert found.follows is follows
    assert found.proven == (BlockPoint(9, HASH) if follows else None)
    assert rpc.asked == [["eth_getBlockByNumber", "eth_getBlockByNumber", "eth_getLogs"]]


async def test_node_without_the_last_block_is_at_its_newest_event() -> None:
    assert await proven(Rpc(None, [])) is None
    assert await proven(Rpc(None, [event(7), event(6)])) == BlockPoint(7, HASH)


async def test_event_of_another_last_block_proves_nothing() -> None:
    assert await proven(Rpc(block(9), [event(9, OTHER)])) is None
    assert await proven(Rpc(block(9), [event(9)])) == BlockPoint(9, HASH)


async def test_node_without_batches_is_asked_for_the_block_first() -> None:
    rpc = Rpc(block(9), [], BatchRefused("node", "any", "no batches"))
    assert await proven(rpc) == BlockPoint(9, HASH)
    assert rpc.asked[1:] == [["eth_getBlockByNumber"], ["eth_getLogs"]]


async def test_block_refused_in_a_batch_is_asked_for_alone() -> None:
    rpc = Rpc(REFUSAL, REFUSAL)
    rpc.alone = {"eth_getBlockByNumber": None, "eth_getLogs": [event(6)]}
    assert await proven(rpc) == BlockPoint(6, HASH)


async def test_refused_listing_is_the_nodes_error() -> None:
    with pytest.raises(NodeError, match="no batches"):
        await proven(Rpc(block(9), REFUSAL))


async def test_another_block_than_asked_for_is_garbage() -> None:
    with pytest.raises(BadAnswer, match="is not block 9"):
        await proven(Rpc(block(8), []))
