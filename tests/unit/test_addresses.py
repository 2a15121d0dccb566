"""Addresses: valid ones are accepted, invalid ones refused."""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from monero import base58
from monero.address import Address
from monero.address import address as decode
from monero.keccak import keccak_256
from nacl.bindings import crypto_core_ed25519_add

from rpcsvc.domain.addresses import (
    NETWORK_BYTES,
    MoneroNetwork,
    encode_base58,
    evm_address_from_seed,
    evm_checksum,
    monero_pattern,
    parse_evm_address,
    parse_monero_address,
    same_address,
    stagenet_subaddress,
    subaddress_on,
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


def test_address_of_another_network_gets_its_network() -> None:
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
    assert decode(text).net  # the package itself accepts it
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


def test_evm_addresses_ignore_case_and_monero_ones_do_not() -> None:
    assert same_address(EIP55[0], EIP55[0].lower())
    assert not same_address(EIP55[0], EIP55[1])
    assert same_address(DONATION, DONATION)
    assert not same_address(DONATION, DONATION.swapcase())
    assert not same_address("\ud800", DONATION)


# Made by real wallets, of each network and kind; published with the monero package.
PUBLISHED = [
    (MoneroNetwork.MAINNET, "standard",
     "47ewoP19TN7JEEnFKUJHAYhGxkeTRH82sf36giEp9AcNfDBfkAtRLX7A6rZz18bbNHPNV7ex6WYbMN3aKisFRJZ8"
     "Ebsmgef"),
    (MoneroNetwork.MAINNET, "subaddress",
     "84LooD7i35SFppgf4tQ453Vi3q5WexSUXaVgut69ro8MFnmHwuezAArEZTZyLr9fS6QotjqkSAxSF6d1aDgsPoX8"
     "49izJ7m"),
    (MoneroNetwork.MAINNET, "integrated",
     "4HMcpBpe4ddJEEnFKUJHAYhGxkeTRH82sf36giEp9AcNfDBfkAtRLX7A6rZz18bbNHPNV7ex6WYbMN3aKisFRJZ8"
     "M7yKhzQhKW3ECCLWQw"),
    (MoneroNetwork.TESTNET, "standard",
     "9wuKTHsxGiwEsMp2fYzJiVahyhU2aZi1oZ6R6fK5U64uRa1Pxi8diZh2S1GJFqYXRRhcbfzfWiPD819zKEZkXTMw"
     "P7hMs5N"),
    (MoneroNetwork.TESTNET, "subaddress",
     "BaU3yLuDqdcETYzeF7vFSVEKNR4sSGxBV1Evrw5yNBf2VMiuAwfDmiF3RHqLHkaA5A6RGiNNRUqvtaqhMtdjA1SQ"
     "1tnQV8D"),
    (MoneroNetwork.STAGENET, "standard",
     "52jzuBBUMty3xPL3JsQxGP74LDuV6E1LS8Zda1PbdqQjGzFmH6N9ep9McbFKMALujVT9S5mKpbEgC5VPhfoAiVj8"
     "LdAqbp6"),
    (MoneroNetwork.STAGENET, "subaddress",
     "7AeQwvrLtPeYoXVPRkEu8oEL7N9wnqHjYKwSvTf6YKbHgYmw6AJMsjggzVLo21egMK9qcoV1mxCTfP4FbaGb7JEM"
     "DfpLetk"),
    (MoneroNetwork.STAGENET, "integrated",
     "5CSfuyzxyAV3xPL3JsQxGP74LDuV6E1LS8Zda1PbdqQjGzFmH6N9ep9McbFKMALujVT9S5mKpbEgC5VPhfoAiVj8"
     "Vz8ySmoqYgTE8dR1yS"),
]  # fmt: skip
NOT_STRINGS: list[tuple[object, str]] = [
    (None, "null"),
    (True, "a boolean"),
    (5, "a number"),
    (0.5, "a number"),
    ([], "an array"),
    ({}, "an object"),
]


def monero_text(network_byte: int, keys: bytes) -> str:
    body = bytes([network_byte]) + keys
    return str(base58.encode((body + keccak_256(body).digest()[:4]).hex()))


@pytest.mark.parametrize(("network", "kind", "text"), PUBLISHED)
def test_real_wallet_addresses_are_valid_on_their_network_only(
    network: MoneroNetwork, kind: str, text: str
) -> None:
    assert parse_monero_address(text, networks=[network]) == (text, network, kind)
    with pytest.raises(InvalidDestination, match=f"is for {network}"):
        parse_monero_address(text, networks=ALL - {network})


@given(st.sampled_from(PUBLISHED), st.integers(0, 105), st.sampled_from(_BASE58))
def test_no_address_of_any_kind_survives_a_changed_character(
    published: tuple[MoneroNetwork, str, str], at: int, char: str
) -> None:
    good = published[2]
    at %= len(good)
    changed = good[:at] + char + good[at + 1 :]
    assume(changed != good)
    with pytest.raises(InvalidDestination):
        parse_monero_address(changed, networks=ALL)


def test_a_block_that_spells_2_to_the_64_is_not_taken_for_zeros() -> None:
    good = monero_text(18, b"\x58" * 7 + b"\x00" * 8 + b"\x58" * 49)
    assert good[11:22] == "1" * 11
    assert base58.encode("ff" * 8) == "jpXCZedGfVQ"
    overflowing = good[:11] + "jpXCZedGfVR" + good[22:]
    assert decode(overflowing).net  # the package itself accepts it
    with pytest.raises(InvalidDestination, match="not spelled"):
        parse_monero_address(overflowing, networks=ALL)


@given(st.binary(min_size=8, max_size=8))
def test_blocks_that_the_package_encodes_are_within_the_largest(block: bytes) -> None:
    assert base58.encode(block.hex()) <= "jpXCZedGfVQ"


@given(st.binary(max_size=80))
def test_base58_agrees_with_the_package(data: bytes) -> None:
    assert encode_base58(data) == base58.encode(data.hex())


def test_a_key_with_a_part_outside_the_main_subgroup_is_refused() -> None:
    point = bytes.fromhex(decode(STANDARD).spend_key())
    of_order_2 = b"\xec" + b"\xff" * 30 + b"\x7f"
    for bad in (crypto_core_ed25519_add(point, of_order_2), of_order_2, b"\x01" + b"\x00" * 31):
        for keys in (bad + point, point + bad):
            with pytest.raises(InvalidDestination, match="no wallet"):
                parse_monero_address(monero_text(18, keys), networks=ALL)


def test_a_network_byte_that_monero_does_not_use_is_refused() -> None:
    keys = bytes.fromhex(decode(STANDARD).spend_key()) * 2
    for byte in (0, 17, 20, 37, 255):
        with pytest.raises(InvalidDestination, match=f"has the network byte {byte}, which no"):
            parse_monero_address(monero_text(byte, keys), networks=ALL)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (STANDARD[:-1], "94 characters"),
        (STANDARD + " ", "spaces around"),
        ("0" + STANDARD[1:], "position 1 that"),
        (STANDARD[:50] + "l" + STANDARD[51:], "position 51 that"),
        (STANDARD.lower().replace("l", "k").replace("0", "1"), "checksum"),
        ("", "has 0 characters"),
    ],
)
def test_bad_monero_address_gets_what_is_wrong(text: str, expected: str) -> None:
    with pytest.raises(InvalidDestination, match=expected):
        parse_monero_address(text, networks=ALL)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (EIP55[0][2:], "does not start with 0x"),
        ("0X" + EIP55[0][2:], "write the x in lower case"),
        (EIP55[0][:-1], "has 41 characters: send 42"),
        (EIP55[0] + "\n", "spaces around"),
        (EIP55[0][:2] + "g" + EIP55[0][3:], "position 3 that is not a hex digit"),
        (EIP55[0][:9] + "g" + EIP55[0][10:], "position 10 that is not a hex digit"),
        (EIP55[0][:9] + "\uff11" + EIP55[0][10:], "position 10 that is not a hex digit"),
        (EIP55[0][:4] + EIP55[0][4].swapcase() + EIP55[0][5:], "EIP-55 .* is character 5"),
        ("0x" + "0" * 40, "zero address"),
        ("", r"send 0x and 40 hex digits\.$"),
    ],
)
def test_bad_evm_address_gets_what_is_wrong(text: str, expected: str) -> None:
    with pytest.raises(InvalidDestination, match=expected):
        parse_evm_address(text)


