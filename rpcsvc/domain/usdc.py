"""Calls, events and typed data of a USDC token, as bytes: no network, no keys.

Covers ERC-20 transfer and balanceOf, EIP-2612 permit, EIP-3009 authorizations, ERC-1271 signatures
of contract wallets, and Circle's pause and blacklist. Amounts are USDC units (10^-6). Addresses are
0x and 40 hex digits, in any case; results are in EIP-55 form. Call data and digests are bytes.
Everything raises ValueError.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final, NamedTuple

from Cryptodome.Hash import keccak
from msgspec import Struct

from rpcsvc.domain.addresses import evm_checksum

WORD: Final = 32
LARGEST_WORD: Final = 2**256 - 1

_ADDRESS: Final = re.compile(r"0x[0-9a-fA-F]{40}", re.ASCII)

_AUTHORIZED: Final = "(address,address,uint256,uint256,uint256,bytes32,"
_PERMIT: Final = "permit(address,address,uint256,uint256,"
_VRS: Final = "uint8,bytes32,bytes32)"
_AUTHORIZATION_FIELDS: Final = (
    b"(address from,address to,uint256 value,uint256 validAfter,uint256 validBefore,bytes32 nonce)"
)
_SELECTOR_BYTES: Final = 4
_ABOVE_ADDRESS: Final = 12
_LARGEST_BYTE: Final = 255
# FiatToken takes the signatures of contract wallets; none in use is longer than this.
_LONGEST_SIGNATURE: Final = 8192


def keccak256(data: bytes) -> bytes:
    """Keccak-256 as Ethereum uses it."""
    return keccak.new(digest_bits=256, data=data).digest()


# --- ABI words -------------------------------------------------------------------------------


def address_word(address: str) -> bytes:
    """An address as an ABI word."""
    if not _ADDRESS.fullmatch(address):
        raise ValueError(f"{address[:64]!r} is not an address: 0x and 40 hex digits are needed")
    return bytes(12) + bytes.fromhex(address[2:])


def uint_word(value: int) -> bytes:
    """A uint256 as an ABI word."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= LARGEST_WORD:
        raise ValueError(f"{value!r} is not a whole number of at most 256 bits")
    return value.to_bytes(WORD, "big")


def bytes32_word(value: bytes) -> bytes:
    """A bytes32 as an ABI word."""
    if len(value) != WORD:
        raise ValueError(f"a word has {WORD} bytes, not {len(value)}")
    return value


def _bytes_tail(value: bytes) -> bytes:
    """Dynamic bytes: length, then the bytes filled up to whole words."""
    return uint_word(len(value)) + value + bytes(-len(value) % WORD)


def read_uint(result: bytes) -> int:
    """A call's result that is one uint256."""
    return int.from_bytes(bytes32_word(result), "big")


def read_bool(result: bytes) -> bool:
    """A call's result that is one bool."""
    number = read_uint(result)
    if number > 1:
        raise ValueError(f"{number} is not a boolean")
    return number == 1


def read_address(word: bytes) -> str:
    """An ABI word that is an address; in EIP-55 form."""
    if any(bytes32_word(word)[:12]):
        raise ValueError(f"0x{word.hex()} is not an address")
    return evm_checksum("0x" + word[12:].hex())


def read_bytes(words: bytes, place: int) -> bytes:
    """The dynamic bytes that the word at ``place``, counted from 0, points to."""
    at = read_uint(words[place * WORD : (place + 1) * WORD])
    length = read_uint(words[at : at + WORD])
    content = words[at + WORD : at + WORD + length]
    if len(content) != length:
        raise ValueError("the bytes are cut off")
    return content


def read_string(result: bytes) -> str:
    """A call's result that is one string."""
    return read_bytes(result, 0).decode()


# --- calls -----------------------------------------------------------------------------------


def selector(signature: str) -> bytes:
    """The first four bytes of call data, of ``name(type,...)``."""
    return keccak256(signature.encode())[:4]


_TRANSFER: Final = selector("transfer(address,uint256)")
_BALANCE_OF: Final = selector("balanceOf(address)")
_NONCES: Final = selector("nonces(address)")
_AUTHORIZATION_STATE: Final = selector("authorizationState(address,bytes32)")
_IS_BLACKLISTED: Final = selector("isBlacklisted(address)")
_IS_VALID_SIGNATURE: Final = selector("isValidSignature(bytes32,bytes)")
_TRANSFER_FROM: Final = selector("transferFrom(address,address,uint256)")

PAUSED: Final = selector("paused()")
DECIMALS: Final = selector("decimals()")
NAME: Final = selector("name()")
VERSION: Final = selector("version()")
DOMAIN_SEPARATOR: Final = selector("DOMAIN_SEPARATOR()")


def transfer(to: str, units: int) -> bytes:
    """``transfer``: from the sender of the transaction."""
    return _TRANSFER + address_word(to) + uint_word(units)


