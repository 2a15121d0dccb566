"""Stored answers are compressed, and come back byte for byte, whenever they were packed."""

from __future__ import annotations

import hashlib
import zlib
from base64 import urlsafe_b64encode

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcsvc.store.packing import DICTIONARIES, NEWEST, pack, unpack

# Packed by the first dictionary when it was made.
ANSWER = b'{"ok":true,"operation":"swap.create","data":{"order":{"attestation":"eyJhIjoxfQ.eyJiIjoyfQ.c2ln"}}}'  # fmt: skip  # noqa: E501
PACKED = (
    "78bb1218e575236e7c183612041fa641edc532000594ac0c6b8174929295512d8312d06886e2cc7400eb1a1ec2"
)

JWS = st.lists(st.binary(max_size=40), min_size=3, max_size=3).map(
    lambda parts: b".".join(b"eyJ" + urlsafe_b64encode(part).rstrip(b"=") for part in parts)
)
TEXTS = st.text(st.characters(exclude_categories=["Cc", "Cs"])).map(str.encode)
WORDS = st.text("abcXYZ019-_.", min_size=1, max_size=12).map(lambda text: b"eyJ" + text.encode())


def test_dictionaries_in_use_never_change() -> None:
    digests = {number: hashlib.sha256(text).hexdigest() for number, text in DICTIONARIES.items()}
    assert digests == {1: "8686b0649768e591d7cb780477dd1e8b514061e7acf925bab0c40906fc087d76"}


def test_answer_packed_long_ago_is_still_read() -> None:
    assert unpack(bytes.fromhex(PACKED), 1) == ANSWER


@given(parts=st.lists(TEXTS | JWS | WORDS | st.sampled_from([b'"', b'":"', b"eyJ"]), max_size=12))
def test_any_answer_comes_back_byte_for_byte(parts: list[bytes]) -> None:
    for body in (b"".join(parts), b'"' + b'","'.join(parts) + b'"'):
        assert unpack(pack(body), NEWEST) == body


def test_damaged_answer_is_refused_or_the_same() -> None:
    """Some bits fill the last byte up, and mean nothing."""
    packed = pack(ANSWER)
    flipped = [
        (int.from_bytes(packed) ^ 1 << bit).to_bytes(len(packed)) for bit in range(8 * len(packed))
    ]
    refused = 0
    for damaged in [*flipped, *(packed[:length] for length in range(len(packed)))]:
        try:
            assert unpack(damaged, NEWEST) == ANSWER
        except (ValueError, zlib.error):
            refused += 1
    assert refused >= 9 * len(packed) - 8


def test_answer_that_is_not_packed_is_left_as_it_is() -> None:
    assert unpack(ANSWER, 0) == ANSWER


@pytest.mark.parametrize("number", DICTIONARIES)
def test_signed_token_packs_to_little_more_than_its_signature(number: int) -> None:
    token = DICTIONARIES[number].split(b'"attestation":"')[1].split(b"\n")
    header, payload = (urlsafe_b64encode(part).rstrip(b"=") for part in token[1:3])
    body = b'{"attestation":"' + b".".join((header, payload, b"A" * 86)) + b'"}'
    assert len(pack(body)) < len(body) // 8
