"""The payment journal on disk: durable before the commit, mirrored; without it payouts wait."""

from __future__ import annotations

import asyncio
import errno
import os
import stat
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from rpcsvc.errors import Unavailable
from rpcsvc.settlement.onchain.journal.files import (
    RESUME,
    AddressesEntry,
    Mark,
    PlaceWriter,
    VoidEntry,
    read_place,
    segments,
)
from rpcsvc.settlement.onchain.journal.writer import JournalOptions, PaymentJournal
from rpcsvc.settlement.onchain.journal_entries import entries_of
from tests.unit.full_disk import Disk, disk

__all__ = ["disk"]


class FakeClock:
    """Wall and monotonic time, moved by the test."""

    def __init__(self) -> None:
        self.at = 1_000_000

    def now_ms(self) -> int:
        return self.at


CLOCK = FakeClock()


def journal(options: JournalOptions, clock: FakeClock = CLOCK) -> PaymentJournal:
    return PaymentJournal(options, clock, lambda n: b"\x0a" * n, steady=clock.now_ms)


@pytest.fixture
def options(tmp_path: Path) -> JournalOptions:
    return JournalOptions(tmp_path / "journal")


def full(_writer: PlaceWriter, _name: str) -> None:
    """An opening on a full disk."""
    raise OSError(errno.ENOSPC, "No space left on device")


async def nothing(_mark: Mark) -> None:
    """A commit that succeeds."""


async def opened(options: JournalOptions, clock: FakeClock = CLOCK) -> PaymentJournal:
    made = journal(options, clock)
    await made.open(None)
    return made


async def written(options: JournalOptions, count: int) -> Mark:
    """Write a journal of so many lines and close it; its last mark."""
    made = await opened(options)
    await write(made, count)
    await made.close()
    return made.mark


async def write(to: PaymentJournal, count: int, start: int = 1) -> None:
    for number in range(start, start + count):
        await to.record(AddressesEntry("evm", number), nothing)


def numbers(place: Path) -> list[int]:
    entries = [entry for line in read_place(place).lines for entry in entries_of(line)]
    return [entry.to for entry in entries if isinstance(entry, AddressesEntry)]


async def test_line_is_on_disk_before_the_commit(options: JournalOptions) -> None:
    made = await opened(options)
    seen: list[list[int]] = []

    async def commit(mark: Mark) -> None:
        seen.append(numbers(options.folder))
        assert read_place(options.folder).end == mark.at

    await made.record(AddressesEntry("evm", 7), commit)
    assert seen == [[7]]
    (file,) = segments(options.folder)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


async def test_line_is_synced_in_each_place_before_the_commit(
    options: JournalOptions, tmp_path: Path, disk: Disk
) -> None:
    """Also in a new file, whose name has to be synced, and after a line that was cut off."""
    options = replace(options, places=(tmp_path / "mirror",), segment_bytes=300)
    made = await opened(options)
    seen: list[int] = []

    async def commit(mark: Mark) -> None:
        for place in (options.folder, *options.places):
            assert read_place(place).end == mark.at
            files = segments(place)
            assert {file: disk.sizes[file] for file in files} == {
                file: file.stat().st_size for file in files
            }
            assert disk.synced.count(place) >= len(files), "the name of each"
        seen.append(len(segments(options.folder)))

    for number in range(1, 7):
        await made.record(AddressesEntry("evm", number), commit)
    assert len(set(seen)) > 1, "files were rotated"
    await made.close()
    with segments(options.folder)[-1].open("ab") as file:
        file.write(b'{"torn')
    again = journal(options)
    await again.open(made.mark)
    await again.record(AddressesEntry("evm", 7), commit)
    assert numbers(options.folder) == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("cut", [0, 1, 20, 80])
async def test_journal_whose_first_line_was_cut_short_begins_again(
    options: JournalOptions, cut: int
) -> None:
    """As by a kill, or a full disk, at the very first write; and once more at the second try."""
    made = await opened(options)
    await made.close()
    (file,) = segments(options.folder)
    header = file.read_bytes()
    file.write_bytes(header[:cut])
    second = await opened(options)
    await second.close()
    file.write_bytes(header[:cut] + RESUME + header[: cut + 1])
    third = await opened(options)
    await write(third, 2)
    assert third.is_usable
    assert numbers(options.folder) == [1, 2]


