"""``rpcsvc serve``, ``config check`` and ``health``: run the service, and check it."""

from __future__ import annotations

import asyncio
from typing import Any

from rpcsvc import engine_context
from rpcsvc.cli.context import (
    FAILED,
    OK,
    SERVE_FLAGS,
    Context,
    Once,
    UsageError,
    add_command,
    add_common,
    add_target,
    say,
)
from rpcsvc.cli.operator.service import refuse
from rpcsvc.client.blocking import BlockingTransport, finished
from rpcsvc.client.transport import ServiceRequest, endpoint_of, headers_of
from rpcsvc.errors import Unavailable
from rpcsvc.health_probe import PATHS, ask
from rpcsvc.logs import configure_logging
from rpcsvc.operations.clients import require_scopes
from rpcsvc.operations.table import BFF_OPERATIONS, OPERATIONS
from rpcsvc.settings import (
    check_bind,
    render_config,
)
from rpcsvc.settings_clients import credentials
from rpcsvc.settings_onchain import read_chains
from rpcsvc.settlement.onchain.evm.keys import OnchainExtraMissing
from rpcsvc.signing import SigningKeyError
from rpcsvc.store.database import DatabaseInUse, DatabaseUnusable
from rpcsvc.store.leases import LeaseLost
from rpcsvc.store.schema import UnknownSchema


def add_commands(commands: Any) -> None:
    """Add the commands to the parser."""
    _add_serve(commands)
    _add_config(commands)
    _add_health(commands)


def _add_serve(commands: Any) -> None:
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
        asyncio.run(context.serve(settings, context.settings))
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


def _add_config(commands: Any) -> None:
    parser = commands.add_parser("config", help="check the configuration")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    text = "print every setting and its source, and check them as a start does"
    add_command(actions, "check", text, check_config)


def check_config(context: Context) -> int:
    """Run the command. Raises SettingsError after everything is printed."""
    loaded = context.loaded()
    say(render_config(loaded).rstrip("\n") + "\n")
    settings = loaded.settings
    check_bind(settings)
    engine_context.check(settings, read_chains(settings.chains_file))
    require_scopes(credentials(settings.clients), (*OPERATIONS, *BFF_OPERATIONS))
    return OK


def _add_health(commands: Any) -> None:
    parser = commands.add_parser(
        "health",
        help="show the health of a running service",
        description="Exit status: 0 healthy, 1 unhealthy, 3 no service answers.",
    )
    add_common(parser)
    add_target(parser)
    parser.add_argument(
        "--check", choices=tuple(PATHS), default="health", help="which health endpoint (health)"
    )
    parser.set_defaults(command=_health)


def _health(context: Context) -> int:
    """Print the answer. Raises Unreachable and BadUrl."""
    url = context.url()
    if url is None:
        return ask(context.settings().data_dir, PATHS[context.options.check])
    transport = BlockingTransport(endpoint_of(url))
    headers = headers_of(context.given_token())
    reply = finished(
        transport.exchange(ServiceRequest("GET", PATHS[context.options.check], headers=headers))
    )
    say(reply.body.decode("utf-8", "replace") + "\n")
    return OK if reply.status == 200 else FAILED
