"""What the XMR side makes of a node that answers and does not go on."""

from __future__ import annotations

from typing import Any, cast

import pytest

from rpcsvc.settlement.onchain.monero.ledger import MoneroOptions
from rpcsvc.settlement.onchain.monero.link import MoneroLink
from rpcsvc.settlement.onchain.monero.monerod import NodeInfo
from rpcsvc.settlement.onchain.unusable import SideUnusable

GAP_MS = 40 * 60_000


class Node:
    """A node that calls itself in step, whatever its peers have."""

    def __init__(self, nettype: str) -> None:
        self.nettype, self.height = nettype, 3_000_000

    async def info(self) -> NodeInfo:
        return NodeInfo(self.height, "top", self.nettype, True, False, False, 0, 0, "0.18")


@pytest.mark.parametrize("nettype", ["mainnet", "fakechain"])
async def test_a_chain_that_stands_still_is_told_though_its_node_calls_itself_in_step(
    nettype: str,
) -> None:
    """Blocks of a regtest chain come when they are told to."""
    node, now = Node(nettype), [0]
    options = MoneroOptions(nettype=nettype)
    nobody = cast("Any", None)
    link = MoneroLink(cast("Any", node), nobody, nobody, options)
    link._standstill._steady = lambda: now[0]
    for now[0] in (0, GAP_MS - 1):
        await link.check_node()
        assert link.standstill() is None
    now[0] = GAP_MS
    await link.check_node()
    told = "the Monero node has shown no new block for 40 minutes"
    assert link.standstill() == (told if nettype == "mainnet" else None)
    node.height += 1
    await link.check_node()
    assert link.standstill() is None
    node.nettype = "testnet"
    with pytest.raises(SideUnusable):
        await link.check_node()
