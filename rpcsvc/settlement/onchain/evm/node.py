"""The client of an EVM node, and strict models of what it answers.

Amounts are wei, gas and fees per gas included. Hashes and transaction ids are 0x and lower-case
hex; addresses are in EIP-55 form; data is bytes. Every method raises RpcFailure (daemon_rpc.py).
Source: the Ethereum JSON-RPC specification (execution-apis); EIP-1559, EIP-2718.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import Field, PlainValidator, TypeAdapter

from rpcsvc.domain.addresses import evm_checksum
from rpcsvc.domain.usdc import keccak256
from rpcsvc.settlement.onchain.daemon_rpc import (
    BadAnswer,
    DaemonEndpoint,
    DaemonRpc,
    JsonObject,
    Model,
    NodeError,
    Pause,
    Text,
    TooLarge,
    named,
    read_answer,
    read_field,
)

_QUANTITY_FORM: Final = re.compile(r"0x(0|[1-9a-f][0-9a-f]*)", re.ASCII | re.IGNORECASE)
_DATA_FORM: Final = re.compile(r"0x([0-9a-f]{2})*", re.ASCII | re.IGNORECASE)
_HASH_FORM: Final = re.compile(r"0x[0-9a-f]{64}", re.ASCII | re.IGNORECASE)
_ADDRESS_FORM: Final = re.compile(r"0x[0-9a-f]{40}", re.ASCII | re.IGNORECASE)

T = TypeVar("T")

# The events of a pass are of one contract.
_checksum: Final = lru_cache(maxsize=1024)(evm_checksum)


class Tag(StrEnum):
    """Blocks by name. FINALIZED is not known to every network."""

    LATEST = "latest"
    PENDING = "pending"
    FINALIZED = "finalized"


BlockRef = int | Tag


def read_quantity(value: Any) -> int:
    """A number: 0x and hex digits without leading zeros. Raises ValueError."""
    if not isinstance(value, str) or not _QUANTITY_FORM.fullmatch(value):
        raise ValueError("it is no quantity")
    return int(value, 16)


def read_data(value: Any) -> bytes:
    """Bytes of any length: 0x and hex digits. Raises ValueError."""
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
    return _checksum(value)


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
    """Which logs: of one contract, with these topics by position (None: any)."""

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
    """All logs of the blocks ``first`` to ``last``, both included."""

    first: int
    last: int
    logs: tuple[Log, ...]


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
        """Where among this transaction's logs the one of that ``log_index`` is, from 0.

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
    """A call or transaction to be tried out, not sent. ``gas``: it may not take more."""

    to: str
    data: bytes = b""
    sender: str | None = None
    value: int = 0
    gas: int | None = None


class EvmSubmission(StrEnum):
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
class EvmSubmissionResult:
    """A node's answer to a raw transaction; ``text`` is the node's own, for the log."""

    submission: EvmSubmission
    txid: str
    text: str = ""


class Reverted(NodeError):
    """A call or an estimate reverted. ``output``: what the contract gave as reason, ABI bytes."""

    def __init__(self, error: NodeError) -> None:
        super().__init__(error.node, error.method, error.code, error.text, error.data)
        self.output = _revert_output(error.data)


def _revert_output(data: Any) -> bytes:
    """Some nodes give the bytes themselves, some an object around them, some nothing."""
    if isinstance(data, dict):
        data = data.get("data")
    if not isinstance(data, str) or not _DATA_FORM.fullmatch(data):
        return b""
    return bytes.fromhex(data[2:])


WIDEST_LOG_RANGE: Final = 2000


@dataclass(frozen=True, slots=True)
class _Sender:
    sender: Annotated[Text, named("from")]


_QUANTITY: Final[TypeAdapter[int]] = TypeAdapter(Quantity)
_DATA: Final[TypeAdapter[bytes]] = TypeAdapter(Data)
_REVERTED: Final = 3
# Nodes have no common code for "too many logs"; these codes and words cover those in use.
_LIMIT_EXCEEDED: Final = -32005
_TOO_MANY: Final = re.compile(r"limit|range|too many|too large|more than|exceed|timed? ?out", re.I)


