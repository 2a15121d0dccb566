"""What monerod is asked, and what it answers, in types.

Written for and tested with Monero 0.18. Amounts are piconero (10^-12 XMR), heights count from 0,
hashes, keys and transactions are lower-case hex. Every method raises RpcFailure (daemon_rpc.py).
Source: the daemon RPC documentation at getmonero.org.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Any, Final, Self

from rpcsvc.settlement.onchain.daemon_rpc import (
    DaemonRpc,
    Endpoint,
    Fields,
    JsonObject,
    NodeError,
    Pause,
    parse_json,
)

_RPC_PATH: Final = "/json_rpc"
_HASHES_PER_CALL: Final = 100
_SLOW_SECONDS: Final = 600.0
_HEIGHT_BEYOND_TOP: Final = -2
_INTERNAL_ERROR: Final = -5


@dataclass(frozen=True, slots=True)
class NodeInfo:
    """State of a monerod. ``height`` is the number of blocks: the top block's height plus one.

    ``nettype``: mainnet, stagenet, testnet, or fakechain (regtest).
    """

    height: int
    top_hash: str
    nettype: str
    synchronized: bool
    busy_syncing: bool
    offline: bool
    target_height: int
    pool_size: int
    version: str


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """A block of the main chain, or of another branch when ``orphan``. ``timestamp``: seconds."""

    height: int
    hash: str
    previous: str
    timestamp: int
    orphan: bool
    transactions: int


@dataclass(frozen=True, slots=True)
class NodeTransaction:
    """A transaction that monerod knows. ``height`` is None while it is in the pool."""

    txid: str
    height: int | None
    double_spend_seen: bool

    @property
    def in_pool(self) -> bool:
        """Whether it waits in the pool."""
        return self.height is None


@dataclass(frozen=True, slots=True)
class NodeBytes:
    """A transaction that monerod knows, whole. ``raw`` is hex, and empty where it is pruned.

    ``height`` is None while it is in the pool.
    """

    txid: str
    raw: str
    key_images: tuple[str, ...]
    height: int | None


class Spent(IntEnum):
    """Where a key image was seen. Both SPENT states say nothing about which transaction did it."""

    UNSPENT = 0
    IN_CHAIN = 1
    IN_POOL = 2


class Submission(StrEnum):
    """What monerod said to a raw transaction. None of them proves what the network will do.

    ACCEPTED: new, in its pool, relayed. KNOWN: it has it already, in the pool or mined, or took it
    without relaying. BUSY: not looked at, the node is syncing. DOUBLE_SPEND: an input is spent by
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
class SubmissionResult:
    """monerod's answer to a raw transaction: its meaning, and its flags and words for the log."""

    submission: Submission
    flags: tuple[str, ...]
    reason: str


@dataclass(frozen=True, slots=True)
class PoolTransaction:
    """A transaction in the pool. ``received_at``: seconds; ``fee``: piconero; ``weight``: bytes.

    ``relayed``: the node has sent it to its peers. One that was killed before it could never does
    so by itself. ``given_up``: it was not valid at a moment, and the node will not try again to
    mine it. A restricted node doesn't tell.
    """

    txid: str
    fee: int
    weight: int
    relayed: bool
    do_not_relay: bool
    double_spend_seen: bool
    received_at: int
    given_up: bool


@dataclass(frozen=True, slots=True)
class FeeEstimate:
    """Fees in piconero per byte, for priorities 1 to 4; fees are rounded up to ``quantum``."""

    per_byte: tuple[int, ...]
    quantum: int


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


