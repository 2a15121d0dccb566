"""What an EVM node answers, in types, and reading it off the JSON.

Amounts are wei, gas and fees per gas included. Hashes and transaction ids are 0x and lower-case
hex; addresses are in EIP-55 form; data is bytes.
Source: the Ethereum JSON-RPC specification (execution-apis); EIP-1559, EIP-2718.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from rpcsvc.domain.addresses import evm_checksum
from rpcsvc.settlement.onchain.daemon_rpc import Fields, NodeError

_QUANTITY: Final = re.compile(r"0x(0|[1-9a-f][0-9a-f]*)", re.ASCII | re.IGNORECASE)
_DATA: Final = re.compile(r"0x([0-9a-f]{2})*", re.ASCII | re.IGNORECASE)
_HASH_BYTES: Final = 32
_ADDRESS_BYTES: Final = 20


class Tag(StrEnum):
    """Blocks by name. FINALIZED and SAFE are not known to every network."""

    LATEST = "latest"
    PENDING = "pending"
    SAFE = "safe"
    FINALIZED = "finalized"


BlockRef = int | Tag


@dataclass(frozen=True, slots=True)
class Block:
    """A block. ``timestamp``: seconds; ``base_fee``: None on a network without EIP-1559."""

    number: int
    hash: str
    parent: str
    timestamp: int
    base_fee: int | None


@dataclass(frozen=True, slots=True)
class LogFilter:
    """Which logs: of one contract, with these topics by position (None: any)."""

    address: str
    topics: tuple[bytes | None, ...]


@dataclass(frozen=True, slots=True)
class Log:
    """An event. ``log_index`` counts within the block: it changes when a block is replaced.

    Receipt.position_of gives the place within the transaction, which does not.
    """

    address: str
    topics: tuple[bytes, ...]
    data: bytes
    txid: str
    block_number: int
    block_hash: str
    log_index: int


@dataclass(frozen=True, slots=True)
class LogRange:
    """All logs of the blocks ``first`` to ``last``, both included."""

    first: int
    last: int
    logs: tuple[Log, ...]


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of a mined transaction. ``ok`` False: it failed, and its nonce is spent.

    The fee is ``gas_used`` times ``gas_price``. On OP-stack chains ``l1_fee`` comes on top, None
    where the node tells none; and ``has_operator_fee``: one more, from Isthmus on, that is reckoned
    as the chain's release says.
    """

    txid: str
    ok: bool
    block_number: int
    block_hash: str
    gas_used: int
    gas_price: int
    logs: tuple[Log, ...]
    l1_fee: int | None = None
    has_operator_fee: bool = False

    def position_of(self, log_index: int) -> int:
        """Where among this transaction's logs the one of that ``log_index`` is, from 0.

        Raises ValueError when the transaction has no such log.
        """
        return [log.log_index for log in self.logs].index(log_index)


@dataclass(frozen=True, slots=True)
class EvmTransaction:
    """A transaction that the node knows. ``block_number`` is None until it is mined."""

    txid: str
    sender: str
    to: str | None
    nonce: int
    value: int
    data: bytes
    block_number: int | None
    block_hash: str | None


@dataclass(frozen=True, slots=True)
class SentIn:
    """What one account sent in a block, by nonce."""

    block: Block
    sent: Mapping[int, EvmTransaction]


@dataclass(frozen=True, slots=True)
class FeeData:
    """Fees of the moment, wei per gas (EIP-1559): of the latest block, and the node's advice."""

    base_fee: int
    tip: int


@dataclass(frozen=True, slots=True)
class EvmCall:
    """A call or transaction to be tried out, not sent."""

    to: str
    data: bytes = b""
    sender: str | None = None
    value: int = 0


