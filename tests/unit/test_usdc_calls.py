"""The payee in call data: the encoders' output is read, and any changed byte refused."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rpcsvc.domain import usdc
from rpcsvc.domain.usdc import (
    WORD,
    Authorization,
    PayingCall,
    Signature,
    read_paying_call,
)

addresses = st.binary(min_size=20, max_size=20).map(lambda raw: "0x" + raw.hex())
words = st.integers(0, usdc.LARGEST_WORD)
signatures = st.builds(Signature, st.integers(27, 28), words, words)
authorizations = st.builds(
    Authorization, addresses, addresses, words, words, words, st.binary(min_size=32, max_size=32)
)
OWNER, TO = "0x" + "0a" * 20, "0x" + "f1" * 20
AUTHORIZATION = Authorization(OWNER, TO, 1_500_000, 10, 2**40, b"\5" * 32)
SIGNATURE = Signature(27, 2**255 + 1, 2**254 + 3)
PAYING = PayingCall(TO, 1_500_000)
CALLS = {
    "transfer": usdc.transfer(TO, 1_500_000),
    "transferFrom": usdc.transfer_from(OWNER, TO, 1_500_000),
    "transferWithAuthorization": usdc.transfer_with_authorization(AUTHORIZATION, SIGNATURE),
    "receiveWithAuthorization": usdc.receive_with_authorization(AUTHORIZATION, SIGNATURE),
    "transferWithAuthorization, bytes": usdc.transfer_with_authorization_bytes(
        AUTHORIZATION, SIGNATURE.packed()
    ),
    "receiveWithAuthorization, bytes": usdc.receive_with_authorization_bytes(
        AUTHORIZATION, SIGNATURE.packed()
    ),
}
every_call = pytest.mark.parametrize("name", CALLS)


def with_word(call: bytes, at: int, word: bytes) -> bytes:
    start = 4 + at * WORD
    return call[:start] + word + call[start + WORD :]


@every_call
def test_the_recipient_and_the_amount_of_each_call_are_read(name: str) -> None:
    assert read_paying_call(CALLS[name]) == PAYING


@given(addresses, addresses, words)
def test_decoded_transfer_equals_the_encoded_one(owner: str, to: str, units: int) -> None:
    assert read_paying_call(usdc.transfer(to, units)) == (to, units)
    assert read_paying_call(usdc.transfer_from(owner, to, units)) == (to, units)


@given(authorizations, signatures, st.binary(max_size=200))
@example(AUTHORIZATION, SIGNATURE, b"")
@example(AUTHORIZATION, SIGNATURE, b"\0" * 64)
def test_decoded_authorization_equals_the_encoded_one(
    item: Authorization, signature: Signature, packed: bytes
) -> None:
    paid = (item.to, item.units)
    assert read_paying_call(usdc.transfer_with_authorization(item, signature)) == paid
    assert read_paying_call(usdc.receive_with_authorization(item, signature)) == paid
    assert read_paying_call(usdc.transfer_with_authorization_bytes(item, packed)) == paid
    assert read_paying_call(usdc.receive_with_authorization_bytes(item, packed)) == paid


@every_call
def test_a_call_that_is_too_short_or_too_long_pays_nobody(name: str) -> None:
    call = CALLS[name]
    for size in range(len(call)):
        assert read_paying_call(call[:size]) is None
    for more in (b"\0", b"\0" * WORD, b"builder"):
        assert read_paying_call(call + more) is None


@every_call
def test_bits_above_an_address_are_no_address(name: str) -> None:
    call = CALLS[name]
    words_of_addresses = (0,) if name == "transfer" else (0, 1)
    for at in words_of_addresses:
        clean = call[4 + at * WORD : 4 + (at + 1) * WORD]
        for byte in range(12):
            dirty = clean[:byte] + b"\1" + clean[byte + 1 :]
            assert read_paying_call(with_word(call, at, dirty)) is None


def test_a_v_of_more_than_a_byte_is_no_signature() -> None:
    for name in ("transferWithAuthorization", "receiveWithAuthorization"):
        assert read_paying_call(with_word(CALLS[name], 6, usdc.uint_word(255))) == PAYING
        assert read_paying_call(with_word(CALLS[name], 6, usdc.uint_word(256))) is None


def test_call_elsewhere_of_wrong_length_or_padding_is_not_read() -> None:
    for name in ("transferWithAuthorization, bytes", "receiveWithAuthorization, bytes"):
        call = CALLS[name]
        assert call[-31:] == bytes(31)
        for offset in (0, 6 * WORD, 7 * WORD + 1, 8 * WORD, usdc.LARGEST_WORD):
            assert read_paying_call(with_word(call, 6, usdc.uint_word(offset))) is None
        for length in (0, 64, 97, usdc.LARGEST_WORD):
            assert read_paying_call(with_word(call, 7, usdc.uint_word(length))) is None
        assert read_paying_call(call[:-1] + b"\1") is None
    longest = usdc.transfer_with_authorization_bytes(AUTHORIZATION, bytes(8192))
    assert read_paying_call(longest) == PAYING
    long = usdc.transfer_with_authorization_bytes(AUTHORIZATION, bytes(8193))
    assert read_paying_call(long) is None


def test_other_calls_of_the_token_pay_nobody() -> None:
    permit = usdc.Permit(OWNER, TO, 5, 0, 2**40)
    for call in (usdc.balance_of(TO), usdc.permit_call(permit, SIGNATURE), b"", b"\xa9\x05\x9c"):
        assert read_paying_call(call) is None
    approve = usdc.selector("approve(address,uint256)") + CALLS["transfer"][4:]
    assert read_paying_call(approve) is None


@given(st.sampled_from(list(CALLS.values())), st.binary(max_size=400))
def test_bytes_after_a_selector_are_read_only_if_well_encoded(call: bytes, garbage: bytes) -> None:
    found = read_paying_call(call[:4] + garbage)
    if found is not None:
        assert 0 <= found.units <= usdc.LARGEST_WORD
        assert bytes.fromhex(found.to[2:]) in garbage


@given(st.binary(max_size=400))
def test_garbage_raises_nothing(data: bytes) -> None:
    assert read_paying_call(data) is None or data[:4] in {call[:4] for call in CALLS.values()}