class MonerodClient:
    """Asks one monerod. Use as ``async with``. Everything raises RpcFailure.

    A node that is syncing answers many questions with the error of code BUSY_CODE.
    """

    BUSY_CODE: Final = -9

    def __init__(self, endpoint: Endpoint, *, pause: Pause = asyncio.sleep) -> None:
        self.rpc = DaemonRpc(endpoint, rpc_path=_RPC_PATH, pause=pause)

    async def __aenter__(self) -> Self:
        self.rpc.open()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.rpc.close()

    # --- reading -------------------------------------------------------------------------------

    async def info(self) -> NodeInfo:
        """The node's state, the network it is on included."""
        answer = await self._read("get_info")
        return NodeInfo(
            height=answer.whole("height"),
            top_hash=answer.text("top_block_hash"),
            nettype=answer.text("nettype"),
            synchronized=answer.flag("synchronized"),
            busy_syncing=answer.flag("busy_syncing", default=False),
            offline=answer.flag("offline"),
            target_height=answer.whole("target_height"),
            pool_size=answer.whole("tx_pool_size"),
            version=answer.text("version"),
        )

    async def header_at(self, height: int) -> BlockHeader | None:
        """The main chain's block at ``height``; None above the top."""
        try:
            answer = await self._read("get_block_header_by_height", {"height": height})
        except NodeError as error:
            if error.code == _HEIGHT_BEYOND_TOP:
                return None
            raise
        return _header(answer.inner("block_header"))

    async def transactions(self, txids: Sequence[str]) -> dict[str, NodeTransaction]:
        """Those of ``txids`` that are in the pool or the main chain, by transaction id."""
        found: dict[str, NodeTransaction] = {}
        for some in _batches(txids):
            answer = await self._read_path(
                "/get_transactions", {"txs_hashes": some, "decode_as_json": False, "prune": True}
            )
            for item in answer.each("txs"):
                found[item.text("tx_hash")] = _node_transaction(item)
        return found

    async def transaction_bytes(self, txid: str) -> NodeBytes | None:
        """A transaction of the pool or the main chain with its bytes; None when unknown."""
        body = {"txs_hashes": [txid], "decode_as_json": True, "prune": False}
        items = (await self._read_path("/get_transactions", body)).each("txs")
        return _node_bytes(items[0]) if items else None

    async def bodies(self, txids: Sequence[str]) -> dict[str, NodeBytes]:
        """Those of ``txids`` that are in the pool or the main chain, pruned, by transaction id."""
        found: dict[str, NodeBytes] = {}
        for some in _batches(txids):
            body = {"txs_hashes": some, "decode_as_json": True, "prune": True}
            answer = await self._read_path("/get_transactions", body)
            found |= {made.txid: made for made in map(_node_bytes, answer.each("txs"))}
        return found

    async def key_images(self, images: Sequence[str]) -> dict[str, Spent]:
        """Whether each key image is spent, by key image."""
        states: dict[str, Spent] = {}
        for some in _batches(images):
            answer = await self._read_path("/is_key_image_spent", {"key_images": some})
            codes = answer.items("spent_status")
            if len(codes) != len(some) or not set(codes) <= set(Spent):
                raise answer.bad("has no known state for each key image")
            states.update(zip(some, map(Spent, codes), strict=True))
        return states

    async def pool(self) -> list[PoolTransaction]:
        """The transactions that wait in the node's pool."""
        answer = await self._read_path("/get_transaction_pool", {})
        return [_pool_transaction(item) for item in answer.each("transactions")]

    async def fees(self) -> FeeEstimate:
        """The fees of the moment."""
        answer = await self._read("get_fee_estimate")
        per_byte = answer.items("fees") or [answer.whole("fee")]
        if not all(type(fee) is int and fee >= 0 for fee in per_byte):
            raise answer.bad("has fees that are not whole numbers")
        return FeeEstimate(tuple(per_byte), answer.whole("quantization_mask", 1))

    # --- acting --------------------------------------------------------------------------------

    async def submit(self, raw: str) -> SubmissionResult:
        """Hand a signed transaction to the network. The same bytes may be handed over again."""
        answer = Fields(
            self.rpc.endpoint.name,
            "/send_raw_transaction",
            await self.rpc.act_path("/send_raw_transaction", {"tx_as_hex": raw}),
        )
        status = answer.text("status")
        flags = tuple(flag for flag in _SUBMISSION_FLAGS if answer.flag(flag, default=False))
        reason = answer.text("reason", "") or status
        return SubmissionResult(_submission(status, flags), flags, reason)

    async def relay(self, txids: Sequence[str]) -> None:
        """Send transactions of the pool to the peers, once more if they were. Not restricted."""
        self._checked("relay_tx", await self.rpc.act("relay_tx", {"txids": list(txids)}))

    async def flush_pool(self, txids: Sequence[str] = ()) -> None:
        """Forget these transactions of the pool, or all of them. Needs an unrestricted node."""
        params = {"txids": list(txids)} if txids else {}
        self._checked("flush_txpool", await self.rpc.act("flush_txpool", params))

    # --- making a chain do as told: regtest only -----------------------------------------------

    async def generate_blocks(self, count: int, address: str) -> tuple[str, ...]:
        """Mine blocks that pay ``address``; their hashes. Regtest only; not repeated."""
        params = {"amount_of_blocks": count, "wallet_address": address, "starting_nonce": 0}
        answer = self._checked(
            "generateblocks", await self.rpc.act("generateblocks", params, seconds=_SLOW_SECONDS)
        )
        return answer.texts("blocks")

    async def pop_blocks(self, count: int) -> int:
        """Take the newest blocks off the chain; the height after. Needs an unrestricted node."""
        answer = await self.rpc.act_path("/pop_blocks", {"nblocks": count})
        return self._checked("/pop_blocks", answer).whole("height")

    # --- plumbing ------------------------------------------------------------------------------

    async def _read(self, method: str, params: JsonObject | None = None) -> Fields:
        return self._checked(method, await self.rpc.read(method, params))

    async def _read_path(self, path: str, body: JsonObject) -> Fields:
        return self._checked(path, await self.rpc.read_path(path, body))

    def _checked(self, method: str, value: Any) -> Fields:
        """monerod reports some failures in a field ``status`` of a good answer."""
        answer = Fields(self.rpc.endpoint.name, method, value)
        status = answer.text("status")
        if status == "OK":
            return answer
        code = self.BUSY_CODE if status == "BUSY" else _INTERNAL_ERROR
        raise NodeError(answer.node, method, code, status)


