"""Rate limits are exact, memory is bounded, and no client can pose as another."""

from __future__ import annotations

import re
from ipaddress import ip_network

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcsvc.http.gate import (
    RateLimitDecision,
    RateLimiter,
    client_address,
    client_key,
    rate_limit_headers,
)

PROXIES = [ip_network("10.0.0.0/8"), ip_network("fd00::/8")]


class Time:
    def __init__(self) -> None:
        self.seconds = 1_000_000.0

    def __call__(self) -> float:
        return self.seconds


def limiter(
    per_minute: int = 30, *, now: Time | None = None, max_clients: int = 100
) -> RateLimiter:
    return RateLimiter(per_minute, now=now or Time(), max_clients=max_clients)


def test_new_client_may_spend_a_full_minute_at_once() -> None:
    limit = limiter(30)

    verdicts = [limit.take("a") for _ in range(31)]

    assert [v.allowed for v in verdicts] == [True] * 30 + [False]
    assert [v.remaining for v in verdicts] == [*range(29, -1, -1), 0]
    assert verdicts[0] == RateLimitDecision(True, 30, 29, reset_seconds=2, retry_after=0)
    assert verdicts[30] == RateLimitDecision(False, 30, 0, reset_seconds=60, retry_after=2)


def test_refused_client_is_admitted_only_after_retry_after() -> None:
    now = Time()
    limit = limiter(30, now=now)
    limit.take("a", 30)

    now.seconds += 1.999
    assert limit.take("a") == RateLimitDecision(False, 30, 0, reset_seconds=59, retry_after=1)
    now.seconds += 0.002
    assert limit.take("a").allowed
    assert not limit.take("a").allowed


def test_refusals_cost_nothing() -> None:
    now = Time()
    limit = limiter(60, now=now)
    limit.take("a", 60)
    for _ in range(1_000):
        limit.take("a")

    now.seconds += 1

    assert limit.take("a").allowed


def test_budget_is_full_after_a_minute_and_never_more() -> None:
    now = Time()
    limit = limiter(7, now=now)
    limit.take("a", 7)

    now.seconds += 60
    assert limit.take("a", 7).allowed
    now.seconds += 3_600
    assert limit.take("a", 7).allowed
    assert not limit.take("a").allowed


def test_clients_do_not_share_a_budget() -> None:
    limit = limiter(1)

    assert limit.take("a").allowed
    assert limit.take("b").allowed
    assert not limit.take("a").allowed


def test_cost_is_spent_in_full_or_not_at_all() -> None:
    limit = limiter(10)

    assert limit.take("a", 6).remaining == 4
    assert limit.take("a", 5) == RateLimitDecision(False, 10, 4, reset_seconds=36, retry_after=6)
    assert limit.take("a", 4).allowed


def test_a_cost_above_the_whole_budget_is_always_refused() -> None:
    now = Time()
    limit = limiter(10, now=now)

    assert not limit.take("a", 11).allowed
    now.seconds += 3_600
    assert not limit.take("a", 11).allowed
    assert limit.take("a", 10).allowed


@given(
    per_minute=st.integers(1, 100),
    steps=st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 5)), max_size=60),
)
def test_any_time_span_admits_at_most_a_burst_plus_refill(
    per_minute: int, steps: list[tuple[int, int]]
) -> None:
    now = Time()
    limit = limiter(per_minute, now=now)
    admitted: list[tuple[int, int]] = []
    at_ms = 0
    for wait_ms, cost in steps:
        at_ms += wait_ms
        now.seconds = at_ms / 1000
        verdict = limit.take("a", cost)
        assert verdict.allowed == (verdict.retry_after == 0)
        assert 0 <= verdict.remaining <= per_minute
        if verdict.allowed:
            admitted.append((at_ms, cost))
    for i, (start, _) in enumerate(admitted):
        total = 0
        for end, cost in admitted[i:]:
            total += cost
            # The clock's floats are truncated to nanoseconds; a millisecond is ample slack.
            assert total * 60_000 <= per_minute * (60_000 + end - start + 1)


def test_memory_is_bounded_by_evicting_the_longest_idle_client() -> None:
    limit = limiter(1, max_clients=3)
    for client in ("limited", "b", "c"):
        limit.take(client)
    assert not limit.take("limited").allowed  # a refusal counts as seen

    limit.take("d")  # forgets b
    assert not limit.take("limited").allowed
    assert limit.take("b").allowed  # forgets c
    assert not limit.take("limited").allowed
    assert not limit.take("d").allowed


