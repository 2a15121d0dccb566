"""Addresses: a wrong one is never accepted, a right one always."""

from __future__ import annotations

import os

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from monero import base58
from monero.address import Address
from monero.address import address as decode
from monero.keccak import keccak_256

from rpcsvc.domain.addresses import (
    MoneroNetwork,
    evm_address_from_seed,
    evm_checksum,
    parse_evm_address,
    parse_monero_address,
    same_address,
    stagenet_subaddress,
)
from rpcsvc.errors import InvalidDestination

ALL = frozenset(MoneroNetwork)
# The Monero project's donation address: getmonero.org.
DONATION = (
    "888tNkZrPN6JsEgekjMnABU4TBzc2Dt29EPAvkRxbANsAnjyPbb3iQ1YBRk1UXcdRsiKc"
    "9dhwMVgN5S9cQUiyoogDavup3H"
)
STANDARD = (
    "44AFFq5kSiGBoZ4NMDwYtN18obc8AemS33DBLWs3H7otXft3XjrpDtQGv7SqSsaBYBb98"
    "uNbr2VBBEt7f2wfn3RVGQBEP3A"
)
# The examples of EIP-55 itself.
EIP55 = [
    "0x5aAeb6053F3E94C9b9A09f33669435E7Ef1BeAed",
    "0xfB6916095ca1df60bB79Ce92cE3Ea74c37c5d359",
    "0xdbF03B407c01E7cD3CBea99509d93f8DDDC8C6FB",
    "0xD1220A0cf47c7B9Be7A2E6BA89F429762e7b9aDb",
    "0x52908400098527886E0F7030069857D2E4169EE7",
    "0xde709f2102306220921060314715629080e2fb77",
]
_BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


@pytest.mark.parametrize("address", EIP55)
def test_the_examples_of_eip_55_hold(address: str) -> None:
    assert evm_checksum(address.lower()) == address
    assert parse_evm_address(address) == address
    assert parse_evm_address(address.lower()) == address


@given(st.integers(2, 41), st.sampled_from("0123456789abcdefABCDEF"))
def test_no_mixed_case_address_survives_a_changed_character(at: int, char: str) -> None:
    good = EIP55[0]
    changed = good[:at] + char + good[at + 1 :]
    assume(changed != good)
    with pytest.raises(InvalidDestination):
        parse_evm_address(changed)


@given(st.text(max_size=120))
def test_any_text_is_an_address_or_an_invalid_destination(text: str) -> None:
    for parse in (parse_evm_address, lambda t: parse_monero_address(t, networks=ALL)):
        with pytest.raises(InvalidDestination):
            parse(text)


@pytest.mark.parametrize(("address", "kind"), [(DONATION, "subaddress"), (STANDARD, "standard")])
def test_published_monero_addresses_are_good(address: str, kind: str) -> None:
    found = parse_monero_address(address, networks=ALL)
    assert (found.network, found.kind) == (MoneroNetwork.MAINNET, kind)


def test_an_integrated_address_is_good() -> None:
    integrated = str(Address(STANDARD).with_payment_id("0123456789abcdef"))
    assert parse_monero_address(integrated, networks=ALL).kind == "integrated"


def test_an_address_of_another_network_is_told_which() -> None:
    stagenet = stagenet_subaddress(b"\x07" * 64)
    with pytest.raises(InvalidDestination, match="for stagenet, and this service pays on mainnet"):
        parse_monero_address(stagenet, networks=[MoneroNetwork.MAINNET])


@given(st.integers(0, 94), st.sampled_from(_BASE58))
def test_no_monero_address_survives_a_changed_character(at: int, char: str) -> None:
    changed = DONATION[:at] + char + DONATION[at + 1 :]
    assume(changed != DONATION)
    with pytest.raises(InvalidDestination):
        parse_monero_address(changed, networks=ALL)


def test_keys_that_are_no_points_are_refused() -> None:
    body = bytes([18]) + b"\x02" + b"\xff" * 63
    text = base58.encode((body + keccak_256(body).digest()[:4]).hex())
    assert decode(text).net  # the package itself takes it
    with pytest.raises(InvalidDestination, match="no wallet"):
        parse_monero_address(text, networks=ALL)


def test_sandbox_addresses_are_good_and_differ() -> None:
    xmr = {stagenet_subaddress(os.urandom(64)) for _ in range(50)}
    assert len(xmr) == 50
    for text in xmr:
        found = parse_monero_address(text, networks=[MoneroNetwork.STAGENET])
        assert found.kind == "subaddress"
        assert str(decode(text)) == text
    evm = {evm_address_from_seed(os.urandom(32)) for _ in range(50)}
    assert {parse_evm_address(text) for text in evm} == evm


def test_evm_addresses_compare_without_case_and_monero_ones_to_the_letter() -> None:
    assert same_address(EIP55[0], EIP55[0].lower())
    assert not same_address(EIP55[0], EIP55[1])
    assert same_address(DONATION, DONATION)
    assert not same_address(DONATION, DONATION.swapcase())
    assert not same_address("\ud800", DONATION)