@pytest.mark.parametrize("spell", [str, str.lower, lambda t: "0x" + t[2:].upper()])
def test_a_forbidden_address_is_refused_in_every_spelling(spell: Callable[[str], str]) -> None:
    forbidden = frozenset({EIP55[0].lower()})
    with pytest.raises(InvalidDestination, match="token contract"):
        parse_evm_address(spell(EIP55[0]), forbidden=forbidden)
    assert parse_evm_address(spell(EIP55[1]), forbidden=forbidden) == EIP55[1]


def test_case_of_the_first_digit_is_checked() -> None:
    address = "0xD1220A0cf47c7B9Be7A2E6BA89F429762e7b9aDb"
    with pytest.raises(InvalidDestination, match="is character 3"):
        parse_evm_address("0xd" + address[3:])
    lower_but_first = "0xA" + "b" * 39
    with pytest.raises(InvalidDestination, match="EIP-55"):
        parse_evm_address(lower_but_first)


def test_refusal_names_the_field() -> None:
    for value in (7, "x", STANDARD[:-1], EIP55[0][:-1]):
        for parse in (
            lambda v: parse_evm_address(v, field="refundAddress"),
            lambda v: parse_monero_address(v, field="refundAddress", networks=ALL),
        ):
            with pytest.raises(InvalidDestination, match=r"^refundAddress ") as caught:
                parse(value)
            assert caught.value.field == "refundAddress"
    for parse in (parse_evm_address, lambda v: parse_monero_address(v, networks=ALL)):
        with pytest.raises(InvalidDestination) as caught:
            parse("x")
        assert caught.value.field == "to"