def test_a_flood_of_addresses_is_remembered_up_to_the_bound() -> None:
    limit = limiter(1, max_clients=50)
    for n in range(10_000):
        limit.take(f"client-{n}")

    remembered = [n for n in range(9_900, 10_000) if not limit.take(f"client-{n}").allowed]

    # Forgotten clients that return evict others: never more than the bound.
    assert len(remembered) <= 50
    assert not limit.take("client-9999").allowed


@pytest.mark.parametrize(("per_minute", "max_clients"), [(0, 1), (-1, 1), (1, 0)])
def test_a_limiter_that_could_admit_nobody_is_refused(per_minute: int, max_clients: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        limiter(per_minute, max_clients=max_clients)


def test_headers_of_an_admitted_request_name_policy_and_budget() -> None:
    assert rate_limit_headers("orders", RateLimitDecision(True, 30, 12, 5, 0)) == {
        "RateLimit-Policy": '"orders";q=30;w=60',
        "RateLimit": '"orders";r=12;t=5',
    }


def test_refusal_headers_say_when_the_budget_is_full_again() -> None:
    limit = limiter(30)
    limit.take("a", 30)

    headers = rate_limit_headers("orders", limit.take("a"))

    assert headers["RateLimit"] == '"orders";r=0;t=60'
    assert all(re.fullmatch(r'"[a-z]+"(;[a-z]=[0-9]+)+', value) for value in headers.values())


@pytest.mark.parametrize(
    ("address", "key"),
    [
        ("203.0.113.9", "203.0.113.9"),
        ("2001:db8:1:2::1", "2001:db8:1:2::/64"),
        ("2001:DB8:1:2:ffff:ffff:ffff:ffff", "2001:db8:1:2::/64"),
        ("2001:db8:1:3::1", "2001:db8:1:3::/64"),
        ("::ffff:203.0.113.9", "203.0.113.9"),
        ("::1", "::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("", ""),
        ("unix", "unix"),
        ("not:an:address", "not:an:address"),
    ],
)
def test_a_client_key_is_an_ipv4_address_or_an_ipv6_64(address: str, key: str) -> None:
    assert client_key(address) == key


@pytest.mark.parametrize(
    ("peer", "forwarded_for", "client"),
    [
        ("203.0.113.9", None, "203.0.113.9"),
        ("203.0.113.9", "198.51.100.1", "203.0.113.9"),
        ("10.0.0.1", None, "10.0.0.1"),
        ("10.0.0.1", "", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.1", "198.51.100.1"),
        ("::ffff:10.0.0.1", "198.51.100.1", "198.51.100.1"),
        ("10.0.0.1", "::ffff:198.51.100.1", "198.51.100.1"),
        ("fd00::1", "2001:DB8::1", "2001:db8::1"),
        ("10.0.0.1", "6.6.6.6, 198.51.100.1", "198.51.100.1"),
        ("10.0.0.1", "6.6.6.6 , 198.51.100.1,10.0.0.3 ,  fd00::7", "198.51.100.1"),
        ("10.0.0.1", "10.0.0.2, 10.0.0.3", "10.0.0.2"),
        ("10.0.0.1", "6.6.6.6, unknown, 10.0.0.3", "10.0.0.3"),
        ("10.0.0.1", "6.6.6.6, garbage", "10.0.0.1"),
        ("10.0.0.1", "6.6.6.6,", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.1:4711", "198.51.100.1"),
        ("10.0.0.1", "[2001:db8::1]:443", "2001:db8::1"),
        ("10.0.0.1", "[2001:db8::1]", "2001:db8::1"),
        ("10.0.0.1", "198.51.100.01", "10.0.0.1"),
        ("10.0.0.1", "198.51.100.1:x", "10.0.0.1"),
        ("10.0.0.1", "\u0661.1.1.1", "10.0.0.1"),
        ("", "198.51.100.1", ""),
    ],
)
def test_client_address_is_trusted_as_far_as_proxies_wrote_it(
    peer: str, forwarded_for: str | None, client: str
) -> None:
    assert client_address(peer, forwarded_for, PROXIES) == client


def test_without_trusted_proxies_the_peer_is_the_client() -> None:
    assert client_address("10.0.0.1", "198.51.100.1", []) == "10.0.0.1"
