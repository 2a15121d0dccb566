"""Checks an unsigned payment against the order that it is meant for.

What carries a signature or a key is refused unread, and no error repeats it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, Final
from urllib.parse import parse_qsl

from msgspec import Struct
from msgspec.structs import replace

from rpcsvc.domain.addresses import same_address
from rpcsvc.domain.chains import MONERO_CHAIN_ID
from rpcsvc.domain.money import USDC, XMR, Asset, format_units, parse_any_amount
from rpcsvc.errors import InputError, InvalidInput

# A payment has to be on its way before the window closes.
LEAST_MS_LEFT: Final = 60_000

_TRANSFER: Final = "a9059cbb"  # transfer(address,uint256), ERC-20
_WORD: Final = 64
_MOST_WEI: Final = 2**256 - 1
# No text of a payment is longer: the data of a transfer has 138 characters, a URI some hundred.
_LONGEST_TEXT: Final = 8_192
_HEX: Final = re.compile(r"0x[0-9a-fA-F]*", re.ASCII)
_QUANTITY: Final = re.compile(r"0x[0-9a-fA-F]{1,64}|[0-9]{1,78}", re.ASCII)
_EIP681: Final = re.compile(
    r"ethereum:(?:pay-)?(?P<target>0x[0-9a-fA-F]{40})(?:@(?P<chain>[0-9]{1,20}))?"
    r"(?:/(?P<function>[A-Za-z0-9_]+))?(?:\?(?P<query>.*))?",
    re.ASCII,
)
# The number of EIP-681: digits, a fraction and an exponent of ten.
_NUMBER: Final = re.compile(r"([0-9]{1,78})(?:\.([0-9]{1,78}))?(?:[eE]([0-9]{1,2}))?", re.ASCII)
_MONERO_URI: Final = re.compile(r"monero:(?P<address>[^?]+)(?:\?(?P<query>.*))?", re.ASCII)
_MONERO_KEYS: Final = frozenset({"tx_amount", "recipient_name", "tx_description"})

TRANSACTION_KEYS: Final = frozenset(
    {
        "from", "to", "value", "data", "input", "gas", "gasLimit", "gasPrice", "maxFeePerGas",
        "maxPriorityFeePerGas", "nonce", "chainId", "type", "accessList",
    }
)  # fmt: skip
# What only a signed transaction has, or nobody but its owner may have.
_SECRET_KEY: Final = re.compile(
    r"\A(?:[rsv]|y_?parity)\Z"
    r"|sign|secret|private|mnemonic|seed|phrase|passw|keystore|keyfile|raw|auth",
    re.IGNORECASE,
)
# 32 bytes in hex, and the words of a seed (BIP 39: 12 to 24; Monero: 13 or 25; Polyseed: 16).
_BARE_KEY: Final = re.compile(r"(0x)?[0-9a-fA-F]{64}", re.ASCII | re.IGNORECASE)
_KEY_WITHIN: Final = re.compile(r"(?<![0-9a-fA-F])[0-9a-fA-F]{64}(?![0-9a-fA-F])", re.ASCII)
_SEED_WORDS: Final = re.compile(r"\s*([^\W\d_]+[\s,]+){11,}[^\W\d_]+\s*")
_EXTENDED_KEY: Final = re.compile(r"[xyztuv]prv[1-9A-HJ-NP-Za-km-z]{50,}", re.ASCII)
# How a transaction begins that is serialized: its type (EIP-2718), or a list in RLP.
_SERIALIZED: Final = re.compile(r"(0x)?(0[1-4]|[c-f])", re.ASCII | re.IGNORECASE)
# Hex or base64 of what may hold a signature (65 bytes); no address is nearly as long.
_LONG_WORD: Final = re.compile(r"[0-9A-Za-z+/_-]{130,}", re.ASCII)
_CALLDATA: Final = re.compile(r"(0x)?[0-9a-fA-F]*", re.ASCII | re.IGNORECASE)
_SIGNED: Final = (
    f"is signed, holds a key, or has over {_LONGEST_TEXT} characters. It was not read. Send the"
    " transaction as it is before it is signed, and never a key or a seed, to anybody: one that was"
    " sent is to be considered lost."
)


class Unreadable(Exception):
    """The payment can't be interpreted; the message repeats nothing of it."""


