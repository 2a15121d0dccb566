"""``rpcsvc health``: what a running service says of itself, for people and for remote probes.

It only asks, and never runs the service. Over the socket it is health_probe.py that asks.
"""

from __future__ import annotations

import http.client
import sys
from typing import Any

from rpcsvc.cli.client import Unreachable, endpoint_of, read_response
from rpcsvc.cli.context import FAILED, OK, Context
from rpcsvc.health_probe import PATHS, ask, printable


def add_health(commands: Any, add_common: Any, add_target: Any) -> None:
    """Hang the command into the parser."""
    parser = commands.add_parser(
        "health",
        help="ask a running service how it is",
        description="Exit status: 0 well, 1 not, 3 no service answers.",
    )
    add_common(parser)
    add_target(parser)
    parser.add_argument(
        "--check", choices=tuple(PATHS), default="health", help="which question (health)"
    )
    parser.set_defaults(command=_health)


def _health(context: Context) -> int:
    """Print the answer. Raises Unreachable and BadUrl."""
    url = context.url()
    if url is None:
        return ask(context.settings().data_dir, PATHS[context.options.check])
    endpoint = endpoint_of(url)
    connection = endpoint.connection()
    try:
        path = endpoint.path.removesuffix("/rpc") + PATHS[context.options.check]
        token = context.given_token()
        connection.request("GET", path, headers={"x-agent-rpc-token": token} if token else {})
        status, body = read_response(connection)
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"No service answers at {endpoint.name}: {error}.") from error
    finally:
        connection.close()
    sys.stdout.write(printable(body.decode("utf-8", "replace")) + "\n")
    return OK if status == 200 else FAILED
