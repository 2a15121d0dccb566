"""Admin calls: the operator's commands ask the running service over its UNIX socket."""

from __future__ import annotations

from typing import Any, Final

from rpcsvc.cli.client import Unreachable, call_method, socket_endpoint
from rpcsvc.cli.context import Context, Json, UsageError
from rpcsvc.settings import Settings

# A command may wait for nodes, and for a wallet that reads blocks first.
SECONDS: Final = 600
_OF_THE_CALLER: Final = frozenset({"invalid_input", "missing_input"})


def is_running(settings: Settings) -> bool:
    """Whether a service answers on the data directory."""
    return socket_endpoint(settings.data_dir) is not None


def ask_service(settings: Settings, method: str, params: Json) -> Json:
    """The answer of an admin method. Raises UsageError for a wrong input, else Unreachable."""
    endpoint = socket_endpoint(settings.data_dir)
    if endpoint is None:
        raise Unreachable(
            f"No service runs on the data directory {settings.data_dir}. This command asks the"
            " running service; start it with rpcsvc serve."
        )
    answer = call_method(endpoint, f"admin.{method}", params, seconds=SECONDS)
    failed: Any = answer.get("error")
    if failed is None:
        return answer
    if failed["code"] in _OF_THE_CALLER:
        raise UsageError(failed["message"])
    raise Unreachable(failed["message"])


def ask(context: Context, method: str, **params: Any) -> Json:
    """The answer of an admin method of the service of a command. Raises as ask_service."""
    return ask_service(context.settings(), method, params)
