"""A command for each operation of the table, which remembers its session and order.

``commands.json`` describes the commands: ``make generate`` writes it from the operation table,
because importing the table takes longer than a call. ``<data-dir>/cli-state.json`` keeps session
and order per service: together they are the owner's secret, which no other service may learn.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from rpcsvc import strict_json
from rpcsvc.cli.context import (
    FAILED,
    OK,
    AnswerUnwritten,
    Context,
    Json,
    Once,
    TextOption,
    UsageError,
    add_common,
    add_target,
    complain,
)
from rpcsvc.client.blocking import finished, rpc_calls
from rpcsvc.client.calls import Retries
from rpcsvc.client.errors import Refused, refusal
from rpcsvc.client.sessions import Sessions
from rpcsvc.client.transport import MAYBE_DONE, endpoint_of, find_endpoint
from rpcsvc.errors import InvalidJson
from rpcsvc.terminal import printable

RESTORE: Final = "agent:swap:restore"
COMMANDS_FILE: Final = Path(__file__).parent / "commands.json"
STATE_NAME = "cli-state.json"
KEPT_SERVICES = 20
# The state file's name for the service of the data directory.
HERE = ""

FIELD: Final = "field_"
_RESTORED: Final = "swap.restore"
# The sessions of a secret among which the remembered one is looked for.
_MOST_SESSIONS: Final = 10_000
_ONCE: Final = Retries(attempts=1)
# The defaults of the settings brand.slug and engine.
_SLUG: Final = "service"
_NETWORK: Final = "sandbox"
IDEMPOTENCY_KEY: Final = "idempotency-key"
_DIGITS: Final = re.compile(r"-?[0-9]{1,18}")


class Input(NamedTuple):
    """An input. ``kind`` of its value is ``text``, ``integer`` or ``boolean``."""

    name: str
    option: str
    kind: str
    help: str | None


class Command(NamedTuple):
    """The command of one operation, as the table of operations declares it."""

    operation: str
    name: str
    summary: str
    idempotent: bool
    creates: bool
    sandbox_only: bool
    inputs: tuple[Input, ...]

    def takes(self, name: str) -> bool:
        """Return whether the operation has an input of that name."""
        return any(each.name == name for each in self.inputs)


def commands() -> tuple[Command, ...]:
    """All commands, in the order of the table."""
    return tuple(
        Command(**{**row, "inputs": tuple(Input(**each) for each in row["inputs"])})
        for row in json.loads(COMMANDS_FILE.read_bytes())
    )


def operation_of(name: str | None) -> str:
    """The operation of a command, or ``unknown``."""
    if name == RESTORE:
        return _RESTORED
    return next((each.operation for each in commands() if each.name == name), "unknown")


# --- the state file ----------------------------------------------------------------------------


class BrokenState(UsageError):
    """The state file exists but can't be used."""


@dataclass(frozen=True, slots=True)
class CliState:
    """The state kept for one service between commands."""

    session_id: str | None = None
    order_id: str | None = None


def load_state(data_dir: Path, service: str = HERE) -> CliState:
    """The state kept for a service; empty if there is none. Raises BrokenState."""
    return _load(data_dir).get(service, CliState())


