"""The command line: one command per operation (spec 1), and those that run the service.

stdout holds exactly one JSON envelope; everything else goes to stderr. Exit status: 0 ok,
1 ``ok: false``, 2 usage error, 3 service not reachable.
What does not live here: where a call goes (cli_client.py), what is remembered (cli_state.py).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import secrets
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rpcsvc import __version__
from rpcsvc.operations.local import LocalService
from rpcsvc.operations.table import OPERATIONS, Operation
from rpcsvc.settings import Settings, SettingsError, load_settings
from rpcsvc.transport import cli_client
from rpcsvc.transport.cli_state import BrokenState, CliState, load_state, save_state

OK, FAILED, USAGE, UNREACHABLE = 0, 1, 2, 3

Serve = Callable[[Settings], Coroutine[Any, Any, None]]
Local = Callable[[Settings], AbstractAsyncContextManager[LocalService]]
Json = dict[str, Any]

_SERVE_FLAGS: Final = ("host", "port", "engine", "tls_cert", "tls_key")
_REMEMBERED: Final = {"sessionId": "session_id", "orderId": "order_id"}


class UsageError(Exception):
    """The command line can't be carried out as it stands."""


@dataclass(frozen=True, slots=True)
class Context:
    """What every command gets."""

    options: argparse.Namespace
    environ: Mapping[str, str]
    serve: Serve
    local: Local

    def settings(self) -> Settings:
        """The settings with this command's flags on top. Raises SettingsError."""
        flags = {name: getattr(self.options, name, None) for name in (*_SERVE_FLAGS, "data_dir")}
        return load_settings(
            config_file=self.options.config, environ=self.environ, flags=flags
        ).settings


def run(argv: Sequence[str], environ: Mapping[str, str], *, serve: Serve, local: Local) -> int:
    """Carry out one command line; returns the exit status."""
    options = build_parser().parse_args(argv)
    try:
        return int(options.command(Context(options, environ, serve, local)))
    except (UsageError, BrokenState, SettingsError) as error:
        sys.stderr.write(f"rpcsvc: {error}\n")
        return USAGE
    except cli_client.Unreachable as error:
        sys.stderr.write(f"rpcsvc: {error}\n")
        return UNREACHABLE


# --- the parser ------------------------------------------------------------------------------


