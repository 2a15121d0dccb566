"""Answers that clients saw over all replicas, and whether one correct service can have given them.

Times are those of one clock. A call whose answer was lost is in no history: it may have had its
effect, or not.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple


class SeenOrder(NamedTuple):
    """The order that an idempotency key has, as of one call: its version, 0 if it was not found.

    None: the call was a create, whose answer is permanently the first one. The order is there then.
    """

    key: str
    order_id: str
    version: int | None
    began: float
    ended: float


class History:
    """The answers that all clients of a test saw."""

    def __init__(self) -> None:
        self.seen: list[SeenOrder] = []

    def saw(self, key: str, order_id: str, version: int | None, began: float) -> None:
        """Add a call that ends now."""
        self.seen.append(SeenOrder(key, order_id, version, began, time.monotonic()))


def violations(history: Iterable[SeenOrder]) -> list[str]:
    """Why no correct service can have given these answers, in words; empty if one can.

    A key has one order, and an order one key. What a call shows is no older than what any call had
    shown that ended before it began (linearisability of the order's versions, which only grow).
    """
    seen = list(history)
    return [*_mixed(seen), *_stale(seen)]


def _mixed(seen: list[SeenOrder]) -> list[str]:
    orders, keys = defaultdict[str, set[str]](set), defaultdict[str, set[str]](set)
    for each in seen:
        orders[each.key].add(each.order_id)
        keys[each.order_id].add(each.key)
    wrong = [f"{key} has {sorted(ids)}" for key, ids in orders.items() if len(ids) > 1]
    return wrong + [f"{one} is of {sorted(names)}" for one, names in keys.items() if len(names) > 1]


def _stale(seen: list[SeenOrder]) -> list[str]:
    wrong = []
    by_order = defaultdict[str, list[SeenOrder]](list)
    for each in seen:
        by_order[each.order_id].append(each)
    for order_id, calls in by_order.items():
        ends = sorted(calls, key=lambda call: call.ended)
        newest, at = 0, 0
        for call in sorted(calls, key=lambda call: call.began):
            while ends[at].ended < call.began:
                shown = ends[at].version
                newest, at = max(newest, 1 if shown is None else shown), at + 1
            if call.version is not None and call.version < newest:
                wrong.append(f"{order_id} was at {newest}, and at {call.version} later: {call}")
    return wrong
