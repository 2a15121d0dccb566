"""The settlement engines by name: the module of each, and the facts known without loading it.

Modules are named, not imported: only the engine that runs is loaded.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple


class EngineFacts(NamedTuple):
    """The facts of an engine that is not loaded.

    ``signs``: it pays from wallets of this machine, so only the service itself runs it, and it
    keeps a payment journal.
    """

    module: str
    signs: bool = False


ENGINES: Final[Mapping[str, EngineFacts]] = {
    "sandbox": EngineFacts("rpcsvc.app_sandbox"),
    "upstream": EngineFacts("rpcsvc.app_upstream"),
    "onchain": EngineFacts("rpcsvc.app_onchain", signs=True),
}