class Problem(StrEnum):
    """The ways in which a payment can differ from the order."""

    UNREADABLE = "unreadable"
    NOT_PAYABLE = "not_payable"
    CLOSING = "closing"
    WRONG_CALL = "wrong_call"
    WRONG_ADDRESS = "wrong_address"
    WRONG_ASSET = "wrong_asset"
    WRONG_TOKEN = "wrong_token"  # noqa: S105 - a problem's name
    WRONG_CHAIN = "wrong_chain"
    AMOUNT_TOO_LOW = "amount_too_low"
    AMOUNT_TOO_HIGH = "amount_too_high"
    COIN_ATTACHED = "coin_attached"


class ProposedPayment(Struct, frozen=True):
    """The effect of a payment; None where it does not say.

    ``units`` are atomic units of ``asset``. ``token`` is the contract that it calls, None where it
    is not known and for XMR; ``is_transfer`` tells that it calls an ERC-20 transfer, and
    ``is_calldata`` that it is the call alone. ``coin`` is what it sends of the chain's own coin, in
    its smallest unit.
    """

    address: str | None
    units: int | None
    asset: Asset
    chain_id: int | None
    token: str | None = None
    is_transfer: bool = True
    coin: int = 0
    is_calldata: bool = False


class ExpectedPayment(Struct, frozen=True):
    """The payment that an order expects. ``token``: None for XMR. Times are ms since the epoch."""

    address: str
    units: int
    asset: Asset
    chain_id: int
    token: str | None
    is_payable: bool
    closes_at: int


class Mismatch(Struct, frozen=True):
    """One problem: the expected value, and the payment's own (None if it has none)."""

    problem: Problem
    message: str
    expected: str | None = None
    received: str | None = None


def differences(payment: ProposedPayment, due: ExpectedPayment, now: int) -> tuple[Mismatch, ...]:
    """Return all differences to the due payment; empty if it is safe to send."""
    return (*_timing(due, now), *_target(payment, due), *_amount(payment, due))


def _timing(due: ExpectedPayment, now: int) -> list[Mismatch]:
    if not due.is_payable or now >= due.closes_at:
        return [Mismatch(Problem.NOT_PAYABLE, "The order takes no payment now: send nothing.")]
    if due.closes_at - now < LEAST_MS_LEFT:
        text = "The deposit window closes in less than a minute: make a new order instead."
        return [Mismatch(Problem.CLOSING, text)]
    return []


def _target(payment: ProposedPayment, due: ExpectedPayment) -> list[Mismatch]:
    if payment.asset != due.asset:
        text = f"The order takes {due.asset.symbol} only."
        return [Mismatch(Problem.WRONG_ASSET, text, due.asset.symbol, payment.asset.symbol)]
    found = []
    if not payment.is_transfer:
        text = "It does not call transfer(address,uint256) of the token, which is all that counts."
        found.append(Mismatch(Problem.WRONG_CALL, text, "transfer(address,uint256)"))
    elif payment.address is None or not same_address(payment.address, due.address):
        text = "It does not go to the order's deposit address."
        found.append(Mismatch(Problem.WRONG_ADDRESS, text, due.address, payment.address))
    if payment.is_calldata and payment.token is None:
        text = "It does not say which contract it calls: the same call to another token is lost."
        found.append(Mismatch(Problem.WRONG_TOKEN, text, due.token))
    elif due.token and payment.token and not same_address(payment.token, due.token):
        text = "It calls another contract than the token's: the deposit would not be seen."
        found.append(Mismatch(Problem.WRONG_TOKEN, text, due.token, payment.token))
    if payment.chain_id != due.chain_id:
        text = (
            "It is for another chain." if payment.chain_id else "It does not say for which chain."
        )
        given = None if payment.chain_id is None else str(payment.chain_id)
        found.append(Mismatch(Problem.WRONG_CHAIN, text, str(due.chain_id), given))
    return found


