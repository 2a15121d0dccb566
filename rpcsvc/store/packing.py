"""Stored answers with their calls, and receipts, compressed with dictionaries of samples.

What is packed names its dictionary, so a dictionary is never changed or removed: a better one gets
the next number.
"""

from __future__ import annotations

import re
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from importlib import resources
from typing import Final

# By their numbers; a row with 0 is not packed.
DICTIONARIES: Final = {1: (resources.files(__package__) / "answers_1.txt").read_bytes()}
NEWEST: Final = max(DICTIONARIES)
# What receipts have in common, by the number with which a packed one begins.
RECEIPTS: Final = {
    1: b'"chainId":42161,"token":"0xaf88d065e77c8cC2239327C5EDb3A432268e5831","logIndex":'
    b'{"network":"arbitrum","asset":"USDC","txid":"0x","address":"0x","amount":"'
    b'{"network":"monero","asset":"XMR","txid":"","address":"","amount":"0.","block":'
    b',"transactionKey":"","transactionProof":"OutProofV2","proofMessage":"'
}
_LEVEL: Final = 6
# A signature covers base64 of what the answer says in plain text elsewhere.
_JWS: Final = re.compile(rb'"(eyJ[\w-]+)\.(eyJ[\w-]+)\.([\w-]+)"')
# It is in no JSON text.
_MARK: Final = b"\0"


def pack(params: str, body: bytes) -> bytes:
    """Return the JSON of a call's params and its answer, compressed with the newest dictionary.

    The params repeat what the answer says, and take a fifth of the room that they would have
    beside it.
    """
    return _packed(params.encode() + _MARK + _plain(body), DICTIONARIES[NEWEST])


def unpack(packed: bytes, number: int) -> tuple[str, bytes]:
    """Return the params and the answer that were packed with a dictionary of this number.

    Raises ValueError or zlib.error for bytes that were not: checksums of dictionary and content are
    among them (RFC 1950).
    """
    params, _, body = _unpacked(packed, DICTIONARIES[number]).partition(_MARK)
    return params.decode(), _original(body)


def pack_receipt(receipt: str, known: bytes) -> bytes:
    """Return a receipt (JSON), compressed with a sample and what is ``known`` from its row."""
    return bytes([1]) + _packed(receipt.encode(), RECEIPTS[1] + known)


def unpack_receipt(packed: bytes, known: bytes) -> str:
    """Return the receipt that was packed beside the same row. Raises as ``unpack`` does."""
    return _unpacked(packed[1:], RECEIPTS[packed[0]] + known).decode()


def _packed(plain: bytes, dictionary: bytes) -> bytes:
    packer = zlib.compressobj(_LEVEL, zdict=dictionary)
    return packer.compress(plain) + packer.flush()


def _unpacked(packed: bytes, dictionary: bytes) -> bytes:
    unpacker = zlib.decompressobj(zdict=dictionary)
    plain = unpacker.decompress(packed)
    if not unpacker.eof:
        raise ValueError("packed bytes are cut short")
    return plain


def _plain(body: bytes) -> bytes:
    """Return the answer with its first JWS decoded: header, payload, and at the end signature."""
    found = _JWS.search(body)
    if found is None:
        return body
    try:
        header, payload, signature = (_decoded(part) for part in found.groups())
    except ValueError:
        return body
    before, after = body[: found.start(1)], body[found.end(3) :]
    plain = _MARK.join((before, header, payload, after, signature))
    # Base64 has several spellings of some bytes.
    return plain if _original(plain) == body else body


def _original(plain: bytes) -> bytes:
    """Return the answer of ``_plain``."""
    if _MARK not in plain:
        return plain
    before, header, payload, after, signature = plain.split(_MARK, 4)
    return before + b".".join(_encoded(part) for part in (header, payload, signature)) + after


def _decoded(part: bytes) -> bytes:
    return urlsafe_b64decode(part + b"=" * (-len(part) % 4))


def _encoded(part: bytes) -> bytes:
    return urlsafe_b64encode(part).rstrip(b"=")
