"""``rpcsvc verify``: check a response or an order by its signature.

stdout is exactly one JSON object. Exit status: 0 verified, 1 not verified, 2 usage error, 3 the
issuer can't be reached. The checks themselves are in rpcsvc.verify.
"""

from __future__ import annotations

import json
import re
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from rpcsvc import verify
from rpcsvc.cli.context import FAILED, OK, Context, Json, Once, TextOption, UsageError, say
from rpcsvc.client.errors import Unreachable

_STATUS_LINE: Final = re.compile(r"HTTP/[0-9.]+ ([0-9]{3})(?: .*)?")
_FIELD_NAME: Final = re.compile(r"[!#$%&'*+.^_`|~0-9A-Za-z-]+")


# --- the parser ------------------------------------------------------------------------------


def add_commands(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("verify", help="check what a service signed")
    actions = parser.add_subparsers(required=True, metavar="WHAT")
    _add_response(actions)
    _add_attestation(actions)


def _add_response(actions: Any) -> None:
    text = "check that the service gave this response to this request"
    parser = actions.add_parser("response", help=text, description=text)
    parser.set_defaults(command=_response)

    def add(flag: str, metavar: str, help_text: str, **extra: Any) -> None:
        parser.add_argument(
            flag, metavar=metavar, help=help_text, **{"action": TextOption, **extra}
        )

    add("--method", "METHOD", "of your request, such as POST", required=True)
    add("--target", "TARGET", "its path and query, as sent", required=True)
    add("--request-body", "FILE", "its body, exactly as sent; none if left out", type=Path)
    add("--headers", "FILE", "the response's, as curl -D writes them", required=True, type=Path)
    add("--body", "FILE", "the response's, exactly as received", required=True, type=Path)
    add(
        "--status",
        "N",
        "the response's, if the headers file has no status line",
        type=verify.integer_text,
    )
    add("--jwks", "FILE|URL", "the service's public keys", required=True, action=Once)
    add("--kid", "KID", "trust this key only; write --kid=KID, as one may begin with a dash")
    add("--max-age", "SECONDS", "refuse a response that is older", type=verify.integer_text)
    add("--slug", "WORD", "the word in x-service-signature, if it is another one")


def _add_attestation(actions: Any) -> None:
    text = "check order terms that were passed on, against what you ordered yourself"
    parser = actions.add_parser("attestation", help=text, description=text)
    parser.set_defaults(command=_attestation)
    verify.add_attestation_options(parser, TextOption)


# --- commands --------------------------------------------------------------------------------


def _response(context: Context) -> int:
    options = context.options
    status, headers = _read_headers(options.headers, options.status)
    request_body = b"" if options.request_body is None else _read(options.request_body)
    body, max_age = _read(options.body), options.max_age
    try:
        exchange = verify.Exchange(
            method=options.method,
            target=options.target,
            request_body=request_body,
            status=status,
            headers=headers,
            body=body,
        )
        found = verify.verify_response(
            exchange,
            verify.load_jwks(options.jwks),
            slug=options.slug or "service",
            now=None if max_age is None else datetime.now(UTC),
            max_age=timedelta(seconds=max_age or 0),
            pinned_kid=options.kid,
        )
    except verify.BadInput as error:
        raise UsageError(error.message) from error
    except verify.Unreachable as error:
        raise Unreachable(error.message) from error
    except verify.VerificationError as error:
        described = verify.described_error(error)
        return _print({"verified": False, "kind": "response", "error": described}, FAILED)
    answer = {
        "verified": True,
        "kind": "response",
        "kid": found.kid,
        "keyRetiredAt": verify.rfc3339(found.key_retired_at),
        "signedAt": verify.rfc3339(found.signed_at),
    }
    return _print(answer, OK)


def _attestation(context: Context) -> int:
    try:
        status, answer = verify.check_attestation(context.options)
    except verify.BadInput as error:
        raise UsageError(error.message) from error
    return _print(answer, status)


def _print(value: Json, status: int) -> int:
    say(json.dumps(value, indent=2) + "\n")
    return status


# --- files -----------------------------------------------------------------------------------


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror or error}.") from error


def _read_headers(path: Path, given: int | None) -> tuple[int, list[tuple[str, str]]]:
    """Status and headers of a response, as ``curl -D`` writes them.

    curl writes every response (100 Continue, a proxy's, redirects): the last one counts.
    """
    blocks = re.split(r"\r?\n\r?\n", _read(path).decode("latin-1").strip("\r\n"))
    lines = re.split(r"\r?\n", blocks[-1])
    first = _STATUS_LINE.fullmatch(lines[0])
    status = int(first[1]) if first else given
    if status is None:
        raise UsageError(
            f"{path} does not begin with a status line. Give the status with --status."
        )
    if given not in (None, status):
        raise UsageError(f"--status is {given}, but {path} says {status}. Leave one of them out.")
    return status, [_field(path, line) for line in lines[1 if first else 0 :]]


def _field(path: Path, line: str) -> tuple[str, str]:
    name, colon, value = line.partition(":")
    if not (colon and _FIELD_NAME.fullmatch(name)):
        raise UsageError(
            f"{path} has a line that is not a header: {line[:60]!r}. Save headers with:"
            " curl -D FILE"
        )
    return name, value.strip(" \t")
