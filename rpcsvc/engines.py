"""The settlement engines by name, each with the module that connects it.

Modules are named, not imported: only the engine that runs is loaded.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    from rpcsvc.clock import Clock
    from rpcsvc.domain.chains import ChainRegistry
    from rpcsvc.ids import RandomBytes
    from rpcsvc.orders.backend import Backend
    from rpcsvc.settings import Settings

ENGINES: Final = {
    "sandbox": "rpcsvc.app_sandbox",
    "upstream": "rpcsvc.settlement.upstream.wiring",
    "onchain": "rpcsvc.app_onchain",
}


class EngineParts(NamedTuple):
    """What an engine is given. ``chains`` are all that are configured.

    ``database`` is the store's, for the engines whose ledgers are in it.
    """

    settings: Settings
    chains: ChainRegistry
    clock: Clock
    random: RandomBytes
    database: Any


class Engine(Protocol):
    """What the module of an engine has."""

    def connected(self, parts: EngineParts, /) -> AbstractAsyncContextManager[Backend]:
        """The engine, as long as the block lasts. Raises SettingsError."""
        ...

    def check(self, settings: Settings, chains: ChainRegistry, /) -> None:
        """Raise SettingsError for settings that the engine refuses, without asking anybody."""
        ...


def engine_of(name: str) -> Engine:
    """The engine of that name."""
    return cast("Engine", import_module(ENGINES[name]))
