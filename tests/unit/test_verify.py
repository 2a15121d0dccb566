"""Client-side verification: each line of a response, each term of an order, each kind of key.

Signing here uses `cryptography` instead of the service, as an independent implementation.
"""

from __future__ import annotations

import base64
import hashlib
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime, timedelta, timezone
from functools import partial
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from hypothesis import given, settings
from hypothesis import strategies as st

from rpcsvc import verify
from rpcsvc.verify import (
    Attestation,
    Exchange,
    Expected,
    OrderTerms,
    VerificationError,
    VerifiedResponse,
    signature_headers,
    thumbprint,
    verify_attestation,
    verify_response,
)

Json = dict[str, Any]
SIGNED_AT = "2026-01-02T03:04:05Z"
NOW = datetime(2026, 1, 2, 3, 4, 35, tzinfo=UTC)
EVM = "0x52908400098527886E0F7030069857D2E4169EE7"
OTHER_EVM = "0x8617E340B3D01FA5F11F306F4090FD50E238070D"
USDC = "0xaf88d065e77c8cC2239327C5EDb3A432268e5831"
MONERO = (
    "888tNkZrPN6JsEgekjMnABU4TBzc2Dt29EPAvkRxbANsAnjyPbb3iQ1YBRk1UXcdRsiKc"
    "9dhwMVgN5S9cQUiyoogDavup3H"
)
SESSION = "0c7e9d52-6f3a-4b1e-8d2c-5a9f7b3e1d64"


def b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


class Signer:
    """A signing service, written from docs/use/signing.md only."""

    def __init__(self, seed: bytes) -> None:
        self.private = Ed25519PrivateKey.from_private_bytes(seed)
        self.x = b64(self.private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw))
        canonical = json.dumps({"crv": "Ed25519", "kty": "OKP", "x": self.x}, separators=(",", ":"))
        self.kid = b64(hashlib.sha256(canonical.encode()).digest())

    def jwk(self, **more: Any) -> Json:
        return {"kty": "OKP", "crv": "Ed25519", "x": self.x, "kid": self.kid, **more}

    def headers(self, lines: Json) -> dict[str, str]:
        text = "\n".join(str(line) for line in lines.values())
        signature = self.private.sign(text.encode("utf-8", "surrogateescape"))
        return {
            "x-service-signing-version": lines["version"],
            "x-service-signing-alg": lines["alg"],
            "x-service-signing-kid": lines["kid"],
            "x-service-content-sha256": lines["content"],
            "x-service-signed-at": lines["signed-at"],
            "x-service-signature": b64(signature),
        }

    def jws(self, header: bytes, payload: bytes) -> str:
        text = f"{b64(header)}.{b64(payload)}"
        return f"{text}.{b64(self.private.sign(text.encode()))}"

    def attest(self, terms: Json, **header: Any) -> str:
        head = {"alg": "EdDSA", "kid": self.kid, "typ": "service-order-attestation", **header}
        return self.jws(canonical(head), canonical(terms))


def canonical(value: Json) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


KEY, OTHER = Signer(b"\x01" * 32), Signer(b"\x02" * 32)
JWKS: Json = {"keys": [KEY.jwk(use="sig", alg="EdDSA"), OTHER.jwk()]}
REQUEST, BODY = b'{"direction":"x2u"}', b'{"ok":true}'


def lines(**changes: Any) -> Json:
    return {
        "label": "service-response-signature",
        "version": "1",
        "alg": "ed25519",
        "kid": KEY.kid,
        "signed-at": SIGNED_AT,
        "method": "POST",
        "target": "/api/v1/agent/swap/plan?a=b",
        "status": 200,
        "request": hashlib.sha256(REQUEST).hexdigest(),
        "content": hashlib.sha256(BODY).hexdigest(),
    } | changes


def exchange(**changes: Any) -> Exchange:
    values: Json = {
        "method": "POST",
        "target": "/api/v1/agent/swap/plan?a=b",
        "request_body": REQUEST,
        "status": 200,
        "headers": KEY.headers(lines()),
        "body": BODY,
    }
    return Exchange(**(values | changes))


def with_header(name: str, value: Any) -> Exchange:
    return exchange(headers=KEY.headers(lines()) | {name: value})


# --- responses -------------------------------------------------------------------------------


def test_a_response_signed_by_another_implementation_verifies() -> None:
    found = verify_response(exchange(), JWKS)
    moment = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)
    assert found == VerifiedResponse(KEY.kid, moment, None)


