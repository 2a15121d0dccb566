"""Addresses: validation, comparison, JSON Schema patterns, and those that the sandbox makes.

EVM addresses follow EIP-55. Monero addresses are read by the ``monero`` package, with two checks
that it leaves out: the text is the canonical spelling of its bytes, and both public keys are points
of the curve's main subgroup. A pattern has no checksum: what matches may still be refused.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection, Iterable
from enum import StrEnum
from functools import lru_cache
from itertools import groupby, starmap
from typing import Any, Final, NamedTuple

from Cryptodome.Hash import keccak
from monero import base58, const
from monero.address import Address, IntegratedAddress, SubAddress
from nacl.bindings import (
    crypto_core_ed25519_is_valid_point,
    crypto_core_ed25519_scalar_reduce,
    crypto_scalarmult_ed25519_base_noclamp,
)

from rpcsvc.errors import InvalidDestination

ZERO_ADDRESS: Final = "0x" + "0" * 40
_HEX = re.compile(r"[0-9a-fA-F]{40}", re.ASCII)
_NOT_HEX = re.compile(r"[^0-9a-fA-F]", re.ASCII)
BASE58: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_IN_BASE58 = frozenset(BASE58)
STANDARD_LENGTH: Final = 95
INTEGRATED_LENGTH: Final = 106
_MONERO_LENGTHS = (STANDARD_LENGTH, INTEGRATED_LENGTH)
_EVM_SEED_BYTES = 32
_MONERO_SEED_BYTES = 64
_LONGEST_RECEIVED = 128
# Monero's base58 spells 8 bytes as 11 characters; this is 2**64 - 1. The alphabet is in ASCII
# order, so that texts of one length compare as their numbers do.
BLOCK_CHARS: Final = 11
_LARGEST_BLOCK = "jpXCZedGfVQ"

_BYTES = zip(
    const.MASTERADDR_NETBYTES, const.SUBADDR_NETBYTES, const.INTADDRR_NETBYTES, strict=True
)
_BAD_CHECKSUM: Final = "fails its checksum: check it against the source, character by character"
_KINDS = {Address: "standard", SubAddress: "subaddress", IntegratedAddress: "integrated"}
_PAIRS: Final = tuple(first + second for first in BASE58 for second in BASE58)
# Characters of a block, by its bytes.
_CHARS_OF: Final = (0, 2, 3, 5, 6, 7, 9, 10, BLOCK_CHARS)
# The sandbox reads no chain, so one view key does for all of its addresses.
_VIEW_KEY = crypto_scalarmult_ed25519_base_noclamp(
    crypto_core_ed25519_scalar_reduce(keccak.new(digest_bits=512, data=b"sandbox view").digest())
)
EVM_PATTERN: Final = "^0x[0-9a-fA-F]{40}$"
_PREFIX: Final = 2


class MoneroNetwork(StrEnum):
    """Monero's networks; an address belongs to one."""

    MAINNET = "mainnet"
    STAGENET = "stagenet"
    TESTNET = "testnet"


class NetworkBytes(NamedTuple):
    """The first byte of a network's addresses, by their kind."""

    standard: int
    subaddress: int
    integrated: int


_IN_PACKAGE = (MoneroNetwork.MAINNET, MoneroNetwork.TESTNET, MoneroNetwork.STAGENET)
NETWORK_BYTES: Final = dict(zip(_IN_PACKAGE, starmap(NetworkBytes, _BYTES), strict=True))


class MoneroAddress(NamedTuple):
    """A good Monero address. ``kind``: standard, subaddress or integrated."""

    text: str
    network: MoneroNetwork
    kind: str


# --- EVM -------------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def evm_checksum(address: str) -> str:
    """The address in the mixed case of EIP-55. ``address`` is 0x and 40 hex digits.

    Agents send an address to plan, quote and create, and nodes name the same ones in their logs. A
    pure function, so its cache can't be wrong.
    """
    digits = address[2:].lower()
    digest = keccak.new(digest_bits=256, data=digits.encode()).digest().hex()
    mixed = [c.upper() if n >= "8" else c for c, n in zip(digits, digest, strict=False)]
    return "0x" + "".join(mixed)


def parse_evm_address(text: object, *, field: str = "to", forbidden: Collection[str] = ()) -> str:
    """The address in its EIP-55 form.

    ``forbidden`` holds lower-case addresses that must not be paid. Raises InvalidDestination.
    """
    if not isinstance(text, str):
        raise _not_a_string(field, text)
    problem = _evm_problem(text, field)
    if problem is None:
        checksummed = evm_checksum(text)
        problem = _evm_refusal(text, checksummed, forbidden)
        if problem is None:
            return checksummed
    raise _refuse(field, text, problem)


def _evm_problem(text: str, field: str) -> str | None:
    if _looks_like_monero(text):
        return "is a Monero address where an EVM address is needed" + _direction_hint(field)
    if text.strip() != text:
        return "has spaces around it: leave them out"
    if not text.startswith("0x"):
        capital = "; write the x in lower case" if text.startswith("0X") else ""
        return f"does not start with 0x: send 0x and 40 hex digits{capital}"
    if len(text) != 42:
        return f"has {len(text)} characters: send 42, which is 0x and 40 hex digits"
    if not _HEX.fullmatch(text, 2):
        at = next(i for i, c in enumerate(text) if i > 1 and _NOT_HEX.match(c))
        return f"has a character at position {at + 1} that is not a hex digit"
    return None


