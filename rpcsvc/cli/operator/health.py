"""``rpcsvc health``: what a running service says of itself, for probes and for people.

Only asks: unlike the operations it never runs the service in its own process. A probe runs it every
few seconds, so it imports as little as it can.
What does not live here: the checks (health.py).
"""

from __future__ import annotations

import http.client
import sys
from typing import Any, Final

from rpcsvc.cli.client import (
    Unreachable,
    find_endpoint,
    printable,
    read_response,
)
from rpcsvc.cli.context import FAILED, OK, Context

_PATHS: Final = {"health": "/health", "ready": "/readyz", "live": "/livez"}


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
        "--check", choices=tuple(_PATHS), default="health", help="which question (health)"
    )
    parser.set_defaults(command=_health)


def _health(context: Context) -> int:
    """Print the answer. Raises Unreachable and BadUrl."""
    data_dir = context.data_dir()
    endpoint = find_endpoint(context.url(), data_dir)
    if endpoint is None:
        raise Unreachable(
            f"No service runs on the data directory {data_dir}. Start one, or give --url."
        )
    connection = endpoint.connection()
    try:
        path = endpoint.path.removesuffix("/rpc") + _PATHS[context.options.check]
        token = context.given_token() if endpoint.takes_token else None
        connection.request("GET", path, headers={"x-agent-rpc-token": token} if token else {})
        status, body = read_response(connection)
    except (OSError, http.client.HTTPException) as error:
        raise Unreachable(f"No service answers at {endpoint.name}: {error}.") from error
    finally:
        connection.close()
    sys.stdout.write(printable(body.decode("utf-8", "replace")) + "\n")
    return OK if status == 200 else FAILED
