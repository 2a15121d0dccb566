"""Whom a call of a USDC token pays, read from its call data alone.

Only the calls that users pay with are known: ``transfer``, ``transferFrom``, and the two of
EIP-3009 in both forms. Whatever is not exactly what an ABI encoder makes is nothing here, though
a contract may take it: too long, too short, or with bits set that a type does not have.
What does not live here: making calls (usdc.py), and what the token does with one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple

from rpcsvc.settlement.onchain.evm.usdc import WORD, read_uint, selector

_SELECTOR_BYTES: Final = 4
_ABOVE_ADDRESS: Final = 12
_AUTHORIZED: Final = "(address,address,uint256,uint256,uint256,bytes32,"
_LARGEST_BYTE: Final = 255
# FiatToken takes the signatures of contract wallets; none in use is longer than this.
_LONGEST_SIGNATURE: Final = 8192


class PayingCall(NamedTuple):
    """What a call would move if it succeeds: USDC units, to an address in lower case."""

    to: str
    units: int


class _Form(NamedTuple):
    """How a call is laid out, in words: all of them, those of addresses, that of the units.

    The last address is paid. ``v``: a word of one byte. ``tail``: the last word points to bytes.
    """

    words: int
    addresses: tuple[int, ...]
    units: int
    v: int | None = None
    tail: bool = False


_TRANSFER: Final = _Form(2, (0,), 1)
_TRANSFER_FROM: Final = _Form(3, (0, 1), 2)
_SIGNED: Final = _Form(9, (0, 1), 2, v=6)
_SIGNED_BYTES: Final = _Form(7, (0, 1), 2, tail=True)

_FORMS: Final = {
    selector("transfer(address,uint256)"): _TRANSFER,
    selector("transferFrom(address,address,uint256)"): _TRANSFER_FROM,
    selector(f"transferWithAuthorization{_AUTHORIZED}uint8,bytes32,bytes32)"): _SIGNED,
    selector(f"receiveWithAuthorization{_AUTHORIZED}uint8,bytes32,bytes32)"): _SIGNED,
    selector(f"transferWithAuthorization{_AUTHORIZED}bytes)"): _SIGNED_BYTES,
    selector(f"receiveWithAuthorization{_AUTHORIZED}bytes)"): _SIGNED_BYTES,
}


def read_paying_call(data: bytes) -> PayingCall | None:
    """Whom call data pays how much; None when it is no such call, or not strictly encoded."""
    form = _FORMS.get(data[:_SELECTOR_BYTES])
    body = data[_SELECTOR_BYTES:]
    if form is None or len(body) < form.words * WORD:
        return None
    words = [body[at * WORD : (at + 1) * WORD] for at in range(form.words)]
    if not _is_strict(form, words, body[form.words * WORD :]):
        return None
    paid = words[form.addresses[-1]][_ABOVE_ADDRESS:]
    return PayingCall("0x" + paid.hex(), read_uint(words[form.units]))


def _is_strict(form: _Form, words: Sequence[bytes], rest: bytes) -> bool:
    """Whether no bit is set that a type does not have, and nothing is missing or too much."""
    if any(any(words[at][:_ABOVE_ADDRESS]) for at in form.addresses):
        return False
    if form.v is not None and read_uint(words[form.v]) > _LARGEST_BYTE:
        return False
    return _is_tail(words[-1], form.words, rest) if form.tail else rest == b""


def _is_tail(offset: bytes, words: int, rest: bytes) -> bool:
    """Whether dynamic bytes follow right after the words: their length, themselves, then zeros."""
    if read_uint(offset) != words * WORD or len(rest) < WORD:
        return False
    length, content = read_uint(rest[:WORD]), rest[WORD:]
    if length > _LONGEST_SIGNATURE or len(content) != -(-length // WORD) * WORD:
        return False
    return not any(content[length:])
