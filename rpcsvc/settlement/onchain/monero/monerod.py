"""The client of monerod, and strict models of its answers. Written for and tested with Monero 0.18.

Amounts are piconero (10^-12 XMR), heights count from 0, hashes, keys and transactions are
lower-case hex. Every method raises RpcFailure (daemon_rpc.py). Source: the daemon RPC documentation
at getmonero.org.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Annotated, Any, Final, Self, TypeVar

from pydantic import AliasPath, Field, PlainValidator, TypeAdapter, ValidationError

from rpcsvc.settlement.onchain.daemon_rpc import (
    FLAG,
    TEXT,
    BadAnswer,
    DaemonEndpoint,
    DaemonRpc,
    Flag,
    HasTime,
    JsonObject,
    Model,
    NodeError,
    Pause,
    Text,
    Whole,
    always,
    named,
    parse_json,
    read_answer,
    read_field,
)

_RPC_PATH: Final = "/json_rpc"
_HASHES_PER_CALL: Final = 100
# The most that a restricted node lists.
HEADERS_PER_CALL: Final = 1000
_HEIGHT_BEYOND_TOP: Final = -2
_INTERNAL_ERROR: Final = -5


T = TypeVar("T")
_INVALID_FLAGS: Final = (
    "invalid_input",
    "invalid_output",
    "low_mixin",
    "overspend",
    "too_big",
    "too_few_outputs",
    "tx_extra_too_big",
    "nonzero_unlock_time",
)
_SUBMISSION_FLAGS: Final = (
    "double_spend",
    "fee_too_low",
    "not_relayed",
    "sanity_check_failed",
    *_INVALID_FLAGS,
)


def _is_above_0(value: Any) -> bool:
    if type(value) is not int or value < 0:
        raise ValueError("it is no whole number")
    return value > 0


def _key_images(value: Any) -> tuple[str, ...]:
    """The key images of the inputs of a transaction that is JSON within the answer."""
    if not isinstance(value, str):
        raise ValueError("it is no string")  # noqa: TRY004 - pydantic wants a ValueError
    try:
        return tuple(
            each.image for each in _INPUTS_BODY.validate_python(parse_json(value.encode())).vin
        )
    except ValidationError:
        raise ValueError("an input is without key image") from None


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """State of a monerod. ``height`` is the number of blocks: the top block's height plus one.

    ``block_weight_limit``: bytes; a block of more than half of it costs its miner a penalty.

    ``nettype``: mainnet, stagenet, testnet, or fakechain (regtest).
    """

    height: Whole
    top_hash: Annotated[Text, named("top_block_hash")]
    nettype: Text
    synchronized: Flag
    busy_syncing: Annotated[Flag, Field(default=False)]
    offline: Flag
    target_height: Whole
    pool_size: Annotated[Whole, named("tx_pool_size")]
    version: Text
    block_weight_limit: Whole


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """The header of a block. ``timestamp``: seconds."""

    height: Whole
    hash: Text
    previous: Annotated[Text, named("prev_hash")]
    timestamp: Whole


@dataclass(frozen=True, slots=True)
class NodeBlock:
    """A block of the main chain. ``txids``: of its transactions, without the miner's own."""

    header: Annotated[BlockHeader, named("block_header")]
    miner_txid: Annotated[Text, named("miner_tx_hash")]
    txids: Annotated[tuple[Text, ...], Field(validation_alias="tx_hashes", default=())]


@dataclass(frozen=True, slots=True)
class NodeTransaction:
    """A transaction that monerod knows. ``height`` is None while it is in the pool."""

    txid: Annotated[Text, named("tx_hash")]
    height: int | None
    double_spend_seen: Flag

    @property
    def in_pool(self) -> bool:
        """Whether it waits in the pool."""
        return self.height is None


