"""``python -m tests.e2e.crashing SEAM WHEN N serve ...``: the service, killed by SIGKILL.

It dies before or after the N-th call of a seam, as a power cut would have it: no handler runs,
nothing is flushed. The product knows nothing of this; the seams are wrapped from outside.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from rpcsvc.__main__ import main
from rpcsvc.orders.processor import OrderProcessor
from rpcsvc.settlement.sandbox.engine import SandboxEngine
from rpcsvc.store.sqlite import Database

SEAMS: dict[str, tuple[type, str]] = {
    "write": (Database, "write"),
    "transaction": (Database, "_transaction"),
    "open": (OrderProcessor, "open"),
    "apply": (OrderProcessor, "apply"),
    "observe": (SandboxEngine, "observe"),
    "acknowledge": (SandboxEngine, "acknowledge"),
    "prepare": (SandboxEngine, "prepare"),
    "publish": (SandboxEngine, "publish"),
    "look_up": (SandboxEngine, "look_up"),
}


def arm(seam: str, when: str, number: int) -> None:
    """Wrap the seam so that its ``number``-th call is deadly."""
    owner, name = SEAMS[seam]
    original: Callable[..., Any] = getattr(owner, name)
    calls = itertools.count(1)

    async def deadly(*args: Any, **kwargs: Any) -> Any:
        fatal = next(calls) == number
        if fatal and when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        result = await original(*args, **kwargs)
        if fatal:
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    setattr(owner, name, deadly)


if __name__ == "__main__":
    arm(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    sys.argv[1:4] = []
    main()