def build_parser() -> argparse.ArgumentParser:
    """The whole command tree, operations included."""
    parser = argparse.ArgumentParser(
        prog="rpcsvc", description="A self-hosted service that swaps XMR and USDC."
    )
    parser.add_argument("--version", action="version", version=f"rpcsvc {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_config(commands)
    _add_db(commands)
    _add_demo(commands)
    for operation in OPERATIONS:
        _add_operation(commands, operation)
    return parser


def _common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file with settings")
    parser.add_argument("--data-dir", metavar="DIR", help="where the service keeps its data")


def _add_serve(commands: Any) -> None:
    parser = commands.add_parser("serve", help="run the service")
    _common(parser)
    for name in _SERVE_FLAGS:
        parser.add_argument(f"--{name.replace('_', '-')}", metavar=name.upper())
    parser.set_defaults(command=_serve)


def _add_config(commands: Any) -> None:
    parser = commands.add_parser("config", help="look at the configuration")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    check = actions.add_parser("check", help="print every setting and where it came from")
    _common(check)
    check.set_defaults(command=_config_check)


def _add_db(commands: Any) -> None:
    parser = commands.add_parser("db", help="look after the database")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    check = actions.add_parser("check", help="check the file and the books")
    backup = actions.add_parser("backup", help="copy the database while the service runs")
    backup.add_argument("destination", type=Path, metavar="DEST")
    for action, command in ((check, _db_check), (backup, _db_backup)):
        _common(action)
        action.set_defaults(command=command)


def _add_demo(commands: Any) -> None:
    parser = commands.add_parser("demo", help="run a whole swap each way on the sandbox")
    _common(parser)
    parser.set_defaults(command=_demo)


def _add_operation(commands: Any, operation: Operation) -> None:
    parser = commands.add_parser(
        operation.command, help=operation.summary, description=operation.summary
    )
    _common(parser)
    fields = parser.add_argument_group("inputs")
    for name, info in operation.params.model_fields.items():
        _add_field(fields, info.alias or name, info.annotation, info.description)
    fields.add_argument("--params", metavar="JSON|-", help="all inputs as one JSON object")
    if operation.sandbox_only:
        parser.add_argument("order", nargs="?", metavar="ORDER", help="the same as --order-id")
    _add_call_options(parser, operation)
    parser.set_defaults(command=_call, operation=operation)


def _add_field(group: Any, wire_name: str, annotation: Any, description: str | None) -> None:
    flag = "--" + re.sub(r"([A-Z])", r"-\1", wire_name).lower()
    text = str(annotation)
    extra: Json = {"dest": f"field_{wire_name}", "help": description, "metavar": "VALUE"}
    if "bool" in text:
        extra |= {"nargs": "?", "const": True, "type": _boolean, "metavar": "true|false"}
    elif "int" in text and "str" not in text:
        extra["type"] = int
    group.add_argument(flag, **extra)


def _boolean(text: str) -> bool:
    if text not in ("true", "false"):
        raise argparse.ArgumentTypeError("must be true or false")
    return text == "true"


def _add_call_options(parser: argparse.ArgumentParser, operation: Operation) -> None:
    group = parser.add_argument_group("the call")
    group.add_argument("--request-id", metavar="ID", help="echoed in the answer")
    group.add_argument(
        "--stateless", action="store_true", help="neither read nor write local state"
    )
    group.add_argument("--url", help="the service's root URL (RPCSVC_URL)")
    group.add_argument("--token", help="for /rpc (AGENT_RPC_TOKEN)")
    if operation.idempotent:
        group.add_argument("--idempotency-key", metavar="KEY", help="makes a retry safe")
    shape = group.add_mutually_exclusive_group()
    shape.add_argument("--pretty", action="store_true", default=None, help="indent the answer")
    shape.add_argument("--compact", dest="pretty", action="store_false", help="one line")


# --- commands --------------------------------------------------------------------------------


def _serve(context: Context) -> int:
    from rpcsvc.logs import configure_logging  # noqa: PLC0415 - only this command logs
    from rpcsvc.store.sqlite import DataDirInUse  # noqa: PLC0415

    settings = context.settings()
    configure_logging(settings.log.format, settings.log.level)
    try:
        asyncio.run(context.serve(settings))
    except DataDirInUse as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"can't serve on {settings.host}:{settings.port}: {error}") from error
    return OK


def _config_check(context: Context) -> int:
    from rpcsvc.settings import check_bind, render_config  # noqa: PLC0415

    flags = {"data_dir": context.options.data_dir}
    loaded = load_settings(config_file=context.options.config, environ=context.environ, flags=flags)
    sys.stdout.write(render_config(loaded).rstrip("\n") + "\n")
    check_bind(loaded.settings)
    return OK


def _db_check(context: Context) -> int:
    from rpcsvc.store.maintenance import check_database  # noqa: PLC0415

    problems = check_database(context.settings().data_dir)
    for problem in problems:
        sys.stdout.write(f"{problem}\n")
    sys.stdout.write(f"{len(problems)} problems\n" if problems else "ok\n")
    return FAILED if problems else OK


def _db_backup(context: Context) -> int:
    from rpcsvc.store.maintenance import BackupFailed, backup_database  # noqa: PLC0415

    try:
        backup_database(context.settings().data_dir, context.options.destination)
    except BackupFailed as error:
        raise UsageError(str(error)) from error
    sys.stdout.write(f"{context.options.destination}\n")
    return OK


def _demo(context: Context) -> int:
    from rpcsvc.transport.demo import run_demo  # noqa: PLC0415

    return OK if run_demo(context.settings(), context.local, context.options.data_dir) else FAILED


# --- calling an operation --------------------------------------------------------------------