def test_header_names_are_matched_in_any_case_and_as_pairs() -> None:
    headers = KEY.headers(lines())
    assert verify_response(exchange(headers={k.title(): v for k, v in headers.items()}), JWKS)
    pairs = [*headers.items(), ("Set-Cookie", "a"), ("Set-Cookie", "b")]
    assert verify_response(exchange(headers=pairs), JWKS)


def test_a_branded_service_has_its_own_header_names() -> None:
    headers = {k.replace("service", "acme"): v for k, v in KEY.headers(lines()).items()}
    assert tuple(headers) == signature_headers("acme")
    assert verify_response(exchange(headers=headers), JWKS, slug="acme")
    with pytest.raises(verify.MissingHeader):
        verify_response(exchange(headers=headers), JWKS)


@pytest.mark.parametrize(
    "change",
    [
        {"label": "service-response-signaturE"},
        {"kid": OTHER.kid},
        {"signed-at": "2026-01-02T03:04:06Z"},
        {"method": "GET"},
        {"target": "/api/v1/agent/swap/plan?a=c"},
        {"target": "/api/v1/agent/swap/plan"},
        {"status": 201},
        {"request": hashlib.sha256(REQUEST + b" ").hexdigest()},
        {"content": hashlib.sha256(BODY + b" ").hexdigest()},
        {"version": "2"},
        {"alg": "Ed25519"},
    ],
    ids=str,
)
def test_a_signature_over_any_other_line_is_refused(change: Json) -> None:
    """The headers are as expected; only the signed text differs."""
    wrong = KEY.headers(lines(**change))["x-service-signature"]
    with pytest.raises(verify.BadSignature):
        verify_response(with_header("x-service-signature", wrong), JWKS)


def test_a_trailing_line_feed_is_not_signed() -> None:
    wrong = KEY.headers(lines(content=lines()["content"] + "\n"))["x-service-signature"]
    with pytest.raises(verify.BadSignature):
        verify_response(with_header("x-service-signature", wrong), JWKS)


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"method": "GET"}, verify.BadSignature),
        ({"target": "/rpc"}, verify.BadSignature),
        ({"request_body": REQUEST + b" "}, verify.BadSignature),
        ({"request_body": b""}, verify.BadSignature),
        ({"status": 404}, verify.BadSignature),
        ({"body": BODY + b"\n"}, verify.DigestMismatch),
        ({"body": b""}, verify.DigestMismatch),
    ],
    ids=str,
)
def test_another_request_or_body_is_refused(change: Json, error: type[Exception]) -> None:
    with pytest.raises(error):
        verify_response(exchange(**change), JWKS)


@pytest.mark.parametrize("name", signature_headers())
def test_each_missing_header_is_named(name: str) -> None:
    headers = KEY.headers(lines())
    del headers[name]
    with pytest.raises(verify.MissingHeader, match=name):
        verify_response(exchange(headers=headers), JWKS)


@pytest.mark.parametrize("name", signature_headers())
def test_a_header_that_is_there_twice_is_refused(name: str) -> None:
    headers = KEY.headers(lines())
    pairs = [*headers.items(), (name.upper(), headers[name])]
    with pytest.raises(verify.MalformedHeader, match="twice"):
        verify_response(exchange(headers=pairs), JWKS)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("signing-version", "2", verify.UnknownVersion),
        ("signing-version", "01", verify.UnknownVersion),
        ("signing-alg", "none", verify.UnknownAlgorithm),
        ("signing-alg", "hmac-sha256", verify.UnknownAlgorithm),
        ("signing-kid", OTHER.kid, verify.BadSignature),
        ("signing-kid", "A" * 43, verify.UnknownKey),
        ("signing-kid", "x", verify.MalformedHeader),
        ("content-sha256", "0" * 64, verify.DigestMismatch),
        ("content-sha256", hashlib.sha256(BODY).hexdigest().upper(), verify.MalformedHeader),
        ("signed-at", "2026-01-02T03:04:06Z", verify.BadSignature),
        ("signed-at", "2026-01-02T03:04:05.0Z", verify.BadSignature),
        ("signed-at", "2026-01-02T03:04:05+00:00", verify.MalformedHeader),
        ("signed-at", "2026-02-30T03:04:05Z", verify.MalformedHeader),
        ("signed-at", "٢٠٢٦-01-02T03:04:05Z", verify.MalformedHeader),
        ("signed-at", SIGNED_AT + "\n", verify.MalformedHeader),
        ("signature", "A" * 86, verify.BadSignature),
        ("signature", "A" * 85, verify.MalformedHeader),
        ("signature", "A" * 85 + "B", verify.MalformedHeader),
        ("signature", "A" * 86 + "==", verify.MalformedHeader),
        ("signature", "", verify.MalformedHeader),
        ("signature", None, verify.MalformedHeader),
    ],
)
def test_a_changed_header_is_refused(name: str, value: Any, error: type[Exception]) -> None:
    with pytest.raises(error):
        verify_response(with_header(f"x-service-{name}", value), JWKS)