def _submission(status: str, flags: tuple[str, ...]) -> Submission:
    if status == "OK":
        return Submission.KNOWN if "not_relayed" in flags else Submission.ACCEPTED
    if status == "BUSY":
        return Submission.BUSY
    # A transaction may earn several flags; that of the input already spent says the most.
    if "double_spend" in flags:
        return Submission.DOUBLE_SPEND
    if any(flag in _INVALID_FLAGS for flag in flags):
        return Submission.INVALID
    return Submission.FEE_TOO_LOW if "fee_too_low" in flags else Submission.REFUSED


def _header(item: Fields) -> BlockHeader:
    return BlockHeader(
        height=item.whole("height"),
        hash=item.text("hash"),
        previous=item.text("prev_hash"),
        timestamp=item.whole("timestamp"),
        orphan=item.flag("orphan_status"),
        transactions=item.whole("num_txes"),
    )


def _node_transaction(item: Fields) -> NodeTransaction:
    return NodeTransaction(
        txid=item.text("tx_hash"),
        height=None if item.flag("in_pool") else item.whole("block_height"),
        double_spend_seen=item.flag("double_spend_seen"),
    )


def _node_bytes(item: Fields) -> NodeBytes:
    try:
        decoded = parse_json(item.text("as_json").encode())
    except ValueError as error:
        raise item.bad("has a transaction that is not JSON") from error
    inputs = Fields(item.node, item.method, decoded).each("vin")
    images = tuple(each.inner("key").text("k_image") for each in inputs)
    height = None if item.flag("in_pool") else item.whole("block_height")
    return NodeBytes(item.text("tx_hash"), item.text("as_hex"), images, height)


def _pool_transaction(item: Fields) -> PoolTransaction:
    return PoolTransaction(
        txid=item.text("id_hash"),
        fee=item.whole("fee"),
        weight=item.whole("weight"),
        relayed=item.flag("relayed"),
        do_not_relay=item.flag("do_not_relay"),
        double_spend_seen=item.flag("double_spend_seen"),
        received_at=item.whole("receive_time"),
        given_up=item.whole("last_failed_height", 0) > 0,
    )


def _batches(items: Sequence[str]) -> Iterable[list[str]]:
    """In parts as large as a restricted node takes."""
    for at in range(0, len(items), _HASHES_PER_CALL):
        yield list(items[at : at + _HASHES_PER_CALL])
