"""Composition of the upstream engine: its calls, and the authorizations that the store keeps."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rpcsvc.engine_parts import EngineParts
from rpcsvc.orders.backend import Backend
from rpcsvc.settlement.upstream import wiring
from rpcsvc.store.gasless import FundingStore

check = wiring.check


@asynccontextmanager
async def connected(parts: EngineParts) -> AsyncIterator[Backend]:
    """The upstream as a venue, with settings that passed ``check``."""
    async with wiring.connected(parts, FundingStore(parts.database)) as backend:
        yield backend