@pytest.mark.parametrize(
    ("now", "error"),
    [
        (NOW, None),
        (NOW.astimezone(timezone(timedelta(hours=9))), None),
        (datetime(2026, 1, 2, 3, 9, 5, tzinfo=UTC), None),
        (datetime(2026, 1, 2, 3, 9, 6, tzinfo=UTC), verify.TooOld),
        (datetime(2026, 1, 2, 3, 3, 5, tzinfo=UTC), None),
        (datetime(2026, 1, 2, 3, 3, 4, tzinfo=UTC), verify.FromTheFuture),
        (datetime(2026, 1, 2, 3, 4, 5), verify.BadInput),  # noqa: DTZ001 - what is refused
        (1767323045, verify.BadInput),
    ],
)
def test_age_is_judged_by_the_verifiers_clock(now: Any, error: type[Exception] | None) -> None:
    if error is None:
        verify_response(exchange(), JWKS, now=now)
        return
    with pytest.raises(error):
        verify_response(exchange(), JWKS, now=now)


@pytest.mark.parametrize(
    "change",
    [
        {"method": "PO ST"}, {"method": None}, {"target": "https://swap.example/rpc"},
        {"target": "/a\nb"}, {"target": "/\ud800"}, {"target": ""}, {"status": "200"},
        {"status": True}, {"status": 99}, {"request_body": "x"}, {"body": None},
    ],
    ids=repr,
)  # fmt: skip
def test_impossible_request_is_a_mistake_of_the_verifier(change: Json) -> None:
    with pytest.raises(verify.BadInput):
        exchange(**change)


def test_a_target_with_bytes_that_are_not_utf8_can_be_checked() -> None:
    target = b"/x?\xff\xc3\xa4".decode("utf-8", "surrogateescape")
    signed = exchange(target=target, headers=KEY.headers(lines(target=target)))
    assert verify_response(signed, JWKS)


# --- keys ------------------------------------------------------------------------------------


def test_the_thumbprint_is_that_of_rfc_8037() -> None:
    x = "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"  # RFC 8037, appendix A
    assert thumbprint(x) == "kPrK_qmxVWaYVA9wwBF6Iuo3vVzz7TxHCTwXBygrS4k"


def _jwk_changed(**changes: Any) -> Json:
    key = KEY.jwk(use="sig", alg="EdDSA") | changes
    return {"keys": [{name: value for name, value in key.items() if value is not ...}]}


@pytest.mark.parametrize(
    "jwks",
    [
        None, [], {}, {"keys": None}, {"keys": {"a": 1}},
        {"keys": [KEY.jwk(), KEY.jwk()]},
        _jwk_changed(kty="EC"), _jwk_changed(crv="X25519"), _jwk_changed(use="enc"),
        _jwk_changed(alg="HS256"), _jwk_changed(d=b64(b"\x01" * 32)), _jwk_changed(kty=...),
        _jwk_changed(x=OTHER.x), _jwk_changed(x=KEY.x + "="), _jwk_changed(x=KEY.x[:-1]),
        _jwk_changed(x=7), _jwk_changed(x=...), _jwk_changed(retiredAt=1767323045),
        _jwk_changed(retiredAt=None),
    ],
    ids=lambda jwks: str(jwks)[:60],
)  # fmt: skip
def test_a_key_set_that_is_not_to_the_letter_is_refused(jwks: Any) -> None:
    with pytest.raises(verify.BadJwks):
        verify_response(exchange(), jwks)


def test_verify_skips_keys_of_other_kinds() -> None:
    jwks = {"keys": [{"kty": "RSA", "kid": "r"}, 5, None, {"kid": []}, KEY.jwk()]}
    assert verify_response(exchange(), jwks)


@pytest.mark.parametrize("keys", [[], [OTHER.jwk()]])
def test_an_unknown_key_is_refused(keys: list[Json]) -> None:
    with pytest.raises(verify.UnknownKey, match="fetch it again"):
        verify_response(exchange(), {"keys": keys})