def test_evm_address_in_capitals_is_no_monero_address() -> None:
    with pytest.raises(InvalidDestination, match="is an EVM address"):
        parse_monero_address("0X" + EIP55[0][2:], networks=ALL)


def test_received_of_128_characters_is_given_back_whole() -> None:
    for size, whole in ((128, True), (129, False)):
        text = "0x" + "q" * (size - 2)
        with pytest.raises(InvalidDestination) as caught:
            parse_evm_address(text)
        assert caught.value.received == (text if whole else text[:125] + "...")


def test_address_of_the_other_side_gets_the_direction() -> None:
    direction = "x2u pays USDC to an EVM address, u2x pays XMR to a Monero address"
    with pytest.raises(InvalidDestination, match=f"is a Monero address .*{direction}"):
        parse_evm_address(STANDARD)
    with pytest.raises(InvalidDestination, match=f"is an EVM address .*{direction}"):
        parse_monero_address(EIP55[0], networks=ALL)


def test_refund_address_of_the_other_asset_mentions_no_payout() -> None:
    # The refund of u2x goes to an EVM address: the message for payouts would mislead.
    for parse in (
        lambda: parse_evm_address(STANDARD, field="walletAddress"),
        lambda: parse_monero_address(EIP55[0], field="walletAddress", networks=ALL),
    ):
        with pytest.raises(InvalidDestination, match="address is needed") as caught:
            parse()
        assert caught.value.message.endswith(" address is needed.")


@pytest.mark.parametrize(("value", "kind"), NOT_STRINGS, ids=repr)
def test_what_is_no_string_is_called_by_its_json_type(value: object, kind: str) -> None:
    for parse in (parse_evm_address, lambda v: parse_monero_address(v, networks=ALL)):
        with pytest.raises(InvalidDestination, match=f"not {kind}") as caught:
            parse(value)
        assert caught.value.received == kind


