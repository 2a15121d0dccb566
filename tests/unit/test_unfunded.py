"""The bounds on reservations without a deposit."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rpcsvc.orders.unfunded import (
    ADDRESS,
    ALL,
    BY_ADDRESS,
    Client,
    OrdersToday,
    Reservation,
    UnfundedLimits,
    UnfundedOrders,
)

LIMITS = UnfundedLimits(
    share=50,
    address_total_share=40,
    address_share=10,
    address_orders=3,
    token_share=30,
    token_orders=5,
    address_orders_a_day=9,
)
SECRET = b"s" * 32
CLIENTS = [Client(ADDRESS, f"203.0.113.{n}").stored(SECRET) for n in range(6)]
CLIENTS += [Client("token", name).stored(SECRET) for name in "ab"]
WALLET = 1_000


def test_a_client_is_stored_without_its_name() -> None:
    one, other = Client(ADDRESS, "203.0.113.7"), Client("token", "203.0.113.7")
    assert one.stored(SECRET) == one.stored(SECRET)
    assert one.stored(SECRET) != one.stored(b"t" * 32)
    assert one.stored(SECRET).partition(":")[2] != other.stored(SECRET).partition(":")[2]
    assert "203.0.113.7" not in one.stored(SECRET)


@given(st.lists(st.tuples(st.sampled_from(CLIENTS), st.integers(1, 200)), max_size=40))
def test_no_sequence_of_orders_breaks_a_bound(wishes: list[tuple[str, int]]) -> None:
    """What is refused would break one, and an order of the room that is told is taken."""
    book = UnfundedOrders()
    for number, (client, units) in enumerate(wishes):
        room = book.room(LIMITS, client, "n", WALLET)
        refusal = book.refusal(LIMITS, client, "n", units, WALLET)
        assert (refusal is None) == (units <= room)
        if refusal is None:
            book.put(f"ord_{number}", Reservation("n", units, client, "d", 10 * number))
        for scope, share in ((ALL, 50), (BY_ADDRESS, 40), *((c, 10) for c in CLIENTS[:6])):
            assert book.units("n", scope) <= WALLET * share // 100
        assert all(book.orders(client) <= LIMITS.orders_of(client) for client in CLIENTS)


@given(
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 200)), max_size=40),
)
def test_fewer_addresses_than_fill_their_share_leave_room(
    attackers: int, wishes: list[tuple[int, int]]
) -> None:
    """docs/economics.md: it takes address_total_share / address_share addresses."""
    book = UnfundedOrders()
    for number, (client, units) in enumerate(wishes):
        attacker = CLIENTS[client]
        if client < attackers and book.refusal(LIMITS, attacker, "n", units, WALLET) is None:
            book.put(f"ord_{number}", Reservation("n", units, attacker, "d", 10))
    assert book.room(LIMITS, CLIENTS[5], "n", WALLET) == WALLET * LIMITS.address_share // 100


def test_four_addresses_keep_others_out_for_one_deposit_window() -> None:
    book = UnfundedOrders()
    for number, client in enumerate(CLIENTS[:4]):
        book.put(f"ord_{number}", Reservation("n", 100, client, "d", 3_600_000 + number))
    refusal = book.refusal(LIMITS, CLIENTS[5], "n", 1, WALLET)
    assert refusal is not None
    assert (refusal.scope, refusal.frees_at) == (BY_ADDRESS, 3_600_000)
    assert book.room(LIMITS, CLIENTS[6], "n", WALLET) == WALLET * 10 // 100, "a token is served"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 100))
def test_a_refused_order_fits_when_it_is_told_to_come_back(held: list[int], units: int) -> None:
    book, client = UnfundedOrders(), CLIENTS[0]
    for number, each in enumerate(held):
        book.put(f"ord_{number}", Reservation("n", each, client, "d", 10 + number))
    refusal = book.refusal(LIMITS, client, "n", units, WALLET)
    if refusal is None or refusal.frees_at is None:
        return
    now = refusal.frees_at
    book.expired(lambda _order, _network, at: at < now)
    assert book.refusal(LIMITS, client, "n", units, WALLET) is not None
    book.expired(lambda _order, _network, at: at <= now)
    assert book.refusal(LIMITS, client, "n", units, WALLET) is None


def test_orders_of_a_day_are_counted_until_it_ends() -> None:
    today, client, day = OrdersToday(7, {CLIENTS[0]: 2}), CLIENTS[0], 86_400_000
    today.add(client, day - 1)
    today.add(CLIENTS[1], 8)
    today.add(CLIENTS[1], 9, -1)
    assert [today.count(each, day - 1) for each in CLIENTS[:3]] == [3, 0, 0]
    assert today.count(client, day) == 0
    today.add(client, day)
    assert (today.count(client, day), today.count(client, 7)) == (1, 0)


def test_an_order_whose_deposits_are_not_known_yet_keeps_its_reservation() -> None:
    book = UnfundedOrders()
    for name in ("behind", "other"):
        book.put(name, Reservation("n", 5, CLIENTS[0], "d", 10))
    ended = book.expired(lambda order, _network, at: at <= 10 and order != "behind")
    assert [name for name, _ in ended] == ["other"]
    assert book.units("n") == 5
    book.expired(lambda _order, _network, _at: True)
    assert (book.units("n"), book.orders(CLIENTS[0])) == (0, 0)
