"""What an EVM node is asked, and what it answers, in types.

Amounts are wei, gas and fees per gas included. Hashes and transaction ids are 0x and lower-case
hex; addresses are in EIP-55 form; data is bytes. Every method raises RpcFailure (daemon_rpc.py).
What does not live here: the token's calls (usdc.py), keys and signing (keys.py), when to ask.
Source: the Ethereum JSON-RPC specification (execution-apis); EIP-1559, EIP-2718.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final, Self

from rpcsvc.domain.addresses import evm_checksum
from rpcsvc.settlement.onchain.daemon_rpc import (
    Answer,
    BadAnswer,
    DaemonRpc,
    Endpoint,
    JsonObject,
    NodeError,
    Pause,
    TooLarge,
)
from rpcsvc.settlement.onchain.evm.usdc import keccak256

WIDEST_LOG_RANGE: Final = 2000

_QUANTITY: Final = re.compile(r"0x(0|[1-9a-f][0-9a-f]*)", re.ASCII | re.IGNORECASE)
_DATA: Final = re.compile(r"0x([0-9a-f]{2})*", re.ASCII | re.IGNORECASE)
_REVERTED: Final = 3
_HASH_BYTES: Final = 32
_ADDRESS_BYTES: Final = 20
# Nodes have no common code for "too many logs"; these codes and words cover those in use.
_LIMIT_EXCEEDED: Final = -32005
_TOO_MANY: Final = re.compile(r"limit|range|too many|too large|more than|exceed|timed? ?out", re.I)


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
class FeeData:
    """Fees of the moment, wei per gas (EIP-1559): of the latest block, and the node's advice."""

    base_fee: int
    tip: int


@dataclass(frozen=True, slots=True)
class Call:
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

    def __init__(self, error: NodeError, output: bytes) -> None:
        super().__init__(error.node, error.method, error.code, error.text, error.data)
        self.output = output


class EvmClient:
    """Asks one EVM node. Use as ``async with``. Everything raises RpcFailure."""

    def __init__(self, endpoint: Endpoint, *, pause: Pause = asyncio.sleep) -> None:
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
        fields = [self._fields("eth_getLogs", item) for item in items]
        return tuple(_log(item) for item in fields if item.value.get("removed") is not True)

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

    async def call(self, call: Call, at: BlockRef = Tag.LATEST) -> bytes:
        """What the contract returns. Raises Reverted."""
        params = [_call_params(call), _block_ref(at)]
        return self._data("eth_call", await self._trying("eth_call", params))

    async def estimate_gas(self, call: Call) -> int:
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

    async def submit(self, raw: bytes) -> SubmissionResult:
        """Hand a signed transaction to the network. The same bytes may be handed over again."""
        txid = "0x" + keccak256(raw).hex()
        try:
            answer = await self.rpc.act("eth_sendRawTransaction", ["0x" + raw.hex()])
        except NodeError as error:
            return SubmissionResult(_submission(error.text), txid, error.text)
        if not isinstance(answer, str) or answer.lower() != txid:
            raise self._bad("eth_sendRawTransaction", f"is not the transaction id {txid}")
        return SubmissionResult(Submission.ACCEPTED, txid)

    async def transaction(self, txid: str) -> EvmTransaction | None:
        """A transaction in the pool or the chain; None when unknown."""
        method = "eth_getTransactionByHash"
        answer = await self.rpc.read(method, [txid])
        return None if answer is None else _transaction(self._fields(method, answer))

    async def receipt(self, txid: str) -> Receipt | None:
        """What became of a transaction; None while it is not mined, or not any more."""
        method = "eth_getTransactionReceipt"
        answer = await self.rpc.read(method, [txid])
        return None if answer is None else _receipt(self._fields(method, answer))

    # --- plumbing ------------------------------------------------------------------------------

    async def _trying(self, method: str, params: Sequence[Any]) -> Any:
        try:
            return await self.rpc.read(method, params)
        except NodeError as error:
            if error.code == _REVERTED or "execution reverted" in error.text.lower():
                raise Reverted(error, _revert_output(error.data)) from error
            raise

    async def _block(self, method: str, which: str) -> Block | None:
        answer = await self.rpc.read(method, [which, False])
        return None if answer is None else _block(self._fields(method, answer))

    def _fields(self, method: str, value: Any) -> _Fields:
        return _Fields(self.rpc.endpoint.name, method, value)

    def _quantity(self, method: str, value: Any) -> int:
        return self._fields(method, {"result": value}).quantity("result")

    def _data(self, method: str, value: Any) -> bytes:
        return self._fields(method, {"result": value}).data("result")

    def _bad(self, method: str, problem: str) -> BadAnswer:
        return BadAnswer(self.rpc.endpoint.name, method, f"the answer {problem}")


