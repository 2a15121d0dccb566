"""swap.check's rules: only the exact amount due is safe to send, and secrets are never read."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from rpcsvc.domain.money import USDC, XMR
from rpcsvc.domain.payment_check import (
    LEAST_MS_LEFT,
    ExpectedPayment,
    Problem,
    ProposedPayment,
    Unreadable,
    differences,
    read_calldata,
    read_transaction,
    read_uri,
    require_no_secret,
    require_unsigned,
)
from rpcsvc.errors import InvalidInput

NOW = 1_767_323_045_000
DEPOSIT = "0x52908400098527886E0F7030069857D2E4169EE7"
TOKEN = "0xaf88d065e77c8cC2239327C5EDb3A432268e5831"
DUE = ExpectedPayment(
    DEPOSIT, 150_000_000, USDC, 42161, TOKEN, is_payable=True, closes_at=NOW + 3_600_000
)
XMR_DUE = ExpectedPayment(
    "8deposit", 800_000_000_000, XMR, 0, None, is_payable=True, closes_at=NOW + 3_600_000
)
# A private key, as text.
KEY = "4c0883a69102937d6231471b5dbb6204fe5129617082792ae468d01a3f362318"

addresses = st.binary(min_size=20, max_size=20).map(lambda raw: "0x" + raw.hex())
units = st.integers(min_value=0, max_value=2**256 - 1)


def calldata(address: str, amount: int, selector: str = "a9059cbb") -> str:
    return f"0x{selector}{address[2:].lower():>064}{amount:064x}"


def transaction(**changes: Any) -> dict[str, Any]:
    call = calldata(DEPOSIT, DUE.units)
    return {"to": TOKEN, "data": call, "value": "0x0", "chainId": 42161, **changes}


def problems(payment: ProposedPayment, due: ExpectedPayment = DUE, now: int = NOW) -> set[Problem]:
    return {each.problem for each in differences(payment, due, now)}


@pytest.mark.parametrize(
    "payment",
    [
        read_transaction(transaction()),
        read_transaction(transaction(chainId="0xa4b1", value=0, to=TOKEN.lower())),
        read_transaction({"to": TOKEN, "input": calldata(DEPOSIT, DUE.units), "chainId": "42161"}),
        read_uri(f"ethereum:{TOKEN}@42161/transfer?address={DEPOSIT}&uint256=150000000"),
        read_uri(f"ethereum:pay-{TOKEN}@42161/transfer?address={DEPOSIT}&uint256=1.5e8"),
        replace(read_calldata(calldata(DEPOSIT, DUE.units)), chain_id=42161, token=TOKEN),
    ],
)
def test_check_accepts_the_due_payment(payment: ProposedPayment) -> None:
    assert problems(payment) == set()


READ = ProposedPayment(DEPOSIT.lower(), DUE.units, USDC, 42161, TOKEN)


@pytest.mark.parametrize(
    ("changes", "read"),
    [
        ({}, READ),
        ({"chainId": None}, replace(READ, chain_id=None)),
        ({"chainId": 2**256 - 1}, replace(READ, chain_id=2**256 - 1)),
        ({"value": "7"}, replace(READ, coin=7)),
        ({"chainId": "42161", "value": "10"}, replace(READ, coin=10)),
        ({"value": 0, "data": None, "input": calldata(DEPOSIT, 1)}, replace(READ, units=1)),
        ({"data": None}, replace(READ, address=None, units=None, is_transfer=False)),
        (
            {"data": "0x01", "value": "0x9"},
            replace(READ, address=None, units=None, is_transfer=False, coin=9),
        ),
        (
            {"data": calldata(DEPOSIT, 1, "a9059cbb").upper().replace("X", "x")},
            replace(READ, units=1),
        ),
    ],
)
def test_transaction_is_read_in_full(changes: dict[str, Any], read: ProposedPayment) -> None:
    assert read_transaction(transaction(**changes)) == read


def test_calldata_is_read_in_full() -> None:
    expected = replace(READ, chain_id=None, token=None, is_calldata=True)
    assert read_calldata(calldata(DEPOSIT, DUE.units)) == expected


@pytest.mark.parametrize(
    ("uri", "read"),
    [
        (f"ethereum:{TOKEN}@42161/transfer?address={DEPOSIT}&uint256=1.5e8&value=3",
         replace(READ, address=DEPOSIT, coin=3)),
        (f"ethereum:{TOKEN}/transfer?address={DEPOSIT}",
         replace(READ, address=DEPOSIT, units=None, chain_id=None)),
        (f"ethereum:{TOKEN}@42161?value=1.20e1",
         replace(READ, address=None, units=None, is_transfer=False, coin=12)),
        (f"ethereum:{TOKEN}@42161/approve", ProposedPayment(
            None, None, USDC, 42161, TOKEN, is_transfer=False)),
        (f"ethereum:{TOKEN}@42161/transfer?uint256=10.50e1",
         replace(READ, address=None, units=105)),
        (f"ethereum:{TOKEN}@42161/transfer?uint256=1e2", replace(READ, address=None, units=100)),
        ("monero:8deposit?tx_amount=0.8&recipient_name=", ProposedPayment(
            "8deposit", 800_000_000_000, XMR, 0)),
        ("monero:8deposit", ProposedPayment("8deposit", None, XMR, 0)),
    ],
)  # fmt: skip
def test_uri_is_read_in_full(uri: str, read: ProposedPayment) -> None:
    assert read_uri(uri) == read


@pytest.mark.parametrize(
    ("payment", "due", "problem", "expected", "received"),
    [
        (READ, XMR_DUE, Problem.WRONG_ASSET, "XMR", "USDC"),
        (replace(READ, is_transfer=False), DUE, Problem.WRONG_CALL,
         "transfer(address,uint256)", None),
        (replace(READ, address=TOKEN), DUE, Problem.WRONG_ADDRESS, DEPOSIT, TOKEN),
        (replace(READ, address=None), DUE, Problem.WRONG_ADDRESS, DEPOSIT, None),
        (replace(READ, token=DEPOSIT), DUE, Problem.WRONG_TOKEN, TOKEN, DEPOSIT),
        (replace(READ, is_calldata=True, token=None), DUE, Problem.WRONG_TOKEN, TOKEN, None),
        (replace(READ, chain_id=1), DUE, Problem.WRONG_CHAIN, "42161", "1"),
        (replace(READ, chain_id=None), DUE, Problem.WRONG_CHAIN, "42161", None),
        (replace(READ, coin=3), DUE, Problem.COIN_ATTACHED, "0", "3"),
        (replace(READ, units=1), DUE, Problem.AMOUNT_TOO_LOW, "150", "0.000001"),
        (replace(READ, units=None), replace(DUE, units=1), Problem.AMOUNT_TOO_LOW,
         "0.000001", None),
        (replace(READ, units=151_000_000), DUE, Problem.AMOUNT_TOO_HIGH, "150", "151"),
    ],
)  # fmt: skip
def test_mismatch_says_what_was_expected_and_what_came(
    payment: ProposedPayment,
    due: ExpectedPayment,
    problem: Problem,
    expected: str,
    received: str | None,
) -> None:
    (found,) = differences(payment, due, NOW)
    assert (found.problem, found.expected, found.received) == (problem, expected, received)
    assert found.message.endswith(".")


def test_chain_that_is_missing_is_not_called_another() -> None:
    (other,) = differences(replace(READ, chain_id=1), DUE, NOW)
    (missing,) = differences(replace(READ, chain_id=None), DUE, NOW)
    assert "another chain" in other.message
    assert "does not say" in missing.message


def test_window_is_closed_at_its_end_and_closing_before() -> None:
    for left, problem in ((0, Problem.NOT_PAYABLE), (1, Problem.CLOSING),
                          (LEAST_MS_LEFT - 1, Problem.CLOSING)):  # fmt: skip
        (found,) = differences(READ, DUE, DUE.closes_at - left)
        assert found.problem is problem
        assert found.message
    assert differences(READ, DUE, DUE.closes_at - LEAST_MS_LEFT) == ()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"to": None}, "no address as to"), ({"to": TOKEN[:-1]}, "no address as to"),
        ({"to": TOKEN + "0"}, "no address as to"), ({"to": "0x" + "g" * 40}, "no address as to"),
        ({"to": 7}, "no address as to"), ({"data": "0x0"}, "hex of whole bytes"),
        ({"data": 7}, "hex of whole bytes"), ({"data": "0xzz"}, "hex of whole bytes"),
        ({"data": "0x" + "00" * 4_096}, "over 8192"), ({"chainId": -1}, "has chainId"),
        ({"chainId": 2**256}, "has chainId"), ({"chainId": 1.0}, "has chainId"),
        ({"value": "x"}, "has value"), ({"input": "0x"}, "both data and input"),
        ({"colour": "red"}, r"\(colour\)"), ({"z" * 32: 1}, "z{32}"), ({"z" * 33: 1}, "not shown"),
        ({"z1": 1}, "not shown"), ({"\xe9": 1}, "not shown"),
    ],
)  # fmt: skip
def test_transaction_that_is_broken_gets_its_fault(changes: dict[str, Any], complaint: str) -> None:
    with pytest.raises(Unreadable, match=complaint):
        read_transaction(transaction(**changes))


def test_longest_data_is_read() -> None:
    longest = "0x" + "00" * 4_095
    assert not read_transaction(transaction(data=longest)).is_transfer
    require_no_secret("." * 8_192, "address")
    with pytest.raises(InvalidInput):
        require_no_secret("." * 8_193, "address")


@pytest.mark.parametrize(
    "value",
    [transaction(), "{" + KEY, calldata(DEPOSIT, 1), "0x", "7", "0x" + "ab" * 100,
     "{" + KEY + "." * 8_125],
)  # fmt: skip
def test_what_is_read_later_is_let_through(value: Any) -> None:
    require_unsigned(value)
    require_unsigned(f" {value} " if isinstance(value, str) else value)


@pytest.mark.parametrize("value", [KEY, f" 0x{KEY}", f"x {KEY}", [KEY], "{" + "x" * 8_192])
def test_what_may_be_signed_is_refused_by_its_field(value: Any) -> None:
    for field in ("transaction", "payment"):
        with pytest.raises(InvalidInput, match=rf"^{field} is signed") as refusal:
            require_unsigned(value, field)
        assert (refusal.value.field, refusal.value.received) == (field, None)
    with pytest.raises(InvalidInput) as refusal:
        require_unsigned(value)
    assert refusal.value.field == "transaction"


@pytest.mark.parametrize("read", [
    lambda *field: read_transaction({"r": 1}, *field),
    lambda *field: read_transaction({"note": KEY}, *field),
    lambda *field: read_calldata("0x02" + "00" * 20, *field),
    lambda *field: read_calldata("f8", *field),
])  # fmt: skip
def test_refusal_of_a_signed_payment_names_the_field(read: Callable[..., Any]) -> None:
    with pytest.raises(InvalidInput, match=r"^transaction is signed") as refusal:
        read()
    assert refusal.value.field == "transaction"
    with pytest.raises(InvalidInput, match=r"^payment is signed") as refusal:
        read("payment")
    assert refusal.value.field == "payment"


def test_key_of_signed_ones_without_a_value_is_unknown() -> None:
    with pytest.raises(Unreadable):
        read_transaction(transaction(r=None))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"to": DEPOSIT}, Problem.WRONG_TOKEN),
        ({"chainId": 1}, Problem.WRONG_CHAIN),
        ({"chainId": None}, Problem.WRONG_CHAIN),
        ({"value": "0x1"}, Problem.COIN_ATTACHED),
        ({"data": calldata(TOKEN, DUE.units)}, Problem.WRONG_ADDRESS),
        ({"data": calldata(DEPOSIT, DUE.units - 1)}, Problem.AMOUNT_TOO_LOW),
        ({"data": calldata(DEPOSIT, DUE.units + 1)}, Problem.AMOUNT_TOO_HIGH),
        ({"data": calldata(DEPOSIT, 150 * 10**18)}, Problem.AMOUNT_TOO_HIGH),
        ({"data": calldata(DEPOSIT, DUE.units, "095ea7b3")}, Problem.WRONG_CALL),
        ({"data": calldata(DEPOSIT, DUE.units) + "00"}, Problem.WRONG_CALL),
        ({"data": "0x"}, Problem.WRONG_CALL),
    ],
)
def test_check_names_each_difference(changes: dict[str, Any], found: Problem) -> None:
    assert problems(read_transaction(transaction(**changes))) == {found}


@given(address=addresses, amount=units, chain=st.integers(0, 2**32), token=addresses)
def test_check_is_safe_for_the_due_payment_alone(
    address: str, amount: int, chain: int, token: str
) -> None:
    payment = read_transaction(
        {"to": token, "data": calldata(address, amount), "chainId": hex(chain)}
    )
    is_due = (
        (address, token) == (DEPOSIT.lower(), TOKEN.lower())
        and (amount, chain) == (DUE.units, DUE.chain_id)
    )  # fmt: skip
    assert (not problems(payment)) is is_due
    wanted = replace(DUE, address=address, units=amount, chain_id=chain, token=token)
    assert problems(payment, wanted) == set()


@given(amount=st.integers(0, 10**15))
def test_check_reads_uri_and_transaction_alike(amount: int) -> None:
    uri = read_uri(f"ethereum:{TOKEN}@42161/transfer?address={DEPOSIT}&uint256={amount}")
    sent = read_transaction(transaction(data=calldata(DEPOSIT, amount)))
    assert problems(uri) == problems(sent)
    assert uri.units == sent.units == amount


@given(st.integers(-(10**9), 10**9))
def test_check_is_never_safe_when_the_window_closes(left: int) -> None:
    found = problems(read_transaction(transaction()), now=DUE.closes_at - left)
    assert (not found) is (left >= LEAST_MS_LEFT)


def test_check_needs_the_contract_of_calldata() -> None:
    call = replace(read_calldata(calldata(DEPOSIT, DUE.units)), chain_id=DUE.chain_id)
    (found,) = differences(call, DUE, NOW)
    assert (found.problem, found.expected, found.received) == (Problem.WRONG_TOKEN, TOKEN, None)
    assert problems(replace(call, token=DEPOSIT)) == {Problem.WRONG_TOKEN}
    assert problems(replace(call, chain_id=None, token=TOKEN)) == {Problem.WRONG_CHAIN}
    described = ProposedPayment(DEPOSIT, DUE.units, USDC, DUE.chain_id)
    assert problems(described) == set()


def test_check_refuses_an_order_that_takes_no_payment() -> None:
    due = replace(DUE, is_payable=False)
    assert problems(read_transaction(transaction()), due) == {Problem.NOT_PAYABLE}


def test_check_reads_monero_uris() -> None:
    assert problems(read_uri("monero:8deposit?tx_amount=0.8"), XMR_DUE) == set()
    assert problems(read_uri("monero:8deposit"), XMR_DUE) == {Problem.AMOUNT_TOO_LOW}
    assert problems(read_uri("monero:8other?tx_amount=0.8"), XMR_DUE) == {Problem.WRONG_ADDRESS}
    assert problems(read_transaction(transaction()), XMR_DUE) == {Problem.WRONG_ASSET}
    assert problems(read_uri("monero:8deposit?tx_amount=0.8")) == {Problem.WRONG_ASSET}


@pytest.mark.parametrize(
    "uri",
    [
        "monero:8deposit?tx_amount=0.8&tx_payment_id=0000",
        "monero:8deposit;8other?tx_amount=0.4;0.4",
        "monero:8deposit;8other?tx_amount=0.4",
        "monero:8deposit?tx_amount=",
        f"ethereum:{TOKEN}@42161/transfer?address={DEPOSIT}&uint256=",
        "monero:8deposit?tx_amount=0.8&tx_amount=0.9",
        f"ethereum:{TOKEN}@42161/transfer?address={DEPOSIT}&uint256=1.5",
        f"ethereum:{TOKEN}@42161/transfer?address={DEPOSIT}&uint256=1e99&uint256=1",
        "bitcoin:1BoatSLRHtKNngkdXEeobR76b53LETtpyT",
    ],
)
def test_check_refuses_a_uri_that_it_cannot_read(uri: str) -> None:
    with pytest.raises(Unreadable):
        read_uri(uri)


SEED = "legal winner thank year wave sausage worth useful legal winner thank yellow"


@pytest.mark.parametrize("text", [KEY, f"0x{KEY}", SEED, SEED.upper(), SEED.replace(" ", ", ")])
def test_check_repeats_no_secret(text: str) -> None:
    with pytest.raises(InvalidInput) as refusal:
        require_no_secret(text, "transaction")
    assert refusal.value.received is None
    assert text not in refusal.value.message


RAW = "02f8b1" + KEY * 3


@pytest.mark.parametrize(
    "value",
    [RAW, f"0x{RAW}", f"ethereum:{TOKEN}?data=0x{RAW}", {"tx": RAW}, {RAW: 1}, [{"a": [RAW]}],
     b64encode(bytes.fromhex(RAW)).decode(), f"address={KEY}", "xprv" + "9" * 107],
)  # fmt: skip
def test_check_repeats_neither_keys_nor_signed_transactions(value: Any) -> None:
    with pytest.raises(InvalidInput) as refusal:
        require_no_secret(value, "address")
    assert refusal.value.received is None
    assert not any(part in refusal.value.message for part in (KEY, RAW[:20]))


@pytest.mark.parametrize(
    "value",
    ["4" * 106, DEPOSIT, calldata(DEPOSIT, 1), f"ethereum:{TOKEN}@1/transfer?address={DEPOSIT}",
     f"monero:{'8' * 95}?tx_amount=0.8&tx_description=for%20a%20swap", "9" * 200, 7, None],
)  # fmt: skip
def test_check_takes_no_address_or_calldata_for_secret(value: Any) -> None:
    require_no_secret(value, "address")


def test_check_reads_storage_keys_of_an_access_list() -> None:
    listed = transaction(accessList=[{"address": TOKEN, "storageKeys": [f"0x{KEY}"]}])
    assert problems(read_transaction(listed)) == set()


@pytest.mark.parametrize(
    "name",
    ["r", "s", "v", "yParity", "signature", "privateKey", "mnemonic", "rawTransaction",
     "authorizationList", "password"],
)  # fmt: skip
def test_check_refuses_a_signed_transaction_unread(name: str) -> None:
    with pytest.raises(InvalidInput, match="signed") as refusal:
        read_transaction(transaction(**{name: KEY, "to": "broken", "data": "broken"}))
    assert refusal.value.received is None
    assert KEY not in refusal.value.message


@given(st.dictionaries(st.text(max_size=8), st.one_of(st.none(), st.text(), st.integers())))
def test_check_reads_or_refuses_whatever_comes(given_: dict[str, Any]) -> None:
    try:
        payment = read_transaction({**transaction(), **given_})
    except Unreadable:
        pass
    except InvalidInput as refusal:
        assert refusal.received is None
    else:
        assert payment.token is not None


@given(st.text(alphabet="0123456789abcdefx", max_size=300))
def test_check_reads_or_refuses_any_calldata(text: str) -> None:
    try:
        payment = read_calldata(text)
    except Unreadable:
        pass
    except InvalidInput as refusal:
        assert refusal.received is None
    else:
        assert payment.token is None
        # A contract may be given besides; without one it is never safe.
        assert Problem.WRONG_TOKEN in problems(replace(payment, chain_id=DUE.chain_id))
