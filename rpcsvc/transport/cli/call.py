"""Carrying out one operation from the command line: inputs, memory, the call, the answer.

What does not live here: which options there are (main.py), how a call reaches a server
(client.py), the file that remembers (state.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple

from rpcsvc.errors import InvalidJson, ServiceError
from rpcsvc.ids import request_id, system_random
from rpcsvc.operations.envelope import failure
from rpcsvc.operations.table import Operation
from rpcsvc.settings import Settings
from rpcsvc.transport import strict_json
from rpcsvc.transport.cli.client import (
    MAYBE_DONE,
    Endpoint,
    call_rpc,
    find_endpoint,
    service_at,
)
from rpcsvc.transport.cli.context import (
    FAILED,
    OK,
    AnswerUnwritten,
    Context,
    Json,
    UsageError,
    in_process,
)
from rpcsvc.transport.cli.state import HERE, BrokenState, CliState, load_state, save_state

FIELD: Final = "field_"
IDEMPOTENCY_KEY: Final = "idempotency-key"
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def run_operation(context: Context) -> int:
    """Call the operation of this command line and print its envelope; the exit status.

    Raises UsageError, BadUrl, BrokenState, SettingsError and Unreachable: stdout is empty then.
    Raises AnswerUnwritten and BrokenPipeError after the call.
    """
    options, operation = context.options, context.options.operation
    settings = context.settings()
    params = read_params(options)
    key = _take_key(options, operation, params)
    memory = _Memory(settings.data_dir, _service(context))
    state = CliState() if options.stateless else memory.load()
    is_local = _fill_in(operation, params, state, key)
    if not options.stateless:
        state = _note_key(memory, state, key, params)
    envelope, is_bare = _ask(context, settings, params, key, is_local=is_local)
    keys = state.with_key(key, None).keys if is_bare else state.keys
    try:
        _print(envelope, pretty=options.pretty)
    finally:
        if not options.stateless:
            _remember(memory, state, keys, operation, envelope)
    return OK if envelope["ok"] else FAILED


# --- inputs ----------------------------------------------------------------------------------


def wire_names(operation: Operation) -> set[str]:
    """The names of an operation's inputs."""
    return {info.alias or name for name, info in operation.params.model_fields.items()}


def read_params(options: argparse.Namespace) -> Json:
    """The inputs: ``--params``, with single options on top. Raises UsageError."""
    params = _whole_params(options.params)
    given = {
        name.removeprefix(FIELD): value
        for name, value in vars(options).items()
        if name.startswith(FIELD) and value is not None
    }
    order = getattr(options, "order", None)
    if order and given.setdefault("orderId", order) != order:
        raise UsageError(f"ORDER is {order} and --order-id is {given['orderId']}: give one.")
    return params | given


def _whole_params(text: str | None) -> Json:
    if text is None:
        return {}
    # Bytes as they came: what is not UTF-8 has to be refused, not guessed at.
    source = sys.stdin.buffer.read() if text == "-" else os.fsencode(text)
    try:
        params = strict_json.loads(source)
    except InvalidJson as error:
        raise UsageError(f"--params: {error.message}") from error
    if not isinstance(params, dict):
        raise UsageError('--params must be a JSON object, such as {"direction": "x2u"}.')
    return params


def _take_key(options: argparse.Namespace, operation: Operation, params: Json) -> Any:
    """The idempotency key; in ``--params`` it has the place that it has over JSON-RPC.

    Raises UsageError for null.
    """
    if not operation.idempotent:
        return None
    given = options.idempotency_key
    if IDEMPOTENCY_KEY not in params:
        return given
    in_params = params.pop(IDEMPOTENCY_KEY)
    if in_params is None and given is None:
        raise UsageError(
            f"--params: {IDEMPOTENCY_KEY} is null, and no retry would find such an order. Give a"
            " string, such as a UUID, or leave it out."
        )
    return in_params if given is None else given


# --- memory ----------------------------------------------------------------------------------


class _Memory(NamedTuple):
    """Where is kept what is remembered of the service that is called."""

    data_dir: Path
    service: str

    def load(self) -> CliState:
        """Raises BrokenState."""
        return load_state(self.data_dir, self.service)

    def save(self, state: CliState) -> None:
        """Raises BrokenState and OSError."""
        save_state(self.data_dir, state, self.service)


def _service(context: Context) -> str:
    """The service that is called, as it is remembered. Raises BadUrl."""
    url = context.url()
    return service_at(url) if url else HERE


def _fill_in(operation: Operation, params: Json, state: CliState, key: Any) -> bool:
    """Put what is remembered where nothing was given; True when that was the session."""
    known = wire_names(operation)
    if "orderId" in known and state.order_id:
        params.setdefault("orderId", state.order_id)
    session_id = state.session_for(key if isinstance(key, str) else None)
    if "sessionId" not in known or "sessionId" in params or not session_id:
        return False
    params["sessionId"] = session_id
    return True