async def test_journal_of_which_no_line_can_be_read_is_refused(options: JournalOptions) -> None:
    await written(options, 2)
    (file,) = segments(options.folder)
    file.write_bytes(b"x" + file.read_bytes().replace(b"\n", b"x\n"))
    made = await opened(options)
    assert "no line of it can be read" in str(made.health().detail)


async def test_reopened_it_gives_what_the_database_lacks(options: JournalOptions) -> None:
    first = await opened(options)
    await write(first, 3)
    mark = first.mark
    await write(first, 2, 4)
    await first.close()
    again = journal(options)
    lines = await again.open(mark)
    assert [line.body["to"] for line in lines] == [4, 5]
    assert again.health().ok
    await write(again, 1, 6)
    assert numbers(options.folder) == [1, 2, 3, 4, 5, 6]


async def test_killed_in_a_line_it_goes_on_after_it(options: JournalOptions) -> None:
    mark = await written(options, 3)
    (file,) = segments(options.folder)
    whole = file.read_bytes()
    for cut in (1, 5, len(whole.splitlines()[-1])):
        file.write_bytes(whole[:-cut])
        earlier = read_place(options.folder)
        again = journal(options)
        await again.open(Mark(mark.journal, earlier.end))
        await write(again, 1, 9)
        await again.close()
        assert numbers(options.folder) == [1, 2, 9]
        assert read_place(options.folder).problem is None


async def test_files_are_rotated_and_all_kept(options: JournalOptions) -> None:
    mark = await written(replace(options, segment_bytes=300), 9)
    assert len(segments(options.folder)) == 3
    assert numbers(options.folder) == list(range(1, 10))
    again = journal(options)
    assert await again.open(mark) == ()
    assert again.health().ok


async def refused(options: JournalOptions, mark: Mark, why: str) -> PaymentJournal:
    made = journal(options)
    assert await made.open(mark) == ()
    assert why in str(made.health().detail)
    with pytest.raises(Unavailable):
        await made.require_ready()
    with pytest.raises(Unavailable):
        await write(made, 1)
    return made


async def test_missing_or_shorter_or_other_journal_stops_payouts(options: JournalOptions) -> None:
    mark = await written(options, 3)
    (file,) = segments(options.folder)
    whole = file.read_bytes()
    file.write_bytes(b"".join(whole.splitlines(keepends=True)[:-1]))
    await refused(options, mark, "it ends at line 3; the database knows 4 lines")
    file.write_bytes(whole[:150] + b"\x00" + whole[151:])
    await refused(options, mark, "")
    file.write_bytes(whole)
    await refused(options, Mark("other", mark.at), "belongs to journal other")
    os.rename(file, options.folder / "away")  # noqa: PTH104
    gone = await refused(options, mark, "it is missing; the database knows 4 lines")
    os.rename(options.folder / "away", file)  # noqa: PTH104
    CLOCK.at += 60_000
    await gone.require_ready()
    assert gone.health().ok


async def test_removed_while_it_runs_it_takes_nothing(options: JournalOptions) -> None:
    made = await opened(options)
    await write(made, 2)
    (file,) = segments(options.folder)
    file.unlink()
    with pytest.raises(Unavailable):
        await write(made, 1, 3)
    assert "payouts wait" in str(made.health().detail)


async def test_line_whose_commit_fails_is_voided(options: JournalOptions) -> None:
    made = await opened(options)

    async def fails(_mark: Mark) -> None:
        raise Unavailable("The disk is full.")

    def undo(committed: bool) -> tuple[VoidEntry, Callable[[], Awaitable[bool]]]:
        async def is_committed() -> bool:
            return committed

        return VoidEntry("ord_1/payout/1", "aa"), is_committed

    for committed in (True, False):
        with pytest.raises(Unavailable):
            await made.record(AddressesEntry("evm", 1), fails, undo(committed))
        await write(made, 1, 2)
    kinds = [line.kind for line in read_place(options.folder).lines]
    assert kinds == ["journal", *["addresses"] * 3, "void", "addresses"]


