"""``rpcsvc verify``: check a saved response, or an order's terms that somebody passed on.

stdout is exactly one JSON object. Exit status: 0 verified, 1 not verified, 2 usage error, 3 the
key set can't be reached. What does not live here: the checks (rpcsvc.verify).
"""

from __future__ import annotations

import argparse
import http.client
import json
import re
import ssl
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final
from urllib.parse import SplitResult, urlsplit

from rpcsvc.errors import InvalidJson
from rpcsvc.transport.cli.client import Unreachable, is_this_machine
from rpcsvc.transport.cli.context import FAILED, OK, Context, Json, UsageError
from rpcsvc.transport.cli.options import Once, Text
from rpcsvc.transport.strict_json import loads

JWKS_PATH: Final = "/.well-known/jwks.json"
TIMEOUT_SECONDS: Final = 10
LARGEST_JWKS: Final = 1024 * 1024

_STATUS_LINE: Final = re.compile(r"HTTP/[0-9.]+ ([0-9]{3})(?: .*)?")
_FIELD_LINE: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*")


# --- the parser ------------------------------------------------------------------------------


def add_verify(commands: Any) -> None:
    """Hang ``verify`` into the command tree."""
    parser = commands.add_parser("verify", help="check what a service signed")
    actions = parser.add_subparsers(required=True, metavar="WHAT")
    _add_response(actions)
    _add_attestation(actions)


def _add_response(actions: Any) -> None:
    text = "check that the service gave this response to this request"
    parser = actions.add_parser("response", help=text, description=text)
    parser.set_defaults(command=_response)

    def add(flag: str, metavar: str, help_text: str, **extra: Any) -> None:
        parser.add_argument(flag, metavar=metavar, help=help_text, **{"action": Text, **extra})

    add("--method", "METHOD", "of your request, such as POST", required=True)
    add("--target", "TARGET", "its path and query, as sent", required=True)
    add("--request-body", "FILE", "its body, exactly as sent; none if left out", type=Path)
    add("--headers", "FILE", "the response's, as curl -D writes them", required=True, type=Path)
    add("--body", "FILE", "the response's, exactly as received", required=True, type=Path)
    add("--status", "N", "the response's, if the headers file has no status line", type=_number)
    add("--jwks", "FILE|URL", "the service's public keys", required=True, action=Once)
    add("--kid", "KID", "trust this key only; write --kid=KID, as one may begin with a dash")
    add("--max-age", "SECONDS", "refuse a response that is older", type=_number)
    add("--slug", "WORD", "the word in x-service-signature, if it is another one")


def _add_attestation(actions: Any) -> None:
    text = "check order terms that were passed on, against what you ordered yourself"
    parser = actions.add_parser("attestation", help=text, description=text)
    parser.set_defaults(command=_attestation)
    parser.add_argument(
        "attestation",
        action=Text,
        metavar="ATTESTATION|-",
        help="data.order.attestation, or - for stdin",
    )

    def add(flag: str, metavar: str, help_text: str, **extra: Any) -> None:
        parser.add_argument(flag, metavar=metavar, help=help_text, **{"action": Text, **extra})

    add("--direction", "x2u|u2x", "which way you swap", required=True)
    add("--chain-id", "N", "number of the USDC chain", required=True, type=_number)
    add("--amount", "AMOUNT", "what you send, such as 0.8, as ordered", required=True)
    add("--to", "ADDRESS", "where the payout must go", required=True)
    add("--issuer", "URL", "the service's site, such as https://swap.example", required=True)
    keys = f"the service's public keys; the issuer's {JWKS_PATH} if left out"
    add("--jwks", "FILE|URL", keys, action=Once)
    add("--deposit-address", "ADDRESS", "where you are about to send the money")
    add("--token", "ADDRESS", "the USDC contract")
    add("--order-id", "ID", "the order")
    add("--network", "NETWORK", "the network; sandbox is simulated money")
    add("--kid", "KID", "trust this key only; write --kid=KID, as one may begin with a dash")
    parser.add_argument(
        "--allow-expired", action="store_true", help="check an order whose time to pay is over"
    )


def _number(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"must be a whole number such as 60, not {text!r}")
    return int(text)


# --- commands --------------------------------------------------------------------------------


def _response(context: Context) -> int:
    from rpcsvc.verify import Exchange, verify_response  # noqa: PLC0415 - others need no libsodium

    options = context.options
    status, headers = _read_headers(options.headers, options.status)
    request_body = b"" if options.request_body is None else _read(options.request_body)
    body, max_age = _read(options.body), options.max_age

    def check() -> Json:
        exchange = Exchange(
            method=options.method,
            target=options.target,
            request_body=request_body,
            status=status,
            headers=headers,
            body=body,
        )
        found = verify_response(
            exchange,
            _load_jwks(options.jwks),
            slug=options.slug or "service",
            now=None if max_age is None else datetime.now(UTC),
            max_age=timedelta(seconds=max_age or 0),
            pinned_kid=options.kid,
        )
        return {
            "kid": found.kid,
            "keyRetiredAt": _rfc3339(found.key_retired_at),
            "signedAt": _rfc3339(found.signed_at),
        }

    return _report("response", check)


