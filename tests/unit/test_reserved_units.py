"""Reservations: what an order may still be paid, and who bounds what, to the unit."""

from __future__ import annotations

import hashlib
import hmac

import pytest
from msgspec.structs import replace

from rpcsvc.domain.clients import ADDRESS, SOCKET, Client, is_known
from rpcsvc.domain.machine import open_order
from rpcsvc.domain.order import (
    Deposit,
    DepositState,
    Order,
    OrderStatus,
    Transfer,
    TransferKind,
    TransferState,
)
from rpcsvc.domain.pricing import Direction
from rpcsvc.domain.reservations import (
    ALL,
    BY_ADDRESS,
    UPSTREAM,
    ExceededBound,
    Excess,
    Reservation,
    ReservationChange,
    Reserved,
    UnfundedLimits,
    bounds_of,
    counted,
    excesses,
    funded_reservations_of,
    funded_units,
    reservations_of,
    room,
    scopes_of,
    uncounted,
    unfunded_reservation_of,
    unfunded_units,
    worst,
)
from tests.unit.orders import HOUR, NOW, key, terms

S, T = OrderStatus, TransferState
FRESH = open_order(terms())
OUTPUT = FRESH.terms.expected_output + FRESH.terms.price.payout_fee
AMOUNT = FRESH.terms.deposit_amount
SEEN = Deposit(key(1), AMOUNT, None, NOW, rate=FRESH.terms.price.rate)
PAYOUT = Transfer(
    "ord_1/payout/1", TransferKind.PAYOUT, "arbitrum", terms().payout_asset, "to", 7, 2
)
REFUND = replace(PAYOUT, transfer_id="ord_1/refund/1", kind=TransferKind.REFUND, network="monero")


def with_(*deposits: Deposit, **changes: object) -> Order:
    return replace(FRESH, deposits=deposits, **changes)


def test_new_order_reserves_its_output_and_fee() -> None:
    assert reservations_of(FRESH) == {"arbitrum": OUTPUT}
    assert unfunded_units(FRESH) == OUTPUT
    assert funded_reservations_of(FRESH) == {"arbitrum": 0}
    assert funded_units(FRESH) == {}


