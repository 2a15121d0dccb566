"""A model of a Monero chain and of monerod, at the level of its JSON answers.

An output is known by its key image. What people send spends an image that is theirs by name
(``MoneroChain.pay``): spending it once more is a double spend. Miners take what was broadcast.
Source: the daemon RPC documentation at getmonero.org, and the facts of tests/regtest.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import json
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, NamedTuple

from tests.simulation.daemons import CallRefused

SPENDABLE_AGE: Final = 10
PER_BYTE: Final = 20_000
_BANK: Final = "bank "
_LONGEST_STEM_SECONDS: Final = 30
_ABOVE_TOP, _NO_METHOD = -2, -32601
_SCALAR_DIGITS: Final = 62


class Paid(NamedTuple):
    """An output of a transaction: to whom, and piconero."""

    address: str
    amount: int


@dataclass(frozen=True, slots=True)
class XmrTransaction:
    """A transaction; ``images`` are the key images that it spends."""

    txid: str
    raw: str
    images: tuple[str, ...]
    outputs: tuple[Paid, ...]
    fee: int

    @property
    def key(self) -> str:
        """The transaction's secret key, which its maker knows."""
        return digest("key", self.txid)[:_SCALAR_DIGITS] + "00"

    @property
    def weight(self) -> int:
        """The transaction's size in bytes, for the fee."""
        return weight_of(len(self.images), len(self.outputs))

    def image_of(self, place: int) -> str:
        """The key image of one of its outputs."""
        return digest("image", self.txid, place)


@dataclass(frozen=True, slots=True)
class Output:
    """A mined output."""

    made: XmrTransaction
    place: int
    height: int
    global_index: int

    @property
    def paid(self) -> Paid:
        """Whom it pays how much."""
        return self.made.outputs[self.place]


@dataclass(frozen=True, slots=True)
class XmrBlock:
    """A block. ``first_index``: the global index of its first output."""

    height: int
    hash: str
    previous: str
    timestamp: int
    mined: tuple[XmrTransaction, ...]
    first_index: int


@dataclass(slots=True)
class Waiting:
    """A transaction in the pool. ``broadcast``: the miners have it. ``failed``: abandoned."""

    made: XmrTransaction
    relayed: bool = False
    broadcast: bool = False
    failed: int = 0
    double_spend_seen: bool = False


def digest(*parts: object) -> str:
    """64 hex digits that follow from the parts."""
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def weight_of(inputs: int, outputs: int) -> int:
    """The bytes of a transaction."""
    return 800 + 700 * inputs + 60 * outputs


def build(images: Sequence[str], outputs: Sequence[Paid], fee: int, salt: int) -> XmrTransaction:
    """A signed transaction."""
    body = {"images": list(images), "outputs": outputs, "fee": fee, "salt": salt}
    return decoded(json.dumps(body).encode().hex())


@lru_cache(maxsize=8192)
def decoded(raw: str) -> XmrTransaction:
    """The transaction of its bytes. Raises ValueError."""
    body = json.loads(bytes.fromhex(raw))
    if not isinstance(body, dict):
        raise ValueError("no transaction")  # noqa: TRY004 - as for other bytes
    outputs = tuple(Paid(*each) for each in body["outputs"])
    return XmrTransaction(digest(raw), raw, tuple(body["images"]), outputs, body["fee"])