def test_a_pinned_key_is_the_only_one_that_counts() -> None:
    assert verify_response(exchange(), JWKS, pinned_kid=KEY.kid)
    with pytest.raises(verify.UnpinnedKey):
        verify_response(exchange(), JWKS, pinned_kid=OTHER.kid)
    token = KEY.attest(terms())
    assert verify_attestation(token, JWKS, expected(), pinned_kid=KEY.kid)
    with pytest.raises(verify.UnpinnedKey):
        verify_attestation(token, JWKS, expected(), pinned_kid=OTHER.kid)


def test_a_retired_key_vouches_for_what_was_made_before_only() -> None:
    same = {"keys": [KEY.jwk(retiredAt=SIGNED_AT)]}
    before = {"keys": [KEY.jwk(retiredAt="2026-01-02T03:04:04.999Z")]}
    assert verify_response(exchange(), same).key_retired_at is not None
    assert verify_attestation(KEY.attest(terms()), same, expected()).key_retired_at is not None
    with pytest.raises(verify.RetiredKey):
        verify_response(exchange(), before)
    with pytest.raises(verify.RetiredKey):
        verify_attestation(KEY.attest(terms()), before, expected())


# --- attestations ----------------------------------------------------------------------------


def terms(**changes: Any) -> Json:
    return {
        "orderId": "ord_" + "0" * 26,
        "direction": "x2u",
        "chainId": 42161,
        "token": USDC,
        "depositAddress": MONERO,
        "depositAmount": "800000000000",
        "toAddress": EVM,
        "expectedOutput": "129350000",
        "minReceived": "128056500",
        "expiresAt": "2026-01-02T04:04:05.000Z",
        "issuedAt": "2026-01-02T03:04:05.000Z",
        "network": "sandbox",
        "issuer": "https://swap.example",
        "refundControl": "session",
        "refundAddress": None,
        "sessionSha256": hashlib.sha256(SESSION.encode()).hexdigest(),
    } | changes


LOCK_END = "2026-01-02T03:19:05.000Z"


def expected(**changes: Any) -> Expected:
    values: Json = {
        "direction": "x2u",
        "chain_id": 42161,
        "amount": "0.8",
        "to": EVM,
        "issuer": "https://swap.example",
        "session": SESSION,
    }
    return Expected(**(values | changes))


FULL: Json = {
    "deposit_address": MONERO,
    "token": USDC.lower(),
    "order_id": "ord_" + "0" * 26,
    "network": "sandbox",
}


@pytest.mark.parametrize("lock", [{}, {"priceLockedUntil": LOCK_END}])
def test_attestation_of_another_implementation_verifies(lock: Json) -> None:
    """Also of a version before ``priceLockedUntil``."""
    found = verify_attestation(KEY.attest(terms(**lock)), JWKS, expected(**FULL), now=NOW)
    assert isinstance(found, Attestation)
    assert (found.kid, found.key_retired_at, found.expired) == (KEY.kid, None, False)
    assert found.terms.as_json() == terms(**lock)
    assert found.terms.deposit_amount == 800_000_000_000


def test_terms_are_written_as_rfc_8785_has_it() -> None:
    assert OrderTerms.from_json(terms()).canonical() == canonical(terms())


def test_expiry_is_stated_when_the_time_is_known() -> None:
    token = KEY.attest(terms())
    end = datetime(2026, 1, 2, 4, 4, 5, tzinfo=UTC)
    assert verify_attestation(token, JWKS, expected()).expired is None
    assert verify_attestation(token, JWKS, expected(), now=end).expired is True
    before = end - timedelta(microseconds=1)
    assert verify_attestation(token, JWKS, expected(), now=before).expired is False
    with pytest.raises(verify.BadInput):
        verify_attestation(token, JWKS, expected(), now=end.replace(tzinfo=None))


@pytest.mark.parametrize(
    ("signed", "field"),
    [
        ({"direction": "u2x"}, "direction"),
        ({"chainId": 1}, "chainId"),
        ({"depositAmount": "800000000001"}, "depositAmount"),
        ({"depositAmount": "8000000000000"}, "depositAmount"),
        ({"toAddress": OTHER_EVM}, "toAddress"),
        ({"issuer": "https://swap.example.evil"}, "issuer"),
        ({"depositAddress": MONERO[:-1] + "J"}, "depositAddress"),
        ({"depositAddress": MONERO.lower()}, "depositAddress"),
        ({"token": OTHER_EVM}, "token"),
        ({"orderId": "ord_" + "0" * 25 + "1"}, "orderId"),
        ({"network": "mainnet"}, "network"),
    ],
    ids=str,
)
def test_a_genuine_attestation_of_another_order_is_refused(signed: Json, field: str) -> None:
    with pytest.raises(verify.TermsMismatch, match="Send nothing") as caught:
        verify_attestation(KEY.attest(terms(**signed)), JWKS, expected(**FULL))
    assert caught.value.fields == (field,)


