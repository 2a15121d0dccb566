"""``python -m tests.e2e.polling serve ...``: the service; it polls its upstream often."""

from __future__ import annotations

from rpcsvc.__main__ import main
from rpcsvc.orders import backend
from rpcsvc.orders.upstream import follower

if __name__ == "__main__":
    follower.ASK_EVERY_MS = 100  # type: ignore[misc]
    backend.POLL_MS = 100  # type: ignore[attr-defined]
    main()
