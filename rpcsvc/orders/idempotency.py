"""Idempotency keys: the same call twice makes one order (design part 3 "Idempotency").

A key is claimed while the first call runs; copies wait for it. Its answer is committed with the
order, so a retry after a crash finds both or neither. Of two processes that are given one key, the
one that commits second reads the answer of the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, TypeVar

from msgspec import Struct

from rpcsvc.errors import IdempotencyConflict, Unavailable
from rpcsvc.store.database import StaleWrite
from rpcsvc.store.orders import OrderStore

T = TypeVar("T")

# How often an order is opened again when others took its reservation, or its key.
TRIES: Final = 5
_BUSY: Final = (
    "Others are making orders with the same limits right now; nothing was changed. Try again."
)


class Claim(Struct, frozen=True):
    """A key with the call that it stands for; ``params`` are normalised JSON values."""

    namespace: str
    key: str
    operation: str
    params: dict[str, Any]


class Idempotency:
    """Runs a call once per (namespace, key)."""

    def __init__(self, store: OrderStore) -> None:
        self._store = store
        self._running: dict[tuple[str, str], asyncio.Future[None]] = {}

    async def once(self, claim: Claim, make: Callable[[], Awaitable[bytes]]) -> tuple[bytes, bool]:
        """Return the answer to the call, and whether it is a replay.

        ``make`` must commit its answer under the claim's key. Raises IdempotencyConflict, and the
        errors of ``make`` (the key is free again then).
        """
        slot = (claim.namespace, claim.key)
        while (running := self._running.get(slot)) is not None:
            await asyncio.shield(running)
        ended = self._running[slot] = asyncio.get_running_loop().create_future()
        try:
            return await retried(lambda: self._once(claim, make))
        except asyncio.CancelledError:
            # The store commits the statements that it was given all the same; copies wait for that.
            await self._store.settle()
            raise
        finally:
            del self._running[slot]
            ended.set_result(None)

    async def _once(self, claim: Claim, make: Callable[[], Awaitable[bytes]]) -> tuple[bytes, bool]:
        # Looked for only now: a copy may have been answered while this one waited.
        stored = await self._store.response(claim.namespace, claim.key)
        if stored is not None:
            require_same(stored.operation, stored.params, claim)
            return stored.body, True
        return await make(), False


async def retried(make: Callable[[], Awaitable[T]]) -> T:
    """Call ``make`` again while others change what it decides on; return its result.

    Raises Unavailable after some tries.
    """
    for _ in range(TRIES):
        with suppress(StaleWrite):
            return await make()
    raise Unavailable(_BUSY, retry_after=1)


def require_same(operation: str, params: dict[str, Any], claim: Claim) -> None:
    """Raise IdempotencyConflict unless the key of ``claim`` was used for an equal call."""
    before = {"operation": operation, **params}
    now = {"operation": claim.operation, **claim.params}
    differing = sorted(
        name for name in before.keys() | now.keys() if before.get(name) != now.get(name)
    )
    if differing:
        raise IdempotencyConflict(
            f"This idempotency key was used before with another {', '.join(differing)}."
            " Send the same call again to get its answer, or use a new key for a new order.",
            details={"fields": differing},
        )
