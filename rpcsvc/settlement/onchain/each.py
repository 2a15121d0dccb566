"""Doing the same for several sides or networks, so that none is left out when another one fails."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any


async def each_of(works: Iterable[Coroutine[Any, Any, None]]) -> None:
    """Do all of them at the same time; once all have ended, raise the first failure."""
    for result in await asyncio.gather(*works, return_exceptions=True):
        if result is not None:
            raise result