class MoneroChain:
    """The chain as the network has it, and the pool that monerod shares with the miners."""

    def __init__(self, now: Callable[[], int], chance: random.Random) -> None:
        self.blocks = [XmrBlock(0, digest("genesis"), digest("nothing"), now(), (), 0)]
        self.pool: dict[str, Waiting] = {}
        self.outputs: dict[str, Output] = {}
        self.spent: dict[str, str] = {}
        self.heights: dict[str, int] = {}
        # Called with the id of each transaction that is submitted to the node.
        self.submitting: Callable[[str], None] = lambda _txid: None
        # Unix seconds of the last reorganisation.
        self.replaced_at = 0
        # Called before blocks are replaced.
        self.replacing: Callable[[], None] = lambda: None
        # Replaced branches whose miners go on: they are as high as this chain.
        self.branches: list[MoneroChain] = []
        # The share of waiting transactions that a block leaves out.
        self.left_out = 0.0
        # The share of a wallet's transactions that no pool gets back from replaced blocks.
        self.forgotten = 0.0
        # Transactions of people that have to go: their money was spent elsewhere.
        self.doomed: dict[str, None] = {}
        self.now = now
        self._chance = chance

    @property
    def top(self) -> XmrBlock:
        """The newest block."""
        return self.blocks[-1]

    def transaction(self, txid: str) -> XmrTransaction | None:
        """A transaction in a block, or waiting."""
        if (waiting := self.pool.get(txid)) is not None:
            return waiting.made
        height = self.heights.get(txid)
        if height is None:
            return None
        return next(made for made in self.blocks[height].mined if made.txid == txid)

    def mine(self, count: int = 1) -> None:
        """Add blocks. What waits and is not valid just now is never tried again."""
        for _ in range(count):
            top, height = self.top, len(self.blocks)
            mined, spent = [], set[str]()
            for waiting in self.pool.values():
                if not waiting.broadcast or waiting.failed or self._is_left_out():
                    continue
                if self.problem(waiting.made, height) is not None:
                    waiting.failed = height
                elif spent.isdisjoint(waiting.made.images):
                    spent.update(waiting.made.images)
                    mined.append(waiting.made)
            timestamp, salt = max(self.now(), top.timestamp + 1), self._chance.getrandbits(64)
            hash_ = digest(top.hash, timestamp, salt)
            first = top.first_index + sum(len(made.outputs) for made in top.mined)
            self._add(XmrBlock(height, hash_, top.hash, timestamp, tuple(mined), first))
            for each in self.branches:
                each.mine(len(self.blocks) - len(each.blocks))

    def branch(self) -> MoneroChain:
        """The blocks as they are now, whatever replaces them, and no pool."""
        kept = copy.copy(self)
        kept.blocks, kept.heights = [*self.blocks], {**self.heights}
        kept.outputs, kept.spent = {**self.outputs}, {**self.spent}
        kept.pool, kept.branches = {}, []
        kept.replacing = lambda: None
        return kept

    def _is_left_out(self) -> bool:
        return self.left_out > 0 and self._chance.random() < self.left_out

    def _is_forgotten(self, made: XmrTransaction) -> bool:
        return not _is_of_people(made) and self._chance.random() < self.forgotten

    def _add(self, block: XmrBlock) -> None:
        self.blocks.append(block)
        index = block.first_index
        for made in block.mined:
            self.heights[made.txid] = block.height
            for image in made.images:
                self.spent[image] = made.txid
            for place in range(len(made.outputs)):
                self.outputs[made.image_of(place)] = Output(made, place, block.height, index)
                index += 1
            self.pool.pop(made.txid, None)
        for txid, waiting in list(self.pool.items()):
            if any(image in self.spent for image in waiting.made.images):
                del self.pool[txid]

    def pop(self, depth: int) -> None:
        """Take the newest blocks off the chain. What was in them waits again, unless doomed."""
        self.replacing()
        self.replaced_at = self.now()
        for _ in range(min(depth, len(self.blocks) - 1)):
            block = self.blocks.pop()
            for made in block.mined:
                del self.heights[made.txid]
                for image in made.images:
                    del self.spent[image]
                for place in range(len(made.outputs)):
                    del self.outputs[made.image_of(place)]
                if not self._is_forgotten(made):
                    self.pool.setdefault(made.txid, Waiting(made, relayed=True, broadcast=True))
        for txid in self.doomed:
            self.pool.pop(txid, None)

    def depth_of(self, images: set[str], most: int) -> int | None:
        """How deep the first that spends one of the images is, in the ``most`` newest blocks."""
        for depth, block in enumerate(reversed(self.blocks[-most:]), start=1):
            if any(not images.isdisjoint(made.images) for made in block.mined):
                return depth
        return None

    def problem(self, made: XmrTransaction, height: int) -> str | None:
        """Why it can't be in a block of this height: the flag of the answer; None: it can."""
        if any(image in self.spent for image in made.images):
            return "double_spend"
        if _is_of_people(made):
            return None
        inputs = [self.outputs.get(image) for image in made.images]
        if any(each is None or each.height + SPENDABLE_AGE > height for each in inputs):
            return "invalid_input"
        held = sum(each.paid.amount for each in inputs if each is not None)
        due = sum(paid.amount for paid in made.outputs) + made.fee
        return None if held == due else "overspend"

    def pay(self, outputs: Sequence[Paid], image: str | None = None) -> XmrTransaction:
        """Have somebody pay, and the network hear of it. ``image``: what is spent, once more."""
        salt = self._chance.getrandbits(64)
        made = build([image or _BANK + digest("bank", salt)], outputs, 10**7, salt)
        self.pool[made.txid] = Waiting(made, relayed=True, broadcast=True)
        return made