class EvmClient:
    """Asks one EVM node. Use as ``async with``. Everything raises RpcFailure."""

    def __init__(self, endpoint: DaemonEndpoint, *, pause: Pause = asyncio.sleep) -> None:
        self.rpc = DaemonRpc(endpoint, pause=pause)

    async def __aenter__(self) -> Self:
        self.rpc.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.rpc.close()

    # --- the chain -----------------------------------------------------------------------------

    async def chain_id(self) -> int:
        """The network's number (EIP-155)."""
        return self._quantity("eth_chainId", await self.rpc.read("eth_chainId", []))

    async def block(self, at: BlockRef = Tag.LATEST) -> Block | None:
        """A block by number or tag; None when the node has none there."""
        return await self._block("eth_getBlockByNumber", _block_ref(at))

    async def sent_in(self, number: int, sender: str) -> SentIn | None:
        """What an account (EIP-55) sent in a block; None when the node has no such block.

        Reads the whole block, megabytes on some networks.
        """
        method = "eth_getBlockByNumber"
        answer = await self.rpc.read(method, [_block_ref(number), True])
        return None if answer is None else read_sent_in(self.rpc.endpoint.name, answer, sender)

    async def pending_block(self, *, seconds: float) -> Any:
        """The block that the node would mine next, with whole transactions, as JSON has it.

        Null from some nodes; others answer with their newest block, or refuse. Asked once.
        """
        params = [Tag.PENDING.value, True]
        return await self.rpc.act("eth_getBlockByNumber", params, seconds=seconds)

    async def logs(self, wanted: LogFilter, first: int, last: int) -> tuple[Log, ...]:
        """Logs of the blocks ``first`` to ``last``, both included; at most WIDEST_LOG_RANGE blocks.

        ``last`` must be a block that this node has: some nodes answer with nothing beyond theirs.
        """
        if not 0 <= first <= last < first + WIDEST_LOG_RANGE:
            raise ValueError(f"1 to {WIDEST_LOG_RANGE} blocks at once, not {first} to {last}")
        topics = [None if topic is None else "0x" + topic.hex() for topic in wanted.topics]
        params = {
            "address": wanted.address,
            "topics": topics,
            "fromBlock": hex(first),
            "toBlock": hex(last),
        }
        items = await self.rpc.read("eth_getLogs", [params])
        if not isinstance(items, list):
            raise self._bad("eth_getLogs", "is not a list")
        kept = [item for item in items if not _is_removed(item)]
        return self._model(tuple[Log, ...], "eth_getLogs", kept)

    async def scan(
        self, wanted: LogFilter, first: int, last: int, *, span: int = WIDEST_LOG_RANGE
    ) -> AsyncIterator[LogRange]:
        """Logs of a long range, in order, ``span`` blocks at a time, fewer if the node wants it."""
        while first <= last:
            upto = min(first + span - 1, last)
            try:
                logs = await self.logs(wanted, first, upto)
            except (NodeError, TooLarge) as error:
                if upto == first or not _too_many_logs(error):
                    raise
                span = (upto - first + 1) // 2
                continue
            yield LogRange(first, upto, logs)
            first = upto + 1

    # --- accounts and contracts ----------------------------------------------------------------

    async def nonce(self, address: str, at: BlockRef = Tag.PENDING) -> int:
        """How many transactions the account has sent; PENDING counts those in the pool."""
        params = [address, _block_ref(at)]
        answer = await self.rpc.read("eth_getTransactionCount", params)
        return self._quantity("eth_getTransactionCount", answer)

    async def ether(self, address: str, at: BlockRef = Tag.LATEST) -> int:
        """The account's balance of the network's own coin, in wei."""
        answer = await self.rpc.read("eth_getBalance", [address, _block_ref(at)])
        return self._quantity("eth_getBalance", answer)

    async def code(self, address: str, at: BlockRef = Tag.LATEST) -> bytes:
        """The contract's code; empty for an account that is none."""
        answer = await self.rpc.read("eth_getCode", [address, _block_ref(at)])
        return self._data("eth_getCode", answer)

    async def call(self, call: EvmCall, at: BlockRef = Tag.LATEST) -> bytes:
        """What the contract returns. Raises Reverted."""
        params = [_call_params(call), _block_ref(at)]
        return self._data("eth_call", await self._trying("eth_call", params))

    async def estimate_gas(self, call: EvmCall) -> int:
        """Gas that the call would use now. Raises Reverted."""
        answer = await self._trying("eth_estimateGas", [_call_params(call)])
        return self._quantity("eth_estimateGas", answer)

    async def fees(self) -> FeeData:
        """Fees of the moment. Raises BadAnswer on a network without EIP-1559."""
        block = await self.block()
        if block is None or block.base_fee is None:
            raise self._bad("eth_getBlockByNumber", "has no base fee")
        answer = await self.rpc.read("eth_maxPriorityFeePerGas", [])
        return FeeData(block.base_fee, self._quantity("eth_maxPriorityFeePerGas", answer))

    # --- transactions --------------------------------------------------------------------------

    async def submit(self, raw: bytes) -> EvmSubmissionResult:
        """Publish a signed transaction. Repeating it is safe."""
        txid = "0x" + keccak256(raw).hex()
        try:
            answer = await self.rpc.act("eth_sendRawTransaction", ["0x" + raw.hex()])
        except NodeError as error:
            return EvmSubmissionResult(_submission(error.text), txid, error.text)
        if not isinstance(answer, str) or answer.lower() != txid:
            raise self._bad("eth_sendRawTransaction", f"is not the transaction id {txid}")
        return EvmSubmissionResult(EvmSubmission.ACCEPTED, txid)

    async def transaction(self, txid: str) -> EvmTransaction | None:
        """A transaction in the pool or the chain; None when unknown."""
        method = "eth_getTransactionByHash"
        answer = await self.rpc.read(method, [txid])
        return None if answer is None else self._model(EvmTransaction, method, answer)

    async def receipt(self, txid: str) -> Receipt | None:
        """The receipt of a transaction; None while it is not mined, or reorged out."""
        method = "eth_getTransactionReceipt"
        answer = await self.rpc.read(method, [txid])
        return None if answer is None else self._model(Receipt, method, answer)

    # --- plumbing ------------------------------------------------------------------------------

    async def _trying(self, method: str, params: Sequence[Any]) -> Any:
        try:
            return await self.rpc.read(method, params)
        except NodeError as error:
            if error.code == _REVERTED or "execution reverted" in error.text.lower():
                raise Reverted(error) from error
            raise

    async def _block(self, method: str, which: str) -> Block | None:
        answer = await self.rpc.read(method, [which, False])
        return None if answer is None else self._model(Block, method, answer)

    def _model(self, model: Model[T], method: str, value: Any) -> T:
        return read_answer(model, self.rpc.endpoint.name, method, value)

    def _quantity(self, method: str, value: Any) -> int:
        return self._model(_QUANTITY, method, value)

    def _data(self, method: str, value: Any) -> bytes:
        return self._model(_DATA, method, value)

    def _bad(self, method: str, problem: str) -> BadAnswer:
        return BadAnswer(self.rpc.endpoint.name, method, f"the answer {problem}")


