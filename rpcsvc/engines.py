"""The settlement engines by name: the module of each, and the facts known without loading it.

Modules are named, not imported: only the engine that runs is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, cast

if TYPE_CHECKING:
    from rpcsvc.clock import Clock
    from rpcsvc.domain.chains import ChainRegistry
    from rpcsvc.ids import RandomBytes
    from rpcsvc.orders.backend import Backend
    from rpcsvc.settings import Settings
    from rpcsvc.store.leases import Lease


class EngineFacts(NamedTuple):
    """What holds of an engine that is not loaded.

    ``network`` gives the ``data.network`` of its answers. ``signs``: it pays from wallets of this
    machine, so only the service itself runs it, and it keeps a payment journal.
    """

    module: str
    network: Callable[[Settings], str]
    signs: bool = False


ENGINES: Final[Mapping[str, EngineFacts]] = {
    "sandbox": EngineFacts("rpcsvc.app_sandbox", lambda _settings: "sandbox"),
    "upstream": EngineFacts(
        "rpcsvc.app_upstream", lambda settings: settings.upstream.monero_network
    ),
    "onchain": EngineFacts(
        "rpcsvc.app_onchain", lambda settings: settings.onchain.monero_network, signs=True
    ),
}


class EngineParts(NamedTuple):
    """What an engine is given. ``chains`` are all that are configured.

    ``database`` is the store's, for the engines whose ledgers are in it; ``lease`` that under which
    it may be written. ``watched``: the ``watch`` of the backend with which this process stood by;
    None: it did not.
    """

    settings: Settings
    chains: ChainRegistry
    clock: Clock
    random: RandomBytes
    database: Any
    lease: Lease
    watched: Any = None


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
    return cast("Engine", import_module(ENGINES[name].module))