def fixed(**changes: Any) -> Json:
    return terms(refundControl="address", refundAddress=MONERO, **changes)


def test_verifier_with_its_own_refund_address_or_session_passes() -> None:
    assert verify_attestation(KEY.attest(terms()), JWKS, expected(session=SESSION.upper()))
    home = expected(session=None, refund_to=MONERO)
    assert verify_attestation(KEY.attest(fixed()), JWKS, home)
    assert verify_attestation(KEY.attest(fixed()), JWKS, expected(refund_to=MONERO))


@pytest.mark.parametrize(
    ("signed", "mine", "field"),
    [
        (terms(), {"refund_to": MONERO}, "refundAddress"),
        (fixed(), {"refund_to": MONERO.replace("N", "n", 1)}, "refundAddress"),
        (terms(), {"session": SESSION[:-1] + "5"}, "sessionSha256"),
    ],
)
def test_an_order_that_refunds_to_somebody_else_is_not_ours(
    signed: Json, mine: Json, field: str
) -> None:
    with pytest.raises(verify.TermsMismatch) as caught:
        verify_attestation(KEY.attest(signed), JWKS, expected(**mine))
    assert caught.value.fields == (field,)


@pytest.mark.parametrize(
    ("signed", "session", "control"),
    [(terms(), None, "session"), (fixed(), None, "address"), (fixed(), SESSION, "address")],
)
def test_who_decides_over_refunds_must_be_the_verifier(
    signed: Json, session: str | None, control: str
) -> None:
    with pytest.raises(verify.ForeignRefunds) as caught:
        verify_attestation(KEY.attest(signed), JWKS, expected(session=session))
    assert caught.value.terms.refund_control == control


def test_a_payout_below_the_verifiers_least_is_refused() -> None:
    token = KEY.attest(terms())
    assert verify_attestation(token, JWKS, expected(min_received="128.0565"))
    with pytest.raises(verify.TermsMismatch) as caught:
        verify_attestation(token, JWKS, expected(min_received="128.056501"))
    assert caught.value.fields == ("minReceived",)


def test_evm_addresses_ignore_case_and_monero_ones_are_exact() -> None:
    token = KEY.attest(terms(toAddress=EVM.lower()))
    assert verify_attestation(token, JWKS, expected(to="0x" + EVM[2:].upper()))
    back = terms(direction="u2x", depositAmount="150000000", depositAddress=EVM, toAddress=MONERO)
    mine = expected(direction="u2x", amount="150", to=MONERO, deposit_address=EVM.lower())
    back |= {"refundControl": "address", "refundAddress": OTHER_EVM.lower()}
    mine = replace(mine, refund_to=OTHER_EVM)
    assert verify_attestation(KEY.attest(back), JWKS, mine)
    swapped = MONERO.replace("N", "n", 1)
    with pytest.raises(verify.TermsMismatch) as caught:
        verify_attestation(KEY.attest(back), JWKS, replace(mine, to=swapped))
    assert caught.value.fields == ("toAddress",)


@pytest.mark.parametrize(
    ("direction", "amount", "units"),
    [
        ("x2u", "0.8", 800_000_000_000), ("x2u", "0.80", 800_000_000_000), ("x2u", "1", 10**12),
        ("x2u", "0.000000000001", 1), ("u2x", "150", 150_000_000), ("u2x", "0.000001", 1),
    ],
)  # fmt: skip
def test_an_amount_is_read_in_atomic_units(direction: str, amount: str, units: int) -> None:
    to = EVM if direction == "x2u" else MONERO
    assert expected(direction=direction, amount=amount, to=to).deposit_units == units


@pytest.mark.parametrize(
    "change",
    [
        {"direction": "X2U"}, {"direction": None}, {"chain_id": "42161"}, {"chain_id": True},
        {"chain_id": 0}, {"amount": 0.8}, {"amount": "0"}, {"amount": "0.0000000000001"},
        {"amount": "1e3"}, {"amount": "-1"}, {"amount": " 1"}, {"amount": "٣"}, {"amount": "01"},
        {"amount": "9" * 5000}, {"to": MONERO}, {"to": "0x" + "1" * 39}, {"to": None},
        {"issuer": ""}, {"issuer": None}, {"deposit_address": EVM}, {"token": ""},
        {"network": 5}, {"order_id": "a b"},
        {"refund_to": EVM}, {"session": "s"}, {"session": 5}, {"min_received": "0"},
        {"direction": "u2x", "amount": "0.0000001"},
    ],
    ids=lambda change: str(change)[:40],
)  # fmt: skip
def test_impossible_expectations_are_a_mistake_of_the_verifier(change: Json) -> None:
    with pytest.raises(verify.BadInput):
        expected(**change)


