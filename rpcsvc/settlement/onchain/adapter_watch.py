"""Scans one adapter for deposits, so that a node that hangs, or a fault, delays no other adapter.

A scan that does not end in time goes on, and a later pass shows what it found. One that fails is
in health and starts anew with the next pass.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic
from typing import Final

import structlog

from rpcsvc.orders.ports.health import Health
from rpcsvc.orders.ports.wallets import Observation
from rpcsvc.settlement.onchain.adapter import ChainAdapter

log = structlog.get_logger(__name__)

# A pass waits no longer for one adapter: the other's deposits and all payouts wait with it.
PATIENCE_SECONDS: Final = 2.0
# A look takes milliseconds. One that takes so long meets a node that hangs, or catches up.
HANGS_SECONDS: Final = 15.0


class AdapterWatch:
    """One adapter's looks, one at a time. Seconds are those of ``now``, which only runs forward.

    ``has_looked``: the last ``observe`` ended with a look, and its result may be acknowledged.
    """

    def __init__(
        self,
        adapter: ChainAdapter,
        *,
        patience: float = PATIENCE_SECONDS,
        now: Callable[[], float] = monotonic,
    ) -> None:
        self._side = adapter
        self._patience = patience
        self._now = now
        self._since = 0.0
        self._fault: str | None = None
        self._look: asyncio.Task[Observation] | None = None
        self.has_looked = False

    async def observe(self) -> Observation:
        """What a look has found; nothing while it is still under way, or when it failed."""
        self.has_looked = False
        if self._look is None:
            self._since = self._now()
            self._look = asyncio.create_task(self._observe())
        done, _ = await asyncio.wait({self._look}, timeout=self._patience)
        if not done:
            return Observation()
        look, self._look = self._look, None
        try:
            found = look.result()
        except Exception as error:  # noqa: BLE001 - logged, and in health
            self._failed(error)
            return Observation()
        self.has_looked, self._fault = True, None
        return found

    def _failed(self, error: Exception) -> None:
        """Say it once; a look is begun every second."""
        fault = type(error).__name__
        if fault != self._fault:
            log.error("deposits_not_observed", asset=self._side.asset.symbol, exc_info=error)
        self._fault = fault

    async def _observe(self) -> Observation:
        return await self._side.observe()

    async def close(self) -> None:
        """End the look that is under way."""
        look, self._look = self._look, None
        if look is not None:
            look.cancel()
            await asyncio.gather(look, return_exceptions=True)

    def hangs(self) -> bool:
        """Whether a look has been under way for too long."""
        return self._look is not None and self._now() - self._since >= HANGS_SECONDS

    def is_blind(self) -> bool:
        """Whether deposits are not seen: a look hangs, or the last one failed."""
        return self._fault is not None or self.hangs()

    def health(self) -> Health:
        """Not ok while a look hangs, or after one that failed."""
        if not self.is_blind():
            return Health(True)
        if self._fault is not None:
            return Health(False, f"a look for deposits has failed ({self._fault})")
        seconds = int(self._now() - self._since)
        return Health(
            False, f"a look for deposits has taken {seconds} s: a node hangs, or catches up"
        )