class _Fields(Answer):
    """Fields in the encodings of Ethereum's JSON-RPC. Each method raises BadAnswer."""

    def quantity(self, key: str) -> int:
        text = self.text(key)
        if not _QUANTITY.fullmatch(text):
            raise self.bad(f"has no quantity under {key}")
        return int(text, 16)

    def optional_quantity(self, key: str) -> int | None:
        return None if self.value.get(key) is None else self.quantity(key)

    def data(self, key: str) -> bytes:
        return self._as_bytes(self.text(key), key)

    def hash(self, key: str) -> str:
        return "0x" + self._sized(key, _HASH_BYTES).hex()

    def optional_hash(self, key: str) -> str | None:
        return None if self.value.get(key) is None else self.hash(key)

    def address(self, key: str) -> str:
        return evm_checksum("0x" + self._sized(key, _ADDRESS_BYTES).hex())

    def topics(self) -> tuple[bytes, ...]:
        return tuple(self._as_bytes(text, "topics") for text in self.texts("topics"))

    def list_of(self, key: str) -> list[_Fields]:
        return [_Fields(self.node, self.method, item) for item in self.items(key)]

    def _sized(self, key: str, size: int) -> bytes:
        value = self.data(key)
        if len(value) != size:
            raise self.bad(f"has not {size} bytes under {key}")
        return value

    def _as_bytes(self, text: str, key: str) -> bytes:
        if not _DATA.fullmatch(text):
            raise self.bad(f"has no hex data under {key}")
        return bytes.fromhex(text[2:])


def _block(item: _Fields) -> Block:
    return Block(
        number=item.quantity("number"),
        hash=item.hash("hash"),
        parent=item.hash("parentHash"),
        timestamp=item.quantity("timestamp"),
        base_fee=item.optional_quantity("baseFeePerGas"),
    )


def _log(item: _Fields) -> Log:
    return Log(
        address=item.address("address"),
        topics=item.topics(),
        data=item.data("data"),
        txid=item.hash("transactionHash"),
        block_number=item.quantity("blockNumber"),
        block_hash=item.hash("blockHash"),
        log_index=item.quantity("logIndex"),
    )


def _receipt(item: _Fields) -> Receipt:
    return Receipt(
        txid=item.hash("transactionHash"),
        ok=item.quantity("status") == 1,
        block_number=item.quantity("blockNumber"),
        block_hash=item.hash("blockHash"),
        gas_used=item.quantity("gasUsed"),
        gas_price=item.quantity("effectiveGasPrice"),
        logs=tuple(_log(log) for log in item.list_of("logs")),
        l1_fee=item.optional_quantity("l1Fee"),
        has_operator_fee=any(
            item.optional_quantity(key) for key in ("operatorFeeScalar", "operatorFeeConstant")
        ),
    )


def _transaction(item: _Fields) -> EvmTransaction:
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


def _block_ref(at: BlockRef) -> str:
    return at.value if isinstance(at, Tag) else hex(at)


def _call_params(call: Call) -> JsonObject:
    params: JsonObject = {"to": call.to, "data": "0x" + call.data.hex()}
    if call.sender is not None:
        params["from"] = call.sender
    if call.value:
        params["value"] = hex(call.value)
    return params


def _revert_output(data: Any) -> bytes:
    """Some nodes give the bytes themselves, some an object around them, some nothing."""
    if isinstance(data, dict):
        data = data.get("data")
    if not isinstance(data, str) or not _DATA.fullmatch(data):
        return b""
    return bytes.fromhex(data[2:])


def _too_many_logs(error: NodeError | TooLarge) -> bool:
    if isinstance(error, TooLarge):
        return True
    return error.code == _LIMIT_EXCEEDED or bool(_TOO_MANY.search(error.text))


# JSON-RPC has no codes for these; the words are those of Geth, Nethermind, Erigon, Besu, Reth,
# Nitro and Anvil. The first that fits decides.
_SUBMISSION_WORDS: Final[Mapping[Submission, tuple[str, ...]]] = {
    Submission.KNOWN: (
        "already known",
        "already imported",
        "alreadyknown",
        "known transaction",
        "already exists",
        "already in",
    ),
    Submission.NONCE_TOO_LOW: ("nonce too low", "nonce is too low", "oldnonce", "old nonce"),
    Submission.NONCE_TOO_HIGH: ("nonce too high", "nonce is too high", "nonce gap", "noncegap"),
    Submission.REPLACEMENT_UNDERPRICED: (
        "replacement transaction underpriced",
        "replacementnotallowed",
        "could not replace",
    ),
    Submission.UNDERPRICED: (
        "underpriced",
        "feetoolow",
        "fee too low",
        "gas price too low",
        "less than block base fee",
        "below configured minimum",
    ),
    Submission.INSUFFICIENT_FUNDS: ("insufficient funds", "insufficientfunds", "upfront cost"),
}


def _submission(text: str) -> Submission:
    said = text.lower()
    for submission, words in _SUBMISSION_WORDS.items():
        if any(word in said for word in words):
            return submission
    return Submission.REFUSED
