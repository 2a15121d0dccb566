"""Addresses: checking those that callers send, comparing them, and making those of the sandbox.

EVM addresses follow EIP-55. Monero addresses are read by the ``monero`` package; two checks are
added that it leaves out: that the text is the one canonical spelling of its bytes, and that both
public keys are points of the curve's main subgroup, which a wallet would insist on when paying.
What does not live here: which addresses a caller may not use (operations/inputs.py).
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection
from enum import StrEnum
from functools import lru_cache
from typing import Final, NamedTuple

from Cryptodome.Hash import keccak
from monero import base58
from monero.address import Address, IntegratedAddress, SubAddress
from monero.address import address as decode_monero
from nacl.bindings import (
    crypto_core_ed25519_is_valid_point,
    crypto_core_ed25519_scalar_reduce,
    crypto_scalarmult_ed25519_base_noclamp,
)

from rpcsvc.errors import InvalidDestination

ZERO_ADDRESS: Final = "0x" + "0" * 40

_HEX = re.compile(r"[0-9a-fA-F]{40}", re.ASCII)
_BASE58 = frozenset("123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz")
_MONERO_LENGTHS = (95, 106)
_STAGENET_SUBADDRESS = 36


class MoneroNetwork(StrEnum):
    """Monero's networks; an address belongs to one."""

    MAINNET = "mainnet"
    STAGENET = "stagenet"
    TESTNET = "testnet"


class MoneroAddress(NamedTuple):
    """A good Monero address. ``kind``: standard, subaddress or integrated."""

    text: str
    network: MoneroNetwork
    kind: str


# --- EVM -------------------------------------------------------------------------------------


def evm_checksum(address: str) -> str:
    """The address in the mixed case of EIP-55. ``address`` is 0x and 40 hex digits."""
    digits = address[2:].lower()
    digest = keccak.new(digest_bits=256, data=digits.encode()).digest().hex()
    mixed = [c.upper() if n >= "8" else c for c, n in zip(digits, digest, strict=False)]
    return "0x" + "".join(mixed)


def parse_evm_address(text: str, *, field: str = "to", forbidden: Collection[str] = ()) -> str:
    """The address in its EIP-55 form.

    ``forbidden`` holds lower-case addresses that must not be paid. Raises InvalidDestination.
    """
    problem = _evm_problem(text)
    if problem is None:
        checksummed = evm_checksum(text)
        problem = _evm_refusal(text, checksummed, forbidden)
        if problem is None:
            return checksummed
    raise _refuse(field, text, problem)


def _evm_problem(text: str) -> str | None:
    if _looks_like_monero(text):
        return "is a Monero address; x2u pays USDC to an EVM address (u2x pays XMR)"
    if not text.startswith("0x"):
        return "does not start with 0x: send 0x and 40 hex digits"
    if len(text) != 42:
        return f"has {len(text)} characters: send 42, which is 0x and 40 hex digits"
    if not _HEX.fullmatch(text, 2):
        at = next(i for i, c in enumerate(text) if i > 1 and not _HEX.match(c * 40))
        return f"has a character at position {at + 1} that is not a hex digit"
    return None


def _evm_refusal(text: str, checksummed: str, forbidden: Collection[str]) -> str | None:
    digits = text[2:]
    if digits not in (digits.lower(), digits.upper()) and text != checksummed:
        at = next(i for i, (a, b) in enumerate(zip(text, checksummed, strict=True)) if a != b)
        return (
            f"fails its EIP-55 checksum at character {at + 1}: check it against the source;"
            " a typing error would send the funds to nobody"
        )
    if checksummed.lower() == ZERO_ADDRESS:
        return "is the zero address, which nobody owns"
    if checksummed.lower() in forbidden:
        return "is a token contract or an address of the service; send the user's own address"
    return None


# --- Monero ----------------------------------------------------------------------------------


