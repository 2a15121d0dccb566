"""The settlement engines by name, each with the function that connects it.

They are named, not imported: only the engine that runs is loaded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib import import_module
from typing import Final

from rpcsvc.orders.backend import Backend
from rpcsvc.settlement.parts import EngineParts

ENGINES: Final = {
    "sandbox": "rpcsvc.app_sandbox:sandbox_backend",
    "upstream": "rpcsvc.settlement.upstream.wiring:connected",
    "onchain": "rpcsvc.app_onchain:onchain_backend",
}

Connect = Callable[[EngineParts], AbstractAsyncContextManager[Backend]]


def connect(name: str) -> Connect:
    """The function that connects the engine of that name as long as its block lasts.

    The function raises SettingsError.
    """
    module, function = ENGINES[name].split(":")
    found: Connect = getattr(import_module(module), function)
    return found
