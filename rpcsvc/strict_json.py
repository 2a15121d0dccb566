"""Reads and writes JSON strictly.

Reading is RFC 8259 narrowed to what is safe to act on. The standard parsers let through what must
not decide over money: the last of two equal keys wins, ``1e400`` is infinity, ``NaN`` is a number,
half a surrogate pair is a string that no encoder takes, and deep nesting ends in RecursionError.
All of that is refused here, so that no later code has to think of it. Integers keep all their
digits, and may be beyond 64 bits: whether a field takes one is for its operation to say. ``dumps``
writes whatever ``loads`` returns, but such an integer.
"""

from __future__ import annotations

import json
import math
import re
from array import array
from itertools import accumulate
from typing import Any, Final, NoReturn

import msgspec
import orjson
from msgspec import Struct

from rpcsvc.errors import InvalidJson, showable

Json = dict[str, Any]

_encode: Final = msgspec.json.Encoder().encode

# A float can hold any of these, too: some fields take either.
_LONGEST_INT_CHARS: Final = 300
_SHOWN_CHARS: Final = 60

# An unclosed string matches too, and possessively: each byte is looked at once, whatever comes.
_STRING: Final = re.compile(rb'"(?:[^"\\]++|\\.)*+"?', re.DOTALL)
_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
# Signed bytes: an opening bracket is +1, a closing one -1.
_STEPS: Final = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")


def loads(body: bytes, *, max_depth: int = 32) -> Any:
    """Read ``body`` as one JSON value (RFC 8259, UTF-8 without a byte order mark).

    ``max_depth`` is the most arrays and objects that may be open at once; keep it well under the
    interpreter's recursion limit. Integers are limited to 300 characters and floats to finite ones.

    Raises InvalidJson, never anything else, and says what is wrong and where.
    """
    if body.count(b"[") + body.count(b"{") > max_depth:
        _check_depth(body, max_depth)
    plain = _plain(body)
    if plain is not None:
        return plain
    try:
        value = _DECODER.decode(body.decode())
    except UnicodeDecodeError as error:
        raise InvalidJson(
            f"The body is not UTF-8: byte {error.start} can't be decoded. Send JSON in UTF-8."
        ) from None
    except json.JSONDecodeError as error:
        raise InvalidJson(_syntax_message(body, error)) from None
    if b"\\u" in body:
        _check_surrogates(body)
    return value


def _plain(body: bytes) -> Any | None:
    """The value of a body that is exactly what ``dumps`` would write of it; else None.

    But for one space after a colon or comma before a quote or brace, as Python writes it: a space
    that is taken out of a string makes the two differ. Such a body hides nothing: a second of two
    equal keys, a number in another form or half a surrogate pair would not be written again. It is
    how most clients write JSON, and several times as fast to read.
    """
    try:
        value = orjson.loads(body)
        written = orjson.dumps(value, option=orjson.OPT_STRICT_INTEGER)
    except (orjson.JSONDecodeError, orjson.JSONEncodeError):
        return None  # the reader that explains what is wrong has the last word
    if written == body:
        return value
    dense = body.replace(b'": ', b'":').replace(b', "', b',"').replace(b", {", b",{")
    return value if written == dense else None


def dumps(value: Any) -> bytes:
    """Write ``value`` as compact UTF-8 JSON; Structs in it, too.

    Raises orjson.JSONEncodeError (a TypeError) for what is not a JSON value: a fault of the
    service, since nothing that ``loads`` returns can cause it.
    """
    return orjson.dumps(value, default=_written)


def _written(value: Any) -> orjson.Fragment:
    if isinstance(value, Struct):
        return orjson.Fragment(_encode(value))
    raise TypeError(type(value).__name__)


def _check_depth(body: bytes, max_depth: int) -> None:
    """Count the open brackets exactly, up to the first place where the body stops being JSON."""
    brackets = _STRING.sub(b"", body).translate(_STEPS, _NOT_BRACKETS)
    if max(accumulate(array("b", brackets)), default=0) > max_depth:
        raise InvalidJson(
            f"The body nests arrays and objects more than {max_depth} levels deep."
            f" Send at most {max_depth} levels."
        )


def _check_surrogates(body: bytes) -> None:
    """Refuse ``\\ud800`` without its other half, in strings and in keys; orjson is strict there."""
    try:
        orjson.loads(body)
    except orjson.JSONDecodeError as error:
        raise InvalidJson(
            "The body has a \\u escape that is half of a surrogate pair"
            f" ({error.msg} at line {error.lineno} column {error.colno})."
            " Send both halves, or the character itself in UTF-8."
        ) from None


def _syntax_message(body: bytes, error: json.JSONDecodeError) -> str:
    if not body:
        return "The body is empty. Send one JSON value."
    if body.startswith(b"\xef\xbb\xbf"):
        return "The body begins with a byte order mark. Send UTF-8 without one."
    place = f"line {error.lineno} column {error.colno}"
    return f"The body is not JSON: {error.msg} ({place}). Send one JSON value as in RFC 8259."


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        _refuse_duplicate(pairs)
    return members


def _refuse_duplicate(pairs: list[tuple[str, Any]]) -> NoReturn:
    seen: set[str] = set()
    for key, _ in pairs:
        if key in seen:
            break
        seen.add(key)
    raise InvalidJson(
        f'The key "{shown(key)}" occurs twice in one object. Send each key once:'
        " which of the two counts would be a guess."
    )


def _integer(text: str) -> int:
    if len(text) <= _LONGEST_INT_CHARS:
        return int(text)
    raise InvalidJson(
        f"The integer {shown(text)} has more than {_LONGEST_INT_CHARS} characters."
        " Send a larger quantity as a string."
    )


def _float(text: str) -> float:
    value = float(text)
    if math.isinf(value):
        raise InvalidJson(
            f"The number {shown(text)} is too large for a float. Send a large quantity as a string."
        )
    return value


def _constant(name: str) -> NoReturn:
    raise InvalidJson(f"{name} is not a JSON value. Send a number, or null where there is none.")


def shown(text: str) -> str:
    """Return the text as a message may have it: short, and without lone surrogates."""
    return showable(text if len(text) <= _SHOWN_CHARS else text[:_SHOWN_CHARS] + "...")


_DECODER: Final = json.JSONDecoder(
    object_pairs_hook=_object, parse_int=_integer, parse_float=_float, parse_constant=_constant
)


def as_integer(value: Any) -> Any:
    """Convert 42161.0 to 42161: some languages write all numbers as floats.

    JSON Schema calls both an integer (2020-12, Validation, section 6.1.1).
    """
    is_whole = isinstance(value, float) and abs(value) < 2**53 and value.is_integer()
    return int(value) if is_whole else value
