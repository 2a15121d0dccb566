"""Keeping a store in memory while it is measured.

Rows at a million orders are compared with rows at a thousand to see what look-ups cost. A machine
that evicts the pages of a large file between two requests for them would measure its disk instead.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_SPARE_BYTES = 2 << 30  # stays free for everything else


class NotHeld(Exception):
    """The file can't be kept in memory; the message says why."""


@contextmanager
def held(path: Path) -> Iterator[None]:
    """Lock the pages of ``path``, as large as it is now, into memory.

    Raises NotHeld when the machine has too little memory, or does not let this user lock so much.
    """
    size = path.stat().st_size
    needed, available = size + _SPARE_BYTES, _available_bytes()
    if available < needed:
        raise NotHeld(f"needs {needed >> 20:,} MiB of memory, {available >> 20:,} are available")
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    with path.open("rb") as file:
        address = libc.mmap(
            None, ctypes.c_size_t(size), mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0
        )
    area = (ctypes.c_void_p(address), ctypes.c_size_t(size))
    try:
        if libc.mlock(*area):
            raise NotHeld(f"mlock: {os.strerror(ctypes.get_errno())}")
        yield
    finally:
        libc.munmap(*area)


def _available_bytes() -> int:
    """The memory that can be used without swapping; 0 without /proc."""
    try:
        text = Path("/proc/meminfo").read_text()
    except FileNotFoundError:
        return 0
    found = re.search(r"MemAvailable: +([0-9]+) kB", text)
    return int(found.group(1)) * 1024 if found else 0
