"""The payment journal on disk: its line format, and files that are appended durably and mirrored.

A line is a checksum, a space, one JSON object and a newline; the checksum covers the one before it,
so a missing, altered or swapped line is found. Each file begins with a header line that repeats the
checksum before it. Unfinished bytes are ended with ``RESUME``. A place is a folder of files
``payments-NNNNNNNNNN.journal``; a further place holds the same bytes as the first, or fewer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import orjson
from msgspec import Struct
from typing_extensions import override

from rpcsvc.durable_files import sync_directory
from rpcsvc.store.leases import HeldLease

VERSION: Final = 1
HEADER: Final = "journal"
VOID: Final = "void"
GROUP: Final = "group"
ADDRESSES: Final = "addresses"
EVM_ADDRESSES: Final = "evm"
# Ends an unfinished line, so that it can't become a whole one.
RESUME: Final = b"~\n"
START: Final = "0" * 16
_SUM_CHARS: Final = 16
# Of lines that were written before a lease was named in them.
NO_LEASE: Final = HeldLease("", 0)
FOLDER: Final = "journal"
_MODE: Final = 0o600
_PREFIX: Final = "payments-"
_SUFFIX: Final = ".journal"


class JournalPosition(Struct, frozen=True):
    """The last line of a journal: its number and checksum. Line 0: nothing is written yet."""

    line: int = 0
    sum: str = START


class Mark(Struct, frozen=True):
    """The line of a journal up to which the database has everything.

    ``lease``: the one under which the journal was last opened, or written to, by this database.
    """

    journal: str
    at: JournalPosition
    lease: HeldLease = NO_LEASE


class Line(Struct, frozen=True):
    """A line that passed its check. ``body`` has its ``kind``, number and content."""

    at: JournalPosition
    body: Mapping[str, Any]

    @property
    def kind(self) -> str:
        """The kind of entry that it records."""
        return str(self.body["kind"])

    @property
    def bodies(self) -> tuple[Mapping[str, Any], ...]:
        """The bodies of its entries: of a group several, each with a ``kind``."""
        return tuple(self.body["entries"]) if self.kind == GROUP else (self.body,)

    @property
    def lease(self) -> HeldLease:
        """The lease under which it was written; ``NO_LEASE`` if it does not say."""
        return HeldLease(self.body.get("holder", ""), self.body.get("token", 0))


class JournalEntry(Struct, frozen=True):
    """The content of a line."""

    def body(self) -> dict[str, Any]:
        """Return the body of the entry's line."""
        raise NotImplementedError


class VoidEntry(JournalEntry, frozen=True):
    """A payment that was never published, or can never be mined: ``txid`` is its first one's."""

    payment_id: str
    txid: str

    @override
    def body(self) -> dict[str, Any]:
        return {"kind": VOID, "payment": self.payment_id, "txid": self.txid}


class GroupEntry(JournalEntry, frozen=True):
    """Entries of one commit in one line: after a crash it is there whole, or not at all."""

    entries: tuple[JournalEntry, ...]

    @override
    def body(self) -> dict[str, Any]:
        return {"kind": GROUP, "entries": [each.body() for each in self.entries]}


def as_one(entries: Sequence[JournalEntry]) -> JournalEntry:
    """Return the entry of a line that holds these entries, at least one."""
    return entries[0] if len(entries) == 1 else GroupEntry(tuple(entries))


class AddressesEntry(JournalEntry, frozen=True):
    """Deposit addresses of ``network`` (monero, or evm) may be handed out up to index ``to``."""

    network: str
    to: int

    @override
    def body(self) -> dict[str, Any]:
        return {"kind": ADDRESSES, "network": self.network, "to": self.to}


class Reading(Struct, frozen=True):
    """The lines of a journal, up to the first one that fails its check.

    ``problem``: the reason of that failure; None when no line fails. ``torn`` counts bytes of
    unfinished lines: a writer was killed before it reported them. ``size`` is where the last line
    of ``lines`` ends.
    """

    lines: tuple[Line, ...]
    problem: str | None = None
    torn: int = 0
    size: int = 0

    @property
    def end(self) -> JournalPosition:
        """The last line."""
        return self.lines[-1].at if self.lines else JournalPosition()


def encode(after: JournalPosition, body: Mapping[str, Any]) -> tuple[bytes, JournalPosition]:
    """The bytes of the line that follows ``after``, and its position."""
    text = orjson.dumps({"line": after.line + 1, **body})
    at = JournalPosition(after.line + 1, _sum(after.sum, text))
    return at.sum.encode() + b" " + text + b"\n", at


