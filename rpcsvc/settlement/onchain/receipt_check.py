"""Checks a payout's receipt on the caller's own nodes, without the service.

Sources: monero-wallet-rpc check_tx_key and check_tx_proof; Ethereum JSON-RPC
eth_getTransactionReceipt; ERC-20 Transfer.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from rpcsvc.domain import usdc
from rpcsvc.domain.addresses import parse_evm_address
from rpcsvc.domain.money import USDC, XMR, Asset, parse_amount
from rpcsvc.errors import ServiceError
from rpcsvc.settlement.onchain.daemon_rpc import NodeError
from rpcsvc.settlement.onchain.evm.node import EvmClient, Log, Receipt
from rpcsvc.settlement.onchain.monero.wallet import WalletClient
from rpcsvc.settlement.onchain.monero.wallet_types import TxCheck, WalletCode

Json = Mapping[str, Any]

_EVM_TXID: Final = re.compile(r"0x[0-9a-fA-F]{64}")
# The wallet has not looked: that says nothing of the receipt.
_NOT_LOOKED: Final = (WalletCode.NOT_OPEN, WalletCode.NO_DAEMON, WalletCode.DAEMON_BUSY)


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
    """By the transaction's key, and by the proof where there is one. Raises NotProven, RpcFailure.

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
    """By the token's Transfer event. Raises NotProven, RpcFailure.

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
