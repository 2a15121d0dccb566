"""What monero-wallet-rpc answers, in types: transfers, outputs, balances, payments, error codes.

Amounts are piconero (10^-12 XMR), heights count from 0, hashes, keys and transactions are lower-
case hex.
Source: the wallet RPC documentation at getmonero.org.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import NamedTuple

from rpcsvc.settlement.onchain.daemon_rpc import Fields


class WalletCode(IntEnum):
    """Error codes of monero-wallet-rpc that callers tell apart (NodeError.code)."""

    UNKNOWN = -1
    WRONG_ADDRESS = -2
    DAEMON_BUSY = -3
    TRANSFER_FAILED = -4
    WRONG_TXID = -8
    NOT_OPEN = -13
    NO_SUCH_ADDRESS = -15
    TX_NOT_POSSIBLE = -16
    NOT_ENOUGH_MONEY = -17
    NO_TX_KEY = -24
    WRONG_TX_KEY = -25
    NOT_ENOUGH_UNLOCKED = -37
    NO_DAEMON = -38


# --- what it answers ------------------------------------------------------------------------------


class SubaddressIndex(NamedTuple):
    """Account (``major``) and index within it (``minor``)."""

    major: int
    minor: int


@dataclass(frozen=True, slots=True)
class Subaddress:
    """An address of the wallet."""

    index: SubaddressIndex
    address: str


class TransferKind(StrEnum):
    """Where the wallet lists a transfer. INCOMING: mined. POOL: incoming, not mined.

    OUTGOING: mined. PENDING: sent, not seen mined. FAILED: sent, given up by the wallet.
    """

    INCOMING = "in"
    POOL = "pool"
    OUTGOING = "out"
    PENDING = "pending"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class WalletTransfer:
    """A transfer as the wallet tells it. Incoming: one per transaction and subaddress.

    ``amount`` sums what this transaction paid to ``index``. ``height`` is None until mined;
    ``coinbase`` outputs unlock after 60 blocks, others after 10. ``locked``: by ``unlock_time`` or
    age. ``timestamp``: seconds. ``fee`` is of the whole transaction.
    """

    kind: TransferKind
    txid: str
    address: str
    index: SubaddressIndex
    amount: int
    fee: int
    height: int | None
    confirmations: int
    timestamp: int
    unlock_time: int
    locked: bool
    double_spend_seen: bool
    coinbase: bool


class Destination(NamedTuple):
    """Who gets how many piconero."""

    address: str
    amount: int


@dataclass(frozen=True, slots=True)
class PreparedPayment:
    """A signed transaction that is not published. The wallet reserves nothing for it.

    ``raw`` is what monerod takes (submit), ``metadata`` what the wallet takes (relay). ``tx_key``
    proves the payment; the wallet forgets it when it is killed before ``store``.
    """

    txid: str
    amount: int
    fee: int
    weight: int
    raw: str
    metadata: str
    tx_key: str
    key_images: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SubaddressBalance:
    """The balance of one subaddress."""

    index: SubaddressIndex
    address: str
    total: int
    unlocked: int
    blocks_to_unlock: int
    outputs: int


@dataclass(frozen=True, slots=True)
class Balance:
    """The balance of an account; ``blocks_to_unlock`` until all of it is unlocked."""

    total: int
    unlocked: int
    blocks_to_unlock: int
    subaddresses: tuple[SubaddressBalance, ...]


class OutputFilter(StrEnum):
    """Which of the wallet's outputs: AVAILABLE is not spent."""

    AVAILABLE = "available"
    UNAVAILABLE = "unavailable"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Output:
    """An output that the wallet received. ``key_image`` is what spending it shows."""

    txid: str
    global_index: int
    index: SubaddressIndex
    amount: int
    key_image: str
    height: int
    spent: bool
    unlocked: bool
    frozen: bool


@dataclass(frozen=True, slots=True)
class AddressCheck:
    """What the wallet says of an address. ``nettype``: mainnet, stagenet or testnet."""

    valid: bool
    integrated: bool
    subaddress: bool
    nettype: str


@dataclass(frozen=True, slots=True)
class Refreshed:
    """What a refresh brought."""

    blocks: int
    received_money: bool


@dataclass(frozen=True, slots=True)
class PaymentCheck:
    """What a transaction paid to an address, by its proof or key. ``valid``: the proof holds."""

    valid: bool
    received: int
    confirmations: int
    in_pool: bool


# --- reading an answer; all raise BadAnswer -------------------------------------------------------


def read_prepared(answer: Fields) -> PreparedPayment:
    """A payment that was signed and not published, with all that is needed to publish it."""
    images = answer.inner("spent_key_images").texts("key_images")
    fields = ("tx_hash", "tx_blob", "tx_metadata", "tx_key")
    txid, raw, metadata, key = (answer.text(field) for field in fields)
    if not (images and txid and raw and metadata and key):
        raise answer.bad("is a payment without id, bytes, metadata, key or key images")
    return PreparedPayment(
        txid=txid,
        amount=answer.whole("amount"),
        fee=answer.whole("fee"),
        weight=answer.whole("weight"),
        raw=raw,
        metadata=metadata,
        tx_key=key,
        key_images=images,
    )


def _kind(item: Fields) -> TransferKind:
    name = item.text("type")
    if name == "block":
        return TransferKind.INCOMING
    if name not in set(TransferKind):
        raise item.bad(f"has a transfer of unknown type {name!r}")
    return TransferKind(name)


def read_transfer(kind: TransferKind, item: Fields) -> WalletTransfer:
    """One item of a list of transfers."""
    height = item.whole("height")
    return WalletTransfer(
        kind=kind,
        txid=item.text("txid"),
        address=item.text("address"),
        index=_index(item),
        amount=item.whole("amount"),
        fee=item.whole("fee"),
        height=height or None,
        confirmations=item.whole("confirmations", 0),
        timestamp=item.whole("timestamp"),
        unlock_time=item.whole("unlock_time"),
        locked=item.flag("locked"),
        double_spend_seen=item.flag("double_spend_seen"),
        coinbase=item.text("type") == "block",
    )


def _index(item: Fields) -> SubaddressIndex:
    inner = item.inner("subaddr_index")
    return SubaddressIndex(inner.whole("major"), inner.whole("minor"))


def read_subaddress_balance(item: Fields) -> SubaddressBalance:
    """What one address of the account holds."""
    return SubaddressBalance(
        index=SubaddressIndex(item.whole("account_index"), item.whole("address_index")),
        address=item.text("address"),
        total=item.whole("balance"),
        unlocked=item.whole("unlocked_balance"),
        blocks_to_unlock=item.whole("blocks_to_unlock"),
        outputs=item.whole("num_unspent_outputs"),
    )


def read_output(item: Fields) -> Output:
    """One item of a list of outputs."""
    return Output(
        txid=item.text("tx_hash"),
        global_index=item.whole("global_index"),
        index=_index(item),
        amount=item.whole("amount"),
        key_image=item.text("key_image"),
        height=item.whole("block_height"),
        spent=item.flag("spent"),
        unlocked=item.flag("unlocked"),
        frozen=item.flag("frozen"),
    )


def read_payment_check(answer: Fields, *, valid: bool) -> PaymentCheck:
    """What a proof or a key shows."""
    return PaymentCheck(
        valid=valid,
        received=answer.whole("received", 0),
        confirmations=answer.whole("confirmations", 0),
        in_pool=answer.flag("in_pool", default=False),
    )