def parse_monero_address(
    text: str, *, field: str = "to", networks: Collection[MoneroNetwork]
) -> MoneroAddress:
    """A standard, sub- or integrated address of one of ``networks``. Raises InvalidDestination."""
    problem = _monero_form(text)
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


def _monero_form(text: str) -> str | None:
    if text[:2] in ("0x", "0X"):
        return "is an EVM address; u2x pays XMR to a Monero address (x2u pays USDC)"
    if len(text) not in _MONERO_LENGTHS:
        return f"has {len(text)} characters: a Monero address has 95, an integrated one 106"
    wrong = next((i for i, c in enumerate(text) if c not in _BASE58), None)
    if wrong is not None:
        return f"has a character at position {wrong + 1} that Monero addresses don't use"
    return None


@lru_cache(maxsize=4096)
def _decode(text: str) -> MoneroAddress | str:
    """The address, or what is wrong with it. A pure function, so its cache can't be wrong."""
    try:
        decoded = decode_monero(text)
    except (ValueError, IndexError):
        return "fails its checksum: check it against the source, character by character"
    raw = bytes.fromhex(base58.decode(text))
    if base58.encode(raw.hex()) != text:
        return "is not spelled as Monero spells it: check it against the source"
    if not all(crypto_core_ed25519_is_valid_point(raw[i : i + 32]) for i in (1, 33)):
        return "holds keys that no wallet can have made"
    return MoneroAddress(text, _NETWORK_NAMES[decoded.net], _KINDS[type(decoded)])


_NETWORK_NAMES = {
    "main": MoneroNetwork.MAINNET,
    "mainnet": MoneroNetwork.MAINNET,
    "stage": MoneroNetwork.STAGENET,
    "stagenet": MoneroNetwork.STAGENET,
    "test": MoneroNetwork.TESTNET,
    "testnet": MoneroNetwork.TESTNET,
}
_KINDS = {Address: "standard", SubAddress: "subaddress", IntegratedAddress: "integrated"}


def _looks_like_monero(text: str) -> bool:
    return len(text) in _MONERO_LENGTHS and _BASE58.issuperset(text)


def _refuse(field: str, text: str, problem: str) -> InvalidDestination:
    return InvalidDestination(f"{field} {problem}.", field=field, received=text)


# --- comparing and making --------------------------------------------------------------------


def same_address(a: str, b: str) -> bool:
    """Whether two texts are one address: EVM without case, Monero to the letter."""
    if a[:2] in ("0x", "0X"):
        a, b = a.lower(), b.lower()
    return hmac.compare_digest(a.encode("utf-8", "replace"), b.encode("utf-8", "replace"))


def evm_address_from_seed(seed: bytes) -> str:
    """An address that nobody has the key of, for the sandbox. ``seed``: 32 random bytes."""
    return evm_checksum("0x" + seed[:20].hex())


def stagenet_subaddress(seed: bytes) -> str:
    """A subaddress that is valid in form, on Monero's stagenet. ``seed``: 64 random bytes."""
    spend = crypto_scalarmult_ed25519_base_noclamp(crypto_core_ed25519_scalar_reduce(seed))
    body = bytes([_STAGENET_SUBADDRESS]) + spend + _VIEW_KEY
    checksum = keccak.new(digest_bits=256, data=body).digest()[:4]
    # Base58 works on blocks of 8 bytes: those of the view key alone are always the same.
    changing, last = body[:40], body[64:] + checksum
    return _base58(changing) + _VIEW_BLOCKS + _base58(last)


def _base58(data: bytes) -> str:
    return str(base58.encode(data.hex()))


# The sandbox reads no chain, so one view key does for all of its addresses.
_VIEW_KEY = crypto_scalarmult_ed25519_base_noclamp(
    crypto_core_ed25519_scalar_reduce(keccak.new(digest_bits=512, data=b"sandbox view").digest())
)
_VIEW_BLOCKS = _base58(_VIEW_KEY[7:31])
