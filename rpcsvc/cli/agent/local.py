"""Code of operation commands that imports the operations: a call in this process, and the envelope
of a call that got no answer.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from rpcsvc.cli.context import Context, Json
from rpcsvc.cli.opening import in_process
from rpcsvc.client.errors import Unreachable
from rpcsvc.errors import InvalidRequest, ServiceError, Unavailable
from rpcsvc.ids import is_request_id, request_id, system_random
from rpcsvc.logs import configure_logging
from rpcsvc.operations.dispatch import failure
from rpcsvc.operations.inputs import is_session_id
from rpcsvc.operations.models import Result
from rpcsvc.operations.table import OPERATIONS


def call_in_process(
    context: Context, name: str, params: Json, key: Any, session: str | None
) -> Json:
    """Run the service in this process for one call; returns its envelope. Raises as
    ``in_process``.
    """
    settings = context.settings()
    # Log lines would only mix with the answer.
    configure_logging(settings.log.format, "error")
    operation = next(each for each in OPERATIONS if each.name == name)
    call_id = _call_id(context.options.request_id)

    async def call() -> bytes:
        async with context.local(settings) as service:
            try:
                return await service.call(operation, params, call_id, key, session)
            except ServiceError as error:  # raised by overdue work before the call
                return failure(name, error, call_id, Result(settings.network, None, "none"))

    with in_process(settings):
        return dict(json.loads(asyncio.run(call())))


def _call_id(given: str | None) -> str:
    return given if is_request_id(given) else request_id(system_random)


def failed_call(argv: Sequence[str], operation: str, error: BaseException) -> Json:
    """Return the envelope of a call that got no answer."""
    reported = (
        Unavailable(str(error)) if isinstance(error, Unreachable) else InvalidRequest(str(error))
    )
    call_id = _call_id(_option(argv, "--request-id"))
    session = _option(argv, "--session-id")
    data: Json = {"network": None, "sessionId": None, "sessionSource": "none"}
    if session is not None and is_session_id(session):
        data |= {"sessionId": session.lower(), "sessionSource": "request"}
    return dict(json.loads(failure(operation, reported, call_id, data)))


def _option(argv: Sequence[str], name: str) -> str | None:
    """The value of an option on a command line that did not parse."""
    for word, following in pairwise([*argv, ""]):
        if word == name:
            return following
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None