def _is_of_people(made: XmrTransaction) -> bool:
    return made.images[0].startswith(_BANK)


class MonerodModel:
    """The node that the service asks. ``relays``: whether it sends on what it takes.

    ``is_syncing``: it has not caught up with its peers since it was started. ``view``: the chain,
    or a branch that was replaced. ``share``: how often it answers, of several.
    """

    def __init__(self, chain: MoneroChain, nettype: str, chance: random.Random) -> None:
        self.chain = self.view = chain
        self.share = 1.0
        self.relays = True
        self.stem_seconds = float(_LONGEST_STEM_SECONDS)
        self.is_away = False
        self.is_syncing = False
        self._nettype = nettype
        self._chance = chance
        self._lives = 0

    def restart(self) -> None:
        """Forget what it was about to relay; the pool is on its disk."""
        self._lives += 1

    def keep(self, share: float, grows: float = 0.5) -> None:
        """Keep the blocks as they are now, whatever replaces them.

        ``grows``: how likely miners go on with the branch, too.
        """
        self.view, self.share = self.chain.branch(), share
        if self._chance.random() < grows:
            self.chain.branches.append(self.view)

    def fall_behind(self, blocks: int) -> None:
        """Lack the newest blocks, and get no more."""
        self.keep(0.0, grows=0.0)
        self.view.pop(blocks)
        self.view.pool.clear()

    def follow(self) -> None:
        """Have the chain again."""
        chain = self.chain
        chain.branches = [each for each in chain.branches if each is not self.view]
        self.view, self.share = chain, 1.0

    @property
    def pool(self) -> Mapping[str, Waiting]:
        """The transactions that wait: on a branch also those that are mined in the chain alone."""
        chain, view = self.chain, self.view
        if view is chain:
            return chain.pool
        fork = min(len(chain.blocks), len(view.blocks))
        while chain.blocks[fork - 1].hash != view.blocks[fork - 1].hash:
            fork -= 1
        elsewhere = (made for block in chain.blocks[fork:] for made in block.mined)
        waiting = [*chain.pool.values(), *(Waiting(made, True, True) for made in elsewhere)]
        return {
            each.made.txid: each
            for each in waiting
            if each.made.txid not in view.heights and view.spent.keys().isdisjoint(each.made.images)
        }

    def transaction(self, txid: str) -> XmrTransaction | None:
        """A transaction in a block that it has, or waiting."""
        if (waiting := self.pool.get(txid)) is not None:
            return waiting.made
        return self.view.transaction(txid)

    def submit(self, raw: str) -> dict[str, Any]:
        """The answer to a raw transaction."""
        try:
            made = decoded(raw)
        except (ValueError, KeyError, TypeError):
            return {"status": "Failed", "reason": "the bytes are no transaction"}
        chain, view, pool = self.chain, self.view, self.pool
        chain.submitting(made.txid)
        known = pool.get(made.txid)
        if made.txid in view.heights or (known is not None and known.broadcast):
            return {"status": "OK", "reason": "", "not_relayed": True}
        if known is not None:
            return {"status": "Failed", "reason": "double spend", "double_spend": True}
        rivals = [
            waiting
            for waiting in pool.values()
            if not set(waiting.made.images).isdisjoint(made.images)
        ]
        for rival in rivals:
            rival.double_spend_seen = True
        flag = view.problem(made, len(view.blocks)) or ("double_spend" if rivals else None)
        if flag is not None:
            return {"status": "Failed", "reason": flag, flag: True}
        if view is not chain and chain.problem(made, len(chain.blocks)) is not None:
            return {"status": "OK", "reason": ""}  # no other node takes it
        chain.pool[made.txid] = Waiting(made)
        if self.relays:
            life, seconds = self._lives, self._chance.random() * self.stem_seconds
            asyncio.get_running_loop().call_later(seconds, self._relay_later, made.txid, life)
        return {"status": "OK", "reason": ""}

    def _relay_later(self, txid: str, life: int) -> None:
        waiting = self.chain.pool.get(txid)
        if waiting is not None and life == self._lives:
            waiting.relayed = waiting.broadcast = True

    # --- answers -------------------------------------------------------------------------------

    def call(self, method: str, params: Any) -> Any:
        """The result of a JSON-RPC call. Raises CallRefused."""
        answer = _METHODS.get(method)
        if answer is None:
            raise CallRefused(_NO_METHOD, "Method not found")
        return answer(self, params or {})

    def call_path(self, path: str, body: dict[str, Any]) -> Any:
        """The answer of a plain JSON path."""
        return _PATHS[path](self, body)

    def _info(self, _params: Any) -> Any:
        chain = self.view
        return {
            "status": "OK",
            "height": len(chain.blocks),
            "top_block_hash": chain.top.hash,
            "nettype": self._nettype,
            "synchronized": not self.is_syncing,
            "busy_syncing": self.is_syncing,
            "offline": False,
            "target_height": 0,
            "tx_pool_size": len(self.pool),
            "version": "0.18.3.4",
            "block_weight_limit": 600_000,
        }

    def _header(self, params: Mapping[str, int]) -> Any:
        return {"status": "OK", "block_header": _header(self._block_at(params["height"]))}

    def _headers(self, params: Mapping[str, int]) -> Any:
        first, last = params["start_height"], params["end_height"]
        self._block_at(last)
        blocks = self.view.blocks[first : last + 1]
        return {"status": "OK", "headers": [_header(block) for block in blocks]}

    def _block(self, params: Mapping[str, int]) -> Any:
        block = self._block_at(params["height"])
        mined = [made.txid for made in block.mined]
        return {
            "status": "OK",
            "block_header": _header(block),
            "miner_tx_hash": digest("miner", block.hash),
        } | ({"tx_hashes": mined} if mined else {})

    def _block_at(self, height: int) -> XmrBlock:
        if height >= len(self.view.blocks):
            raise CallRefused(_ABOVE_TOP, f"Requested block height: {height} greater than top")
        return self.view.blocks[height]

    def _fees(self, _params: Any) -> Any:
        fees = [PER_BYTE * factor for factor in (1, 4, 20, 160)]
        return {"status": "OK", "fee": fees[0], "fees": fees, "quantization_mask": 10_000}

    def _relay(self, params: Mapping[str, Sequence[str]]) -> Any:
        for txid in params["txids"]:
            waiting = self.chain.pool.get(txid)
            if waiting is None:
                raise CallRefused(-5, f"transaction not found in pool: {txid}")
            waiting.relayed = waiting.broadcast = True
        return {"status": "OK"}

    def _flush(self, params: Mapping[str, Sequence[str]]) -> Any:
        for txid in params.get("txids") or list(self.chain.pool):
            self.chain.pool.pop(txid, None)
        return {"status": "OK"}

    def _transactions(self, body: Mapping[str, Any]) -> Any:
        found = [each for txid in body["txs_hashes"] if (each := self._listed(txid)) is not None]
        return {"status": "OK"} | ({"txs": found} if found else {})

    def _listed(self, txid: str) -> Any:
        made, waiting = self.transaction(txid), self.pool.get(txid)
        if made is None:
            return None
        inside = {
            "vin": [{"key": {"k_image": image}} for image in made.images],
            "rct_signatures": {"txnFee": made.fee},
        }
        return {
            "tx_hash": txid,
            "in_pool": waiting is not None,
            "double_spend_seen": waiting is not None and waiting.double_spend_seen,
            "as_hex": made.raw,
            "as_json": json.dumps(inside),
        } | ({} if waiting is not None else {"block_height": self.view.heights[txid]})

    def _images(self, body: Mapping[str, Sequence[str]]) -> Any:
        return {"status": "OK", "spent_status": [self.state_of(e) for e in body["key_images"]]}

    def state_of(self, image: str) -> int:
        """0: unspent, 1: spent in the chain, 2: in the pool."""
        if image in self.view.spent:
            return 1
        return 2 if any(image in e.made.images for e in self.pool.values()) else 0

    def _pool(self, _body: Any) -> Any:
        found = [
            {
                "id_hash": txid,
                "fee": waiting.made.fee,
                "weight": waiting.made.weight,
                "relayed": waiting.relayed,
                "double_spend_seen": waiting.double_spend_seen,
                "last_failed_height": waiting.failed,
            }
            for txid, waiting in self.pool.items()
        ]
        return {"status": "OK"} | ({"transactions": found} if found else {})

    def _pool_stats(self, _body: Any) -> Any:
        weight = sum(waiting.made.weight for waiting in self.pool.values())
        return {"status": "OK", "pool_stats": {"bytes_total": weight}}

    def _submitted(self, body: Mapping[str, str]) -> Any:
        return self.submit(body["tx_as_hex"])


