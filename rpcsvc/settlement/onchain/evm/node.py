"""An EVM node: its client, and the check that it can be relied on.

``EvmConnection`` asks a node nothing for an order before it is on the right chain with the right
token. A failed call discards that result, so that a node which comes back as another one is caught.
Source: the Ethereum JSON-RPC specification (execution-apis); EIP-1559.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, Final, Self, TypeVar

import structlog
from pydantic import TypeAdapter

from rpcsvc.domain import usdc
from rpcsvc.errors import Unavailable
from rpcsvc.health import Condition, Severity
from rpcsvc.settlement.onchain.daemon_rpc import (
    BadAnswer,
    BatchRefused,
    Call,
    ChainUnusable,
    DaemonEndpoint,
    DaemonRpc,
    HasTime,
    JsonObject,
    Model,
    NodeError,
    Pause,
    Resting,
    RpcFailure,
    StallDetector,
    Text,
    TooLarge,
    TooManyCalls,
    always,
    named,
    read_answer,
    read_field,
)
from rpcsvc.settlement.onchain.evm.node_types import (
    Block,
    BlockRef,
    Data,
    EvmCall,
    EvmSubmission,
    EvmSubmissionResult,
    EvmTransaction,
    FeeData,
    Log,
    LogFilter,
    LogRange,
    Quantity,
    Receipt,
    Reverted,
    SentIn,
    Tag,
)
from rpcsvc.settlement.onchain.evm.records import BlockPoint, EvmNetwork
from rpcsvc.settlement.onchain.thresholds import DepthTag, tags

log = structlog.get_logger(__name__)

WIDEST_LOG_RANGE: Final = 2000


_QUANTITY: Final[TypeAdapter[int]] = TypeAdapter(Quantity)
_DATA: Final[TypeAdapter[bytes]] = TypeAdapter(Data)
_REVERTED: Final = 3
# Nodes have no common code for "too many logs"; these codes and words cover those in use.
_LIMIT_EXCEEDED: Final = -32005
_TOO_MANY: Final = re.compile(r"limit|range|too many|too large|more than|exceed|timed? ?out", re.I)
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
_DECIMALS: Final = 6
_LEAST_GAP_MS: Final = 10 * 60_000
_LONGEST_GAP_BLOCKS: Final = 100

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Sender:
    sender: Annotated[Text, named("from")]


class EvmClient:
    """Calls one EVM node. Use as ``async with``. Every method raises RpcFailure."""

    def __init__(
        self,
        endpoint: DaemonEndpoint,
        *,
        pause: Pause = asyncio.sleep,
        has_time: HasTime = always,
    ) -> None:
        self.rpc = DaemonRpc(endpoint, pause=pause, has_time=has_time)

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
        """Return the transactions that an account (EIP-55) sent in a block; None if there is no
        such block.

        Reads the whole block, megabytes on some networks.
        """
        method = "eth_getBlockByNumber"
        answer = await self.rpc.read(method, [_block_ref(number), True])
        return None if answer is None else read_sent_in(self.rpc.endpoint.name, answer, sender)

    async def pending_block(self, *, seconds: float) -> Any:
        """Return the block that the node would mine next, with whole transactions, as JSON has it.

        Null from some nodes; others answer with their newest block, or refuse. Asked once.
        """
        params = [Tag.PENDING.value, True]
        return await self.rpc.act("eth_getBlockByNumber", params, seconds=seconds)

    async def logs(
        self, wanted: LogFilter, first: int, last: int, after: BlockPoint | None = None
    ) -> LogRange:
        """Return the logs of the blocks ``first`` to ``last``, both included; at most
        WIDEST_LOG_RANGE blocks. ``after``: the block that was read before.

        Nodes list nothing beyond their newest block, and no error. So block ``last`` is asked for
        in the same batch, and ``after``, which a node on a replaced branch has otherwise: whoever
        passes the batch on whole has one node answer all. A proxy that divides a batch over several
        nodes makes this no proof. A node that takes no batches is asked for the blocks first: of
        several behind one address, another one may then list.
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
        numbers = [last] if after is None else [last, after.number]
        try:
            blocks, items = await self.with_blocks(numbers, ("eth_getLogs", [params]))
        except BatchRefused:
            blocks = [await self.block(number) for number in numbers]
            items = await self.rpc.read("eth_getLogs", [params])
        if not isinstance(items, list):
            raise self._bad("eth_getLogs", "is not a list")
        kept = [item for item in items if not _is_removed(item)]
        logs = self._model(tuple[Log, ...], "eth_getLogs", kept)
        found = LogRange.shown(first, last, logs, blocks[0])
        return found if after is None else found.joined(after, blocks[1])

    async def with_blocks(
        self, numbers: Sequence[int], call: Call
    ) -> tuple[list[Block | None], Any]:
        """Return blocks and the result of a call, from one node; None: it lacks the block.

        Raises BatchRefused when the node does not answer all at once.
        """
        method = "eth_getBlockByNumber"
        asked = [(method, [_block_ref(number), False]) for number in numbers]
        *found, result = await self.rpc.read_all([*asked, call])
        for each in found:
            if isinstance(each, NodeError):
                raise BatchRefused(self.rpc.endpoint.name, method, str(each))
        if isinstance(result, NodeError):
            raise result
        blocks = [None if each is None else self._model(Block, method, each) for each in found]
        for number, block in zip(numbers, blocks, strict=True):
            if block is not None and block.number != number:
                raise self._bad(method, f"is not block {number}")
        return blocks, result

    async def scan(
        self,
        wanted: LogFilter,
        first: int,
        last: int,
        *,
        span: int = WIDEST_LOG_RANGE,
        after: BlockPoint | None = None,
    ) -> AsyncIterator[LogRange]:
        """Yield the logs of a long range, in order, ``span`` blocks at a time, fewer if the node
        refuses. ``after`` as in ``logs``, of the first; each later one follows those before it.
        """
        while first <= last:
            upto = min(first + span - 1, last)
            try:
                found = await self.logs(wanted, first, upto, after)
            except (NodeError, TooLarge) as error:
                if upto == first or not _too_many_logs(error):
                    raise
                span = (upto - first + 1) // 2
                continue
            yield found
            first = upto + 1
            if after is not None and found.proven is not None:
                after = max(after, found.proven, key=lambda block: block.number)

    # --- accounts and contracts ----------------------------------------------------------------

    async def nonce(self, address: str, at: BlockRef = Tag.PENDING) -> int:
        """Return the number of transactions the account sent; PENDING counts those in the pool."""
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
        """Return the contract's answer. Raises Reverted."""
        params = [_call_params(call), _block_ref(at)]
        return self._data("eth_call", await self._trying("eth_call", params))

    async def estimate_gas(self, call: EvmCall) -> int:
        """Return the gas that the call would use now. Raises Reverted."""
        answer = await self._trying("eth_estimateGas", [_call_params(call)])
        return self._quantity("eth_estimateGas", answer)

    async def fees(self, top: Block | None = None) -> FeeData:
        """Return the fees of the moment, ``top`` being the newest block, if that is known.

        Raises BadAnswer on a network without EIP-1559.
        """
        block = await self.block() if top is None else top
        if block is None or block.base_fee is None:
            raise self._bad("eth_getBlockByNumber", "has no base fee")
        answer = await self.rpc.read("eth_maxPriorityFeePerGas", [])
        return FeeData(block.base_fee, self._quantity("eth_maxPriorityFeePerGas", answer))

    # --- transactions --------------------------------------------------------------------------

    async def submit(self, raw: bytes) -> EvmSubmissionResult:
        """Publish a signed transaction. Repeating it is safe."""
        (said,) = await self._published([raw])
        if isinstance(said, RpcFailure):
            raise said
        return said

    async def submit_each(self, raws: Sequence[bytes]) -> list[EvmSubmissionResult | RpcFailure]:
        """Publish signed transactions, in this order; return the result or failure of each.

        Repeating it is safe.
        """
        return await self._published(raws)

    async def _published(self, raws: Sequence[bytes]) -> list[EvmSubmissionResult | RpcFailure]:
        calls = [("eth_sendRawTransaction", ["0x" + raw.hex()]) for raw in raws]
        answers = await self.rpc.publish_each(calls)
        return [self._submitted(raw, answer) for raw, answer in zip(raws, answers, strict=True)]

    def _submitted(self, raw: bytes, answer: Any) -> EvmSubmissionResult | RpcFailure:
        txid = "0x" + usdc.keccak256(raw).hex()
        if isinstance(answer, NodeError):
            return EvmSubmissionResult(_submission(answer.text), txid, answer.text)
        if isinstance(answer, RpcFailure):
            return answer
        if not isinstance(answer, str) or answer.lower() != txid:
            return self._bad("eth_sendRawTransaction", f"is not the transaction id {txid}")
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
    """Return the transactions of ``sender`` in a block of eth_getBlockByNumber that has whole ones.

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


def _submission(text: str) -> EvmSubmission:
    said = text.lower()
    for submission, words in _SUBMISSION_WORDS.items():
        if any(word in said for word in words):
            return submission
    return EvmSubmission.REFUSED


# --- whether it can be relied on ----------------------------------------------------------------


class Conditions:
    """The conditions of one part of a network, by key; a new text is logged."""

    def __init__(self, network: str, severity: Severity = Severity.FAULT) -> None:
        self._network = network
        self._severity = severity
        self._texts: dict[str, str] = {}

    def set(self, key: str, text: str | None) -> None:
        """Keep a condition, or drop it (None)."""
        if text is None:
            self._texts.pop(key, None)
            return
        if self._texts.get(key) != text:
            log.error("evm_condition_reported", network=self._network, condition=text)
        self._texts[key] = text

    def present(self) -> list[Condition]:
        """Return all present conditions."""
        return [Condition(text, self._severity) for text in self._texts.values()]


class EvmConnection:
    """A checked node. ``problem``: the reason not to use it, for the operator; None: there is
    none.

    ``domain`` is the token's EIP-712 domain, found to be the contract's own. ``paused``: the token
    moves nothing for anyone now.
    """

    def __init__(self, client: EvmClient, network: EvmNetwork) -> None:
        self.client = client
        self.network = network
        self.problem: str | None = "not started"
        self.paused = False
        self._stall_detector = StallDetector(
            max(_LEAST_GAP_MS, round(_LONGEST_GAP_BLOCKS * network.block_seconds * 1000))
        )
        self._domain: usdc.Domain | None = None
        self._is_checked = False
        self._failures = 0

    @property
    def domain(self) -> usdc.Domain:
        """The token's domain. Raises errors.Unavailable before the first check."""
        if self._domain is None:
            raise self._unavailable()
        return self._domain

    @property
    def failures(self) -> int:
        """The number of failed calls: once it has changed, the node may be another one."""
        return self._failures

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Turn failures of the node into errors.Unavailable, and remember the reason."""
        try:
            yield
        except (Resting, TooManyCalls) as failure:
            # The node is the one that was checked: to check it again would be more calls.
            self._note(
                f"the node of {self.network.name} asks for fewer calls: it is asked again after a"
                " rest"
            )
            raise self._unavailable() from failure
        except RpcFailure as failure:
            verb = "refuses" if isinstance(failure, NodeError) else "is down"
            self._is_checked = False
            self._note(f"the node of {self.network.name} {verb}: {failure}")
            raise self._unavailable() from failure
        except ChainUnusable as found:
            self._is_checked = False
            self._note(str(found))
            raise self._unavailable() from found

    async def check(self) -> Block:
        """Return the newest block, of a node that was found right, and note whether USDC is paused.

        Raises RpcFailure and ChainUnusable; errors.Unavailable when a concurrent call failed: the
        node that answers now may not be the one that was checked.
        """
        failures = self._failures
        await self._check_node()
        with self.client.rpc.together():
            block, self.paused = await asyncio.gather(
                self.client.block(), self._ask(usdc.PAUSED, usdc.read_bool)
            )
        return self._accepted(block, failures)

    async def head(self) -> Block:
        """Return the newest block, as ``check`` does. Asks nothing of the token."""
        failures = self._failures
        await self._check_node()
        return self._accepted(await self.client.block(), failures)

    def _accepted(self, block: Block | None, failures: int) -> Block:
        if block is None:
            raise ChainUnusable(f"the node of {self.network.name} has no block")
        self._stall_detector.saw(block.number)
        if self._failures != failures:
            raise self._unavailable()
        if self.problem is not None:
            log.info("evm_connected", network=self.network.name, block=block.number)
        self.problem, self._is_checked = None, True
        return block

    def block_age(self) -> int | None:
        """Return the time (ms) since the node showed a new block; None before the first."""
        return self._stall_detector.age_ms()

    def height(self) -> int | None:
        """The number of the node's newest block at the last look; None before the first."""
        return self._stall_detector.height

    def stall(self) -> str | None:
        """A message for the operator when the chain has stalled; else None."""
        return self._stall_detector.problem(f"the node of {self.network.name}")

    async def has(self, point: BlockPoint) -> bool:
        """Whether this block is on the node's chain now. Raises RpcFailure."""
        block = await self.client.block(point.number)
        return block is not None and block.hash == point.hash

    async def is_blacklisted(self, account: str) -> bool:
        """Whether the token refuses this account, as sender and as recipient."""
        return await self._ask(usdc.is_blacklisted(account), usdc.read_bool)

    async def balance(self, account: str, at: BlockRef = Tag.LATEST) -> int:
        """The account's USDC units in a block."""
        return await self._ask(usdc.balance_of(account), usdc.read_uint, at)

    async def _check_node(self) -> None:
        """Check chain and token, unless that was done since the node failed last."""
        if not self._is_checked:
            await self._check_network()
            for tag in tags(self.network.thresholds):
                await self.tagged(tag)
            self._domain = await self._checked_domain()

    async def _check_network(self) -> None:
        found = await self.client.chain_id()
        if found != self.network.chain_id:
            raise ChainUnusable(
                f"wrong network: the node of {self.network.name} is on chain {found}, not on"
                f" {self.network.chain_id}"
            )

    async def tagged(self, tag: DepthTag) -> int:
        """Return the number of the newest block with a tag that deposits wait for.

        Raises ChainUnusable for a node that does not know the tag: no block would be called final.
        """
        try:
            block = await self.client.block(Tag(tag.value))
        except NodeError:
            block = None
        if block is None:
            raise ChainUnusable(
                f"the node of {self.network.name} names no block of the tag {tag.value}: use"
                " another node, or onchain.usdc_confirmations without the tag"
            )
        return block.number

    async def _checked_domain(self) -> usdc.Domain:
        """Return the contract's domain; its name differs between chains."""
        token = self.network.token
        if not await self.client.code(token):
            raise ChainUnusable(f"there is no contract at {token} on {self.network.name}")
        decimals = await self._ask(usdc.DECIMALS, usdc.read_uint)
        if decimals != _DECIMALS:
            raise ChainUnusable(
                f"the token on {self.network.name} has {decimals} decimals, USDC has 6"
            )
        name = await self._ask(usdc.NAME, usdc.read_string)
        version = await self._ask(usdc.VERSION, usdc.read_string)
        domain = usdc.Domain(name, version, self.network.chain_id, token)
        if domain.separator() != await self._ask(usdc.DOMAIN_SEPARATOR, usdc.bytes32_word):
            raise ChainUnusable(
                f"the token on {self.network.name} signs in another domain than its name, version,"
                " chain and address say: it is not the USDC that is meant"
            )
        return domain

    async def _ask(self, data: bytes, read: Callable[[bytes], T], at: BlockRef = Tag.LATEST) -> T:
        """Return the token's answer to a call.

        Raises RpcFailure; ChainUnusable when the token lacks the function.
        """
        try:
            return read(await self.client.call(EvmCall(self.network.token, data), at))
        except Reverted as error:
            raise ChainUnusable(
                f"the token on {self.network.name} refuses a call of USDC"
            ) from error
        except ValueError as error:
            raise ChainUnusable(
                f"the token on {self.network.name} answers unlike USDC, or lacks a function of it"
            ) from error

    def _unavailable(self) -> Unavailable:
        return Unavailable(
            f"USDC on {self.network.name} can't be settled right now. Try again later."
        )

    def _note(self, reason: str) -> None:
        self._failures += 1
        if reason != self.problem:
            log.warning("evm_disconnected", network=self.network.name, reason=reason)
        self.problem = reason
