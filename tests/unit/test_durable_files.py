"""Durable files: written to disk completely or not at all."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rpcsvc.durable_files import replace_file, write_new
from tests.unit.full_disk import Disk, disk

__all__ = ["disk"]


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_file_and_its_name_are_synced_in_this_order(tmp_path: Path, disk: Disk) -> None:
    replace_file(tmp_path / "a", b"text")
    first, second = disk.synced
    assert first.parent == second == tmp_path
    assert ((tmp_path / "a").read_bytes(), names(tmp_path)) == (b"text", ["a"])


def test_unwritable_file_leaves_the_old_one_and_nothing_else(tmp_path: Path, disk: Disk) -> None:
    replace_file(tmp_path / "a", b"old")
    disk.is_full = True
    with pytest.raises(OSError, match="No space"):
        replace_file(tmp_path / "a", b"new")
    with pytest.raises(OSError, match="No space"):
        write_new(tmp_path / "b", b"new")
    assert ((tmp_path / "a").read_bytes(), names(tmp_path)) == (b"old", ["a"])


def test_directory_in_the_files_place_stays_untouched(
    tmp_path: Path,
) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(IsADirectoryError):
        replace_file(tmp_path / "a", b"new")
    assert names(tmp_path) == ["a"]


def test_concurrent_replacements_of_one_file_do_not_collide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace: Callable[..., None] = os.replace
    others = [b"second"]

    def replace_after_the_other(*paths: Any, **options: Any) -> None:
        if others:
            replace_file(tmp_path / "a", others.pop())
        replace(*paths, **options)

    monkeypatch.setattr(os, "replace", replace_after_the_other)
    replace_file(tmp_path / "a", b"first")
    assert ((tmp_path / "a").read_bytes(), names(tmp_path)) == (b"first", ["a"])


def test_new_file_is_private_and_replaces_no_one_elses(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        write_new(tmp_path / "a", b"secret")
    finally:
        os.umask(old)
    assert (tmp_path / "a").stat().st_mode & 0o777 == 0o600
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for taken in ("a", "link"):
        with pytest.raises(FileExistsError):
            write_new(tmp_path / taken, b"other")
    assert (tmp_path / "a").read_bytes() == b"secret"
    assert names(tmp_path) == ["a", "link"]