def _attestation(context: Context) -> int:
    from rpcsvc.verify import Expected, verify_attestation  # noqa: PLC0415 - as above

    options = context.options
    token = sys.stdin.read() if options.attestation == "-" else options.attestation

    def check() -> Json:
        expected = Expected(
            direction=options.direction,
            chain_id=options.chain_id,
            amount=options.amount,
            to=options.to,
            issuer=options.issuer,
            deposit_address=options.deposit_address,
            token=options.token,
            order_id=options.order_id,
            network=options.network,
        )
        jwks = _load_jwks(options.jwks or options.issuer.rstrip("/") + JWKS_PATH)
        found = verify_attestation(
            token.strip(), jwks, expected, now=datetime.now(UTC), pinned_kid=options.kid
        )
        return {
            "kid": found.kid,
            "keyRetiredAt": _rfc3339(found.key_retired_at),
            "expired": found.expired,
            "terms": found.terms.as_json(),
        }

    return _report("attestation", check, allow_expired=options.allow_expired)


def _report(kind: str, check: Callable[[], Json], *, allow_expired: bool = True) -> int:
    """Print what the check found. Raises UsageError when the command line can't be right."""
    from rpcsvc.verify import BadInput, TermsMismatch, VerificationError  # noqa: PLC0415 - as above

    try:
        found = check()
    except BadInput as error:
        raise UsageError(error.message) from error
    except VerificationError as error:
        described: Json = {"code": error.code, "message": error.message}
        if isinstance(error, TermsMismatch):
            described["fields"] = list(error.fields)
        return _print({"verified": False, "kind": kind, "error": described})
    if found.get("expired") and not allow_expired:
        message = (
            f"The attestation is genuine, but its order was to be paid before"
            f" {found['terms']['expiresAt']}. Send nothing any more; ask for a new order. To check"
            " an old one, add --allow-expired."
        )
        error_body = {"code": "expired", "message": message}
        return _print({"verified": False, "kind": kind, "error": error_body, **found})
    return _print({"verified": True, "kind": kind, **found})


def _print(value: Json) -> int:
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
    return OK if value["verified"] else FAILED


def _rfc3339(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat().replace("+00:00", "Z")


# --- files -----------------------------------------------------------------------------------


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UsageError(f"{path} can't be read: {error.strerror or error}.") from error


def _read_headers(path: Path, given: int | None) -> tuple[int, list[tuple[str, str]]]:
    """Status and headers of a response, as ``curl -D`` writes them.

    curl writes every response that it meets (100 Continue, a proxy's, redirects): the last counts.
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
    match = _FIELD_LINE.fullmatch(line)
    if match is None:
        raise UsageError(
            f"{path} has a line that is not a header: {line[:60]!r}. Save headers with:"
            " curl -D FILE"
        )
    return match[1], match[2]


# --- the key set -----------------------------------------------------------------------------


def _load_jwks(source: str) -> Json:
    """The key set in a file or at an address. Raises UsageError, Unreachable, BadJwks."""
    from rpcsvc.verify import BadJwks  # noqa: PLC0415 - as above

    is_url = source.lower().startswith(("http://", "https://"))
    raw = _fetch(source) if is_url else _read(Path(source))
    try:
        value = loads(raw)
    except InvalidJson as error:
        raise BadJwks(f"{source} is not a JWKS. {error.message}") from error
    if not isinstance(value, dict):
        raise BadJwks(f"{source} is not a JWKS: it must be a JSON object.")
    return value


def _fetch(url: str) -> bytes:
    """What is at ``url``; redirects are not followed: they would lead to keys of somebody else."""
    connection, target = _connection_to(url)
    try:
        connection.request("GET", target, headers={"accept": "application/json"})
        response = connection.getresponse()
        raw = response.read(LARGEST_JWKS + 1)
    except (OSError, http.client.HTTPException, UnicodeError) as error:
        raise Unreachable(f"No key set at {url}: {error or type(error).__name__}.") from error
    finally:
        connection.close()
    if response.status != 200:
        raise Unreachable(f"No key set at {url}: it answers with HTTP status {response.status}.")
    if len(raw) > LARGEST_JWKS:
        raise Unreachable(f"What is at {url} is no key set: it has over {LARGEST_JWKS} bytes.")
    return raw


def _connection_to(url: str) -> tuple[http.client.HTTPConnection, str]:
    try:
        parts = urlsplit(url)
        target = _target(parts)
        host, port = parts.hostname or "", parts.port
        if parts.scheme == "https":
            context = ssl.create_default_context()
            made: http.client.HTTPConnection = http.client.HTTPSConnection(
                host, port, timeout=TIMEOUT_SECONDS, context=context
            )
        else:
            _require_this_machine(host)
            made = http.client.HTTPConnection(host, port, timeout=TIMEOUT_SECONDS)
    except (ValueError, http.client.InvalidURL) as error:
        raise UsageError(f"{url!r} can't be fetched: {error}.") from error
    return made, target


def _target(parts: SplitResult) -> str:
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if not parts.hostname or parts.username is not None or parts.fragment:
        raise ValueError("it must have a host, and no user name or #")
    if not re.fullmatch(r"[\x21-\x7e]+", target):
        raise ValueError("its path must be percent-encoded")
    return target


def _require_this_machine(host: str) -> None:
    if not is_this_machine(host):
        raise ValueError(
            "keys over plain HTTP could be anybody's, except from this machine; use https://"
        )
