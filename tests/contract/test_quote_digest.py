"""quoteDigest: an order is made at the quoted terms or better ones, or not at all."""

from __future__ import annotations

import base64
import hashlib
import re
from fractions import Fraction
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpcsvc.errors import InvalidInput
from rpcsvc.orders.quoted import QuotedTerms, percent_change, read_digest, write_digest
from tests.contract.serving import MONERO, SWAP, Served

KEY = "0f6c2b9a-5d1e-4c37-9a40-6b1d2f8e7c05"
U2X = {"direction": "u2x", "chain": "base", "amount": "150", "to": MONERO}
Json = dict[str, Any]
units = st.integers(0, 2**63 - 1)
times = st.integers(0, 253_402_300_799_999)
terms = st.builds(
    QuotedTerms, st.sampled_from(["x2u", "u2x"]), st.integers(1, 2**32), units, units, units, units,
    times, units, units, units,
)  # fmt: skip


async def quoted(served: Served, swap: Json = SWAP) -> str:
    priced = {name: swap[name] for name in ("direction", "chain", "amount")}
    return str((await served.post("/agent/swap/quote", priced)).body["data"]["quoteDigest"])


async def execute(served: Served, swap: Json, **headers: str) -> Any:
    return await served.post("/agent/swap/execute", swap, **headers)


async def set_rate(served: Served, rate: str) -> None:
    assert (await served.post("/sandbox/fault", {"fault": "set_rate", "rate": rate})).body["ok"]


@pytest.mark.parametrize(
    ("swap", "worse", "better"), [(SWAP, "150", "190"), (U2X, "190", "150")], ids=["x2u", "u2x"]
)
async def test_digest_refuses_worse_terms_only(
    served: Served, swap: Json, worse: str, better: str
) -> None:
    await set_rate(served, "170")
    held = {**swap, "quoteDigest": await quoted(served, swap)}
    assert (await execute(served, held)).status == 200
    before = served.count("orders")
    await set_rate(served, worse)
    refused = await execute(served, held)
    assert (refused.status, refused.body["error"]["code"]) == (409, "quote_changed")
    details = refused.body["error"]["details"]["worse"]
    assert [each["field"] for each in details] == ["expectedOutput", "minReceived"]
    assert all(float(each["now"]) < float(each["quoted"]) for each in details)
    assert served.count("orders") == before
    await set_rate(served, better)
    assert (await execute(served, held)).status == 200


async def test_quote_digest_is_refused_for_another_swap(served: Served) -> None:
    digest = await quoted(served)
    for change in ({"amount": "0.9"}, {"chain": "base"}):
        refused = await execute(served, {**SWAP, **change, "quoteDigest": digest})
        problems = refused.body["validationErrors"]
        assert [problem["field"] for problem in problems] == ["quoteDigest"]


@pytest.mark.parametrize(("form", "gas"), [(b"1", b""), (b"2", b",0"), (b"3", b",0,0")])
def test_digest_of_an_earlier_form_is_read(form: bytes, gas: bytes) -> None:
    """Quotes had no gas in the first form, no exact output until the second, no rate until then."""
    terms = b',"x2u",42161,800000000000,131000000,129000000,50000,1763678000000'
    body = b"[" + form + terms + gas + b"]"
    written = base64.urlsafe_b64encode(hashlib.sha256(body).digest()[:9] + body).decode()
    found = read_digest(written.rstrip("="))
    assert found == QuotedTerms(
        "x2u", 42161, 800_000_000_000, 131_000_000, 129_000_000, 50_000, 1_763_678_000_000
    )


@pytest.mark.parametrize(
    ("named", "output", "deposit"),
    [({"amount": "0.8"}, "10.0038", "0"), ({"receiveAmount": "100"}, "0", "-9.0909")],
)
async def test_requote_says_what_changed_in_percent(
    served: Served, named: Json, output: str, deposit: str
) -> None:
    swap = {"direction": "x2u", "chain": "arbitrum", **named}
    await set_rate(served, "165")
    first = (await served.post("/agent/swap/quote", swap)).body["data"]
    assert "changed" not in first
    asked = {**swap, "requoteOf": first["quoteDigest"]}
    same = (await served.post("/agent/swap/quote", asked)).body["data"]["changed"]
    assert same.pop("quotedAt")
    assert same == {"rate": "0", "expectedOutput": "0", "depositAmount": "0"}
    await set_rate(served, "181.5")
    later = (await served.rpc("swap.quote", asked)).body["result"]["data"]["changed"]
    assert later.pop("quotedAt")
    assert later == {"rate": "10", "expectedOutput": output, "depositAmount": deposit}


