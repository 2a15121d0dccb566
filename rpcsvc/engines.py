"""The settlement engines by name: the module of each, and the facts known without loading it.

Modules are named, not imported: engine_context.py loads the one that runs.
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
    "sandbox": EngineFacts("rpcsvc.settlement.sandbox.wiring"),
    "upstream": EngineFacts("rpcsvc.settlement.upstream.wiring"),
    "onchain": EngineFacts("rpcsvc.settlement.onchain.wiring", signs=True),
}
