"""Sessions of a secret: the derivation, and no order that a search would miss."""

from __future__ import annotations

import hmac
import re
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcsvc.client import Unreachable
from rpcsvc.client import sessions as module
from rpcsvc.client.blocking import finished
from rpcsvc.client.sessions import (
    GAP,
    BadSecret,
    Json,
    Sessions,
    new_secret,
    read_secret,
    session_of,
)

SECRET = bytes(range(32)).hex()
SITE = "https://swap.example"
PAGE = Path(__file__).parent.parent.parent / "docs" / "use" / "secret.md"
KEYS = st.binary(min_size=32, max_size=32)


class Service:
    """Lists orders by session, two a page, and counts the calls."""

    def __init__(self) -> None:
        self.orders: dict[str, list[str]] = {}
        self.calls = 0

    def order(self, session: str) -> None:
        made = sum(map(len, self.orders.values()))
        self.orders.setdefault(session, []).append(f"ord_{made}")

    async def ask(self, params: Json) -> Json:
        self.calls += 1
        listed = self.orders.get(params["sessionId"], [])
        start = listed.index(params["after"]) + 1 if "after" in params else 0
        page = listed[start : start + 2]
        after = page[-1] if len(page) == 2 else None
        return {"orders": [{"orderId": each} for each in page], "nextAfter": after}

    def found_by(self, secret: str) -> set[str]:
        found = finished(Sessions(secret, SITE).search(self.ask))
        assert all(each["orderId"] in self.orders[each["sessionId"]] for each in found)
        assert len({each["orderId"] for each in found}) == len(found)
        return {each["orderId"] for each in found}


# --- the derivation --------------------------------------------------------------------------


def test_page_has_vectors_and_the_function_for_sessions() -> None:
    text = PAGE.read_text()
    rows = re.findall(r"^\| `(http\S+)` \| ([0-9]+) \| `(\S+)` \|$", text, re.MULTILINE)
    assert len(rows) == 6
    assert f"`{SECRET}`" in text
    code = next(
        each for each in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if "hmac" in each
    )
    names: dict[str, Any] = {}
    exec(code, names)
    documented: Callable[[str, str, int], str] = names["session"]
    for site, n, session in rows:
        assert session_of(read_secret(SECRET), site, int(n)) == session
        assert documented(SECRET, site, int(n)) == session


@given(KEYS, st.text(max_size=40), st.integers(0, 2**40))
def test_session_is_a_uuid_of_version_4(key: bytes, site: str, index: int) -> None:
    session = session_of(key, site, index)
    assert str(uuid.UUID(session)) == session
    assert (uuid.UUID(session).version, uuid.UUID(session).variant) == (4, uuid.RFC_4122)


@given(KEYS, KEYS, st.integers(0, 1000), st.integers(0, 1000))
def test_sessions_differ_by_secret_site_and_number(
    one: bytes, other: bytes, first: int, second: int
) -> None:
    session = session_of(one, SITE, first)
    assert (session == session_of(other, SITE, second)) == ((one, first) == (other, second))
    assert session != session_of(one, "https://other.example", first)


def test_session_is_the_same_for_an_address_in_another_form() -> None:
    key = read_secret(SECRET)
    assert session_of(key, "https://Swap.Example/", 3) == session_of(key, SITE, 3)
    assert session_of(key, f"{SITE}:443/", 3) == session_of(key, SITE, 3)
    assert session_of(key, f"{SITE}:443/base", 3) == session_of(key, f"{SITE}/base", 3)
    assert session_of(key, "http://[::1]:80", 3) == session_of(key, "http://[::1]", 3)


@pytest.mark.parametrize("site", [f"{SITE}:80", f"{SITE}:8443", f"{SITE}/:443", f"{SITE}:1443"])
def test_session_keeps_a_port_that_is_not_the_default(site: str) -> None:
    key = read_secret(SECRET)
    digest = hmac.digest(key, f"rpcsvc session\n{site}\n3".encode(), "sha256")
    assert session_of(key, site, 3) == str(uuid.UUID(bytes=digest[:16], version=4))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "correct horse battery staple",
        "a" * 64,
        "ab" * 32,
        "0123456789abcdef" * 4,
        SECRET.upper(),
        SECRET[:-2],
        SECRET + "00",
        SECRET + "\n",
        "٣" * 64,
    ],
)
def test_weak_secret_is_refused_and_not_repeated(text: str) -> None:
    with pytest.raises(BadSecret, match="openssl rand") as refused:
        read_secret(text)
    assert len(text) < 8 or text not in str(refused.value)