@dataclass(frozen=True, slots=True)
class NodeBytes:
    """A transaction that monerod knows, whole. ``raw`` is hex, and empty where it is pruned.

    ``height`` is None while it is in the pool.
    """

    txid: Annotated[Text, named("tx_hash")]
    raw: Annotated[Text, named("as_hex")]
    key_images: Annotated[tuple[str, ...], PlainValidator(_key_images), named("as_json")]
    height: int | None


class Spent(IntEnum):
    """The place where a key image was seen. The SPENT states don't say by which transaction."""

    UNSPENT = 0
    IN_CHAIN = 1
    IN_POOL = 2


class MoneroSubmission(StrEnum):
    """monerod's answer to a raw transaction. None of them proves what the network will do.

    ACCEPTED: new, in its pool, relayed. KNOWN: it has it already, in the pool or mined, or took it
    without relaying. BUSY: not checked, the node is syncing. DOUBLE_SPEND: an input is spent by
    another transaction, in pool or chain, which a reorganisation may undo; or by this very one,
    while Dandelion++ still hides it. FEE_TOO_LOW: below the
    relay fee of the moment. INVALID: inputs, outputs, ring or size break a rule, which may be so
    only until blocks that were reorganised away are replaced. REFUSED: none of these; also what
    comes for bytes that are no transaction.
    """

    ACCEPTED = "accepted"
    KNOWN = "known"
    BUSY = "busy"
    DOUBLE_SPEND = "double_spend"
    FEE_TOO_LOW = "fee_too_low"
    INVALID = "invalid"
    REFUSED = "refused"


@dataclass(frozen=True, slots=True)
class MoneroSubmissionResult:
    """monerod's answer to a raw transaction: its meaning, and its flags and words for the log."""

    submission: MoneroSubmission
    flags: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class PoolTransaction:
    """A transaction in the pool. ``fee``: piconero; ``weight``: bytes.

    ``relayed``: the node has sent it to its peers. One that was killed before it could never does
    so by itself. ``abandoned``: it was not valid at a moment, and the node will not try again to
    mine it. A restricted node does not report it.
    """

    txid: Annotated[Text, named("id_hash")]
    fee: Whole
    weight: Whole
    relayed: Flag
    double_spend_seen: Flag
    abandoned: Annotated[
        bool,
        PlainValidator(_is_above_0),
        named("last_failed_height"),
        Field(default=False),
    ]


@dataclass(frozen=True, slots=True)
class FeeEstimate:
    """The fees in piconero per byte, for priorities 1 to 4; fees are rounded up to ``quantum``."""

    per_byte: tuple[int, ...]
    quantum: int


@dataclass(frozen=True, slots=True)
class _Input:
    image: Annotated[str, Field(strict=True, validation_alias=AliasPath("key", "k_image"))]


@dataclass(frozen=True, slots=True)
class _InputsBody:
    vin: tuple[_Input, ...] = ()


_INPUTS_BODY: Final = TypeAdapter(_InputsBody)


@dataclass(frozen=True, slots=True)
class _Place:
    in_pool: Flag
    block_height: Whole | None = None

    def __post_init__(self) -> None:
        if not self.in_pool and self.block_height is None:
            raise ValueError("a mined transaction has no height")

    @property
    def height(self) -> int | None:
        """The height of its block; None in the pool, whatever the node says under block_height."""
        return None if self.in_pool else self.block_height


@dataclass(frozen=True, slots=True)
class _PoolStats:
    bytes_total: Whole


@dataclass(frozen=True, slots=True)
class _Fees:
    fees: tuple[Whole, ...] = ()
    fee: Whole | None = None
    quantization_mask: Whole = 1