def header(after: JournalPosition, journal: str, at: int) -> dict[str, Any]:
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
    """Return why a line can't follow those before it; None when it does.

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
        at = JournalPosition(body["line"], chunk[:_SUM_CHARS].decode("ascii"))
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


class JournalDamaged(Exception):
    """A place does not hold the lines that were written there. The text is for the operator."""


class JournalContents(Struct, frozen=True):
    """A journal as read: ``name`` None when there is none. ``problem``: why it is not whole."""

    name: str | None
    lines: tuple[Line, ...]
    problem: str | None
    torn: int
    files: int

    @property
    def end(self) -> JournalPosition:
        """The last line that passed its check."""
        return self.lines[-1].at if self.lines else JournalPosition()


def segments(place: Path) -> list[Path]:
    """The files of a place in order; the place itself when it is a file."""
    if place.is_file():
        return [place]
    return sorted(place.glob(f"{_PREFIX}*{_SUFFIX}"))


def segment_name(first_line: int) -> str:
    """The name of the file that begins with a line."""
    return f"{_PREFIX}{first_line:010}{_SUFFIX}"


def read_place(place: Path, since: int = 0) -> JournalContents:
    """Read a journal, from the file on that has the line after ``since``."""
    files = segments(place)
    first = max((i for i, file in enumerate(files) if _first_line(file) <= since + 1), default=0)
    data = b"".join(file.read_bytes() for file in files[first:])
    found: Reading = read(data)
    name = next(of_journal(found.lines), None)
    problem = found.problem
    if name is None and problem is None and not _is_unfinished(data):
        problem = "no line of it can be read"
    return JournalContents(name, found.lines, problem, found.torn, len(files))


def _is_unfinished(data: bytes) -> bool:
    """Whether no line was ever whole: the first one was cut short, perhaps several times."""
    return all(chunk.endswith(RESUME) or not chunk.endswith(b"\n") for chunk in _chunks(data))


def head_of(place: Path) -> tuple[str, HeldLease] | None:
    """Return the name of the journal in a place, and its last line's lease; None without one."""
    try:
        for file in reversed(segments(place)):
            lines = read(file.read_bytes()).lines
            if name := next(of_journal(lines), None):
                return name, max((line.lease for line in lines), key=lambda lease: lease.token)
    except OSError:
        return None
    return None


def _first_line(file: Path) -> int:
    digits = file.name.removeprefix(_PREFIX).removesuffix(_SUFFIX)
    return int(digits) if digits.isdecimal() else 0


class PlaceWriter:
    """Appends to one place. The lock of the data directory keeps a second writer away."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._fd: int | None = None
        self._file: Path | None = None

    def open(self, name: str) -> None:
        """Continue in a file of this name, which is made if it does not exist."""
        self.close()
        make_place(self.place)
        self._file = self.place / name
        self._fd = _open_for_append(self._file)
        sync_directory(self.place)

    def append(self, data: bytes) -> None:
        """Write, on disk when this returns. After a failure the file has to be opened again."""
        if self._fd is None or self._file is None:
            raise JournalDamaged(f"no file is open in {self.place}")
        try:
            _require_in_place(self._file, self._fd)
            _write_all(self._fd, data)
            os.fsync(self._fd)
        except BaseException:
            self.close()
            raise

    @property
    def name(self) -> str:
        """The name of the file that is written to."""
        return "" if self._file is None else self._file.name

    @property
    def size(self) -> int:
        """The bytes of the file that is written to."""
        return 0 if self._fd is None else os.fstat(self._fd).st_size

    @property
    def is_open(self) -> bool:
        """Whether it can be appended to."""
        return self._fd is not None

    def close(self) -> None:
        """Close the file."""
        if self._fd is not None:
            os.close(self._fd)
        self._fd = self._file = None


def _require_in_place(path: Path, fd: int) -> None:
    """Raise JournalDamaged when the file was removed, or something was mounted over it."""
    if path.stat().st_ino != os.fstat(fd).st_ino:
        raise JournalDamaged(f"{path} was replaced")


def make_place(place: Path) -> None:
    """Make the folder, which only its owner can read, if it is not there."""
    if not place.is_dir():
        place.mkdir(mode=0o700)
        sync_directory(place.parent)


def mirror(source: Path, target: Path) -> None:
    """Bring ``target`` up to the bytes of ``source``. Raises JournalDamaged when they differ."""
    make_place(target)
    files = segments(source)
    for file in files:
        copy = target / (segment_name(1) if source.is_file() else file.name)
        size = copy.stat().st_size if copy.is_file() else 0
        if size == 0 or size != file.stat().st_size or file == files[-1]:
            _mirror_file(file, copy, size)
    sync_directory(target)


def _mirror_file(file: Path, copy: Path, size: int) -> None:
    data = file.read_bytes()
    if size and copy.read_bytes() != data[:size]:
        raise JournalDamaged(f"{copy} does not hold the same as {file}")
    fd = _open_for_append(copy)
    try:
        _write_all(fd, data[size:])
        os.fsync(fd)
    finally:
        os.close(fd)


def _open_for_append(path: Path) -> int:
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
    return os.open(path, flags, _MODE)


def _write_all(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