def _call(context: Context) -> int:
    options, operation = context.options, context.options.operation
    settings = context.settings()
    params = _params(options)
    state = CliState() if options.stateless else load_state(settings.data_dir)
    filled = _fill_in(operation, params, state)
    envelope = _send(context, settings, operation, params)
    if "sessionId" in filled and envelope["data"].get("sessionSource") == "request":
        envelope["data"]["sessionSource"] = "local"
    if not options.stateless:
        _remember(settings.data_dir, state, envelope)
    _print(envelope, pretty=options.pretty)
    return OK if envelope["ok"] else FAILED


def _params(options: argparse.Namespace) -> Json:
    """The inputs: ``--params``, with single options on top."""
    params = _parse_params(options.params)
    if getattr(options, "order", None):
        params["orderId"] = options.order
    for name, value in vars(options).items():
        if name.startswith("field_") and value is not None:
            params[name.removeprefix("field_")] = value
    return params


def _parse_params(text: str | None) -> Json:
    from rpcsvc.errors import InvalidJson  # noqa: PLC0415
    from rpcsvc.transport import strict_json  # noqa: PLC0415

    if text is None:
        return {}
    source = sys.stdin.read() if text == "-" else text
    try:
        params = strict_json.loads(source.encode("utf-8", "surrogateescape"))
    except InvalidJson as error:
        raise UsageError(f"--params: {error.message}") from error
    if not isinstance(params, dict):
        raise UsageError("--params must be a JSON object, such as '{}'.")
    return params


def _fill_in(operation: Operation, params: Json, state: CliState) -> set[str]:
    """Put remembered values where the operation takes them and none was given."""
    known = {info.alias or name for name, info in operation.params.model_fields.items()}
    filled = set()
    for wire_name, attribute in _REMEMBERED.items():
        value = getattr(state, attribute)
        if value and wire_name in known and wire_name not in params:
            params[wire_name] = value
            filled.add(wire_name)
    return filled


def _send(context: Context, settings: Settings, operation: Operation, params: Json) -> Json:
    options = context.options
    key = getattr(options, "idempotency_key", None)
    url = options.url or context.environ.get("RPCSVC_URL")
    path = None if url else cli_client.socket_of(settings.data_dir)
    if url is None and path is None:
        return _call_locally(context, settings, operation, params, key)
    connection = (
        cli_client.connection_to(url) if url else cli_client.connection_to_socket(path or Path())
    )
    message = params if key is None else {**params, "idempotency-key": key}
    return cli_client.call_rpc(
        connection,
        f"{settings.brand.slug}.{operation.name}",
        message,
        request_id=options.request_id,
        token=options.token or _first_token(settings),
    )


def _first_token(settings: Settings) -> str | None:
    tokens = settings.agent_rpc_tokens
    return tokens[0].get_secret_value() if tokens else None


def _call_locally(
    context: Context, settings: Settings, operation: Operation, params: Json, key: str | None
) -> Json:
    from rpcsvc.logs import configure_logging  # noqa: PLC0415
    from rpcsvc.store.sqlite import DataDirInUse  # noqa: PLC0415
    from rpcsvc.transport.gate import is_request_id  # noqa: PLC0415

    configure_logging(settings.log.format, "warning")
    given = context.options.request_id
    request_id = given if is_request_id(given) else "req_" + secrets.token_hex(10)

    async def call() -> bytes:
        async with context.local(settings) as service:
            return await service.call(operation, params, request_id, key)

    try:
        return dict(json.loads(asyncio.run(call())))
    except DataDirInUse as error:
        raise cli_client.Unreachable(f"{error} It does not answer on its socket.") from error


def _remember(data_dir: Path, before: CliState, envelope: Json) -> None:
    data = envelope["data"]
    order_id = data.get("order", {}).get("orderId") if envelope["ok"] else None
    after = CliState(data.get("sessionId") or before.session_id, order_id or before.order_id)
    if after != before:
        save_state(data_dir, after)


def _print(envelope: Json, *, pretty: bool | None) -> None:
    wanted = sys.stdout.isatty() if pretty is None else pretty
    text = json.dumps(envelope, indent=2 if wanted else None, ensure_ascii=False)
    sys.stdout.write(text + "\n")
