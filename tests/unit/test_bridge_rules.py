"""Bridge orders: their kinds, and the exchange as a chain."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rpcsvc.domain.bridge import DIRECTION_OF, BridgeKind, BridgeStatus, kind_of, perps_chain
from rpcsvc.domain.chains import Chain
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.order import PERPS
from tests.unit.orders import terms


@pytest.mark.parametrize("kind", BridgeKind)
def test_kind_of_a_bridge_order_is_its_direction(kind: BridgeKind) -> None:
    order = open_order(replace(terms(DIRECTION_OF[kind]), chain=PERPS))
    assert order.terms.is_bridge
    assert kind_of(order) is kind


def test_bridge_order_without_a_payout_has_failed() -> None:
    failed = {status for status in BridgeStatus if status.is_failure}
    assert failed == {BridgeStatus.FAILED, BridgeStatus.EXPIRED}


def test_exchange_is_a_chain_that_no_caller_can_name() -> None:
    assert perps_chain(25) == Chain(
        name="perps", display_name="Perpetuals exchange", chain_id=1337, aliases=(),
        native_token="USDC", usdc_contract="", min_swap_usd=25, confirmations=1,
        block_time_ms=1_000, test_network="perps", test_chain_id=1337, test_usdc_contract="",
    )  # fmt: skip
