"""Bytes of EVM transactions: RLP, unsigned ones, and signed ones rebuilt from a node's fields.

A rebuilt transaction must hash to its id: what the service would publish again is what was mined.
The sender is the node's word. Sources: EIP-1559, EIP-2718; the Yellow Paper, appendix B (RLP).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from rpcsvc.settlement.onchain.evm.keys import TransactionPlan
from rpcsvc.settlement.onchain.evm.usdc import keccak256

_LEGACY, _FEE_MARKET = 0, 2
_SHORT: Final = 55
_STRING, _LIST = 0x80, 0xC0

Item = bytes | Sequence["Item"]


@dataclass(frozen=True, slots=True)
class SignedFields:
    """A signed transaction. ``raw`` are its bytes; gas is a limit, fees are wei per gas."""

    txid: str
    raw: bytes
    sender: str
    to: str
    nonce: int
    value: int
    data: bytes
    gas: int
    max_fee: int
    tip: int


def signed_fields(answer: Mapping[str, Any]) -> SignedFields:
    """The transaction of a node's answer to eth_getTransactionByHash.

    Raises ValueError when its bytes do not give its id: the node tells something else than was
    signed, or the transaction is of another type than 0 (legacy) and 2 (EIP-1559).
    """
    try:
        kind = _number(answer.get("type", "0x0"))
        fields = {_LEGACY: _legacy, _FEE_MARKET: _fee_market}[kind](answer)
        prefix = bytes([kind]) if kind else b""
        raw = prefix + rlp(fields)
        txid = str(answer["hash"]).lower()
        if "0x" + keccak256(raw).hex() != txid:
            raise ValueError("its bytes do not give its id")
        return _read(answer, txid, raw, kind)
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"a field is missing, or of an unknown kind: {error}") from error


def _read(answer: Mapping[str, Any], txid: str, raw: bytes, kind: int) -> SignedFields:
    dynamic = kind == _FEE_MARKET
    return SignedFields(
        txid=txid,
        raw=raw,
        sender=str(answer["from"]).lower(),
        to=str(answer["to"]).lower(),
        nonce=_number(answer["nonce"]),
        value=_number(answer["value"]),
        data=_bytes(answer["input"]),
        gas=_number(answer["gas"]),
        max_fee=_number(answer["maxFeePerGas" if dynamic else "gasPrice"]),
        tip=_number(answer["maxPriorityFeePerGas" if dynamic else "gasPrice"]),
    )


def unsigned(plan: TransactionPlan) -> bytes:
    """The transaction as it is before it is signed (EIP-1559), without an access list."""
    numbers = (plan.chain_id, plan.nonce, plan.tip, plan.max_fee, plan.gas)
    to = bytes.fromhex(plan.to[2:])
    return bytes([_FEE_MARKET]) + rlp(
        [*map(_digits, numbers), to, _digits(plan.value), plan.data, []]
    )


def _legacy(answer: Mapping[str, Any]) -> list[Item]:
    names = ("nonce", "gasPrice", "gas")
    return [
        *(_quantity(answer[name]) for name in names),
        _bytes(answer["to"]),
        _quantity(answer["value"]),
        _bytes(answer["input"]),
        *(_quantity(answer[name]) for name in ("v", "r", "s")),
    ]


def _fee_market(answer: Mapping[str, Any]) -> list[Item]:
    names = ("chainId", "nonce", "maxPriorityFeePerGas", "maxFeePerGas", "gas")
    listed: list[Item] = [
        [_bytes(entry["address"]), [_bytes(key) for key in entry["storageKeys"]]]
        for entry in answer.get("accessList") or []
    ]
    parity = answer.get("yParity", answer.get("v"))
    return [
        *(_quantity(answer[name]) for name in names),
        _bytes(answer["to"]),
        _quantity(answer["value"]),
        _bytes(answer["input"]),
        listed,
        *(_quantity(each) for each in (parity, answer["r"], answer["s"])),
    ]


def _number(text: Any) -> int:
    return int(text, 16)


def _quantity(text: Any) -> bytes:
    return _digits(_number(text))


def _digits(number: int) -> bytes:
    """Big-endian without leading zeros; nothing for 0."""
    return number.to_bytes((number.bit_length() + 7) // 8, "big")


def _bytes(text: Any) -> bytes:
    return bytes.fromhex(text.removeprefix("0x"))


def rlp(item: Item) -> bytes:
    """Recursive length prefix encoding of bytes, and lists of them."""
    if isinstance(item, bytes):
        if len(item) == 1 and item[0] < _STRING:
            return item
        return _prefix(len(item), _STRING) + item
    body = b"".join(rlp(each) for each in item)
    return _prefix(len(body), _LIST) + body


def _prefix(length: int, offset: int) -> bytes:
    if length <= _SHORT:
        return bytes([offset + length])
    size = _digits(length)
    return bytes([offset + _SHORT + len(size)]) + size