def read_sent_in(node: str, answer: Any, sender: str) -> SentIn:
    """What ``sender`` sent in a block of eth_getBlockByNumber that has whole transactions.

    Of the others only the sender is read: some networks have kinds of their own. Raises BadAnswer.
    """
    method = "eth_getBlockByNumber"
    block = read_answer(Block, node, method, answer)
    senders = read_field(list[_Sender], node, method, answer, "transactions")
    mine = [
        read_answer(EvmTransaction, node, method, item)
        for item, by in zip(answer["transactions"], senders, strict=True)
        if by.sender.lower() == sender.lower()
    ]
    return SentIn(block, {one.nonce: one for one in mine})


def _is_removed(item: Any) -> bool:
    """Whether it is a log that a reorganisation took away."""
    return isinstance(item, dict) and item.get("removed") is True


def _block_ref(at: BlockRef) -> str:
    return at.value if isinstance(at, Tag) else hex(at)


def _call_params(call: EvmCall) -> JsonObject:
    params: JsonObject = {"to": call.to, "data": "0x" + call.data.hex()}
    if call.sender is not None:
        params["from"] = call.sender
    if call.value:
        params["value"] = hex(call.value)
    if call.gas is not None:
        params["gas"] = hex(call.gas)
    return params


def _too_many_logs(error: NodeError | TooLarge) -> bool:
    if isinstance(error, TooLarge):
        return True
    return error.code == _LIMIT_EXCEEDED or bool(_TOO_MANY.search(error.text))


# JSON-RPC has no codes for these; the words are those of Geth, Nethermind, Erigon, Besu, Reth,
# Nitro and Anvil. The first that fits decides.
_SUBMISSION_WORDS: Final[Mapping[EvmSubmission, tuple[str, ...]]] = {
    EvmSubmission.KNOWN: (
        "already known",
        "already imported",
        "alreadyknown",
        "known transaction",
        "already exists",
        "already in",
    ),
    EvmSubmission.NONCE_TOO_LOW: ("nonce too low", "nonce is too low", "oldnonce", "old nonce"),
    EvmSubmission.NONCE_TOO_HIGH: ("nonce too high", "nonce is too high", "nonce gap", "noncegap"),
    EvmSubmission.REPLACEMENT_UNDERPRICED: (
        "replacement transaction underpriced",
        "replacementnotallowed",
        "could not replace",
    ),
    EvmSubmission.UNDERPRICED: (
        "underpriced",
        "feetoolow",
        "fee too low",
        "gas price too low",
        "less than block base fee",
        "below configured minimum",
    ),
    EvmSubmission.INSUFFICIENT_FUNDS: ("insufficient funds", "insufficientfunds", "upfront cost"),
}


def _submission(text: str) -> EvmSubmission:
    said = text.lower()
    for submission, words in _SUBMISSION_WORDS.items():
        if any(word in said for word in words):
            return submission
    return EvmSubmission.REFUSED
