"""``rpcsvc verify`` and ``rpcsvc receipt verify``: check a signature, or a payout on your own node.

stdout is exactly one JSON object. Exit status: 0 verified, 1 not verified, 2 usage error, 3 the
issuer or the node can't be reached. The checks of signatures are in rpcsvc.verify.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final

from rpcsvc import verify
from rpcsvc.cli.context import FAILED, OK, Context, Json, Once, Text, UsageError, add_command
from rpcsvc.client.errors import Unreachable
from rpcsvc.domain.money import USDC, XMR, format_units, parse_amount
from rpcsvc.errors import InvalidJson, ServiceError
from rpcsvc.settings_onchain import read_chains
from rpcsvc.settlement.onchain.daemon_rpc import Endpoint, RpcFailure
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.receipt_check import NotProven, check_evm, check_monero
from rpcsvc.strict_json import loads

_STATUS_LINE: Final = re.compile(r"HTTP/[0-9.]+ ([0-9]{3})(?: .*)?")
_FIELD_LINE: Final = re.compile(r"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*(.*?)[ \t]*")


# --- the parser ------------------------------------------------------------------------------


def add_commands(commands: Any) -> None:
    """Add both commands to the parser."""
    parser = commands.add_parser("verify", help="check what a service signed")
    actions = parser.add_subparsers(required=True, metavar="WHAT")
    _add_response(actions)
    _add_attestation(actions)
    _add_receipt(commands)


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
    verify.add_attestation_options(parser, Text)


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
    sys.stdout.write(json.dumps(value, indent=2) + "\n")
    return status


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


def _add_receipt(commands: Any) -> None:
    parser = commands.add_parser("receipt", help="check the receipt of a payout")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    text = "check on your own node that a payout was made; nothing of the service is asked"
    verify = add_command(actions, "verify", text, _verify)

    def add(flag: str, metavar: str, help_text: str, action: type[Once] = Text) -> None:
        verify.add_argument(flag, action=action, metavar=metavar, help=help_text)

    verify.add_argument(
        "receipt", metavar="FILE|-", help="data.receipt of a status answer, or the whole answer"
    )
    add("--node", "URL", "an EVM node of the network, for USDC")
    add("--wallet-rpc", "URL", "a monero-wallet-rpc with any wallet open, for XMR")
    add("--username", "NAME", "of that wallet-rpc, if it asks for one")
    add("--password-file", "FILE", "holds its password", Once)
    add("--to", "ADDRESS", "the destination that you ordered the payout to")
    add("--amount", "AMOUNT", "the least that you are to have received, such as 0.97")


def _verify(context: Context) -> int:
    given = context.options

    receipt = _receipt(given.receipt)
    differs = _difference(receipt, given)
    if differs is not None:
        return _print_proof({"proven": False, "reason": differs}, FAILED)
    try:
        return _print_proof({"proven": True, **asyncio.run(_checked(context, receipt))}, OK)
    except NotProven as reason:
        return _print_proof({"proven": False, "reason": f"{reason}."}, FAILED)


async def _checked(context: Context, receipt: Json) -> Json:

    try:
        check = _monero if receipt.get("asset") == "XMR" else _evm
        proven = await check(context, receipt)
    except RpcFailure as failure:
        raise Unreachable(str(failure)) from failure
    return {
        "asset": proven.asset.symbol,
        "txid": proven.txid,
        "address": proven.address,
        "amount": format_units(proven.units, proven.asset),
        "confirmations": proven.confirmations,
    }


async def _monero(context: Context, receipt: Json) -> Any:

    given = context.options
    url = _required(given.wallet_rpc, "--wallet-rpc", "XMR")
    password = _password(given.password_file)
    try:
        endpoint = Endpoint("wallet-rpc", url, given.username, password, serial=True)
    except ValueError as error:
        raise UsageError(str(error)) from error
    async with WalletClient(endpoint) as wallet:
        return await check_monero(receipt, wallet)


def _password(file: str | None) -> str | None:
    try:
        return Path(file).read_text(encoding="utf-8").strip() if file else None
    except OSError as error:
        raise UsageError(f"{file} can't be read: {error.strerror}.") from error


async def _evm(context: Context, receipt: Json) -> Any:

    token = _token(context, receipt)
    try:
        endpoint = Endpoint("node", _required(context.options.node, "--node", "USDC"))
    except ValueError as error:
        raise UsageError(str(error)) from error
    async with EvmClient(endpoint) as client:
        return await check_evm(receipt, client, token)


def _token(context: Context, receipt: Json) -> str:
    """The USDC contract of the receipt's chain, from this installation's own table of chains."""
    chains = read_chains(context.settings().chains_file)
    number = receipt.get("chainId")
    chain = chains.by_id(number) if isinstance(number, int) else None
    if chain is None:
        raise UsageError(f"The receipt's chain {number!r} is not one of the known chains.")
    return chain.usdc_contract


def _receipt(source: str) -> Json:
    """The receipt itself, out of whatever answer it came in."""
    try:
        raw = sys.stdin.buffer.read() if source == "-" else Path(source).read_bytes()
        found = loads(raw)
    except OSError as error:
        raise UsageError(f"{source} can't be read: {error.strerror}.") from error
    except InvalidJson as error:
        raise UsageError(f"{source} holds no JSON: {error.message}") from error
    for key in ("result", "data", "receipt"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or "txid" not in found or "asset" not in found:
        raise UsageError(
            f"{source} holds no receipt: save the status answer of a completed order, or its"
            " data.receipt."
        )
    return found


def _difference(receipt: Json, given: argparse.Namespace) -> str | None:
    """How it differs from what the caller ordered: a receipt of another payout proves nothing."""
    address, asset = str(receipt.get("address")), XMR if receipt["asset"] == "XMR" else USDC
    same = address == given.to or (asset is USDC and address.lower() == str(given.to).lower())
    if given.to is not None and not same:
        return f"The receipt is of a payout to {address}, not to {given.to}."
    if given.amount is None:
        return None
    try:
        least = parse_amount(given.amount, asset)
        paid = parse_amount(receipt.get("amount"), asset)
    except ServiceError as error:
        raise UsageError(error.message) from error
    if paid.units >= least.units:
        return None
    return f"The receipt is of {paid.display()}, less than {least.display()}."


def _required(value: str | None, flag: str, asset: str) -> str:
    if value is None:
        raise UsageError(f"The receipt is of {asset}: give {flag}.")
    return value


def _print_proof(document: Json, status: int) -> int:
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
    return status
