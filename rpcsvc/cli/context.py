"""Shared by all commands: context, options, errors and exit statuses."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from rpcsvc.health_probe import DEFAULT_DATA_DIR
from rpcsvc.terminal import printable

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Coroutine
    from contextlib import AbstractAsyncContextManager

    from rpcsvc.operations.dispatch import LocalService
    from rpcsvc.settings import LoadedSettings, Settings

OK, FAILED, USAGE, UNREACHABLE, INTERRUPTED = 0, 1, 2, 3, 130

Serve: TypeAlias = "Callable[[Settings, Callable[[], Settings]], Coroutine[Any, Any, None]]"
Local: TypeAlias = "Callable[[Settings], AbstractAsyncContextManager[LocalService]]"
Private: TypeAlias = "Callable[[Settings], AbstractAsyncContextManager[asyncio.Event]]"
Json = dict[str, Any]

_DATA_DIR: Final = "RPCSVC_DATA_DIR"
# The prefix of the settings' environment variables, mistyped case included.
_SETTINGS: Final = ("RPCSVC_", "AGENT_RPC_TOKEN")
SERVE_FLAGS: Final = ("host", "port", "engine", "tls_cert", "tls_key")


def say(text: str) -> None:
    """Write text to stdout as a terminal may have it."""
    sys.stdout.write(printable(text))


def complain(text: str) -> None:
    """Write an error to stderr as a terminal may have it."""
    sys.stderr.write(printable(text))


class UsageError(Exception):
    """The command line is wrong; the message says what to change."""


class BadCommandLine(SystemExit):
    """The command line does not parse; the process ends as with argparse."""

    def __init__(self, message: str) -> None:
        super().__init__(USAGE)
        self.message = message

    def __str__(self) -> str:
        return self.message


class AnswerUnwritten(Exception):
    """The answer can't be written to stdout."""


@dataclass(frozen=True, slots=True)
class Context:
    """A command line, and the service that it may run.

    ``serve`` runs the service, with what loads its settings again; ``local`` runs it for calls in
    this process, and ``private`` serves it on its socket alone.
    """

    options: argparse.Namespace
    environ: Mapping[str, str]
    serve: Serve
    local: Local
    private: Private

    def loaded(self) -> LoadedSettings:
        """The settings with this command's flags on top, with origins. Raises SettingsError."""
        from rpcsvc.settings import load_settings  # noqa: PLC0415 - half of a call's time

        flags = {name: getattr(self.options, name, None) for name in (*SERVE_FLAGS, "data_dir")}
        return load_settings(config_file=self.options.config, environ=self.environ, flags=flags)

    def settings(self) -> Settings:
        """The settings with this command's flags on top. Raises SettingsError."""
        return self.loaded().settings

    def data_dir_alone(self) -> Path | None:
        """The data directory, if every other setting has its default; else None."""
        known = {_DATA_DIR, "RPCSVC_URL"}
        others = (name for name in self.environ if name not in known)
        if self.options.config or any(name.upper().startswith(_SETTINGS) for name in others):
            return None
        given: str | None = self.options.data_dir
        name = self.environ.get(_DATA_DIR, DEFAULT_DATA_DIR) if given is None else given
        return Path(name) if name else None

    def url(self) -> str | None:
        """The URL of the service, if one was given."""
        return self.options.url or self.environ.get("RPCSVC_URL") or None

    def token(self, settings: Settings) -> str | None:
        """The value for x-agent-rpc-token. Raises UsageError if no header can hold it."""
        tokens = settings.agent_rpc_tokens
        return self.given_token() or (tokens[0].get_secret_value() if tokens else None)

    def given_token(self) -> str | None:
        """The value of --token. Raises UsageError if no header can hold it."""
        token: str | None = self.options.token
        if token is not None and not (token.isascii() and token.isprintable()):
            raise UsageError("--token must be printable ASCII, as the server's AGENT_RPC_TOKEN is.")
        return token or None


class Once(argparse.Action):
    """Accepts an option once: with two amounts, which one counts would be a guess."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,  # noqa: ARG002 - argparse passes it
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,  # noqa: ARG002 - as above
    ) -> None:
        """Take the value, or refuse the second one."""
        if getattr(namespace, self.dest, None) is not None:
            raise argparse.ArgumentError(self, "is given twice")
        setattr(namespace, self.dest, values)


class TextOption(Once):
    """Accepts text, and refuses undecodable bytes that a shell lets through. For paths, which may
    hold any bytes, use Once.
    """

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Take the value once. Refuse one that no JSON, header or database can hold."""
        if isinstance(values, str) and not _is_utf8(values):
            # The value is not shown: it may be a token.
            raise argparse.ArgumentError(
                self, "holds a byte that is not UTF-8. Give it in UTF-8, as all text here is."
            )
        super().__call__(parser, namespace, values, option_string)


def _is_utf8(text: str) -> bool:
    """Return whether an argument was UTF-8: Python keeps other bytes as lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def add_common(parser: argparse.ArgumentParser) -> None:
    """Add the options that select the settings."""
    parser.add_argument(
        "--config", action=Once, type=Path, metavar="FILE", help="TOML file with settings"
    )
    parser.add_argument(
        "--data-dir", action=Once, metavar="DIR", help="where the service keeps its data"
    )


def add_command(
    parsers: Any,
    name: str,
    text: str,
    command: Callable[[Context], int],
    more: str = "",
    **options: Any,
) -> Any:
    """The parser of a new command. Its description has ``more`` after ``text``."""
    parser = parsers.add_parser(name, help=text, description=text + more, **options)
    add_common(parser)
    parser.set_defaults(command=command)
    return parser


def add_target(group: Any) -> None:
    """Add the options that select the service to call."""
    group.add_argument("--url", action=TextOption, help="the service's root URL (RPCSVC_URL)")
    group.add_argument("--token", action=TextOption, help="for /rpc (AGENT_RPC_TOKEN)")