def test_new_secrets_are_accepted_and_differ() -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert all(read_secret(each).hex() == each for each in secrets)


# --- searches --------------------------------------------------------------------------------


STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "order", "lose", "restart", "learn"]), st.integers(0, 2)),
    max_size=150,
)


@given(STEPS)
def test_orders_of_clients_that_share_a_secret_are_all_found(steps: list[tuple[str, int]]) -> None:
    service = Service()
    clients = [Sessions(SECRET, SITE) for _ in range(3)]
    taken: list[list[str]] = [[], [], []]
    for step, which in steps:
        client, waiting = clients[which], taken[which]
        if step == "take":  # a session is derived, and its order may be made much later
            waiting.append(client.take())
        elif waiting and step in ("order", "lose"):
            session = waiting.pop()
            service.order(session)
            if step == "order":  # otherwise the answer is lost
                assert client.note_order(session)
        elif step == "restart":  # what was taken may have been stored
            clients[which] = Sessions(SECRET, SITE)
            finished(clients[which].search(service.ask))
        elif step == "learn":
            finished(client.search(service.ask))
    made = {each for orders in service.orders.values() for each in orders}
    assert service.found_by(SECRET) == made


def test_sessions_without_orders_are_taken_again_before_the_gap() -> None:
    service, client = Service(), Sessions(SECRET, SITE)
    taken = [client.take() for _ in range(10 * GAP)]
    assert len(set(taken)) == GAP
    service.order(taken[-1])
    assert len(service.found_by(SECRET)) == 1


def test_search_goes_on_over_a_gap_of_nineteen_and_no_more() -> None:
    for gap, is_found in ((GAP - 1, True), (GAP, False)):
        service = Service()
        service.order(session_of(read_secret(SECRET), SITE, gap))
        assert bool(service.found_by(SECRET)) == is_found
        assert service.calls == GAP + (GAP if is_found else 0)


def test_search_finds_nothing_of_another_secret() -> None:
    service = Service()
    service.order(Sessions(SECRET, SITE).take())
    assert service.found_by(new_secret()) == set()


def test_client_forgets_sessions_that_the_service_lost() -> None:
    service, client = Service(), Sessions(SECRET, SITE)
    for _ in range(GAP + 5):
        session = client.take()
        service.order(session)
        client.note_order(session)
    service.orders.clear()
    assert finished(client.search(service.ask)) == []
    service.order(client.take())
    assert len(service.found_by(SECRET)) == 1


def test_remembered_session_is_recognised_without_a_search() -> None:
    client = Sessions(SECRET, SITE)
    key = read_secret(SECRET)
    assert client.note_order(session_of(key, SITE, 500), 1000)
    assert client.take() == session_of(key, SITE, 501)
    assert not client.note_order(str(uuid.uuid4()), 1000)


def test_search_ends_at_a_service_that_lists_endlessly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_PAGES", 50)

    async def endless(_params: Json) -> Json:
        return {"orders": [{"orderId": "ord_1"}], "nextAfter": "ord_1"}

    with pytest.raises(Unreachable, match="50 pages"):
        finished(Sessions(SECRET, SITE).search(endless))


def test_search_ends_at_a_service_that_lists_too_many_orders(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "MOST_ORDERS", 1000)
    pages = 0

    async def many(_params: Json) -> Json:
        nonlocal pages
        pages += 1
        return {"orders": [{"orderId": "ord_1"}] * 100, "nextAfter": "ord_1"}

    with pytest.raises(Unreachable, match="more than 1000 orders"):
        finished(Sessions(SECRET, SITE).search(many))
    assert pages == 11


def test_search_refuses_a_page_longer_than_it_asked_for() -> None:
    async def long(params: Json) -> Json:
        return {"orders": [{"orderId": "ord_1"}] * (params["limit"] + 1), "nextAfter": None}

    with pytest.raises(Unreachable, match="101 orders a page"):
        finished(Sessions(SECRET, SITE).search(long))


@pytest.mark.parametrize(
    "data", [{}, {"orders": {}}, {"orders": [1], "nextAfter": None}, {"orders": [], "nextAfter": 1}]
)
def test_search_refuses_an_answer_without_a_list(data: Json) -> None:
    async def ask(_params: Json) -> Json:
        return data

    with pytest.raises(Unreachable, match="without a list"):
        finished(Sessions(SECRET, SITE).search(ask))
