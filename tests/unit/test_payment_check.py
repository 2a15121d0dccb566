"""swap.check's rules: only the exact amount due is safe to send, and secrets are never read."""

from __future__ import annotations

from base64 import b64encode
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
        "monero:8deposit?tx_amount=0.8&tx_amount=0.9",
        f"ethereum:{TOKEN}@42161/transfer?address={DEPOSIT}&uint256=1.5",
        f"ethereum:{TOKEN}@42161/transfer?address={DEPOSIT}&uint256=1e99&uint256=1",
        "bitcoin:1BoatSLRHtKNngkdXEeobR76b53LETtpyT",
    ],
)
def test_check_refuses_a_uri_that_it_cannot_read(uri: str) -> None:
    with pytest.raises(Unreadable):
        read_uri(uri)


KEY = "4c0883a69102937d6231471b5dbb6204fe5129617082792ae468d01a3f362318"
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