async def test_requote_of_another_swap_is_refused(served: Served) -> None:
    digest = await quoted(served)
    priced = {"direction": "x2u", "chain": "arbitrum", "amount": "0.9", "requoteOf": digest}
    refused = await served.post("/agent/swap/quote", priced)
    assert [each["field"] for each in refused.body["validationErrors"]] == ["requoteOf"]
    broken = await served.post("/agent/swap/quote", {**priced, "requoteOf": digest[:-1] + "A"})
    assert [each["field"] for each in broken.body["validationErrors"]] == ["requoteOf"]


@given(st.integers(1, 2**63 - 1), st.integers(0, 2**63 - 1))
def test_percent_change_is_within_its_last_decimal(before: int, after: int) -> None:
    text = percent_change(before, after)
    assert text is not None
    assert re.fullmatch(r"-?(0|[1-9][0-9]*)(\.[0-9]{1,4})?", text)
    exact = Fraction(after - before, before) * 100
    assert abs(Fraction(text) - exact) <= Fraction(1, 20_000)


async def test_digest_of_nothing_gives_no_percent(served: Served) -> None:
    """Anybody can write a digest: one of no output must not divide by it."""
    digest = write_digest(QuotedTerms("x2u", 42161, 800_000_000_000, 0, 0, 0, 0))
    asked = {"direction": "x2u", "chain": "arbitrum", "amount": "0.8", "requoteOf": digest}
    changed = (await served.post("/agent/swap/quote", asked)).body["data"]["changed"]
    assert (changed["rate"], changed["expectedOutput"]) == (None, None)


async def test_retry_with_a_digest_replays_the_first_answer(served: Served) -> None:
    await set_rate(served, "170")
    held = {**SWAP, "quoteDigest": await quoted(served)}
    first = await execute(served, held, idempotency_key=KEY)
    await set_rate(served, "150")
    again = await execute(served, held, idempotency_key=KEY)
    assert again.body["data"] == first.body["data"]
    other = await execute(served, SWAP, idempotency_key=KEY)
    assert other.body["error"]["details"]["fields"] == ["quoteDigest"]


async def test_a_refused_digest_claims_no_key(served: Served) -> None:
    await set_rate(served, "170")
    held = {**SWAP, "quoteDigest": await quoted(served)}
    await set_rate(served, "150")
    assert (await execute(served, held, idempotency_key=KEY)).status == 409
    fresh = {**SWAP, "quoteDigest": await quoted(served)}
    assert (await execute(served, fresh, idempotency_key=KEY)).status == 200


@given(terms)
def test_digest_round_trip(quote: QuotedTerms) -> None:
    assert read_digest(write_digest(quote)) == quote


@given(terms, st.data())
def test_digest_refuses_a_bad_copy(quote: QuotedTerms, data: st.DataObject) -> None:
    text = write_digest(quote)
    at = data.draw(st.integers(0, len(text) - 2))
    other = data.draw(st.sampled_from([c for c in "AZaz09-_" if c != text[at]]))
    for bad in (text[:at] + other + text[at + 1 :], text[:at], text + "AAAA"):
        with pytest.raises(InvalidInput):
            read_digest(bad)


@given(st.text(max_size=600))
def test_digest_refuses_any_other_text(text: str) -> None:
    with pytest.raises(InvalidInput):
        read_digest(text)


@pytest.mark.parametrize(
    "body",
    [
        b"1",
        b"{}",
        b"[]",
        b"[1",
        b"\xff",
        b'[1, "x2u"]',
        b'[1, "x2u", 1, "1", 1, 1, 1, 1]',
        b'[1, "x2u", 1, 1, 1, 1, 1, 1e99]',
        b'[1, "x2u", 1, 1, 1, 1, 1, 999999999999999999]',
        b'[1, "x2u", 1, -1, 1, 1, 1, 1]',
        b'[2, "x2u", 1, 1, 1, 1, 1, 1]',
    ],
)
async def test_digest_forged_with_its_check_is_refused(served: Served, body: bytes) -> None:
    check = hashlib.sha256(body).digest()[:9]
    forged = base64.urlsafe_b64encode(check + body + b" " * 12).decode().rstrip("=")
    whole = base64.urlsafe_b64encode(check + body).decode().rstrip("=")
    for digest in (forged, whole):
        refused = await execute(served, {**SWAP, "quoteDigest": digest})
        assert (refused.status, refused.body["error"]["code"]) == (400, "invalid_input")
