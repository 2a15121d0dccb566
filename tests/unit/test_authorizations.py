"""Signed authorizations and the objects of x402, against its own package and eth-account."""

from __future__ import annotations

import base64
import json
from typing import Any

import eth_abi.abi
import pytest
from eth_account import Account
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from x402.mechanisms.evm.eip712 import hash_eip3009_authorization
from x402.mechanisms.evm.types import ExactEIP3009Authorization

from rpcsvc.domain.addresses import evm_checksum
from rpcsvc.domain.authorizations import (
    LEAST_SECONDS,
    MOST_SECONDS,
    AuthorizationRefused,
    Due,
    Reason,
    SignedAuthorization,
    is_signed_by_key,
    refusal,
    signer_of,
)
from rpcsvc.domain.usdc import LARGEST_WORD, Authorization, Domain, transfer_digest
from rpcsvc.errors import InvalidInput
from rpcsvc.operations.x402 import read_payment
from tests.signature_forms import WRAPPED, forms

NOW = 1_763_678_000
TOKEN = evm_checksum("0x" + "7a" * 20)
TO = evm_checksum("0x" + "0b" * 20)
DOMAIN = Domain("USDC", "2", 84532, TOKEN)
DUE = Due(TO, 150_000_000, DOMAIN)
CURVE_ORDER = 0xFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFFEBAAEDCE6AF48A03BBFD25E8CD0364141

keys = st.integers(1, CURVE_ORDER - 1).map(lambda n: Account.from_key(n.to_bytes(32, "big")))
addresses = st.binary(min_size=20, max_size=20).map(lambda raw: evm_checksum("0x" + raw.hex()))
words = st.integers(0, LARGEST_WORD)
texts = st.text(max_size=20)
domains = st.builds(Domain, texts, texts, words, addresses)
authorizations = st.builds(
    Authorization, addresses, addresses, words, words, words, st.binary(min_size=32, max_size=32)
)
PAYER = Account.from_key(b"\7" * 32)
GOOD = Authorization(PAYER.address, TO, DUE.units, 0, NOW + 300, b"\5" * 32)


def signed(authorization: Authorization, by: Any = PAYER, on: Domain = DOMAIN) -> bytes:
    signature = by.unsafe_sign_hash(transfer_digest(on, authorization)).signature
    return bytes(signature)


def reason(authorization: Authorization, signature: bytes | None = None) -> Reason | None:
    given = SignedAuthorization(authorization, signature or signed(authorization))
    found = refusal(given, DUE, NOW)
    if found is None and not is_signed_by_key(DOMAIN, given):
        return Reason.SIGNATURE
    return found and found.reason


# --- signatures ------------------------------------------------------------------------------


@given(domains, authorizations)
def test_digest_is_the_one_that_x402_signs(domain: Domain, given: Authorization) -> None:
    theirs = ExactEIP3009Authorization(
        given.source,
        given.to,
        str(given.units),
        str(given.valid_after),
        str(given.valid_before),
        "0x" + given.nonce.hex(),
    )
    made = hash_eip3009_authorization(
        theirs, domain.chain_id, domain.contract, domain.name, domain.version
    )
    assert transfer_digest(domain, given) == made


@settings(max_examples=30, deadline=None)
@given(keys, domains, authorizations)
def test_signer_is_found_in_every_form_of_a_signature(
    by: Any, domain: Domain, given: Authorization
) -> None:
    known = SignedAuthorization(given, signed(given, by, domain))
    for signature in forms(known.signature):
        other = SignedAuthorization(given, signature)
        assert signer_of(domain, other) == by.address
        assert known.is_same_payment(other)
        assert other.is_same_payment(known)


