"""Types of the calls and answers of an EVM node, as strict models.

Amounts are wei, gas and fees per gas included. Hashes and transaction ids are 0x and lower-case
hex; addresses are in EIP-55 form; data is bytes. Source: the Ethereum JSON-RPC specification
(execution-apis); EIP-1559, EIP-2718.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Annotated, Any, Final, TypeVar

from pydantic import Field, PlainValidator

from rpcsvc.domain.addresses import evm_checksum
from rpcsvc.settlement.onchain.daemon_rpc import NodeError, named
from rpcsvc.settlement.onchain.evm.records import BlockPoint

_QUANTITY_FORM: Final = re.compile(r"0x(0|[1-9a-f][0-9a-f]*)", re.ASCII | re.IGNORECASE)
_DATA_FORM: Final = re.compile(r"0x([0-9a-f]{2})*", re.ASCII | re.IGNORECASE)
_HASH_FORM: Final = re.compile(r"0x[0-9a-f]{64}", re.ASCII | re.IGNORECASE)
_ADDRESS_FORM: Final = re.compile(r"0x[0-9a-f]{40}", re.ASCII | re.IGNORECASE)

T = TypeVar("T")

# The events of a pass are of one contract.


class Tag(StrEnum):
    """Blocks by name. SAFE and FINALIZED are not known to every network."""

    LATEST = "latest"
    PENDING = "pending"
    SAFE = "safe"
    FINALIZED = "finalized"


BlockRef = int | Tag


def read_quantity(value: Any) -> int:
    """A number: 0x and hex digits without leading zeros. Raises ValueError."""
    if not isinstance(value, str) or not _QUANTITY_FORM.fullmatch(value):
        raise ValueError("it is no quantity")
    return int(value, 16)


def read_data(value: Any) -> bytes:
    """Return bytes of any length from 0x and hex digits. Raises ValueError."""
    if not isinstance(value, str) or not _DATA_FORM.fullmatch(value):
        raise ValueError("it is no hex data")
    return bytes.fromhex(value[2:])


def _hash(value: Any) -> str:
    if not isinstance(value, str) or not _HASH_FORM.fullmatch(value):
        raise ValueError("it is not 32 bytes")
    return value.lower()


def _address(value: Any) -> str:
    if not isinstance(value, str) or not _ADDRESS_FORM.fullmatch(value):
        raise ValueError("it is no address")
    return evm_checksum(value)


def _is_one(value: Any) -> bool:
    return read_quantity(value) == 1


def _or_none(read: Callable[[Any], T]) -> PlainValidator:
    return PlainValidator(lambda value: None if value is None else read(value))


Quantity = Annotated[int, PlainValidator(read_quantity)]
Data = Annotated[bytes, PlainValidator(read_data)]
Hash = Annotated[str, PlainValidator(_hash)]
Address = Annotated[str, PlainValidator(_address)]
MaybeQuantity = Annotated[int | None, _or_none(read_quantity), Field(default=None)]
MaybeHash = Annotated[str | None, _or_none(_hash), Field(default=None)]
MaybeAddress = Annotated[str | None, _or_none(_address), Field(default=None)]


@dataclass(frozen=True, slots=True)
class Block:
    """A block. ``timestamp``: seconds; ``base_fee``: None on a network without EIP-1559."""

    number: Quantity
    hash: Hash
    parent: Annotated[Hash, named("parentHash")]
    timestamp: Quantity
    base_fee: Annotated[MaybeQuantity, named("baseFeePerGas")]


@dataclass(frozen=True, slots=True)
class LogFilter:
    """A choice of logs: of one contract, with these topics by position (None: any)."""

    address: str
    topics: tuple[bytes | None, ...]


@dataclass(frozen=True, slots=True)
class Log:
    """An event. ``log_index`` counts within the block: it changes when a block is replaced.

    Receipt.position_of gives the place within the transaction, which does not.
    """

    address: Address
    topics: Annotated[tuple[Data, ...], Field(default=())]
    data: Data
    txid: Annotated[Hash, named("transactionHash")]
    block_number: Annotated[Quantity, named("blockNumber")]
    block_hash: Annotated[Hash, named("blockHash")]
    log_index: Annotated[Quantity, named("logIndex")]


@dataclass(frozen=True, slots=True)
class LogRange:
    """The logs of the blocks ``first`` to ``last``, both included.

    ``proven``: the newest block that the node which listed the logs is shown to have; None: none
    is. Of several nodes behind one address, one that lags lists nothing for blocks that it lacks.
    ``follows``: whether that node has the block that was read before; None: it has no block there.
    """

    first: int
    last: int
    logs: tuple[Log, ...]
    proven: BlockPoint | None
    follows: bool | None = True

    @classmethod
    def shown(cls, first: int, last: int, logs: tuple[Log, ...], block: Block | None) -> LogRange:
        """Return a range whose node is shown to have ``block`` or, without it, the newest event's.

        An event in another block of that number proves nothing: the chain has changed meanwhile.
        """
        newest = max(logs, key=lambda item: item.block_number, default=None)
        event = None if newest is None else BlockPoint(newest.block_number, newest.block_hash)
        proven = event if block is None else BlockPoint(block.number, block.hash)
        if event is not None and proven is not None and event.number == proven.number:
            proven = event if event == proven else None
        return cls(first, last, logs, proven)

    def joined(self, after: BlockPoint, block: Block | None) -> LogRange:
        """Return the range as read after ``after``; ``block`` is the node's block of that number.

        A node that does not have ``after`` proves nothing.
        """
        follows = None if block is None else block.hash == after.hash
        return self if follows else replace(self, proven=None, follows=follows)


@dataclass(frozen=True, slots=True)
class Receipt:
    """The receipt of a mined transaction. ``ok`` False: it failed, and its nonce is spent.

    The fee is ``gas_used`` times ``gas_price``. On OP-stack chains ``l1_fee`` comes on top; None
    where the node reports none.
    """

    txid: Annotated[Hash, named("transactionHash")]
    ok: Annotated[bool, PlainValidator(_is_one), named("status")]
    block_number: Annotated[Quantity, named("blockNumber")]
    block_hash: Annotated[Hash, named("blockHash")]
    gas_used: Annotated[Quantity, named("gasUsed")]
    gas_price: Annotated[Quantity, named("effectiveGasPrice")]
    logs: Annotated[tuple[Log, ...], Field(default=())]
    l1_fee: Annotated[MaybeQuantity, named("l1Fee")] = None
    operator_fee_scalar: Annotated[MaybeQuantity, named("operatorFeeScalar")] = None
    operator_fee_constant: Annotated[MaybeQuantity, named("operatorFeeConstant")] = None

    @property
    def has_operator_fee(self) -> bool:
        """Whether one more fee comes on top (Isthmus), reckoned as the chain's release says."""
        return bool(self.operator_fee_scalar or self.operator_fee_constant)

    def position_of(self, log_index: int) -> int:
        """Return the place among this transaction's logs, from 0, of the log with that
        ``log_index``.

        Raises ValueError when the transaction has no such log.
        """
        return [log.log_index for log in self.logs].index(log_index)