class MonerodClient:
    """Asks one monerod. Use as ``async with``. Everything raises RpcFailure.

    A node that is syncing answers many questions with the error of code BUSY_CODE.
    """

    BUSY_CODE: Final = -9

    def __init__(
        self,
        endpoint: DaemonEndpoint,
        *,
        pause: Pause = asyncio.sleep,
        has_time: HasTime = always,
    ) -> None:
        self.rpc = DaemonRpc(endpoint, rpc_path=_RPC_PATH, pause=pause, has_time=has_time)

    async def __aenter__(self) -> Self:
        self.rpc.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.rpc.close()

    # --- reading -------------------------------------------------------------------------------

    async def info(self) -> NodeInfo:
        """The node's state, the network it is on included."""
        return self._model(NodeInfo, "get_info", await self._read("get_info"))

    async def header_at(self, height: int) -> BlockHeader | None:
        """The main chain's block at ``height``; None above the top."""
        method = "get_block_header_by_height"
        answer = await self._up_to_top(method, {"height": height})
        return None if answer is None else self._field(BlockHeader, method, answer, "block_header")

    async def headers(self, first: int, last: int) -> list[BlockHeader]:
        """The main chain's blocks from ``first`` to ``last``, HEADERS_PER_CALL at most; none where
        the last is above the top.
        """
        method = "get_block_headers_range"
        answer = await self._up_to_top(method, {"start_height": first, "end_height": last})
        return [] if answer is None else self._field(list[BlockHeader], method, answer, "headers")

    async def block_at(self, height: int) -> NodeBlock | None:
        """The main chain's block at ``height`` with what is in it; None above the top."""
        method = "get_block"
        answer = await self._up_to_top(method, {"height": height})
        return None if answer is None else self._model(NodeBlock, method, answer)

    async def _up_to_top(self, method: str, params: JsonObject) -> JsonObject | None:
        """The answer about blocks by height; None where one is above the top."""
        try:
            return await self._read(method, params)
        except NodeError as error:
            if error.code == _HEIGHT_BEYOND_TOP:
                return None
            raise

    async def transactions(self, txids: Sequence[str]) -> dict[str, NodeTransaction]:
        """The transactions of ``txids`` in the pool or the main chain, by transaction id.

        A transaction that is just being mined is missing: MoneroConnection.find_transactions tells
        that apart from one that the node does not have.
        """
        found: dict[str, NodeTransaction] = {}
        for some in _batches(txids):
            body = {"txs_hashes": some, "decode_as_json": False, "prune": True}
            found |= {item.txid: item for item in await self._transactions(NodeTransaction, body)}
        return found

    async def transaction_bytes(self, txid: str) -> NodeBytes | None:
        """A transaction of the pool or the main chain with its bytes; None when unknown."""
        body = {"txs_hashes": [txid], "decode_as_json": True, "prune": False}
        items = await self._transactions(NodeBytes, body)
        return items[0] if items else None

    async def bodies(self, txids: Sequence[str]) -> dict[str, NodeBytes]:
        """The pruned transactions of ``txids`` in the pool or the main chain, by transaction id."""
        found: dict[str, NodeBytes] = {}
        for some in _batches(txids):
            body = {"txs_hashes": some, "decode_as_json": True, "prune": True}
            found |= {made.txid: made for made in await self._transactions(NodeBytes, body)}
        return found

    async def _transactions(self, model: type[T], body: JsonObject) -> list[T]:
        path = "/get_transactions"
        items = (await self._read_path(path, body)).get("txs", [])
        places = self._model(list[_Place], path, items)
        return [
            self._model(model, path, item | {"height": place.height})
            for item, place in zip(items, places, strict=True)
        ]

    async def key_images(self, images: Sequence[str]) -> dict[str, Spent]:
        """Whether each key image is spent, by key image."""
        states: dict[str, Spent] = {}
        for some in _batches(images):
            path = "/is_key_image_spent"
            answer = await self._read_path(path, {"key_images": some})
            codes = self._model(list[Spent], path, answer.get("spent_status", []))
            if len(codes) != len(some):
                raise self._bad(path, "has not one state for each key image")
            states.update(zip(some, codes, strict=True))
        return states

    async def pool(self) -> list[PoolTransaction]:
        """The transactions that wait in the node's pool."""
        path = "/get_transaction_pool"
        answer = await self._read_path(path, {})
        return self._model(list[PoolTransaction], path, answer.get("transactions", []))

    async def pool_weight(self) -> int:
        """The bytes of all transactions that wait in the node's pool."""
        path = "/get_transaction_pool_stats"
        answer = await self._read_path(path, {})
        return self._field(_PoolStats, path, answer, "pool_stats").bytes_total

    async def fees(self) -> FeeEstimate:
        """The fees of the moment."""
        method = "get_fee_estimate"
        found = self._model(_Fees, method, await self._read(method))
        per_byte = found.fees or ((found.fee,) if found.fee is not None else ())
        if not per_byte:
            raise self._bad(method, "has no fee")
        return FeeEstimate(per_byte, found.quantization_mask)

    # --- acting --------------------------------------------------------------------------------

    async def submit(self, raw: str) -> MoneroSubmissionResult:
        """Publish a signed transaction. Repeating it is safe."""
        path = "/send_raw_transaction"
        answer = await self.rpc.act_path(path, {"tx_as_hex": raw}, publishes=True)
        status = self._field(TEXT, path, answer, "status")
        flags = tuple(
            flag
            for flag in _SUBMISSION_FLAGS
            if flag in answer and self._field(FLAG, path, answer, flag)
        )
        reason = self._field(TEXT, path, {"reason": ""} | answer, "reason") or status
        return MoneroSubmissionResult(_submission(status, flags), flags, reason)

    async def relay(self, txids: Sequence[str]) -> None:
        """Send transactions of the pool to the peers, once more if they were. Not restricted."""
        params = {"txids": list(txids)}
        self._checked("relay_tx", await self.rpc.act("relay_tx", params, publishes=True))

    async def flush_pool(self, txids: Sequence[str] = ()) -> None:
        """Forget these transactions of the pool, or all of them. Needs an unrestricted node."""
        params = {"txids": list(txids)} if txids else {}
        self._checked("flush_txpool", await self.rpc.act("flush_txpool", params))

    # --- plumbing ------------------------------------------------------------------------------

    async def _read(self, method: str, params: JsonObject | None = None) -> JsonObject:
        return self._checked(method, await self.rpc.read(method, params))

    async def _read_path(self, path: str, body: JsonObject) -> JsonObject:
        return self._checked(path, await self.rpc.read_path(path, body))

    def _checked(self, method: str, value: Any) -> JsonObject:
        """monerod reports some failures in a field ``status`` of a good answer."""
        status = self._field(TEXT, method, value, "status")
        if status != "OK":
            code = self.BUSY_CODE if status == "BUSY" else _INTERNAL_ERROR
            raise NodeError(self.rpc.endpoint.name, method, code, status)
        answer: JsonObject = value
        return answer

    def _model(self, model: Model[T], method: str, value: Any) -> T:
        return read_answer(model, self.rpc.endpoint.name, method, value)

    def _field(self, model: Model[T], method: str, answer: Any, key: str) -> T:
        return read_field(model, self.rpc.endpoint.name, method, answer, key)

    def _bad(self, method: str, problem: str) -> BadAnswer:
        return BadAnswer(self.rpc.endpoint.name, method, f"the answer {problem}")


def _submission(status: str, flags: tuple[str, ...]) -> MoneroSubmission:
    if status == "OK":
        return MoneroSubmission.KNOWN if "not_relayed" in flags else MoneroSubmission.ACCEPTED
    if status == "BUSY":
        return MoneroSubmission.BUSY
    # A transaction may earn several flags; that of the input already spent says the most.
    if "double_spend" in flags:
        return MoneroSubmission.DOUBLE_SPEND
    if any(flag in _INVALID_FLAGS for flag in flags):
        return MoneroSubmission.INVALID
    return MoneroSubmission.FEE_TOO_LOW if "fee_too_low" in flags else MoneroSubmission.REFUSED


def _batches(items: Sequence[str]) -> Iterable[list[str]]:
    """Yield parts as large as a restricted node takes."""
    for at in range(0, len(items), _HASHES_PER_CALL):
        yield list(items[at : at + _HASHES_PER_CALL])
