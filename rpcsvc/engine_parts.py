"""The parts that an engine is given, and its module, which is loaded by name."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, cast

from rpcsvc.engines import ENGINES

if TYPE_CHECKING:
    from rpcsvc.clock import Clock
    from rpcsvc.domain.chains import ChainRegistry
    from rpcsvc.ids import RandomBytes
    from rpcsvc.orders.backend import Backend
    from rpcsvc.settings import Settings
    from rpcsvc.store.database import Tables
    from rpcsvc.store.leases import Lease


class EngineParts(NamedTuple):
    """The parts that an engine is given. ``chains`` are all that are configured.

    ``database`` is for the engine's own tables and for the store; ``lease`` that under which it may
    be written. ``watched``: the ``watch`` of the backend with which this process stood by;
    None: it did not.
    """

    settings: Settings
    chains: ChainRegistry
    clock: Clock
    random: RandomBytes
    database: Tables
    lease: Lease
    watched: Any = None


class Engine(Protocol):
    """The module of an engine."""

    def connected(self, parts: EngineParts, /) -> AbstractAsyncContextManager[Backend]:
        """The engine, as long as the block lasts. Raises SettingsError."""
        ...

    def check(self, settings: Settings, chains: ChainRegistry, /) -> None:
        """Raise SettingsError for settings that the engine refuses, without asking anybody."""
        ...


def engine_of(name: str) -> Engine:
    """The engine of that name."""
    return cast("Engine", import_module(ENGINES[name].module))