def _header(block: XmrBlock) -> Any:
    return {
        "height": block.height,
        "hash": block.hash,
        "prev_hash": block.previous,
        "timestamp": block.timestamp,
    }


_METHODS: Final[Mapping[str, Callable[[MonerodModel, Any], Any]]] = {
    "get_info": MonerodModel._info,
    "get_block_header_by_height": MonerodModel._header,
    "get_block_headers_range": MonerodModel._headers,
    "get_block": MonerodModel._block,
    "get_fee_estimate": MonerodModel._fees,
    "relay_tx": MonerodModel._relay,
    "flush_txpool": MonerodModel._flush,
}
_PATHS: Final[Mapping[str, Callable[[MonerodModel, Any], Any]]] = {
    "/get_transactions": MonerodModel._transactions,
    "/is_key_image_spent": MonerodModel._images,
    "/get_transaction_pool": MonerodModel._pool,
    "/get_transaction_pool_stats": MonerodModel._pool_stats,
    "/send_raw_transaction": MonerodModel._submitted,
}


class MonerodName:
    """Several nodes behind one address: each call is answered by one of them.

    None that keeps a branch says by itself which block is the newest: a balancer names the highest.
    ``is_on_chain``: none that keeps a branch says anything. ``alone``: the only one that answers,
    because the others are gone.
    """

    def __init__(
        self, nodes: Sequence[MonerodModel], chance: random.Random, *, is_on_chain: bool = False
    ) -> None:
        self._nodes = nodes
        self._chance = chance
        self._is_on_chain = is_on_chain
        self.alone: MonerodModel | None = None

    def one(self, asked: Any) -> MonerodModel:
        """Return the node that answers the next exchange."""
        if self.alone is not None:
            return self.alone
        nodes = self._nodes
        if self._is_on_chain or asked.get("method") == "get_info":
            nodes = [each for each in nodes if each.view is each.chain]
        return self._chance.choices(nodes, [each.share for each in nodes])[0]