def _amount(payment: ProposedPayment, due: ExpectedPayment) -> list[Mismatch]:
    found = []
    if payment.coin:
        text = "It sends the chain's own coin along, which would be lost: value must be 0."
        found.append(Mismatch(Problem.COIN_ATTACHED, text, "0", str(payment.coin)))
    if payment.asset != due.asset or not payment.is_transfer or payment.units == due.units:
        return found
    expected = format_units(due.units, due.asset)
    units = payment.units or 0
    given = None if payment.units is None else format_units(units, due.asset)
    if units < due.units:
        text = "It is less than what is due; a sum below the minimum is refunded, less the fee."
        found.append(Mismatch(Problem.AMOUNT_TOO_LOW, text, expected, given))
    else:
        text = "It is more than what is due."
        found.append(Mismatch(Problem.AMOUNT_TOO_HIGH, text, expected, given))
    return found


# --- reading a payment -----------------------------------------------------------------------


def require_no_secret(value: Any, field: str) -> None:
    """Raise InvalidInput for a value that may be signed, a key, or is too long to tell.

    The error does not repeat it.
    """
    if holds_secret(value):
        raise InvalidInput(f"{field} {_SIGNED}", field=field)


def require_unsigned(transaction: Any, field: str = "transaction") -> None:
    """The same of a transaction that was not read yet, which may be JSON or calldata as text."""
    if isinstance(transaction, str) and len(transaction) <= _LONGEST_TEXT:
        text = transaction.strip()
        is_calldata = _CALLDATA.fullmatch(text) and not _BARE_KEY.fullmatch(text)
        if text.startswith("{") or is_calldata:
            return  # read_transaction and read_calldata refuse what is signed
    elif isinstance(transaction, Mapping):
        return
    require_no_secret(transaction, field)


def holds_secret(value: Any) -> bool:
    """Return whether a JSON value holds what may be a signed transaction, a key or a seed.

    A text of more than _LONGEST_TEXT characters may be each of them.
    """
    if isinstance(value, str):
        return _is_secret(value)
    if isinstance(value, Mapping):
        return any(_is_secret(name) or holds_secret(part) for name, part in value.items())
    return isinstance(value, list) and any(map(holds_secret, value))


def _is_secret(text: str) -> bool:
    if len(text) > _LONGEST_TEXT:
        return True
    if _KEY_WITHIN.search(text) or _EXTENDED_KEY.search(text) or _SEED_WORDS.fullmatch(text):
        return True
    words = (word.lower().removeprefix("0x") for word in _LONG_WORD.findall(text))
    return not all(word.isdigit() or word.startswith(_TRANSFER) for word in words)


def read_transaction(given: Mapping[str, Any], field: str = "transaction") -> ProposedPayment:
    """An unsigned EVM transaction in the form of JSON-RPC. Raises Unreadable, and
    InvalidInput for one that is signed.

    Source: Ethereum execution API, ``eth_sendTransaction``; ERC-20, ``transfer``.
    """
    for name, value in given.items():
        if name not in TRANSACTION_KEYS:
            if holds_secret({name: value}) or (value is not None and _SECRET_KEY.search(name)):
                raise InvalidInput(f"{field} {_SIGNED}", field=field)
            shown = name if name.isascii() and name.isalpha() and len(name) <= 32 else "not shown"
            raise _unreadable(f"has a key that transactions don't have ({shown})")
    calls = [given[name] for name in ("data", "input") if given.get(name) is not None]
    if any(call != calls[0] for call in calls):
        raise _unreadable("has both data and input, and they differ")
    target = given.get("to")
    if not isinstance(target, str) or len(target) != 42 or not _HEX.fullmatch(target):
        raise _unreadable("has no address as to")
    call = calls[0] if calls else "0x"
    chain = given.get("chainId")
    return _call(
        call,
        token=target,
        chain_id=None if chain is None else _quantity(chain, "chainId"),
        coin=_quantity(given.get("value") or 0, "value"),
    )