def test_what_was_received_is_given_back_short() -> None:
    with pytest.raises(InvalidDestination) as caught:
        parse_evm_address("0x" + "q" * 5000)
    received = caught.value.received
    assert (len(received), received[-4:]) == (128, "q...")
    with pytest.raises(InvalidDestination) as caught:
        parse_monero_address(STANDARD[:-1], networks=ALL)
    assert caught.value.received == STANDARD[:-1]


def test_a_lone_surrogate_is_equal_to_itself_only() -> None:
    assert same_address("\ud800", "\ud800")
    assert not same_address("\ud800", "?")
    assert not same_address("\ud800", "\ud801")


def test_a_seed_of_the_wrong_length_makes_no_address() -> None:
    with pytest.raises(ValueError, match="must have 32 bytes, not 20"):
        evm_address_from_seed(b"\x07" * 20)
    with pytest.raises(ValueError, match="must have 64 bytes, not 32"):
        stagenet_subaddress(b"\x07" * 32)


def test_the_same_seed_makes_the_same_address() -> None:
    assert stagenet_subaddress(b"\x07" * 64) == stagenet_subaddress(b"\x07" * 64)
    assert stagenet_subaddress(b"\x07" * 64) != stagenet_subaddress(b"\x08" * 64)
    assert evm_address_from_seed(b"\x07" * 32) != evm_address_from_seed(b"\x08" * 32)


@pytest.mark.parametrize("network", MoneroNetwork)
@pytest.mark.parametrize("kind", range(3), ids=["standard", "subaddress", "integrated"])
@given(rest=st.binary(min_size=76, max_size=76))
def test_network_pattern_accepts_its_own_addresses_only(
    network: MoneroNetwork, kind: int, rest: bytes
) -> None:
    raw = bytes([NETWORK_BYTES[network][kind]]) + rest[: 76 if kind == 2 else 68]
    text = base58.encode(raw.hex())
    for other in MoneroNetwork:
        assert bool(re.match(monero_pattern([other]), text)) == (other is network)
    assert re.match(monero_pattern(ALL), text)
    assert not re.match(monero_pattern([network]), text[:-1])


BODY = "[1-9A-HJ-NP-Za-km-z]"


@pytest.mark.parametrize(
    ("networks", "pattern"),
    [
        (["mainnet"], f"^((4[1-9AB]|8[2-9A-C]){BODY}{{93}}|(4[B-HJ-M]){BODY}{{104}})$"),
        (["stagenet"], f"^((5[1-9AB]|7[2-9AB]){BODY}{{93}}|(5[B-HJ-M]){BODY}{{104}})$"),
        (["testnet"], f"^((9[s-z]|A[12]|B[YZa-h]){BODY}{{93}}|(A[2-9A-C]){BODY}{{104}})$"),
        (
            ["testnet", "mainnet"],
            f"^((4[1-9AB]|8[2-9A-C]|9[s-z]|A[12]|B[YZa-h]){BODY}{{93}}"
            f"|(4[B-HJ-M]|A[2-9A-C]){BODY}{{104}})$",
        ),
    ],
)
def test_pattern_is_written_in_ranges(networks: list[str], pattern: str) -> None:
    assert monero_pattern([MoneroNetwork(name) for name in networks]) == pattern


@given(st.binary(min_size=64, max_size=64).filter(any))
def test_subaddress_has_the_same_keys_on_each_network(seed: bytes) -> None:
    staged = stagenet_subaddress(seed)
    for network in MoneroNetwork:
        moved = subaddress_on(staged, network)
        found = parse_monero_address(moved, networks=[network])
        assert (found.network, found.kind) == (network, "subaddress")
        assert decode(moved).spend_key() == decode(staged).spend_key()
        assert decode(moved).view_key() == decode(staged).view_key()
        assert subaddress_on(moved, MoneroNetwork.STAGENET) == staged


def test_addresses_are_compared_by_their_kind() -> None:
    assert same_address("0XAB", "0xab")
    assert same_address("0xab", "0XAB")
    assert not same_address("AB", "ab")
