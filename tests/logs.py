"""What a module logs, whatever other tests have configured before.

A logger that was used keeps the configuration of then: so the module gets one of its own.
"""

from __future__ import annotations

import pytest
import structlog
from structlog.testing import LogCapture


def captured(monkeypatch: pytest.MonkeyPatch, module: str) -> LogCapture:
    """All that ``module`` logs from now on, of every level."""
    capture = LogCapture()
    own = structlog.wrap_logger(
        None, processors=[capture], wrapper_class=structlog.make_filtering_bound_logger(0)
    )
    monkeypatch.setattr(f"{module}.log", own)
    return capture
