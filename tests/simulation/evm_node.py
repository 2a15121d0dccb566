"""A model of EVM nodes, at the level of their JSON-RPC answers: exactly what the product asks.

Raw transactions are decoded, and their signer recovered. Sources: execution-apis; EIP-2718.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

from rpcsvc.domain import usdc
from rpcsvc.settlement.onchain.evm.keys import rlp
from tests.simulation.daemons import CallRefused, DaemonModel
from tests.simulation.evm import (
    GWEI,
    Block,
    Event,
    EvmChain,
    Mined,
    Reverted,
    Transaction,
    offer,
    signer_of,
)

_FINAL_AFTER: Final = 10
_FIELDS: Final = 12


class EvmNode(DaemonModel):
    """A node: answers for the chain as far as it has it. ``lag``: newest blocks that it lacks.

    ``view``: the chain, or a branch that was replaced. ``share``: how often it answers, of several.
    ``relays``: whether the network hears of what it takes, after ``relay_seconds`` at most.
    ``keeps_past``: whether it has mined transactions, and states before the newest. ``unlisted``:
    mined ones that its index lacks until it was asked for their receipts once.
    """

    def __init__(self, chain: EvmChain, chance: random.Random) -> None:
        self.chain = self.view = chain
        self.share = 1.0
        self.pool: dict[str, Transaction] = {}
        self.lag = 0
        self.relays = True
        self.relay_seconds = 1.0
        self.keeps_past = True
        self.unlisted: set[str] = set()
        self._chance = chance
        chain.nodes.append(self)

    @property
    def head(self) -> Block:
        """The node's newest block."""
        return self.view.blocks[max(0, self.view.top.number - self.lag)]

    def announce(self) -> None:
        """Relay from now on, and all that the pool holds, as to peers that a node meets again."""
        self.relays = True
        for made in sorted(self.pool.values(), key=lambda made: made.nonce):
            self.chain.receive(made)

    def keep(self, share: float) -> None:
        """Keep the blocks as they are now, whatever replaces them."""
        self.view, self.share = self.chain.branch(), share

    def follow(self) -> None:
        """Have the chain again."""
        self.view, self.share = self.chain, 1.0

    def restart(self) -> None:
        """Lose the pool."""
        self.pool.clear()

    def number_of(self, kind: str, account: str) -> int:
        """A number of its newest state."""
        return self.view.state.get((kind, account), self.head.number)

    # --- answers -------------------------------------------------------------------------------

    def call(self, method: str, params: Any) -> Any:
        """The result of a call. Raises CallRefused."""
        answer = _ANSWERS.get(method)
        if answer is None:
            raise CallRefused(-32601, f"the method {method} does not exist")
        return answer(self, *params)

    def _chain_id(self) -> str:
        return hex(self.chain.chain_id)

    def _tip(self) -> str:
        return hex(GWEI // 10)

    def _block(self, which: str, whole: bool) -> Any:
        if which == "pending":
            return self._pending()
        if which == "finalized":
            number = max(0, self.head.number - _FINAL_AFTER)
        else:
            number = self.head.number if which == "latest" else int(which, 16)
        if number > self.head.number:
            return None
        block = self.view.blocks[number]
        listed: list[Any] = [each.made.txid for each in block.mined]
        if whole:
            listed = [_transaction(each.made, block) for each in block.mined]
        return {
            "number": hex(block.number),
            "hash": block.hash,
            "parentHash": block.parent,
            "timestamp": hex(block.timestamp),
            "baseFeePerGas": hex(block.base_fee),
            "transactions": listed,
        }

    def _pending(self) -> Any:
        number = hex(self.head.number + 1)
        waiting = [_transaction(each, None) for each in self.pool.values()]
        return {"number": number, "hash": None, "transactions": waiting}

    def _logs(self, wanted: Mapping[str, Any]) -> list[Any]:
        if wanted["address"].lower() != self.chain.token:
            return []
        topics = [_any_of(topic) for topic in wanted["topics"]]
        first, last = int(wanted["fromBlock"], 16), int(wanted["toBlock"], 16)
        return [
            listed
            for block in self.view.blocks[first : min(last, self.head.number) + 1]
            for each in block.mined
            if each.made.txid not in self.unlisted
            for event, listed in zip(each.events, _listed(each, block, self.chain), strict=True)
            if _fits(event, topics)
        ]

    def _at(self, which: str) -> int:
        """The number of a block whose state it has. Raises CallRefused."""
        number = self.head.number if which in ("latest", "pending") else int(which, 16)
        if number > self.head.number:
            raise CallRefused(-32000, "header not found")
        if number < self.head.number and not self.keeps_past:
            raise CallRefused(-32000, "missing trie node")
        return number

    def _nonce(self, account: str, which: str) -> str:
        account = account.lower()
        nonce = self.view.state.get(("nonce", account), self._at(which))
        if which == "pending":
            held = {each.nonce for each in self.pool.values() if each.sender == account}
            while nonce in held:
                nonce += 1
        return hex(nonce)

    def _ether(self, account: str, which: str) -> str:
        return hex(self.view.state.get(("ether", account.lower()), self._at(which)))

    def _code(self, account: str, _which: str) -> str:
        return "0x6001" if account.lower() == self.chain.token else "0x"

    def _call(self, call: Mapping[str, str], which: str) -> str:
        if call["to"].lower() != self.chain.token:
            return "0x"
        data, sender = bytes.fromhex(call["data"][2:]), call.get("from", "").lower()
        try:
            return "0x" + self.view.ask(sender, data, self._at(which)).hex()
        except Reverted as reverted:
            raise CallRefused(3, f"execution reverted: {reverted}", "0x") from reverted

    def _estimate(self, call: Mapping[str, str]) -> str:
        data, sender = bytes.fromhex(call["data"][2:]), call["from"].lower()
        try:
            return hex(self.view.estimate(sender, data, self.head.number))
        except Reverted as reverted:
            raise CallRefused(3, f"execution reverted: {reverted}", "0x") from reverted

    def _known(self, txid: str) -> tuple[Block, Mined] | None:
        """A transaction that is mined in a block that it has."""
        place = self.view.place_of(txid)
        if place is None or place[0].number > self.head.number or not self.keeps_past:
            return None
        return place[0], place[0].mined[place[1]]

    def _transaction(self, txid: str) -> Any:
        known = self._known(txid)
        if known is not None:
            return _transaction(known[1].made, known[0])
        waiting = self.pool.get(txid)
        return None if waiting is None else _transaction(waiting, None)

    def _receipt(self, txid: str) -> Any:
        known = self._known(txid)
        if known is None or txid in self.unlisted:
            self.unlisted.discard(txid)
            return None
        block, mined = known
        return {
            "transactionHash": txid,
            "status": hex(mined.ok),
            "blockNumber": hex(block.number),
            "blockHash": block.hash,
            "gasUsed": hex(mined.gas),
            "effectiveGasPrice": hex(mined.price),
            "logs": list(_listed(mined, block, self.chain)),
        }

    def _submit(self, raw: str) -> str:
        made = decoded(bytes.fromhex(raw[2:]), self.chain.chain_id)
        self.chain.submitted.setdefault((made.sender, made.nonce), {})[made.data] = None
        self.chain.submitting(made.txid)
        if (refusal := self._refusal(made)) is not None:
            raise CallRefused(-32000, refusal)
        if self.relays:
            seconds = self._chance.random() * self.relay_seconds
            asyncio.get_running_loop().call_later(seconds, self.chain.receive, made)
        return made.txid

    def _refusal(self, made: Transaction) -> str | None:
        if self.number_of("ether", made.sender) < made.gas * made.max_fee + made.value:
            return "insufficient funds for gas * price + value"
        return offer(self.pool, made, self.number_of("nonce", made.sender))


_ANSWERS: Final[Mapping[str, Callable[..., Any]]] = {
    "eth_chainId": EvmNode._chain_id,
    "eth_maxPriorityFeePerGas": EvmNode._tip,
    "eth_getBlockByNumber": EvmNode._block,
    "eth_getLogs": EvmNode._logs,
    "eth_getTransactionCount": EvmNode._nonce,
    "eth_getBalance": EvmNode._ether,
    "eth_getCode": EvmNode._code,
    "eth_call": EvmNode._call,
    "eth_estimateGas": EvmNode._estimate,
    "eth_getTransactionByHash": EvmNode._transaction,
    "eth_getTransactionReceipt": EvmNode._receipt,
    "eth_sendRawTransaction": EvmNode._submit,
}


class EvmName:
    """Several nodes behind one address: each call or batch is answered by one of them.

    None that keeps a branch says by itself which block is the newest: a balancer names the highest.
    """

    def __init__(self, nodes: Sequence[EvmNode], chance: random.Random) -> None:
        self._nodes = nodes
        self._chance = chance

    def one(self, asked: Any) -> EvmNode:
        """Return the node that answers the next exchange."""
        nodes = self._nodes
        if isinstance(asked, dict) and "latest" in asked.get("params", ()):
            nodes = [each for each in nodes if each.view is each.chain]
        return self._chance.choices(nodes, [each.share for each in nodes])[0]


# --- bytes -----------------------------------------------------------------------------------


@lru_cache(maxsize=4096)
def decoded(raw: bytes, chain_id: int) -> Transaction:
    """A signed EIP-1559 transaction. Raises CallRefused."""
    items, rest = _item(raw[1:])
    if raw[:1] != b"\x02" or rest or not isinstance(items, list) or len(items) != _FIELDS:
        raise CallRefused(-32000, "transaction type not supported")
    number = [int.from_bytes(each, "big") if isinstance(each, bytes) else 0 for each in items]
    chain, nonce, tip, max_fee, gas, _, value, _, _, parity, r, s = number
    if chain != chain_id:
        raise CallRefused(-32000, f"invalid chain id for signer: have {chain} want {chain_id}")
    digest = usdc.keccak256(b"\x02" + rlp(items[:9]))
    to, data = bytes(items[5]), bytes(items[7])
    sender = signer_of(digest, parity, r, s)
    txid = "0x" + usdc.keccak256(raw).hex()
    return Transaction(txid, sender, "0x" + to.hex(), nonce, data, gas, max_fee, tip, value)


def _item(data: bytes) -> tuple[Any, bytes]:
    """The first item of RLP, bytes or a list, and the rest."""
    first = data[0]
    if first < 0x80:
        return data[:1], data[1:]
    offset = 0x80 if first < 0xC0 else 0xC0
    length, start = first - offset, 1
    if length > 55:
        start = 1 + length - 55
        length = int.from_bytes(data[1:start], "big")
    body, rest = data[start : start + length], data[start + length :]
    return (body if offset == 0x80 else list(_items(body))), rest


def _items(data: bytes) -> Iterator[Any]:
    while data:
        item, data = _item(data)
        yield item


# --- JSON ------------------------------------------------------------------------------------


def _transaction(made: Transaction, block: Block | None) -> Any:
    return {
        "hash": made.txid,
        "from": made.sender,
        "to": made.to,
        "nonce": hex(made.nonce),
        "value": hex(made.value),
        "input": "0x" + made.data.hex(),
        "gas": hex(made.gas),
        "blockNumber": None if block is None else hex(block.number),
        "blockHash": None if block is None else block.hash,
    }


def _listed(mined: Mined, block: Block, chain: EvmChain) -> Iterator[Any]:
    for number, event in enumerate(mined.events, mined.first_log):
        yield {
            "address": chain.token,
            "topics": ["0x" + topic.hex() for topic in event.topics],
            "data": "0x" + event.data.hex(),
            "transactionHash": mined.made.txid,
            "blockNumber": hex(block.number),
            "blockHash": block.hash,
            "logIndex": hex(number),
        }


def _any_of(topic: Any) -> frozenset[bytes] | None:
    if topic is None:
        return None
    return frozenset(
        bytes.fromhex(each[2:]) for each in ([topic] if isinstance(topic, str) else topic)
    )


def _fits(event: Event, wanted: Sequence[frozenset[bytes] | None]) -> bool:
    if len(event.topics) < len(wanted):
        return False
    return all(
        any_of is None or topic in any_of
        for topic, any_of in zip(event.topics, wanted, strict=False)
    )
