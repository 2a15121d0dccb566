"""The checks of the universe of the engine onchain find what is wrong with the money."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pytest
from typing_extensions import override

from rpcsvc.domain import usdc
from tests.simulation.evm import Holding
from tests.simulation.monero import Paid, Waiting, build
from tests.simulation.monero_wallet import address_of
from tests.simulation.onchain import RICH, OnchainUniverse
from tests.simulation.tiers import USDC, XMR
from tests.simulation.universe import Faults, Order, evm_address, monero_address

EXPECTED: Final = 9 * XMR // 10
DEPOSIT: Final = evm_address("deposit")
PAYEE: Final = monero_address("payee")
PAYER: Final = evm_address("somebody")
ORDER: Final = Order(0, "u2x", "ord_1", "session", PAYEE, DEPOSIT, 150 * USDC, EXPECTED, "arbitrum")


@pytest.fixture
def universe(tmp_path: Path) -> OnchainUniverse:
    """One order, paid in full."""
    made = OnchainUniverse(1, tmp_path, Faults())
    made.orders["key"] = ORDER
    made.evm.give(PAYER, Holding(units=1_000 * USDC))
    made.evm.send(PAYER, usdc.transfer(DEPOSIT, 150 * USDC))
    made.evm.mine()
    return made


def pay_xmr(universe: OnchainUniverse, address: str, units: int) -> None:
    """Have the service's wallet pay."""
    universe.monero.pay([Paid(address_of(0), units)])
    universe.monero.mine(10)
    image = next(
        image
        for image, output in universe.monero.outputs.items()
        if output.paid == Paid(address_of(0), units) and image not in universe.monero.spent
    )
    made = build([image], [Paid(address, units)], 0, len(universe.monero.blocks))
    universe.monero.pool[made.txid] = Waiting(made, relayed=True, broadcast=True)
    universe.monero.mine()


def found(universe: OnchainUniverse) -> list[str]:
    return [*universe.order_differences(ORDER), *universe.strange_payments()]


def test_order_that_was_paid_as_quoted_is_right(universe: OnchainUniverse) -> None:
    pay_xmr(universe, PAYEE, EXPECTED)
    assert found(universe) == []


def test_deposit_that_nobody_answers_is_found(universe: OnchainUniverse) -> None:
    less, wrong = found(universe)
    assert less.startswith("less went out than came: ord_1")
    assert wrong.startswith(f"not paid what was quoted, {EXPECTED}")


def test_second_payout_is_found(universe: OnchainUniverse) -> None:
    for _ in range(2):
        pay_xmr(universe, PAYEE, EXPECTED)
    assert "paid twice" in found(universe)[0]
    assert any(text.startswith("more went out than came") for text in found(universe))


def test_refund_beside_a_payout_is_found(universe: OnchainUniverse) -> None:
    pay_xmr(universe, PAYEE, EXPECTED)
    universe.evm.send(universe.hot, usdc.transfer(universe.refund_address(ORDER, 0), 150 * USDC))
    universe.evm.mine()
    assert any(text.startswith("more went out than came") for text in found(universe))


def test_payments_to_strangers_are_found(universe: OnchainUniverse) -> None:
    pay_xmr(universe, PAYEE, EXPECTED)
    pay_xmr(universe, monero_address("stranger"), XMR)
    universe.evm.send(universe.hot, usdc.transfer(evm_address("stranger"), 7))
    universe.evm.mine()
    usdc_gone, xmr_gone = found(universe)
    assert usdc_gone.startswith("7 USDC units went from the hot wallet")
    assert xmr_gone.startswith(f"{XMR} piconero went from the wallet")


# --- two networks --------------------------------------------------------------------------------


class TwoNetworks(OnchainUniverse):
    """A universe with a second EVM chain."""

    @override
    def _has_second_chain(self) -> bool:
        return True


