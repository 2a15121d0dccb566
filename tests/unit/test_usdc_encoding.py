"""The token's calls and typed data, against the independent encoders of eth-abi and eth-account."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcsvc.domain import usdc
from rpcsvc.domain.addresses import evm_checksum
from rpcsvc.domain.usdc import Authorization, Domain, Permit, Signature
from rpcsvc.settlement.onchain.evm import keys

eth_abi = pytest.importorskip("eth_abi", reason="needs the extra rpcsvc[onchain]")
messages = keys._load("eth_account.messages")

ALICE = evm_checksum("0x" + "a1" * 20)
BOB = evm_checksum("0x" + "0b" * 20)
TOKEN = "0xaf88d065e77c8cC2239327C5EDb3A432268e5831"
DOMAIN = Domain("USD Coin", "2", 42161, TOKEN)
AUTHORIZATION = Authorization(ALICE, BOB, 1_500_000, 10, 2**40, b"\5" * 32)
PERMIT = Permit(ALICE, BOB, usdc.LARGEST_WORD, 3, 2**40)
SIGNATURE = Signature(27, 2**255 + 1, 2**254 + 3)
PARTS = (ALICE, BOB, 1_500_000, 10, 2**40, b"\5" * 32)
PART_TYPES = ("address", "address", "uint256", "uint256", "uint256", "bytes32")

addresses = st.binary(min_size=20, max_size=20).map(lambda raw: evm_checksum("0x" + raw.hex()))
words = st.integers(0, usdc.LARGEST_WORD)


def typed_digest(kind: str, fields: list[tuple[str, str]], message: dict[str, Any]) -> bytes:
    """The digest as eth-account makes it."""
    encoded = messages.encode_typed_data(
        domain_data={
            "name": DOMAIN.name,
            "version": DOMAIN.version,
            "chainId": DOMAIN.chain_id,
            "verifyingContract": DOMAIN.contract,
        },
        message_types={kind: [{"name": name, "type": type_} for type_, name in fields]},
        message_data=message,
    )
    return usdc.keccak256(b"\x19" + encoded.version + encoded.header + encoded.body)


# --- calls -----------------------------------------------------------------------------------


def test_selectors_are_the_published_ones() -> None:
    assert usdc.transfer(ALICE, 1)[:4].hex() == "a9059cbb"
    assert usdc.transfer_from(ALICE, BOB, 1)[:4].hex() == "23b872dd"
    assert usdc.balance_of(ALICE)[:4].hex() == "70a08231"
    assert usdc.DOMAIN_SEPARATOR.hex() == "3644e515"
    assert usdc.PAUSED.hex() == "5c975abb"
    assert usdc.is_blacklisted(ALICE)[:4].hex() == "fe575a87"
    assert usdc.nonces(ALICE)[:4].hex() == "7ecebe00"
    assert usdc.authorization_state(ALICE, bytes(32))[:4].hex() == "e94a0102"
    assert usdc.permit_call(PERMIT, SIGNATURE)[:4].hex() == "d505accf"
    assert usdc.selector("isValidSignature(bytes32,bytes)").hex() == "1626ba7e"
    assert usdc.VALID_SIGNATURE.hex() == "1626ba7e" + "00" * 28
    assert usdc.transfer_with_authorization(AUTHORIZATION, SIGNATURE)[:4].hex() == "e3ee160e"
    assert usdc.receive_with_authorization(AUTHORIZATION, SIGNATURE)[:4].hex() == "ef55bec6"


def test_the_transfer_event_is_the_published_one() -> None:
    assert usdc.TRANSFER_TOPIC.hex() == (
        "ddf252ad1be2c89b69c2b068fc378daa952ba7f163c4a11628f55a4df523b3ef"
    )


@given(addresses, words)
def test_a_transfer_is_encoded_as_the_abi_has_it(to: str, units: int) -> None:
    assert usdc.transfer(to, units)[4:] == eth_abi.encode(["address", "uint256"], [to, units])


def test_signed_calls_are_encoded_as_the_abi_has_them() -> None:
    vrs = (27, SIGNATURE.r.to_bytes(32, "big"), SIGNATURE.s.to_bytes(32, "big"))
    expected = eth_abi.encode([*PART_TYPES, "uint8", "bytes32", "bytes32"], [*PARTS, *vrs])
    assert usdc.transfer_with_authorization(AUTHORIZATION, SIGNATURE)[4:] == expected
    assert usdc.receive_with_authorization(AUTHORIZATION, SIGNATURE)[4:] == expected
    types = ["address", "address", "uint256", "uint256", "uint8", "bytes32", "bytes32"]
    permit = eth_abi.encode(types, [ALICE, BOB, PERMIT.units, PERMIT.deadline, *vrs])
    assert usdc.permit_call(PERMIT, SIGNATURE)[4:] == permit


@given(st.binary(max_size=200))
def test_signatures_as_bytes_are_encoded_as_the_abi_has_them(signature: bytes) -> None:
    expected = eth_abi.encode([*PART_TYPES, "bytes"], [*PARTS, signature])
    assert usdc.transfer_with_authorization_bytes(AUTHORIZATION, signature)[4:] == expected
    assert usdc.receive_with_authorization_bytes(AUTHORIZATION, signature)[4:] == expected


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=200))
def test_question_to_a_contract_wallet_is_encoded_by_the_abi(
    digest: bytes, signature: bytes
) -> None:
    call = usdc.is_valid_signature(digest, signature)
    assert call[:4] == usdc.VALID_SIGNATURE[:4]
    assert call[4:] == eth_abi.encode(["bytes32", "bytes"], [digest, signature])


@given(st.builds(Signature, st.integers(27, 28), words, words))
def test_packed_signature_has_65_bytes(signature: Signature) -> None:
    packed = signature.packed()
    assert (int.from_bytes(packed[:32], "big"), int.from_bytes(packed[32:64], "big")) == (
        signature.r,
        signature.s,
    )
    assert packed[64:] == bytes([signature.v])


@pytest.mark.parametrize("units", [-1, 2**256, True, 1.0])
def test_an_amount_that_no_word_holds_is_refused(units: int) -> None:
    with pytest.raises(ValueError, match="256 bits"):
        usdc.transfer(ALICE, units)


@pytest.mark.parametrize("to", ["", "0x", ALICE[:-1], ALICE + "0", ALICE[2:], "0x" + "g" * 40])
def test_what_is_no_address_is_refused(to: str) -> None:
    with pytest.raises(ValueError, match="not an address"):
        usdc.transfer(to, 1)


# --- typed data ------------------------------------------------------------------------------

AUTHORIZATION_FIELDS = [
    ("address", "from"), ("address", "to"), ("uint256", "value"), ("uint256", "validAfter"),
    ("uint256", "validBefore"), ("bytes32", "nonce"),
]  # fmt: skip
MESSAGE = dict(zip((name for _, name in AUTHORIZATION_FIELDS), PARTS, strict=True))


def test_authorizations_are_digested_as_eip_712_has_it() -> None:
    transfer = typed_digest("TransferWithAuthorization", AUTHORIZATION_FIELDS, MESSAGE)
    receive = typed_digest("ReceiveWithAuthorization", AUTHORIZATION_FIELDS, MESSAGE)
    assert usdc.transfer_digest(DOMAIN, AUTHORIZATION) == transfer
    assert usdc.receive_digest(DOMAIN, AUTHORIZATION) == receive
    assert transfer != receive


def test_a_permit_is_digested_as_eip_712_has_it() -> None:
    fields = [
        ("address", "owner"), ("address", "spender"), ("uint256", "value"), ("uint256", "nonce"),
        ("uint256", "deadline"),
    ]  # fmt: skip
    parts = (ALICE, BOB, PERMIT.units, PERMIT.nonce, PERMIT.deadline)
    message = dict(zip((name for _, name in fields), parts, strict=True))
    assert usdc.permit_digest(DOMAIN, PERMIT) == typed_digest("Permit", fields, message)


def test_each_field_of_the_domain_changes_the_separator() -> None:
    others = (
        Domain("USDC", "2", 42161, TOKEN),
        Domain("USD Coin", "1", 42161, TOKEN),
        Domain("USD Coin", "2", 1, TOKEN),
        Domain("USD Coin", "2", 42161, ALICE),
    )
    assert len({domain.separator() for domain in (DOMAIN, *others)}) == 5


# --- results and events ----------------------------------------------------------------------


@given(addresses, addresses, words)
def test_a_transfer_event_is_read_as_it_was_written(sender: str, to: str, units: int) -> None:
    topics = (usdc.TRANSFER_TOPIC, usdc.address_word(sender), usdc.address_word(to))
    assert usdc.read_transfer(topics, usdc.uint_word(units)) == usdc.TransferEvent(
        sender, to, units
    )


@pytest.mark.parametrize(
    ("topics", "data"),
    [
        ((), bytes(32)),
        ((usdc.TRANSFER_TOPIC, bytes(32)), bytes(32)),
        ((bytes(32), bytes(32), bytes(32)), bytes(32)),
        ((usdc.TRANSFER_TOPIC, bytes(32), bytes(32), bytes(32)), b""),
        ((usdc.TRANSFER_TOPIC, bytes(32), bytes(32)), bytes(31)),
        ((usdc.TRANSFER_TOPIC, bytes(32), b"\1" * 32), bytes(32)),
    ],
)
def test_a_log_of_another_form_is_no_transfer(topics: tuple[bytes, ...], data: bytes) -> None:
    with pytest.raises(ValueError, match=r"Transfer|32 bytes|not an address"):
        usdc.read_transfer(topics, data)
    assert usdc.transfer_in(topics, data) is None


def test_transfer_is_found_among_other_events() -> None:
    topics = (usdc.TRANSFER_TOPIC, usdc.address_word(ALICE), usdc.address_word(BOB))
    assert usdc.transfer_in(topics, usdc.uint_word(7)) == usdc.TransferEvent(ALICE, BOB, 7)


def test_results_are_read_by_type() -> None:
    assert usdc.read_uint(usdc.uint_word(7)) == 7
    assert usdc.read_bool(usdc.uint_word(1)) is True
    assert usdc.read_bool(usdc.uint_word(0)) is False
    assert usdc.bytes32_word(b"\7" * 32) == b"\7" * 32
    assert usdc.read_string(eth_abi.encode(["string"], ["USD Coin"])) == "USD Coin"


@pytest.mark.parametrize("result", [b"", bytes(31), bytes(33)])
def test_a_result_of_another_size_is_refused(result: bytes) -> None:
    with pytest.raises(ValueError, match="32 bytes"):
        usdc.read_uint(result)


def test_other_results_that_can_not_be_right_are_refused() -> None:
    with pytest.raises(ValueError, match="not a boolean"):
        usdc.read_bool(usdc.uint_word(2))
    with pytest.raises(ValueError, match="cut off"):
        usdc.read_string(eth_abi.encode(["string"], ["USD Coin"])[:70])