@dataclass(frozen=True, slots=True)
class EvmTransaction:
    """A transaction that the node knows. ``block_number`` is None until it is mined."""

    txid: Annotated[Hash, named("hash")]
    sender: Annotated[Address, named("from")]
    to: MaybeAddress
    nonce: Quantity
    value: Quantity
    data: Annotated[Data, named("input")]
    block_number: Annotated[MaybeQuantity, named("blockNumber")]
    block_hash: Annotated[MaybeHash, named("blockHash")]


@dataclass(frozen=True, slots=True)
class SentIn:
    """The transactions of one account in a block, by nonce."""

    block: Block
    sent: Mapping[int, EvmTransaction]


@dataclass(frozen=True, slots=True)
class FeeData:
    """The fees of the moment, wei per gas (EIP-1559): of the latest block, and as the node
    advises.
    """

    base_fee: int
    tip: int


@dataclass(frozen=True, slots=True)
class EvmCall:
    """A call or transaction to be tried out, not sent. ``gas``: it may not take more."""

    to: str
    data: bytes = b""
    sender: str | None = None
    value: int = 0
    gas: int | None = None


class EvmSubmission(StrEnum):
    """A node's answer to a raw transaction.

    Only ACCEPTED and KNOWN mean that the node has it. No other answer proves that the transaction
    is neither in the pool nor mined: mined bytes get NONCE_TOO_LOW, too. Look up its id.
    """

    ACCEPTED = "accepted"
    KNOWN = "known"
    NONCE_TOO_LOW = "nonce_too_low"
    NONCE_TOO_HIGH = "nonce_too_high"
    REPLACEMENT_UNDERPRICED = "replacement_underpriced"
    UNDERPRICED = "underpriced"
    INSUFFICIENT_FUNDS = "insufficient_funds"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class EvmSubmissionResult:
    """A node's answer to a raw transaction; ``text`` is the node's own, for the log."""

    submission: EvmSubmission
    txid: str
    text: str = ""


class Reverted(NodeError):
    """A call or an estimate reverted. ``output``: the contract's reason, ABI bytes."""

    def __init__(self, error: NodeError) -> None:
        super().__init__(error.node, error.method, error.code, error.text, error.data)
        self.output = _revert_output(error.data)


def _revert_output(data: Any) -> bytes:
    """Return the reverted call's bytes, which some nodes give bare, some in an object, some not at
    all.
    """
    if isinstance(data, dict):
        data = data.get("data")
    if not isinstance(data, str) or not _DATA_FORM.fullmatch(data):
        return b""
    return bytes.fromhex(data[2:])
