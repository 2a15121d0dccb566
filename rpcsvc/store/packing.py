"""Stored answers, compressed with a dictionary of sample answers.

A row names the dictionary that packed it, so a dictionary is never changed or removed: a better one
gets the next number.
"""

from __future__ import annotations

import re
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from importlib import resources
from typing import Final

# By their numbers; 0 is an answer as it is.
DICTIONARIES: Final = {1: (resources.files(__package__) / "answers_1.txt").read_bytes()}
NEWEST: Final = max(DICTIONARIES)
_LEVEL: Final = 6
# A signature covers base64 of what the answer says in plain text elsewhere.
_JWS: Final = re.compile(rb'"(eyJ[\w-]+)\.(eyJ[\w-]+)\.([\w-]+)"')
# It is in no JSON text.
_MARK: Final = b"\0"


def pack(body: bytes) -> bytes:
    """Return a JSON answer compressed with the newest dictionary."""
    packer = zlib.compressobj(_LEVEL, zdict=DICTIONARIES[NEWEST])
    return packer.compress(_plain(body)) + packer.flush()


def unpack(packed: bytes, number: int) -> bytes:
    """Return the answer that was packed with a dictionary of this number.

    Raises ValueError or zlib.error for bytes that were not: checksums of dictionary and answer are
    among them (RFC 1950).
    """
    if number == 0:
        return packed
    unpacker = zlib.decompressobj(zdict=DICTIONARIES[number])
    plain = unpacker.decompress(packed)
    if not unpacker.eof:
        raise ValueError("a packed answer is cut short")
    return _original(plain)


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