def test_the_terms_that_decide_over_the_money_must_be_given() -> None:
    for name in ("direction", "chain_id", "to", "issuer"):
        given_all: Json = {f: getattr(expected(), f) for f in Expected.__dataclass_fields__}
        del given_all[name]
        with pytest.raises(TypeError, match=name):
            Expected(**given_all)
    with pytest.raises(verify.BadInput, match="amount is missing"):
        expected(amount=None)


def _without(name: str) -> Json:
    return {key: value for key, value in terms().items() if key != name}


HEADER: Json = {"alg": "EdDSA", "kid": KEY.kid, "typ": "service-order-attestation"}
TWICE = canonical(terms())[:-1] + b',"toAddress":"' + OTHER_EVM.encode() + b'"}'


@pytest.mark.parametrize(
    "token",
    [
        "", ".", "..", "a.b.c.d", "a" * 9000, 5, None, b"x",
        KEY.attest(terms(), typ="JWT"),
        KEY.attest(terms(), crit=["b64"], b64=False),
        KEY.attest(terms(), jwk=OTHER.jwk()),
        KEY.attest(terms(), kid=[]),
        KEY.jws(canonical({k: v for k, v in HEADER.items() if k != "typ"}), canonical(terms())),
        KEY.jws(canonical({k: v for k, v in HEADER.items() if k != "kid"}), canonical(terms())),
        KEY.jws(json.dumps(HEADER).encode(), canonical(terms())),
        KEY.jws(canonical(HEADER)[:-1] + b',"alg":"EdDSA"}', canonical(terms())),
        KEY.jws(b"[]", canonical(terms())),
        KEY.jws(canonical(HEADER), b"\xff"),
        KEY.jws(canonical(HEADER), b"[" * 5000),
        KEY.jws(canonical(HEADER), b"9" * 5000),
        KEY.jws(canonical(HEADER), b"NaN"),
        KEY.jws(canonical(HEADER), TWICE),
        KEY.jws(canonical(HEADER), json.dumps(terms()).encode()),
        KEY.jws(canonical(HEADER), canonical(terms()) + b"\n"),
        KEY.attest(terms(memo="x")),
        KEY.attest(_without("network")),
        KEY.attest(terms(depositAmount=800000000000)),
        KEY.attest(terms(depositAmount="0800000000000")),
        KEY.attest(terms(depositAmount="-1")),
        KEY.attest(terms(chainId="42161")),
        KEY.attest(terms(chainId=True)),
        KEY.attest(terms(direction="sideways")),
        KEY.attest(terms(expiresAt="tomorrow")),
        KEY.attest(terms(issuer="https://swap.example/")),
        KEY.attest(terms(refundControl="address")),
        KEY.attest(terms(refundAddress=MONERO)),
        KEY.attest(terms(refundControl="operator")),
        KEY.attest(terms(sessionSha256="0")),
        KEY.attest(_without("refundAddress")),
        KEY.attest(terms(priceLockedUntil=None)),
        KEY.attest(terms(priceLockedUntil="soon")),
        KEY.attest(terms(toAddress=EVM + "\u200b")),
        KEY.attest(terms()) + "=",
        KEY.attest(terms()) + "\n",
        KEY.attest(terms()).replace(".", ".\n", 1),
    ],
    ids=lambda token: str(token)[:24],
)  # fmt: skip
def test_verify_refuses_a_malformed_attestation(token: Any) -> None:
    with pytest.raises(verify.MalformedAttestation):
        verify_attestation(token, JWKS, expected())


@pytest.mark.parametrize("alg", ["none", "None", "HS256", "ES256", "Ed25519", "", None, 5])
def test_any_other_algorithm_is_refused(alg: Any) -> None:
    with pytest.raises(verify.UnknownAlgorithm):
        verify_attestation(KEY.attest(terms(), alg=alg), JWKS, expected())


def test_an_unsigned_token_is_refused() -> None:
    header = canonical(HEADER | {"alg": "none"})
    with pytest.raises(VerificationError):
        verify_attestation(f"{b64(header)}.{b64(canonical(terms()))}.", JWKS, expected())