def _direction_hint(field: str) -> str:
    """The asset and address that each direction pays; empty for any field but ``to``."""
    if field != "to":
        return ""
    return ": x2u pays USDC to an EVM address, u2x pays XMR to a Monero address"


def _evm_refusal(text: str, checksummed: str, forbidden: Collection[str]) -> str | None:
    digits = text[2:]
    if digits not in (digits.lower(), digits.upper()) and text != checksummed:
        at = next(i for i, (a, b) in enumerate(zip(text, checksummed, strict=True)) if a != b)
        return (
            "fails its EIP-55 checksum: the first letter in the wrong case is character"
            f" {at + 1}. Check the whole address against its source; a typing error would send"
            " the funds to nobody"
        )
    if checksummed.lower() == ZERO_ADDRESS:
        return "is the zero address, which nobody owns"
    if checksummed.lower() in forbidden:
        return "is a token contract or an address of the service; send the user's own address"
    return None


# --- Monero ----------------------------------------------------------------------------------


def parse_monero_address(
    text: object, *, field: str = "to", networks: Collection[MoneroNetwork]
) -> MoneroAddress:
    """A standard, sub- or integrated address of one of ``networks``. Raises InvalidDestination."""
    if not isinstance(text, str):
        raise _not_a_string(field, text)
    problem = _monero_form(text, field)
    if problem is None:
        found = _decode(text)
        if isinstance(found, MoneroAddress):
            if found.network in networks:
                return found
            wanted = " or ".join(sorted(networks))
            problem = f"is for {found.network}, and this service pays on {wanted}"
        else:
            problem = found
    raise _refuse(field, text, problem)


def _monero_form(text: str, field: str) -> str | None:
    if text[:2] in ("0x", "0X"):
        return "is an EVM address where a Monero address is needed" + _direction_hint(field)
    if text.strip() != text:
        return "has spaces around it: leave them out"
    if len(text) not in _MONERO_LENGTHS:
        return f"has {len(text)} characters: a Monero address has 95, an integrated one 106"
    wrong = next((i for i, c in enumerate(text) if c not in _IN_BASE58), None)
    if wrong is not None:
        return f"has a character at position {wrong + 1} that Monero addresses don't use"
    return None


@lru_cache(maxsize=4096)
def _decode(text: str) -> MoneroAddress | str:
    """Return the address, or what is wrong with it. Pure, so its cache can't be wrong."""
    try:
        kind = _kind(text)
        decoded = kind(text)
    except ValueError:
        return _unreadable(text)
    # The package takes the block that spells 2**64 for eight zero bytes.
    if any(block > _LARGEST_BLOCK for block in _full_blocks(text)):
        return "is not spelled as Monero spells it: check it against the source"
    keys = (bytes.fromhex(key) for key in (decoded.spend_key(), decoded.view_key()))
    if not all(map(crypto_core_ed25519_is_valid_point, keys)):
        return "holds keys that no wallet can have made"
    return MoneroAddress(text, _NETWORK_NAMES[decoded.net], _KINDS[kind])


def _unreadable(text: str) -> str:
    """Return why the package does not read ``text`` as an address: its checksum, or its network
    byte.
    """
    try:
        raw = bytes.fromhex(base58.decode(text))
    except ValueError:
        return _BAD_CHECKSUM
    if keccak.new(digest_bits=256, data=raw[:-4]).digest()[:4] != raw[-4:]:
        return _BAD_CHECKSUM
    return (
        f"has the network byte {raw[0]}, which no Monero address of {len(text)} characters has:"
        " it may be an address of another currency. Send the user's Monero address"
    )


def _full_blocks(text: str) -> list[str]:
    end = len(text) - len(text) % BLOCK_CHARS
    return [text[at : at + BLOCK_CHARS] for at in range(0, end, BLOCK_CHARS)]


def _kind(text: str) -> Any:
    """The package's class for this address. Its own lookup decodes every address twice."""
    if len(text) == INTEGRATED_LENGTH:
        return IntegratedAddress
    network_byte = int(base58.decode(text[:BLOCK_CHARS])[:2], 16)
    return SubAddress if network_byte in const.SUBADDR_NETBYTES else Address


_NETWORK_NAMES = {
    "main": MoneroNetwork.MAINNET,
    "mainnet": MoneroNetwork.MAINNET,
    "stage": MoneroNetwork.STAGENET,
    "stagenet": MoneroNetwork.STAGENET,
    "test": MoneroNetwork.TESTNET,
    "testnet": MoneroNetwork.TESTNET,
}


def _looks_like_monero(text: str) -> bool:
    return len(text) in _MONERO_LENGTHS and _IN_BASE58.issuperset(text)


