"""How often the network is asked what became of signed authorizations."""

from __future__ import annotations

from typing import Any, cast

import pytest

from rpcsvc.orders.gasless import ClientLimit, GaslessFunding
from tests.sandbox import ManualClock


class Store:
    """Counts how often it is asked for what is unresolved."""

    asked = 0

    async def unresolved(self) -> list[Any]:
        self.asked += 1
        return []


@pytest.mark.parametrize(("poll_ms", "asked"), [(0, 3), (3_600_000, 1)])
async def test_authorizations_are_looked_at_once_in_a_while(poll_ms: int, asked: int) -> None:
    store, nothing = Store(), cast("Any", None)
    limit = ClientLimit(1, b"")
    funding = GaslessFunding(nothing, cast("Any", store), nothing, ManualClock(), limit, poll_ms)
    for _ in range(3):
        await funding.resume()
    assert store.asked == asked
