"""Addresses with valid checksums, for generators that draw requests from the API documents.

A schema can describe the pattern of an address, but not its checksum. So the documents are given to
generators with a ``format`` beside each address pattern, and strategies for the formats are
registered with schemathesis.
"""

from __future__ import annotations

from typing import Any, Final

import schemathesis
from Cryptodome.Hash import keccak
from hypothesis import strategies as st
from monero import base58
from nacl.bindings import crypto_core_ed25519_scalar_reduce, crypto_scalarmult_ed25519_base_noclamp

from rpcsvc.domain.addresses import (
    EVM_PATTERN,
    NETWORK_BYTES,
    ZERO_ADDRESS,
    MoneroNetwork,
    evm_checksum,
    monero_pattern,
)

_EVM: Final = "evm-address"
_MONERO: Final = "monero-address"
_FORMATS: Final = {EVM_PATTERN: _EVM, monero_pattern(list(MoneroNetwork)): _MONERO}


def with_formats(value: Any) -> Any:
    """A document with a format beside each pattern of an address."""
    if isinstance(value, list):
        return [with_formats(item) for item in value]
    if not isinstance(value, dict):
        return value
    formatted = {key: with_formats(item) for key, item in value.items()}
    pattern = value.get("pattern")
    if isinstance(pattern, str) and pattern in _FORMATS:
        formatted["format"] = _FORMATS[pattern]
    return formatted


def _public_key(seed: bytes) -> bytes:
    return crypto_scalarmult_ed25519_base_noclamp(crypto_core_ed25519_scalar_reduce(seed))


def monero_address(network_byte: int, seed: bytes, payment_id: bytes) -> str:
    """An address of the network and kind that the byte stands for."""
    body = bytes([network_byte]) + 2 * _public_key(seed)
    if any(network_byte == found.integrated for found in NETWORK_BYTES.values()):
        body += payment_id
    checksum = keccak.new(digest_bits=256, data=body).digest()[:4]
    return str(base58.encode((body + checksum).hex()))


_lower = st.binary(min_size=20, max_size=20).map(lambda raw: "0x" + raw.hex())
schemathesis.openapi.format(
    _EVM, st.one_of(_lower, _lower.map(evm_checksum)).filter(ZERO_ADDRESS.__ne__)
)
schemathesis.openapi.format(
    _MONERO,
    st.builds(
        monero_address,
        st.sampled_from([byte for found in NETWORK_BYTES.values() for byte in found]),
        st.binary(min_size=64, max_size=64).filter(any),
        st.binary(min_size=8, max_size=8),
    ),
)