def test_part_of_the_deposit_reserves_the_whole_output() -> None:
    half = with_(replace(SEEN, units=AMOUNT // 2), status=S.DEPOSIT_DETECTED)
    assert reservations_of(half) == {"arbitrum": OUTPUT, "monero": AMOUNT // 2}
    price = FRESH.terms.price
    funded = price.output(Direction.XMR_TO_USDC, AMOUNT // 2) + price.payout_fee
    assert unfunded_units(half) == OUTPUT - funded
    assert funded_units(half) == {"arbitrum": funded, "monero": AMOUNT // 2}


@pytest.mark.parametrize(
    ("deposit", "counts"),
    [
        (SEEN, True), (replace(SEEN, state=DepositState.CONFIRMED), True),
        (replace(SEEN, state=DepositState.REMOVED), False), (replace(SEEN, is_dust=True), False),
        (replace(SEEN, transfer_id=REFUND.transfer_id), False),
        (replace(SEEN, transfer_id=PAYOUT.transfer_id), True),
    ],
)  # fmt: skip
def test_deposit_that_may_go_back_is_reserved(deposit: Deposit, counts: bool) -> None:
    settled = replace(REFUND, state=T.SETTLED)
    order = with_(deposit, status=S.EXPIRED, transfers=(settled,))
    assert reservations_of(order) == ({"monero": AMOUNT} if counts else {})


@pytest.mark.parametrize("state", T)
def test_transfer_is_reserved_until_it_is_over(state: TransferState) -> None:
    order = with_(status=S.COMPLETED, transfers=(replace(PAYOUT, state=state),))
    over = state in (T.SETTLED, T.FAILED, T.CANCELLED)
    assert reservations_of(order) == ({} if over else {"arbitrum": 9})
    both = replace(order, transfers=(*order.transfers, replace(PAYOUT, network="monero")))
    assert reservations_of(both) == {"monero": 9} | ({} if over else {"arbitrum": 9})


def test_transfers_of_one_network_add_up_with_the_output() -> None:
    here = replace(REFUND, network="arbitrum")
    both = (here, replace(here, transfer_id="ord_1/refund/2"))
    assert reservations_of(with_(transfers=both)) == {"arbitrum": OUTPUT + 18}
    over = with_(status=S.EXPIRED, transfers=both)
    assert reservations_of(over) == {"arbitrum": 18}


def test_exact_order_reserves_its_amount() -> None:
    agreed = replace(terms(), receive_amount=terms().expected_output - 500)
    order = replace(FRESH, terms=agreed)
    assert reservations_of(order) == {"arbitrum": OUTPUT - 500}
    low = replace(SEEN, rate=FRESH.terms.price.rate // 2)
    came = replace(with_(low, status=S.DEPOSIT_DETECTED), terms=agreed)
    assert reservations_of(came)["arbitrum"] == OUTPUT - 500


def test_deposit_of_just_the_amount_reserves_nothing_more() -> None:
    agreed = terms(Direction.USDC_TO_XMR)
    price, amount = agreed.price, agreed.deposit_amount
    came = replace(SEEN, units=amount, rate=price.rate)
    order = replace(open_order(agreed), deposits=(came,), status=S.DEPOSIT_DETECTED)
    output = price.output(agreed.direction, amount) + price.payout_fee
    assert reservations_of(order)["monero"] == output


def test_output_is_reserved_while_a_payout_may_be_planned() -> None:
    for status in S:
        may = not status.is_terminal and status is not S.REFUNDING
        assert ("arbitrum" in reservations_of(replace(FRESH, status=status))) is may
    failed = with_(transfers=(replace(PAYOUT, state=T.FAILED),))
    assert reservations_of(failed) == {"arbitrum": OUTPUT}


def test_paid_order_reserves_what_is_left_and_what_comes() -> None:
    paid = replace(SEEN, transfer_id=PAYOUT.transfer_id, state=DepositState.CONFIRMED)
    extra = replace(SEEN, key=key(2), units=5)
    order = with_(
        paid, extra, status=S.COMPLETED, leftover=3, transfers=(replace(PAYOUT, state=T.SETTLED),)
    )
    assert reservations_of(order) == {"monero": 8}


def test_late_deposit_is_valued_at_the_locked_rate() -> None:
    order = with_(replace(SEEN, rate=None), status=S.DEPOSIT_DETECTED)
    assert reservations_of(order)["arbitrum"] == OUTPUT
    doubled = with_(replace(SEEN, rate=2 * FRESH.terms.price.rate), status=S.DEPOSIT_DETECTED)
    price = FRESH.terms.price.at(2 * FRESH.terms.price.rate)
    output = price.output(Direction.XMR_TO_USDC, AMOUNT) + price.payout_fee
    assert reservations_of(doubled)["arbitrum"] == output
    assert unfunded_units(doubled) == 0


def test_deposits_above_the_maximum_reserve_the_maximum() -> None:
    most, price = FRESH.terms.max_deposit, FRESH.terms.price
    output = price.output(Direction.XMR_TO_USDC, most) + price.payout_fee
    for units in (most, most + 1, 5 * most):
        order = with_(replace(SEEN, units=units), status=S.DEPOSIT_DETECTED)
        assert reservations_of(order) == {"arbitrum": output, "monero": units}
    low = with_(replace(SEEN, units=most, rate=price.rate // 2), status=S.DEPOSIT_DETECTED)
    output = price.at(price.rate // 2).output(Direction.XMR_TO_USDC, most) + price.payout_fee
    assert reservations_of(low)["arbitrum"] == output


def test_unfunded_part_ends_with_the_waiting_for_deposits() -> None:
    for status in S:
        waits = status in (S.AWAITING_DEPOSIT, S.DEPOSIT_DETECTED)
        assert (unfunded_units(replace(FRESH, status=status)) > 0) is waits
        held = unfunded_reservation_of(replace(FRESH, status=status), "who")
        expected = Reservation("arbitrum", OUTPUT, "who", "monero", NOW + HOUR)
        assert held == (expected if waits else None)
    planned = replace(FRESH, transfers=(PAYOUT,))
    assert unfunded_units(planned) == 0


@pytest.mark.parametrize("direction", Direction)
def test_relayed_order_reserves_its_worth_in_usdc(direction: Direction) -> None:
    agreed = replace(terms(direction), upstream_id="theirs")
    order = open_order(agreed)
    is_sold = direction is Direction.XMR_TO_USDC
    worth = agreed.expected_output if is_sold else agreed.deposit_amount
    assert unfunded_units(order) == worth
    held = Reservation(UPSTREAM, worth, "who", agreed.deposit_network, NOW + HOUR)
    assert unfunded_reservation_of(order, "who") == held
    assert funded_units(order) == {}
    bridge = replace(order, terms=replace(agreed, chain="perps"))
    assert unfunded_units(bridge) == 0
    assert unfunded_reservation_of(bridge, "who") == held._replace(units=0)
    for status in set(S) - {S.AWAITING_DEPOSIT}:
        moved = replace(order, status=status)
        assert (unfunded_units(moved), unfunded_reservation_of(moved)) == (0, None)


def test_change_names_what_changes_and_nothing_else() -> None:
    held = Reservation("arbitrum", OUTPUT, "who", "monero", NOW + HOUR)
    assert counted(None, FRESH, "who") == ReservationChange("ord_1", {}, held, begins=True)
    assert counted(FRESH, FRESH) is None
    whole = with_(SEEN, status=S.DEPOSIT_DETECTED)
    funded = {"arbitrum": OUTPUT, "monero": AMOUNT}
    assert counted(FRESH, whole) == ReservationChange("ord_1", funded, None, begins=False)
    ended = replace(whole, status=S.EXPIRED)
    assert counted(whole, ended) == ReservationChange("ord_1", {"arbitrum": 0}, None, begins=True)
    gone = with_(replace(SEEN, state=DepositState.REMOVED))
    back = counted(whole, gone, "who")
    assert back == ReservationChange("ord_1", {"arbitrum": 0, "monero": 0}, held, begins=True)
    assert uncounted(FRESH, whole) is None  # type: ignore[func-returns-value]


# --- bounds ----------------------------------------------------------------------------------

LIMITS = UnfundedLimits(50, 40, 10, 3, 30, 5, 9, 9)
STRANGER, TOKEN = f"{ADDRESS}:aa", "token:bb"


def test_client_is_stored_as_a_keyed_hash() -> None:
    client = Client("token", "desk")
    digest = hmac.new(b"secret", b"token:desk", hashlib.sha256).hexdigest()
    assert client.stored(b"secret") == f"token:{digest[:24]}"
    assert SOCKET.stored(b"secret").startswith("socket:")


def test_ipv6_neighbours_are_one_customer() -> None:
    inside = [Client(ADDRESS, f"2001:db8:7:{n}::/64") for n in ("0", "ffff")]
    assert {each.customer for each in inside} == {Client(ADDRESS, "2001:db8:7::/48")}
    for single in (Client(ADDRESS, "203.0.113.7"), Client("token", "a:b"), SOCKET):
        assert single.customer is single


def test_client_is_known_by_all_but_its_address() -> None:
    assert [is_known(each) for each in (TOKEN, "socket:", STRANGER, "")] == [
        True,
        True,
        False,
        False,
    ]
    assert (LIMITS.orders_of(TOKEN), LIMITS.orders_of(STRANGER)) == (5, 3)
    assert scopes_of(TOKEN) == (ALL, TOKEN)
    assert scopes_of(STRANGER) == (ALL, BY_ADDRESS, STRANGER)
    assert bounds_of(LIMITS, TOKEN, 1_001) == [(TOKEN, 300), (ALL, 500)]
    assert bounds_of(LIMITS, STRANGER, 1_001) == [(STRANGER, 100), (BY_ADDRESS, 400), (ALL, 500)]


def test_money_that_came_is_what_is_not_unfunded() -> None:
    assert Reserved(10, {ALL: 4}, 1).funded == 6
    assert Reserved(10, {}, 1).funded == 10


def test_order_breaks_each_bound_by_a_unit() -> None:
    held = Reserved(0, {STRANGER: 60, BY_ADDRESS: 390, ALL: 495}, 2)
    assert excesses(LIMITS, STRANGER, 5, 1_000, held) == []
    assert room(LIMITS, STRANGER, 1_000, held) == 5
    all_ = Excess(ALL, False, 500, 495, 6)
    assert excesses(LIMITS, STRANGER, 6, 1_000, held) == [all_]
    assert excesses(LIMITS, STRANGER, 41, 1_000, held) == [
        Excess(STRANGER, False, 100, 60, 41), Excess(BY_ADDRESS, False, 400, 390, 41),
        all_._replace(needed=41),
    ]  # fmt: skip
    full = held._replace(orders=3)
    assert excesses(LIMITS, STRANGER, 5, 1_000, full) == [Excess(STRANGER, True, 3, 3, 1)]
    assert room(LIMITS, STRANGER, 1_000, full) == 0
    assert room(LIMITS, STRANGER, 1_000, Reserved(0, {ALL: 501}, 0)) == 0
    assert room(LIMITS, TOKEN, 1_000, Reserved(0, {}, 0)) == 300
    nothing = excesses(LIMITS, TOKEN, 301, 1_000, Reserved(0, {}, 0))
    assert nothing == [Excess(TOKEN, False, 300, 0, 301)]


def held(client: str, units: int, until: int, network: str = "n") -> Reservation:
    return Reservation(network, units, client, "d", until)


def test_refusal_tells_when_enough_of_its_scope_expires() -> None:
    mine = [held(STRANGER, 10, 30), held(STRANGER, 10, 10), held(STRANGER, 10, 20)]
    others = [held(TOKEN, 50, 1), held(STRANGER, 50, 2, "other network")]
    for needed, frees_at in ((71, 10), (80, 10), (81, 20), (90, 20), (91, 30), (100, 30)):
        excess = Excess(STRANGER, False, 100, 30, needed)
        expected = ExceededBound(STRANGER, False, 100, 30, frees_at)
        assert excess.refusal("n", [*mine, *others]) == expected
    never = Excess(STRANGER, False, 100, 30, 101).refusal("n", mine)
    assert never == ExceededBound(STRANGER, False, 100, 30, None)
    assert Excess(ALL, False, 100, 80, 60).refusal("n", [*mine, *others]).frees_at == 1


def test_refusal_for_their_number_counts_orders_of_all_networks() -> None:
    found = [held(STRANGER, 10, 9), held(STRANGER, 10, 5, "other"), held(TOKEN, 1, 1)]
    assert Excess(STRANGER, True, 2, 2, 1).refusal("n", found).frees_at == 5
    assert Excess(STRANGER, True, 1, 2, 1).refusal("n", found).frees_at == 9
    assert Excess(STRANGER, True, 0, 2, 1).refusal("n", []).frees_at == 0


def test_worst_bound_blocks_for_longest() -> None:
    bounds = [ExceededBound(ALL, False, 1, 1, at) for at in (5, 9, 7)]
    assert worst(bounds) == bounds[1]
    never = ExceededBound(STRANGER, False, 1, 1, None)
    assert worst([*bounds, never]) == never
    assert worst([bounds[0]._replace(frees_at=0), bounds[0]._replace(frees_at=1)]).frees_at == 1
