"""``rpcsvc serve``: runs the service in this process."""

from __future__ import annotations

import asyncio
from typing import Any

from rpcsvc.cli.context import OK, SERVE_FLAGS, Context, Once, UsageError, add_common
from rpcsvc.cli.operator.service import refuse
from rpcsvc.errors import Unavailable
from rpcsvc.logs import configure_logging
from rpcsvc.orders.lease import LeaseLost
from rpcsvc.settlement.onchain.evm.keys import OnchainExtraMissing
from rpcsvc.signing.keys import SigningKeyError
from rpcsvc.store.database import DatabaseInUse, DatabaseUnusable
from rpcsvc.store.schema import UnknownSchema


def add_commands(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("serve", help="run the service")
    add_common(parser)
    for name in SERVE_FLAGS:
        parser.add_argument(f"--{name.replace('_', '-')}", action=Once, metavar=name.upper())
    parser.set_defaults(command=_serve)


def _serve(context: Context) -> int:
    settings = context.settings()
    configure_logging(settings.log.format, settings.log.level)
    refusals = (
        DatabaseInUse, DatabaseUnusable, UnknownSchema, SigningKeyError, OnchainExtraMissing
    )  # fmt: skip
    try:
        asyncio.run(context.serve(settings))
    except refusals as error:
        raise UsageError(str(error)) from error
    except LeaseLost as error:
        return refuse(error.message)
    except Unavailable as error:
        raise UsageError(f"can't start: {error.message}") from error
    except OSError as error:
        where = error.filename or f"{settings.host}:{settings.port}"
        raise UsageError(f"can't serve on {where}: {error.strerror or error}") from error
    return OK
