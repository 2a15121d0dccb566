"""``rpcsvc config check``: prints every setting, and refuses what a start would refuse of them.

Nobody is asked: whether a node, a wallet or an upstream is there is for ``rpcsvc onchain init`` and
``rpcsvc health``. What does not live here: what a setting may hold (settings.py), what is made of
them (app.py and the wiring of each engine).
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from rpcsvc.cli.context import OK, Context

if TYPE_CHECKING:
    from rpcsvc.domain.chains import ChainRegistry
    from rpcsvc.settings import Settings


def check_config(context: Context) -> int:
    """The command. Raises SettingsError once everything is printed."""
    from rpcsvc.settings import (  # noqa: PLC0415 - help needs none of it
        check_bind,
        check_integrators,
        render_config,
    )

    loaded = context.loaded()
    sys.stdout.write(render_config(loaded).rstrip("\n") + "\n")
    settings = loaded.settings
    check_bind(settings)
    check_integrators(settings)
    if settings.chains_file is not None:
        _chains(settings)
    if settings.engine == "upstream":
        _check_upstream(settings)
    if settings.engine == "onchain":
        _check_onchain(settings)
    return OK


def _chains(settings: Settings) -> ChainRegistry:
    from rpcsvc.chains_file import read_chains  # noqa: PLC0415 - not where it is the usual one

    return read_chains(settings.chains_file)


def _check_upstream(settings: Settings) -> None:
    from rpcsvc.settlement.upstream.wiring import client_options  # noqa: PLC0415

    client_options(settings.upstream)


def _check_onchain(settings: Settings) -> None:
    from rpcsvc.clock import SystemClock  # noqa: PLC0415
    from rpcsvc.rates.sources import rate_source  # noqa: PLC0415
    from rpcsvc.settlement.onchain import wiring  # noqa: PLC0415

    wiring.monero_options(settings.onchain)
    wiring.monero_clients(settings.onchain)
    served = wiring.served_chains(settings.onchain, _chains(settings))
    wiring.evm_nodes(settings.onchain, served)
    rate_source(settings.rates, SystemClock())
