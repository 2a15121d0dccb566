"""The payment journal's line format: encode one line, read many. Pure.

A line is a checksum, a space, one JSON object and a newline. ``line`` in the object counts from 1
without gaps; the checksum covers the checksum before it, so a missing, altered or swapped line is
found. Each file begins with a header line, which repeats the checksum before it: files can be read
alone or joined in order. A writer that finds unfinished bytes ends them with ``RESUME`` and writes
a header.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import orjson

VERSION: Final = 1
HEADER: Final = "journal"
# What ends an unfinished line, so that it can't become a whole one.
RESUME: Final = b"~\n"
START: Final = "0" * 16
_SUM_CHARS: Final = 16


@dataclass(frozen=True, slots=True)
class Position:
    """The last line of a journal: its number and checksum. Line 0: nothing is written yet."""

    line: int = 0
    sum: str = START


@dataclass(frozen=True, slots=True)
class Line:
    """One line that passed its check. ``body`` has its ``kind``, number and content."""

    at: Position
    body: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """What it records."""
        return str(self.body["kind"])


@dataclass(frozen=True, slots=True)
class Reading:
    """What the bytes of a journal hold, up to the first line that can't be right.

    ``problem`` says what is wrong there; None when nothing is. ``torn`` counts bytes of unfinished
    lines: a writer was killed there, and nobody relied on them. ``size`` is where the last line of
    ``lines`` ends.
    """

    lines: tuple[Line, ...]
    problem: str | None = None
    torn: int = 0
    size: int = 0

    @property
    def end(self) -> Position:
        """The last line."""
        return self.lines[-1].at if self.lines else Position()


def encode(after: Position, body: Mapping[str, Any]) -> tuple[bytes, Position]:
    """The bytes of the line that follows ``after``, and its position."""
    text = orjson.dumps({"line": after.line + 1, **body})
    at = Position(after.line + 1, _sum(after.sum, text))
    return at.sum.encode() + b" " + text + b"\n", at


def header(after: Position, journal: str, at: int) -> dict[str, Any]:
    """The body of a file's first line. ``journal`` names the journal, ``at`` is in ms."""
    return {
        "kind": HEADER, "version": VERSION, "journal": journal, "at": at, "after": after.sum,
    }  # fmt: skip


def read(data: bytes) -> Reading:
    """Read the bytes of one file, or of several joined in order."""
    lines: list[Line] = []
    torn = size = offset = 0
    for chunk in _chunks(data):
        offset += len(chunk)
        found = _parse(chunk)
        if found is None:
            torn += len(chunk)
            continue
        problem = _out_of_order(lines, found, torn)
        if problem is not None:
            return Reading(tuple(lines), problem, 0, size)
        lines.append(found)
        torn, size = 0, offset
    return Reading(tuple(lines), None, torn, size)


def _chunks(data: bytes) -> Iterator[bytes]:
    parts = data.split(b"\n")
    yield from (part + b"\n" for part in parts[:-1])
    if parts[-1]:
        yield parts[-1]


def _out_of_order(lines: list[Line], found: Line, torn: int) -> str | None:
    """Why a line can't follow those before it; None when it does.

    Only a header may follow unfinished bytes: a line that was whole is missing otherwise.
    """
    last, body = lines[-1].at if lines else None, found.body
    is_header = found.kind == HEADER
    if last is None:
        return (
            None
            if is_header and _fits(str(body.get("after")), found)
            else "it does not begin at a file"
        )
    if torn and not is_header:
        return f"what follows line {last.line} is damaged"
    if found.at.line != last.line + 1 or not _fits(last.sum, found):
        return f"line {found.at.line} does not follow line {last.line}"
    return None


def _fits(before: str, found: Line) -> bool:
    return _sum(before, orjson.dumps(found.body)) == found.at.sum


def _parse(chunk: bytes) -> Line | None:
    """A line as it stands, its checksum not looked at; None when it is none."""
    if not chunk.endswith(b"\n") or chunk[_SUM_CHARS : _SUM_CHARS + 1] != b" ":
        return None
    try:
        body = orjson.loads(chunk[_SUM_CHARS + 1 :])
        at = Position(body["line"], chunk[:_SUM_CHARS].decode("ascii"))
        return Line(at, body) if isinstance(body["kind"], str) else None
    except (ValueError, KeyError, TypeError):
        return None


def _sum(before: str, text: bytes) -> str:
    return hashlib.sha256(before.encode() + text).hexdigest()[:_SUM_CHARS]


def of_journal(lines: tuple[Line, ...]) -> Iterator[str]:
    """The names of the journals whose headers are among the lines."""
    for item in lines:
        if item.kind == HEADER:
            yield str(item.body["journal"])
