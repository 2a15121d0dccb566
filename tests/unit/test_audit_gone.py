"""Deposits and payouts reorged out permanently: the audit names the command for each."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rpcsvc.audit.check import check
from rpcsvc.audit.records import MONERO, Annotation, Arrival, AuditReport, Difference, OrderEntry
from rpcsvc.domain.order import DepositState
from rpcsvc.domain.pricing import Direction
from tests.unit.audit_world import ARBITRUM, U2X, X2U, World

XMR, USDC = 10**12, 10**6
WAYS = [(X2U, MONERO, XMR), (U2X, ARBITRUM, 165 * USDC)]


def report(world: World, closed: frozenset[str] = frozenset()) -> AuditReport:
    return check(replace(world.books(), closed=closed), world.monero(), [world.evm()])


def only(world: World) -> Difference:
    (found,) = report(world).differences
    return found


# --- a deposit whose payout was made -----------------------------------------------------------


def without_deposit(direction: Direction, units: int, state: DepositState) -> World:
    """A deposit whose payout was made, and that was reorged out."""
    world = World()
    order = world.pay_out(world.deposit(world.order(direction), units))
    world.keep(replace(order, deposits=(replace(order.deposits[0], state=state),)))
    world.arrivals.clear()
    world.moves = [move for move in world.moves if move.recipient != order.deposit_address]
    return world


@pytest.mark.parametrize(("direction", "network", "units"), WAYS)
@pytest.mark.parametrize("state", [DepositState.CONFIRMED, DepositState.REMOVED])
def test_operator_closes_a_deposit_that_is_gone(
    direction: Direction, network: str, units: int, state: DepositState
) -> None:
    world = without_deposit(direction, units, state)
    (order,) = world.orders
    txid = order.deposits[0].txid
    kind = "deposit_lost" if state is DepositState.REMOVED else "deposit_not_on_chain"
    found = only(world)
    assert found.kind == kind
    assert f"rpcsvc treasury explain {network} {txid} --note TEXT" in found.hint
    world.annotations.append(Annotation(network, txid, "the loss is ours"))
    after = report(world)
    assert after.differences == ()
    assert f"{txid} is explained, and {network} does not show it" in after.notes


def test_early_deposit_that_is_lost_pauses_nothing() -> None:
    world = without_deposit(U2X, 165 * USDC, DepositState.REMOVED)
    order = world.orders.pop()
    world.keep(replace(order, deposits=(replace(order.deposits[0], is_early=True),)))
    found = only(world)
    assert (found.kind, found.is_bounded) == ("deposit_lost_early", True)


def test_early_deposit_between_two_blocks_is_expected_back() -> None:
    world = without_deposit(U2X, 165 * USDC, DepositState.CONFIRMED)
    order = world.orders.pop()
    world.keep(replace(order, deposits=(replace(order.deposits[0], is_early=True),)))
    assert report(world).differences == ()
    assert any("in a block that was replaced" in each for each in report(world).pending)


def test_returned_deposit_counts_after_a_write_off() -> None:
    world = World()
    order = world.keep(world.pay_out(world.deposit(world.order(X2U), XMR)))
    world.annotations.append(Annotation(MONERO, order.deposits[0].txid, "the loss is ours"))
    assert report(world).differences == ()
    world.arrivals[0] = replace(world.arrivals[0], units=XMR - 1)
    assert "deposit_units" in {item.kind for item in report(world).differences}


def test_deposit_without_a_payment_cannot_be_written_off() -> None:
    world = World()
    order = world.keep(world.deposit(world.order(X2U), XMR))
    world.arrivals.clear()
    world.annotations.append(Annotation(MONERO, order.deposits[0].txid, "no"))
    assert (only(world).kind, only(world).hint) == ("deposit_not_on_chain", "")


@pytest.mark.parametrize("block", [500, None])
def test_xmr_top_up_counts_while_it_is_in_a_block(block: int | None) -> None:
    world = World()
    world.arrivals.append(Arrival("brought", "primary", XMR, block))
    assert report(world).differences == ()
    world.arrivals.clear()
    assert report(world).differences == (), "gone, and needed no explanation"


# --- a payout that was reorged out -------------------------------------------------------------


def paid(direction: Direction) -> tuple[World, OrderEntry]:
    world = World()
    units = XMR if direction is X2U else 165 * USDC
    return world, world.keep(world.pay_out(world.deposit(world.order(direction), units)))


def test_xmr_payout_gone_is_closed_by_the_named_command() -> None:
    world, order = paid(U2X)
    name = order.transfers[0].transfer_id
    world.departures.clear()
    world.proven.clear()
    assert f"rpcsvc payouts close {name} --note TEXT" in only(world).hint
    assert report(world, frozenset({name})).differences == ()


def test_lost_usdc_payout_ends_once_its_nonce_is_annotated() -> None:
    world, order = paid(X2U)
    name, (payment,) = order.transfers[0].transfer_id, world.payments
    world.moves.clear()
    found = {item.kind: item for item in report(world).differences}
    assert f"rpcsvc payouts close {name} --note TEXT" in found["not_on_chain"].hint
    closed = frozenset({name})
    assert "unrecorded_transaction" in {item.kind for item in report(world, closed).differences}
    world.annotations.append(Annotation(ARBITRUM, "rival", "the key's other user"))
    world.annotated["rival"] = payment.nonce
    world.spent = {"rival": 10**14}
    assert report(world, closed).differences == ()


@pytest.mark.parametrize("direction", [X2U, U2X])
def test_closed_payout_that_is_mined_is_a_difference(direction: Direction) -> None:
    world, order = paid(direction)
    closed = frozenset({order.transfers[0].transfer_id})
    assert {item.kind for item in report(world, closed).differences} == {"paid_though_closed"}