@settings(deadline=None)
@given(authorizations, authorizations, st.integers(0, 65 * 8 - 1))
def test_another_payment_or_signature_is_not_the_same(
    first: Authorization, second: Authorization, bit: int
) -> None:
    signature = signed(first)
    known = SignedAuthorization(first, signature)
    same = first.words() == second.words()
    assert known.is_same_payment(SignedAuthorization(second, signature)) is same
    flipped = bytearray(signature)
    flipped[bit // 8] ^= 1 << bit % 8
    assert not known.is_same_payment(SignedAuthorization(first, bytes(flipped)))


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 65 * 8 - 1))
def test_signature_with_another_bit_is_not_the_payers(bit: int) -> None:
    flipped = bytearray(signed(GOOD))
    flipped[bit // 8] ^= 1 << bit % 8
    assert reason(GOOD, bytes(flipped)) is Reason.SIGNATURE


@given(st.binary(max_size=100))
def test_bytes_at_random_are_nobodys_signature(signature: bytes) -> None:
    assert signer_of(DOMAIN, SignedAuthorization(GOOD, signature)) != PAYER.address


def test_signature_with_the_larger_s_is_refused() -> None:
    signature = signed(GOOD)
    s = CURVE_ORDER - int.from_bytes(signature[32:64], "big")
    other = signature[:32] + s.to_bytes(32, "big") + bytes([55 - signature[64]])
    assert signer_of(DOMAIN, SignedAuthorization(GOOD, other)) is None


@pytest.mark.parametrize(
    "other",
    [
        replace(DOMAIN, name="USD Coin"),
        replace(DOMAIN, version="1"),
        replace(DOMAIN, chain_id=8453),
        replace(DOMAIN, contract=TO),
    ],
)
def test_signature_for_another_token_is_refused(other: Domain) -> None:
    assert reason(GOOD, signed(GOOD, on=other)) is Reason.SIGNATURE


def test_signature_in_a_wrapper_is_the_payers() -> None:
    """ERC-6492: factory, its call data and the signature, then the magic word."""
    parts = eth_abi.abi.encode(["address", "bytes", "bytes"], [TO, b"deploy", signed(GOOD)])
    assert reason(GOOD, parts + WRAPPED) is None


@given(st.binary(max_size=300))
def test_broken_wrapper_is_nobodys_signature(content: bytes) -> None:
    wrapped = SignedAuthorization(GOOD, content + WRAPPED)
    assert wrapped.is_wrapped
    assert signer_of(DOMAIN, wrapped) != PAYER.address


def test_half_of_the_curve_order_is_the_largest_s() -> None:
    r, half = signed(GOOD)[:32], CURVE_ORDER // 2
    for s, is_taken in ((half, True), (half + 1, False)):
        found = signer_of(DOMAIN, SignedAuthorization(GOOD, r + s.to_bytes(32, "big") + b"\x1b"))
        assert (found is not None) is is_taken


@pytest.mark.parametrize(
    "signature", [b"", signed(GOOD)[:64] + b"\2", signed(GOOD) + b"\x1b", signed(GOOD)[1:-1]]
)
def test_signature_of_another_form_is_none_of_a_key(signature: bytes) -> None:
    assert SignedAuthorization(GOOD, signature).vrs is None


def test_refused_authorization_says_why() -> None:
    found = refusal(SignedAuthorization(replace(GOOD, units=1), b""), DUE, NOW)
    assert found is not None
    refused = AuthorizationRefused(found)
    assert (refused.refusal, str(refused)) == (found, found.message)


def test_broken_wrapper_holds_nothing() -> None:
    assert SignedAuthorization(GOOD, b"x" + WRAPPED).bare == b""
    assert SignedAuthorization(GOOD, b"x").bare == b"x"


# --- acceptable payments ---------------------------------------------------------------------


@pytest.mark.parametrize("left", [LEAST_SECONDS, 300, MOST_SECONDS])
def test_authorization_of_the_due_amount_is_accepted(left: int) -> None:
    assert reason(replace(GOOD, valid_before=NOW + left)) is None
    assert reason(replace(GOOD, valid_after=NOW - 1, to=TO.lower())) is None


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"to": TOKEN}, Reason.RECIPIENT),
        ({"units": DUE.units - 1}, Reason.VALUE),
        ({"units": DUE.units + 1}, Reason.VALUE),
        ({"valid_after": NOW}, Reason.VALID_AFTER),
        ({"valid_before": NOW + LEAST_SECONDS - 1}, Reason.VALID_BEFORE),
        ({"valid_before": NOW + MOST_SECONDS + 1}, Reason.VALID_BEFORE),
        ({"valid_before": LARGEST_WORD}, Reason.VALID_BEFORE),
        ({"source": TOKEN}, Reason.SIGNATURE),
    ],
)
def test_authorization_of_anything_else_is_refused(change: dict[str, Any], why: Reason) -> None:
    changed = replace(GOOD, **change)
    assert reason(changed) is why, "though it is signed as it stands"


