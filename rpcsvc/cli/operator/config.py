"""``rpcsvc config check``: prints every setting, and refuses what a start would refuse of them.

Nobody is asked: whether a node, a wallet or an upstream is there is for ``rpcsvc onchain init`` and
``rpcsvc health``.
"""

from __future__ import annotations

import sys

from rpcsvc.cli.context import OK, Context


def check_config(context: Context) -> int:
    """The command. Raises SettingsError once everything is printed."""
    from rpcsvc.chains_file import read_chains  # noqa: PLC0415 - help needs none of it
    from rpcsvc.engines import engine_of  # noqa: PLC0415
    from rpcsvc.settings import (  # noqa: PLC0415
        check_bind,
        check_integrators,
        render_config,
    )

    loaded = context.loaded()
    sys.stdout.write(render_config(loaded).rstrip("\n") + "\n")
    settings = loaded.settings
    check_bind(settings)
    check_integrators(settings)
    engine_of(settings.engine).check(settings, read_chains(settings.chains_file))
    return OK
