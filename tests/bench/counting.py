"""Counts N calls for /metrics as a status call is: ``python -m tests.bench.counting N``."""

from __future__ import annotations

import sys
import time

from rpcsvc.http.metrics import Metrics
from rpcsvc.operations.service import Call, Reply


def count(calls: int) -> None:
    """Time and count so many calls and their responses, as Dispatcher and Edge do."""
    metrics, call, reply = Metrics(), Call("s1", transport="rpc"), Reply(b"")
    for _ in range(calls):
        started = time.perf_counter_ns()
        metrics.call("swap.status", call, reply, (time.perf_counter_ns() - started) / 1e9)
        metrics.response(200)


if __name__ == "__main__":
    count(int(sys.argv[1]))
