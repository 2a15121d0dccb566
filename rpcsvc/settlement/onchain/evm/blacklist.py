"""Whether the token of a network would pay an address: asked before an order for it is made."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import structlog

from rpcsvc.clock import steady_ms
from rpcsvc.settlement.onchain.daemon_rpc import RpcFailure
from rpcsvc.settlement.onchain.evm.connection import EvmConnection
from rpcsvc.settlement.onchain.unusable import ChainUnusable

log = structlog.get_logger(__name__)

# How long an order waits for the answer; a slow node keeps nobody from ordering.
WAIT_SECONDS: Final = 0.5
KEPT_MS: Final = 60_000
_MOST_KEPT: Final = 4_096


class Blacklist:
    """The blacklist of one token, as its node tells it."""

    def __init__(self, connection: EvmConnection, now_ms: Callable[[], int] = steady_ms) -> None:
        self._connection = connection
        self._now_ms = now_ms
        self._kept: OrderedDict[str, tuple[int, bool]] = OrderedDict()
        self._has_none = False  # the token has no such function

    async def has(self, address: str) -> bool:
        """Whether the address is on it; False, with a line in the log, when the node does not
        answer in time.
        """
        if self._has_none:
            return False
        now, key = self._now_ms(), address.lower()
        kept = self._kept.get(key)
        if kept is not None and now - kept[0] < KEPT_MS:
            return kept[1]
        try:
            async with asyncio.timeout(WAIT_SECONDS):
                found = await self._connection.is_blacklisted(address)
        except ChainUnusable:
            self._has_none = True
            log.info("blacklist_not_found", network=self._connection.network.name)
            return False
        except (TimeoutError, RpcFailure) as failure:
            reason = str(failure) or f"no answer within {WAIT_SECONDS} s"
            log.warning("blacklist_not_asked", network=self._connection.network.name, reason=reason)
            return False
        self._keep(key, now, found=found)
        return found

    def _keep(self, key: str, now: int, *, found: bool) -> None:
        self._kept[key] = (now, found)
        self._kept.move_to_end(key)
        if len(self._kept) > _MOST_KEPT:
            self._kept.popitem(last=False)