async def test_cancelled_caller_leaves_no_line_without_its_commit(options: JournalOptions) -> None:
    made = await opened(options)
    begun, go_on, done = asyncio.Event(), asyncio.Event(), asyncio.Event()

    async def slow(_mark: Mark) -> None:
        begun.set()
        await go_on.wait()
        done.set()

    caller = asyncio.create_task(_record(made, slow))
    await begun.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    go_on.set()
    await write(made, 1, 2)
    assert done.is_set()


async def _record(made: PaymentJournal, commit: Callable[[Mark], Awaitable[None]]) -> None:
    await made.record(AddressesEntry("evm", 1), commit)


# --- further places --------------------------------------------------------------------------


async def test_further_place_holds_the_same_and_catches_up(
    options: JournalOptions, tmp_path: Path
) -> None:
    place, clock = tmp_path / "mount" / "journal", FakeClock()
    both = replace(options, places=(place, tmp_path / "other"), segment_bytes=300)
    made = await opened(both, clock)
    await write(made, 2)  # one place is enough: the other's folder is not mounted
    assert "payouts go on" in str(made.health().detail)
    place.parent.mkdir()
    clock.at += 60_000
    await write(made, 4, 3)
    assert made.health().ok
    assert numbers(place) == numbers(options.folder) == [1, 2, 3, 4, 5, 6]
    assert [each.read_bytes() for each in segments(place)] == [
        each.read_bytes() for each in segments(options.folder)
    ]


async def test_lost_journal_comes_back_from_a_further_place(
    options: JournalOptions, tmp_path: Path
) -> None:
    both = replace(options, places=(tmp_path / "place",))
    mark = await written(both, 3)
    (file,) = segments(options.folder)
    file.unlink()
    again = journal(both)
    await again.open(mark)
    assert again.health().ok
    await write(again, 1, 4)
    assert numbers(options.folder) == numbers(tmp_path / "place") == [1, 2, 3, 4]


async def test_without_any_further_place_payouts_wait(
    options: JournalOptions, tmp_path: Path
) -> None:
    made = await opened(replace(options, places=(tmp_path / "none" / "journal",)))
    with pytest.raises(Unavailable):
        await write(made, 1)
    assert "payouts wait" in str(made.health().detail)
    (tmp_path / "none").mkdir()
    CLOCK.at += 60_000
    await made.retry()
    assert made.health().ok, "without a payment to record, too"
    assert read_place(options.folder).problem is None


async def test_command_gets_each_line_and_what_it_missed(
    options: JournalOptions, tmp_path: Path
) -> None:
    kept, fails, clock = tmp_path / "kept", tmp_path / "fails", FakeClock()
    script = (
        "import sys, pathlib; sys.exit(1) if pathlib.Path(sys.argv[2]).exists() else None;"
        " open(sys.argv[1], 'ab').write(sys.stdin.buffer.read())"
    )
    command = (sys.executable, "-c", script, str(kept), str(fails))
    made = await opened(replace(options, command=command), clock)
    await write(made, 1)
    fails.touch()
    for number in (2, 3):
        with pytest.raises(Unavailable):
            await write(made, 1, number)
    fails.unlink()
    clock.at += 60_000
    await write(made, 1, 4)
    assert kept.read_bytes() == b"".join(
        line + b"\n" for line in segments(options.folder)[0].read_bytes().splitlines()[1:]
    )


async def test_a_late_opening_skips_no_line_that_nobody_has_read(
    options: JournalOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = await opened(options)
    await write(first, 3)
    mark = first.mark
    await write(first, 2, 4)
    await first.close()

    late = journal(options)
    with monkeypatch.context() as patched:
        patched.setattr(PlaceWriter, "open", full)
        assert await late.open(mark) == ()
    await late.retry()
    assert "restart the service" in str(late.health())
    with pytest.raises(Unavailable):
        await write(late, 1, 6)
    again = journal(options)
    assert [line.body["to"] for line in await again.open(mark)] == [4, 5]


async def test_a_late_opening_that_lacks_nothing_takes_lines(
    options: JournalOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = await written(options, 3)

    late = journal(options)
    with monkeypatch.context() as patched:
        patched.setattr(PlaceWriter, "open", full)
        await late.open(mark)
    await late.retry()
    await write(late, 1, 4)
    assert numbers(options.folder) == [1, 2, 3, 4]
