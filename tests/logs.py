"""Captures the log of a module, independent of the configuration by other tests.

A logger keeps the configuration of its first use, so the module is given a new one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import structlog
from structlog.testing import LogCapture
from structlog.typing import EventDict


def captured(monkeypatch: pytest.MonkeyPatch, module: str, name: str = "log") -> LogCapture:
    """All that ``module`` logs from now on, of every level. ``name``: of its logger."""
    capture = LogCapture()
    own = structlog.wrap_logger(
        None, processors=[capture], wrapper_class=structlog.make_filtering_bound_logger(0)
    )
    monkeypatch.setattr(f"{module}.{name}", own)
    return capture


@contextmanager
def logs_of(module: str, name: str = "log") -> Iterator[list[EventDict]]:
    """All that ``module`` logs within the block."""
    with pytest.MonkeyPatch.context() as patch:
        yield captured(patch, module, name).entries