def test_terms_under_anothers_signature_are_refused() -> None:
    genuine, other = KEY.attest(terms()), KEY.attest(terms(toAddress=OTHER_EVM))
    header, _, signature = genuine.split(".")
    forged = f"{header}.{other.split('.')[1]}.{signature}"
    with pytest.raises(verify.BadSignature):
        verify_attestation(forged, JWKS, expected(to=OTHER_EVM))
    other_one = OTHER.attest(terms(), kid=KEY.kid)
    with pytest.raises(verify.BadSignature):
        verify_attestation(other_one, JWKS, expected())
    with pytest.raises(verify.UnknownKey):
        verify_attestation(OTHER.attest(terms()), {"keys": [KEY.jwk()]}, expected())


def test_response_signature_does_not_pass_as_an_attestation() -> None:
    """The signed texts of the two kinds share no string: one has line feeds, the other none."""
    text = verify.attestation_input(KEY.kid, OrderTerms.from_json(terms()).canonical())
    assert b"\n" not in text
    assert verify.signed_head(KEY.kid, SIGNED_AT).startswith(b"service-response-signature\n")


# --- the order's status ----------------------------------------------------------------------


def status(**changes: Any) -> Json:
    """The issuer's answer about the order of ``terms``; ``order`` and ``deposits`` may differ."""
    order = {
        "orderId": terms()["orderId"],
        "status": "awaiting_deposit",
        "depositAddress": MONERO,
        "depositTxHash": None,
        "refundAddress": None,
    }
    answer = {
        "ok": True,
        "requestId": "r-1",
        "data": {
            "order": order | changes.pop("order", {}),
            "deposits": changes.pop("deposits", []),
        },
    }
    return answer | changes


def payable(answer: Json, *, http: int = 200, now: datetime = NOW, **more: Any) -> timedelta:
    target = f"/api/v1/agent/swap/status/{terms()['orderId']}"
    body = json.dumps(answer).encode()
    empty, content = (hashlib.sha256(b).hexdigest() for b in (b"", body))
    signed_at = now.isoformat().replace("+00:00", "Z")
    said = {"method": "GET", "target": target, "status": http, "request": empty}
    headers = KEY.headers(lines(**said, content=content, **{"signed-at": signed_at}))
    asked = Exchange(
        method="GET", target=target, request_body=b"", status=http, headers=headers, body=body
    )
    known = OrderTerms.from_json(terms())
    return verify.verify_payable(known, asked, JWKS, now=now, request_id="r-1", **more)


def test_an_order_that_awaits_its_deposit_may_be_paid() -> None:
    assert payable(status()) == timedelta(minutes=59, seconds=30)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (status(order={"status": "deposit_detected"}), "deposit_detected"),
        (status(order={"status": "refunding"}), "refunding"),
        (status(order={"status": None}), "None"),
        (status(order={"depositTxHash": "ab"}), "paid something"),
        (status(deposits=[{"txid": "ab"}]), "paid something"),
        (status(deposits=None), "paid something"),
        (status(order={"depositAddress": MONERO.lower()}), "depositAddress"),
        (status(order={"orderId": "ord_1"}), "orderId"),
        (status(order={"refundAddress": EVM}), "refundAddress"),
        (status(data=None), "orderId"),
    ],
    ids=str,
)
def test_time_to_pay_refuses_an_order_in_any_other_state(answer: Json, said: str) -> None:
    with pytest.raises(verify.NotPayable, match=said):
        payable(answer)


def test_order_unknown_to_its_issuer_is_not_to_be_paid() -> None:
    missing = {"ok": False, "requestId": "r-1", "error": {"code": "order_not_found"}}
    with pytest.raises(verify.NotPayable, match="order_not_found"):
        payable(missing, http=404)


def test_an_order_that_ends_soon_is_not_to_be_paid() -> None:
    late = datetime(2026, 1, 2, 3, 54, 6, tzinfo=UTC)  # 9:59 before the end
    with pytest.raises(verify.NotPayable, match="9 more minutes"):
        payable(status(), now=late)
    assert payable(status(), now=late, min_time=timedelta(minutes=9))


def test_answer_to_another_request_proves_nothing_of_the_order() -> None:
    with pytest.raises(verify.TooOld):
        payable(status(requestId="r-0"))
    with pytest.raises(verify.UnpinnedKey):
        payable(status(), pinned_kid=OTHER.kid)


@pytest.mark.parametrize(
    "member",
    [{"use": "enc"}, {"key_ops": ["encrypt"]}, {"key_ops": []}, {"key_ops": "verify"}],
    ids=str,
)
def test_key_that_is_not_for_signatures_is_refused(member: dict[str, Any]) -> None:
    key = {**JWKS["keys"][0], **member}
    with pytest.raises(verify.BadJwks, match=next(iter(member))):
        verify._read_key(key, key["kid"])


