"""Clients of the settings: scopes, destinations, limits, approvals and tokens."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from rpcsvc.domain.clients import (
    DEFAULT,
    Approval,
    ApprovalState,
    Client,
    Clients,
    Credential,
    ExceededLimit,
    KnownClient,
    Scope,
    Spending,
    default_credentials,
    worth,
)
from rpcsvc.domain.integrators import key_hash
from rpcsvc.domain.money import MAX_UNITS
from rpcsvc.domain.pricing import Direction
from rpcsvc.errors import DestinationNotAllowed, Forbidden

X2U, U2X = Direction.XMR_TO_USDC, Direction.USDC_TO_XMR
EVM = "0xAbCdEf0000000000000000000000000000000001"
XMR = "8MoneroAddress"
DEFAULT_CLIENT = KnownClient(DEFAULT, token="t0ken")
DESK = KnownClient("desk", destinations=(EVM, XMR))


def approval(deposit: int, output: int) -> Approval:
    return Approval("a", "desk", "", "t", ApprovalState.PENDING, 0, 1, deposit, output, {})


@pytest.mark.parametrize("units", [0, 1, 99, 100, 101, 10_000, 10**15 + 7])
def test_approval_covers_a_quote_within_its_tolerance(units: int) -> None:
    shown = approval(units, units)
    least, most = -(-units * 9_900 // 10_000), units * 10_100 // 10_000
    assert (shown.least_output, shown.most_deposit) == (least, most)
    assert shown.covers(most, least)
    assert not shown.covers(most + 1, least)
    assert not shown.covers(most, least - 1)


def test_client_has_its_own_keys_and_budgets() -> None:
    assert (DEFAULT_CLIENT.is_default, DESK.is_default) == (True, False)
    assert (DEFAULT_CLIENT.namespace, DESK.namespace) == ("rpc", "client:desk")
    assert (DEFAULT_CLIENT.account, DESK.account) == ("token:t0ken", "client:desk")
    assert DESK.client == Client("token", "client:desk")
    assert "t0ken" not in repr(DEFAULT_CLIENT)


@pytest.mark.parametrize("limit", ["max_order", "max_day", "approve_above"])
def test_each_limit_makes_a_client_limited(limit: str) -> None:
    assert not DESK.has_limits
    assert replace(KnownClient("desk"), **{limit: 0}).has_limits


def test_order_above_the_limit_waits_for_a_person() -> None:
    assert not DESK.needs_approval(10**15)
    client = KnownClient("desk", approve_above=5)
    assert [client.needs_approval(units) for units in (5, 6)] == [False, True]


def test_scope_is_held_by_group_or_by_name() -> None:
    reader = KnownClient("desk", scopes=frozenset({Scope.READ, "swap.fund"}))
    reader.require_scope("swap.status", Scope.READ)
    reader.require_scope("swap.fund", Scope.FUND)
    with pytest.raises(Forbidden, match=r"desk may not call swap\.execute") as caught:
        reader.require_scope("swap.execute", Scope.ORDER)
    assert caught.value.details == {"scope": "order", "scopes": ["read", "swap.fund"]}


@pytest.mark.parametrize("address", [EVM, EVM.lower(), EVM.replace("0x", "0X"), XMR])
def test_listed_destination_is_allowed_in_each_spelling(address: str) -> None:
    DESK.require_destination(address, field="to", caller=None)
    DESK.require_refund_address(address, U2X)


@pytest.mark.parametrize("address", [XMR.lower(), EVM[:-1] + "2", "", XMR[1:]])
def test_other_destination_is_refused_with_the_list(address: str) -> None:
    anyone = KnownClient("any")
    anyone.require_destination(address, field="to", caller=anyone)
    for caller, shown in ((DESK, [EVM, XMR]), (anyone, None), (None, None)):
        with pytest.raises(DestinationNotAllowed, match=r"^to is not among") as caught:
            DESK.require_destination(address, field="to", caller=caller)
        error = caught.value
        assert (error.field, error.received, error.allowed) == ("to", address, shown)
    with pytest.raises(DestinationNotAllowed) as caught:
        DESK.require_refund_address(address, X2U)
    assert caught.value.field == "refundAddress"


def test_usdc_without_a_refund_address_could_go_to_anybody() -> None:
    KnownClient("any").require_refund_address(None, U2X)
    DESK.require_refund_address(None, X2U)
    with pytest.raises(DestinationNotAllowed) as caught:
        DESK.require_refund_address(None, U2X)
    assert (caught.value.field, caught.value.allowed) == ("refundAddress", [EVM, XMR])


def test_refusal_lists_no_more_than_ten_destinations() -> None:
    many = KnownClient("desk", destinations=tuple(map(str, range(11))))
    for address in ("x", None):
        with pytest.raises(DestinationNotAllowed) as caught:
            many.require_refund_address(address, U2X)
        assert caught.value.allowed == list(map(str, range(10)))


def test_limits_of_an_order_and_a_day_hold_to_the_unit() -> None:
    client = KnownClient("desk", max_order=10, max_day=15)
    assert client.exceeded(10, 5) is None
    assert client.exceeded(11, 0) == ExceededLimit("max_order_usd", 10, 0)
    assert client.exceeded(10, 6) == ExceededLimit("max_day_usd", 15, 6)
    assert KnownClient("desk").exceeded(10**15, 10**15) is None


def test_day_counts_every_client_but_the_default() -> None:
    assert DEFAULT_CLIENT.spending(5, 7) is None
    assert DESK.spending(5, 7) == Spending(7, "desk", 5, MAX_UNITS)
    assert KnownClient("desk", max_day=9).spending(5, 7) == Spending(7, "desk", 5, 9)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, MAX_UNITS), ({"max_day": 1}, 50), ({"max_order": 100}, 100), ({"max_order": 40}, 50),
        ({"approve_above": 100}, 100), ({"max_order": 100, "approve_above": 70}, 70),
        ({"max_order": 100, "max_day": 1}, 50),
    ],
)  # fmt: skip
def test_larger_deposit_does_not_get_around_the_limits(
    limits: dict[str, int], expected: int
) -> None:
    assert replace(KnownClient("desk"), **limits).most_deposit(U2X, 50, 165_000_000) == expected


def test_limits_on_deposits_of_xmr_are_converted() -> None:
    client = KnownClient("desk", max_order=165_000_000)
    assert client.most_deposit(X2U, 50, 165_000_000) == 10**12
    assert worth(X2U, 10**12 + 1, 165_000_000) == 165_000_001
    assert worth(U2X, 7, 165_000_000) == 7


def test_client_is_found_by_its_token_and_name() -> None:
    desk, other = KnownClient("desk"), KnownClient("aaa")
    credentials = [
        *default_credentials(["one", "two"]),
        Credential(key_hash("three"), desk),
        Credential(key_hash("four"), other),
    ]
    clients = Clients(credentials)
    found = {name: clients.find(name) for name in ("one", "two", "three", "four", "five", "")}
    assert found == {
        "one": KnownClient(DEFAULT, token="one"), "two": KnownClient(DEFAULT, token="two"),
        "three": desk, "four": other, "five": None, "": None,
    }  # fmt: skip
    assert (clients.named("desk"), clients.named("nobody")) == (desk, None)
    assert clients.listed == [other, desk]
    assert clients.has_tokens
    clients.replace([])
    assert not clients.has_tokens
    assert (clients.find("three"), clients.named("desk"), clients.listed) == (None, None, [])
    assert not Clients().has_tokens
