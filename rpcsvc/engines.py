"""The settlement engines by name: the module of each, and the facts known without loading it.

Modules are named, not imported: only the engine that runs is loaded. Each has ``connect`` and
``check``.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    from contextlib import AbstractAsyncContextManager

    from rpcsvc.clock import Clock
    from rpcsvc.domain.chains import ChainRegistry
    from rpcsvc.ids import RandomBytes
    from rpcsvc.orders.policy import MakeOrders
    from rpcsvc.orders.settlement import Settlement
    from rpcsvc.settings import Settings
    from rpcsvc.store.database import Tables
    from rpcsvc.store.leases import Lease


class EngineFacts(NamedTuple):
    """The facts of an engine that is not loaded.

    ``signs``: it pays from wallets of this machine, so only the service itself runs it, and it
    keeps a payment journal.
    """

    module: str
    signs: bool = False


ENGINES: Final[Mapping[str, EngineFacts]] = {
    "sandbox": EngineFacts("rpcsvc.settlement.sandbox.wiring"),
    "upstream": EngineFacts("rpcsvc.settlement.upstream.wiring"),
    "onchain": EngineFacts("rpcsvc.settlement.onchain.wiring", signs=True),
}


class EngineContext(NamedTuple):
    """The process that an engine runs in. ``chains`` are all that are configured.

    ``tables`` are for the engine's own rows and for orders; they are written under ``lease``.
    ``watched``: the ``watch`` of the settlement with which this process stood by; None: it did not.
    """

    settings: Settings
    chains: ChainRegistry
    clock: Clock
    random: RandomBytes
    tables: Tables
    lease: Lease
    watched: Any = None


def connect(
    context: EngineContext, make_orders: MakeOrders
) -> AbstractAsyncContextManager[Settlement]:
    """Connect the engine of the settings, as long as the block lasts. Raises SettingsError."""
    connected: AbstractAsyncContextManager[Settlement] = _module(context.settings).connect(
        context, make_orders
    )
    return connected


def check(settings: Settings, chains: ChainRegistry) -> None:
    """Raise SettingsError for settings that their engine refuses, without asking anybody."""
    _module(settings).check(settings, chains)


def _module(settings: Settings) -> Any:
    return import_module(ENGINES[settings.engine].module)