def reserve(universe: OnchainUniverse, network: str, units: int) -> list[str]:
    """Have an order reserve a payout; what does not hold then."""
    universe.server.connection.execute(
        "INSERT INTO reservations VALUES (?, 'unfunded', ?, ?, '', 'monero', 0)",
        (f"ord_{units}", network, units),
    )
    return universe.violations


@pytest.mark.parametrize("network", ["arbitrum", "monero"])
def test_reservations_within_what_the_wallet_holds_are_right(
    universe: OnchainUniverse, network: str
) -> None:
    held = RICH.units
    universe.monero.pay([Paid(address_of(0), held)])
    universe.monero.mine()
    assert reserve(universe, network, held - 1) == []
    assert reserve(universe, network, 1) == []
    (text,) = reserve(universe, network, 2)
    assert text.endswith(f"reserve {held + 2} units on {network}, where {held} are held")


def test_what_was_just_paid_counts_as_held(universe: OnchainUniverse) -> None:
    pay_xmr(universe, PAYEE, EXPECTED)
    universe.evm.send(universe.hot, usdc.transfer(PAYER, RICH.units))
    universe.evm.mine()
    assert reserve(universe, "monero", EXPECTED) == []
    assert reserve(universe, "arbitrum", RICH.units) == []
    assert len(reserve(universe, "monero", 1)) == 1


@pytest.fixture
def two(tmp_path: Path) -> OnchainUniverse:
    """One order on arbitrum, paid on base."""
    made = TwoNetworks(1, tmp_path, Faults())
    made.orders["key"] = ORDER
    for each in made.evms.values():
        each.chain.give(made.payer(0), Holding(units=1_000 * USDC))
        each.chain.give(made.operator_addresses[each.name], Holding(units=1_000 * USDC))
    made.evms["base"].chain.send(made.payer(0), usdc.transfer(DEPOSIT, 150 * USDC))
    made.evms["base"].chain.mine()
    return made


def pay_back(universe: OnchainUniverse) -> None:
    base = universe.evms["base"].chain
    (mined,) = base.top.mined
    assert universe.pay_back("base", mined.made.txid, DEPOSIT, 150 * USDC)
    base.mine()


def test_payment_on_the_wrong_network_is_of_no_order(two: OnchainUniverse) -> None:
    assert list(two.order_differences(ORDER)) == []
    (text,) = two.misdirected_payments()
    assert text == "ord_1 got [150000000] on base, and gave back []"
    pay_back(two)
    assert list(two.misdirected_payments()) == []


def test_second_repayment_on_the_wrong_network_is_found(two: OnchainUniverse) -> None:
    pay_back(two)
    two.evms["base"].chain.send(two.hot, usdc.transfer(two.payer(0), 150 * USDC))
    two.evms["base"].chain.mine()
    (text,) = two.misdirected_payments()
    assert text == "ord_1 got [150000000] on base, and gave back [150000000, 150000000]"


def test_payout_on_the_wrong_network_is_found(two: OnchainUniverse) -> None:
    payee = evm_address("payee")
    order = Order(1, "x2u", "ord_2", "", payee, address_of(1), XMR, 165 * USDC, "arbitrum")
    two.orders["key 2"] = order
    two.evms["base"].chain.send(two.hot, usdc.transfer(payee, 165 * USDC))
    two.evms["base"].chain.mine()
    (text,) = two.strange_payments()
    assert text == f"165000000 USDC units went from the hot wallet to {payee.lower()} on base"


@pytest.mark.parametrize(("hot", "unswept"), [("1000000", "150.000001"), ("999999.9", "150")])
def test_unit_that_the_treasury_has_wrong_is_found(
    two: OnchainUniverse, hot: str, unswept: str
) -> None:
    right = {"network": "base", "hotWallet": "1000000", "unswept": "150"}
    assert list(two.holding_differences(right)) == []
    (_,) = two.holding_differences({**right, "hotWallet": hot, "unswept": unswept})
