"""``rpcsvc receipt verify``: check the receipt of a payout on your own node.

stdout is exactly one JSON object. Exit status: 0 proven, 1 not proven, 2 usage error, 3 the node
can't be reached.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rpcsvc.cli.context import (
    FAILED,
    OK,
    Context,
    Json,
    Once,
    TextOption,
    UsageError,
    add_command,
    say,
)
from rpcsvc.client.errors import Unreachable
from rpcsvc.domain import usdc
from rpcsvc.domain.addresses import parse_evm_address
from rpcsvc.domain.money import USDC, XMR, Asset, format_units, parse_amount
from rpcsvc.errors import InvalidJson, ServiceError
from rpcsvc.settings_onchain import read_chains
from rpcsvc.settlement.onchain.daemon_rpc import DaemonEndpoint, NodeError, RpcFailure
from rpcsvc.settlement.onchain.evm.node import EvmClient
from rpcsvc.settlement.onchain.evm.node_types import Log, Receipt
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import TxCheck, WalletCode
from rpcsvc.strict_json import loads

_EVM_TXID: Final = re.compile(r"0x[0-9a-fA-F]{64}")
# The wallet has not looked: that says nothing of the receipt.
_NOT_LOOKED: Final = (WalletCode.NOT_OPEN, WalletCode.NO_DAEMON, WalletCode.DAEMON_BUSY)


def add_commands(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("receipt", help="check the receipt of a payout")
    actions = parser.add_subparsers(required=True, metavar="ACTION")
    text = "check on your own node that a payout was made, without calling the service"
    verify = add_command(actions, "verify", text, _verify)

    def add(flag: str, metavar: str, help_text: str, action: type[Once] = TextOption) -> None:
        verify.add_argument(flag, action=action, metavar=metavar, help=help_text)

    verify.add_argument(
        "receipt", metavar="FILE|-", help="data.receipt of a status answer, or the whole answer"
    )
    add("--node", "URL", "an EVM node of the network, for USDC")
    add("--wallet-rpc", "URL", "a monero-wallet-rpc with any wallet open, for XMR")
    add("--username", "NAME", "user of that wallet-rpc, if it needs one")
    add("--password-file", "FILE", "contains its password", Once)
    add("--to", "ADDRESS", "the destination that you ordered the payout to")
    add("--amount", "AMOUNT", "minimum amount of the payout, such as 0.97")


def _verify(context: Context) -> int:
    given = context.options
    receipt = _receipt(given.receipt)
    differs = _difference(receipt, given)
    if differs is not None:
        return _print({"proven": False, "reason": differs}, FAILED)
    try:
        return _print({"proven": True, **asyncio.run(_checked(context, receipt))}, OK)
    except NotProven as reason:
        return _print({"proven": False, "reason": f"{reason}."}, FAILED)


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
        endpoint = DaemonEndpoint("wallet-rpc", url, given.username, password, serial=True)
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
        endpoint = DaemonEndpoint("node", _required(context.options.node, "--node", "USDC"))
    except ValueError as error:
        raise UsageError(str(error)) from error
    async with EvmClient(endpoint) as client:
        return await check_evm(receipt, client, token)


def _token(context: Context, receipt: Json) -> str:
    """The USDC contract of the receipt's chain or test network, from this installation's table."""
    chains = read_chains(context.settings().chains_file)
    number = receipt.get("chainId")
    token = chains.usdc_on(number) if isinstance(number, int) else None
    if token is None:
        raise UsageError(f"The receipt's chain {number!r} is not one of the known chains.")
    return token


def _receipt(source: str) -> Json:
    """Extract the receipt from any answer that contains it."""
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
    """The difference of the receipt from the caller's order: one of another payout proves
    nothing.
    """
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


def _print(document: Json, status: int) -> int:
    say(json.dumps(document, indent=2) + "\n")
    return status


class NotProven(Exception):
    """The receipt does not hold; the message says what differs."""


@dataclass(frozen=True, slots=True)
class Proven:
    """A payment that the network confirms: atomic ``units`` arrived at the address."""

    asset: Asset
    txid: str
    address: str
    units: int
    confirmations: int


async def check_monero(receipt: Json, wallet: WalletClient) -> Proven:
    """Prove a payout by the transaction's key, and by the proof where there is one.

    Raises NotProven and RpcFailure.


    Any wallet does: nothing of it is used.
    """
    txid, address = _text(receipt, "txid"), _text(receipt, "address")
    units = _units(receipt, XMR)
    try:
        by_key = await wallet.check_key(txid, _text(receipt, "transactionKey"), address)
        _require_received(by_key, units)
        proof = receipt.get("transactionProof")
        if proof is not None:
            message = _text(receipt, "proofMessage")
            _require_received(await wallet.check_proof(txid, address, str(proof), message), units)
    except NodeError as error:
        if error.code in _NOT_LOOKED:
            raise
        raise NotProven(f"the wallet refuses the receipt: {error.text}") from error
    return Proven(XMR, txid, address, units, by_key.confirmations)


def _require_received(found: TxCheck, units: int) -> None:
    if not found.valid:
        raise NotProven("the proof is not one of this transaction, address and message")
    if found.in_pool or found.confirmations == 0:
        raise NotProven("the transaction is in no block yet")
    if found.received != units:
        raise NotProven(f"the address received {found.received} piconero, not {units}")


async def check_evm(receipt: Json, client: EvmClient, token: str) -> Proven:
    """Prove a payout by the token's Transfer event. Raises NotProven, RpcFailure.

    ``token`` is the USDC contract that the caller knows, not what the receipt says.
    """
    wanted, units = _evm_address(receipt), _units(receipt, USDC)
    txid = _text(receipt, "txid")
    if not _EVM_TXID.fullmatch(txid):
        raise NotProven("the receipt's txid is no transaction id")
    if await client.chain_id() != receipt.get("chainId"):
        raise NotProven(f"the node is on chain {await client.chain_id()}, not on the receipt's")
    mined, top = await client.receipt(txid), await client.block()
    if mined is None or top is None:
        raise NotProven(f"the node knows no mined transaction {txid}")
    if not mined.ok:
        raise NotProven("the transaction failed: it moved nothing")
    try:
        event = usdc.read_transfer(*_event(mined, receipt, token))
    except ValueError as error:
        raise NotProven(f"the event is no transfer: {error}") from error
    if (event.to, event.units) != (wanted, units):
        raise NotProven(f"the event is {event.units} units to {event.to}, not {units} to {wanted}")
    return Proven(USDC, mined.txid, wanted, units, top.number - mined.block_number + 1)


def _event(mined: Receipt, receipt: Json, token: str) -> tuple[tuple[bytes, ...], bytes]:
    found: Log | None = next(
        (log for log in mined.logs if log.log_index == receipt.get("logIndex")), None
    )
    if found is None:
        raise NotProven(f"the transaction has no event {receipt.get('logIndex')}")
    if found.address.lower() != token.lower():
        raise NotProven(f"the event is one of {found.address}, not of the USDC contract {token}")
    return found.topics, found.data


def _text(receipt: Json, field: str) -> str:
    value = receipt.get(field)
    if not isinstance(value, str):
        raise NotProven(f"the receipt has no {field}")
    return value


def _evm_address(receipt: Json) -> str:
    try:
        return parse_evm_address(_text(receipt, "address"), field="address")
    except ServiceError as error:
        raise NotProven(error.message) from error


def _units(receipt: Json, asset: Asset) -> int:
    try:
        return parse_amount(_text(receipt, "amount"), asset).units
    except ServiceError as error:
        raise NotProven(error.message) from error
