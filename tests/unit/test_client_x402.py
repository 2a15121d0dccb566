"""The client pays an order on the chain of the attested network."""

from __future__ import annotations

import pytest

from rpcsvc.client import x402
from rpcsvc.client.errors import Unverified
from rpcsvc.domain.addresses import MoneroNetwork

MAIN = {each.chain_id for each in x402.CHAINS.values()}
TEST = {each.test_chain_id for each in x402.CHAINS.values()}
NETWORKS = ["sandbox", *(each.value for each in MoneroNetwork)]


def test_no_chain_is_both() -> None:
    assert not MAIN & TEST
    assert len(MAIN) == len(TEST) == len(x402.CHAINS)


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("chain", x402.CHAINS.values(), ids=x402.CHAINS)
def test_order_is_paid_on_the_chain_of_its_network(
    chain: x402.ChainContracts, network: str
) -> None:
    due = x402.bill(chain.chain_id, "0x1", 7, network)
    if network == "mainnet":
        assert (due.chain_id, due.token) == (chain.chain_id, chain.usdc)
    else:
        assert (due.chain_id, due.token) == (chain.test_chain_id, chain.test_usdc)
    for offered in (MAIN | TEST) - {due.chain_id}:
        offer = {
            "scheme": "exact",
            "network": f"eip155:{offered}",
            "asset": due.token,
            "payTo": due.to,
            "amount": str(due.units),
            "extra": {"name": "USDC", "version": "2"},
            "maxTimeoutSeconds": 60,
        }
        with pytest.raises(Unverified):
            x402.offer_of({"x402Version": 2, "accepts": [offer]}, due)


@pytest.mark.parametrize("network", ["regtest", "", "Mainnet", "sandbox "])
def test_network_that_is_not_known_is_not_paid_on(network: str) -> None:
    with pytest.raises(Unverified):
        x402.bill(1, "0x1", 7, network)