def _refuse(field: str, text: str, problem: str) -> InvalidDestination:
    short = text if len(text) <= _LONGEST_RECEIVED else text[: _LONGEST_RECEIVED - 3] + "..."
    return InvalidDestination(f"{field} {problem}.", field=field, received=short)


def _not_a_string(field: str, value: object) -> InvalidDestination:
    kind = _json_type(value)
    return InvalidDestination(
        f"{field} must be a string with an address, not {kind}.", field=field, received=kind
    )


def _json_type(value: object) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "a boolean"
    if isinstance(value, int | float):
        return "a number"
    return "an array" if isinstance(value, list | tuple) else "an object"


# --- comparing and making --------------------------------------------------------------------


def same_address(a: str, b: str) -> bool:
    """Return whether two texts are one address: EVM without case, Monero to the letter."""
    if a[:2] in ("0x", "0X"):
        a, b = a.lower(), b.lower()
    # surrogatepass keeps different texts different; "replace" would make a surrogate equal "?".
    return hmac.compare_digest(
        a.encode("utf-8", "surrogatepass"), b.encode("utf-8", "surrogatepass")
    )


def evm_address_from_seed(seed: bytes) -> str:
    """An address that nobody has the key of, for the sandbox. ``seed``: 32 random bytes.

    Raises ValueError for a seed of another length, which would give a shorter address.
    """
    _require_length(seed, _EVM_SEED_BYTES)
    return evm_checksum("0x" + seed[:20].hex())


def stagenet_subaddress(seed: bytes) -> str:
    """A subaddress that is valid in form, on Monero's stagenet. ``seed``: 64 random bytes.

    Raises ValueError for a seed of another length.
    """
    _require_length(seed, _MONERO_SEED_BYTES)
    spend = crypto_scalarmult_ed25519_base_noclamp(crypto_core_ed25519_scalar_reduce(seed))
    body = bytes([NETWORK_BYTES[MoneroNetwork.STAGENET].subaddress]) + spend + _VIEW_KEY
    checksum = keccak.new(digest_bits=256, data=body).digest()[:4]
    # Base58 works on blocks of 8 bytes: the blocks of the view key alone are always equal.
    changing, last = body[:40], body[64:] + checksum
    return encode_base58(changing) + _VIEW_BLOCKS + encode_base58(last)


def subaddress_on(address: str, network: MoneroNetwork) -> str:
    """Return the subaddress of the same keys on another of Monero's networks."""
    keys = bytes.fromhex(base58.decode(address))[1:-4]
    body = bytes([NETWORK_BYTES[network].subaddress]) + keys
    return encode_base58(body + keccak.new(digest_bits=256, data=body).digest()[:4])


def _require_length(seed: bytes, wanted: int) -> None:
    if len(seed) != wanted:
        raise ValueError(f"the seed must have {wanted} bytes, not {len(seed)}")


def encode_base58(data: bytes) -> str:
    """Monero's base58: blocks of 8 bytes, in half the time that the library takes."""
    return "".join(_block58(data[at : at + 8]) for at in range(0, len(data), 8))


def _block58(block: bytes) -> str:
    number, pairs = int.from_bytes(block, "big"), []
    for _ in range(BLOCK_CHARS // 2 + 1):
        number, pair = divmod(number, len(_PAIRS))
        pairs.append(_PAIRS[pair])
    return "".join(reversed(pairs))[-_CHARS_OF[len(block)] :]


_VIEW_BLOCKS = encode_base58(_VIEW_KEY[7:31])


def monero_pattern(networks: Collection[MoneroNetwork]) -> str:
    """Standard, sub- and integrated addresses of the networks: length, alphabet, first characters.

    The first characters follow from the network byte, which is the highest of the first block.
    """
    served = [NETWORK_BYTES[network] for network in sorted(networks)]
    short = [byte for found in served for byte in (found.standard, found.subaddress)]
    long = [found.integrated for found in served]
    return f"^({_form(short, STANDARD_LENGTH)}|{_form(long, INTEGRATED_LENGTH)})$"


def _form(network_bytes: Iterable[int], length: int) -> str:
    prefixes = "|".join(prefix for byte in network_bytes for prefix in _prefixes(byte))
    return f"({prefixes}){_one_of(BASE58)}{{{length - _PREFIX}}}"


def _prefixes(network_byte: int) -> Iterable[str]:
    """The first two characters of addresses with that byte: one expression per first character."""
    unit = len(BASE58) ** (BLOCK_CHARS - _PREFIX)
    low, high = (network_byte << 56) // unit, ((network_byte + 1 << 56) - 1) // unit
    pairs = (divmod(pair, len(BASE58)) for pair in range(low, high + 1))
    for first, group in groupby(pairs, key=lambda pair: pair[0]):
        yield BASE58[first] + _one_of("".join(BASE58[second] for _, second in group))


def _one_of(characters: str) -> str:
    """A character class: runs of neighbours as ranges."""
    runs = groupby(enumerate(characters), key=lambda item: ord(item[1]) - item[0])
    spans = ["".join(character for _, character in run) for _, run in runs]
    return f"[{''.join(s if len(s) < 3 else f'{s[0]}-{s[-1]}' for s in spans)}]"