def read_calldata(text: str, field: str = "transaction") -> ProposedPayment:
    """The calldata of a token, whose contract and chain it does not name.

    Raises Unreadable, and InvalidInput for what may be a signed transaction.
    """
    if _SERIALIZED.match(text):
        raise InvalidInput(f"{field} {_SIGNED}", field=field)
    return replace(_call(text, token=None, chain_id=None, coin=0), is_calldata=True)


def _call(call: Any, *, token: str | None, chain_id: int | None, coin: int) -> ProposedPayment:
    is_short = isinstance(call, str) and len(call) <= _LONGEST_TEXT
    if not is_short or not _HEX.fullmatch(call) or len(call) % 2:
        raise _unreadable(
            f"has data that is not hex of whole bytes, or over {_LONGEST_TEXT} characters"
        )
    digits = call[2:].lower()
    recipient, units = digits[8 : 8 + _WORD], digits[8 + _WORD :]
    if digits[:8] != _TRANSFER or len(units) != _WORD or recipient[:24].strip("0"):
        return ProposedPayment(None, None, USDC, chain_id, token, is_transfer=False, coin=coin)
    return ProposedPayment("0x" + recipient[24:], int(units, 16), USDC, chain_id, token, coin=coin)


def _quantity(value: Any, name: str) -> int:
    """A number of JSON-RPC: hex, decimal digits, or a JSON number."""
    if isinstance(value, str) and _QUANTITY.fullmatch(value):
        return int(value, 16) if value[:2] == "0x" else int(value)
    if type(value) is int and 0 <= value <= _MOST_WEI:
        return value
    raise _unreadable(f"has {name} that is no whole number")


def read_uri(text: str) -> ProposedPayment:
    """A ``monero:`` URI, or an ``ethereum:`` one for a transfer (EIP-681). Raises Unreadable."""
    if match := _MONERO_URI.fullmatch(text):
        return _monero(match["address"], _query(match["query"]))
    if match := _EIP681.fullmatch(text):
        chain = None if match["chain"] is None else int(match["chain"])
        query = _query(match["query"])
        coin = _number(query.get("value", "0"))
        if match["function"] != "transfer":
            return ProposedPayment(
                None, None, USDC, chain, match["target"], is_transfer=False, coin=coin
            )
        given = query.get("uint256")
        units = None if given is None else _number(given)
        return ProposedPayment(query.get("address"), units, USDC, chain, match["target"], coin=coin)
    raise _unreadable("is neither a monero: URI nor an ethereum: one with an address")


def _monero(address: str, query: Mapping[str, str]) -> ProposedPayment:
    """Read the URI of Monero's wallets: one recipient, without a payment id."""
    unknown = query.keys() - _MONERO_KEYS
    if unknown or ";" in address:
        raise _unreadable("is not for one recipient, or has more than tx_amount")
    amount = query.get("tx_amount")
    try:
        units = None if amount is None else parse_any_amount(amount, XMR).units
    except InputError:
        raise _unreadable("has a tx_amount that is no amount of XMR") from None
    return ProposedPayment(address, units, XMR, MONERO_CHAIN_ID)


def _query(text: str | None) -> dict[str, str]:
    pairs = parse_qsl(text or "", keep_blank_values=True)
    if len({name for name, _ in pairs}) != len(pairs):
        raise _unreadable("has a parameter twice")
    return dict(pairs)


def _number(text: str) -> int:
    """The number of EIP-681 as a whole number of the smallest unit: 1.5e8 is 150000000."""
    match = _NUMBER.fullmatch(text)
    if match is not None:
        whole, fraction, exponent = match[1], (match[2] or "").rstrip("0"), int(match[3] or 0)
        if len(fraction) <= exponent:
            return int(whole + fraction.ljust(exponent, "0"))
    raise _unreadable("has a number that is not a whole one of the smallest unit")


def _unreadable(what: str) -> Unreadable:
    return Unreadable(
        f"The payment {what}. Send an unsigned transaction (to, data, chainId), its calldata, a"
        " payment URI, or address, amount, asset and chain."
    )
