"""The payment journal's format: lines are read back, incomplete and damaged ones found."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from rpcsvc.settlement.onchain.journal.files import RESUME, JournalPosition, encode, header, read

NAME = "ab" * 8
BODIES = st.lists(
    st.dictionaries(st.sampled_from(["a", "b"]), st.text() | st.integers(0, 2**53)), max_size=8
)


def written(bodies: list[dict[str, object]], after: JournalPosition | None = None) -> list[bytes]:
    """The lines of a file: header, then these."""
    at = after or JournalPosition()
    lines = []
    for body in [header(at, NAME, 1), *({"kind": "x", **body} for body in bodies)]:
        line, at = encode(at, body)
        lines.append(line)
    return lines


@given(BODIES)
def test_lines_are_read_as_written(bodies: list[dict[str, object]]) -> None:
    found = read(b"".join(written(bodies)))
    assert (found.problem, found.torn) == (None, 0)
    assert [line.at.line for line in found.lines] == list(range(1, len(bodies) + 2))
    kept = [{k: line.body[k] for k in line.body if k in "ab"} for line in found.lines[1:]]
    assert kept == bodies


@given(BODIES, st.data())
def test_torn_tail_is_normal_and_only_the_last_line_is_lost(
    bodies: list[dict[str, object]], data: st.DataObject
) -> None:
    lines = written(bodies)
    cut = data.draw(st.integers(0, len(lines[-1]) - 1))
    found = read(b"".join(lines[:-1]) + lines[-1][:cut])
    assert (found.problem, found.torn) == (None, cut)
    assert len(found.lines) == len(lines) - 1


@given(BODIES, st.data())
def test_writer_goes_on_after_a_torn_line(
    bodies: list[dict[str, object]], data: st.DataObject
) -> None:
    lines = written(bodies)
    # Also the line without its newline: it must not become complete later.
    cut = data.draw(st.integers(1, len(lines[-1]) - 1))
    torn = b"".join(lines[:-1]) + lines[-1][:cut]
    after = read(torn).end
    found = read(torn + RESUME + b"".join(written([{"a": 1}], after)))
    assert (found.problem, found.torn) == (None, 0)
    assert [line.at.line for line in found.lines] == list(range(1, len(lines) + 2))


@given(BODIES.filter(bool), st.data())
def test_changed_byte_is_found_or_leaves_a_torn_tail(
    bodies: list[dict[str, object]], data: st.DataObject
) -> None:
    lines = written(bodies)
    whole = b"".join(lines)
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = bytearray(whole)
    damaged[at] ^= data.draw(st.integers(1, 255))
    found = read(bytes(damaged))
    assert len(found.lines) < len(lines)
    is_in_last = at >= len(whole) - len(lines[-1])
    assert found.problem is not None or (is_in_last and found.torn > 0)


@given(BODIES.filter(lambda bodies: len(bodies) > 1), st.data())
def test_missing_line_is_found(bodies: list[dict[str, object]], data: st.DataObject) -> None:
    lines = written(bodies)
    gone = data.draw(st.integers(0, len(lines) - 2))
    assert read(b"".join(lines[:gone] + lines[gone + 1 :])).problem is not None
