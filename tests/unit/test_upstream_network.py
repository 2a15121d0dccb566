"""Which answers of an upstream about its network permit an order."""

from __future__ import annotations

from typing import cast

import pytest

from rpcsvc.domain.addresses import MoneroNetwork
from rpcsvc.errors import Unavailable
from rpcsvc.settlement.upstream.answers import Capabilities
from rpcsvc.settlement.upstream.calls import Upstream
from rpcsvc.settlement.upstream.limits import Demand, Urgency
from rpcsvc.settlement.upstream.offered import NetworkCheck
from rpcsvc.settlement.upstream.transport import NeverSent


class UpstreamStub:
    """Reports its network; None: no connection."""

    def __init__(self, network: str | None) -> None:
        self.network = network
        self.asked: list[Urgency] = []

    async def capabilities(self, demand: Demand, *, total_ms: int | None = None) -> Capabilities:
        assert total_ms is None
        self.asked.append(demand.urgency)
        if self.network is None:
            raise NeverSent("no connection")
        return Capabilities.model_validate({"data": {"network": self.network}}, context=b"")


def check_of(stub: UpstreamStub, ours: str = "mainnet") -> NetworkCheck:
    return NetworkCheck(cast("Upstream", stub), MoneroNetwork(ours))


@pytest.mark.parametrize(
    ("reported", "ours", "is_same"),
    [
        ("mainnet", "mainnet", True),
        ("sandbox", "stagenet", True),
        ("stagenet", "stagenet", True),
        ("testnet", "testnet", True),
        ("sandbox", "mainnet", False),
        ("stagenet", "mainnet", False),
        ("mainnet", "stagenet", False),
        ("sandbox", "testnet", False),
        # Regtest has the addresses of mainnet, without real money.
        ("regtest", "mainnet", False),
        ("Mainnet", "mainnet", False),
    ],
)
async def test_orders_pass_only_where_the_networks_are_the_same(
    reported: str, ours: str, is_same: bool
) -> None:
    check = check_of(UpstreamStub(reported), ours)
    assert not check.health().ok
    with pytest.raises(Unavailable):
        check.require_same()
    assert await check.ask(Demand())
    health = check.health()
    assert health.ok is is_same
    if is_same:
        await check.require_same_now()
        return
    assert f"settles on {reported}, and upstream.monero_network is {ours}" in (health.detail or "")
    for_now, for_orders = check.require_same, check.require_same_now
    with pytest.raises(Unavailable, match="another network"):
        for_now()
    with pytest.raises(Unavailable, match="another network"):
        await for_orders()


async def test_each_order_asks_and_an_earlier_answer_lets_none_through() -> None:
    stub = UpstreamStub("mainnet")
    check = check_of(stub)
    await check.require_same_now()
    await check.require_same_now()
    assert stub.asked == [Urgency.CREATION] * 2
    stub.network = None
    with pytest.raises(Unavailable, match="does not report its network now"):
        await check.require_same_now()
    # Quotes still pass: the check before each order is the strict one.
    check.require_same()
    stub.network = "sandbox"
    with pytest.raises(Unavailable, match="another network"):
        await check.require_same_now()
