"""The problems that ``rpcsvc onchain init`` reports, and its advice."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rpcsvc.settlement.onchain.evm.gas import HotBalances
from rpcsvc.settlement.onchain.readiness import (
    MoneroFound,
    NetworkFound,
    ReadinessCheck,
    XmrHeld,
    coins,
    monero_checks,
    network_checks,
    usdc_floor_check,
)
from tests.chain_options import evm_network, monero_options

XMR, USDC, ETHER = 10**12, 10**6, 10**18
HOT, PRIMARY = "0xHot", "4Primary"
OPTIONS = monero_options(nettype="fakechain")
ARBITRUM = evm_network("arbitrum", 42161, "0xToken", gas_reserve=ETHER // 100)
FUNDED = XmrHeld(unlocked=3 * XMR, locked=XMR, outputs=20, large=16, blocks_to_unlock=4)
WELL = MoneroFound(100, primary_address=PRIMARY, held=FUNDED)
NETWORK = NetworkFound(ARBITRUM, None, HotBalances(ETHER, 5 * USDC, 7))


def missing(checks: list[ReadinessCheck]) -> dict[str, str | None]:
    return {check.name: check.remedy for check in checks if not check.ok}


def xmr(found: MoneroFound, floor: int = 0) -> list[ReadinessCheck]:
    return list(monero_checks(found, OPTIONS, floor))


def arbitrum(found: NetworkFound) -> list[ReadinessCheck]:
    return list(network_checks(found, HOT, "ETH"))


def test_a_funded_operator_lacks_nothing() -> None:
    assert missing(xmr(WELL)) == {}
    assert missing(arbitrum(NETWORK)) == {}


def test_without_a_node_nothing_is_said_of_the_wallet() -> None:
    assert list(missing(xmr(MoneroFound(node_problem="it is down")))) == ["monero node"]


def test_a_wallet_that_can_t_be_used_says_why() -> None:
    checks = xmr(MoneroFound(100, wallet_problem="another wallet", primary_address=PRIMARY))
    assert [check.detail for check in checks if not check.ok] == ["another wallet"]


@pytest.mark.parametrize(
    ("held", "floor", "says"),
    [
        (XmrHeld(0, 0, 0, 0, 0), 0, f"Send XMR to {PRIMARY}"),
        (FUNDED, 5 * XMR, f"Send at least 1 XMR to {PRIMARY}"),
        (XmrHeld(0, XMR, 1, 1, 7), 0, "Wait about 14 minutes: all of it is locked."),
    ],
)
def test_xmr_that_is_not_there_or_locked_is_named(held: XmrHeld, floor: int, says: str) -> None:
    assert missing(xmr(replace(WELL, held=held), floor)) == {"XMR": says}


def test_too_few_outputs_are_no_reason_to_stop() -> None:
    checks = xmr(replace(WELL, held=replace(FUNDED, large=1)))
    assert missing(checks) == {}
    assert "16 by itself" in checks[-1].detail


def test_a_node_that_is_down_is_named_with_its_setting() -> None:
    found = missing(arbitrum(NetworkFound(ARBITRUM, "it is down")))
    assert found == {
        "arbitrum node": "Run a node of chain 42161 and name it in onchain.nodes: arbitrum=URL."
    }


def test_gas_usdc_pause_and_blacklist_are_each_named() -> None:
    poor = NetworkFound(ARBITRUM, None, HotBalances(1, 0, 7), paused=True, blacklisted=True)
    names = [check.name for check in arbitrum(poor) if not check.ok]
    assert names == ["arbitrum token", "arbitrum token", "arbitrum gas", "arbitrum USDC"]
    wanted = "Send at least 0.009999999999999999 ETH on arbitrum to 0xHot"
    assert str(missing(arbitrum(poor))["arbitrum gas"]).startswith(wanted)


def test_the_floor_of_usdc_holds_for_all_networks_together() -> None:
    assert usdc_floor_check([NETWORK], HOT, 0) is None
    assert usdc_floor_check([NETWORK, NetworkFound(ARBITRUM, "it is down")], HOT, 1) is None
    enough = usdc_floor_check([NETWORK, NETWORK], HOT, 10 * USDC)
    assert enough is not None
    assert enough.ok
    short = usdc_floor_check([NETWORK], HOT, 10 * USDC)
    assert short is not None
    assert not short.ok
    assert short.remedy == "Send at least 5 USDC to 0xHot"


@pytest.mark.parametrize(
    ("wei", "text"), [(0, "0"), (ETHER, "1"), (1, "0." + "0" * 17 + "1"), (25 * ETHER // 10, "2.5")]
)
def test_wei_are_shown_as_whole_coins(wei: int, text: str) -> None:
    assert coins(wei) == text