def save_state(data_dir: Path, state: CliState, service: str = HERE) -> None:
    """Replace the state of a service; for other services, the last KEPT_SERVICES are kept.

    The file is replaced atomically. Raises BrokenState and OSError, and then keeps the old one.
    """
    others = {name: kept for name, kept in _load(data_dir).items() if name != service}
    text = json.dumps(_written({**others, service: state}))
    data_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = data_dir / f"{STATE_NAME}.{os.getpid()}"
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(fd, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(data_dir / STATE_NAME)
    except OSError:
        fresh.unlink(missing_ok=True)
        raise


def _load(data_dir: Path) -> dict[str, CliState]:
    path = data_dir / STATE_NAME
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        elsewhere = value.get("elsewhere", {})
        return {HERE: _read(value), **{name: _read(kept) for name, kept in elsewhere.items()}}
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BrokenState(
            f"{path} is not a state file that this version can use. Delete it, or add --stateless."
        ) from error


def _written(states: Mapping[str, CliState]) -> dict[str, Any]:
    elsewhere = {name: asdict(state) for name, state in states.items() if name != HERE}
    kept = dict([*elsewhere.items()][-KEPT_SERVICES:])
    here = asdict(states.get(HERE, CliState()))
    return {**here, "elsewhere": kept} if kept else here


def _read(value: Any) -> CliState:
    state = CliState(value["session_id"], value["order_id"])
    if not all(text is None or _is_plain(text) for text in (state.session_id, state.order_id)):
        raise TypeError("ids are printable ASCII")
    return state


def _is_plain(text: Any) -> bool:
    """Return whether a header can hold the text."""
    return isinstance(text, str) and text.isascii() and text.isprintable()


# --- one call ----------------------------------------------------------------------------------


def run_operation(context: Context) -> int:
    """Call the operation of this command line and print its envelope; returns the exit status.

    Before it prints, raises UsageError, BadUrl, BrokenState, SettingsError and Unreachable; after
    the call, AnswerUnwritten and BrokenPipeError.
    """
    options = context.options
    command: Command = options.called
    service = service_of(context)
    params = read_params(options)
    key = _take_key(options, command, params)
    name = _name_of(context)
    state = CliState() if options.stateless else load_state(service.data_dir, name)
    if state.order_id and command.takes("orderId"):
        params.setdefault("orderId", state.order_id)
    try:
        session = _session(context, service, params, state.session_id)
        envelope = _send(context, service, command.operation, params, key, session)
    except Refused as refused:
        # A search for the session was refused as swap.list.
        envelope = {**refused.envelope, "operation": command.operation}
    try:
        print_envelope(envelope, pretty=options.pretty)
    finally:
        if not options.stateless:
            _remember(service.data_dir, name, state, command, envelope)
    return OK if envelope["ok"] else FAILED


def restore(context: Context) -> int:
    """Print all orders of a secret as one envelope; returns the exit status.

    Raises UsageError, BadUrl, SettingsError and Unreachable; after the calls, AnswerUnwritten and
    BrokenPipeError.
    """
    service = service_of(context)
    sessions = _sessions(context, makes=False)
    last: Json = {}

    async def ask(params: Json) -> Json:
        last.update(_listed(context, service, params))
        return dict(last["data"])

    try:
        found = finished(sessions.search(ask))
    except Refused as refused:
        envelope = {**refused.envelope, "operation": _RESTORED}
        print_envelope(envelope, pretty=context.options.pretty)
        return FAILED
    if not found:
        complain(
            f"rpcsvc: No order of this secret at {sessions.issuer}. Orders made at another address"
            " of the service are found by that address: give --url.\n"
        )
    data = {"network": last["data"].get("network"), "sessionId": None, "sessionSource": "none"}
    restored = {"operation": _RESTORED, "nextActions": [], "data": {**data, "orders": found}}
    print_envelope({**last, **restored}, pretty=context.options.pretty)
    return OK


def _session(
    context: Context, service: CalledService, params: Json, remembered: str | None
) -> str | None:
    """The session for a call that names none: the next one of the secret, else the remembered one.

    A remembered session of the secret saves the search, while the service has an order of it: after
    its store was lost, a later one would be behind a gap. Raises UsageError and Refused.
    """
    if getattr(context.options, "secret_file", None) is None:
        return remembered
    if "sessionId" in params:
        raise UsageError("Give --secret-file or a session id: the secret gives the session.")
    sessions = _sessions(context, makes=True)

    async def ask(params: Json) -> Json:
        return dict(_listed(context, service, params)["data"])

    is_noted = (
        remembered is not None
        and sessions.note_order(remembered, _MOST_SESSIONS)
        and finished(ask({"sessionId": remembered, "limit": 1})).get("orders")
    )
    if not is_noted:
        finished(sessions.search(ask))
    return sessions.take()


def _sessions(context: Context, *, makes: bool) -> Sessions:
    """The sessions of the given secret at the called service. Raises UsageError and BadUrl."""
    url = context.url()
    issuer = endpoint_of(url).url if url else context.settings().effective_site_url
    from rpcsvc.cli.agent.secret_file import sessions_at  # noqa: PLC0415 - few calls have a secret

    return sessions_at(context.options.secret_file, issuer, makes=makes)


def _listed(context: Context, service: CalledService, params: Json) -> Json:
    """The envelope of a page of a session's orders. Waits for limits. Raises Refused."""
    return _send(context, service, "swap.list", params, retries=Retries())


# --- inputs ----------------------------------------------------------------------------------


def read_params(options: argparse.Namespace) -> Json:
    """The inputs: ``--params``, overridden by single options. Raises UsageError."""
    params = _all_params(options.params)
    given = {
        name.removeprefix(FIELD): value
        for name, value in vars(options).items()
        if name.startswith(FIELD) and value is not None
    }
    order = getattr(options, "order", None)
    if order and given.setdefault("orderId", order) != order:
        raise UsageError(f"ORDER is {order} and --order-id is {given['orderId']}: give one.")
    return params | given


def _all_params(text: str | None) -> Json:
    if text is None:
        return {}
    # Raw bytes: text that is not UTF-8 must be refused, not guessed at.
    source = sys.stdin.buffer.read() if text == "-" else os.fsencode(text)
    try:
        params = strict_json.loads(source)
    except InvalidJson as error:
        raise UsageError(f"--params: {error.message}") from error
    if not isinstance(params, dict):
        raise UsageError('--params must be a JSON object, such as {"direction": "x2u"}.')
    return params


def _take_key(options: argparse.Namespace, command: Command, params: Json) -> Any:
    """The idempotency key; ``--params`` may hold it as JSON-RPC params do.

    Raises UsageError for null.
    """
    if not command.idempotent:
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


def _name_of(context: Context) -> str:
    """The name under which the state of the called service is kept. Raises BadUrl."""
    url = context.url()
    return endpoint_of(url).url if url else HERE


def _remember(
    data_dir: Path, name: str, before: CliState, command: Command, envelope: Json
) -> None:
    """Remember the new order and its session. The answer is out, so a failure only warns."""
    if not command.creates:
        return
    match envelope:
        case {"ok": True, "data": {"order": {"orderId": str(order_id)}, "sessionId": str(session)}}:
            after = CliState(session, order_id)
        case _:  # do not carry any other answer over to the next command
            return
    try:
        if after != before:
            save_state(data_dir, after, name)
    except (OSError, BrokenState) as error:
        complain(
            "rpcsvc: the order was created, but its state could not be saved in"
            f" {data_dir}: {error}\n"
        )


# --- the call --------------------------------------------------------------------------------


class CalledService(NamedTuple):
    """The settings about the called service.

    ``network`` is None for a URL: the service there may be configured differently.
    """

    data_dir: Path
    slug: str
    network: str | None
    token: str | None


def service_of(context: Context) -> CalledService:
    """The facts about the called service, without loading the settings if they are the defaults.

    Raises SettingsError.
    """
    data_dir = context.data_dir_alone()
    if data_dir is not None:
        network = None if context.url() else _NETWORK
        return CalledService(data_dir, _SLUG, network, context.given_token())
    settings = context.settings()
    network = None if context.url() else settings.network
    return CalledService(settings.data_dir, settings.brand.slug, network, context.token(settings))


def _send(
    context: Context,
    service: CalledService,
    operation: str,
    params: Json,
    key: Any = None,
    session: str | None = None,
    retries: Retries = _ONCE,
) -> Json:
    """Call the endpoint, or run the operation in this process if there is none; returns the
    envelope. Raises Refused.

    ``session`` is used for a call that names none.
    """
    endpoint = find_endpoint(context.url(), service.data_dir)
    if endpoint is None:
        from rpcsvc.cli.agent.local import call_in_process  # noqa: PLC0415 - the whole service

        envelope = call_in_process(context, operation, params, key, session)
        if not envelope["ok"]:
            raise refusal(envelope, None)
        return envelope
    calls = rpc_calls(
        endpoint,
        service.token,
        service.slug,
        network=service.network,
        local_session=session,
        retries=retries,
    )
    return finished(calls.call(operation, params, key=key, request_id=context.options.request_id))


def print_envelope(envelope: Json, *, pretty: bool | None) -> None:
    """Write the envelope in UTF-8, whatever the terminal's encoding: it is for a program.

    Raises AnswerUnwritten, and BrokenPipeError if the reader is gone.
    """
    wanted = sys.stdout.isatty() if pretty is None else pretty
    text = json.dumps(envelope, indent=2 if wanted else None, ensure_ascii=False) + "\n"
    try:
        sys.stdout.buffer.write(printable(text).encode())
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        raise AnswerUnwritten(
            f"The answer can't be written to stdout: {error.strerror}. {MAYBE_DONE}"
        ) from error


def add_commands(parsers: Any) -> None:
    """Add the commands to the parser."""
    for command in commands():
        _add_command(parsers, command)
    text = "Find all orders that were made with a secret."
    parser = parsers.add_parser(RESTORE, help=text, description=text)
    add_common(parser)
    group = parser.add_argument_group("the call")
    _add_secret(group, "the secret that the orders were made with", required=True)
    _add_answer_options(group)
    parser.set_defaults(command=restore)


def _add_command(parsers: Any, command: Command) -> None:
    parser = parsers.add_parser(command.name, help=command.summary, description=command.summary)
    add_common(parser)
    fields = parser.add_argument_group("inputs")
    for each in command.inputs:
        _add_input(fields, each)
    fields.add_argument(
        "--params", action=Once, metavar="JSON|-", help="all inputs as one JSON object"
    )
    if command.sandbox_only:
        parser.add_argument(
            "order", action=TextOption, nargs="?", metavar="ORDER", help="the same as --order-id"
        )
    _add_call_options(parser, command)
    parser.set_defaults(command=run_operation, called=command)


def _add_input(group: Any, each: Input) -> None:
    extra: Json = {"dest": FIELD + each.name, "help": each.help, "metavar": "VALUE"}
    if each.kind == "boolean":
        extra |= {"nargs": "?", "const": True, "type": _boolean, "metavar": "true|false"}
    elif each.kind == "integer":
        extra["type"] = _integer
    group.add_argument(each.option, action=TextOption, **extra)


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError("must be true or false")
    return text == "true"


def _integer(text: str) -> int:
    if not _DIGITS.fullmatch(text):
        raise argparse.ArgumentTypeError(f"must be a whole number such as 60, not {text!r}")
    return int(text)


def _add_call_options(parser: argparse.ArgumentParser, command: Command) -> None:
    group = parser.add_argument_group("the call")
    group.add_argument(
        "--stateless", action="store_true", help="neither read nor write local state"
    )
    if command.idempotent:
        group.add_argument(
            "--idempotency-key", action=TextOption, metavar="KEY", help="makes a retry safe"
        )
        _add_secret(group, "derive the session from the secret here; made if it is missing")
    _add_answer_options(group)


def _add_secret(group: Any, text: str, **extra: Any) -> None:
    group.add_argument("--secret-file", action=Once, type=Path, metavar="FILE", help=text, **extra)


def _add_answer_options(group: Any) -> None:
    group.add_argument("--request-id", action=TextOption, metavar="ID", help="echoed in the answer")
    add_target(group)
    shape = group.add_mutually_exclusive_group()
    shape.add_argument("--pretty", action="store_true", default=None, help="indent the answer")
    shape.add_argument("--compact", dest="pretty", action="store_false", help="one line")