def transfer_from(owner: str, to: str, units: int) -> bytes:
    """``transferFrom``: what the owner permitted the sender to take."""
    return _TRANSFER_FROM + address_word(owner) + address_word(to) + uint_word(units)


def balance_of(owner: str) -> bytes:
    """``balanceOf``; answered by a uint256."""
    return _BALANCE_OF + address_word(owner)


def nonces(owner: str) -> bytes:
    """``nonces``: the next permit's nonce (EIP-2612); answered by a uint256."""
    return _NONCES + address_word(owner)


def authorization_state(authorizer: str, nonce: bytes) -> bytes:
    """``authorizationState``: whether the nonce is used or cancelled (EIP-3009); a bool."""
    return _AUTHORIZATION_STATE + address_word(authorizer) + bytes32_word(nonce)


def is_blacklisted(account: str) -> bytes:
    """``isBlacklisted``; answered by a bool."""
    return _IS_BLACKLISTED + address_word(account)


def is_valid_signature(digest: bytes, signature: bytes) -> bytes:
    """``isValidSignature`` of a contract wallet (ERC-1271); VALID_SIGNATURE if it is its own."""
    return _IS_VALID_SIGNATURE + bytes32_word(digest) + uint_word(2 * WORD) + _bytes_tail(signature)


VALID_SIGNATURE: Final = _IS_VALID_SIGNATURE.ljust(WORD, b"\0")


# --- signed authorizations -------------------------------------------------------------------


class Signature(Struct, frozen=True):
    """A signature of secp256k1. ``v`` is 27 or 28."""

    v: int
    r: int
    s: int

    def words(self) -> bytes:
        """v, r, s as ABI words."""
        return uint_word(self.v) + uint_word(self.r) + uint_word(self.s)

    def packed(self) -> bytes:
        """r, s, v in 65 bytes, as contracts take it that take bytes."""
        return uint_word(self.r) + uint_word(self.s) + bytes([self.v])


class Domain(Struct, frozen=True):
    """The EIP-712 domain of a token. Its ``name`` differs between chains: ask the contract.

    ``separator`` has to be compared with the contract's DOMAIN_SEPARATOR() before signing.
    """

    name: str
    version: str
    chain_id: int
    contract: str

    def separator(self) -> bytes:
        """The domain separator (EIP-712)."""
        return keccak256(
            _DOMAIN_TYPE
            + keccak256(self.name.encode())
            + keccak256(self.version.encode())
            + uint_word(self.chain_id)
            + address_word(self.contract)
        )


class Authorization(Struct, frozen=True):
    """A transfer that the owner of ``source`` signs and anyone may send (EIP-3009).

    Valid strictly between ``valid_after`` and ``valid_before``, Unix seconds of the block.
    ``nonce``: 32 bytes, used once per owner.
    """

    source: str
    to: str
    units: int
    valid_after: int
    valid_before: int
    nonce: bytes

    def words(self) -> bytes:
        """The fields as ABI words, in the standard's order."""
        return (
            address_word(self.source)
            + address_word(self.to)
            + uint_word(self.units)
            + uint_word(self.valid_after)
            + uint_word(self.valid_before)
            + bytes32_word(self.nonce)
        )


class Permit(Struct, frozen=True):
    """Leave for ``spender`` to take up to ``units`` (EIP-2612), until ``deadline`` (seconds).

    ``nonce`` is the one that nonces() gives.
    """

    owner: str
    spender: str
    units: int
    nonce: int
    deadline: int


def transfer_digest(domain: Domain, authorization: Authorization) -> bytes:
    """The digest that the owner signs for transferWithAuthorization."""
    return _typed_digest(domain, _TRANSFER_TYPE + authorization.words())


def receive_digest(domain: Domain, authorization: Authorization) -> bytes:
    """The digest that the owner signs for receiveWithAuthorization."""
    return _typed_digest(domain, _RECEIVE_TYPE + authorization.words())


def permit_digest(domain: Domain, permit: Permit) -> bytes:
    """The digest that the owner signs for permit."""
    head = address_word(permit.owner) + address_word(permit.spender)
    numbers = (permit.units, permit.nonce, permit.deadline)
    return _typed_digest(domain, _PERMIT_TYPE + head + b"".join(map(uint_word, numbers)))


def transfer_with_authorization(authorization: Authorization, signature: Signature) -> bytes:
    """The call with v, r, s. Anyone may send it."""
    return _AUTHORIZED_TRANSFER + authorization.words() + signature.words()


def receive_with_authorization(authorization: Authorization, signature: Signature) -> bytes:
    """The call with v, r, s. Only ``authorization.to`` may send it."""
    return _AUTHORIZED_RECEIPT + authorization.words() + signature.words()


def transfer_with_authorization_bytes(authorization: Authorization, signature: bytes) -> bytes:
    """The call with the signature as bytes, of FiatToken 2.2 on; contract wallets need it."""
    return _AUTHORIZED_TRANSFER_BYTES + _with_bytes(authorization.words(), signature)