def _note_key(memory: _Memory, state: CliState, key: Any, params: Json) -> CliState:
    """Write down what goes out with a key before it goes out: its retry must be the same call."""
    session_id = params.get("sessionId")
    if not isinstance(key, str) or not (session_id is None or isinstance(session_id, str)):
        return state
    noted = state.with_key(key, session_id)
    try:
        if noted != state:
            memory.save(noted)
    except (OSError, UnicodeError) as error:
        raise UsageError(
            f"The local state in {memory.data_dir} can't be written: {error}. Nothing was sent."
            " Give another --data-dir, or add --stateless."
        ) from error
    return noted


def _remember(
    memory: _Memory,
    before: CliState,
    keys: Mapping[str, str | None],
    operation: Operation,
    envelope: Json,
) -> None:
    """Keep the order that was made, its session, and what went with which key.

    The answer is out: only warn if that fails.
    """
    if not operation.creates:
        return
    match envelope:
        case {"ok": True, "data": {"order": {"orderId": str(order_id)}, "sessionId": str(session)}}:
            after = CliState(session, order_id, keys)
        case _:  # whatever else a service says here is not for the next command
            return
    try:
        if after != before:
            memory.save(after)
    except (OSError, BrokenState) as error:
        where = memory.data_dir
        sys.stderr.write(f"rpcsvc: the order is made, but not remembered in {where}: {error}\n")


# --- the call --------------------------------------------------------------------------------


def _ask(
    context: Context, settings: Settings, params: Json, key: Any, *, is_local: bool
) -> tuple[Json, bool]:
    """The envelope, and whether the remembered session was left out of the call after all.

    ``is_local``: the session in ``params`` was filled in, not given.
    """
    endpoint = find_endpoint(context.url(), settings.data_dir)
    send = partial(_send, context, settings, endpoint, key)
    envelope = send(params)
    if is_local and isinstance(key, str) and _has_key_with_another_session(envelope):
        # The service there has an answer for this key: without the session it gives that one, or
        # refuses again. It can't make a second order.
        return send({name: value for name, value in params.items() if name != "sessionId"}), True
    if is_local and envelope["data"].get("sessionSource") == "request":
        envelope["data"]["sessionSource"] = "local"
    return envelope, False


def _has_key_with_another_session(envelope: Json) -> bool:
    """Whether a key's first call had another session, or none: it came over another transport, or
    without memory.
    """
    match envelope:
        case {
            "ok": False,
            "error": {"code": "idempotency_conflict", "details": {"fields": [*fields]}},
        }:
            return "sessionId" in fields
    return False


def _send(
    context: Context, settings: Settings, endpoint: Endpoint | None, key: Any, params: Json
) -> Json:
    """The envelope of one call: to the endpoint, or in this process where there is none."""
    options, operation = context.options, context.options.operation
    token = context.token(settings)
    if endpoint is None:
        return _call_in_process(context, settings, params, key)
    message = params if key is None else {**params, IDEMPOTENCY_KEY: key}
    method = f"{settings.brand.slug}.{operation.name}"
    # What a URL leads to may be configured otherwise than this command is.
    network = None if context.url() else _network_of(settings)
    return call_rpc(
        endpoint, method, message, request_id=options.request_id, token=token, network=network
    )


def _network_of(settings: Settings) -> str:
    """What a service of these settings has as ``data.network`` (app.py, app_onchain.py)."""
    if settings.engine == "sandbox":
        return "sandbox"
    side = settings.upstream if settings.engine == "upstream" else settings.onchain
    return side.monero_network


def _call_in_process(context: Context, settings: Settings, params: Json, key: Any) -> Json:
    from rpcsvc.logs import configure_logging  # noqa: PLC0415 - a server does its own logging

    configure_logging(settings.log.format, "warning")
    operation: Operation = context.options.operation
    given = context.options.request_id
    call_id = given if given and _REQUEST_ID.fullmatch(given) else request_id(system_random)

    async def call() -> bytes:
        async with context.local(settings) as service:
            try:
                return await service.call(operation, params, call_id, key)
            except ServiceError as error:  # settling what was due before the call
                network = _network_of(settings)
                data = {"network": network, "sessionId": None, "sessionSource": "none"}
                return failure(operation.name, error, call_id, data)

    with in_process(settings):
        return dict(json.loads(asyncio.run(call())))


def _print(envelope: Json, *, pretty: bool | None) -> None:
    """Write the envelope in UTF-8, whatever the terminal's encoding: it is for a program.

    Raises AnswerUnwritten, and BrokenPipeError where nobody reads it any more.
    """
    wanted = sys.stdout.isatty() if pretty is None else pretty
    text = json.dumps(envelope, indent=2 if wanted else None, ensure_ascii=False) + "\n"
    try:
        # Half a surrogate pair becomes \udXXX, which is also its escape in JSON.
        sys.stdout.buffer.write(text.encode("utf-8", "backslashreplace"))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise AnswerUnwritten(
            f"The answer can't be written to stdout: {error.strerror}. {MAYBE_DONE}"
        ) from error
