"""The answers of monero-wallet-rpc as strict models: transfers, outputs, balances, error codes.

Amounts are piconero (10^-12 XMR), heights count from 0, hashes, keys and transactions are
lower-case hex. Source: the wallet RPC documentation at getmonero.org.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Annotated, Any, Final, NamedTuple

from pydantic import AliasPath, Field, PlainValidator

from rpcsvc.settlement.onchain.daemon_rpc import Flag, Text, Whole, named

_COINBASE: Final = "block"


class WalletCode(IntEnum):
    """The error codes of monero-wallet-rpc that callers distinguish (NodeError.code)."""

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


Filled = Annotated[str, Field(strict=True, min_length=1)]


class SubaddressIndex(NamedTuple):
    """An index in the wallet: the account (``major``) and the index within it (``minor``)."""

    major: Whole
    minor: Whole


@dataclass(frozen=True, slots=True)
class Subaddress:
    """An address of the wallet."""

    index: SubaddressIndex
    address: str


class WalletTransferKind(StrEnum):
    """The list in which the wallet has a transfer. INCOMING: mined. POOL: incoming, not mined.

    OUTGOING: mined. PENDING: sent, not seen mined. FAILED: sent, abandoned by the wallet.
    """

    INCOMING = "in"
    POOL = "pool"
    OUTGOING = "out"
    PENDING = "pending"
    FAILED = "failed"


def _kind(value: Any) -> WalletTransferKind:
    return WalletTransferKind.INCOMING if value == _COINBASE else WalletTransferKind(value)


def _height(value: Any) -> int | None:
    """Return a height; None for 0, which the wallet gives outside of a block."""
    if type(value) is not int or value < 0:
        raise ValueError("it is no whole number")
    return value or None


@dataclass(frozen=True, slots=True)
class WalletTransfer:
    """A transfer as the wallet reports it. Incoming: one per transaction and subaddress.

    ``amount`` sums what this transaction paid to ``index``. ``height`` is None until mined.
    ``locked``: by ``unlock_time`` or age. ``timestamp``: seconds. ``fee`` is of the whole
    transaction.
    """

    kind: Annotated[WalletTransferKind, PlainValidator(_kind), named("type")]
    txid: Text
    address: Text
    index: Annotated[SubaddressIndex, named("subaddr_index")]
    amount: Whole
    fee: Whole
    height: Annotated[int | None, PlainValidator(_height)]
    confirmations: Annotated[Whole, Field(default=0)]
    timestamp: Whole
    unlock_time: Whole
    locked: Flag
    double_spend_seen: Flag


class Destination(NamedTuple):
    """A recipient, and the piconero for it."""

    address: str
    amount: int


@dataclass(frozen=True, slots=True)
class PreparedPayment:
    """A signed transaction that is not published. The wallet reserves nothing for it.

    ``raw`` is what monerod takes (submit), ``metadata`` what the wallet takes (relay). ``tx_key``
    proves the payment; the wallet forgets it when it is killed before ``store``.
    """

    txid: Annotated[Filled, named("tx_hash")]
    amount: Whole
    fee: Whole
    weight: Whole
    raw: Annotated[Filled, named("tx_blob")]
    metadata: Annotated[Filled, named("tx_metadata")]
    tx_key: Filled
    key_images: Annotated[
        tuple[Text, ...],
        Field(min_length=1, validation_alias=AliasPath("spent_key_images", "key_images")),
    ]


@dataclass(frozen=True, slots=True)
class SubaddressBalance:
    """The balance of one subaddress."""

    account: Annotated[Whole, named("account_index")]
    minor: Annotated[Whole, named("address_index")]
    address: Text
    total: Annotated[Whole, named("balance")]
    unlocked: Annotated[Whole, named("unlocked_balance")]
    blocks_to_unlock: Whole
    outputs: Annotated[Whole, named("num_unspent_outputs")]

    @property
    def index(self) -> SubaddressIndex:
        """The subaddress's index in the wallet."""
        return SubaddressIndex(self.account, self.minor)


@dataclass(frozen=True, slots=True)
class Balance:
    """The balance of an account; ``blocks_to_unlock`` until all of it is unlocked."""

    total: Annotated[Whole, named("balance")]
    unlocked: Annotated[Whole, named("unlocked_balance")]
    blocks_to_unlock: Whole
    subaddresses: Annotated[
        tuple[SubaddressBalance, ...], named("per_subaddress"), Field(default=())
    ]


class OutputFilter(StrEnum):
    """A choice of the wallet's outputs: AVAILABLE is not spent."""

    AVAILABLE = "available"
    UNAVAILABLE = "unavailable"
    ALL = "all"


@dataclass(frozen=True, slots=True)
class Output:
    """An output that the wallet received. ``key_image`` is shown when it is spent."""

    txid: Annotated[Text, named("tx_hash")]
    global_index: Whole
    index: Annotated[SubaddressIndex, named("subaddr_index")]
    amount: Whole
    key_image: Text
    height: Annotated[Whole, named("block_height")]
    spent: Flag
    unlocked: Flag
    frozen: Flag


@dataclass(frozen=True, slots=True)
class AddressCheck:
    """The wallet's check of an address. ``nettype``: mainnet, stagenet or testnet."""

    valid: Flag
    integrated: Flag
    subaddress: Flag
    nettype: Text


@dataclass(frozen=True, slots=True)
class Refreshed:
    """The result of a refresh."""

    blocks: Annotated[Whole, named("blocks_fetched")]


@dataclass(frozen=True, slots=True)
class TxCheck:
    """A transaction's payment to an address, by its proof or key. ``valid``: the proof holds."""

    valid: Annotated[Flag, named("good")]
    received: Annotated[Whole, Field(default=0)]
    confirmations: Annotated[Whole, Field(default=0)]
    in_pool: Annotated[Flag, Field(default=False)]