class Submission(StrEnum):
    """What a node said to a raw transaction.

    Only ACCEPTED and KNOWN say that it has it. Of the others none proves that the transaction is
    not in the pool or mined: the same bytes, mined, get NONCE_TOO_LOW too. Look up its id.
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
class SubmissionResult:
    """A node's answer to a raw transaction; ``text`` is the node's own, for the log."""

    submission: Submission
    txid: str
    text: str = ""


class Reverted(NodeError):
    """A call or an estimate reverted. ``output``: what the contract gave as reason, ABI bytes."""

    def __init__(self, error: NodeError) -> None:
        super().__init__(error.node, error.method, error.code, error.text, error.data)
        self.output = _revert_output(error.data)


class EvmFields(Fields):
    """Fields in the encodings of Ethereum's JSON-RPC. Each method raises BadAnswer."""

    def quantity(self, key: str) -> int:
        """A number: 0x and hex digits without leading zeros."""
        text = self.text(key)
        if not _QUANTITY.fullmatch(text):
            raise self.bad(f"has no quantity under {key}")
        return int(text, 16)

    def optional_quantity(self, key: str) -> int | None:
        """A number, or None where there is none."""
        return None if self.value.get(key) is None else self.quantity(key)

    def data(self, key: str) -> bytes:
        """Bytes of any length."""
        return self._as_bytes(self.text(key), key)

    def hash(self, key: str) -> str:
        """32 bytes, as 0x and lower-case hex."""
        return "0x" + self._sized(key, _HASH_BYTES).hex()

    def optional_hash(self, key: str) -> str | None:
        """32 bytes, or None where there are none."""
        return None if self.value.get(key) is None else self.hash(key)

    def address(self, key: str) -> str:
        """An address in EIP-55 form."""
        return evm_checksum("0x" + self._sized(key, _ADDRESS_BYTES).hex())

    def topics(self) -> tuple[bytes, ...]:
        """The topics of a log."""
        return tuple(self._as_bytes(text, "topics") for text in self.texts("topics"))

    def list_of(self, key: str) -> list[EvmFields]:
        """The objects of a list."""
        return [EvmFields(self.node, self.method, item) for item in self.items(key)]

    def _sized(self, key: str, size: int) -> bytes:
        value = self.data(key)
        if len(value) != size:
            raise self.bad(f"has not {size} bytes under {key}")
        return value

    def _as_bytes(self, text: str, key: str) -> bytes:
        if not _DATA.fullmatch(text):
            raise self.bad(f"has no hex data under {key}")
        return bytes.fromhex(text[2:])


def read_block(item: EvmFields) -> Block:
    """A block of eth_getBlockByNumber. Raises BadAnswer."""
    return Block(
        number=item.quantity("number"),
        hash=item.hash("hash"),
        parent=item.hash("parentHash"),
        timestamp=item.quantity("timestamp"),
        base_fee=item.optional_quantity("baseFeePerGas"),
    )


def read_sent_in(item: EvmFields, sender: str) -> SentIn:
    """What ``sender`` sent in a block of eth_getBlockByNumber that has whole transactions.

    Of the others only the sender is read: some networks have kinds of their own. Raises BadAnswer.
    """
    made = item.list_of("transactions")
    mine = [each for each in made if each.text("from").lower() == sender.lower()]
    return SentIn(read_block(item), {one.nonce: one for one in map(read_transaction, mine)})


def read_log(item: EvmFields) -> Log:
    """A log of eth_getLogs or of a receipt. Raises BadAnswer."""
    return Log(
        address=item.address("address"),
        topics=item.topics(),
        data=item.data("data"),
        txid=item.hash("transactionHash"),
        block_number=item.quantity("blockNumber"),
        block_hash=item.hash("blockHash"),
        log_index=item.quantity("logIndex"),
    )


def read_receipt(item: EvmFields) -> Receipt:
    """The answer of eth_getTransactionReceipt. Raises BadAnswer."""
    return Receipt(
        txid=item.hash("transactionHash"),
        ok=item.quantity("status") == 1,
        block_number=item.quantity("blockNumber"),
        block_hash=item.hash("blockHash"),
        gas_used=item.quantity("gasUsed"),
        gas_price=item.quantity("effectiveGasPrice"),
        logs=tuple(read_log(log) for log in item.list_of("logs")),
        l1_fee=item.optional_quantity("l1Fee"),
        has_operator_fee=any(
            item.optional_quantity(key) for key in ("operatorFeeScalar", "operatorFeeConstant")
        ),
    )


def read_transaction(item: EvmFields) -> EvmTransaction:
    """The answer of eth_getTransactionByHash. Raises BadAnswer."""
    return EvmTransaction(
        txid=item.hash("hash"),
        sender=item.address("from"),
        to=None if item.value.get("to") is None else item.address("to"),
        nonce=item.quantity("nonce"),
        value=item.quantity("value"),
        data=item.data("input"),
        block_number=item.optional_quantity("blockNumber"),
        block_hash=item.optional_hash("blockHash"),
    )


def _revert_output(data: Any) -> bytes:
    """Some nodes give the bytes themselves, some an object around them, some nothing."""
    if isinstance(data, dict):
        data = data.get("data")
    if not isinstance(data, str) or not _DATA.fullmatch(data):
        return b""
    return bytes.fromhex(data[2:])
