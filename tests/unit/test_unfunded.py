"""The bounds on reservations without a deposit."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from rpcsvc.domain.clients import ADDRESS, Client
from rpcsvc.domain.reservations import (
    ALL,
    BY_ADDRESS,
    ExceededBound,
    Reservation,
    Reserved,
    UnfundedLimits,
    excesses,
    room,
    scopes_of,
    worst,
)

LIMITS = UnfundedLimits(
    share=50,
    address_total_share=40,
    address_share=10,
    address_orders=3,
    token_share=30,
    token_orders=5,
    address_orders_a_day=9,
    address_authorizations_a_day=9,
)
SECRET = b"s" * 32
CLIENTS = [Client(ADDRESS, f"203.0.113.{n}").stored(SECRET) for n in range(6)]
CLIENTS += [Client("token", name).stored(SECRET) for name in "ab"]
WALLET = 1_000


class Book:
    """Reservations with the sums of the database."""

    def __init__(self) -> None:
        self.held: dict[str, Reservation] = {}

    def put(self, order_id: str, reservation: Reservation) -> None:
        self.held[order_id] = reservation

    def end(self, at: int) -> None:
        """Remove the reservations that expire until ``at``."""
        self.held = {name: each for name, each in self.held.items() if each.expires_at > at}

    def reserved(self, client: str) -> Reserved:
        units: Counter[str] = Counter()
        for each in self.held.values():
            units.update(dict.fromkeys(scopes_of(each.client), each.units))
        orders = sum(each.client == client for each in self.held.values())
        return Reserved(units[ALL], units, orders)

    def room(self, client: str) -> int:
        return room(LIMITS, client, WALLET, self.reserved(client))

    def refusal(self, client: str, units: int) -> ExceededBound | None:
        broken = excesses(LIMITS, client, units, WALLET, self.reserved(client))
        found = [each.refusal("n", self.held.values()) for each in broken]
        return worst(found) if found else None


def test_a_client_is_stored_without_its_name() -> None:
    one, other = Client(ADDRESS, "203.0.113.7"), Client("token", "203.0.113.7")
    assert one.stored(SECRET) == one.stored(SECRET)
    assert one.stored(SECRET) != one.stored(b"t" * 32)
    assert one.stored(SECRET).partition(":")[2] != other.stored(SECRET).partition(":")[2]
    assert "203.0.113.7" not in one.stored(SECRET)


@given(st.lists(st.tuples(st.sampled_from(CLIENTS), st.integers(1, 200)), max_size=40))
def test_no_sequence_of_orders_breaks_a_bound(requests: list[tuple[str, int]]) -> None:
    """A refused order would exceed a bound; one of the reported room is accepted."""
    book = Book()
    for number, (client, units) in enumerate(requests):
        room = book.room(client)
        refusal = book.refusal(client, units)
        assert (refusal is None) == (units <= room)
        if refusal is None:
            book.put(f"ord_{number}", Reservation("n", units, client, "d", 10 * number))
        for scope, share in ((ALL, 50), (BY_ADDRESS, 40), *((c, 10) for c in CLIENTS[:6])):
            assert book.reserved("").unfunded[scope] <= WALLET * share // 100
        assert all(book.reserved(each).orders <= LIMITS.orders_of(each) for each in CLIENTS)


@given(
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(1, 200)), max_size=40),
)
def test_fewer_addresses_than_fill_their_share_leave_room(
    attackers: int, requests: list[tuple[int, int]]
) -> None:
    """docs/operate/economics.md: it takes address_total_share / address_share addresses."""
    book = Book()
    for number, (client, units) in enumerate(requests):
        attacker = CLIENTS[client]
        if client < attackers and book.refusal(attacker, units) is None:
            book.put(f"ord_{number}", Reservation("n", units, attacker, "d", 10))
    assert book.room(CLIENTS[5]) == WALLET * LIMITS.address_share // 100


def test_four_addresses_keep_others_out_for_one_deposit_window() -> None:
    book = Book()
    for number, client in enumerate(CLIENTS[:4]):
        book.put(f"ord_{number}", Reservation("n", 100, client, "d", 3_600_000 + number))
    refusal = book.refusal(CLIENTS[5], 1)
    assert refusal is not None
    assert (refusal.scope, refusal.frees_at) == (BY_ADDRESS, 3_600_000)
    assert book.room(CLIENTS[6]) == WALLET * 10 // 100, "a token is served"


@given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(1, 100))
def test_refused_order_fits_at_its_retry_after(held: list[int], units: int) -> None:
    book, client = Book(), CLIENTS[0]
    for number, each in enumerate(held):
        book.put(f"ord_{number}", Reservation("n", each, client, "d", 10 + number))
    refusal = book.refusal(client, units)
    if refusal is None or refusal.frees_at is None:
        return
    now = refusal.frees_at
    book.end(now - 1)
    assert book.refusal(client, units) is not None
    book.end(now)
    assert book.refusal(client, units) is None