@pytest.mark.parametrize(
    "change", [{"nonce": b"\6" * 32}, {"valid_after": 1}, {"valid_before": NOW + 301}]
)
def test_authorization_changed_after_signing_is_refused(change: dict[str, Any]) -> None:
    assert reason(replace(GOOD, **change), signed(GOOD)) is Reason.SIGNATURE


# --- the objects of x402 ---------------------------------------------------------------------


def payment(**changes: Any) -> dict[str, Any]:
    """A payment with some fields changed, given by their paths."""
    made: dict[str, Any] = {
        "x402Version": 2,
        "accepted": {
            "scheme": "exact",
            "network": "eip155:84532",
            "amount": "150000000",
            "asset": TOKEN,
            "payTo": TO,
            "maxTimeoutSeconds": 600,
            "extra": {"name": "USDC", "version": "2", "assetTransferMethod": "eip3009"},
        },
        "payload": {
            "signature": "0x" + signed(GOOD).hex(),
            "authorization": {
                "from": GOOD.source,
                "to": GOOD.to,
                "value": str(GOOD.units),
                "validAfter": "0",
                "validBefore": str(GOOD.valid_before),
                "nonce": "0x" + GOOD.nonce.hex(),
            },
        },
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        part = made
        for name in parents:
            part = part[name]
        part[last] = value
    return made


def test_payment_may_have_whole_numbers_as_floats() -> None:
    floats = payment(x402Version=2.0, accepted__maxTimeoutSeconds=600.0)
    assert read_payment(floats) == read_payment(payment())


def test_payment_is_read_from_object_and_header_alike() -> None:
    header = base64.b64encode(json.dumps(payment()).encode()).decode()
    assert read_payment(header) == read_payment(payment())
    assert read_payment(payment()).signed == SignedAuthorization(GOOD, signed(GOOD))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("x402Version", 1),
        ("x402Version", "2"),
        ("colour", "red"),
        ("accepted__amount", 150_000_000),
        ("accepted__maxTimeoutSeconds", 1.5),
        ("payload__authorization__from", "0x7a"),
        ("payload__authorization__value", "1.5"),
        ("payload__authorization__value", "-1"),
        ("payload__authorization__validAfter", 0),
        ("payload__authorization__nonce", "0x" + "5" * 62),
        ("payload__signature", "0x123"),
        ("payload__signature", None),
    ],
)
def test_malformed_payment_gets_its_field(path: str, value: Any) -> None:
    with pytest.raises(InvalidInput) as refused:
        read_payment(payment(**{path: value}))
    assert refused.value.field == "payment." + path.replace("__", ".")


def test_number_beyond_256_bits_is_refused() -> None:
    read = read_payment(payment(payload__authorization__value=str(LARGEST_WORD + 1)))
    with pytest.raises(InvalidInput, match="256 bits"):
        _ = read.signed


@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda b: base64.b64encode(b).decode()))
def test_header_that_holds_no_payment_is_refused(text: str) -> None:
    with pytest.raises(InvalidInput):
        read_payment(text)
