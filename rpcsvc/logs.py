"""Logging: structlog to stderr, JSON when nobody watches; secrets and addresses masked.

Tokens and keys never reach a log line; addresses are shortened to what an operator needs to
recognise one, because a log travels further than the database.
"""

from __future__ import annotations

import io
import logging
import re
import sys
from collections import Counter
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, Final, TextIO, cast

import orjson
import structlog
from typing_extensions import override

from rpcsvc.errors import showable
from rpcsvc.terminal import printable

_SECRET_NAMES = re.compile(r"token|secret|password|authorization|api_key|idempotency", re.I)
_ADDRESS = re.compile(
    r"0x[0-9a-fA-F]{40}\b|\b[1-9A-HJ-NP-Za-km-z]{95}(?:[1-9A-HJ-NP-Za-km-z]{11})?\b"
)
MASK = "********"
_PERIOD_SECONDS: Final = 60.0

EventDict = MutableMapping[str, Any]


def configure_logging(log_format: str, level: str) -> None:
    """Set up logging for the process. ``log_format``: auto (by terminal), json or console."""
    as_json = log_format == "json" or (log_format == "auto" and not sys.stderr.isatty())
    number = logging.getLevelNamesMapping()[level.upper()]
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            mask,
            *_renderers(as_json=as_json),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(number),
        logger_factory=structlog.WriteLoggerFactory(cast("TextIO", _Stderr())),
        cache_logger_on_first_use=True,
    )
    handler = _StructlogHandler()
    logging.basicConfig(handlers=[handler], level=max(number, logging.WARNING), force=True)


class Occasional:
    """Counts events by kind, to log one of each kind a minute. ``now`` gives seconds."""

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._counts: Counter[str] = Counter()
        self._logged_at: dict[str, float] = {}

    def note(self, kind: str) -> int:
        """Count an event. Return the count to log, or 0 within a minute after a logged one."""
        self._counts[kind] += 1
        now = self._now()
        if now - self._logged_at.get(kind, -_PERIOD_SECONDS) < _PERIOD_SECONDS:
            return 0
        self._logged_at[kind] = now
        return self._counts.pop(kind)


def print_greeting(log_format: str, text: str) -> None:
    """Write a text for people below the log, if a person reads it on a terminal."""
    if log_format != "json" and sys.stderr.isatty():
        _Stderr().write(text)


def mask(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Hide secrets by name and shorten addresses by form, in every value of an event.

    Texts are made ``showable``: one that can't be encoded would lose its line.
    """
    for name, value in event.items():
        if _is_secret(name):
            event[name] = MASK
        elif isinstance(value, str):
            text = showable(value)
            event[name] = shorten_addresses(text) if len(text) >= 42 else text
    return event


@lru_cache(maxsize=512)
def _is_secret(name: str) -> bool:
    return _SECRET_NAMES.search(name) is not None


def shorten_addresses(text: str) -> str:
    """``text`` with each EVM or Monero address reduced to its ends."""
    return _ADDRESS.sub(lambda m: f"{m[0][:8]}...{m[0][-4:]}", text)


def _renderers(*, as_json: bool) -> list[Callable[[Any, str, EventDict], Any]]:
    if as_json:
        return [lambda _logger, _method, event: printable(_json(event))]
    return [_printable_values, structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty())]


def _json(event: EventDict) -> str:
    return orjson.dumps(dict(event), default=str).decode()


def _printable_values(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Escape before the renderer adds its colours."""
    for name, value in event.items():
        if isinstance(value, str):
            event[name] = printable(value)
    return event


class _Stderr(io.TextIOBase):
    """A stderr that never raises: a log that can't be written, on a full disk for example, must not
    end the work that it reports.
    """

    @override
    def write(self, text: str) -> int:
        with suppress(OSError):
            return sys.stderr.write(text)
        return 0

    @override
    def flush(self) -> None:
        with suppress(OSError):
            sys.stderr.flush()


class _StructlogHandler(logging.Handler):
    """Brings the log records of libraries (aiohttp, asyncio) into the same stream and form."""

    @override
    def emit(self, record: logging.LogRecord) -> None:
        log = structlog.get_logger(record.name)
        log.log(
            record.levelno,
            "library_log",
            logger=record.name,
            message=record.getMessage(),
            exc_info=record.exc_info,
        )
