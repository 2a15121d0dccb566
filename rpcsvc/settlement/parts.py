"""What the composition root gives to an engine."""

from __future__ import annotations

from typing import Any, NamedTuple

from rpcsvc.clock import Clock
from rpcsvc.domain.chains import ChainRegistry
from rpcsvc.ids import RandomBytes
from rpcsvc.settings import Settings


class EngineParts(NamedTuple):
    """``chains`` are all that are configured; ``database`` is the store's, for ledgers in it."""

    settings: Settings
    chains: ChainRegistry
    clock: Clock
    random: RandomBytes
    database: Any
