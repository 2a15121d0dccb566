"""Stored answers are compressed, and come back byte for byte, whenever they were packed."""

from __future__ import annotations

import hashlib
import random
import zlib
from base64 import urlsafe_b64encode

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcsvc.store.packing import (
    DICTIONARIES,
    NEWEST,
    RECEIPTS,
    pack,
    pack_receipt,
    unpack,
    unpack_receipt,
)

# Packed by the first dictionaries when they were made.
PARAMS = '{"direction":"x2u"}'
ANSWER = b'{"ok":true,"operation":"swap.create","data":{"order":{"attestation":"eyJhIjoxfQ.eyJiIjoyfQ.c2ln"}}}'  # fmt: skip  # noqa: E501
PACKED = (
    "78bb1218e575c39c6fad65206ecc18363a041fba41edd9024"
    "d014a1b824c4b52b232aa6550025ac7509c990e00a34e255c"
)
RECEIPT = (
    '{"network":"arbitrum","asset":"USDC","txid":"0xab","address":"0xcd","amount":"1","block":7}'
)
KNOWN = b"0xcd 0xab ord_1/payout/1"
PACKED_RECEIPT = "0178bbfe9364b923d1d7894968fe4e4e4176b621c2d5e6b50047d81c5c"
ADDRESS = (
    "8BEZVL9Tcv2fAPU4KmGc1GXfMaAB3M1JEVW8DUmU"
    "euzx98ujBdTk12qUsGWjFYq6na16u4vjKU1Ly7M8GRikS2sqK73kVE6"
)
TXID = "f1ab16b06cb5a62f3db2e481142d8a854d0c883968a57f9fe4887ea7237ab754"
NAME = "ord_2EN9NHCD4Z84PYBWX0T4KNY9T7/payout/1"
BASE58 = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"

JWS = st.lists(st.binary(max_size=40), min_size=3, max_size=3).map(
    lambda parts: b".".join(b"eyJ" + urlsafe_b64encode(part).rstrip(b"=") for part in parts)
)
TEXTS = st.text(st.characters(exclude_categories=["Cc", "Cs"])).map(str.encode)
WORDS = st.text("abcXYZ019-_.", min_size=1, max_size=12).map(lambda text: b"eyJ" + text.encode())


def test_dictionaries_in_use_never_change() -> None:
    digests = {number: hashlib.sha256(text).hexdigest() for number, text in DICTIONARIES.items()}
    assert digests == {1: "8686b0649768e591d7cb780477dd1e8b514061e7acf925bab0c40906fc087d76"}


def test_answer_packed_long_ago_is_still_read() -> None:
    assert unpack(bytes.fromhex(PACKED), 1) == (PARAMS, ANSWER)


def test_receipt_packed_long_ago_is_still_read() -> None:
    assert unpack_receipt(bytes.fromhex(PACKED_RECEIPT), KNOWN) == RECEIPT
    assert RECEIPTS.keys() == {1}


@given(receipt=st.text(), known=st.binary())
def test_any_receipt_comes_back(receipt: str, known: bytes) -> None:
    receipt = receipt.encode("utf-8", "replace").decode()
    assert unpack_receipt(pack_receipt(receipt, known), known) == receipt


def test_receipt_beside_another_row_is_refused() -> None:
    with pytest.raises(zlib.error):
        unpack_receipt(bytes.fromhex(PACKED_RECEIPT), KNOWN.replace(b"ord_1", b"ord_2"))


def test_receipt_of_a_batch_packs_to_little_more_than_its_keys() -> None:
    """Hex has 4 bits a letter and base58 5.9: 544 bytes of keys, 1,580 of a proof."""
    rng = random.Random(1)
    key = rng.randbytes(16 * 34).hex()
    proof = "OutProofV2" + "".join(rng.choices(BASE58, k=2_140))
    said = {
        "network": "monero", "asset": "XMR", "txid": TXID, "address": ADDRESS,
        "amount": "0.97808", "block": 118, "transactionKey": key, "transactionProof": proof,
        "proofMessage": NAME,
    }  # fmt: skip
    receipt = orjson.dumps(said).decode()
    known = f"{ADDRESS} {TXID} {NAME}".encode()
    assert len(pack_receipt(receipt, known)) < len(receipt) * 7 // 10


@given(parts=st.lists(TEXTS | JWS | WORDS | st.sampled_from([b'"', b'":"', b"eyJ"]), max_size=12))
def test_any_answer_comes_back_byte_for_byte(parts: list[bytes]) -> None:
    for body in (b"".join(parts), b'"' + b'","'.join(parts) + b'"'):
        assert unpack(pack(PARAMS, body), NEWEST) == (PARAMS, body)


def test_damaged_answer_is_refused_or_the_same() -> None:
    """Some bits fill the last byte up, and mean nothing."""
    packed = pack(PARAMS, ANSWER)
    flipped = [
        (int.from_bytes(packed) ^ 1 << bit).to_bytes(len(packed)) for bit in range(8 * len(packed))
    ]
    refused = 0
    for damaged in [*flipped, *(packed[:length] for length in range(len(packed)))]:
        try:
            assert unpack(damaged, NEWEST) == (PARAMS, ANSWER)
        except (ValueError, zlib.error):
            refused += 1
    assert refused >= 9 * len(packed) - 8


@pytest.mark.parametrize("number", DICTIONARIES)
def test_signed_token_packs_to_little_more_than_its_signature(number: int) -> None:
    token = DICTIONARIES[number].split(b'"attestation":"')[1].split(b"\n")
    header, payload = (urlsafe_b64encode(part).rstrip(b"=") for part in token[1:3])
    body = b'{"attestation":"' + b".".join((header, payload, b"A" * 86)) + b'"}'
    assert len(pack("{}", body)) < len(body) // 8
