"""The context that an engine runs in, and its module, loaded by name.

Each engine's module has ``connect`` and ``check``; only that of the engine that runs is imported.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

from rpcsvc.engines import ENGINES

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
