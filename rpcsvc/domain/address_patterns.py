"""The form of addresses as regular expressions: what JSON Schema can say of them.

They keep to what every regular expression engine takes, without lookaround. Checksums are not in
them: an address that matches may still be refused (addresses.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import groupby
from typing import Final

from rpcsvc.domain.addresses import (
    BASE58,
    BLOCK_CHARS,
    INTEGRATED_LENGTH,
    NETWORK_BYTES,
    STANDARD_LENGTH,
    MoneroNetwork,
)

EVM_PATTERN: Final = "^0x[0-9a-fA-F]{40}$"

_PREFIX: Final = 2


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