def test_key_for_verifying_is_taken() -> None:
    key = {**JWKS["keys"][0], "use": "sig", "key_ops": ["verify"]}
    assert verify._read_key(key, key["kid"]).kid == key["kid"]


# --- arbitrary input -------------------------------------------------------------------------

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just(KEY.kid),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)
KEYS = st.fixed_dictionaries(
    {"kid": st.just(KEY.kid) | JSON_VALUES},
    optional=dict.fromkeys(
        ("kty", "crv", "x", "use", "key_ops", "alg", "d", "retiredAt"), JSON_VALUES
    ),
)
ANY_JWKS = JSON_VALUES | st.just(JWKS) | st.fixed_dictionaries({"keys": st.lists(KEYS)})
HEADER_VALUES = st.text() | st.none() | st.binary() | st.sampled_from(list(lines().values()))
ANY_HEADERS = st.dictionaries(st.sampled_from(signature_headers()) | st.text(), HEADER_VALUES) | (
    st.lists(st.tuples(st.text(), HEADER_VALUES))
)
TIMES = st.none() | st.datetimes(timezones=st.just(UTC) | st.just(timezone(timedelta(hours=14))))


def only_verification_errors(check: Callable[[], object]) -> None:
    try:
        check()
    except VerificationError as error:
        assert error.message
        assert len(error.message) < 2000
        assert error.code


@given(headers=ANY_HEADERS, jwks=ANY_JWKS, now=TIMES)
@settings(max_examples=100, deadline=None)
def test_any_headers_and_keys_raise_only_a_verification_error(
    headers: Any, jwks: Any, now: datetime | None
) -> None:
    signed = KEY.headers(lines())
    both = {**signed, **headers} if isinstance(headers, dict) else [*signed.items(), *headers]
    only_verification_errors(lambda: verify_response(exchange(headers=headers), jwks, now=now))
    only_verification_errors(lambda: verify_response(exchange(headers=both), jwks, now=now))


@given(payload=JSON_VALUES, header=JSON_VALUES, name=st.sampled_from(list(terms())), now=TIMES)
@settings(max_examples=100, deadline=None)
def test_verify_raises_only_verification_errors(
    payload: Any, header: Any, name: str, now: datetime | None
) -> None:
    tokens = (
        KEY.jws(canonical(HEADER), json.dumps(payload).encode()),
        KEY.jws(json.dumps(header).encode(), canonical(terms())),
        KEY.attest(terms(**{name: payload})),
    )
    for token in tokens:
        only_verification_errors(partial(verify_attestation, token, JWKS, expected(), now=now))


@given(token=st.text() | st.from_regex(r"[A-Za-z0-9_-]*\.[A-Za-z0-9_-]*\.[A-Za-z0-9_-]*"))
@settings(deadline=None)
def test_verify_refuses_every_random_token(token: str) -> None:
    with pytest.raises(VerificationError):
        verify_attestation(token, JWKS, expected())


@given(at=st.integers(0, 10**6), byte=st.characters(codec="ascii"))
@settings(deadline=None)
def test_no_character_of_a_token_can_be_changed(at: int, byte: str) -> None:
    token = KEY.attest(terms())
    at %= len(token)
    changed = token[:at] + byte + token[at + 1 :]
    if changed == token:
        return
    with pytest.raises(VerificationError):
        verify_attestation(changed, JWKS, expected())


def test_verify_refuses_integers_too_large_to_print() -> None:
    jwks = _jwk_changed(x=10**5000, use="sig")
    with pytest.raises(verify.BadJwks):
        verify_response(exchange(), jwks)
    with pytest.raises(verify.BadJwks):
        verify_response(exchange(), _jwk_changed(retiredAt=10**5000))


def test_the_module_needs_the_standard_library_and_pynacl_only() -> None:
    code = (
        "import sys; before = set(sys.modules); import rpcsvc.verify;"
        " print(*{m.partition('.')[0] for m in set(sys.modules) - before})"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    third_party = set(out.stdout.split()) - set(sys.stdlib_module_names)
    assert third_party <= {"rpcsvc", "nacl", "_cffi_backend", "_sodium"}
    inner = subprocess.run(
        [sys.executable, "-c", code.replace("partition('.')[0]", "strip()")],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    ours = {name for name in inner.stdout.split() if name.startswith("rpcsvc")}
    assert ours == {"rpcsvc", "rpcsvc.verify"}