def receive_with_authorization_bytes(authorization: Authorization, signature: bytes) -> bytes:
    """The call with the signature as bytes, of FiatToken 2.2 on."""
    return _AUTHORIZED_RECEIPT_BYTES + _with_bytes(authorization.words(), signature)


def permit_call(permit: Permit, signature: Signature) -> bytes:
    """The call ``permit`` with v, r, s. Anyone may send it, once."""
    head = address_word(permit.owner) + address_word(permit.spender)
    amounts = uint_word(permit.units) + uint_word(permit.deadline)
    return _PERMIT_CALL + head + amounts + signature.words()


def _with_bytes(static: bytes, tail: bytes) -> bytes:
    """Static words, then one dynamic bytes: its offset, and itself at the end."""
    return static + uint_word(len(static) + WORD) + _bytes_tail(tail)


def _typed_digest(domain: Domain, encoded: bytes) -> bytes:
    return keccak256(b"\x19\x01" + domain.separator() + keccak256(encoded))


_AUTHORIZED_TRANSFER: Final = selector(f"transferWithAuthorization{_AUTHORIZED}{_VRS}")
_AUTHORIZED_RECEIPT: Final = selector(f"receiveWithAuthorization{_AUTHORIZED}{_VRS}")
_AUTHORIZED_TRANSFER_BYTES: Final = selector(f"transferWithAuthorization{_AUTHORIZED}bytes)")
_AUTHORIZED_RECEIPT_BYTES: Final = selector(f"receiveWithAuthorization{_AUTHORIZED}bytes)")
_PERMIT_CALL: Final = selector(_PERMIT + _VRS)

_TRANSFER_TYPE: Final = keccak256(b"TransferWithAuthorization" + _AUTHORIZATION_FIELDS)
_RECEIVE_TYPE: Final = keccak256(b"ReceiveWithAuthorization" + _AUTHORIZATION_FIELDS)
_PERMIT_TYPE: Final = keccak256(
    b"Permit(address owner,address spender,uint256 value,uint256 nonce,uint256 deadline)"
)
_DOMAIN_TYPE: Final = keccak256(
    b"EIP712Domain(string name,string version,uint256 chainId,address verifyingContract)"
)


# --- events ----------------------------------------------------------------------------------

TRANSFER_TOPIC: Final = keccak256(b"Transfer(address,address,uint256)")


class TransferEvent(Struct, frozen=True):
    """A Transfer event of the token."""

    sender: str
    to: str
    units: int


def read_transfer(topics: Sequence[bytes], data: bytes) -> TransferEvent:
    """The Transfer event of a log's topics and data. Raises ValueError for another event."""
    if len(topics) != 3 or topics[0] != TRANSFER_TOPIC:
        raise ValueError("the log is not a Transfer(address indexed, address indexed, uint256)")
    return TransferEvent(read_address(topics[1]), read_address(topics[2]), read_uint(data))


def transfer_in(topics: Sequence[bytes], data: bytes) -> TransferEvent | None:
    """The Transfer event of a log's topics and data; None for another event."""
    try:
        return read_transfer(topics, data)
    except ValueError:
        return None


AUTHORIZATION_USED: Final = keccak256(b"AuthorizationUsed(address,bytes32)")
AUTHORIZATION_CANCELED: Final = keccak256(b"AuthorizationCanceled(address,bytes32)")


class PayingCall(NamedTuple):
    """The transfer of a call if it succeeds: USDC units, to an address in lower case."""

    to: str
    units: int


class _Form(NamedTuple):
    """The layout of a call in words: their number, those of addresses, that of the units.

    The last address is paid. ``v``: a word of one byte. ``tail``: the last word points to bytes.
    """

    words: int
    addresses: tuple[int, ...]
    units: int
    v: int | None = None
    tail: bool = False


_SIGNED: Final = _Form(9, (0, 1), 2, v=6)
_SIGNED_BYTES: Final = _Form(7, (0, 1), 2, tail=True)

_FORMS: Final = {
    _TRANSFER: _Form(2, (0,), 1),
    _TRANSFER_FROM: _Form(3, (0, 1), 2),
    _AUTHORIZED_TRANSFER: _SIGNED,
    _AUTHORIZED_RECEIPT: _SIGNED,
    _AUTHORIZED_TRANSFER_BYTES: _SIGNED_BYTES,
    _AUTHORIZED_RECEIPT_BYTES: _SIGNED_BYTES,
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
    """Return whether dynamic bytes follow right after the words: their length, themselves, then
    zeros.
    """
    if read_uint(offset) != words * WORD or len(rest) < WORD:
        return False
    length, content = read_uint(rest[:WORD]), rest[WORD:]
    if length > _LONGEST_SIGNATURE or len(content) != -(-length // WORD) * WORD:
        return False
    return not any(content[length:])
