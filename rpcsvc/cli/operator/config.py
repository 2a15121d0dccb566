"""``rpcsvc config check``: prints every setting, and refuses what a start would refuse of them.

It asks no node, wallet or upstream: ``rpcsvc onchain init`` and ``rpcsvc health`` do.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

from rpcsvc.cli.context import OK, Context
from rpcsvc.engines import engine_of
from rpcsvc.settings import (
    check_bind,
    render_config,
)
from rpcsvc.settings_onchain import read_chains

Common = Callable[[argparse.ArgumentParser], None]


def add_config(commands: Any, common: Common) -> None:
    """Hang the command into the tree; ``common`` adds the shared options."""
    parser = commands.add_parser("config", help="look at the configuration")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    text = "print every setting and where it came from, and check them as a start does"
    check = actions.add_parser("check", help=text, description=text)
    common(check)
    check.set_defaults(command=check_config)


def check_config(context: Context) -> int:
    """The command. Raises SettingsError once everything is printed."""
    loaded = context.loaded()
    sys.stdout.write(render_config(loaded).rstrip("\n") + "\n")
    settings = loaded.settings
    check_bind(settings)
    engine_of(settings.engine).check(settings, read_chains(settings.chains_file))
    return OK
