"""The forms in which wallets write one signature."""

from __future__ import annotations

from typing import Final

import eth_abi

# What ends the signature of a contract wallet that may not be deployed yet (ERC-6492).
WRAPPED: Final = bytes.fromhex("6492" * 16)
_FACTORY: Final = "0x" + "ab" * 20


def forms(signature: bytes) -> list[bytes]:
    """A key's signature as wallets write it: v from 27 or 0 on, compact (EIP-2098), wrapped."""
    parity = signature[64] - 27
    small = signature[:64] + bytes([parity])
    compact = signature[:32] + bytes([signature[32] | parity << 7]) + signature[33:64]
    bare = [signature, small, compact]
    return bare + [
        eth_abi.abi.encode(["address", "bytes", "bytes"], [_FACTORY, b"deploy", each]) + WRAPPED
        for each in bare
    ]
